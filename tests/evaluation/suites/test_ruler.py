# SPDX-License-Identifier: Apache-2.0
"""RULER's families: what their definitions say about each, the length of samples, scores."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from oscar_kv.errors import OscarError
from oscar_kv.evaluation.suites import RULER_TASKS, Measure, RulerQa, Sample, ruler_task
from oscar_kv.evaluation.suites.ruler import string_match_all, string_match_part, zeta

NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def one(name: str, measure: Measure, context: int = 4096, seed: int = 0) -> tuple[Sample, str]:
    sample = ruler_task(name).samples(measure, context, 1, seed)[0]
    return sample, measure.render(sample)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_samples_fill_the_context_of_the_models_own_tokenizer(name: str, chat: Measure) -> None:
    samples = ruler_task(name).samples(chat, 4096, 2, seed=3)
    for sample in samples:
        used = chat.length(sample) + sample.max_new_tokens
        assert 0.98 * 4096 <= used <= 4096
    lengths = [(chat.length(s), s.max_new_tokens) for s in samples]
    assert ruler_task(name).history_share(lengths, 64, 256) >= 0.8


@pytest.mark.parametrize("name", RULER_TASKS)
def test_sample_i_depends_on_seed_and_i_alone(name: str, words: Measure) -> None:
    task = ruler_task(name)
    three = task.samples(words, 2048, 3, seed=1)
    assert task.samples(words, 2048, 2, seed=1) == three[:2]
    assert len({words.render(s) for s in three}) == 3
    assert task.samples(words, 2048, 1, seed=2)[0] != three[0]
    assert len({s.id for s in three}) == 3


@pytest.mark.parametrize(
    ("name", "needles", "answers", "values", "keys"),
    [
        ("niah_single_1", 1, 1, "numbers", "words"),
        ("niah_single_2", 1, 1, "numbers", "words"),
        ("niah_single_3", 1, 1, "uuids", "words"),
        ("niah_multikey_1", 4, 1, "numbers", "words"),
        ("niah_multikey_2", None, 1, "numbers", "words"),
        ("niah_multikey_3", None, 1, "uuids", "uuids"),
        ("niah_multivalue", 4, 4, "numbers", "words"),
        ("niah_multiquery", 4, 4, "numbers", "words"),
    ],
)
def test_needles(name: str, needles: int | None, answers: int, values: str, keys: str, words: Measure) -> None:
    sample, text = one(name, words)
    found = NEEDLE.findall(text)
    # A haystack of needles has hundreds; no key or value comes twice, so every question has one answer.
    assert len(found) == needles if needles else len(found) > 100
    pattern = {"numbers": re.compile(r"[1-9]\d{6}"), "uuids": UUID, "words": re.compile(r"[a-z]+-[a-z]+")}
    assert all(kind == values and pattern[values].fullmatch(value) for kind, _, value in found)
    assert all(pattern[keys].fullmatch(key) for _, key, _ in found)
    assert len({value for _, _, value in found}) == len(found)
    asked = sample.meta["keys"]
    assert sorted(v for _, k, v in found if k in asked) == sorted(sample.reference)
    assert len(sample.reference) == answers
    question = text[text.rindex("\nWhat ") :]
    assert all(key in question for key in asked)
    assert sample.max_new_tokens == 128
    assert ("Emma" in sample.meta["haystack"]) == (name not in ("niah_single_1", "niah_multikey_2", "niah_multikey_3"))


def test_needles_stand_between_sentences_at_many_depths(words: Measure) -> None:
    samples = ruler_task("niah_single_2").samples(words, 2048, 40)
    depths = [s.meta["depths"][0] for s in samples]
    assert min(depths) < 0.15 and max(depths) > 0.85
    for sample in samples:
        before = words.render(sample).partition("One of the special magic")[0].rstrip()
        # Behind the last word, where the novel is cut off, there may be no end of a sentence.
        assert before[-1] in ".!?\"')_" or sample.meta["depths"] == [1.0]


def test_variable_tracking(words: Measure) -> None:
    sample, text = one("vt", words)
    assert len(sample.reference) == 5 and all(re.fullmatch("[A-Z]{5}", name) for name in sample.reference)
    # Behind the worked example, one chain: VAR a = value, VAR b = VAR a …
    chain = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?([A-Z]{5}|\d{5})\n", text)
    assert [name for name, _ in chain] == list(sample.reference)
    assert [source for _, source in chain] == [sample.meta["value"], *sample.reference[:-1]]
    assert text.endswith("namely:") and sample.max_new_tokens == 30
    example = re.findall(r"VAR ([A-Z]{3}) = ", text)
    assert len(example) == 5 and " ".join(example) in text


def test_common_words(words: Measure) -> None:
    sample, text = one("cwe", words)
    listed = text[text.rindex("Here is a numbered list") :]
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", listed))
    assert sorted(w for w, n in counts.items() if n == 30) == sorted(sample.reference)
    assert len(sample.reference) == 10
    assert {n for w, n in counts.items() if w not in sample.reference} == {3}
    numbers = [int(n) for n in re.findall(r"(\d+)\. [a-z]+", listed)]
    assert numbers == list(range(1, len(numbers) + 1))
    example = text[: text.rindex("Here is a numbered list")]
    assert not set(sample.reference) & set(re.findall(r"\d+\. ([a-z]+)", example))
    with pytest.raises(OscarError, match="vocabulary of"):
        ruler_task("cwe").samples(words, 100_000, 1)


def test_frequent_words_follow_the_zeta_law(words: Measure) -> None:
    sample, text = one("fwe", words, 8192)
    counts = Counter(re.findall(r"(?<= )(?:[a-z]{6}|\.\.\.)(?= )", text[text.index("ones.") : text.index("Question")]))
    common = counts.most_common(4)
    assert common[0][0] == "..."
    assert [w for w, _ in common[1:]] == list(sample.reference)
    for rank, (_, count) in enumerate(common, 1):
        assert count / common[0][1] == pytest.approx(rank**-2, rel=0.02)
    assert zeta(2.0) == pytest.approx(1.6449340668, abs=1e-9)
    assert zeta(1.5) == pytest.approx(2.6123753487, abs=1e-8)


def test_scores() -> None:
    task = ruler_task("niah_multivalue")
    sample = Sample("s", ("1234567", "Abc", "x-y", "99"), 1, prompt="p")
    assert task.score(sample, "They are 1234567, abc, x-y and 99.") == 1.0
    assert task.score(sample, "They are 1234567 and ABC.") == 0.5
    assert task.score(sample, "123456") == 0.0
    assert string_match_all("", ("a",)) == 0.0
    assert string_match_part("in Paris", ("London", "paris")) == 1.0
    assert string_match_part("in Rome", ("London", "paris")) == 0.0


def test_too_short_and_unknown(words: Measure) -> None:
    with pytest.raises(OscarError, match="too short"):
        ruler_task("niah_single_1").samples(words, 200, 1)
    with pytest.raises(OscarError, match="no RULER task 'niah'"):
        ruler_task("niah")
    with pytest.raises(OscarError, match="needs SQuAD"):
        ruler_task("qa_1")


def squad(path: Path) -> Path:
    def paragraph(article: int, i: int) -> dict[str, object]:
        text = f"Paragraph {i} of article {article} says that its number is n{article}x{i} . " + "filler " * 30
        answers = [{"text": f"n{article}x{i}", "answer_start": 0}]
        qas = [
            {"question": f"What is the number of {article}, {i}?", "answers": answers, "is_impossible": False},
            {"question": "Nobody knows?", "answers": [], "is_impossible": True},
        ]
        return {"context": text, "qas": qas}

    data = [{"paragraphs": [paragraph(a, i) for i in range(5)]} for a in range(20)]
    path.write_text(json.dumps({"data": data}))
    return path


def test_qa_reads_squad_and_hides_the_document(tmp_path: Path, words: Measure) -> None:
    task = RulerQa("qa_1", squad(tmp_path / "dev.json"))
    samples = task.samples(words, 2048, 5)
    assert samples == task.samples(words, 2048, 7)[:5]
    for sample in samples:
        text = words.render(sample)
        assert 2048 * 0.9 <= words.length(sample) + 32 <= 2048
        assert f"is {sample.reference[0]} ." in text
        assert text.count("Document ") == sample.meta["documents"] > 20
        assert task.score(sample, f"It is {sample.reference[0].upper()}.") == 1.0
        assert task.score(sample, "n9") == 0.0
    with pytest.raises(OscarError, match="has 100 questions"):
        task.samples(words, 2048, 101)


def test_qa_reads_hotpot(tmp_path: Path, words: Measure) -> None:
    items = [
        {
            "question": f"Q{i}?", "answer": f"yes{i}", "supporting_facts": [[f"T{i}b", 0], [f"T{i}a", 0]],
            "context": [[f"T{i}{x}", [f"First {i}{x}.", " word" * 20]] for x in "abc"],
        }
        for i in range(30)
    ]  # fmt: skip
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(items))
    for i, sample in enumerate(RulerQa("qa_2", path).samples(words, 400, 3)):
        text = words.render(sample)
        assert f"First {i}a." in text and f"First {i}b." in text


def test_qa_names_a_bad_file(tmp_path: Path, words: Measure) -> None:
    with pytest.raises(OscarError, match="cannot be read"):
        RulerQa("qa_1", tmp_path / "none.json").samples(words, 2048, 1)
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(OscarError, match="is not SQuAD"):
        RulerQa("qa_1", tmp_path / "other.json").samples(words, 2048, 1)
