# SPDX-License-Identifier: Apache-2.0
"""Tiny random models from configs, and random artifacts that fit them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oscar_kv.artifact import Artifact, Calibration, LayerTensors, Metadata, ModelIdentity
from oscar_kv.geometry import LayerGeometry
from oscar_kv.quantizer import normalised_weight
from oscar_kv.recipe import Recipe, get_recipe
from oscar_kv.transform import SideTransform

VOCAB = 97
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "use_cache": True,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma2": {"sliding_window": 100, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 100, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    "phi3": {"hidden_size": 64, "sliding_window": None},
}
FAMILIES = tuple(_OWN)


def config(family: str, **fields: Any) -> Any:
    from transformers import AutoConfig

    wanted = {**_BASE, **_OWN[family], **fields}
    if family in ("qwen2", "phi3"):  # these derive it from hidden_size
        wanted["hidden_size"] = wanted["head_dim"] * wanted["num_attention_heads"]
    return AutoConfig.for_model(family, **wanted)


def model(family: str, dtype: torch.dtype = torch.float32, attention: str | None = None, **fields: Any) -> Any:
    """A random model whose attention is not flat: queries and keys are scaled up."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    attention = attention or ("eager" if family == "gemma2" else None)  # sdpa has no soft-cap
    kwargs = {} if attention is None else {"attn_implementation": attention}
    out = AutoModelForCausalLM.from_config(config(family, **fields), dtype=dtype, **kwargs).eval()
    with torch.no_grad():
        for name, weight in out.named_parameters():
            if weight.ndim == 2 and "norm" not in name:
                weight.mul_(6.0)
            elif name.endswith("bias"):
                weight.normal_(0, 0.5)
    out.generation_config.eos_token_id = None
    return out


def orthogonal(heads: int, d: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(heads, d, d, dtype=torch.float64, generator=generator))[0].float()


def artifact(
    layers: tuple[LayerGeometry, ...], recipe: str | Recipe = "k2v2", seed: int = 0, **changes: Any
) -> Artifact:
    """Random centres, rotations and error weights."""
    g = torch.Generator().manual_seed(seed)
    wanted = get_recipe(recipe).replace(**changes) if changes else get_recipe(recipe)
    tensors = {}
    for i, layer in enumerate(layers):
        if layer.kind != "full":
            continue
        heads = layer.num_kv_heads
        sides = []
        for d in (layer.k_head_dim, layer.v_head_dim):
            centre = torch.randn(heads, d, generator=g) if wanted.centre else torch.zeros(heads, d)
            sides.append(SideTransform(centre, orthogonal(heads, d, g)))
        x = torch.randn(heads, 4 * layer.k_head_dim, layer.k_head_dim, generator=g)
        weight = normalised_weight(x.mT @ x, sides[0].rotation).float()  # type: ignore[arg-type]
        tensors[i] = LayerTensors(sides[0], sides[1], weight if wanted.shaping else None)
    meta = Metadata(
        format_version=1,
        package_version="0",
        model=ModelIdentity(id="tiny", architecture="tiny"),
        layers=layers,
        recipe=wanted,
        calibration=Calibration(source="calibrated", tokens=4096),
    )
    return Artifact(meta, tensors)


def artifact_of(model: Any, recipe: str | Recipe = "k2v2", seed: int = 0, **changes: Any) -> Artifact:
    from oscar_kv.integrations.transformers.geometry import layer_geometries

    return artifact(layer_geometries(model.config), recipe, seed, **changes)


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
