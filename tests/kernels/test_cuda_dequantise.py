# SPDX-License-Identifier: Apache-2.0
"""The CUDA de-quantise kernel's source, run on a CPU, against the layout's own reader: bit for bit."""

from __future__ import annotations

import pytest
import torch
from emulate import EmulatedFault, compiler, guarded
from emulate_store import EmulatedDequantise

from oscar_kv.errors import OscarError
from oscar_kv.kernels.cuda.dequantise import CudaDequantise, DequantiseSpec, _check_arguments, run
from oscar_kv.layout import PageLayout, read_pages

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulated kernels need g++")


def random_pages(layout: PageLayout, pool: int, heads: int, scale: float = 1.0) -> torch.Tensor:
    """Any bytes are codes; steps and zeros are finite."""
    generator = torch.Generator().manual_seed(layout.page_bytes)
    pages = torch.randint(0, 256, (pool, heads, layout.page_bytes), dtype=torch.uint8, generator=generator)
    meta = (torch.rand(pool, heads, 256, generator=generator) - 0.3) * scale
    pages[..., layout.metadata_offset :] = meta.half().view(torch.uint8).view(pool, heads, -1)
    return pages


def expected(layout: PageLayout, pages: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    out = []
    for q in read_pages(layout, pages[blocks.clamp(min=0).long()]):
        x = q.dequantise(torch.float32)  # [batch, n, heads, 64, d]
        x[blocks < 0] = 0
        if dtype == torch.float16:
            x = x.clamp(-65504, 65504)
        out.append(x.transpose(2, 3).flatten(1, 2).to(dtype))
    return out


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


QUICK = [(128, 128, 2, 2), (80, 112, 3, 1), (96, 64, 1, 4)]
MORE = [(64, 64, 1, 3), (112, 80, 4, 2), (192, 128, 3, 2), (256, 256, 2, 3), (128, 192, 1, 1), (16, 48, 3, 3)]


@pytest.mark.parametrize("shape", [*QUICK, *(slow(x) for x in MORE)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_as_the_layout_says(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    layout = PageLayout(*shape)
    pages, blocks = guarded(random_pages(layout, 5, 2)), torch.tensor([[3, -1, 0], [4, 2, 2]], dtype=torch.int32)
    k, v = (guarded(torch.full((2, 192, 2, d), torch.nan, dtype=dtype)) for d in (layout.k_dim, layout.v_dim))
    run(EmulatedDequantise(DequantiseSpec(layout, dtype, (9, 0))), pages, blocks, k, v)
    for got, want in zip((k, v), expected(layout, pages, blocks, dtype), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("offset", [0, 1])
def test_strides_and_alignment(offset: int) -> None:
    """Rows inside larger tensors, heads before tokens; what lies between stays as it is."""
    layout, blocks = PageLayout(64, 64, 2, 2), torch.tensor([[1, 0]], dtype=torch.int32)
    pages = random_pages(layout, 2, 2)
    room = [torch.full((1, 2, 128, 80 + offset), 7.0, dtype=torch.float16) for _ in range(2)]
    k, v = (x[..., offset : 64 + offset].transpose(1, 2) for x in room)
    run(EmulatedDequantise(DequantiseSpec(layout, torch.float16, (9, 0))), pages, blocks, k, v)
    for whole, got, want in zip(room, (k, v), expected(layout, pages, blocks, torch.float16), strict=True):
        assert torch.equal(got, want)
        whole[..., offset : 64 + offset] = 7.0
        assert (whole == 7.0).all()


def test_fp16_saturates() -> None:
    layout, blocks = PageLayout(64, 64, 4, 4), torch.zeros(1, 1, dtype=torch.int32)
    pages = random_pages(layout, 1, 1, scale=60000.0)
    k, v = (torch.full((1, 64, 1, 64), torch.nan, dtype=torch.float16) for _ in range(2))
    run(EmulatedDequantise(DequantiseSpec(layout, torch.float16, (9, 0))), pages, blocks, k, v)
    assert k.isfinite().all()
    assert (k == 65504).any()
    assert torch.equal(k, expected(layout, pages, blocks, torch.float16)[0])


def test_block_numbers_out_of_range_fault() -> None:
    """The emulator would notice a page outside the pool."""
    layout, blocks = PageLayout(64, 64, 2, 2), torch.full((1, 1), 1 << 20, dtype=torch.int32)
    pages = guarded(random_pages(layout, 1, 1))
    k, v = (torch.zeros(1, 64, 1, 64, dtype=torch.float16) for _ in range(2))
    with pytest.raises(EmulatedFault, match="outside every buffer"):
        run(EmulatedDequantise(DequantiseSpec(layout, torch.float16, (9, 0))), pages, blocks, k, v)


def test_what_cannot_be_served_is_refused() -> None:
    layout, blocks = PageLayout(64, 64, 2, 2), torch.zeros(1, 1, dtype=torch.int32)
    pages, k = random_pages(layout, 1, 1), torch.zeros(1, 64, 1, 64, dtype=torch.float16)
    with pytest.raises(OscarError, match="CUDA device"):
        CudaDequantise()(pages, blocks, layout, k, k)
    with pytest.raises(OscarError, match="float64"):
        DequantiseSpec(layout, torch.float64, (9, 0))
    with pytest.raises(OscarError, match="v must be"):
        _check_arguments(pages, blocks, layout, k, k[:, :32])
    with pytest.raises(OscarError, match="last dimension"):
        _check_arguments(pages, blocks, layout, k, k.repeat(1, 1, 1, 2)[..., ::2])
