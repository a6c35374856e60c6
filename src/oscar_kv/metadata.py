# SPDX-License-Identifier: Apache-2.0
"""The header of an artifact: what it is, whose it is, where its statistics come from. Specified in docs/format.md."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import ArtifactError
from .geometry import LayerGeometry
from .recipe import Bits, Recipe

FORMAT_VERSION = 1
METADATA_KEY = "oscar_kv"
HEADER_HASH_KEY = "oscar_kv_sha256"
"""The header's own sha256, beside it: a changed recipe or bit width is as bad as a changed tensor."""
MIN_TOKENS = 1024
"""Fewer calibration tokens than this give rotations that load and serve garbage."""


class WeightSample(BaseModel):
    """One row of a key projection, as the checkpoint names it: sha256 of its values rounded to bfloat16."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    row: int = Field(ge=0)
    sha256: str


class ModelIdentity(BaseModel):
    """Which model an artifact belongs to. ``config`` holds the fields that fix its attention."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    id: str
    architecture: str
    config: dict[str, Any] = {}
    config_sha256: str = ""
    weight_samples: tuple[WeightSample, ...] = ()


class Calibration(BaseModel):
    """Where the statistics come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: Literal["calibrated", "data-free", "rotationzoo"]
    tokens: int = Field(ge=0)
    chunk: int = Field(default=0, ge=0)
    data: str = ""
    data_sha256: str = ""
    chat_template: bool = False
    covariance_of_values: str = ""
    notes: str = ""


class Metadata(BaseModel):
    """The header of the file. ``plan`` holds (k_bits, v_bits) a layer, None for layers that are not quantised.

    Raises pydantic's ValidationError for a plan that fits neither the layers nor the recipe.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format_version: int
    package_version: str
    model: ModelIdentity
    layers: tuple[LayerGeometry, ...]
    recipe: Recipe
    plan: tuple[tuple[Bits, Bits] | None, ...] | None = None
    calibration: Calibration
    tensors_sha256: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Metadata:
        if self.plan is None:
            return self
        if len(self.plan) != len(self.layers):
            raise ValueError(f"the plan has {len(self.plan)} entries for {len(self.layers)} layers")
        for i, (bits, layer) in enumerate(zip(self.plan, self.layers, strict=True)):
            if (bits is None) != (layer.kind != "full"):
                raise ValueError(
                    f"plan, layer {i}: (k_bits, v_bits) are for full-attention layers, and for each of them"
                )
            if bits is not None and 1 in bits and self.recipe.step != "least-squares":
                raise ValueError(
                    f"plan, layer {i}: 1 bit needs step='least-squares', the recipe has {self.recipe.step!r}"
                )
        return self


def problems(error: ValidationError) -> str:
    """pydantic's findings in one line: field: what is wrong; …"""
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'metadata'}: {e['msg']}" for e in error.errors())


def hash_header(header: str) -> str:
    """sha256 of the header's UTF-8 text."""
    return hashlib.sha256(header.encode()).hexdigest()


def read_file(path: Path) -> tuple[Metadata, dict[str, Tensor]]:
    """Header and tensors of an artifact file, hashes of the header checked. Raises ArtifactError."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise ArtifactError(f"{path}: {what}; make an artifact with `oscar-kv calibrate MODEL -o {path.name}`")
    _refuse_other_formats(path)
    try:
        with safe_open(path, "pt") as stream:
            strings = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{path}: not a readable safetensors file, perhaps cut short ({error}); copy or calibrate it again"
        ) from error
    header = strings.get(METADATA_KEY)
    if header is None:
        raise ArtifactError(
            f"{path}: a safetensors file, but not an oscar-kv artifact (no {METADATA_KEY!r} metadata); "
            "give the file that `oscar-kv calibrate` wrote, not the model's weights"
        )
    return _parse_header(header, strings.get(HEADER_HASH_KEY), path), tensors


def _refuse_other_formats(path: Path) -> None:
    with path.open("rb") as stream:
        start = stream.read(9)
    if start[8:] == b"{":  # safetensors: eight bytes of header length, which may look like anything, then JSON
        return
    if start[:2] == b"PK" or start[:1] == b"\x80":
        raise ArtifactError(
            f"{path}: a pickle (.pt), which is never loaded as an artifact; if it is a RotationZoo file, import its K "
            "and V files with oscar_kv.rotationzoo.load_zoo and save the result"
        )
    if start[:4] == b"GGUF":
        raise ArtifactError(f"{path}: a GGUF model, not an artifact; calibrate the model with `oscar-kv calibrate`")


def _parse_header(header: str, stored_hash: str | None, path: Path) -> Metadata:
    try:
        fields = json.loads(header)
        version = fields.get("format_version")
    except (json.JSONDecodeError, AttributeError) as error:
        raise ArtifactError(f"{path}: the {METADATA_KEY!r} metadata is not a JSON object; calibrate again") from error
    if version != FORMAT_VERSION:  # before the hash: another version may hash another way
        raise ArtifactError(
            f"{path}: format_version is {version!r}, this release reads {FORMAT_VERSION}; "
            "calibrate again, or use the release that wrote it"
        )
    if stored_hash != hash_header(header):
        raise ArtifactError(f"{path}: {HEADER_HASH_KEY} does not match the header, it was changed; calibrate again")
    try:
        return Metadata.model_validate_json(header)
    except ValidationError as error:
        raise ArtifactError(f"{path}: bad metadata ({problems(error)}); calibrate again") from error
