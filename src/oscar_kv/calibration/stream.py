# SPDX-License-Identifier: Apache-2.0
"""The sums over one chunk: one blockwise pass over the attention probabilities, then d×d moments in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Attention scores held at a time: 16 MB of fp32 on a CPU, 256 MB on a GPU."""

FIELDS: dict[str, str] = {
    "k_sum": "k",
    "k_outer": "kk",
    "v_sum": "v",
    "v_outer": "vv",
    "w_sum": "",
    "wv_sum": "v",
    "wv_outer": "vv",
    "u_sum": "",
    "uq_outer": "kk",
    "q_outer": "kk",
    "c_sum": "",
    "cv_sum": "v",
    "cv_outer": "vv",
}
"""Sums kept a KV head, and their trailing shape: k and v stand for the two head sizes."""


def history_weights(
    q: Tensor, k: Tensor, *, scaling: float, softcap: float | None, sink: int, recent: int
) -> tuple[Tensor, Tensor]:
    """Σ p² over the history (t >= sink and i − t >= recent) of one causal sequence, in fp32.

    q [Hq, n, d], k [Hkv, n, d]. Returns w [Hkv, n], token t's sum over the queries and query heads that read it, and
    u [Hq, n], query i's sum over the tokens it reads. Memory is one block of queries times n.
    """
    heads, n, _ = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    q = q.float().reshape(kv_heads, group, n, -1)
    k = k.float()
    w = torch.zeros(kv_heads, n, dtype=torch.float64 if q.device.type != "mps" else torch.float32, device=q.device)
    u = torch.zeros(kv_heads, group, n, dtype=torch.float32, device=q.device)
    block = max(16, min(512, _BLOCK.get(q.device.type, 1 << 24) // (heads * n)))
    for start in range(sink + recent, n, block):
        end = min(start + block, n)
        rows = end - start
        part = q[:, :, start:end].reshape(kv_heads, group * rows, -1)
        scores = (part @ k[:, :end].mT).mul_(scaling).view(kv_heads, group, rows, end)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        # Adding and multiplying dense masks takes a third of masked_fill_'s time on strided slices.
        scores[..., start:] += torch.full((rows, rows), float("-inf"), device=q.device).triu_(1)
        e = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        norm = e.sum(-1, keepdim=True).reciprocal_()
        last = end - recent  # exclusive: the newest token that the block's last query reads from the history
        p2 = e[..., sink:last].mul_(norm).square_()  # one exp a score; a log-sum-exp would take two
        # Row r (query start+r) reads t <= start+r−recent. Only the last rows−1 columns need the mask.
        cut = min(rows - 1, last - sink)
        if cut:
            t = torch.arange(last - cut, last, device=q.device)
            i = torch.arange(start, end, device=q.device)
            p2[..., p2.shape[-1] - cut :] *= (i[:, None] - t >= recent).to(p2.dtype)
        u[:, :, start:end] = p2.sum(-1)
        w[:, sink:last] += p2.sum((1, 2))
    return w, u.view(heads, n)


def outer(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ_n weight·xᵀx: x [H, n, d], weight [H, n] → [H, d, d]."""
    return x.mT @ (x if weight is None else x * weight[..., None])


def chunk_sums(
    q: Tensor, k: Tensor, v: Tensor, *, scaling: float, softcap: float | None, sink: int, recent: int
) -> dict[str, Tensor]:
    """All sums (``FIELDS``) of one chunk of one layer, fp64. q [Hq, n, d], k [Hkv, n, d], v [Hkv, n, dv]."""
    w, u = history_weights(q, k, scaling=scaling, softcap=softcap, sink=sink, recent=recent)
    if q.device.type == "mps":  # has no fp64
        q, k, v, w, u = (x.cpu() for x in (q, k, v, w, u))
    kv_heads = k.shape[0]
    q, k, v, w, u = q.double(), k.double(), v.double(), w.double(), u.double()
    q, u = q.reshape(kv_heads, -1, q.shape[-1]), u.reshape(kv_heads, -1)  # the group's heads one after another
    q_outer = outer(q)
    c = ((k @ (q_outer / q.shape[1])) * k).sum(-1)  # published value weights, with this chunk's own C_Q
    return {
        "k_sum": k.sum(1),
        "k_outer": outer(k),
        "v_sum": v.sum(1),
        "v_outer": outer(v),
        "w_sum": w.sum(1),
        "wv_sum": (v * w[..., None]).sum(1),
        "wv_outer": outer(v, w),
        "u_sum": u.sum(1),
        "uq_outer": outer(q, u),
        "q_outer": q_outer,
        "c_sum": c.sum(1),
        "cv_sum": (v * c[..., None]).sum(1),
        "cv_outer": outer(v, c),
    }
