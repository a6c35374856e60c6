# SPDX-License-Identifier: Apache-2.0
"""What is done to keys and values: a frozen, validated recipe, and the presets by name."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import RecipeError

Bits = Annotated[int, Field(ge=1, le=4)]
"""Not a Literal: that would take ``True`` for 1 and ``2.0`` for 2."""
Rotation = Literal["none", "hadamard", "eigen", "eigen-layer"]
Step = Literal["minmax", "quantile", "least-squares"]
PAGE = 64
"""Tokens a page; the codec, the layout and the kernels all work on whole pages."""


class Recipe(BaseModel):
    """One way to store keys and values.

    Attributes
    ----------
    name : str
        What results and logs call it.
    k_bits, v_bits : {1, 2, 3, 4}
        Bits of a code.
    sink, recent : int
        Tokens at the start and at the end (the query's own included), kept as they came, in the model's dtype.
        ``recent`` is at least 64: a page is written when its 64th token has come, from rows still in the window.
    slack : int
        Rows that the ring of recent tokens keeps beyond ``recent``, so that up to that many tokens can be rolled back.
    centre : bool
        Subtract the calibrated centres: mean of the keys, attention-weighted mean of the values.
    rotation : {"none", "hadamard", "eigen", "eigen-layer"}
        ``eigen`` is U·H per KV head; ``eigen-layer`` is the published U·H·P_br, one for all heads of a layer.
    value_weight : {"attention", "query"}
        Weights of the value covariance: Σ_i p_it² over queries that read t from the history, or the published k C_Q kᵀ.
    step : {"minmax", "quantile", "least-squares"}
        Range of the row; range after clipping at a quantile of |row| (``k_clip``, ``v_clip``; published 0.96 and 0.92);
        or the step of least squared error.
    shaping : bool
        Round keys with error feedback shaped by the attention-weighted query covariance.
    unbiased : bool
        Stretch step and zero until ⟨x̂, x⟩ = ⟨x, x⟩ (row means removed; for keys in the metric of the error weight).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=64)
    k_bits: Bits
    v_bits: Bits
    sink: Annotated[int, Field(ge=0, le=4096)] = 64
    recent: Annotated[int, Field(ge=PAGE, le=65536)] = 256
    slack: Annotated[int, Field(ge=0, le=1024)] = 32
    centre: bool = True
    rotation: Rotation = "eigen"
    value_weight: Literal["attention", "query"] = "attention"
    step: Step = "least-squares"
    k_clip: Annotated[float, Field(gt=0, le=1)] | None = None
    v_clip: Annotated[float, Field(gt=0, le=1)] | None = None
    shaping: bool = True
    unbiased: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if (self.step == "quantile") != (self.k_clip is not None and self.v_clip is not None):
            raise ValueError("k_clip and v_clip belong to step='quantile', and only to it")
        if self.shaping and self.step != "least-squares":
            raise ValueError("shaping=True needs step='least-squares'")
        if self.step != "least-squares" and 1 in (self.k_bits, self.v_bits):
            raise ValueError("1 bit needs step='least-squares': min-max has no two-level form")
        return self

    def replace(self, **changes: Any) -> Recipe:
        """The recipe with some fields changed, validated anew. Raises RecipeError."""
        return make_recipe({**self.model_dump(), **changes})

    @property
    def windows(self) -> tuple[int, int]:
        """(sink, recent) in tokens."""
        return self.sink, self.recent


def make_recipe(fields: dict[str, Any]) -> Recipe:
    """Validate a mapping of fields. Raises RecipeError that names each bad field and the allowed ones."""
    if not isinstance(fields, dict):
        raise RecipeError(f"a recipe is a mapping of fields, got {type(fields).__name__}")
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'recipe'}: {e['msg']}" for e in error.errors()]
        raise RecipeError(
            "bad recipe:\n" + "\n".join(lines) + f"\nFields are: {', '.join(Recipe.model_fields)}"
        ) from error


def _preset(name: str, k_bits: int, v_bits: int, **fields: Any) -> Recipe:
    return make_recipe({"name": name, "k_bits": k_bits, "v_bits": v_bits, **fields})


_BARE: dict[str, Any] = {"centre": False, "shaping": False, "unbiased": False}

PRESETS: dict[str, Recipe] = {
    r.name: r
    for r in (
        _preset("k2v1", 2, 1),
        _preset("k2v2", 2, 2),
        _preset("k3v2", 3, 2),
        _preset("k3v3", 3, 3),
        _preset("k4v4", 4, 4),
        _preset("k2v2-plain", 2, 2, shaping=False, unbiased=False),
        _preset("naive", 2, 2, rotation="none", step="minmax", **_BARE),
        _preset("quarot", 2, 2, rotation="hadamard", step="minmax", **_BARE),
        _preset(
            "oscar-paper", 2, 2, rotation="eigen-layer", value_weight="query",
            step="quantile", k_clip=0.96, v_clip=0.92, **_BARE,
        ),
    )
}  # fmt: skip
ALIASES = {"oscar": "k2v2"}
DEFAULT = "k2v2"


def get_recipe(name: str | Recipe) -> Recipe:
    """A preset by name or alias. Raises RecipeError for an unknown one, with the nearest names."""
    if isinstance(name, Recipe):
        return name
    if not isinstance(name, str):
        raise RecipeError(f"a recipe is a preset's name or a Recipe, got {type(name).__name__}")
    key = ALIASES.get(name, name)
    if key not in PRESETS:
        near = difflib.get_close_matches(name, [*PRESETS, *ALIASES], n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise RecipeError(f"unknown recipe {name!r}.{hint} Presets: {', '.join([*PRESETS, *ALIASES])}")
    return PRESETS[key]
