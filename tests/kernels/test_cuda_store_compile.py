# SPDX-License-Identifier: Apache-2.0
"""The store and de-quantise kernels compile for every architecture they are meant for; spills and sizes are known."""

from __future__ import annotations

import pytest
import torch
from test_cuda_compile import CAPABILITIES, needs_nvrtc

from oscar_kv.kernels.base import StoreTables
from oscar_kv.kernels.cuda.compiler import compile_source
from oscar_kv.kernels.cuda.dequantise import DEQUANTISE_HEADERS, DequantiseSpec
from oscar_kv.kernels.cuda.store_launch import KERNELS
from oscar_kv.kernels.cuda.store_spec import STORE_HEADERS, StoreSpec
from oscar_kv.layout import PageLayout

MAIN = PageLayout(128, 128, 2, 2)
EVERY = [
    *((c, MAIN, shaped) for c in CAPABILITIES for shaped in (True, False)),
    ((9, 0), PageLayout(256, 256, 2, 2), True),
    ((9, 0), PageLayout(128, 128, 3, 3), True),
    ((8, 9), PageLayout(80, 112, 3, 1), True),
]
QUICK = [((9, 0), MAIN, True)]
CASES = [*QUICK, *(pytest.param(*x, marks=pytest.mark.slow) for x in EVERY if x not in QUICK)]
# What the assembler puts aside lies around the rare paths (careful_rows) where a warp's rows take nearly all registers.
SPILLS = 512


def tables(shaped: bool) -> StoreTables:
    some = torch.zeros(1)
    return StoreTables(some, some, some, some, some if shaped else None, some if shaped else None, True)


@needs_nvrtc
@pytest.mark.parametrize(("capability", "layout", "shaped"), CASES)
def test_spills(capability: tuple[int, int], layout: PageLayout, shaped: bool) -> None:
    spec = StoreSpec.choose(layout, torch.bfloat16, tables(shaped), capability)
    usage = compile_source("store.cu", spec.header, capability, STORE_HEADERS).usage
    assert set(usage) == set(KERNELS)
    for name, u in usage.items():
        print(f"sm_{capability[0]}{capability[1]} {layout} shaped {shaped} {name}: {u}")
        assert u.spill_bytes <= SPILLS, name


@needs_nvrtc
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_dequantise(capability: tuple[int, int]) -> None:
    spec = DequantiseSpec(MAIN, torch.bfloat16, capability)
    usage = compile_source("dequantise.cu", spec.header, capability, DEQUANTISE_HEADERS).usage
    print(f"sm_{capability[0]}{capability[1]} {usage}")
    assert usage["dequantise"].spill_bytes == 0


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("shaped", [True, False])
def test_every_shape_fits_shared_memory(capability: tuple[int, int], shaped: bool) -> None:
    for dk in (64, 80, 96, 112, 128, 192, 256):
        for dv in (64, dk, 256):
            spec = StoreSpec.choose(PageLayout(dk, dv, 2, 2), torch.bfloat16, tables(shaped), capability)
            assert spec.shared_bytes <= spec.shared_limit
            assert spec.group_bytes(True) % 128 == spec.group_bytes(False) % 128 == 0
