# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv bench`` from the command line: the tiny case of every part, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oscar_kv.cli import app

OURS = {
    "decode": {"ms", "bytes", "share", "error", "times_faster"},
    "store": {"ms", "shaped", "what"},
    "prefill": {"ms", "error", "ratio", "peak_extra_bytes", "dense"},
    "model": {"ms", "tokens_per_s", "cache_bytes_per_token", "memory_ratio", "error"},
}


@pytest.mark.parametrize("part", list(OURS))
def test_the_tiny_case_runs_the_whole_path(part: str, runner: CliRunner, tmp_path: Path) -> None:
    file, picture = tmp_path / f"{part}.json", tmp_path / "p.png"
    words = ["bench", part, "--device", "cpu", "--tiny", "--json", str(file)]
    try:
        import matplotlib  # noqa: F401

        words += ["--plot", str(picture)]
    except ImportError:
        pass
    found = runner.invoke(app, words)
    assert found.exit_code == 0, found.output
    assert "NO BENCHMARK" in found.output
    document = json.loads(file.read_text())
    rows = document["rows"]
    ours = [r for r in rows if r["op"] == "oscar-torch"]
    assert ours
    assert all(OURS[part] <= set(r) for r in ours)
    assert all(r["ms"] > 0 for r in rows)
    assert document["meta"]["wrong"] == []
    assert document["meta"]["problems"] == []
    assert "oscar-cuda" in document["meta"]["missing"]
    assert picture.is_file() == ("--plot" in words)
    if part != "store":
        assert any(r["op"] == "sdpa-bf16" for r in rows)
        assert "fa3-bf16" in document["meta"]["missing"]
    else:
        prompt = [r for r in ours if r["what"] == "prompt"]
        assert {r["shaped"] for r in prompt} == {True, False}
        assert all(r["k_rows_off_percent"] <= 0.1 and r["percent_of_prefill"] > 0 for r in prompt)
        assert all(r["percent_of_decode"] > 0 for r in ours if r["what"] == "decode")


def test_contenders_can_be_chosen(runner: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    words = ["bench", "decode", "--device", "cpu", "--tiny", "--contenders", "sdpa-bf16", "--json", str(file)]
    assert runner.invoke(app, words).exit_code == 0
    document = json.loads(file.read_text())
    assert [r["op"] for r in document["rows"]] == ["sdpa-bf16"]
    assert document["meta"]["missing"] == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "everything"], "one of decode, store, prefill, model"),
        (["bench", "decode", "--device", "cpu"], "--tiny"),
        (["bench", "decode", "--device", "tpu9"], "--device"),
        (["bench", "decode", "--preset", "huge"], "table, others"),
        (["bench", "decode", "--shape", "q=7"], "7 query heads"),
        (["bench", "decode", "--tiny", "--shape", "q=8", "--device", "cpu"], "--shape"),
        (["bench", "prefill", "--compile-only", "7.5"], "8.0"),
        (["bench", "decode", "--compile-only", "sm_90"], "compute capability"),
        (["bench", "model", "--batches", "one"], "--batches"),
        (["bench", "model", "--batches", "1,-4"], "0 for the largest"),
        (["bench", "decode", "--shape", "batch=0"], "batch of 0"),
        (["bench", "model", "--shape", "layers=0"], "layers is 0"),
        (["bench", "decode", "--tiny", "--device", "cpu", "--preset", "huge"], "table, others"),
        (["bench", "decode", "--tiny", "--device", "cpu", "--fa3", "no_such.so"], "no such file"),
        (["bench", "decode", "--device", "cpu", "--tiny", "--contenders", "fa4"], "fa3-bf16"),
        (["bench", "decode", "--json", "/dev/null/x.json"], "--json"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_remedy(words: list[str], said: str, runner: CliRunner) -> None:
    found = runner.invoke(app, words)
    assert found.exit_code == 2, found.output
    assert said in found.output


def test_a_part_compiles_what_it_runs(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    from oscar_kv.kernels.cuda import compiler

    made: list[tuple[str, str]] = []
    monkeypatch.setattr(
        compiler, "compile_cached", lambda name, header, capability, headers: made.append((name, header))
    )
    files = {}
    for part in OURS:
        made.clear()
        assert runner.invoke(app, ["bench", part, "--compile-only", "9.0"]).exit_code == 0
        assert len(set(made)) == len(made), "nothing is compiled twice"
        files[part] = [name for name, _ in made]
    assert files["decode"].count("decode.cu") == 3, "4, 8 and 12 heads a group"
    assert files["store"].count("store.cu") == 2, "shaped and plain"
    assert "store.cu" in files["model"]
    assert files["prefill"] == ["dequantise.cu"]


def test_without_a_gpu_it_says_so(runner: CliRunner) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = runner.invoke(app, ["bench", "decode"])
    assert found.exit_code == 2
    assert "no CUDA device" in found.output
    assert "--device cpu --tiny" in found.output


def test_a_wrong_answer_gives_another_exit_code(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    from oscar_kv.bench.contenders import oscar

    monkeypatch.setattr(oscar, "decode_error", lambda out, x: 0.5)
    found = runner.invoke(app, ["bench", "decode", "--device", "cpu", "--tiny"])
    assert found.exit_code == 1
    assert "WRONG ANSWER: oscar-torch" in found.output


def test_nothing_begins_after_the_budget(runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oscar_kv.bench.report import Report

    monkeypatch.setattr(Report, "late", True)
    file = tmp_path / "d.json"
    found = runner.invoke(app, ["bench", "decode", "--device", "cpu", "--tiny", "--json", str(file)])
    assert found.exit_code == 0
    document = json.loads(file.read_text())
    assert document["rows"] == []
    assert "budget" in document["meta"]["missing"]["oscar-torch"]
