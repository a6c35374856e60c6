# SPDX-License-Identifier: Apache-2.0
"""Figures of reports, README and ``inspect``: quality by recipe, error by position, spectra, centres, key channels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import OscarError
from .diagnostics import LayerSummary, Spread

INK, SOFT, LINE = "#1d2733", "#5b6875", "#dde3ea"
BLUE, ORANGE, GREEN, RED, GREY = "#1f6fb5", "#e08214", "#2a9d6f", "#c8443c", "#9aa5b1"
COLOURS = {
    "bf16": INK, "naive": "#b9322b", "quarot": "#d9694f", "oscar-paper": "#e8a33d", "k2v2-plain": "#8fb8de",
    "k2v2": BLUE, "k3v2": "#1b8a8f", "k2v1": "#6a51a3", "k3v3": GREEN, "k4v4": "#14633f",
}  # fmt: skip
"""One colour a recipe, the same in every figure."""


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise OscarError(f"plots need matplotlib ({error}): pip install 'oscar-kv[demo]'") from error
    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "figure.dpi": 140, "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": GREY, "axes.labelcolor": SOFT, "text.color": INK, "xtick.color": SOFT, "ytick.color": SOFT,
        "axes.grid": True, "grid.color": LINE, "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.spines.top": False,
        "axes.spines.right": False, "legend.frameon": False, "figure.constrained_layout.use": True,
    })  # fmt: skip
    return plt


def png(figure: Any, source: str = "") -> bytes:
    """The figure as PNG bytes, with ``source`` (what it was drawn from) in its metadata; the figure is closed."""
    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor="white", metadata={"Software": None, "Source": source or None})
    _pyplot().close(figure)
    return out.getvalue()


def save(figure: Any, path: str | Path, source: str = "") -> Path:
    """Write the figure as PNG. Raises OscarError if the file cannot be written."""
    path, data = Path(path), png(figure, source)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise OscarError(f"{path}: the picture cannot be written ({error})") from error
    return path


def _tint(colour: str, share: float) -> tuple[float, ...]:
    """The colour mixed with this share of white."""
    rgb = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(c + (1 - c) * share for c in rgb)


def quality_bars(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """KL to full precision by recipe and kind of text, on a log scale.

    rows: mappings with recipe, dataset, kl, bpe (rows of a results file); ``bf16`` and rows without KL are left out.
    """
    rows = [r for r in rows if r.get("kl") and r["recipe"] != "bf16"]
    if not rows:
        raise OscarError("no rows with a KL above zero: nothing to plot")
    kinds = sorted({r["dataset"] for r in rows})
    mean = {name: [r["kl"] for r in rows if r["recipe"] == name] for name in {r["recipe"] for r in rows}}
    names = sorted(mean, key=lambda n: -sum(mean[n]) / len(mean[n]))
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(10.4, 0.9 + 0.52 * len(names) * max(1, len(kinds) * 0.62)))
    height = 0.8 / len(kinds)
    for y, name in enumerate(names):
        for j, kind in enumerate(kinds):
            found = [r["kl"] for r in rows if r["recipe"] == name and r["dataset"] == kind]
            if not found:
                continue
            kl, at = sum(found) / len(found), y + (j - (len(kinds) - 1) / 2) * height
            axis.barh(at, kl, height * 0.88, color=_tint(COLOURS.get(name, GREY), 0.0 if j == 0 else 0.4), linewidth=0)
            axis.annotate(f"{kl:.2g}  {kind}", (kl, at), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    bpe = {r["recipe"]: r["bpe"] for r in rows if r.get("bpe")}
    axis.set_yticks(range(len(names)), [f"{n}\n{bpe[n]:.2f} bits/element" if n in bpe else n for n in names], color=INK)
    axis.invert_yaxis()
    axis.set_xscale("log")
    low, high = min(r["kl"] for r in rows), max(r["kl"] for r in rows)
    axis.set_xlim(low / 2.2, high * 5)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("KL divergence to full precision, nats a token (log scale, less is better)")
    axis.set_title(title)
    return figure


def kl_by_position(curves: Mapping[str, Sequence[float]], bucket: int, first: int = 0) -> Any:
    """Mean KL in buckets of ``bucket`` positions, a line a recipe; positions start at ``first``."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(10.4, 3.7))
    for name, curve in curves.items():
        at = [first + bucket * (i + 0.5) for i in range(len(curve))]
        axis.plot(
            at, [max(v, 1e-6) for v in curve], color=COLOURS.get(name, GREY), lw=2, marker="o", ms=3.5, label=name
        )
    axis.set_yscale("log")
    axis.set_xlabel("position in the text (tokens)")
    axis.set_ylabel("KL, nats a token")
    axis.set_title("Error by position in the text")
    axis.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _layer_colours(plt: Any, n: int) -> Any:
    return plt.get_cmap("viridis")([i / max(n - 1, 1) * 0.92 for i in range(n)])


