# SPDX-License-Identifier: Apache-2.0
"""The Triton decode kernels, run by Triton's interpreter, against float64 on the same pages."""

from __future__ import annotations

import math

import pytest
import torch
from decode_reference import random_case, reference, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton_worker import AVAILABLE, run

from oscar_kv.errors import OscarError
from oscar_kv.layout import PageLayout

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs the package triton")

# (hist_start, hist_end, seq_len): borders inside pages, no history, no tokens at all, one page.
RAGGED = [(64, 300, 350), (10, 131, 150), (0, 0, 0)]
SHORT = [(60, 150, 170)]
# Half precision outputs: their own rounding is 2e-4 of the result, so a wrong code or factor shows.
LIMIT = 3e-4


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def decode(
    layout: PageLayout,
    group: int,
    lengths: list[tuple[int, int, int]] = SHORT,
    dtype: torch.dtype = torch.float16,
    softcap: float = 0.0,
    scale: float | None = None,
    tuning: dict[str, int] | None = None,
    **case: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, float64 reference). Outputs start as NaN, and so does every input that must not be read."""
    c = random_case(layout, group, lengths, dtype=dtype, **{"heads": 1, "ring_rows": 96, **case})  # type: ignore[arg-type]
    out = torch.full((len(lengths), c.q.shape[1], layout.v_dim), math.nan, dtype=dtype)
    run("decode", *c.arguments(), layout, softcap=softcap, scale=scale, out=out, tuning=tuning or {})
    return out, reference(c, softcap=softcap, scale=scale)


@pytest.mark.parametrize("bits", [(2, 2), (1, 4), (3, 3), slow((2, 1)), slow((4, 1)), slow((3, 2)), slow((4, 4))])
def test_bits(bits: tuple[int, int]) -> None:
    assert relative_error(*decode(PageLayout(64, 64, *bits), 4)) < LIMIT


@pytest.mark.parametrize(
    "layout",
    [PageLayout(128, 128, 2, 2), PageLayout(80, 112, 3, 1)]
    + [
        slow(PageLayout(*x))
        for x in ((96, 96, 1, 3), (112, 80, 4, 2), (192, 192, 2, 2), (256, 256, 2, 2), (192, 128, 3, 2), (16, 48, 1, 1))
    ],
    ids=lambda x: f"{x.k_dim}-{x.v_dim}-{x.k_bits}{x.v_bits}",
)
def test_head_sizes(layout: PageLayout) -> None:
    assert relative_error(*decode(layout, 2)) < LIMIT


@pytest.mark.parametrize("group", [1, 20, *(slow(g) for g in (5, 6, 7, 8, 12, 16))])
def test_groups(group: int) -> None:
    assert relative_error(*decode(PageLayout(32, 32, 2, 2), group)) < LIMIT


def test_ragged_batch_of_several_heads() -> None:
    out, want = decode(PageLayout(32, 32, 2, 2), 4, RAGGED, heads=2)
    assert relative_error(out, want) < LIMIT
    assert not out[2].any()


@pytest.mark.parametrize("programs", [1, slow(64)])
def test_few_and_many_pieces(programs: int) -> None:
    """One program for all pages of a head, and more programs than some requests have pages."""
    out = decode(PageLayout(32, 32, 2, 2), 4, [(64, 600, 650), (64, 70, 100)], tuning={"programs": programs})
    assert relative_error(*out) < LIMIT


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_shapes(data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    layout = PageLayout(16 * draw(1, 4), 16 * draw(1, 4), draw(1, 4), draw(1, 4))
    lengths = []
    for _ in range(draw(1, 2)):
        start = draw(0, 64)
        end = start + draw(0, 140)
        lengths.append((start, end, end + draw(0, 96)))
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    softcap = data.draw(st.sampled_from([0.0, 2.0]))
    c = random_case(layout, draw(1, 6), lengths, dtype=dtype, heads=1, ring_rows=96, seed=draw(0, 99))
    out = torch.full((len(lengths), c.q.shape[1], layout.v_dim), math.nan, dtype=dtype)
    run("decode", *c.arguments(), layout, softcap=softcap, out=out)
    want = reference(c, softcap=softcap)
    plain = reference(c, softcap=softcap, dtype=torch.bfloat16)
    assert (out.double() - want).norm() <= 2 * (plain.double() - want).norm() + 1e-6 * want.norm()


def test_bfloat16() -> None:
    """The interpreter rounds to bf16 towards zero, which doubles the error of the output's own rounding."""
    out, want = decode(PageLayout(64, 64, 2, 2), 4, dtype=torch.bfloat16)
    assert relative_error(out, want) < 2.2 * relative_error(want.bfloat16(), want)


