# SPDX-License-Identifier: Apache-2.0
"""What each recipe makes of the moments; the data-free artifact; calibrate from end to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from families import CONFIGS, ids_of, tiny

from oscar_kv.artifact import Artifact
from oscar_kv.calibration import Moments, calibrate, collect, data_free, fit
from oscar_kv.calibration.data import Document
from oscar_kv.errors import CalibrationError, RecipeError, UnsupportedModelError
from oscar_kv.integrations.transformers.identity import check_model
from oscar_kv.recipe import PRESETS, get_recipe
from oscar_kv.transform import bit_reversal, hadamard


@pytest.fixture(scope="module")
def moments() -> Moments:
    return collect(tiny("qwen2"), [ids_of(1100, 1), ids_of(900, 2)], progress=False, model_id="toy", data="random ids")


def diagonal_of(basis: Tensor, matrix: Tensor) -> Tensor:
    """Off-diagonal share of basisᵀ matrix basis: 0 if the basis's columns are eigenvectors."""
    turned = basis.double().mT @ matrix @ basis.double()
    off = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    return off.norm() / turned.norm()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_fitted_and_saved(moments: Moments, name: str, tmp_path: Any) -> None:
    artifact = fit(moments, name)
    again = Artifact.load(artifact.save(tmp_path / "a.safetensors"))
    assert again.sha256 == artifact.sha256
    assert again.label == name
    assert again.meta.model.id == "toy" and again.meta.calibration.tokens == 2000
    assert again.meta.calibration.data == "random ids"
    recipe = get_recipe(name)
    for i, t in artifact.layers.items():
        assert (t.k.rotation is None) == (recipe.rotation == "none")
        assert (t.error_weight is None) == (not recipe.shaping)
        assert bool(t.k.centre.any()) == recipe.centre
        assert artifact.codec(i).num_kv_heads == 2
    check_model(artifact, tiny("qwen2"))


def test_keys_turn_by_the_weighted_query_covariance(moments: Moments) -> None:
    artifact = fit(moments, "k2v2")
    h = hadamard(16)
    for i, t in artifact.layers.items():
        assert t.k.rotation is not None
        basis = t.k.rotation.double() @ h.T
        assert diagonal_of(basis, moments.layers[i]["uq_outer"]) < 1e-6
        assert diagonal_of(basis, moments.layers[i]["q_outer"]) > 1e-3, "the plain covariance would not tell them apart"


def test_values_turn_by_the_weighted_covariance_about_the_weighted_mean(moments: Moments) -> None:
    artifact = fit(moments, "k2v2")
    for i, t in artifact.layers.items():
        sums = moments.layers[i]
        mean = sums["wv_sum"] / sums["w_sum"][:, None]
        torch.testing.assert_close(t.v.centre.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(t.k.centre.double(), sums["k_sum"] / 2000, rtol=1e-5, atol=1e-6)
        covariance = sums["wv_outer"] / sums["w_sum"][:, None, None] - mean[:, :, None] * mean[:, None, :]
        assert t.v.rotation is not None
        assert diagonal_of(t.v.rotation.double() @ hadamard(16).T, covariance) < 1e-6


def test_error_weight_is_the_weighted_covariance_in_the_keys_basis(moments: Moments) -> None:
    for name in ("k2v2", "k4v4"):
        for i, t in fit(moments, name).layers.items():
            assert t.k.rotation is not None and t.error_weight is not None
            r = t.k.rotation.double()
            a = r.mT @ moments.layers[i]["uq_outer"] @ r
            a = a / a.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] + 0.02 * torch.eye(16)
            torch.testing.assert_close(t.error_weight.double(), a, rtol=1e-5, atol=1e-6)


def test_the_published_recipe(moments: Moments) -> None:
    artifact = fit(moments, "oscar-paper")
    assert artifact.meta.calibration.covariance_of_values == "chunk"
    undo = torch.empty(16, dtype=torch.long)
    undo[bit_reversal(16)] = torch.arange(16)
    for i, t in artifact.layers.items():
        assert not t.k.centre.any() and not t.v.centre.any() and t.error_weight is None
        for rotation, fields in ((t.k.rotation, ("q_outer", None)), (t.v.rotation, ("cv_outer", "c_sum"))):
            assert rotation is not None and torch.equal(rotation[0], rotation[1]), "one rotation a layer"
            basis = rotation[0][:, undo].double() @ hadamard(16).T
            total = moments.layers[i][fields[0]]
            if fields[1] is not None:
                total = total / moments.layers[i][fields[1]][:, None, None]
            assert diagonal_of(basis, total.mean(0)) < 1e-6


