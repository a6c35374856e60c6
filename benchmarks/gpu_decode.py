# SPDX-License-Identifier: Apache-2.0
"""Decode attention on one GPU: check against float64, then time against the fastest BF16 kernel at hand.

    python benchmarks/gpu_decode.py --out decode_h200.json --fa3 …/_vllm_fa3_C.abi3.so
    python benchmarks/gpu_decode.py --compile-only 9.0     # fill the kernel cache without a GPU
    python benchmarks/gpu_decode.py --parts preflight,copy,tune,where     # some of it only

Every time is the median over replays of one CUDA graph that calls the operation on several input sets in turn, so that
the L2 cache does not help; all contenders are timed so, in this run, on the same shapes. Inputs are random, not zeros.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_baselines import measure
from decode_reference import Case, random_case, reference, relative_error, to_device
from decode_timing import RECENT, RING, ROOT, SINK, Shape, copy_bandwidth, lengths, time_graph

from oscar_kv.errors import OscarError
from oscar_kv.kernels.base import LayerTables, Windows
from oscar_kv.kernels.cuda.compiler import compile_cached
from oscar_kv.kernels.cuda.decode import CudaDecode, run
from oscar_kv.kernels.cuda.launch import load
from oscar_kv.kernels.cuda.spec import DecodeSpec
from oscar_kv.layout import PAGE, PageLayout

Tuning = dict[str, Any]
DEVICE = "cuda"
BASE: Tuning = {}  # what the preflight found to work
PARTS = ("preflight", "checks", "long", "copy", "baseline", "table", "tune", "where", "others")


TABLE = [
    Shape(32, 1),
    Shape(32, 8),
    Shape(32, 32),
    Shape(64, 1),
    Shape(64, 8),
    Shape(64, 32),
    Shape(96, 1),
    Shape(96, 8),
    Shape(96, 32),
    Shape(32, 128, 8192),
    Shape(32, 1, 32768),
]
OTHERS = [
    Shape(32, 8, head_dim=64),
    Shape(32, 8, head_dim=256),
    Shape(32, 8, k_bits=4, v_bits=4),
    Shape(32, 8, k_bits=2, v_bits=1),
    Shape(32, 8, k_bits=3, v_bits=2),
    Shape(32, 8, k_bits=3, v_bits=3),
]
VARIANTS: list[Tuning] = [{}, {"warps": 12, "stages": 3, "min_blocks": 1}, {"buffers": 1}]
WIDE_VARIANTS: list[Tuning] = [
    {},
    {"tiles": 2, "warps": 8, "stages": 3, "min_blocks": 1, "buffers": 1},
]
MORE_BITS: list[Tuning] = [{}]
TUNED = {
    Shape(32, 1): VARIANTS,
    Shape(32, 8): VARIANTS,
    Shape(64, 8): VARIANTS[:2],
    Shape(32, 32): VARIANTS[:4],
    Shape(96, 8): WIDE_VARIANTS,
    Shape(32, 128, 8192): VARIANTS[:5],
    **{Shape(32, 8, k_bits=k, v_bits=v): MORE_BITS for k, v in ((4, 4), (3, 3), (3, 2), (2, 1))},
    Shape(32, 8, head_dim=64): MORE_BITS,
    Shape(32, 8, head_dim=256): MORE_BITS,
}
RAGGED = [(64, 4000, 4200), (64, 64, 64), (10, 131, 200), (0, 0, 0), (5, 64, 70), (64, 129, 400), (64, 20000, 20250)]
CHECKS: list[tuple[PageLayout, int, dict[str, Any]]] = [
    *((PageLayout(128, 128, k, v), 4, {}) for k, v in ((2, 2), (2, 1), (3, 2), (3, 3), (4, 4), (1, 4))),
    *((PageLayout(d, d, 2, 2), 4, {}) for d in (64, 80, 96, 112, 192, 256)),
    *((PageLayout(128, 128, 2, 2), g, {}) for g in (1, 7, 8, 12, 16)),
    (PageLayout(192, 128, 3, 2), 12, {}),
    (PageLayout(128, 128, 2, 2), 4, {"v_scale": 200.0}),
    (PageLayout(128, 128, 2, 2), 4, {"q_scale": 2000.0}),
]


SOME_CHECKS = (0, 2, 4, 6, 11, 14, 15, 17, 18)


def check(layout: PageLayout, group: int, options: dict[str, Any], tuning: Tuning, softcap: float = 0.0) -> bool:
    """One ragged case in fp16 (bf16 output would hide the error) and bf16; prints the errors."""
    line, ok = "", True
    for dtype in (torch.float16, torch.bfloat16):
        c = to_device(random_case(layout, group, RAGGED, dtype=dtype, **options), "cuda")
        out = torch.full((len(RAGGED), 2 * group, layout.v_dim), math.nan, dtype=dtype, device=DEVICE)
        CudaDecode(**{**BASE, **tuning})(*c.arguments(), layout, softcap=softcap, out=out)  # type: ignore[arg-type]
        want = reference(c, softcap=softcap)
        error, plain = (
            relative_error(out, want),
            relative_error(reference(c, softcap=softcap, dtype=torch.bfloat16), want),
        )
        limit = 2 * plain if dtype == torch.bfloat16 or "q_scale" in options else 2e-3
        ok &= error < limit
        line += f" {str(dtype)[6:]} {error:.1e}"
    label = f"dk{layout.k_dim} dv{layout.v_dim} {layout.k_bits}/{layout.v_bits} g{group} {options or ''} {tuning or ''}"
    label += f" cap{softcap:g}"
    print(f"check {'ok  ' if ok else 'FAIL'} {label}:{line} (plain bf16 {plain:.1e})", flush=True)
    return ok


def preflight() -> bool:
    """Try the default and plainer launches, each in a process of its own: a hang or a bad access ends that one only."""
    for tuning in ({}, {"chained": False}, {"bulk": False, "chained": False}):
        command = [sys.executable, __file__, "--preflight", json.dumps(tuning)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            text, ok = done.stdout + done.stderr[-1500:], done.returncode == 0
        except subprocess.TimeoutExpired:
            text, ok = "hangs", False
        print(f"preflight {tuning}: {text.strip()}", flush=True)
        if ok:
            BASE.update(tuning)
            return True
    return False


def check_long(tokens: int) -> None:
    """Accumulation over a long history by a single thread block: its error must not grow with the length."""
    layout = PageLayout(128, 128, 2, 2)
    c = random_case(layout, 4, [(64, tokens, tokens + 200)], heads=1, dtype=torch.float16)
    c = to_device(c, "cuda")
    kernels = load(DecodeSpec.choose(layout, 4, torch.float16, torch.cuda.get_device_capability(), **BASE), 0)
    usual = kernels.blocks
    want = reference(c)
    for blocks in (1, usual):
        kernels.blocks = blocks
        out = CudaDecode(**BASE)(*c.arguments(), layout)  # type: ignore[arg-type]
        print(f"long  {tokens} tokens, {blocks} blocks: error {relative_error(out, want):.1e}", flush=True)
    kernels.blocks = usual


def our_inputs(s: Shape, sets: int) -> list[tuple[Any, ...]]:
    layout, h, d, n = s.layout, s.kv_heads, s.head_dim, -(-s.context // PAGE)

    def raw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    out = []
    for _ in range(sets):
        pages = torch.randint(0, 256, (s.batch * n, h, layout.page_bytes), dtype=torch.uint8, device=DEVICE)
        meta = (torch.rand(s.batch * n, h, PAGE, 4, device=DEVICE) * 0.3 + 0.1).half()
        meta[..., 1] *= -(2**s.k_bits) / 2
        meta[..., 3] *= -(2**s.v_bits) / 2
        pages[..., layout.metadata_offset :] = meta.view(torch.uint8).flatten(-2)
        table = torch.randperm(s.batch * n, device=DEVICE).int().view(s.batch, n).contiguous()
        windows = Windows(
            raw(s.batch, h, SINK, d), raw(s.batch, h, SINK, d), raw(s.batch, h, RING, d), raw(s.batch, h, RING, d)
        )
        turn = torch.linalg.qr(torch.randn(h, d, d, device=DEVICE)).Q.contiguous()
        tables = LayerTables(
            turn, torch.randn(h, d, device=DEVICE), turn.mT.contiguous(), torch.randn(h, d, device=DEVICE)
        )
        out.append((raw(s.batch, s.q_heads, d), pages, table, *lengths(s, DEVICE), windows, tables, layout))
    return out


def sets_for(bytes_a_set: int) -> int:
    return max(3, min(24, (2 << 30) // bytes_a_set))


def time_ours(s: Shape, inputs: list[tuple[Any, ...]], tuning: Tuning) -> float:
    decode = CudaDecode(**{**BASE, **tuning})
    return time_graph([partial(decode, *x) for x in inputs])


def error_of(inputs: tuple[Any, ...], tuning: Tuning) -> float:
    """Relative error of the last request's answer at a shape that is timed, against float64."""
    q, pages, table, start, end, length, w, t, layout = inputs
    got = CudaDecode(**{**BASE, **tuning})(*inputs)[-1:]
    windows = Windows(w.sink_k[-1:], w.sink_v[-1:], w.ring_k[-1:], w.ring_v[-1:])
    last = Case(layout, q[-1:], pages, table[-1:], start[-1:], end[-1:], length[-1:], windows, t)
    return relative_error(got, reference(last))