def test_softcap_and_scale() -> None:
    assert relative_error(*decode(PageLayout(32, 32, 2, 2), 4, softcap=3.0, scale=0.5)) < LIMIT


def test_without_rotation() -> None:
    assert relative_error(*decode(PageLayout(32, 32, 2, 2), 4, rotate=False)) < LIMIT


@pytest.mark.parametrize("v_scale", [2.0**-12, 300.0, slow(20000.0)])
def test_range_of_value_steps(v_scale: float) -> None:
    """Steps from fp16's smallest to beyond what a fixed power of two would stand."""
    out, want = decode(PageLayout(32, 32, 2, 2), 4, [(0, 190, 190)], dtype=torch.bfloat16, v_scale=v_scale)
    assert relative_error(out, want) < 4e-3


def test_a_large_step_leaves_later_pages_exact() -> None:
    """One page with steps near fp16's end, seen with next to no weight, before pages of ordinary ones."""
    layout = PageLayout(32, 32, 2, 2)
    c = random_case(layout, 4, [(0, 192, 192)], dtype=torch.float16, heads=1)
    meta = c.pages[..., layout.metadata_offset :].view(torch.float16).view(-1, 1, 64, 4)
    meta[c.block_table[0, 0].long(), :, :, 2] = 30000.0
    meta[c.block_table[0, 0].long(), :, :, 0] = 2.0**-10
    c.q.fill_(0.5)
    meta[c.block_table[0, 1:].long(), :, :, 1] = 60.0  # keys that take all the weight, after the first page
    c = type(c)(**{**vars(c), "tables": type(c.tables)(None, c.tables.k_centre, None, c.tables.v_centre)})
    meta[c.block_table[0, 0].long(), :, :, 1] = -60.0
    out = run("decode", *c.arguments(), layout, tuning={"programs": 1})
    assert relative_error(out, reference(c)) < LIMIT


def test_large_queries() -> None:
    """|q R_K| of about 8,000 times the usual: beyond fp16 with a fixed factor. Softmax is then nearly one-hot."""
    out, want = decode(PageLayout(32, 32, 2, 2), 4, [(0, 190, 190)], dtype=torch.bfloat16, q_scale=8000.0, scale=1e-4)
    assert relative_error(out, want) < 4e-3


def test_infinite_query_spoils_its_own_head_only() -> None:
    layout = PageLayout(32, 32, 2, 2)
    c = random_case(layout, 4, SHORT, dtype=torch.float16, heads=1)
    want = reference(c)
    c.q[0, 1, 3] = torch.inf
    out = run("decode", *c.arguments(), layout)
    assert not torch.isfinite(out[0, 1]).any()
    assert relative_error(out[:, [0, 2, 3]], want[:, [0, 2, 3]]) < LIMIT


def test_what_is_not_served_is_refused() -> None:
    layout = PageLayout(32, 32, 2, 2)
    c = random_case(layout, 4, SHORT, dtype=torch.float16, heads=1)
    q, pages, *rest = c.arguments()
    with pytest.raises(OscarError, match="pages must be"):
        run("decode", q, pages, *rest, PageLayout(32, 32, 2, 4))
    with pytest.raises(OscarError, match="int32"):
        run("decode", q, pages, c.block_table.long(), *rest[1:], layout)
    with pytest.raises(OscarError, match="float16"):
        run("decode", q.double(), pages, *rest, layout)
