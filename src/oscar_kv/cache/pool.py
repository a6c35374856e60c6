# SPDX-License-Identifier: Apache-2.0
"""A pool of pages with one table a row. Rows that were copied (beams) share pages until they write their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import CacheError


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on the device, without waiting for it."""
    out = torch.tensor(values, dtype=dtype)
    return out.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else out.to(device)


class PagePool:
    """``pages`` uint8 [capacity, kv_heads, page_bytes]; ``tables[row][n]`` is the pool index of the row's n-th page.

    A page is written once, whole, so rows may share it: nothing is ever copied on write. The pool grows to exactly what
    a prompt needs and by two pages a row afterwards: an idle page counts in the bits per element.
    """

    def __init__(self, rows: int, heads: int, page_bytes: int, device: torch.device) -> None:
        self.pages = torch.empty(0, heads, page_bytes, dtype=torch.uint8, device=device)
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self._uses: list[int] = []
        self._free: list[int] = []
        self.version = 0
        """Changes with the tables, so that copies of them on a device know when they are old."""

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    def write(self, rows: Sequence[int], first: int, data: Tensor) -> None:
        """Put pages first … first+n−1 of each of the rows; data uint8 [rows·n, kv_heads, page_bytes], row-major."""
        places = self.claim(rows, first, data.shape[0] // len(rows))
        self.pages[torch.tensor(places, device=self.pages.device)] = data

    def claim(self, rows: Sequence[int], first: int, count: int) -> list[int]:
        """Give each of the rows pages first … first+count−1, to be written by the caller; their places, row-major."""
        for row in rows:
            if len(self.tables[row]) < first:
                raise CacheError(f"row {row} has {len(self.tables[row])} pages, page {first} cannot come next")
            self.truncate(row, first)
        places = self._take(len(rows) * count, len(rows))
        for i, row in enumerate(rows):
            self.tables[row] += places[i * count : (i + 1) * count]
        self.version += 1
        return places

    def read(self, row: int, first: int, last: int) -> Tensor:
        """Pages first … last−1 of a row, uint8 [last−first, kv_heads, page_bytes] (a view where they lie in order)."""
        places = self.tables[row][first:last]
        if len(places) < last - first:
            raise CacheError(f"row {row} has {len(self.tables[row])} pages, {last} are asked for")
        if places and places == list(range(places[0], places[0] + len(places))):
            return self.pages[places[0] : places[0] + len(places)]
        return self.pages[torch.tensor(places, dtype=torch.long, device=self.pages.device)]

    def truncate(self, row: int, count: int) -> None:
        """Give back the row's pages from number ``count`` on."""
        if len(self.tables[row]) > count:
            self.version += 1
        for place in self.tables[row][count:]:
            self._uses[place] -= 1
            if not self._uses[place]:
                self._free.append(place)
        del self.tables[row][count:]

    def reorder(self, index: Sequence[int]) -> None:
        """Row i becomes a copy of the old row index[i]; the number of rows may change."""
        self.tables = [list(self.tables[i]) for i in index]
        self._uses = [0] * len(self.pages)
        for table in self.tables:
            for place in table:
                self._uses[place] += 1
        self._free = [place for place, uses in enumerate(self._uses) if not uses]
        self.version += 1
        self.shrink()

    def shrink(self) -> None:
        """Return memory once more than two pages a row and an eighth of the pool lie idle."""
        idle = len(self._free)
        if idle <= 2 * len(self.tables) or idle * 8 <= len(self.pages):
            return
        kept = sorted({place for table in self.tables for place in table})
        new = {place: i for i, place in enumerate(kept)}
        self.pages = self.pages[torch.tensor(kept, dtype=torch.long, device=self.pages.device)]
        self.tables = [[new[place] for place in table] for table in self.tables]
        self._uses, self._free = [self._uses[place] for place in kept], []
        self.version += 1

    def block_table(self, lead: int) -> Tensor:
        """int32 [rows, lead + most pages of a row] on the pool's device; the first ``lead`` columns are never read."""
        width = lead + max(len(table) for table in self.tables)
        rows = [[0] * lead + table + [0] * (width - lead - len(table)) for table in self.tables]
        return upload(rows, torch.int32, self.pages.device)

    def reserve(self, count: int) -> None:
        """Make room for ``count`` pages beyond those in use, and no more."""
        self._grow(count - len(self._free))

    def _grow(self, missing: int) -> None:
        if missing > 0:
            old = len(self.pages)
            grown = self.pages.new_empty(old + missing, *self.pages.shape[1:])
            grown[:old] = self.pages
            self.pages = grown
            self._uses += [0] * missing
            self._free += range(old, old + missing)

    def _take(self, count: int, rows: int) -> list[int]:
        missing = count - len(self._free)
        self._grow(missing + rows if missing > 0 and len(self.pages) else missing)
        self._free.sort()  # neighbours in a text become neighbours in memory
        places, self._free = self._free[:count], self._free[count:]
        for place in places:
            self._uses[place] = 1
        return places


class FixedPool(PagePool):
    """A pool whose pages all exist from the start: page n of row r lies at place r·capacity + n, whatever happens."""

    def __init__(self, rows: int, heads: int, page_bytes: int, device: torch.device, capacity: int) -> None:
        super().__init__(rows, heads, page_bytes, device)
        self.capacity = capacity
        # Whoever compares caches byte by byte should not meet what lay in memory before.
        self.pages = torch.zeros(rows * max(1, capacity), heads, page_bytes, dtype=torch.uint8, device=device)

    def claim(self, rows: Sequence[int], first: int, count: int) -> list[int]:
        if first + count > self.capacity:
            raise CacheError(f"the cache has room for {self.capacity} pages a row, {first + count} are needed")
        places = []
        for row in rows:
            if len(self.tables[row]) < first:
                raise CacheError(f"row {row} has {len(self.tables[row])} pages, page {first} cannot come next")
            self.hold(row, first + count)
            places += self.tables[row][first:]
        return places

    def hold(self, row: int, count: int) -> None:
        """Let a row have exactly ``count`` pages."""
        self.tables[row] = list(range(row * self.capacity, row * self.capacity + count))

    def truncate(self, row: int, count: int) -> None:
        del self.tables[row][count:]

    def block_table(self, lead: int) -> Tensor:
        """int32 [rows, lead + capacity], for ever the same."""
        rows = len(self.tables)
        own = torch.arange(rows * self.capacity, dtype=torch.int32, device=self.pages.device).view(rows, self.capacity)
        return torch.cat([own.new_zeros(rows, lead), own], 1).contiguous()

    def shrink(self) -> None:
        """Nothing is ever returned."""

    def reserve(self, count: int) -> None:
        """Everything is reserved already."""

    def reorder(self, index: Sequence[int]) -> NoReturn:
        raise CacheError("a cache of a fixed length cannot reorder its rows: leave max_cache_len out")