class Some:
    """Kernels of which only some are launched, to see where the time goes."""

    def __init__(self, kernels: Any, names: tuple[str, ...]) -> None:
        self.spec, self.blocks, self.multiprocessors = kernels.spec, kernels.blocks, kernels.multiprocessors
        self.kernels, self.names = kernels, names

    def launch(self, name: str, grid: tuple[int, int], params: Any) -> None:
        if name.startswith(self.names):
            self.kernels.launch(name, grid, params)


def where(s: Shape, tuning: Tuning) -> list[tuple[str, float]]:
    """Times with parts left out. Not attention any more: only for finding out what a part costs."""
    inputs = our_inputs(s, sets_for(s.bytes))
    spec = DecodeSpec.choose(
        s.layout, s.group, torch.bfloat16, torch.cuda.get_device_capability(), **{**BASE, **tuning}
    )
    kernels = load(spec, 0)

    def but(x: tuple[Any, ...], windows: bool = True, turn: bool = True, tokens: int = s.context) -> tuple[Any, ...]:
        q, pages, table, start, end, length, w, t, _ = x
        if not windows:
            none = [y[:, :, :0].contiguous() for y in (w.sink_k, w.sink_v, w.ring_k, w.ring_v)]
            start, end, w = torch.zeros_like(start), length, Windows(*none)
        if not turn:
            t = LayerTables(None, t.k_centre, None, t.v_centre)
        if tokens != s.context:
            length = torch.full_like(length, tokens)
            end = (length - RECENT).clamp(min=SINK) if windows else length
        return q, pages, table, start, end, length, w, t

    cases: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
        ("all", ("prepare", "decode", "finish"), {}),
        ("prepare, decode", ("prepare", "decode"), {}),
        ("decode", ("decode",), {}),
        ("finish", ("finish",), {}),
        ("decode, no windows", ("decode",), {"windows": False}),
        ("decode, no rotation", ("decode",), {"turn": False}),
        ("decode, neither", ("decode",), {"windows": False, "turn": False}),
        ("all, neither", ("prepare", "decode", "finish"), {"windows": False, "turn": False}),
        ("all, 8192 tokens", ("prepare", "decode", "finish"), {"tokens": 8192}),
        ("all, 640 tokens", ("prepare", "decode", "finish"), {"tokens": 640}),
        ("all, no history", ("prepare", "decode", "finish"), {"tokens": 320}),
        ("decode, no history", ("decode",), {"tokens": 320}),
        ("decode, nothing", ("decode",), {"tokens": 0, "windows": False}),
    ]
    out = []
    for name, names, options in cases:
        calls = [partial(run, Some(kernels, names), *but(x, **options)) for x in inputs]
        out.append((name, time_graph(calls)))
    return out


