# SPDX-License-Identifier: Apache-2.0
"""SQuat (arXiv 2503.24358): keys' errors kept away from the directions that the prompt's queries look along."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import OscarError
from .base import Baseline, Groups, Stored, Windows, by_token, check_bits, check_token_groups

PUBLISHED = Windows(0, 32, key_block=32)


@dataclass(frozen=True, kw_only=True)
class Squat(Baseline):
    """Minimises ‖e‖² + λ‖Q̂e‖² of a key's error e, where Q̂ = S_r V_rᵀ holds the ``rank`` leading singular directions of
    the prompt's queries, those of all query heads of a KV head together.

    Channels are quantised ``block`` at a time; what a block's error can no longer be helped, the blocks after it take
    into account in closed form. Inside a block it is KIVI: groups of ``group`` tokens of one channel, asymmetric
    min–max, fp16 scale and zero. Values as in KIVI. block is at most half the head, else nothing would be left to
    correct.
    """

    name: str = "squat-2"
    k_bits: int = 2
    v_bits: int = 2
    windows: Windows = PUBLISHED
    group: int = 32
    block: int = 64
    rank: int = 60
    weight: float = 0.001

    def __post_init__(self) -> None:
        for side in ("k_bits", "v_bits"):
            check_bits(side, getattr(self, side), (2, 3, 4))
        check_token_groups(self.name, self.group, self.windows)
        if self.block < 1 or self.rank < 1 or self.weight < 0:
            raise OscarError(f"{self.name}: block and rank are at least 1 and weight at least 0")

    def keys(self, k: Tensor, q: Tensor) -> Stored:
        d, heads = k.shape[-1], k.shape[1]
        lead = leading_queries(q, heads, min(self.rank, d)).to(k.dtype)
        eye = torch.eye(d, dtype=k.dtype, device=k.device)
        metric = eye + self.weight * lead.mT @ lead
        count = k.shape[2] // self.group
        whole = count * self.group
        rows, block = k[:, :, :whole], min(self.block, d // 2)
        hat, bits = torch.zeros_like(rows), 0
        for start in range(0, d, block):
            stop = min(start + block, d)
            target = rows[..., start:stop]
            if start:
                # Errors of the later channels that best undo the earlier ones': −A₂₂⁻¹ A₂₁ e₁; of it, this block's.
                done = rows[..., :start] - hat[..., :start]
                undo = torch.linalg.solve(metric[..., start:, start:], metric[..., start:, :start])
                target = target + done @ undo[..., : stop - start, :].mT
            groups = Groups.of(target.unflatten(2, (count, self.group)).transpose(-1, -2), self.k_bits)
            hat[..., start:stop] = groups.hat.transpose(-1, -2).flatten(2, 3)
            bits += groups.bits
        tail = k[:, :, whole:]
        return Stored(torch.cat([hat, tail], 2), bits + 16 * tail.numel(), 16 * lead.numel())

    def values(self, v: Tensor) -> Stored:
        return by_token(v, self.v_bits, min(self.group, v.shape[-1]))


def leading_queries(q: Tensor, kv_heads: int, rank: int) -> Tensor:
    """S_r V_rᵀ [B, Hkv, rank, d] of q [B, Hq, m, d], the query heads of a KV head stacked; fp64 inside."""
    rows = q.double().unflatten(1, (kv_heads, -1)).flatten(2, 3)
    values, vectors = torch.linalg.eigh(rows.mT @ rows)
    keep = slice(values.shape[-1] - rank, None)
    return (vectors[..., keep] * values[..., None, keep].clamp(min=0).sqrt()).mT.flip(-2)