def test_heads_that_never_read_the_history_are_noted(moments: Moments) -> None:
    layers = {i: dict(s) for i, s in moments.layers.items()}
    for f in ("w_sum", "wv_sum", "wv_outer", "u_sum", "uq_outer"):
        layers[1][f] = layers[1][f].clone()
        layers[1][f][0] = 0
    artifact = fit(Moments(moments.meta, layers), "k2v2")
    assert "1.0 read nothing from the history" in artifact.meta.calibration.notes
    plain = moments.layers[1]["v_sum"][0] / 2000
    torch.testing.assert_close(artifact.layers[1].v.centre[0].double(), plain, rtol=1e-5, atol=1e-6)
    assert "read nothing" not in fit(moments, "k2v2").meta.calibration.notes


def test_other_windows_than_the_moments_are_noted(moments: Moments) -> None:
    assert not fit(moments, "k2v2").meta.calibration.notes
    assert "sink 64 and recent 256" in fit(moments, get_recipe("k2v2").replace(recent=512)).meta.calibration.notes


def test_plans(moments: Moments) -> None:
    artifact = fit(moments, "k2v2", [(3, 2), (1, 4)])
    assert (artifact.layer_recipe(0).k_bits, artifact.layer_recipe(1).v_bits) == (3, 4)
    with pytest.raises(RecipeError, match="plan"):
        fit(moments, "k2v2", [(3, 2)])


def test_moments_without_tokens_are_refused(moments: Moments) -> None:
    with pytest.raises(CalibrationError, match="no tokens"):
        fit(Moments(moments.meta.model_copy(update={"tokens": 0}), moments.layers))


@pytest.mark.parametrize("family", CONFIGS)
def test_data_free_needs_the_config_alone(family: str, tmp_path: Any) -> None:
    config = CONFIGS[family]()
    artifact = Artifact.load(data_free(config, "toy", "k3v2").save(tmp_path / "a.safetensors"))
    recipe = artifact.recipe
    assert (recipe.rotation, recipe.centre, recipe.shaping) == ("hadamard", False, False)
    assert (recipe.k_bits, recipe.v_bits, recipe.unbiased) == (3, 2, True)
    assert artifact.meta.calibration.source == "data-free" and artifact.meta.calibration.tokens == 0
    assert "data-free" in recipe.name and "data-free" in artifact.label
    for t in artifact.layers.values():
        assert t.error_weight is None and not t.k.centre.any() and not t.v.centre.any()
        assert t.k.rotation is not None
        d = t.k.rotation.shape[-1]
        torch.testing.assert_close(t.k.rotation.double(), hadamard(d).expand_as(t.k.rotation), rtol=0, atol=1e-7)
    check_model(artifact, tiny(family))


def test_data_free_refuses_a_model_without_full_attention() -> None:
    with pytest.raises(UnsupportedModelError, match="nothing to quantise"):
        data_free(CONFIGS["mistral"](sliding_window=64), "toy")


class Characters:
    """A tokenizer of one token a character."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 90 for c in text]}


def test_calibrate_from_a_file(tmp_path: Any) -> None:
    model = tiny("llama")
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i * i} of the text\n" for i in range(200)))
    artifact = calibrate(model, Characters(), path, tokens=2000, chunk=1000, progress=False, model_id="toy")
    assert artifact.label == "k2v2"
    c = artifact.meta.calibration
    assert (c.source, c.tokens, c.chunk, c.data) == ("calibrated", 2000, 1000, "text.txt (1 document)")
    assert len(c.data_sha256) == 64
    same = calibrate(
        model, Characters(), [Document("x", path.read_text())], tokens=2000, chunk=1000, progress=False, model_id="toy"
    )
    assert same.meta.calibration.data_sha256 == c.data_sha256
    for name, x in artifact.tensors().items():
        assert torch.equal(x, same.tensors()[name]), "the same text gives the same file"
    check_model(artifact, model)
    with pytest.raises(CalibrationError, match="500 calibration tokens, the floor"):
        calibrate(model, Characters(), path, tokens=500, chunk=1000, progress=False)
