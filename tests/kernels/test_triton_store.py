# SPDX-License-Identifier: Apache-2.0
"""Pages and windows written by the Triton kernels, run by Triton's interpreter, against the reference codec."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_worker import AVAILABLE, run

from oscar_kv.codec import LayerCodec
from oscar_kv.errors import OscarError
from oscar_kv.kernels.base import StoreTables, Windows
from oscar_kv.layout import PAGE, PageLayout, read_pages
from oscar_kv.quantizer import ErrorWeight, normalised_weight
from oscar_kv.recipe import Recipe
from oscar_kv.transform import SideTransform

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs the package triton")
SINK, RING = 64, 160


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def random_codec(
    layout: PageLayout, shaping: bool, *, heads: int = 1, unbiased: bool = True, rotate: bool = True, seed: int = 0
) -> LayerCodec:
    g = torch.Generator().manual_seed(seed)

    def side(d: int) -> SideTransform:
        turn = torch.linalg.qr(torch.randn(heads, d, d, generator=g)).Q
        return SideTransform(torch.randn(heads, d, generator=g), turn if rotate else None)

    k, v, d = side(layout.k_dim), side(layout.v_dim), layout.k_dim
    recipe = Recipe(
        name="test", k_bits=layout.k_bits, v_bits=layout.v_bits, sink=64, recent=64, slack=32,
        shaping=shaping, unbiased=unbiased,
    )  # fmt: skip
    weight = None
    if shaping:
        root = torch.randn(heads, d, d, generator=g, dtype=torch.float64)
        turn = torch.eye(d).expand(heads, d, d) if k.rotation is None else k.rotation
        weight = ErrorWeight.of(normalised_weight(root @ root.mT / d, turn)).to("cpu", torch.float32)
    return LayerCodec(recipe, k, v, weight)


class Store:
    """A cache of ``lengths`` slots, kept by the kernels, beside the raw rows that came. What nobody wrote is NaN."""

    def __init__(self, codec: LayerCodec, batch: int, dtype: torch.dtype, max_pages: int = 6, sink: int = SINK) -> None:
        heads, layout = codec.num_kv_heads, codec.layout
        self.codec, self.dtype = codec, dtype
        self.pages = torch.full((batch * max_pages + 1, heads, layout.page_bytes), 0xA5, dtype=torch.uint8)
        order = torch.randperm(batch * max_pages, generator=torch.Generator().manual_seed(1))
        self.table = (order.view(batch, max_pages) + 1).to(torch.int32)
        self.slots = torch.arange(batch, 0, -1, dtype=torch.int32)
        sizes = [(r, d) for r in (sink, RING) for d in (layout.k_dim, layout.v_dim)]
        self.windows = Windows(
            *(torch.full((batch + 1, heads, r, d), torch.nan, dtype=dtype) for r, d in sizes), self.slots
        )
        empty = [torch.zeros(heads, 0, d, dtype=dtype) for d in (layout.k_dim, layout.v_dim)]
        self.raw = [list(empty) for _ in range(batch)]

    def append(self, counts: list[int], seed: int = 0, k: Tensor | None = None) -> None:
        g, layout, heads = torch.Generator().manual_seed(seed), self.codec.layout, self.codec.num_kv_heads
        n = max(counts) + 1  # a row that no request reads

        def rows(d: int) -> Tensor:  # transposed: strides are not those of a contiguous tensor
            x = torch.randn(len(counts), n, heads, d, generator=g).to(self.dtype)
            for b, count in enumerate(counts):
                x[b, count:] = torch.nan
            return x.transpose(1, 2)

        k, v = rows(layout.k_dim) if k is None else k, rows(layout.v_dim)
        start = torch.tensor([r[0].shape[1] for r in self.raw], dtype=torch.int32)
        tables = StoreTables.of(self.codec, "cpu")
        count = torch.tensor(counts, dtype=torch.int32)
        run("store", k, v, self.pages, self.table, start, count, self.windows, tables, layout)
        for b, c in enumerate(counts):
            self.raw[b] = [torch.cat([old, x[b, :, :c]], 1) for old, x in zip(self.raw[b], (k, v), strict=True)]

    def check(self, first_page: int = 1, untouched: tuple[int, ...] = ()) -> None:
        w, layout = self.windows, self.codec.layout
        written = set()
        for b, (k, v) in enumerate(self.raw):
            n, slot = k.shape[1], int(self.slots[b])
            recent = torch.arange(max(0, n - RING), n)
            head = torch.arange(min(n, w.sink_k.shape[2]))
            for ring, sink, x in ((w.ring_k, w.sink_k, k), (w.ring_v, w.sink_v, v)):
                assert torch.equal(ring[slot, :, recent % RING], x[:, recent])
                assert torch.equal(sink[slot, :, head], x[:, head])
                assert sink[slot, :, len(head) :].isnan().all()
            for page in range(first_page, n // PAGE):
                block, rows = int(self.table[b, page]), slice(page * PAGE, (page + 1) * PAGE)
                written.add(block)
                want = read_pages(layout, self.codec.encode(k[None, :, rows], v[None, :, rows]))
                for mine, theirs in zip(read_pages(layout, self.pages[None, block]), want, strict=True):
                    assert (mine.code == theirs.code).all(-1).float().mean() >= 0.999
                    torch.testing.assert_close(mine.step, theirs.step, rtol=2e-3, atol=0)
                    torch.testing.assert_close(mine.zero, theirs.zero, rtol=2e-3, atol=2e-3)
        others = [x for x in range(len(self.pages)) if x not in written]
        assert (self.pages[others] == 0xA5).all()


@pytest.mark.parametrize(
    ("layout", "shaping"),
    [
        (PageLayout(64, 64, 2, 2), True),
        (PageLayout(48, 80, 3, 3), True),
        (PageLayout(32, 32, 4, 4), False),
        slow(PageLayout(128, 128, 2, 2), True),
        slow(PageLayout(32, 32, 1, 1), True),
        slow(PageLayout(80, 112, 3, 1), True),
        slow(PageLayout(96, 192, 1, 4), False),
        slow(PageLayout(256, 256, 2, 2), True),
    ],
    ids=str,
)
def test_codes_are_the_oracles(layout: PageLayout, shaping: bool) -> None:
    store = Store(random_codec(layout, shaping), 1, torch.bfloat16)
    store.append([128])
    store.check()


def test_rows_before_the_call_come_from_the_ring() -> None:
    """Ragged: a page that was begun earlier, one that is not complete yet, nothing new, and chunks beyond the ring."""
    store = Store(random_codec(PageLayout(32, 32, 2, 2), False, heads=2), 3, torch.float16)
    store.append([100, 60, 0])
    store.append([27, 3, 0])
    store.append([1, 0, 230], seed=1)
    store.append([64, 1, 1], seed=2)
    store.check()


def test_one_token_at_a_time() -> None:
    store = Store(random_codec(PageLayout(16, 16, 2, 2), True), 2, torch.float32)
    store.append([126, 60])
    for i in range(3):
        store.append([1, 1], seed=i)
    store.check()


def test_pages_without_a_block_are_left_out() -> None:
    store = Store(random_codec(PageLayout(16, 16, 2, 2), False), 1, torch.float16)
    taken = int(store.table[0, 1])
    store.table[0, 1] = -1
    store.append([192])
    assert (store.pages[taken] == 0xA5).all()
    assert (store.pages[int(store.table[0, 2])] != 0xA5).any()


def test_a_short_sink_makes_page_0_history() -> None:
    store = Store(random_codec(PageLayout(16, 16, 2, 2), False), 1, torch.float16, sink=16)
    store.append([64])
    store.check(first_page=0)


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_chunks(data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    layout = PageLayout(16 * draw(1, 3), 16 * draw(1, 3), draw(1, 4), draw(1, 4))
    codec = random_codec(layout, bool(draw(0, 1)), unbiased=bool(draw(0, 1)), rotate=bool(draw(0, 1)), seed=draw(0, 99))
    batch = draw(1, 2)
    store = Store(codec, batch, data.draw(st.sampled_from([torch.float16, torch.bfloat16])))
    for seed in range(draw(1, 3)):
        store.append([draw(0, 100) for _ in range(batch)], seed=seed)
    store.check()


def test_rows_that_are_not_finite_or_without_spread() -> None:
    """Infinities and NaN become what the oracle makes of them, and spoil no other row; constant rows come back."""
    codec = random_codec(PageLayout(32, 32, 2, 2), True, rotate=False)
    k = torch.randn(1, 1, 128, 32, generator=torch.Generator().manual_seed(3)).half()
    k[0, 0, 70, 3], k[0, 0, 71, 4], k[0, 0, 72, 5] = torch.inf, -torch.inf, torch.nan
    k[0, 0, 73] = codec.k.centre[0].half()
    store = Store(codec, 1, torch.float16)
    g = torch.Generator().manual_seed(0)
    v = torch.randn(1, 1, 128, 32, generator=g).half()
    start, count = torch.tensor([0], dtype=torch.int32), torch.tensor([128], dtype=torch.int32)
    tables = StoreTables.of(codec, "cpu")
    run("store", k, v, store.pages, store.table, start, count, store.windows, tables, codec.layout)
    got = read_pages(codec.layout, store.pages[None, int(store.table[0, 1])])
    want = read_pages(codec.layout, codec.encode(k[:, :, 64:], v[:, :, 64:]))
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.code == theirs.code).all(-1).float().mean() >= 0.98  # one row of 64
        assert mine.step.isfinite().all() and mine.zero.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "layout", [PageLayout(32, 64, 2, 2), PageLayout(48, 80, 3, 1), PageLayout(16, 16, 1, 4)], ids=str
)
def test_dequantised_tiles(layout: PageLayout, dtype: torch.dtype) -> None:
    g, heads = torch.Generator().manual_seed(0), 2
    pages = torch.randint(0, 256, (4, heads, layout.page_bytes), generator=g, dtype=torch.uint8)
    meta = pages[..., layout.metadata_offset :].view(torch.float16)
    meta.copy_(torch.randn(meta.shape, generator=g))
    meta[2, 0, :4] = 60000.0  # beyond fp16: saturates
    blocks = torch.tensor([[3, -1], [2, 0]], dtype=torch.int32)
    k = torch.full((2, 128, heads, layout.k_dim), torch.nan, dtype=dtype)
    v = torch.full((2, heads, 128, layout.v_dim), torch.nan, dtype=dtype).transpose(1, 2)
    run("dequantise", pages, blocks, layout, k, v)
    want = read_pages(layout, pages)
    top = 65504.0 if dtype == torch.float16 else torch.inf
    for out, rows in zip((k, v), want, strict=True):
        whole = rows.dequantise().clamp(-top, top)  # [pool, heads, 64, d]
        for b in range(2):
            for i in range(2):
                tile = whole[blocks[b, i]] if blocks[b, i] >= 0 else torch.zeros_like(whole[0])
                got = out[b, 64 * i : 64 * i + 64].transpose(0, 1).float()
                # The interpreter rounds to bf16 towards zero.
                torch.testing.assert_close(got, tile, rtol=8e-3 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)


def test_what_is_not_served_is_refused() -> None:
    store = Store(random_codec(PageLayout(16, 16, 2, 2), False), 1, torch.float16)
    with pytest.raises(OscarError, match="k must be"):
        store.append([3], k=torch.zeros(1, 2, 4, 16, dtype=torch.float16))
    with pytest.raises(OscarError, match="int32"):
        store.table = store.table.long()
        store.append([3])
