# SPDX-License-Identifier: Apache-2.0
"""The cache in real models against the dense definition in fp64, and against stock attention to the bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from oracle import oracle
from tiny import FAMILIES, artifact_of, model, tokens

from oscar_kv import OscarCache, disable, enable
from oscar_kv.integrations.transformers.compat import cache_argument

SMALL = {"sink": 32, "recent": 70, "slack": 8}


def run(m: Any, ids: torch.Tensor, cache: Any, chunks: list[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [rows, tokens, vocab] of a text given in chunks, then token by token."""
    out, at = [], 0
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    for size in [*chunks, *[1] * (ids.shape[1] - sum(chunks))]:
        part = slice(at, at + size)
        extra = {} if mask is None else {"attention_mask": mask[:, : at + size], "position_ids": positions[:, part]}
        with torch.no_grad():
            out.append(m(input_ids=ids[:, part], use_cache=True, **{cache_argument(): cache}, **extra).logits)
        at += size
    return torch.cat(out, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_equals_the_dense_definition(family: str) -> None:
    m = model(family, torch.float64)
    artifact = artifact_of(m, **SMALL)
    ids = tokens(1, 200)
    chunks = [110, 30, 9]
    with oracle(m, artifact, chunks), torch.no_grad():
        wanted = m(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        full = m(input_ids=ids, use_cache=False).logits
    enable(m, artifact)
    got = run(m, ids, OscarCache(artifact, m.config), chunks)
    assert (got - wanted).abs().max() < 1e-6
    assert (got - full)[:, 140:].abs().max() > 1e-3  # the history is really quantised


@pytest.mark.parametrize("recipe", ["k2v1", "k3v2", "k4v4", "k2v2-plain", "naive", "oscar-paper"])
def test_every_kind_of_recipe(recipe: str) -> None:
    m = model("qwen2", torch.float64)
    artifact = artifact_of(m, recipe, **SMALL)
    ids = tokens(1, 160)
    with oracle(m, artifact, [120]), torch.no_grad():
        wanted = m(input_ids=ids, use_cache=False).logits
    enable(m, artifact)
    assert (run(m, ids, OscarCache(artifact, m.config), [120]) - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)], ids=["mha", "mqa", "gqa3"])
def test_head_groups(heads: tuple[int, int]) -> None:
    m = model("llama", torch.float64, num_attention_heads=heads[0], num_key_value_heads=heads[1],
              head_dim=16, hidden_size=96)  # fmt: skip
    artifact = artifact_of(m, **SMALL)
    ids = tokens(1, 140)
    with oracle(m, artifact, [90]), torch.no_grad():
        wanted = m(input_ids=ids, use_cache=False).logits
    enable(m, artifact)
    assert (run(m, ids, OscarCache(artifact, m.config), [90]) - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padded_batches_equal_the_dense_definition(side: str) -> None:
    m = model("llama", torch.float64)
    artifact = artifact_of(m, **SMALL)
    ids = tokens(3, 210)
    mask = torch.ones(3, 210, dtype=torch.long)
    if side == "left":
        mask[0, :57] = 0
        mask[2, :130] = 0
    elif side == "right":
        mask[0, 150:180] = 0
        mask[2, 60:180] = 0
    else:
        mask[0, 20:70] = 0
        mask[1, :5] = 0
        mask[2, 100:175:2] = 0
    chunks = [120, 60]
    valid = mask.bool()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with oracle(m, artifact, chunks, valid), torch.no_grad():
        wanted = m(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    enable(m, artifact)
    cache = OscarCache(artifact, m.config)
    got = run(m, ids, cache, chunks, mask)
    assert (got - wanted)[valid].abs().max() < 1e-6
    assert cache.get_seq_length() == 210
    assert cache.packed_layers[0].store.lengths == mask.sum(1).tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bit_identical_while_there_is_no_history(family: str, attention: str) -> None:
    from transformers import DynamicCache

    m = model(family, attention=None if family == "gemma2" else attention)
    stock = m.config._attn_implementation
    artifact = artifact_of(m)
    ids = tokens(2, 320)
    mask = torch.ones(2, 320, dtype=torch.long)
    mask[1, :40] = 0
    for padding in (None, mask):
        wanted = run(m, ids, DynamicCache(config=m.config), [150, 40, 127], padding)
        enable(m, artifact)
        got = run(m, ids, OscarCache(artifact, m.config), [150, 40, 127], padding)
        assert m.config._attn_implementation == "oscar"
        disable(m)
        assert m.config._attn_implementation == stock
        keep = slice(None) if padding is None else mask.bool()
        assert torch.equal(got[keep], wanted[keep])


def test_a_long_prompt_in_one_chunk_is_prefilled_exactly() -> None:
    m = model("qwen3")
    ids = tokens(1, 900)
    with torch.no_grad():
        wanted = m(input_ids=ids, use_cache=True).logits
    enable(m, artifact_of(m))
    cache = OscarCache(artifact_of(m), m.config)
    assert torch.equal(run(m, ids, cache, [900]), wanted)
    assert len(cache.packed_layers[0].store.pool.tables[0]) == 900 // 64 - 1


def test_without_a_cache_the_stock_attention_runs() -> None:
    m = model("gemma3_text")
    ids = tokens(2, 400)
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[0, :30] = 0
    with torch.no_grad():
        wanted = m(input_ids=ids, attention_mask=mask, use_cache=False).logits
        enable(m, artifact_of(m))
        assert torch.equal(m(input_ids=ids, attention_mask=mask, use_cache=False).logits, wanted)


def test_half_precision_windows() -> None:
    m = model("llama", torch.bfloat16)
    enable(m, artifact_of(m))
    cache = OscarCache(artifact_of(m), m.config)
    logits = run(m, tokens(1, 340), cache, [330])
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
    assert cache.packed_layers[0].store.ring_k.dtype == torch.bfloat16
