# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv inspect`` on a synthetic artifact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from oscar_kv.artifact import Artifact
from oscar_kv.cli import app
from oscar_kv.evaluation.diagnostics import summarise


def test_text_says_what_the_artifact_is(runner: CliRunner, artifact: Artifact, artifact_file: Path) -> None:
    result = runner.invoke(app, ["inspect", str(artifact_file)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for what in (
        "synthetic/tiny",
        "k2v2",
        artifact.sha256,
        "8,192 tokens",
        "synthetic rows",
        "bits at 8K",
        "bits at 128K",
    ):
        assert what in result.stdout
    assert "4 quantised, 1 left as they are" in result.stdout
    first = summarise(artifact)[0]
    assert f"{first.k_offset:.2f}" in result.stdout
    assert f"{100 * (first.key_shaped or 0):.1f}" in result.stdout


def test_json_holds_the_same_and_more(
    runner: CliRunner, artifact: Artifact, artifact_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.json"
    assert runner.invoke(app, ["inspect", str(artifact_file), "--json", str(out)]).exit_code == 0
    document = json.loads(out.read_text())
    assert document["meta"]["artifact_sha256"] == artifact.sha256
    bits = [document["meta"]["bpe"][n] for n in ("8192", "32768", "131072")]
    assert bits == sorted(bits, reverse=True)
    assert 3.0 < bits[-1] < 3.2, "d = 32: 3 bits of history, windows beyond it"
    assert [row["layer"] for row in document["rows"]] == [0, 1, 2, 3]
    row = document["rows"][0]
    assert row["key_shaped"] < row["key_plain"]
    assert row["gain"] > 1
    assert [len(s) for s in row["spectrum"]] == [32, 32]
    assert row["k_spread"] is None


def test_png_and_html(runner: CliRunner, artifact: Artifact, artifact_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra oscar-kv[demo]")
    picture, page = tmp_path / "a.png", tmp_path / "sub" / "a.html"
    result = runner.invoke(app, ["inspect", str(artifact_file), "--png", str(picture), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"data:image/png;base64", text)) == 3
    for s in summarise(artifact):
        assert f"<td>{s.k_offset:.2f}</td>" in text
        assert f"<td>{100 * (s.key_shaped or 0):.1f}</td>" in text
    assert artifact.sha256 in text
    assert "synthetic rows" in text


def test_a_recipe_without_shaping_shows_dashes(
    runner: CliRunner, artifact_of: Callable[..., Artifact], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra oscar-kv[demo]")
    file = artifact_of().with_recipe("naive").save(tmp_path / "naive.safetensors")
    result = runner.invoke(app, ["inspect", str(file), "--html", str(tmp_path / "n.html")])
    assert result.exit_code == 0, result.output
    assert "–" in result.stdout
    assert summarise(Artifact.load(file))[0].k_offset is None, "a recipe that does not centre keeps no centres"
    assert "naive" in result.stdout


def test_a_tampered_file_is_refused(runner: CliRunner, artifact_file: Path) -> None:
    from safetensors import safe_open

    with safe_open(artifact_file, "pt") as stream:
        header = stream.metadata()
    tensors = load_file(artifact_file)
    tensors["layers.0.k_centre"] += 1
    save_file(tensors, artifact_file, metadata=header)
    result = runner.invoke(app, ["inspect", str(artifact_file)])
    assert result.exit_code == 2
    assert "tensors_sha256" in result.stderr


def moments_of(artifact: Artifact, path: Path, **model: object) -> Path:
    from oscar_kv.calibration.moments import Moments, MomentsMeta, shapes

    meta = MomentsMeta(
        model=artifact.meta.model.model_copy(update=model), layers=artifact.meta.layers, tokens=1000,
        history_queries=600, chunk=1000, sink=64, recent=256,
    )  # fmt: skip
    layers = {}
    for i in artifact.layers:
        sums = {f: torch.zeros(s, dtype=torch.float64) for f, s in shapes(artifact.meta.layers[i]).items()}
        for side in "kv":
            sums[f"{side}_sum"] += 1000 * (1 + i)
            mean = torch.full((32, 1), 1.0 + i, dtype=torch.float64)
            sums[f"{side}_outer"] += 1000 * (mean @ mean.T + 4 * torch.eye(32, dtype=torch.float64))
        layers[i] = sums
    return Moments(meta, layers).save(path)


def test_moments_add_spreads_and_channels(
    runner: CliRunner, artifact: Artifact, artifact_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra oscar-kv[demo]")
    moments, out, page = moments_of(artifact, tmp_path / "m.safetensors"), tmp_path / "a.json", tmp_path / "a.html"
    call = ["inspect", str(artifact_file), "--moments", str(moments), "--json", str(out), "--html", str(page)]
    result = runner.invoke(app, call)
    assert result.exit_code == 0, result.output
    row = json.loads(out.read_text())["rows"][2]
    assert row["k_spread"] == pytest.approx(2 * 32**0.5)
    assert row["k_offset"] == pytest.approx(3 * 32**0.5)
    assert page.read_text(encoding="utf-8").count("data:image/png") == 4


def test_moments_of_another_model_are_refused(
    runner: CliRunner, artifact: Artifact, artifact_file: Path, tmp_path: Path
) -> None:
    from oscar_kv.artifact import WeightSample

    other = WeightSample(name="k_proj", row=0, sha256="0")
    moments = moments_of(artifact, tmp_path / "m.safetensors", id="other/model", weight_samples=(other,))
    result = runner.invoke(app, ["inspect", str(artifact_file), "--moments", str(moments)])
    assert result.exit_code == 2
    assert "other/model" in result.stderr
    assert "synthetic/tiny" in result.stderr


def test_no_figure_is_cut_on_a_narrow_screen(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from oscar_kv.cli import common
    from oscar_kv.cli.inspect import COLUMNS, layer_rows

    monkeypatch.setattr(common, "console", Console(width=60))
    rows = layer_rows(summarise(artifact))
    common.print_table("By layer", COLUMNS, rows)
    said = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in said.splitlines() if "│" in line]
    assert [line for line in lines if line[0].isdigit()] == rows
    assert "…" not in said
