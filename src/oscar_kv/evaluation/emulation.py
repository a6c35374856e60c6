# SPDX-License-Identifier: Apache-2.0
"""One forward pass that attends as the 2-bit cache would if it decoded the text token by token.

Query i reads the sink and its ``recent`` most recent tokens (its own included) as they are, and every token t of its
history (t >= sink and i − t >= recent) from its codes. The codes come from the same whole pages as in the cache.

Arithmetic: rows are centred before anything is multiplied. q·(k − μ) differs from q·k by the same number for every
token, so softmax does not see it, and the digits that a large key offset would cost are kept. History and exact rows
are attended separately and joined by their log-sum-exps, which is one softmax over both.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..artifact import Artifact
from ..codec import LayerCodec
from ..errors import OscarError, UnsupportedModelError
from ..layout import PAGE

NAME = "oscar-emulation"
_SCORES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Attention scores held at a time (fp32: 16 MB on a CPU, 512 MB on a GPU)."""
_PAGES = {"cpu": 64, "cuda": 4096}
"""Pages quantised a call: a GPU wants many rows, since shaped rounding runs one dimension after another."""


class Attending(Protocol):
    """What ``emulated`` runs in place of a model's attention: an artifact's cache, or a rival method's.

    layers: those that it serves; the others attend as they do. exact: positions before which no query reads a code.
    prefill: queries before this position read everything as it is.
    """

    prefill: int

    @property
    def layers(self) -> Container[int]: ...
    @property
    def exact(self) -> int: ...
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """q [B, Hq, n, d], k and v [B, Hkv, n, d], post-RoPE → [B, n, Hq, v_dim] in q's dtype."""
        ...


@dataclass(frozen=True)
class Centred:
    """Rows of one layer, less their centres, in the model's own basis: k, v [batch, kv_heads, n, d]."""

    k: Tensor
    v: Tensor


