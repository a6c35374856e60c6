# SPDX-License-Identifier: Apache-2.0
"""Samples are what they claim, depend on seed and index alone, and a hit is what greedy decoding would write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oscar_kv.calibration import data_free
from oscar_kv.errors import OscarError
from oscar_kv.evaluation.emulation import Emulation, emulated
from oscar_kv.evaluation.language import Head
from oscar_kv.evaluation.needles import NEEDLES, Haystack, Sample, retrieve, retrieved


class Named:
    name = "numbers"
    text = "\n".join(f"Line {i} speaks of {7919 * i % 10007}." for i in range(80))


@pytest.fixture(scope="module")
def hay(byte_tokenizer: Any) -> Haystack:
    return Haystack([Named()], byte_tokenizer, 1024, seed=3)


def test_a_sample_holds_its_needles_and_question(hay: Haystack, byte_tokenizer: Any) -> None:
    numbers = set()
    for i in range(6):
        s = hay.sample(i)
        text = byte_tokenizer.decode(s.ids)
        assert len(s.ids) == 1024
        assert text.endswith(f"The special number for {s.key} is {s.number}")
        assert byte_tokenizer.decode(s.ids[s.prompt :]) == f" {s.number}"
        assert text.count(f"The special number for {s.key} is {s.number}.\n") == 1
        assert text.count("\nThe special number for ") == NEEDLES + 1  # and the answer's beginning
        assert len(s.depths) == NEEDLES
        for depth in s.depths:
            assert byte_tokenizer.decode(s.ids[depth : depth + 8]) == "\nThe spe"
        numbers.add((s.number, s.depths))
    assert len(numbers) == 6


def test_samples_depend_on_seed_and_index_alone(hay: Haystack, byte_tokenizer: Any) -> None:
    again = Haystack([Named()], byte_tokenizer, 1024, seed=3)
    other = Haystack([Named()], byte_tokenizer, 1024, seed=4)
    alone = again.sample(5)  # without the five before it
    assert torch.equal(alone.ids, hay.sample(5).ids)
    assert alone.number == hay.sample(5).number
    assert not torch.equal(other.sample(5).ids, alone.ids)


def test_chat_templates_frame_the_prompt(byte_tokenizer: Any) -> None:
    import copy

    chat = copy.deepcopy(byte_tokenizer)
    turns = "<<{% for m in messages %}{{ m.role }}: {{ m.content }}>>{% endfor %}"
    chat.chat_template = turns + "{% if add_generation_prompt %}A: {% endif %}"
    s = Haystack([Named()], chat, 1024, seed=3).sample(0)
    text = chat.decode(s.ids)
    assert text.startswith("<<user: Some special numbers")
    assert f"in the text above?>>A: The special number for {s.key} is {s.number}" in text
    chat.chat_template = "{{ messages|length }}"
    with pytest.raises(OscarError, match="chat template"):
        Haystack([Named()], chat, 1024)


def test_too_short_a_context_is_refused(byte_tokenizer: Any) -> None:
    with pytest.raises(OscarError, match="no room"):
        Haystack([Named()], byte_tokenizer, 300).sample(0)
    with pytest.raises(OscarError, match="empty"):
        Haystack([], byte_tokenizer, 300)


@pytest.fixture(scope="module")
def model(families: Any) -> Any:
    return families.tiny("llama", vocab_size=257)


def greedy(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    out = ids
    with torch.no_grad():
        for _ in range(count):
            out = torch.cat([out, model(out[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return out[len(ids) :].tolist()


@pytest.mark.parametrize("quantised", [False, True])
def test_a_hit_is_what_greedy_decoding_writes(quantised: bool, model: Any, families: Any) -> None:
    """The model's own greedy continuation is a hit; the same with any one token changed is none."""
    prompt = families.ids_of(360, 9)
    head = Head(model, prompt)
    entry = Emulation.of(data_free(model.config, "tiny", "k2v2"), model)
    from contextlib import nullcontext

    with emulated(model, entry) if quantised else nullcontext():
        own = greedy(model, prompt, 3)
        for place in (None, 0, 1, 2):
            answer = list(own)
            if place is not None:
                answer[place] = (answer[place] + 1) % 257
            s = Sample(torch.cat([prompt, torch.tensor(answer)]), 3, "", "", ())
            assert retrieved(model, head, s) == (place is None)


def test_retrieve_reports_every_recipe_and_restores_the_model(model: Any, hay: Haystack) -> None:
    samples = [hay.sample(i) for i in range(2)]
    calls: list[tuple[int, int]] = []
    subjects = {"bf16": None, "naive": data_free(model.config, "tiny", "naive")}
    for prefill in ("strict", "exact"):
        runs = retrieve(model, samples, subjects, prefill=prefill, progress=lambda a, b: calls.append((a, b)))
        assert [r.recipe for r in runs] == ["bf16", "naive"]
        assert all(len(r.right) == 2 and r.context == 1024 for r in runs)
        assert runs[0].ci95[0] <= runs[0].score <= runs[0].ci95[1]
    assert calls[:4] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert model.config._attn_implementation != "oscar-emulation"
    with pytest.raises(OscarError, match="strict"):
        retrieve(model, samples, subjects, prefill="none")  # type: ignore[arg-type]
