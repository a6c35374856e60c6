# SPDX-License-Identifier: Apache-2.0
"""Bits an element of the cache takes: all of its buffers over all elements that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import OscarError
from .geometry import LayerGeometry
from .layout import PAGE, PageLayout
from .recipe import Recipe, get_recipe

if TYPE_CHECKING:
    from .artifact import Artifact

Plan = Sequence[tuple[int, int] | None]


def plan_bits_per_element(
    layers: Sequence[LayerGeometry],
    recipe: str | Recipe,
    context: int | None,
    plan: Plan | None = None,
    window_bits: int = 16,
) -> float:
    """Bits an element of the full-attention layers' caches, for one request.

    ``context`` tokens: pages for every whole 64 tokens after the sink's own, metadata included; the sink's rows and the
    ring's (recent + slack) in ``window_bits`` an element, allocated from the start. None: of the history alone.
    ``plan``: (K bits, V bits) a layer, None where the recipe's hold. OscarError where there is nothing to quantise.
    """
    base = get_recipe(recipe)
    if context is not None and context < 1:
        raise OscarError(f"context is {context}: bits an element are defined from one token on")
    if plan is not None and len(plan) != len(layers):
        raise OscarError(f"the plan has {len(plan)} entries for {len(layers)} layers")
    bits = elements = 0.0
    for i, layer in enumerate(layers):
        if layer.kind != "full":
            continue
        k_bits, v_bits = (plan[i] if plan is not None else None) or (base.k_bits, base.v_bits)
        page = PageLayout(layer.k_head_dim, layer.v_head_dim, k_bits, v_bits).page_bytes * 8
        row = layer.k_head_dim + layer.v_head_dim
        if context is None:
            bits += layer.num_kv_heads * page
            elements += layer.num_kv_heads * row * PAGE
        else:
            pages = max(0, context // PAGE - base.sink // PAGE)
            windows = (base.sink + base.recent + base.slack) * row * window_bits
            bits += layer.num_kv_heads * (pages * page + windows)
            elements += layer.num_kv_heads * row * context
    if not elements:
        raise OscarError("no full-attention layer: there is nothing to quantise")
    return bits / elements


def bits_per_element(artifact: Artifact, context: int | None = None, window_bits: int = 16) -> float:
    """``plan_bits_per_element`` of an artifact's layers, recipe and plan."""
    return plan_bits_per_element(artifact.meta.layers, artifact.recipe, context, artifact.meta.plan, window_bits)
