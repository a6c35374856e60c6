# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv inspect``: what an artifact holds and predicts, as text, JSON, PNG and HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import check_outputs, console, need, number, print_table, write_json

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..evaluation.diagnostics import LayerSummary, Spread
    from ..evaluation.report import Section

CONTEXTS = (8192, 32768, 131072)
COLUMNS = (
    "layer", "K/V bits", "‖μ_K‖", "K spread", "‖μ_V‖", "V spread", "K error plain %", "K error shaped %", "gain",
    "V error %", "top ⅛ of A %",
)  # fmt: skip


def command(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The file that `oscar-kv calibrate` wrote.")],
    moments: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Moments of the same calibration: adds spreads and key channels."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the same figures as JSON.")
    ] = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Write the plots as one picture.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained report.")
    ] = None,
) -> None:
    """What an artifact holds and predicts: model, recipe, size, offsets, spectra and errors by layer."""
    check_outputs(("--json", json_file), ("--png", png_file), ("--html", html_file))
    from ..artifact import Artifact
    from ..evaluation.diagnostics import summarise

    loaded = Artifact.load(artifact)
    keys, values = load_spreads(moments, loaded) if moments else ({}, {})
    layers = summarise(loaded, keys, values)
    facts = describe(loaded)
    for name, value in facts:
        console.print(f"{name:17s} {value}", markup=False, soft_wrap=True)
    print_table("By layer (means over KV heads)", COLUMNS, layer_rows(layers))
    console.print(NOTE, style="dim", soft_wrap=True)
    if json_file:
        write_json(json_file, as_json(loaded, layers))
    if png_file or html_file:
        pictures = draw(loaded, layers, keys)
        if png_file:
            _write_png(png_file, [png for png, _ in pictures])
        if html_file:
            from ..evaluation.report import write

            title = f"{loaded.meta.model.id}: {loaded.label}"
            write(html_file, title, f"oscar-kv artifact {loaded.sha256[:12]}", sections(facts, layers, pictures))
    for path in (json_file, png_file, html_file):
        if path:
            console.print(f"wrote {path}", markup=False)


NOTE = (
    "K error: predicted eAeᵀ of what is stored, relative to tr(A); plain rounds each dimension by itself, tr(A); "
    "shaped feeds errors forward, tr(D) of A = (I+U)D(I+U)ᵀ. V error: relative to the spread around "
    "μ_V. Gaussian rows assumed."
)


def describe(artifact: Artifact) -> list[tuple[str, str]]:
    """Name and value of everything about the artifact as a whole."""
    from ..memory import bits_per_element

    meta, recipe = artifact.meta, artifact.recipe
    full = [g for g in meta.layers if g.kind == "full"]
    shapes = sorted({f"{g.num_q_heads} query / {g.num_kv_heads} KV heads, d = {_dims(g)}" for g in full})
    rest = len(meta.layers) - len(full)
    c = meta.calibration
    steps = [
        "centred" if recipe.centre else "not centred", f"rotation {recipe.rotation}", f"step {recipe.step}",
        "keys shaped" if recipe.shaping else "no shaping", "unbiased" if recipe.unbiased else "biased",
    ]  # fmt: skip
    tokens = f"{c.tokens:,} tokens in chunks of {c.chunk:,}" if c.tokens else "none"
    out = [
        ("model", f"{meta.model.id} ({meta.model.architecture})"),
        ("layers", f"{len(full)} quantised" + (f", {rest} left as they are (sliding or no attention)" if rest else "")),
        ("geometry", "; ".join(shapes)),
        ("recipe", f"{artifact.label}: {', '.join(steps)}"),
        ("windows", f"sink {recipe.sink}, recent {recipe.recent}, slack {recipe.slack} tokens in the model's dtype"),
        ("calibration", f"{c.source}, {tokens}{', chat template' if c.chat_template else ''}"),
        ("data", c.data or "not recorded"),
        ("sha256", artifact.sha256),
    ]
    out += [
        (f"bits at {n // 1024}K", f"{bits_per_element(artifact, n):.3f} an element, windows included") for n in CONTEXTS
    ]
    return [*out, ("notes", c.notes)] if c.notes else out


