# SPDX-License-Identifier: Apache-2.0
"""The kernels' interface in PyTorch: what every implementation must do, against the storage and the definition."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cache"))

from test_cache_layer import CODEC, DIM, HEADS, fill, layer, make_codec, rows

from oscar_kv.cache import MixedLayer
from oscar_kv.errors import OscarError
from oscar_kv.kernels.base import LayerTables, StoreTables, Windows
from oscar_kv.kernels.torch_ref import attend_row
from oscar_kv.kernels.torch_set import kernel_set

SET = kernel_set()
TABLES = StoreTables.of(CODEC, "cpu")


def by_kernel(count: int, codec: Any = CODEC) -> MixedLayer:
    return MixedLayer(codec, count, torch.float32, torch.device("cpu"), (SET.store, StoreTables.of(codec, "cpu")))


def alike(a: MixedLayer, b: MixedLayer, plain: bool) -> None:
    """Windows to the bit; pages to the bit where nothing is shaped, else but for a broken tie."""
    x, y = a.state(), b.state()
    for name in ("sink_k", "sink_v", "ring_k", "ring_v", "lengths", "raw_from"):
        assert torch.equal(x[name], y[name]), name
    assert float((x["pages"] != y["pages"]).double().mean()) <= (0 if plain else 2e-3)


@pytest.mark.parametrize("sizes", [[420], [1] * 130, [63, 1, 1, 200, 64], [300, 17, 5, 1, 1]], ids=str)
@pytest.mark.parametrize("plain", [True, False])
def test_storing_is_what_the_storage_does(sizes: list[int], plain: bool) -> None:
    codec = make_codec(shaping=False, unbiased=False) if plain else CODEC
    k, v = rows(2, sum(sizes))
    alike(fill(by_kernel(2, codec), k, v, sizes), fill(layer(2, codec), k, v, sizes), plain)


def test_ragged_rows_slots_and_blocks() -> None:
    """One call for four requests: slots permuted, one without tokens, one with a page that is not to be written."""
    starts, counts, slots = [10, 250, 100, 64], [90, 7, 0, 130], [2, 0, 3, 1]
    k, v = rows(4)
    before = layer(4)
    for i, (start, slot) in enumerate(zip(starts, slots, strict=True)):
        valid = torch.zeros(4, start, dtype=torch.bool)
        valid[slot] = True
        spread = k[i : i + 1, :, :start].expand(4, -1, -1, -1), v[i : i + 1, :, :start].expand(4, -1, -1, -1)
        before.append(*spread, valid)
    pool = torch.full((40, HEADS, CODEC.layout.page_bytes), 7, dtype=torch.uint8)
    table = torch.arange(28, dtype=torch.int32).view(4, 7) + 3
    table[3, 1] = -1
    new = max(counts)
    part_k, part_v = (
        torch.stack([torch.cat([x[i, :, s : s + n], torch.full((HEADS, new - n, DIM), torch.nan)], 1)
                     for i, (s, n) in enumerate(zip(starts, counts, strict=True))])
        for x in (k, v)
    )  # fmt: skip
    w = Windows(before.sink_k, before.sink_v, before.ring_k, before.ring_v, torch.tensor(slots, dtype=torch.int32))
    ints = [torch.tensor(x, dtype=torch.int32) for x in (starts, counts)]
    SET.store(part_k, part_v, pool, table, *ints, w, TABLES, CODEC.layout)
    written = set()
    for i, (start, count, slot) in enumerate(zip(starts, counts, slots, strict=True)):
        whole = fill(layer(), k[i : i + 1, :, : start + count], v[i : i + 1, :, : start + count], [])
        assert torch.equal(w.ring_k[slot], whole.ring_k[0])
        assert torch.equal(w.sink_v[slot], whole.sink_v[0])
        for page in range(start // 64, (start + count) // 64):
            if table[i, page] >= 0:
                written.add(int(table[i, page]))
                wanted = whole.pool.read(0, page, page + 1)[0]
                assert float((pool[table[i, page]] != wanted).double().mean()) < 2e-3
    untouched = torch.tensor([i not in written for i in range(40)])
    assert written
    assert bool((pool[untouched] == 7).all())


def test_decoding_reads_sink_history_and_ring() -> None:
    held = fill(layer(3), *rows(3), [])
    tables = LayerTables.of(CODEC.k, CODEC.v, "cpu")
    q = torch.randn(5, 4, DIM, generator=torch.Generator().manual_seed(3))
    slots, lengths = [2, 0, 1, 1, 0], [420, 419, 410, 20, 0]
    start = [min(32, n) for n in lengths]
    end = [min(max(32, n - 96), n) for n in lengths]
    ints = [torch.tensor(x, dtype=torch.int32) for x in (start, end, lengths, slots)]
    w = Windows(held.sink_k, held.sink_v, held.ring_k, held.ring_v, ints[3])
    table = held.block_table()[ints[3].long()]
    got = SET.decode(q, held.pool.pages, table, *ints[:3], w, tables, CODEC.layout, softcap=9.0)
    for i, (slot, n) in enumerate(zip(slots, lengths, strict=True)):
        if not n:
            assert bool((got[i] == 0).all())
            continue
        if n == 20:
            raw = held.sink_k[slot][:, :20], held.sink_v[slot][:, :20]
            sink, window, new = (tuple(x[:, a:b] for x in raw) for a, b in ((0, 19), (0, 0), (19, 20)))
            pages, first = held.pool.pages[:0], 0
        else:
            sink = held.sink_k[slot], held.sink_v[slot]
            window, new = held.raw(slot, end[i], n - 1), held.raw(slot, n - 1, n)
            pages, first = held.pages(slot, 32, end[i])
        wanted = attend_row(q[i][:, None], sink, pages, first, window, new, position=n - 1, hist_start=start[i],
                            hist_end=[end[i]], tables=tables, layout=CODEC.layout, scale=DIM**-0.5, softcap=9.0)[:, 0]  # type: ignore[arg-type]  # fmt: skip
        assert (got[i] - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantising_a_tile(dtype: torch.dtype) -> None:
    held = fill(layer(1), *rows(1), [])
    blocks = torch.tensor([[3, -1, 0], [1, 1, -5]], dtype=torch.int32)
    store = [torch.full((2, 192, HEADS, DIM + 8), torch.nan, dtype=dtype) for _ in "kv"]
    k, v = (x[..., :DIM] for x in store)
    SET.dequantise(held.pool.pages, blocks, CODEC.layout, k, v)
    for got, codes in zip((k, v), CODEC.decode_rotated(held.pool.pages), strict=True):
        for row in range(2):
            for i, block in enumerate(blocks[row].tolist()):
                wanted = codes[block].transpose(0, 1).to(dtype) if block >= 0 else torch.zeros(64, HEADS, DIM)
                assert torch.equal(got[row, 64 * i : 64 * i + 64].float(), wanted.float())
    assert bool(store[0][..., DIM:].isnan().all())


def test_values_beyond_the_dtype_are_saturated() -> None:
    held = fill(layer(1), *rows(1), [])
    pages = held.pool.pages.clone()
    meta = pages[..., CODEC.layout.metadata_offset :].view(torch.float16)
    meta.view(*meta.shape[:-1], 64, 4)[..., 0] = 60000.0
    k, v = (torch.empty(1, 64, HEADS, DIM, dtype=torch.float16) for _ in "kv")
    SET.dequantise(pages, torch.zeros(1, 1, dtype=torch.int32), CODEC.layout, k, v)
    assert bool(k.isfinite().all())
    assert float(k.max()) == 65504.0


def test_rooms_of_another_shape_are_refused() -> None:
    held = fill(layer(1), *rows(1), [])
    x = torch.empty(1, 64, HEADS, DIM)
    with pytest.raises(OscarError, match="dequantise: v must be"):
        SET.dequantise(held.pool.pages, torch.zeros(1, 1, dtype=torch.int32), CODEC.layout, x, x[..., :8])
