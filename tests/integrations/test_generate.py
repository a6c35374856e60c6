# SPDX-License-Identifier: Apache-2.0
"""generate with a packed cache: every decoding mode of Transformers, prompts of any length, several calls."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from tiny import artifact_of, model, tokens

from oscar_kv import OscarCache, disable, enable
from oscar_kv.integrations.transformers.compat import cache_argument

SMALL = {"sink": 32, "recent": 80, "slack": 32}
GREEDY = {"do_sample": False}


def enabled(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    m = model(family, dtype)
    return enable(m, artifact_of(m, **{**SMALL, **changes}))


def with_cache(m: Any, artifact: Any) -> tuple[OscarCache, dict[str, Any]]:
    cache = OscarCache(artifact, m.config)
    return cache, {cache_argument(): cache}


def step_by_step(m: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy by hand: prompt in one chunk, then one token a call."""
    cache = OscarCache(m._oscar_kv.artifact, m.config)
    new = ids
    for _ in range(count):
        with torch.no_grad():
            logits = m(input_ids=new, use_cache=True, **{cache_argument(): cache}).logits
        new = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], 1)
    return ids


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 111, 112, 113, 400])
def test_prompts_of_any_length(length: int) -> None:
    m, ids = enabled(), tokens(2, length)
    assert torch.equal(m.generate(ids, max_new_tokens=20, **GREEDY), step_by_step(m, ids, 20))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2"])
def test_assisted_decoding_equals_greedy_of_itself(family: str) -> None:
    """The prompt fits the windows, so the first drafts, which come in the prompt's chunk, see what greedy sees."""
    m, ids = enabled(family), tokens(1, 105)
    wanted = m.generate(ids, max_new_tokens=70, **GREEDY)
    helper = model(family, torch.float64)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():  # close enough to be right sometimes
        for weight in helper.parameters():
            if weight.ndim == 2:
                weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=g, dtype=weight.dtype)
    cache, given = with_cache(m, m._oscar_kv.artifact)
    got = m.generate(ids, max_new_tokens=70, assistant_model=helper, **given, **GREEDY)
    assert torch.equal(got, wanted)
    assert cache.get_seq_length() == 174


def test_prompt_lookup_equals_greedy_of_itself() -> None:
    m = enabled()
    ids = tokens(1, 25).repeat(1, 4)
    wanted = m.generate(ids, max_new_tokens=60, **GREEDY)
    assert torch.equal(m.generate(ids, max_new_tokens=60, prompt_lookup_num_tokens=6, **GREEDY), wanted)


def test_assisted_decoding_without_a_cache_runs() -> None:
    """The prompt's chunk then holds the first drafts too, which see the prompt exactly: the text may differ."""
    m, ids = enabled(), tokens(1, 150)
    out = m.generate(ids, max_new_tokens=20, assistant_model=model("llama", torch.float64), **GREEDY)
    assert out.shape == (1, 170)
    assert torch.equal(out[:, :150], ids)


