# SPDX-License-Identifier: Apache-2.0
"""Presets, and recipes through JSON."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from oscar_kv.recipe import ALIASES, DEFAULT, PRESETS, Recipe, get_recipe

ALL_STEPS = {"centre": True, "step": "least-squares", "shaping": True, "unbiased": True, "sink": 64, "recent": 256}


@pytest.mark.parametrize("name", ["k2v1", "k2v2", "k3v2", "k3v3", "k4v4"])
def test_a_preset_does_all_four_steps_and_its_name_says_its_bits(name: str) -> None:
    r = get_recipe(name)
    assert (r.k_bits, r.v_bits) == (int(name[1]), int(name[3]))
    assert {field: getattr(r, field) for field in ALL_STEPS} == ALL_STEPS


def test_comparisons_lack_exactly_what_they_should() -> None:
    plain, best = get_recipe("k2v2-plain").model_dump(), get_recipe("oscar").model_dump()
    assert {k for k in plain if plain[k] != best[k]} == {"name", "shaping", "unbiased"}
    assert ALIASES["oscar"] == DEFAULT == "k2v2"
    paper = get_recipe("oscar-paper")
    assert (paper.k_clip, paper.v_clip, paper.rotation, paper.value_weight) == (0.96, 0.92, "eigen-layer", "query")
    for name in ("naive", "quarot", "oscar-paper"):
        r = get_recipe(name)
        assert not (r.centre)
        assert not (r.shaping)
        assert not (r.unbiased)
        assert (r.k_bits, r.v_bits) == (2, 2)
    assert (get_recipe("naive").rotation, get_recipe("quarot").rotation) == ("none", "hadamard")


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name: str) -> None:
    r = PRESETS[name]
    assert Recipe.model_validate_json(r.model_dump_json()) == r
    assert get_recipe(r) is r


def test_recipes_are_frozen_and_replaced() -> None:
    r = get_recipe("k2v2")
    with pytest.raises(ValidationError):
        r.k_bits = 3  # type: ignore[misc]
    assert r.replace(k_bits=3).k_bits == 3
    assert r.k_bits == 2
    assert r.windows == (64, 256)
