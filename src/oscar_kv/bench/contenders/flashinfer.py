# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's batch decode over a paged cache, where installed. It compiles at first use, outside the timing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ..shapes import DecodeShape, Shape
from .base import BF16_LIMIT
from .fa3 import DecodeBf16 as PagedBf16

PAGE = 64
WORKSPACE = 512 << 20
"""Bytes of its split-KV workspace."""


def why_no_flashinfer() -> str | None:
    """Why FlashInfer cannot be called here, or None."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install flashinfer-python)"
    return None if torch.cuda.is_available() else "it needs a CUDA device"


class DecodeBf16(PagedBf16):
    """``BatchDecodeWithPagedKVCacheWrapper`` in CUDA-graph mode, on tensor cores (with a group of heads the faster)."""

    def missing(self) -> str | None:
        return why_no_flashinfer()

    def ways(self, shape: Shape) -> list[str]:
        return ["tensor cores, fa2"]

    def prepare(self, shape: Shape) -> None:
        import flashinfer  # type: ignore[import-not-found]

        s = cast(DecodeShape, shape)
        self.make_inputs(s)
        self.q = self.q.to(torch.bfloat16)
        device, table, pages = self.options.device, self.tables[PAGE], -(-s.context // PAGE)
        indices = table[:, :pages].reshape(-1).contiguous()
        starts = torch.arange(s.batch + 1, dtype=torch.int32) * pages
        last = torch.full((s.batch,), (s.context - 1) % PAGE + 1, dtype=torch.int32)
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, backend="fa2",
            paged_kv_indptr_buffer=starts.to(device), paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.to(device),
        )  # fmt: skip
        self.wrapper.plan(
            starts, indices, last, s.q_heads, s.kv_heads, s.head_dim, PAGE, q_data_type=torch.bfloat16,
            kv_data_type=self.dtype,
        )  # fmt: skip

    def _call(self, way: Any, kv: Tensor) -> Callable[[], Tensor]:
        s = self.shape
        k, v = (x.view(-1, PAGE, s.kv_heads, s.head_dim) for x in kv)
        out = torch.empty_like(self.q)

        def call() -> Tensor:
            self.wrapper.run(self.q, (k, v), out=out)
            return out

        return call

    def measure(self, way: str) -> dict[str, Any]:
        return self.timed([self._call(way, x) for x in self.kv], lambda out: self.error(out, PAGE))


class DecodeFp8(DecodeBf16):
    """The same with keys and values in float8_e4m3fn, queries and arithmetic in BF16."""

    dtype = torch.float8_e4m3fn
    limit = BF16_LIMIT

    def fields(self) -> dict[str, Any]:
        return {"k_bits": 8, "v_bits": 8}
