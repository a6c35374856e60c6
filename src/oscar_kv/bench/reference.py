# SPDX-License-Identifier: Apache-2.0
"""The right answers in float64, for one request or for some queries of a chunk: slow, and plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.base import LayerTables, Windows
from ..kernels.torch_ref import attend_row
from ..layout import PageLayout
from .inputs import DecodeArguments


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖; infinity where ``got`` is not finite."""
    value = float((got.double() - want.double()).norm() / want.double().norm())
    return value if math.isfinite(value) else math.inf


def paged_reference(
    q: Tensor,
    pages: Tensor,
    blocks: Tensor,
    span: tuple[int, int],
    windows: Windows,
    tables: LayerTables,
    layout: PageLayout,
    *,
    slot: int,
    position: int,
    raw: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Answer [q_heads, dv] for one query q [q_heads, dk] at ``position``, whose history is span = [start, end).

    blocks: the request's row of the block table. Raw rows of positions end … position come from the ring, or, those
    from the first of ``raw``'s on, from k, v [kv_heads, n, d] of the last n positions.
    """
    start, end = span
    w, last = windows, position + 1
    chunk = 0 if raw is None else raw[0].shape[1]
    place = torch.arange(end, last - chunk, device=q.device) % w.ring_k.shape[2]
    k, v = (x[slot][:, place] for x in (w.ring_k, w.ring_v))
    if raw is not None:
        k, v = torch.cat([k, raw[0]], 1), torch.cat([v, raw[1]], 1)
    first = start // 64
    return attend_row(
        q[:, None].double(),
        (w.sink_k[slot][:, :start], w.sink_v[slot][:, :start]),
        pages[blocks[first : -(-end // 64)].long()],
        first,
        (k[:, :-1], v[:, :-1]),
        (k[:, -1:], v[:, -1:]),
        position=position,
        hist_start=start,
        hist_end=[end],
        tables=tables,
        layout=layout,
        scale=layout.k_dim**-0.5,
    )[:, 0]


def decode_error(got: Tensor, x: DecodeArguments, request: int = -1) -> float:
    """Relative error of one request's answer, got [batch, q_heads, dv]."""
    slot = request % x.q.shape[0]
    start, end, length = (int(n[request]) for n in (x.hist_start, x.hist_end, x.seq_len))
    want = paged_reference(
        x.q[request], x.pages, x.block_table[request], (start, end), x.windows, x.tables, x.layout,
        slot=slot, position=length - 1,
    )  # fmt: skip
    return relative_error(got[request], want)


def dense_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [n, q_heads, d] over all of k, v [tokens, kv_heads, d] → [n, q_heads, d] in float64, a KV head at a time."""
    heads, scale = k.shape[1], q.shape[-1] ** -0.5
    parts = []
    for h, part in enumerate(q.double().unflatten(1, (heads, -1)).unbind(1)):
        p = (part @ k[:, h].double().mT * scale).softmax(-1)
        parts.append(p @ v[:, h].double())
    return torch.stack(parts, 1).flatten(1, 2)


def causal_reference(q: Tensor, k: Tensor, v: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of causal attention: q [chunk, q_heads, d] are the last of k, v [tokens, kv_heads, d]."""
    before = k.shape[0] - q.shape[0]
    return torch.cat([dense_reference(q[i : i + 1], k[: before + i + 1], v[: before + i + 1]) for i in rows])
