# SPDX-License-Identifier: Apache-2.0
"""oscar-kv: a 2-bit KV cache for the engine you already run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "Artifact": "artifact",
    "OscarError": "errors",
    "PRESETS": "recipe",
    "Recipe": "recipe",
    "get_recipe": "recipe",
    "OscarCache": "integrations.transformers",
    "enable": "integrations.transformers",
    "disable": "integrations.transformers",
    "calibrate": "calibration",
}
__all__ = ["PRESETS", "Artifact", "OscarCache", "OscarError", "Recipe", "calibrate", "disable", "enable", "get_recipe"]

if TYPE_CHECKING:
    from .artifact import Artifact as Artifact
    from .calibration import calibrate as calibrate
    from .errors import OscarError as OscarError
    from .integrations.transformers import OscarCache as OscarCache
    from .integrations.transformers import disable as disable
    from .integrations.transformers import enable as enable
    from .recipe import PRESETS as PRESETS
    from .recipe import Recipe as Recipe
    from .recipe import get_recipe as get_recipe


def __getattr__(name: str) -> Any:
    """Parts are imported when first asked for: ``import oscar_kv`` stays light."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
