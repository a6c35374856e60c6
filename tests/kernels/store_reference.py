# SPDX-License-Identifier: Apache-2.0
"""What a store call must do, by LayerCodec.encode a page at a time; random codecs and rows; how pages are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv.codec import LayerCodec
from oscar_kv.kernels.base import Windows
from oscar_kv.layout import PAGE, PageLayout, read_pages
from oscar_kv.quantizer import ErrorWeight, normalised_weight
from oscar_kv.recipe import Recipe
from oscar_kv.transform import SideTransform, rotation


def random_codec(
    layout: PageLayout,
    heads: int,
    *,
    shaping: bool = True,
    unbiased: bool = True,
    rotate: bool = True,
    offset: float = 2.0,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LayerCodec:
    """Keys with an offset of about ``offset`` of their spread, error weights of a falling spectrum."""
    g = torch.Generator().manual_seed(seed)
    recipe = Recipe(name="test", k_bits=layout.k_bits, v_bits=layout.v_bits, shaping=shaping, unbiased=unbiased)

    def covariance(d: int) -> Tensor:
        x = torch.randn(heads, 2 * d, d, generator=g, dtype=torch.float64)
        x = x * torch.logspace(0, -1.5, d, dtype=torch.float64)
        mix = torch.linalg.qr(torch.randn(heads, d, d, generator=g, dtype=torch.float64))[0]
        return (x @ mix).mT @ (x @ mix) / (2 * d)

    def side(d: int, cov: Tensor, scale: float) -> SideTransform:
        centre = torch.randn(heads, d, generator=g, dtype=torch.float64) * scale
        return SideTransform(centre, rotation("eigen", cov) if rotate else None).to(device, dtype)

    query, value = covariance(layout.k_dim), covariance(layout.v_dim)
    k, v = side(layout.k_dim, query, offset), side(layout.v_dim, value, 0.2)
    turn = torch.eye(layout.k_dim, dtype=torch.float64).expand(heads, -1, -1) if k.rotation is None else k.rotation
    weight = ErrorWeight.of(normalised_weight(query, turn.cpu())).to(device, dtype) if shaping else None
    return LayerCodec(recipe, k, v, weight, dtype)


def in_double(codec: LayerCodec) -> LayerCodec:
    """The same codec in fp64 arithmetic."""
    device, f64 = codec.k.centre.device, torch.float64
    weight = None if codec.weight is None else codec.weight.to(device, f64)
    return LayerCodec(codec.recipe, codec.k.to(device, f64), codec.v.to(device, f64), weight, f64)


def random_rows(codec: LayerCodec, batch: int, n: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    """k, v [batch, heads, n, d]: Gaussian about the centres, some dimensions wider."""
    device = codec.k.centre.device
    g = torch.Generator(device=device).manual_seed(seed)

    def rows(side: SideTransform) -> Tensor:
        heads, d = side.centre.shape
        spread = 0.5 + 2 * torch.rand(heads, 1, d, generator=g, device=device) ** 4
        x = torch.randn(batch, heads, n, d, generator=g, device=device) * spread
        return (x + side.centre[:, None].float()).to(dtype)

    return rows(codec.k), rows(codec.v)


@dataclass
class State:
    """What a store call changes. Windows without slots hold one slot a request."""

    pages: Tensor
    windows: Windows

    def clone(self) -> State:
        w = self.windows
        return State(
            self.pages.clone(),
            Windows(w.sink_k.clone(), w.sink_v.clone(), w.ring_k.clone(), w.ring_v.clone(), w.slots),
        )


def store(
    codec: LayerCodec, k: Tensor, v: Tensor, block_table: Tensor, start: list[int], count: list[int], state: State
) -> set[tuple[int, int]]:
    """The contract of base.StoreKernel, row by row, in place. Returns (request, pool block) of each page written."""
    w, written = state.windows, set()
    ring_rows, sink_rows = w.ring_k.shape[2], w.sink_k.shape[2]
    for i in range(k.shape[0]):
        slot = i if w.slots is None else int(w.slots[i])
        stop = start[i] + count[i]
        for n in range(sink_rows // PAGE, stop // PAGE):
            block = int(block_table[i, n])
            if PAGE * n + PAGE - 1 < start[i] or block < 0:
                continue
            page = []
            for x, ring in ((k, w.ring_k), (v, w.ring_v)):
                rows = [
                    x[i, :, p - start[i]] if p >= start[i] else ring[slot, :, p % ring_rows]
                    for p in range(PAGE * n, PAGE * n + PAGE)
                ]
                page.append(torch.stack(rows, 1)[None])
            state.pages[block] = codec.encode(page[0].contiguous(), page[1].contiguous())[0]
            written.add((i, block))
        for p in range(start[i], stop):
            for x, sink, ring in ((k, w.sink_k, w.ring_k), (v, w.sink_v, w.ring_v)):
                if p < sink_rows:
                    sink[slot, :, p] = x[i, :, p - start[i]]
                if p >= stop - ring_rows:
                    ring[slot, :, p % ring_rows] = x[i, :, p - start[i]]
    return written


def encode_prompt(codec: LayerCodec, k: Tensor, v: Tensor) -> Tensor:
    """Whole pages of k, v [1, heads, 64·n, d] → uint8 [n, heads, page_bytes]."""
    k, v = (x[0].unflatten(1, (-1, PAGE)).transpose(0, 1).contiguous() for x in (k, v))
    return codec.encode(k, v)


@dataclass
class Difference:
    """Shares of rows whose codes differ; and of rows whose codes agree, but whose stored pair is off.

    Off: by more than two units of fp16, counted at the larger of the number itself and the step.
    """

    k_rows: float
    v_rows: float
    pairs: float


def difference(layout: PageLayout, got: Tensor, want: Tensor) -> Difference:
    shares, off = [], []
    for a, b in zip(read_pages(layout, got), read_pages(layout, want), strict=True):
        other = (a.code != b.code).any(-1)
        shares.append(other.double().mean().item() if other.numel() else 0.0)
        for x, y in ((a.step, b.step), (a.zero, b.zero)):
            unit = torch.maximum(y.double().abs(), b.step.double().abs()) * 2.0**-10
            off.append((((x.double() - y.double()).abs() > 2 * unit) & ~other).double().mean().item())
    return Difference(*shares, max(off))


def weighted_error(codec: LayerCodec, k: Tensor, pages: Tensor) -> float:
    """Sum of eAeᵀ over the keys of k [1, heads, 64·n, d], in fp64 (A = I without shaping)."""
    exact = in_double(codec)
    rows = k[0].unflatten(1, (-1, PAGE)).transpose(0, 1).double()
    e = exact.k.apply(rows) - read_pages(codec.layout, pages)[0].dequantise(torch.float64)
    left = e if exact.weight is None or not exact.shaped else e @ exact.weight.matrix
    return (left * e).sum().item()
