# SPDX-License-Identifier: Apache-2.0
"""Intervals against published values and simulation."""

from __future__ import annotations

import random

import pytest

from oscar_kv.errors import OscarError
from oscar_kv.evaluation.stats import bootstrap_mean, paired_difference, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe (1998), table I: the score interval without continuity correction
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_published_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_wilson_is_symmetric_and_closed_at_the_ends() -> None:
    low, high = wilson(29, 29)
    assert high == 1.0
    assert 1 - low == pytest.approx(wilson(0, 29)[1])
    for bad in ((1, 0), (-1, 4), (5, 4)):
        with pytest.raises(OscarError):
            wilson(*bad)


def test_bootstrap_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = random.Random(0)
    hits = 0
    for i in range(200):
        values = [rng.gauss(1.0, 1.0) for _ in range(40)]
        low, high = bootstrap_mean(values, seed=i, resamples=500)
        hits += low <= 1.0 <= high
    assert 180 <= hits <= 198


def test_pairs_beat_separate_samples_when_noise_is_shared() -> None:
    rng = random.Random(1)
    shared = [rng.gauss(0, 10) for _ in range(50)]
    a, b = ([x + rng.gauss(shift, 0.1) for x in shared] for shift in (0.5, 0.0))
    mean, low, high = paired_difference(a, b)
    assert low < mean < high
    assert low > 0.3
    assert high < 0.7
    with pytest.raises(OscarError):
        paired_difference([1.0], [1.0, 2.0])
