# SPDX-License-Identifier: Apache-2.0
"""Caches of the whole-model loop, filled with distinct random data in every layer, and read by one kernel each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.base import LayerTables, StoreTables
from ...layout import PAGE
from ..inputs import SPREAD, block_table, fill_pages_, model_dtype, random_codec, random_windows
from ..reference import dense_reference, paged_reference, relative_error
from ..shapes import RECENT, RING, SINK, ModelShape
from .base import Options
from .fa3 import forward, load
from .oscar import our_kernels

SPARE = 2 * PAGE
"""Positions beyond the context that the timed steps write to."""
CODECS = 4
"""Distinct codecs; the layers take them in turn, each with a copy of its own on the device."""


class Cache(ABC):
    """position int32 [batch] is that of the token now decoded; it starts at context − 1."""

    table_bytes = 0
    """Bytes that do not grow with the context: rotations and centres, counted as part of the model."""

    def __init__(self, shape: ModelShape, options: Options) -> None:
        self.shape, self.options, self.device, self.way = shape, options, options.device, "default"
        self.pages = -(-(shape.context + SPARE) // PAGE)
        self.position = torch.empty(shape.batch, dtype=torch.int32, device=self.device)
        self.rewind()

    def rewind(self) -> None:
        """Back to the first of the timed steps."""
        self.position.fill_(self.shape.context - 1)

    @property
    @abstractmethod
    def request_bytes(self) -> int:
        """Bytes of one request."""

    @abstractmethod
    def fill(self) -> None:
        """Allocate and fill."""

    def begin_step(self) -> None:  # noqa: B027  (not every cache has such work)
        """Work once a step, for all layers."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store one new token a request, then attend: q [batch, q_heads, d], k, v [batch, kv_heads, d]."""

    @abstractmethod
    def error(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
        """Relative error of the last request's answer of the step just made."""

    def written_error(self) -> float:
        """A measure of what the steps wrote into the cache being wrong; 0 where attention's own check covers it."""
        return 0.0


class OscarCache(Cache):
    """Pages of a pool a layer, sink and ring; page writes included."""

    def __init__(self, shape: ModelShape, options: Options, kernels: str) -> None:
        super().__init__(shape, options)
        self.kernels = our_kernels(options.device, kernels)

    @property
    def request_bytes(self) -> int:
        s, element = self.shape, model_dtype(self.device).itemsize
        windows = 2 * s.head_dim * element * (SINK + RING)
        return s.layers * s.kv_heads * (self.pages * s.layout.page_bytes + windows)

    def fill(self) -> None:
        s, device = self.shape, self.device
        codecs = [random_codec(s, shaped=True, seed=i) for i in range(min(CODECS, s.layers))]
        self.codecs = [codecs[i % len(codecs)] for i in range(s.layers)]
        self.reads = [LayerTables.of(c.k, c.v, device) for c in self.codecs]
        self.writes = [StoreTables.of(c, device) for c in self.codecs]
        held = [x for t in (*self.reads, *self.writes) for x in vars(t).values() if isinstance(x, Tensor)]
        self.table_bytes = sum(-(-x.nbytes // 512) * 512 for x in held)  # the allocator's granularity
        self.table = block_table(s.batch, self.pages, device)
        self.pools, self.windows = [], []
        for _ in range(s.layers):
            size = (s.batch * self.pages, s.kv_heads, s.layout.page_bytes)
            self.pools.append(fill_pages_(torch.empty(size, dtype=torch.uint8, device=device), s.layout))
            self.windows.append(random_windows(s, device))
        self.ones = torch.ones(s.batch, dtype=torch.int32, device=device)
        self.start = self.ones * SINK

    def begin_step(self) -> None:
        self.length = self.position + 1
        self.end = self.length - RECENT

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages, windows, layout = self.pools[layer], self.windows[layer], self.shape.layout
        self.kernels.store(
            k[:, :, None], v[:, :, None], pages, self.table, self.position, self.ones, windows, self.writes[layer],
            layout,
        )  # fmt: skip
        return self.kernels.decode(
            q.contiguous(), pages, self.table, self.start, self.end, self.length, windows, self.reads[layer], layout
        )

    def error(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
        last, length = q.shape[0] - 1, self.shape.context
        want = paged_reference(
            q[last], self.pools[layer], self.table[last], (SINK, length - RECENT), self.windows[layer],
            self.reads[layer], self.shape.layout, slot=last, position=length - 1,
        )  # fmt: skip
        return relative_error(out[last], want)

    def written_error(self) -> float:
        """How far the page just written is from its rows, in the last layer; 0 if no farther than the oracle's page.

        The rows are still in the ring. Codes are not compared: a tie may round either way and change the rest of a row.
        """
        page = int(self.position[-1]) // PAGE - 1
        w, rows = self.windows[-1], torch.arange(page * PAGE, (page + 1) * PAGE, device=self.device) % RING
        codec, k, v = self.codecs[-1], w.ring_k[-1:, :, rows].float().cpu(), w.ring_v[-1:, :, rows].float().cpu()
        got = codec.decode(self.pools[-1][self.table[-1, page].long()].cpu()[None])
        want = codec.decode(codec.encode(k, v))
        pairs = [(relative_error(a, x), relative_error(b, x)) for a, b, x in zip(got, want, (k, v), strict=True)]
        return 0.0 if all(a <= 1.05 * b for a, b in pairs) else max(a for a, _ in pairs)


class DenseCache(Cache):
    """k, v [batch, kv_heads, positions, d] in the model's dtype."""

    @property
    def request_bytes(self) -> int:
        s = self.shape
        return s.layers * s.kv_heads * 2 * s.head_dim * self.pages * PAGE * model_dtype(self.device).itemsize

    def fill(self) -> None:
        s = self.shape
        size = (2, s.batch, s.kv_heads, self.pages * PAGE, s.head_dim)
        self.kv = [
            torch.empty(size, device=self.device, dtype=model_dtype(self.device)).normal_(std=SPREAD)
            for _ in range(s.layers)
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = int(self.position[0])
        self.kv[layer][0][:, :, n], self.kv[layer][1][:, :, n] = k, v
        seen = self.kv[layer][..., : n + 1, :]
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], seen[0], seen[1], enable_gqa=True)[
            :, :, 0
        ]

    def error(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
        rows = self.kv[layer][:, -1, :, : self.shape.context].transpose(1, 2)
        return relative_error(out[-1], dense_reference(q[-1:], rows[0], rows[1])[0])


class Fa3Cache(Cache):
    """Pages of 64 tokens in BF16, [pages, 64, kv_heads, d] a layer, addressed through a block table."""

    WAYS: ClassVar[list[str]] = ["ragged, planned once a step", "batched, splits 16"]

    @property
    def request_bytes(self) -> int:
        return self.shape.layers * self.shape.kv_heads * self.shape.raw_row * self.pages * PAGE

    def fill(self) -> None:
        s = self.shape
        self.ops: Any = load(self.options.fa3)
        self.table = block_table(s.batch, self.pages, self.device)
        size = (2, s.batch * self.pages * PAGE, s.kv_heads, s.head_dim)
        self.kv = [
            torch.empty(size, device=self.device, dtype=model_dtype(self.device)).normal_(std=SPREAD)
            for _ in range(s.layers)
        ]
        self.starts = torch.arange(s.batch + 1, dtype=torch.int32, device=self.device)

    def begin_step(self) -> None:
        s, place = self.shape, self.position.long()
        self.length = self.position + 1
        self.slots = self.table.gather(1, (place // PAGE)[:, None])[:, 0].long() * PAGE + place % PAGE
        self.longest, self.plan = self.pages * PAGE, None
        if self.ops is not None and self.way == self.WAYS[0]:
            self.plan = self.ops.get_scheduler_metadata(
                *(s.batch, 1, self.longest, s.q_heads, s.kv_heads, s.head_dim, s.head_dim, model_dtype(self.device)),
                *(self.length, self.starts, None, None, None, None, PAGE, 0, True, -1, -1, False, 0, None, 0),
            )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, kv = self.shape, self.kv[layer]
        kv[0].index_copy_(0, self.slots, k)
        kv[1].index_copy_(0, self.slots, v)
        pages = kv.view(2, -1, PAGE, s.kv_heads, s.head_dim)
        ragged = self.plan is not None
        if self.ops is None:
            from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

            return flash_attn_with_kvcache(
                q[:, None], pages[0], pages[1], cache_seqlens=self.length, page_table=self.table, causal=True
            )[:, 0]
        out = forward(
            self.ops, q if ragged else q[:, None], pages[0], pages[1], None, splits=0 if ragged else 16,
            table=self.table, used=self.length, starts=self.starts if ragged else None, plan=self.plan,
            longest=(1, self.longest) if ragged else None,
        )[0]  # fmt: skip
        return out if ragged else out[:, 0]

    def error(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
        blocks = self.table[-1].long()
        rows = self.kv[layer].view(2, -1, PAGE, *k.shape[1:])[:, blocks].flatten(1, 2)[:, : self.shape.context]
        return relative_error(out[-1], dense_reference(q[-1:], rows[0], rows[1])[0])
