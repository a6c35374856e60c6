# SPDX-License-Identifier: Apache-2.0
"""The reference codec's arithmetic: step choice, shaped rounding, unbiased scales. The oracle of every kernel.

One convention everywhere: x̂ = step·code + zero, code ∈ 0 … 2ᵇ−1, one (step, zero) a row. Codes are chosen with a pair
that is already rounded to fp16; unbiasing then yields the pair that is stored, rounded to fp16 again.

Rows are [..., n, d]. Sums are written as separate multiplications and additions, so a row's codes do not depend on how
many other rows come with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArtifactError
from .transform import page_matmul

SIGMA_STEP = {2: 0.9957, 3: 0.586, 4: 0.335}
"""Step of least squared error of a unit Gaussian, in σ (2, 3, 4 bits)."""
SHAPED_STEP_FACTOR = {1: 1.0, 2: 1.1, 3: 1.05, 4: 1.05}
"""Error feedback widens what is rounded, so the step starts this much wider; measured by benchmarks/ablation.py."""
RANGE_FRACTIONS = (0.7, 0.8, 0.9, 1.0)
"""Shares of the row's range tried as the step at 3 and 4 bits where nothing is shaped."""
MIN_STEP = 2.0**-14
"""Smallest normal fp16 number: the step of a constant row."""
FP16_MAX = 65504.0
STRETCH_RANGE = (0.5, 3.0)
"""Bounds of the unbiasing factor."""


@dataclass(frozen=True)
class Quantised:
    """Rows as stored: code uint8 [..., n, d], step and zero fp16 [..., n]."""

    code: Tensor
    step: Tensor
    zero: Tensor

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """x̂ = step·code + zero [..., n, d]."""
        return self.code.to(dtype) * self.step.to(dtype)[..., None] + self.zero.to(dtype)[..., None]


@dataclass(frozen=True)
class ErrorWeight:
    """What an error e of a rotated key costs, eAeᵀ, and the factor A = (I+U) D (I+U)ᵀ.

    matrix [heads, d, d]; upper = I + U, unit upper triangular, same shape.
    """

    matrix: Tensor
    upper: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> ErrorWeight:
        """Factor A [heads, d, d] (fp64 inside). Raises ArtifactError if A is not positive definite."""
        a = matrix.double()
        lower, info = torch.linalg.cholesky_ex(a.flip(-2, -1))
        if info.any():
            raise ArtifactError(
                "the keys' error weight is not positive definite: the artifact is damaged, calibrate again"
            )
        upper = (lower / lower.diagonal(dim1=-2, dim2=-1)[..., None, :]).flip(-2, -1)
        return cls(a, upper)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> ErrorWeight:
        return ErrorWeight(self.matrix.to(device, dtype).contiguous(), self.upper.to(device, dtype).contiguous())


def normalised_weight(covariance: Tensor, rotation: Tensor, damping: float = 0.02) -> Tensor:
    """A = RᵀCR with mean diagonal 1, plus damping·I: [heads, d, d] fp64 (method: "shape the keys' rounding error")."""
    a = rotation.double().mT @ covariance.double() @ rotation.double()
    a = (a + a.mT) / 2
    scale = a.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.where(scale > 0, a / scale.clamp(min=1e-300), eye) + damping * eye


def to_half(x: Tensor) -> Tensor:
    """Round to fp16's grid, saturating at its largest number; the dtype stays."""
    return x.clamp(-FP16_MAX, FP16_MAX).half().to(x.dtype)


def to_step(x: Tensor) -> Tensor:
    return to_half(x.clamp(min=MIN_STEP))


def round_to(x: Tensor, step: Tensor, zero: Tensor, top: int) -> Tensor:
    """Nearest code 0 … top, as a float tensor; ties to even."""
    return ((x - zero) / step).round().clamp(0, top)


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def least_squares_step(x: Tensor, bits: int, fractions: tuple[float, ...] = ()) -> tuple[Tensor, Tensor]:
    """Step and zero [..., n, 1] of least squared error: the σ-rule, then two refits with the codes chosen anew.

    ``fractions`` of the row's range are tried as further starts. 1 bit: step = 2·mean|x − mean|, zero = mean − step/2.
    """
    top, mean = 2**bits - 1, _mean(x)
    start = 2 * _mean((x - mean).abs()) if bits == 1 else SIGMA_STEP[bits] * _mean((x - mean).square()).sqrt()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    starts = [(start, mean)] + [((high - low) * f / top, (low + high) / 2) for f in fractions]
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for raw, middle in starts:
        step = to_step(raw)
        zero = to_half(middle - top / 2 * step)
        for _ in range(2):
            code = round_to(x, step, zero, top)
            mean_code = _mean(code)
            dev = code - mean_code
            var = _mean(dev.square())
            step = torch.where(var > 1e-6, to_step(_mean(x * dev) / var.clamp(min=1e-6)), step)
            zero = to_half(mean - step * mean_code)
        if len(starts) == 1:
            return step, zero
        loss = _mean((round_to(x, step, zero, top) * step + zero - x).square())
        if best is None:
            best = step, zero, loss
        else:
            better = loss < best[2]
            best = (
                torch.where(better, step, best[0]),
                torch.where(better, zero, best[1]),
                torch.where(better, loss, best[2]),
            )
    assert best is not None
    return best[:2]