def _dims(g: Any) -> str:
    return str(g.k_head_dim) if g.k_head_dim == g.v_head_dim else f"{g.k_head_dim} (K) / {g.v_head_dim} (V)"


def layer_rows(layers: list[LayerSummary]) -> list[list[str]]:
    """The table's cells."""

    def percent(value: float | None) -> str:
        return number(None if value is None else 100 * value, 1)

    return [
        [
            str(s.layer), f"{s.k_bits}/{s.v_bits}", number(s.k_offset, 2), number(s.k_spread, 2), number(s.v_offset, 2),
            number(s.v_spread, 2), percent(s.key_plain), percent(s.key_shaped), number(s.gain, 2), percent(s.value),
            percent(s.leading),
        ]
        for s in layers
    ]  # fmt: skip


def as_json(artifact: Artifact, layers: list[LayerSummary]) -> dict[str, Any]:
    """The JSON twin: the artifact's metadata and a row a layer, spectra included."""
    from dataclasses import asdict

    from ..memory import bits_per_element

    return {
        "meta": {
            "artifact": artifact.meta.model_dump(mode="json"),
            "artifact_sha256": artifact.sha256,
            "label": artifact.label,
            "bpe": {str(n): bits_per_element(artifact, n) for n in CONTEXTS},
        },
        "rows": [{**asdict(s), "gain": s.gain} for s in layers],
    }


def load_spreads(path: Path, artifact: Artifact) -> tuple[dict[int, Spread], dict[int, Spread]]:
    """Spreads of raw keys and values by layer, from a moments file. Raises OscarError if it is of another model."""
    from ..calibration import Moments
    from ..errors import OscarError
    from ..evaluation.diagnostics import spreads_of

    moments = Moments.load(path)
    ours, theirs = artifact.meta.model, moments.meta.model
    if moments.meta.layers != artifact.meta.layers or ours.weight_samples != theirs.weight_samples:
        raise OscarError(
            f"--moments {path}: collected on {theirs.id!r}, the artifact is of {ours.id!r}; give its own moments"
        )
    return spreads_of(moments)


def draw(artifact: Artifact, layers: list[LayerSummary], keys: dict[int, Spread]) -> list[tuple[bytes, str]]:
    """Every plot the artifact allows, as (PNG, caption)."""
    from ..evaluation import plots
    from ..evaluation.diagnostics import most_offset_head

    need("matplotlib", "plotting")
    out = []
    if any(s.spectrum for s in layers):
        caption = "How unequally directions of a key count. The steeper, the more shaping gains over plain rounding."
        out.append((plots.png(plots.spectra(layers)), caption))
    out.append((plots.png(plots.predicted_errors(layers)), "Predicted error of what is stored, a figure a layer."))
    if keys or artifact.recipe.centre:
        centre = {i: (keys[i].mean if i in keys else t.k.centre) for i, t in artifact.layers.items()}
        caption = (
            "Where keys lie on average. A large offset wastes the few levels there are unless it is subtracted first."
        )
        out.append((plots.png(plots.centres(centre, layers)), caption))
    if keys:
        i, head = most_offset_head(keys)
        figure = plots.key_channels(keys[i], keys[i].under(artifact.layers[i].k), head, f"layer {i}, KV head {head}")
        caption = (
            "The head whose keys lie furthest from zero, before and after. One step size has to serve every channel."
        )
        out.append((plots.png(figure), caption))
    return out


def _write_png(path: Path, pictures: list[bytes]) -> None:
    from ..errors import OscarError
    from ..evaluation.plots import overview

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(overview(pictures))
    except OSError as error:
        raise OscarError(f"--png {path}: cannot be written ({error})") from error


def sections(
    facts: list[tuple[str, str]], layers: list[LayerSummary], pictures: list[tuple[bytes, str]]
) -> list[Section]:
    """The report's sections."""
    from ..evaluation.report import Facts, Picture, Section, Table

    return [
        Section("Artifact", [Facts(facts)]),
        Section("Plots", [Picture(png, caption) for png, caption in pictures]),
        Section("By layer", [NOTE, Table(COLUMNS, layer_rows(layers))]),
    ]
