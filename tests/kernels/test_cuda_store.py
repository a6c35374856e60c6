# SPDX-License-Identifier: Apache-2.0
"""The CUDA store kernels' source, run on a CPU, against LayerCodec.encode and the contract of base.StoreKernel."""

from __future__ import annotations

import pytest
import torch
from emulate import EmulatedFault, compiler, guarded
from emulate_store import EmulatedStore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_reference import State, difference, encode_prompt, random_codec, random_rows, store, weighted_error
from torch import Tensor

from oscar_kv.codec import LayerCodec
from oscar_kv.errors import OscarError
from oscar_kv.kernels.base import StoreTables, Windows
from oscar_kv.kernels.cuda.store import CudaStore, _check_arguments, run
from oscar_kv.kernels.cuda.store_spec import StoreSpec
from oscar_kv.kernels.cuda.store_tables import PreparedTables
from oscar_kv.layout import PAGE, PageLayout, read_pages

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulated kernels need g++")
SMALL = PageLayout(32, 48, 2, 2)
POISON = 0xAB


def kernels(codec: LayerCodec, dtype: torch.dtype, **tuning: int) -> EmulatedStore:
    return EmulatedStore(StoreSpec.choose(codec.layout, dtype, StoreTables.of(codec, "cpu"), (9, 0), **tuning))


def empty_state(
    codec: LayerCodec, pool: int, slots: int, sink: int, ring: int, dtype: torch.dtype, slot: list[int] | None = None
) -> State:
    heads, layout = codec.num_kv_heads, codec.layout

    def window(rows: int, d: int) -> Tensor:
        return torch.randn(slots, heads, rows, d, generator=torch.Generator().manual_seed(rows + d)).to(dtype)

    windows = Windows(
        window(sink, layout.k_dim), window(sink, layout.v_dim), window(ring, layout.k_dim), window(ring, layout.v_dim),
        None if slot is None else torch.tensor(slot, dtype=torch.int32),
    )  # fmt: skip
    return State(torch.full((pool, heads, layout.page_bytes), POISON, dtype=torch.uint8), windows)


def run_guarded(
    emulated: EmulatedStore,
    codec: LayerCodec,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    start: list[int],
    count: list[int],
    state: State,
    before: bool = False,
) -> State:
    """The state after the call; every buffer ends (before: begins) where nothing is mapped."""

    def guard(x: Tensor) -> Tensor:
        return guarded(x, before)

    w = state.windows
    out = State(
        guard(state.pages),
        Windows(
            *(guard(x) for x in (w.sink_k, w.sink_v, w.ring_k, w.ring_v)), None if w.slots is None else guard(w.slots)
        ),
    )
    numbers = [guard(torch.tensor(x, dtype=torch.int32)) for x in (start, count)]
    tables = StoreTables.of(codec, "cpu")
    _check_arguments(k, v, out.pages, table, *numbers, out.windows, tables, codec.layout)
    ready = PreparedTables.of(tables, codec.layout.k_bits, codec.layout.v_bits)
    run(emulated, guard(k), guard(v), out.pages, guard(table), *numbers, out.windows, ready)
    return out


def assert_same(codec: LayerCodec, got: State, want: State, written: set[int], rows: float = 0.02) -> None:
    """Windows to the bit, pages not to be written too; written ones but for a share of rows."""
    for name in ("sink_k", "sink_v", "ring_k", "ring_v"):
        assert torch.equal(getattr(got.windows, name), getattr(want.windows, name)), name
    for block in range(len(want.pages)):
        if block not in written:
            assert (got.pages[block] == POISON).all(), f"page {block} was not to be written"
    if written:
        index = sorted(written)
        d = difference(codec.layout, got.pages[index], want.pages[index])
        assert max(d.k_rows, d.v_rows) <= rows
        assert d.pairs <= rows


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


SHAPES = [
    (128, 128, 2, 2), (64, 64, 2, 2), (80, 112, 3, 1), (96, 64, 1, 4), (112, 80, 4, 2), (192, 128, 3, 2),
    (256, 256, 2, 2), (128, 128, 2, 1), (128, 128, 3, 3), (128, 128, 4, 4), (64, 256, 1, 1), (16, 16, 2, 3),
    (128, 192, 2, 4),
]  # fmt: skip
QUICK = [(80, 112, 3, 1), (128, 128, 2, 2)]


