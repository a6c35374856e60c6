# SPDX-License-Identifier: Apache-2.0
"""Moments → artifact: centres, rotations and the keys' error weight of a recipe. No model and no data needed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from ..artifact import FORMAT_VERSION, Artifact, Calibration, LayerTensors, Metadata, ModelIdentity
from ..errors import CalibrationError, RecipeError
from ..quantizer import normalised_weight
from ..recipe import Recipe, get_recipe
from ..transform import SideTransform, rotation
from .moments import Moments

Plan = Sequence[tuple[int, int] | None]
DATA_FREE_SUFFIX = "-data-free"


def package_version() -> str:
    """Version of the installed package, or "unknown" when run from a source tree."""
    try:
        return metadata.version("oscar-kv")
    except metadata.PackageNotFoundError:
        return "unknown"


def fit(moments: Moments, recipe: str | Recipe = "k2v2", plan: Plan | None = None) -> Artifact:
    """The artifact of a recipe (and of bits a layer, where a plan is given).

    Keys: U·H from the attention-weighted query covariance a head; ``eigen-layer`` from the plain one, averaged over the
    layer's heads. Values: the attention-weighted covariance about its mean, or the published k C_Q kᵀ weights
    (``value_weight="query"``), about the centre if the recipe centres. Error weight: method.md, step 3.

    A head that reads nothing from the history (its weights are all zero) gets plain means and covariances; the
    artifact's ``calibration.notes`` names it. Raises RecipeError for a plan that does not fit, CalibrationError for
    moments that cannot serve.
    """
    chosen = get_recipe(recipe)
    meta = moments.meta
    notes: list[str] = []
    if chosen.windows != (meta.sink, meta.recent):
        notes.append(f"weights were collected with sink {meta.sink} and recent {meta.recent}")
    layers, idle = {}, []
    for i, sums in moments.layers.items():
        layers[i], heads = _fit_layer(sums, meta.tokens, chosen)
        idle += [f"{i}.{h}" for h in heads]
    if idle:
        notes.append(f"layer.head {', '.join(idle)} read nothing from the history: plain means and covariances")
    if not meta.model.weight_samples:
        notes.append("no key-projection rows were found to identify the model by")
    calibration = Calibration(
        source="calibrated",
        tokens=meta.tokens,
        chunk=meta.chunk,
        data=meta.data,
        data_sha256=meta.data_sha256,
        chat_template=meta.chat_template,
        covariance_of_values="chunk" if chosen.value_weight == "query" else "attention",
        notes="; ".join(notes),
    )
    artifact = Artifact(_metadata(meta.model, meta.layers, chosen, plan, calibration), layers)
    artifact.validate("fitted artifact")
    return artifact


def _metadata(
    model: ModelIdentity, layers: Any, recipe: Recipe, plan: Plan | None, calibration: Calibration
) -> Metadata:
    try:
        return Metadata(
            format_version=FORMAT_VERSION,
            package_version=package_version(),
            model=model,
            layers=layers,
            recipe=recipe,
            plan=None if plan is None else tuple(plan),
            calibration=calibration,
        )
    except ValueError as error:
        raise RecipeError(f"bad plan: {error}") from error


def _fit_layer(sums: dict[str, Tensor], tokens: int, recipe: Recipe) -> tuple[LayerTensors, list[int]]:
    """Tensors of one layer, and the heads whose attention weights are all zero."""
    if tokens < 1:
        raise CalibrationError("the moments hold no tokens: collect them again")
    w, u = sums["w_sum"], sums["u_sum"]
    busy = (w > 0) & (u > 0)
    on1, on2 = busy[:, None], busy[:, None, None]
    queries = torch.where(on2, sums["uq_outer"], sums["q_outer"])
    mass = torch.where(busy, w, torch.full_like(w, tokens))
    v_sum = torch.where(on1, sums["wv_sum"], sums["v_sum"])
    v_outer = torch.where(on2, sums["wv_outer"], sums["v_outer"])
    k_centre, v_centre = sums["k_sum"] / tokens, v_sum / mass[:, None]
    if not recipe.centre:
        k_centre, v_centre = torch.zeros_like(k_centre), torch.zeros_like(v_centre)
    if recipe.value_weight == "query":
        mass, v_sum, v_outer = sums["c_sum"], sums["cv_sum"], sums["cv_outer"]
    values = _about(v_outer, v_sum, mass, v_centre)
    k_rotation = _rotation(recipe.rotation, sums["q_outer"] if recipe.rotation == "eigen-layer" else queries)
    v_rotation = _rotation(recipe.rotation, values)
    weight = None
    if recipe.shaping:
        d = queries.shape[-1]
        turned = torch.eye(d, dtype=torch.float64).expand_as(queries) if k_rotation is None else k_rotation
        weight = normalised_weight(queries, turned).float()
    return LayerTensors(
        SideTransform(k_centre.float(), k_rotation), SideTransform(v_centre.float(), v_rotation), weight
    ), (~busy).nonzero()[:, 0].tolist()


def _about(outer: Tensor, total: Tensor, mass: Tensor, centre: Tensor) -> Tensor:
    """Σ w (x − centre)ᵀ(x − centre) / Σ w of each head, from Σ w xᵀx, Σ w x and Σ w."""
    mass = mass.clamp(min=torch.finfo(torch.float64).tiny)[:, None, None]
    mean = total[:, None, :] / mass
    c = centre[:, None, :]
    return outer / mass - mean.mT @ c - c.mT @ mean + c.mT @ c


def _rotation(kind: str, covariance: Tensor) -> Tensor | None:
    return None if kind == "none" else rotation(kind, covariance).float()


def data_free(config: Any, model_id: str, recipe: str | Recipe = "k2v2", plan: Plan | None = None) -> Artifact:
    """An artifact from a Transformers config alone: Hadamard rotations, zero centres, no error weight.

    The recipe keeps its bits, step and windows, loses centring and shaping, and is named so wherever it is printed.
    Raises UnsupportedModelError for attention that cannot be held.
    """
    from ..errors import UnsupportedModelError
    from ..integrations.transformers.geometry import layer_geometries
    from ..integrations.transformers.identity import config_identity

    chosen = get_recipe(recipe)
    kind = "none" if chosen.rotation == "none" else "hadamard"
    chosen = chosen.replace(
        name=chosen.name.removesuffix(DATA_FREE_SUFFIX) + DATA_FREE_SUFFIX,
        rotation=kind, centre=False, shaping=False, value_weight="attention",
    )  # fmt: skip
    layers = layer_geometries(config)
    if not any(layer.kind == "full" for layer in layers):
        raise UnsupportedModelError(f"{config.model_type}: no full-attention layer, there is nothing to quantise")
    tensors = {}
    for i, layer in enumerate(layers):
        if layer.kind == "full":
            heads = layer.num_kv_heads
            k, v = (
                SideTransform(torch.zeros(heads, d), _rotation(kind, torch.zeros(heads, d, d)))
                for d in (layer.k_head_dim, layer.v_head_dim)
            )
            tensors[i] = LayerTensors(k, v)
    calibration = Calibration(
        source="data-free", tokens=0, notes="from the configuration alone: Hadamard, no centring, no shaping"
    )
    artifact = Artifact(_metadata(config_identity(config, model_id), layers, chosen, plan, calibration), tensors)
    artifact.validate("data-free artifact")
    return artifact
