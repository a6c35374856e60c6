# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv eval``: perplexity, KL and needle retrieval, recipes side by side with full precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OscarError
from .common import Steps, check_outputs, console, model_name, number, print_table

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..evaluation.language import Tokens
    from ..evaluation.results import NeedleRow, QualityRow
    from ..evaluation.run import Contestant

CODE = (".py", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".js", ".ts", ".java")
"""Suffixes of files that count as code; all others are prose."""


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, hub name or .gguf file of a Transformers causal model.")
    ],
    artifact: Annotated[Path | None, typer.Option(metavar="FILE", help="Evaluate this artifact.")] = None,
    moments: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Fit the recipes to these statistics (calibrate --save-moments)."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Calibration tokens, where neither is given (shipped texts).")
    ] = 8192,
    recipes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Presets and rivals (kivi-2, turboquant-3, saw-int4, squat-2, fp8 …; NAME@ours: with our windows), "
            "separated by commas. With --artifact: besides its own.",
        ),
    ] = None,
    contexts: Annotated[str, typer.Option(metavar="TOKENS", help="Context lengths, separated by commas.")] = "2048",
    texts: Annotated[
        list[str] | None, typer.Option(metavar="builtin|FILE", help="Evaluation text; give it once for each file.")
    ] = None,
    per_kind: Annotated[int, typer.Option(min=1, help="Shipped texts of each kind.")] = 4,
    needles: Annotated[int, typer.Option(min=0, metavar="N", help="Needle samples; 0 leaves retrieval out.")] = 0,
    needle_context: Annotated[int, typer.Option(min=256, metavar="L", help="Tokens of a needle sample.")] = 2048,
    prefill: Annotated[
        str, typer.Option(metavar="strict|exact", help="Needles: prompt read from codes too, or prefilled exactly.")
    ] = "strict",
    seed: Annotated[int, typer.Option(help="Seed of needles and intervals.")] = 0,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float32, bfloat16, float16 or auto.")] = "auto",
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1 … or auto.")] = "auto",
    fast: Annotated[
        bool, typer.Option("--fast", help="CUDA: read the history by flash attention with fp16 operands.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write a results file.")] = None,
) -> None:
    """Perplexity and KL to full precision (exact emulation, positions ≥ 512), and needle retrieval, side by side."""
    chosen = _chosen(recipes)  # first what needs no heavy import
    check_outputs(("--json", json_file), devices=())
    if artifact is not None and moments is not None:
        raise OscarError("--artifact and --moments: give one of them")
    if prefill not in ("strict", "exact"):
        raise OscarError(f"--prefill {prefill}: it is strict or exact")
    lengths = _lengths(contexts)
    names = _names(chosen, artifact is not None)
    sources = _sources(texts or ["builtin"], per_kind)
    from ..evaluation.language import evaluate, tokenise
    from ..evaluation.needles import Haystack, retrieve
    from ..evaluation.results import needle_row
    from ..evaluation.run import haystack_texts, quality_rows, subjects_of
    from ..integrations.transformers.loading import load_model

    quality: list[QualityRow] = []
    found: list[NeedleRow] = []
    with Steps() as steps:
        with steps.task(f"loading {model}"):
            net, tokenizer = load_model(model, dtype, device)
        ready = _contestants(steps, net, tokenizer, model, artifact, moments, names, tokens)
        subjects = subjects_of(ready)
        for length in lengths:
            pieces: list[Tokens] = [t for kind, own in sources.items() for t in tokenise(own, kind, tokenizer, length)]
            with steps.task(f"{len(pieces)} texts of {length:,} tokens, {len(ready)} recipes") as report:
                quality += quality_rows(evaluate(net, pieces, subjects, fast=fast, progress=report), subjects, seed)
        if needles:
            hay = Haystack(haystack_texts(), tokenizer, needle_context, seed)
            with steps.task(f"{needles} needle samples of {needle_context:,} tokens") as report:
                samples = [hay.sample(i) for i in range(needles)]
                how: Any = prefill
                runs = retrieve(net, samples, subjects, prefill=how, fast=fast, progress=report)
            hashes = {name: getattr(a, "sha256", None) for name, a in subjects.items()}
            found = [needle_row(r, "prose", how, hashes[r.recipe]) for r in runs]
    show(quality, found)
    if json_file is not None:
        _write(json_file, quality, found, ready, net, model, seed, prefill)


def _lengths(contexts: str) -> list[int]:
    from ..evaluation.language import FIRST

    try:
        out = [int(part) for part in contexts.split(",")]
    except ValueError:
        raise OscarError(f"--contexts {contexts}: give whole numbers, separated by commas") from None
    if min(out) < FIRST + 2:
        raise OscarError(
            f"--contexts {contexts}: positions from {FIRST} on count, so a context needs at least {FIRST + 2} tokens"
        )
    return out


def _chosen(recipes: str | None) -> list[str] | None:
    """Names given, each once. Raises RecipeError for an unknown one."""
    if recipes is None:
        return None
    from ..evaluation.rivals import contestant_name

    return list(dict.fromkeys(contestant_name(name.strip()) for name in recipes.split(",")))


def _names(chosen: list[str] | None, own: bool) -> list[str]:
    from ..evaluation.run import RECIPES

    return chosen if chosen is not None else [] if own else list(RECIPES)


@dataclass(frozen=True)
class _File:
    name: str
    text: str


