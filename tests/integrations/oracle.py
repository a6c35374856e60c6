# SPDX-License-Identifier: Apache-2.0
"""The definition, densely: one forward pass in which every query reads exact windows and de-quantised history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from oscar_kv.artifact import Artifact
from oscar_kv.integrations.transformers.attention import stock_attention

NAME = "oracle"
_active: dict[str, Any] = {}


def history_ends(length: int, chunks: list[int], sink: int, recent: int, slack: int) -> list[int]:
    """Where each query's history ends when ``length`` tokens come in these chunks, then one by one."""
    ends: list[int] = []
    for size in [*chunks, *[1] * (length - sum(chunks))]:
        start = len(ends)
        strict = size <= min(slack + 1, recent)
        ends += [max(sink, start + (i if strict else 0) + 1 - recent) for i in range(size)]
    return ends


def dense(
    q: Tensor, k: Tensor, v: Tensor, codec: Any, ends: list[int], sink: int, scale: float, softcap: float | None
) -> Tensor:
    """q [q_heads, n, d], k and v [kv_heads, n, d] of one row's valid tokens → [q_heads, n, v_dim]."""
    length, group = k.shape[1], q.shape[0] // k.shape[0]
    k_hat, v_hat = k.clone(), v.clone()
    for page in range(length // 64):
        part = slice(64 * page, 64 * page + 64)
        a, b = codec.decode(codec.encode(k[None, :, part], v[None, :, part]))
        k_hat[:, part], v_hat[:, part] = a[0], b[0]
    place = torch.arange(length)
    coded = (place >= sink) & (place < torch.tensor(ends)[:, None])
    k, k_hat, v, v_hat = (x.repeat_interleave(group, 0) for x in (k, k_hat, v, v_hat))
    logits = torch.where(coded, q @ k_hat.mT, q @ k.mT) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    p = logits.masked_fill(place > place[:, None], -torch.inf).softmax(-1)
    return (p * coded) @ v_hat + (p * ~coded) @ v


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    artifact, chunks, valid = _active["artifact"], _active["chunks"], _active["valid"]
    if module.layer_idx not in artifact.layers:
        return _active["stock"](module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]
    recipe, codec = artifact.recipe, artifact.codec(module.layer_idx, "cpu", torch.float64)
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    for row in range(query.shape[0]):
        keep = torch.arange(query.shape[2]) if valid is None else valid[row].nonzero()[:, 0]
        sizes, at = [], 0
        for size in chunks:
            sizes.append(int(((keep >= at) & (keep < at + size)).sum()))
            at += size
        ends = history_ends(len(keep), sizes, recipe.sink, recipe.recent, recipe.slack)
        o = dense(query[row][:, keep], key[row][:, keep], value[row][:, keep], codec, ends, recipe.sink,
                  kwargs["scaling"], kwargs.get("softcap"))  # fmt: skip
        out[row, keep] = o.transpose(0, 1)
    return out, None


def _mask(**arguments: Any) -> Any:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS[_active["name"]](**arguments)


@contextmanager
def oracle(model: Any, artifact: Artifact, chunks: list[int], valid: Tensor | None = None) -> Iterator[None]:
    """Run the model with the dense definition. Call it with use_cache=False on the whole text."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    module = next(m for m in model.modules() if hasattr(m, "layer_idx"))
    before = model.config._attn_implementation
    _active.update(artifact=artifact, chunks=chunks, valid=valid, name=before, stock=stock_attention(module, before))
    model.config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        model.config._attn_implementation_internal = before
        _active.clear()