@pytest.mark.parametrize("shape", [x if x in QUICK else slow(x) for x in SHAPES], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
def test_codes_as_the_codec(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    codec = random_codec(PageLayout(*shape), 2)
    k, v = random_rows(codec, 1, 2 * PAGE, dtype)
    state = empty_state(codec, 2, 1, 0, PAGE, dtype)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    got = run_guarded(kernels(codec, dtype), codec, k, v, table, [0], [2 * PAGE], state)
    d = difference(codec.layout, got.pages.flip(0), encode_prompt(codec, k, v))
    assert max(d.k_rows, d.v_rows) <= 1 / 256
    assert d.pairs <= 1 / 256


@pytest.mark.parametrize(
    "options",
    [
        {"shaping": False},
        {"unbiased": False},
        slow({"unbiased": False, "shaping": False}),
        {"rotate": False},
        slow({"rotate": False, "shaping": False}),
        {"offset": 300.0},
    ],
    ids=str,
)
def test_recipes(options: dict[str, object]) -> None:
    codec = random_codec(PageLayout(48, 32, 2, 3), 2, **options)  # type: ignore[arg-type]
    k, v = random_rows(codec, 1, 2 * PAGE, torch.bfloat16)
    state = empty_state(codec, 2, 1, 0, PAGE, torch.bfloat16)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    got = run_guarded(kernels(codec, torch.bfloat16), codec, k, v, table, [0], [2 * PAGE], state)
    d = difference(codec.layout, got.pages, encode_prompt(codec, k, v))
    assert max(d.k_rows, d.v_rows) <= 1 / 256
    assert d.pairs <= 1 / 256


@pytest.mark.parametrize(
    ("shape", "pages"), [((64, 64, 2, 2), 12), slow((128, 128, 2, 2), 40), slow((64, 64, 3, 4), 40)]
)
def test_share_of_rows_with_other_codes(shape: tuple[int, int, int, int], pages: int) -> None:
    """At most one row in a thousand, and the weighted error stays what it is."""
    codec = random_codec(PageLayout(*shape), 2, offset=5.0)
    k, v = random_rows(codec, 1, pages * PAGE, torch.bfloat16)
    state = empty_state(codec, pages, 1, 0, PAGE, torch.bfloat16)
    table = torch.arange(pages, dtype=torch.int32)[None]
    got = run_guarded(kernels(codec, torch.bfloat16), codec, k, v, table, [0], [pages * PAGE], state)
    want = encode_prompt(codec, k, v)
    d = difference(codec.layout, got.pages, want)
    assert max(d.k_rows, d.v_rows) <= 1e-3
    assert weighted_error(codec, k, got.pages) == pytest.approx(weighted_error(codec, k, want), rel=1e-3)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_contract(data: st.DataObject) -> None:
    """Ragged batches: any start and count, borders in ring and sink, slots, no blocks, chunks longer than the ring."""
    codec = random_codec(SMALL, 2)
    batch, ring = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([64, 96, 288]))
    sink, n = data.draw(st.sampled_from([0, 20, 64, 100])), data.draw(st.sampled_from([1, 1, 5, 64, 70, 300]))
    begin = st.one_of(st.integers(0, 400), st.sampled_from([63, 127]))
    start = data.draw(st.lists(begin, min_size=batch, max_size=batch))
    count = data.draw(st.lists(st.integers(0, n), min_size=batch, max_size=batch))
    slots = data.draw(st.one_of(st.none(), st.permutations(range(batch + 1))))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    width = (400 + n) // PAGE + 1
    numbers = torch.randperm(batch * width, generator=torch.Generator().manual_seed(n)).int().view(batch, width)
    missing = torch.rand(batch, width, generator=torch.Generator().manual_seed(ring)) < 0.2
    table = torch.where(missing, -1, numbers).int()
    k, v = random_rows(codec, batch, n, dtype, seed=n)
    for i, c in enumerate(count):  # later rows are not read
        k[i, :, c:], v[i, :, c:] = torch.nan, torch.nan
    state = empty_state(codec, batch * width, batch + 1, sink, ring, dtype, None if slots is None else slots[:batch])
    got = run_guarded(kernels(codec, dtype), codec, k, v, table, start, count, state, before=n % 2 == 1)
    want = state.clone()
    written = store(codec, k, v, table, start, count, want)
    assert_same(codec, got, want, {block for _, block in written})


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    dk=st.integers(1, 16), dv=st.integers(1, 16), k_bits=st.integers(1, 4), v_bits=st.integers(1, 4),
    shaping=st.booleans(), unbiased=st.booleans(), rotate=st.booleans(), tiles=st.sampled_from([1, 2, None]),
)  # fmt: skip
def test_any_shape(
    dk: int, dv: int, k_bits: int, v_bits: int, shaping: bool, unbiased: bool, rotate: bool, tiles: int | None
) -> None:
    codec = random_codec(
        PageLayout(16 * dk, 16 * dv, k_bits, v_bits), 1, shaping=shaping, unbiased=unbiased, rotate=rotate
    )
    k, v = random_rows(codec, 1, PAGE, torch.float16)
    state = empty_state(codec, 1, 1, 0, PAGE, torch.float16)
    tuning = {} if tiles is None or max(dk, dv) > 8 else {"tiles": tiles}
    table = torch.zeros(1, 1, dtype=torch.int32)
    got = run_guarded(kernels(codec, torch.float16, **tuning), codec, k, v, table, [0], [PAGE], state)
    assert_same(codec, got, State(encode_prompt(codec, k, v), got.windows), {0}, rows=1 / 64)


