# SPDX-License-Identifier: Apache-2.0
"""The CUDA decode kernels' source, run on a CPU, against float64 on the same pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from decode_reference import Case, moved, random_case, reference, relative_error
from emulate import EmulatedFault, EmulatedKernels, compiler, guarded, guarded_workspace

from oscar_kv.kernels.cuda.decode import run
from oscar_kv.kernels.cuda.spec import DecodeSpec
from oscar_kv.layout import PageLayout

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulated kernels need g++")

# (hist_start, hist_end, seq_len): borders inside pages, no history, no tokens at all, one page, several thread blocks.
RAGGED = [(64, 400, 500), (64, 64, 64), (10, 131, 200), (0, 0, 0), (5, 64, 70), (64, 129, 400)]
# Half precision outputs: their own rounding is 2e-4 of the result, so a wrong code or factor shows.
LIMIT = 3e-4


def decode(
    layout: PageLayout,
    group: int,
    lengths: list[tuple[int, int, int]] = RAGGED,
    capability: tuple[int, int] = (9, 0),
    softcap: float = 0.0,
    multiprocessors: int = 4,
    dtype: torch.dtype = torch.float16,
    blocks: int = 3,
    scale: float | None = None,
    tuning: dict[str, object] | None = None,
    late: bool = True,
    before: bool = False,
    **case: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, float64 reference). Every buffer ends (before: begins) where nothing is mapped; outputs start as NaN."""
    spec = DecodeSpec.choose(layout, group, dtype, capability, softcap > 0, **{"warps": 4, **(tuning or {})})
    kernels = EmulatedKernels(spec, blocks, multiprocessors, late)
    c = random_case(layout, group, lengths, dtype=dtype, **case)  # type: ignore[arg-type]
    given = moved(c, lambda x: guarded(x, before))
    with guarded_workspace(before):
        out = run(kernels, *given.arguments(), softcap=softcap, scale=scale)  # type: ignore[arg-type]
    return out, reference(c, softcap=softcap, scale=scale)


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("bits", [(2, 2), slow((2, 1)), slow((3, 2)), slow((3, 3)), slow((4, 4)), (1, 4)])
def test_bits(bits: tuple[int, int]) -> None:
    assert relative_error(*decode(PageLayout(128, 128, *bits), 4)) < LIMIT


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout(d, d, k, v) if (d, k) == (80, 3) else slow(PageLayout(d, d, k, v))
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
    + [slow(x) for x in (PageLayout(192, 128, 3, 2), PageLayout(64, 256, 2, 2), PageLayout(256, 64, 1, 1))],
    ids=lambda x: f"{x.k_dim}-{x.v_dim}-{x.k_bits}{x.v_bits}",
)
def test_head_sizes(layout: PageLayout) -> None:
    assert relative_error(*decode(layout, 2)) < LIMIT


@pytest.mark.parametrize(
    ("group", "multiprocessors"), [slow(1, 4), slow(5, 100), slow(8, 4), (12, 4), slow(16, 100), slow(20, 4)]
)
def test_groups(group: int, multiprocessors: int) -> None:
    """Few multiprocessors: many heads a finishing block; many: one."""
    out = decode(PageLayout(64, 64, 2, 2), group, multiprocessors=multiprocessors)
    assert relative_error(*out) < LIMIT


@pytest.mark.parametrize("capability", [slow((8, 0)), (8, 9)])
def test_without_bulk_copies(capability: tuple[int, int]) -> None:
    assert relative_error(*decode(PageLayout(80, 80, 1, 2), 4, capability=capability)) < LIMIT


def test_bfloat16() -> None:
    out, want = decode(PageLayout(64, 64, 2, 2), 4, dtype=torch.bfloat16)
    assert relative_error(out, want) < 1.1 * relative_error(want.bfloat16(), want)


def test_softcap_and_scale() -> None:
    assert relative_error(*decode(PageLayout(64, 64, 2, 2), 4, softcap=3.0, scale=0.5)) < LIMIT


def test_without_rotation() -> None:
    assert relative_error(*decode(PageLayout(64, 64, 2, 2), 4, rotate=False)) < LIMIT


def test_many_blocks_share_one_head() -> None:
    lengths = [(64, 2000, 2200)]
    assert relative_error(*decode(PageLayout(64, 64, 2, 2), 4, lengths, blocks=40)) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("warps", [1, 12, 16])
def test_warps(warps: int) -> None:
    tuning = {"warps": warps, "stages": 3, "min_blocks": 1}
    assert relative_error(*decode(PageLayout(64, 64, 2, 2), 4, tuning=tuning)) < LIMIT


