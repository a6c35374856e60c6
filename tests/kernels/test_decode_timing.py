# SPDX-License-Identifier: Apache-2.0
"""The decode benchmark's clock must not let a kernel run before its inputs are written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from decode_timing import time_graph


class Stream:
    """Work that was launched and is done no sooner than somebody waits for it."""

    def __init__(self) -> None:
        self.launched: list[Callable[[], None]] = []

    def synchronize(self) -> None:
        while self.launched:
            self.launched.pop(0)()

    def wait_stream(self, other: Stream) -> None:
        self.launched.append(other.synchronize)


class Cuda:
    """Streams of torch.cuda that are as slow as they may be."""

    def __init__(self) -> None:
        self.current = Stream()
        self.streams = [self.current]
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
        self.Event = lambda enable_timing: SimpleNamespace(
            record=lambda stream: None, synchronize=lambda: None, elapsed_time=lambda end: 1.0
        )

    def Stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: object, stream: Stream) -> Iterator[None]:
        for s in self.streams:  # a capture begins with a synchronisation of the device
            s.synchronize()
        yield


def test_first_calls_wait_for_inputs_in_the_making(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, written, seen = Cuda(), [], []
    monkeypatch.setattr(torch, "cuda", cuda)
    cuda.current.launched.append(lambda: written.append(True))
    time_graph([lambda: cuda.current.launched.append(lambda: seen.append(bool(written)))], replays=1, warm_s=0.0)
    assert seen
    assert all(seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_first_calls_wait_on_a_gpu() -> None:
    big, flag, seen = torch.randn(8192, 8192, device="cuda"), torch.zeros(1, device="cuda"), []
    torch.cuda.synchronize()
    for _ in range(20):
        big = big @ big * 1e-4
    flag.fill_(1)
    time_graph([lambda: seen.append(flag.clone())], replays=1, warm_s=0.0)
    assert float(seen[0]) == 1
