# SPDX-License-Identifier: Apache-2.0
"""Files that cannot be written: refused in one line before any work, and named if it fails all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oscar_kv.artifact import Artifact
from oscar_kv.cli import app
from oscar_kv.errors import ArtifactError, OscarError

COMMANDS = {
    "calibrate": (["no-such-model"], ("-o", "--save-moments", "--json")),
    "eval": (["no-such-model"], ("--json",)),
    "generate": (["no-such-model", "--artifact", "none", "--prompt", "x"], ("--json",)),
    "inspect": (["none"], ("--json", "--png", "--html")),
    "demo": ([], ("--json",)),
    "zoo-export": (["none"], ("--k-file", "--v-file")),
}
CASES = [(name, option) for name, (_, options) in COMMANDS.items() for option in options]


def refused(runner: CliRunner, tmp_path: Path, name: str, option: str, target: Path) -> str:
    """The command's error. Nothing else it needs exists, so an error about the output came before any work."""
    given = [*COMMANDS[name][0], option, str(target)]
    for other in COMMANDS[name][1] if name in ("calibrate", "zoo-export") else ():
        if other != option:
            given += [other, str(tmp_path / f"other{other}")]
    result = runner.invoke(app, [name, *given])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {option} {target}")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


@pytest.mark.parametrize(("name", "option"), CASES)
def test_a_folder_is_no_target(runner: CliRunner, tmp_path: Path, name: str, option: str) -> None:
    assert "is a folder" in refused(runner, tmp_path, name, option, tmp_path)


@pytest.mark.parametrize(("name", "option"), CASES)
def test_a_file_is_no_folder(runner: CliRunner, tmp_path: Path, name: str, option: str) -> None:
    (tmp_path / "data.txt").write_text("x")
    said = refused(runner, tmp_path, name, option, tmp_path / "data.txt" / "sub" / "x.out")
    assert f"{tmp_path / 'data.txt'} is a file" in said


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc: a folder that takes no file")
@pytest.mark.parametrize("target", ["/proc/x.safetensors", "/proc/sub/x.safetensors"])
def test_a_folder_that_takes_no_file(runner: CliRunner, tmp_path: Path, target: str) -> None:
    assert "/proc takes no file" in refused(runner, tmp_path, "calibrate", "-o", Path(target))


def test_two_outputs_in_one_file(runner: CliRunner, tmp_path: Path) -> None:
    same = str(tmp_path / "x")
    result = runner.invoke(app, ["calibrate", "no-such-model", "-o", same, "--save-moments", same])
    assert result.exit_code == 2
    assert "-o names the same file" in result.stderr


def test_checking_makes_and_keeps_nothing(runner: CliRunner, tmp_path: Path) -> None:
    kept = tmp_path / "old.json"
    kept.write_text("old")
    call = ["inspect", "none", "--json", str(kept), "--png", str(tmp_path / "sub" / "a.png")]
    assert "none" in runner.invoke(app, call).stderr
    assert kept.read_text() == "old"
    assert os.listdir(tmp_path) == ["old.json"]


def test_json_may_go_to_a_device(runner: CliRunner, artifact_file: Path) -> None:
    assert runner.invoke(app, ["inspect", str(artifact_file), "--json", os.devnull]).exit_code == 0


def test_writing_names_the_path_and_leaves_no_part(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match=r"file/a\.safetensors: cannot be written"):
        artifact.save(tmp_path / "file" / "a.safetensors")
    with pytest.raises(ArtifactError, match="it is a folder"):
        artifact.save(tmp_path)
    if Path("/proc/self").exists():
        with pytest.raises(ArtifactError, match=r"/proc/a\.safetensors: cannot be written"):
            artifact.save("/proc/a.safetensors")
    assert os.listdir(tmp_path) == ["file"]


def test_rotation_files_that_cannot_be_written(artifact: Artifact, tmp_path: Path) -> None:
    from oscar_kv.rotationzoo import save_zoo

    with pytest.raises(OscarError, match="it is a folder"):
        save_zoo(artifact, tmp_path, tmp_path / "v.pt", lossy=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OscarError, match=r"v\.pt: cannot be written"):
        save_zoo(artifact, tmp_path / "k.pt", tmp_path / "file" / "v.pt", lossy=True)


def test_an_unknown_recipe_is_found_before_anything_heavy_is_imported() -> None:
    probe = (
        "import sys\nfrom oscar_kv.cli import app\ntry:\n app(['eval', 'no-such-model', '--recipes', 'k2v2,nope'])\n"
        "except SystemExit as end:\n print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["2", "False", "False"]
    assert "'nope'" in done.stderr


def test_a_recipe_named_twice_counts_once() -> None:
    from oscar_kv.cli.eval import _chosen

    assert _chosen("k2v2, naive,k2v2") == ["k2v2", "naive"]


@pytest.mark.parametrize(("given", "want"), [(None, "passive"), ("active", "active")])
def test_waiting_threads_sleep_unless_told_otherwise(given: str | None, want: str) -> None:
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | (
        {} if given is None else {"OMP_WAIT_POLICY": given}
    )
    probe = "import oscar_kv.cli, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == [want, "False"]