def test_drafts_that_are_taken_back_leave_no_trace() -> None:
    """Logits after draft, crop and the right tokens equal those without the draft, window and history alike."""
    m = enabled()
    ids = tokens(1, 260)
    plain, _ = with_cache(m, m._oscar_kv.artifact)
    drafted, _ = with_cache(m, m._oscar_kv.artifact)

    def feed(cache: Any, part: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return m(input_ids=part, use_cache=True, **{cache_argument(): cache}).logits[:, -1]

    feed(plain, ids[:, :200])
    feed(drafted, ids[:, :200])
    for at in range(200, 260):
        wanted = feed(plain, ids[:, at : at + 1])
        if at % 7 == 0:
            feed(drafted, tokens(1, 1 + at % 32, seed=at))
            drafted.crop(-(1 + at % 32))
        assert (feed(drafted, ids[:, at : at + 1]) - wanted).abs().max() < 1e-9


def test_beams_equal_beams_of_copied_caches() -> None:
    """Reordered rows must hold their own beam's tokens: the winner's score is recomputed by forced decoding."""
    m, ids = enabled(), tokens(2, 140)
    out = m.generate(ids, max_new_tokens=16, num_beams=3, num_return_sequences=3, return_dict_in_generate=True,
                     output_scores=True, length_penalty=0.0, **GREEDY)  # fmt: skip
    for row, sequence in list(enumerate(out.sequences))[::2]:
        cache = OscarCache(m._oscar_kv.artifact, m.config)
        total, new = 0.0, sequence[None, :140]
        for token in sequence[140:]:
            with torch.no_grad():
                logits = m(input_ids=new, use_cache=True, **{cache_argument(): cache}).logits[0, -1]
            total += logits.float().log_softmax(-1)[token].item()
            new = token.view(1, 1)
        assert total == pytest.approx(out.sequences_scores[row].item(), abs=1e-3)


def test_beams_of_ragged_rows() -> None:
    m = enabled()
    ids, mask = tokens(2, 150), torch.ones(2, 150, dtype=torch.long)
    ids[1, :60], mask[1, :60] = 0, 0
    both = m.generate(ids, attention_mask=mask, max_new_tokens=12, num_beams=3, **GREEDY)
    alone = m.generate(ids[1:, 60:], max_new_tokens=12, num_beams=3, **GREEDY)
    assert torch.equal(both[1, 150:], alone[0, 90:])


def test_sampling_follows_the_seed() -> None:
    m, ids = enabled(), tokens(2, 150)

    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return m.generate(ids, max_new_tokens=10, do_sample=True, temperature=1.5, top_k=0, num_return_sequences=2)

    assert torch.equal(sample(3), sample(3))
    assert not torch.equal(sample(3), sample(4))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_rows_alone(side: str) -> None:
    m = enabled()
    ids, mask = tokens(3, 170), torch.ones(3, 170, dtype=torch.long)
    lengths = [170, 90, 5]
    for row, n in enumerate(lengths):
        pad = slice(0, 170 - n) if side == "left" else slice(n, 170)
        ids[row, pad], mask[row, pad] = 0, 0
    out = m.generate(ids, attention_mask=mask, max_new_tokens=40, **GREEDY)
    for row, n in enumerate(lengths if side == "left" else [170]):
        own = ids[row : row + 1][mask[row : row + 1].bool()][None]
        assert torch.equal(out[row, 170:], m.generate(own, max_new_tokens=40, **GREEDY)[0, n:])


def test_right_padded_rows_decoded_by_hand_equal_rows_alone() -> None:
    """The last valid token of a right-padded prompt, then new tokens after the padding."""
    m = enabled()
    ids, mask = tokens(2, 160), torch.ones(2, 160, dtype=torch.long)
    ids[1, 120:], mask[1, 120:] = 0, 0
    cache = OscarCache(m._oscar_kv.artifact, m.config)
    more = tokens(2, 30, seed=4)
    alone = OscarCache(m._oscar_kv.artifact, m.config)
    name = cache_argument()
    with torch.no_grad():
        first = m(input_ids=ids, attention_mask=mask, use_cache=True, **{name: cache}).logits[1, 119]
        wanted = m(input_ids=ids[1:, :120], use_cache=True, **{name: alone}).logits[0, -1]
        assert (first - wanted).abs().max() < 1e-9
        for i in range(30):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            place = mask.sum(1, keepdim=True) - 1
            got = m(
                input_ids=more[:, i : i + 1], attention_mask=mask, position_ids=place, use_cache=True, **{name: cache}
            ).logits[1]
            wanted = m(input_ids=more[1:, i : i + 1], use_cache=True, **{name: alone}).logits[0]
            assert (got - wanted).abs().max() < 1e-7
    assert [layer.store.lengths for layer in cache.packed_layers] == [[190, 150]] * 2


@pytest.mark.parametrize("chunk", [50, 64, 100])
def test_chunked_prefill_stores_the_same_bytes(chunk: int) -> None:
    m, ids = enabled(), tokens(1, 300)
    whole, given = with_cache(m, m._oscar_kv.artifact)
    m.generate(ids, max_new_tokens=1, **given, **GREEDY)
    parts, given = with_cache(m, m._oscar_kv.artifact)
    m.generate(ids, max_new_tokens=1, prefill_chunk_size=chunk, **given, **GREEDY)
    a, b = whole.packed_layers[0].store, parts.packed_layers[0].store
    assert a.lengths == b.lengths == [300]
    # The first layer's keys do not depend on attention, so its bytes must agree; later layers read quantised history.
    same = (a.pool.read(0, 0, 4) == b.pool.read(0, 0, 4)).float().mean()
    assert same > 0.999
    assert torch.allclose(a.raw(0, 220, 300)[0], b.raw(0, 220, 300)[0])


def test_chat_goes_on_over_several_calls() -> None:
    m = enabled()
    cache, given = with_cache(m, m._oscar_kv.artifact)
    text = tokens(1, 100)
    for turn in range(3):
        text = m.generate(text, max_new_tokens=30, **given, **GREEDY)
        assert cache.get_seq_length() == text.shape[1] - 1
        text = torch.cat([text, tokens(1, 25, seed=turn)], 1)
    sizes = [100, *[1] * 29, 26, *[1] * 29, 26, *[1] * 29]
    again, at = OscarCache(m._oscar_kv.artifact, m.config), 0
    for size in sizes:
        with torch.no_grad():
            m(input_ids=text[:, at : at + size], use_cache=True, **{cache_argument(): again})
        at += size
    for x, y in zip(cache.packed_layers, again.packed_layers, strict=True):
        assert torch.equal(x.store.ring_k, y.store.ring_k)
        assert torch.equal(x.store.pool.read(0, 0, 2), y.store.pool.read(0, 0, 2))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_saved_prefix_goes_on_bit_identically(family: str, padded: bool, tmp_path: Path) -> None:
    m = enabled(family, torch.float32)
    ids, mask = tokens(2, 230), torch.ones(2, 230, dtype=torch.long)
    if padded:
        ids[1, :77], mask[1, :77] = 0, 0
    cache, given = with_cache(m, m._oscar_kv.artifact)
    first = m.generate(ids, attention_mask=mask, max_new_tokens=10, **given, **GREEDY)
    path = cache.save_prefix(tmp_path / "prefix.safetensors")
    loaded, given_loaded = with_cache(m, m._oscar_kv.artifact)
    loaded.load_prefix(path)
    assert loaded.nbytes <= cache.nbytes
    assert loaded.get_seq_length() == cache.get_seq_length()
    text = torch.cat([first, tokens(2, 9, seed=3)], 1)
    mask = torch.cat([mask, torch.ones(2, 19, dtype=torch.long)], 1)
    options = {
        "attention_mask": mask,
        "max_new_tokens": 30,
        "return_dict_in_generate": True,
        "output_logits": True,
        **GREEDY,
    }
    a, b = m.generate(text, **given, **options), m.generate(text, **given_loaded, **options)
    assert torch.equal(a.sequences, b.sequences)
    assert all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))


