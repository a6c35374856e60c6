# SPDX-License-Identifier: Apache-2.0
"""Captured q, k, v reproduce each layer's attention output; identity and its errors."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from families import CONFIGS, SOFTCAP, tiny

from oscar_kv.calibration import data_free
from oscar_kv.errors import ArtifactError, UnsupportedModelError
from oscar_kv.integrations.transformers.capture import capture
from oscar_kv.integrations.transformers.geometry import layer_geometries
from oscar_kv.integrations.transformers.identity import (
    attention_config,
    check_model,
    config_hash,
    model_identity,
    row_hash,
)

Seen = dict[int, tuple[Tensor, Tensor, Tensor, float, float | None]]


def run(model: nn.Module, ids: Tensor) -> tuple[Seen, dict[int, Tensor], Tensor]:
    """What capture saw, what each attention module fed its output projection, and the logits."""
    seen: Seen = {}
    fed: dict[int, Tensor] = {}
    hooks = []
    for module in model.modules():
        if hasattr(module, "layer_idx") and (out := getattr(module, "o_proj", None) or getattr(module, "dense", None)):
            hooks.append(
                out.register_forward_pre_hook(lambda _m, args, i=module.layer_idx: fed.__setitem__(i, args[0]))
            )
    with torch.no_grad(), capture(model, lambda i, *rest: seen.__setitem__(i, rest)):  # type: ignore[arg-type]
        logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return seen, fed, logits


def attend(q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None, window: int | None) -> Tensor:
    """Causal attention in fp64, written out."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * scaling
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    n = q.shape[2]
    age = torch.arange(n)[:, None] - torch.arange(n)[None]
    s = s.masked_fill((age < 0) | (age >= (window or n)), float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", CONFIGS)
def test_captured_rows_reproduce_the_attention_output(family: str, implementation: str) -> None:
    if family in SOFTCAP and implementation == "sdpa":
        pytest.skip("Transformers' sdpa has no softcap")
    model = tiny(family)
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
    seen, fed, logits = run(model, ids)
    assert torch.equal(before, logits)
    assert model.config._attn_implementation == implementation
    layers = layer_geometries(model.config)
    assert sorted(seen) == sorted(fed) == list(range(len(layers)))
    for i, layer in enumerate(layers):
        q, k, v, scaling, softcap = seen[i]
        assert q.shape == (2, layer.num_q_heads, 40, layer.k_head_dim)
        assert k.shape == (2, layer.num_kv_heads, 40, layer.k_head_dim)
        assert v.shape == (2, layer.num_kv_heads, 40, layer.v_head_dim)
        assert softcap == SOFTCAP.get(family)
        window = model.config.sliding_window if layer.kind == "sliding" else None
        want = attend(q, k, v, scaling, softcap, window)
        torch.testing.assert_close(fed[i].double(), want, rtol=1e-4, atol=1e-5)


def test_keys_are_taken_after_rope() -> None:
    model = tiny("llama")
    ids = torch.full((1, 8), 5)  # the same token everywhere: without RoPE layer 0's keys would all be equal
    seen, _, _ = run(model, ids)
    k = seen[0][1][0, 0]
    assert (k[1:] - k[:1]).abs().amax() > 1e-2
    torch.testing.assert_close(k.norm(dim=-1), k[:1].norm(dim=-1).expand(8), rtol=1e-4, atol=1e-4)


def test_the_implementation_comes_back_after_an_error() -> None:
    model = tiny("llama")
    before = model.config._attn_implementation

    def fail(*_: Any) -> None:
        raise RuntimeError("from the callback")

    with pytest.raises(RuntimeError, match="from the callback"), capture(model, fail):
        model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    assert model.config._attn_implementation == before
    model(input_ids=torch.arange(3, 9)[None], use_cache=False)


def test_two_models_are_captured_apart() -> None:
    a, b = tiny("llama", 0), tiny("llama", 1)
    ids = torch.arange(3, 9)[None]
    seen_a: list[Tensor] = []
    seen_b: list[Tensor] = []
    with (
        torch.no_grad(),
        capture(a, lambda _i, q, *_: seen_a.append(q)),
        capture(b, lambda _i, q, *_: seen_b.append(q)),
    ):
        a(input_ids=ids, use_cache=False)
        b(input_ids=ids, use_cache=False)
    assert len(seen_a) == len(seen_b) == 2
    assert not torch.equal(seen_a[0], seen_b[0])


def test_models_outside_the_interface_are_refused() -> None:
    model = tiny("llama")
    with pytest.raises(UnsupportedModelError, match="never called"), capture(model, lambda *_: None):
        pass
    model._supports_attention_backend = False
    with pytest.raises(UnsupportedModelError, match="attention interface"), capture(model, lambda *_: None):
        pass


# Identity


def made(model: nn.Module) -> Any:
    """A data-free artifact that records the model's weights too, as a calibrated one does."""
    artifact = data_free(model.config, "toy/model")
    meta = artifact.meta.model_copy(update={"model": model_identity(model, "toy/model")})
    return type(artifact)(meta, artifact.layers)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_passes_its_own_check_in_any_precision(family: str) -> None:
    model = tiny(family)
    artifact = made(model)
    assert artifact.meta.model.weight_samples
    check_model(artifact, model)
    check_model(artifact, copy.deepcopy(model).bfloat16())
    check_model(data_free(model.config, "toy/model"), model)


def test_rows_are_the_first_of_each_kv_head_of_the_first_and_last_full_layer() -> None:
    model = tiny("qwen2", num_hidden_layers=3)
    samples = model_identity(model, "m").weight_samples
    assert [(s.name, s.row) for s in samples] == [
        (f"model.layers.{i}.self_attn.k_proj.weight", row) for i in (0, 2) for row in (0, 16)
    ]
    weight = model.model.layers[2].self_attn.k_proj.weight
    assert samples[3].sha256 == row_hash(weight[16])
    fused = model_identity(tiny("phi3"), "m").weight_samples
    assert [(s.name, s.row) for s in fused[:2]] == [("model.layers.0.self_attn.qkv_proj.weight", r) for r in (64, 80)]


def test_a_gemma_sample_comes_from_the_full_layer() -> None:
    assert {s.name for s in model_identity(tiny("gemma3"), "m").weight_samples} == {
        "model.layers.1.self_attn.k_proj.weight"
    }


def test_a_row_hash_is_of_little_endian_bfloat16() -> None:
    import hashlib

    assert row_hash(torch.tensor([1.0, -2.0])) == hashlib.sha256(bytes.fromhex("803f00c0")).hexdigest()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, r"config\.rope_theta 10000 ≠ 1e\+06"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
            r"config\.rope_factor None ≠ 4",
        ),
        ({"num_hidden_layers": 3}, "num_hidden_layers 2 ≠ 3"),
        ({"num_key_value_heads": 4}, r"layers\[0\]\.num_kv_heads 2 ≠ 4"),
        ({"head_dim": 32}, r"layers\[0\]\.k_head_dim 16 ≠ 32"),
        ({"hidden_size": 128, "head_dim": 16}, r"config\.hidden_size 64 ≠ 128"),
    ],
)
def test_another_model_is_refused_by_the_field_that_differs(fields: dict[str, Any], says: str) -> None:
    artifact = made(tiny("llama"))
    with pytest.raises(ArtifactError, match=says) as error:
        check_model(artifact, tiny("llama", **fields))
    assert "artifact was calibrated for 'toy/model'" in str(error.value)


