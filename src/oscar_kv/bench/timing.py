# SPDX-License-Identifier: Apache-2.0
"""The clock that every contender is measured by: medians of CUDA-graph replays, and copy bandwidth as the yardstick."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def time_graph(calls: Sequence[Call], replays: int = 15, warm_s: float = 0.03) -> float:
    """Median ms a call over replays of one CUDA graph of all calls, once the clocks are up.

    Several calls on inputs of their own keep the L2 cache from helping.
    """
    stream = torch.cuda.Stream()
    # Such a stream does not wait for the default one, on which the inputs may still be in the making: without this, a
    # first call could follow block numbers that are not written yet.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # each once: what is compiled or prepared at a first call must not be so in the capture
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        began = time.perf_counter()
        while time.perf_counter() - began < warm_s:
            graph.replay()
            stream.synchronize()
        times = []
        for _ in range(replays):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(stream)
            graph.replay()
            b.record(stream)
            b.synchronize()
            times.append(a.elapsed_time(b) / len(calls))
    torch.cuda.current_stream().wait_stream(stream)
    del graph
    return statistics.median(times)


def time_clock(calls: Sequence[Call], replays: int = 3) -> float:
    """Median ms a call by the wall clock: for the CPU, where the figures are no benchmark."""
    for call in calls[:1]:
        call()
    times = []
    for _ in range(replays):
        began = time.perf_counter()
        for call in calls:
            call()
        times.append(1e3 * (time.perf_counter() - began) / len(calls))
    return statistics.median(times)


def time_calls(calls: Sequence[Call], device: torch.device | str, replays: int = 15) -> float:
    """``time_graph`` on CUDA, ``time_clock`` on the CPU."""
    if torch.device(device).type == "cuda":
        return time_graph(calls, replays)
    return time_clock(calls, min(replays, 3))


def copy_bandwidth(device: torch.device | str, size: int = 1 << 32) -> float:
    """TB/s of a copy on the device of ``size`` bytes, those read and those written counted: the better of two ways."""
    on_gpu = torch.device(device).type == "cuda"
    a = torch.empty(size // 8 if on_gpu else 1 << 20, dtype=torch.int64, device=device)
    a.random_(-(1 << 63), None)
    b = torch.empty_like(a)
    best = 0.0
    for copy in (lambda: b.copy_(a), lambda: torch.bitwise_not(a, out=b)):
        for _ in range(3):
            copy()
        for _ in range(10):
            if on_gpu:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(), copy(), copy(), end.record()
                end.synchronize()
                ms = start.elapsed_time(end)
            else:
                began = time.perf_counter()
                copy(), copy()
                ms = 1e3 * (time.perf_counter() - began)
            best = max(best, 2 * 2 * a.nbytes / ms / 1e9)
    return best
