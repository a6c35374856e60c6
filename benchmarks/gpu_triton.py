# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on one GPU: answers against float64 and the reference codec, then times. Under 90 seconds.

    python benchmarks/gpu_triton.py --out triton_h200.json
    python benchmarks/gpu_triton.py --parts times,write     # some of it

Compiling takes most of the time, so kernels are first compiled, and answers checked, in several processes at once.
Times are medians of CUDA-graph replays over several input sets; inputs and clock are those of ``oscar-kv bench``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (the path of what follows)
import torch
from decode_reference import random_case, reference, relative_error, to_device

from oscar_kv.bench.inputs import DecodeArguments, decode_arguments
from oscar_kv.bench.reference import decode_error
from oscar_kv.bench.shapes import RECENT, RING, SINK, DecodeShape
from oscar_kv.bench.timing import copy_bandwidth, time_graph
from oscar_kv.codec import LayerCodec
from oscar_kv.kernels.base import StoreTables, Windows
from oscar_kv.kernels.triton.decode import TritonDecode
from oscar_kv.kernels.triton.dequantise import TritonDequantise
from oscar_kv.kernels.triton.store import TritonStore
from oscar_kv.layout import PAGE, PageLayout, read_pages
from oscar_kv.quantizer import ErrorWeight, normalised_weight
from oscar_kv.recipe import Recipe
from oscar_kv.transform import SideTransform

RAGGED = [(64, 4000, 4200), (64, 64, 64), (10, 131, 200), (0, 0, 0), (5, 64, 70), (64, 129, 400), (64, 20000, 20250)]
CHECKS: list[tuple[PageLayout, int, torch.dtype, dict[str, Any]]] = [
    (PageLayout(128, 128, 2, 2), 4, torch.float16, {}),
    (PageLayout(128, 128, 2, 2), 4, torch.bfloat16, {}),
    (PageLayout(128, 128, 2, 2), 4, torch.float16, {"softcap": 5.0}),
    (PageLayout(128, 128, 3, 1), 8, torch.float16, {}),
    (PageLayout(128, 128, 4, 4), 5, torch.float16, {}),
    (PageLayout(64, 64, 2, 2), 12, torch.float16, {}),
    (PageLayout(64, 128, 1, 3), 1, torch.float16, {}),
    (PageLayout(80, 112, 3, 2), 7, torch.float16, {}),
    (PageLayout(96, 96, 2, 2), 4, torch.bfloat16, {}),
    (PageLayout(192, 128, 3, 2), 20, torch.float16, {}),
    (PageLayout(256, 256, 2, 2), 4, torch.float16, {}),
    (PageLayout(128, 128, 2, 2), 4, torch.bfloat16, {"v_scale": 200.0}),
    (PageLayout(128, 128, 2, 2), 4, torch.bfloat16, {"q_scale": 2000.0}),
]
VARIANTS: list[dict[str, int]] = [
    {},
    {"stages": 1},
    {"stages": 3},
    {"programs": 16},
    {"programs": 24},
    {"stages": 3, "programs": 16},
    {"warps": 2},
]
SHAPES = [(DecodeShape(batch=8), VARIANTS), (DecodeShape(), VARIANTS[:6]), (DecodeShape(batch=32), VARIANTS[:5])]
MORE = [
    *(DecodeShape(q_heads=q, batch=8) for q in (64, 96)),
    DecodeShape(batch=8, k_bits=4, v_bits=4),
    DecodeShape(batch=8, head_dim=64),
]
STORES = [
    (PageLayout(128, 128, 2, 2), True),
    (PageLayout(128, 128, 2, 2), False),
    (PageLayout(64, 64, 3, 4), False),
    (PageLayout(80, 112, 3, 1), True),
    (PageLayout(256, 256, 2, 2), True),
]


