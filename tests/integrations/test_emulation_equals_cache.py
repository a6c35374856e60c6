# SPDX-License-Identifier: Apache-2.0
"""Exact emulation (one forward pass) against the packed cache that decodes the same text token by token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
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


# Tiny models in fp64: codes cannot hang on the last bit, so the two must agree to rounding.


def check(m: Any, artifact: Artifact, ids: Tensor, windows: int = WINDOWS, step: int = 1) -> None:
    wanted, got = served(m, artifact, ids, [windows], step), one_pass(m, artifact, ids)
    assert (got - wanted).abs().max() < 1e-6
    assert (wanted - full(m, ids))[:, windows + 1 :].abs().amax((0, 2)).min() > 1e-4  # every later query reads codes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_families(family: str) -> None:
    """GQA, biases, q/k norm, capped logits beside a sliding layer, one full layer among six. History: three pages."""
    m = model(family, torch.float64)
    check(m, artifact_of(m), tokens(1, 450))


@pytest.mark.parametrize("recipe", ["k2v1", "k3v2", "k4v4", "k2v2-plain", "naive", "quarot", "oscar-paper"])
def test_recipes(recipe: str) -> None:
    m = model("qwen2", torch.float64)
    check(m, artifact_of(m, recipe), tokens(1, 390))


@pytest.mark.parametrize(("sink", "recent"), [(0, 64), (32, 70), (64, 64), (130, 65)])
def test_windows_that_do_not_end_with_a_page(sink: int, recent: int) -> None:
    m = model("llama", torch.float64)
    check(m, artifact_of(m, sink=sink, recent=recent, slack=8), tokens(2, 260), sink + recent)


def test_short_chunks_are_as_if_decoded_one_by_one() -> None:
    m = model("llama", torch.float64)
    check(m, artifact_of(m), tokens(2, 450), step=33)


def test_a_prompt_in_one_chunk_is_prefilled_exactly_by_both() -> None:
    m = model("qwen2", torch.float64)
    artifact, ids = artifact_of(m), tokens(1, 450)
    wanted = served(m, artifact, ids, [400])
    assert (one_pass(m, artifact, ids, prefill=400) - wanted).abs().max() < 1e-6
    assert (one_pass(m, artifact, ids) - wanted)[:, 401:].abs().max() > 1e-4  # another prompt, other keys later on


# The real model in fp32.

PROMPT, LENGTH = 330, 420


@dataclass
class Served:
    """What the cache's attention was given and returned: per layer q, k, v [1, heads, n, d] and out [1, n, heads, d]."""

    model: Any
    artifact: Artifact
    ids: Tensor
    logits: Tensor
    layers: dict[int, list[list[Tensor]]]

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, out = zip(*self.layers[index], strict=True)
        return torch.cat(q, 2), torch.cat(k, 2), torch.cat(v, 2), torch.cat(out, 1)


@pytest.fixture(scope="module")
def smollm2_served(smollm2: Path) -> Iterator[Served]:
    """330 tokens of prose in one chunk, then 90 one by one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from oscar_kv.demo.texts import load

    m = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prose = next(t for t in texts() if t.kind == "prose")
    ids = AutoTokenizer.from_pretrained(smollm2)(prose.text[:6000], return_tensors="pt").input_ids[:, :LENGTH]
    artifact = artifact_of(m)
    layers: dict[int, list[list[Tensor]]] = {i: [] for i in artifact.layers}
    resolve = OscarLayer.resolve

    def record(self: OscarLayer, pending: Any, module: Any, query: Tensor, *args: Any) -> Any:
        k, v = pending.__dict__["_key"], pending.__dict__["_value"]
        out = resolve(self, pending, module, query, *args)
        layers[self.index].append([query, k, v, out[0]])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OscarLayer, "resolve", record)
        logits = served(m, artifact, ids, [PROMPT])
    yield Served(m, artifact, ids, logits, layers)
