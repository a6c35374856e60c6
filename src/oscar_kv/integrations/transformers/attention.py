# SPDX-License-Identifier: Apache-2.0
"""The attention function ``oscar`` and its mask, registered in Transformers' interfaces.

A cache's update cannot attend and an attention function cannot see the cache, so the update hands over a ``Pending``
that stands in for the keys: this function resolves it. Any other attention function trips over it, loudly. While no
query has history, the model's stock attention gets raw keys, values and its own mask: bit-identical output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ...errors import CacheError
from .capture import stock_attention

if TYPE_CHECKING:
    from .enable import Enabled
    from .layer import OscarLayer

NAME = "oscar"

ENABLED = "_oscar_kv"
"""The attribute in which a model and its decoder's modules keep what ``enable`` did: copies and pickles carry it."""

_own: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Keys that OscarCache's sliding-window and other stock layers have just returned, by id."""


def vouch(key: Any) -> None:
    """Note a tensor as the return of an OscarCache's stock layer: longer than the queries, and rightly so."""
    if isinstance(key, Tensor):
        _own[id(key)] = key


class Pending:
    """Stands for the keys (or values) of a layer between update and attention. Every use of it is an error."""

    def __init__(self, layer: OscarLayer, key: Tensor, value: Tensor) -> None:
        self.__dict__.update(_layer=layer, _key=key, _value=value)

    def _refuse(self, what: str) -> NoReturn:
        raise CacheError(
            f"{what} was asked of keys that are held in packed pages: the model runs another attention function than "
            f"'{NAME}', or changes keys after the cache's update. Call oscar_kv.enable(model, artifact), or load the "
            f"model with attn_implementation='{NAME}'; then cache.reset()"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # what copy, pickle and isinstance look for
        self._refuse(name)

    def __getitem__(self, item: Any) -> NoReturn:
        self._refuse("indexing")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration")

    def __len__(self) -> NoReturn:
        self._refuse("len")

    def __bool__(self) -> NoReturn:
        self._refuse("truth")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = next(x for x in args if isinstance(x, cls)) if any(isinstance(x, cls) for x in args) else None
        Pending._refuse(found, getattr(function, "__name__", str(function)))  # type: ignore[arg-type]


def _operator(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Pending, *args: Any) -> NoReturn:
        self._refuse(name)

    return refuse


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "neg", "pow"):
    setattr(Pending, f"__{_name}__", _operator(_name))


class OscarMask:
    """What the mask interface returns: the 2-D padding mask, and the stock mask once somebody needs it.

    padding: bool [batch, slots] or None. plain: whether the pattern is causal and nothing else. windowed: whether it
    belongs to sliding-window or chunked layers.
    """

    ndim = 4
    """For ``generate``, which makes masks of compilable caches itself: this one is ready, as 4-D tensors are."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from transformers.masking_utils import causal_mask_function

        self._arguments = arguments
        self._stock: dict[str, Any] = {}
        self.chunk: tuple[Tensor | None, list[int]] | None = None
        self.padding: Tensor | None = arguments.get("attention_mask")
        self.plain = arguments.get("mask_function", causal_mask_function) is causal_mask_function
        self.windowed = arguments.get("local_size") is not None

    def stock(self, name: str) -> Any:
        """The mask of stock attention ``name``; built once a forward pass."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        if name not in self._stock:
            build = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
            self._stock[name] = None if build is None else build(**self._arguments)
        return self._stock[name]

    def to(self, *args: Any, **kwargs: Any) -> OscarMask:
        """Itself: hooks that move a layer's inputs between devices may ask; tensors are moved when they are used."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CacheError(
            f"{name} was asked of the attention mask: this model changes masks itself, or runs another attention "
            f"function than '{NAME}'; oscar-kv does not support that"
        )


def _stock_name(module: nn.Module, kwargs: dict[str, Any], wanted: str | None) -> str:
    """Which stock attention to run: the one before ``enable``, the cache's, or what serves the call."""
    state: Enabled | None = module.__dict__.get(ENABLED)
    known = None if state is None else state.stock_name(getattr(module, "config", None))
    return (
        known or wanted or ("eager" if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None else "sdpa")
    )


def attend(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function ``oscar``: query [batch, q_heads, n, d] → [batch, n, q_heads, v_dim], and no weights.

    Raises CacheError for another cache's keys and for masks that packed history cannot follow, ArtifactError for a
    cache of another model's artifact. Compiled for the decode steps of a cache of fixed length; torch.compile breaks
    its graph here otherwise.
    """
    from .static import StaticPending

    if isinstance(key, StaticPending):
        return key.layer.step(module, query, key, attention_mask, kwargs)
    return _attend(module, query, key, value, attention_mask, *args, **kwargs)


@torch.compiler.disable
def _attend(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    if isinstance(key, Pending):
        layer: OscarLayer = key.__dict__["_layer"]
        state: Enabled | None = module.__dict__.get(ENABLED)
        if state is not None:
            state.check_cache(layer.owner)
        name = _stock_name(module, kwargs, layer.owner.stock_attention)
        return layer.resolve(key, module, query, attention_mask, name, args, kwargs)
    mask, n = attention_mask, query.shape[2]
    own = _own.get(id(key)) is key
    windowed = kwargs.get("sliding_window") is not None or (isinstance(mask, OscarMask) and mask.windowed)
    if key.shape[2] != n and not own and not windowed:
        raise CacheError(
            f"attention '{NAME}' got {key.shape[2]} keys for {n} queries: they come from another cache. Pass "
            "OscarCache(artifact, model.config), call generate without a cache, or oscar_kv.disable(model)"
        )
    name = _stock_name(module, kwargs, None)
    mask = mask.stock(name) if isinstance(mask, OscarMask) else mask
    return stock_attention(module, name)(module, query, key, value, mask, *args, **kwargs)


def oscar_mask(**arguments: Any) -> Any:
    """Mask function ``oscar``: keeps the arguments, builds nothing.

    None for the decode steps of a cache of fixed length (Transformers gives its length as a tensor): they follow no
    mask but the causal one.
    """
    from transformers.masking_utils import causal_mask_function

    ready = arguments.get("attention_mask")
    if isinstance(ready, OscarMask):
        return ready
    plain = arguments.get("mask_function", causal_mask_function) is causal_mask_function
    if plain and arguments.get("q_length") == 1 and isinstance(arguments.get("q_offset"), Tensor):
        if isinstance(ready, Tensor) and ready.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_step(ready, int(arguments["q_offset"]))
        return None
    return OscarMask(arguments)


def _check_step(padding: Tensor, column: int) -> None:
    """Raise CacheError where a mask [batch, slots] hides a step's token: a fixed length reads the prompt's mask alone.

    On a CPU, where looking costs nothing.
    """
    if padding.ndim == 2 and not (padding.shape[1] > column and bool(padding[:, column].all())):
        raise CacheError(
            f"the attention mask leaves out the new token {column} of some row: a cache of fixed length reads padding "
            "from the prompt's mask alone. Give a mask with ones from there on, or leave max_cache_len out"
        )


def register() -> None:
    """Put ``oscar`` into Transformers' attention and mask interfaces; doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, oscar_mask)
