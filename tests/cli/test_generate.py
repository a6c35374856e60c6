# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv calibrate`` and ``oscar-kv generate`` on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oscar_kv.artifact import Artifact
from oscar_kv.cli import app


@pytest.fixture(scope="module")
def calibrated(tiny_model: Path, some_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("artifact") / "tiny.safetensors"
    call = [
        "calibrate",
        str(tiny_model),
        "--data",
        str(some_text),
        "--tokens",
        "2048",
        "--chunk",
        "1024",
        "-o",
        str(file),
    ]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    return file


def generate(runner: CliRunner, model: Path, artifact: Path, out: Path, *more: str) -> tuple[str, dict[str, Any]]:
    call = ["generate", str(model), "--artifact", str(artifact), "--max-new-tokens", "8", "--json", str(out), *more]
    result = runner.invoke(app, call, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads(out.read_text())


def test_long_prompt_beside_full_precision(
    runner: CliRunner, tiny_model: Path, calibrated: Path, some_text: Path, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(some_text.read_text()[:900])
    text, document = generate(
        runner, tiny_model, calibrated, tmp_path / "g.json", "--prompt-file", str(prompt), "--compare"
    )
    ours, full = document["rows"]
    assert (ours["recipe"], full["recipe"]) == ("k2v2", "full precision")
    assert ours["prompt_tokens"] == full["prompt_tokens"] == 900
    assert ours["new_tokens"] == 8
    assert 900 - 320 <= ours["history_tokens"] <= 908 - 320
    assert full["history_tokens"] == 0
    assert ours["cache_bytes"] < full["cache_bytes"]
    assert (
        ours["bf16_bytes"] == full["bf16_bytes"] == 2 * 2 * 2 * 2 * 16 * 907
    )  # layers, sides, heads, bytes, head size
    assert document["meta"]["artifact_sha256"] == Artifact.load(calibrated).sha256
    for shown in ("k2v2", "full precision", document["meta"]["artifact_sha256"][:16], ours["kernel"], "tokens/s"):
        assert shown in text
    assert f"{ours['bits_per_element']:.2f}" in text
    assert "Nothing was quantised" not in text


def test_a_short_prompt_is_identical_and_says_that_nothing_was_quantised(
    runner: CliRunner, tiny_model: Path, calibrated: Path, tmp_path: Path
) -> None:
    call = ("--prompt", "12 34 56", "--compare")
    text, document = generate(runner, tiny_model, calibrated, tmp_path / "g.json", *call)
    assert document["rows"][0]["text"] == document["rows"][1]["text"]
    assert document["rows"][0]["history_tokens"] == 0
    assert "Nothing was quantised" in text


def test_seeds_fix_sampling(runner: CliRunner, tiny_model: Path, calibrated: Path, tmp_path: Path) -> None:
    def drawn(seed: int) -> str:
        more = ("--prompt", "12 34", "--temperature", "1.5", "--seed", str(seed))
        return str(generate(runner, tiny_model, calibrated, tmp_path / "g.json", *more)[1]["rows"][0]["text"])

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_another_recipe_over_the_same_statistics(
    runner: CliRunner, tiny_model: Path, calibrated: Path, some_text: Path, tmp_path: Path
) -> None:
    more = ("--prompt", some_text.read_text()[:700], "--recipe", "k4v4")
    text, document = generate(runner, tiny_model, calibrated, tmp_path / "g.json", *more)
    assert document["rows"][0]["recipe"] == "k4v4"
    assert document["meta"]["recipe"]["k_bits"] == 4
    assert "k4v4" in text


def test_an_artifact_of_another_model_is_refused(runner: CliRunner, tiny_model: Path, artifact_file: Path) -> None:
    result = runner.invoke(app, ["generate", str(tiny_model), "--artifact", str(artifact_file), "--prompt", "1"])
    assert result.exit_code == 2
    assert "synthetic/tiny" in result.stderr


def test_a_tokenizer_without_chat_template_says_so(runner: CliRunner, tiny_model: Path, calibrated: Path) -> None:
    call = ["generate", str(tiny_model), "--artifact", str(calibrated), "--prompt", "1", "--chat"]
    result = runner.invoke(app, call)
    assert result.exit_code == 2
    assert "chat template" in result.stderr
