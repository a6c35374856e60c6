# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

tf = pytest.importorskip("transformers")

from families import COMMON, CONFIGS  # noqa: E402

from oscar_kv.errors import UnsupportedModelError  # noqa: E402
from oscar_kv.integrations.transformers.geometry import layer_geometries  # noqa: E402


def config(**fields: Any) -> SimpleNamespace:
    base = {"model_type": "toy", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    return SimpleNamespace(**{**base, **fields})


def kinds(c: Any) -> list[str]:
    return [layer.kind for layer in layer_geometries(c)]


@pytest.mark.parametrize("family", CONFIGS)
def test_heads_of_each_family(family: str) -> None:
    c = CONFIGS[family]()
    for layer in layer_geometries(c):
        assert layer.num_q_heads == 4
        assert layer.num_kv_heads == c.num_key_value_heads
        assert layer.k_head_dim == layer.v_head_dim == (getattr(c, "head_dim", None) or 16)
    assert kinds(c) == (["sliding", "full"] if family in ("gemma2", "gemma3") else ["full", "full"])


def test_head_dim_of_the_config_wins_over_hidden_over_heads() -> None:
    assert layer_geometries(config())[0].k_head_dim == 64
    assert layer_geometries(config(head_dim=None))[0].k_head_dim == 64
    assert layer_geometries(config(head_dim=128))[0].k_head_dim == 128


def test_no_kv_heads_means_one_each_and_multi_query_one() -> None:
    assert layer_geometries(config())[0].num_kv_heads == 8
    assert layer_geometries(config(multi_query=True))[0].num_kv_heads == 1
    assert layer_geometries(config(num_key_value_heads=2))[0].group == 4


def test_value_heads_may_differ() -> None:
    layer = layer_geometries(config(head_dim=192, v_head_dim=128))[0]
    assert (layer.k_head_dim, layer.v_head_dim) == (192, 128)


def test_heads_may_differ_by_layer() -> None:
    assert [g.num_kv_heads for g in layer_geometries(config(num_key_value_heads=[2, 4]))] == [2, 4]


def test_sliding_window_without_layer_types_holds_for_all_layers() -> None:
    assert kinds(tf.MistralConfig(**COMMON, sliding_window=4096)) == ["sliding"] * 2
    assert kinds(config(sliding_window=4096)) == ["sliding"] * 2
    assert kinds(config(sliding_window=4096, use_sliding_window=False)) == ["full"] * 2
    assert kinds(tf.Qwen2Config(**COMMON, use_sliding_window=False, sliding_window=4096)) == ["full"] * 2


def test_layer_types() -> None:
    names = ["full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "mamba"]
    want = ["full", "sliding", "sliding", "other", "other", "other"]
    assert kinds(config(num_hidden_layers=6, layer_types=names)) == want


def test_text_part_of_a_multimodal_config() -> None:
    text = {**COMMON, "head_dim": 32}
    c = tf.Gemma3Config(text_config={**text, "layer_types": ["sliding_attention", "full_attention"]})
    assert kinds(c) == ["sliding", "full"]
    assert layer_geometries(c)[1].k_head_dim == 32


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank=512: multi-head latent attention"),
        ({"index_topk": 2048}, "index_topk"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers=10: several layers share"),
        ({"kv_sharing_modes": ["own", "shared"]}, "kv_sharing_modes"),
        ({"cross_attention_layers": [1]}, "cross"),
        ({"head_dim": 72}, "72"),
        ({"head_dim": 512}, "512"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"layer_types": ["full_attention", "indexed_attention"]}, "indexed_attention"),
        ({"layer_types": ["full_attention"]}, "1 of 2 layers"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": 7}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_what_cannot_be_held_is_refused_with_reason_and_remedy(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        layer_geometries(config(**fields))
    assert says in str(error.value)
    assert "full-precision cache" in str(error.value)


def test_deepseek_and_t5_configs_are_refused() -> None:
    for c in (tf.DeepseekV3Config(), tf.T5Config()):
        with pytest.raises(UnsupportedModelError):
            layer_geometries(c)
