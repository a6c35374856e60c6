# SPDX-License-Identifier: Apache-2.0
"""Packing is a bijection on whole pages, for every head_dim and width."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_kv.layout import PageLayout, code_positions, pack_codes, read_pages, unpack_codes, write_pages
from oscar_kv.quantizer import Quantised

DIMS = list(range(16, 257, 16))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("d", DIMS)
def test_pack_then_unpack_is_the_identity(d: int, bits: int) -> None:
    code = torch.randint(0, 2**bits, (2, 3, 64, d), dtype=torch.uint8)
    for side in ("k", "v"):
        data = pack_codes(code, side, bits)
        assert data.shape == (2, 3, 8 * d * bits)
        assert torch.equal(unpack_codes(data, side, d, bits), code)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_slices_and_views_of_other_tensors_pack_and_unpack(bits: int) -> None:
    """Rows that start at an odd byte, transposed rows, and pages cut out of wider ones."""
    code = torch.randint(0, 2**bits, (3, 64, 48), dtype=torch.uint8)
    odd = torch.empty(code.numel() + 3, dtype=torch.uint8)[3:].view_as(code).copy_(code)
    for side in ("k", "v"):
        data = pack_codes(code, side, bits)
        assert torch.equal(pack_codes(odd, side, bits), data)
        assert torch.equal(pack_codes(code.mT.contiguous().mT, side, bits), data)
        wide = torch.full((3, data.shape[1] + 10), 255, dtype=torch.uint8)
        wide[:, 5:-5] = data
        assert torch.equal(unpack_codes(wide[:, 5:-5], side, 48, bits), code)
        high = code + (255 << bits) % 256  # bits beyond the width are dropped
        assert torch.equal(pack_codes(high, side, bits), data)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("d", DIMS)
def test_the_rule_is_a_bijection_without_padding(d: int, bits: int) -> None:
    for side in ("k", "v"):
        byte, bit = code_positions(side, d, bits)
        assert (bit % bits == 0).all()
        assert ((byte * 8 + bit) // bits).reshape(-1).sort().values.equal(torch.arange(64 * d))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_page_bytes_survive_a_round_trip(data: st.DataObject) -> None:
    layout = PageLayout(
        *(data.draw(st.sampled_from(DIMS)) for _ in range(2)), *(data.draw(st.integers(1, 4)) for _ in range(2))
    )
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    page = torch.randint(0, 256, (2, layout.page_bytes), dtype=torch.uint8, generator=g)
    page[:, layout.metadata_offset :].view(torch.float16).nan_to_num_(1.0, 1.0, 1.0)
    assert torch.equal(write_pages(layout, *read_pages(layout, page)), page)
    assert layout.page_bytes % 128 == 0


def test_the_usual_page_has_the_prototype_s_words() -> None:
    """d = 128, 2 bits: word 128·(t/16) + 4·lane + 2·(t/8 mod 2) + i/64 of the keys; the values' in the same spirit."""
    t, i = torch.meshgrid(torch.arange(64), torch.arange(128), indexing="ij")
    byte, bit = code_positions("k", 128, 2)
    lane = 4 * (t % 8) + (i % 8) // 2
    assert torch.equal(byte // 4, t // 16 * 128 + 4 * lane + 2 * (t // 8 % 2) + i // 64)
    assert torch.equal(byte % 4 * 8 + bit, 16 * (i % 2) + 2 * (i // 8 % 8))
    byte, bit = code_positions("v", 128, 2)
    lane = 4 * (i % 8) + t % 8 // 2
    assert torch.equal(byte // 4, t // 16 * 128 + 4 * lane + 2 * (t // 8 % 2) + i // 8 % 2)
    assert torch.equal(byte % 4 * 8 + bit, 16 * (t % 2) + 2 * (i // 16))


@pytest.mark.parametrize(
    ("d", "bits", "expected"),
    [(128, (2, 1), 1.75), (128, (2, 2), 2.25), (128, (3, 2), 2.75), (128, (4, 4), 4.25), (64, (2, 2), 2.5)],
)
def test_bits_per_element(d: int, bits: tuple[int, int], expected: float) -> None:
    layout = PageLayout(d, d, *bits)
    rows = [Quantised(torch.zeros(64, d, dtype=torch.uint8), torch.ones(64).half(), torch.ones(64).half())] * 2
    assert layout.bits_per_element == expected
    assert write_pages(layout, *rows).nbytes * 8 / (64 * 2 * d) == expected


def test_no_pages_at_all() -> None:
    layout = PageLayout(64, 80, 3, 2)
    k, v = read_pages(layout, torch.empty(0, 2, layout.page_bytes, dtype=torch.uint8))
    assert k.code.shape == (0, 2, 64, 64) and v.code.shape == (0, 2, 64, 80) and k.step.shape == (0, 2, 64)
    assert write_pages(layout, k, v).shape == (0, 2, layout.page_bytes)
