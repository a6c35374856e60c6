# SPDX-License-Identifier: Apache-2.0
"""``OscarCache``: a Transformers cache whose full-attention layers are packed pages and raw windows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ...artifact import Artifact
from ...errors import ArtifactError, CacheError
from ...kernels import registry
from ...kernels.base import KernelSet
from . import compat, prefix
from .attention import NAME, vouch
from .codecs import codecs_of
from .geometry import layer_geometries
from .identity import attention_config
from .layer import OscarLayer, storing
from .serving import Serving
from .slots import Slots
from .static import OscarStaticLayer, StaticPending

log = logging.getLogger("oscar_kv")
_RAW_BITS = 16


class OscarCache(Serving, Cache):
    """Keys and values of one batch in a recipe's bits; Transformers' own cache for sliding-window and other layers.

    The model must run attention ``oscar`` (``oscar_kv.enable``, or ``attn_implementation="oscar"``).

    Positions count a row's tokens that are not padding. The query at position i reads positions 0 … sink−1 and
    i−recent+1 … i as they came, and those between from codes. A chunk of at most slack + 1 tokens (drafts to verify) is
    read as if its tokens were decoded one by one; a longer one (a prompt) sees itself and the window before its first
    token exactly. So a prompt given in one chunk is prefilled exactly, by the model's stock attention.

    artifact: calibration of this model. config: the model's. stock_attention: what to run while there is no history
    ("sdpa", "eager" …); default: the attention before ``enable``. kernels: "cuda", "triton" or "torch", or a KernelSet;
    None: what serves the device where the first tokens lie (see ``kernels.registry``; logged, and in ``describe``).

    max_cache_len: tokens a row, for a cache of fixed length like Transformers' StaticCache: its memory is taken at
    once, and decode steps can be compiled and captured in CUDA graphs (``generate`` compiles them by itself on a GPU).
    Such a cache reads padding from the prompt's mask alone (later tokens all count), serves no beams, crops or assisted
    decoding. Once a row is full, a step is a CacheError where the host runs it, and NaN where it is compiled or
    captured; ``generate`` of an enabled model and ``save_prefix`` find that and raise.

    Raises CacheError for another geometry, ArtifactError where a config field that fixes attention differs from what
    the artifact recorded. Weights are compared by ``enable``, from samples of the key projections.
    """

    def __init__(
        self,
        artifact: Artifact | str | Path,
        config: Any,
        stock_attention: str | None = None,
        *,
        kernels: str | KernelSet | None = None,
        max_cache_len: int | None = None,
    ) -> None:
        compat.check_version()
        if not isinstance(artifact, Artifact):
            artifact = Artifact.load(artifact)
        kinds, named = layer_geometries(config), artifact.meta.layers
        remedy = "calibrate this model"
        if len(kinds) != len(named):
            raise CacheError(f"the artifact names {len(named)} layers, the model has {len(kinds)}: {remedy}")
        for i, (have, want) in enumerate(zip(named, kinds, strict=True)):
            for field in ("kind", "num_kv_heads", "k_head_dim", "v_head_dim"):
                a, b = getattr(have, field), getattr(want, field)
                if a != b and (field == "kind" or want.kind == "full"):
                    raise CacheError(f"layers[{i}].{field} is {a!r} in the artifact, {b!r} in the model: {remedy}")
        _check_config(artifact, config, remedy)
        if stock_attention == NAME:
            raise CacheError(f"stock_attention={NAME!r} is the packed cache's own: name 'sdpa', 'eager' …, or leave it")
        self.artifact, self.codecs, self.stock_attention = artifact, codecs_of(artifact), stock_attention
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            raise CacheError(f"max_cache_len is {max_cache_len!r}, it must be a whole number of at least 1 token")
        if kernels is not None and not isinstance(kernels, KernelSet) and kernels not in registry.NAMES:
            raise CacheError(f"kernels={kernels!r}: give one of {', '.join(registry.NAMES)}, or a KernelSet")
        self._init_serving(kernels, max_cache_len)
        self.slots = Slots()
        self._warned = False
        layers = compat.stock_layers(config, max_cache_len)
        self._packed = [i for i, layer in enumerate(kinds) if layer.kind == "full"]
        for i in self._packed:
            layers[i] = OscarLayer(self, i) if max_cache_len is None else OscarStaticLayer(self, i)
        if self._packed and max_cache_len is not None:
            layers[self._packed[0]].first = True
        super().__init__(layers=layers)
        stock = (i for i, layer in enumerate(layers) if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer))
        self._counted = sorted({*self._packed, *stock})
        self._first = self._counted[0]

    @property
    def packed_layers(self) -> list[OscarLayer]:
        """The layers that are quantised."""
        return [self.layers[i] for i in self._packed]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Add post-RoPE k, v [batch, kv_heads, n, d] to a layer. Packed layers return what only ``oscar`` can read."""
        if self.fixed_length is not None:
            layer = self.layers[layer_idx]
            if not isinstance(layer, OscarStaticLayer):
                return layer.update(key_states, value_states, *args, **kwargs)
            if layer.steps(key_states):
                return StaticPending(layer, key_states, value_states), StaticPending(layer, key_states, value_states)
        return self._update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def _update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx == self._first:
            self._whole("update")
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        vouch(keys)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last −n slots (n negative; up to 5.17 a positive n means "crop to n slots", later CacheError).

        Up to slack + 1 tokens a row leave the cache as if they had never come. A deeper crop is right in its positions,
        but tokens that were outside the ring come back from their codes; a warning says so once.
        """
        self._growing("crop")
        tokens_to_remove = int(tokens_to_remove)  # some releases hand over a tensor
        count = -tokens_to_remove
        if tokens_to_remove > 0:
            if not compat.positive_crop_is_length():
                raise CacheError(f"crop({tokens_to_remove}): give the tokens to remove as a negative number, crop(-n)")
            count = max(0, self.slots.count - tokens_to_remove)
        self._whole("crop")
        others = [layer for i, layer in enumerate(self.layers) if i not in self._packed]
        for layer in others:  # first: they may refuse, and then nothing has changed
            layer.crop(-count)
        if not count or not self.slots.count:
            return
        rows = self._rows()
        removed = self.slots.crop(count, rows)
        restored = False
        for layer in self.packed_layers:
            layer.slots = self.slots.count
            if layer.store is not None:
                with storing(layer.store.device):
                    restored |= layer.store.crop(removed)
        if restored and not self._warned:
            self._warned = True
            log.warning(
                "crop(%d) reaches beyond the ring's slack of %d tokens: window tokens that were no longer raw come "
                "back from their codes. Raise the recipe's slack to roll back further exactly.",
                -count,
                self.artifact.recipe.slack,
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i]; rows share pages until they write their own."""
        self._growing("reorder_cache")
        self._whole("reorder_cache")
        self._reorder(beam_idx.tolist())
        for i, layer in enumerate(self.layers):
            if i not in self._packed:
                layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, copies side by side."""
        self._growing("batch_repeat_interleave")
        self._whole("batch_repeat_interleave")
        self._reorder([row for row in range(self._rows()) for _ in range(repeats)])
        self._others("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows (int64 or bool)."""
        self._growing("batch_select_indices")
        self._whole("batch_select_indices")
        chosen = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._reorder(chosen.tolist())
        self._others("batch_select_indices", indices)

    def _others(self, method: str, argument: Any) -> None:
        for i, layer in enumerate(self.layers):
            if i not in self._packed:
                if not hasattr(layer, method):
                    raise CacheError(f"layer {i}, a {type(layer).__name__}, cannot do {method}")
                getattr(layer, method)(argument)

    def _reorder(self, index: list[int]) -> None:
        self.slots.reorder(index)
        for layer in self.packed_layers:
            if layer.store is not None:
                with storing(layer.store.device):
                    layer.store.reorder(index)

    def _growing(self, what: str) -> None:
        if self.fixed_length is not None:
            raise CacheError(f"{what}: a cache of fixed length cannot do that; leave max_cache_len out")

    def _whole(self, what: str) -> None:
        """Raise CacheError unless all layers hold the same slots: an interrupted pass reaches some of them only."""
        first = self.layers[self._first]
        if what == "update" and isinstance(first, OscarLayer) and first.pending is not None:
            return  # the layer says more: another attention function may be at work
        pending = any(layer.pending is not None for layer in self.packed_layers)
        fixed = self.fixed_length is not None  # lengths are the device's there, and one for all layers
        if pending or (
            not fixed and any(int(self.layers[i].get_seq_length()) != self.slots.count for i in self._counted)
        ):
            raise CacheError(
                f"{what}: a forward pass was interrupted, some layers hold its tokens and some do not: call "
                "cache.reset() and give the text again"
            )

    def _rows(self) -> int:
        return next((layer.store.rows for layer in self.packed_layers if layer.store is not None), 0)

    def reset(self) -> None:
        """Forget all tokens; an interrupted forward pass is forgotten too."""
        self.slots.reset()
        self._pass = None
        for i in self._counted:
            if i not in self._packed:  # before 5.18 they zero their rows, and later tokens would be appended to those
                layer = self.layers[i]
                layer.keys = layer.values = None
                layer.is_initialized = False
        super().reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> OscarCache:
        """A copy with its own tokens that shares artifact and codecs."""
        self._whole("deepcopy")
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        from copy import deepcopy

        for shared in (self.artifact, self.codecs, self.kernels, self._served):
            memo[id(shared)] = shared
        for layer in self.packed_layers:
            if layer.store is not None:
                memo[id(layer.store.codec)] = layer.store.codec
                memo[id(layer.store.writer)] = layer.store.writer
        with torch.inference_mode(False):
            new.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        return new

    def memory(self) -> dict[str, int]:
        """Bytes by kind, exact sums of the tensors; total.

        pages, windows (sink, ring), padding masks, tables (block tables and lengths on the device), other layers.
        """
        stores = [layer.store for layer in self.packed_layers if layer.store is not None]
        out = {
            "pages": sum(store.pool.nbytes for store in stores),
            "windows": sum(store.window_nbytes for store in stores),
            "padding": self.slots.nbytes,
            "tables": sum(store.table_nbytes for store in stores)
            + (0 if self._pass is None else self._pass[1].nbytes)
            + (0 if self.state is None else self.state.nbytes),
            "other_layers": sum(
                t.nbytes for i, layer in enumerate(self.layers) if i not in self._packed for t in layer_tensors(layer)
            ),
        }
        return {**out, "total": sum(out.values())}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the cache (codecs and rotations are shared with other caches and not counted)."""
        return self.memory()["total"]

    def bits_per_element(self, context: int | None = None) -> float:
        """Bits a key or value element of the packed layers takes, windows, ring slack and idle pages included.

        context None: of the buffers as they are. Otherwise: of the buffers that one row of so many tokens gets from a
        prompt in one chunk, windows in the model's dtype (16 bits before any token came). CacheError while empty.
        """
        stores = [layer.store for layer in self.packed_layers if layer.store is not None]
        if context is None:
            elements = sum(store.elements for store in stores)
            if not elements:
                raise CacheError("bits per element of an empty cache: name a context, bits_per_element(context=32768)")
            return 8 * sum(store.nbytes for store in stores) / elements
        if context < 1:
            raise CacheError(f"context is {context}, it must be at least 1 token")
        raw = 8 * stores[0].ring_k.element_size() if stores else _RAW_BITS
        bits, elements = 0.0, 0
        for i in self._packed:
            codec = self.codecs.get(i, torch.device("cpu"), torch.float32)
            recipe, layout = codec.recipe, codec.layout
            pages = max(0, context // 64 - recipe.sink // 64)
            wide = (layout.k_dim + layout.v_dim) * codec.num_kv_heads
            bits += pages * layout.page_bytes * 8 * codec.num_kv_heads
            bits += (recipe.sink + recipe.recent + recipe.slack) * wide * raw
            elements += context * wide
        return bits / elements

    def describe(self, context: int = 32768) -> dict[str, Any]:
        """Recipe, artifact hash, kernels, windows and bits per element (now, and at a stated context).

        kernel: what serves decode. kernels: what serves decode, store and prefill; the device decides, so None before
        the first token.
        """
        recipe, tokens = self.artifact.recipe, int(self.get_seq_length())
        if self.fixed_length is not None and self.state is not None:
            self.pull()
        served = self.served_now()
        return {
            "recipe": self.artifact.label,
            "artifact_sha256": self.codecs.sha256,
            "kernel": None if served is None else served["decode"],
            "kernels": served,
            "windows": {"sink": recipe.sink, "recent": recipe.recent, "slack": recipe.slack},
            "packed_layers": len(self._packed),
            "layers": len(self.layers),
            "tokens": tokens,
            "bits_per_element": self.bits_per_element() if tokens else None,
            f"bits_per_element_at_{context}": self.bits_per_element(context),
            "bytes": self.nbytes,
        }

    def __repr__(self) -> str:
        served = self.served_now()
        kernels = "no tokens yet" if served is None else f"kernels {served['decode']}"
        fixed = "" if self.fixed_length is None else f" of {self.fixed_length}"
        tokens = f"{int(self.get_seq_length())} slots{fixed}"
        return f"OscarCache({self.artifact.label}, {tokens}, {self.nbytes} bytes, {kernels})"

    def save_prefix(self, path: str | Path) -> Path:
        """Write all tokens to a safetensors file; generation goes on from it bit-identically. See ``load_prefix``."""
        self._whole("save_prefix")
        if self.state is not None:
            self.state.check_room()
            self.pull()
        return prefix.save(self, Path(path))

    def load_prefix(self, path: str | Path, device: torch.device | str = "cpu") -> OscarCache:
        """Fill this empty cache from a file, tensors on ``device`` (the model's). Raises CacheError.

        The file must come from the same artifact and model: its hash is checked.
        """
        if self.get_seq_length():
            raise CacheError("the cache holds tokens already: load a prefix into a new OscarCache, or reset() it")
        with storing(torch.device(device)):
            prefix.load(self, Path(path), torch.device(device))
            if self.fixed_length is not None:
                self.push(self.packed_layers[-1])
        return self


def _check_config(artifact: Artifact, config: Any, remedy: str) -> None:
    recorded = artifact.meta.model.config
    if not recorded:
        return  # RotationZoo files record none
    found = attention_config(config)
    for field in sorted({*recorded, *found}):
        if recorded.get(field) != found.get(field):
            raise ArtifactError(
                f"the artifact was calibrated for {artifact.meta.model.id!r}: config.{field} is "
                f"{recorded.get(field)!r} there, {found.get(field)!r} in this config; {remedy}"
            )


def layer_tensors(layer: Any) -> list[Tensor]:
    """Tensors that a stock cache layer holds."""
    out = []
    for value in vars(layer).values():
        values = value.values() if isinstance(value, dict) else (value,)
        out += [x for x in values if isinstance(x, Tensor) and x.ndim]
    return out
