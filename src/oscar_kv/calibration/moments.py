# SPDX-License-Identifier: Apache-2.0
"""Moments of keys, values and queries: what calibration keeps of a text, and its file.

Memory and file size depend on the model alone (d×d numbers a KV head), not on the number of tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..artifact import ModelIdentity, hash_tensors, replace_file
from ..errors import CalibrationError
from ..geometry import LayerGeometry
from .stream import FIELDS

FORMAT_VERSION = 1
METADATA_KEY = "oscar_kv_moments"


class MomentsMeta(BaseModel):
    """Header of a moments file.

    tokens: in all. history_queries: queries that had a history to read, i.e. positions >= sink + recent of a chunk.
    chunk: tokens of the longest chunk.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format_version: int = FORMAT_VERSION
    model: ModelIdentity
    layers: tuple[LayerGeometry, ...]
    tokens: int = Field(ge=0)
    history_queries: int = Field(ge=0)
    chunk: int = Field(ge=0)
    sink: int = Field(ge=0)
    recent: int = Field(ge=1)
    data: str = ""
    data_sha256: str = ""
    chat_template: bool = False
    tensors_sha256: str = ""


@dataclass(frozen=True)
class Moments:
    """Sums over the calibration text: ``layers[i][field]``, fp64, for each full-attention layer i.

    Fields (stream.FIELDS), a KV head: k_sum, k_outer (Σk, Σkᵀk); v_sum, v_outer; w_sum, wv_sum, wv_outer (values
    weighted by w_t = Σ p² over the queries that read t from the history); u_sum, uq_outer (queries weighted by
    u_i = Σ p² over the history they read); q_outer (plain, over the group's heads); c_sum, cv_sum, cv_outer (values
    weighted by k C_Q kᵀ with each chunk's own C_Q).
    """

    meta: MomentsMeta
    layers: dict[int, dict[str, Tensor]]

    def __add__(self, other: Moments) -> Moments:
        """Moments of both texts. Raises CalibrationError unless model, layers and windows agree."""
        a, b = self.meta, other.meta
        for name, x, y in (
            ("model.config_sha256", a.model.config_sha256, b.model.config_sha256),
            ("model.weight_samples", a.model.weight_samples, b.model.weight_samples),
            ("layers", a.layers, b.layers),
            ("sink", a.sink, b.sink),
            ("recent", a.recent, b.recent),
            ("chat_template", a.chat_template, b.chat_template),
        ):
            if x != y:
                raise CalibrationError(f"moments of {a.model.id!r} and {b.model.id!r} do not add up: {name} differs")
        meta = a.model_copy(
            update={
                "tokens": a.tokens + b.tokens,
                "history_queries": a.history_queries + b.history_queries,
                "chunk": max(a.chunk, b.chunk),
                "data": " + ".join(dict.fromkeys(x for x in (a.data, b.data) if x)),
                "data_sha256": a.data_sha256 if a.data_sha256 == b.data_sha256 else "",
            }
        )
        layers = {i: {f: x[f] + other.layers[i][f] for f in FIELDS} for i, x in self.layers.items()}
        return Moments(meta, layers)

    def tensors(self) -> dict[str, Tensor]:
        """Every sum by the name it has in the file."""
        return {f"layers.{i}.{f}": x.contiguous() for i, sums in self.layers.items() for f, x in sums.items()}

    def save(self, path: str | Path) -> Path:
        """Write the file (atomically). Raises CalibrationError where it cannot be written."""
        path = Path(path)
        tensors = self.tensors()
        meta = self.meta.model_copy(update={"tensors_sha256": hash_tensors(tensors)})
        stamp = {METADATA_KEY: json.dumps(meta.model_dump(mode="json"), sort_keys=True)}
        return replace_file(path, lambda part: save_file(tensors, part, metadata=stamp), CalibrationError)

    @classmethod
    def load(cls, path: str | Path) -> Moments:
        """Read and validate. Raises CalibrationError that names the file and the field."""
        path = Path(path)
        if not path.is_file():
            raise CalibrationError(
                f"{path}: no such file; `oscar-kv calibrate MODEL --save-moments {path.name}` makes one"
            )
        try:
            with safe_open(path, "pt") as stream:
                header = (stream.metadata() or {}).get(METADATA_KEY)
                tensors: dict[str, Tensor] = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CalibrationError(f"{path}: not a readable safetensors file ({error})") from error
        if header is None:
            raise CalibrationError(f"{path}: a safetensors file, but not one of moments (no {METADATA_KEY!r} metadata)")
        meta = _parse(header, path)
        if hash_tensors(tensors) != meta.tensors_sha256:
            raise CalibrationError(f"{path}: tensors_sha256 does not match, the file was changed; collect it again")
        full = [i for i, layer in enumerate(meta.layers) if layer.kind == "full"]
        layers: dict[int, dict[str, Tensor]] = {}
        for i in full:
            wanted = shapes(meta.layers[i])
            layers[i] = {}
            for field, shape in wanted.items():
                x = tensors.pop(f"layers.{i}.{field}", None)
                if x is None or tuple(x.shape) != shape or x.dtype != torch.float64 or not torch.isfinite(x).all():
                    what = "missing" if x is None else f"{x.dtype} {tuple(x.shape)}, or not finite"
                    raise CalibrationError(f"{path}: layers.{i}.{field} is {what}; expected finite float64 {shape}")
                layers[i][field] = x
        if tensors:
            raise CalibrationError(f"{path}: unknown tensors {sorted(tensors)[:4]}; it was written by another release")
        return cls(meta, layers)


def shapes(layer: LayerGeometry) -> dict[str, tuple[int, ...]]:
    """Shape of each sum of a full-attention layer."""
    size = {"k": layer.k_head_dim, "v": layer.v_head_dim}
    return {field: (layer.num_kv_heads, *(size[side] for side in sides)) for field, sides in FIELDS.items()}


def _parse(header: str, path: Path) -> MomentsMeta:
    try:
        fields: Any = json.loads(header)
        version = fields.get("format_version")
    except (json.JSONDecodeError, AttributeError) as error:
        raise CalibrationError(f"{path}: the metadata is not a JSON object; collect it again") from error
    if version != FORMAT_VERSION:
        raise CalibrationError(f"{path}: format_version {version!r}, this release reads {FORMAT_VERSION}")
    try:
        return MomentsMeta.model_validate_json(header)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CalibrationError(f"{path}: bad metadata ({what}); collect it again") from error
