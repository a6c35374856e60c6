# SPDX-License-Identifier: Apache-2.0
"""SAW-INT4 (arXiv 2604.19157): a block-diagonal Hadamard rotation, then asymmetric INT4 token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import OscarError
from ...transform import hadamard
from .base import Baseline, Stored, by_token, check_bits


@dataclass(frozen=True, kw_only=True)
class SawInt4(Baseline):
    """One scale and zero (fp16) for a token's head, after keys have been rotated in blocks of ``order`` channels.

    No windows: every token is quantised. order: 16 in its authors' commands; at most the head, which it must divide.
    rotate_v: values too (off in their default).
    """

    name: str = "saw-int4"
    k_bits: int = 4
    v_bits: int = 4
    order: int = 16
    rotate_v: bool = False

    def __post_init__(self) -> None:
        for side in ("k_bits", "v_bits"):
            check_bits(side, getattr(self, side), (4,))
        if self.order < 1 or self.order & (self.order - 1):
            raise OscarError(f"order={self.order}: a power of two")

    def keys(self, k: Tensor, q: Tensor) -> Stored:
        return self._side(k, self.k_bits, True)

    def values(self, v: Tensor) -> Stored:
        return self._side(v, self.v_bits, self.rotate_v)

    def _side(self, x: Tensor, bits: int, rotate: bool) -> Stored:
        d = x.shape[-1]
        order = min(self.order, d)
        if d % order:
            raise OscarError(f"{self.name}: blocks of {order} channels do not divide a head of {d}")
        if not rotate:
            return by_token(x, bits, d)
        h = hadamard(order, x.dtype).to(x.device)
        stored = by_token((x.unflatten(-1, (-1, order)) @ h).flatten(-2), bits, d)
        back = (stored.hat.unflatten(-1, (-1, order)) @ h.mT).flatten(-2)
        return Stored(back, stored.bits, stored.fixed)


def blocks(d: int, order: int) -> Tensor:
    """The block-diagonal rotation [d, d] in fp64, as one matrix."""
    return torch.block_diag(*[hadamard(order)] * (d // order))
