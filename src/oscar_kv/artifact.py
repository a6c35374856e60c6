# SPDX-License-Identifier: Apache-2.0
"""The calibration artifact: one self-describing safetensors file, validated when it is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .codec import LayerCodec
from .errors import ArtifactError, RecipeError
from .geometry import LayerGeometry
from .quantizer import ErrorWeight
from .recipe import Recipe, get_recipe
from .transform import SideTransform, rotation

FORMAT_VERSION = 1
METADATA_KEY = "oscar_kv"
ORTHOGONALITY_TOLERANCE = 1e-3


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
    """The header of the file. ``plan`` holds (k_bits, v_bits) a layer, None for layers that are not quantised."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format_version: int
    package_version: str
    model: ModelIdentity
    layers: tuple[LayerGeometry, ...]
    recipe: Recipe
    plan: tuple[tuple[int, int] | None, ...] | None = None
    calibration: Calibration
    tensors_sha256: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Metadata:
        if self.plan is not None:
            if len(self.plan) != len(self.layers):
                raise ValueError(f"the plan has {len(self.plan)} entries for {len(self.layers)} layers")
            for i, (bits, layer) in enumerate(zip(self.plan, self.layers, strict=True)):
                if (bits is None) != (layer.kind != "full"):
                    raise ValueError(f"plan, layer {i}: (k_bits, v_bits) are for full-attention layers, and for each of them")
        return self


@dataclass(frozen=True)
class LayerTensors:
    """Statistics of one full-attention layer, fp32.

    k, v: centre [kv_heads, d] and rotation [kv_heads, d, d] (None: identity); error_weight: A [kv_heads, d, d] in the
    keys' rotated basis, mean diagonal 1 before damping, or None.
    """

    k: SideTransform
    v: SideTransform
    error_weight: Tensor | None = None


