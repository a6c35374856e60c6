# SPDX-License-Identifier: Apache-2.0
"""OscarCache and enable: memory, bits per element, crops, and an error for every misuse."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from tiny import artifact, artifact_of, config, model, tokens

from oscar_kv import OscarCache, disable, enable
from oscar_kv.errors import ArtifactError, CacheError, OscarError, RecipeError, UnsupportedModelError
from oscar_kv.geometry import LayerGeometry
from oscar_kv.integrations.transformers import compat
from oscar_kv.integrations.transformers.compat import cache_argument

SMALL = {"sink": 32, "recent": 80, "slack": 32}


def enabled(family: str = "llama", **changes: Any) -> Any:
    m = model(family)
    return enable(m, artifact_of(m, **{**SMALL, **changes}))


def feed(m: Any, cache: Any, ids: torch.Tensor, **extra: Any) -> torch.Tensor:
    with torch.no_grad():
        return m(input_ids=ids, use_cache=True, **{cache_argument(): cache}, **extra).logits


def filled(m: Any, rows: int = 1, length: int = 300) -> OscarCache:
    cache = OscarCache(m._oscar_kv.artifact, m.config)
    feed(m, cache, tokens(rows, length))
    return cache


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_memory_is_the_sum_of_all_tensors(family: str) -> None:
    m = enabled(family)
    cache = OscarCache(m._oscar_kv.artifact, m.config)
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[0, :20] = 0
    feed(m, cache, tokens(2, 300), attention_mask=mask)
    seen: dict[int, int] = {}
    skip = {id(cache.artifact), id(cache.codecs), id(cache)}

    def walk(x: Any) -> None:
        if id(x) in skip:
            return
        skip.add(id(x))
        if isinstance(x, torch.Tensor):
            if x.ndim:
                seen[id(x)] = x.numel() * x.element_size()
        elif isinstance(x, dict):
            for y in x.values():
                walk(y)
        elif isinstance(x, (list, tuple)):
            for y in x:
                walk(y)
        elif hasattr(x, "__dict__") and type(x).__name__ != "LayerCodec":
            walk(vars(x))

    walk(vars(cache))
    assert cache.nbytes == sum(seen.values()) == cache.memory()["total"]


@pytest.mark.parametrize(
    ("recipe", "length"), [("k2v2", 32768), ("k2v2", 131072), ("k4v4", 4096), ("k2v1", 1000), ("k3v2", 320)]
)
def test_bits_per_element_at_a_context_are_those_of_the_buffers(recipe: str, length: int) -> None:
    """The formula against a cache that really holds so many tokens, head_dim 128 in bf16."""
    layers = (LayerGeometry(kind="full", num_q_heads=2, num_kv_heads=1, k_head_dim=128, v_head_dim=128),)
    c = config("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=128)
    cache = OscarCache(artifact(layers, recipe), c)
    stated = cache.bits_per_element(length)
    layer = cache.packed_layers[0]
    rows = torch.zeros(1, 1, min(length, 2048), 128, dtype=torch.bfloat16)
    layer.lazy_initialization(rows, rows)
    store = layer.store
    store.pool.reserve(max(0, length // 64 - store.first_page))
    store.lengths[0] = length
    assert cache.bits_per_element() == pytest.approx(stated)
    if recipe == "k2v2":
        assert stated <= {32768: 2.43, 131072: 2.30}[length]


def test_describe_names_recipe_hash_kernel_and_size() -> None:
    m = enabled()
    about = filled(m).describe(context=4096)
    assert about["recipe"] == "k2v2"
    assert about["kernel"] == "torch"
    assert about["artifact_sha256"] == m._oscar_kv.artifact.sha256
    assert about["tokens"] == 300
    assert about["bits_per_element"] > about["bits_per_element_at_4096"] > 2


def test_enable_logs_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    m = model("llama")
    a = artifact_of(m)
    with caplog.at_level(logging.INFO, "oscar_kv"):
        enable(m, a)
    assert "recipe k2v2" in caplog.text
    assert a.sha256[:12] in caplog.text
    assert "bits per element" in caplog.text


def test_enable_takes_a_file_and_another_recipe(tmp_path: Path) -> None:
    m = model("llama")
    path = artifact_of(m).save(tmp_path / "a.safetensors")
    enable(m, path, recipe="k3v2")
    assert m._oscar_kv.artifact.recipe.name == "k3v2"
    enable(m, str(path))
    assert m._oscar_kv.artifact.recipe.name == "k2v2"
    assert disable(m).config._attn_implementation == "sdpa"
    assert "generate" not in vars(m)
    assert disable(m) is m


# --- crops


def test_crop_counts_slots_and_valid_tokens() -> None:
    m = enabled()
    cache = OscarCache(m._oscar_kv.artifact, m.config)
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[1, 190:] = 0
    feed(m, cache, tokens(2, 200), attention_mask=mask)
    cache.crop(-15)
    assert cache.get_seq_length() == 185
    assert cache.packed_layers[0].store.lengths == [185, 185]
    assert cache.slots.mask is None
    assert cache.memory()["padding"] == 0
    cache.crop(0)
    assert cache.get_seq_length() == 185
    cache.crop(-1000)
    assert cache.get_seq_length() == 0
    assert cache.packed_layers[1].store.lengths == [0, 0]


def test_positive_crop_is_a_length_where_the_release_says_so() -> None:
    m = enabled()
    cache = filled(m)
    if compat.positive_crop_is_length():
        cache.crop(290)
        assert cache.get_seq_length() == 290
        cache.crop(5000)
        assert cache.get_seq_length() == 290
    else:
        with pytest.raises(CacheError, match="negative number"):
            cache.crop(290)


def test_a_deep_crop_warns_once_and_stays_usable(caplog: pytest.LogCaptureFixture) -> None:
    m = enabled()
    cache = filled(m)
    with caplog.at_level(logging.WARNING, "oscar_kv"):
        cache.crop(-33)
        assert not caplog.records
        cache.crop(-60)
        cache.crop(-50)
    assert len(caplog.records) == 1
    assert "slack of 32" in caplog.text
    close, at = feed(m, cache, tokens(1, 300)[:, 157:]), OscarCache(m._oscar_kv.artifact, m.config)
    feed(m, at, tokens(1, 300)[:, :157])
    exact = feed(m, at, tokens(1, 300)[:, 157:])
    assert cache.get_seq_length() == 300
    assert close.isfinite().all()
    scale = exact.std()
    assert (close - exact).abs().mean() < scale  # degraded by codes, not by wrong positions


def test_sliding_layers_follow_a_crop_only_where_they_recorded() -> None:
    m = enabled("gemma3_text")
    cache = filled(m)
    with pytest.raises(RuntimeError, match="past states"):
        cache.crop(-1)
    assert cache.get_seq_length(5) == 300
    assert cache.packed_layers[0].store.lengths == [300]


# --- misuse


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_any_other_attention_function_is_an_error(attention: str) -> None:
    m = model("llama", attention=attention)
    with pytest.raises(CacheError, match="attn_implementation='oscar'"):
        feed(m, OscarCache(artifact_of(m), m.config), tokens(1, 20))


def test_tokens_added_twice_are_an_error() -> None:
    m = model("llama")
    cache = OscarCache(artifact_of(m), m.config)
    k = torch.zeros(1, 2, 3, 16)
    keys, _ = cache.update(k, k, 0)
    with pytest.raises(CacheError, match="added twice"):
        cache.update(k, k, 0)
    for use in (
        lambda: keys.shape,
        lambda: keys[0],
        lambda: len(keys),
        lambda: keys @ k,
        lambda: k @ keys,
        lambda: torch.cat([k, keys]),
        lambda: torch.matmul(k, keys),
        lambda: bool(keys),
        lambda: list(keys),
    ):
        with pytest.raises(CacheError, match="packed pages"):
            use()
    for method in (lambda: cache.crop(-1), lambda: cache.reorder_cache(torch.tensor([0]))):
        with pytest.raises(CacheError, match="forward pass"):
            method()
    cache.reset()
    cache.update(k, k, 0)


def test_another_cache_is_an_error() -> None:
    from transformers import DynamicCache

    m = enabled()
    with pytest.raises(CacheError, match="DynamicCache"):
        m.generate(tokens(1, 10), max_new_tokens=2, **{cache_argument(): DynamicCache(config=m.config)})
    other = DynamicCache(config=m.config)
    feed(m, other, tokens(1, 10))
    with pytest.raises(CacheError, match="come from another cache"):
        feed(m, other, tokens(1, 3))


@pytest.mark.parametrize("where", ["argument", "generation_config", "model"])
def test_cache_implementation_is_an_error(where: str) -> None:
    from transformers import GenerationConfig

    m = enabled()
    kwargs: dict[str, Any] = {"max_new_tokens": 2}
    if where == "argument":
        kwargs["cache_implementation"] = "static"
    elif where == "generation_config":
        kwargs = {"generation_config": GenerationConfig(max_new_tokens=2, cache_implementation="dynamic")}
    else:
        m.generation_config.cache_implementation = "static"
    with pytest.raises(CacheError, match="cache_implementation"):
        m.generate(tokens(1, 10), **kwargs)


def test_use_cache_false_runs_without_a_cache() -> None:
    m = model("llama")
    ids = tokens(1, 30)
    wanted = m.generate(ids, max_new_tokens=4, use_cache=False, do_sample=False)
    enable(m, artifact_of(m))
    assert torch.equal(m.generate(ids, max_new_tokens=4, use_cache=False, do_sample=False), wanted)


def test_masks_that_do_not_fit_are_errors() -> None:
    m = enabled()
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[1, :50] = 0
    cache = OscarCache(m._oscar_kv.artifact, m.config)
    feed(m, cache, tokens(2, 200), attention_mask=mask)
    new = tokens(2, 1)
    with pytest.raises(CacheError, match="no attention_mask"):
        feed(m, cache, new)
    for bad, match in (
        (torch.ones(2, 1), r"must cover 2 rows of 200 slots"),
        (torch.ones(2, 201), "differs from the one"),
    ):
        cache = OscarCache(m._oscar_kv.artifact, m.config)
        feed(m, cache, tokens(2, 200), attention_mask=mask)
        with pytest.raises(CacheError, match=match):
            feed(m, cache, new, attention_mask=bad)


def test_custom_masks_work_only_without_history() -> None:
    from transformers import DynamicCache

    m = enabled()
    square = torch.ones(100, 100).tril().bool()
    square[:, 3] = False
    square[3, 3] = True
    cache = OscarCache(m._oscar_kv.artifact, m.config)
    got = feed(m, cache, tokens(1, 100), attention_mask=square[None, None])
    for i in range(12):  # up to sink + recent there is no history
        feed(m, cache, tokens(1, 1, seed=i))
    with pytest.raises(CacheError, match="custom attention mask"):
        feed(m, cache, tokens(1, 1))
    disable(m)
    wanted = feed(m, DynamicCache(config=m.config), tokens(1, 100), attention_mask=square[None, None])
    assert torch.equal(got, wanted)


def test_soft_caps_need_eager_attention() -> None:
    m = model("gemma2")
    a = artifact_of(m, **SMALL)
    m.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedModelError, match="attn_implementation='eager'"):
        enable(m, a)
    assert m.config._attn_implementation == "sdpa"


def test_enabling_with_attention_oscar_and_no_enable() -> None:
    """The explicit way: attn_implementation="oscar" and a cache, nothing else."""
    plain = model("qwen2", attention="sdpa")
    m = model("qwen2", attention="oscar")
    a = artifact_of(m, **SMALL)
    ids = tokens(1, 180)
    wanted = enable(plain, a).generate(ids, max_new_tokens=20, do_sample=False)
    got = m.generate(ids, max_new_tokens=20, do_sample=False, **{cache_argument(): OscarCache(a, m.config)})
    assert torch.equal(got, wanted)
    with pytest.raises(CacheError, match="come from another cache"):
        m.generate(ids, max_new_tokens=2)


def test_crop_takes_a_tensor() -> None:
    m = enabled()
    cache = filled(m)
    amount = torch.tensor(-3)
    cache.crop(amount)
    amount += 1
    assert cache.get_seq_length() == 297
    assert type(cache.get_seq_length()) is int


def test_another_batch_size_is_an_error() -> None:
    m = enabled()
    with pytest.raises(CacheError, match="holds 1 rows, this batch has 2"):
        feed(m, filled(m), tokens(2, 1))


def test_flags_that_generate_reads() -> None:
    m = enabled()
    cache = OscarCache(m._oscar_kv.artifact, m.config)
    assert not cache.is_compileable
    assert cache.is_croppable


def test_training_with_dropout_is_an_error() -> None:
    m = model("llama", attention_dropout=0.1)
    enable(m, artifact_of(m, **SMALL)).train()
    cache = OscarCache(m._oscar_kv.artifact, m.config)
    feed(m, cache, tokens(1, 200))
    with pytest.raises(CacheError, match=r"model\.eval"):
        feed(m, cache, tokens(1, 1))


def test_artifacts_of_other_models_are_errors() -> None:
    m = model("llama")
    for other, match in (
        (model("llama", num_hidden_layers=3), "2"),
        (model("llama", num_key_value_heads=4), "num_kv_heads"),
    ):
        with pytest.raises(ArtifactError, match=match):
            enable(m, artifact_of(other))
        with pytest.raises(CacheError, match=match):
            OscarCache(artifact_of(other), m.config)
    assert m.config._attn_implementation == "sdpa"
    with pytest.raises(ArtifactError, match="no such file"):
        enable(m, "nowhere.safetensors")
    with pytest.raises(RecipeError, match="rotation"):
        enable(m, artifact_of(m), recipe="oscar-paper")


def test_unsupported_models_are_errors() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    c = T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError):
        enable(T5ForConditionalGeneration(c), artifact_of(model("llama")))
    with pytest.raises(UnsupportedModelError, match="not a Transformers model"):
        enable(torch.nn.Linear(2, 2), artifact_of(model("llama")))


@pytest.mark.parametrize("installed", ["4.57.1", "5.16.2", "5.25.0", "6.0.0.dev0"])
def test_other_releases_are_refused_with_the_list(installed: str) -> None:
    with pytest.raises(OscarError, match=r"5\.17, 5\.18.*5\.24"):
        compat.check_version(installed)


def test_this_release_is_supported() -> None:
    compat.check_version()
    compat.check_version("5.20.0.dev0")


# --- prefixes


def test_prefixes_are_checked(tmp_path: Path) -> None:
    m = enabled()
    path = filled(m).save_prefix(tmp_path / "p.safetensors")
    other = OscarCache(artifact_of(m, seed=5, **SMALL), m.config)
    with pytest.raises(CacheError, match="artifact_sha256"):
        other.load_prefix(path)
    fresh = OscarCache(m._oscar_kv.artifact, m.config)
    with pytest.raises(CacheError, match="nothing to save"):
        fresh.save_prefix(tmp_path / "empty")
    with pytest.raises(CacheError, match="no such file"):
        fresh.load_prefix(tmp_path / "nowhere")
    with pytest.raises(CacheError, match="holds tokens already"):
        filled(m).load_prefix(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    (tmp_path / "changed").write_bytes(data)
    with pytest.raises(CacheError, match="tensors_sha256"):
        fresh.load_prefix(tmp_path / "changed")
    (tmp_path / "short").write_bytes(data[:100])
    with pytest.raises(CacheError, match="not a readable"):
        fresh.load_prefix(tmp_path / "short")
    a = artifact_of(m).save(tmp_path / "a.safetensors")
    with pytest.raises(CacheError, match="not a saved prefix"):
        fresh.load_prefix(a)
    assert fresh.get_seq_length() == 0
    assert fresh.load_prefix(path).get_seq_length() == 300
