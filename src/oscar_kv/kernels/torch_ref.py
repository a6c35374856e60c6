# SPDX-License-Identifier: Apache-2.0
"""Attention over sink, packed history and raw window in plain PyTorch: the oracle of the kernels, and the CPU path.

History is de-quantised tile by tile, never whole. It stays in the rotated basis: queries are turned by R_K, the
constant q·μ_K is added to the history's logits (before a soft-cap), and the value sum is turned back once, with μ_V
weighted by the history's probability mass (OSCAR, arXiv 2605.17757, section 3; centring as in the method).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import PAGE, PageLayout, read_pages
from .base import LayerTables

_TILE_ELEMENTS = 1 << 22
"""Logits a tile: bounds the working memory of a long chunk over a long history (16 MB in fp32)."""


class OnlineSoftmax:
    """Softmax-weighted sums over tiles of keys. Rows are query heads × queries of one KV head.

    The history's values are summed apart from the raw ones, because they are in another basis.
    """

    def __init__(self, heads: int, rows: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.top = torch.full((heads, rows, 1), -torch.inf, dtype=dtype, device=device)
        self.mass, self.history_mass = zeros(heads, rows, 1), zeros(heads, rows, 1)
        self.raw, self.history = zeros(heads, rows, v_dim), zeros(heads, rows, v_dim)

    def add(self, logits: Tensor, v: Tensor, history: bool) -> None:
        """logits [heads, rows, tokens] (−inf: not seen), v [heads, tokens, v_dim]."""
        top = torch.maximum(self.top, logits.amax(-1, keepdim=True))
        safe = torch.where(top == -torch.inf, 0.0, top)  # a row that has seen nothing yet
        p, keep = (logits - safe).exp_(), (self.top - safe).exp_()
        self.top = top
        tile = p.sum(-1, keepdim=True)
        self.mass = self.mass * keep + tile
        self.history_mass = self.history_mass * keep + (tile if history else 0.0)
        self.raw, self.history = self.raw * keep, self.history * keep
        if history:
            self.history += p @ v
        else:
            self.raw += p @ v

    def result(self, tables: LayerTables) -> Tensor:
        """The weighted mean of the values [heads, rows, v_dim], in the model's basis."""
        turned = (
            self.history if tables.v_rotation_t is None else self.history @ tables.v_rotation_t.to(self.history.dtype)
        )
        centre = self.history_mass * tables.v_centre.to(self.history.dtype)[:, None]
        return (self.raw + turned + centre) / self.mass


def attend_row(
    q: Tensor,
    sink: tuple[Tensor, Tensor],
    pages: Tensor,
    first_page: int,
    window: tuple[Tensor, Tensor],
    chunk: tuple[Tensor, Tensor],
    *,
    position: int,
    hist_start: int,
    hist_end: list[int],
    tables: LayerTables,
    layout: PageLayout,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of one request's new queries q [q_heads, n, k_dim] → [q_heads, n, v_dim] in fp32 (fp64 for fp64 q).

    position: that of the first query. sink: raw k, v [kv_heads, s, d] of positions 0 … s−1. pages uint8
    [p, kv_heads, page_bytes], the first holding positions from 64·first_page. window: raw rows of positions
    hist_end[0] … position−1. chunk: the n new rows, causal. hist_end[t] is where query t's history ends: it reads codes
    of [hist_start, hist_end[t]) and raw rows from there on.
    """
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_heads, n, _ = q.shape
    heads = chunk[0].shape[0]
    group = q_heads // heads
    q = q.to(acc).reshape(heads, group * n, -1)
    state = OnlineSoftmax(heads, group * n, chunk[1].shape[-1], acc, q.device)
    ends = torch.tensor(hist_end, device=q.device)
    low, high = min(hist_end), max(hist_end)
    tile = max(PAGE, _TILE_ELEMENTS // (q_heads * n) // PAGE * PAGE)

    def add(turned: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, seen: Tensor | None, history: bool) -> None:
        logits = (turned @ k.to(acc).mT + bias) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if seen is not None:  # [n, tokens], the same for all heads
            logits = logits.view(heads, group, n, -1).masked_fill(~seen, -torch.inf).view(heads, group * n, -1)
        state.add(logits, v.to(acc), history)

    def add_raw(k: Tensor, v: Tensor, position: int, causal_from: int | None) -> None:
        for start in range(0, k.shape[1], tile):
            stop = min(start + tile, k.shape[1])
            place = torch.arange(position + start, position + stop, device=q.device)
            seen = None
            if causal_from is not None:
                seen = place <= torch.arange(causal_from, causal_from + n, device=q.device)[:, None]
            elif position + start < high and position >= low:
                seen = place >= ends[:, None]
            add(q, k[:, start:stop], v[:, start:stop], 0.0, seen, False)

    if sink[0].shape[1]:
        add_raw(*sink, 0, None)
    if high > hist_start:
        turned = q if tables.k_rotation is None else q @ tables.k_rotation.to(acc)
        bias = (q * tables.k_centre.to(acc)[:, None]).sum(-1, keepdim=True)
        for start in range(hist_start // PAGE * PAGE, high, tile):
            stop = min(start + tile, high)
            block = pages[start // PAGE - first_page : -(-stop // PAGE) - first_page]
            k_codes, v_codes = read_pages(layout, block)
            inside = slice(max(start, hist_start) - start, stop - start)
            k = k_codes.dequantise(acc).transpose(0, 1).flatten(1, 2)[:, inside]
            v = v_codes.dequantise(acc).transpose(0, 1).flatten(1, 2)[:, inside]
            seen = None
            if stop > low:
                seen = torch.arange(max(start, hist_start), stop, device=q.device) < ends[:, None]
            add(turned, k, v, bias, seen, True)
    if window[0].shape[1]:
        add_raw(*window, low, None)
    add_raw(*chunk, position, position)
    return state.result(tables).reshape(q_heads, n, -1)
