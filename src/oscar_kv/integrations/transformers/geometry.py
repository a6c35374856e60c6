# SPDX-License-Identifier: Apache-2.0
"""Layer geometry of a Transformers config: which layers have full attention, how many heads, how wide."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ...errors import OscarError, UnsupportedModelError
from ...geometry import LayerGeometry

_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "window_attention": "sliding",
    "linear_attention": "other",
    "conv": "other",
    "mamba": "other",
    "mamba2": "other",
    "recurrent": "other",
    "moe": "other",
    "mlp": "other",
    "hybrid": "other",
    "hybrid_sliding": "other",
}
"""Layer types of Transformers → kinds of cache. A hybrid layer's cache holds attention and a recurrent state."""

_REFUSED = (
    ("kv_lora_rank", "multi-head latent attention stores one compressed vector a token, not keys and values a head"),
    ("index_topk", "an indexer picks the tokens that are read, and its own cache cannot be quantised here"),
    ("indexer_types", "an indexer picks the tokens that are read, and its own cache cannot be quantised here"),
    ("indexer_head_dim", "an indexer picks the tokens that are read, and its own cache cannot be quantised here"),
    ("index_n_heads", "an indexer picks the tokens that are read, and its own cache cannot be quantised here"),
    ("num_kv_shared_layers", "several layers share one KV cache"),
    ("kv_sharing_modes", "several layers share one KV cache"),
    ("cross_attention_layers", "cross-attention layers read another sequence"),
)
_REMEDY = (
    "use the full-precision cache for this model, or take one with grouped-query, multi-query or multi-head attention"
)


def text_config(config: Any) -> Any:
    """The decoder's config of a multimodal wrapper, or the config itself."""
    get = getattr(config, "get_text_config", None)
    return config if get is None else get()


def refuse(config: Any, reason: str) -> UnsupportedModelError:
    """The error for a model whose attention cannot be held, with reason and remedy."""
    return UnsupportedModelError(f"{getattr(config, 'model_type', type(config).__name__)}: {reason}; {_REMEDY}")


def _check_causal(config: Any) -> None:
    """Refuse encoders. ``is_decoder`` False alone says nothing: some causal models carry it and never read it."""
    if getattr(config, "is_decoder", None):
        return
    names = [str(name) for name in getattr(config, "architectures", None) or ()]
    if any(name.endswith("ForMaskedLM") for name in names) and not any(name.endswith("ForCausalLM") for name in names):
        raise refuse(config, f"not a causal language model (architectures={names})")
    if getattr(config, "is_decoder", None) is False:
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

        if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            raise refuse(config, "not a causal language model (is_decoder=False: each token sees later ones)")


def layer_geometries(config: Any) -> tuple[LayerGeometry, ...]:
    """One entry a decoder layer, from any Transformers config (the text part of multimodal ones).

    Raises UnsupportedModelError with reason and remedy: latent attention, indexers, encoders and encoder-decoders, KV
    caches shared by layers, cross-attention, head sizes that are no multiple of 16 up to 256, unknown layer types.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(config, "is_encoder_decoder is set, and an encoder-decoder has two caches")
    config = text_config(config)
    _check_causal(config)
    for field, reason in _REFUSED:
        if value := getattr(config, field, None):
            raise refuse(config, f"{field}={value!r}: {reason}")
    kinds = _layer_kinds(config)
    try:
        return tuple(_geometry(config, i, kind) for i, kind in enumerate(kinds))
    except (ValidationError, OscarError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise refuse(config, why) from error


def _layer_kinds(config: Any) -> list[str]:
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers < 1:
        raise refuse(config, f"num_hidden_layers={layers!r}: a decoder needs at least one layer")
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if types:
        types = list(types)[:layers]  # layers after the decoder's own predict further tokens
        if len(types) < layers:
            raise refuse(config, f"layer_types names {len(types)} of {layers} layers")
        if unknown := sorted({str(t) for t in types} - set(_KINDS)):
            raise refuse(config, f"layer_types holds {', '.join(unknown)}, whose cache cannot be held in pages")
        return [_KINDS[str(t)] for t in types]
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True) is not False
    chunked = getattr(config, "attention_chunk_size", None)
    return ["sliding" if windowed or chunked else "full"] * layers


def _of_layer(value: Any, layer: int) -> Any:
    return value[layer] if isinstance(value, (list, tuple)) else value


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _geometry(config: Any, layer: int, kind: str) -> LayerGeometry:
    if kind == "other":
        return LayerGeometry(kind="other")
    heads = _of_layer(_first(config, "num_attention_heads", "n_head", "num_heads"), layer)
    if not isinstance(heads, int) or heads < 1:
        raise refuse(config, f"num_attention_heads={heads!r}: the config does not say how many query heads there are")
    kv_heads = _of_layer(_first(config, "num_key_value_heads", "num_kv_heads", "multi_query_group_num"), layer)
    if kv_heads is None:
        kv_heads = 1 if getattr(config, "multi_query", False) else heads
    head_dim = _of_layer(_first(config, "head_dim", "attention_head_dim", "kv_channels"), layer)
    if head_dim is None:
        hidden = _first(config, "hidden_size", "n_embd", "d_model")
        if not isinstance(hidden, int) or hidden % heads:
            raise refuse(config, f"no head_dim, and hidden_size={hidden!r} is not a multiple of {heads} heads")
        head_dim = hidden // heads
    v_dim = _of_layer(_first(config, "v_head_dim", "value_head_dim"), layer)
    v_dim = head_dim if v_dim is None else v_dim
    if kind == "sliding":
        prefix = {"num_q_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
        own = {k: getattr(config, f"swa_{name}", None) for k, name in prefix.items()}
        heads, kv_heads = own["num_q_heads"] or heads, own["num_kv_heads"] or kv_heads
        head_dim = getattr(config, "swa_head_dim", None) or head_dim
        v_dim = getattr(config, "swa_v_head_dim", None) or v_dim
    else:  # Gemma's newer configs widen the heads of full-attention layers only
        kv_heads = getattr(config, "num_global_key_value_heads", None) or kv_heads
        wide = getattr(config, "global_head_dim", None)
        head_dim, v_dim = wide or head_dim, wide or v_dim
    return LayerGeometry(
        kind="full" if kind == "full" else "sliding",
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        k_head_dim=head_dim,
        v_head_dim=v_dim,
    )
