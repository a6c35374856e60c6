# SPDX-License-Identifier: Apache-2.0
"""Shapes, dtypes and devices that the Triton kernels serve. Values on the device are not read: no synchronisation."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import OscarError
from ...layout import PageLayout
from ..base import LayerTables, StoreTables, Windows

RAW = (torch.float16, torch.bfloat16, torch.float32)


def require(ok: bool, message: str) -> None:
    """OscarError with this message unless ok."""
    if not ok:
        raise OscarError(f"Triton kernels: {message}")


def _shape(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    require(
        tuple(x.shape) == shape and x.dtype == dtype and x.is_contiguous(),
        f"{name} must be contiguous {dtype} {shape}, got {x.dtype} {tuple(x.shape)}",
    )


def check_pages(pages: Tensor, layout: PageLayout) -> int:
    """The KV heads of a pool."""
    require(
        pages.ndim == 3
        and pages.dtype == torch.uint8
        and pages.shape[2] == layout.page_bytes
        and pages.is_contiguous(),
        f"pages must be contiguous uint8 [pool, kv_heads, {layout.page_bytes}], got {pages.dtype} {tuple(pages.shape)}",
    )
    require(pages.data_ptr() % 16 == 0, "pages must be aligned to 16 bytes")
    return pages.shape[1]


def check_requests(batch: int, block_table: Tensor, numbers: dict[str, Tensor]) -> None:
    """The block table and one int32 a request each."""
    require(
        block_table.ndim == 2 and block_table.shape[0] == batch,
        f"block_table must be [{batch}, max_pages], got {tuple(block_table.shape)}",
    )
    _shape("block_table", block_table, tuple(block_table.shape), torch.int32)
    for name, x in numbers.items():
        _shape(name, x, (batch,), torch.int32)


def check_windows(w: Windows, heads: int, layout: PageLayout, dtype: torch.dtype, batch: int) -> None:
    """Raw windows of one dtype; K and V with as many rows."""
    require(dtype in RAW, f"queries, keys and values must be float16, bfloat16 or float32, got {dtype}")
    for side in ("sink", "ring"):
        k, v = getattr(w, f"{side}_k"), getattr(w, f"{side}_v")
        require(k.ndim == 4, f"{side}_k must be [slots, {heads}, rows, {layout.k_dim}], got {tuple(k.shape)}")
        lead = (k.shape[0], heads, k.shape[2])
        _shape(f"{side}_k", k, (*lead, layout.k_dim), dtype)
        _shape(f"{side}_v", v, (*lead, layout.v_dim), dtype)
        require(w.slots is not None or k.shape[0] >= batch, f"{side}_k has {k.shape[0]} slots for {batch} requests")
    if w.slots is not None:
        _shape("slots", w.slots, (batch,), torch.int32)


def check_tables(t: LayerTables | StoreTables, heads: int, layout: PageLayout) -> None:
    """Contiguous fp32 tables of the layer's heads and head sizes."""
    for name, x in vars(t).items():
        if isinstance(x, Tensor):
            d = layout.v_dim if name.startswith("v_") else layout.k_dim
            shape = (heads, d) if name.endswith("centre") or name == "diagonal" else (heads, d, d)
            _shape(name, x, shape, torch.float32)


def check_device(tensors: Sequence[Tensor | None]) -> contextlib.AbstractContextManager[object]:
    """One device that can run the kernels; the context that makes it the current one."""
    import triton

    given = [x for x in tensors if x is not None]
    device = given[0].device
    require(all(x.device == device for x in given), "every tensor must be on one device")
    if triton.knobs.runtime.interpret:
        return contextlib.nullcontext()
    require(
        device.type == "cuda",
        f"they need a GPU, the tensors are on {device}: use kernels='torch' (or set TRITON_INTERPRET=1 to test)",
    )
    return torch.cuda.device(device)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n ≥ 1)."""
    return 1 << (n - 1).bit_length()
