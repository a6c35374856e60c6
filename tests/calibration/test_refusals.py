# SPDX-License-Identifier: Apache-2.0
"""Models that cannot be calibrated, and folders that hold none: refused from the config, with what to do."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

tf = pytest.importorskip("transformers")

from families import CONFIGS, ids_of, tiny  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from oscar_kv.calibration import collect  # noqa: E402
from oscar_kv.cli import app  # noqa: E402
from oscar_kv.errors import CalibrationError, UnsupportedModelError  # noqa: E402
from oscar_kv.integrations.transformers.geometry import layer_geometries  # noqa: E402

SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 97}


def calibrate(model: Path, out: Path, *args: Any) -> Any:
    """The command. It must not warn by itself: a warning is printed with a line of source."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return CliRunner().invoke(app, ["calibrate", str(model), "-o", str(out), *map(str, args)])


def config_folder(path: Path, config: Any) -> Path:
    config.save_pretrained(path)
    return path


ENCODER = {
    "bert": lambda: tf.BertConfig(**SMALL),
    "bert, architectures": lambda: tf.BertConfig(**SMALL, architectures=["BertForPreTraining"]),
    "modernbert": lambda: tf.ModernBertConfig(**SMALL, architectures=["ModernBertForMaskedLM"]),
}


@pytest.mark.parametrize("kind", ENCODER)
def test_an_encoder_is_no_causal_model(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not a causal language model"):
        layer_geometries(ENCODER[kind]())
    done = calibrate(config_folder(tmp_path / "m", ENCODER[kind]()), tmp_path / "a")
    assert done.exit_code == 2, done.output
    assert "bert: not a causal language model" in done.stderr


def test_causal_models_that_carry_the_encoders_fields_pass() -> None:
    assert layer_geometries(tf.BertConfig(**SMALL, is_decoder=True, architectures=["BertLMHeadModel"]))
    assert layer_geometries(tf.GPTNeoXConfig(**SMALL))  # is_decoder is False there and means nothing
    both = SimpleNamespace(model_type="toy", num_hidden_layers=1, num_attention_heads=4, hidden_size=64)
    both.architectures = ["ToyForCausalLM", "ToyForMaskedLM"]
    assert layer_geometries(both)


REFUSED = {
    "encoder-decoder": lambda: tf.T5Config(d_model=64, num_layers=1, num_heads=4),
    "multi-head latent attention": lambda: tf.DeepseekV3Config(num_hidden_layers=1),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_the_config_is_judged_before_tokenizer_and_weights(reason: str, tmp_path: Path) -> None:
    done = calibrate(config_folder(tmp_path / "m", REFUSED[reason]()), tmp_path / "a")
    assert done.exit_code == 2, done.output
    assert reason in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "m")
    done = calibrate(tmp_path / "m", tmp_path / "a")
    assert done.exit_code == 2
    assert f"model '{tmp_path / 'm'}': tokenizer files are missing" in done.stderr


def test_an_empty_folder_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert "no model here: config.json is missing" in calibrate(tmp_path / "m", tmp_path / "a").stderr
    (tmp_path / "model.bin").write_text("x")
    assert "is a file; name its folder" in calibrate(tmp_path / "model.bin", tmp_path / "a").stderr


def test_chunks_longer_than_the_positions(tmp_path: Path) -> None:
    config = CONFIGS["llama"](max_position_embeddings=1024)
    done = calibrate(config_folder(tmp_path / "m", config), tmp_path / "a")
    assert done.exit_code == 2
    assert "positions for 1024" in done.stderr and "--chunk 1024" in done.stderr
    model = tiny("llama", max_position_embeddings=1024)
    with pytest.raises(CalibrationError, match="positions for 1024"):
        collect(model, [ids_of(1025, 1)], progress=False)
    collect(model, [ids_of(1024, 1)], progress=False)


def test_short_texts_give_a_note_or_an_error_never_a_raw_warning(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("".join(str(i) for i in range(1000))[:1500])
    done = calibrate(folder, tmp_path / "a", "--data", text)
    assert done.exit_code == 0, done.output
    assert "note: the texts hold 1,500 tokens, 8,192 were asked for" in done.output
    text.write_text("0123456789" * 50)
    done = calibrate(folder, tmp_path / "b", "--data", text)
    assert done.exit_code == 2
    assert "500 calibration tokens, the floor" in done.stderr and "note" not in done.output


def test_a_copy_whose_tokenizer_is_broken_says_so(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    done = calibrate(tmp_path / "m", tmp_path / "a")
    assert done.exit_code == 2, done.output
    assert "its tokenizer cannot be loaded" in done.stderr
