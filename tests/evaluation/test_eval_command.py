# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv eval`` end to end on a tiny model: table, results file, and options that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oscar_kv.cli import app
from oscar_kv.evaluation.results import NeedleRow, QualityRow, read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, families: Any, byte_tokenizer: Any) -> Path:
    """A two-layer Llama, a tokenizer of single bytes, a text of each kind, and an artifact."""
    from oscar_kv.calibration import data_free

    path = tmp_path_factory.mktemp("eval")
    model = families.tiny("llama", vocab_size=257)
    model.save_pretrained(path / "tiny")
    byte_tokenizer.save_pretrained(path / "tiny")
    (path / "words.txt").write_text(" ".join(str(7919 * i % 100003) for i in range(200)))
    (path / "sums.py").write_text("\n".join(f"x{i} = {7919 * i % 10007}" for i in range(100)))
    data_free(model.config, "tiny").save(path / "tiny.safetensors")
    return path


def run(folder: Path, *arguments: str) -> Any:
    files = ["--texts", str(folder / "words.txt"), "--texts", str(folder / "sums.py")]
    return CliRunner().invoke(app, ["eval", str(folder / "tiny"), *files, "--contexts", "600", *arguments])


def test_table_and_results_file(folder: Path) -> None:
    out = folder / "out.json"
    done = run(
        folder, "--artifact", str(folder / "tiny.safetensors"), "--recipes", "naive", "--needles", "2",
        "--needle-context", "1024", "--json", str(out),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    results = read(out)
    quality = [r for r in results.rows if isinstance(r, QualityRow)]
    assert [(r.dataset, r.recipe) for r in quality] == [
        (kind, recipe) for kind in ("prose", "code") for recipe in ("bf16", "k2v2-data-free (data-free)", "naive")
    ]
    assert all((r.kl == 0) == (r.recipe == "bf16") for r in quality)
    assert {r.k_bits for r in quality} == {16, 2}
    found = [r for r in results.rows if isinstance(r, NeedleRow)]
    assert (found[0].recipe, found[0].n, found[0].context) == ("bf16", 2, 1024)
    assert len(found) == 3
    assert results.meta.model == "tiny"
    assert str(folder) not in out.read_text()
    for word in ("prose: 1 texts of 600", "code: 1 texts of 600", "naive", "Needles at 1,024"):
        assert word in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--contexts", "300"), "positions from 512"),
        (("--contexts", "many"), "whole numbers"),
        (("--recipes", "k2v9"), "unknown recipe"),
        (("--prefill", "never"), "strict or exact"),
        (("--artifact", "a", "--moments", "b"), "one of them"),
        (("--texts", "no/such.txt"), "no/such.txt"),
    ],
)
def test_bad_options_say_what_is_wrong(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(folder, *arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_recipes_that_an_artifact_cannot_serve_are_refused(folder: Path) -> None:
    done = run(folder, "--artifact", str(folder / "tiny.safetensors"), "--recipes", "oscar-paper")
    assert done.exit_code == 2
    assert "calibrate again with --recipe oscar-paper" in done.output
