# SPDX-License-Identifier: Apache-2.0
"""The kernels' interface in plain PyTorch: slow, for every dtype and device, and what the tests call on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import OscarError
from ..layout import PAGE, PageLayout, read_pages, write_pages
from ..quantizer import ErrorWeight, quantise
from ..transform import SideTransform
from .base import KernelSet, LayerTables, StoreTables, Windows
from .torch_ref import attend_row

Encode = Callable[[Tensor, Tensor], Tensor]
"""Raw rows of whole pages k, v [pages, heads, 64, d] → uint8 [pages, heads, page_bytes]."""


def _slots(windows: Windows, batch: int) -> list[int]:
    return list(range(batch)) if windows.slots is None else windows.slots.tolist()


class TorchDecode:
    """``base.DecodeKernel`` on ``attend_row``, a request at a time. A request without tokens gets zeros."""

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
        batch, q_heads, _ = q.shape
        if out is None:
            out = q.new_empty(batch, q_heads, layout.v_dim)
        ring = windows.ring_k.shape[2]
        rows = zip(hist_start.tolist(), hist_end.tolist(), seq_len.tolist(), _slots(windows, batch), strict=True)
        for i, (start, end, length, slot) in enumerate(rows):
            if not length:
                out[i] = 0
                continue
            at = torch.arange(end, length, device=q.device) % ring
            recent = windows.ring_k[slot][:, at], windows.ring_v[slot][:, at]
            sink = windows.sink_k[slot][:, :start], windows.sink_v[slot][:, :start]
            source = recent if length > end else sink  # the query's own row is the last of it
            new = source[0][:, -1:], source[1][:, -1:]
            if length > end:
                recent = recent[0][:, :-1], recent[1][:, :-1]
            else:
                sink = sink[0][:, :-1], sink[1][:, :-1]
            first = start // PAGE
            blocks = block_table[i, first : -(-end // PAGE)].long() if end > start else block_table[i, :0].long()
            o = attend_row(
                q[i][:, None], sink, pages[blocks], first, recent, new, position=length - 1, hist_start=start,
                hist_end=[end], tables=tables, layout=layout, scale=layout.k_dim**-0.5 if scale is None else scale,
                softcap=softcap,
            )  # fmt: skip
            out[i] = o[:, 0].to(out.dtype)
        return out


def encoder(tables: StoreTables, layout: PageLayout) -> Encode:
    """Rows to pages by the reference quantiser, from the kernels' tables."""
    weight = None
    if tables.upper is not None and tables.diagonal is not None:
        upper = tables.upper.double()
        matrix = (upper * tables.diagonal.double()[..., None, :]) @ upper.mT
        weight = ErrorWeight(matrix.float(), tables.upper)
    sides = SideTransform(tables.k_centre, tables.k_rotation), SideTransform(tables.v_centre, tables.v_rotation)

    def encode(k: Tensor, v: Tensor) -> Tensor:
        kq = quantise(sides[0].apply(k.float()), layout.k_bits, weight=weight, unbias=tables.unbiased)
        vq = quantise(sides[1].apply(v.float()), layout.v_bits, unbias=tables.unbiased)
        return write_pages(layout, kq, vq)

    return encode


class TorchStore:
    """``base.StoreKernel`` by the reference quantiser, or by ``encode``, which then stands for the tables."""

    def __init__(self, encode: Encode | None = None) -> None:
        self.encode = encode

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
        encode = self.encode or encoder(tables, layout)
        sink, ring = windows.sink_k.shape[2], windows.ring_k.shape[2]
        rows = zip(start.tolist(), count.tolist(), _slots(windows, k.shape[0]), strict=True)
        for i, (first, n, slot) in enumerate(rows):
            if not n:
                continue
            stop = first + n
            sides = (
                (k[i, :, :n], windows.sink_k[slot], windows.ring_k[slot]),
                (v[i, :, :n], windows.sink_v[slot], windows.ring_v[slot]),
            )
            low, high = max(first // PAGE, sink // PAGE), stop // PAGE
            if high > low:
                whole = []
                for new, _, held in sides:
                    old = held[:, torch.arange(PAGE * low, max(first, PAGE * low), device=k.device) % ring]
                    new = new[:, max(PAGE * low - first, 0) : PAGE * high - first]
                    rows_of = torch.cat([old, new], 1).unflatten(1, (high - low, PAGE))
                    whole.append(rows_of.transpose(0, 1).contiguous())
                blocks = block_table[i, low:high].long()
                kept = blocks >= 0
                if bool(kept.any()):
                    pages[blocks[kept]] = encode(whole[0][kept], whole[1][kept])
            tail = max(first, stop - ring)
            at = torch.arange(tail, stop, device=k.device) % ring
            for new, sunk, held in sides:
                if first < sink:
                    sunk[:, first : min(stop, sink)] = new[:, : min(stop, sink) - first]
                held[:, at] = new[:, tail - first :]


class TorchDequantise:
    """``base.DequantiseKernel`` by ``read_pages``."""

    def __call__(self, pages: Tensor, blocks: Tensor, layout: PageLayout, k: Tensor, v: Tensor) -> None:
        batch, n = blocks.shape
        for name, x, d in (("k", k, layout.k_dim), ("v", v, layout.v_dim)):
            wanted = [batch, PAGE * n, pages.shape[1], d]
            if list(x.shape) != wanted:
                raise OscarError(f"dequantise: {name} must be {wanted}, is {list(x.shape)}")
        there = (blocks >= 0)[:, :, None, None, None]
        for codes, x in zip(read_pages(layout, pages[blocks.clamp(min=0).long()]), (k, v), strict=True):
            work = torch.promote_types(x.dtype, torch.float32)
            rows = torch.where(there, codes.dequantise(work), 0.0)  # [batch, n, heads, 64, d]
            limit = torch.finfo(x.dtype).max
            x.copy_(rows.clamp(-limit, limit).permute(0, 1, 3, 2, 4).reshape(x.shape))


def kernel_set(encode: Encode | None = None) -> KernelSet:
    """All three, under the name "torch"."""
    return KernelSet("torch", TorchDecode(), TorchStore(encode), TorchDequantise())
