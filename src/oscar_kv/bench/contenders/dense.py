# SPDX-License-Identifier: Apache-2.0
"""Causal attention of a chunk over everything before it, in 16 bits: FlashAttention-3, cuDNN, FlashAttention-2, plain.

An ``Attend`` takes q [n, q_heads, d], the last n positions of k, v [tokens, kv_heads, d], and gives [n, q_heads, d].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..inputs import SPREAD, model_dtype, queries
from ..reference import causal_reference, relative_error
from ..shapes import PrefillShape, Shape
from .base import Contender, Options
from .fa3 import forward, load, why_no_fa3
from .flashinfer import why_no_flashinfer

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SAMPLES = 8
"""Queries of a chunk whose answers are checked, the first and the last among them."""


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def fa3(ops: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One call; its causal mask is aligned at the end."""
    if ops is None:
        from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]

        out = flash_attn_func(q[None], k[None], v[None], causal=True)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)[0]
    # vLLM's build takes ragged batches alone: one of one request. The offsets are made on the device, for the graph.
    starts, key_starts = (
        torch.arange(0, x + 1, x, dtype=torch.int32, device=q.device) for x in (q.shape[0], k.shape[0])
    )
    longest = q.shape[0], k.shape[0]
    return forward(ops, q, k, v, None, splits=1, starts=starts, key_starts=key_starts, longest=longest)[0]


def fa2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's FlashAttention-2; its causal mask is aligned at the end."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out = flash(heads_first(q), heads_first(k), heads_first(v), 0.0, True, False)[0]
    return cast(Tensor, out)[0].transpose(0, 1)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """cuDNN through PyTorch: the prefix and the causal chunk in two calls, merged by log-sum-exp."""
    attention, n = torch.ops.aten._scaled_dot_product_cudnn_attention, q.shape[0]

    def part(k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = attention(heads_first(q), heads_first(k), heads_first(v), None, True, 0.0, causal, False)[:2]
        return out[0], lse.reshape(*out.shape[1:3], 1)

    chunk, lse = part(k[-n:], v[-n:], True)
    if k.shape[0] == n:
        return chunk.transpose(0, 1)
    before, lse_before = part(k[:-n], v[:-n], False)
    # out = chunk + (before − chunk)·share of the prefix: one fused pass over the two
    return torch.lerp(chunk, before, torch.sigmoid(lse_before - lse).to(chunk.dtype)).transpose(0, 1)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's reference with the mask written out: for the CPU."""
    n, t = q.shape[0], k.shape[0]
    mask = torch.arange(t, device=q.device) <= torch.arange(t - n, t, device=q.device)[:, None]
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(
            heads_first(q), heads_first(k), heads_first(v), attn_mask=mask, enable_gqa=True
        )
    return out[0].transpose(0, 1)


def flashinfer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashInfer's prefill of one request; its causal mask is aligned at the end."""
    from flashinfer import single_prefill_with_kv_cache  # type: ignore[import-not-found]

    return cast(Tensor, single_prefill_with_kv_cache(q, k, v, causal=True))


def missing_attend(name: str, options: Options) -> str | None:
    """Why this attention cannot run here, or None."""
    if name == "fa3":
        return why_no_fa3(options.fa3)
    if name == "flashinfer":
        return why_no_flashinfer()
    if name == "plain":
        return None if not options.on_gpu else "it is for the CPU: on a GPU it writes all probabilities out"
    return None if torch.cuda.is_available() else "it needs a CUDA device"


def attention(name: str, options: Options) -> Attend:
    """The function of that name, its extension loaded."""
    if name == "fa3":
        return partial(fa3, load(options.fa3))
    return {"fa2": fa2, "cudnn": cudnn, "plain": plain, "flashinfer": flashinfer}[name]


def sampled(n: int) -> list[int]:
    """Rows of a chunk of n that are checked."""
    return sorted({round(i * (n - 1) / (SAMPLES - 1)) for i in range(SAMPLES)})


def peak_extra(call: Callable[[], object], device: str) -> int:
    """Bytes that a call takes beyond what is held before it, its result included; 0 on the CPU."""
    if torch.device(device).type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


class DensePrefill(Contender):
    """A chunk over an unquantised prefix, keys and values contiguous."""

    attend: ClassVar[str]

    def missing(self) -> str | None:
        return missing_attend(self.attend, self.options)

    def bytes(self, shape: Shape) -> int:
        s = cast(PrefillShape, shape)
        return s.batch * s.kv_heads * s.raw_row * (s.prefix + s.chunk)

    def prepare(self, shape: Shape) -> None:
        self.shape, device = cast(PrefillShape, shape), self.options.device
        size = (2, self.shape.prefix + self.shape.chunk, self.shape.kv_heads, self.shape.head_dim)
        self.kv = [torch.randn(*size, device=device, dtype=model_dtype(device)).mul_(SPREAD) for _ in range(2)]
        self.q = queries(shape, self.shape.chunk, device=device)
        self.call = attention(self.attend, self.options)

    def measure(self, way: str) -> dict[str, Any]:
        rows = sampled(self.shape.chunk)
        want = causal_reference(self.q, self.kv[0][0], self.kv[0][1], rows)
        calls = [partial(self.call, self.q, x[0], x[1]) for x in self.kv]
        calls[0]()  # compiles, loads, plans
        extra = peak_extra(calls[0], self.options.device)
        return {**self.timed(calls, lambda out: relative_error(out[rows], want)), "peak_extra_bytes": extra}


class Fa3Prefill(DensePrefill):
    attend = "fa3"


class CudnnPrefill(DensePrefill):
    attend = "cudnn"


class Fa2Prefill(DensePrefill):
    attend = "fa2"


class FlashinferPrefill(DensePrefill):
    attend = "flashinfer"


class MathPrefill(DensePrefill):
    attend = "plain"
