# SPDX-License-Identifier: Apache-2.0
"""OscarCache in rough use: interrupted passes, gradients, inference mode, autocast, shared configs, pickles."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from tiny import artifact_of, model, tokens

from oscar_kv import OscarCache, disable, enable
from oscar_kv.errors import ArtifactError, CacheError
from oscar_kv.integrations.transformers.compat import cache_argument
from oscar_kv.integrations.transformers.identity import config_identity, weight_samples

SMALL = {"sink": 32, "recent": 80, "slack": 32}
IDS = tokens(1, 200)


def enabled(family: str = "llama", **fields: Any) -> Any:
    m = model(family, **fields)
    return enable(m, artifact_of(m, **SMALL))


def new(m: Any) -> OscarCache:
    return OscarCache(m._oscar_kv.artifact, m.config)


def forward(m: Any, ids: torch.Tensor, cache: Any, **extra: Any) -> torch.Tensor:
    return m(input_ids=ids, use_cache=True, **{cache_argument(): cache}, **extra).logits


def feed(m: Any, ids: torch.Tensor, cache: Any, **extra: Any) -> torch.Tensor:
    with torch.no_grad():
        return forward(m, ids, cache, **extra)


# --- interrupted passes


def interrupt(m: Any, cache: Any, module: torch.nn.Module) -> None:
    def boom(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = module.register_forward_hook(boom)
    with pytest.raises(KeyboardInterrupt):
        feed(m, IDS[:, :1], cache)
    hook.remove()


@pytest.mark.parametrize(("family", "layer"), [("llama", 0), ("gemma3_text", 2)])
def test_an_interrupted_pass_is_noticed_until_reset(family: str, layer: int, tmp_path: Path) -> None:
    """The layer is packed in one family, a sliding window before all packed ones in the other."""
    m = enabled(family)
    cache = new(m)
    feed(m, IDS, cache)
    interrupt(m, cache, m.model.layers[layer].mlp)
    uses: list[Callable[[], Any]] = [
        lambda: feed(m, IDS[:, :1], cache),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.save_prefix(tmp_path / "p.safetensors"),
        lambda: copy.deepcopy(cache),
    ]
    for use in uses:
        with pytest.raises(CacheError, match=r"interrupted.*cache\.reset\(\)"):
            use()
    cache.reset()
    assert torch.equal(feed(m, IDS, cache), feed(m, IDS, new(m)))


def test_an_interruption_while_storing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half stored, in the last layer: the counts of slots alone would not tell."""
    m = enabled()
    cache = new(m)
    feed(m, IDS, cache)
    store = cache.packed_layers[-1].store
    append = store.append

    def half(*args: Any) -> None:
        append(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "append", half)
        with pytest.raises(KeyboardInterrupt):
            feed(m, IDS[:, :1], cache)
    with pytest.raises(CacheError, match="interrupted"):
        feed(m, IDS[:, :1], cache)


# --- whose artifact


def test_the_config_must_be_the_one_that_was_calibrated() -> None:
    m = model("llama")
    a = artifact_of(m, **SMALL)
    own = replace(a, meta=a.meta.model_copy(update={"model": config_identity(m.config, "tiny")}))
    OscarCache(own, m.config)
    other = copy.deepcopy(m.config)
    other.rope_parameters["rope_theta"] = 5e5
    with pytest.raises(ArtifactError, match=r"config\.rope_theta"):
        OscarCache(own, other)


def test_an_enabled_model_takes_its_own_artifact_only() -> None:
    m = enabled()
    foreign = OscarCache(artifact_of(m, seed=5, **SMALL), m.config)
    with pytest.raises(ArtifactError, match="is not the one that this model was enabled with"):
        feed(m, IDS, foreign)
    with pytest.raises(ArtifactError, match="is not the one that this model was enabled with"):
        m.generate(IDS, max_new_tokens=2, **{cache_argument(): OscarCache(foreign.artifact, m.config)})


def test_another_recipe_of_the_same_calibration_is_taken() -> None:
    m = model("llama")
    a = artifact_of(m, **SMALL)
    identity = config_identity(m.config, "tiny").model_copy(update={"weight_samples": weight_samples(m)})
    a = replace(a, meta=a.meta.model_copy(update={"model": identity}))
    assert identity.weight_samples
    enable(m, a)
    wider = a.with_recipe("k4v4")
    assert wider.sha256 != a.sha256
    assert feed(m, IDS, OscarCache(wider, m.config)).isfinite().all()


# --- which attention runs without history


def test_a_model_loaded_with_oscar_falls_back_to_its_default(caplog: pytest.LogCaptureFixture) -> None:
    m = model("llama", attention="oscar")
    with caplog.at_level("INFO", "oscar_kv"):
        enable(m, artifact_of(m, **SMALL))
    assert "it runs 'sdpa'" in caplog.text
    assert torch.equal(feed(m, IDS, new(m)), feed(enabled(), IDS, new(m)))
    assert disable(m).config._attn_implementation == "sdpa"
    with pytest.raises(CacheError, match="stock_attention"):
        OscarCache(artifact_of(m), m.config, stock_attention="oscar")