def check(layout: PageLayout, group: int, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    softcap = options.get("softcap", 0.0)
    c = to_device(
        random_case(layout, group, RAGGED, dtype=dtype, **{k: v for k, v in options.items() if k != "softcap"}), "cuda"
    )
    out = torch.full((len(RAGGED), 2 * group, layout.v_dim), math.nan, dtype=dtype, device="cuda")
    TritonDecode()(*c.arguments(), layout, softcap=softcap, out=out)  # type: ignore[arg-type]
    want = reference(c, softcap=softcap)
    error, plain = relative_error(out, want), relative_error(reference(c, softcap=softcap, dtype=torch.bfloat16), want)
    ok = error < (2 * plain if dtype == torch.bfloat16 else min(2 * plain, 2e-3))
    return {"ok": ok, "error": error, "plain_bf16": plain}


def random_codec(layout: PageLayout, shaping: bool, heads: int) -> LayerCodec:
    g = torch.Generator().manual_seed(0)

    def side(d: int) -> SideTransform:
        turn = torch.linalg.qr(torch.randn(heads, d, d, generator=g)).Q
        return SideTransform(torch.randn(heads, d, generator=g), turn).to("cuda", torch.float32)

    recipe = Recipe(
        name="bench", k_bits=layout.k_bits, v_bits=layout.v_bits, sink=SINK, recent=RECENT, slack=RING - RECENT,
        shaping=shaping, unbiased=True,
    )  # fmt: skip
    k, weight = side(layout.k_dim), None
    if shaping:
        root = torch.randn(heads, layout.k_dim, layout.k_dim, generator=g, dtype=torch.float64).cuda()
        assert k.rotation is not None
        weight = ErrorWeight.of(normalised_weight(root @ root.mT / layout.k_dim, k.rotation)).to("cuda", torch.float32)
    return LayerCodec(recipe, k, side(layout.v_dim), weight)


def store_arguments(codec: LayerCodec, batch: int, n: int, start: int = 0) -> tuple[Any, ...]:
    layout, heads = codec.layout, codec.num_kv_heads
    most = (start + n) // PAGE + 1
    pages = torch.zeros(batch * most, heads, layout.page_bytes, dtype=torch.uint8, device="cuda")
    table = torch.randperm(batch * most, device="cuda").view(batch, most).int()
    sizes = [(r, d) for r in (SINK, RING) for d in (layout.k_dim, layout.v_dim)]
    w = Windows(*(torch.randn(batch, heads, r, d, device="cuda").bfloat16() for r, d in sizes))
    k, v = (torch.randn(batch, heads, n, d, device="cuda").bfloat16() for d in (layout.k_dim, layout.v_dim))
    ones = torch.ones(batch, dtype=torch.int32, device="cuda")
    return k, v, pages, table, ones * start, ones * n, w, StoreTables.of(codec, "cuda"), layout


def check_store(layout: PageLayout, shaping: bool, precision: str) -> dict[str, Any]:
    """Rows whose codes differ from the reference codec's on the same GPU; and the tile de-quantised."""
    codec = random_codec(layout, shaping, 4)
    args = store_arguments(codec, 2, 1024)
    k, v, pages, table = args[:4]
    TritonStore(precision)(*args)  # type: ignore[arg-type]

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, PAGE:].unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)

    got = read_pages(layout, pages[table[:, 1:16].long()].flatten(0, 1))
    want = codec.quantise(rows(k), rows(v))
    differ = [float((a.code != b.code).any(-1).float().mean()) for a, b in zip(got, want, strict=True)]
    tiles = [torch.empty(2, 15 * PAGE, 4, d, dtype=torch.float16, device="cuda") for d in (layout.k_dim, layout.v_dim)]
    TritonDequantise()(pages, table[:, 1:16].contiguous(), layout, *tiles)
    worst = 0.0
    for tile, side in zip(tiles, got, strict=True):
        exact = side.dequantise().view(2, 15, 4, PAGE, -1).transpose(2, 3).flatten(1, 2)
        worst = max(worst, float((tile.float() - exact).abs().max() / exact.abs().max()))
    ok = (precision != "ieee" or max(differ) <= 1e-3) and worst < 1e-3
    return {"ok": ok, "rows_that_differ": differ, "dequantised_error": worst}


class Report:
    def __init__(self, file: Path | None) -> None:
        self.file, self.began, self.rows, self.good = file, time.time(), [], True  # type: ignore[var-annotated]

    def part(self, name: str, what: Callable[[], dict[str, Any]]) -> None:
        """One row; an error is one, too. Written at once: a run that ends early leaves what it measured."""
        try:
            row = what()
        except Exception as error:
            traceback.print_exc()
            row = {"ok": False, "failed": f"{type(error).__name__}: {error}"[:400]}
            torch.cuda.empty_cache()
        self.good &= row.get("ok", True)
        self.rows.append({"part": name, **row})
        print(f"[{time.time() - self.began:5.1f} s] {name}: {row}", flush=True)
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            meta = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
            self.file.write_text(json.dumps({"meta": meta, "rows": self.rows}, indent=1) + "\n")


