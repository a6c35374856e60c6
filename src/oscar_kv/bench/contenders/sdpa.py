# SPDX-License-Identifier: Apache-2.0
"""PyTorch's scaled_dot_product_attention over a contiguous cache in 16 bits (FP32 on the CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..inputs import SPREAD, model_dtype, queries, sets_for
from ..reference import dense_reference, relative_error
from ..shapes import DecodeShape, Shape
from .base import Contender

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}


class Decode(Contender):
    """k, v [batch, kv_heads, context, d]. The math back end is for the CPU: on a GPU it copies the cache a head."""

    def ways(self, shape: Shape) -> list[str]:
        return ["flash", "cudnn"] if self.options.on_gpu else ["math"]

    def bytes(self, shape: Shape) -> int:
        return cast(DecodeShape, shape).dense_bytes(2)

    def prepare(self, shape: Shape) -> None:
        shape, device = cast(DecodeShape, shape), self.options.device
        size = (2, shape.batch, shape.kv_heads, shape.context, shape.head_dim)
        sets = min(4, sets_for(shape.dense_bytes(2), device)) if shape.batch < 8 else 2
        self.kv = [torch.randn(*size, device=device, dtype=model_dtype(device)).mul_(SPREAD) for _ in range(sets)]
        self.q = queries(shape, shape.batch, device=device)

    def measure(self, way: str) -> dict[str, Any]:
        def call(kv: Tensor) -> Callable[[], Tensor]:
            def run() -> Tensor:
                with sdpa_kernel(BACKENDS[way]):
                    return torch.nn.functional.scaled_dot_product_attention(
                        self.q[:, :, None], kv[0], kv[1], enable_gqa=True
                    )[:, :, 0]

            return run

        k, v = (x[-1].transpose(0, 1) for x in self.kv[0])
        return self.timed(
            [call(x) for x in self.kv], lambda out: relative_error(out[-1], dense_reference(self.q[-1:], k, v)[0])
        )
