# SPDX-License-Identifier: Apache-2.0
"""A cache's tokens as one safetensors file, to go on from later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...artifact import hash_tensors
from ...errors import CacheError

if TYPE_CHECKING:
    from .cache import OscarCache

FORMAT_VERSION = 1
METADATA_KEY = "oscar_kv_prefix"
_STATE = ("sink_k", "sink_v", "ring_k", "ring_v", "pages", "lengths", "raw_from")


def save(cache: OscarCache, path: Path) -> Path:
    """Write the file atomically. CacheError for an empty cache and for layers with a recurrent state."""
    if not cache.get_seq_length():
        raise CacheError("there is nothing to save: the cache is empty")
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(cache.layers):
        if i in cache._packed:
            tensors |= {f"layers.{i}.{name}": value for name, value in layer.store.state().items()}
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            tensors |= {f"layers.{i}.keys": layer.keys, f"layers.{i}.values": layer.values}
            if isinstance(layer, DynamicSlidingWindowLayer):
                tensors[f"layers.{i}.cumulative_length"] = torch.tensor(layer.cumulative_length)
        else:
            raise CacheError(f"layer {i}, a {type(layer).__name__}, cannot be saved: only attention layers can")
    if cache.slots.mask is not None:
        tensors["padding"] = cache.slots.mask
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    header = {
        "format_version": FORMAT_VERSION,
        "artifact_sha256": cache.codecs.sha256,
        "recipe": cache.artifact.recipe.name,
        "model": cache.artifact.meta.model.id,
        "slots": cache.slots.count,
        "custom_mask": cache.slots.custom,
        "tensors_sha256": hash_tensors(tensors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={METADATA_KEY: json.dumps(header, sort_keys=True)})
    part.replace(path)
    return path


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise CacheError(f"{path}: no such file; write one with cache.save_prefix(path)")
    try:
        with safe_open(path, "pt") as stream:
            header = (stream.metadata() or {}).get(METADATA_KEY)
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CacheError(f"{path}: not a readable safetensors file ({error}); save the prefix again") from error
    try:
        fields = json.loads(header or "")
        if fields["format_version"] != FORMAT_VERSION:
            raise CacheError(
                f"{path}: format_version {fields['format_version']!r}, this release reads {FORMAT_VERSION}"
            )
        if hash_tensors(tensors) != fields["tensors_sha256"]:
            raise CacheError(f"{path}: tensors_sha256 does not match, the file was changed; save the prefix again")
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CacheError(f"{path}: not a saved prefix (bad or no {METADATA_KEY!r} metadata: {error})") from error
    return fields, tensors


def load(cache: OscarCache, path: Path, device: torch.device) -> None:
    """Fill an empty cache. CacheError that names file and field."""
    header, tensors = _read(path)
    if header["artifact_sha256"] != cache.codecs.sha256:
        raise CacheError(
            f"{path}: artifact_sha256 differs: the prefix was written with recipe {header['recipe']!r} of model "
            f"{header['model']!r}; load it with that artifact, or compute the prefix again"
        )
    for i, layer in enumerate(cache.layers):
        wanted = _STATE if i in cache._packed else ("keys", "values")
        missing = [name for name in wanted if f"layers.{i}.{name}" not in tensors]
        if missing:
            raise CacheError(f"{path}: layers.{i}.{missing[0]} is missing; save the prefix again")
        if i not in cache._packed and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise CacheError(f"layer {i}, a {type(layer).__name__}, cannot be loaded: only attention layers can")
    limit, longest = cache.fixed_length, int(tensors[f"layers.{cache._packed[0]}.lengths"].max())
    if limit is not None and longest > limit:
        raise CacheError(f"{path} holds {longest} tokens a row, the cache has room for {limit}: make it longer, "
                         "OscarCache(…, max_cache_len=…)")  # fmt: skip
    for i, layer in enumerate(cache.layers):
        mine = {name.removeprefix(f"layers.{i}."): x for name, x in tensors.items() if name.startswith(f"layers.{i}.")}
        if i in cache._packed:
            dtype = mine["ring_k"].dtype
            store = layer.new_store(len(mine["lengths"]), dtype, device)
            store.load_state(mine)
            layer.store, layer.is_initialized, layer.slots = store, True, header["slots"]
        else:
            keys, values = mine["keys"].to(device), mine["values"].to(device)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = int(mine["cumulative_length"])
    cache.slots.count, cache.slots.custom = header["slots"], header["custom_mask"]
    cache.slots.mask = tensors["padding"].to(device) if "padding" in tensors else None
