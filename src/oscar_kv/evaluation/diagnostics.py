# SPDX-License-Identifier: Apache-2.0
"""What an artifact says about a model before anything is run: offsets, spectra, predicted errors by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..artifact import Artifact
from ..quantizer import SHAPED_STEP_FACTOR, SIGMA_STEP
from ..transform import SideTransform

if TYPE_CHECKING:
    from ..calibration.moments import Moments


def gaussian_distortion(bits: int, factor: float = 1.0) -> float:
    """E(x − x̂)² of a unit Gaussian under the plain step times ``factor``, 2ᵇ even levels around the mean."""
    step = (2 * math.sqrt(2 / math.pi) if bits == 1 else SIGMA_STEP[bits]) * factor
    top = 2**bits - 1

    def below(x: float) -> tuple[float, float, float]:
        """∫ of φ, xφ and x²φ from −∞ to x."""
        if math.isinf(x):
            return (0.0, 0.0, 0.0) if x < 0 else (1.0, 0.0, 1.0)
        pdf, cdf = math.exp(-x * x / 2) / math.sqrt(2 * math.pi), 0.5 * (1 + math.erf(x / math.sqrt(2)))
        return cdf, -pdf, cdf - x * pdf

    total = 0.0
    for code in range(top + 1):
        level = (code - top / 2) * step
        low = -math.inf if code == 0 else level - step / 2
        high = math.inf if code == top else level + step / 2
        mass, first, second = (b - a for a, b in zip(below(low), below(high), strict=True))
        total += second - 2 * level * first + level * level * mass
    return total


def noise(bits: int, unbiased: bool, factor: float = 1.0) -> float:
    """Predicted error energy of a rotated, centred row, relative to the row's own.

    Stretching a least-squares reproduction until ⟨x̂, x⟩ = ⟨x, x⟩ turns an error D into D / (1 − D).
    """
    d = gaussian_distortion(bits, factor)
    return d / (1 - d) if unbiased else d


@dataclass(frozen=True)
class Spread:
    """Mean [heads, d] and covariance [heads, d, d] of the rows of one layer."""

    mean: Tensor
    covariance: Tensor

    @property
    def std(self) -> Tensor:
        """Deviation of each channel, [heads, d]."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()

    @property
    def radius(self) -> Tensor:
        """Root of the mean squared distance from the mean, [heads]."""
        return self.std.square().sum(-1).sqrt()

    @property
    def offset(self) -> Tensor:
        """‖mean‖, [heads]."""
        return self.mean.square().sum(-1).sqrt()

    def under(self, transform: SideTransform) -> Spread:
        """The same rows centred and rotated."""
        t = transform.to(self.mean.device, self.mean.dtype)
        mean = self.mean - t.centre
        if t.rotation is None:
            return Spread(mean, self.covariance)
        return Spread((mean[:, None] @ t.rotation)[:, 0], t.rotation.mT @ self.covariance @ t.rotation)


@dataclass(frozen=True)
class LayerSummary:
    """One full-attention layer; figures are means over its KV heads.

    ``k_offset``, ``v_offset``: length of the mean; None where the recipe does not centre and no spreads are given.

    ``key_plain`` and ``key_shaped``: predicted eAeᵀ relative to tr(A), rounding each dimension by itself and with
    error feedback. ``value``: predicted squared error relative to the spread around μ_V. All three assume Gaussian rows
    and the least-squares step; None for recipes with another step. ``leading``: share of the error weight's
    spectrum in its largest eighth. ``spectrum``: eigenvalues [heads][d], largest first, mean about 1; empty without A.
    """

    layer: int
    k_bits: int
    v_bits: int
    k_offset: float | None
    v_offset: float | None
    k_spread: float | None
    v_spread: float | None
    key_plain: float | None
    key_shaped: float | None
    value: float | None
    leading: float | None
    spectrum: tuple[tuple[float, ...], ...]

    @property
    def gain(self) -> float | None:
        """How many times shaping lowers the predicted key error."""
        if self.key_plain is None or self.key_shaped is None:
            return None
        return self.key_plain / self.key_shaped


