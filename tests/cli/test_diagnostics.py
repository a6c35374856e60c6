# SPDX-License-Identifier: Apache-2.0
"""What diagnostics predict must be what the quantiser does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from oscar_kv.artifact import Artifact
from oscar_kv.evaluation.diagnostics import (
    Spread,
    feedback_ratio,
    gaussian_distortion,
    most_offset_head,
    noise,
    spread_of,
    summarise,
)
from oscar_kv.quantizer import ErrorWeight, least_squares_step, quantise, round_to, unbiased


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("unbias", [False, True])
def test_value_noise_of_gaussian_rows(bits: int, unbias: bool) -> None:
    torch.manual_seed(bits)
    x = torch.randn(4, 2, 64, 128)
    error = (quantise(x, bits, unbias=unbias).dequantise() - x).square().mean() / x.var()
    # at 3 and 4 bits values also try fractions of the range, which the prediction leaves out
    assert error.item() == pytest.approx(noise(bits, unbias), rel=0.1 if bits < 3 else 0.3)


def test_distortion_is_least_at_the_plain_step() -> None:
    for bits in (2, 3, 4):
        at = gaussian_distortion(bits)
        assert at < gaussian_distortion(bits, 1.1)
        assert at < gaussian_distortion(bits, 0.9)


@pytest.mark.parametrize("bits", [2, 3])
def test_key_noise_plain_and_shaped(artifact_of: Callable[..., Artifact], bits: int) -> None:
    torch.manual_seed(0)
    artifact = artifact_of(layers=1, d=128)
    weight = ErrorWeight.of(artifact.layers[0].error_weight).to("cpu", torch.float32)
    x = torch.randn(2, 2, 64, 128)
    step, zero = least_squares_step(x, bits)
    plain = unbiased(x, code := round_to(x, step, zero, 2**bits - 1), step, zero, weight.matrix)
    trace = weight.matrix.diagonal(dim1=-2, dim2=-1).sum(-1)

    def cost(y: torch.Tensor) -> float:
        error = y - x
        return float(((error @ weight.matrix * error).sum(-1).mean((0, 2)) / trace).mean())

    cost_plain = cost(code * plain[0] + plain[1])
    cost_shaped = cost(quantise(x, bits, weight=weight, unbias=True).dequantise())
    summary = summarise(artifact.with_recipe(artifact.recipe.replace(name="t", k_bits=bits)))[0]
    assert cost_plain == pytest.approx(summary.key_plain, rel=0.2)
    assert cost_shaped == pytest.approx(summary.key_shaped, rel=0.35)
    assert cost_plain / cost_shaped == pytest.approx(summary.gain, rel=0.35)


def test_a_flat_weight_gains_nothing() -> None:
    assert feedback_ratio(torch.eye(16).expand(2, 16, 16)).tolist() == pytest.approx([1.0, 1.0])


def test_recipes_with_another_step_predict_nothing(artifact: Artifact) -> None:
    summary = summarise(artifact.with_recipe("naive"))[0]
    assert summary.key_plain is None
    assert summary.value is None
    assert summary.gain is None
    assert summary.spectrum == ()


def test_spread_and_the_head_that_needs_centring() -> None:
    torch.manual_seed(0)
    rows = torch.randn(2, 4000, 16)
    rows[1] += 5
    spread = spread_of(rows)
    assert spread.radius.tolist() == pytest.approx([4.0, 4.0], rel=0.05)
    assert spread.offset[1].item() == pytest.approx(20, rel=0.05)
    calm = Spread(torch.zeros(2, 16), torch.eye(16).expand(2, 16, 16))
    assert most_offset_head({3: calm, 7: spread}) == (7, 1)


def test_a_transform_acts_on_moments_as_on_rows(artifact: Artifact) -> None:
    torch.manual_seed(0)
    rows, transform = torch.randn(1, 2, 500, 32) * 3 + 1, artifact.layers[0].k
    direct, moved = spread_of(transform.apply(rows)[0]), spread_of(rows[0]).under(transform)
    assert torch.allclose(direct.mean, moved.mean, atol=1e-4)
    assert torch.allclose(direct.std, moved.std, rtol=1e-4)
