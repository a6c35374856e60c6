# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv bench prefill``: a chunk over a long quantised prefix, against dense kernels over a BF16 prefix."""

from __future__ import annotations

from collections.abc import Sequence

from .report import Report
from .run import Job, compete
from .shapes import PrefillShape

NOTES = (
    "ours: the chunk attends to sink, pages and ring of the prefix and causally to itself; dense kernels: causal, keys "
    "and values in BF16; ratio: ours over the fastest BF16 kernel, ratio_fa3: over FlashAttention-3; dense: the "
    "kernel that our tiles were given to, the first of a fixed order that serves, other_dense_ms: the same operation "
    "with others; error: sampled queries against float64; peak_extra_bytes: what a call takes beyond "
    "its inputs, its result included"
)
COLUMNS = (
    ("op", "op", 0), ("q / KV heads", "heads", 0), ("d", "head_dim", 0), ("K/V bits", "bits", 0),
    ("prefix", "prefix", 0), ("chunk", "chunk", 0), ("ms", "ms", 3), ("time / fastest BF16", "ratio", 3),
    ("time / FA3", "ratio_fa3", 3), ("error", "error", -1), ("extra MiB", "extra_mib", 0), ("dense kernel", "dense", 0),
)  # fmt: skip


def run(job: Job, report: Report, shapes: Sequence[PrefillShape]) -> None:
    """Fill the report."""
    report.notes = NOTES
    compete(job, report, "prefill", shapes, size_of_row=False)
    for row in report.rows:
        for ratio, times in (("ratio", "times_faster"), ("ratio_fa3", "times_faster_fa3")):
            if row.get(times):
                row[ratio] = 1 / row[times]
    report.save()
