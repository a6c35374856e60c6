# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv bench``: our kernels and whole decode steps beside the fastest BF16 kernels at hand."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OscarError
from .common import check_outputs, console, print_table

if TYPE_CHECKING:
    from ..bench.report import Report
    from ..bench.run import Job

PARTS = ("decode", "store", "prefill", "model")
BATCHES = (1, 0)


def command(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="decode, store, prefill or model.")],
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N,…",
            help="A shape instead of the preset's: q, kv, d, k, v (bits), batch, context; prefill: prefix, chunk; "
            "model: layers, hidden, mlp, vocab. Give it once for each shape.",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(metavar="NAME", help="decode: table, others, all or small.")] = "table",
    contenders: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these, separated by commas, such as oscar-cuda,fa3-bf16.")
    ] = None,
    fa3: Annotated[
        Path | None,
        typer.Option("--fa3", metavar="FILE", help="FlashAttention-3 extension of vLLM's wheel (_vllm_fa3_C.abi3.so)."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=128, help="store: tokens of the prompt.")] = 32768,
    batches: Annotated[
        str, typer.Option(metavar="N,…", help="model: batch sizes; 0 is the largest that fits.")
    ] = "1,0",
    compiled: Annotated[
        bool, typer.Option("--compile", help="model, store: the layers' elementwise parts through torch.compile.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Time after which nothing new begins.")
    ] = None,
    replays: Annotated[int, typer.Option(min=1, help="Replays of a graph that the median is taken of.")] = 15,
    device: Annotated[str, typer.Option(metavar="NAME", help="cuda, cuda:1 …; cpu with --tiny alone.")] = "cuda",
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A tiny case: checks that the command works, measures nothing of worth.")
    ] = False,
    compile_only: Annotated[
        str | None,
        typer.Option(metavar="CAPABILITY", help="Fill the kernel cache for this part on 9.0, say; needs no GPU."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Results file, written after every row.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture (PNG).")] = None,
) -> None:
    """Time our kernels and the fastest BF16 kernels at hand, in one run, on the same shapes, with checked answers."""
    if what not in PARTS:
        raise OscarError(f"bench {what}: it is one of {', '.join(PARTS)}")
    check_outputs(("--json", json_file), ("--plot", plot), devices=())
    if fa3 is not None and not fa3.is_file():
        raise OscarError(f"--fa3 {fa3}: no such file; it is vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so of vLLM's wheel")
    from ..bench.contenders.base import Options
    from ..bench.precompile import parse_capability, precompile
    from ..bench.report import Report
    from ..bench.run import Job

    shapes = _shapes(what, shape or [], preset, tiny, batches)
    began = time.time()

    def say(text: str) -> None:
        console.print(f"[{time.time() - began:6.1f} s] {text}", markup=False, soft_wrap=True)

    if compile_only is not None:
        say(f"{precompile(what, shapes, parse_capability(compile_only), say)} files of machine code are in the cache")
        return
    _check_device(device, tiny)
    names = tuple(n.strip() for n in contenders.split(",")) if contenders else ()
    options = Options(device, str(fa3.absolute()) if fa3 else None, seed, replays, compiled)
    job = Job(options, names, say)
    report = Report(what, device, json_file, seed, deadline=began + budget if budget else math.inf)
    _run(what, job, report, shapes, 256 if tiny else tokens)
    _show(what, report)
    if plot is not None and report.rows:
        from ..bench.plot import bars

        say(f"picture: {bars(what, report.rows, plot, str(report.meta()['gpu'] or 'CPU, no benchmark'))}")
    if json_file is not None:
        say(f"written: {json_file}")
    if report.wrong:
        raise typer.Exit(1)


def _shapes(what: str, given: list[str], preset: str, tiny: bool, batches: str) -> list[Any]:
    from ..bench import shapes as s

    try:
        sizes = [int(n) for n in batches.split(",")]
    except ValueError:
        raise OscarError(f"--batches {batches}: give whole numbers, separated by commas") from None
    if min(sizes) < 0:
        raise OscarError(f"--batches {batches}: give sizes of at least 1, or 0 for the largest that fits")
    if what == "decode" and preset not in s.PRESETS:
        raise OscarError(f"--preset {preset}: it is one of {', '.join(s.PRESETS)}")
    kinds: dict[str, tuple[Any, Any]] = {
        "decode": (s.DecodeShape, s.TINY), "store": (s.DecodeShape, s.TINY),
        "prefill": (s.PrefillShape, s.TINY_PREFILL), "model": (s.ModelShape, s.TINY_MODEL),
    }  # fmt: skip
    kind, small = kinds[what]
    if tiny:
        if given:
            raise OscarError("--tiny has a shape of its own; leave out --shape")
        return [small]
    if what == "model":
        found = [kind.parse(text) for text in given or [""]]
        return [kind(**{**m.row(), "batch": n}) for m in found for n in sizes]
    if given:
        return [kind.parse(text) for text in given]
    if what == "decode":
        return list(s.PRESETS[preset])
    return list(s.STORE) if what == "store" else [kind()]


def _check_device(device: str, tiny: bool) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise OscarError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if kind == "cpu" and tiny:
        console.print("NO BENCHMARK: a tiny case on the CPU with the PyTorch kernels; its times mean nothing.")
        return
    if kind != "cuda":
        raise OscarError(f"--device {device}: benchmarks are for CUDA; --device cpu --tiny checks the command itself")
    if not torch.cuda.is_available():
        raise OscarError(
            "PyTorch sees no CUDA device here, and times on another would say nothing; "
            "--device cpu --tiny checks the command itself"
        )


def _run(what: str, job: Job, report: Report, shapes: list[Any], tokens: int) -> None:
    from ..bench import decode, model, prefill, store

    if what == "store":
        store.run(job, report, shapes, tokens)
    else:
        parts: dict[str, Any] = {"decode": decode.run, "prefill": prefill.run, "model": model.run}
        parts[what](job, report, shapes)
    report.save()


def _show(what: str, report: Report) -> None:
    from ..bench import decode, model, prefill, store
    from ..bench.report import cells

    columns = {"decode": decode, "store": store, "prefill": prefill, "model": model}[what].COLUMNS
    rows = [
        {
            **r,
            "heads": f"{r['q_heads']} / {r['kv_heads']}",
            "bits": f"{r['k_bits']}/{r['v_bits']}",
            "extra_mib": round(r.get("peak_extra_bytes", 0) / 2**20),
        }
        for r in report.rows
    ]
    caption = [f"missing: {name} ({why})" for name, why in report.missing.items()]
    caption += [f"not measured: {p}" for p in report.problems[:8]]
    title = f"bench {what}" if report.is_benchmark else f"bench {what}: NO BENCHMARK, a tiny case on the CPU"
    console.print()
    print_table(title, [t for t, _, _ in columns], cells(rows, columns), "")
    for line in caption:
        console.print(line, markup=False, soft_wrap=True)
    for line in report.wrong:
        console.print(f"WRONG ANSWER: {line}", markup=False, soft_wrap=True, style="bold red")
