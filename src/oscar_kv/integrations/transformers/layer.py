# SPDX-License-Identifier: Apache-2.0
"""A full-attention layer of ``OscarCache``: slots on Transformers' side, valid tokens in packed storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from ...cache import MixedLayer
from ...cache.passes import Pass
from ...errors import CacheError, UnsupportedModelError
from .attention import OscarMask, Pending
from .capture import stock_attention
from .reading import Reading, by_kernels, by_reference

if TYPE_CHECKING:
    from .cache import OscarCache

SOFTCAP_NEEDS_EAGER = (
    "the model soft-caps its attention logits, which stock attention 'sdpa' ignores: load it with "
    "attn_implementation='eager', then enable the packed cache"
)
NOT_SERVED = {
    "s_aux": "learned attention sinks",
    "position_bias": "a position bias on attention scores",
    "sliding_window": "a sliding window in a layer that its configuration calls full attention",
}


@contextmanager
def storing(device: torch.device) -> Iterator[None]:
    """Where tokens are stored and history is read: ordinary tensors, no gradients, and the dtypes that are written.

    Buffers made under ``torch.inference_mode`` could not be written outside it, and autocast would round the codec.
    """
    with torch.inference_mode(False), torch.no_grad():
        if not torch.is_autocast_enabled(device.type):
            yield
            return
        with torch.autocast(device.type, enabled=False):
            yield


class _Sealed(torch.autograd.Function):
    """Passes an output on; a backward pass through it is an error, not a gradient without the history's part."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise CacheError(
            "gradients do not flow through a packed cache's history: run the model under torch.no_grad(), or train "
            "with use_cache=False"
        )


