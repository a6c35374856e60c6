# SPDX-License-Identifier: Apache-2.0
"""FP8 (e4m3), the 8-bit cache of vLLM, SGLang and TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...errors import OscarError
from .base import Baseline, Stored

LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, kw_only=True)
class Fp8(Baseline):
    """x̂ = scale · e4m3(x / scale), saturating at ±448·scale; every token is quantised, the query's own too.

    scale: "tensor": largest |x| of the layer's keys (values) / 448, as after calibration; "head": one a KV head;
    "unit": 1, what engines take for a checkpoint without scales. fp32, once a request.
    """

    name: str = "fp8"
    k_bits: int = 8
    v_bits: int = 8
    scale: Literal["tensor", "head", "unit"] = "tensor"

    def __post_init__(self) -> None:
        if (self.k_bits, self.v_bits) != (8, 8):
            raise OscarError("FP8 has 8 bits")
        if self.scale not in ("tensor", "head", "unit"):
            raise OscarError(f"scale={self.scale!r}: it is 'tensor', 'head' or 'unit'")

    def keys(self, k: Tensor, q: Tensor) -> Stored:
        return self._side(k)

    def values(self, v: Tensor) -> Stored:
        return self._side(v)

    def _side(self, x: Tensor) -> Stored:
        if self.scale == "unit":
            scale = torch.ones((), dtype=torch.float32, device=x.device)
        else:
            largest = x.abs().amax((2, 3) if self.scale == "head" else (1, 2, 3), keepdim=True)
            scale = (largest.float() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        code = (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        fixed = 0 if self.scale == "unit" else 32 * scale.numel()
        return Stored((code.float() * scale).to(x.dtype), 8 * code.numel(), fixed)
