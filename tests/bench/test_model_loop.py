# SPDX-License-Identifier: Apache-2.0
"""The whole-model loop as a GPU runs it, with stand-ins for streams, events and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kv.bench.contenders import find, model
from oscar_kv.bench.contenders.base import Options
from oscar_kv.bench.shapes import SINK, TINY_MODEL, ModelShape
from oscar_kv.errors import OscarError

FREE = 4 << 30
SMALL = replace(TINY_MODEL, layers=1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda that captures calls by running them and replays by running them again."""
    state = SimpleNamespace(step=None, replays=0, free=FREE)

    class Graph:
        def replay(self) -> None:
            state.replays += 1
            state.step()

    @contextmanager
    def capture(graph: Graph, stream: Any) -> Iterator[None]:
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None, elapsed_time=lambda end: 128.0)
    for name, value in {
        "Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda s: nullcontext(),
        "CUDAGraph": Graph, "graph": capture, "Event": lambda enable_timing: event, "memory_allocated": lambda: 0,
        "mem_get_info": lambda: (state.free, 2 * state.free), "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Options, "on_gpu", True)
    monkeypatch.setattr(model, "TIMINGS", 2)
    return state


def loop(gpu: SimpleNamespace, name: str, shape: ModelShape) -> Any:
    torch.manual_seed(0)
    c: Any = find("model", name, Options(device="cpu"))
    c.prepare(shape)
    gpu.step = c.step
    return c


def test_every_request_writes_the_page_that_it_completes(gpu: SimpleNamespace) -> None:
    c = loop(gpu, "oscar-torch", replace(SMALL, context=450))
    before = [pool.clone() for pool in c.kv.pools]
    found = c.measure("default")
    assert found["error"] < 1e-5
    assert found["ms"] == 2.0
    assert gpu.replays == 2 * 64
    for pool, old in zip(c.kv.pools, before, strict=True):
        changed = (pool != old).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == sorted(c.kv.table[:, 7].tolist()), "page 7 of each request, and no other"
    assert int(c.kv.start[0]) == SINK


def test_a_page_that_is_not_written_is_seen(gpu: SimpleNamespace) -> None:
    c = loop(gpu, "oscar-torch", SMALL)
    store = c.kv.kernels.store
    scratch = [pool.clone() for pool in c.kv.pools]

    def elsewhere(k: Any, v: Any, pages: Any, *rest: Any) -> None:
        store(k, v, scratch[0], *rest)

    c.kv.kernels = replace(c.kv.kernels, store=elsewhere)
    assert c.measure("default")["error"] > c.limit


def test_paged_bf16_in_the_same_loop(gpu: SimpleNamespace, fake_fa3: Any) -> None:
    c = loop(gpu, "fa3-bf16", TINY_MODEL)
    for way in c.ways(TINY_MODEL):
        assert c.measure(way)["error"] < c.limit


def test_the_largest_batch_that_fits(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    filled = model.DecodeModel._filled

    def full(self: Any, s: ModelShape) -> Any:
        asked.append(s.batch)
        if s.batch > 3:
            raise torch.cuda.OutOfMemoryError("too much")
        return filled(self, s)

    monkeypatch.setattr(model.DecodeModel, "_filled", full)
    one = find("model", "oscar-torch", Options(device="cpu")).cache(replace(TINY_MODEL, batch=1)).request_bytes  # type: ignore[attr-defined]
    gpu.free = model.RESERVE + 5 * one + 1
    c = loop(gpu, "oscar-torch", replace(TINY_MODEL, batch=0))
    assert asked == [5, 4, 3]
    assert c.shape.batch == 3
    assert c.measure("default")["batch"] == 3
    gpu.free = model.RESERVE + 1
    with pytest.raises(OscarError, match="not one request"):
        loop(gpu, "oscar-torch", replace(TINY_MODEL, batch=0))


def test_our_cache_takes_the_bytes_that_its_format_says() -> None:
    s = ModelShape(layers=2)
    c: Any = find("model", "oscar-torch", Options(device="cpu"))
    pages = -(-(s.context + 128) // 64)
    windows = 4 * (64 + 288) * 2 * 128  # FP32 on the CPU
    assert c.cache(s).request_bytes == 2 * 8 * (pages * 4608 + windows)