def test_bytes_do_not_depend_on_chunks() -> None:
    """A prompt at once in blocks of several pages, and in pieces of any length in another tuning: the same bytes."""
    codec = random_codec(SMALL, 2)
    tokens = 6 * PAGE
    k, v = random_rows(codec, 1, tokens, torch.bfloat16)
    table = torch.arange(6, dtype=torch.int32)[None]
    state = empty_state(codec, 6, 1, 64, 128, torch.bfloat16)
    whole = run_guarded(
        kernels(codec, torch.bfloat16, key_pages=3, value_pages=2), codec, k, v, table, [0], [tokens], state
    )
    pieces, at = state, 0
    for n in (1, 62, 1, 30, 128, 100, 62):
        part = slice(at, at + n)
        pieces = run_guarded(
            kernels(codec, torch.bfloat16, tiles=1, value_tiles=1),
            codec,
            k[:, :, part],
            v[:, :, part],
            table,
            [at],
            [n],
            pieces,
        )
        at += n
    assert at == tokens
    assert torch.equal(whole.pages, pieces.pages)
    assert (whole.pages[0] == POISON).all()
    assert (whole.pages[1:] != POISON).any((1, 2)).all()


def _rows_of_one_number(k: Tensor) -> None:
    k[:, :, :8], k[:, :, 8:16], k[:, :, 16:24], k[:, :, 24:32] = 0.0, 1.0, -300.0, 1e-5


def _not_finite(k: Tensor) -> None:
    k[:, :, 0, 3], k[:, :, 1, 3], k[:, :, 2] = torch.inf, -torch.inf, torch.nan
    k[:, :, 17, :2] = torch.tensor([torch.inf, -torch.inf]).to(k.dtype)
    k[:, :, 20, ::3] = -torch.inf


def _huge(k: Tensor) -> None:
    k[:, :, :16] *= 2.0**13
    k[:, :, 16:32] = torch.where(k[:, :, 16:32] > 0, 60000.0, -60000.0).to(k.dtype)
    k[:, :, 40, 1] = 65000.0
    if k.dtype == torch.bfloat16:
        k[:, :, 50], k[:, :, 51, 2], k[:, :, 52] = 3e38, 2e38, 1e-39


def _tiny(k: Tensor) -> None:
    k *= 2.0**-20


