# SPDX-License-Identifier: Apache-2.0
"""A cache of fixed length, as Transformers' static cache is one: its decode steps can be compiled and captured.

All pages exist from the start and lengths live on the device, so a step of one token a row is shape for shape the same:
tensor operations and one custom op a layer, with no question to the device. Prompts and longer chunks run as they do in
a growing cache, uncompiled; they begin by asking the device how far it has come, and end by telling it.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...cache import MixedLayer
from ...cache.pool import FixedPool, upload
from ...errors import CacheError, OscarError, UnsupportedModelError
from ...kernels.base import KernelSet, LayerTables, StoreTables, Windows
from ...layout import PageLayout
from .attention import OscarMask, Pending
from .layer import NOT_SERVED, OscarLayer, storing

if TYPE_CHECKING:
    from .cache import OscarCache


@dataclass(frozen=True, eq=False)
class Kit:
    """What a layer's decode step needs beside tensors that change. Shared by the caches of an artifact."""

    kernels: KernelSet
    tables: LayerTables
    store_tables: StoreTables
    layout: PageLayout


_kits: weakref.WeakValueDictionary[str, Kit] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_kit(kit: Kit) -> str:
    """The name under which ``decode_step`` finds it, as long as somebody holds it."""
    name = f"{kit.kernels.name}:{next(_numbers)}"
    _kits[name] = kit
    return name


_MUTATED = ("pages", "sink_k", "sink_v", "ring_k", "ring_v")


@torch.library.custom_op("oscar_kv::decode_step", mutates_args=_MUTATED)
def decode_step(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, block_table: Tensor, start: Tensor, count: Tensor,
    hist_start: Tensor, hist_end: Tensor, seq_len: Tensor, sink_k: Tensor, sink_v: Tensor, ring_k: Tensor,
    ring_v: Tensor, kit: str, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    """Store one new token a row, then attend: q [rows, q_heads, k_dim], k, v [rows, kv_heads, 1, d] → [rows, q_heads,
    v_dim]. The rest as in ``kernels.base``; kit: a name from ``register_kit``; softcap 0: none.
    """
    own = _kits.get(kit)
    if own is None:
        raise OscarError(f"decode_step: {kit!r} is no longer there: the cache's artifact is gone")
    windows = Windows(sink_k, sink_v, ring_k, ring_v)
    own.kernels.store(k, v, pages, block_table, start, count, windows, own.store_tables, own.layout)
    return own.kernels.decode(
        q.contiguous(), pages, block_table, hist_start, hist_end, seq_len, windows, own.tables, own.layout, scale=scale,
        softcap=softcap,
    )  # fmt: skip


@decode_step.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, block_table: Tensor, start: Tensor, count: Tensor,
    hist_start: Tensor, hist_end: Tensor, seq_len: Tensor, sink_k: Tensor, sink_v: Tensor, ring_k: Tensor,
    ring_v: Tensor, kit: str, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], q.shape[1], v.shape[3])


def _fix(*tensors: Tensor) -> None:
    """Tell the compiler that these stay where they are: CUDA graphs may then write them in place."""
    if not torch.compiler.is_compiling():
        for x in tensors:
            torch._dynamo.mark_static_address(x)


class StaticState:
    """Lengths of all rows on the device, shared by the layers. int32 [rows], as the kernels take them.

    start, hist_start, hist_end, seq_len: of the step in progress or the last one. count: ones. full: bool [rows], rows
    that had no room left for the step's token. slots: int64, padding counted, as Transformers counts.
    """

    def __init__(self, rows: int, sink: int, recent: int, limit: int, device: torch.device) -> None:
        self.sink, self.recent, self.limit, self.device = sink, recent, limit, device

        def zeros() -> Tensor:
            return torch.zeros(rows, dtype=torch.int32, device=device)

        self.start, self.hist_start, self.hist_end, self.seq_len = zeros(), zeros(), zeros(), zeros()
        self.count, self.full = zeros() + 1, zeros().bool()
        self.slots = torch.zeros((), dtype=torch.int64, device=device)
        self.known = 0
        """Tokens that the longest row holds at least: what the host knows without asking. Compiled steps add none."""
        _fix(*self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        return [
            self.start, self.hist_start, self.hist_end, self.seq_len, self.count, self.full, self.slots,
        ]  # fmt: skip

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)

    def advance(self) -> None:
        """One more token in every row; where there is no room the last place is taken again, and ``full`` says so."""
        self.full.copy_(self.seq_len >= self.limit)
        self.start.copy_(self.seq_len.clamp(max=self.limit - 1))
        self.seq_len.copy_(self.start + 1)
        self.hist_start.copy_(self.seq_len.clamp(max=self.sink))
        self.hist_end.copy_(torch.minimum((self.seq_len - self.recent).clamp(min=self.sink), self.seq_len))
        self.slots.add_(1)

    def set(self, lengths: list[int], slots: int) -> None:
        """Take over what the host knows."""
        self.seq_len.copy_(upload(lengths, torch.int32, self.device))
        self.slots.fill_(slots)
        self.full.zero_()
        self.known = max(lengths, default=0)

    def host_step(self) -> None:
        """Before a step that the host runs itself: raise CacheError where it knows that a row is full already."""
        if self.device.type == "cpu":
            self.known = int(self.seq_len.max())
        elif torch.cuda.is_current_stream_capturing():
            return  # nothing runs now, and replays do not come by here
        if self.known >= self.limit:
            raise CacheError(
                f"the cache has room for {self.limit} tokens a row and is full: make it longer, "
                "OscarCache(…, max_cache_len=…), or generate fewer tokens"
            )
        self.known += 1

    def check_room(self) -> None:
        """Raise CacheError if steps went on after a row was full. Asks the device: not for use within a step."""
        if bool(self.full.any()):
            raise CacheError(
                f"a row was full at {self.limit} tokens and decoding went on: what came after answers with NaN. Make "
                "the cache longer, OscarCache(…, max_cache_len=…), or generate fewer tokens; cache.reset() before "
                "other text"
            )


