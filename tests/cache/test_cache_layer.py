# SPDX-License-Identifier: Apache-2.0
"""Storage of one layer: bytes and windows must not depend on chunks, padding, neighbours or rolled-back tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_kv.cache import MixedLayer
from oscar_kv.cache.pool import PagePool
from oscar_kv.codec import LayerCodec
from oscar_kv.errors import CacheError
from oscar_kv.quantizer import ErrorWeight, normalised_weight
from oscar_kv.recipe import get_recipe
from oscar_kv.transform import SideTransform, hadamard

HEADS, DIM = 2, 16
LENGTH = 420


def make_codec(**changes: Any) -> LayerCodec:
    g = torch.Generator().manual_seed(1)
    turn = hadamard(DIM, torch.float32).expand(HEADS, DIM, DIM).contiguous()
    side = [SideTransform(torch.randn(HEADS, DIM, generator=g), turn) for _ in "kv"]
    x = torch.randn(HEADS, 64, DIM, generator=g)
    weight = ErrorWeight.of(normalised_weight(x.mT @ x, turn)).to("cpu", torch.float32)
    fields = {"sink": 32, "recent": 96, "slack": 16, **changes}
    return LayerCodec(get_recipe("k2v2").replace(**fields), side[0], side[1], weight)


CODEC = make_codec()


def rows(count: int = 1, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = count, HEADS, length, DIM
    return torch.randn(shape, generator=g) * 3 + 1, torch.randn(shape, generator=g)


def layer(count: int = 1, codec: LayerCodec = CODEC) -> MixedLayer:
    return MixedLayer(codec, count, torch.float32, torch.device("cpu"))


def fill(target: MixedLayer, k: Tensor, v: Tensor, sizes: list[int]) -> MixedLayer:
    at = 0
    for size in [*sizes, k.shape[2]]:
        stop = min(at + size, k.shape[2])
        if stop > at:
            target.append(k[:, :, at:stop], v[:, :, at:stop])
        at = stop
    return target


def assert_same(a: MixedLayer, b: MixedLayer, row_a: int = 0, row_b: int = 0) -> None:
    """Same tokens as far as any later query can tell: sink, ring from the older raw_from on, pages."""
    n = a.lengths[row_a]
    assert n == b.lengths[row_b]
    start = max(0, n - a.recent)
    for x, y in zip(a.raw(row_a, 0, min(a.sink, n)), b.raw(row_b, 0, min(a.sink, n)), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(a.raw(row_a, max(start, 0), n), b.raw(row_b, max(start, 0), n), strict=True):
        assert torch.equal(x, y)
    pages = max(0, n // 64 - a.first_page)
    assert len(a.pool.tables[row_a]) == len(b.pool.tables[row_b]) == pages
    assert torch.equal(a.pool.read(row_a, 0, pages), b.pool.read(row_b, 0, pages))


def test_one_chunk_holds_raw_windows_and_encoded_pages() -> None:
    k, v = rows()
    held = fill(layer(), k, v, [])
    assert torch.equal(held.raw(0, 0, 32)[0], k[0, :, :32])
    assert torch.equal(held.raw(0, LENGTH - 96, LENGTH)[1], v[0, :, -96:])
    pages = [CODEC.encode(k[:, :, 64 * j : 64 * j + 64], v[:, :, 64 * j : 64 * j + 64])[0] for j in range(LENGTH // 64)]
    assert torch.equal(held.pool.read(0, 0, len(pages)), torch.stack(pages))


def test_pages_wholly_inside_the_sink_are_not_stored() -> None:
    k, v = rows()
    for sink, stored in ((0, 6), (63, 6), (64, 5), (127, 5), (128, 4)):
        codec = make_codec(sink=sink)
        held = fill(layer(codec=codec), k, v, [])
        assert len(held.pool.tables[0]) == stored
        assert torch.equal(held.pages(0, sink, 384)[0][-1], codec.encode(k[:, :, 320:384], v[:, :, 320:384])[0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 150), max_size=12), st.integers(1, LENGTH))
def test_any_split_gives_the_same_bytes_and_windows(sizes: list[int], length: int) -> None:
    k, v = rows()
    k, v = k[:, :, :length], v[:, :, :length]
    assert_same(fill(layer(), k, v, sizes), fill(layer(), k, v, []))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, LENGTH - 60),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 17)), min_size=1, max_size=6),
)
def test_crop_within_the_slack_leaves_no_trace(length: int, steps: list[tuple[int, int]]) -> None:
    """Append drafts, take some back, append the real tokens: as if the drafts had never come."""
    k, v = rows()
    wrong_k, wrong_v = rows(seed=9)
    held, at = fill(layer(), k[:, :, :length], v[:, :, :length], []), length
    for good, draft in steps:
        if draft:
            held.append(wrong_k[:, :, :draft], wrong_v[:, :, :draft])
            assert not held.crop([draft])
        stop = min(at + good, LENGTH)
        if stop > at:
            held.append(k[:, :, at:stop], v[:, :, at:stop])
        at = stop
    assert_same(held, fill(layer(), k[:, :, :at], v[:, :, :at], []))


@settings(max_examples=25, deadline=None)
@given(st.integers(150, LENGTH), st.integers(18, LENGTH), st.integers(1, 100))
def test_a_deep_crop_keeps_positions_and_restores_from_codes(length: int, count: int, more: int) -> None:
    k, v = rows()
    held = fill(layer(), k[:, :, :length], v[:, :, :length], [])
    left = max(0, length - count)
    oldest_raw = max(0, length - held.ring)
    held.crop([count])
    assert held.lengths == [left]
    assert torch.equal(held.raw(0, 0, min(32, left))[0], k[0, :, : min(32, left)])
    start = max(0, left - held.recent)
    window = held.raw(0, start, left)[0]
    for i, position in enumerate(range(start, left)):
        if position < 32 or position >= oldest_raw:
            assert torch.equal(window[:, i], k[0, :, position])
        else:
            page = position // 64
            decoded = CODEC.decode(
                CODEC.encode(k[:, :, 64 * page : 64 * page + 64], v[:, :, 64 * page : 64 * page + 64])
            )[0]
            assert torch.equal(window[:, i], decoded[0, :, position % 64])
    held.append(k[:, :, left : left + more], v[:, :, left : left + more])
    fresh = fill(layer(), k[:, :, : held.lengths[0]], v[:, :, : held.lengths[0]], [])
    # Pages that were complete before the crop's border stay to the bit; new tokens are raw.
    whole = left // 64
    assert torch.equal(held.pool.read(0, 0, whole), fresh.pool.read(0, 0, whole))
    new = min(more, LENGTH - left)
    tail = min(new, held.recent)
    if tail:
        assert torch.equal(held.raw(0, left + new - tail, left + new)[1], v[0, :, left + new - tail : left + new])


def test_crop_says_whether_codes_were_needed() -> None:
    k, v = rows()
    for count, expected in ((17, False), (18, True)):
        assert fill(layer(), k, v, []).crop([count]) is expected


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_padding_and_neighbours_change_nothing(data: st.DataObject) -> None:
    """Three ragged rows with holes anywhere; each must equal its own tokens alone."""
    k, v = rows(3, 300)
    held, alone = layer(3), [layer() for _ in range(3)]
    at = 0
    while at < 300:
        stop = min(300, at + data.draw(st.integers(1, 120)))
        pattern = data.draw(st.integers(0, 2**16))
        valid = torch.rand(3, stop - at, generator=torch.Generator().manual_seed(pattern)) > (pattern % 3) / 4
        held.append(k[:, :, at:stop], v[:, :, at:stop], None if valid.all() else valid)
        for row in range(3):
            keep = valid[row].nonzero()[:, 0] + at
            if len(keep):
                alone[row].append(k[row : row + 1, :, keep], v[row : row + 1, :, keep])
        at = stop
    for row in range(3):
        assert_same(held, alone[row], row)


def test_reordered_rows_share_pages_and_part_when_they_write() -> None:
    k, v = rows(2)
    held = layer(2)
    held.append(k[:, :, :320], v[:, :, :320])
    before = held.pool.nbytes
    held.reorder([1, 1, 0, 1])
    assert held.pool.nbytes == before
    more_k, more_v = rows(4, 100, seed=5)
    held.append(more_k, more_v)
    for row, source in enumerate([1, 1, 0, 1]):
        whole_k = torch.cat([k[source : source + 1, :, :320], more_k[row : row + 1]], 2)
        whole_v = torch.cat([v[source : source + 1, :, :320], more_v[row : row + 1]], 2)
        assert_same(held, fill(layer(), whole_k, whole_v, []), row)


def test_repeat_and_shrinking_return_memory() -> None:
    k, v = rows(4)
    held = layer(4)
    held.append(k, v)
    full = held.nbytes
    held.reorder([2])
    assert held.nbytes == full / 4
    held.repeat(2)
    assert held.lengths == [LENGTH, LENGTH]
    assert held.pool.nbytes == full / 4 - held.window_nbytes / 2
    held.crop([LENGTH, LENGTH])
    assert held.pool.nbytes == 0


def test_state_goes_on_identically() -> None:
    k, v = rows(2)
    held = layer(2)
    held.append(k[:, :, :300], v[:, :, :300])
    held.crop([5, 70])
    copy = layer(2)
    copy.load_state({name: x.clone() for name, x in held.state().items()})
    assert copy.raw_from == held.raw_from
    assert copy.nbytes <= held.nbytes
    for one in (held, copy):
        one.append(k[:, :, 300:], v[:, :, 300:])
    for row in range(2):
        assert_same(held, copy, row, row)


def test_state_of_other_shape_is_refused() -> None:
    k, v = rows()
    state = fill(layer(), k, v, []).state()
    for name, value in (
        ("ring_k", state["ring_k"][..., :8]),
        ("pages", state["pages"][1:]),
        ("sink_v", state["sink_v"].double()),
        ("raw_from", state["lengths"] + 1),
    ):
        with pytest.raises(CacheError, match=name):
            layer().load_state({**state, name: value})


def test_memory_is_the_sum_of_the_tensors_and_grows_in_small_steps() -> None:
    k, v = rows()
    held = layer()
    held.append(k[:, :, :300], v[:, :, :300])
    buffers = [held.sink_k, held.sink_v, held.ring_k, held.ring_v, held.pool.pages]
    assert held.nbytes == sum(t.numel() * t.element_size() for t in buffers)
    assert len(held.pool.pages) == 4  # exactly what the prompt needs
    idle = []
    for i in range(300, LENGTH):
        held.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        idle.append(len(held.pool.pages) - len(held.pool.tables[0]))
    assert max(idle) == 1
    assert held.elements == LENGTH * HEADS * 2 * DIM


@pytest.mark.parametrize(
    "bad",
    [lambda k: k[:1], lambda k: k[:, :1], lambda k: k[..., :8], lambda k: k.half()],
    ids=["rows", "heads", "head_dim", "dtype"],
)
def test_rows_of_another_shape_are_refused(bad: Any) -> None:
    k, v = rows(2)
    with pytest.raises(CacheError, match="this layer holds 2 rows"):
        layer(2).append(bad(k), v)


def test_reading_what_is_not_raw_is_refused() -> None:
    held = fill(layer(), *rows(), [])
    with pytest.raises(CacheError, match="not held raw"):
        held.raw(0, 100, LENGTH)
    with pytest.raises(CacheError, match="not held raw"):
        held.raw(0, LENGTH - 5, LENGTH + 1)


def test_pool_refuses_gaps() -> None:
    pool = PagePool(1, 1, 8, torch.device("cpu"))
    with pytest.raises(CacheError, match="cannot come next"):
        pool.write([0], 1, torch.zeros(1, 1, 8, dtype=torch.uint8))
    with pytest.raises(CacheError, match="asked for"):
        pool.read(0, 0, 1)


def test_block_table_names_the_pages_of_each_row() -> None:
    k, v = rows(2)
    codec = make_codec(sink=64)
    held = layer(2, codec)
    held.append(k[:, :, :200], v[:, :, :200], torch.tensor([[True] * 200, [True] * 130 + [False] * 70]))
    table = held.pool.block_table(held.first_page)
    assert table.dtype == torch.int32
    assert table.shape == (2, 3)
    for row, page in ((0, 1), (0, 2), (1, 1)):
        part = slice(64 * page, 64 * page + 64)
        encoded = codec.encode(k[row : row + 1, :, part], v[row : row + 1, :, part])[0]
        assert torch.equal(held.pool.pages[table[row, page]], encoded)
