# SPDX-License-Identifier: Apache-2.0
"""Decode attention with the CUDA C++ kernels: checks, workspace, and the three launches of one call."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from ...errors import OscarError
from ...layout import PageLayout
from ..base import LayerTables, Windows
from .arguments import check_int32, check_pages, check_requests, check_tables, check_windows
from .launch import load
from .spec import DecodeSpec, Params


class Kernels(Protocol):
    """Loaded kernels: on a device (launch.py), or emulated by the tests."""

    spec: DecodeSpec
    blocks: int
    multiprocessors: int

    def launch(self, name: str, grid: tuple[int, int], params: Params) -> None: ...


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise OscarError(f"decode: {message}")


def _check_arguments(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    lengths: tuple[Tensor, ...],
    w: Windows,
    t: LayerTables,
    layout: PageLayout,
) -> None:
    """Shapes, dtypes, devices. Values on the device (lengths, block numbers) are not read: that would synchronise."""
    _require(
        q.ndim == 3 and q.shape[-1] == layout.k_dim, f"q must be [batch, q_heads, {layout.k_dim}], got {tuple(q.shape)}"
    )
    kv = check_pages(_require, pages, layout)
    _require(kv > 0 and q.shape[1] % kv == 0, f"{q.shape[1]} query heads cannot share {kv} KV heads evenly")
    numbers = dict(zip(("hist_start", "hist_end", "seq_len"), lengths, strict=True))
    check_requests(_require, q.shape[0], block_table, numbers)
    check_windows(_require, w, kv, layout, q.dtype)
    integers = [block_table, *lengths, *([] if w.slots is None else [w.slots])]
    check_int32(_require, integers)
    tensors = [q, pages, *integers, w.sink_k, w.sink_v, w.ring_k, w.ring_v, *check_tables(_require, t, kv, layout)]
    for x in tensors:
        _require(x.is_contiguous() and x.device == q.device, "every tensor must be contiguous and on q's device")


def run(
    kernels: Kernels,
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    hist_start: Tensor,
    hist_end: Tensor,
    seq_len: Tensor,
    windows: Windows,
    tables: LayerTables,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """One call with kernels already chosen. Only shapes decide anything here, so a CUDA graph can capture it."""
    spec, layout = kernels.spec, kernels.spec.layout
    batch, kv, device = q.shape[0], pages.shape[1], q.device
    heads = kv * spec.head_blocks
    if out is None:
        out = torch.empty(batch, q.shape[1], layout.v_dim, dtype=q.dtype, device=device)
    _require(
        out.shape == (batch, q.shape[1], layout.v_dim) and out.dtype == q.dtype and out.is_contiguous(),
        "out has the wrong shape or dtype",
    )
    # A window item is a warp's: as many as there are warps, if the windows have as many tiles of 16 tokens.
    tiles = max(1, -(-(windows.sink_k.shape[2] + windows.ring_k.shape[2]) // 16))
    item_tokens = 16 * -(-tiles // max(1, min(tiles, kernels.blocks * spec.warps // (batch * heads))))
    items_a_head = -(-16 * tiles // item_tokens)
    items, slots = batch * heads * items_a_head, kernels.blocks + batch * heads
    partial = torch.empty((slots + items) * spec.heads * layout.v_dim, dtype=torch.float32, device=device)
    lse = torch.empty((slots + items) * spec.heads, dtype=torch.float32, device=device)
    pieces, columns = batch * heads, spec.columns
    query = torch.empty(pieces * layout.k_dim * spec.tiles * 4, dtype=torch.int32, device=device)
    query_sum = torch.empty(pieces * spec.prepare_parts * columns, dtype=torch.float32, device=device)
    query_step = torch.empty(pieces, dtype=torch.float32, device=device)
    query_centre = torch.empty(pieces * spec.heads, dtype=torch.float32, device=device)
    ranges = torch.empty(2 + 2 * batch * heads, dtype=torch.int32, device=device)
    natural = layout.k_dim**-0.5 if scale is None else scale
    log2e = 1 / math.log(2)

    def at(x: Tensor | None) -> int | None:
        return None if x is None else x.data_ptr()

    params = Params(
        at(q),
        at(tables.k_rotation),
        at(tables.k_centre),
        at(tables.v_rotation_t),
        at(tables.v_centre),
        at(pages),
        at(block_table),
        at(hist_start),
        at(hist_end),
        at(seq_len),
        at(windows.slots),
        at(windows.sink_k),
        at(windows.sink_v),
        at(windows.ring_k),
        at(windows.ring_v),
        at(partial),
        at(lse),
        at(query),
        at(query_sum),
        at(query_step),
        at(query_centre),
        at(ranges),
        at(out),
        batch,
        kv,
        block_table.shape[1],
        windows.sink_k.shape[2],
        windows.ring_k.shape[2],
        kernels.blocks,
        items,
        items_a_head,
        item_tokens,
        max(1, round(item_tokens * (layout.k_dim + layout.v_dim) * 2 / layout.page_bytes)),
        spec.opening,
        natural / softcap if softcap else natural * log2e,
        softcap * log2e,
    )
    times = spec.prepare_times if batch * heads * spec.prepare_parts > 4 * kernels.multiprocessors else 1
    kernels.launch(
        "prepare_many" if times > 1 else "prepare_one", (-(-batch // times), heads * spec.prepare_parts + 1), params
    )
    kernels.launch("decode", (kernels.blocks, 1), params)
    # The fewer outputs there are, the more threads each gets.
    size = (
        "one"
        if pieces * spec.heads <= kernels.multiprocessors
        else "some"
        if pieces <= 2 * kernels.multiprocessors
        else "many"
    )
    row_blocks = heads * -(-spec.heads // (1 if size == "one" else spec.finish_rows))
    requests = max(1, min(batch, 3 * kernels.multiprocessors // row_blocks)) if size == "many" else batch
    kernels.launch(f"finish_{size}", (requests, row_blocks), params)
    return out


class CudaDecode:
    """The CUDA C++ implementation of ``base.DecodeKernel``. Keyword arguments override the tuning (see DecodeSpec).

    Checked on one H200 (sm_90), PyTorch 2.11, CUDA 13.0; on no other GPU:

    - fp16 and bf16 against float64 on a ragged batch of 7 (0 to 20,250 tokens): the CHECKS of benchmarks/tune_decode.py
      that --some-checks keeps. Head sizes 64, 128, 256, and keys of 192 with values of 128; 2/2, 3/2 and 4/4 bits; 4, 8
      and 12 query heads a group; large value steps, a soft-cap, no bulk copies.
    - bf16, one request of each timed batch against float64: 1 to 32 requests of 98,304 tokens, 128 of 8,192; 2/1 and
      3/3 bits too.
    - 1,048,576 tokens of one KV head, fp16: an earlier version only.

    The rest (other head sizes, bits and groups, other architectures) is emulated and compiled in tests/kernels.
    """

    def __init__(self, **tuning: object) -> None:
        self.tuning = tuning

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
        _check_arguments(q, pages, block_table, (hist_start, hist_end, seq_len), windows, tables, layout)
        _require(q.is_cuda, f"the CUDA kernels need tensors on a CUDA device, q is on {q.device}")
        with torch.cuda.device(q.device):
            capability = torch.cuda.get_device_capability(q.device)
            spec = DecodeSpec.choose(
                layout, q.shape[1] // pages.shape[1], q.dtype, capability, softcap > 0, **self.tuning
            )
            kernels = load(spec, q.device.index)
            return run(
                kernels,
                q,
                pages,
                block_table,
                hist_start,
                hist_end,
                seq_len,
                windows,
                tables,
                scale=scale,
                softcap=softcap,
                out=out,
            )