def compile_for(s: DecodeShape, tuning: dict[str, int]) -> dict[str, Any]:
    """Fills the compiler's cache: batch and context do not matter to it."""
    TritonDecode(**tuning)(*decode_arguments(dataclasses.replace(s, batch=1, context=1024), "cuda"))
    torch.cuda.synchronize()
    return {}


def all_checks() -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    out: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for layout, shaping in STORES:
        for precision in ("ieee", "tf32x3") if layout.k_dim == 128 and shaping else ("ieee",):
            name = f"store {layout} shaping={shaping} {precision}"
            out.append((name, partial(check_store, layout, shaping, precision)))
    for case in CHECKS:
        out.append((f"check {case[0]} g{case[1]} {case[2]} {case[3] or ''}", partial(check, *case)))
    for s, variants in (SHAPES[0], *((s, [{}]) for s in MORE)):
        out += [(f"compile {s} {tuning}", partial(compile_for, s, tuning)) for tuning in variants]
    return out


def check_in_processes(report: Report, jobs: int, limit: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(jobs)]
        command = [sys.executable, __file__, "--jobs", str(jobs)]
        running = [subprocess.Popen([*command, "--slice", str(i), "--out", str(f)]) for i, f in enumerate(files)]
        began = time.time()
        for process, file in zip(running, files, strict=True):
            try:
                process.wait(max(1.0, limit - (time.time() - began)))
            except subprocess.TimeoutExpired:
                process.kill()
            rows = json.loads(file.read_text())["rows"] if file.exists() else []
            for row in rows:
                report.part(row.pop("part"), partial(dict, row))
            if process.returncode != 0:  # None: it was killed
                report.part(f"process {files.index(file)}", partial(dict, ok=False, failed="ended early"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="checks,times,write")
    parser.add_argument("--jobs", type=int, default=10, help="processes that compile and check")
    parser.add_argument("--budget", type=float, default=85.0, help="seconds after which nothing new begins")
    parser.add_argument("--slice", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    report, wanted = Report(args.out), args.parts.split(",")
    torch.manual_seed(0)

    def late() -> bool:
        return time.time() - report.began > args.budget

    if args.slice is not None:
        for name, what in all_checks()[args.slice :: args.jobs]:
            report.part(name, what)
        return
    if "checks" in wanted:
        check_in_processes(report, args.jobs, 0.6 * args.budget)
    if not {"times", "write"} & set(wanted):
        print("passed" if report.good else "FAILED")
        sys.exit(not report.good)
    bandwidth = copy_bandwidth("cuda")

    def timed(s: DecodeShape, tuning: dict[str, int], inputs: list[DecodeArguments]) -> dict[str, Any]:
        decode = TritonDecode(**tuning)
        error = decode_error(decode(*inputs[0]), inputs[0])
        ms = time_graph([partial(decode, *x) for x in inputs], replays=9)
        share = s.bytes / bandwidth / 1e9 / ms
        return {"ok": error < 4e-3, "ms": ms, "share": share, "error": error, **tuning}

    shapes = [*SHAPES, *((s, [{}]) for s in MORE)] if "times" in wanted else []
    for s, variants in shapes:
        if late():
            break
        inputs = [decode_arguments(s, "cuda") for _ in range(max(2, min(12, (1 << 30) // s.bytes)))]
        for tuning in variants:
            if not late():
                report.part(f"decode {s}", partial(timed, s, tuning, inputs))
        del inputs
        torch.cuda.empty_cache()

    def write(batch: int, n: int, start: int, **options: Any) -> dict[str, Any]:
        codec = random_codec(PageLayout(128, 128, 2, 2), True, 8)
        calls = [partial(TritonStore(**options), *store_arguments(codec, batch, n, start)) for _ in range(2)]
        ms = time_graph(calls, replays=9)
        size = batch * n * 8 * (512 + 72)
        return {"ms": ms, "share": size / bandwidth / 1e9 / ms, **options}

    for options in ({}, {"rows": 32, "warps": 8}, {"precision": "tf32x3"}) if "write" in wanted else []:
        if not late():
            report.part("write a prompt of 16,384", partial(write, 1, 16384, 0, **options))
    if "write" in wanted and not late():
        report.part("write a token, no page", partial(write, 32, 1, 98000))
        report.part("write a token, a page each", partial(write, 32, 1, 98047))
    print("passed" if report.good else "FAILED")
    sys.exit(not report.good)


if __name__ == "__main__":
    main()
