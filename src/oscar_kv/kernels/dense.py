# SPDX-License-Identifier: Apache-2.0
"""Dense attention kernels that return the log-sum-exp: FlashAttention-3, cuDNN, flash, memory-efficient, plain.

Which one serves is found once a device, dtype and shape of heads: the first whose answers on a small problem are right.
The order is fixed and nothing is timed: FlashAttention-3 of vLLM where its extension is loaded, that of the package
flash_attn_interface, cuDNN, FlashAttention-2, memory-efficient, plain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import OscarError

log = logging.getLogger(__name__)
Call = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""(q [n, q_heads, dk], k [m, kv_heads, dk], v [m, kv_heads, dv], scale, causal: n = m) → out [n, q_heads, dv] in q's
dtype, log-sum-exp of the scaled logits [n, q_heads] fp32 (natural logarithm)."""
_PLAIN_ELEMENTS = 1 << 24


class Dense(NamedTuple):
    """A kernel by name."""

    name: str
    call: Call


def _first(x: Tensor) -> Tensor:
    """[n, heads, d] → a view [1, heads, n, d]."""
    return x.transpose(0, 1)[None]


def _back(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """[1, heads, n, d] and [1, heads, ≥ n (, 1)] → [n, heads, d] and [n, heads]."""
    out = out[0].transpose(0, 1)
    return out, lse.reshape(out.shape[1], -1)[:, : out.shape[0]].transpose(0, 1)


def _vllm(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """FlashAttention-3 of vLLM's wheel: 37 positional arguments in 0.25, and ragged batches alone, here of one request.

    Its log-sum-exp is [heads, total queries]; with a leading batch of one and with padding it is understood, too.
    """
    n, m = len(q), len(k)
    # Offsets are made on the device: a copy from the host could not be captured by a CUDA graph.
    starts = [torch.arange(0, x + 1, x, dtype=torch.int32, device=q.device) for x in (n, m)]
    arguments: list[Any] = [q, k, v, *[None] * 4, *starts, *[None] * 3, n, m, *[None] * 9]
    arguments += [scale, causal, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None]
    out, lse = torch.ops._vllm_fa3_C.fwd(*arguments)[:2]
    return out, lse.reshape(q.shape[1], -1)[:, :n].transpose(0, 1)


def _fa3(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]

    out, lse = flash_attn_func(
        q[None], k[None], v[None], softmax_scale=scale, causal=causal, return_attn_probs=True
    )[:2]  # fmt: skip
    return out[0], lse[0].transpose(0, 1)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    return _back(*run(_first(q), _first(k), _first(v), None, True, 0.0, causal, False, scale=scale)[:2])


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    run = torch.ops.aten._scaled_dot_product_flash_attention
    return _back(*run(_first(q), _first(k), _first(v), 0.0, causal, False, scale=scale)[:2])


def _efficient(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    run = torch.ops.aten._scaled_dot_product_efficient_attention
    return _back(*run(_first(q), _first(k), _first(v), None, True, 0.0, causal, scale=scale)[:2])


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return _back(*run(_first(q), _first(k), _first(v), 0.0, causal, scale=scale)[:2])


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Any device and dtype, in fp32 (fp64 for fp64), some queries at a time."""
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    (n, q_heads, _), (m, heads, _) = q.shape, k.shape
    out, lse = q.new_empty(n, q_heads, v.shape[-1]), torch.empty(n, q_heads, dtype=acc, device=q.device)
    k, v = k.to(acc).permute(1, 2, 0), v.to(acc).transpose(0, 1)  # [heads, dk, m], [heads, m, dv]
    part = max(1, _PLAIN_ELEMENTS // max(1, q_heads * m))
    for at in range(0, n, part):
        some = slice(at, min(at + part, n))
        x = q[some].to(acc).view(-1, heads, q_heads // heads, q.shape[-1]).transpose(0, 1).flatten(1, 2)
        logits = (x @ k).mul_(scale).view(heads, -1, q_heads // heads, m)
        if causal:
            later = torch.arange(m, device=q.device) > torch.arange(some.start, some.stop, device=q.device)[:, None]
            logits.masked_fill_(later[None, :, None], -torch.inf)
        total = logits.logsumexp(-1, keepdim=True)
        o = logits.sub_(total).exp_().flatten(1, 2) @ v
        out[some] = o.view(heads, -1, q_heads // heads, v.shape[-1]).transpose(0, 1).flatten(1, 2).to(out.dtype)
        lse[some] = total[..., 0].transpose(0, 1).flatten(1, 2)
    return out, lse


def _expanded(call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """For kernels that want one KV head a query head.

    Without a causal mask the heads of a group are so many more queries; with one (the new chunk alone) K and V are
    repeated.
    """
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return call(q, k, v, scale, causal)
    if causal:
        return call(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), scale, True)
    n, q_heads, d = q.shape
    folded = q.view(n, -1, group, d).transpose(1, 2).reshape(n * group, -1, d)
    out, lse = call(folded, k, v, scale, False)
    out = out.reshape(n, group, -1, out.shape[-1]).transpose(1, 2).reshape(n, q_heads, -1)
    return out, lse.reshape(n, group, -1).transpose(1, 2).reshape(n, q_heads)


def _candidates(device: torch.device, dtype: torch.dtype) -> Iterator[Dense]:
    if device.type == "cuda":
        half = dtype in (torch.float16, torch.bfloat16)
        if half and torch.version.hip is None:
            if torch.cuda.get_device_capability(device)[0] == 9:
                if hasattr(torch.ops._vllm_fa3_C, "fwd"):
                    yield Dense("FlashAttention-3 (vLLM)", _vllm)
                yield Dense("FlashAttention-3", _fa3)
            for name, call in (("cuDNN", _cudnn), ("flash", _flash)):
                yield Dense(name, call)
                yield Dense(f"{name}, KV heads repeated", partial(_expanded, call))
        elif half:
            yield Dense("flash, KV heads repeated", partial(_expanded, _flash))
        yield Dense("memory-efficient, KV heads repeated", partial(_expanded, _efficient))
    elif device.type == "cpu" and dtype != torch.float64:
        yield Dense("flash (CPU), KV heads repeated", partial(_expanded, _flash_cpu))
    yield Dense("plain", plain)


def _right(
    call: Call, q_heads: int, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device
) -> str:  # fmt: skip
    """Why the kernel cannot serve, or nothing."""
    g = torch.Generator().manual_seed(0)
    limit = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-4)
    for n, m, causal in ((72, 200, False), (72, 72, True)):
        q = torch.randn(n, q_heads, k_dim, generator=g).to(device, dtype)
        # Keys and values come as slices of longer tiles.
        k, v = (torch.randn(m + 8, kv_heads, d, generator=g).to(device, dtype)[3 : m + 3] for d in (k_dim, v_dim))
        try:
            got, want = call(q, k, v, 0.11, causal), plain(q, k, v, 0.11, causal)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error) else ''}"
        if got[0].shape != want[0].shape or got[0].dtype != dtype or got[1].shape != want[1].shape:
            return "its answer has another shape or dtype"
        for x, y in zip(got, want, strict=True):
            if not float((x.float() - y.float()).abs().max()) < limit * max(1.0, float(y.abs().max())):
                return "its answer is wrong" if causal else "its answer without a mask is wrong"
    return ""


def serving(
    q_heads: int, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Dense]:  # fmt: skip
    """Every kernel that serves such heads, in order. Why others do not is logged."""
    for found in _candidates(device, dtype):
        why = "" if found.name == "plain" else _right(found.call, q_heads, kv_heads, k_dim, v_dim, dtype, device)
        if not why:
            yield found
        else:
            key = q_heads, kv_heads, k_dim, v_dim, dtype, str(device)
            log.info("dense attention %s does not serve %s: %s", found.name, key, why)


_chosen: dict[tuple[Any, ...], Dense] = {}


def choose(q_heads: int, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> Dense:
    """The first kernel in the fixed order that serves such heads. The choice is logged, and stays.

    An extension that is loaded later is not looked at again: load it first. Raises OscarError if none serves.
    """
    key = q_heads, kv_heads, k_dim, v_dim, dtype, str(device)
    if key not in _chosen:
        found = next(serving(q_heads, kv_heads, k_dim, v_dim, dtype, device), None)
        if found is None:
            raise OscarError(f"no dense attention kernel serves {key}")
        _chosen[key] = found
        level = logging.WARNING if found.name == "plain" and device.type == "cuda" else logging.INFO
        log.log(level, "dense attention of prefill over packed history on %s: %s", device, found.name)
    return _chosen[key]


def chosen(device: torch.device) -> list[str]:
    """Names of the kernels in use on a device."""
    return sorted({dense.name for key, dense in _chosen.items() if key[-1] == str(device)})
