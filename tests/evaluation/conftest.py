# SPDX-License-Identifier: Apache-2.0
"""Artifacts with random statistics, for geometries that no test model has and for tiny models."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from oscar_kv.artifact import Artifact, Calibration, LayerTensors, Metadata, ModelIdentity
from oscar_kv.geometry import LayerGeometry
from oscar_kv.quantizer import normalised_weight
from oscar_kv.recipe import Recipe, get_recipe
from oscar_kv.transform import SideTransform, rotation


def random_artifact(
    layers: tuple[LayerGeometry, ...], recipe: str | Recipe, offset: float = 4.0, seed: int = 0
) -> Artifact:
    """Rotations, centres and error weights from random covariances; no model is recorded."""
    chosen, gen = get_recipe(recipe), torch.Generator().manual_seed(seed)
    tensors = {}
    for i, layer in enumerate(layers):
        if layer.kind != "full":
            continue
        sides, covariance, turn = [], torch.empty(0), torch.empty(0)
        for d in (layer.v_head_dim, layer.k_head_dim):
            root = torch.randn(layer.num_kv_heads, d, d, generator=gen, dtype=torch.float64)
            covariance = root @ root.mT / d + 0.1 * torch.eye(d)
            turn = rotation(chosen.rotation, covariance)
            centre = torch.randn(layer.num_kv_heads, d, generator=gen) * offset * chosen.centre
            sides.append(SideTransform(centre, None if chosen.rotation == "none" else turn.float()))
        weight = normalised_weight(covariance, turn).float() if chosen.shaping else None
        tensors[i] = LayerTensors(sides[1], sides[0], weight)
    meta = Metadata(
        format_version=1, package_version="0", layers=layers, recipe=chosen,
        model=ModelIdentity(id="random", architecture="Random"),
        calibration=Calibration(source="calibrated", tokens=8192),
    )  # fmt: skip
    return Artifact(meta, tensors)


@pytest.fixture
def artifact_of() -> Callable[..., Artifact]:
    return random_artifact


@pytest.fixture(scope="session")
def families() -> ModuleType:
    """The tiny models of the integration tests."""
    pytest.importorskip("transformers", reason="needs the extra oscar-kv[transformers]")
    path = Path(__file__).parents[1] / "integrations" / "families.py"
    spec = importlib.util.spec_from_file_location("oscar_families", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """One token a byte."""
    pytest.importorskip("transformers", reason="needs the extra oscar-kv[transformers]")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate([*symbols, "<eos>"])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
