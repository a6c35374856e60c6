# SPDX-License-Identifier: Apache-2.0
"""SGLang's Triton decode attention, where installed."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..shapes import DecodeShape, Shape
from .fa3 import DecodeBf16 as PagedBf16

PLACES = ("sglang.kernels.ops.attention.decode_attention", "sglang.srt.layers.attention.triton_ops.decode_attention")
"""Where ``decode_attention_fwd`` lives: from 0.5.16 on, and before."""
PAGE = 64


class Decode(PagedBf16):
    """A cache [tokens, kv_heads, d], addressed token by token. SGLang's default is 8 splits."""

    def missing(self) -> str | None:
        if importlib.util.find_spec("sglang") is None:
            return "SGLang is not installed (pip install sglang)"
        return None if torch.cuda.is_available() else "it needs a CUDA device"

    def ways(self, shape: Shape) -> list[str]:
        return ["8 splits", "16 splits", "32 splits"]

    def prepare(self, shape: Shape) -> None:
        s = cast(DecodeShape, shape)
        self.make_inputs(s)
        for place in PLACES:
            try:
                self.decode = importlib.import_module(place).decode_attention_fwd
                break
            except ModuleNotFoundError:
                if place == PLACES[-1]:
                    raise
        token = torch.arange(PAGE, device=self.options.device)
        places = self.tables[PAGE].long()[:, :, None] * PAGE + token
        self.indices = places.flatten(1)[:, : s.context].flatten().contiguous()
        self.starts = torch.arange(s.batch + 1, dtype=torch.int32, device=self.options.device) * s.context

    def measure(self, way: str) -> dict[str, Any]:
        s, splits = self.shape, int(way.split()[0])
        logits = torch.empty(s.batch, s.q_heads, splits, s.head_dim, dtype=torch.float32, device=self.options.device)
        lse = torch.empty(s.batch, s.q_heads, splits, dtype=torch.float32, device=self.options.device)
        counts = torch.full((s.batch,), splits, dtype=torch.int32, device=self.options.device)
        out = torch.empty_like(self.q)

        def call(kv: Tensor) -> Tensor:
            self.decode(
                self.q, kv[0], kv[1], out, self.starts, self.indices, logits, lse, counts, splits, s.head_dim**-0.5,
                1.0, 1.0,
            )  # fmt: skip
            return out

        return self.timed([partial(call, x) for x in self.kv], lambda got: self.error(got, PAGE))
