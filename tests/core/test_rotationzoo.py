# SPDX-License-Identifier: Apache-2.0
"""RotationZoo files in and out. Set OSCAR_KV_ZOO to a folder with the Qwen3.5-4B pair to read published files too."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from core_cases import LAYERS, covariance, make_artifact

from oscar_kv.artifact import Artifact
from oscar_kv.errors import ArtifactError
from oscar_kv.geometry import LayerGeometry
from oscar_kv.recipe import get_recipe
from oscar_kv.rotationzoo import load_zoo, save_zoo
from oscar_kv.transform import rotation


def write(path: Path, side: str, version: int, **changes: Any) -> Path:
    """A file as the zoo publishes them, for the layers of LAYERS."""
    layers = {}
    for i, g in enumerate(LAYERS):
        if g.kind == "full":
            d = g.k_head_dim if side == "k" else g.v_head_dim
            turn = rotation("eigen-layer" if version == 1 else "eigen", covariance(g.num_kv_heads, d, i)).float()
            layers[i] = {"layer_id": i, "rotation": turn[0] if version == 1 else turn, "eigenvalues": torch.ones(d)}
    content = {
        "format_version": version, "objective": {"k": "qqt_r_h_pbr", "v": "sst_r_h_pbr"}[side],
        "source_grouping": "layer", "layers": layers,
    }  # fmt: skip
    content.update(changes)
    torch.save(content, path)
    return path


@pytest.mark.parametrize("version", [1, 2])
def test_a_pair_becomes_an_artifact_that_says_what_it_lacks(version: int, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{s}.pt", s, version) for s in "kv"]
    artifact = load_zoo(*paths, LAYERS, "some/model")
    r = artifact.recipe
    assert (r.centre, r.shaping, r.unbiased, r.k_bits, r.v_bits) == (False, False, True, 2, 2)
    assert "no centring, no shaping" in artifact.label
    assert artifact.meta.calibration.source == "rotationzoo"
    for i, t in artifact.layers.items():
        stored = torch.load(paths[0], weights_only=True)["layers"][i]["rotation"]
        assert torch.equal(t.k.rotation, stored.expand(2, 32, 32))  # type: ignore[arg-type]
        assert t.error_weight is None
        assert not t.k.centre.any()
        assert not t.v.centre.any()
    again = Artifact.load(artifact.save(tmp_path / "a.safetensors"))
    k, v = torch.randn(1, 2, 64, 32), torch.randn(1, 2, 64, 16)
    assert torch.equal(again.codec(0).encode(k, v), artifact.codec(0).encode(k, v))
    assert load_zoo(*paths, LAYERS, "m", k_bits=3).layer_recipe(0).k_bits == 3


@pytest.mark.parametrize("version", [1, 2])
def test_out_and_in_again(version: int, tmp_path: Path) -> None:
    first = load_zoo(*(write(tmp_path / f"{s}.pt", s, version) for s in "kv"), LAYERS, "m")
    out = tmp_path / "out" / "k.pt", tmp_path / "out" / "v.pt"
    assert save_zoo(first, *out) == version
    second = load_zoo(*out, LAYERS, "m")
    assert all(torch.equal(t, second.tensors()[name]) for name, t in first.tensors().items())
    assert save_zoo(first, *out, version=2) == 2  # sharing can always be written out a head


def test_losing_information_is_refused_or_said(
    artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "k.pt", tmp_path / "v.pt"
    with pytest.raises(ArtifactError, match=r"cannot hold centres and the keys' error weights.*lossy=True"):
        save_zoo(artifact, *out)
    assert not out[0].exists()
    with caplog.at_level(logging.WARNING):
        assert save_zoo(artifact, *out, lossy=True) == 2
    assert "centres and the keys' error weights dropped" in caplog.text
    with pytest.raises(ArtifactError, match="one a KV head: write version 2"):
        save_zoo(artifact, *out, version=1, lossy=True)
    with pytest.raises(ArtifactError, match="does not rotate"):
        save_zoo(make_artifact("naive"), *out)


def test_without_centres_nothing_is_lost(tmp_path: Path) -> None:
    r = get_recipe("k2v2-plain").replace(centre=False)
    assert save_zoo(make_artifact(r), tmp_path / "k.pt", tmp_path / "v.pt") == 2


FULL = LayerGeometry(kind="full", num_q_heads=4, num_kv_heads=2, k_head_dim=64, v_head_dim=16)
HEADS = LayerGeometry(kind="full", num_q_heads=4, num_kv_heads=4, k_head_dim=32, v_head_dim=16)


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({"format_version": 3}, LAYERS, "format_version is 3; RotationZoo versions 1 and 2"),
        ({"format_version": 1}, LAYERS, r"shape \(2, 32, 32\); version 1 .* need \(32, 32\)"),
        ({"layers": {}}, LAYERS, "layers is not a dictionary of layers"),
        ({"layers": {"zero": {}}}, LAYERS, "key 'zero'"),
        ({"layers": {0: torch.eye(32)}}, LAYERS, r"layers\[0\] is a Tensor"),
        ({"layers": {0: {"layer_id": 4, "rotation": torch.eye(32)}}}, LAYERS, "mixed up"),
        ({"layers": {0: {"rotation": torch.eye(32).expand(2, 32, 32)}}}, LAYERS, r"no entry for \[2\]"),
        ({}, LAYERS[:1], r"entries \[2\] where the model has no full attention"),
        ({}, (FULL, LAYERS[1], FULL), r"shape \(2, 32, 32\); version 2 and the model's key heads need \(2, 64, 64\)"),
        ({}, (HEADS, LAYERS[1], HEADS), r"need \(4, 32, 32\)"),
        ({"layers": {i: {"rotation": torch.ones(2, 32, 32)} for i in (0, 2)}}, LAYERS, "not orthogonal"),
        ({"layers": {i: {"rotation": torch.full((2, 32, 32), float("nan"))} for i in (0, 2)}}, LAYERS, "NaN"),
        ({"layers": {i: {"k": 1} for i in (0, 2)}}, LAYERS, "rotation is missing"),
        ({"objective": "sst_r_h_pbr"}, LAYERS, "exchange the two paths"),
    ],
)
def test_bad_files(changes: dict[str, Any], layers: tuple[LayerGeometry, ...], message: str, tmp_path: Path) -> None:
    k, v = write(tmp_path / "k.pt", "k", 2, **changes), write(tmp_path / "v.pt", "v", 2)
    with pytest.raises(ArtifactError, match=message) as caught:
        load_zoo(k, v, layers, "m")
    assert str(k) in str(caught.value)


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("echo never",)


@pytest.mark.parametrize("content", ["code", "list", "garbage", "empty", "absent", "truncated"])
def test_files_that_are_something_else(content: str, tmp_path: Path) -> None:
    v, path = write(tmp_path / "v.pt", "v", 2), tmp_path / "k.pt"
    if content == "truncated":
        path.write_bytes(v.read_bytes()[:-500])
    elif content in ("code", "list"):
        torch.save(Evil() if content == "code" else [1, 2], path)
    elif content != "absent":
        path.write_bytes(b"not a pickle" if content == "garbage" else b"")
    with pytest.raises(ArtifactError, match=r"k\.pt: (not a RotationZoo|holds a list|no such file)"):
        load_zoo(path, v, LAYERS, "m")


def test_the_same_file_twice(tmp_path: Path) -> None:
    square = LayerGeometry(kind="full", num_q_heads=2, num_kv_heads=2, k_head_dim=32, v_head_dim=32)
    k = write(tmp_path / "k.pt", "k", 2, objective="unknown")
    with pytest.raises(ArtifactError, match="hold the same rotations"):
        load_zoo(k, k, (square, LAYERS[1], square), "m")


@pytest.mark.skipif("OSCAR_KV_ZOO" not in os.environ, reason="OSCAR_KV_ZOO names no folder with published files")
def test_the_published_files() -> None:
    folder = Path(os.environ["OSCAR_KV_ZOO"])
    full = LayerGeometry(kind="full", num_q_heads=16, num_kv_heads=4, k_head_dim=256, v_head_dim=256)
    layers = [full if i % 4 == 3 else LayerGeometry(kind="other") for i in range(32)]
    (k,), (v,) = folder.glob("*_k_rotation.pt"), folder.glob("*_v_rotation.pt")
    artifact = load_zoo(k, v, layers, "Qwen/Qwen3.5-4B")
    assert sorted(artifact.layers) == [3, 7, 11, 15, 19, 23, 27, 31]
    assert artifact.recipe.rotation == "eigen-layer"
    with pytest.raises(ArtifactError, match="exchange the two paths"):
        load_zoo(v, k, layers, "Qwen/Qwen3.5-4B")
