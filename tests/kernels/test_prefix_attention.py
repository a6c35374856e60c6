# SPDX-License-Identifier: Apache-2.0
"""Chunks over packed prefixes by tiles and dense kernels, against the definition (attend_row)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from oscar_kv.errors import OscarError
from oscar_kv.kernels import dense as dense_module
from oscar_kv.kernels import prefix as prefix_module
from oscar_kv.kernels.base import LayerTables
from oscar_kv.kernels.dense import Dense, choose, plain
from oscar_kv.kernels.prefix import History, Workspace, attend_prefix
from oscar_kv.kernels.torch_ref import attend_row
from oscar_kv.kernels.torch_set import TorchDequantise
from oscar_kv.layout import PageLayout, write_pages
from oscar_kv.quantizer import quantise

CPU = torch.device("cpu")


class Case:
    """A request: sink rows, packed history of which both ends may lie inside a page, window rows, a chunk."""

    def __init__(self, *, q_heads: int = 4, heads: int = 2, dims: tuple[int, int] = (32, 16), n: int = 50,
                 sink: int = 70, end: int = 500, position: int = 560, dtype: torch.dtype = torch.float32,
                 rotate: bool = True, seed: int = 0) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        self.layout, self.n, self.heads = PageLayout(*dims, 2, 3), n, heads
        self.sink, self.end, self.position = sink, end, position

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        turn = [torch.linalg.qr(normal(heads, d, d))[0].contiguous() if rotate else None for d in dims]
        centres = [normal(heads, d) for d in dims]
        self.tables = LayerTables(turn[0], centres[0], turn[1], centres[1])
        self.pool = torch.stack(
            [write_pages(self.layout, quantise(normal(heads, 64, dims[0]), 2), quantise(normal(heads, 64, dims[1]), 3))
             for _ in range(14)]
        )  # fmt: skip
        first, last = sink // 64, -(-end // 64)
        self.blocks = torch.randperm(14, generator=g)[: last - first].int()
        self.q = (2 * normal(q_heads, n, dims[0])).to(dtype)

        def raw(m: int) -> tuple[Tensor, Tensor]:
            return normal(heads, m, dims[0]).to(dtype), normal(heads, m, dims[1]).to(dtype)

        self.sink_rows, self.window, self.chunk = raw(sink), raw(position - end), raw(n)

    def wanted(self) -> Tensor:
        return attend_row(
            self.q, self.sink_rows, self.pool[self.blocks.long()], self.sink // 64, self.window, self.chunk,
            position=self.position, hist_start=self.sink, hist_end=[self.end] * self.n, tables=self.tables,
            layout=self.layout, scale=0.3,
        ).transpose(0, 1)  # fmt: skip

    def got(self, dense: Dense | None = None, tile: int = 128) -> Tensor:
        first = lambda x: x.transpose(0, 1)  # noqa: E731
        raw = tuple(torch.cat([first(a), first(b)]) for a, b in zip(self.sink_rows, self.window, strict=True))
        q = first(self.q)
        dense = dense or choose(q.shape[1], self.heads, *self.layout_dims, q.dtype, CPU)
        return attend_prefix(
            q, (first(self.chunk[0]), first(self.chunk[1])), raw,  # type: ignore[arg-type]
            History(self.pool, self.blocks, self.sink, self.end), self.tables, self.layout, TorchDequantise(), dense,
            scale=0.3, tile=tile,
        )  # fmt: skip

    @property
    def layout_dims(self) -> tuple[int, int]:
        return self.layout.k_dim, self.layout.v_dim


CASES: list[dict[str, Any]] = [
    {},
    {"q_heads": 2},
    {"q_heads": 12, "heads": 2, "dims": (16, 16)},
    {"sink": 0, "end": 512, "position": 512},
    {"sink": 64, "end": 65},
    {"sink": 3, "end": 62},
    {"end": 70, "sink": 70},
    {"rotate": False},
    {"n": 1500, "heads": 1, "q_heads": 2},
]


@pytest.mark.parametrize("fields", CASES, ids=[str(i) for i in range(len(CASES))])
@pytest.mark.parametrize("tile", [64, 192, 16384])
def test_equals_the_definition(fields: dict[str, Any], tile: int) -> None:
    case = Case(**fields)
    wanted = case.wanted()
    for dense in (None, Dense("plain", plain)):
        error = (case.got(dense, tile) - wanted).abs().max()
        assert error < 3e-5 * wanted.abs().max()


def test_fp64_and_bf16() -> None:
    exact = Case(dtype=torch.float64)
    assert (exact.got() - exact.wanted()).abs().max() < 1e-9
    coarse = Case(dtype=torch.bfloat16, dims=(32, 32))
    got, wanted = coarse.got(), coarse.wanted()
    assert got.dtype == torch.bfloat16
    assert (got - wanted).norm() / wanted.norm() < 0.01


def test_the_workspace_does_not_grow_with_the_prefix() -> None:
    Workspace.clear()
    for end in (200, 500, 800):
        Case(end=end, position=end + 20).got(tile=128)
        assert [len(k) for k, _ in Workspace._rooms.values()] == [128]


@pytest.mark.parametrize("queries", [1, 7, 64])
def test_queries_may_meet_the_history_some_at_a_time(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_module, "QUERIES", queries)
    for fields in ({}, {"end": 70, "sink": 70}):
        case = Case(**fields)
        wanted = case.wanted()
        assert (case.got() - wanted).abs().max() < 3e-5 * wanted.abs().max()


class Peak(TorchDispatchMode):
    """Most bytes alive at once of what operations made; what came from outside, and views of it, do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def _note(self, x: Any, counts: bool) -> None:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            self.known.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes() if counts else 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tree_map(lambda x: self._note(x, False), (args, kwargs))
        out = func(*args, **kwargs)
        tree_map(lambda x: self._note(x, True), out)
        self.known = {key: found for key, found in self.known.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.known.values()))
        return out


