# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv demo`` from end to end, with a tiny random model in SmolLM2's place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oscar_kv.cli import app
from oscar_kv.cli.demo import RECIPES
from oscar_kv.errors import OscarError


@pytest.fixture
def in_its_place(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_kv.demo.model.demo_model_path", lambda: tiny_model)


def test_the_whole_demo(runner: CliRunner, in_its_place: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the report needs the extra oscar-kv[demo]")
    call = [
        "demo",
        "--out",
        str(tmp_path),
        "--texts",
        "1",
        "--context",
        "1024",
        "--tokens",
        "2048",
        "--max-new-tokens",
        "4",
    ]
    result = runner.invoke(app, call, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "report.json").read_text())
    found = {(r["recipe"], r["dataset"]): r for r in document["rows"]}
    assert set(found) == {(recipe, kind) for recipe in ("bf16", *RECIPES) for kind in ("code", "prose")}
    for kind in ("code", "prose"):
        assert found["bf16", kind]["kl"] == 0
        assert found["bf16", kind]["ppl"] == found["bf16", kind]["ppl_bf16"]
        assert found["k2v2", kind]["kl"] < found["naive", kind]["kl"]
        assert found["k2v2", kind]["bpe"] == found["naive", kind]["bpe"] < found["k3v2", kind]["bpe"] < 16
    assert set(document["kl_by_position"]) == set(RECIPES)
    ours, full = document["samples"]
    assert ours["recipe"] == "k2v2"
    assert full["recipe"] == "full precision"
    assert ours["history_tokens"] == ours["prompt_tokens"] + 3 - 320 > 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64") == 6
    shown = found["k2v2", "code"]
    for text in (page, result.stdout):
        assert f"{shown['ppl']:.3f}" in text
        assert f"{shown['bpe']:.2f}" in text
    assert f"{ours['history_tokens']:,} of {ours['prompt_tokens'] + 4:,} tokens" in result.stdout
    assert "report.html" in result.stdout
    assert "oscar-kv calibrate" in result.stdout


def test_progress_names_every_step(runner: CliRunner, in_its_place: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise OscarError("far enough")

    monkeypatch.setattr("oscar_kv.cli.demo.compare", stop)
    result = runner.invoke(app, ["demo", "--tokens", "2048"])
    assert result.exit_code == 2
    assert "far enough" in result.stderr
    assert "loading" in result.stdout
    assert "calibrating on 2,048 tokens" in result.stdout
    assert "done in" in result.stdout


@pytest.mark.parametrize(
    ("option", "value"), [("--texts", "0"), ("--context", "100"), ("--tokens", "10"), ("--max-new-tokens", "0")]
)
def test_sizes_out_of_range_are_refused(runner: CliRunner, option: str, value: str) -> None:
    result = runner.invoke(app, ["demo", option, value])
    assert result.exit_code == 2
    assert option in result.output
