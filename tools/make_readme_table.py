#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write README's picture line and tables of measured results from benchmarks/results/*.json, losses included.

    python tools/make_readme_table.py            rewrite the block between the markers
    python tools/make_readme_table.py --check    exit 1 if README does not say what the files say

Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin (python tools/make_readme_table.py) -->", "<!-- results:end -->"
PICTURE_BEGIN, PICTURE_END = "<!-- picture:begin (python tools/make_readme_table.py) -->", "<!-- picture:end -->"
PICTURE = """![KL divergence to full precision by recipe](docs/images/quality.png)

*`naive`, `quarot`, `oscar-paper`, `k2v2-plain` and `k2v2` store the same number of bytes.
[How it is measured](#measured-results).*"""
OF_SPEED = {f"{part}_h200" for part in ("decode", "store", "prefill", "model")}
"""Files that tools/make_speed_table.py has tables for."""
NONE_YET = "No results file is in `benchmarks/results/` yet."
RECIPES = ("bf16", "naive", "quarot", "oscar-paper", "k2v2-plain", "k2v1", "k2v2", "k3v2", "k3v3", "k4v4")
FOLD, FOLD_OTHERS = 24, 8
"""Tables longer than this are folded, not cut; the second figure is for files without a table of their own."""
Row = Mapping[str, Any]


def load(path: Path) -> tuple[Row, list[Row]]:
    """(meta, rows) of a results file. Exits with the file's name if it is not one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        meta, rows = document["meta"], document["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: not a results file with meta and rows ({error!r})")
    if not isinstance(rows, list) or not rows:
        sys.exit(f"{path}: rows is empty; delete the file or run its command again")
    return meta, rows


def figure(value: Any) -> str:
    """A cell: four significant digits for floats, thousands separated, lists and the rest as they are."""
    if value is None:
        return "–"
    if isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, (list, tuple)):
        return " – ".join(figure(v) for v in value)
    return str(value).replace("|", "\\|")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], fold: int = FOLD) -> list[str]:
    out = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    out += ["| " + " | ".join(row) + " |" for row in rows]
    if len(rows) <= fold:
        return out
    return [f"<details><summary>{len(rows)} rows</summary>", "", *out, "", "</details>"]


def mean(rows: Sequence[Row], field: str) -> float | None:
    """Mean over rows, weighted by their tokens."""
    found = [(r[field], r.get("tokens") or 1) for r in rows if r.get(field) is not None]
    return sum(v * n for v, n in found) / sum(n for _, n in found) if found else None


def _rank(name: str) -> tuple[int, str]:
    return (RECIPES.index(name) if name in RECIPES else len(RECIPES), name)


def _bold(name: str) -> str:
    return f"**{name}**" if name == "k2v2" else name


def quality(rows: list[Row]) -> list[str]:
    """A table a context of KL and perplexity; then the needles."""
    out: list[str] = []
    text = [r for r in rows if "kl" in r and "dataset" in r]
    for context in sorted({r["context"] for r in text}):
        here = [r for r in text if r["context"] == context]
        kinds = sorted({r["dataset"] for r in here})
        columns = ["recipe", "K / V bits", f"bits an element at {context:,}"]
        columns += [f"KL, {kind}" for kind in kinds] + [f"perplexity, {kind}" for kind in kinds]
        body = []
        for name in sorted({r["recipe"] for r in here}, key=_rank):
            own = [r for r in here if r["recipe"] == name]
            by_kind = [[r for r in own if r["dataset"] == kind] for kind in kinds]
            bits = "16 / 16" if name == "bf16" else f"{own[0].get('k_bits', '–')} / {own[0].get('v_bits', '–')}"
            cells = [_bold(name), bits, figure(16.0 if name == "bf16" else mean(own, "bpe"))]
            cells += [figure(mean(r, "kl")) for r in by_kind] + [figure(mean(r, "ppl")) for r in by_kind]
            body.append(cells)
        out += [*markdown(columns, body), ""]
    needles = [r for r in rows if "task" in r]
    if needles:
        needles.sort(key=lambda r: (str(r["task"]), r["context"], _rank(r["recipe"])))
        body = [
            [
                _bold(r["recipe"]),
                r["task"],
                figure(r["context"]),
                figure(r["n"]),
                figure(r["score"]),
                figure(r.get("ci95")),
            ]
            for r in needles
        ]
        out += [*markdown(["recipe", "task", "context", "n", "score", "95 % interval"], body), ""]
    rest = [r for r in rows if r not in text and r not in needles]
    return out + (generic(rest) if rest else [])


def decode(rows: list[Row]) -> list[str]:
    """Decode attention: time, share of copy bandwidth, and times the fastest BF16 kernel at the same shape."""
    fields = ("q_heads", "kv_heads", "head_dim", "batch", "context")
    if not all("ms" in r and "op" in r and all(f in r for f in fields) for r in rows):
        return generic(rows)

    def shape(row: Row) -> tuple[Any, ...]:
        return tuple(row[f] for f in fields)

    best: dict[tuple[Any, ...], float] = {}
    for r in rows:
        if "bf16" in r["op"]:
            best[shape(r)] = min(best.get(shape(r), float("inf")), r["ms"])
    body = []
    for r in sorted(rows, key=lambda r: (shape(r), r["ms"])):
        bits = f"{r['k_bits']} / {r['v_bits']}" if r.get("k_bits") else "–"
        times = f"{best[shape(r)] / r['ms']:.2f}" if shape(r) in best else "–"
        cells = [r["op"], bits, f"{r['q_heads']} / {r['kv_heads']}", *(figure(r[f]) for f in fields[2:])]
        body.append([*cells, figure(r["ms"]), figure(r.get("share")), times])
    columns = ["op", "K / V bits", "q / KV heads", "head_dim", "batch", "context", "ms", "share of copy speed"]
    return [*markdown([*columns, "× fastest BF16"], body), ""]


def generic(rows: list[Row]) -> list[str]:
    """Every field of every row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [*markdown(columns, [[figure(row.get(c)) for c in columns] for row in rows], FOLD_OTHERS), ""]


