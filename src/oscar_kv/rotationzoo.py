# SPDX-License-Identifier: Apache-2.0
"""RotationZoo files (the published `.pt` rotations) in and out.

A file is a dictionary ``format_version``, ``objective``, ``source_grouping``, ``layers``; a layer holds ``layer_id``
and ``rotation``: [d, d] in version 1 (all KV heads share it), [kv_heads, d, d] in version 2; columns are the new axes.
Keys and values have a file each. It knows nothing of centres, error weights, bits or the model: an artifact made from
it runs without centring and shaping and says so.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import __version__
from .artifact import (
    FORMAT_VERSION,
    ORTHOGONALITY_TOLERANCE,
    Artifact,
    Calibration,
    LayerTensors,
    Metadata,
    ModelIdentity,
    orthogonality_error,
    replace_file,
)
from .errors import ArtifactError
from .geometry import LayerGeometry
from .recipe import make_recipe
from .transform import SideTransform

logger = logging.getLogger(__name__)

OBJECTIVE = {"k": "qqt", "v": "sst"}
"""How a file's ``objective`` begins: query covariance for the keys, score-weighted covariance for the values."""
_SIDE = {"k": "key", "v": "value"}
_COMPOSITION = {"eigen": "_r_h", "eigen-layer": "_r_h_pbr", "hadamard": "_h"}


def load_zoo(
    k_path: str | Path,
    v_path: str | Path,
    geometries: Sequence[LayerGeometry],
    model_id: str | ModelIdentity,
    *,
    k_bits: int = 2,
    v_bits: int = 2,
) -> Artifact:
    """An artifact from a K file and a V file, for the layers of a model's config.

    geometries: one a decoder layer; the files must cover exactly the full-attention ones. model_id: a name, or the
    whole identity, so that the engine can refuse another model. Raises ArtifactError that names the file, the layer and
    the remedy.
    """
    k_path, v_path = Path(k_path), Path(v_path)
    k_version, k = _read(k_path, "k", geometries)
    v_version, v = _read(v_path, "v", geometries)
    if all(k[i].shape == v[i].shape and torch.equal(k[i], v[i]) for i in k):
        raise ArtifactError(
            f"{k_path} and {v_path} hold the same rotations: give the K file and the V file of one model"
        )
    recipe = make_recipe({
        "name": f"k{k_bits}v{v_bits}-zoo", "k_bits": k_bits, "v_bits": v_bits, "centre": False, "shaping": False,
        "rotation": "eigen-layer" if k_version == v_version == 1 else "eigen", "value_weight": "query",
    })  # fmt: skip
    layers = {}
    for i in k:
        heads = geometries[i].num_kv_heads
        turned = [r.expand(heads, -1, -1).contiguous() for r in (k[i], v[i])]
        sides = [SideTransform(torch.zeros(heads, r.shape[-1]), r) for r in turned]
        layers[i] = LayerTensors(k=sides[0], v=sides[1])
    identity = model_id if isinstance(model_id, ModelIdentity) else ModelIdentity(id=model_id, architecture="")
    calibration = Calibration(
        source="rotationzoo", tokens=0, data=f"{k_path.name}, {v_path.name}",
        notes=f"RotationZoo versions {k_version} (K) and {v_version} (V): no centres, no error weight, tokens unknown",
    )  # fmt: skip
    meta = Metadata(
        format_version=FORMAT_VERSION, package_version=__version__, model=identity, layers=tuple(geometries),
        recipe=recipe, calibration=calibration,
    )  # fmt: skip
    artifact = Artifact(meta, layers)
    artifact.validate(f"{k_path}, {v_path}")
    logger.warning(
        "%s: rotations alone, so neither centring nor shaping: expect more loss than calibrating gives", k_path
    )
    return artifact


def _read(path: Path, side: str, geometries: Sequence[LayerGeometry]) -> tuple[int, dict[int, Tensor]]:
    """Version, and the fp32 rotations [1 or kv_heads, d, d] by layer, all checked."""
    content = _content(path)
    version, objective = content.get("format_version"), content.get("objective")
    if type(version) is not int or version not in (1, 2):
        raise ArtifactError(f"{path}: format_version is {version!r}; RotationZoo versions 1 and 2 are known")
    other = "v" if side == "k" else "k"
    if isinstance(objective, str) and objective.startswith(OBJECTIVE[other]):
        raise ArtifactError(
            f"{path}: objective {objective!r} is that of the {_SIDE[other]}s, but the file was given as the "
            f"{_SIDE[side]}s': exchange the two paths"
        )
    wanted = [i for i, g in enumerate(geometries) if g.kind == "full"]
    entries = _entries(path, content.get("layers"))
    if missing := [i for i in wanted if i not in entries]:
        raise ArtifactError(
            f"{path}: layers has no entry for {missing}; the model has full attention there: another model?"
        )
    if extra := sorted(set(entries) - set(wanted)):
        raise ArtifactError(f"{path}: layers has entries {extra} where the model has no full attention: another model?")
    return version, {i: _rotation(path, i, entries[i], version, side, geometries[i]) for i in wanted}