@pytest.mark.parametrize("damage", [_rows_of_one_number, _not_finite, _huge, _tiny])
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_extreme_rows(damage: object, rotate: bool, dtype: torch.dtype) -> None:
    """Every stored pair is finite, and each row is as near to what it stands for as the codec's."""
    codec = random_codec(SMALL, 1, rotate=rotate, offset=0.0 if damage is _rows_of_one_number else 1.0)
    k, v = random_rows(codec, 1, PAGE, dtype)
    damage(k), damage(v)  # type: ignore[operator]
    state = empty_state(codec, 1, 1, 0, PAGE, dtype)
    table = torch.zeros(1, 1, dtype=torch.int32)
    got = run_guarded(kernels(codec, dtype), codec, k, v, table, [0], [PAGE], state)
    want = encode_prompt(codec, k, v)
    for ours, theirs in zip(read_pages(codec.layout, got.pages), read_pages(codec.layout, want), strict=True):
        assert ours.step.isfinite().all()
        assert ours.zero.isfinite().all()
        a, b = ours.dequantise(torch.float64), theirs.dequantise(torch.float64)
        scale = b.abs().amax(-1) + 1e-4
        off = (a - b).abs().amax(-1) / scale
        assert (off > 1e-2).double().mean() <= 1 / 64, off


def test_rows_anywhere_in_memory() -> None:
    """Token-major rows, and rows that are not aligned to 16 bytes."""
    codec = random_codec(SMALL, 2)
    k, v = random_rows(codec, 2, PAGE, torch.bfloat16)
    state = empty_state(codec, 2, 2, 0, PAGE, torch.bfloat16)
    table, emulated = torch.tensor([[1], [0]], dtype=torch.int32), kernels(codec, torch.bfloat16)
    want = run_guarded(emulated, codec, k, v, table, [0, 0], [PAGE, PAGE], state)
    room = torch.zeros(2, PAGE, 2, 101, dtype=torch.bfloat16)
    odd_k, odd_v = room[..., 1:33].transpose(1, 2), room[..., 33:81].transpose(1, 2)
    odd_k.copy_(k), odd_v.copy_(v)
    turned_k, turned_v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    for a, b in ((odd_k, odd_v), (turned_k, turned_v)):
        out, numbers = state.clone(), [torch.tensor(x, dtype=torch.int32) for x in ([0, 0], [PAGE, PAGE])]
        prepared = PreparedTables.of(StoreTables.of(codec, "cpu"))
        run(emulated, a, b, out.pages, table, *numbers, out.windows, prepared)
        assert torch.equal(out.pages, want.pages)
        assert torch.equal(out.windows.ring_k, want.windows.ring_k)


def test_block_numbers_out_of_range_fault() -> None:
    """The emulator would notice a page outside the pool."""
    codec = random_codec(SMALL, 1)
    k, v = random_rows(codec, 1, PAGE, torch.bfloat16)
    table = torch.full((1, 1), 1 << 20, dtype=torch.int32)
    with pytest.raises(EmulatedFault, match="outside every buffer"):
        run_guarded(
            kernels(codec, torch.bfloat16), codec, k, v, table, [0], [PAGE], empty_state(codec, 1, 1, 0, 64, k.dtype)
        )


def test_what_cannot_be_served_is_refused() -> None:
    codec = random_codec(SMALL, 1)
    tables, state = StoreTables.of(codec, "cpu"), empty_state(codec, 1, 1, 0, 64, torch.bfloat16)
    k, v = random_rows(codec, 1, 1, torch.bfloat16)
    one = torch.ones(1, dtype=torch.int32)
    arguments = (state.pages, one[None], one, one, state.windows, tables, SMALL)
    with pytest.raises(OscarError, match="CUDA device"):
        CudaStore()(k, v, *arguments)
    with pytest.raises(OscarError, match="one dtype"):
        _check_arguments(k, v.half(), *arguments)
    with pytest.raises(OscarError, match="k must be"):
        _check_arguments(v, v, *arguments)
    with pytest.raises(OscarError, match="int32"):
        _check_arguments(k, v, state.pages, one[None], one.long(), one, state.windows, tables, SMALL)
    short = empty_state(codec, 1, 1, 0, 63, torch.bfloat16)
    with pytest.raises(OscarError, match="63 rows"):
        _check_arguments(k, v, state.pages, one[None], one, one, short.windows, tables, SMALL)
    with pytest.raises(OscarError, match="float32"):
        StoreSpec.choose(SMALL, torch.float32, tables, (9, 0))
    with pytest.raises(OscarError, match="compute capability"):
        StoreSpec.choose(SMALL, torch.bfloat16, tables, (7, 5))
    with pytest.raises(OscarError, match="shared memory"):
        StoreSpec.choose(PageLayout(256, 256, 2, 2), torch.bfloat16, tables, (8, 6), key_pages=2)
