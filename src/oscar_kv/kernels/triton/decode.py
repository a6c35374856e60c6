# SPDX-License-Identifier: Apache-2.0
"""Decode attention with the Triton kernels: checks, division of work, and the three launches of one call."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...layout import PageLayout
from ..base import LayerTables, Windows
from . import checks
from .codes import exponent_of
from .decode_kernels import ROWS, attend, finish, turn_queries

MAX_GROUP = 64
MAX_PIECES = 512


@dataclass(frozen=True)
class Tuning:
    """How one call is cut and compiled. None: the default for the shape and the device.

    warps: of a program; stages: of the software pipeline over pages (1: none); programs: how many to aim at
    a multiprocessor, by cutting histories into pieces.
    """

    warps: int | None = None
    stages: int | None = None
    programs: int | None = None

    def choose(self, layout: PageLayout, rows: int = 1) -> tuple[int, int, int]:
        """(warps, stages, programs a multiprocessor) for so many (request, KV head) pairs."""
        # One warp: its loads are its own MMA operands, and the MMAs of 16 rows cannot be shared out. Head sizes that
        # are no powers of two load words where they are needed, which takes more registers than one warp has.
        odd = any(d & (d - 1) for d in (layout.k_dim, layout.v_dim))
        warps = self.warps or (4 if odd else 1)
        return warps, self.stages or (1 if odd else 2), self.programs or (4 if odd else 24 if rows >= 32 else 8)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


class TritonDecode:
    """The Triton implementation of ``base.DecodeKernel``. Keyword arguments override the tuning (see Tuning)."""

    def __init__(self, **tuning: int) -> None:
        self.tuning = Tuning(**tuning)

    def __call__(
        self,
        q: Tensor,
        pages: Tensor,
        block_table: Tensor,
        hist_start: Tensor,
        hist_end: Tensor,
        seq_len: Tensor,
        windows: Windows,
        tables: LayerTables,
        layout: PageLayout,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        kv, w, t = checks.check_pages(pages, layout), windows, tables
        dk, dv = layout.k_dim, layout.v_dim
        checks.require(
            q.ndim == 3 and q.shape[2] == dk and q.is_contiguous(),
            f"q must be contiguous [batch, q_heads, {dk}], got {tuple(q.shape)}",
        )
        batch, q_heads, group = q.shape[0], q.shape[1], q.shape[1] // kv
        checks.require(q_heads == group * kv, f"{q_heads} query heads cannot share {kv} KV heads evenly")
        checks.require(1 <= group <= MAX_GROUP, f"{group} query heads a KV head are not supported: 1 to {MAX_GROUP}")
        lengths = {"hist_start": hist_start, "hist_end": hist_end, "seq_len": seq_len}
        checks.check_requests(batch, block_table, lengths)
        checks.check_windows(w, kv, layout, q.dtype, batch)
        checks.check_tables(t, kv, layout)
        if out is None:
            out = torch.empty(batch, q_heads, dv, dtype=q.dtype, device=q.device)
        checks.require(
            out.shape == (batch, q_heads, dv) and out.dtype == q.dtype and out.is_contiguous(),
            f"out must be contiguous {q.dtype} {(batch, q_heads, dv)}",
        )
        tensors = [q, pages, block_table, *lengths.values(), w.sink_k, w.sink_v, w.ring_k, w.ring_v, w.slots, out]
        if batch == 0:
            return out
        with checks.check_device([*tensors, t.k_rotation, t.k_centre, t.v_rotation_t, t.v_centre]):
            self._launch(q, pages, block_table, lengths, w, t, layout, scale, softcap, out)
        return out

    def _launch(
        self,
        q: Tensor,
        pages: Tensor,
        block_table: Tensor,
        lengths: dict[str, Tensor],
        w: Windows,
        t: LayerTables,
        layout: PageLayout,
        scale: float | None,
        softcap: float,
        out: Tensor,
    ) -> None:
        batch, q_heads, dk = q.shape
        kv, dv, max_pages = pages.shape[1], layout.v_dim, block_table.shape[1]
        group = q_heads // kv
        head_blocks = -(-group // ROWS.value)
        k_pad, v_pad = checks.next_power_of_2(dk), checks.next_power_of_2(dv)
        # Shapes alone decide the grid, so that a graph can be replayed while lengths change on the device.
        rows = batch * kv * head_blocks
        warps, stages, programs = self.tuning.choose(layout, rows)  # 24 measured at 64 and 256 pairs, 8 at 8
        pieces = min(max_pages, MAX_PIECES, max(1, programs * _multiprocessors(q.device) // rows))
        sink_rows, ring_rows = w.sink_k.shape[2], w.ring_k.shape[2]
        sink_items = -(-sink_rows // 64)
        items = pieces + sink_items + -(-ring_rows // 64)
        checks.require(items > 0, "there is neither a page nor a window to attend to")

        def buffer(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=q.device)

        turned, bias = buffer(batch, q_heads, k_pad), buffer(batch, q_heads)
        partial, lse = buffer(batch, q_heads, items, dv), buffer(batch, q_heads, items)
        natural, log2e = dk**-0.5 if scale is None else scale, 1 / math.log(2)
        factor, cap = (natural / softcap, softcap * log2e) if softcap else (natural * log2e, 0.0)
        columns = min(32, k_pad)
        turn_queries[(batch * kv, head_blocks, k_pad // columns)](
            q, t.k_rotation, t.k_centre, turned, bias, kv, factor, group, dk, k_pad, columns, num_warps=4
        )
        attend[(items, kv * head_blocks, batch)](
            q, turned, bias, pages.view(torch.int32), block_table, *lengths.values(), w.slots,
            w.sink_k, w.sink_v, w.ring_k, w.ring_v, partial, lse,
            kv, max_pages, sink_rows, ring_rows, pieces, sink_items, items, factor, cap,
            exponent_of(layout.k_bits), exponent_of(layout.v_bits),
            dk, k_pad, dv, v_pad, layout.k_bits, layout.v_bits, group, head_blocks, softcap > 0, stages,
            16, bool(triton.knobs.runtime.interpret),
            num_warps=warps,
        )  # fmt: skip
        finish[(q_heads, batch)](
            partial, lse, t.v_rotation_t, t.v_centre, out, pieces, items,
            dv, v_pad, group, 16, num_warps=16 if v_pad > 128 else 8,
        )  # fmt: skip
