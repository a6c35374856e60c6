# SPDX-License-Identifier: Apache-2.0
"""An artifact's codecs on their devices, built once and shared by all caches of a model."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from ...artifact import Artifact
from ...codec import LayerCodec
from ...kernels.base import LayerTables, StoreTables


class Codecs:
    """Codecs and kernel tables by layer, device and dtype. Shared like weights, so not part of a cache's memory."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._codecs: dict[tuple[int, str, torch.dtype], LayerCodec] = {}
        self._tables: dict[tuple[int, str, torch.dtype], LayerTables] = {}
        self._store_tables: dict[tuple[int, str], StoreTables] = {}
        self.kits: dict[tuple[Any, ...], Any] = {}
        """What decode steps of fixed length need, by layer, device and kernels, and its name (see static.py)."""

    @cached_property
    def sha256(self) -> str:
        """The artifact's hash."""
        return self.artifact.sha256

    def get(self, layer: int, device: torch.device, dtype: torch.dtype) -> LayerCodec:
        """The codec of a layer for a model in ``dtype``: fp64 for fp64, else fp32."""
        work = torch.float64 if dtype == torch.float64 else torch.float32
        key = layer, str(device), work
        if key not in self._codecs:
            self._codecs[key] = self.artifact.codec(layer, device, work)
        return self._codecs[key]

    def tables(self, layer: int, codec: LayerCodec) -> LayerTables:
        """Rotations and centres of a codec as the kernels want them, in the codec's dtype."""
        key = layer, str(codec.k.centre.device), codec.dtype
        if key not in self._tables:
            turned = codec.v.rotation
            self._tables[key] = LayerTables(
                codec.k.rotation, codec.k.centre, None if turned is None else turned.mT.contiguous(), codec.v.centre
            )
        return self._tables[key]

    def store_tables(self, layer: int, codec: LayerCodec) -> StoreTables:
        """What the store kernel wants of a codec: one object a layer and device, as long as the artifact lives.

        Raises OscarError for a step rule that only the reference codec serves.
        """
        key = layer, str(codec.k.centre.device)
        if key not in self._store_tables:
            self._store_tables[key] = StoreTables.of(codec, codec.k.centre.device)
        return self._store_tables[key]


def codecs_of(artifact: Artifact) -> Codecs:
    """The shared codecs of an artifact object, kept on it: they go when it goes."""
    return artifact.__dict__.setdefault("_codecs", Codecs(artifact))  # type: ignore[no-any-return]
