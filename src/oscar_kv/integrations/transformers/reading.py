# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens to one layer's storage, by the reference or by kernels; both store the new tokens too."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...cache import MixedLayer
from ...cache.passes import Pass
from ...cache.pool import upload
from ...kernels import dense, prefix
from ...kernels.base import KernelSet, LayerTables
from ...kernels.torch_ref import attend_row

_Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Reading:
    """How a layer attends. softcap 0: none."""

    tables: LayerTables
    scale: float
    softcap: float


def by_reference(
    store: MixedLayer, query: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, starts: list[int],
    ends: list[list[int]], how: Reading,
) -> Tensor:  # fmt: skip
    """query [rows, q_heads, n, d], k, v [rows, kv_heads, n, d] → [rows, n, q_heads, v_dim]; padding gives zeros.

    ends: where the history of each row's valid queries ends.
    """
    # Windows are read before the ring moves on, pages after those that the chunk completes are there.
    raw: list[tuple[_Rows, _Rows] | None] = []
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not end:
            raw.append(None)
            continue
        window = store.raw(row, min(start, end[0]), start)
        if start + len(end) - store.ring > end[0]:  # the chunk overwrites them
            window = window[0].clone(), window[1].clone()
        raw.append((store.raw(row, 0, min(store.sink, start)), window))
    store.append(k, v, valid)
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], v.shape[-1])
    for row, part in enumerate(raw):
        if part is None:
            continue
        pick = slice(None) if valid is None else valid[row].nonzero()[:, 0]
        new = k[row][:, pick], v[row][:, pick]
        o = _row(store, row, query[row][:, pick], *part, new, starts[row], ends[row], how)
        out[row, pick] = o.transpose(0, 1).to(out.dtype)
    return out


def _row(
    store: MixedLayer, row: int, q: Tensor, sink: _Rows, window: _Rows, new: _Rows, start: int, ends: list[int],
    how: Reading,
) -> Tensor:  # fmt: skip
    last = ends[-1]
    pages, first = store.pages(row, store.sink, last) if last > store.sink else (store.pool.pages[:0], 0)
    return attend_row(
        q, sink, pages, first, window, new, position=start, hist_start=store.sink, hist_end=ends, tables=how.tables,
        layout=store.codec.layout, scale=how.scale, softcap=how.softcap,
    )  # fmt: skip


def by_kernels(
    store: MixedLayer, kernels: KernelSet, query: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, step: Pass,
    how: Reading,
) -> Tensor:  # fmt: skip
    """The same through a kernel set: rows with few tokens by the decode kernel, after the store; others tile by tile.

    A long chunk reads pages that are whole before it and windows that the store would overwrite: it goes first.
    """
    rows, q_heads, n, _ = query.shape
    asked, query = query.dtype, query.to(store.dtype)  # autocast may hand over another dtype
    whole = step.reads is not None and step.reads.picks is None
    out = query.new_empty(0) if whole else query.new_zeros(rows, n, q_heads, v.shape[-1])
    for row in step.long:
        pick = slice(None)
        if step.columns is not None and len(step.columns[row]) < n:
            pick = upload(step.columns[row], torch.int64, query.device)  # type: ignore[assignment]
        q, new = query[row][:, pick], (k[row][:, pick], v[row][:, pick])
        out[row, pick] = _long(store, kernels, row, q, new, step.starts[row], how).to(out.dtype)
    store.append(k, v, valid, step)
    reads = step.reads
    if reads is None:
        return out.to(asked)
    flat = query.transpose(1, 2).reshape(rows * n, q_heads, -1)
    flat = (flat if reads.picks is None else flat.index_select(0, reads.picks)).contiguous()
    windows = store.windows
    if reads.slots is not None:
        windows = replace(windows, slots=reads.slots)
    table = store.block_table()
    if reads.slots is not None:
        table = table.index_select(0, reads.slots)
    o = kernels.decode(
        flat, store.pool.pages, table, reads.hist_start, reads.hist_end, reads.seq_len, windows, how.tables,
        store.codec.layout, scale=how.scale, softcap=how.softcap,
    )  # fmt: skip
    if reads.picks is None:
        return o.view(rows, n, q_heads, -1).to(asked)
    out.view(rows * n, q_heads, -1).index_copy_(0, reads.picks, o)
    return out.to(asked)


def _long(
    store: MixedLayer, kernels: KernelSet, row: int, q: Tensor, new: _Rows, start: int, how: Reading
) -> Tensor:  # fmt: skip
    """A row's long chunk q [q_heads, n, d] → [n, q_heads, v_dim]; sees the window before its first token and itself."""
    end = store.history_end(start)
    sink, window = store.raw(row, 0, min(store.sink, start)), store.raw(row, min(start, end), start)
    if how.softcap:  # q·μ_K belongs inside the cap, where a dense kernel does not let it
        return _row(store, row, q, sink, window, new, start, [end] * q.shape[1], how).transpose(0, 1)
    layout = store.codec.layout
    kernel = dense.choose(q.shape[0], new[0].shape[0], layout.k_dim, layout.v_dim, q.dtype, q.device)
    history = None
    if end > store.sink:
        columns = slice(store.sink // 64, -(-end // 64))
        history = prefix.History(store.pool.pages, store.block_table()[row, columns].contiguous(), store.sink, end)
    first = [x.transpose(0, 1) for x in (q, *new)]
    raw = tuple(torch.cat([a, b], 1).transpose(0, 1) for a, b in zip(sink, window, strict=True))
    return prefix.attend_prefix(
        first[0], (first[1], first[2]), (raw[0], raw[1]), history, how.tables, layout, kernels.dequantise, kernel,
        scale=how.scale,
    )  # fmt: skip
