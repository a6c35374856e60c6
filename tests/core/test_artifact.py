# SPDX-License-Identifier: Apache-2.0
"""Save, load, other recipes over the same statistics, and pages that a loaded artifact reads alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from core_cases import make_artifact

from oscar_kv.artifact import Artifact, LayerTensors
from oscar_kv.errors import ArtifactError, OscarError, RecipeError
from oscar_kv.recipe import PRESETS, get_recipe
from oscar_kv.transform import SideTransform

PLAN = [(3, 2), None, (1, 4)]


@pytest.mark.parametrize("recipe", PRESETS)
def test_a_saved_artifact_is_the_same_artifact(recipe: str, tmp_path: Path) -> None:
    before = make_artifact(recipe)
    after = Artifact.load(before.save(tmp_path / "deep" / "a.safetensors"))
    assert after.sha256 == before.sha256
    assert after.recipe == before.recipe
    assert before.tensors().keys() == after.tensors().keys()
    assert all(torch.equal(t, after.tensors()[name]) for name, t in before.tensors().items())
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.safetensors"]
    k, v = torch.randn(2, 2, 64, 32), torch.randn(2, 2, 64, 16)
    for layer in (0, 2):
        assert torch.equal(before.codec(layer).encode(k, v), after.codec(layer).encode(k, v))


def test_a_plan_sets_each_layer_s_bits_and_survives(artifact: Artifact, tmp_path: Path) -> None:
    planned = artifact.with_recipe("k2v2", PLAN)
    loaded = Artifact.load(planned.save(tmp_path / "a.safetensors"))
    assert [(loaded.layer_recipe(i).k_bits, loaded.layer_recipe(i).v_bits) for i in (0, 2)] == [(3, 2), (1, 4)]
    assert "bits per layer" in loaded.label
    assert loaded.sha256 != artifact.sha256
    layout = loaded.codec(2).layout
    assert (layout.k_bits, layout.v_bits) == (1, 4)


def test_the_hash_sees_every_change(artifact: Artifact) -> None:
    other = artifact.with_recipe(get_recipe("k2v2").replace(slack=16))
    assert len({artifact.sha256, other.sha256, artifact.with_recipe("k3v2").sha256, make_artifact(seed=1).sha256}) == 4


def test_other_recipes_over_the_same_statistics(artifact: Artifact) -> None:
    plain = artifact.with_recipe("k2v2-plain")
    assert all(t.error_weight is None for t in plain.layers.values())
    naive = artifact.with_recipe("naive")
    assert all(t.k.rotation is None and not t.k.centre.any() for t in naive.layers.values())
    quarot = artifact.with_recipe("quarot")
    assert all(t.k.rotation is not None for t in quarot.layers.values())
    for derived in (plain, naive, quarot):
        derived.validate()
    with pytest.raises(RecipeError, match=r"rotation='eigen-layer'.*calibrate again"):
        artifact.with_recipe("oscar-paper")
    with pytest.raises(RecipeError, match="shaping=True"):
        plain.with_recipe("k2v2")
    with pytest.raises(RecipeError, match="the plan has 1 entries for 3 layers"):
        artifact.with_recipe("k2v2", [(2, 2)])


def test_decoding_gives_back_nearly_what_was_encoded(artifact: Artifact) -> None:
    best = artifact.with_recipe("k4v4").codec(0)
    k, v = torch.randn(3, 2, 64, 32), torch.randn(3, 2, 64, 16)
    k_back, v_back = best.decode(best.encode(k, v))
    assert (k_back - k).square().mean() < 0.03
    assert (v_back - v).square().mean() < 0.03


def test_pages_do_not_depend_on_how_many_come_together(artifact: Artifact) -> None:
    codec, k, v = artifact.codec(0), torch.randn(70, 2, 64, 32), torch.randn(70, 2, 64, 16)
    together = codec.encode(k, v)
    assert torch.equal(together, torch.cat([codec.encode(k[i : i + 7], v[i : i + 7]) for i in range(0, 70, 7)]))
    assert torch.equal(together, torch.cat([codec.encode(k[i : i + 1], v[i : i + 1]) for i in range(70)]))


def test_infinities_in_the_input_give_no_nan_and_touch_no_other_row(artifact: Artifact) -> None:
    codec, k, v = artifact.codec(0), torch.randn(1, 2, 64, 32), torch.randn(1, 2, 64, 16)
    clean = codec.decode(codec.encode(k, v))
    k[0, 0, 5, 1], k[0, 1, 9], v[0, 0, 63, 0] = float("inf"), float("nan"), float("-inf")
    spoilt = codec.decode(codec.encode(k, v))
    for before, after, rows in zip(clean, spoilt, ([(0, 5), (1, 9)], [(0, 63)]), strict=True):
        assert torch.isfinite(after).all()
        for head, row in rows:
            after[0, head, row] = before[0, head, row]
        assert torch.equal(before, after)


def test_half_precision_input_is_computed_in_the_codec_s_dtype(artifact: Artifact) -> None:
    codec, k, v = artifact.codec(0), torch.randn(1, 2, 64, 32).bfloat16(), torch.randn(1, 2, 64, 16).bfloat16()
    assert torch.equal(codec.encode(k, v), codec.encode(k.float(), v.float()))


def test_what_the_codec_refuses(artifact: Artifact) -> None:
    codec = artifact.codec(0)
    with pytest.raises(OscarError, match="whole pages"):
        codec.encode(torch.randn(1, 2, 63, 32), torch.randn(1, 2, 63, 16))
    with pytest.raises(OscarError, match="v has shape"):
        codec.encode(torch.randn(1, 2, 64, 32), torch.randn(1, 2, 64, 32))
    with pytest.raises(ArtifactError, match=r"layer 1 is not in the artifact; it covers layers \[0, 2\]"):
        artifact.codec(1)


def test_nothing_is_written_that_would_not_load(artifact: Artifact, tmp_path: Path) -> None:
    bad = LayerTensors(
        SideTransform(torch.full((2, 32), float("nan")), artifact.layers[0].k.rotation), artifact.layers[0].v
    )
    with pytest.raises(ArtifactError, match=r"layers\.0\.k_centre holds NaN"):
        Artifact(artifact.meta, {**artifact.layers, 0: bad}).save(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())
