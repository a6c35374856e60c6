# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv demo``: calibrate a small model, compare recipes, generate, and write a report."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import Steps, check_outputs, console, number, print_table, quiet_transformers, versions, write_json

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..calibration import Moments
    from .generate import Sample

RECIPES = ("naive", "quarot", "oscar-paper", "k2v2-plain", "k2v2", "k3v2")
KINDS = ("code", "prose")
SHOWN = "k2v2"
"""The recipe that is calibrated for, marked in tables, and generated with."""
PROMPT_TOKENS, BUCKET = 1000, 192
COLUMNS = ("recipe", "K/V", "bits/elem", "KL code", "KL prose", "PPL code", "PPL prose")


@dataclass(frozen=True)
class Comparison:
    """Rows for the results file, and mean KL by position for the plot."""

    rows: list[dict[str, Any]]
    curves: dict[str, list[float]]


def command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where report.html and report.json go.")] = Path(
        "oscar-demo"
    ),
    texts: Annotated[int, typer.Option(min=1, max=8, help="Evaluation texts of each kind.")] = 1,
    context: Annotated[int, typer.Option(min=1024, max=8192, help="Tokens of each evaluation text.")] = 2048,
    tokens: Annotated[int, typer.Option(min=1024, help="Calibration tokens.")] = 8192,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write report.json here instead of into --out.")
    ] = None,
) -> None:
    """See the whole of it on SmolLM2-135M: calibrate, compare recipes, generate. Some minutes on a CPU."""
    check_outputs(
        ("--out", out / "report.html"), ("--json" if json_file else "--out", json_file or out / "report.json")
    )
    from ..demo.model import demo_model_path
    from ..evaluation.results import make_meta

    began, folder = time.monotonic(), demo_model_path()
    with Steps() as steps:
        with steps.task(f"loading {folder.name}"):
            model, tokenizer, name = load(folder)
        with steps.task(f"calibrating on {tokens:,} tokens of code and prose") as report:
            moments = measure_moments(model, tokenizer, tokens, name, report)
            artifacts = fit_all(moments)
        calibrated = time.monotonic() - began
        compared = compare(model, tokenizer, artifacts, texts, context, steps)
        samples = generate(model, tokenizer, artifacts[SHOWN], max_new_tokens, steps)
        with steps.task("drawing the report"):
            facts = [
                ("model", name), ("calibration", f"{moments.meta.tokens:,} tokens, {calibrated:.0f} s with loading"),
                ("evaluation", f"{texts} of each kind of text, {context:,} tokens each, disjoint from calibration"),
                ("artifact", artifacts[SHOWN].sha256),
                *((k, str(v)) for k, v in versions().items() if v),
            ]  # fmt: skip
            page = write_report(out / "report.html", compared, samples, artifacts[SHOWN], moments, facts)
    notes = f"{texts} of each kind of text, {context} tokens each; exact emulation; KL and PPL over positions >= 512"
    meta = make_meta(name, artifact_sha256=artifacts[SHOWN].sha256, notes=notes).model_dump(mode="json")
    document = {
        "meta": meta,
        "rows": compared.rows,
        "kl_by_position": compared.curves,
        "samples": [asdict(s) for s in samples],
    }
    twin = json_file or out / "report.json"
    write_json(twin, document)
    console.print()
    print_table(f"Recipes at {context:,} tokens of context", COLUMNS, table_rows(compared.rows), caption=READING)
    print_samples(samples)
    console.print(closing(compared.rows, samples, page, twin, time.monotonic() - began), markup=False, soft_wrap=True)


READING = (
    "KL: mean divergence from full precision, nats a token, positions ≥ 512; 0 is identical. "
    "bits/elem: bits an element of the whole cache at this context, exact windows included. PPL: perplexity."
)


def load(folder: Path) -> tuple[Any, Any, str]:
    """Model in fp32 on the CPU, tokenizer, name."""
    from ..integrations.transformers.loading import load_model

    quiet_transformers()
    model, tokenizer = load_model(str(folder), "float32", "cpu")
    return model, tokenizer, folder.name


def measure_moments(model: Any, tokenizer: Any, tokens: int, name: str, report: Any) -> Moments:
    """Moments over the shipped calibration texts, code and prose in turn."""
    from ..calibration import collect, load_texts
    from ..recipe import get_recipe
    from .calibrate import cut

    pieces = cut(load_texts("builtin"), tokenizer, tokens, 2048, False, get_recipe(SHOWN).windows)
    return collect(model, pieces, progress=report, model_id=name, data="builtin (code and prose)")


def fit_all(moments: Moments) -> dict[str, Artifact]:
    """One artifact a recipe, all from the same moments."""
    from ..calibration import fit

    return {recipe: fit(moments, recipe) for recipe in RECIPES}


