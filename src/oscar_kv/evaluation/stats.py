# SPDX-License-Identifier: Apache-2.0
"""Intervals (Wilson's for shares, the bootstrap's for means and paired differences) and McNemar's exact test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> tuple[int, int, float]:
    """Samples that only a has right, that only b has right, and the exact two-sided p (Q. McNemar, 1947).

    p: how likely so uneven a split of the samples on which they differ is, if each is as likely either way (binomial);
    1 where they differ on none. OscarError where the lengths differ.
    """
    if len(a) != len(b):
        raise OscarError(f"pairs need samples of one kind: {len(a)} and {len(b)} values")
    only_a = sum(bool(x) and not y for x, y in zip(a, b, strict=True))
    only_b = sum(bool(y) and not x for x, y in zip(a, b, strict=True))
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return only_a, only_b, min(1.0, 2 * tail / 2**n) if n else 1.0


@dataclass(frozen=True)
class Comparison:
    """A subject against a baseline on the same samples, scores 0 … 1.

    n: samples. score, baseline: means (of all samples pooled). difference: score − baseline, with its 95 % bootstrap
    interval. only_subject, only_baseline, p: McNemar's, on samples that count as right at 1.
    """

    n: int
    score: float
    baseline: float
    difference: float
    ci95: tuple[float, float]
    only_subject: int
    only_baseline: int
    p: float


def compare_paired(
    subject: Mapping[str, Mapping[str, float]], baseline: Mapping[str, Mapping[str, float]], seed: int = 0,
    resamples: int = 10_000,
) -> Comparison:  # fmt: skip
    """Pooled over tasks: task → sample id → score; every sample counts once, whatever its task.

    The bootstrap draws within each task, as many samples as it has: the mix of tasks is part of the design, no chance.
    OscarError unless both have the same samples of the same tasks.
    """
    if subject.keys() != baseline.keys() or not subject:
        raise OscarError(f"a paired comparison needs the same tasks: {sorted(subject)} and {sorted(baseline)}")
    rng = np.random.default_rng(seed)
    pairs: list[tuple[float, float]] = []
    sums = np.zeros(resamples)
    for task in sorted(subject):
        if subject[task].keys() != baseline[task].keys() or not subject[task]:
            unpaired = sorted(subject[task].keys() ^ baseline[task].keys())[:3]
            raise OscarError(f"task {task}: a paired comparison needs the same samples (unpaired: {unpaired})")
        own = [(subject[task][k], baseline[task][k]) for k in sorted(subject[task])]
        away = np.array([x - y for x, y in own], dtype=np.float64)
        # Row by row: 10,000 draws of a thousand samples at once would be 80 MB.
        for r in range(0, resamples, 500):
            rows = min(500, resamples - r)
            sums[r : r + rows] += away[rng.integers(0, len(away), (rows, len(away)))].sum(1)
        pairs += own
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    only_a, only_b, p = mcnemar([x >= 1 for x in a], [y >= 1 for y in b])
    low, high = np.quantile(sums / len(pairs), [0.025, 0.975])
    n = len(pairs)
    return Comparison(
        n, sum(a) / n, sum(b) / n, sum(x - y for x, y in pairs) / n, (float(low), float(high)), only_a, only_b, p
    )
