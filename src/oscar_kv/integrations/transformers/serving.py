# SPDX-License-Identifier: Apache-2.0
"""``OscarCache``'s part that chooses kernels and hands them what they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...cache import MixedLayer
from ...cache.passes import Pass
from ...codec import LayerCodec
from ...errors import CacheError
from ...kernels import dense, registry
from ...kernels.base import KernelSet, StoreTables
from ...kernels.torch_set import kernel_set as torch_set
from .layer import OscarLayer, storing
from .static import Kit, OscarStaticLayer, StaticState, register_kit

if TYPE_CHECKING:
    from ...artifact import Artifact
    from .codecs import Codecs
    from .slots import Slots


class Serving:
    """Which kernels run, and what a forward pass's layers share of their arguments.

    fixed_length: tokens a row of a cache of fixed length, None for a growing one. state: its lengths on the device.
    """

    artifact: Artifact
    codecs: Codecs
    slots: Slots

    def _init_serving(self, kernels: str | KernelSet | None, fixed_length: int | None) -> None:
        self.kernels, self.fixed_length = kernels, fixed_length
        self.state: StaticState | None = None
        self._served: dict[tuple[str, torch.dtype], registry.Served] = {}
        self._pass: tuple[Tensor | None, Pass] | None = None

    @property
    def packed_layers(self) -> list[OscarLayer]:
        raise NotImplementedError

    def serve(self, device: torch.device, dtype: torch.dtype) -> registry.Served:
        """Which kernels serve a model of this dtype on this device; chosen once. Raises OscarError."""
        key = str(device), dtype
        if key not in self._served:
            served = registry.serve(device, dtype, self.artifact.recipe.step, self.kernels)
            self._served[key] = served if self.fixed_length is None else self._serve_static(served, device)
        return self._served[key]

    def _serve_static(self, served: registry.Served, device: torch.device) -> registry.Served:
        """Decode steps of a fixed length are one op: all of it runs on kernels that ask nothing of the host."""
        if device.type == "cuda" and not served.stores:
            raise CacheError(
                f"max_cache_len={self.fixed_length}: a cache of fixed length needs kernels for decode and store, and "
                f"here decode is by {served.decode}, store by {served.store} (recipe {self.artifact.label!r}): leave "
                "max_cache_len out, or take a 16-bit model and a recipe with step rule 'least-squares'"
            )
        if served.kernels is None or not served.stores:
            return registry.Served("torch", "torch", "torch", torch_set(), False)
        return served

    def by_kernels(self, store: MixedLayer) -> bool:
        """Whether a layer's storage is read by a kernel set, and not by the reference."""
        return self.serve(store.device, store.dtype).kernels is not None

    def new_pass(self, store: MixedLayer, counts: list[int], valid: Tensor | None, n: int) -> Pass:
        """What kernels need to know of a forward pass: made by its first layer, the same for the others."""
        if self._pass is not None:
            seen, old = self._pass
            if seen is valid and old.n == n and old.starts == tuple(store.lengths) and old.counts == tuple(counts):
                return old
        with storing(store.device):
            self._pass = valid, store.new_pass(counts, valid, n)
        return self._pass[1]

    def kit(self, index: int, store: MixedLayer) -> str:
        """The name of what a layer's decode steps of fixed length need; the same for all caches of an artifact."""
        served = self.serve(store.device, store.dtype)
        assert served.kernels is not None
        kernels = served.kernels
        key = index, str(store.device), store.codec.dtype, id(kernels) if served.stores else kernels.name
        if key not in self.codecs.kits:
            if served.stores:
                tables = self.codecs.store_tables(index, store.codec)
            else:
                kernels, tables = torch_set(store.codec.encode), _no_tables(store.codec)
            kit = Kit(kernels, self.codecs.tables(index, store.codec), tables, store.codec.layout)
            self.codecs.kits[key] = kit, register_kit(kit)
        return self.codecs.kits[key][1]

    def new_state(self, rows: int, store: MixedLayer) -> None:
        """Make the lengths on the device, once for all layers."""
        assert self.fixed_length is not None
        if self.state is None:
            self.state = StaticState(rows, store.sink, store.recent, self.fixed_length, store.device)

    def pull(self) -> None:
        """Learn from the device how far decode steps have come that ran without the host."""
        assert self.state is not None
        lengths, slots = self.state.seq_len.tolist(), int(self.state.slots)
        self.state.known = max(lengths, default=0)
        for layer in self.packed_layers:
            assert isinstance(layer, OscarStaticLayer)
            layer.take(lengths, slots)
        first = self.packed_layers[0].store
        if slots > self.slots.count and first is not None:
            with storing(first.device):
                self.slots.extend(None, first.rows, self.slots.count, slots - self.slots.count, first.device)

    def push(self, layer: OscarLayer) -> None:
        """Tell the device what a chunk has added, after the last layer."""
        if layer is self.packed_layers[-1] and layer.store is not None and self.state is not None:
            with storing(layer.store.device):
                self.state.set(layer.store.lengths, layer.slots)

    def served_now(self) -> dict[str, str] | None:
        """What serves decode, store and prefill where the tokens lie; None before the first."""
        store = next((layer.store for layer in self.packed_layers if layer.store is not None), None)
        if store is None:
            return None
        out = self.serve(store.device, store.dtype).as_dict()
        used = dense.chosen(store.device)
        if used and out["prefill"] != "torch":
            out["prefill"] += f", {' / '.join(used)}"
        return out


def _no_tables(codec: LayerCodec) -> StoreTables:
    """For a store that has a codec and reads no tables."""
    return StoreTables(None, codec.k.centre, None, codec.v.centre, None, None, codec.recipe.unbiased)