def _sources(texts: Sequence[str], per_kind: int) -> dict[str, list[Any]]:
    """Evaluation texts by kind."""
    from ..evaluation.run import KINDS, evaluation_texts
    from .common import read_text

    out: dict[str, list[Any]] = {}
    for name in texts:
        if name == "builtin":
            for kind in KINDS:
                out.setdefault(kind, []).extend(evaluation_texts(kind, per_kind))
        else:
            kind = "code" if Path(name).suffix in CODE else "prose"
            out.setdefault(kind, []).append(_File(Path(name).name, read_text(name, "--texts")))
    return out


def _contestants(
    steps: Steps,
    net: Any,
    tokenizer: Any,
    model: str,
    file: Path | None,
    moments: Path | None,
    names: list[str],
    tokens: int,
) -> dict[str, Contestant]:
    """What to evaluate, by the name that tables call it: an artifact's own recipe first, then as asked for."""
    from ..evaluation.baselines import bind, get_baseline, is_baseline

    rivals = bind([get_baseline(name) for name in names if is_baseline(name)], net)
    presets = [name for name in names if name not in rivals]
    artifacts: dict[str, Artifact] = {}
    if presets or file is not None:  # rivals need no calibration
        artifacts = _artifacts(steps, net, tokenizer, model, file, moments, presets, tokens)
    own = [name for name in artifacts if name not in names]
    found: dict[str, Contestant] = {**artifacts, **rivals}
    return {name: found[name] for name in [*own, *names] if name in found}


def _artifacts(
    steps: Steps,
    net: Any,
    tokenizer: Any,
    model: str,
    file: Path | None,
    moments: Path | None,
    names: list[str],
    tokens: int,
) -> dict[str, Artifact]:
    """The artifacts to evaluate, by the name that tables call them."""
    from ..artifact import Artifact
    from ..calibration import Moments, collect, load_texts
    from ..evaluation.run import fit_all
    from ..recipe import DEFAULT, get_recipe
    from .calibrate import cut

    if file is not None:
        own = Artifact.load(file)
        return {own.label: own, **{n: own.with_recipe(n) for n in names if n != own.recipe.name}}
    if moments is not None:
        return fit_all(Moments.load(moments), names)
    pieces = cut(load_texts("builtin"), tokenizer, tokens, 2048, False, get_recipe(DEFAULT).windows)
    with steps.task(f"calibrating on {sum(map(len, pieces)):,} tokens (layers)") as report:
        name = Path(model).name if Path(model).exists() else model
        sums = collect(net, pieces, progress=report, model_id=name, data="builtin")
    return fit_all(sums, names)


def show(quality: Sequence[QualityRow], found: Sequence[NeedleRow]) -> None:
    """A table a kind and context, and one of needles."""
    groups: dict[tuple[str, int], list[QualityRow]] = {}
    for row in quality:
        groups.setdefault((row.dataset, row.context), []).append(row)
    console.print()
    for (kind, context), rows in groups.items():
        columns = (
            "recipe", "K/V bits", "windows", "history", f"at {context:,}", "KL", "perplexity", "change", "top-1",
        )  # fmt: skip
        cells = [
            [
                r.recipe, f"{r.k_bits}/{r.v_bits}", "–" if r.windows is None else f"{r.windows[0]}+{r.windows[1]}",
                number(r.bpe if r.bpe_history is None else r.bpe_history, 2), number(r.bpe, 2), number(r.kl),
                number(r.ppl, 3), f"{100 * (r.ppl / r.ppl_bf16 - 1):+.2f} %", f"{100 * (r.top1 or 0):.1f} %",
            ]
            for r in rows
        ]  # fmt: skip
        caption = (
            "windows: sink and recent tokens in full precision. "
            "bits an element, history: codes with their metadata; at a context: the whole cache, windows in 16 bits. "
            "bf16 stands for the model in full precision, whatever its dtype."
        )
        print_table(f"{kind}: {rows[0].texts} texts of {context:,} tokens, positions ≥ 512", columns, cells, caption)
    if found:
        shares = [
            [
                r.recipe,
                f"{round(r.score * r.n)} of {r.n}",
                f"{100 * r.score:.1f} %",
                f"{100 * r.ci95[0]:.1f} to {100 * r.ci95[1]:.1f} %",
            ]
            for r in found
        ]
        how = "every query reads its history from codes" if found[0].prefill == "strict" else "prompt prefilled exactly"
        titles = ("recipe", "found", "share", "95 % interval")
        print_table(f"Needles at {found[0].context:,} tokens ({how})", titles, shares)


def _write(
    path: Path, quality: Sequence[QualityRow], found: Sequence[NeedleRow], ready: dict[str, Contestant], net: Any,
    model: str, seed: int, prefill: str,
) -> None:  # fmt: skip
    from ..artifact import Artifact
    from ..evaluation.results import make_meta, write
    from ..recipe import DEFAULT

    artifacts = {name: a for name, a in ready.items() if isinstance(a, Artifact)}
    chosen = artifacts.get(DEFAULT) or next(iter(artifacts.values()), None)
    calibration = (
        ""
        if chosen is None
        else f"calibration: {chosen.meta.calibration.tokens} tokens of {chosen.meta.calibration.data}; "
    )
    parameter = next(net.parameters())
    meta = make_meta(
        model_name(model), artifact_sha256=None if chosen is None else chosen.sha256, seed=seed,
        device=str(parameter.device),
        notes=f"exact emulation, {str(parameter.dtype).removeprefix('torch.')} model; KL and perplexity over positions "
        f">= 512; {calibration}" + (f"needles: {prefill} emulation" if found else "no needles"),
    )  # fmt: skip
    try:
        write(path, meta, [*quality, *found])
    except OSError as error:
        raise OscarError(f"--json {path}: cannot be written ({error})") from error
    console.print(f"written: {path}", markup=False)
