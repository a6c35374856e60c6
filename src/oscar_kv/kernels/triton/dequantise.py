# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Packed history as raw rows, with Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAGE as PAGE_TOKENS
from ...layout import PageLayout
from . import checks
from .codes import PAGE, code_bias, contracted, exponent_of, k_codes, v_codes
from .quantise import clamp


@triton.jit
def _store(out, x, dtype: tl.constexpr, mask):
    if dtype == tl.float16:
        x = clamp(x, -65504.0, 65504.0)
    tl.store(out, x.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["kv_heads", "k_exponent", "v_exponent"])
def expand(
    pages, metadata, blocks, k, v, kv_heads, k_exponent, v_exponent,
    k_batch, k_row, k_head, v_batch, v_row, v_head,
    K_DIM: tl.constexpr, K_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr,
):  # fmt: skip
    """One page of one head and both sides. Grid (n, kv_heads, batch)."""
    PAGE_WORDS: tl.constexpr = 2 * (K_DIM * K_BITS + V_DIM * V_BITS) + 2 * PAGE
    n, head, request = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    number = tl.load(blocks + request * tl.num_programs(0) + n).to(tl.int64)
    exists = number >= 0
    page = tl.maximum(number, 0) * kv_heads + head
    words = pages + page * PAGE_WORDS
    meta = metadata + page * (2 * PAGE_WORDS) + (2 * PAGE_WORDS - 4 * PAGE)
    row = n.to(tl.int64) * PAGE

    token, dim = tl.arange(0, PAGE), contracted(tl.arange(0, K_PAD))
    step = tl.load(meta + 4 * token).to(tl.float32)
    zero = tl.load(meta + 4 * token + 1).to(tl.float32)
    code = k_codes(words, k_exponent, K_DIM, K_PAD, K_BITS).to(tl.float32) - code_bias(K_BITS)
    x = tl.where(exists, code * step[None, :] + zero[None, :], 0.0)
    at = k + request * k_batch + head * k_head + ((row + token) * k_row)[None, :] + dim[:, None]
    _store(at, x, k.dtype.element_ty, (dim < K_DIM)[:, None] & (token >= 0)[None, :])

    token, dim = contracted(tl.arange(0, PAGE)), tl.arange(0, V_PAD)
    step = tl.load(meta + 4 * token + 2).to(tl.float32)
    zero = tl.load(meta + 4 * token + 3).to(tl.float32)
    code = v_codes(words + 2 * K_DIM * K_BITS, v_exponent, V_DIM, V_PAD, V_BITS).to(tl.float32) - code_bias(V_BITS)
    x = tl.where(exists, code * step[:, None] + zero[:, None], 0.0)
    at = v + request * v_batch + head * v_head + ((row + token) * v_row)[:, None] + dim[None, :]
    _store(at, x, v.dtype.element_ty, (dim < V_DIM)[None, :] & (token >= 0)[:, None])


class TritonDequantise:
    """The Triton implementation of ``base.DequantiseKernel``."""

    def __call__(self, pages: Tensor, blocks: Tensor, layout: PageLayout, k: Tensor, v: Tensor) -> None:
        heads = checks.check_pages(pages, layout)
        checks.require(
            blocks.ndim == 2 and blocks.dtype == torch.int32 and blocks.is_contiguous(),
            f"blocks must be contiguous int32 [batch, n], got {blocks.dtype} {tuple(blocks.shape)}",
        )
        batch, n = blocks.shape
        for name, x, d in (("k", k, layout.k_dim), ("v", v, layout.v_dim)):
            checks.require(
                tuple(x.shape) == (batch, n * PAGE_TOKENS, heads, d) and x.stride(-1) == 1 and x.dtype in checks.RAW,
                f"{name} must be {(batch, n * PAGE_TOKENS, heads, d)} in fp16, bf16 or fp32 with a contiguous last "
                f"dimension, got {tuple(x.shape)} {x.dtype}",
            )
        if not batch or not n or not heads:
            return
        with checks.check_device([pages, blocks, k, v]):
            expand[(n, heads, batch)](
                pages.view(torch.int32), pages.view(torch.float16), blocks, k, v, heads,
                exponent_of(layout.k_bits), exponent_of(layout.v_bits), *k.stride()[:3], *v.stride()[:3],
                layout.k_dim, checks.next_power_of_2(layout.k_dim), layout.v_dim, checks.next_power_of_2(layout.v_dim),
                layout.k_bits, layout.v_bits,
            )  # fmt: skip
