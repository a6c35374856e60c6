# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The quantiser's arithmetic on a tile of rows, as quantizer.py has it: step choice, rounding, unbiased scales.

Rows are [64, PAD] fp32; dimensions from D on are padding, held at 0 and left out of every sum. What a row has one of is
divided with correct rounding; an element's quotient may be 2 ulp off, which changes a code only next to a tie.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...quantizer import FP16_MAX, MIN_STEP, RANGE_FRACTIONS, STRETCH_RANGE

_MAX = tl.constexpr(FP16_MAX)
SMALLEST = tl.constexpr(MIN_STEP)
_STRETCH_LOW, _STRETCH_HIGH = tl.constexpr(STRETCH_RANGE[0]), tl.constexpr(STRETCH_RANGE[1])
_FRACTIONS, _TRIES = tl.constexpr(RANGE_FRACTIONS), tl.constexpr(len(RANGE_FRACTIONS))
_ROUND = tl.constexpr(12582912.0)  # 1.5·2^23: adding it leaves no fraction bits, ties to even


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def to_half(x):
    """Round to fp16's grid, saturating."""
    return clamp(x, -_MAX, _MAX).to(tl.float16).to(tl.float32)


@triton.jit
def to_step(x):
    return to_half(tl.maximum(x, SMALLEST))


@triton.jit
def sanitise(x):
    """NaN to 0, beyond fp16's range to its ends."""
    return clamp(tl.where(x == x, x, 0.0), -_MAX, _MAX)


@triton.jit
def round_to(x, step, zero, TOP: tl.constexpr):
    """Nearest code 0 … TOP, as floats; ties to even. step and zero broadcast against x."""
    y = clamp((x - zero) / step, -1.0, TOP + 1.0)
    return clamp((y + _ROUND) - _ROUND, 0.0, TOP)


@triton.jit
def mean(x, D: tl.constexpr):
    return tl.div_rn(tl.sum(x, 1), tl.full([x.shape[0]], D, tl.float32))


@triton.jit
def _refit(x, average, step, middle, real, D: tl.constexpr, TOP: tl.constexpr):
    """Step and zero after two refits from a first step centred on ``middle``."""
    step = to_step(step)
    zero = to_half(middle - TOP / 2 * step)
    for _ in range(2):
        code = tl.where(real, round_to(x, step[:, None], zero[:, None], TOP), 0.0)
        mean_code = mean(code, D)
        deviation = tl.where(real, code - mean_code[:, None], 0.0)
        variance = mean(deviation * deviation, D)
        fitted = to_step(tl.div_rn(mean(x * deviation, D), tl.maximum(variance, 1e-6)))
        step = tl.where(variance > 1e-6, fitted, step)
        zero = to_half(average - step * mean_code)
    return step, zero


@triton.jit
def least_squares_step(x, real, D: tl.constexpr, BITS: tl.constexpr, SIGMA: tl.constexpr, FRACTIONS: tl.constexpr):
    """quantizer.least_squares_step: step and zero [64]. SIGMA: SIGMA_STEP of the bits (unused at 1)."""
    TOP: tl.constexpr = (1 << BITS) - 1
    average = mean(x, D)
    centred = tl.where(real, x - average[:, None], 0.0)
    if BITS == 1:  # noqa: SIM108
        start = 2 * mean(tl.abs(centred), D)
    else:
        start = SIGMA * tl.sqrt_rn(mean(centred * centred, D))
    step, zero = _refit(x, average, start, average, real, D, TOP)
    if FRACTIONS:
        low, high = tl.min(tl.where(real, x, float("inf")), 1), tl.max(tl.where(real, x, float("-inf")), 1)
        loss = _loss(x, step, zero, real, D, TOP)
        for i in tl.static_range(_TRIES):
            width = (high - low) * _FRACTIONS[i]
            start = tl.div_rn(width, tl.full([x.shape[0]], TOP, tl.float32))
            other_step, other_zero = _refit(x, average, start, (low + high) / 2, real, D, TOP)
            other = _loss(x, other_step, other_zero, real, D, TOP)
            step, zero = tl.where(other < loss, other_step, step), tl.where(other < loss, other_zero, zero)
            loss = tl.minimum(loss, other)
    return step, zero


@triton.jit
def _loss(x, step, zero, real, D: tl.constexpr, TOP: tl.constexpr):
    error = round_to(x, step[:, None], zero[:, None], TOP) * step[:, None] + zero[:, None] - x
    error = tl.where(real, error, 0.0)
    return mean(error * error, D)


@triton.jit
def stretched(own, cross, mean_y, step, zero):
    """The stored step and zero: stretched about mean_y by own/cross, within bounds."""
    usable = (cross > 1e-3 * own) & (own > 0)
    g = tl.where(usable, tl.div_rn(own, tl.where(usable, cross, 1.0)), 1.0)
    g = clamp(g, _STRETCH_LOW, _STRETCH_HIGH)
    return to_step(g * step), to_half(mean_y + g * (zero - mean_y))
