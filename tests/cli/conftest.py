# SPDX-License-Identifier: Apache-2.0
"""A synthetic artifact: what calibration would write for a small model, without running one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oscar_kv.artifact import Artifact, Calibration, LayerTensors, Metadata, ModelIdentity
from oscar_kv.geometry import LayerGeometry
from oscar_kv.quantizer import normalised_weight
from oscar_kv.recipe import get_recipe
from oscar_kv.transform import SideTransform, rotation


def make_artifact(layers: int = 4, heads: int = 2, d: int = 32, recipe: str = "k2v2", sliding: int = 1) -> Artifact:
    """``layers`` full-attention layers and ``sliding`` sliding ones; layer 0's keys lie furthest from the origin."""
    torch.manual_seed(0)
    full = LayerGeometry(kind="full", num_q_heads=2 * heads, num_kv_heads=heads, k_head_dim=d, v_head_dim=d)
    geometry = [full] * layers + [LayerGeometry(kind="sliding")] * sliding
    tensors = {}
    for i in range(layers):
        basis = torch.linalg.qr(torch.randn(heads, d, d, dtype=torch.float64))[0]
        fall = torch.logspace(0, -1.5 - i / layers, d, dtype=torch.float64)
        covariance = basis * fall @ basis.mT
        turn = rotation("eigen", covariance)
        sides = [SideTransform(torch.randn(heads, d) * s / (1 + i), turn.float()) for s in (4.0, 0.3)]
        tensors[i] = LayerTensors(sides[0], sides[1], normalised_weight(covariance, turn).float())
    meta = Metadata(
        format_version=1,
        package_version="0.1.0",
        model=ModelIdentity(id="synthetic/tiny", architecture="LlamaForCausalLM"),
        layers=tuple(geometry),
        recipe=get_recipe(recipe),
        calibration=Calibration(source="calibrated", tokens=8192, chunk=2048, data="synthetic rows"),
    )
    return Artifact(meta, tensors)


@pytest.fixture
def artifact_of() -> Callable[..., Artifact]:
    return make_artifact


@pytest.fixture
def artifact() -> Artifact:
    return make_artifact()


@pytest.fixture
def artifact_file(artifact: Artifact, tmp_path: Path) -> Path:
    return artifact.save(tmp_path / "tiny.safetensors")


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer Llama and a tokenizer of single bytes."""
    pytest.importorskip("transformers", reason="needs the extra oscar-kv[transformers]")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate([*symbols, "<eos>"])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(symbols) + 1, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def some_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 characters that do not repeat: one token each for the tiny model."""
    file = tmp_path_factory.mktemp("text") / "numbers.txt"
    file.write_text(" ".join(str(7919 * i % 100003) for i in range(600))[:3000])
    return file
