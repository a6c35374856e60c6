# SPDX-License-Identifier: Apache-2.0
"""A chunk of new tokens over a packed prefix: tiles of constant size are de-quantised and given to a dense kernel.

Nothing grows with the prefix, and beside the answer nothing with the chunk: its queries meet the history some thousand
at a time (turning pages into tiles again each time costs a hundredth of the attention over them). History stays in the
rotated basis: queries are turned by R_K once, q·μ_K is the same for all of a query's history and so only shifts its
log-sum-exp, and the merged history is turned back by R_Vᵀ once, with μ_V added. A soft-cap would have to know q·μ_K
inside the kernel: such models use ``torch_ref.attend_row``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OscarError
from ..layout import PAGE, PageLayout
from .base import DequantiseKernel, LayerTables
from .dense import Dense

TILE = 32768
"""Tokens of history de-quantised at a time, 128 MB for 8 KV heads of 128 in BF16: long, because every further tile is
one more pass over the chunk's outputs."""
QUERIES = 8192
"""Queries that meet the history at a time: their turned copy, fp32 sum and a tile's answer take 256 MB for 32 heads of
128 in BF16. Enough thread blocks for any GPU."""
_ROWS = 1024
"""Queries merged at a time, so that the fp32 temporaries stay in the cache of a GPU."""

Raw = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class History:
    """Positions start … end−1 of one request. blocks int32 [p]: pool blocks of pages start // 64 … ; pool uint8."""

    pool: Tensor
    blocks: Tensor
    start: int
    end: int


class Workspace:
    """Room for one de-quantised tile, made once a device, dtype and shape, and used again by every layer."""

    _rooms: dict[tuple[object, ...], Raw] = {}  # noqa: RUF012

    @classmethod
    def get(cls, tokens: int, heads: int, layout: PageLayout, dtype: torch.dtype, device: torch.device) -> Raw:
        """k [tokens, heads, k_dim] and v [tokens, heads, v_dim], uninitialised."""
        key = heads, layout.k_dim, layout.v_dim, dtype, str(device)
        room = cls._rooms.get(key)
        if room is None or len(room[0]) < tokens:
            with torch.inference_mode(False):
                room = (
                    torch.empty(tokens, heads, layout.k_dim, dtype=dtype, device=device),
                    torch.empty(tokens, heads, layout.v_dim, dtype=dtype, device=device),
                )
            cls._rooms[key] = room
        return room[0][:tokens], room[1][:tokens]

    @classmethod
    def clear(cls) -> None:
        cls._rooms.clear()


