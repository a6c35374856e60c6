# SPDX-License-Identifier: Apache-2.0
"""A whole decode step in one CUDA graph, random weights: our store and decode, or a BF16 cache in the same loop."""

from __future__ import annotations

import gc
import statistics
import time
from abc import abstractmethod
from contextlib import suppress
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import OscarError
from ..qwen import EPS, Block, Pieces, block_forward, rope_table
from ..shapes import ModelShape, Shape
from .base import Contender
from .caches import Cache, DenseCache, Fa3Cache, OscarCache
from .fa3 import why_no_fa3
from .oscar import why_not

STEPS = 64
"""Steps of one timing: as many as a page has tokens, so that each request writes one page."""
TIMINGS = 4
"""Timings, of which the first warms up."""
RESERVE = 3 << 30
"""Bytes left free when the largest batch is sought: activations, workspaces, the graph's own pool."""


class DecodeModel(Contender):
    """Embedding, layers, head and greedy choice; positions and tokens stay on the device."""

    @abstractmethod
    def cache(self, shape: ModelShape) -> Cache:
        """An empty cache that knows its size a request."""

    def bytes(self, shape: Shape) -> int:
        return 0  # said by the rows: weights and cache

    def prepare(self, shape: Shape) -> None:
        s, device = cast(ModelShape, shape), self.options.device
        self.blocks = [Block.random(s, s.hidden, s.mlp, device) for _ in range(s.layers)]
        dtype = self.blocks[0].out.dtype
        self.embedding = torch.randn(s.vocab, s.hidden, device=device, dtype=dtype)
        self.head = torch.randn(s.vocab, s.hidden, device=device, dtype=dtype).mul_(s.hidden**-0.5)
        self.norm = torch.ones(s.hidden, device=device, dtype=dtype)
        self.turns = rope_table(s.context + 2 * STEPS, s.head_dim, device)
        self.pieces = Pieces.compiled() if self.options.compiled else Pieces()
        self.kv, self.shape = self._fitting(s)
        self.tokens = torch.randint(s.vocab, (self.shape.batch,), device=device)

    def _fitting(self, s: ModelShape) -> tuple[Cache, ModelShape]:
        """The cache of the given batch, or of the largest that fits."""
        if s.batch:
            return self._filled(s), s
        if not self.options.on_gpu:
            raise OscarError("--batch 0 (the largest that fits) needs a CUDA device; name a batch")
        one = self.cache(ModelShape(**{**s.row(), "batch": 1})).request_bytes
        batch = (torch.cuda.mem_get_info()[0] - RESERVE) // one
        while batch > 0:
            now = ModelShape(**{**s.row(), "batch": batch})
            with suppress(torch.cuda.OutOfMemoryError):
                return self._filled(now), now
            gc.collect()  # only now is the error gone, and with it what it held
            torch.cuda.empty_cache()
            batch -= 1
        raise OscarError(f"not one request of {s.context:,} tokens fits beside the weights")

    def _filled(self, s: ModelShape) -> Cache:
        before = torch.cuda.memory_allocated() if self.options.on_gpu else 0
        made = self.cache(s)
        made.fill()
        held = torch.cuda.memory_allocated() - before - made.table_bytes if self.options.on_gpu else made.request_bytes
        self.cache_bytes = held if self.options.on_gpu else held * s.batch
        return made

    def step(self, probe: dict[int, list[Tensor]] | None = None) -> None:
        """One token a request. probe: layers whose q, k, v and answer are kept."""
        kv = self.kv
        kv.begin_step()
        turn = self.turns[kv.position]
        x = self.embedding[self.tokens]
        for i, block in enumerate(self.blocks):

            def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = i) -> Tensor:
                out = kv.attend(layer, q, k, v)
                if probe is not None and layer in probe:
                    probe[layer] = [q, k, v, out]
                return out

            x = block_forward(x, block, self.shape, turn, attend, self.pieces)
        logits = F.linear(F.rms_norm(x, x.shape[-1:], self.norm, EPS), self.head)
        torch.argmax(logits, -1, out=self.tokens)
        kv.position.add_(1)

    def _check(self) -> float:
        """Largest error of the first and the last layer's attention over a step, against float64."""
        probe: dict[int, list[Tensor]] = {0: [], len(self.blocks) - 1: []}
        self.kv.rewind()
        self.step(probe)
        return max(self.kv.error(layer, *seen) for layer, seen in probe.items())

    @torch.no_grad()
    def measure(self, way: str) -> dict[str, Any]:
        self.kv.way = way
        error = self._check()
        if not self.options.on_gpu:
            began = time.perf_counter()
            self.step()
            return self._row(1e3 * (time.perf_counter() - began), error)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.kv.rewind()
            self.step()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.step()
            times = []
            for _ in range(TIMINGS):
                self.kv.rewind()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(stream)
                for _ in range(STEPS):
                    graph.replay()
                end.record(stream)
                end.synchronize()
                times.append(start.elapsed_time(end) / STEPS)
        torch.cuda.current_stream().wait_stream(stream)
        return self._row(statistics.median(times[1:]), max(error, self.kv.written_error()))

    def _row(self, ms: float, error: float) -> dict[str, Any]:
        s = self.shape
        return {
            "ms": ms, "error": error, "batch": s.batch, "tokens_per_s": 1e3 * s.batch / ms,
            "cache_bytes": self.cache_bytes, "cache_bytes_per_token": self.cache_bytes / s.batch / s.context,
            "weight_bytes": s.weights * self.head.element_size(), "compiled_pieces": self.options.compiled,
        }  # fmt: skip


class OscarModel(DecodeModel):
    """Our pages: the store and the decode kernel in every layer, values turned back at run time."""

    kernels: ClassVar[str]

    def missing(self) -> str | None:
        return why_not(self.options.device, self.kernels)

    def fields(self) -> dict[str, Any]:
        return {}

    def cache(self, shape: ModelShape) -> Cache:
        return OscarCache(shape, self.options, self.kernels)


class CudaModel(OscarModel):
    kernels = "cuda"


class TritonModel(OscarModel):
    kernels = "triton"


class TorchModel(OscarModel):
    kernels = "torch"


class Fa3Model(DecodeModel):
    """A paged BF16 cache read by FlashAttention-3."""

    def missing(self) -> str | None:
        return why_no_fa3(self.options.fa3)

    def ways(self, shape: Shape) -> list[str]:
        return Fa3Cache.WAYS

    def cache(self, shape: ModelShape) -> Cache:
        return Fa3Cache(shape, self.options)


class SdpaModel(DecodeModel):
    """A contiguous cache read by PyTorch's attention, for the CPU; on a GPU it would read the whole buffer masked."""

    def missing(self) -> str | None:
        return "it is for the CPU" if self.options.on_gpu else None

    def cache(self, shape: ModelShape) -> Cache:
        return DenseCache(shape, self.options)
