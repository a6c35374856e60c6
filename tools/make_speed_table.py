#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write README's tables of speed from benchmarks/results/{decode,store,prefill,model}_h200.json, losses included.

python tools/make_speed_table.py            rewrite the block between the markers
python tools/make_speed_table.py --check    exit 1 if README does not say what the files say

Without any of the files README needs no markers. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from make_readme_table import ROOT, Row, figure, load, markdown, provenance, replaced

BEGIN, END = "<!-- speed:begin (python tools/make_speed_table.py) -->", "<!-- speed:end -->"
SHAPE = ("q_heads", "kv_heads", "head_dim", "batch", "context")
FOLD = 12


def number(value: Any, form: str = "{:.3g}") -> str:
    return "–" if value is None else form.format(value)


def percent(value: Any) -> str:
    return "–" if value is None else f"{value:.2g} %"


def decode(rows: list[Row]) -> list[str]:
    """A line a shape and bits of ours, the others beside it."""
    others = sorted({r["op"] for r in rows if not r["op"].startswith("oscar")}, key=lambda op: ("bf16" not in op, op))
    ms = {(r["op"], *(r[f] for f in SHAPE), r["k_bits"], r["v_bits"]): r for r in rows}

    def of(op: str, shape: tuple[Any, ...]) -> float | None:
        return next((r["ms"] for key, r in ms.items() if key[0] == op and key[1:6] == shape), None)

    keys = list(dict.fromkeys((*(r[f] for f in SHAPE), r["k_bits"], r["v_bits"]) for r in rows if "oscar" in r["op"]))
    columns = ["q / KV heads, d", "batch × context", "K / V bits", "ours, ms", "share of copy speed", "× fastest BF16"]
    columns += ["× FA3 BF16", *(f"{op}, ms" for op in others)]
    triton = any(r["op"] == "oscar-triton" for r in rows)
    columns += ["ours in Triton, ms"] if triton else []
    body = []
    for key in keys:
        q, kv, d, batch, context, k, v = key
        ours: Row = ms.get(("oscar-cuda", *key), {})
        cells = [f"{q} / {kv}, {d}", f"{batch} × {context:,}", f"{k} / {v}", number(ours.get("ms"))]
        cells += [number(ours.get("share"), "{:.2f}"), number(ours.get("times_faster"), "{:.2f}")]
        cells += [number(ours.get("times_faster_fa3"), "{:.2f}")]
        cells += [number(of(op, key[:5])) for op in others]
        cells += [number(ms.get(("oscar-triton", *key), {}).get("ms"))] if triton else []
        body.append(cells)
    return markdown(columns, body, FOLD)


def store(rows: list[Row]) -> list[str]:
    columns = ["writing", "K / V bits", "kernel", "ms", "of decode attention", "share of copy speed", "of a prefill"]
    columns += ["key rows with other codes", "error, × reference"]
    body = []
    for r in rows:
        what = f"{r['tokens']:,}-token prompt" if r["what"] == "prompt" else f"decode, batch {r['batch']}"
        kernel = f"{r['op']}, {'shaped' if r['shaped'] else 'plain'}"
        cells = [what, f"{r['k_bits']} / {r['v_bits']}", kernel, number(r["ms"]), percent(r.get("percent_of_decode"))]
        cells += [number(r.get("share"), "{:.2f}"), percent(r.get("percent_of_prefill"))]
        cells += [percent(r.get("k_rows_off_percent")), number(r.get("k_error_ratio"), "{:.4f}")]
        body.append(cells)
    return markdown(columns, body, FOLD)


def prefill(rows: list[Row]) -> list[str]:
    columns = ["op", "chunk over prefix", "ms", "time over fastest BF16", "time over FA3", "error", "extra memory, MiB"]
    body = [
        [
            f"{r['op']}, tiles to {r['dense']}" if r.get("dense") else r["op"],
            f"{r['chunk']:,} over {r['prefix']:,}", number(r["ms"]), number(r.get("ratio"), "{:.3f}"),
            number(r.get("ratio_fa3"), "{:.3f}"), number(r.get("error"), "{:.1e}"),
            number(r.get("peak_extra_bytes", 0) / 2**20, "{:.0f}"),
        ]
        for r in rows
    ]  # fmt: skip
    return markdown(columns, body, FOLD)


def model(rows: list[Row]) -> list[str]:
    columns = [
        "cache",
        "batch",
        "context",
        "ms a step",
        "tokens/s",
        "cache bytes a token",
        "× less memory",
        "× faster",
        "× FA3 BF16",
    ]
    body = [
        [
            r["op"], figure(r["batch"]), figure(r["context"]), number(r["ms"]), number(r["tokens_per_s"], "{:,.0f}"),
            number(r["cache_bytes_per_token"], "{:,.0f}"), number(r.get("memory_ratio"), "{:.2f}"),
            number(r.get("times_faster"), "{:.2f}"), number(r.get("times_faster_fa3"), "{:.2f}"),
        ]
        for r in sorted(rows, key=lambda r: (r["batch"], r["ms"]))
    ]  # fmt: skip
    return markdown(columns, body, FOLD)


PARTS: dict[str, tuple[str, Callable[[list[Row]], list[str]]]] = {
    "decode": ("Decode attention", decode),
    "store": ("Writing", store),
    "prefill": ("A chunk over a long prefix", prefill),
    "model": ("Whole decode steps, random weights of Qwen3-8B's shape", model),
}


def block(results: Path, suffix: str = "h200") -> str:
    """Everything between the markers; empty without files."""
    out: list[str] = []
    for part, (title, build) in PARTS.items():
        path = results / f"{part}_{suffix}.json"
        if path.is_file():
            meta, rows = load(path)
            missing = ", ".join(sorted(meta.get("missing") or {}))
            out += [f"**{title}**", "", *build(rows), "", provenance(path, meta)]
            out += [f"<sub>not measured: {missing}</sub>"] if missing else []
            out += [""]
    return "\n".join(out).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 if README is out of date; write nothing")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    old, made = options.readme.read_text(encoding="utf-8"), block(options.results)
    if not made and BEGIN not in old:
        return 0
    new = replaced(old, made, BEGIN, END)
    if old == new:
        return 0
    if options.check:
        print(f"{options.readme} differs from {options.results}: run python tools/make_speed_table.py", file=sys.stderr)
        return 1
    options.readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
