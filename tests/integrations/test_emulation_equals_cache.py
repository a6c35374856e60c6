# SPDX-License-Identifier: Apache-2.0
"""Exact emulation (one forward pass) against the packed cache that decodes the same text token by token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from tiny import artifact_of, model, tokens

from oscar_kv import OscarCache, disable, enable
from oscar_kv.artifact import Artifact
from oscar_kv.demo.texts import load
from oscar_kv.evaluation.emulation import Emulation, emulated
from oscar_kv.integrations.transformers.compat import cache_argument
from oscar_kv.integrations.transformers.layer import OscarLayer

WINDOWS = 320  # sink 64 and recent 256: before that nothing is read from codes


def served(m: Any, artifact: Artifact, ids: Tensor, chunks: list[int], step: int = 1) -> Tensor:
    """Logits [rows, tokens, vocab] of the packed cache: the text in these chunks, then ``step`` tokens at a time."""
    enable(m, artifact)
    cache, out, at = OscarCache(artifact, m.config), [], 0
    rest = ids.shape[1] - sum(chunks)
    for size in [*chunks, *[step] * (rest // step), *([rest % step] if rest % step else [])]:
        with torch.no_grad():
            given = {cache_argument(): cache}
            out.append(m(input_ids=ids[:, at : at + size], use_cache=True, **given).logits)
        at += size
    disable(m)
    return torch.cat(out, 1)


def one_pass(m: Any, artifact: Artifact, ids: Tensor, prefill: int = 0) -> Tensor:
    with torch.no_grad(), emulated(m, artifact, prefill=prefill):
        return m(input_ids=ids, use_cache=False).logits


def full(m: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return m(input_ids=ids, use_cache=False).logits


# Tiny models in fp64: no code hangs on a last bit, so cache and emulation hold the same codes all the way down.


def check(m: Any, artifact: Artifact, ids: Tensor, windows: int = WINDOWS, step: int = 1) -> None:
    wanted, got = served(m, artifact, ids, [windows], step), one_pass(m, artifact, ids)
    assert (got - wanted).abs().max() < 1e-9
    assert (wanted - full(m, ids))[:, windows + 1 :].abs().amax((0, 2)).min() > 1e-4  # every later query reads codes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GQA, biases, q/k norm, capped logits beside a sliding layer, one full layer among six. History: three pages."""
    softmax = torch.nn.functional.softmax

    def in_its_own_dtype(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
        return softmax(x, dim)

    # Stock eager attention, which a cap on logits needs, rounds its softmax to fp32.
    monkeypatch.setattr(torch.nn.functional, "softmax", in_its_own_dtype)
    m = model(family, torch.float64)
    check(m, artifact_of(m), tokens(1, 450))


@pytest.mark.parametrize("recipe", ["k2v1", "k3v2", "k4v4", "k2v2-plain", "naive", "quarot", "oscar-paper"])
def test_recipes(recipe: str) -> None:
    m = model("qwen2", torch.float64)
    check(m, artifact_of(m, recipe), tokens(1, 390))


@pytest.mark.parametrize(("sink", "recent"), [(0, 64), (32, 70), (64, 64), (130, 65)])
def test_windows_that_do_not_end_with_a_page(sink: int, recent: int) -> None:
    m = model("llama", torch.float64)
    check(m, artifact_of(m, sink=sink, recent=recent, slack=8), tokens(2, sink + recent + 100), sink + recent)


def test_short_chunks_are_as_if_decoded_one_by_one() -> None:
    m = model("llama", torch.float64)
    check(m, artifact_of(m), tokens(2, 450), step=33)


def test_a_prompt_in_one_chunk_is_prefilled_exactly_by_both() -> None:
    m = model("qwen2", torch.float64)
    artifact, ids = artifact_of(m), tokens(1, 450)
    wanted = served(m, artifact, ids, [400])
    assert (one_pass(m, artifact, ids, prefill=400) - wanted).abs().max() < 1e-9
    assert (one_pass(m, artifact, ids) - wanted)[:, 401:].abs().max() > 1e-4  # another prompt, other keys later on


# The real model in fp32. Shaped rounding turns a last-bit difference into other, equally good codes: the two agree to
# rounding for the same k and v, and as distributions otherwise.

PROMPT, LENGTH = 330, 390
Call = tuple[Tensor, Tensor, Tensor, Tensor]


def test_the_real_model(smollm2: Path) -> None:
    """330 tokens of prose in one chunk, then 60 one by one: their history grows over the border of a page."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    m = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    text = load("prose", "evaluation")[0].text[20000:24000]
    ids = AutoTokenizer.from_pretrained(smollm2)(text, return_tensors="pt").input_ids[:, :LENGTH]
    assert ids.shape[1] == LENGTH
    artifact = artifact_of(m)
    with recorded(artifact) as calls:
        logits = served(m, artifact, ids, [PROMPT])
    same_rows_give_the_same_output(Emulation.of(artifact, m), calls)
    same_distributions(full(m, ids), logits, one_pass(m, artifact, ids, prefill=PROMPT))


@contextmanager
def recorded(artifact: Artifact) -> Iterator[dict[int, list[Call]]]:
    """By layer, what the cache's attention is given and returns at each call: q, k, v [1, heads, n, d] and output."""
    calls: dict[int, list[Call]] = {i: [] for i in artifact.layers}
    resolve = OscarLayer.resolve

    def record(self: OscarLayer, pending: Any, module: Any, query: Tensor, *args: Any) -> Any:
        k, v = pending.__dict__["_key"], pending.__dict__["_value"]
        out = resolve(self, pending, module, query, *args)
        calls[self.index].append((query, k, v, out[0]))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OscarLayer, "resolve", record)
        yield calls


def same_rows_give_the_same_output(emulation: Emulation, calls: dict[int, list[Call]]) -> None:
    """Layer by layer, the emulation returns what the cache returned when it is given the cache's own q, k and v."""
    for layer, parts in calls.items():
        q, k, v = (torch.cat([part[i] for part in parts], 2) for i in range(3))
        wanted = torch.cat([part[3] for part in parts], 1)
        got = emulation.attend(layer, q, k, v, q.shape[-1] ** -0.5, None)
        assert got.shape == wanted.shape == (1, LENGTH, q.shape[1], v.shape[-1])
        error = (got - wanted).abs().amax((0, 2, 3)) / wanted.abs().amax((0, 2, 3))
        assert error[:WINDOWS].max() < 1e-4
        assert error[PROMPT:].max() < 1e-4
        assert error[WINDOWS:PROMPT].max() > 1e-3  # the prompt's end, which the cache prefilled exactly


def same_distributions(exact: Tensor, cache: Tensor, emulation: Tensor) -> None:
    """Two whole runs, whose arithmetic differs, beside what quantisation itself changes."""

    def divergence(a: Tensor, b: Tensor) -> float:
        a, b = (x[0, PROMPT:].double().log_softmax(-1) for x in (a, b))
        return float((a.exp() * (a - b)).sum(-1).mean())

    quantised = divergence(exact, cache)
    assert quantised > 1e-2  # random rotations: something to agree on
    assert divergence(cache, emulation) < 1e-2 * quantised
    assert divergence(exact, emulation) == pytest.approx(quantised, rel=0.05)
