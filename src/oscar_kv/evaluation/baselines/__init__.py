# SPDX-License-Identifier: Apache-2.0
"""Rival KV quantisers at stated bits, one file a method, run by the same exact emulation as the presets.

``get_baseline("kivi-2")`` is the method as published, ``get_baseline("kivi-2@ours")`` the same with this package's
windows (sink 64, recent 256). A method needs no artifact. What differs from the papers: docs/baselines.md.
"""

from __future__ import annotations

from ...errors import RecipeError
from ..rivals import OURS as OURS_SUFFIX
from ..rivals import is_baseline
from .base import OURS, Baseline, Stored, Windows
from .bound import BaselineEmulation, bind
from .fp8 import Fp8
from .kivi import Kivi
from .saw_int4 import SawInt4
from .squat import Squat
from .turboquant import TurboQuant

BASELINES: dict[str, Baseline] = {
    method.name: method
    for method in (
        Kivi(),
        Kivi(name="kivi-2-g64", group=64),
        Kivi(name="kivi-4", k_bits=4, v_bits=4),
        TurboQuant(name="turboquant-2", k_bits=2, v_bits=2),
        TurboQuant(),
        TurboQuant(name="turboquant-4", k_bits=4, v_bits=4),
        TurboQuant(name="turboquant-2-prod", k_bits=2, v_bits=2, keys_by="product"),
        TurboQuant(name="turboquant-3-prod", keys_by="product"),
        SawInt4(),
        SawInt4(name="saw-int4-kv", order=128, rotate_v=True),
        Squat(),
        Fp8(),
        Fp8(name="fp8-head", scale="head"),
        Fp8(name="fp8-unit", scale="unit"),
    )
}


def get_baseline(name: str) -> Baseline:
    """A rival by name, NAME@ours with this package's windows. Raises RecipeError for an unknown one."""
    if not is_baseline(name):
        raise RecipeError(
            f"unknown rival {name!r}: it is one of {', '.join(BASELINES)}, alone or followed by {OURS_SUFFIX}"
        )
    return BASELINES[name.removesuffix(OURS_SUFFIX)].at_windows("ours" if name.endswith(OURS_SUFFIX) else "published")


__all__ = [
    "BASELINES", "OURS", "Baseline", "BaselineEmulation", "Fp8", "Kivi", "SawInt4", "Squat", "Stored", "TurboQuant",
    "Windows", "bind", "get_baseline", "is_baseline",
]  # fmt: skip
