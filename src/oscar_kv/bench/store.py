# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv bench store``: writing at decode time beside decode attention, and whole prompts beside copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..codec import LayerCodec
from ..errors import OscarError
from ..kernels.base import StoreTables
from ..layout import PAGE, PageLayout, read_pages
from .contenders.oscar import our_kernels, why_not
from .inputs import (
    SPREAD,
    DecodeArguments,
    block_table,
    decode_arguments,
    model_dtype,
    random_codec,
    random_windows,
    sets_for,
)
from .reference import relative_error
from .report import Report, Row
from .run import Job, compete
from .shapes import RING, DecodeShape, ModelShape, PromptShape
from .timing import time_calls

NOTES = (
    "decode write: 64 consecutive steps of all requests in one CUDA graph, so that each request writes one page; "
    "percent_of_decode: their mean over decode attention of the same shape; prompt: share of copy bandwidth, raw rows "
    "read and pages written counted; codes against the reference codec on the CPU in fp32; percent_of_prefill: over "
    "one layer of Qwen3-8B's shape on the same prompt (random weights in BF16, fastest attention at hand), which "
    "holds for all its layers alike"
)
COLUMNS = (
    ("op", "op", 0), ("what", "what", 0), ("K/V bits", "bits", 0), ("shaped", "shaped", 0), ("batch", "batch", 0),
    ("tokens", "tokens", 0), ("ms", "ms", 4), ("% of decode", "percent_of_decode", 2), ("share of copy", "share", 3),
    ("% of prefill", "percent_of_prefill", 2), ("K rows off %", "k_rows_off_percent", 3),
    ("weighted error", "k_error_ratio", 4),
)  # fmt: skip
CHECKED_PAGES = 64
ERROR_LIMIT = 1.01
"""Squared error over the oracle's, weighted for keys: ties aside, a writer may not lose more than this."""


def run(job: Job, report: Report, shapes: Sequence[DecodeShape], prompt: int = 32768) -> None:
    """Fill the report."""
    report.notes = NOTES
    job.say(f"copy bandwidth {report.measure_copy('before'):.2f} TB/s")
    prompt_row = PromptShape(
        q_heads=shapes[0].q_heads, kv_heads=shapes[0].kv_heads, head_dim=shapes[0].head_dim, chunk=prompt
    )
    best, name = _layer(job, report, prompt_row)
    for kernels in ("cuda", "triton", "torch"):
        op = f"oscar-{kernels}"
        if job.contenders and op not in job.contenders:
            continue
        reason = why_not(job.options.device, kernels)
        if reason is not None:
            report.missing[op] = reason
            job.say(f"missing: {op}: {reason}")
            continue
        for shaped in (True, False):
            tasks: list[Callable[[], Row]] = [partial(decode_write, job, kernels, s, shaped) for s in shapes]
            tasks.append(partial(prompt_write, job, kernels, shapes[0], shaped, prompt))
            for task in tasks:
                _row(job, report, op, task, best, name)
    job.say(f"copy bandwidth afterwards {report.measure_copy('after'):.2f} TB/s")


def _row(job: Job, report: Report, op: str, task: Callable[[], Row], layer_ms: float | None, layer: str) -> None:
    if report.late:
        report.problems.append(f"{op}: not begun: the time budget was spent")
        return
    torch.manual_seed(job.options.seed)
    try:
        found = task()
    except (OscarError, RuntimeError) as error:
        report.problems.append(f"{op}: {type(error).__name__}: {str(error)[:300]}")
        job.say(report.problems[-1])
        return
    if found["what"] == "prompt" and layer_ms:
        found |= {"percent_of_prefill": 100 * found["ms"] / layer_ms, "prefill_attention": layer}
    shape, ms, size = found.pop("shape"), found.pop("ms"), found.pop("size")
    row = report.add(op, shape, ms, size, **found)
    if row.get("off", 0.0) > ERROR_LIMIT:
        report.wrong.append(f"{op}, {row['what']}, shaped {row['shaped']}: error {row['off']:.4f} times the oracle's")
        job.say(f"WRONG {report.wrong[-1]}")
    said = [f"{k} {row[k]:.4g}" for k in ("percent_of_decode", "share", "percent_of_prefill") if row.get(k)]
    job.say(f"{op} {row['what']} batch {row['batch']} shaped {row['shaped']}: {ms:.4f} ms, {', '.join(said)}")
    if torch.device(job.options.device).type == "cuda":
        torch.cuda.empty_cache()