class OscarLayer(CacheLayerMixin):
    """One layer. ``update`` returns ``Pending`` objects; the attention function ``oscar`` calls ``resolve``."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, owner: OscarCache, index: int) -> None:
        super().__init__()
        self.owner, self.index = owner, index
        self.store: MixedLayer | None = None
        self.slots = 0
        self.pending: Pending | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        with storing(key_states.device):
            self.store = self.new_store(key_states.shape[0], key_states.dtype, key_states.device)
        self.is_initialized = True

    def new_store(self, rows: int, dtype: torch.dtype, device: torch.device) -> MixedLayer:
        """Empty storage, written by the kernel that serves the model."""
        codec = self.owner.codecs.get(self.index, device, dtype)
        served = self.owner.serve(device, dtype)
        writer = None
        if served.kernels is not None and served.stores:
            writer = served.kernels.store, self.owner.codecs.store_tables(self.index, codec)
        return MixedLayer(codec, rows, dtype, device, writer, self.owner.fixed_length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Post-RoPE k, v [batch, kv_heads, n, d] → two Pending objects."""
        if self.pending is not None:
            raise CacheError(
                f"layer {self.index}: tokens were added twice with no attention between: the model runs another "
                "attention function than 'oscar', or a forward pass was interrupted. Call oscar_kv.enable(model, "
                "artifact), then cache.reset()"
            )
        if torch.is_autocast_enabled(key_states.device.type):  # it leaves keys and values in different dtypes
            dtype = self.store.dtype if self.store else torch.promote_types(key_states.dtype, value_states.dtype)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.pending = Pending(self, key_states, value_states)
        return self.pending, Pending(self, key_states, value_states)

    def resolve(
        self,
        pending: Pending,
        module: nn.Module,
        query: Tensor,
        mask: Any,
        stock: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with the pending tokens and store them. query [batch, q_heads, n, d] → [batch, n, q_heads, v_dim]."""
        if pending is not self.pending or self.store is None:
            raise CacheError(f"layer {self.index}: these keys belong to an earlier update; call cache.reset()")
        store, slots = self.store, self.owner.slots
        k, v = pending.__dict__["_key"], pending.__dict__["_value"]
        rows, n, past = k.shape[0], k.shape[2], self.slots
        if rows != store.rows:
            raise CacheError(f"the cache holds {store.rows} rows, this batch has {rows}: use one cache a batch")
        if query.shape[2] != n:
            raise CacheError(f"layer {self.index}: {query.shape[2]} queries for {n} new keys")
        if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{type(module).__name__} is not causal, and packed history serves only causal")
        if kwargs.get("softcap") is not None and stock == "sdpa":
            raise UnsupportedModelError(SOFTCAP_NEEDS_EAGER)
        custom = isinstance(mask, Tensor) or (isinstance(mask, OscarMask) and not mask.plain)
        valid, counts = self._valid(mask, rows, past, n)
        starts = list(store.lengths)
        ends = [self._ends(start, count) for start, count in zip(starts, counts, strict=True)]
        packed = any(end and end[-1] > store.sink for end in ends)
        if packed and (custom or slots.custom):
            raise CacheError(
                "a custom attention mask (4-D, or a pattern beside causal) is in use and some tokens are in packed "
                "history, which only causal attention with a 2-D padding mask can read: keep such prompts in one "
                f"chunk, or within {store.sink + store.recent} tokens, or use the full-precision cache"
            )
        step = self.owner.new_pass(store, counts, valid, n) if self.owner.by_kernels(store) else None
        # From here to the end ``pending`` stays: whatever interrupts leaves a mark that the next call finds.
        inputs = [x for x in (query, k, v) if x.requires_grad] if torch.is_grad_enabled() else []
        seal = bool(inputs) and (packed or past > 0)
        if packed:
            if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
                raise CacheError("attention weights over packed history do not exist: leave out output_attentions")
            with storing(k.device):
                out = self._attend(query.detach(), k.detach(), v.detach(), valid, starts, ends, step, kwargs)
            weights = None
        else:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not seal):
                keys, values = self._contiguous(k, v, past)
                own = mask.stock(stock) if isinstance(mask, OscarMask) else mask
                out, weights = stock_attention(module, stock)(module, query, keys, values, own, *args, **kwargs)
            with storing(k.device):
                store.append(k.detach(), v.detach(), valid, step)
        if seal:
            out = _Sealed.apply(out, *inputs)
        with storing(k.device):
            slots.custom |= custom
            slots.extend(valid, rows, past, n, k.device)
        self.slots = past + n
        self.pending = None
        return out, weights

    def _valid(self, mask: Any, rows: int, past: int, n: int) -> tuple[Tensor | None, list[int]]:
        """Valid columns bool [rows, n] (None: all), and how many in each row."""
        if isinstance(mask, OscarMask):
            if mask.chunk is None:  # the first layer of a forward pass checks for all
                valid = self.owner.slots.new(mask.padding, rows, past, n)
                mask.chunk = valid, [n] * rows if valid is None else valid.sum(1).tolist()
            return mask.chunk
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4):
            raise CacheError(f"the attention mask is a {type(mask).__name__}; pass a 2-D padding mask or None")
        return None, [n] * rows

    def _ends(self, start: int, count: int) -> list[int]:
        """Where the history of each new query ends (see ``OscarCache``: short chunks as if decoded one by one)."""
        store = self.store
        assert store is not None
        if count <= min(store.slack + 1, store.recent):
            return [store.history_end(start + i) for i in range(count)]
        return [store.history_end(start)] * count

    def _attend(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        starts: list[int],
        ends: list[list[int]],
        step: Pass | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        store = self.store
        assert store is not None
        for name, what in NOT_SERVED.items():
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(
                    f"layer {self.index} has {what} ({name}): packed history does not serve that"
                )
        if kwargs.get("dropout"):
            raise CacheError("attention dropout is on: call model.eval() before generating with a packed cache")
        scaling = kwargs.get("scaling")
        how = Reading(
            tables=self.owner.codecs.tables(self.index, store.codec),
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap=float(kwargs.get("softcap") or 0.0),
        )
        if step is None:
            return by_reference(store, query, k, v, valid, starts, ends, how)
        kernels = self.owner.serve(store.device, store.dtype).kernels
        assert kernels is not None
        return by_kernels(store, kernels, query, k, v, valid, step, how)

    def _contiguous(self, k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Raw keys and values of all slots, the chunk's as they came; slots that were padding hold zeros."""
        store = self.store
        assert store is not None
        if not past:
            return k, v
        places = self.owner.slots.valid_before(store.rows, past)
        if places is None:
            old = [store.raw(row, 0, past) for row in range(store.rows)]
            return tuple(
                torch.cat([torch.stack(x), new], 2) for x, new in zip(zip(*old, strict=False), (k, v), strict=False)
            )  # type: ignore[return-value]
        out = []
        for side, new in enumerate((k, v)):
            full = torch.cat([new.new_zeros(*new.shape[:2], past, new.shape[3]), new], 2)
            for row, slots in enumerate(places):
                at = torch.tensor(slots, dtype=torch.long, device=new.device)
                full[row][:, at] = store.raw(row, 0, len(slots))[side]
            out.append(full)
        return out[0], out[1]

    def get_seq_length(self) -> int:
        return self.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.store, self.pending, self.slots, self.is_initialized = None, None, 0, False

    def offload(self) -> None:
        raise CacheError("offloading is not supported: the packed cache is small enough to stay on its device")

    prefetch = offload

    def _through_owner(self, *args: Any) -> None:
        raise CacheError("call the cache's own method: all layers of an OscarCache change together")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _through_owner