def _per_head(x: Tensor, matrix: Tensor, heads: int) -> Tensor:
    """x [n, q_heads, d] times its KV head's matrix [heads, d, e] → [n, q_heads, e], in the matrix's dtype."""
    n, q_heads, d = x.shape
    rows = x.to(matrix.dtype).view(n, heads, q_heads // heads, d).permute(1, 0, 2, 3).reshape(heads, -1, d)
    return (rows @ matrix).view(heads, n, q_heads // heads, -1).transpose(0, 1).reshape(n, q_heads, -1)


def _slices(n: int) -> list[slice]:
    return [slice(at, min(at + _ROWS, n)) for at in range(0, n, _ROWS)]


def _merge(total: Tensor, lse: Tensor, out: Tensor, lse_out: Tensor, first: bool) -> None:
    """Take another part of the softmax into (total fp32, lse) in place; the first one replaces what is there."""
    if first:
        total.copy_(out)
        lse.copy_(lse_out)
        return
    share = torch.sigmoid(lse_out - lse)[..., None]
    for part in _slices(len(total)):
        total[part].lerp_(out[part].to(total.dtype), share[part])
    lse.copy_(torch.logaddexp(lse, lse_out))


def attend_history(
    q: Tensor, history: History, tables: LayerTables, layout: PageLayout, dequantise: DequantiseKernel, dense: Dense, *,
    scale: float, tile: int = TILE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [n, q_heads, k_dim] over packed history alone: its mean value [n, q_heads, v_dim], still centred and rotated,
    in fp32, and the log-sum-exp [n, q_heads] with q·μ_K in it.
    """
    heads, acc = history.pool.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32
    n, q_heads, _ = q.shape
    turned = torch.empty_like(q, memory_format=torch.contiguous_format)
    bias = torch.empty(n, q_heads, dtype=acc, device=q.device)
    centre = tables.k_centre.to(acc).repeat_interleave(q_heads // heads, 0)
    for part in _slices(n):
        bias[part] = (q[part].to(acc) * centre).sum(-1)
        turned[part] = q[part] if tables.k_rotation is None else _per_head(q[part], tables.k_rotation.to(acc), heads)
    total = torch.empty(n, q_heads, layout.v_dim, dtype=acc, device=q.device)
    lse = torch.empty(n, q_heads, dtype=acc, device=q.device)
    first, pages = history.start // PAGE * PAGE, tile // PAGE
    k_room, v_room = Workspace.get(min(pages, len(history.blocks)) * PAGE, heads, layout, q.dtype, q.device)
    for at in range(0, len(history.blocks), pages):
        blocks = history.blocks[at : at + pages]
        k, v = k_room[: len(blocks) * PAGE], v_room[: len(blocks) * PAGE]
        dequantise(history.pool, blocks[None], layout, k[None], v[None])
        begin = first + at * PAGE
        inside = slice(max(history.start - begin, 0), min(history.end - begin, len(k)))
        # No name for the tile's answer: it would live on beside the next one.
        _merge(total, lse, *dense.call(turned, k[inside], v[inside], scale, False), first=at == 0)
    return total, lse.add_(bias, alpha=scale)


def attend_prefix(
    q: Tensor, chunk: Raw, raw: Raw, history: History | None, tables: LayerTables, layout: PageLayout,
    dequantise: DequantiseKernel, dense: Dense, *, scale: float, tile: int = TILE,
) -> Tensor:  # fmt: skip
    """Attention of one request's n new queries, causal among themselves, to all that came before.

    q [n, q_heads, k_dim]; chunk: the new k, v [n, kv_heads, d], post-RoPE; raw: sink and window rows [m, kv_heads, d],
    seen by every query; history: packed positions, seen by every query. All in q's dtype → [n, q_heads, v_dim].
    Raises OscarError for a tile that is not whole pages.
    """
    if tile < PAGE or tile % PAGE:
        raise OscarError(f"a tile is whole pages of {PAGE} tokens, got {tile}")
    out, lse = dense.call(q, *chunk, scale, True)
    if history is not None and history.end <= history.start:
        history = None
    if history is None and not len(raw[0]):
        return out
    for at in range(0, len(q), QUERIES):
        some = slice(at, min(at + QUERIES, len(q)))
        parts = []
        if history is not None:
            part = attend_history(q[some], history, tables, layout, dequantise, dense, scale=scale, tile=tile)
            _turn_back(part[0], tables)
            parts.append(part)
        if len(raw[0]):
            parts.append(dense.call(q[some], *raw, scale, False))
        _blend(out[some], lse[some], parts)
    return out


def _turn_back(total: Tensor, tables: LayerTables) -> None:
    """Rotated, centred means [n, q_heads, v_dim] as values, in place."""
    heads = tables.v_centre.shape[0]
    centre = tables.v_centre.to(total.dtype).repeat_interleave(total.shape[1] // heads, 0)
    turn = None if tables.v_rotation_t is None else tables.v_rotation_t.to(total.dtype)
    for some in _slices(len(total)):
        x = total[some] if turn is None else _per_head(total[some], turn, heads)
        total[some] = x + centre


def _blend(out: Tensor, lse: Tensor, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Take the other parts of one softmax into ``out``, in place."""
    weights = torch.stack([lse, *(x for _, x in parts)]).softmax(0)[..., None]
    for some in _slices(len(out)):
        mixed = weights[0, some] * out[some]
        for weight, (x, _) in zip(weights[1:], parts, strict=True):
            mixed.addcmul_(weight[some], x[some].to(mixed.dtype))
        out[some] = mixed