def _content(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; give the K and V `.pt` files of a RotationZoo folder")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArtifactError(
            f"{path}: not a RotationZoo file that loads with weights_only=True ({reason}); download it again, "
            "and never load one that needs more than tensors"
        ) from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: holds a {type(content).__name__}, a RotationZoo file holds a dictionary")
    return content


def _entries(path: Path, layers: Any) -> dict[int, dict[str, Any]]:
    if not isinstance(layers, dict) or not layers:
        raise ArtifactError(f"{path}: layers is not a dictionary of layers; this is no RotationZoo file")
    entries = {}
    for key, entry in layers.items():
        try:
            index = int(key)
        except (TypeError, ValueError):
            raise ArtifactError(f"{path}: layers has the key {key!r}, which is no layer number") from None
        if not isinstance(entry, dict):
            raise ArtifactError(
                f"{path}: layers[{key}] is a {type(entry).__name__}, expected a dictionary with 'rotation'"
            )
        if entry.get("layer_id", index) != index:
            raise ArtifactError(f"{path}: layers[{key}] says layer_id {entry['layer_id']!r}: the file is mixed up")
        entries[index] = entry
    return entries


def _rotation(
    path: Path, layer: int, entry: dict[str, Any], version: int, side: str, geometry: LayerGeometry
) -> Tensor:
    where, r = f"{path}: layers[{layer}].rotation", entry.get("rotation")
    if not isinstance(r, Tensor) or not r.is_floating_point():
        raise ArtifactError(f"{where} is missing or no floating-point tensor")
    d = geometry.k_head_dim if side == "k" else geometry.v_head_dim
    shape = (d, d) if version == 1 else (geometry.num_kv_heads, d, d)
    if tuple(r.shape) != shape:
        raise ArtifactError(
            f"{where} has shape {tuple(r.shape)}; version {version} and the model's {_SIDE[side]} heads need {shape}"
        )
    if not torch.isfinite(r).all():
        raise ArtifactError(f"{where} holds NaN or infinity; download the file again")
    if (off := orthogonality_error(r)) > ORTHOGONALITY_TOLERANCE:
        raise ArtifactError(
            f"{where} is not orthogonal (off by {off:.2g}), rotated attention would differ from the model's"
        )
    return r.float().reshape(-1, d, d)


def save_zoo(
    artifact: Artifact, k_path: str | Path, v_path: str | Path, version: int | None = None, *, lossy: bool = False
) -> int:
    """Write the K file and the V file; returns the version (None: 1 where every layer's heads share, else 2).

    The format holds rotations alone. Centres and error weights are refused unless ``lossy``, and then named in a
    warning; recipe, bits and the model's identity have no place in it either way. Raises ArtifactError.
    """
    artifact.validate("artifact to export")
    if artifact.recipe.rotation == "none":
        raise ArtifactError(f"recipe {artifact.recipe.name!r} does not rotate: there is nothing to export")
    lost = []
    if any(t.k.centre.any() or t.v.centre.any() for t in artifact.layers.values()):
        lost.append("centres")
    if any(t.error_weight is not None for t in artifact.layers.values()):
        lost.append("the keys' error weights")
    if lost and not lossy:
        raise ArtifactError(
            f"a RotationZoo file cannot hold {' and '.join(lost)}: keys and values would be stored worse than "
            "this artifact does; pass lossy=True to export the rotations alone"
        )
    shared = all(_shared(side.rotation) for t in artifact.layers.values() for side in (t.k, t.v))
    version = version or (1 if shared else 2)
    if version not in (1, 2):
        raise ArtifactError(f"RotationZoo version {version!r} is not known: 1 or 2")
    if version == 1 and not shared:
        raise ArtifactError("version 1 holds one rotation a layer, this artifact has one a KV head: write version 2")
    if lost:
        logger.warning("%s, %s: %s dropped, the format has no place for them", k_path, v_path, " and ".join(lost))
    for side, path in (("k", Path(k_path)), ("v", Path(v_path))):
        layers = {}
        for i, t in artifact.layers.items():
            r = (t.k if side == "k" else t.v).rotation
            assert r is not None
            layers[i] = {"layer_id": i, "rotation": (r[0] if version == 1 else r).detach().float().cpu().clone()}
        content = {
            "format_version": version, "objective": OBJECTIVE[side] + _COMPOSITION[artifact.recipe.rotation],
            "source_grouping": "layer" if version == 1 else "kv_head", "layers": layers,
        }  # fmt: skip
        replace_file(path, lambda part, content=content: torch.save(content, part), ArtifactError)  # type: ignore[misc]
    return version


def _shared(r: Tensor | None) -> bool:
    return r is not None and torch.equal(r, r[:1].expand_as(r))
