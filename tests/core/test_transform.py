# SPDX-License-Identifier: Apache-2.0
"""Hadamard matrices, rotations and what they promise."""

from __future__ import annotations

import pytest
import torch
from core_cases import covariance, key_rows

from oscar_kv.errors import OscarError
from oscar_kv.quantizer import quantise
from oscar_kv.transform import SideTransform, bit_reversal, eigenbasis, hadamard, page_matmul, rotation


@pytest.mark.parametrize("d", range(16, 257, 16))
def test_hadamard_is_orthogonal_with_equal_entries(d: int) -> None:
    h = hadamard(d)
    assert torch.equal((h * d**0.5).round().abs(), torch.ones(d, d, dtype=h.dtype))
    torch.testing.assert_close(h.mT @ h, torch.eye(d, dtype=h.dtype), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["none", "hadamard", "eigen", "eigen-layer"])
@pytest.mark.parametrize("d", [64, 80])
def test_rotations_are_orthogonal_and_undone(kind: str, d: int) -> None:
    turn = rotation(kind, covariance(3, d, 1))
    eye = torch.eye(d, dtype=turn.dtype).expand(3, d, d)
    torch.testing.assert_close(turn.mT @ turn, eye, atol=1e-10, rtol=0)
    x, side = key_rows(2, 3, d, 2), SideTransform(torch.randn(3, d, dtype=torch.float64), turn)
    torch.testing.assert_close(side.undo(side.apply(x)), x, atol=1e-9, rtol=0)
    q = torch.randn(3, d, dtype=torch.float64)  # q·k = (qR)·(kR) + q·μ
    rotated = (side.apply(x) * (q[:, None] @ turn)).sum(-1) + (q * side.centre).sum(-1)[:, None]
    torch.testing.assert_close(rotated, (x * q[:, None]).sum(-1), atol=1e-9, rtol=0)


@pytest.mark.parametrize("rule", ["quantile", "least-squares"])
def test_bit_reversal_changes_nothing_when_the_group_is_the_head(rule: str) -> None:
    turn, x = rotation("eigen-layer", covariance(1, 64, 3)), key_rows(2, 1, 64, 4)
    plain = eigenbasis(covariance(1, 64, 3).mean(0)) @ hadamard(64)
    assert torch.equal(turn[0], plain[:, bit_reversal(64)])
    backs = []
    for r in (turn, plain[None]):
        side = SideTransform(torch.zeros(1, 64, dtype=torch.float64), r)
        q = quantise(side.apply(x), 2, step_rule=rule, clip=0.96 if rule == "quantile" else None)
        backs.append(side.undo(q.dequantise(torch.float64)))
    same = torch.isclose(backs[0], backs[1], atol=1e-9, rtol=0).all(-1)
    assert same.float().mean() > 0.98  # a code on a tie may fall to either side


def test_rotation_lowers_the_range_of_keys_with_outlier_channels() -> None:
    """What the paper's Table 10 shows: channels that stick out before, an even spread after."""
    x = key_rows(4, 2, 128, 5)
    x[..., 7] *= 12
    x[..., 90] *= 8
    c = covariance(2, 128, 6)
    for kind in ("hadamard", "eigen", "eigen-layer"):
        y = page_matmul(x, rotation(kind, c))
        before, after = (r.amax(-1) - r.amin(-1) for r in (x, y))
        assert after.mean() < 0.7 * before.mean()
        assert y.abs().amax(-1).mean() / y.square().mean(-1).sqrt().mean() < 0.6 * (
            x.abs().amax(-1).mean() / x.square().mean(-1).sqrt().mean()
        )


def test_eigenbasis_is_ordered_and_signed() -> None:
    c = covariance(2, 32, 8)
    u = eigenbasis(c)
    values = (u.mT @ c @ u).diagonal(dim1=-2, dim2=-1)
    assert (values.diff(dim=-1) <= 1e-12).all()
    assert torch.equal(u, eigenbasis(c))
    assert (u.gather(-2, u.abs().argmax(-2, keepdim=True)) > 0).all()


def test_what_is_not_built_in_is_refused() -> None:
    with pytest.raises(OscarError, match="multiple of 16"):
        hadamard(23)
    with pytest.raises(OscarError, match="power of two"):
        bit_reversal(80)
    with pytest.raises(OscarError, match="unknown rotation"):
        rotation("random", covariance(1, 16, 0))