def feedback_ratio(weight: Tensor) -> Tensor:
    """tr(D) / tr(A) of A = (I+U) D (I+U)ᵀ, A [heads, d, d] → [heads]."""
    a = weight.double()
    factor: Tensor = torch.linalg.cholesky(a.flip(-2, -1)).diagonal(dim1=-2, dim2=-1)
    return factor.square().sum(-1) / a.diagonal(dim1=-2, dim2=-1).sum(-1)


def summarise(
    artifact: Artifact, keys: Mapping[int, Spread] | None = None, values: Mapping[int, Spread] | None = None
) -> list[LayerSummary]:
    """A summary of every layer the artifact covers; spreads come from moments or live rows where given."""
    out = []
    for i, tensors in sorted(artifact.layers.items()):
        recipe, weight = artifact.layer_recipe(i), tensors.error_weight
        known = recipe.step == "least-squares"
        shaped = leading = None
        spectrum: tuple[tuple[float, ...], ...] = ()
        if weight is not None:
            eigenvalues = torch.linalg.eigvalsh(weight.double()).flip(-1).clamp(min=0)
            spectrum = tuple(tuple(row) for row in eigenvalues.tolist())
            first = max(1, eigenvalues.shape[-1] // 8)
            leading = float((eigenvalues[:, :first].sum(-1) / eigenvalues.sum(-1)).mean())
            if recipe.shaping:
                factor = SHAPED_STEP_FACTOR[recipe.k_bits]
                shaped = float(feedback_ratio(weight).mean()) * noise(recipe.k_bits, recipe.unbiased, factor)
        k, v = (keys or {}).get(i), (values or {}).get(i)
        out.append(
            LayerSummary(
                layer=i, k_bits=recipe.k_bits, v_bits=recipe.v_bits,
                k_offset=_offset(k, tensors.k, recipe.centre),
                v_offset=_offset(v, tensors.v, recipe.centre),
                k_spread=float(k.radius.mean()) if k else None,
                v_spread=float(v.radius.mean()) if v else None,
                key_plain=noise(recipe.k_bits, recipe.unbiased) if known else None, key_shaped=shaped,
                value=noise(recipe.v_bits, recipe.unbiased) if known else None, leading=leading, spectrum=spectrum,
            )
        )  # fmt: skip
    return out


def _offset(spread: Spread | None, side: SideTransform, centred: bool) -> float | None:
    if spread is not None:
        return float(spread.offset.mean())
    return float(side.centre.norm(dim=-1).mean()) if centred else None


def spread_of(rows: Tensor) -> Spread:
    """Mean and covariance, in fp64, of rows [heads, n, d]."""
    rows = rows.double()
    mean = rows.mean(-2)
    away = rows - mean[:, None]
    return Spread(mean, away.mT @ away / rows.shape[-2])


def spreads_of(moments: Moments) -> tuple[dict[int, Spread], dict[int, Spread]]:
    """Spreads of the raw post-RoPE keys and values by layer, from calibration's moments."""
    n = moments.meta.tokens
    keys: dict[int, Spread] = {}
    values: dict[int, Spread] = {}
    for i, sums in moments.layers.items():
        for out, total, outer in ((keys, "k_sum", "k_outer"), (values, "v_sum", "v_outer")):
            mean = sums[total].double() / n
            out[i] = Spread(mean, sums[outer].double() / n - mean[:, :, None] * mean[:, None])
    return keys, values


def most_offset_head(spreads: Mapping[int, Spread]) -> tuple[int, int]:
    """(layer, KV head) whose mean is largest against its spread: where centring matters most."""
    best = max((float(r), i, h) for i, s in spreads.items() for h, r in enumerate(s.offset / s.radius.clamp(min=1e-12)))
    return best[1], best[2]
