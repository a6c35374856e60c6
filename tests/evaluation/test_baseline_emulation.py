# SPDX-License-Identifier: Apache-2.0
"""Rivals in the exact emulation: against a loop over queries, on tiny models, on SmolLM2, and in ``oscar-kv eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from oscar_kv.cli import app
from oscar_kv.errors import OscarError
from oscar_kv.evaluation import emulation
from oscar_kv.evaluation.baselines import BaselineEmulation, Fp8, Kivi, SawInt4, Squat, TurboQuant, Windows, bind
from oscar_kv.evaluation.baselines import get_baseline as rival
from oscar_kv.evaluation.baselines.attend import attend
from oscar_kv.evaluation.emulation import emulated
from oscar_kv.evaluation.language import Tokens, evaluate
from oscar_kv.evaluation.needles import Sample, retrieve
from oscar_kv.evaluation.results import QualityRow, read
from oscar_kv.evaluation.run import bits_of, quality_rows, subjects_of


def oracle(
    q: Tensor, rows: tuple[Tensor, Tensor], hats: tuple[Tensor, Tensor], windows: Windows, scaling: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Query by query, key list by key list: [B, n, Hq, dv]."""
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], rows[1].shape[-1], dtype=torch.float64)
    for b in range(q.shape[0]):
        for head in range(q.shape[1]):
            h = head // (q.shape[1] // rows[0].shape[1])
            for i in range(q.shape[2]):
                keys, values = [], []
                for t in range(i + 1):
                    old_v = t >= windows.sink and i - t >= windows.recent
                    old_k = t < i // windows.key_block * windows.key_block if windows.key_block else old_v
                    keys.append((hats[0] if old_k else rows[0])[b, h, t])
                    values.append((hats[1] if old_v else rows[1])[b, h, t])
                logits = torch.stack(keys) @ q[b, head, i] * scaling
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                out[b, i, head] = logits.softmax(-1) @ torch.stack(values)
    return out


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "windows",
    [Windows(), Windows(0, 1), Windows(5, 0), Windows(7, 20), Windows(0, 16, key_block=16), Windows(150, 20)],
    ids=str,
)
def test_attention_under_any_windows(windows: Windows, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from oscar_kv.evaluation.baselines import attend as module

    gen = torch.Generator().manual_seed(0)
    n = 70

    def draw(heads: int, d: int) -> Tensor:
        return torch.randn(2, heads, n, d, generator=gen, dtype=torch.float64)

    q, k, v, k_hat, v_hat = draw(4, 16), draw(2, 16), draw(2, 8), draw(2, 16), draw(2, 8)
    expected = oracle(q, (k, v), (k_hat, v_hat), windows, 0.4, softcap)
    for short in (128, 24, 1):
        monkeypatch.setattr(module, "_SHORT", short)
        out = attend(q, (k, v), (k_hat, v_hat), windows, 0.4, softcap)
        assert torch.allclose(out, expected, atol=1e-10)


def of(method: Any, model: Any) -> BaselineEmulation:
    return BaselineEmulation.of(method, model)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_a_model_reads_codes_outside_the_windows_alone(family: str, families: Any) -> None:
    """With an exact copy in place of codes, nothing changes; with codes, only what lies behind the window does."""
    extra = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = families.tiny(family, **extra).double()
    if extra:
        model.config._attn_implementation = "eager"
    ids = families.ids_of(300, 1)[None]
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        kivi = of(Kivi(), model)
        with emulated(model, kivi):
            coded = model(ids, use_cache=False).logits
            short = model(ids[:, :128], use_cache=False).logits
        with emulated(model, of(Exact(), model)):
            same = model(ids, use_cache=False).logits
        assert torch.equal(short, model(ids[:, :128], use_cache=False).logits)
    close = 1e-5 if extra else 1e-8  # eager attention takes its softmax in fp32
    assert torch.allclose(same, full, atol=close)
    assert torch.allclose(coded[:, :128], full[:, :128], atol=close)
    assert not torch.allclose(coded[:, 128:], full[:, 128:], atol=1e-3)


class Exact(TurboQuant):
    """A method that stores everything."""

    def quantise_layer(self, layer: int, k: Tensor, v: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


def test_prefilled_queries_read_everything_and_squat_sees_the_prompt_alone(families: Any) -> None:
    model = families.tiny("llama")
    seen: list[int] = []

    class Spy(Squat):
        def keys(self, k: Tensor, q: Tensor) -> Any:
            seen.append(q.shape[2])
            return super().keys(k, q)

    ids = families.ids_of(700, 2)
    entry = of(Spy(), model)
    seen.clear()
    with torch.no_grad():
        full = model(ids[None], use_cache=False).logits
        with emulated(model, entry):
            model(ids[None], use_cache=False)
            assert set(seen) == {512}
            seen.clear()
            entry.prefill = 650
            prefilled = model(ids[None], use_cache=False).logits
    assert set(seen) == {650}
    assert torch.allclose(prefilled[:, :650], full[:, :650], atol=1e-5)
    assert not torch.allclose(prefilled[:, 650:], full[:, 650:], atol=1e-3)
    (found,) = retrieve(model, [Sample(ids, 4, "key", "1234567", ())], {"squat-2": entry}, prefill="exact")
    assert len(found.right) == 1
    assert entry.prefill == 696


def test_more_bits_cost_less_on_a_random_model(families: Any) -> None:
    model = families.tiny("llama")
    methods = [
        Fp8(), SawInt4(), TurboQuant(name="turboquant-3", k_bits=3, v_bits=3),
        TurboQuant(name="turboquant-2", k_bits=2, v_bits=2),
    ]  # fmt: skip
    subjects = subjects_of(bind(methods, model))
    texts = [Tokens(str(s), "prose", families.ids_of(640, s)) for s in range(2)]
    rows = quality_rows(evaluate(model, texts, subjects), subjects)
    kl = [r.kl for r in rows]
    assert kl[0] == 0 < kl[1] < kl[2] < kl[3] < kl[4] < float("inf")
    assert [r.bpe_history for r in rows] == pytest.approx([16, 8, 4 + 32 / 16, 3 + 16 / 16, 2 + 16 / 16], abs=1e-6)
    assert [r.windows for r in rows] == [None] + [(0, 0)] * 4
    assert all(r.artifact_sha256 is None for r in rows)
    assert bits_of(None) == bits_of(None, 100) == 16


def test_equal_windows_are_fairer_than_published_ones(families: Any) -> None:
    """A wider window helps every method, and its row says so."""
    model = families.tiny("llama")
    names = ("turboquant-2", "turboquant-2@ours", "squat-2", "squat-2@ours")
    subjects = bind([rival(n) for n in names], model)
    rows = quality_rows(evaluate(model, [Tokens("a", "prose", families.ids_of(700, 3))], subjects), subjects)
    found = {r.recipe: r for r in rows}
    assert found["turboquant-2@ours"].kl < found["turboquant-2"].kl
    assert found["squat-2@ours"].kl < found["squat-2"].kl
    assert found["squat-2@ours"].windows == (64, 256)
    assert found["squat-2@ours"].bpe > found["squat-2"].bpe


def test_an_artifact_and_a_rival_do_not_mix_up(families: Any) -> None:
    model = families.tiny("llama")
    entry = of(Fp8(), model)
    with emulated(model, entry), pytest.raises(OscarError, match="being emulated already"), emulated(model, entry):
        pass
    assert not emulation._open


def test_eval_runs_rivals_beside_presets_and_without_calibration(
    families: Any, byte_tokenizer: Any, tmp_path: Path
) -> None:
    from oscar_kv.calibration import data_free

    model = families.tiny("llama", vocab_size=257)
    model.save_pretrained(tmp_path / "tiny")
    byte_tokenizer.save_pretrained(tmp_path / "tiny")
    data_free(model.config, "tiny").save(tmp_path / "tiny.safetensors")
    (tmp_path / "words.txt").write_text(" ".join(str(7919 * i % 100003) for i in range(200)))

    def run(*arguments: str) -> Any:
        fixed = ["eval", str(tmp_path / "tiny"), "--texts", str(tmp_path / "words.txt"), "--contexts", "600"]
        return CliRunner().invoke(app, [*fixed, *arguments])

    out = tmp_path / "out.json"
    done = run("--recipes", "fp8,kivi-2,kivi-2@ours,squat-2,saw-int4,turboquant-3", "--json", str(out))
    assert done.exit_code == 0, done.output
    assert "calibrating" not in done.output
    found = [r for r in read(out).rows if isinstance(r, QualityRow)]
    order = ["bf16", "fp8", "kivi-2", "kivi-2@ours", "squat-2", "saw-int4", "turboquant-3"]
    assert [r.recipe for r in found] == order
    assert [r.windows for r in found] == [None, (0, 0), (0, 128), (64, 256), (0, 32), (0, 0), (0, 0)]
    assert "64+256" in done.output

    done = run(
        "--artifact", str(tmp_path / "tiny.safetensors"), "--recipes", "fp8,naive", "--needles", "1",
        "--needle-context", "1024", "--json", str(out),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    names = ["bf16", "k2v2-data-free (data-free)", "fp8", "naive"]
    assert [r.recipe for r in read(out).rows] == names * 2
    assert [r.artifact_sha256 is None for r in read(out).rows] == [True, False, True, False] * 2

    done = run("--recipes", "kivi-9")
    assert done.exit_code == 2
    assert "turboquant-3" in done.output
    assert "k2v2" in done.output
    done = run("--recipes", "kivi-2@theirs")
    assert done.exit_code == 2
    assert "@ours" in done.output


def test_a_head_that_a_method_cannot_serve_is_refused_at_once(families: Any) -> None:
    model = families.tiny("llama", hidden_size=192)  # heads of 48
    with pytest.raises(OscarError, match="do not divide a head of 48"):
        of(Kivi(), model)


@pytest.mark.slow
def test_order_on_smollm2(smollm2: Path) -> None:
    from oscar_kv.evaluation.language import tokenise
    from oscar_kv.evaluation.run import evaluation_texts
    from oscar_kv.integrations.transformers.loading import load_model

    model, tokenizer = load_model(str(smollm2), "float32", "cpu")
    names = ("fp8", "saw-int4", "turboquant-3", "turboquant-2")
    subjects = bind([rival(n) for n in names], model)
    text = tokenise(evaluation_texts("prose", 1), "prose", tokenizer, 640)
    kl = {r.recipe: r.kl for r in evaluate(model, text, subjects)}
    assert 0 < kl["fp8"] < kl["saw-int4"] < kl["turboquant-3"] < kl["turboquant-2"] < float("inf")