def compare(
    model: Any, tokenizer: Any, artifacts: dict[str, Artifact], texts: int, context: int, steps: Steps
) -> Comparison:
    """KL and perplexity of every recipe over the first ``context`` tokens of the texts, by exact emulation."""
    from ..demo import texts as shipped
    from ..evaluation import language
    from ..evaluation.run import quality_rows, subjects_of

    pieces = [
        tokens
        for kind in KINDS
        for tokens in language.tokenise(shipped.load(kind, "evaluation")[:texts], kind, tokenizer, context)
    ]
    subjects = subjects_of(artifacts)
    with steps.task(f"{len(artifacts)} recipes and full precision on {len(pieces)} texts") as report:
        results = language.evaluate(model, pieces, subjects, progress=report)
    rows = [row.model_dump(mode="json") for row in quality_rows(results, subjects)]
    return Comparison(rows, {name: language.curve(results, name, BUCKET) for name in artifacts})


def generate(model: Any, tokenizer: Any, artifact: Artifact, max_new_tokens: int, steps: Steps) -> list[Sample]:
    """The same continuation with the 2-bit cache and with full precision."""
    from ..demo import texts
    from .generate import encode, sample

    text = texts.load("prose", "evaluation")[0].text
    ids = encode(tokenizer, text, chat=False)[:, :PROMPT_TOKENS]
    out = []
    for kind in (artifact, None):
        label = "full precision" if kind is None else kind.label
        with steps.task(f"generating with {label}") as report:
            out.append(sample(model, tokenizer, ids, kind, max_new_tokens, report=report))
    return out


def table_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table's cells: a line a recipe, means over texts."""
    out = []
    for name in ("bf16", *RECIPES):
        own = [r for r in rows if r["recipe"] == name]
        by_kind = {kind: [r for r in own if r["dataset"] == kind] for kind in KINDS}
        bits = "16/16" if name == "bf16" else f"{own[0]['k_bits']}/{own[0]['v_bits']}"
        cells = [name, bits, number(own[0]["bpe"], 2)]
        cells += [number(_mean(r, "kl")) for r in by_kind.values()] + [
            number(_mean(r, "ppl"), 3) for r in by_kind.values()
        ]
        out.append(cells)
    return out


def _mean(rows: list[dict[str, Any]], field: str) -> float:
    return float(sum(r[field] for r in rows) / len(rows))


def print_samples(samples: list[Sample]) -> None:
    for s in samples:
        console.rule(s.recipe, align="left", characters="─")
        console.print(s.text.strip(), markup=False)
    console.rule(characters="─")


def closing(rows: list[dict[str, Any]], samples: list[Sample], page: Path, twin: Path, seconds: float) -> str:
    """What to look at, and what to try next."""
    kl = {name: _mean([r for r in rows if r["recipe"] == name], "kl") for name in RECIPES}
    quantised = samples[0]
    written = quantised.prompt_tokens + quantised.new_tokens
    lines = (
        f"Done in {seconds:.0f} s. When the last token was written, {quantised.history_tokens:,} of {written:,} tokens",
        f"were read from {quantised.recipe}'s codes; the rest lay in the exact windows.",
        f"Look at: {SHOWN} against oscar-paper, the same bytes and {kl['oscar-paper'] / kl[SHOWN]:.1f} times less KL;",
        f"         against {SHOWN}-plain, {kl[f'{SHOWN}-plain'] / kl[SHOWN]:.1f} times less.",
        f"Report:  {page}   figures: {twin}",
        "Next:    oscar-kv calibrate YOUR_MODEL --data YOUR_TEXT -o your.safetensors",
        "         oscar-kv generate YOUR_MODEL --artifact your.safetensors --prompt-file LONG.txt --compare",
    )
    return "\n".join(lines)


def write_report(
    path: Path,
    compared: Comparison,
    samples: list[Sample],
    artifact: Artifact,
    moments: Moments,
    facts: list[tuple[str, str]],
) -> Path:
    """The HTML report."""
    from ..evaluation import plots
    from ..evaluation.diagnostics import spreads_of, summarise
    from ..evaluation.report import Facts, Picture, Section, Table, Verbatim, write
    from .common import need
    from .inspect import draw

    need("matplotlib", "the report")
    keys, values = spreads_of(moments)
    shown = table_rows(compared.rows)
    bars = plots.quality_bars(compared.rows, "KL to full precision by recipe")
    curve = plots.kl_by_position(compared.curves, BUCKET, 512)
    text: list[Any] = [
        f"The same prompt of {samples[0].prompt_tokens:,} tokens, greedy. "
        f"At the end {samples[0].history_tokens:,} tokens were read from {samples[0].recipe}'s codes."
    ]
    for s in samples:
        text += [s.recipe, Verbatim(s.text.strip())]
    sections = [
        Section("Recipes side by side", [
            READING, Table(COLUMNS, shown, marked=[i for i, row in enumerate(shown) if row[0] == SHOWN]),
            Picture(plots.png(bars), "Every 2-bit recipe stores the same number of bytes."),
            Picture(plots.png(curve), "Early tokens see little history, late ones mostly history."),
        ]),
        Section("The 2-bit cache writes beside full precision", text),
        Section("What calibration found", [
            Picture(png, caption) for png, caption in draw(artifact, summarise(artifact, keys, values), keys)
        ]),
        Section("How this was made", [Facts(facts)]),
    ]  # fmt: skip
    return write(
        path,
        "oscar-kv demo: a 2-bit KV cache on SmolLM2-135M",
        "Calibrated, compared and generated on this machine.",
        sections,
    )
