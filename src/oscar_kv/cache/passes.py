# SPDX-License-Identifier: Apache-2.0
"""What the kernels of all layers need to know of one forward pass, on the device: made once, copied without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pool import upload


@dataclass(frozen=True)
class Reads:
    """New queries that the decode kernel serves, each as a request of its own.

    picks: int64 [m], the queries among the rows·n of the chunk, None where that is all of them. slots: int32 [m], the
    row of each, None where query i is row i's. hist_start, hist_end, seq_len: int32 [m], its own token counted.
    """

    picks: Tensor | None
    slots: Tensor | None
    hist_start: Tensor
    hist_end: Tensor
    seq_len: Tensor


@dataclass(frozen=True)
class Pass:
    """New tokens of a batch: ``counts[row]`` after ``starts[row]`` earlier ones, in n columns.

    start, count: the same as int32 [rows] on the device. order: int64 [rows, n], the columns with the valid ones
    first; None where all are valid. columns: of each row, its valid columns (None: all). reads: rows with few tokens,
    read as if decoded one by one, or None. long: rows with more, which see themselves and the window before exactly.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    n: int
    start: Tensor
    count: Tensor
    order: Tensor | None
    columns: tuple[tuple[int, ...], ...] | None
    reads: Reads | None
    long: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds on the device."""
        r = self.reads
        own = [self.start, self.count, self.order]
        own += [] if r is None else [r.picks, r.slots, r.hist_start, r.hist_end, r.seq_len]
        return [x for x in own if x is not None]

    @classmethod
    def make(
        cls, starts: Sequence[int], counts: Sequence[int], valid: Tensor | None, n: int, *,
        sink: int, recent: int, slack: int, device: torch.device,
    ) -> Pass:  # fmt: skip
        """valid: bool [rows, n] with counts[row] true columns in each row, None where all are."""
        rows, few = len(starts), min(slack + 1, recent)
        columns = None
        if valid is not None:
            columns = tuple(tuple(i for i, ok in enumerate(row) if ok) for row in valid.tolist())
        start, count = upload([list(starts), list(counts)], torch.int32, device).unbind()
        order = None if valid is None else (~valid).to(torch.uint8).argsort(dim=1, stable=True).to(device)
        asked = [
            (row * n + (i if columns is None else columns[row][i]), row, start_of + i)
            for row, (start_of, own) in enumerate(zip(starts, counts, strict=True))
            if own <= few
            for i in range(own)
        ]
        reads = None
        if asked:
            lengths = [p + 1 for _, _, p in asked]
            first = [min(sink, length) for length in lengths]
            last = [min(max(sink, length - recent), length) for length in lengths]
            slots = [row for _, row, _ in asked]
            table = upload([first, last, lengths, slots], torch.int32, device)
            every = len(asked) == rows * n
            reads = Reads(
                None if every else upload([pick for pick, _, _ in asked], torch.int64, device),
                None if every and n == 1 else table[3], table[0], table[1], table[2],
            )  # fmt: skip
        long = tuple(row for row, own in enumerate(counts) if own > few)
        return cls(tuple(starts), tuple(counts), n, start, count, order, columns, reads, long)
