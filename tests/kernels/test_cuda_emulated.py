# SPDX-License-Identifier: Apache-2.0
"""The CUDA decode kernels' source, run on a CPU, against float64 on the same pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decode_reference import random_case, reference, relative_error
from emulate import EmulatedKernels, compiler

from oscar_kv.kernels.cuda.decode import run
from oscar_kv.kernels.cuda.spec import DecodeSpec
from oscar_kv.layout import PageLayout

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulated kernels need g++")

# (hist_start, hist_end, seq_len): borders inside pages, no history, no tokens at all, one page, several thread blocks.
RAGGED = [(64, 400, 500), (64, 64, 64), (10, 131, 200), (0, 0, 0), (5, 64, 70), (64, 129, 400)]
# Half precision outputs: their own rounding is 2e-4 of the result, so a wrong code or factor shows.
LIMIT = 3e-4


def decode(
    folder: Path,
    layout: PageLayout,
    group: int,
    lengths: list[tuple[int, int, int]] = RAGGED,
    capability: tuple[int, int] = (9, 0),
    softcap: float = 0.0,
    multiprocessors: int = 4,
    dtype: torch.dtype = torch.float16,
    blocks: int = 3,
    scale: float | None = None,
    **case: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, float64 reference). The output buffer starts as NaN."""
    spec = DecodeSpec.choose(layout, group, dtype, capability, softcap > 0)
    kernels = EmulatedKernels(spec, blocks, folder, multiprocessors)
    c = random_case(layout, group, lengths, dtype=dtype, **case)  # type: ignore[arg-type]
    out = torch.full((len(lengths), c.q.shape[1], layout.v_dim), torch.nan, dtype=dtype)
    run(kernels, *c.arguments(), softcap=softcap, scale=scale, out=out)  # type: ignore[arg-type]
    return out, reference(c, softcap=softcap, scale=scale)


@pytest.mark.parametrize("bits", [(2, 2), (2, 1), (3, 2), (3, 3), (4, 4), (1, 4)])
def test_bits(tmp_path: Path, bits: tuple[int, int]) -> None:
    assert relative_error(*decode(tmp_path, PageLayout(128, 128, *bits), 4)) < LIMIT


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout(d, d, k, v)
        for d, k, v in (
            (64, 2, 2),
            (80, 3, 1),
            (80, 1, 3),
            (96, 1, 1),
            (96, 2, 3),
            (112, 2, 2),
            (112, 3, 4),
            (192, 4, 2),
            (256, 2, 2),
        )
    ]
    + [PageLayout(192, 128, 3, 2), PageLayout(64, 256, 2, 2)],
    ids=lambda x: f"{x.k_dim}-{x.v_dim}-{x.k_bits}{x.v_bits}",
)
def test_head_sizes(tmp_path: Path, layout: PageLayout) -> None:
    assert relative_error(*decode(tmp_path, layout, 2)) < LIMIT


@pytest.mark.parametrize(("group", "multiprocessors"), [(1, 4), (5, 100), (8, 4), (12, 4), (16, 100), (20, 4)])
def test_groups(tmp_path: Path, group: int, multiprocessors: int) -> None:
    """Few multiprocessors: many heads a finishing block; many: one."""
    out = decode(tmp_path, PageLayout(64, 64, 2, 2), group, multiprocessors=multiprocessors)
    assert relative_error(*out) < LIMIT


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_without_bulk_copies(tmp_path: Path, capability: tuple[int, int]) -> None:
    assert relative_error(*decode(tmp_path, PageLayout(80, 80, 1, 2), 4, capability=capability)) < LIMIT


def test_bfloat16(tmp_path: Path) -> None:
    out, want = decode(tmp_path, PageLayout(64, 64, 2, 2), 4, dtype=torch.bfloat16)
    assert relative_error(out, want) < 1.1 * relative_error(want.bfloat16(), want)


def test_softcap_and_scale(tmp_path: Path) -> None:
    assert relative_error(*decode(tmp_path, PageLayout(64, 64, 2, 2), 4, softcap=3.0, scale=0.5)) < LIMIT


def test_without_rotation(tmp_path: Path) -> None:
    assert relative_error(*decode(tmp_path, PageLayout(64, 64, 2, 2), 4, rotate=False)) < LIMIT


def test_many_blocks_share_one_head(tmp_path: Path) -> None:
    lengths = [(64, 2000, 2200)]
    assert relative_error(*decode(tmp_path, PageLayout(64, 64, 2, 2), 4, lengths, blocks=40)) < LIMIT


@pytest.mark.parametrize("v_scale", [2.0**-12, 300.0, 20000.0])
def test_range_of_value_steps(tmp_path: Path, v_scale: float) -> None:
    """Steps from fp16's smallest to beyond what a fixed power of two would stand."""
    out, want = decode(tmp_path, PageLayout(64, 64, 2, 2), 4, [(0, 300, 300)], dtype=torch.bfloat16, v_scale=v_scale)
    assert relative_error(out, want) < 4e-3


def test_large_queries(tmp_path: Path) -> None:
    """|q R_K| of about 8,000 times the usual: beyond fp16 with a fixed factor. Softmax is then nearly one-hot."""
    out, want = decode(
        tmp_path, PageLayout(64, 64, 2, 2), 4, [(0, 300, 300)], dtype=torch.bfloat16, q_scale=8000.0, scale=1e-4
    )
    assert relative_error(out, want) < 4e-3


def test_infinite_query_spoils_its_own_head_only(tmp_path: Path) -> None:
    layout = PageLayout(64, 64, 2, 2)
    spec = DecodeSpec.choose(layout, 4, torch.float16, (9, 0))
    c = random_case(layout, 4, RAGGED[:1], dtype=torch.float16)
    want = reference(c)
    c.q[0, 1, 3] = torch.inf
    out = run(EmulatedKernels(spec, 3, tmp_path), *c.arguments())  # type: ignore[arg-type]
    others = [0, 2, 3, 4, 5, 6, 7]
    assert not torch.isfinite(out[0, 1]).any()
    assert relative_error(out[:, others], want[:, others]) < LIMIT
