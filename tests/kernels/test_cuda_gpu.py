# SPDX-License-Identifier: Apache-2.0
"""The CUDA decode kernels on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from decode_reference import random_case, reference, relative_error, to_device

from oscar_kv.errors import OscarError
from oscar_kv.kernels.cuda.decode import CudaDecode
from oscar_kv.layout import PageLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs a CUDA device, sm_80 or newer",
    ),
]
RAGGED = [(64, 4000, 4200), (64, 64, 64), (10, 131, 200), (0, 0, 0), (5, 64, 70), (64, 129, 400)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [(2, 2), (2, 1), (3, 3), (4, 4)])
def test_twice_as_exact_as_needed(bits: tuple[int, int], dtype: torch.dtype) -> None:
    layout = PageLayout(128, 128, *bits)
    c = to_device(random_case(layout, 4, RAGGED, dtype=dtype), "cuda")
    out = torch.full((len(RAGGED), 8, 128), math.nan, dtype=dtype, device="cuda")
    CudaDecode()(*c.arguments(), layout, out=out)  # type: ignore[arg-type]
    want = reference(c)
    assert relative_error(out, want) < 2 * relative_error(reference(c, dtype=torch.bfloat16), want)


def test_graph_follows_lengths_on_the_device() -> None:
    """Captured once; lengths change on the device between replays."""
    layout = PageLayout(128, 128, 2, 2)
    c = to_device(random_case(layout, 4, [(64, 4000, 4200), (64, 3000, 3200)], dtype=torch.float16), "cuda")
    decode = CudaDecode()
    decode(*c.arguments(), layout)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(*c.arguments(), layout)  # type: ignore[arg-type]
    for end in (4000, 2048, 100):
        c.hist_end[0] = end
        c.seq_len[0] = end  # no recent tokens: their rows hold others
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, reference(c)) < 1e-3


def test_tensors_elsewhere_are_refused() -> None:
    layout = PageLayout(128, 128, 2, 2)
    c = random_case(layout, 4, RAGGED, dtype=torch.float16)
    with pytest.raises(OscarError, match="CUDA device"):
        CudaDecode()(*c.arguments(), layout)  # type: ignore[arg-type]
