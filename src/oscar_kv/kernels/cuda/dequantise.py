# SPDX-License-Identifier: Apache-2.0
"""Packed pages to raw rows with a CUDA C++ kernel."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import OscarError
from ...layout import PAGE, PageLayout
from .arguments import check_pages
from .compiler import compile_cached
from .launch import _check, _driver, submit

DEQUANTISE_HEADERS = ("fragments.cuh", "ptx.cuh")
THREADS = 256  # as in dequantise.cu
_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_POINTERS = (("pages", "const u8*"), ("blocks", "const int*"), ("k", "u8*"), ("v", "u8*"))
_STRIDES = ("k_batch", "k_token", "k_head", "v_batch", "v_token", "v_head")
_INTS = ("n", "kv_heads", "aligned")


class DequantiseParams(ctypes.Structure):
    """The kernel's one argument, by value; the C++ struct is written from the same lists."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name, _ in _POINTERS]
        + [(name, ctypes.c_int64) for name in _STRIDES]
        + [(name, ctypes.c_int32) for name in _INTS]
    )


@dataclass(frozen=True)
class DequantiseSpec:
    """One specialisation. OscarError for what cannot be served."""

    layout: PageLayout
    dtype: torch.dtype
    capability: tuple[int, int]

    def __post_init__(self) -> None:
        if self.capability < (8, 0):
            raise OscarError(f"the CUDA kernels need compute capability 8.0, this device has {self.capability}")
        if self.dtype not in _KINDS:
            raise OscarError(f"de-quantised rows are float16, bfloat16 or float32, not {self.dtype}")

    @property
    def shared_bytes(self) -> int:
        return max(self.layout.k_bytes, self.layout.v_bytes) + 8 * PAGE

    @cached_property
    def header(self) -> str:
        """config.cuh."""
        layout = self.layout
        defines = {
            "PAGE": PAGE, "K_DIM": layout.k_dim, "V_DIM": layout.v_dim, "K_BITS": layout.k_bits,
            "V_BITS": layout.v_bits, "PAGE_BYTES": layout.page_bytes, "V_OFFSET": layout.v_offset,
            "METADATA_OFFSET": layout.metadata_offset, "OUT_KIND": _KINDS[self.dtype], "BULK": 0, "CHAINED": 0,
        }  # fmt: skip
        fields = [f"{kind} {name};" for name, kind in _POINTERS]
        fields += [f"long long {name};" for name in _STRIDES] + [f"int {name};" for name in _INTS]
        lines = ["#pragma once", *(f"#define {k} {v}" for k, v in defines.items()), '#include "fragments.cuh"']
        return "\n".join([*lines, "struct Params { " + " ".join(fields) + " };"]) + "\n"


class Kernel(Protocol):
    """The loaded kernel: on a device, or emulated by the tests."""

    spec: DequantiseSpec

    def launch(self, grid: tuple[int, int], params: DequantiseParams) -> None: ...


class DeviceKernel:
    """The kernel of one specialisation, loaded on one device."""

    def __init__(self, spec: DequantiseSpec, device: int) -> None:
        self.spec, self.device = spec, device
        d = _driver()
        code = compile_cached("dequantise.cu", spec.header, spec.capability, DEQUANTISE_HEADERS)
        self._module = _check(d.cuModuleLoadData(code))
        self._function: Any = _check(d.cuModuleGetFunction(self._module, b"dequantise"))

    def launch(self, grid: tuple[int, int], params: DequantiseParams) -> None:
        """Launch on the current stream."""
        submit(self._function, self.device, grid, THREADS, self.spec.shared_bytes, params)


@cache
def load_dequantise(spec: DequantiseSpec, device: int) -> DeviceKernel:
    """Compile (or find) and load; once a process, specialisation and device."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes the primary context current
        return DeviceKernel(spec, device)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise OscarError(f"dequantise: {message}")


def _check_arguments(pages: Tensor, blocks: Tensor, layout: PageLayout, k: Tensor, v: Tensor) -> None:
    check_pages(_require, pages, layout)
    _require(pages.is_contiguous(), "pages must be contiguous")
    _require(
        blocks.ndim == 2 and blocks.dtype == torch.int32 and blocks.is_contiguous(),
        f"blocks must be contiguous int32 [batch, n], got {blocks.dtype} {tuple(blocks.shape)}",
    )
    for name, x, d in (("k", k, layout.k_dim), ("v", v, layout.v_dim)):
        shape = (blocks.shape[0], PAGE * blocks.shape[1], pages.shape[1], d)
        _require(tuple(x.shape) == shape, f"{name} must be {list(shape)}, got {list(x.shape)}")
        _require(x.stride(3) == 1, f"{name}'s last dimension must be contiguous, its stride is {x.stride(3)}")
    _require(k.dtype == v.dtype, f"k is {k.dtype}, v is {v.dtype}: both must have one dtype")
    _require(all(x.device == pages.device for x in (blocks, k, v)), "every tensor must be on one device")


def run(kernel: Kernel, pages: Tensor, blocks: Tensor, k: Tensor, v: Tensor) -> None:
    """One call with the kernel already chosen. Only shapes decide anything here, so a CUDA graph can capture it."""
    if blocks.numel() == 0:
        return
    aligned = all(
        x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:3]) for x in (k, v)
    )
    params = DequantiseParams(
        pages.data_ptr(), blocks.data_ptr(), k.data_ptr(), v.data_ptr(), *k.stride()[:3], *v.stride()[:3],
        blocks.shape[1], pages.shape[1], aligned,
    )  # fmt: skip
    kernel.launch((blocks.numel(), 2 * pages.shape[1]), params)


class CudaDequantise:
    """The CUDA C++ implementation of ``base.DequantiseKernel``."""

    def __call__(self, pages: Tensor, blocks: Tensor, layout: PageLayout, k: Tensor, v: Tensor) -> None:
        _check_arguments(pages, blocks, layout, k, v)
        _require(k.is_cuda, f"the CUDA kernels need tensors on a CUDA device, k is on {k.device}")
        with torch.cuda.device(k.device):
            spec = DequantiseSpec(layout, k.dtype, torch.cuda.get_device_capability(k.device))
            run(load_dequantise(spec, k.device.index), pages, blocks, k, v)
