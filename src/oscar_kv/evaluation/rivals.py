# SPDX-License-Identifier: Apache-2.0
"""Names of the rival methods, without what they compute: a misspelt one is found before PyTorch is imported."""

from __future__ import annotations

import difflib

from ..errors import RecipeError
from ..recipe import get_recipe

NAMES = (
    "kivi-2", "kivi-2-g64", "kivi-4", "turboquant-2", "turboquant-3", "turboquant-4", "turboquant-2-prod",
    "turboquant-3-prod", "saw-int4", "saw-int4-kv", "squat-2", "fp8", "fp8-head", "fp8-unit",
)  # fmt: skip
"""What ``baselines.BASELINES`` holds."""
OURS = "@ours"
"""Behind a name: with this package's windows instead of the published ones."""


def is_baseline(name: str) -> bool:
    """Whether the name, with or without "@ours", is a rival's."""
    return name.removesuffix(OURS) in NAMES


def contestant_name(name: str) -> str:
    """What tables call a preset or a rival. Raises RecipeError for neither, with the names there are."""
    if is_baseline(name):
        return name
    try:
        return get_recipe(name).name
    except RecipeError as error:
        near = difflib.get_close_matches(name.partition("@")[0], NAMES, n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise RecipeError(
            f"{error}. Rivals, alone or followed by {OURS} (windows 64+256): {', '.join(NAMES)}.{hint}"
        ) from error
