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


def pack_weight(weight: Tensor) -> Tensor:
    """A [heads, d, d] times a power of two → fp16 [heads, d/16, d/16, 32, 8]: blocks of 16 columns as B fragments.

    Columns lie as rows do (four of a lane in a row of each 16), so that products can be an operand in turn.
    """
    heads, d, _ = weight.shape
    _, exponent = torch.frexp(weight.abs().amax((1, 2)).double())
    down = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), -exponent)
    scaled = (weight.double() * down[:, None, None]).half()
    order = row_order(d, False).to(weight.device)
    x = scaled[:, order][..., order.flatten()].view(heads, d // 16, 4, 2, 2, d // 16, 4, 2, 2)
    # heads, step, quad, row half, row of two, block, column quad, column half, column of two
    return x.permute(0, 5, 1, 6, 8, 2, 7, 3, 4).reshape(heads, d // 16, d // 16, 32, 8).contiguous()


@dataclass(frozen=True)
class Side:
    """One side's centre [heads, d], and with a rotation: its fragments, its fp32 form, centre·rotation, least_norm.

    least_norm [heads]: squared norm of a turned row from which on the kernel's quick products are exact enough. Rows
    shorter than a quarter of the centre lose digits against it, those below 2⁻¹⁰ an element leave fp16's grid.
    """

    centre: Tensor
    rotation: Tensor | None
    factor: Tensor | None
    unscale: Tensor | None
    shift: Tensor | None
    least_norm: Tensor | None

    @classmethod
    def of(cls, centre: Tensor, rotation: Tensor | None, bits: int = 2) -> Side:
        if rotation is None:
            return cls(centre, None, None, None, None, None)
        shift = (centre.double()[:, None] @ rotation.double())[:, 0].float().contiguous()
        # A quick product suffices for rows whose norm is not far below the centre's: 1/4 of it, but 1/2 where many
        # codes lie close to a tie (4 bits) or sums are long.
        ratio = 4 if bits > 3 or centre.shape[-1] > 128 else 16
        least = (centre.double().square().sum(-1) / ratio).clamp(min=centre.shape[-1] * 2.0**-20).float().contiguous()
        return cls(centre, rotation, *pack_factor(rotation, True), shift, least)


@dataclass(frozen=True)
class PreparedTables:
    """All that the kernel reads of a layer. upper is I + U in fp32, metric A in fp16 fragments."""

    k: Side
    v: Side
    upper: Tensor | None
    upper_factor: Tensor | None
    upper_unscale: Tensor | None
    metric: Tensor | None

    @classmethod
    def of(cls, t: StoreTables, k_bits: int = 2, v_bits: int = 2) -> PreparedTables:
        k, v = Side.of(t.k_centre, t.k_rotation, k_bits), Side.of(t.v_centre, t.v_rotation, v_bits)
        if t.upper is None or t.diagonal is None:
            return cls(k, v, None, None, None, None)
        upper = t.upper.double()
        weight = (upper * t.diagonal.double()[:, None]) @ upper.mT
        return cls(k, v, t.upper, *pack_factor(t.upper.triu(1), False), pack_weight(weight))


_prepared: dict[tuple[int, int, int], PreparedTables] = {}


def prepared(tables: StoreTables, k_bits: int, v_bits: int) -> PreparedTables:
    """Made once for each StoreTables, and kept while it lives. OscarError where that would happen inside a capture."""
    key = id(tables), k_bits, v_bits
    found = _prepared.get(key)
    if found is None:
        if tables.k_centre.is_cuda and torch.cuda.is_current_stream_capturing():
            raise OscarError("store: call the kernel once with these tables before a CUDA graph captures it")
        found = _prepared[key] = PreparedTables.of(tables, k_bits, v_bits)
        weakref.finalize(tables, _prepared.pop, key, None)
    return found
