# SPDX-License-Identifier: Apache-2.0
"""Everything that differs between the supported releases of Transformers, in one place."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from ...errors import OscarError, UnsupportedModelError

OLDEST, NEWEST = (5, 17), (5, 24)
SUPPORTED = ", ".join(f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1))


def parse_version(text: str) -> tuple[int, int]:
    """(major, minor) of a version string."""
    major, minor = [*text.split("."), "0"][:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


@cache
def version() -> tuple[int, int]:
    """(major, minor) of the installed Transformers."""
    import transformers

    return parse_version(transformers.__version__)


def check_version(installed: str | None = None) -> None:
    """Raise OscarError unless the release is one whose cache interface this package was tested with."""
    if installed is None:
        try:
            import transformers
        except ImportError as error:
            raise OscarError("Transformers is not installed: pip install 'oscar-kv[transformers]'") from error
        installed = transformers.__version__
    if not OLDEST <= parse_version(installed) <= NEWEST:
        raise OscarError(
            f"transformers {installed} is not supported, its cache interface may differ; these work: {SUPPORTED}"
        )


@cache
def cache_argument() -> str:
    """The name of ``generate``'s and ``forward``'s cache argument: ``past_key_values``, in later releases ``cache``."""
    from transformers import GenerationMixin

    names = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in names else "past_key_values"


CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""All names under which some release takes a cache."""


def positive_crop_is_length() -> bool:
    """Whether ``crop(n)`` with positive n still means "crop to n tokens" (removed in 5.18)."""
    return version() < (5, 18)


def stock_layers(config: Any, max_cache_len: int | None = None) -> list[Any]:
    """Transformers' own cache layers for a config, one a decoder layer; static ones for a cache of fixed length."""
    from transformers import DynamicCache, StaticCache

    if max_cache_len is None:
        layers = DynamicCache(config=config).layers
    else:
        layers = StaticCache(config=config, max_cache_len=max_cache_len).layers
    wanted = text_config(config).num_hidden_layers
    if len(layers) != wanted:
        raise UnsupportedModelError(f"{config.model_type}: {len(layers)} cache layers for {wanted} decoder layers")
    return layers


def text_config(config: Any) -> Any:
    """The decoder's config of a multimodal wrapper, or the config itself."""
    return config.get_text_config(decoder=True)
