# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv calibrate`` from end to end on a tiny model in a folder, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

tf = pytest.importorskip("transformers")

from families import CONFIGS  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from oscar_kv.artifact import Artifact  # noqa: E402
from oscar_kv.calibration import Moments  # noqa: E402
from oscar_kv.cli import app  # noqa: E402
from oscar_kv.errors import OscarError  # noqa: E402
from oscar_kv.integrations.transformers.identity import check_model  # noqa: E402
from oscar_kv.integrations.transformers.loading import choose_device, choose_dtype, load_config, load_model  # noqa: E402
from oscar_kv.memory import bits_per_element  # noqa: E402


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "squares.txt"
    path.write_text(" ".join(f"{i} squared is {i * i};" for i in range(300)))
    return path


def call(*args: Any) -> Any:
    return CliRunner().invoke(app, ["calibrate", *map(str, args)])


def test_calibrate_keep_moments_and_fit_again(folder: Path, text: Path, tmp_path: Path) -> None:
    out, kept, js = tmp_path / "a.safetensors", tmp_path / "m.safetensors", tmp_path / "a.json"
    size = ("--tokens", 2048, "--chunk", 1024)
    done = call(folder, "--data", text, *size, "-o", out, "--save-moments", kept, "--json", js)
    assert done.exit_code == 0, done.output
    artifact = Artifact.load(out)
    check_model(artifact, load_model(str(folder))[0])
    said = json.loads(js.read_text())
    assert said["sha256"] == artifact.sha256
    assert artifact.sha256[:16] in done.output and "k2v2" in done.output
    assert (
        artifact.meta.model.id == "toy-llama" and str(folder) not in done.output.split("written")[0].split("recipe")[1]
    )
    assert (artifact.meta.calibration.tokens, artifact.meta.calibration.chunk) == (2048, 1024)
    assert Moments.load(kept).meta.tokens == 2048
    second = tmp_path / "b.safetensors"
    assert call(folder, "--from-moments", kept, "-o", second, "--recipe", "oscar-paper").exit_code == 0
    assert Artifact.load(second).label == "oscar-paper"


def test_data_free(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    done = call(folder, "--data-free", "-o", out, "--recipe", "k3v2")
    assert done.exit_code == 0, done.output
    assert "data-free" in done.output
    assert Artifact.load(out).meta.calibration.source == "data-free"


def test_moments_of_another_model_are_refused(folder: Path, text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "m.safetensors"
    assert call(folder, "--data", text, "--tokens", 1500, "--save-moments", kept).exit_code == 0
    other = tmp_path / "other"
    CONFIGS["llama"](num_hidden_layers=3).save_pretrained(other)
    done = call(other, "--from-moments", kept, "-o", tmp_path / "a")
    assert done.exit_code == 2
    assert "m.safetensors: collected from 'toy-llama'" in done.output and "config.layers" in done.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "-o FILE"),
        (("-o", "x", "--recipe", "k2v3"), "unknown recipe 'k2v3'"),
        (("-o", "x", "--data", "none.txt"), "data 'none.txt': no such file"),
        (
            ("-o", "x", "--data", "{text}", "--tokens", "1000"),
            "1000 calibration tokens, the floor",
        ),
        (("-o", "x", "--data", "{text}", "--chunk", "300"), "use longer chunks"),
        (("-o", "x", "--data-free", "--save-moments", "y"), "--data-free reads no text"),
        (("-o", "x", "--from-moments", "none"), "none: no such file"),
        (("-o", "x", "--data", "{text}", "--dtype", "int8"), "dtype 'int8' is unknown"),
        (("-o", "x", "--data", "{text}", "--device", "tpu9"), "device 'tpu9' is unknown"),
        (("-o", "."), "is a folder"),
    ],
)
def test_errors_name_the_option_and_the_remedy(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(folder, *(str(text) if a == "{text}" else a for a in args))
    assert done.exit_code == 2
    assert says in done.output
    assert not (tmp_path / "x").exists()


def test_loading_errors(tmp_path: Path) -> None:
    with pytest.raises(OscarError, match="no such folder"):
        load_model(str(tmp_path / "none"))
    with pytest.raises(OscarError, match="no such file"):
        load_config(str(tmp_path / "none.gguf"))
    (tmp_path / "empty").mkdir()
    for load in (load_config, load_model):
        with pytest.raises(OscarError, match=r"no model here: config\.json is missing"):
            load(str(tmp_path / "empty"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    with pytest.raises(OscarError, match="cannot be loaded"):
        load_model(str(broken))
    assert choose_dtype("auto", torch.device("cpu")) is torch.float32
    if not torch.cuda.is_available():
        assert choose_device().type == "cpu"
        with pytest.raises(OscarError, match="is not there"):
            choose_device("cuda:0")


def test_bits_per_element_of_the_default_at_head_dim_128(tmp_path: Path) -> None:
    """2.25 for the history; with windows and slack at most 2.43 at 32K tokens and 2.30 at 128K."""
    from oscar_kv.calibration import data_free

    artifact = data_free(CONFIGS["llama"](head_dim=128), "toy")
    assert bits_per_element(artifact) == 2.25
    assert 2.25 < bits_per_element(artifact, 131072) < 2.30 < bits_per_element(artifact, 32768) < 2.43