def _layer(job: Job, report: Report, prompt: PromptShape) -> tuple[float | None, str]:
    """Fastest layer of a prompt's prefill, and its attention; its row goes to the report."""
    rows = len(report.rows)
    compete(job, report, "layer", [prompt], size_of_row=False)
    found, report.rows[rows:] = report.rows[rows:], []
    if not found:
        report.problems.append("no dense attention could be measured: percent_of_prefill is missing")
        return None, ""
    best = min(found, key=lambda r: r["ms"])
    layers = ModelShape().layers
    report.extra["prefill"] = {
        "tokens": prompt.chunk, "layer_ms": best["ms"], "attention": best["op"], "layers": layers,
        "prefill_ms": layers * best["ms"], "others_ms": {r["op"]: r["ms"] for r in found},
    }  # fmt: skip
    job.say(f"one layer on {prompt.chunk:,} tokens: {best['ms']:.2f} ms with {best['op']}; a prefill has {layers}")
    return best["ms"], best["op"]


def decode_write(job: Job, kernels: str, s: DecodeShape, shaped: bool) -> Row:
    """One new token a request: a step without a page, one in which all write a page, and the mean of 64 steps."""
    device, ours = job.options.device, our_kernels(job.options.device, kernels)
    codec = random_codec(s, shaped, job.options.seed)
    inputs = [decode_arguments(s, device) for _ in range(min(8, sets_for(s.bytes, device)))]
    tables = [StoreTables.of(codec, device) for _ in inputs]
    first = (s.context // PAGE - 1) * PAGE
    k, v = (new_rows(s, s.batch, 1, device) for _ in range(2))
    ones = torch.ones(s.batch, dtype=torch.int32, device=device)
    starts = [ones * (first + j) for j in range(PAGE)]

    def write(i: int, j: int) -> Callable[[], None]:
        x = inputs[i % len(inputs)]
        t = tables[i % len(inputs)]
        return partial(ours.store, k, v, x.pages, x.block_table, starts[j], ones, x.windows, t, x.layout)

    off = page_error(inputs[0], k, v, first + PAGE - 1, write(0, PAGE - 1), codec)

    def timed(calls: Sequence[Callable[[], Any]]) -> float:
        return time_calls(calls, device, job.options.replays)

    none, page = (timed([write(i, j) for i in range(len(inputs))]) for j in (10, PAGE - 1))
    mean = timed([write(j, j) for j in range(PAGE)])
    decode = timed([partial(ours.decode, *x) for x in inputs])
    return {
        "what": "decode", "shape": s.row(), "tokens": s.batch, "shaped": shaped, "ms": mean, "size": 0,
        "no_page_ms": none, "page_ms": page, "decode_ms": decode, "percent_of_decode": 100 * mean / decode, "off": off,
    }  # fmt: skip


def prompt_write(job: Job, kernels: str, s: DecodeShape, shaped: bool, tokens: int) -> Row:
    """A whole prompt of one request, straight into pages, as one call."""
    device, ours = job.options.device, our_kernels(job.options.device, kernels)
    layout, n = s.layout, -(-tokens // PAGE)
    size = tokens * s.kv_heads * (s.raw_row + layout.page_bytes // PAGE)
    codec = random_codec(s, shaped, job.options.seed)
    one = DecodeShape(**{**s.row(), "batch": 1})
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    sets = []
    for _ in range(min(8, sets_for(size, device))):
        pages = torch.empty(n, s.kv_heads, layout.page_bytes, dtype=torch.uint8, device=device)
        k, v = (new_rows(s, 1, tokens, device) for _ in range(2))
        sets.append((k, v, pages, block_table(1, n, device), zero, zero + tokens, random_windows(one, device),
                     StoreTables.of(codec, device), layout))  # fmt: skip
    calls = [partial(ours.store, *x) for x in sets]
    calls[0]()
    quality = compare_codes(sets[0], codec, layout)
    ms = time_calls(calls, device, job.options.replays)
    off = max(quality["k_error_ratio"], quality["v_error_ratio"])
    shape = {**one.row(), "context": tokens}
    return {"what": "prompt", "shape": shape, "tokens": tokens, "shaped": shaped, "ms": ms, "size": size, "off": off,
            **quality}  # fmt: skip


def new_rows(s: DecodeShape, batch: int, n: int, device: str) -> Tensor:
    """[batch, kv_heads, n, d] with the strides of a projection's output, heads beside each other."""
    made = torch.randn(batch, n, s.kv_heads, s.head_dim, device=device, dtype=model_dtype(device))
    return made.mul_(SPREAD).transpose(1, 2)


def page_error(
    x: DecodeArguments, k: Tensor, v: Tensor, position: int, write: Callable[[], None], codec: LayerCodec
) -> float:
    """Error of the last request's page that ``write`` completes, over that of the oracle's page of the same rows."""
    rows = torch.arange(position + 1 - PAGE, position + 1, device=k.device) % RING
    raw = []
    for ring, new in ((x.windows.ring_k, k), (x.windows.ring_v, v)):
        part = ring[-1][:, rows].clone()
        part[:, -1] = new[-1, :, 0]
        raw.append(part.float().cpu()[None])
    write()
    got = codec.decode(x.pages[x.block_table[-1, position // PAGE].long()].cpu()[None])
    want = codec.decode(codec.encode(raw[0], raw[1]))
    ratios = [relative_error(a, r) / relative_error(b, r) for a, b, r in zip(got, want, raw, strict=True)]
    for ring, part in ((x.windows.ring_k, raw[0]), (x.windows.ring_v, raw[1])):
        if not torch.equal(ring[-1][:, rows[-1]].float().cpu(), part[0, :, -1]):
            return float("inf")  # the new token's raw row is not in the ring
    return max(ratios) ** 2 if max(ratios) > 1.02 else 1.0  # one page is a small sample: ties decide below that


def compare_codes(written: tuple[Any, ...], codec: LayerCodec, layout: PageLayout) -> dict[str, float]:
    """Rows of sampled pages whose codes differ from the oracle's (percent), and squared errors over the oracle's."""
    k, v, pages, table = written[:4]
    full = k.shape[2] // PAGE
    picked = sorted({1 + round(i * (full - 2) / (CHECKED_PAGES - 1)) for i in range(CHECKED_PAGES)})
    picked = [p for p in picked if p < full]

    def whole(x: Tensor) -> Tensor:
        return torch.stack([x[0, :, p * PAGE : (p + 1) * PAGE] for p in picked]).float().cpu()

    raw = whole(k), whole(v)
    got = pages[table[0, picked].long()].cpu()
    want = codec.encode(*raw)
    out: dict[str, float] = {}
    sides = zip("kv", read_pages(layout, got), read_pages(layout, want), (codec.k, codec.v), raw, strict=True)
    for name, a, b, side, x in sides:
        other = (a.code != b.code).any(-1) | (a.step != b.step) | (a.zero != b.zero)
        out[f"{name}_rows_off_percent"] = 100 * float((a.code != b.code).any(-1).float().mean())
        out[f"{name}_rows_or_scales_off_percent"] = 100 * float(other.float().mean())
        true = side.apply(x).double()
        errors = [q.dequantise(torch.float64) - true for q in (a, b)]
        if name == "k" and codec.weight is not None:
            cost = [float((e @ codec.weight.matrix.double() * e).sum()) for e in errors]
        else:
            cost = [float(e.square().sum()) for e in errors]
        out[f"{name}_error_ratio"] = cost[0] / cost[1]
    return out
