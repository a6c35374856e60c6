# SPDX-License-Identifier: Apache-2.0
"""Post-RoPE q, k and v of any Transformers causal model, seen through its attention interface.

No model class is patched: while the context is open the model's config names a registered attention function, which
reports what it is given and then calls the implementation that the model had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from ...errors import UnsupportedModelError
from .geometry import refuse, text_config

Callback = Callable[[int, Tensor, Tensor, Tensor, float, "float | None"], None]
"""callback(layer_idx, q [B, Hq, n, d], k [B, Hkv, n, d], v [B, Hkv, n, dv], scaling, softcap)."""

_PREFIX = "oscar_capture_"


class _Session:
    def __init__(self, callback: Callback):
        self.callback = callback
        self.calls = 0


_open: dict[int, _Session] = {}
"""Sessions by the id of the config that the attention modules hold."""


def stock_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    """The function that attention ``name`` means to this module: its file's registry first, its own eager one last."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    source = sys.modules[type(module).__module__]
    registry = getattr(source, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    if name in registry:
        return cast("Callable[..., Any]", registry[name])
    eager = getattr(source, "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedModelError(f"{type(module).__name__}: its file defines no eager_attention_forward to fall on")
    return cast("Callable[..., Any]", eager)


def _register(stock: str) -> str:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = _PREFIX + stock

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        session = _open.get(id(getattr(module, "config", None)))
        if session is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} still names the attention function {name!r} after its capture ended; "
                "a copy of the config was made meanwhile: set config._attn_implementation back"
            )
        _report(session, module, query, key, value, kwargs)
        return stock_attention(module, stock)(module, query, key, value, attention_mask, *args, **kwargs)

    AttentionInterface.register(name, attend)
    if stock in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[stock])
    return name


def _report(session: _Session, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> None:
    if getattr(module, "is_causal", True) is False:
        raise refuse(module.config, f"{type(module).__name__} is not causal")
    if kwargs.get("s_aux") is not None:
        raise refuse(module.config, "its heads have learned attention sinks (s_aux), which the 2-bit attention lacks")
    if kwargs.get("position_bias") is not None:
        raise refuse(module.config, "it adds a position bias to attention scores, which the 2-bit attention lacks")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise refuse(module.config, f"{type(module).__name__} has no layer_idx")
    scaling = kwargs.get("scaling")
    session.calls += 1
    session.callback(layer, q, k, v, q.shape[-1] ** -0.5 if scaling is None else float(scaling), kwargs.get("softcap"))


def decoder_configs(model: nn.Module) -> list[Any]:
    """Every distinct config object of the text decoder that a module of the model reads its attention's name from."""
    kind = type(text_config(model.config))
    found = [module.config for module in model.modules() if isinstance(getattr(module, "config", None), kind)]
    return list({id(c): c for c in found}.values())


@contextmanager
def capture(model: nn.Module, callback: Callback) -> Iterator[None]:
    """Call ``callback`` with each attention layer's post-RoPE q, k, v while the model runs; its outputs do not change.

    Run the model with ``use_cache=False``: with a cache, k and v hold its tokens too. Raises UnsupportedModelError for
    a model whose attention does not go through the interface.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise refuse(model.config, "its attention does not go through Transformers' attention interface")
    configs = decoder_configs(model)
    before = [config._attn_implementation for config in configs]
    session = _Session(callback)
    try:
        for config, stock in zip(configs, before, strict=True):
            _open[id(config)] = session
            config._attn_implementation_internal = _register(stock or "eager")
        yield
    finally:
        for config, stock in zip(configs, before, strict=True):
            config._attn_implementation_internal = stock
            _open.pop(id(config), None)
    if not session.calls:
        raise refuse(model.config, "its attention never called the interface's function")
