# SPDX-License-Identifier: Apache-2.0
"""A dense decoder of Qwen3's build with random weights, written plainly: what surrounds attention in the timings.

RMS norm, joint QKV product, norms of q and k a head, rotary positions, output product, gated MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import SHARPNESS, SPREAD, model_dtype
from .shapes import Shape

ROPE_BASE = 1e6
EPS = 1e-6
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [n, q_heads, d], k, v [n, kv_heads, d] of n new tokens → [n, q_heads, d]."""


@dataclass(frozen=True)
class Block:
    """One layer's weights, each [out, in]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: Tensor
    """[2, hidden]: before attention and before the MLP."""
    qk_norm: Tensor
    """[q_heads + kv_heads, d], fp32, such that attention is peaked (see inputs.py)."""

    @classmethod
    def random(cls, shape: Shape, hidden: int, mlp: int, device: torch.device | str) -> Block:
        d, heads = shape.head_dim, shape.q_heads + 2 * shape.kv_heads
        dtype = model_dtype(device)
        qk_norm = torch.ones(shape.q_heads + shape.kv_heads, d, device=device)
        qk_norm[: shape.q_heads] *= SHARPNESS / SPREAD
        qk_norm[shape.q_heads :] *= SPREAD

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device=device, dtype=dtype).mul_(columns**-0.5)

        return cls(
            weight(heads * d, hidden), weight(hidden, shape.q_heads * d), weight(2 * mlp, hidden), weight(hidden, mlp),
            torch.ones(2, hidden, device=device, dtype=dtype),
            qk_norm,
        )  # fmt: skip


def rope_table(positions: int, d: int, device: torch.device | str) -> Tensor:
    """cos and sin [positions, 2, d/2] in fp32."""
    rates = ROPE_BASE ** (-torch.arange(0, d, 2, device=device, dtype=torch.float64) / d)
    angle = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * rates
    return torch.stack([angle.cos(), angle.sin()], 1).float()


def norm_and_turn(qk: Tensor, weight: Tensor, turn: Tensor) -> Tensor:
    """Norm a head and rotary positions: qk [n, heads, d], turn [n, 2, d/2]."""
    x = F.rms_norm(qk.float(), qk.shape[-1:], eps=EPS) * weight
    a, b = x.chunk(2, -1)
    cos, sin = turn[:, :1], turn[:, 1:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(qk.dtype)


def gated(x: Tensor) -> Tensor:
    """silu(gate)·up of [n, 2·mlp]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Pieces:
    """The elementwise parts, plain or compiled into a kernel each."""

    norm_and_turn: Callable[[Tensor, Tensor, Tensor], Tensor] = norm_and_turn
    gated: Callable[[Tensor], Tensor] = gated

    @classmethod
    def compiled(cls) -> Pieces:
        """With torch.compile, as engines do: fewer launches around attention, for every contender alike."""
        return cls(torch.compile(norm_and_turn, dynamic=False), torch.compile(gated, dynamic=False))


def block_forward(x: Tensor, w: Block, shape: Shape, turn: Tensor, attention: Attention, pieces: Pieces) -> Tensor:
    """One layer on n tokens: x [n, hidden] → [n, hidden]."""
    n, d, hidden = x.shape[0], shape.head_dim, x.shape[-1:]
    qkv = F.linear(F.rms_norm(x, hidden, w.norms[0], EPS), w.qkv).view(n, -1, d)
    qk = pieces.norm_and_turn(qkv[:, : shape.q_heads + shape.kv_heads], w.qk_norm, turn)
    got = attention(qk[:, : shape.q_heads], qk[:, shape.q_heads :], qkv[:, shape.q_heads + shape.kv_heads :])
    x = x + F.linear(got.reshape(n, -1), w.out)
    return x + F.linear(pieces.gated(F.linear(F.rms_norm(x, hidden, w.norms[1], EPS), w.gate_up)), w.down)
