# SPDX-License-Identifier: Apache-2.0
"""One layer of Qwen3-8B's shape on a whole prompt, with each dense attention: what writing pages is a share of."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..qwen import Block, Pieces, block_forward, rope_table
from ..reference import causal_reference, relative_error
from ..shapes import ModelShape, PromptShape, Shape
from .base import Contender
from .dense import attention, missing_attend, sampled


class PromptLayer(Contender):
    """``chunk`` tokens at position 0. The attention's answer is checked on sampled rows."""

    attend: ClassVar[str]

    def missing(self) -> str | None:
        return missing_attend(self.attend, self.options)

    def bytes(self, shape: Shape) -> int:
        return 0  # arithmetic decides here

    def prepare(self, shape: Shape) -> None:
        self.shape, device = cast(PromptShape, shape), self.options.device
        model = ModelShape() if self.options.on_gpu else ModelShape(hidden=64, mlp=96, layers=1, vocab=64)
        self.block = Block.random(self.shape, model.hidden, model.mlp, device)
        self.x = torch.randn(self.shape.chunk, model.hidden, device=device, dtype=self.block.out.dtype)
        self.turn = rope_table(self.shape.chunk, self.shape.head_dim, device)
        self.call = attention(self.attend, self.options)

    def measure(self, way: str) -> dict[str, Any]:
        seen: list[Tensor] = []
        pieces = Pieces.compiled() if self.options.compiled else Pieces()

        def watched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen[:] = [q, k, v, self.call(q, k, v)]
            return seen[3]

        with torch.no_grad():
            block_forward(self.x, self.block, self.shape, self.turn, watched, pieces)
            rows = sampled(self.shape.chunk)
            q, k, v, got = seen
            error = relative_error(got[rows], causal_reference(q, k, v, rows))
            del q, k, v, got
            seen.clear()
            forward = partial(block_forward, self.x, self.block, self.shape, self.turn, self.call, pieces)
            return self.timed([forward], lambda _: error)


class Fa3Layer(PromptLayer):
    attend = "fa3"


class CudnnLayer(PromptLayer):
    attend = "cudnn"


class Fa2Layer(PromptLayer):
    attend = "fa2"


class MathLayer(PromptLayer):
    attend = "plain"
