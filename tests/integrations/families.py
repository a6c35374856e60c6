# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of the families that calibration and cache are proven on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}

CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **kw: tf.LlamaConfig(**{**COMMON, **kw}),
    "llama-mha": lambda **kw: tf.LlamaConfig(**{**COMMON, "num_key_value_heads": 4, **kw}),
    "llama-mqa": lambda **kw: tf.LlamaConfig(**{**COMMON, "num_key_value_heads": 1, **kw}),
    "qwen2": lambda **kw: tf.Qwen2Config(**{**COMMON, **kw}),
    "qwen3": lambda **kw: tf.Qwen3Config(**{**COMMON, "head_dim": 32, **kw}),
    "qwen3-moe": lambda **kw: tf.Qwen3MoeConfig(**{**COMMON, **MOE, "head_dim": 16, **kw}),
    "mistral": lambda **kw: tf.MistralConfig(**{**COMMON, "sliding_window": None, **kw}),
    "gemma": lambda **kw: tf.GemmaConfig(**{**COMMON, "head_dim": 32, **kw}),
    "gemma2": lambda **kw: tf.Gemma2Config(
        **{**COMMON, **GEMMA, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8, **kw}
    ),
    "gemma3": lambda **kw: tf.Gemma3TextConfig(**{**COMMON, **GEMMA, **kw}),
    "glm4": lambda **kw: tf.Glm4Config(**{**COMMON, "head_dim": 16, **kw}),
    "phi": lambda **kw: tf.PhiConfig(**{**COMMON, **kw}),
    "phi3": lambda **kw: tf.Phi3Config(**{**COMMON, **kw}),
}
SOFTCAP = {"gemma2": 5.0}


def tiny(family: str, seed: int = 0, **fields: Any) -> nn.Module:
    """A random model in fp32 whose heads differ enough for attention to be peaked."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family](**fields), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "gate.weight" not in name:
                weight.normal_(0, 0.25)
            elif name.endswith("bias"):
                weight.normal_(0, 0.5)
    return model.eval()


def ids_of(n: int, seed: int) -> torch.Tensor:
    """Token ids [n] that no special token is among."""
    return torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(seed))
