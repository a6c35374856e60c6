# SPDX-License-Identifier: Apache-2.0
"""``enable(model, artifact)``: attention ``oscar`` for one model, and a packed cache for plain ``generate``."""

from __future__ import annotations

import functools
import logging
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ...artifact import Artifact
from ...errors import CacheError, UnsupportedModelError
from ...recipe import Recipe
from . import compat
from .attention import NAME, register, stock_of
from .cache import OscarCache
from .layer import SOFTCAP_NEEDS_EAGER

log = logging.getLogger("oscar_kv")
_KEY = "_oscar_kv"
Model = TypeVar("Model", bound=nn.Module)


@dataclass
class Enabled:
    """What ``enable`` did to a model: its artifact, and (config object, attention before) of its decoder."""

    artifact: Artifact
    stock: list[tuple[Any, str | None]]

    def __deepcopy__(self, memo: dict[int, Any]) -> Enabled:
        """A copied model names its own configs; the artifact is shared."""
        copies = [(memo.get(id(config), config), name) for config, name in self.stock]
        for config, name in copies:
            stock_of[id(config)] = name or "eager"
        return Enabled(self.artifact, copies)


def enable(model: Model, artifact: Artifact | str | Path, recipe: str | Recipe | None = None) -> Model:
    """Make this model's ``generate`` keep its KV cache in packed pages. Returns the model itself.

    artifact: calibration of this model, or its file. recipe: another recipe that the artifact's statistics can serve.
    Enabling again replaces the artifact. Raises ArtifactError where the artifact is another model's, RecipeError, and
    UnsupportedModelError (latent attention, encoder-decoders, attention outside Transformers' interface …).
    """
    compat.check_version()
    register()
    from .geometry import layer_geometries
    from .identity import check_model

    if not isinstance(artifact, Artifact):
        artifact = Artifact.load(artifact)
    if recipe is not None:
        artifact = artifact.with_recipe(recipe)
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a Transformers model that generates")
    layer_geometries(config)
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{type(model).__name__}: its attention does not go through Transformers' attention interface, so the "
            "packed cache cannot serve it; use the full-precision cache"
        )
    check_model(artifact, model)
    configs = _decoder_configs(model)
    before = model.__dict__[_KEY].stock if _KEY in model.__dict__ else [(c, c._attn_implementation) for c in configs]
    if any(name == "sdpa" and getattr(c, "attn_logit_softcapping", None) for c, name in before):
        raise UnsupportedModelError(f"{type(model).__name__}: {SOFTCAP_NEEDS_EAGER}")
    cache = OscarCache(artifact, config)
    disable(model)
    state = Enabled(artifact, [(c, c._attn_implementation) for c in configs])
    for c, name in state.stock:
        stock_of[id(c)] = name or "eager"
        c._attn_implementation_internal = NAME
    model.__dict__[_KEY] = state
    model.__dict__["generate"] = functools.partial(_generate, model)
    weakref.finalize(model, _forget, [c for c, _ in state.stock])
    about = cache.describe()
    log.info(
        "oscar-kv enabled: recipe %s, artifact %s, kernel %s, %.2f bits per element at 32768 tokens",
        about["recipe"], about["artifact_sha256"][:12], about["kernel"], about["bits_per_element_at_32768"],
    )  # fmt: skip
    return model


def disable(model: Model) -> Model:
    """Undo ``enable``: attention and ``generate`` are what they were. Does nothing to a model that is not enabled."""
    state = model.__dict__.pop(_KEY, None)
    if state is not None:
        model.__dict__.pop("generate", None)
        for config, name in state.stock:
            config._attn_implementation_internal = name
        _forget([config for config, _ in state.stock])
    return model


def _forget(configs: list[Any]) -> None:
    for config in configs:
        stock_of.pop(id(config), None)


def _decoder_configs(model: nn.Module) -> list[Any]:
    """Every distinct config object from which a module of the text decoder reads its attention's name."""
    kind = type(compat.text_config(model.config))  # type: ignore[arg-type]
    found = [c for module in model.modules() if isinstance(c := getattr(module, "config", None), kind)]
    return list({id(c): c for c in found}.values())


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own generate, with a fresh packed cache where none is given."""
    state: Enabled = model.__dict__[_KEY]
    given = {name: kwargs[name] for name in compat.CACHE_NAMES if kwargs.get(name) is not None}
    configs = [kwargs.get("generation_config", args[1] if len(args) > 1 else None), model.generation_config]

    def setting(name: str) -> Any:
        if kwargs.get(name) is not None:
            return kwargs[name]
        return next((x for c in configs if (x := getattr(c, name, None)) is not None), None)

    if (implementation := setting("cache_implementation")) is not None:
        raise CacheError(
            f"cache_implementation={implementation!r} asks for another cache than the packed one: leave it out, or "
            "oscar_kv.disable(model)"
        )
    if given:
        for name, cache in given.items():
            if not isinstance(cache, OscarCache):
                raise CacheError(
                    f"{name} is a {type(cache).__name__}, but this model keeps its cache packed: pass an OscarCache, "
                    "leave it out, or oscar_kv.disable(model)"
                )
    elif setting("use_cache") is not False:
        cache = OscarCache(state.artifact, model.config)
        if setting("is_assistant"):
            cache.activate_past_recording()
        kwargs[compat.cache_argument()] = cache
    return type(model).generate(model, *args, **kwargs)
