# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv calibrate``: a model and some text in, an artifact out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CalibrationError, OscarError
from .common import Steps, check_outputs, console, model_name, number, print_table, size, write_json

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..calibration import Moments

CONTEXTS = (32768, 131072)


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, hub name or .gguf file of a Transformers causal model.")
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE|DATASET",
            help="Text: .txt, .md, .py, .jsonl (text or messages), .gz of these, a folder, builtin, builtin:code, "
            "builtin:prose, or a dataset of the hub.",
        ),
    ] = "builtin",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to calibrate on; at least 1,024.")] = 8192,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of one sequence; longer ones see more history.")] = 2048,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write the artifact.")
    ] = None,
    recipe: Annotated[str, typer.Option(metavar="NAME", help="A preset.")] = "k2v2",
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Lay the texts out with the model's chat template.")
    ] = False,
    data_free: Annotated[
        bool, typer.Option("--data-free", help="No text: Hadamard and zero centres from the config alone (worse).")
    ] = False,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float32, bfloat16, float16 or auto.")] = "auto",
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1 … or auto.")] = "auto",
    save_moments: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the statistics, from which every recipe can be fitted.")
    ] = None,
    from_moments: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Fit to statistics that --save-moments kept; no text is read.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was done as JSON.")
    ] = None,
) -> None:
    """Measure a model's keys, values and queries and write the artifact that a 2-bit cache needs."""
    _check_options(output, data_free, save_moments, from_moments)
    check_outputs(("-o", output), ("--save-moments", save_moments), ("--json", json_file))
    from ..calibration import data_free as fit_without_data
    from ..calibration import fit
    from ..recipe import get_recipe

    wanted = get_recipe(recipe)
    with Steps() as steps:
        if data_free:
            from ..integrations.transformers.loading import load_config

            artifact = fit_without_data(load_config(model), model_name(model), wanted)
        else:
            if from_moments is not None:
                moments = _load_moments(from_moments, model)
            else:
                moments = _collect(steps, model, data, tokens, chunk, wanted.windows, chat_template, dtype, device)
            if save_moments is not None:
                moments.save(save_moments)
            artifact = fit(moments, wanted)
        if output is not None:
            artifact.save(output)
    _show(artifact, output, save_moments)
    if json_file is not None:
        write_json(json_file, summary(artifact, output))


def _check_options(output: Path | None, data_free: bool, save: Path | None, source: Path | None) -> None:
    if output is None and save is None:
        raise OscarError("say where the artifact goes: -o FILE")
    if data_free and (save is not None or source is not None):
        raise OscarError("--data-free reads no text and has no statistics: leave out --save-moments and --from-moments")


def _collect(
    steps: Steps, model: str, data: str, tokens: int, chunk: int, windows: tuple[int, int],
    chat_template: bool, dtype: str, device: str,
) -> Moments:  # fmt: skip
    from ..calibration import collect, load_texts
    from ..calibration.collect import check_floor, check_positions
    from ..calibration.data import describe
    from ..integrations.transformers.loading import check_config, load_model

    texts = load_texts(data)  # before the model is loaded: a bad name should not cost minutes
    check_floor([min(chunk, tokens - i) for i in range(0, tokens, chunk)], *windows)
    if (config := check_config(model)) is not None:
        check_positions(config, min(chunk, tokens))
    with steps.task(f"loading {model}"):
        net, tokenizer = load_model(model, dtype, device)
    sink, recent = windows
    pieces = cut(texts, tokenizer, tokens, chunk, chat_template, windows)
    found = sum(len(piece) for piece in pieces)
    with steps.task(f"calibrating on {found:,} tokens of {data} (layers)") as report:
        return collect(
            net, pieces, sink=sink, recent=recent, progress=report, model_id=model_name(model),
            data=describe(data, texts), chat_template=chat_template,
        )  # fmt: skip


def cut(
    texts: list[Any], tokenizer: Any, tokens: int, chunk: int, chat_template: bool, windows: tuple[int, int]
) -> list[Any]:
    """Chunks of the texts; says so in a line if there is less text than asked, or raises if it is too little."""
    import warnings

    from ..calibration import chunks
    from ..calibration.collect import check_floor

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the calibration texts hold")  # the note below says it
        pieces = chunks(texts, tokenizer, tokens, chunk, chat_template)
    check_floor([len(piece) for piece in pieces], *windows)
    if (found := sum(len(piece) for piece in pieces)) < tokens:
        console.print(f"note: the texts hold {found:,} tokens, {tokens:,} were asked for", markup=False)
    return pieces


def _load_moments(path: Path, model: str) -> Moments:
    from ..calibration import Moments
    from ..integrations.transformers.identity import attention_config
    from ..integrations.transformers.loading import load_config

    moments = Moments.load(path)
    have, want = moments.meta.model.config, attention_config(load_config(model))
    for field in sorted({*have, *want}):
        if have.get(field) != want.get(field):
            raise CalibrationError(
                f"{path}: collected from {moments.meta.model.id!r}, not from {model!r}: config.{field} "
                f"{have.get(field)!r} ≠ {want.get(field)!r}"
            )
    return moments


def summary(artifact: Artifact, output: Path | None) -> dict[str, Any]:
    """What ``--json`` writes."""
    from ..memory import bits_per_element

    return {
        "file": None if output is None else str(output),
        "label": artifact.label,
        "sha256": artifact.sha256,
        "bits_per_element": {
            "history": bits_per_element(artifact),
            **{str(n): bits_per_element(artifact, n) for n in CONTEXTS},
        },
        "meta": artifact.meta.model_dump(mode="json"),
    }


def _show(artifact: Artifact, output: Path | None, save_moments: Path | None) -> None:
    from ..memory import bits_per_element

    meta = artifact.meta
    full = sum(layer.kind == "full" for layer in meta.layers)
    rows = [
        ["model", f"{meta.model.id} ({meta.model.architecture})"],
        ["layers quantised", f"{full} of {len(meta.layers)}"],
        ["recipe", artifact.label],
        ["bits an element, history", number(bits_per_element(artifact), 2)],
        *([f"bits an element at {n:,} tokens", number(bits_per_element(artifact, n), 2)] for n in CONTEXTS),
        ["calibrated on", f"{meta.calibration.tokens:,} tokens: {meta.calibration.data or 'no data'}"],
        ["artifact sha256", artifact.sha256[:16]],
    ]
    if meta.calibration.notes:
        rows.append(["notes", meta.calibration.notes])
    if output is not None:
        rows.append(["written", f"{output} ({size(output.stat().st_size)})"])
    if save_moments is not None:
        rows.append(["moments", f"{save_moments} ({size(save_moments.stat().st_size)})"])
    print_table("", ("", ""), rows)
