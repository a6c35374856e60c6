# SPDX-License-Identifier: Apache-2.0
"""Intervals against published values and simulation."""

from __future__ import annotations

import random

import pytest

from oscar_kv.errors import OscarError
from oscar_kv.evaluation.stats import bootstrap_mean, compare_paired, mcnemar, paired_difference, wilson


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


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (0, 6, 2 / 64), (1, 9, 22 / 1024), (8, 2, 112 / 1024)],
)
def test_mcnemar_is_the_binomial_test(only_a: int, only_b: int, p: float) -> None:
    a = [True] * only_a + [False] * only_b + [True] * 50 + [False] * 7
    b = [False] * only_a + [True] * only_b + [True] * 50 + [False] * 7
    assert mcnemar(a, b) == (only_a, only_b, pytest.approx(p))
    assert mcnemar(b, a) == (only_b, only_a, pytest.approx(p))
    with pytest.raises(OscarError, match="samples of one kind"):
        mcnemar(a, b[1:])


def test_mcnemar_rejects_as_often_as_it_says() -> None:
    rng = random.Random(0)
    rejected = 0
    for _ in range(2000):
        pairs = [(rng.random() < 0.6, rng.random() < 0.6) for _ in range(60)]
        rejected += mcnemar([x for x, _ in pairs], [y for _, y in pairs])[2] <= 0.05
    assert 0.01 < rejected / 2000 <= 0.055  # an exact test is a little conservative


def test_pooled_comparison_counts_every_sample_once() -> None:
    base = {"a": {str(i): 1.0 for i in range(30)}, "b": {str(i): float(i % 2) for i in range(10)}}
    other = {"a": {**base["a"], "0": 0.0, "1": 0.5}, "b": dict(base["b"])}
    got = compare_paired(other, base)
    assert got.n == 40
    assert (got.score, got.baseline) == (pytest.approx(33.5 / 40), pytest.approx(35 / 40))
    assert got.difference == pytest.approx(-1.5 / 40)
    assert got.ci95[0] < got.difference < got.ci95[1] <= 0
    assert (got.only_subject, got.only_baseline, got.p) == (0, 2, 0.5)
    assert compare_paired(other, base) == got
    same = compare_paired(base, base)
    assert (same.difference, same.ci95, same.p) == (0.0, (0.0, 0.0), 1.0)


def test_pooled_interval_covers_the_truth() -> None:
    rng = random.Random(1)
    covered = 0
    for trial in range(200):
        base = {t: {str(i): float(rng.random() < share) for i in range(80)} for t, share in (("a", 0.9), ("b", 0.4))}
        other = {t: {k: v if rng.random() < 0.8 else 1 - v for k, v in s.items()} for t, s in base.items()}
        truth = 0.2 * ((1 - 2 * 0.9) + (1 - 2 * 0.4)) / 2
        low, high = compare_paired(other, base, seed=trial, resamples=500).ci95
        covered += low <= truth <= high
    assert covered / 200 > 0.9


def test_comparisons_need_the_same_samples() -> None:
    with pytest.raises(OscarError, match="the same tasks"):
        compare_paired({"a": {"0": 1.0}}, {"b": {"0": 1.0}})
    with pytest.raises(OscarError, match=r"task a: .*unpaired: \['1'\]"):
        compare_paired({"a": {"0": 1.0, "1": 0.0}}, {"a": {"0": 1.0}})
    with pytest.raises(OscarError, match="the same tasks"):
        compare_paired({}, {})
