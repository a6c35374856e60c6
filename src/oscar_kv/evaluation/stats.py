# SPDX-License-Identifier: Apache-2.0
"""Intervals: Wilson's for shares, the bootstrap's for means and paired differences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import OscarError

Z95 = 1.959963984540054
"""97.5 % point of the normal distribution."""


def wilson(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a share (E. B. Wilson, 1927). OscarError unless 0 <= successes <= n and n >= 1."""
    if n < 1 or not 0 <= successes <= n:
        raise OscarError(f"{successes} successes of {n}: needs 0 <= successes <= n and n >= 1")
    share, z2 = successes / n, z * z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * (share * (1 - share) / n + z2 / (4 * n * n)) ** 0.5
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return (0.0 if successes == 0 else low), (1.0 if successes == n else high)


def bootstrap_mean(
    values: Sequence[float], seed: int = 0, resamples: int = 10_000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of the mean: ``values`` (texts, say) drawn with replacement. OscarError without values."""
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x):
        raise OscarError("a bootstrap needs at least one value")
    rng = np.random.default_rng(seed)
    means = x[rng.integers(0, len(x), (resamples, len(x)))].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_difference(
    a: Sequence[float], b: Sequence[float], seed: int = 0, resamples: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean of a − b over the same samples, and its bootstrap interval. OscarError where the lengths differ."""
    if len(a) != len(b):
        raise OscarError(f"pairs need samples of one kind: {len(a)} and {len(b)} values")
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    low, high = bootstrap_mean(difference.tolist(), seed, resamples, level)
    return float(difference.mean()), low, high
