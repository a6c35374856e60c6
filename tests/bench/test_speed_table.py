# SPDX-License-Identifier: Apache-2.0
"""README's tables of speed say what the results files say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 8, "context": 98304}
META = {"command": "oscar-kv bench", "gpu": "H200", "missing": {"triton-bf16": "SGLang is not installed"}}
FILES: dict[str, list[dict[str, Any]]] = {
    "decode": [
        {"op": "oscar-cuda", **SHAPE, "k_bits": 2, "v_bits": 2, "ms": 0.14, "share": 0.76, "times_faster": 5.1,
         "times_faster_fa3": 5.2},
        {"op": "oscar-cuda", **SHAPE, "k_bits": 4, "v_bits": 4, "ms": 0.26, "share": 0.77, "times_faster": 2.75},
        {"op": "oscar-triton", **SHAPE, "k_bits": 2, "v_bits": 2, "ms": 0.5},
        {"op": "fa3-fp8", **SHAPE, "k_bits": 8, "v_bits": 8, "ms": 0.38},
        {"op": "fa3-bf16", **SHAPE, "k_bits": 16, "v_bits": 16, "ms": 0.714},
    ],
    "store": [
        {"op": "oscar-cuda", **SHAPE, "k_bits": 2, "v_bits": 2, "ms": 0.003, "what": "decode", "shaped": True,
         "tokens": 8, "percent_of_decode": 2.1},
        {"op": "oscar-cuda", **SHAPE, "k_bits": 2, "v_bits": 2, "ms": 0.3, "what": "prompt", "shaped": True,
         "tokens": 32768, "share": 0.12, "percent_of_prefill": 0.9, "k_rows_off_percent": 0.05,
         "k_error_ratio": 1.0001},
    ],
    "prefill": [
        {"op": "oscar-cuda", "chunk": 32768, "prefix": 65536, "ms": 80.0, "ratio": 1.08, "ratio_fa3": 0.98,
         "dense": "cuDNN", "error": 2e-3,
         "peak_extra_bytes": 3 << 28},
    ],
    "model": [
        {"op": "fa3-bf16", "batch": 1, "context": 98304, "ms": 9.0, "tokens_per_s": 111.0,
         "cache_bytes_per_token": 147555.0},
        {"op": "oscar-cuda", "batch": 1, "context": 98304, "ms": 6.0, "tokens_per_s": 167.0,
         "cache_bytes_per_token": 21300.0, "memory_ratio": 6.93, "times_faster": 1.5, "times_faster_fa3": 1.5},
    ],
}  # fmt: skip


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("make_speed_table", ROOT / "tools" / "make_speed_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path) -> None:
    for part, rows in FILES.items():
        (folder / f"{part}_h200.json").write_text(json.dumps({"meta": META, "rows": rows}))


def test_readme_says_what_the_files_say(tool: ModuleType) -> None:
    assert tool.main(["--check"]) == 0, f"run python tools/make_speed_table.py (README needs {tool.BEGIN} {tool.END})"


def test_tables_are_written_and_checked(tool: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# x\n\n{tool.BEGIN}\nold\n{tool.END}\n\nafter\n")
    write(tmp_path)
    words = ["--readme", str(readme), "--results", str(tmp_path)]
    assert tool.main(["--check", *words]) == 1
    assert tool.main(words) == 0
    assert tool.main(["--check", *words]) == 0
    text = readme.read_text()
    assert "old" not in text
    assert text.endswith("after\n")
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    two, four = (next(x for x in lines if x[:3] == ["32 / 8, 128", "8 × 98,304", bits]) for bits in ("2 / 2", "4 / 4"))
    assert two[3:] == ["0.14", "0.76", "5.10", "5.20", "0.714", "0.38", "0.5"]
    assert four[3:] == ["0.26", "0.77", "2.75", "–", "0.714", "0.38", "–"]
    assert [
        "32,768-token prompt",
        "2 / 2",
        "oscar-cuda, shaped",
        "0.3",
        "–",
        "0.12",
        "0.9 %",
        "0.05 %",
        "1.0001",
    ] in lines
    assert ["oscar-cuda, tiles to cuDNN", "32,768 over 65,536", "80", "1.080", "0.980", "2.0e-03", "768"] in lines
    assert ["oscar-cuda", "1", "98,304", "6", "167", "21,300", "6.93", "1.50", "1.50"] in lines
    assert "not measured: triton-bf16" in text
    readme.write_text(text.replace("0.76", "0.86"))
    assert tool.main(["--check", *words]) == 1


def test_files_without_a_place_in_readme_are_an_error(tool: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# x\n")
    words = ["--check", "--readme", str(readme), "--results", str(tmp_path)]
    assert tool.main(words) == 0
    write(tmp_path)
    with pytest.raises(SystemExit, match="markers"):
        tool.main(words)