class Emulation:
    """An artifact's codecs on one device, ready for any number of passes.

    dtype: float32, or float64 for a model in float64. ``fast`` (CUDA only): the history is read by flash attention with
    fp16 operands, 11 bits where a bf16 model itself has 8; the exact windows stay in fp32. On a CPU flash attention
    works in ``dtype``, so it is always used, except under a cap on logits, which it does not know.
    ``prefill``: queries before this position read everything as it is, as a prompt given in one chunk is prefilled.
    """

    def __init__(
        self, artifact: Artifact, device: torch.device | str, dtype: torch.dtype = torch.float32, *,
        fast: bool = False, prefill: int = 0,
    ) -> None:  # fmt: skip
        self.artifact, self.device, self.dtype = artifact, torch.device(device), dtype
        self.fast, self.prefill = fast, prefill
        self.sink, self.recent = artifact.recipe.windows
        if fast and self.device.type != "cuda":
            raise OscarError(f"fast emulation uses flash attention on CUDA; the model is on {self.device}")
        self.flash, self.short = fast or self.device.type == "cpu", 64 if self.device.type == "cpu" else 512
        self.codecs = {i: artifact.codec(i, self.device, dtype) for i in artifact.layers}

    @classmethod
    def of(cls, artifact: Artifact, model: nn.Module, *, fast: bool = False, prefill: int = 0) -> Emulation:
        """On the model's device; float64 for a model in float64, else float32. ArtifactError for another model's."""
        from ..integrations.transformers.identity import check_model

        check_model(artifact, model)
        parameter = next(model.parameters())
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        return cls(artifact, parameter.device, dtype, fast=fast, prefill=prefill)

    @property
    def layers(self) -> Container[int]:
        return self.codecs

    @property
    def exact(self) -> int:
        return self.sink + self.recent

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """q [B, Hq, n, d], k and v [B, Hkv, n, d], post-RoPE → [B, n, Hq, v_dim] in q's dtype."""
        codec = self.codecs[layer]
        mu_k, mu_v = codec.k.centre[:, None], codec.v.centre[:, None]
        exact = Centred(k.to(self.dtype) - mu_k, v.to(self.dtype) - mu_v)
        history = quantised_history(codec, k, v, self.sink, self.recent)
        shape = (k.shape[1], q.shape[1] // k.shape[1])
        grouped = q.to(self.dtype).unflatten(1, shape)  # [B, Hkv, G, n, d]
        # A cap on logits sees the constant that softmax does not.
        shift = (grouped @ codec.k.centre[:, None, :, None])[..., 0] * scaling if softcap is not None else None
        first = self.sink + self.recent
        flashed = None
        if self.flash and softcap is None:
            flashed = flash_history(grouped[..., first:, :], history, scaling)
        out = torch.empty(*grouped.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        n, start = q.shape[2], 0
        while start < n:
            # Before any history: one block, whatever its size. Then as many queries as the budget of scores allows;
            # where blocks serve the windows alone, short ones, which compute fewer scores that no query may see.
            stop = first if start == 0 else min(n, start + (block_rows(q, n) if flashed is None else self.short))
            part = grouped[..., start:stop, :]
            bias = None if shift is None else shift[..., start:stop]
            o, lse = attend_exact(part, exact, start, self.sink, self.recent, scaling, softcap, bias)
            if start:
                if flashed is not None:
                    rows = slice(start - first, stop - first)
                    old, old_lse = flashed[0][..., rows, :], flashed[1][..., rows]
                else:
                    old, old_lse = attend_history(part, history, start, self.sink, self.recent, scaling, softcap, bias)
                share = torch.sigmoid(old_lse.to(self.dtype) - lse)[..., None]
                o = o + share * (old.to(self.dtype) - o)
            out[..., start:stop, :] = o + mu_v[:, None]
            start = stop
        return out.flatten(1, 2).transpose(1, 2).contiguous()


def block_rows(q: Tensor, keys: int) -> int:
    """Queries whose scores fit the budget, a multiple of 16."""
    return max(16, min(1024, _SCORES.get(q.device.type, 1 << 22) // (q.shape[0] * q.shape[1] * keys) // 16 * 16))


def quantised_history(codec: LayerCodec, k: Tensor, v: Tensor, sink: int, recent: int) -> Centred:
    """k̂ and v̂, less their centres, of positions sink … n−recent−1 (what any query of this text reads from codes).

    k, v [B, Hkv, n, d] raw. Only whole pages are made: the window is at least a page long, so no token of a page that
    is still filling can be history.
    """
    batch, heads, n, _ = k.shape
    lead, stop = sink // PAGE, -(-(n - recent) // PAGE)
    span = slice(lead * PAGE, stop * PAGE)

    def pages(x: Tensor) -> Tensor:
        x = x[:, :, span].unflatten(2, (-1, PAGE)).transpose(1, 2)
        return x.reshape(batch * (stop - lead), heads, PAGE, x.shape[-1])

    k_pages, v_pages = pages(k), pages(v)
    done_k: list[Tensor] = []
    done_v: list[Tensor] = []
    step = _PAGES.get(k.device.type, 64)
    for i in range(0, len(k_pages), step):
        for q, side, done in zip(
            codec.quantise(k_pages[i : i + step], v_pages[i : i + step]),
            (codec.k, codec.v),
            (done_k, done_v),
            strict=True,
        ):
            y = q.dequantise(codec.dtype)
            done.append(y if side.rotation is None else torch.matmul(y, side.rotation.mT))

    def rows(done: list[Tensor]) -> Tensor:
        x = torch.cat(done).unflatten(0, (batch, stop - lead)).transpose(1, 2).flatten(2, 3)
        return x[:, :, sink - lead * PAGE : n - recent - lead * PAGE].contiguous()

    return Centred(rows(done_k), rows(done_v))


def _softmax(
    scores: Tensor, hidden: Tensor | None, softcap: float | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores [..., m, t], consumed → (probabilities of this part, log-sum-exp [..., m] of its logits).

    hidden bool [m, c]: what of the last c columns each query must not see.
    """
    if softcap is not None:
        if bias is not None:
            scores += bias[..., None]
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:  # after the cap, which would make −inf finite
        scores[..., scores.shape[-1] - hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    return scores.sub_(lse[..., None]).exp_(), lse


def attend_exact(
    q: Tensor,
    rows: Centred,
    start: int,
    sink: int,
    recent: int,
    scaling: float,
    softcap: float | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Queries from ``start`` on over sink and window: q [B, Hkv, G, m, d] → centred output [..., m, dv], lse."""
    stop = start + q.shape[-2]
    window = max(sink, start - recent + 1)
    head = min(sink, stop)
    columns = torch.cat([torch.arange(head, device=q.device), torch.arange(window, stop, device=q.device)])
    k, v = (torch.cat([x[:, :, :head], x[:, :, window:stop]], 2)[:, :, None] for x in (rows.k, rows.v))
    i = torch.arange(start, stop, device=q.device)[:, None]
    hidden = (columns > i) | ((columns >= sink) & (i - columns >= recent))
    p, lse = _softmax((q * scaling) @ k.mT, hidden, softcap, bias)
    return p @ v, lse


def attend_history(
    q: Tensor,
    rows: Centred,
    start: int,
    sink: int,
    recent: int,
    scaling: float,
    softcap: float | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same over the history; ``rows`` begin at position sink, and start >= sink + recent, so no query has none."""
    b, heads, group, m, d = q.shape
    count = start + m - recent - sink  # the last query's
    k, v = rows.k[:, :, :count], rows.v[:, :, :count]
    scores = (q * scaling).reshape(b, heads, group * m, d) @ k.mT
    scores = scores.view(b, heads, group, m, count)
    # Query start+r reads all but the last m−1−r columns.
    edge, hidden = min(m - 1, count), None
    if edge:
        last = torch.arange(start, start + m, device=q.device)[:, None] - recent - sink
        hidden = torch.arange(count - edge, count, device=q.device) > last
    p, lse = _softmax(scores, hidden, softcap, bias)
    return (p.view(b, heads, group * m, count) @ v).view(b, heads, group, m, -1), lse


def flash_history(q: Tensor, rows: Centred, scaling: float) -> tuple[Tensor, Tensor]:
    """All queries from sink + recent on over the history, by one causal flash attention.

    Query sink+recent+j reads the first j+1 history rows: a square causal pattern. q [B, Hkv, G, m, d], rows
    [B, Hkv, m, d] → centred output [B, Hkv, G, m, dv] and lse [B, Hkv, G, m]. On CUDA the operands are rounded to fp16.
    """
    heads, group, m, dv = *q.shape[1:4], rows.v.shape[-1]
    flat = [q.flatten(1, 2), *(x.repeat_interleave(group, 1) for x in (rows.k, rows.v))]
    widest = max(q.shape[-1], dv)  # the operators want one head size: zeros add nothing
    flat = [torch.nn.functional.pad(x, (0, widest - x.shape[-1])) for x in flat]
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*flat, 0.0, True, scale=scaling)
    else:
        limit = torch.finfo(torch.float16).max
        flat = [x.clamp(-limit, limit).half() for x in flat]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*flat, 0.0, True, scale=scaling)[:2]
    return out[..., :dv].unflatten(1, (heads, group)), lse[..., :m].unflatten(1, (heads, group))


_open: dict[int, Attending] = {}
"""Emulations in force, by the id of the config that the attention modules hold."""


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attention function ``oscar-emulation``."""
    from ..integrations.transformers.attention import OscarMask
    from ..integrations.transformers.capture import stock_attention

    entry = _open.get(id(getattr(module, "config", None)))
    if entry is None:
        raise OscarError(f"{type(module).__name__} names the attention function {NAME!r} outside of emulated(...)")
    stock = _stock[id(module.config)]
    mask = attention_mask.stock(stock) if isinstance(attention_mask, OscarMask) else attention_mask

    def plain() -> Any:
        return stock_attention(module, stock)(module, query, key, value, mask, *args, **kwargs)

    layer: Any = getattr(module, "layer_idx", None)
    if layer not in entry.layers:
        return plain()
    _check(module, layer, query, key, attention_mask, kwargs)
    n = query.shape[2]
    if n <= max(entry.prefill, entry.exact):
        return plain()
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    with torch.no_grad():
        out = entry.attend(layer, query, key, value, scaling, kwargs.get("softcap"))
    if entry.prefill:
        out[:, : entry.prefill] = plain()[0][:, : entry.prefill]
    return out, None


def _check(module: nn.Module, layer: int, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> None:
    """Refuse whatever this pass would get wrong."""
    from ..integrations.transformers.attention import OscarMask

    if key.shape[2] != query.shape[2]:
        raise OscarError(
            f"layer {layer}: {key.shape[2]} keys for {query.shape[2]} queries: emulation takes a whole text in one "
            "pass, without a cache (use_cache=False)"
        )
    for field in ("s_aux", "position_bias", "sliding_window"):
        if kwargs.get(field) is not None:
            raise UnsupportedModelError(f"layer {layer}: its attention has {field}, which the 2-bit attention lacks")
    if kwargs.get("softcap") is not None and _stock[id(module.config)] == "sdpa":
        raise UnsupportedModelError(
            f"layer {layer} caps its logits, which the model's attention 'sdpa' leaves out: full precision would be "
            "another model; load it with attn_implementation='eager'"
        )
    if isinstance(mask, OscarMask):
        if mask.padding is not None and not bool(mask.padding.all()):
            raise OscarError("emulation takes texts of one length, without padding: evaluate them one by one")
        if not mask.plain:
            raise OscarError(
                f"layer {layer}: its mask is not plainly causal (packed sequences?): one text a row, no position_ids"
            )


_stock: dict[int, str] = {}


@contextmanager
def emulated(
    model: nn.Module, artifact: Artifact | Attending, *, fast: bool = False, prefill: int = 0
) -> Iterator[Attending]:
    """While open, the model's forward passes attend as the 2-bit cache would, decoding token by token.

    Unpadded texts, ``use_cache=False``; several rows of one length are fine. Up to sink + recent tokens the model's
    stock attention runs and the output is bit-identical. ``fast`` and ``prefill``: see ``Emulation`` (pass one to share
    its codecs between openings; ``baselines.BaselineEmulation`` runs a rival method). Raises ArtifactError for another
    model's artifact, OscarError and UnsupportedModelError for what it cannot follow.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from ..integrations.transformers.attention import oscar_mask
    from ..integrations.transformers.capture import decoder_configs

    entry = Emulation.of(artifact, model, fast=fast, prefill=prefill) if isinstance(artifact, Artifact) else artifact
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, oscar_mask)
    configs = decoder_configs(model)
    before = [config._attn_implementation for config in configs]
    if NAME in before:
        raise OscarError("this model is being emulated already: close the other emulated(...) first")
    try:
        for config, stock in zip(configs, before, strict=True):
            _open[id(config)], _stock[id(config)] = entry, stock or "eager"
            config._attn_implementation_internal = NAME
        yield entry
    finally:
        for config, stock in zip(configs, before, strict=True):
            config._attn_implementation_internal = stock
            _open.pop(id(config), None)
            _stock.pop(id(config), None)
