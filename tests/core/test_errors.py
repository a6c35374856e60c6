# SPDX-License-Identifier: Apache-2.0
"""Bad input to the core: each case gets an error that names the place, the field and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_cases import LAYERS, make_artifact
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from oscar_kv.artifact import METADATA_KEY, MIN_TOKENS, Artifact, hash_tensors
from oscar_kv.errors import ArtifactError, OscarError, RecipeError
from oscar_kv.geometry import LayerGeometry
from oscar_kv.layout import PageLayout, pack_codes, read_pages, unpack_codes
from oscar_kv.metadata import HEADER_HASH_KEY, hash_header
from oscar_kv.recipe import get_recipe, make_recipe

BASE = {"name": "mine", "k_bits": 2, "v_bits": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k_bit": 2}, "k_bit: Extra inputs.*Fields are: name, k_bits"),
        ({"k_bits": 5}, "k_bits: .*less than or equal to 4"),
        ({"v_bits": 0}, "v_bits: "),
        ({"k_bits": "2"}, "k_bits: .*integer"),
        ({"k_bits": True}, "k_bits: .*integer"),
        ({"k_bits": 2.0}, "k_bits: .*integer"),
        ({"recent": 63}, "recent: .*64"),
        ({"sink": -1}, "sink: "),
        ({"slack": 4096}, "slack: "),
        ({"rotation": "random"}, "rotation: .*'none', 'hadamard', 'eigen' or 'eigen-layer'"),
        ({"step": "min-max"}, "step: "),
        ({"step": "quantile", "shaping": False}, "k_clip and v_clip belong to step='quantile'"),
        ({"k_clip": 0.96, "v_clip": 0.92}, "k_clip and v_clip belong to step='quantile'"),
        ({"step": "quantile", "shaping": False, "k_clip": 1.5, "v_clip": 0.9}, "k_clip: "),
        ({"step": "quantile", "shaping": False, "k_clip": float("nan"), "v_clip": 0.9}, "k_clip: "),
        ({"step": "minmax"}, "shaping=True needs step='least-squares'"),
        ({"step": "minmax", "shaping": False, "v_bits": 1}, "1 bit needs step='least-squares'"),
        ({"centre": "yes"}, "centre: .*boolean"),
        ({"name": ""}, "name: "),
    ],
)
def test_bad_recipes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        make_recipe({**BASE, **fields})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("k2v3x", "unknown recipe 'k2v3x'. Did you mean k.v. or k2v2"),
        ("int2", "Presets: k2v1, k2v2"),
        (None, "got NoneType"),
        (2, "got int"),
    ],
)
def test_bad_recipe_names(name: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        get_recipe(name)


Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


def rewrite(path: Path, edit: Edit, *, rehash: bool = True) -> None:
    """Change header fields and tensors of a saved artifact; ``rehash`` as someone would who knows the format."""
    with safe_open(path, "pt") as stream:
        header = json.loads(stream.metadata()[METADATA_KEY])
        stored = stream.metadata()[HEADER_HASH_KEY]
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    edit(header, tensors)
    if rehash:
        header["tensors_sha256"] = hash_tensors(tensors)
    text = json.dumps(header)
    save_file(tensors, path, metadata={METADATA_KEY: text, HEADER_HASH_KEY: hash_header(text) if rehash else stored})


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    def edit(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return edit


def field(path: str, value: Any) -> Edit:
    def edit(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        *parents, last = path.split(".")
        at: Any = header
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at[part]
        at[int(last) if isinstance(at, list) else last] = value

    return edit


def drop(*names: str) -> Edit:
    def edit(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return edit


def nan(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan"))


def slide(x: Tensor) -> Tensor:
    x[0, 0, 1] += 0.1
    return x


TAMPERED = {
    "tensor changed": (tensor("layers.2.v_centre", lambda x: x + 1), False, "tensors_sha256 does not match"),
    "rotations exchanged": (
        lambda h, t: t.update(
            {"layers.0.k_rotation": t["layers.2.k_rotation"], "layers.2.k_rotation": t["layers.0.k_rotation"]}
        ),
        False,
        "tensors_sha256 does not match",
    ),
    "recipe changed": (field("recipe.k_bits", 3), False, f"{HEADER_HASH_KEY} does not match the header"),
    "tokens changed": (field("calibration.tokens", 9999), False, "does not match the header"),
    "another version": (field("format_version", 2), True, "format_version is 2, this release reads 1"),
    "no version": (lambda h, t: h.pop("format_version"), True, "format_version is None"),
    "unknown field": (field("rotation_dir", "x"), True, "bad metadata .rotation_dir: Extra"),
    "unknown recipe field": (field("recipe.lloyd_max", True), True, "recipe.lloyd_max: Extra"),
    "missing field": (lambda h, t: h.pop("recipe"), True, "recipe: Field required"),
    "bits out of range": (field("recipe.k_bits", 8), True, "recipe.k_bits"),
    "unknown layer kind": (field("layers.1.kind", "mla"), True, "layers.1.kind"),
    "odd head size": (field("layers.0.k_head_dim", 40), True, "k_head_dim 40 is not supported.*multiple of 16"),
    "heads that do not share": (field("layers.0.num_q_heads", 5), True, "5 query heads cannot share 2 KV heads"),
    "plan too short": (field("plan", [[2, 2]]), True, "the plan has 1 entries for 3 layers"),
    "plan without a layer": (field("plan", [[2, 2], None, None]), True, "plan, layer 2"),
    "plan for a sliding layer": (field("plan", [[2, 2], [2, 2], [2, 2]]), True, "plan, layer 1"),
    "plan bits": (field("plan", [[2, 2], None, [2, 5]]), True, "plan.2.1"),
    "few tokens": (
        field("calibration.tokens", 12),
        True,
        f"calibration.tokens is 12, the floor is {MIN_TOKENS}.*--tokens",
    ),
    "unknown source": (field("calibration.source", "guess"), True, "calibration.source"),
    "NaN": (tensor("layers.0.k_centre", nan), True, "layers.0.k_centre holds NaN"),
    "not orthogonal": (tensor("layers.2.v_rotation", slide), True, "layers.2.v_rotation is not orthogonal"),
    "scaled rotation": (
        tensor("layers.0.k_rotation", lambda x: 1.1 * x),
        True,
        "layers.0.k_rotation is not orthogonal",
    ),
    "missing rotation": (drop("layers.0.k_rotation"), True, "rotation='eigen', but layers.0.k_rotation is missing"),
    "missing centre": (drop("layers.2.v_centre"), True, "layers.2.v_centre is missing"),
    "missing weight": (drop("layers.2.k_error_weight"), True, "k_error_weight is missing"),
    "unknown tensor": (
        lambda h, t: t.update({"layers.9.k_centre": torch.zeros(2)}),
        True,
        "unknown tensors .*layers.9.k_centre",
    ),
    "shape": (
        tensor("layers.0.k_centre", lambda x: x[:1]),
        True,
        r"layers.0.k_centre has shape \(1, 32\), expected \(2, 32\)",
    ),
    "dtype": (tensor("layers.0.k_rotation", Tensor.half), True, "layers.0.k_rotation is torch.float16"),
    "weight not symmetric": (tensor("layers.0.k_error_weight", slide), True, "error_weight is not symmetric"),
    "weight not positive": (
        tensor("layers.0.k_error_weight", torch.neg),
        True,
        "layers.0.k_error_weight: .*not positive definite",
    ),
    "shared geometry": (field("layers.2.num_kv_heads", 1), True, "layers.2.* has shape"),
    "centre without centring": (
        field("recipe.centre", False),
        True,
        "does not centre, but layers.0.k_centre is not zero",
    ),
    "rotation without rotating": (
        field("recipe.rotation", "none"),
        True,
        "has no rotation, but layers.0.k_rotation is there",
    ),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_damaged_artifacts(case: str, tmp_path: Path) -> None:
    edit, rehash, message = TAMPERED[case]
    path = make_artifact().save(tmp_path / "a.safetensors")
    rewrite(path, edit, rehash=rehash)
    with pytest.raises(ArtifactError, match=message) as caught:
        Artifact.load(path)
    assert str(path) in str(caught.value)
    assert any(word in str(caught.value) for word in ("calibrate", "release", "recipe with"))


def test_rewriting_without_a_change_still_loads(tmp_path: Path) -> None:
    path = make_artifact().save(tmp_path / "a.safetensors")
    rewrite(path, lambda header, tensors: None)
    Artifact.load(path)


def test_one_bit_in_a_plan_needs_least_squares(tmp_path: Path) -> None:
    path = make_artifact("quarot").save(tmp_path / "a.safetensors")
    rewrite(path, field("plan", [[2, 1], None, [2, 2]]))
    with pytest.raises(ArtifactError, match="plan, layer 0: 1 bit needs step='least-squares'"):
        Artifact.load(path)


def write_bytes(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "absent": (lambda path: path.unlink(), "no such file; make an artifact with `oscar-kv calibrate"),
    "a folder": (lambda path: (path.unlink(), path.mkdir())[1], "is a folder"),
    "empty": (write_bytes(b""), "not a readable safetensors file"),
    "truncated tensors": (lambda path: write_bytes(path.read_bytes()[:-64])(path), "perhaps cut short"),
    "truncated header": (lambda path: write_bytes(path.read_bytes()[:40])(path), "perhaps cut short"),
    "text": (write_bytes(b"k_rotation: v2"), "not a readable safetensors file"),
    "a zoo file": (lambda path: torch.save({"format_version": 1}, path), "oscar_kv.rotationzoo.load_zoo"),
    "an old pickle": (
        lambda path: torch.save({"format_version": 1}, path, _use_new_zipfile_serialization=False),
        "oscar_kv.rotationzoo.load_zoo",
    ),
    "a GGUF": (write_bytes(b"GGUF" + bytes(64)), "a GGUF model, not an artifact"),
    "model weights": (
        lambda path: save_file({"w": torch.zeros(2)}, path),
        "not an oscar-kv artifact.*not the model's weights",
    ),
    "header no JSON": (
        lambda path: save_file({"w": torch.zeros(2)}, path, metadata={METADATA_KEY: "{"}),
        "not a JSON object",
    ),
    "header a list": (
        lambda path: save_file({"w": torch.zeros(2)}, path, metadata={METADATA_KEY: "[]"}),
        "not a JSON object",
    ),
    "no header hash": (
        lambda path: save_file({"w": torch.zeros(2)}, path, metadata={METADATA_KEY: '{"format_version": 1}'}),
        f"{HEADER_HASH_KEY} does not match",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_artifact(case: str, tmp_path: Path) -> None:
    spoil, message = FILES[case]
    path = make_artifact().save(tmp_path / "a.safetensors")
    spoil(path)
    with pytest.raises(ArtifactError, match=message) as caught:
        Artifact.load(path)
    assert str(path) in str(caught.value)


def test_too_few_tokens_are_not_saved_either(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"calibration.tokens is 12"):
        make_artifact(tokens=12).save(tmp_path / "a.safetensors")


def test_no_layer_to_quantise() -> None:
    artifact = make_artifact()
    meta = artifact.meta.model_copy(update={"layers": (LAYERS[1],) * 2})
    with pytest.raises(ArtifactError, match="nothing to quantise"):
        Artifact(meta, {}).validate("x")
    with pytest.raises(ArtifactError, match=r"tensors cover layers \[0\], the metadata names \[0, 2\]"):
        Artifact(artifact.meta, {0: artifact.layers[0]}).validate("x")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PageLayout(100, 128, 2, 2), "key head_dim 100 is not supported"),
        (lambda: PageLayout(128, 512, 2, 2), "value head_dim 512 is not supported"),
        (lambda: PageLayout(128, 128, 5, 2), "5 bits are not supported: 1, 2, 3 or 4"),
        (lambda: PageLayout(128, 128, 2, 0), "0 bits are not supported"),
        (
            lambda: pack_codes(torch.zeros(63, 64, dtype=torch.uint8), "k", 2),
            r"uint8 \[..., 64, d\], got torch.uint8 \(63, 64\)",
        ),
        (lambda: pack_codes(torch.zeros(64, 64), "k", 2), "got torch.float32"),
        (lambda: unpack_codes(torch.zeros(100, dtype=torch.uint8), "k", 64, 2), "are 1024 uint8, got"),
        (
            lambda: read_pages(PageLayout(64, 64, 2, 2), torch.zeros(2048, dtype=torch.uint8)),
            "has 2560 uint8, got 2048",
        ),
    ],
)
def test_bad_layouts(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(OscarError, match=message):
        call()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_q_heads": 4, "num_kv_heads": 3}, "cannot share"),
        ({"num_q_heads": 4, "num_kv_heads": 0}, "cannot share"),
        ({"k_head_dim": 72}, "k_head_dim 72 is not supported"),
        ({"v_head_dim": 0}, "v_head_dim 0 is not supported"),
        ({"head_dim": 64}, "Extra inputs"),
        ({"kind": "latent"}, "kind"),
    ],
)
def test_bad_geometries(fields: dict[str, Any], message: str) -> None:
    good = {"kind": "full", "num_q_heads": 4, "num_kv_heads": 2, "k_head_dim": 64, "v_head_dim": 64}
    with pytest.raises(ValidationError, match=message):
        LayerGeometry(**{**good, **fields})
