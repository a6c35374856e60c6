# SPDX-License-Identifier: Apache-2.0
"""A layer's rotation and feedback matrices in the order in which the store kernel's tensor cores take them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import OscarError
from ..base import StoreTables


def row_order(d: int, steps_of_32: bool) -> Tensor:
    """Dimensions [d/16, 4, 4]: the four of lane ``quad`` in each 16-dimension step of a product.

    steps_of_32: a lane has eight dimensions in a row of each 32 (a 16-byte load of a raw row), four a step; the last 16
    of an odd number of steps, and all where False: four in a row of each 16.
    """
    quad, i = torch.arange(4)[:, None], torch.arange(4)[None]
    full = d // 32 * 2 if steps_of_32 else 0
    steps = [32 * (s // 2) + 8 * quad + 4 * (s % 2) + i if s < full else 16 * s + 4 * quad + i for s in range(d // 16)]
    return torch.stack(steps)


def pack_factor(matrix: Tensor, steps_of_32: bool) -> tuple[Tensor, Tensor]:
    """fp32 [heads, d, e] → fp16 [heads, d/16, e/8, 32, 8] as B fragments of m16n8k16, and its power of two [heads].

    A lane's eight numbers: four of the high parts, four of the low ones; matrix ≈ (high + low) · power, to 2⁻²³ of it.
    """
    heads, d, e = matrix.shape
    _, exponent = torch.frexp(matrix.abs().amax((1, 2)).double())
    up = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), 14 - exponent)
    scaled = matrix.double() * up[:, None, None]
    high = scaled.half()
    low = (scaled - high.double()).half()
    order = row_order(d, steps_of_32).to(matrix.device)

    def fragments(x: Tensor) -> Tensor:
        x = x[:, order].view(heads, d // 16, 4, 4, e // 8, 8)
        return x.permute(0, 1, 4, 5, 2, 3).reshape(heads, d // 16, e // 8, 32, 4)

    return torch.cat([fragments(high), fragments(low)], -1).contiguous(), (1 / up).float().contiguous()


@dataclass(frozen=True)
class Side:
    """One side's centre [heads, d], and with a rotation: its fragments, its fp32 form, centre·rotation, least_norm.

    least_norm [heads]: squared norm of a turned row from which on the kernel's quick products are exact enough. Shorter
    rows than a quarter of the centre lose digits against it, and rows below 2⁻¹⁰ an element have parts below fp16's grid.
    """

    centre: Tensor
    rotation: Tensor | None
    factor: Tensor | None
    unscale: Tensor | None
    shift: Tensor | None
    least_norm: Tensor | None

    @classmethod
    def of(cls, centre: Tensor, rotation: Tensor | None) -> Side:
        if rotation is None:
            return cls(centre, None, None, None, None, None)
        shift = (centre.double()[:, None] @ rotation.double())[:, 0].float().contiguous()
        least = (centre.double().square().sum(-1) / 16).clamp(min=centre.shape[-1] * 2.0**-20).float().contiguous()
        return cls(centre, rotation, *pack_factor(rotation, True), shift, least)


@dataclass(frozen=True)
class PreparedTables:
    """All that the kernel reads of a layer. upper is I + U in fp32; metric [heads, dk, 2]: its column sums, and D."""

    k: Side
    v: Side
    upper: Tensor | None
    upper_factor: Tensor | None
    upper_unscale: Tensor | None
    metric: Tensor | None

    @classmethod
    def of(cls, t: StoreTables) -> PreparedTables:
        k, v = Side.of(t.k_centre, t.k_rotation), Side.of(t.v_centre, t.v_rotation)
        if t.upper is None or t.diagonal is None:
            return cls(k, v, None, None, None, None)
        metric = torch.stack([t.upper.double().sum(1).float(), t.diagonal], -1).contiguous()
        return cls(k, v, t.upper, *pack_factor(t.upper.triu(1), False), metric)


_prepared: dict[int, PreparedTables] = {}


def prepared(tables: StoreTables) -> PreparedTables:
    """Made once for each StoreTables, and kept while it lives. OscarError where that would happen inside a capture."""
    found = _prepared.get(id(tables))
    if found is None:
        if tables.k_centre.is_cuda and torch.cuda.is_current_stream_capturing():
            raise OscarError("store: call the kernel once with these tables before a CUDA graph captures it")
        found = _prepared[id(tables)] = PreparedTables.of(tables)
        weakref.finalize(tables, _prepared.pop, id(tables), None)
    return found
