# SPDX-License-Identifier: Apache-2.0
"""One layer's keys and values for a ragged batch: raw sink, raw ring of recent tokens, packed pages.

Positions count the valid tokens of a row from 0. Page j holds positions 64j … 64j+63; it is written when its 64th token
has come, from raw rows, so its bytes do not depend on how a text was cut into chunks. Where the history ends is a
number, not a move of bytes: a page is there long before its tokens leave the recent window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..codec import LayerCodec
from ..errors import CacheError
from ..kernels.base import StoreKernel, StoreTables, Windows
from ..layout import PAGE
from .passes import Pass
from .pool import FixedPool, PagePool


def ring_segments(start: int, stop: int, rows: int) -> list[tuple[slice, slice]]:
    """(slice of the ring, slice of the range) pairs that place positions start … stop−1 at position mod rows."""
    out, at = [], start
    while at < stop:
        slot = at % rows
        end = min(stop, at + rows - slot)
        out.append((slice(slot, slot + end - at), slice(at - start, end - start)))
        at = end
    return out


class MixedLayer:
    """Buffers of one layer. k and v are post-RoPE rows in the model's dtype.

    sink_k, sink_v [rows, kv_heads, sink, d]: positions 0 … sink−1. ring_k, ring_v [rows, kv_heads, recent+slack, d]:
    position p in place p mod (recent+slack). pool: pages, those wholly inside the sink left out. lengths: valid tokens
    a row. raw_from: first position whose ring rows are there (``max(0, length − recent − slack)``, later after a crop).

    writer: the kernel that writes new tokens and its tables; None: the codec does. fixed: tokens a row for which all
    pages are made at once, in places that never change; None: the pool grows.
    """

    def __init__(
        self,
        codec: LayerCodec,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        writer: tuple[StoreKernel, StoreTables] | None = None,
        fixed: int | None = None,
    ) -> None:
        recipe, heads = codec.recipe, codec.num_kv_heads
        self.codec, self.dtype, self.device = codec, dtype, device
        self.sink, self.recent, self.ring = recipe.sink, recipe.recent, recipe.recent + recipe.slack
        self.slack, self.first_page = recipe.slack, recipe.sink // PAGE

        def buffer(length: int, d: int) -> Tensor:
            return torch.zeros(rows, heads, length, d, dtype=dtype, device=device)

        layout = codec.layout
        self.sink_k, self.sink_v = buffer(self.sink, layout.k_dim), buffer(self.sink, layout.v_dim)
        self.ring_k, self.ring_v = buffer(self.ring, layout.k_dim), buffer(self.ring, layout.v_dim)
        if fixed is None:
            self.pool = PagePool(rows, heads, layout.page_bytes, device)
        else:
            self.pool = FixedPool(rows, heads, layout.page_bytes, device, max(0, fixed // PAGE - self.first_page))
        self.lengths, self.raw_from = [0] * rows, [0] * rows
        self.writer = writer
        self._table: tuple[int, Tensor] | None = None

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Sum of all tensors, in bytes."""
        return self.window_nbytes + self.pool.nbytes

    @property
    def window_nbytes(self) -> int:
        return sum(t.nbytes for t in (self.sink_k, self.sink_v, self.ring_k, self.ring_v))

    @property
    def elements(self) -> int:
        """Key and value elements held: valid tokens × KV heads × (k_dim + v_dim)."""
        layout = self.codec.layout
        return sum(self.lengths) * self.codec.num_kv_heads * (layout.k_dim + layout.v_dim)

    def history_end(self, position: int) -> int:
        """Where the history of the query at ``position`` ends: it reads codes of [sink, this), raw rows after."""
        return max(self.sink, position + 1 - self.recent)

    @property
    def table_nbytes(self) -> int:
        return 0 if self._table is None else self._table[1].nbytes

    @property
    def windows(self) -> Windows:
        """Sink and ring as the kernels take them, row i in slot i."""
        return Windows(self.sink_k, self.sink_v, self.ring_k, self.ring_v)

    def block_table(self) -> Tensor:
        """int32 [rows, pages] on the device, page n of a row in column n; made anew only when pages have changed."""
        if self._table is None or self._table[0] != self.pool.version:
            table = self.pool.block_table(self.first_page)
            if not table.shape[1]:
                table = table.new_zeros(self.rows, 1)
            self._table = self.pool.version, table
        return self._table[1]

    def new_pass(self, counts: Sequence[int], valid: Tensor | None, n: int) -> Pass:
        """What the kernels need to know of ``counts[row]`` tokens that come next, in n columns."""
        return Pass.make(
            self.lengths, counts, valid, n,
            sink=self.sink, recent=self.recent, slack=self.slack, device=self.device,
        )  # fmt: skip

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None = None, step: Pass | None = None) -> None:
        """New rows k [rows, kv_heads, n, k_dim], v [rows, kv_heads, n, v_dim]; valid bool [rows, n], None = all.

        step: what the layers of a forward pass share, where the caller has it. Raises CacheError for another shape or
        dtype.
        """
        layout, heads = self.codec.layout, self.codec.num_kv_heads
        for name, x, d in (("k", k, layout.k_dim), ("v", v, layout.v_dim)):
            if x.shape[0] != self.rows or x.shape[1] != heads or x.shape[3] != d or x.dtype != self.dtype:
                raise CacheError(
                    f"{name} is {list(x.shape)} {x.dtype}; this layer holds {self.rows} rows of {heads} KV heads × {d} "
                    f"in {self.dtype}: use one cache a batch and a model"
                )
        if self.writer is not None:
            if step is None:
                counts = [k.shape[2]] * self.rows if valid is None else valid.sum(1).tolist()
                step = self.new_pass(counts, valid, k.shape[2])
            self._append_by_kernel(k, v, step)
            return
        if valid is None and len(set(self.lengths)) == 1:
            self._append(range(self.rows), k, v)
            return
        for row in range(self.rows):
            one = slice(row, row + 1)
            if valid is None:
                self._append(range(row, row + 1), k[one], v[one])
            elif keep := valid[row].nonzero()[:, 0].tolist():
                pick = slice(None) if len(keep) == valid.shape[1] else torch.tensor(keep, device=k.device)
                self._append(range(row, row + 1), k[one, :, pick], v[one, :, pick])

    def _append_by_kernel(self, k: Tensor, v: Tensor, step: Pass) -> None:
        assert self.writer is not None
        kernel, tables = self.writer
        alike = len(set(zip(step.starts, step.counts, strict=True))) == 1
        for rows in [range(self.rows)] if alike else [range(row, row + 1) for row in range(self.rows)]:
            start = step.starts[rows.start]
            first, last = max(start // PAGE, self.first_page), (start + step.counts[rows.start]) // PAGE
            if last > first:
                self.pool.claim(rows, first - self.first_page, last - first)
        if step.order is not None:
            at = step.order[:, None, :, None]
            k, v = (x.gather(2, at.expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v))
        kernel(
            k, v, self.pool.pages, self.block_table(), step.start, step.count, self.windows, tables, self.codec.layout
        )
        for row, count in enumerate(step.counts):
            self.lengths[row] += count
            self.raw_from[row] = max(self.raw_from[row], self.lengths[row] - self.ring)

    def _append(self, rows: range, k: Tensor, v: Tensor) -> None:
        """Rows of one length."""
        start, count = self.lengths[rows.start], k.shape[2]
        stop, part = start + count, slice(rows.start, rows.stop)
        first, last = max(start // PAGE, self.first_page), stop // PAGE
        if last > first:
            lead = first * PAGE
            new = slice(max(lead - start, 0), last * PAGE - start)
            page_k, page_v = k[:, :, new], v[:, :, new]
            if lead < start:
                old_k, old_v = self._raw(part, lead, start)
                page_k, page_v = torch.cat([old_k, page_k], 2), torch.cat([old_v, page_v], 2)
            self.pool.write(rows, first - self.first_page, self.codec.encode(self._pages(page_k), self._pages(page_v)))
        if start < self.sink:
            head = min(stop, self.sink)
            self.sink_k[part, :, start:head] = k[:, :, : head - start]
            self.sink_v[part, :, start:head] = v[:, :, : head - start]
        tail = max(start, stop - self.ring)
        for place, source in ring_segments(tail, stop, self.ring):
            self.ring_k[part, :, place] = k[:, :, tail - start :][:, :, source]
            self.ring_v[part, :, place] = v[:, :, tail - start :][:, :, source]
        for row in rows:
            self.lengths[row] = stop
            self.raw_from[row] = max(self.raw_from[row], stop - self.ring)

    @staticmethod
    def _pages(x: Tensor) -> Tensor:
        """[rows, heads, n·64, d] → [rows·n, heads, 64, d]."""
        rows, heads, length, d = x.shape
        return x.reshape(rows, heads, length // PAGE, PAGE, d).transpose(1, 2).reshape(-1, heads, PAGE, d).contiguous()

    def raw(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Raw k, v [kv_heads, stop−start, d] of positions start … stop−1. CacheError where they are no longer raw."""
        if stop > self.lengths[row] or min(max(start, self.sink), stop) < min(self.raw_from[row], stop):
            raise CacheError(
                f"positions {start} to {stop} of row {row} are not held raw: the sink is {self.sink} tokens, the ring "
                f"holds {self.raw_from[row]} to {self.lengths[row]}"
            )
        k, v = self._raw(slice(row, row + 1), start, stop)
        return k[0], v[0]

    def _raw(self, part: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        ks, vs = [], []
        if start < self.sink:
            end = min(stop, self.sink)
            ks, vs = [self.sink_k[part, :, start:end]], [self.sink_v[part, :, start:end]]
            start = end
        for place, _ in ring_segments(start, stop, self.ring):
            ks.append(self.ring_k[part, :, place])
            vs.append(self.ring_v[part, :, place])
        if not ks:
            return self.ring_k[part, :, :0], self.ring_v[part, :, :0]
        return (ks[0], vs[0]) if len(ks) == 1 else (torch.cat(ks, 2), torch.cat(vs, 2))

    def pages(self, row: int, start: int, stop: int) -> tuple[Tensor, int]:
        """Pages that hold positions start … stop−1 of a row, uint8 [n, kv_heads, page_bytes], and the first number."""
        first = start // PAGE
        return self.pool.read(row, first - self.first_page, -(-stop // PAGE) - self.first_page), first

    def crop(self, remove: Sequence[int]) -> bool:
        """Take the last remove[row] tokens of each row back.

        Up to slack + 1 tokens leave the layer as if they had never come. Deeper, tokens that were already outside the
        ring come back from their codes: ring rows (and so the page that they reopen) are then no longer exact. Returns
        whether that happened. Tokens in the sink are always exact.
        """
        restored = False
        for row, count in enumerate(remove):
            if count <= 0:
                continue
            length = max(0, self.lengths[row] - count)
            oldest, raw_from = max(0, length - self.ring), self.raw_from[row]
            if raw_from > max(0, length + 1 - self.recent):
                restored |= self._restore(row, oldest, min(raw_from, length))
                self.raw_from[row] = oldest
            self.lengths[row] = length
            self.pool.truncate(row, max(0, length // PAGE - self.first_page))
        self.pool.shrink()
        return restored

    def _restore(self, row: int, start: int, stop: int) -> bool:
        """Fill ring places of positions start … stop−1 from the sink (exact) or from pages; whether codes were used."""
        part = slice(row, row + 1)
        edge = min(max(start, self.sink), stop)
        if edge > start:
            self._fill(part, start, self.sink_k[part, :, start:edge], self.sink_v[part, :, start:edge])
        if stop <= edge:
            return False
        pages, first = self.pages(row, edge, stop)
        k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in self.codec.decode(pages))
        inside = slice(edge - first * PAGE, stop - first * PAGE)
        self._fill(part, edge, k[:, :, inside].to(self.dtype), v[:, :, inside].to(self.dtype))
        return True

    def _fill(self, part: slice, start: int, k: Tensor, v: Tensor) -> None:
        for place, source in ring_segments(start, start + k.shape[2], self.ring):
            self.ring_k[part, :, place], self.ring_v[part, :, place] = k[:, :, source], v[:, :, source]

    def reorder(self, index: Sequence[int]) -> None:
        """Row i becomes a copy of the old row index[i] (beams); the number of rows may change (repeat, select)."""
        place = torch.tensor(list(index), dtype=torch.long, device=self.device)
        for name in ("sink_k", "sink_v", "ring_k", "ring_v"):
            setattr(self, name, getattr(self, name).index_select(0, place))
        self.lengths = [self.lengths[i] for i in index]
        self.raw_from = [self.raw_from[i] for i in index]
        self.pool.reorder(index)

    def repeat(self, repeats: int) -> None:
        """Each row ``repeats`` times, copies side by side."""
        self.reorder([row for row in range(self.rows) for _ in range(repeats)])

    def state(self) -> dict[str, Tensor]:
        """All that ``load_state`` needs, as tensors: pages of each row in turn, their count from the lengths."""
        pages = [self.pool.read(row, 0, len(self.pool.tables[row])) for row in range(self.rows)]
        windows = {name: getattr(self, name) for name in ("sink_k", "sink_v", "ring_k", "ring_v")}
        return {
            **windows,
            "pages": torch.cat(pages),
            "lengths": torch.tensor(self.lengths, dtype=torch.int64),
            "raw_from": torch.tensor(self.raw_from, dtype=torch.int64),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what ``state`` gave, into a layer with as many rows. CacheError for other shapes or dtypes."""
        lengths, raw_from = state["lengths"].tolist(), state["raw_from"].tolist()
        counts = [max(0, n // PAGE - self.first_page) for n in lengths]
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(getattr(self, name).shape), self.dtype) for name in ("sink_k", "sink_v", "ring_k", "ring_v")
        }
        expected["pages"] = ((sum(counts), *self.pool.pages.shape[1:]), torch.uint8)
        for name, (shape, dtype) in expected.items():
            have = state[name]
            if tuple(have.shape) != shape or have.dtype != dtype:
                raise CacheError(f"{name} is {tuple(have.shape)} {have.dtype}, expected {shape} {dtype}")
        if len(raw_from) != len(lengths) or any(not 0 <= a <= n for a, n in zip(raw_from, lengths, strict=True)):
            raise CacheError("raw_from does not fit lengths")
        for name in ("sink_k", "sink_v", "ring_k", "ring_v"):
            getattr(self, name).copy_(state[name])
        self.lengths, self.raw_from = lengths, raw_from
        at = 0
        for row in range(len(counts)):
            self.pool.truncate(row, 0)
        self.pool.reserve(sum(counts))
        for row, count in enumerate(counts):
            if count:
                self.pool.write([row], 0, state["pages"][at : at + count].to(self.device))
            at += count