@dataclass(frozen=True)
class Artifact:
    """Calibration of one model: metadata and the tensors of its full-attention layers."""

    meta: Metadata
    layers: dict[int, LayerTensors]

    @property
    def recipe(self) -> Recipe:
        return self.meta.recipe

    @property
    def label(self) -> str:
        """The recipe's name, with a mark where it is not what the preset promises."""
        mark = {"calibrated": "", "data-free": " (data-free)", "rotationzoo": " (RotationZoo: no centring, no shaping)"}
        plan = " (bits per layer)" if self.meta.plan else ""
        return self.recipe.name + plan + mark[self.meta.calibration.source]

    @property
    def sha256(self) -> str:
        """Hash of everything that changes results: metadata and tensors."""
        return hashlib.sha256(self._header().encode()).hexdigest()

    def layer_recipe(self, layer: int) -> Recipe:
        """The recipe with this layer's bits."""
        bits = self.meta.plan[layer] if self.meta.plan else None
        return self.recipe if bits is None else self.recipe.replace(k_bits=bits[0], v_bits=bits[1])

    def codec(
        self, layer: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> LayerCodec:
        """The reference codec of a full-attention layer. Raises ArtifactError for a layer it does not cover."""
        if layer not in self.layers:
            raise ArtifactError(f"layer {layer} is not in the artifact; it covers layers {sorted(self.layers)}")
        t = self.layers[layer]
        weight = None if t.error_weight is None else ErrorWeight.of(t.error_weight).to(device, dtype)
        return LayerCodec(self.layer_recipe(layer), t.k.to(device, dtype), t.v.to(device, dtype), weight, dtype)

    def with_recipe(self, recipe: str | Recipe, plan: Sequence[tuple[int, int] | None] | None = None) -> Artifact:
        """The same statistics under another recipe. Raises RecipeError if they cannot serve it."""
        wanted = get_recipe(recipe)
        have = self.recipe
        meta = self.meta.model_copy(update={"recipe": wanted, "plan": None if plan is None else tuple(plan)})
        meta = Metadata.model_validate(meta.model_dump())
        if wanted.rotation in ("none", "hadamard") and not wanted.centre and not wanted.shaping:
            return Artifact(meta, {i: _bare(self.meta.layers[i], wanted.rotation) for i in self.layers})
        lacks = [
            f"{name}={getattr(wanted, name)!r} (the artifact has {getattr(have, name)!r})"
            for name in ("rotation", "value_weight", "centre", "sink", "recent")
            if getattr(wanted, name) != getattr(have, name)
        ]
        if wanted.shaping and any(t.error_weight is None for t in self.layers.values()):
            lacks.append("shaping=True (the artifact holds no error weight)")
        if lacks:
            raise RecipeError(
                f"recipe {wanted.name!r} needs {'; '.join(lacks)}: calibrate again with --recipe {wanted.name}"
            )
        layers = self.layers
        if not wanted.shaping:
            layers = {i: replace(t, error_weight=None) for i, t in layers.items()}
        return Artifact(meta, layers)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by the name it has in the file."""
        out = {}
        for i, t in self.layers.items():
            for side, transform in (("k", t.k), ("v", t.v)):
                out[f"layers.{i}.{side}_centre"] = transform.centre
                if transform.rotation is not None:
                    out[f"layers.{i}.{side}_rotation"] = transform.rotation
            if t.error_weight is not None:
                out[f"layers.{i}.k_error_weight"] = t.error_weight
        return {name: value.float().contiguous() for name, value in out.items()}

    def _header(self) -> str:
        meta = self.meta.model_copy(update={"tensors_sha256": hash_tensors(self.tensors())})
        return json.dumps(meta.model_dump(mode="json"), sort_keys=True)

    def save(self, path: str | Path) -> Path:
        """Validate and write the file (atomically). Raises ArtifactError for tensors that would not load again."""
        path = Path(path)
        self.validate(str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        save_file(self.tensors(), part, metadata={METADATA_KEY: self._header()})
        part.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Artifact:
        """Read and validate. Raises ArtifactError that names the file, the field and the remedy."""
        path = Path(path)
        if not path.is_file():
            raise ArtifactError(f"{path}: no such file; make one with `oscar-kv calibrate MODEL -o {path.name}`")
        try:
            with safe_open(path, "pt") as stream:
                header = (stream.metadata() or {}).get(METADATA_KEY)
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"{path}: not a readable safetensors file ({error}); copy or calibrate it again") from error
        if header is None:
            raise ArtifactError(f"{path}: a safetensors file, but not an oscar-kv artifact (no {METADATA_KEY!r} metadata)")
        meta = _parse_header(header, path)
        if hash_tensors(tensors) != meta.tensors_sha256:
            raise ArtifactError(f"{path}: tensors_sha256 does not match, the file was changed; calibrate it again")
        artifact = cls(meta, _assemble(meta, tensors, path))
        artifact.validate(str(path))
        return artifact

    def validate(self, where: str = "artifact") -> None:
        """Shapes, finiteness, orthogonality, coverage. Raises ArtifactError."""
        full = [i for i, layer in enumerate(self.meta.layers) if layer.kind == "full"]
        if full != sorted(self.layers):
            raise ArtifactError(f"{where}: tensors cover layers {sorted(self.layers)}, the metadata names {full}")
        if not full:
            raise ArtifactError(f"{where}: the model has no full-attention layer, there is nothing to quantise")
        for name, value in self.tensors().items():
            layer = self.meta.layers[int(name.split(".")[1])]
            d = layer.v_head_dim if ".v_" in name else layer.k_head_dim
            shape = (layer.num_kv_heads, d) if name.endswith("centre") else (layer.num_kv_heads, d, d)
            if tuple(value.shape) != shape:
                raise ArtifactError(f"{where}: {name} has shape {tuple(value.shape)}, expected {shape}")
            if not torch.isfinite(value).all():
                raise ArtifactError(f"{where}: {name} holds NaN or infinity; calibrate again")
            if name.endswith("rotation"):
                gram = value.double().mT @ value.double()
                off = (gram - torch.eye(d, dtype=gram.dtype)).abs().max().item()
                if off > ORTHOGONALITY_TOLERANCE:
                    raise ArtifactError(f"{where}: {name} is not orthogonal (off by {off:.2g}); calibrate again")
            if name.endswith("error_weight"):
                asymmetry = (value - value.mT).abs().max().item()
                if asymmetry > 1e-4 * value.abs().max().item():
                    raise ArtifactError(f"{where}: {name} is not symmetric (off by {asymmetry:.2g}); calibrate again")
                ErrorWeight.of(value)
        if self.recipe.shaping and any(t.error_weight is None for t in self.layers.values()):
            raise ArtifactError(f"{where}: recipe {self.recipe.name!r} shapes keys, but k_error_weight is missing")


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """sha256 over names, shapes, dtypes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _bare(layer: LayerGeometry, kind: str) -> LayerTensors:
    """Zero centres and a rotation that needs no data."""

    def side(d: int) -> SideTransform:
        turn = None if kind == "none" else rotation(kind, torch.zeros(layer.num_kv_heads, d, d)).float()
        return SideTransform(torch.zeros(layer.num_kv_heads, d), turn)

    return LayerTensors(side(layer.k_head_dim), side(layer.v_head_dim))


def _parse_header(header: str, path: Path) -> Metadata:
    try:
        fields = json.loads(header)
        version = fields.get("format_version")
    except (json.JSONDecodeError, AttributeError) as error:
        raise ArtifactError(f"{path}: the metadata is not a JSON object; calibrate again") from error
    if version != FORMAT_VERSION:
        raise ArtifactError(f"{path}: format_version {version!r}, this release reads {FORMAT_VERSION}")
    try:
        return Metadata.model_validate_json(header)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ArtifactError(f"{path}: bad metadata ({what}); calibrate again") from error


def _assemble(meta: Metadata, tensors: dict[str, Tensor], path: Path) -> dict[int, LayerTensors]:
    layers, rest = {}, dict(tensors)
    for i, layer in enumerate(meta.layers):
        if layer.kind != "full":
            continue
        sides = []
        for side in ("k", "v"):
            centre = rest.pop(f"layers.{i}.{side}_centre", None)
            if centre is None:
                raise ArtifactError(f"{path}: layers.{i}.{side}_centre is missing; calibrate again")
            sides.append(SideTransform(centre, rest.pop(f"layers.{i}.{side}_rotation", None)))
        layers[i] = LayerTensors(sides[0], sides[1], rest.pop(f"layers.{i}.k_error_weight", None))
        if meta.recipe.rotation != "none" and (sides[0].rotation is None or sides[1].rotation is None):
            raise ArtifactError(f"{path}: layers.{i}: recipe {meta.recipe.name!r} rotates, but a rotation is missing")
    if rest:
        raise ArtifactError(f"{path}: unknown tensors {sorted(rest)[:4]}; it was written by another release")
    return layers
