# SPDX-License-Identifier: Apache-2.0
"""Which model an artifact belongs to: the config fields that fix attention, and samples of the key projections."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...artifact import Artifact, ModelIdentity, WeightSample
from ...errors import ArtifactError
from ...geometry import LayerGeometry
from .geometry import layer_geometries, text_config

_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "attn_logit_softcapping",
    "attention_multiplier",
    "query_pre_attn_scalar",
    "sliding_window",
)
_ROPE_DROPPED = ("type", "rope_scaling")
_PROJECTION = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.[\w.]*?\b(k_proj|qkv_proj)\.weight$")


def attention_config(config: Any) -> dict[str, Any]:
    """The config's fields that fix attention, in one form for every release (JSON types, numbers as float).

    Rope parameters are flattened to ``rope_theta``, ``rope_type`` …; those of single layer types to
    ``rope_theta[full_attention]``. Layer kinds and heads come from ``layer_geometries``.
    """
    layers = layer_geometries(config)
    config = text_config(config)
    out: dict[str, Any] = {"model_type": config.model_type}
    for name in _FIELDS:
        if (value := getattr(config, name, None)) is not None:
            out[name] = value
    if not any(layer.kind == "sliding" for layer in layers):
        out.pop("sliding_window", None)  # Qwen2 carries one that use_sliding_window switches off
    out.update(_rope(config))
    out["layers"] = _runs(layers)
    return {name: _plain(value) for name, value in sorted(out.items())}


def _plain(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return float(value)


def _rope(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = {key: value for key, value in rope.items() if isinstance(value, dict)}
    out = {}
    for layer_type, fields in (nested or {"": rope}).items():
        suffix = f"[{layer_type}]" if layer_type else ""
        for name, value in fields.items():
            if value is not None and name not in _ROPE_DROPPED:
                out[(name if name.startswith("rope_") else f"rope_{name}") + suffix] = value
    if not nested and getattr(config, "rope_theta", None) is not None:
        out.setdefault("rope_theta", config.rope_theta)
    partial = getattr(config, "partial_rotary_factor", None)
    if not nested and partial is not None:
        out.setdefault("rope_partial_rotary_factor", partial)
    if out.get("rope_partial_rotary_factor") == 1:
        del out["rope_partial_rotary_factor"]  # the default, which only some releases write out
    return out


def _runs(layers: tuple[LayerGeometry, ...]) -> list[str]:
    """Equal neighbours as one line: "28 x full, 12 query heads, 2 KV heads, head_dim 128/128"."""
    out: list[tuple[int, LayerGeometry]] = []
    for layer in layers:
        if out and out[-1][1] == layer:
            out[-1] = (out[-1][0] + 1, layer)
        else:
            out.append((1, layer))
    return [
        f"{n} x {g.kind}, {g.num_q_heads} query heads, {g.num_kv_heads} KV heads, "
        f"head_dim {g.k_head_dim}/{g.v_head_dim}"
        for n, g in out
    ]


def config_hash(config: dict[str, Any]) -> str:
    """sha256 of the canonical JSON (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def row_hash(row: Tensor) -> str:
    """sha256 of one weight row's values rounded to bfloat16, little-endian."""
    bits = row.detach().to("cpu").to(torch.bfloat16).contiguous().view(torch.int16)
    return hashlib.sha256(bits.numpy().astype("<i2").tobytes()).hexdigest()


def _key_projections(model: nn.Module) -> Iterator[tuple[int, str, str, Tensor]]:
    """(layer, name as in the checkpoint, kind, weight) of each decoder layer's key projection."""
    for name, weight in model.named_parameters():
        found = _PROJECTION.search(name)
        if found and "vision" not in name and "audio" not in name:
            yield int(found[1]), name, found[2], weight


def weight_samples(model: nn.Module) -> tuple[WeightSample, ...]:
    """The first row of each KV head of the first and last full-attention layers' key projections.

    Of a fused ``qkv_proj`` (q, k, v stacked) the same rows, counted from its top. Empty where the model names its
    projections otherwise or holds them packed.
    """
    layers = layer_geometries(model.config)
    full = [i for i, layer in enumerate(layers) if layer.kind == "full"]
    out = []
    for layer, name, kind, weight in _key_projections(model):
        if layer not in (full[:1] + full[-1:]) or not weight.is_floating_point() or weight.is_meta:
            continue
        g = layers[layer]
        offset = g.num_q_heads * g.k_head_dim if kind == "qkv_proj" else 0
        for head in range(g.num_kv_heads):
            row = offset + head * g.k_head_dim
            out.append(WeightSample(name=name, row=row, sha256=row_hash(weight[row])))
    return tuple(out)


def config_identity(config: Any, model_id: str) -> ModelIdentity:
    """What is known of a model from its configuration alone: no weight samples."""
    fields = attention_config(config)
    architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
    return ModelIdentity(id=model_id, architecture=architecture, config=fields, config_sha256=config_hash(fields))


def model_identity(model: nn.Module, model_id: str) -> ModelIdentity:
    """What an artifact records of its model. Raises UnsupportedModelError for attention that cannot be held."""
    config = attention_config(model.config)
    return ModelIdentity(
        id=model_id,
        architecture=type(model).__name__,
        config=config,
        config_sha256=config_hash(config),
        weight_samples=weight_samples(model),
    )


def check_model(artifact: Artifact, model: nn.Module) -> None:
    """Raise ArtifactError that names the field by which the model differs from the one that was calibrated.

    Checked: layer geometry; the config fields and key-projection rows that the artifact recorded. A RotationZoo or
    data-free artifact records no rows, and a zoo file no config.
    """
    identity = artifact.meta.model
    which = (
        f"artifact was calibrated for {identity.id!r} ({identity.architecture}), not for this {type(model).__name__}"
    )
    remedy = "use its own artifact, or run `oscar-kv calibrate` on this model"
    layers = layer_geometries(model.config)
    if len(layers) != len(artifact.meta.layers):
        raise ArtifactError(f"{which}: num_hidden_layers {len(artifact.meta.layers)} ≠ {len(layers)}; {remedy}")
    for i, (have, want) in enumerate(zip(artifact.meta.layers, layers, strict=True)):
        for field in ("kind", "num_q_heads", "num_kv_heads", "k_head_dim", "v_head_dim"):
            # Zoo files do not say how many query heads there are, nor what the layers they leave out look like.
            unknown = have.kind != "full" or not getattr(have, field)
            if getattr(have, field) != getattr(want, field) and not (field != "kind" and unknown):
                raise ArtifactError(
                    f"{which}: layers[{i}].{field} {getattr(have, field)!r} ≠ {getattr(want, field)!r}; {remedy}"
                )
    if identity.config:
        config = attention_config(model.config)
        for field in sorted({*identity.config, *config}):
            have_value, value = identity.config.get(field), config.get(field)
            if have_value != value:
                raise ArtifactError(f"{which}: config.{field} {_show(have_value)} ≠ {_show(value)}; {remedy}")
    _check_rows(identity, model, which, remedy)


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _check_rows(identity: ModelIdentity, model: nn.Module, which: str, remedy: str) -> None:
    weights = {name: weight for _, name, _, weight in _key_projections(model)}
    unseen = []
    for sample in identity.weight_samples:
        # A model without its head, or inside a wrapper, has the same names behind another prefix.
        weight = next((w for n, w in weights.items() if _same_name(n, sample.name)), None)
        if weight is None or not weight.is_floating_point() or weight.is_meta or weight.ndim != 2:
            unseen.append(sample.name)
        elif sample.row >= len(weight) or row_hash(weight[sample.row]) != sample.sha256:
            raise ArtifactError(f"{which}: {sample.name} row {sample.row} holds other weights; {remedy}")
    if unseen and len(unseen) == len(identity.weight_samples):
        warnings.warn(
            f"{unseen[0]} is missing or packed in this {type(model).__name__}: only its geometry and configuration "
            "were checked against the artifact",
            stacklevel=4,
        )


def _same_name(a: str, b: str) -> bool:
    return a == b or a.endswith("." + b) or b.endswith("." + a)
