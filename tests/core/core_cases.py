# SPDX-License-Identifier: Apache-2.0
"""Small artifacts and rows that look like keys."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kv.artifact import FORMAT_VERSION, Artifact, Calibration, LayerTensors, Metadata, ModelIdentity
from oscar_kv.geometry import LayerGeometry
from oscar_kv.quantizer import normalised_weight
from oscar_kv.recipe import Recipe, get_recipe
from oscar_kv.transform import SideTransform, rotation

FULL = LayerGeometry(kind="full", num_q_heads=4, num_kv_heads=2, k_head_dim=32, v_head_dim=16)
LAYERS = (FULL, LayerGeometry(kind="sliding"), FULL)


def covariance(heads: int, d: int, seed: int, decay: float = 2.0) -> Tensor:
    """Random covariances [heads, d, d] whose eigenvalues fall by 10^decay: queries are that anisotropic."""
    g = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(heads, d, d, generator=g, dtype=torch.float64))[0]
    return basis @ torch.diag(torch.logspace(0, -decay, d, dtype=torch.float64)) @ basis.mT


def key_rows(pages: int, heads: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Anisotropic, heavy-tailed rows [pages, heads, 64, d] in the model's basis."""
    g = torch.Generator().manual_seed(seed)
    root = torch.linalg.cholesky(covariance(heads, d, seed + 1, 1.5))
    rows = torch.randn(pages, heads, 64, d, generator=g, dtype=torch.float64) @ root.mT
    scale = torch.empty(pages, heads, 64, 1, dtype=torch.float64).exponential_(1.5, generator=g) + 0.3
    return (rows * scale).to(dtype)


def make_artifact(recipe: str | Recipe = "k2v2", tokens: int = 8192, seed: int = 0) -> Artifact:
    chosen = get_recipe(recipe)
    layers = {}
    for i, layer in enumerate(LAYERS):
        if layer.kind != "full":
            continue
        sides = []
        for d in (layer.k_head_dim, layer.v_head_dim):
            g = torch.Generator().manual_seed(seed + i + d)
            centre = (
                torch.randn(layer.num_kv_heads, d, generator=g) if chosen.centre else torch.zeros(layer.num_kv_heads, d)
            )
            turn = (
                None
                if chosen.rotation == "none"
                else rotation(chosen.rotation, covariance(layer.num_kv_heads, d, i + d))
            )
            sides.append(SideTransform(centre, None if turn is None else turn.float()))
        weight = None
        if chosen.shaping:
            assert sides[0].rotation is not None
            weight = normalised_weight(
                covariance(layer.num_kv_heads, layer.k_head_dim, i + 7), sides[0].rotation
            ).float()
        layers[i] = LayerTensors(sides[0], sides[1], weight)
    meta = Metadata(
        format_version=FORMAT_VERSION, package_version="test", model=ModelIdentity(id="tiny", architecture="Tiny"),
        layers=LAYERS, recipe=chosen, calibration=Calibration(source="calibrated", tokens=tokens, data="synthetic"),
    )  # fmt: skip
    return Artifact(meta, layers)