def peak_of(case: Case) -> int:
    case.got(tile=128)  # the room for a tile is made once
    with Peak() as mode:
        out = case.got(tile=128)
    assert mode.peak > out.nbytes
    return mode.peak


def test_nothing_grows_with_the_prefix() -> None:
    """Two, four and six tiles; the same rows around them."""
    peaks = {peak_of(Case(sink=64, end=64 + 128 * tiles, position=128 + 128 * tiles)) for tiles in (2, 4, 6)}
    assert len(peaks) == 1


def test_what_the_history_takes_does_not_grow_with_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense kernel that takes nothing but its answer: beyond that of the chunk, a constant remains."""

    def lean(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:2], v.shape[-1]).zero_(), q.new_empty(q.shape[:2]).zero_()

    monkeypatch.setattr(prefix_module, "QUERIES", 64)
    extra = []
    for n in (128, 640):
        case = Case(n=n)
        with Peak() as mode:
            out = case.got(Dense("lean", lean), tile=128)
        extra.append(mode.peak - out.nbytes - 4 * out.shape[0] * out.shape[1])
    assert extra[0] == extra[1]


def test_a_tile_of_broken_pages_is_refused() -> None:
    with pytest.raises(OscarError, match="whole pages"):
        Case().got(tile=100)


def test_a_wrong_kernel_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN and others differ in what they return: what counts is the answer."""

    def other_base(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = plain(*args)
        return out, lse * 1.4427

    def top_left(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return plain(q, k, v, scale, False)

    def absent(*args: Any) -> tuple[Tensor, Tensor]:
        raise ImportError("no such module")

    offered = [Dense(f.__name__, f) for f in (other_base, top_left, absent)] + [Dense("right", plain)]
    monkeypatch.setattr(dense_module, "_chosen", {})
    monkeypatch.setattr(dense_module, "_candidates", lambda device, dtype: iter(offered))
    assert choose(4, 2, 16, 16, torch.float32, CPU).name == "right"
