# SPDX-License-Identifier: Apache-2.0
"""Attention of a whole text over rows and their quantised copies, under a rival's windows.

Keys and values may leave the window at different positions, so there is one softmax over columns whose key and whose
value each come from one copy or the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..emulation import block_rows
from .base import Windows

_SHORT = 128
"""Queries a block at most: the columns near the diagonal are multiplied by both copies."""


def first_exact(i: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """For the queries at positions i: from which position on keys and values are read as they came."""
    newest = i - windows.recent + 1
    if windows.key_block:
        return i // windows.key_block * windows.key_block, newest
    return newest, newest


def attend(
    q: Tensor,
    rows: tuple[Tensor, Tensor],
    hats: tuple[Tensor, Tensor],
    windows: Windows,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """q [B, Hq, n, d]; rows (k, v) and hats (k̂, v̂) [B, Hkv, n, d] → [B, n, Hq, v_dim] in q's dtype.

    Arithmetic is in the rows' dtype.
    """
    (k, v), (k_hat, v_hat) = rows, hats
    n, group = q.shape[2], q.shape[1] // k.shape[1]
    grouped = q.to(k.dtype).unflatten(1, (-1, group)) * scaling  # [B, Hkv, G, n, d]
    out = torch.empty(*grouped.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    step = min(_SHORT, block_rows(q, n))
    for start in range(0, n, step):
        stop = min(n, start + step)
        i = torch.arange(start, stop, device=q.device)[:, None]
        k_from, v_from = first_exact(i, windows)
        sink = min(windows.sink, stop)
        # Columns: the sink, exact; up to ``near``, codes for every query of this block; then some of both.
        near = max(sink, min(int(k_from.min()), int(v_from.min()), start))
        part = grouped[..., start:stop, :].flatten(2, 3)

        def scores(keys: Tensor, part: Tensor = part, m: int = stop - start) -> Tensor:
            return (part @ keys.mT).unflatten(2, (group, m))

        t = torch.arange(near, stop, device=q.device)
        old = scores(k_hat[:, :, near:stop])
        last = torch.where(t < k_from, old, scores(k[:, :, near:stop]))
        logits = torch.cat([scores(k[:, :, :sink]), scores(k_hat[:, :, sink:near]), last], -1)
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        # Before the sink is full, its own columns reach beyond the query.
        columns = torch.cat([torch.arange(near, device=q.device), t])
        p = logits.masked_fill_(columns > i, float("-inf")).softmax(-1)
        tail, coded = p[..., near:], t < v_from

        def read(p: Tensor, values: Tensor) -> Tensor:
            return (p.flatten(2, 3) @ values).unflatten(2, (group, -1))

        out[..., start:stop, :] = (
            read(p[..., :sink], v[:, :, :sink])
            + read(p[..., sink:near], v_hat[:, :, sink:near])
            + read(tail * coded, v_hat[:, :, near:stop])
            + read(tail * ~coded, v[:, :, near:stop])
        )
    return out.flatten(1, 2).transpose(1, 2).contiguous()
