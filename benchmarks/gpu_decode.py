# SPDX-License-Identifier: Apache-2.0
"""Decode attention on one GPU: check against float64, then time against the fastest BF16 kernel at hand.

    python benchmarks/gpu_decode.py --out decode_h200.json --fa3 …/_vllm_fa3_C.abi3.so
    python benchmarks/gpu_decode.py --compile-only 9.0     # fill the kernel cache without a GPU

Every time is the median over replays of one CUDA graph that calls the operation on several input sets in turn, so that
the L2 cache does not help; all contenders are timed so, in this run, on the same shapes. Inputs are random, not zeros.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "kernels")]

from decode_reference import random_case, reference, relative_error, to_device  # noqa: E402

from oscar_kv.kernels.base import LayerTables, Windows  # noqa: E402
from oscar_kv.kernels.cuda.compiler import compile_cached  # noqa: E402
from oscar_kv.kernels.cuda.decode import CudaDecode  # noqa: E402
from oscar_kv.kernels.cuda.spec import DecodeSpec  # noqa: E402
from oscar_kv.layout import PAGE, PageLayout  # noqa: E402

SINK, RECENT, RING = 64, 256, 288
Tuning = dict[str, Any]
DEVICE = "cuda"
BASE: Tuning = {}  # what the preflight found to work


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    q_heads: int
    batch: int
    context: int = 98304
    head_dim: int = 128
    k_bits: int = 2
    v_bits: int = 2
    kv_heads: int = 8

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.head_dim, self.head_dim, self.k_bits, self.v_bits)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def bytes(self) -> int:
        """What a call must read: history in pages, windows raw."""
        history = self.context - SINK - RECENT
        raw = 2 * 2 * self.head_dim * (SINK + RECENT)
        return self.batch * self.kv_heads * (history * self.layout.page_bytes // PAGE + raw)

    def row(self) -> dict[str, Any]:
        names = ("k_bits", "v_bits", "q_heads", "kv_heads", "head_dim", "batch", "context")
        return {n: getattr(self, n) for n in names}


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
VARIANTS: list[Tuning] = [
    {},
    {"bulk": False},
    {"chained": False},
    {"stages": 3},
    {"stages": 6, "min_blocks": 2},
    {"min_blocks": 4, "stages": 3},
    {"warps": 8, "stages": 3, "min_blocks": 2},
    {"warps": 8, "stages": 4, "min_blocks": 1},
    {"warps": 2, "stages": 4, "min_blocks": 6},
    {"warps": 2, "stages": 4, "min_blocks": 8},
]
WIDE_VARIANTS: list[Tuning] = [
    {"tiles": 2},
    {"tiles": 2, "stages": 3},
    {"tiles": 2, "min_blocks": 3, "stages": 3},
    {"tiles": 1, "min_blocks": 3},
    {"tiles": 2, "warps": 8, "stages": 3, "min_blocks": 1},
    {"tiles": 2, "warps": 2, "min_blocks": 4},
]
TUNED = [(Shape(32, 1), VARIANTS), (Shape(32, 8), VARIANTS), (Shape(96, 8), WIDE_VARIANTS)]
RAGGED = [(64, 4000, 4200), (64, 64, 64), (10, 131, 200), (0, 0, 0), (5, 64, 70), (64, 129, 400), (64, 20000, 20250)]
CHECKS: list[tuple[PageLayout, int, dict[str, Any]]] = [
    *((PageLayout(128, 128, k, v), 4, {}) for k, v in ((2, 2), (2, 1), (3, 2), (3, 3), (4, 4), (1, 4))),
    *((PageLayout(d, d, 2, 2), 4, {}) for d in (64, 80, 96, 112, 192, 256)),
    *((PageLayout(128, 128, 2, 2), g, {}) for g in (1, 7, 8, 12, 16)),
    (PageLayout(192, 128, 3, 2), 12, {}),
    (PageLayout(128, 128, 2, 2), 4, {"v_scale": 200.0}),
    (PageLayout(128, 128, 2, 2), 4, {"q_scale": 2000.0}),
]


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
    for tuning in ({}, {"chained": False}, {"bulk": False}, {"bulk": False, "chained": False}):
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
    from oscar_kv.kernels.cuda.launch import load

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


def time_graph(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Median ms per call over replays of a graph of all calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for i in range(replays + 2):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(stream), graph.replay(), b.record(stream)
            b.synchronize()
            if i >= 2:
                times.append(a.elapsed_time(b) / len(calls))
    del graph
    return statistics.median(times)


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy, bytes read and written both counted."""
    a = torch.randint(0, 256, (1 << 31,), dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / time_graph([lambda: b.copy_(a)]) / 1e9


def lengths(s: Shape) -> tuple[torch.Tensor, ...]:
    ones = torch.ones(s.batch, dtype=torch.int32, device=DEVICE)
    return ones * SINK, ones * (s.context - RECENT), ones * s.context


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
        out.append((raw(s.batch, s.q_heads, d), pages, table, *lengths(s), windows, tables, layout))
    return out


def sets_for(bytes_a_set: int) -> int:
    return max(3, min(24, (2 << 30) // bytes_a_set))


def time_ours(s: Shape, inputs: list[tuple[Any, ...]], tuning: Tuning) -> float:
    decode = CudaDecode(**{**BASE, **tuning})
    return time_graph([partial(decode, *x) for x in inputs])


def fa3(
    q: torch.Tensor,
    kv: torch.Tensor,
    page: int,
    table: torch.Tensor,
    starts: torch.Tensor,
    used: torch.Tensor,
    splits: int,
) -> None:
    """FlashAttention-3 of vLLM's wheel over pages: kv [2, …] flat, q [batch, q_heads, d]; starts: cu_seqlens_q."""
    d = q.shape[-1]
    k, v = (x.view(-1, page, kv.shape[1] // (table.numel() * page * d), d) for x in kv)
    new, lengths_k, rotary_and_descale = [None] * 3, [None] * 3, [None] * 8
    context = table.shape[1] * page
    arguments = [q, k, v, *new, torch.empty_like(q), starts, *lengths_k, used, 1, context, table, *rotary_and_descale]
    arguments += [d**-0.5, True, -1, -1, 0.0, True, None, splits, None, 0, None, 1, 0, None]
    torch.ops._vllm_fa3_C.fwd(*arguments)


def time_fa3(s: Shape) -> tuple[float, str]:
    """Fastest over page sizes and split counts of FlashAttention-3, paged, BF16."""
    best, numbers = (math.inf, ""), s.batch * s.context * s.kv_heads * s.head_dim
    sets = max(2, min(8, (4 << 30) // (4 * numbers)))
    kv = [torch.randn(2, numbers, device=DEVICE, dtype=torch.bfloat16) for _ in range(sets)]
    q = torch.randn(s.batch, s.q_heads, s.head_dim, device=DEVICE, dtype=torch.bfloat16)
    starts, used = torch.arange(s.batch + 1, dtype=torch.int32, device=DEVICE), lengths(s)[2]
    for page in (64, 128):
        n = s.context // page
        table = torch.randperm(s.batch * n, device=DEVICE).int().view(s.batch, n).contiguous()
        for splits in (0, 16):
            calls = [partial(fa3, q, x, page, table, starts, used, splits) for x in kv]
            best = min(best, (time_graph(calls), f"page {page}, splits {splits}"))
    return best


def time_sdpa(s: Shape) -> tuple[float, str]:
    """PyTorch's scaled_dot_product_attention, contiguous BF16."""
    shape = (2, s.batch, s.kv_heads, s.context, s.head_dim)
    kv = [torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    q = torch.randn(s.batch, s.q_heads, 1, s.head_dim, device=DEVICE, dtype=torch.bfloat16)
    attention = torch.nn.functional.scaled_dot_product_attention
    return time_graph([partial(attention, q, x[0], x[1], enable_gqa=True) for x in kv]), ""


def specs() -> list[tuple[Shape, Tuning]]:
    return [(s, {}) for s in TABLE + OTHERS] + [(s, t) for s, variants in TUNED for t in variants]


def compile_only(capability: tuple[int, int]) -> None:
    wanted = [(s.layout, s.group, torch.bfloat16, t, False) for s, t in specs()]
    wanted += [(layout, g, dtype, {}, False) for layout, g, _ in CHECKS for dtype in (torch.float16, torch.bfloat16)]
    wanted += [
        (CHECKS[0][0], 4, dtype, t, cap)
        for dtype in (torch.float16, torch.bfloat16)
        for t, cap in (({"bulk": False}, False), ({}, True))
    ]
    for layout, group, dtype, tuning, cap in wanted:
        spec = DecodeSpec.choose(layout, group, dtype, capability, cap, **tuning)
        for file in ("decode.cu", "finish.cu"):
            compile_cached(file, spec.header, capability)
    print(f"{len(wanted)} specialisations compiled for sm_{capability[0]}{capability[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--fa3", type=Path, help="FlashAttention-3 extension of vLLM's wheel; without it: PyTorch's SDPA"
    )
    parser.add_argument("--compile-only", metavar="CAPABILITY")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--skip-tuning", action="store_true")
    parser.add_argument("--skip-others", action="store_true")
    parser.add_argument("--skip-baseline", action="store_true")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which no new part begins")
    parser.add_argument("--preflight", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.preflight is not None:
        sys.exit(not check(*CHECKS[0], args.preflight))
    if args.compile_only:
        major, minor = args.compile_only.split(".")
        compile_only((int(major), int(minor)))
        return
    began, rows = time.time(), []
    torch.manual_seed(0)
    torch.cuda.init()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)

    if not preflight():
        sys.exit("no launch works: see above")

    def in_time(what: str) -> bool:
        late = time.time() - began > args.budget
        if late:
            print(f"skipped (budget): {what}", flush=True)
        return not late

    good = True
    if not args.skip_checks:
        good &= check(*CHECKS[0], {})
        good &= check(*CHECKS[0], {"bulk": False}) & check(*CHECKS[0], {}, softcap=5.0)
        for case in CHECKS[1:]:
            if in_time(f"check {case}"):
                try:
                    good &= check(*case, {})
                except Exception:
                    good = False
                    traceback.print_exc()
                    torch.cuda.synchronize()
        check_long(1 << 17), check_long(1 << 20)
    print(f"[{time.time() - began:.0f} s] checks {'passed' if good else 'FAILED'}", flush=True)
    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s", flush=True)
    baseline = time_sdpa
    if args.fa3:
        torch.ops.load_library(str(args.fa3))
        baseline = time_fa3
    name = "fa3-bf16" if args.fa3 else "sdpa-bf16"
    best_of = dict(TUNED) if not args.skip_tuning else {}
    for s in TABLE + ([] if args.skip_others else OTHERS):
        if not in_time(str(s)):
            continue
        inputs = our_inputs(s, sets_for(s.bytes))
        torch.cuda.synchronize()
        floor = s.bytes / copy / 1e9
        line = f"q{s.q_heads} b{s.batch} ctx{s.context} d{s.head_dim} {s.k_bits}/{s.v_bits}"
        for tuning in [{}, *(t for t in best_of.get(s, []) if t)]:
            try:
                ms = time_ours(s, inputs, tuning)
            except Exception as error:
                print(f"{line} {tuning}: {error}", flush=True)
                continue
            rows.append(
                {"op": "oscar-cuda", **s.row(), "ms": ms, "bytes": s.bytes, "share": floor / ms, "tuning": tuning}
            )
            print(f"{line} {tuning or ''}: {ms:.4f} ms share {floor / ms:.3f}", flush=True)
        del inputs
        torch.cuda.empty_cache()
        if args.skip_baseline or s.head_dim not in (64, 128, 256) or (s.k_bits, s.v_bits) != (2, 2):
            continue
        try:
            ms, note = baseline(s)
            ours = min(
                r["ms"]
                for r in rows
                if r["op"] == "oscar-cuda" and {k: r[k] for k in s.row()} == s.row() and not r["tuning"]
            )
            size = 4 * s.batch * s.context * s.kv_heads * s.head_dim
            rows.append(
                {
                    "op": name,
                    **s.row(),
                    "k_bits": 16,
                    "v_bits": 16,
                    "ms": ms,
                    "bytes": size,
                    "share": size / copy / 1e9 / ms,
                    "notes": note,
                }
            )
            print(
                f"{line} {name} ({note}): {ms:.4f} ms share {size / copy / 1e9 / ms:.3f}; ours x{ms / ours:.2f}",
                flush=True,
            )
        except Exception as error:
            print(f"{line} {name}: {error}", flush=True)
        torch.cuda.empty_cache()
    print(f"[{time.time() - began:.0f} s] done", flush=True)
    if args.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        meta = {
            "command": " ".join(sys.argv),
            "commit": commit,
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.machine(),
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "model": None,
            "artifact_sha256": None,
            "seed": 0,
            "copy_tb_s": copy,
            "notes": "whole operation: q.R_K, paged history, raw windows, merge, R_V; medians of CUDA-graph replays",
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
