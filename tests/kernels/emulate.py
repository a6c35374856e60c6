# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on a CPU: the very source, compiled by the host's C++ compiler against emulator.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from oscar_kv.kernels.cuda.compiler import source
from oscar_kv.kernels.cuda.launch import FINISH_THREADS
from oscar_kv.kernels.cuda.spec import DecodeSpec, Params

MAIN = """
#include "emulator.h"
#include "decode.cu"
#include "finish.cu"
static const Params* given;
static void run_decode() { decode(*given); }
static void run_finish_one() { finish_one(*given); }
static void run_finish_many() { finish_many(*given); }
extern "C" void emulate(int kernel, int gx, int gy, int threads, const Params* p) {
  static void (*const all[])() = {run_decode, run_finish_one, run_finish_many};
  given = p;
  emulator::launch(all[kernel], gx, gy, threads);
}
"""
NAMES = ("decode", "finish_one", "finish_many")


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def build(header: str) -> ctypes.CDLL:
    """The library of one specialisation, built once a process."""
    command = [compiler() or "g++", "-std=c++17", "-O1", "-w", "-fpermissive", "-fno-gnu-unique", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        for name in ("common.cuh", "fragments.cuh", "decode.cu", "finish.cu"):
            (at / name).write_text(source(name))
        (at / "emulator.h").write_text((Path(__file__).parent / "emulator.h").read_text())
        (at / "ptx.cuh").write_text('#include "emulator.h"\n')
        (at / "config.cuh").write_text(header)
        (at / "main.cpp").write_text(MAIN)
        command += ["main.cpp", "-o", "emulated.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[:4000]
        return ctypes.CDLL(str(at / "emulated.so"))


@dataclass
class EmulatedKernels:
    """Same interface as DeviceKernels, on CPU tensors."""

    spec: DecodeSpec
    blocks: int
    multiprocessors: int = 4

    def launch(self, name: str, grid: tuple[int, int], params: Params) -> None:
        threads = 32 * self.spec.warps if name == "decode" else FINISH_THREADS
        build(self.spec.header).emulate(NAMES.index(name), grid[0], grid[1], threads, ctypes.byref(params))