def test_other_weights_are_refused() -> None:
    artifact = made(tiny("llama"))
    with pytest.raises(ArtifactError, match=r"layers\.0\.self_attn\.k_proj\.weight row 0 holds other weights"):
        check_model(artifact, tiny("llama", seed=1))
    changed = tiny("llama")
    changed.model.layers[1].self_attn.k_proj.weight.data[16, 3] += 1
    with pytest.raises(ArtifactError, match=r"layers\.1\.self_attn\.k_proj\.weight row 16"):
        check_model(artifact, changed)


def test_another_family_of_the_same_geometry_is_refused() -> None:
    with pytest.raises(ArtifactError, match="config.model_type 'llama' ≠ 'qwen2'"):
        check_model(made(tiny("llama")), tiny("qwen2"))


def test_packed_weights_are_reported() -> None:
    model = tiny("llama")
    artifact = made(model)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.warns(UserWarning, match="missing or packed"):
        check_model(artifact, model)


def test_the_config_hash_stands_still() -> None:
    """The same dict under every Transformers release, whatever the notation of numbers and defaults."""
    have = attention_config(CONFIGS["llama"]())
    want = {
        "hidden_size": 64.0,
        "layers": ["2 x full, 4 query heads, 2 KV heads, head_dim 16/16"],
        "model_type": "llama",
        "num_hidden_layers": 2.0,
        "rope_theta": 10000.0,
        "rope_type": "default",
    }
    assert have == want
    assert json.loads(json.dumps(have)) == have
    integer = CONFIGS["llama"](
        rope_parameters={"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0}
    )
    assert config_hash(attention_config(integer)) == config_hash(want)


def test_rope_of_single_layer_types_is_told_apart() -> None:
    fields = attention_config(CONFIGS["gemma3"]())
    assert fields["rope_theta[full_attention]"] != fields["rope_theta[sliding_attention]"]
    assert attention_config(CONFIGS["phi"]())["rope_partial_rotary_factor"] == 0.5
