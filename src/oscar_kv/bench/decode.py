# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv bench decode``: attention of one new token a request, the whole operation, against dense caches."""

from __future__ import annotations

from collections.abc import Sequence

from .report import Report
from .run import Job, compete
from .shapes import DecodeShape

NOTES = (
    "whole operation: q·R_K, q·μ_K, paged history, raw windows (64 + 256), merge, R_Vᵀ, μ_V; medians of CUDA-graph "
    "replays over several input sets; error: of one request's answer against float64; share: bytes over time and copy "
    "bandwidth of this run; times_faster: against the fastest BF16 kernel of this run, fastest_bf16, which may read a "
    "contiguous cache; times_faster_fa3: against FlashAttention-3 over pages"
)
COLUMNS = (
    ("op", "op", 0), ("q / KV heads", "heads", 0), ("d", "head_dim", 0), ("K/V bits", "bits", 0), ("batch", "batch", 0),
    ("context", "context", 0), ("ms", "ms", 4), ("share of copy", "share", 3), ("× fastest BF16", "times_faster", 2),
    ("× FA3 BF16", "times_faster_fa3", 2), ("error", "error", -1),
)  # fmt: skip


def run(job: Job, report: Report, shapes: Sequence[DecodeShape]) -> None:
    """Fill the report."""
    report.notes = NOTES
    job.say(f"copy bandwidth {report.measure_copy('before'):.2f} TB/s")
    compete(job, report, "decode", shapes)
    job.say(f"copy bandwidth afterwards {report.measure_copy('after'):.2f} TB/s")