def compile_only(capability: tuple[int, int], table: list[Shape], some: bool) -> None:
    shapes = [(s, {}) for s in table] + [(s, t) for s, variants in TUNED.items() for t in variants]
    wanted = [(s.layout, s.group, torch.bfloat16, t, False) for s, t in shapes]
    checks = [c for i, c in enumerate(CHECKS) if not some or i in SOME_CHECKS]
    wanted += [(layout, g, dtype, {}, False) for layout, g, _ in checks for dtype in (torch.float16, torch.bfloat16)]
    wanted += [
        (CHECKS[0][0], 4, dtype, t, cap)
        for dtype in (torch.float16, torch.bfloat16)
        for t, cap in (({"bulk": False}, False), ({}, True), (VARIANTS[1], False))
    ]
    done: set[str] = set()
    for layout, group, dtype, tuning, cap in wanted:
        try:
            spec = DecodeSpec.choose(layout, group, dtype, capability, cap, **tuning)
        except OscarError as error:
            print(error)
            continue
        if spec.header not in done:
            done.add(spec.header)
            for file in ("prepare.cu", "decode.cu", "finish.cu"):
                compile_cached(file, spec.header, capability)
    print(f"{len(done)} specialisations compiled for sm_{capability[0]}{capability[1]}")


class Report:
    """Rows, written after each one: a run that ends early leaves what it measured."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.rows, self.began, self.copy = file, [], time.time(), 0.0
        self.extra: dict[str, Any] = {}

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.began:5.1f} s] {text}", flush=True)

    def add(self, s: Shape, op: str, ms: float, size: int, **more: Any) -> None:
        share = size / self.copy / 1e9 / ms if self.copy else None
        row = {"op": op, **s.row(), "ms": ms, "bytes": size, "share": share, **more}
        if op != "oscar-cuda":
            row["k_bits"] = row["v_bits"] = 16
        self.rows.append(row)
        theirs = [
            r["ms"]
            for r in self.rows
            if r["op"] != "oscar-cuda" and all(r[k] == v for k, v in s.row().items() if "bits" not in k)
        ]
        times = f" x{theirs[0] / ms:.2f}" if theirs and op == "oscar-cuda" else ""
        self.say(f"{s} {op} {more or ''}: {ms:.4f} ms share {share or 0:.3f}{times}")
        self.save()

    def save(self) -> None:
        if not self.file:
            return
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        meta = {
            "command": " ".join(sys.argv), "commit": commit, "date": time.strftime("%Y-%m-%d"),
            "machine": platform.machine(), "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda}, "model": None,
            "artifact_sha256": None, "seed": 0, "copy_tb_s": self.copy, **self.extra,
            "notes": "whole operation: q.R_K, paged history, raw windows, merge, R_V; medians of CUDA-graph replays",
        }  # fmt: skip
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({"meta": meta, "rows": self.rows}, indent=1) + "\n")


def check_all(report: Report, some: bool) -> bool:
    good = check(*CHECKS[0], {"bulk": False}) & check(*CHECKS[0], {}, softcap=5.0) & check(*CHECKS[0], VARIANTS[1])
    for case in [c for i, c in enumerate(CHECKS) if not some or i in SOME_CHECKS]:
        try:
            good &= check(*case, {})
        except OscarError:
            good = False
            traceback.print_exc()
    report.say(f"checks {'passed' if good else 'FAILED'}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fa3", type=Path, help="FlashAttention-3 extension of vLLM's wheel; else PyTorch's SDPA")
    parser.add_argument("--compile-only", metavar="CAPABILITY")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--some-checks", action="store_true")
    parser.add_argument("--shapes", default="", help="rows of the table by number, as 0,1,4")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which no new part begins")
    parser.add_argument("--preflight", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    table = [TABLE[int(i)] for i in args.shapes.split(",")] if args.shapes else TABLE
    if args.preflight is not None:
        sys.exit(not check(*CHECKS[0], args.preflight))
    if args.compile_only:
        major, minor = args.compile_only.split(".")
        others = OTHERS if "others" in args.parts.split(",") else []
        compile_only((int(major), int(minor)), table + others, args.some_checks)
        return
    parts, report, good = args.parts.split(","), Report(args.out), True
    torch.manual_seed(0)
    torch.cuda.init()
    report.say(f"{torch.cuda.get_device_name()} {torch.__version__}")

    def wanted(part: str) -> bool:
        late = time.time() - report.began > args.budget
        if late and part in parts:
            report.say(f"skipped (budget): {part}")
        return part in parts and not late

    if wanted("preflight") and not preflight():
        sys.exit("no launch works: see above")
    if wanted("checks"):
        good &= check_all(report, args.some_checks)
    if wanted("long"):
        check_long(1 << 20)
    if wanted("copy"):
        report.copy = copy_bandwidth()
        report.say(f"copy {report.copy:.2f} TB/s")
    if wanted("baseline"):
        notes = (args.out or Path("decode.json")).with_suffix(".baseline.jsonl")
        shapes = table + [s for s in OTHERS if "others" in parts and (s.k_bits, s.v_bits) == (2, 2)]
        for s, (ms, way) in measure(shapes, args.fa3, notes, args.budget / 2).items():
            report.add(s, "fa3-bf16" if args.fa3 else "sdpa-bf16", ms, s.raw_bytes, notes=way)
    for s in table + (OTHERS if "others" in parts else []):
        tunings: list[Tuning] = [{}] if "table" in parts or s in OTHERS else []
        tunings += [t for t in (TUNED.get(s, []) if "tune" in parts else []) if t or not tunings]
        if not tunings or not wanted("table" if "table" in parts else "tune"):
            continue
        inputs = our_inputs(s, sets_for(s.bytes))
        for tuning in tunings:
            try:
                ms, error = time_ours(s, inputs, tuning), error_of(inputs[0], tuning)
                report.add(s, "oscar-cuda", ms, s.bytes, tuning=tuning, error=error)
                good &= error < 4e-3  # bf16 output alone: 1.7e-3
            except OscarError as error:
                report.say(f"{s} {tuning}: {error}")
        del inputs
        torch.cuda.empty_cache()
    if wanted("where"):
        for s in (Shape(32, 1), Shape(32, 8)):
            for tuning in ({}, VARIANTS[1]):
                times = where(s, tuning)
                report.extra.setdefault("where", []).append({"shape": str(s), "tuning": tuning, "ms": dict(times)})
                report.say(f"where {s} {tuning or ''}: " + "; ".join(f"{n} {1000 * ms:.1f} us" for n, ms in times))
                torch.cuda.empty_cache()
    if wanted("copy"):
        after = copy_bandwidth()
        report.extra["copy_tb_s_after"] = after
        report.say(f"copy {after:.2f} TB/s")
    report.save()
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
