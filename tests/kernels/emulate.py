# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on a CPU: the very source, compiled by the host's C++ compiler against emulator.h."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from oscar_kv.kernels.cuda.compiler import HEADERS, source
from oscar_kv.kernels.cuda.launch import THREADS
from oscar_kv.kernels.cuda.spec import DecodeSpec, Params

MAIN = """
#include "emulator.h"
#include "common.cuh"
#include "prepare.cu"
#include "decode.cu"
namespace finishing {
#include "finish.cu"
}
static const Params* given;
static void run_prepare_one() { prepare_one(*given); }
static void run_prepare_many() { prepare_many(*given); }
static void run_decode() { decode(*given); }
static void run_finish_one() { finishing::finish_one(*given); }
static void run_finish_some() { finishing::finish_some(*given); }
static void run_finish_many() { finishing::finish_many(*given); }
extern "C" const char* emulate(int kernel, int gx, int gy, int threads, const Params* p, int shared, bool late) {
  static void (*const all[])() = {run_prepare_one, run_prepare_many, run_decode, run_finish_one, run_finish_some,
                                run_finish_many};
  given = p;
  return emulator::launch(all[kernel], gx, gy, threads, shared, late);
}
"""
NAMES = ("prepare_one", "prepare_many", "decode", "finish_one", "finish_some", "finish_many")


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def build(header: str) -> ctypes.CDLL:
    """The library of one specialisation, built once a process."""
    command = [compiler() or "g++", "-std=c++17", "-O1", "-w", "-fpermissive", "-fno-gnu-unique", "-shared", "-fPIC"]
    # What faults on a GPU faults here too.
    command += ["-fsanitize=alignment,bounds,integer-divide-by-zero", "-fsanitize-undefined-trap-on-error"]
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        for name in (*HEADERS, "prepare.cu", "decode.cu", "finish.cu"):
            (at / name).write_text(source(name))
        (at / "emulator.h").write_text((Path(__file__).parent / "emulator.h").read_text())
        (at / "ptx.cuh").write_text('#include "emulator.h"\n')
        (at / "config.cuh").write_text(header)
        (at / "main.cpp").write_text(MAIN)
        command += ["main.cpp", "-o", "emulated.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[:4000]
        library = ctypes.CDLL(str(at / "emulated.so"))
        library.emulate.restype = ctypes.c_char_p
        return library


class EmulatedFault(AssertionError):
    """A kernel did what a GPU would end it for, or for ever wait for."""


@dataclass
class EmulatedKernels:
    """Same interface as DeviceKernels, on CPU tensors. late: asynchronous copies land when waited for, not at once."""

    spec: DecodeSpec
    blocks: int
    multiprocessors: int = 4
    late: bool = True

    def launch(self, name: str, grid: tuple[int, int], params: Params) -> None:
        threads = THREADS.get(name, 32 * self.spec.warps)
        shared = self.spec.shared_bytes if name == "decode" else 0
        given = (NAMES.index(name), *grid, threads, ctypes.byref(params), shared, self.late)
        fault = build(self.spec.header).emulate(*given)
        if fault:
            raise EmulatedFault(f"{name}: {fault.decode()}")


@contextmanager
def guarded_workspace(before: bool = False) -> Iterator[None]:
    """What torch.empty returns meanwhile is guarded, and starts as NaN."""
    plain = torch.empty

    def empty(*size: object, **options: object) -> torch.Tensor:
        x = plain(*size, **options)
        return guarded(x.fill_(torch.nan if x.is_floating_point() else -(1 << 30)), before)  # type: ignore[call-overload]

    torch.empty = empty  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = plain


def guarded(x: torch.Tensor, before: bool = False) -> torch.Tensor:
    """A copy that ends where nothing is mapped (or begins there): a kernel that leaves it faults.

    Aligned as PyTorch would, to 16 bytes (rounded to the item where the size is no multiple).
    """
    size, page = x.numel() * x.element_size(), mmap.PAGESIZE
    room = -(-max(size, 1) // page) * page
    area = mmap.mmap(-1, room + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    for at in (base, base + page + room):
        if libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = page if before or not size else page + room - size
    if not size:
        return torch.empty_like(x)  # no kernel may read of it
    out = torch.frombuffer(area, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape)
    return out.copy_(x)