@pytest.mark.parametrize("softcap", [0.0, slow(3.0)])
def test_long_runs_are_added_up_in_pieces(softcap: float) -> None:
    lengths, tuning = [(64, 2000, 2200), (3, 900, 1000)], {"flush_pages": 2, "warps": 2}
    out = decode(PageLayout(64, 64, 2, 2), 4, lengths, blocks=3, tuning=tuning, softcap=softcap)
    assert relative_error(*out) < LIMIT


def test_large_batch() -> None:
    """More requests than a warp has lanes, some without history, fewer blocks than (request, head) pairs."""
    lengths = [(64, 64 + 64 * (i % 3), 70 + 64 * (i % 3)) for i in range(40)]
    assert relative_error(*decode(PageLayout(64, 64, 2, 2), 4, lengths, blocks=2)) < LIMIT


@pytest.mark.parametrize(
    "tuning", [{"warps": 2}, {"warps": 2, "bulk": False}, slow({"warps": 8}), slow({"warps": 12, "stages": 3})]
)
@pytest.mark.parametrize(("pages", "blocks"), [(5, 9), (2, 60), (0, 4)])
@pytest.mark.parametrize("late", [True, False])
def test_nothing_outside_the_buffers(tuning: dict[str, object], pages: int, blocks: int, late: bool) -> None:
    """A batch of 8 in fewer and in more blocks than it has pages; copies that land late, and at once.

    Two warps with five pages fill every stage of a ring while queries are turned in the one that must be free.
    """
    lengths = [(64, 64 + 64 * pages, 64 + 64 * pages + 256)] * 8
    out = decode(PageLayout(64, 64, 2, 2), 4, lengths, blocks=blocks, tuning=tuning, late=late, before=not late)
    assert relative_error(*out) < LIMIT


def test_the_default_tuning() -> None:
    spec = DecodeSpec.choose(PageLayout(64, 64, 2, 2), 4, torch.float16, (9, 0))
    tuning = {"warps": spec.warps, "stages": spec.stages, "min_blocks": spec.min_blocks}
    assert relative_error(*decode(PageLayout(64, 64, 2, 2), 4, tuning=tuning)) < LIMIT


def _block_number(c: Case) -> None:
    c.block_table[0, 2] = 1 << 20


def _length(c: Case) -> None:
    c.hist_end[0] = 1 << 20


def _window(c: Case) -> None:
    assert c.windows.slots is not None
    c.windows.slots[0] = 1 << 20


@pytest.mark.parametrize("damage", [_block_number, _length, _window])
def test_inputs_not_yet_written_fault(damage: Callable[[Case], None]) -> None:
    """What a kernel does that runs before its inputs are there; and proof that the emulator would notice."""
    c = random_case(PageLayout(64, 64, 2, 2), 4, [(64, 400, 500)], dtype=torch.float16)
    damage(c)
    spec = DecodeSpec.choose(c.layout, 4, torch.float16, (9, 0), warps=4)
    with pytest.raises(EmulatedFault, match="decode: outside every buffer"):
        run(EmulatedKernels(spec, 3), *moved(c, guarded).arguments())  # type: ignore[arg-type]


@pytest.mark.parametrize("v_scale", [2.0**-12, 300.0, 20000.0])
def test_range_of_value_steps(v_scale: float) -> None:
    """Steps from fp16's smallest to beyond what a fixed power of two would stand."""
    out, want = decode(PageLayout(64, 64, 2, 2), 4, [(0, 300, 300)], dtype=torch.bfloat16, v_scale=v_scale)
    assert relative_error(out, want) < 4e-3


def test_large_queries() -> None:
    """|q R_K| of about 8,000 times the usual: beyond fp16 with a fixed factor. Softmax is then nearly one-hot."""
    out, want = decode(PageLayout(64, 64, 2, 2), 4, [(0, 300, 300)], dtype=torch.bfloat16, q_scale=8000.0, scale=1e-4)
    assert relative_error(out, want) < 4e-3


def test_infinite_query_spoils_its_own_head_only() -> None:
    layout = PageLayout(64, 64, 2, 2)
    spec = DecodeSpec.choose(layout, 4, torch.float16, (9, 0), warps=4)
    c = random_case(layout, 4, RAGGED[:1], dtype=torch.float16)
    want = reference(c)
    c.q[0, 1, 3] = torch.inf
    out = run(EmulatedKernels(spec, 3), *c.arguments())  # type: ignore[arg-type]
    others = [0, 2, 3, 4, 5, 6, 7]
    assert not torch.isfinite(out[0, 1]).any()
    assert relative_error(out[:, others], want[:, others]) < LIMIT
