# SPDX-License-Identifier: Apache-2.0
"""Which slots of a padded batch hold tokens. Transformers counts slots, the storage counts valid tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import CacheError


class Slots:
    """The padding seen so far, shared by all layers of a cache.

    mask: bool [rows, slots], or None while no slot is padding. custom: whether a 4-D mask of the user's was in use,
    which says nothing about padding: raw attention may follow it, packed history cannot.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.count = 0
        self.custom = False

    @property
    def nbytes(self) -> int:
        return 0 if self.mask is None else self.mask.nbytes

    def new(self, padding: Tensor | None, rows: int, past: int, n: int) -> Tensor | None:
        """bool [rows, n], which of a chunk's slots are valid (None: all), from the padding mask of all slots.

        Raises CacheError where the mask is too short, or differs from what the cache has seen.
        """
        if padding is None:
            if self.mask is not None and not bool(self.mask[:, :past].all()):
                raise CacheError(
                    "the cache holds a padded batch, but this call has no attention_mask: pass one that covers its "
                    f"{past} slots and the {n} new ones"
                )
            return None
        if padding.shape[0] != rows or padding.shape[1] < past + n:
            raise CacheError(
                f"attention_mask is {list(padding.shape)}; it must cover {rows} rows of {past} slots in the cache and "
                f"{n} new ones"
            )
        padding = padding[:, : past + n].bool()
        before = padding[:, :past]
        known = True if self.mask is None else self.mask[:, :past].to(padding.device)
        chunk = padding[:, past:]
        same, whole = torch.stack([(before == known).all(), chunk.all()]).tolist()  # the device is asked once
        if not same:
            raise CacheError("attention_mask differs from the one these tokens came with: padding cannot change later")
        return None if whole else chunk

    def extend(self, valid: Tensor | None, rows: int, past: int, n: int, device: torch.device) -> None:
        """Count a chunk's slots; the first layer of a forward pass does it for all."""
        if past + n <= self.count:
            return
        if valid is not None or self.mask is not None:
            old = self.mask if self.mask is not None else torch.ones(rows, past, dtype=torch.bool, device=device)
            new = valid if valid is not None else torch.ones(rows, n, dtype=torch.bool, device=device)
            self.mask = torch.cat([old, new.to(old.device)], 1)
        self.count = past + n

    def valid_before(self, rows: int, past: int) -> list[list[int]] | None:
        """Slots of each row's valid tokens among the first ``past``, or None where that is all of them."""
        if self.mask is None or bool(self.mask[:, :past].all()):
            return None
        return [self.mask[row, :past].nonzero()[:, 0].tolist() for row in range(rows)]

    def crop(self, count: int, rows: int) -> list[int]:
        """Take the last ``count`` slots back; how many valid tokens that is, a row."""
        count = min(count, self.count)
        keep = self.count - count
        removed = [count] * rows if self.mask is None else self.mask[:, keep:].sum(1).tolist()
        self.count = keep
        if self.mask is not None:
            self.mask = self.mask[:, :keep].clone() if keep and not bool(self.mask[:, :keep].all()) else None
        return removed

    def reorder(self, index: list[int]) -> None:
        """Row i becomes a copy of the old row index[i]."""
        if self.mask is not None:
            self.mask = self.mask[torch.tensor(index, dtype=torch.long, device=self.mask.device)]

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]