BUILDERS: dict[str, Callable[[list[Row]], list[str]]] = {"quality": quality, "decode": decode}
"""First word of a file's name → its table."""


def provenance(path: Path, meta: Row) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in (meta.get("versions") or {}).items() if v)
    where = ", ".join(str(meta[k]) for k in ("gpu", "machine") if meta.get(k))
    parts = [f"[`{path.name}`](benchmarks/results/{path.name})", f"`{meta.get('command', 'command not recorded')}`"]
    parts += [str(p) for p in (where, versions, meta.get("date"), meta.get("notes")) if p]
    return f"<sub>{' · '.join(parts)}</sub>"


def block(results: Path) -> str:
    """Everything between the markers."""
    # Ablations are evidence for docs/method.md, not results of a preset.
    found = [p for p in results.glob("*.json") if not p.stem.startswith("ablation") and p.stem not in OF_SPEED]
    files = sorted(found, key=lambda p: (not p.stem.startswith("quality"), p.stem))
    if not files:
        return NONE_YET
    out: list[str] = []
    for path in files:
        meta, rows = load(path)
        out += [f"**{meta.get('model') or path.stem}** ({path.stem})", ""]
        out += BUILDERS.get(path.stem.split("_")[0], generic)(rows)
        out += [provenance(path, meta), ""]
    return "\n".join(out).rstrip()


def replaced(readme: str, new: str, begin: str = BEGIN, end: str = END) -> str:
    """README with the block between two markers replaced. Exits if the markers are not there exactly once."""
    if readme.count(begin) != 1 or readme.count(end) != 1 or readme.index(begin) > readme.index(end):
        sys.exit(f"README must hold the markers {begin!r} and {end!r} once each, in this order")
    before, after = readme.split(begin)[0], readme.split(end)[1]
    return f"{before}{begin}\n{new}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 if README is out of date; write nothing")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    old = options.readme.read_text(encoding="utf-8")
    drawn = (options.readme.parent / "docs" / "images" / "quality.png").is_file()
    new = replaced(old, block(options.results))
    new = replaced(new, PICTURE if drawn else "", PICTURE_BEGIN, PICTURE_END)
    if old == new:
        return 0
    if options.check:
        print(
            f"{options.readme} differs from {options.results}: run python tools/make_readme_table.py", file=sys.stderr
        )
        return 1
    options.readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
