# SPDX-License-Identifier: Apache-2.0
"""Where passages lie, and how a quotation is scored."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_kv.errors import OscarError
from oscar_kv.evaluation.suites import Measure, Verbatim
from oscar_kv.evaluation.suites.verbatim import Border, edit_similarity, exact


def distance(a: str, b: str) -> int:
    """Levenshtein's, as it is defined."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row = row, [i] + [0] * len(b)
        for j, y in enumerate(b, 1):
            row[j] = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
    return row[-1]


@pytest.mark.parametrize("border", get_args(Border))
@pytest.mark.parametrize("plain", [False, True])
def test_the_passage_lies_where_it_should(border: Border, plain: bool, chat: Measure) -> None:
    measure = Measure(chat.count) if plain else chat
    task = Verbatim(border)
    for sample in task.samples(measure, 4096, 2):
        text, quoted = measure.render(sample), sample.reference[0]
        assert text.count(quoted) == 1
        at = text.index(quoted)
        begin, end = measure.tokens(sample, text[:at]), measure.tokens(sample, text[: at + len(quoted)])
        total = measure.length(sample)
        assert 0.98 * 4096 <= total + sample.max_new_tokens <= 4096
        assert 120 <= end - begin <= 160
        newest = total - 256  # the first token of the recent window
        if border == "recent":
            assert begin < newest - 48 and newest + 48 < end
        elif border == "edge":
            assert newest - 64 < begin < newest
        elif border == "sink":
            assert begin < 64 - 16 and end > 64 + 16
        elif border == "history":
            assert begin >= 64 and end <= newest
        else:
            assert begin > newest
        # What is copied must fit the answer, and be read from the history where that is the point.
        assert sample.max_new_tokens >= end - begin
    assert task.history_share([(total, 160)], 64, 256) >= 0.8


def test_other_windows_move_the_passage(words: Measure) -> None:
    near, far = (Verbatim("recent", recent=r).samples(words, 4096, 1)[0].meta for r in (256, 1024))
    assert near["border_at"] - far["border_at"] == pytest.approx(1024 - 256, abs=60)
    assert far["passage"][0] < far["border_at"] < far["passage"][1]


def test_samples_are_deterministic(words: Measure) -> None:
    task = Verbatim("edge")
    three = task.samples(words, 2048, 3, seed=5)
    assert task.samples(words, 2048, 1, seed=5) == three[:1]
    assert len({s.reference for s in three}) == 3
    assert task.samples(words, 2048, 1, seed=6)[0].reference != three[0].reference


def test_scores(words: Measure) -> None:
    task = Verbatim("recent")
    sample = task.samples(words, 2048, 1)[0]
    quoted = sample.reference[0]
    cue = sample.meta["cue"]
    assert sample.opening == f"<passage>{cue}" and f"<passage>{cue} {quoted}</passage>" in (sample.prompt or "")
    for right in (
        quoted,
        f"{cue} {quoted}",
        f"<passage>{cue} {quoted}</passage>",
        f"\n{quoted}</passage> That was it.",
        quoted.replace(" ", "\n") + "\n\nDone",
    ):
        assert task.details(sample, right) == {"similarity": 1.0, "exact": 1.0}
    spoilt = quoted.split()
    spoilt[len(spoilt) // 2] = "xxx"
    almost = task.details(sample, " ".join(spoilt))
    assert 0.95 < almost["similarity"] < 1 and almost["exact"] == 0
    half = task.score(sample, quoted[: len(quoted) // 2])
    assert half == pytest.approx(0.5, abs=0.02)
    assert task.score(sample, "") == 0.0
    assert task.score(sample, "I cannot see any passage in this text, sorry.") < 0.2


@given(st.text("abc ", min_size=1, max_size=12), st.text("abc ", max_size=16))
def test_similarity_is_the_best_beginning(reference: str, answer: str) -> None:
    wanted, given_ = " ".join(reference.split()), " ".join(answer.split())
    if not wanted:
        return
    best = min(distance(wanted, given_[:j]) for j in range(min(len(given_), 2 * len(wanted)) + 1))
    assert edit_similarity(answer, reference) == pytest.approx(max(0.0, 1 - best / len(wanted)))
    assert edit_similarity(reference + " " + answer, reference) == 1.0
    assert exact(reference + " " + answer, reference)


def test_bad_settings(words: Measure) -> None:
    with pytest.raises(OscarError, match="border 'middle'"):
        Verbatim("middle")  # type: ignore[arg-type]
    with pytest.raises(OscarError, match="16 or more"):
        Verbatim(passage=8)
    with pytest.raises(OscarError, match="choose other lengths"):
        Verbatim("window", recent=64).samples(words, 2048, 1)
    with pytest.raises(OscarError, match="too short"):
        Verbatim("recent").samples(words, 300, 1)