def test_two_models_on_one_config_object() -> None:
    a = model("llama")
    wanted = feed(a, IDS, None)
    b = type(a)(a.config).eval()
    assert a.config is b.config
    enable(a, artifact_of(a, **SMALL))
    enable(b, artifact_of(b, seed=3, **SMALL))
    assert torch.equal(feed(a, IDS, new(a)), wanted)
    with pytest.raises(ArtifactError):
        feed(a, IDS, new(b))
    disable(a)
    assert b.generate(IDS, max_new_tokens=3).shape == (1, 203)
    assert disable(b).config._attn_implementation == "sdpa"
    assert torch.equal(feed(a, IDS, None), wanted)


def test_a_pickled_eager_model_stays_eager() -> None:
    m = enabled(attention="eager")
    twin = pickle.loads(pickle.dumps(m))
    assert torch.equal(feed(twin, IDS, new(twin)), feed(m, IDS, new(m)))
    attention = twin.model.layers[0].self_attn
    assert attention._oscar_kv.stock_name(attention.config) == "eager"
    disable(m)
    assert twin.config._attn_implementation == "oscar"
    assert disable(twin).config._attn_implementation == "eager"
    assert not any("_oscar_kv" in module.__dict__ for module in twin.modules())


# --- modes of PyTorch


def test_without_no_grad_steps_work_and_gradients_are_refused() -> None:
    m = enabled()
    cache, plain = new(m), new(m)
    prompt = forward(m, IDS, cache)
    assert torch.equal(prompt, feed(m, IDS, plain))
    prompt.sum().backward()  # no history yet: ordinary gradients
    assert m.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    for part in (IDS[:, :1], IDS[:, :60]):
        out = forward(m, part, cache)
        assert torch.equal(out, feed(m, part, plain))
        with pytest.raises(CacheError, match=r"torch\.no_grad\(\)"):
            out.sum().backward()
    assert not any(t.requires_grad for layer in cache.packed_layers for t in layer.store.state().values())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_cache_moves_between_inference_mode_and_outside(family: str) -> None:
    m = enabled(family)
    cache, plain = new(m), new(m)
    rows, mask = tokens(2, 240), torch.ones(2, 240, dtype=torch.long)
    mask[0, :30] = 0
    with torch.inference_mode():
        forward(m, rows[:, :200], cache, attention_mask=mask[:, :200])
        cache.reorder_cache(torch.tensor([0, 0]))
        cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(1)
    feed(m, rows[:, :200], plain, attention_mask=mask[:, :200])
    plain.reorder_cache(torch.tensor([0, 0]))
    mask[1] = mask[0]
    for start, stop in ((200, 238), (238, 239), (239, 240)):
        part = {"attention_mask": mask[:, :stop]}
        with torch.inference_mode(stop == 239):
            got = forward(m, rows[:, start:stop], cache, **part)
        assert torch.equal(got, feed(m, rows[:, start:stop], plain, **part))
    cache.reset()
    assert torch.equal(feed(m, IDS, cache), feed(m, IDS, new(m)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_autocast(attention: str) -> None:
    from transformers import DynamicCache

    m, plain = enabled(attention=attention), model("llama", attention=attention)
    cache, stock = new(m), DynamicCache(config=plain.config)
    with torch.autocast("cpu", torch.bfloat16):
        for part in (IDS[:, :50], IDS[:, 50:55], IDS[:, 55:56]):  # no history: equal to the stock cache
            assert torch.equal(feed(m, part, cache), feed(plain, part, stock))
        for start in (56, 150):
            assert feed(m, IDS[:, start : start + 50], cache).isfinite().all()
        got = feed(m, IDS[:, :1], cache)
    layer = cache.packed_layers[0].store
    assert layer.ring_v.dtype == torch.float32
    exact = new(m)
    feed(m, IDS[:, :206], exact)
    assert torch.allclose(layer.sink_k, exact.packed_layers[0].store.sink_k, rtol=0.05, atol=0.05)
    assert got.isfinite().all()
    assert feed(m, IDS[:, :1], cache).dtype == torch.float32  # and goes on without autocast


def test_a_compiled_model_gives_the_same() -> None:
    m = enabled(num_hidden_layers=1)
    compiled = torch.compile(m, backend="eager")
    cache, plain = new(m), new(m)
    for part in (IDS[:, :120], IDS[:, :1]):
        assert torch.equal(feed(compiled, part, cache), feed(m, part, plain))


def test_attention_weights_over_history_are_refused() -> None:
    m = enabled(attention="eager")
    cache = new(m)
    assert feed(m, IDS, cache, output_attentions=True).shape[1] == 200  # the prompt's are the stock attention's
    with pytest.raises(CacheError, match="output_attentions"):
        feed(m, IDS[:, :1], cache, output_attentions=True)
