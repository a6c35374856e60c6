# SPDX-License-Identifier: Apache-2.0
"""Inputs are what they should be, references agree with an independent one, and the clock waits for its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from oscar_kv.bench.inputs import SHARPNESS, SPREAD, decode_arguments, random_codec
from oscar_kv.bench.reference import causal_reference, decode_error, dense_reference, paged_reference
from oscar_kv.bench.shapes import TINY, DecodeShape
from oscar_kv.bench.timing import copy_bandwidth, time_clock, time_graph
from oscar_kv.layout import read_pages


@pytest.mark.parametrize("bits", [(1, 4), (2, 2), (3, 3)])
def test_random_pages_are_centred_rows_of_the_wanted_spread(bits: tuple[int, int]) -> None:
    s = DecodeShape(q_heads=2, kv_heads=2, head_dim=64, k_bits=bits[0], v_bits=bits[1], batch=2, context=1024)
    x = decode_arguments(s, "cpu")
    for codes in read_pages(s.layout, x.pages):
        rows = codes.dequantise()
        assert rows.mean() == pytest.approx(0.0, abs=0.01)
        assert rows.std() == pytest.approx(SPREAD, rel=0.1)
        assert len(codes.code.unique()) > 1
    logits = x.q.std() * SPREAD  # per coordinate, over √d of them, scaled by 1/√d
    assert logits == pytest.approx(SHARPNESS, rel=0.2)
    assert sorted(x.block_table.flatten().tolist()) == list(range(x.pages.shape[0]))
    other = decode_arguments(s, "cpu")
    assert not torch.equal(x.pages, other.pages)


def test_the_reference_is_attention_over_the_de_quantised_rows() -> None:
    """Written once more, without tiles, online softmax or the rotated basis."""
    s = replace(TINY, context=700)
    x = decode_arguments(s, "cpu")
    start, end, n, i = int(x.hist_start[1]), int(x.hist_end[1]), s.context, 1
    k, v = (c.dequantise(torch.float64) for c in read_pages(s.layout, x.pages[x.block_table[i].long()]))
    k, v = (y.transpose(0, 1).flatten(1, 2)[:, start:end] for y in (k, v))
    t, w = x.tables, x.windows
    assert t.k_rotation is not None
    assert t.v_rotation_t is not None
    k = k @ t.k_rotation.double().mT + t.k_centre.double()[:, None]
    v = v @ t.v_rotation_t.double() + t.v_centre.double()[:, None]
    at = torch.arange(end, n) % w.ring_k.shape[2]
    k = torch.cat([w.sink_k[i].double(), k, w.ring_k[i][:, at].double()], 1).transpose(0, 1)
    v = torch.cat([w.sink_v[i].double(), v, w.ring_v[i][:, at].double()], 1).transpose(0, 1)
    want = dense_reference(x.q[i : i + 1], k, v)
    assert decode_error(torch.stack([torch.zeros_like(want[0]), want[0]]), x) < 1e-6
    raw = w.ring_k[i][:, at[-5:]], w.ring_v[i][:, at[-5:]]
    got = paged_reference(
        x.q[i], x.pages, x.block_table[i], (start, end), w, t, s.layout, slot=i, position=n - 1, raw=raw
    )
    assert torch.allclose(got, want[0], atol=1e-6)


def test_dense_references_are_causal() -> None:
    q, k, v = torch.randn(5, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    got = causal_reference(q, k, v, [0, 4])
    assert torch.allclose(got[1:], dense_reference(q[4:], k, v))
    assert torch.allclose(got[:1], dense_reference(q[:1], k[:16], v[:16]))


def test_the_codec_shapes_only_where_asked() -> None:
    shaped, plain = (random_codec(TINY, x) for x in (True, False))
    assert shaped.shaped
    assert not plain.shaped
    assert shaped.k.rotation is not None
    assert torch.equal(shaped.k.centre, plain.k.centre)


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
        self.current, self.capturing = Stream(), False
        self.streams = [self.current]
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
        self.Event = lambda enable_timing: SimpleNamespace(
            record=lambda stream: None, synchronize=lambda: None, elapsed_time=lambda end: 6.0
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
        self.capturing = True
        yield
        self.capturing = False


def test_calls_wait_for_inputs_in_the_making_and_each_runs_before_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, written, seen, first = Cuda(), [], [], []
    monkeypatch.setattr(torch, "cuda", cuda)
    cuda.current.launched.append(lambda: written.append(True))

    def call(i: int) -> Callable[[], None]:
        def run() -> None:
            if i not in first:
                assert not cuda.capturing, "what a first call compiles or prepares cannot be captured"
                first.append(i)
            cuda.current.launched.append(lambda: seen.append(bool(written)))

        return run

    assert time_graph([call(i) for i in range(3)], replays=1, warm_s=0.0) == 2.0
    assert first == [0, 1, 2]
    assert seen
    assert all(seen)


def test_the_cpu_clock_and_copy() -> None:
    calls: list[int] = []
    assert time_clock([lambda: calls.append(1)], replays=2) >= 0
    assert len(calls) == 3
    assert copy_bandwidth("cpu") > 0


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