class StaticPending(Pending):
    """Stands for the keys of a decode step's one token, between update and attention."""

    def __init__(self, layer: OscarStaticLayer, key: Tensor, value: Tensor) -> None:
        self.layer, self.key, self.value = layer, key, value


class OscarStaticLayer(OscarLayer):
    """A layer of a cache of fixed length."""

    is_compileable = True
    is_croppable = False
    kit: str
    block_table: Tensor

    def __init__(self, owner: OscarCache, index: int) -> None:
        super().__init__(owner, index)
        self.first = False
        """Whether this is the first packed layer of the model: it moves the lengths on."""

    def new_store(self, rows: int, dtype: torch.dtype, device: torch.device) -> MixedLayer:
        store = super().new_store(rows, dtype, device)
        self.kit = self.owner.kit(self.index, store)
        self.owner.new_state(rows, store)
        self.block_table = store.block_table()
        _fix(store.pool.pages, self.block_table, store.sink_k, store.sink_v, store.ring_k, store.ring_v)
        return store

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.batch_size = key_states.shape[0]

    def steps(self, key_states: Tensor) -> bool:
        """Whether these tokens are a decode step: one a row, with the buffers there."""
        return self.is_initialized and key_states.shape[2] == 1

    def step(
        self, module: nn.Module, query: Tensor, pending: StaticPending, mask: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, None]:
        """Attend with one new token a row and store it. query [rows, q_heads, 1, d] → [rows, 1, q_heads, v_dim]."""
        store, state = self.store, self.owner.state
        assert store is not None
        assert state is not None
        if mask is not None and not (isinstance(mask, OscarMask) and mask.plain):
            raise CacheError(
                "a custom attention mask cannot be followed by a cache of fixed length: leave max_cache_len out"
            )
        for name, what in NOT_SERVED.items():
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(f"layer {self.index} has {what} ({name}): packed history does not serve it")
        if kwargs.get("dropout"):
            raise CacheError("attention dropout is on: call model.eval() before generating with a packed cache")
        if query.shape[0] != store.rows:
            raise CacheError(f"the cache holds {store.rows} rows, this batch has {query.shape[0]}")
        dtype, scaling = store.dtype, kwargs.get("scaling")
        if pending.key.dtype != dtype and not torch.is_autocast_enabled(pending.key.device.type):
            raise CacheError(
                f"the cache holds {dtype}, this model's keys are {pending.key.dtype}: use one cache a batch and a model"
            )
        if self.first:
            if not torch.compiler.is_compiling():
                state.host_step()
            state.advance()
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        out = torch.ops.oscar_kv.decode_step(
            query[:, :, 0].to(dtype), pending.key.to(dtype), pending.value.to(dtype), store.pool.pages,
            self.block_table, state.start, state.count, state.hist_start, state.hist_end, state.seq_len, store.sink_k,
            store.sink_v, store.ring_k, store.ring_v, self.kit, scale, float(kwargs.get("softcap") or 0.0),
        )  # fmt: skip
        if self.first:  # nobody may ask the device whether there was room: numbers that cannot be overlooked say it
            out = out.masked_fill(state.full[:, None, None], torch.nan)
        return out[:, None].to(query.dtype), None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Prompts and longer chunks."""
        if self.first and self.is_initialized:
            self.owner.pull()
        limit = self.owner.fixed_length
        assert limit is not None
        longest = max(self.store.lengths, default=0) if self.store is not None else 0
        if longest + key_states.shape[2] > limit:
            raise CacheError(
                f"the cache has room for {limit} tokens a row, holds {longest} and is given {key_states.shape[2]}: "
                "make it longer, OscarCache(…, max_cache_len=…)"
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def resolve(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out = super().resolve(*args, **kwargs)
        self.owner.push(self)
        return out

    def take(self, lengths: list[int], slots: int) -> None:
        """Learn how far the device has come."""
        store = self.store
        if store is None:
            return
        assert isinstance(store.pool, FixedPool)
        self.slots = slots
        for row, length in enumerate(lengths):
            if store.lengths[row] != length:
                store.lengths[row] = length
                store.raw_from[row] = max(store.raw_from[row], length - store.ring)
                store.pool.hold(row, max(0, length // 64 - store.first_page))

    def get_seq_length(self) -> Any:
        """Slots: an int before the first token, then a tensor on the device, as Transformers' static layers give it."""
        return self.owner.state.slots if self.is_initialized and self.owner.state is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        limit = self.owner.fixed_length
        assert limit is not None
        return (limit if query_length == 1 and self.is_initialized else int(self.get_seq_length()) + query_length), 0

    def get_max_length(self) -> int:
        return self.owner.fixed_length or -1

    @property
    def max_cache_len(self) -> int:
        return self.get_max_length()

    def get_max_cache_shape(self) -> int:
        return self.owner.fixed_length or -1

    def reset(self) -> None:
        """Forget the tokens; the buffers stay where they are, so that captured graphs remain right."""
        self.pending = None
        if self.store is None:
            return
        assert isinstance(self.store.pool, FixedPool)
        self.slots = 0
        for row in range(self.store.rows):
            self.store.lengths[row] = self.store.raw_from[row] = 0
            self.store.pool.hold(row, 0)
        if self.first and self.owner.state is not None:
            with storing(self.store.device):
                self.owner.state.set(self.store.lengths, 0)