def test_a_copied_model_is_enabled_on_its_own() -> None:
    m, ids = enabled(), tokens(1, 150)
    twin = copy.deepcopy(m)
    wanted = m.generate(ids, max_new_tokens=10, **GREEDY)
    disable(m)
    assert twin.generate.args[0] is twin
    assert torch.equal(twin.generate(ids, max_new_tokens=10, **GREEDY), wanted)
    assert m.config._attn_implementation == "sdpa"
    assert twin.config._attn_implementation == "oscar"


def test_a_copied_cache_parts_from_its_original() -> None:
    m, ids = enabled(), tokens(1, 150)
    cache, given = with_cache(m, m._oscar_kv.artifact)
    text = m.generate(ids, max_new_tokens=5, **given, **GREEDY)
    twin = copy.deepcopy(cache)
    assert twin.artifact is cache.artifact
    assert twin.packed_layers[0].owner is twin
    a = m.generate(text, max_new_tokens=20, **given, **GREEDY)
    assert twin.get_seq_length() == 154
    b = m.generate(text, max_new_tokens=20, **{cache_argument(): twin}, **GREEDY)
    assert torch.equal(a, b)


def test_reset_forgets() -> None:
    m, ids = enabled(), tokens(1, 150)
    cache, given = with_cache(m, m._oscar_kv.artifact)
    first = m.generate(ids, max_new_tokens=15, **given, **GREEDY)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0
    assert torch.equal(m.generate(ids, max_new_tokens=15, **given, **GREEDY), first)
