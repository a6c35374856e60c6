# SPDX-License-Identifier: Apache-2.0
"""Our attention of a chunk over sink, pages and ring of a prefix, and causally over itself."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ...kernels.base import LayerTables, Windows
from ...kernels.dense import Dense, choose, serving
from ...kernels.prefix import History, attend_prefix
from ...layout import PAGE
from ..inputs import SPREAD, block_table, fill_pages_, model_dtype, queries, random_tables, random_windows
from ..reference import paged_reference, relative_error
from ..shapes import RECENT, RING, SINK, PrefillShape, Shape
from ..timing import time_calls
from .base import Contender
from .dense import peak_extra, sampled
from .fa3 import load, why_no_fa3
from .oscar import our_kernels, why_not

REPEATED = ", KV heads repeated"
OTHER_REPLAYS = 5


class Inputs(NamedTuple):
    """One request's chunk and prefix. q, k, v [chunk, heads, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    pages: Tensor
    blocks: Tensor
    windows: Windows
    tables: LayerTables


class OscarPrefill(Contender):
    """``kernels.prefix`` with a kernel set's de-quantised tiles and the dense kernel that users get here.

    That is the first of a fixed order, even where another is faster; times with the others are in other_dense_ms.
    """

    kernels: ClassVar[str]
    limit = 0.05
    """Tiles are rounded to BF16, as a BF16 cache is when it is written: that alone is 0.02 on these inputs."""

    def missing(self) -> str | None:
        return why_not(self.options.device, self.kernels)

    def bytes(self, shape: Shape) -> int:
        return 0  # arithmetic decides here

    def fields(self) -> dict[str, Any]:
        return {}

    def prepare(self, shape: Shape) -> None:
        self.shape, device = cast(PrefillShape, shape), self.options.device
        s, n = self.shape, -(-self.shape.prefix // PAGE)
        if why_no_fa3(self.options.fa3) is None:
            load(self.options.fa3)  # so that it is among those to choose from

        def raw() -> Tensor:
            return torch.randn(s.chunk, s.kv_heads, s.head_dim, device=device, dtype=model_dtype(device)).mul_(SPREAD)

        def made() -> Inputs:
            pages = torch.empty(n, s.kv_heads, s.layout.page_bytes, dtype=torch.uint8, device=device)
            return Inputs(
                queries(s, s.chunk, device=device), raw(), raw(), fill_pages_(pages, s.layout),
                block_table(1, n, device)[0], random_windows(s, device), random_tables(s, device),
            )  # fmt: skip

        self.inputs = [made() for _ in range(2)]
        self.dequantise = our_kernels(device, self.kernels).dequantise
        heads = s.q_heads, s.kv_heads, s.head_dim, s.head_dim, model_dtype(device), torch.device(device)
        self.dense = choose(*heads)
        others = [d for d in serving(*heads) if d.name not in (self.dense.name, "plain")] if self.options.on_gpu else []
        # One that serves as it is needs no second time with its KV heads repeated.
        names = {d.name for d in others} | {self.dense.name}
        self.others = [d for d in others if d.name.removesuffix(REPEATED) == d.name
                       or d.name.removesuffix(REPEATED) not in names]  # fmt: skip
        self.recent = torch.arange(s.prefix - RECENT, s.prefix, device=device) % RING

    def call(self, x: Inputs, dense: Dense | None = None) -> Tensor:
        """The whole operation: raw rows are gathered from sink and ring as a cache does."""
        w, layout, end = x.windows, self.shape.layout, self.shape.prefix - RECENT
        k, v = (
            torch.cat([sink[0], ring[0][:, self.recent]], 1).transpose(0, 1)
            for sink, ring in ((w.sink_k, w.ring_k), (w.sink_v, w.ring_v))
        )
        history = History(x.pages, x.blocks[SINK // PAGE : -(-end // PAGE)], SINK, end)
        return attend_prefix(
            x.q, (x.k, x.v), (k, v), history, x.tables, layout, self.dequantise, dense or self.dense,
            scale=layout.k_dim**-0.5,
        )  # fmt: skip

    def measure(self, way: str) -> dict[str, Any]:
        calls = [partial(self.call, x) for x in self.inputs]
        calls[0]()  # compiles, prepares
        extra = peak_extra(calls[0], self.options.device)
        found = self.timed(calls, self._error)
        other = {d.name: self._with(d) for d in self.others}
        notes = f"tiles given to {self.dense.name}, the first of the fixed order that serves"
        return {**found, "peak_extra_bytes": extra, "dense": self.dense.name, "other_dense_ms": other, "notes": notes}

    def _with(self, dense: Dense) -> float | str:
        """ms with another dense kernel, or why there is none: that may not cost the row."""
        try:
            return time_calls([partial(self.call, x, dense) for x in self.inputs], self.options.device, OTHER_REPLAYS)
        except RuntimeError as error:
            return f"{type(error).__name__}: {str(error)[:120]}"

    def _error(self, out: Tensor) -> float:
        x, s, rows = self.inputs[0], self.shape, sampled(self.shape.chunk)
        k, v = x.k.transpose(0, 1), x.v.transpose(0, 1)
        want = [
            paged_reference(
                x.q[i], x.pages, x.blocks, (SINK, s.prefix - RECENT), x.windows, x.tables, s.layout, slot=0,
                position=s.prefix + i, raw=(k[:, : i + 1], v[:, : i + 1]),
            )
            for i in rows
        ]  # fmt: skip
        return relative_error(out[rows], torch.stack(want))


class CudaPrefill(OscarPrefill):
    kernels = "cuda"


class TritonPrefill(OscarPrefill):
    kernels = "triton"


class TorchPrefill(OscarPrefill):
    kernels = "torch"
