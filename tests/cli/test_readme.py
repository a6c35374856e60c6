# SPDX-License-Identifier: Apache-2.0
"""README and docs: every command and import exists, every figure comes from a results file."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from oscar_kv.cli import COMMANDS, app
from oscar_kv.recipe import ALIASES, PRESETS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def shell_lines(page: Path) -> list[str]:
    """Commands of shell blocks and of inline code that begins like one."""
    text = page.read_text(encoding="utf-8")
    lines = [line for body in blocks(page, "bash", "sh", "shell") for line in body.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`((?:oscar-kv|make) [^`\n]+)`", FENCE.sub("", text))
    return [line.strip().removeprefix("$ ") for line in [*lines, *inline]]


def commands(program: str) -> list[tuple[str, str]]:
    found = [(page.name, line) for page in PAGES for line in shell_lines(page)]
    return [(name, line) for name, line in found if line.split()[:1] == [program]]


def test_the_pages_show_the_main_commands() -> None:
    shown = {line.split()[1] for _, line in commands("oscar-kv")}
    assert {"calibrate", "generate", "inspect", "eval", "demo"} <= shown
    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for _, line in commands("make")}


@pytest.mark.parametrize(("page", "line"), commands("oscar-kv"))
def test_every_command_parses(page: str, line: str) -> None:
    group: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)[1:]
    context = group.make_context("oscar-kv", list(words), resilient_parsing=True)
    while words and words[0].startswith("-"):
        assert words.pop(0) in {"--debug", "--help", "-h"}, f"{page}: {line}"
    if not words:
        return
    command = group.get_command(context, words[0])
    assert command is not None, f"{page}: no such command: {line}"
    inner: Any = type(context)(command, info_name=words[0], parent=context)
    options, rest, _ = command.make_parser(inner).parse_args(args=words[1:])  # raises for an unknown option
    if "--help" in words:
        return
    needed = [p for p in command.get_params(inner) if p.required and p.name not in options]
    assert not needed or not words[1:], f"{page}: {line}: lacks {[p.name for p in needed]}"
    assert not rest, f"{page}: {line}: {rest} are too many"


@pytest.mark.parametrize(("page", "line"), commands("make"))
def test_every_make_target_exists(page: str, line: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in shlex.split(line, comments=True)[1:]:
        if "=" not in target:
            assert re.search(rf"^{re.escape(target)}\s*:", makefile, re.MULTILINE), f"{page}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_in_the_pages_names_things_that_exist(page: Path) -> None:
    import oscar_kv

    for body in blocks(page, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "oscar_kv":
                assert node.attr in oscar_kv.__all__, f"{page.name}: oscar_kv.{node.attr}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oscar_kv"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}: {node.module}.{alias.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_of_recipes_is_the_presets() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Recipes")[1].split("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")][2:]
    named = {re.findall(r"`([\w-]+)`", row[0])[0]: row for row in rows}
    assert set(named) == set(PRESETS)
    assert all(alias in text for alias in ALIASES)
    for name, row in named.items():
        recipe = PRESETS[name]
        assert re.findall(r"\d", row[1]) == [str(recipe.k_bits), str(recipe.v_bits)], name
        for cell, d in ((row[2], 128), (row[3], 64)):
            assert float(cell) == (recipe.k_bits + recipe.v_bits) / 2 + 32 / d, f"{name} at head size {d}"


def test_the_tables_say_what_the_results_files_say() -> None:
    assert tool("make_readme_table").main(["--check"]) == 0, "run python tools/make_readme_table.py"


def test_the_picture_shows_what_the_results_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    assert tool("make_readme_picture").main(["--check"]) == 0, "run python tools/make_readme_picture.py"


def test_the_picture_stands_in_the_page_once_it_is_drawn(page: tuple[Path, Path, ModuleType]) -> None:
    readme = page[0]
    assert run(page) == 0
    assert "quality.png" not in readme.read_text(encoding="utf-8")
    (readme.parent / "docs" / "images").mkdir(parents=True)
    (readme.parent / "docs" / "images" / "quality.png").write_bytes(b"")
    assert run(page, "--check") == 1
    assert run(page) == 0
    assert "](docs/images/quality.png)" in readme.read_text(encoding="utf-8")


RESULTS: dict[str, Any] = {
    "meta": {"command": "oscar-kv eval tiny", "model": "tiny", "date": "2026-10-01", "versions": {"torch": "2.13.0"}},
    "rows": [
        {"recipe": "bf16", "dataset": "code", "context": 2048, "tokens": 100, "kl": 0.0, "ppl": 3.0, "bpe": 16.0},
        {"recipe": "k2v2", "k_bits": 2, "v_bits": 2, "dataset": "code", "context": 2048, "tokens": 100, "kl": 0.02,
         "ppl": 3.1, "bpe": 5.25},
        {"recipe": "k2v2", "k_bits": 2, "v_bits": 2, "dataset": "code", "context": 2048, "tokens": 300, "kl": 0.04,
         "ppl": 3.3, "bpe": 5.25},
        {"recipe": "naive", "k_bits": 2, "v_bits": 2, "dataset": "code", "context": 2048, "tokens": 100, "kl": 1.5,
         "ppl": 36.0, "bpe": 5.25},
        {"recipe": "k2v2", "task": "niah", "context": 8192, "n": 60, "score": 0.85, "ci95": [0.74, 0.92]},
    ],
}  # fmt: skip
DECODE = {
    "meta": {"command": "bench", "gpu": "H200"},
    "rows": [
        {
            "op": op,
            "k_bits": b,
            "v_bits": b,
            "q_heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "batch": 1,
            "context": 8192,
            "ms": ms,
        }
        for op, b, ms in (("ours", 2, 2.0), ("fa3-bf16", None, 1.0), ("sdpa-bf16", None, 4.0))
    ],
}


@pytest.fixture
def page(tmp_path: Path) -> tuple[Path, Path, ModuleType]:
    made, results, readme = tool("make_readme_table"), tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    picture = f"{made.PICTURE_BEGIN}\n{made.PICTURE_END}"
    readme.write_text(f"# x\n\n{picture}\n{made.BEGIN}\nold\n{made.END}\n\nafter\n", encoding="utf-8")
    return readme, results, made


def run(page: tuple[Path, Path, ModuleType], *flags: str) -> int:
    readme, results, made = page
    return int(made.main([*flags, "--readme", str(readme), "--results", str(results)]))


def test_tables_are_written_checked_and_complete(page: tuple[Path, Path, ModuleType]) -> None:
    readme, results, _ = page
    (results / "quality_tiny.json").write_text(json.dumps(RESULTS))
    (results / "decode_tiny.json").write_text(json.dumps(DECODE))
    for part in ("decode", "store", "prefill", "model"):  # they have tables of their own
        (results / f"{part}_h200.json").write_text('{"meta": {"gpu": "ELSEWHERE"}, "rows": [{"op": "elsewhere"}]}')
    assert run(page, "--check") == 1
    assert run(page) == 0
    assert run(page, "--check") == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("# x\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "elsewhere" not in text.lower()
    rows = {
        line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ") and "2,048" not in line
    }
    assert "0.035" in text, "texts are averaged by their tokens"
    assert "1.5" in rows["naive"]
    assert "36" in rows["naive"]
    assert "0.5" in rows["ours"].split("|")[-2], "a loss against the fastest BF16 kernel is shown as one"
    assert "0.74 – 0.92" in text
    assert "oscar-kv eval tiny" in text
    assert "torch 2.13.0" in text


def test_a_changed_figure_is_noticed(page: tuple[Path, Path, ModuleType]) -> None:
    readme, results, _ = page
    (results / "quality_tiny.json").write_text(json.dumps(RESULTS))
    run(page)
    readme.write_text(readme.read_text(encoding="utf-8").replace("36", "3.6"), encoding="utf-8")
    assert run(page, "--check") == 1


def test_without_results_it_says_so(page: tuple[Path, Path, ModuleType]) -> None:
    run(page)
    assert page[2].NONE_YET in page[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("content", ["{", "[]", '{"meta": {}, "rows": []}', '{"rows": [1]}'])
def test_a_damaged_results_file_is_named(page: tuple[Path, Path, ModuleType], content: str) -> None:
    (page[1] / "quality_tiny.json").write_text(content)
    with pytest.raises(SystemExit, match=r"quality_tiny\.json"):
        run(page)


def test_missing_markers_are_an_error(page: tuple[Path, Path, ModuleType]) -> None:
    page[0].write_text("# nothing here\n")
    with pytest.raises(SystemExit, match="markers"):
        run(page)


def test_the_picture_is_drawn_from_a_results_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    source, out = tmp_path / "quality_tiny.json", tmp_path / "images" / "q.png"
    source.write_text(json.dumps(RESULTS))
    draw = tool("make_readme_picture").main
    assert draw([str(source), "-o", str(out), "--check"]) == 1
    assert draw([str(source), "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert draw([str(source), "-o", str(out), "--check"]) == 0
    source.write_text(json.dumps(RESULTS).replace("1.5", "1.4"))
    assert draw([str(source), "-o", str(out), "--check"]) == 1
    sys.modules.pop("make_readme_table", None)


def test_the_option_tables_are_those_of_the_commands() -> None:
    assert tool("make_cli_docs").main(["--check"]) == 0, "run python tools/make_cli_docs.py"


def test_every_command_has_its_option_table() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- options:([\w-]+) -->", text)) == {*COMMANDS, "version"}
