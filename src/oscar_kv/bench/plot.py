# SPDX-License-Identifier: Apache-2.0
"""A picture of a run: a bar a contender, a group a shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..evaluation.plots import BLUE, GREY, INK, ORANGE, SOFT, _pyplot, save
from .report import KEY, Row

COLOURS = {
    "oscar-cuda": BLUE, "oscar-triton": "#8fb8de", "oscar-torch": "#c9d9e8", "fa3-bf16": INK, "fa3-fp8": ORANGE,
    "flashinfer-bf16": SOFT, "flashinfer-fp8": "#e8a33d", "sdpa-bf16": GREY, "triton-bf16": "#b3bac2",
    "cudnn-bf16": "#5b6875", "fa2-bf16": "#c5ccd3",
}  # fmt: skip


def label(row: Row) -> str:
    """A group's name."""
    heads = f"{row['q_heads']}/{row['kv_heads']} heads, d {row['head_dim']}"
    if "chunk" in row:
        return f"{heads}\n{row['chunk']:,} over {row['prefix']:,}"
    return f"{heads}\nbatch {row['batch']} × {row['context']:,}"


def relative(own: Sequence[Row], field: str) -> float:
    """What a group's bars are divided by: the fastest BF16 time, else the largest of all."""
    dense = [float(r[field]) for r in own if r["op"].endswith("-bf16")]
    return min(dense) if dense else max(float(r[field]) for r in own)


def bars(part: str, rows: Sequence[Row], path: Path, gpu: str) -> Path:
    """Time over the fastest BF16 kernel's of the same shape; of store, percent of decode. Raises OscarError."""
    plt = _pyplot()
    field = "percent_of_decode" if part == "store" else "ms"
    unit = "%" if part == "store" else " ms"
    groups: dict[str, list[Row]] = {}
    for r in (r for r in rows if r.get(field) is not None):
        alike = next((name for name, own in groups.items() if all(own[0].get(k) == r.get(k) for k in KEY)), None)
        groups.setdefault(alike or label(r), []).append(r)
    count = sum(map(len, groups.values()))
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.26 * count + 0.2 * len(groups)))
    place, ticks = 0.0, []
    for name, own in groups.items():
        base = 1.0 if part == "store" else relative(own, field)
        ticks.append((place + (len(own) - 1) / 2, name))
        for r in sorted(own, key=lambda r: float(r[field])):
            words = [r["op"]]
            if r["op"].startswith("oscar"):
                words.append(f"{r['k_bits']}/{r['v_bits']} bits")
            if "shaped" in r:
                words.append("shaped" if r["shaped"] else "plain")
            axis.barh(place, r[field] / base, color=COLOURS.get(r["op"], GREY), height=0.8)
            axis.text(r[field] / base, place, f" {', '.join(words)}: {r[field]:.3g}{unit}", va="center", fontsize=8)
            place += 1
        place += 0.7
    axis.set_yticks([t for t, _ in ticks], [n for _, n in ticks], fontsize=8)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.35)
    axis.set_xlabel("percent of decode attention" if part == "store" else "time over that of the fastest BF16 kernel")
    axis.set_title(f"oscar-kv bench {part}, {gpu}")
    return save(figure, path)
