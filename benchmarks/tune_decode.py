# SPDX-License-Identifier: Apache-2.0
"""Work on the CUDA decode kernels on one GPU: ragged requests against float64, tuning variants, and where time goes.

    python benchmarks/tune_decode.py --parts checks,tune --some-checks --shapes 0,1
    python benchmarks/tune_decode.py --compile-only 9.0        # fill the kernel cache without a GPU

Inputs and clock are those of ``oscar-kv bench decode``, which has the comparison with other kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from functools import partial
from typing import Any

import checkout  # noqa: F401  (the path of what follows)
import torch
from decode_reference import random_case, reference, relative_error, to_device

from oscar_kv.bench.inputs import DecodeArguments, decode_arguments, sets_for
from oscar_kv.bench.reference import decode_error
from oscar_kv.bench.shapes import PRESETS, RECENT, SINK, DecodeShape
from oscar_kv.bench.timing import copy_bandwidth, time_graph
from oscar_kv.errors import OscarError
from oscar_kv.kernels.base import LayerTables, Windows
from oscar_kv.kernels.cuda.compiler import compile_cached
from oscar_kv.kernels.cuda.decode import CudaDecode, run
from oscar_kv.kernels.cuda.launch import _FILES, load
from oscar_kv.kernels.cuda.spec import DecodeSpec
from oscar_kv.layout import PageLayout

Tuning = dict[str, Any]
PARTS = ("preflight", "checks", "long", "tune", "where")
SHAPES = [*PRESETS["all"], DecodeShape(q_heads=64), DecodeShape(q_heads=96), DecodeShape(context=32768)]
VARIANTS: list[Tuning] = [{}, {"warps": 12, "stages": 3, "min_blocks": 1}, {"buffers": 1}]
WIDE: list[Tuning] = [{}, {"tiles": 2, "warps": 8, "stages": 3, "min_blocks": 1, "buffers": 1}]
PLAINER: list[Tuning] = [{"chained": False}, {"bulk": False}, {"bulk": False, "chained": False}]
"""What the preflight tries where the default hangs or answers wrongly."""
RAGGED = [(64, 4000, 4200), (64, 64, 64), (10, 131, 200), (0, 0, 0), (5, 64, 70), (64, 129, 400), (64, 20000, 20250)]
K2V2 = PageLayout(128, 128, 2, 2)
Check = tuple[PageLayout, int, dict[str, Any], Tuning, float]
"""(layout, query heads a KV head, options of random_case, tuning, soft-cap)"""
CHECKS: list[Check] = [
    *((K2V2, 4, {}, tuning, 0.0) for tuning in ({}, {"bulk": False}, VARIANTS[1])),
    (K2V2, 4, {}, {}, 5.0),
    (K2V2, 4, {"v_scale": 200.0}, {}, 0.0),
    *((K2V2, group, {}, {}, 0.0) for group in (8, 12)),
    (PageLayout(192, 128, 3, 2), 12, {}, {}, 0.0),
    *((PageLayout(128, 128, k, v), 4, {}, {}, 0.0) for k, v in ((3, 2), (4, 4))),
    *((PageLayout(d, d, 2, 2), 4, {}, {}, 0.0) for d in (64, 256)),
    # --some-checks ends here, after 12.
    *((PageLayout(128, 128, k, v), 4, {}, {}, 0.0) for k, v in ((2, 1), (3, 3), (1, 4))),
    *((PageLayout(d, d, 2, 2), 4, {}, {}, 0.0) for d in (80, 96, 112, 192)),
    *((K2V2, group, {}, {}, 0.0) for group in (1, 7, 16)),
    (K2V2, 4, {"q_scale": 2000.0}, {}, 0.0),
    *((K2V2, 4, {}, tuning, 0.0) for tuning in (PLAINER[0], PLAINER[2])),
]
LIMIT = 4e-3
"""Relative error at a shape that is timed; BF16 output alone makes 1.7e-3."""


BEGAN = time.time()


def say(text: str) -> None:
    print(f"[{time.time() - BEGAN:5.1f} s] {text}", flush=True)


def variants(s: DecodeShape) -> list[Tuning]:
    return WIDE if s.group > 8 else VARIANTS if (s.k_bits, s.v_bits, s.head_dim) == (2, 2, 128) else [{}]


def check(case: Check) -> bool:
    """Ragged requests in fp16 (BF16 output would hide the error) and bf16; prints the errors."""
    layout, group, options, tuning, cap = case
    line, ok = "", True
    for dtype in (torch.float16, torch.bfloat16):
        c = to_device(random_case(layout, group, RAGGED, dtype=dtype, **options), "cuda")
        out = torch.full((len(RAGGED), 2 * group, layout.v_dim), math.nan, dtype=dtype, device="cuda")
        CudaDecode(**tuning)(*c.arguments(), layout, softcap=cap, out=out)  # type: ignore[arg-type]
        want = reference(c, softcap=cap)
        error, rounded = relative_error(out, want), reference(c, softcap=cap, dtype=torch.bfloat16)
        plain = relative_error(rounded, want)
        ok &= error < (2 * plain if dtype == torch.bfloat16 or "q_scale" in options else 2e-3)
        line += f" {str(dtype)[6:]} {error:.1e} (plain BF16 {plain:.1e})"
    label = f"dk{layout.k_dim} dv{layout.v_dim} {layout.k_bits}/{layout.v_bits} group {group} cap {cap:g}"
    say(f"check {'ok  ' if ok else 'FAIL'} {label} {options or ''} {tuning or ''}:{line}")
    return ok


def preflight() -> bool:
    """The default and plainer launches, each in a process of its own: a hang or a bad access ends that one only."""
    for tuning in ({}, *PLAINER):
        command = [sys.executable, __file__, "--preflight", json.dumps(tuning)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            text, ok = done.stdout + done.stderr[-1500:], done.returncode == 0
        except subprocess.TimeoutExpired:
            text, ok = "hangs", False
        say(f"preflight {tuning or 'default'}: {text.strip()}")
        if ok:
            return not tuning
    return False


def check_long(tokens: int = 1 << 20) -> bool:
    """Accumulation over a long history by one thread block: its error must not grow with the length."""
    c = to_device(random_case(K2V2, 4, [(64, tokens, tokens + 200)], heads=1, dtype=torch.float16), "cuda")
    kernels = load(DecodeSpec.choose(K2V2, 4, torch.float16, torch.cuda.get_device_capability()), 0)
    usual, want, good = kernels.blocks, reference(c), True
    for blocks in (1, usual):
        kernels.blocks = blocks
        error = relative_error(CudaDecode()(*c.arguments(), K2V2), want)  # type: ignore[arg-type]
        good &= error < 2e-3
        say(f"long  {tokens:,} tokens, {blocks} blocks: error {error:.1e}")
    kernels.blocks = usual
    return good


def tune(s: DecodeShape, copy: float) -> bool:
    """Every variant of one shape: time, share of copy bandwidth, error of the last request."""
    inputs, good = [decode_arguments(s, "cuda") for _ in range(sets_for(s.bytes, "cuda"))], True
    for tuning in variants(s):
        decode = CudaDecode(**tuning)
        try:
            error = decode_error(decode(*inputs[0]), inputs[0])
            ms = time_graph([partial(decode, *x) for x in inputs])
        except OscarError as refused:
            say(f"{s} {tuning}: {refused}")
            continue
        good, wrong = good and error < LIMIT, "" if error < LIMIT else " WRONG"
        say(f"tune  {s} {tuning or ''}: {ms:.4f} ms, share {s.bytes / ms / 1e9 / copy:.3f}, error {error:.1e}{wrong}")
    return good


class Some:
    """Kernels of which only some are launched."""

    def __init__(self, kernels: Any, names: tuple[str, ...]) -> None:
        self.spec, self.blocks, self.multiprocessors = kernels.spec, kernels.blocks, kernels.multiprocessors
        self.kernels, self.names = kernels, names

    def launch(self, name: str, grid: tuple[int, int], params: Any) -> None:
        if name.startswith(self.names):
            self.kernels.launch(name, grid, params)


def without(x: DecodeArguments, windows: bool = True, turn: bool = True, tokens: int | None = None) -> tuple[Any, ...]:
    """Arguments with parts of the work left out."""
    q, pages, table, start, end, length, w, t, _ = x
    if not windows:
        w = Windows(*(y[:, :, :0].contiguous() for y in (w.sink_k, w.sink_v, w.ring_k, w.ring_v)))
        start, end = torch.zeros_like(start), length
    if not turn:
        t = LayerTables(None, t.k_centre, None, t.v_centre)
    if tokens is not None:
        length = torch.full_like(length, tokens)
        end = (length - RECENT).clamp(min=SINK) if windows else length
    return q, pages, table, start, end, length, w, t


ALL = ("prepare", "decode", "finish")
LEFT: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("all", ALL, {}),
    ("prepare, decode", ALL[:2], {}),
    ("decode", ALL[1:2], {}),
    ("finish", ALL[2:], {}),
    ("decode, no windows", ALL[1:2], {"windows": False}),
    ("decode, no rotation", ALL[1:2], {"turn": False}),
    ("decode, neither", ALL[1:2], {"windows": False, "turn": False}),
    ("all, neither", ALL, {"windows": False, "turn": False}),
    ("all, 8192 tokens", ALL, {"tokens": 8192}),
    ("all, 640 tokens", ALL, {"tokens": 640}),
    ("all, no history", ALL, {"tokens": 320}),
    ("decode, no history", ALL[1:2], {"tokens": 320}),
    ("decode, nothing", ALL[1:2], {"tokens": 0, "windows": False}),
]


def where(s: DecodeShape, tuning: Tuning) -> None:
    """Times with parts left out. Not attention any more: only for finding out what a part costs."""
    inputs = [decode_arguments(s, "cuda") for _ in range(sets_for(s.bytes, "cuda"))]
    capability = torch.cuda.get_device_capability()
    kernels = load(DecodeSpec.choose(s.layout, s.group, torch.bfloat16, capability, **tuning), 0)
    run(kernels, *without(inputs[0]))  # buffers that a part finds are filled once
    for name, names, options in LEFT:
        ms = time_graph([partial(run, Some(kernels, names), *without(x, **options)) for x in inputs])
        say(f"where {s} {tuning or ''}: {name}: {1000 * ms:.1f} us")


def compile_only(capability: tuple[int, int], shapes: list[DecodeShape], checks: list[Check]) -> None:
    """Every specialisation of the parts."""
    wanted = [(s.layout, s.group, torch.bfloat16, False, t) for s in shapes for t in variants(s)]
    for layout, group, _, tuning, cap in checks:
        wanted += [(layout, group, dtype, cap > 0, tuning) for dtype in (torch.float16, torch.bfloat16)]
    headers = {DecodeSpec.choose(*a, capability, cap, **t).header for *a, cap, t in wanted}
    for header in headers:
        for file in dict.fromkeys(_FILES.values()):
            compile_cached(file, header, capability)
    say(f"{len(headers)} specialisations compiled for sm_{capability[0]}{capability[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--some-checks", action="store_true")
    parser.add_argument("--compile-only", metavar="CAPABILITY")
    parser.add_argument("--shapes", default="", help="shapes by number, as 0,1,4")
    parser.add_argument("--tuning", type=json.loads, default={}, help='where: a tuning, such as {"warps": 12}')
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which nothing new begins")
    parser.add_argument("--preflight", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    parts, checks = args.parts.split(","), CHECKS[:12] if args.some_checks else CHECKS
    if args.preflight is not None:
        sys.exit(not check((K2V2, 4, {}, args.preflight, 0.0)))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    shapes = [SHAPES[int(i)] for i in args.shapes.split(",")] if args.shapes else SHAPES
    if args.compile_only:
        major, minor = args.compile_only.split(".")
        compile_only((int(major), int(minor)), shapes if "tune" in parts else [], checks if "checks" in parts else [])
        return
    torch.manual_seed(0)
    say(f"{torch.cuda.get_device_name()} {torch.__version__}")
    if "preflight" in parts and not preflight():
        sys.exit("the default launch does not work here: see above")
    copy = copy_bandwidth("cuda") if "tune" in parts else 0.0
    jobs: list[Any] = [partial(check, c) for c in checks if "checks" in parts]
    jobs += [check_long] if "long" in parts else []
    jobs += [partial(tune, s, copy) for s in shapes if "tune" in parts]
    jobs += [partial(where, s, args.tuning) for s in (shapes[:2] if "where" in parts else [])]
    good = True
    for job in jobs:
        if time.time() - BEGAN > args.budget:
            say("the rest was skipped: the time budget was spent")
            break
        good &= job() is not False
        torch.cuda.empty_cache()
    say("passed" if good else "FAILED")
    sys.exit(not good)


if __name__ == "__main__":
    main()
