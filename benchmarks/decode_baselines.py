# SPDX-License-Identifier: Apache-2.0
"""BF16 decode attention by others, for comparison: FlashAttention-3 of vLLM's wheel, or PyTorch's own.

A foreign kernel that crashes takes its process along, so these run in a process of their own, which notes each attempt
before it begins; ``measure`` starts it again behind an attempt that ended it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decode_timing import Shape, lengths, time_graph


class Way(NamedTuple):
    """A way to call FlashAttention-3. plan: with the scheduler's metadata made beforehand, as vLLM does."""

    page: int
    ragged: bool
    plan: bool
    splits: int


WAYS = [
    Way(64, True, True, 0),
    Way(64, True, True, 32),
    Way(64, True, False, 16),
    Way(64, False, False, 0),
    Way(64, False, False, 16),
    Way(128, True, True, 0),
    Way(128, False, False, 16),
]


def fa3_call(s: Shape, way: Way, kv: torch.Tensor, q: torch.Tensor, table: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One call over pages: kv [2, numbers] flat, q [batch, q_heads, d]. Buffers are made here, outside the timing."""
    ops, d, used = torch.ops._vllm_fa3_C, s.head_dim, lengths(s, "cuda")[2]
    k, v = (x.view(-1, way.page, s.kv_heads, d) for x in kv)
    starts = torch.arange(s.batch + 1, dtype=torch.int32, device="cuda") if way.ragged else None
    q = q if way.ragged else q[:, None]
    out, context, plan = torch.empty_like(q), table.shape[1] * way.page, None
    if way.plan:
        plan = ops.get_scheduler_metadata(
            *(s.batch, 1, context, s.q_heads, s.kv_heads, d, d, torch.bfloat16, used, starts),
            *(None, None, None, None, way.page, 0, True, -1, -1, False, way.splits, None, 0),
        )
    arguments = [q, k, v, None, None, None, out, starts, None, None, None, used, 1 if way.ragged else None]
    arguments += [context if way.ragged else None, table, *[None] * 8, d**-0.5, True, -1, -1, 0.0, True]
    arguments += [plan, way.splits, None, 0, None, 1, 0, None]

    def call() -> torch.Tensor:
        ops.fwd(*arguments)
        return out

    return call


def time_fa3(s: Shape, way: Way) -> tuple[float, float]:
    """(ms, relative error of one request's answer against PyTorch's)."""
    numbers = s.raw_bytes // 4
    kv = [
        torch.randn(2, numbers, device="cuda", dtype=torch.bfloat16)
        for _ in range(max(2, min(8, (1 << 30) // numbers)))
    ]
    q = torch.randn(s.batch, s.q_heads, s.head_dim, device="cuda", dtype=torch.bfloat16)
    n = s.context // way.page
    table = torch.randperm(s.batch * n, device="cuda").int().view(s.batch, n).contiguous()
    calls = [fa3_call(s, way, x, q, table) for x in kv]
    ms = time_graph(calls)
    got = calls[0]().reshape(s.batch, s.q_heads, s.head_dim)[-1]
    k, v = (
        x.view(-1, way.page, s.kv_heads, s.head_dim)[table[-1]].flatten(0, 1).transpose(0, 1).float() for x in kv[0]
    )
    want = (q[-1].view(s.kv_heads, s.group, -1).float() @ k.mT * s.head_dim**-0.5).softmax(-1) @ v
    error = float((got.float() - want.flatten(0, 1)).norm() / want.norm())
    return ms, error


def time_sdpa(s: Shape) -> tuple[float, float]:
    """PyTorch's scaled_dot_product_attention, contiguous BF16."""
    shape = (2, s.batch, s.kv_heads, s.context, s.head_dim)
    kv = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    q = torch.randn(s.batch, s.q_heads, 1, s.head_dim, device="cuda", dtype=torch.bfloat16)
    attention = torch.nn.functional.scaled_dot_product_attention
    return time_graph([partial(attention, q, x[0], x[1], enable_gqa=True) for x in kv]), 0.0


def _notes(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def worker(job: dict[str, Any], file: Path) -> None:
    """All shapes and ways that the notes do not name yet."""
    if job["fa3"]:
        torch.ops.load_library(job["fa3"])
    seen = {x["key"] for x in _notes(file)}
    ways: list[Way | None] = list(WAYS) if job["fa3"] else [None]
    with file.open("a") as out:

        def note(**x: object) -> None:
            out.write(json.dumps(x) + "\n")
            out.flush()

        for shape in job["shapes"]:
            s = Shape(**shape)
            for way in ways:
                key = f"{s} {'sdpa' if way is None else way}"
                if key in seen:
                    continue
                note(key=key)
                try:
                    ms, error = time_sdpa(s) if way is None else time_fa3(s, way)
                    note(key=key, shape=shape, ms=ms, error=error, way="sdpa" if way is None else str(way))
                except RuntimeError as error:
                    note(key=key, failed=str(error)[:200])
                    if "memory access" in str(error) or "AcceleratorError" in type(error).__name__:
                        sys.exit(3)
                torch.cuda.empty_cache()


def measure(
    shapes: list[Shape], fa3: Path | None, file: Path, limit: float, starts: int = 6
) -> dict[Shape, tuple[float, str]]:
    """Fastest correct way for each shape: (ms, description). Takes at most about ``limit`` seconds."""
    file.unlink(missing_ok=True)
    job, end = {"shapes": [asdict(s) for s in shapes], "fa3": str(fa3) if fa3 else None}, time.time() + limit
    for _ in range(starts):
        try:
            done = subprocess.run(
                [sys.executable, __file__, json.dumps(job), str(file)],
                capture_output=True,
                text=True,
                timeout=max(1.0, end - time.time()),
            )
        except subprocess.TimeoutExpired:
            print("baselines: out of time", flush=True)
            break
        if done.returncode == 0:
            break
        last = _notes(file)[-1]["key"] if _notes(file) else "start"
        print(f"baselines: ended with {done.returncode} at {last}: {done.stderr.strip()[-200:]}", flush=True)
    best: dict[Shape, tuple[float, str]] = {}
    for x in _notes(file):
        if "ms" in x:
            bad = not x["error"] < 0.02
            print(f"baseline {x['key']}: {x['ms']:.4f} ms error {x['error']:.1e}{' WRONG' if bad else ''}", flush=True)
            s = Shape(**x["shape"])
            if not bad and x["ms"] < best.get(s, (math.inf, ""))[0]:
                best[s] = (x["ms"], x["way"])
        elif "failed" in x:
            print(f"baseline {x['key']}: {x['failed']}", flush=True)
    return best


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]), Path(sys.argv[2]))
