# SPDX-License-Identifier: Apache-2.0
"""``enable(model, artifact)``: attention ``oscar`` for one model, and a packed cache for plain ``generate``."""

from __future__ import annotations

import functools
import logging
import weakref
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ...artifact import Artifact
from ...errors import ArtifactError, CacheError, UnsupportedModelError
from ...kernels.base import KernelSet
from ...recipe import Recipe
from . import compat
from .attention import ENABLED, NAME, register
from .cache import OscarCache
from .codecs import codecs_of
from .layer import SOFTCAP_NEEDS_EAGER

log = logging.getLogger("oscar_kv")
Model = TypeVar("Model", bound=nn.Module)


@dataclass(eq=False)
class Enabled:
    """What ``enable`` did to a model: its artifact, and (config object, attention before) of its decoder."""

    artifact: Artifact
    stock: list[tuple[Any, str | None]]
    kernels: str | KernelSet | None = None

    def __post_init__(self) -> None:
        _states.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _states.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Enabled:
        """A copied model names its own configs; the artifact is shared."""
        new = memo[id(self)] = Enabled(self.artifact, [], self.kernels)
        new.stock += [(deepcopy(config, memo), name) for config, name in self.stock]
        return new

    def stock_name(self, config: Any) -> str | None:
        """The attention before ``enable`` of modules that hold this config object; None for other objects."""
        return next((name or "eager" for c, name in self.stock if c is config), None)

    def check_cache(self, cache: OscarCache) -> None:
        """Raise ArtifactError for a cache whose artifact was not seen to belong to this model.

        It does if it is the enabled one, or (another recipe's) names the same config fields and weight samples.
        """
        if cache.artifact is self.artifact or cache.codecs.sha256 == codecs_of(self.artifact).sha256:
            return
        theirs, own = cache.artifact.meta.model, self.artifact.meta.model
        if own.weight_samples and (theirs.weight_samples, theirs.config) == (own.weight_samples, own.config):
            return
        raise ArtifactError(
            f"the cache's artifact ({theirs.id!r}, sha256 {cache.codecs.sha256[:12]}) is not the one that this model "
            f"was enabled with ({own.id!r}, sha256 {codecs_of(self.artifact).sha256[:12]}): build the cache from that "
            "one, or oscar_kv.enable(model, artifact) with the cache's"
        )


_states: weakref.WeakSet[Enabled] = weakref.WeakSet()
"""Of all enabled models that are alive: two of them may hold one config object."""


def enable(
    model: Model,
    artifact: Artifact | str | Path,
    recipe: str | Recipe | None = None,
    kernels: str | KernelSet | None = None,
) -> Model:
    """Make this model's ``generate`` keep its KV cache in packed pages. Returns the model itself.

    artifact: calibration of this model, or its file. recipe: another recipe that the artifact's statistics can serve.
    kernels: "cuda", "triton" or "torch" for the caches that ``generate`` makes; None: what serves the device. Enabling
    again replaces the artifact. Raises ArtifactError where the artifact is another model's, RecipeError, and
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
    before = [(c, _attention_before(model, c)) for c in configs]
    if any(name == "sdpa" and getattr(c, "attn_logit_softcapping", None) for c, name in before):
        raise UnsupportedModelError(f"{type(model).__name__}: {SOFTCAP_NEEDS_EAGER}")
    cache = OscarCache(artifact, config, kernels=kernels)
    served = _served(cache, model)
    disable(model)
    state = Enabled(artifact, before, kernels)
    for c in configs:
        c._attn_implementation_internal = NAME
    for module in model.modules():
        if module is model or state.stock_name(getattr(module, "config", None)):
            module.__dict__[ENABLED] = state
    model.__dict__["generate"] = functools.partial(_generate, model)
    about = cache.describe()
    log.info(
        "oscar-kv enabled: recipe %s, artifact %s, kernels %s, %.2f bits per element at 32768 tokens",
        about["recipe"], about["artifact_sha256"][:12], served, about["bits_per_element_at_32768"],
    )  # fmt: skip
    return model


def _served(cache: OscarCache, model: nn.Module) -> str:
    """Which kernels serve the model where it is now; raises OscarError where they cannot. It may move later."""
    first = next(model.parameters(), None)
    if first is None or first.device.type == "meta":
        return "not chosen before the model has a device"
    dtype = getattr(model, "dtype", first.dtype)
    return ", ".join(f"{what} by {name}" for what, name in cache.serve(first.device, dtype).as_dict().items())


def disable(model: Model) -> Model:
    """Undo ``enable``: attention and ``generate`` are what they were. Does nothing to a model that is not enabled.

    A config object that another enabled model holds too keeps attention ``oscar`` until that one is disabled.
    """
    state = model.__dict__.get(ENABLED)
    if state is not None:
        for module in model.modules():
            module.__dict__.pop(ENABLED, None)
        model.__dict__.pop("generate", None)
        _states.discard(state)
        for config, name in state.stock:
            if not any(other.stock_name(config) for other in _states):
                config._attn_implementation_internal = name
    return model


def _attention_before(model: nn.Module, config: Any) -> str | None:
    """The attention to restore and to run without history; never ``oscar``, which would call itself."""
    name: str | None = config._attn_implementation
    if name != NAME:
        return name
    for state in _states:  # this model's own, or that of another model with the same config object
        for known, before in state.stock:
            if known is config:
                return before
    soft_capped = getattr(config, "attn_logit_softcapping", None)
    name = "sdpa" if getattr(model, "_supports_sdpa", False) and not soft_capped else "eager"
    log.info("%s was loaded with attention %r: without history, and after disable, it runs %r",
             type(model).__name__, NAME, name)  # fmt: skip
    return name


def _decoder_configs(model: nn.Module) -> list[Any]:
    """Every distinct config object from which a module of the text decoder reads its attention's name."""
    kind = type(compat.text_config(model.config))  # type: ignore[arg-type]
    found = [c for module in model.modules() if isinstance(c := getattr(module, "config", None), kind)]
    return list({id(c): c for c in found}.values())


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own generate, with a fresh packed cache where none is given."""
    state: Enabled = model.__dict__[ENABLED]
    given = {name: kwargs[name] for name in compat.CACHE_NAMES if kwargs.get(name) is not None}
    configs = [kwargs.get("generation_config", args[1] if len(args) > 1 else None), model.generation_config]

    def setting(name: str) -> Any:
        if kwargs.get(name) is not None:
            return kwargs[name]
        return next((x for c in configs if (x := getattr(c, name, None)) is not None), None)

    if (implementation := setting("cache_implementation")) is not None:
        raise CacheError(
            f"cache_implementation={implementation!r} asks for another cache than the packed one: leave it out (for a "
            "static one pass OscarCache(artifact, model.config, max_cache_len=…)), or oscar_kv.disable(model)"
        )
    if given:
        for name, cache in given.items():
            if not isinstance(cache, OscarCache):
                raise CacheError(
                    f"{name} is a {type(cache).__name__}, but this model keeps its cache packed: pass an OscarCache, "
                    "leave it out, or oscar_kv.disable(model)"
                )
    elif setting("use_cache") is not False:
        cache = OscarCache(state.artifact, model.config, kernels=state.kernels)
        if setting("is_assistant"):
            cache.activate_past_recording()
        kwargs[compat.cache_argument()] = cache
    out = type(model).generate(model, *args, **kwargs)
    for name in compat.CACHE_NAMES:  # compiled steps cannot say that the cache was full
        if isinstance(cache := kwargs.get(name), OscarCache) and cache.state is not None:
            cache.state.check_room()
    return out
