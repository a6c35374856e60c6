# SPDX-License-Identifier: Apache-2.0
"""KL and perplexity against logits that are held whole, and what must hold of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oscar_kv.artifact import Artifact
from oscar_kv.calibration import data_free
from oscar_kv.errors import OscarError, UnsupportedModelError
from oscar_kv.evaluation import language
from oscar_kv.evaluation.emulation import Emulation, emulated
from oscar_kv.evaluation.language import Head, Tokens, curve, evaluate, summarise, tokenise
from oscar_kv.memory import bits_per_element, plan_bits_per_element

FIRST = 330


@pytest.fixture(scope="module")
def model(families: Any) -> Any:
    return families.tiny("llama")


@pytest.fixture(scope="module")
def artifacts(model: Any) -> dict[str, Artifact]:
    return {name: data_free(model.config, "tiny", name) for name in ("naive", "k2v2", "k4v4")}


def texts(families: Any, n: int = 400, count: int = 2) -> list[Tokens]:
    return [Tokens(f"t{i}", "prose", families.ids_of(n, i)) for i in range(count)]


def test_figures_equal_those_of_whole_logits(
    model: Any, artifacts: dict[str, Artifact], families: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(language._LOGITS, "cpu", 97 * 7)  # slices of seven positions
    (text,) = texts(families, count=1)
    full, got = evaluate(model, [text], {"bf16": None, "k2v2": artifacts["k2v2"]}, first=FIRST)
    with torch.no_grad():
        p = model(text.ids[None], use_cache=False).logits[0].double().log_softmax(-1)[FIRST:-1]
        with emulated(model, artifacts["k2v2"]):
            q = model(text.ids[None], use_cache=False).logits[0].double().log_softmax(-1)[FIRST:-1]
    target = text.ids[FIRST + 1 :, None]
    kl = (p.exp() * (p - q)).sum(-1)
    assert got.kl == pytest.approx(float(kl.mean()), rel=1e-4)
    torch.testing.assert_close(got.kl_by_position, kl.float(), rtol=1e-3, atol=1e-5)
    assert got.ppl == pytest.approx(float((-q.gather(-1, target)).mean().exp()), rel=1e-4)
    assert full.ppl == got.ppl_reference == pytest.approx(float((-p.gather(-1, target)).mean().exp()), rel=1e-4)
    assert got.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=0.02)


def test_full_precision_against_itself_is_zero(model: Any, families: Any) -> None:
    (result,) = evaluate(model, texts(families, count=1), {"bf16": None}, first=FIRST)
    assert result.kl == 0
    assert result.top1 == 1
    assert result.ppl == result.ppl_reference


def test_summary_and_curve_are_means_over_texts(model: Any, artifacts: dict[str, Artifact], families: Any) -> None:
    calls: list[tuple[int, int]] = []
    both = texts(families)
    results = evaluate(model, both, artifacts, first=FIRST, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(i + 1, 8) for i in range(8)]
    by_name = {s.recipe: s for s in summarise(results)}
    assert list(by_name) == ["naive", "k2v2", "k4v4"]
    own = [r for r in results if r.recipe == "k2v2"]
    assert by_name["k2v2"].kl == pytest.approx((own[0].kl + own[1].kl) / 2)
    assert by_name["k2v2"].ppl == pytest.approx((own[0].ppl * own[1].ppl) ** 0.5)
    assert by_name["k4v4"].kl < by_name["k2v2"].kl
    parts = curve(results, "k2v2", 23)
    assert len(parts) == 3
    assert sum(parts) / 3 == pytest.approx(by_name["k2v2"].kl, rel=1e-4)  # 69 positions: three whole buckets


def test_one_emulation_serves_several_calls(model: Any, artifacts: dict[str, Artifact], families: Any) -> None:
    ready = Emulation.of(artifacts["k2v2"], model)
    first = evaluate(model, texts(families, count=1), {"k2v2": ready}, first=FIRST)
    again = evaluate(model, texts(families, count=1), {"k2v2": artifacts["k2v2"]}, first=FIRST)
    assert first[0].kl == again[0].kl


@pytest.mark.parametrize("family", ["gemma2", "qwen3-moe"])
def test_heads_with_caps_and_ties(family: str, families: Any) -> None:
    other = families.tiny(family, final_logit_softcapping=3.0) if family == "gemma2" else families.tiny(family)
    ids = families.ids_of(40, 0)
    head = Head(other, ids)
    with torch.no_grad():
        want = other(ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(head(language.hidden_states(other, ids)), want, rtol=1e-4, atol=1e-4)


def test_a_head_that_differs_is_refused(families: Any) -> None:
    other = families.tiny("gemma2", final_logit_softcapping=3.0)
    forward = other.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    other.forward = scaled
    with pytest.raises(UnsupportedModelError, match="output matrix"):
        Head(other, families.ids_of(20, 0))


class Named:
    name, text = "short.txt", "only a few words"


def test_short_texts_are_refused(model: Any, families: Any, byte_tokenizer: Any) -> None:
    with pytest.raises(OscarError, match=r"short\.txt"):
        tokenise([Named()], "prose", byte_tokenizer, 512)
    with pytest.raises(OscarError, match="positions from 512"):
        evaluate(model, texts(families, 500), {"bf16": None})
    with pytest.raises(OscarError, match="no evaluation text"):
        evaluate(model, [], {"bf16": None})


def test_bits_an_element(artifact_of: Callable[..., Artifact]) -> None:
    from oscar_kv.geometry import LayerGeometry
    from oscar_kv.recipe import get_recipe

    def layer(d: int) -> LayerGeometry:
        return LayerGeometry(kind="full", num_q_heads=4, num_kv_heads=2, k_head_dim=d, v_head_dim=d)

    wide = (layer(128), LayerGeometry(kind="sliding"))
    assert plan_bits_per_element(wide, "k2v2", None) == 2.25
    assert 2.25 < plan_bits_per_element(wide, "k2v2", 131_072) <= 2.30
    assert plan_bits_per_element(wide, "k2v2", 32_768) <= 2.43
    # By hand: 15 pages of 64·(32+32)+512 bytes after the sink's page, 352 rows of 2·128 fp16 numbers, 1,024 tokens.
    by_hand = 8 * (15 * (64 * 64 + 512) + 352 * 256 * 2) / (1024 * 256)
    assert plan_bits_per_element(wide, "k2v2", 1024) == pytest.approx(by_hand)
    history = {
        name: plan_bits_per_element((layer(64),), name, None) for name in ("k2v1", "k2v2", "k3v2", "k3v3", "k4v4")
    }
    assert history == {"k2v1": 2.0, "k2v2": 2.5, "k3v2": 3.0, "k3v3": 3.5, "k4v4": 4.5}
    mixed = (layer(128), layer(64))
    plan = ((4, 4), None)
    assert plan_bits_per_element(mixed, "k2v2", None, plan) == pytest.approx((2 * 4.25 + 2.5) / 3)
    artifact = artifact_of((layer(64), layer(64)), get_recipe("k2v2"))
    assert bits_per_element(artifact, 2048) == plan_bits_per_element(artifact.meta.layers, "k2v2", 2048)
    with pytest.raises(OscarError, match="nothing to quantise"):
        plan_bits_per_element((LayerGeometry(kind="sliding"),), "k2v2", 64)
    with pytest.raises(OscarError, match="2 entries for 1"):
        plan_bits_per_element((layer(64),), "k2v2", 64, plan)
