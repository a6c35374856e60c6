# SPDX-License-Identifier: Apache-2.0
"""Checks that reading and writing share: pool, block table, windows, tables. Nothing on the device is read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...layout import PageLayout
from ..base import LayerTables, StoreTables, Windows

Require = Callable[[bool, str], None]
"""Raises OscarError with the message unless the first argument holds."""


def check_pages(require: Require, pages: Tensor, layout: PageLayout) -> int:
    """The KV heads of a pool."""
    require(
        pages.ndim == 3 and pages.dtype == torch.uint8 and pages.shape[2] == layout.page_bytes,
        f"pages must be uint8 [pool, kv_heads, {layout.page_bytes}], got {pages.dtype} {tuple(pages.shape)}",
    )
    return pages.shape[1]


def check_requests(require: Require, batch: int, block_table: Tensor, numbers: dict[str, Tensor]) -> None:
    """The block table and one number a request each: shapes (dtypes: see ``check_int32``)."""
    require(
        block_table.ndim == 2 and block_table.shape[0] == batch,
        f"block_table must be [{batch}, max_pages], got {tuple(block_table.shape)}",
    )
    for name, x in numbers.items():
        require(tuple(x.shape) == (batch,), f"{name} must be [{batch}], got {tuple(x.shape)}")


def check_windows(require: Require, w: Windows, kv_heads: int, layout: PageLayout, dtype: torch.dtype) -> None:
    """Raw windows of the rows' dtype; K and V with as many rows."""
    for side in ("sink", "ring"):
        for name, d in ((f"{side}_k", layout.k_dim), (f"{side}_v", layout.v_dim)):
            x = getattr(w, name)
            require(
                x.ndim == 4 and x.shape[1] == kv_heads and x.shape[3] == d,
                f"{name} must be [slots, {kv_heads}, rows, {d}], got {tuple(x.shape)}",
            )
            require(x.dtype == dtype, f"{name} is {x.dtype}, the rows given are {dtype}: all must have one dtype")
    require(
        w.sink_k.shape[2] == w.sink_v.shape[2] and w.ring_k.shape[2] == w.ring_v.shape[2],
        "K and V windows differ in rows",
    )


def check_tables(require: Require, t: LayerTables | StoreTables, kv_heads: int, layout: PageLayout) -> list[Tensor]:
    """Contiguous fp32 tables of the layer's heads and head sizes; returns those that are there."""
    given = {name: x for name, x in vars(t).items() if isinstance(x, Tensor)}
    for name, x in given.items():
        d = layout.v_dim if name.startswith("v_") else layout.k_dim
        shape = (kv_heads, d) if name.endswith("centre") or name == "diagonal" else (kv_heads, d, d)
        require(
            tuple(x.shape) == shape and x.dtype == torch.float32 and x.is_contiguous(),
            f"{name} must be contiguous float32 {shape}, got {x.dtype} {tuple(x.shape)}",
        )
    return list(given.values())


def check_int32(require: Require, tensors: list[Tensor]) -> None:
    """Block table, lengths and slots."""
    require(all(x.dtype == torch.int32 for x in tensors), "block_table, lengths and slots must be int32")
