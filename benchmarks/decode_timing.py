# SPDX-License-Identifier: Apache-2.0
"""What every contender of the decode benchmark shares: shapes, lengths, and how a call is timed."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "kernels")]

from oscar_kv.layout import PAGE, PageLayout  # noqa: E402

SINK, RECENT, RING = 64, 256, 288


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    q_heads: int
    batch: int
    context: int = 98304
    head_dim: int = 128
    k_bits: int = 2
    v_bits: int = 2
    kv_heads: int = 8

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.head_dim, self.head_dim, self.k_bits, self.v_bits)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def bytes(self) -> int:
        """What a call must read: history in pages, windows raw."""
        history = self.context - SINK - RECENT
        raw = 2 * 2 * self.head_dim * (SINK + RECENT)
        return self.batch * self.kv_heads * (history * self.layout.page_bytes // PAGE + raw)

    @property
    def raw_bytes(self) -> int:
        """What a call over a BF16 cache must read."""
        return 4 * self.batch * self.context * self.kv_heads * self.head_dim

    def row(self) -> dict[str, Any]:
        names = ("k_bits", "v_bits", "q_heads", "kv_heads", "head_dim", "batch", "context")
        return {n: getattr(self, n) for n in names}

    def __str__(self) -> str:
        return f"q{self.q_heads} b{self.batch} ctx{self.context} d{self.head_dim} {self.k_bits}/{self.v_bits}"


def lengths(s: Shape, device: str) -> tuple[torch.Tensor, ...]:
    """hist_start, hist_end, seq_len."""
    ones = torch.ones(s.batch, dtype=torch.int32, device=device)
    return ones * SINK, ones * (s.context - RECENT), ones * s.context


def time_graph(calls: list[Callable[[], object]], replays: int = 15, warm_s: float = 0.03) -> float:
    """Median ms a call over replays of a CUDA graph of all calls, once the clocks are up."""
    stream = torch.cuda.Stream()
    # Such a stream does not wait for the default one, on which the inputs may still be in the making: without this, a
    # first call has followed block numbers that were not written yet (an illegal access, in our kernels or another's).
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
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
            a.record(stream), graph.replay(), b.record(stream)
            b.synchronize()
            times.append(a.elapsed_time(b) / len(calls))
    torch.cuda.current_stream().wait_stream(stream)
    del graph
    return statistics.median(times)


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 4 GB, bytes read and written both counted: the best of two ways to copy."""
    a = torch.randint(-(1 << 62), 1 << 62, (1 << 29,), dtype=torch.int64, device="cuda")
    b = torch.empty_like(a)
    best = 0.0
    for copy in (lambda: b.copy_(a), lambda: torch.bitwise_not(a, out=b)):
        for _ in range(3):
            copy()
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(), copy(), copy(), end.record()
            end.synchronize()
            best = max(best, 2 * 2 * a.nbytes / start.elapsed_time(end) / 1e9)
    return best
