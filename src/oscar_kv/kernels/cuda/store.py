# SPDX-License-Identifier: Apache-2.0
"""Writing new tokens with the CUDA C++ kernels: checks, and the launches of a call."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...errors import OscarError
from ...layout import PAGE, PageLayout
from ..base import StoreTables, Windows
from .arguments import check_int32, check_pages, check_requests, check_tables, check_windows
from .store_launch import load_store
from .store_spec import StoreParams, StoreSpec
from .store_tables import PreparedTables, prepared

_ROW_THREADS = 256  # as in store.cu


class Kernels(Protocol):
    """Loaded kernels: on a device (store_launch.py), or emulated by the tests."""

    spec: StoreSpec

    def launch(self, name: str, grid: tuple[int, int], threads: int, shared: int, params: StoreParams) -> None: ...


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise OscarError(f"store: {message}")


def _check_arguments(
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    block_table: Tensor,
    start: Tensor,
    count: Tensor,
    w: Windows,
    t: StoreTables,
    layout: PageLayout,
) -> None:
    """Shapes, dtypes, devices. Values on the device (lengths, block numbers) are not read: that would synchronise."""
    kv, batch = check_pages(_require, pages, layout), k.shape[0] if k.ndim else 0
    for name, x, d in (("k", k, layout.k_dim), ("v", v, layout.v_dim)):
        _require(
            x.ndim == 4 and x.shape[:2] == (batch, kv) and x.shape[3] == d,
            f"{name} must be [batch, {kv}, n, {d}], got {tuple(x.shape)}",
        )
        _require(x.stride(3) == 1, f"{name}'s last dimension must be contiguous, its stride is {x.stride(3)}")
    _require(k.shape[2] == v.shape[2], f"k has {k.shape[2]} rows a request, v has {v.shape[2]}")
    _require(v.dtype == k.dtype, f"v is {v.dtype}, k is {k.dtype}: rows and windows must have one dtype")
    check_requests(_require, batch, block_table, {"start": start, "count": count})
    check_windows(_require, w, kv, layout, k.dtype)
    windows = [w.sink_k, w.sink_v, w.ring_k, w.ring_v]
    for x in windows if w.slots is None else ():
        _require(x.shape[0] >= batch, f"windows have {x.shape[0]} slots for {batch} requests")
    _require(
        w.ring_k.shape[2] >= PAGE,
        f"the ring has {w.ring_k.shape[2]} rows: a page is written from its last {PAGE}, so it must have as many",
    )
    tables = check_tables(_require, t, kv, layout)
    _require((t.upper is None) == (t.diagonal is None), "upper and diagonal come together or not at all")
    integers = [block_table, start, count, *([] if w.slots is None else [w.slots])]
    check_int32(_require, integers)
    whole = [pages, *integers, *windows]
    for x in (v, *whole, *tables):
        _require(x.device == k.device, "every tensor must be on k's device")
    for x in whole:
        _require(x.is_contiguous(), "every tensor but k and v must be contiguous")


def _aligned(x: Tensor) -> Tensor:
    """x where its rows can be read 16 bytes at a time, else a copy."""
    ready = x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:3])
    return x if ready else x.clone(memory_format=torch.contiguous_format)


def run(
    kernels: Kernels,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    block_table: Tensor,
    start: Tensor,
    count: Tensor,
    windows: Windows,
    tables: PreparedTables,
) -> None:
    """One call with kernels already chosen. Only shapes decide anything here, so a CUDA graph can capture it."""
    spec = kernels.spec
    (batch, kv, n, _), rows = k.shape, windows.ring_k.shape[2]
    if batch == 0 or n == 0:
        return
    k, v = _aligned(k), _aligned(v)
    request_pages = -(-n // PAGE)
    # New rows overwrite ring rows that a page is made of only if there are many of them; else one launch does.
    one_launch = n <= rows - PAGE + 1
    units = batch * request_pages
    row_blocks = min(64, -(-min(n, rows) * max(spec.layout.k_dim, spec.layout.v_dim) // 8 // _ROW_THREADS))

    def at(x: Tensor | None) -> int | None:
        return None if x is None else x.data_ptr()

    params = StoreParams(
        at(k), at(v), at(pages), at(block_table), at(start), at(count), at(windows.slots), at(windows.sink_k),
        at(windows.sink_v), at(windows.ring_k), at(windows.ring_v), at(tables.k.factor), at(tables.v.factor),
        at(tables.k.rotation), at(tables.v.rotation), at(tables.k.centre), at(tables.v.centre), at(tables.k.shift),
        at(tables.v.shift), at(tables.k.unscale), at(tables.v.unscale), at(tables.k.least_norm),
        at(tables.v.least_norm), at(tables.upper_factor), at(tables.upper), at(tables.upper_unscale),
        at(tables.metric), *k.stride()[:3], *v.stride()[:3], batch, kv, n, block_table.shape[1],
        windows.sink_k.shape[2], rows, request_pages, 1, units, row_blocks,
    )  # fmt: skip
    if one_launch:
        shared = max(spec.group_bytes(True), spec.group_bytes(False))
        kernels.launch("store_step", (units * kv, 2), spec.step_threads, shared, params)
        return
    for name, keys, each in (("store_keys", True, spec.key_pages), ("store_values", False, spec.value_pages)):
        params.groups, params.parts = each, -(-units // each)
        threads, shared = each * spec.group_threads(keys), each * spec.group_bytes(keys)
        kernels.launch(name, (params.parts * kv, 1), threads, shared, params)
    kernels.launch("store_rows", (row_blocks, batch * kv), _ROW_THREADS, 0, params)


class CudaStore:
    """The CUDA C++ implementation of ``base.StoreKernel``. Keyword arguments override the tuning (see StoreSpec).

    k and v that are not aligned to 16 bytes (pointer and strides) are copied first. The first call with a layer's
    tables prepares them: make it before a CUDA graph captures calls. Pages beyond the block table are not written.
    """

    def __init__(self, **tuning: int) -> None:
        self.tuning = tuning

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        pages: Tensor,
        block_table: Tensor,
        start: Tensor,
        count: Tensor,
        windows: Windows,
        tables: StoreTables,
        layout: PageLayout,
    ) -> None:
        _check_arguments(k, v, pages, block_table, start, count, windows, tables, layout)
        _require(k.is_cuda, f"the CUDA kernels need tensors on a CUDA device, k is on {k.device}")
        with torch.cuda.device(k.device):
            capability = torch.cuda.get_device_capability(k.device)
            spec = StoreSpec.choose(layout, k.dtype, tables, capability, **self.tuning)
            kernels = load_store(spec, k.device.index)
            ready = prepared(tables, layout.k_bits, layout.v_bits)
            run(kernels, k, v, pages, block_table, start, count, windows, ready)
