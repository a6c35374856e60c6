# SPDX-License-Identifier: Apache-2.0
"""Samples, the share of the history, and filling a context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_kv.errors import OscarError
from oscar_kv.evaluation.suites import Gsm8k, Measure, Message, Sample, Verbatim, history_share, ruler_task
from oscar_kv.evaluation.suites.base import Task, fill


@given(st.integers(1, 900), st.integers(1, 40), st.integers(0, 130), st.integers(1, 260))
def test_history_share_counts_tokens_one_by_one(prompt: int, generated: int, sink: int, recent: int) -> None:
    seen = [(i, t) for i in range(prompt - 1, prompt + generated - 1) for t in range(i + 1)]
    old = sum(t >= sink and i - t >= recent for i, t in seen)
    assert history_share(prompt, generated, sink, recent) == pytest.approx(old / len(seen))


def test_short_prompts_have_no_history_and_long_ones_little_else() -> None:
    assert history_share(320, 1, 64, 256) == 0.0
    assert history_share(4096 - 128, 128, 64, 256) > 0.9
    with pytest.raises(OscarError, match="prompt and generated >= 1"):
        history_share(0, 1, 64, 256)


def test_mean_share_over_samples() -> None:
    task = ruler_task("vt")
    assert task.history_share([(320, 1), (3200, 1)], 64, 256) == pytest.approx(0.45)
    with pytest.raises(OscarError, match="at least one sample"):
        task.history_share([], 64, 256)


def test_tasks_have_the_protocol() -> None:
    assert all(isinstance(t, Task) for t in (ruler_task("cwe"), Verbatim(), Gsm8k("items.jsonl")))


def test_a_sample_is_a_prompt_or_a_conversation() -> None:
    with pytest.raises(OscarError, match="either a prompt or messages"):
        Sample("a", ("x",), 1)
    with pytest.raises(OscarError, match="either a prompt or messages"):
        Sample("a", ("x",), 1, prompt="p", messages=(Message("user", "p"),))
    with pytest.raises(OscarError, match="at least 1"):
        Sample("a", ("x",), 0, prompt="p")


def test_conversations_need_a_template(words: Measure) -> None:
    with pytest.raises(OscarError, match="no chat template"):
        words.render(Sample("a", ("x",), 1, messages=(Message("user", "p"),)))


def test_a_chat_measure_counts_the_template_and_the_opening(chat: Measure) -> None:
    bare = Sample("a", ("x",), 1, **chat.ask("Hello"))
    opened = Sample("a", ("x",), 1, **chat.ask("Hello", "The answer is"))
    assert bare.messages == (Message("user", "Hello"),)
    assert "assistant" in chat.render(opened) and chat.render(opened).endswith("The answer is")
    assert chat.length(opened) == chat.length(bare) + 3
    assert chat.length(bare) > chat.count("Hello")


@given(st.integers(20, 5000), st.integers(1, 9), st.integers(1, 30), st.integers(1, 500))
def test_fill_is_full_and_never_over(context: int, a_unit: int, least: int, most: int) -> None:
    most += least

    def build(units: int) -> Sample:
        assert least <= units <= most
        return Sample("s", ("x",), 5, prompt=" ".join(["w"] * (10 + a_unit * units)))

    measure = Measure(lambda text: len(text.split()))
    if 15 + a_unit * least > context:
        with pytest.raises(OscarError, match="too short"):
            fill(build, measure, context, least, most)
        return
    used = measure.length(fill(build, measure, context, least, most)) + 5
    assert used <= context
    assert used == 15 + a_unit * most or context - used <= max(context // 100, a_unit)
