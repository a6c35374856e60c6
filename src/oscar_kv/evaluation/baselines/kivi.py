# SPDX-License-Identifier: Apache-2.0
"""KIVI (arXiv 2402.02750): keys by channel, values by token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Baseline, Stored, Windows, by_channel, by_token, check_bits, check_token_groups

PUBLISHED = Windows(0, 128, key_block=128)


@dataclass(frozen=True, kw_only=True)
class Kivi(Baseline):
    """Keys lie in groups of ``group`` tokens of one channel, because some channels of keys are large throughout; values
    in groups of ``group`` channels of one token. Asymmetric min–max, fp16 scale and zero a group.

    The published residual R = 128: keys are quantised 128 at a time, the newest 128 values stay as they came.
    group: tokens (keys) and channels (values; at most the head) a group. 2 or 4 bits in the paper.
    """

    name: str = "kivi-2"
    k_bits: int = 2
    v_bits: int = 2
    windows: Windows = PUBLISHED
    group: int = 32

    def __post_init__(self) -> None:
        for side in ("k_bits", "v_bits"):
            check_bits(side, getattr(self, side), (2, 3, 4, 8))
        check_token_groups(self.name, self.group, self.windows)

    def keys(self, k: Tensor, q: Tensor) -> Stored:
        return by_channel(k, self.k_bits, self.group)

    def values(self, v: Tensor) -> Stored:
        return by_token(v, self.v_bits, min(self.group, v.shape[-1]))
