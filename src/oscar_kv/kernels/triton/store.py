# SPDX-License-Identifier: Apache-2.0
"""New tokens written with the Triton kernels: complete pages first, from rows that the windows are about to lose."""

from __future__ import annotations

from typing import Literal

import torch
import triton
from torch import Tensor

from ...layout import PAGE, PageLayout
from ...quantizer import SHAPED_STEP_FACTOR, SIGMA_STEP
from ..base import StoreTables, Windows
from . import checks
from .store_kernels import pack_pages, quantise_rows, write_windows

Precision = Literal["ieee", "tf32x3", "tf32"]
_WINDOW_ROWS = 16


class TritonStore:
    """The Triton implementation of ``base.StoreKernel``.

    rows, warps: how many a program quantises together, and its warps. precision: of the matrix products (rotation,
    error feedback between blocks of 16 dimensions): fp32, or on tensor cores as three TF32 products or one. With "ieee"
    codes are the reference codec's but for ties.
    """

    def __init__(self, precision: Precision = "ieee", rows: int | None = None, warps: int = 4) -> None:
        self.precision, self.rows, self.warps = precision, rows, warps

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
        heads, w = checks.check_pages(pages, layout), windows
        batch, n = (k.shape[0], k.shape[2]) if k.ndim == 4 else (0, 0)
        for name, x, d in (("k", k, layout.k_dim), ("v", v, layout.v_dim)):
            checks.require(
                tuple(x.shape) == (batch, heads, n, d) and x.stride(-1) == 1 and x.dtype == k.dtype,
                f"{name} must be [batch, {heads}, n, {d}], last dimension contiguous, got {x.dtype} {tuple(x.shape)}",
            )
        checks.check_requests(batch, block_table, {"start": start, "count": count})
        checks.check_windows(w, heads, layout, k.dtype, batch)
        checks.check_tables(tables, heads, layout)
        checks.require(w.ring_k.shape[2] >= PAGE, f"the ring has {w.ring_k.shape[2]} rows, a page needs {PAGE}")
        checks.require((tables.upper is None) == (tables.diagonal is None), "upper and diagonal come together")
        if not batch or not n:
            return
        given = [x for x in vars(tables).values() if isinstance(x, Tensor)]
        tensors = [k, v, pages, block_table, start, count, w.sink_k, w.sink_v, w.ring_k, w.ring_v, w.slots, *given]
        with checks.check_device(tensors):
            codes = [
                self._quantise(x, ring, pages, block_table, start, count, w, tables, layout)
                for x, ring in ((k, w.ring_k), (v, w.ring_v))
            ]
            first_page, max_pages = w.sink_k.shape[2] // PAGE, block_table.shape[1]
            pack_pages[(triton.cdiv(n, PAGE), heads, batch)](
                *codes, pages.view(torch.int32), block_table, start, count, heads, max_pages, first_page,
                layout.k_dim, layout.v_dim, layout.k_bits, layout.v_bits,
                _padded_words(layout.k_dim, layout.k_bits), _padded_words(layout.v_dim, layout.v_bits),
            )  # fmt: skip
            write_windows[(triton.cdiv(n, _WINDOW_ROWS), heads, batch)](
                k, v, w.sink_k, w.sink_v, w.ring_k, w.ring_v, start, count, w.slots,
                *k.stride()[:3], *v.stride()[:3], heads, w.sink_k.shape[2], w.ring_k.shape[2],
                layout.k_dim, layout.v_dim, checks.next_power_of_2(max(layout.k_dim, layout.v_dim)), _WINDOW_ROWS,
            )  # fmt: skip

    def _quantise(
        self,
        x: Tensor,
        ring: Tensor,
        pages: Tensor,
        block_table: Tensor,
        start: Tensor,
        count: Tensor,
        w: Windows,
        t: StoreTables,
        layout: PageLayout,
    ) -> Tensor:
        """Codes [batch, kv_heads, pages, 64, d] of one side; steps and zeros go to the pages."""
        (batch, heads, n, d), values = x.shape, ring is w.ring_v
        bits = layout.v_bits if values else layout.k_bits
        # n consecutive positions hold at most this many last places of a page.
        most, pad = triton.cdiv(n, PAGE), checks.next_power_of_2(d)
        rows = self.rows or (16 if pad >= 128 else 32)  # bounds registers and shared memory
        codes = torch.empty(batch, heads, most, PAGE, d, dtype=torch.uint8, device=x.device)
        quantise_rows[(most * PAGE // rows, heads, batch)](
            x, ring, pages.view(torch.float16), block_table, start, count, w.slots,
            t.v_rotation if values else t.k_rotation, t.v_centre if values else t.k_centre,
            None if values else t.upper, None if values else t.diagonal, codes,
            *x.stride()[:3], heads, block_table.shape[1], ring.shape[2], w.sink_k.shape[2] // PAGE,
            d, pad, bits, t.unbiased, SIGMA_STEP.get(bits, 0.0), SHAPED_STEP_FACTOR[bits],
            layout.page_bytes // 4, 2 if values else 0, rows, self.precision,
            num_warps=self.warps,
        )  # fmt: skip
        return codes


def _padded_words(d: int, bits: int) -> int:
    """Words a lane of a side's widest plane, up to a power of two."""
    return checks.next_power_of_2(d * (2 if bits == 3 else bits) // 16)
