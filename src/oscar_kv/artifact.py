# SPDX-License-Identifier: Apache-2.0
"""The calibration artifact: one self-describing safetensors file, validated when it is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .codec import LayerCodec
from .errors import ArtifactError, OscarError, RecipeError
from .geometry import LayerGeometry
from .metadata import (
    FORMAT_VERSION,
    HEADER_HASH_KEY,
    METADATA_KEY,
    MIN_TOKENS,
    Calibration,
    Metadata,
    ModelIdentity,
    WeightSample,
    hash_header,
    problems,
    read_file,
)
from .quantizer import ErrorWeight
from .recipe import Recipe, get_recipe
from .transform import SideTransform, rotation

__all__ = [
    "FORMAT_VERSION", "METADATA_KEY", "MIN_TOKENS", "Artifact", "Calibration", "LayerTensors", "Metadata",
    "ModelIdentity", "WeightSample", "hash_tensors", "orthogonality_error",
    "replace_file",
]  # fmt: skip
ORTHOGONALITY_TOLERANCE = 1e-3


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
        return hash_header(self._header())

    def layer_recipe(self, layer: int) -> Recipe:
        """The recipe with this layer's bits."""
        bits = self.meta.plan[layer] if self.meta.plan else None
        return self.recipe if bits is None else self.recipe.replace(k_bits=bits[0], v_bits=bits[1])

    def codec(self, layer: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> LayerCodec:
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
        try:
            meta = Metadata.model_validate(meta.model_dump())
        except ValidationError as error:
            raise RecipeError(f"recipe {wanted.name!r} with this plan: {problems(error)}") from error
        if wanted.rotation in ("none", "hadamard") and not wanted.centre and not wanted.shaping:
            return Artifact(meta, {i: _bare(self.meta.layers[i], wanted.rotation) for i in self.layers})
        lacks = [
            f"{name}={getattr(wanted, name)!r} (the artifact has {getattr(have, name)!r})"
            for name in ("rotation", "value_weight", "centre")  # windows only change which tokens are read raw
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
        return {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in out.items()}

    def _header(self) -> str:
        meta = self.meta.model_copy(update={"tensors_sha256": hash_tensors(self.tensors())})
        return json.dumps(meta.model_dump(mode="json"), sort_keys=True)

    def save(self, path: str | Path) -> Path:
        """Validate and write the file (atomically).

        Raises ArtifactError for tensors that would not load again, and where the file cannot be written.
        """
        path = Path(path)
        self.validate(str(path))
        header = self._header()
        stamp = {METADATA_KEY: header, HEADER_HASH_KEY: hash_header(header)}
        return replace_file(path, lambda part: save_file(self.tensors(), part, metadata=stamp), ArtifactError)

    @classmethod
    def load(cls, path: str | Path) -> Artifact:
        """Read and validate. Raises ArtifactError that names the file, the field and the remedy."""
        path = Path(path)
        meta, tensors = read_file(path)
        for name, value in tensors.items():
            if value.dtype != torch.float32:
                raise ArtifactError(f"{path}: {name} is {value.dtype}, the format has torch.float32; calibrate again")
        layers = _assemble(meta, tensors, path)
        if hash_tensors(tensors) != meta.tensors_sha256:
            raise ArtifactError(
                f"{path}: tensors_sha256 does not match the tensors, they were changed; calibrate again"
            )
        artifact = cls(meta, layers)
        artifact.validate(str(path))
        return artifact

    def validate(self, where: str = "artifact") -> None:
        """Shapes, finiteness, orthogonality, coverage. Raises ArtifactError."""
        source = self.meta.calibration
        if source.source == "calibrated" and source.tokens < MIN_TOKENS:
            raise ArtifactError(
                f"{where}: calibration.tokens is {source.tokens}, the floor is {MIN_TOKENS}: rotations from so few "
                "load but serve garbage; calibrate again with more --tokens"
            )
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
                raise ArtifactError(
                    f"{where}: {name} has shape {tuple(value.shape)}, expected {shape}; calibrate again"
                )
            if not torch.isfinite(value).all():
                raise ArtifactError(f"{where}: {name} holds NaN or infinity; calibrate again")
            if name.endswith("rotation") and (off := orthogonality_error(value)) > ORTHOGONALITY_TOLERANCE:
                raise ArtifactError(f"{where}: {name} is not orthogonal (off by {off:.2g}); calibrate again")
            if name.endswith("error_weight"):
                asymmetry = (value - value.mT).abs().max().item()
                if asymmetry > 1e-4 * value.abs().max().item():
                    raise ArtifactError(f"{where}: {name} is not symmetric (off by {asymmetry:.2g}); calibrate again")
                try:
                    ErrorWeight.of(value)
                except ArtifactError as error:
                    raise ArtifactError(f"{where}: {name}: {error}") from error
        self._serves_recipe(where)

    def _serves_recipe(self, where: str) -> None:
        """Whether every layer has what the recipe asks for: a missing rotation is never an identity by accident."""
        for i, t in self.layers.items():
            for side, transform in (("k", t.k), ("v", t.v)):
                if (transform.rotation is None) != (self.recipe.rotation == "none"):
                    wants = "no rotation" if self.recipe.rotation == "none" else f"rotation={self.recipe.rotation!r}"
                    has = "is missing" if transform.rotation is None else "is there"
                    raise ArtifactError(
                        f"{where}: recipe {self.recipe.name!r} has {wants}, but layers.{i}.{side}_rotation {has}; "
                        "calibrate again"
                    )
                if not self.recipe.centre and transform.centre.any():
                    raise ArtifactError(
                        f"{where}: recipe {self.recipe.name!r} does not centre, but layers.{i}.{side}_centre "
                        "is not zero; calibrate again"
                    )
        if self.recipe.shaping and any(t.error_weight is None for t in self.layers.values()):
            raise ArtifactError(
                f"{where}: recipe {self.recipe.name!r} shapes keys, but k_error_weight is missing; calibrate again, or "
                "use a recipe with shaping=False"
            )


def replace_file(path: Path, write: Callable[[Path], object], error: type[OscarError]) -> Path:
    """Have ``write`` write a file beside ``path``, then move it there: readers never see half of one.

    Makes the parent folder. Raises ``error`` with the path and the reason where anything of this fails.
    """
    part = path.with_name(path.name + ".part")
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder, name a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        part.replace(path)
    except (OSError, SafetensorError, RuntimeError) as cause:  # torch.save raises RuntimeError for I/O errors
        if part.is_file():
            part.unlink()
        raise error(f"{path}: cannot be written ({cause}); name a file in a folder that you may write to") from cause
    return path


def orthogonality_error(matrix: Tensor) -> float:
    """Largest entry of |RᵀR − I| over [..., d, d]."""
    gram = matrix.double().mT @ matrix.double()
    return (gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).abs().max().item()


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
    if rest:
        raise ArtifactError(
            f"{path}: unknown tensors {sorted(rest)[:4]}; it was written by another release, calibrate again"
        )
    return layers
