# SPDX-License-Identifier: Apache-2.0
"""The command line itself: light, strict about names, and plain about errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oscar_kv import __version__
from oscar_kv.cli import COMMANDS, app
from oscar_kv.errors import OscarError

HEAVY = ("torch", "transformers", "matplotlib", "safetensors", "numpy")


def loaded_after(code: str) -> set[str]:
    probe = f"import sys\n{code}\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split("\n")[-2].split())


def test_the_list_of_commands_imports_nothing_heavy() -> None:
    run = "from oscar_kv.cli import app\ntry:\n app(['--help'])\nexcept SystemExit:\n pass"
    assert loaded_after(run) == set()


@pytest.mark.parametrize("name", ["demo", "generate", "inspect"])
def test_help_of_a_command_imports_nothing_heavy(name: str) -> None:
    run = f"from oscar_kv.cli import app\ntry:\n app(['{name}', '--help'])\nexcept SystemExit:\n pass"
    assert loaded_after(run) == set()


@pytest.mark.parametrize("name", [*COMMANDS, "version"])
def test_every_listed_command_explains_itself(runner: CliRunner, name: str) -> None:
    listing = runner.invoke(app, ["--help"])
    assert name in listing.stdout
    own = runner.invoke(app, [name, "--help"])
    assert own.exit_code == 0
    assert "Usage" in own.stdout
    assert "--json" in own.stdout, "every command has a JSON twin"


def test_an_unknown_command_names_the_nearest(runner: CliRunner) -> None:
    result = runner.invoke(app, ["calibrat"])
    assert result.exit_code == 2
    assert "calibrate" in result.output


@pytest.mark.parametrize("name", [*COMMANDS, "version"])
def test_an_unknown_option_is_an_error(runner: CliRunner, name: str) -> None:
    result = runner.invoke(app, [name, "--no-such-option", "1"])
    assert result.exit_code == 2
    assert "--no-such-option" in result.output


def test_an_error_of_ours_is_a_message_and_code_2(runner: CliRunner, tmp_path: Path) -> None:
    missing = tmp_path / "missing.safetensors"
    result = runner.invoke(app, ["inspect", str(missing)])
    assert result.exit_code == 2
    assert str(missing) in result.stderr
    assert "calibrate" in result.stderr
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ")


def test_debug_lets_the_error_through(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(app, ["--debug", "inspect", str(tmp_path / "missing.safetensors")])
    assert isinstance(result.exception, OscarError)


def test_a_message_is_not_read_as_markup(runner: CliRunner, tmp_path: Path) -> None:
    odd = tmp_path / "[red]x[/red].safetensors"
    assert "[red]x[/red]" in runner.invoke(app, ["inspect", str(odd)]).stderr


def test_version_and_its_json(runner: CliRunner, tmp_path: Path) -> None:
    out = tmp_path / "sub" / "v.json"
    result = runner.invoke(app, ["version", "--json", str(out)])
    assert result.exit_code == 0
    assert __version__ in result.stdout
    assert json.loads(out.read_text())["versions"]["oscar-kv"] == __version__


def test_a_json_file_that_cannot_be_written_is_named(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = runner.invoke(app, ["version", "--json", str(tmp_path / "file" / "v.json")])
    assert result.exit_code == 2
    assert "--json" in result.stderr
    assert "v.json" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "--prompt"),
        (["--prompt", "a", "--prompt-file", "b"], "one of the two"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt-file", "missing.txt"], "missing.txt"),
        (["--prompt", "a"], "no such file"),
    ],
)
def test_generate_refuses_before_it_loads_a_model(runner: CliRunner, arguments: list[str], what: str) -> None:
    result = runner.invoke(app, ["generate", "no/model", "--artifact", "none.safetensors", *arguments])
    assert result.exit_code == 2
    assert what in result.stderr


def test_an_empty_prompt_file_is_refused(runner: CliRunner, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    result = runner.invoke(app, ["generate", "m", "--artifact", "a", "--prompt-file", str(empty)])
    assert result.exit_code == 2
    assert "empty" in result.stderr


def test_generate_says_which_recipes_exist(runner: CliRunner, artifact_file: Path) -> None:
    call = ["generate", "m", "--artifact", str(artifact_file), "--prompt", "x", "--recipe", "k2v3"]
    result = runner.invoke(app, call)
    assert result.exit_code == 2
    assert "k2v2" in result.stderr
