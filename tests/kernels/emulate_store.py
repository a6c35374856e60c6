# SPDX-License-Identifier: Apache-2.0
"""The CUDA store and de-quantise kernels on a CPU: the very source, compiled against emulator.h."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from emulate import EmulatedFault, compiler

from oscar_kv.kernels.cuda.compiler import source
from oscar_kv.kernels.cuda.dequantise import THREADS, DequantiseParams, DequantiseSpec
from oscar_kv.kernels.cuda.store_launch import KERNELS
from oscar_kv.kernels.cuda.store_spec import STORE_HEADERS, StoreParams, StoreSpec

HERE = Path(__file__).parent
MAIN = """
#include "emulator_store.h"
#include "%s"
static const Params* given;
%s
extern "C" const char* emulate(int kernel, int gx, int gy, int threads, const Params* p, int shared) {
  static void (*const all[])() = {%s};
  given = p;
  return emulator::launch(all[kernel], gx, gy, threads, shared, false);
}
"""


@cache
def build(file: str, header: str, kernels: tuple[str, ...]) -> ctypes.CDLL:
    """The library of one specialisation, built once a process."""
    command = [compiler() or "g++", "-std=c++17", "-O0", "-w", "-fpermissive", "-fno-gnu-unique", "-shared", "-fPIC"]
    # What faults on a GPU faults here too.
    command += ["-fsanitize=alignment,bounds,integer-divide-by-zero", "-fsanitize-undefined-trap-on-error"]
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        for name in dict.fromkeys((file, *STORE_HEADERS)):
            (at / name).write_text(source(name))
        for name in ("emulator.h", "emulator_store.h"):
            (at / name).write_text((HERE / name).read_text())
        for name in ("ptx.cuh", "store_ptx.cuh"):
            (at / name).write_text('#include "emulator_store.h"\n')
        (at / "config.cuh").write_text(header)
        runs = "\n".join(f"static void run_{name}() {{ {name}(*given); }}" for name in kernels)
        (at / "main.cpp").write_text(MAIN % (file, runs, ", ".join(f"run_{name}" for name in kernels)))
        done = subprocess.run(
            [*command, "main.cpp", "-o", "emulated.so"], cwd=folder, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[:4000]
        library = ctypes.CDLL(str(at / "emulated.so"))
        library.emulate.restype = ctypes.c_char_p
        return library


@dataclass
class EmulatedStore:
    """Same interface as StoreKernels, on CPU tensors."""

    spec: StoreSpec

    def launch(self, name: str, grid: tuple[int, int], threads: int, shared: int, params: StoreParams) -> None:
        library = build("store.cu", self.spec.header, KERNELS)
        fault = library.emulate(KERNELS.index(name), *grid, threads, ctypes.byref(params), shared)
        if fault:
            raise EmulatedFault(f"{name}: {fault.decode()}")


@dataclass
class EmulatedDequantise:
    """Same interface as dequantise.DeviceKernel, on CPU tensors."""

    spec: DequantiseSpec

    def launch(self, grid: tuple[int, int], params: DequantiseParams) -> None:
        library = build("dequantise.cu", self.spec.header, ("dequantise",))
        fault = library.emulate(0, *grid, THREADS, ctypes.byref(params), self.spec.shared_bytes)
        if fault:
            raise EmulatedFault(f"dequantise: {fault.decode()}")
