# SPDX-License-Identifier: Apache-2.0
"""Decode attention in float64, a request and a head at a time, read by layout.read_pages; and random cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv.kernels.base import LayerTables, Windows
from oscar_kv.layout import PAGE, PageLayout, read_pages, write_pages
from oscar_kv.quantizer import Quantised


@dataclass
class Case:
    """Arguments of a DecodeKernel."""

    layout: PageLayout
    q: Tensor
    pages: Tensor
    block_table: Tensor
    hist_start: Tensor
    hist_end: Tensor
    seq_len: Tensor
    windows: Windows
    tables: LayerTables

    def arguments(self) -> tuple[object, ...]:
        return (
            self.q,
            self.pages,
            self.block_table,
            self.hist_start,
            self.hist_end,
            self.seq_len,
            self.windows,
            self.tables,
        )


def random_pages(
    layout: PageLayout, count: int, heads: int, g: torch.Generator, k_scale: float = 1.0, v_scale: float = 1.0
) -> Tensor:
    """Pages of random codes whose rows are about centred: uint8 [count, heads, page_bytes]."""

    def rows(d: int, bits: int, scale: float) -> Quantised:
        code = torch.randint(0, 2**bits, (count, heads, PAGE, d), generator=g, dtype=torch.uint8)
        step = (torch.rand(count, heads, PAGE, generator=g) + 0.5) * scale * 2 / 2**bits
        zero = -step * (2**bits - 1) / 2 + torch.randn(count, heads, PAGE, generator=g) * 0.1 * scale
        return Quantised(code, step.half(), zero.half())

    return write_pages(layout, rows(layout.k_dim, layout.k_bits, k_scale), rows(layout.v_dim, layout.v_bits, v_scale))


def random_case(
    layout: PageLayout,
    group: int,
    lengths: list[tuple[int, int, int]],
    *,
    heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    rotate: bool = True,
    q_scale: float = 1.0,
    v_scale: float = 1.0,
    sink_rows: int = 64,
    ring_rows: int = 288,
) -> Case:
    """lengths: (hist_start, hist_end, seq_len) a request. What no kernel may use is NaN (codes: random bytes)."""
    g = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    start, end, total = (torch.tensor(x, dtype=torch.int32) for x in zip(*lengths, strict=True))
    need = [-(-e // PAGE) for _, e, _ in lengths]
    width, count = max(1, *need), sum(need) + 1
    pages = random_pages(layout, count, heads, g, v_scale=v_scale)
    order, table, used = torch.randperm(count, generator=g), torch.zeros(batch, width, dtype=torch.int32), 0
    meta = pages[..., layout.metadata_offset :].view(torch.float16).view(count, heads, PAGE, 4)
    for b, n in enumerate(need):
        for i in range(width):
            table[b, i] = order[used + i] if i < n else 1 << 24  # an address nobody maps
        for i in range(n):
            token = torch.arange(i * PAGE, (i + 1) * PAGE)
            meta[order[used + i], :, (token < start[b]) | (token >= end[b])] = torch.nan
        used += n
    slots = torch.randperm(batch + 1, generator=g)[:batch].to(torch.int32)

    def window(rows: int, d: int) -> Tensor:
        return torch.full((batch + 1, heads, rows, d), torch.nan, dtype=dtype)

    w = Windows(
        window(sink_rows, layout.k_dim),
        window(sink_rows, layout.v_dim),
        window(ring_rows, layout.k_dim),
        window(ring_rows, layout.v_dim),
        slots,
    )
    for b, (s, e, n) in enumerate(lengths):
        for k, v, d in ((w.sink_k, w.ring_k, layout.k_dim), (w.sink_v, w.ring_v, layout.v_dim)):
            k[slots[b], :, :s] = torch.randn(heads, s, d, generator=g).to(dtype)
            recent = torch.arange(max(e, s), n)
            v[slots[b], :, recent % ring_rows] = torch.randn(heads, len(recent), d, generator=g).to(dtype)

    def turn(d: int) -> Tensor | None:
        if not rotate:
            return None
        return torch.linalg.qr(torch.randn(heads, d, d, generator=g)).Q.contiguous()

    tables = LayerTables(
        turn(layout.k_dim),
        torch.randn(heads, layout.k_dim, generator=g),
        turn(layout.v_dim),
        torch.randn(heads, layout.v_dim, generator=g),
    )
    q = (torch.randn(batch, heads * group, layout.k_dim, generator=g) * q_scale).to(dtype)
    return Case(layout, q, pages, table, start, end, total, w, tables)


def reference(c: Case, scale: float | None = None, softcap: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The exact answer [batch, q_heads, dv] (or, with another dtype, plain PyTorch's in that dtype)."""
    batch, q_heads, dk = c.q.shape
    heads = c.pages.shape[1]
    group, scale = q_heads // heads, dk**-0.5 if scale is None else scale
    out = torch.zeros(batch, q_heads, c.layout.v_dim, dtype=dtype, device=c.q.device)
    t, w = c.tables, c.windows
    for b in range(batch):
        s, e, n = (int(x[b]) for x in (c.hist_start, c.hist_end, c.seq_len))
        slot = b if w.slots is None else int(w.slots[b])
        e = max(s, e)
        first = s // PAGE
        blocks = c.block_table[b, first : -(-e // PAGE)].long() if e > s else torch.zeros(1, dtype=torch.long)
        recent = torch.arange(e, n, device=c.q.device) % w.ring_k.shape[2]
        for h in range(heads):
            kq, vq = read_pages(c.layout, c.pages[blocks, h])
            inside = slice(s - first * PAGE, e - first * PAGE)
            k = kq.dequantise(dtype).flatten(0, 1)[inside]
            v = vq.dequantise(dtype).flatten(0, 1)[inside]
            k = (k if t.k_rotation is None else k @ t.k_rotation[h].to(dtype).T) + t.k_centre[h].to(dtype)
            v = (v if t.v_rotation_t is None else v @ t.v_rotation_t[h].to(dtype)) + t.v_centre[h].to(dtype)
            k = torch.cat([w.sink_k[slot, h, :s].to(dtype), k, w.ring_k[slot, h, recent].to(dtype)])
            v = torch.cat([w.sink_v[slot, h, :s].to(dtype), v, w.ring_v[slot, h, recent].to(dtype)])
            if not len(k):
                continue
            x = c.q[b, h * group : (h + 1) * group].to(dtype) @ k.T * scale
            if softcap:
                x = softcap * torch.tanh(x / softcap)
            out[b, h * group : (h + 1) * group] = x.softmax(-1) @ v
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def to_device(c: Case, device: str) -> Case:
    """The same case on another device."""
    return moved(c, lambda x: x.to(device))


def moved(c: Case, to: Callable[[Tensor], Tensor]) -> Case:
    """The same case with every tensor replaced by to(tensor)."""

    def move(x: Tensor | None) -> Tensor | None:
        return None if x is None else to(x)

    w, t = c.windows, c.tables
    windows = Windows(*(move(x) for x in (w.sink_k, w.sink_v, w.ring_k, w.ring_v, w.slots)))  # type: ignore[arg-type]
    tables = LayerTables(*(move(x) for x in (t.k_rotation, t.k_centre, t.v_rotation_t, t.v_centre)))  # type: ignore[arg-type]
    rest = (move(x) for x in (c.q, c.pages, c.block_table, c.hist_start, c.hist_end, c.seq_len))
    return Case(c.layout, *rest, windows, tables)  # type: ignore[arg-type]