def range_step(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Step and zero [..., n, 1] of the row's range (min–max)."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return to_step((high - low) / (2**bits - 1)), to_half(low)


def quantile_clip(x: Tensor, ratio: float) -> Tensor:
    """Clip a row at the ⌊ratio·d⌋-th smallest |x| (zero-based), as published."""
    d = x.shape[-1]
    limit = x.abs().sort(-1).values[..., min(int(ratio * d), d - 1), None]
    return x.clamp(-limit, limit)


def shaped_codes(x: Tensor, upper: Tensor, step: Tensor, zero: Tensor, top: int) -> Tensor:
    """Codes with error feedback: dimension k is rounded after adding Σ_{j<k} e_j U_jk, e_j = x_j − x̂_j.

    The weighted error eAeᵀ falls from about tr(A) to tr(D) (LDLQ, known from QuIP and GPTQ for weights).
    x [..., heads, n, d]; upper [heads, d, d]; step, zero [..., heads, n, 1].
    """
    fed, code = x.clone(), torch.empty_like(x)
    step, zero = step[..., 0], zero[..., 0]
    for k in range(x.shape[-1]):
        code[..., k] = round_to(fed[..., k], step, zero, top)
        error = x[..., k] - (code[..., k] * step + zero)
        if k + 1 < x.shape[-1]:
            fed[..., k + 1 :] += error[..., None] * upper[:, None, k, k + 1 :]
    return code


def unbiased(
    x: Tensor, code: Tensor, step: Tensor, zero: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The stored (step, zero): stretched about the row's mean until ⟨x̂, x⟩_A = ⟨x, x⟩_A, row means removed.

    Noise averages out over many attended tokens, shrinkage does not. weight: A [heads, d, d], or None for A = I.
    """
    y = code * step + zero
    mean_y = _mean(y)
    dx, dy = x - _mean(x), y - mean_y
    left = dx if weight is None else page_matmul(dx, weight)
    own, cross = (left * dx).sum(-1, keepdim=True), (left * dy).sum(-1, keepdim=True)
    usable = (cross > 1e-3 * own) & (own > 0)
    g = torch.where(usable, own / torch.where(usable, cross, torch.ones_like(cross)), torch.ones_like(own))
    g = g.clamp(*STRETCH_RANGE)
    return to_step(g * step), to_half(mean_y + g * (zero - mean_y))


def sanitise(x: Tensor) -> Tensor:
    """Rows that arithmetic can stand: NaN to 0, beyond fp16's range to its ends."""
    return torch.nan_to_num(x, nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX).clamp(-FP16_MAX, FP16_MAX)


def quantise(
    x: Tensor,
    bits: int,
    *,
    step_rule: str = "least-squares",
    clip: float | None = None,
    weight: ErrorWeight | None = None,
    unbias: bool = False,
) -> Quantised:
    """Quantise centred, rotated rows x [pages, heads, n, d], fp32 or fp64.

    ``weight`` (keys only) switches on shaped rounding and the metric of the unbiased scale.
    """
    x, top = sanitise(x), 2**bits - 1
    target = x
    if step_rule == "minmax":
        step, zero = range_step(x, bits)
    elif step_rule == "quantile":
        target = quantile_clip(x, 1.0 if clip is None else clip)
        step, zero = range_step(target, bits)
    else:
        step, zero = least_squares_step(x, bits, RANGE_FRACTIONS if bits > 2 and weight is None else ())
    if weight is None:
        code = round_to(target, step, zero, top)
    else:
        # A row without spread stays at the smallest step: widening it would move its exact zero.
        factor = torch.where(step > MIN_STEP, SHAPED_STEP_FACTOR[bits], 1.0).to(step.dtype)
        step, zero = to_step(step * factor), to_half(zero + top / 2 * step * (1 - factor))
        code = shaped_codes(x, weight.upper, step, zero, top)
    if unbias:
        step, zero = unbiased(x, code, step, zero, None if weight is None else weight.matrix)
    return Quantised(code.to(torch.uint8), step[..., 0].half(), zero[..., 0].half())
