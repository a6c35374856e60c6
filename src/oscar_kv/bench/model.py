# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv bench model``: whole decode steps of a random model of Qwen3-8B's shape, batch 1 and the largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .report import Report, Row
from .run import Job, compete
from .shapes import ModelShape

NOTES = (
    "bare decode loop in one CUDA graph, random weights in BF16; caches hold random synthetic pages or values, "
    "distinct in every layer and request; 64 steps a timing, so every request writes one page; R_V at run time; "
    "ms: a step of all requests; cache_bytes: what the allocator gave for pages, windows and block table; "
    "times_faster: a step at the same batch, against the fastest BF16 cache; times_faster_fa3: against that read by "
    "FlashAttention-3; "
    "memory_ratio: BF16's bytes a token over ours; throughput_ratio: tokens/s over those of the fastest BF16 row, "
    "whatever its batch"
)
COLUMNS = (
    ("op", "op", 0), ("K/V bits", "bits", 0), ("layers", "layers", 0), ("batch", "batch", 0), ("context", "context", 0),
    ("ms a step", "ms", 3), ("tokens/s", "tokens_per_s", 0), ("cache bytes a token", "cache_bytes_per_token", 0),
    ("× less memory", "memory_ratio", 2), ("× faster", "times_faster", 2),
    ("× FA3 BF16", "times_faster_fa3", 2), ("error", "error", -1),
)  # fmt: skip


def run(job: Job, report: Report, shapes: Sequence[ModelShape]) -> None:
    """Fill the report. Largest batches differ between contenders, so tokens per second compare there, not steps."""
    report.notes = NOTES + ("; elementwise parts compiled by torch.compile" if job.options.compiled else "")
    compete(job, report, "model", shapes, size_of_row=False)
    compare(report.rows)
    report.save()


def compare(rows: list[Row]) -> None:
    """memory_ratio and throughput_ratio of our rows: against the BF16 loop at its own largest batch."""
    theirs = [r for r in rows if r["op"].endswith("-bf16")]
    if not theirs:
        return
    best = max(theirs, key=lambda r: r["tokens_per_s"])
    for row in rows:
        if row["op"].startswith("oscar"):
            row["memory_ratio"] = best["cache_bytes_per_token"] / row["cache_bytes_per_token"]
            row["throughput_ratio"] = row["tokens_per_s"] / best["tokens_per_s"]


def shapes_for(base: ModelShape, batches: Sequence[int]) -> list[ModelShape]:
    return [replace(base, batch=b) for b in batches]
