# SPDX-License-Identifier: Apache-2.0
"""TurboQuant (arXiv 2504.19874): a random rotation, then the best scalar quantiser of a random unit vector."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import pi, sqrt
from typing import Literal

import torch
from torch import Tensor

from ...errors import OscarError
from .base import Baseline, Stored, check_bits


@cache
def random_rotation(d: int, seed: int) -> Tensor:
    """Haar-distributed orthogonal matrix [d, d] in fp64: QR of a Gaussian one, signs of R's diagonal taken out."""
    gen = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(d, d, generator=gen, dtype=torch.float64))
    return q * r.diagonal().sign()


@cache
def codebook(d: int, bits: int) -> Tensor:
    """Lloyd–Max centroids, ascending [2^bits] fp64, of one coordinate of a uniform point on the unit sphere in d ≥ 4.

    Its density is proportional to (1 − x²)^((d−3)/2): Beta, and close to a Gaussian of variance 1/d.
    """
    x = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    weight = (1 - x.square()).clamp(min=0).pow((d - 3) / 2)
    mass, moment = weight.cumsum(0), (weight * x).cumsum(0)
    # Cumulative sums make a cell's mean two look-ups. Start: cells of equal mass.
    share = mass / mass[-1]
    edges = torch.searchsorted(share, torch.arange(1, 2**bits, dtype=torch.float64) / 2**bits)
    centres = torch.zeros(2**bits, dtype=torch.float64)
    for _ in range(2000):
        ends = torch.cat([edges.new_zeros(1), edges, edges.new_tensor([len(x) - 1])])
        new = moment[ends].diff() / mass[ends].diff()
        new = (new - new.flip(0)) / 2  # the density is even
        done = bool((new - centres).abs().max() < 1e-9)
        centres = new
        if done:
            break
        edges = torch.searchsorted(x, (centres[1:] + centres[:-1]) / 2)
    return centres


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Baseline):
    """x = ‖x‖·u, the norm in fp16, the rotated u coordinate by coordinate to the nearest Lloyd–Max centroid.

    keys_by: "mse": like values. "product": one bit less of that, and the residual's norm (fp16) with the signs of its
    Gaussian projection (QJL), which makes q·k̂ unbiased. No windows: tokens are quantised as they come.
    The rotation and the projection are drawn once from ``seed`` for all layers and heads: nothing is stored of them.
    """

    name: str = "turboquant-3"
    k_bits: int = 3
    v_bits: int = 3
    keys_by: Literal["mse", "product"] = "mse"
    seed: int = 0

    def __post_init__(self) -> None:
        for side in ("k_bits", "v_bits"):
            check_bits(side, getattr(self, side), (1, 2, 3, 4))
        if self.keys_by not in ("mse", "product"):
            raise OscarError(f"keys_by={self.keys_by!r}: it is 'mse' or 'product'")
        if self.keys_by == "product" and self.k_bits < 2:
            raise OscarError("keys_by='product' spends one bit on signs: k_bits is at least 2")

    def keys(self, k: Tensor, q: Tensor) -> Stored:
        return self._product(k) if self.keys_by == "product" else self._mse(k, self.k_bits)

    def values(self, v: Tensor) -> Stored:
        return self._mse(v, self.v_bits)

    def _mse(self, x: Tensor, bits: int) -> Stored:
        norm = _fp16(x.norm(dim=-1, keepdim=True))
        unit = self._unit(x, bits)
        return Stored(unit * norm, bits * x.numel() + 16 * norm.numel())

    def _unit(self, x: Tensor, bits: int) -> Tensor:
        """x / ‖x‖ through the codebook and back into its own basis."""
        d = x.shape[-1]
        turn = random_rotation(d, self.seed).to(x)
        centres = codebook(d, bits).to(x)
        direction = torch.nn.functional.normalize(x, dim=-1) @ turn
        code = torch.bucketize(direction, (centres[1:] + centres[:-1]) / 2)
        return centres[code] @ turn.mT

    def _product(self, x: Tensor) -> Stored:
        d = x.shape[-1]
        norm = _fp16(x.norm(dim=-1, keepdim=True))
        unit = self._unit(x, self.k_bits - 1)
        rest = torch.nn.functional.normalize(x, dim=-1) - unit
        length = _fp16(rest.norm(dim=-1, keepdim=True))
        gen = torch.Generator().manual_seed(self.seed + 1)
        s = torch.randn(d, d, generator=gen, dtype=torch.float64).to(x)
        signs = torch.where(rest @ s.mT < 0, -1.0, 1.0).to(x.dtype)
        hat = unit + sqrt(pi / 2) / d * length * (signs @ s)
        return Stored(hat * norm, self.k_bits * x.numel() + 16 * (norm.numel() + length.numel()))


def _fp16(x: Tensor) -> Tensor:
    return x.clamp(max=torch.finfo(torch.float16).max).half().to(x.dtype)