def spectra(layers: Sequence[LayerSummary]) -> Any:
    """Eigenvalues of the keys' error weight, a line a layer (mean over heads), and the share of the largest eighth."""
    shown = [s for s in layers if s.spectrum]
    if not shown:
        raise OscarError("the artifact holds no error weight: there are no spectra to plot")
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.0), width_ratios=[1.55, 1])
    for s, colour in zip(shown, _layer_colours(plt, len(shown)), strict=True):
        mean = torch.tensor(s.spectrum).mean(0).tolist()
        left.plot(range(1, len(mean) + 1), mean, color=colour, lw=1.2)
    left.axhline(1, color=RED, ls="--", lw=1)
    left.annotate("flat: every direction matters alike", (0.98, 1), (0, 4), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", color=RED, fontsize=8.5)  # fmt: skip
    left.set_yscale("log")
    left.set_xlabel("direction, most important first")
    left.set_ylabel("weight of an error (mean 1)")
    left.set_title("Spectrum of the keys' error weight")
    scale = plt.cm.ScalarMappable(
        cmap="viridis", norm=plt.Normalize(shown[0].layer, max(shown[-1].layer, shown[0].layer + 1))
    )
    figure.colorbar(scale, ax=left, label="layer", pad=0.01)
    right.bar([s.layer for s in shown], [100 * (s.leading or 0) for s in shown], color=BLUE, width=0.8)
    d = len(shown[0].spectrum[0])
    right.axhline(100 * max(1, d // 8) / d, color=RED, ls="--", lw=1)
    right.set_ylim(0, 100)
    right.set_xlabel("layer")
    right.set_ylabel("% of the weight")
    right.set_title(f"Held by {max(1, d // 8)} of {d} directions")
    right.grid(axis="x", visible=False)
    return figure


def predicted_errors(layers: Sequence[LayerSummary]) -> Any:
    """Predicted relative error by layer: keys rounded plainly, keys with shaping, values."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(10.4, 3.4))
    at = [s.layer for s in layers]
    lines: list[tuple[str, str, list[float | None]]] = [
        ("keys, each dimension rounded by itself", "#8fb8de", [s.key_plain for s in layers]),
        ("keys, error feedback", BLUE, [s.key_shaped for s in layers]),
        ("values", ORANGE, [s.value for s in layers]),
    ]
    for name, colour, values in lines:
        if any(v is not None for v in values):
            shown = [float("nan") if v is None else 100 * v for v in values]
            dashed = name == "values"  # at equal bits it lies on the first line
            axis.plot(
                at,
                shown,
                color=colour,
                lw=2,
                ls="--" if dashed else "-",
                marker=None if dashed else "o",
                ms=4,
                label=name,
            )
    axis.set_ylim(0, axis.get_ylim()[1] * 1.22)
    axis.set_xlabel("layer")
    axis.set_ylabel("% of what is stored")
    axis.set_title("Predicted error of the history, weighted by what it costs")
    if axis.lines:
        axis.legend(fontsize=9, loc="upper left", ncols=3)
    return figure


def centres(centre: Mapping[int, Tensor], layers: Sequence[LayerSummary]) -> Any:
    """Key centres by layer and channel (every head side by side), and offset against spread by layer."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.0), width_ratios=[1.75, 1])
    width = max(c.numel() for c in centre.values())
    grid = torch.full((len(centre), width), float("nan"))
    for row, value in enumerate(centre.values()):
        grid[row, : value.numel()] = value.reshape(-1).float()
    top = float(grid.nan_to_num().abs().flatten().quantile(0.995)) or 1.0
    image = left.imshow(grid.numpy(), aspect="auto", cmap="RdBu_r", vmin=-top, vmax=top, interpolation="nearest")
    ids = list(centre)
    ticks = range(0, len(ids), max(1, len(ids) // 8))
    left.set_yticks(list(ticks), [str(ids[i]) for i in ticks])
    heads, d = next(iter(centre.values())).shape
    for h in range(1, heads):
        left.axvline(h * d - 0.5, color=INK, lw=0.8)
    left.set_xticks([h * d + d / 2 for h in range(heads)], [f"KV head {h}" for h in range(heads)])
    left.set_ylabel("layer")
    left.grid(visible=False)
    left.set_title("Centres of the keys, by channel")
    figure.colorbar(image, ax=left, pad=0.01)
    at = [s.layer for s in layers]
    lines: list[tuple[str, str, str, list[float | None]]] = [
        ("‖μ_K‖ offset of keys", BLUE, "-", [s.k_offset for s in layers]),
        ("‖μ_V‖ offset of values", ORANGE, "-", [s.v_offset for s in layers]),
        ("spread of keys", BLUE, ":", [s.k_spread for s in layers]),
        ("spread of values", ORANGE, ":", [s.v_spread for s in layers]),
    ]
    for name, colour, style, values in lines:
        if all(v is not None for v in values):
            right.plot(at, values, color=colour, lw=2 if style == "-" else 1.3, ls=style, label=name)
    right.set_xlabel("layer")
    right.set_title("Offset against spread")
    if right.lines:
        right.set_yscale("log")
        right.legend(fontsize=8.5)
    return figure


def key_channels(before: Spread, after: Spread, head: int, where: str) -> Any:
    """Channels of one KV head's keys as the model makes them, and once centred and rotated: mean ± 2 deviations."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 3.5), sharey=True)
    titles = (f"Keys as the model makes them ({where})", "The same keys centred and rotated")
    for axis, spread, title, colour in zip(axes, (before, after), titles, (RED, BLUE), strict=True):
        mean, std = spread.mean[head].double().numpy(), spread.std[head].double().numpy()
        at = range(len(mean))
        axis.fill_between(
            at, mean - 2 * std, mean + 2 * std, step="mid", color=colour, alpha=0.28, lw=0, label="mean ± 2σ"
        )
        axis.step(at, mean, where="mid", color=colour, lw=1.3, label="mean")
        axis.axhline(0, color=INK, lw=0.7)
        axis.set_xlabel("channel")
        axis.set_title(title)
        axis.legend(fontsize=8.5, loc="upper left")
    return figure


def overview(figures: Sequence[bytes]) -> bytes:
    """Several PNGs stacked into one, for ``inspect --png``."""
    plt = _pyplot()
    images = [plt.imread(io.BytesIO(data), format="png") for data in figures]
    width = max(i.shape[1] for i in images)
    heights = [i.shape[0] * width / i.shape[1] for i in images]
    figure = plt.figure(figsize=(width / 140, sum(heights) / 140), layout="none")
    bottom = 1.0
    for image, height in zip(images, heights, strict=True):
        bottom -= height / sum(heights)
        axis = figure.add_axes((0.0, bottom, 1.0, height / sum(heights)))
        axis.imshow(image, aspect="auto")
        axis.axis("off")
    return png(figure)
