# SPDX-License-Identifier: Apache-2.0
"""``zoo-import`` and ``zoo-export``: rotations go out and come back, and what they lose is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oscar_kv.artifact import Artifact
from oscar_kv.cli import app

transformers = pytest.importorskip("transformers")


@pytest.fixture
def config(tmp_path: Path) -> str:
    made = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=32
    )
    made.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def zoo_file(path: Path, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rotations = torch.linalg.qr(torch.randn(2, 16, 16, generator=generator))[0]
    layers = {i: {"layer_id": i, "rotation": r} for i, r in enumerate(rotations)}
    side = "qqt" if seed == 0 else "sst"
    torch.save({"format_version": 1, "objective": side, "source_grouping": "layer", "layers": layers}, path)
    return rotations


def test_rotations_come_back_as_they_went_out(tmp_path: Path, config: str) -> None:
    k, v, out = tmp_path / "k.pt", tmp_path / "v.pt", tmp_path / "zoo.safetensors"
    rotations = zoo_file(k, 0)
    zoo_file(v, 1)
    files = ["--k-file", str(k), "--v-file", str(v)]
    made = CliRunner().invoke(app, ["zoo-import", "--model", config, *files, "-o", str(out), "--json", f"{out}.json"])
    assert made.exit_code == 0, made.output
    artifact = Artifact.load(out)
    assert json.loads(Path(f"{out}.json").read_text())["sha256"] == artifact.sha256
    assert "no centring, no shaping" in artifact.label
    back = ["--k-file", str(tmp_path / "k2.pt"), "--v-file", str(tmp_path / "v2.pt")]
    assert CliRunner().invoke(app, ["zoo-export", str(out), *back]).exit_code == 0
    again = torch.load(tmp_path / "k2.pt", weights_only=True)["layers"]
    assert all(torch.allclose(again[i]["rotation"], rotations[i]) for i in range(2))


def test_a_missing_file_is_named(tmp_path: Path, config: str) -> None:
    files = ["--k-file", str(tmp_path / "none.pt"), "--v-file", str(tmp_path / "none.pt")]
    made = CliRunner().invoke(app, ["zoo-import", "--model", config, *files, "-o", str(tmp_path / "a.safetensors")])
    assert made.exit_code == 2
    assert "none.pt" in made.output
