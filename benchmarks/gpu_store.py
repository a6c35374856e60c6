# SPDX-License-Identifier: Apache-2.0
"""Writing and de-quantising pages on one GPU: check against the reference codec, then time.

    python benchmarks/gpu_store.py --out store_h200.json
    python benchmarks/gpu_store.py --compile-only 9.0     # fill the kernel cache without a GPU
    python benchmarks/gpu_store.py --parts checks,prompt   # some of it only

Every time is the median over replays of one CUDA graph that calls the operation on several input sets in turn. Shares
are of the copy bandwidth measured in this run; bytes are those that a call must read and write: at d = 128 and 2/2 bits
512 + 72 a token and KV head.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkout import ROOT
from store_reference import difference, encode_prompt, in_double, random_codec, random_rows, weighted_error

from oscar_kv.bench.shapes import RING, SINK
from oscar_kv.bench.timing import copy_bandwidth, time_graph
from oscar_kv.kernels.base import StoreTables, Windows
from oscar_kv.kernels.cuda.compiler import compile_cached
from oscar_kv.kernels.cuda.dequantise import DEQUANTISE_HEADERS, CudaDequantise, DequantiseSpec
from oscar_kv.kernels.cuda.store import CudaStore
from oscar_kv.kernels.cuda.store_spec import STORE_HEADERS, StoreSpec
from oscar_kv.layout import PAGE, PageLayout, read_pages

PARTS = ("checks", "copy", "steps", "prompt", "tune", "dequantise")
DEVICE = "cuda"
K2V2 = PageLayout(128, 128, 2, 2)
HEADS = 8
Tuning = dict[str, int]


@dataclass(frozen=True)
class Config:
    """One specialisation to check or time."""

    layout: PageLayout = K2V2
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=dict)

    def __str__(self) -> str:
        s = self.layout
        extra = {**self.options, **self.tuning}
        return f"dk{s.k_dim} dv{s.v_dim} {s.k_bits}/{s.v_bits} {str(self.dtype)[6:]}{f' {extra}' if extra else ''}"

    def spec(self, capability: tuple[int, int]) -> StoreSpec:
        some = torch.zeros(1)
        rotated, shaped = self.options.get("rotate", True), self.options.get("shaping", True)
        tables = StoreTables(
            some if rotated else None, some, some if rotated else None, some, some if shaped else None,
            some if shaped else None, self.options.get("unbiased", True),
        )  # fmt: skip
        return StoreSpec.choose(self.layout, self.dtype, tables, capability, **self.tuning)


PLAIN = {"shaping": False}
CHECKS = [
    Config(),
    Config(dtype=torch.float16),
    Config(options={"offset": 50.0}),
    Config(options=PLAIN),
    Config(tuning={"tiles": 1, "value_tiles": 2}),
    Config(PageLayout(128, 128, 2, 1)),
    Config(PageLayout(128, 128, 3, 3)),
    Config(PageLayout(128, 128, 4, 4)),
    Config(PageLayout(64, 64, 2, 2)),
    Config(PageLayout(80, 112, 3, 1)),
    Config(PageLayout(256, 256, 2, 2)),
    Config(PageLayout(192, 128, 3, 2)),
    Config(options={"unbiased": False}),
    Config(options={"rotate": False, "shaping": False}),
]
TIMED = [Config(), Config(options=PLAIN)]
TUNED = [
    *(Config(tuning=t) for t in (
        {"value_tiles": 2, "value_warps": 8}, {"value_warps": 12}, {"key_pages": 2, "value_pages": 2},
        {"key_pages": 4}, {"tiles": 1, "key_warps": 12},
    )),
    *(Config(options=PLAIN, tuning=t) for t in (
        {"tiles": 2, "key_warps": 8, "value_tiles": 2, "value_warps": 8}, {"key_warps": 12, "value_warps": 12},
        {"key_pages": 2, "value_pages": 2},
    )),
]  # fmt: skip
STEP_CONFIGS = [Config(), Config(options=PLAIN)]
DEQUANTISED = [
    (K2V2, torch.bfloat16),
    (K2V2, torch.float16),
    (PageLayout(128, 128, 3, 2), torch.bfloat16),
    (PageLayout(128, 128, 4, 4), torch.bfloat16),
    (PageLayout(80, 112, 3, 1), torch.float32),
]


class Report:
    """Rows, written after each one: a run that ends early leaves what it measured."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.began, self.copy = file, time.time(), 0.0
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.began:5.1f} s] {text}", flush=True)

    def add(self, op: str, text: str, **values: Any) -> None:
        self.rows.append({"op": op, **values})
        self.say(f"{op}: {text}")
        if not self.file:
            return
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        meta = {
            "command": " ".join(sys.argv), "commit": commit, "date": time.strftime("%Y-%m-%d"),
            "machine": platform.machine(), "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda}, "model": None,
            "artifact_sha256": None, "seed": 0, "copy_tb_s": self.copy, "failed": self.failed,
            "notes": "medians of CUDA-graph replays; bytes: raw rows read or written, and pages",
        }  # fmt: skip
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({"meta": meta, "rows": self.rows}, indent=1) + "\n")

    def tried(self, what: str, call: Any) -> None:
        """One failure must not hide the other parts."""
        try:
            call()
        except Exception as error:  # reported, and the run ends with an error
            traceback.print_exc()
            self.failed.append(f"{what}: {error}")
            self.say(f"FAILED {what}: {error}")


@dataclass
class Inputs:
    """One layer's buffers for a batch of requests."""

    k: torch.Tensor
    v: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    windows: Windows
    tables: StoreTables
    layout: PageLayout

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.k, self.v, self.pages, self.table, self.start, self.count, self.windows, self.tables, self.layout,
        )  # fmt: skip


def inputs(codec: Any, k: torch.Tensor, v: torch.Tensor, start: int, pool_pages: int, first: int) -> Inputs:
    """first: page number that lies in a request's first pool block; earlier ones have none."""
    batch, heads, n, _ = k.shape
    layout = codec.layout
    pages = torch.full((batch * pool_pages, heads, layout.page_bytes), 0xAB, dtype=torch.uint8, device=DEVICE)
    table = torch.full((batch, first + pool_pages), -1, dtype=torch.int32, device=DEVICE)
    numbers = torch.randperm(batch * pool_pages, device=DEVICE).view(batch, pool_pages)
    table[:, first:] = numbers.int()
    ones = torch.ones(batch, dtype=torch.int32, device=DEVICE)

    def window(rows: int, d: int) -> torch.Tensor:
        return torch.randn(batch, heads, rows, d, device=DEVICE).to(k.dtype)

    dk, dv = layout.k_dim, layout.v_dim
    windows = Windows(window(SINK, dk), window(SINK, dv), window(RING, dk), window(RING, dv))
    tables = StoreTables.of(codec, DEVICE)
    return Inputs(k, v, pages, table.contiguous(), ones * start, ones * n, windows, tables, layout)


def check(report: Report, config: Config) -> None:
    """A prompt of 64 pages at once, then its last page again token by token's last step: same bytes as the codec's."""
    heads, tokens, layout = 2, 64 * PAGE, config.layout
    codec = random_codec(layout, heads, device=DEVICE, **config.options)
    k, v = random_rows(codec, 1, tokens, config.dtype)
    x = inputs(codec, k, v, 0, 64, 0)
    store = CudaStore(**config.tuning)
    store(*x.arguments())
    got = x.pages[x.table[0, SINK // PAGE :].long()]
    want, exact = (encode_prompt(c, k, v)[SINK // PAGE :] for c in (codec, in_double(codec)))
    ours, floor, truth = difference(layout, got, want), difference(layout, want, exact), difference(layout, got, exact)
    rows = k[:, :, SINK:]
    ratio = weighted_error(codec, rows, got) / weighted_error(codec, rows, want)
    untouched = bool((x.pages[x.table[0, : SINK // PAGE].long()] == 0xAB).all())
    w = x.windows
    place = torch.arange(tokens - RING, tokens, device=DEVICE) % RING
    windows = all(
        torch.equal(sink, y[:, :, :SINK]) and torch.equal(ring[:, :, place], y[:, :, tokens - RING :])
        for sink, ring, y in ((w.sink_k, w.ring_k, k), (w.sink_v, w.ring_v, v))
    )
    # The same page as at decode: 63 rows in the ring, the 64th comes.
    before = x.pages.clone()
    x.pages[x.table[0, -1]] = 0xCD
    one = torch.ones_like(x.count)
    store(k[:, :, -1:], v[:, :, -1:], x.pages, x.table, one * (tokens - 1), one, w, x.tables, layout)
    same = torch.equal(before, x.pages)
    good = max(ours.k_rows, ours.v_rows) <= 1e-3 and ours.pairs <= 1e-3 and abs(ratio - 1) < 1e-3
    good = good and untouched and windows and same
    report.add(
        "check",
        f"{'ok  ' if good else 'FAIL'} {config}: rows with other codes K {ours.k_rows:.1e} V {ours.v_rows:.1e} "
        f"(fp32 oracle against fp64: {floor.k_rows:.1e} {floor.v_rows:.1e}; ours against fp64: {truth.k_rows:.1e} "
        f"{truth.v_rows:.1e}), pairs off {ours.pairs:.1e}, weighted error x{ratio:.6f}"
        f"{'' if untouched else ', PAGES OF THE SINK TOUCHED'}{'' if windows else ', WINDOWS WRONG'}"
        f"{'' if same else ', DECODE STEP WROTE OTHER BYTES'}",
        config=str(config), good=good, k_rows=ours.k_rows, v_rows=ours.v_rows, oracle_k_rows=floor.k_rows,
        oracle_v_rows=floor.v_rows, exact_k_rows=truth.k_rows, exact_v_rows=truth.v_rows, pairs=ours.pairs,
        weighted_error_ratio=ratio,
    )  # fmt: skip
    if not good:
        report.failed.append(f"check {config}")


def steps(report: Report, config: Config, batch: int, layers: int = 36) -> None:
    """A decode step's write: without a page, and with one in all requests; layers in turn."""
    codec = random_codec(config.layout, HEADS, device=DEVICE, **config.options)
    k, v = random_rows(codec, batch, 1, config.dtype)
    every = [inputs(codec, k.clone(), v.clone(), 64 * PAGE - 1, 1, 63) for _ in range(layers)]
    store, times = CudaStore(**config.tuning), {}
    for name, start in (("page", 64 * PAGE - 1), ("no page", 64 * PAGE - 20)):
        for x in every:
            x.start.fill_(start)
            store(*x.arguments())
        torch.cuda.synchronize()
        times[name] = 1e3 * time_graph([partial(store, *x.arguments()) for x in every])
    mean = (63 * times["no page"] + times["page"]) / 64
    report.add(
        "step",
        f"{config} batch {batch}: {times['no page']:.2f} us, with a page in every request {times['page']:.2f} us, "
        f"averaged {mean:.2f} us",
        config=str(config), batch=batch, kv_heads=HEADS, no_page_us=times["no page"], page_us=times["page"],
        mean_us=mean,
    )  # fmt: skip


def prompt(report: Report, config: Config, tokens: int = 32768, sets: int = 3) -> None:
    """A prompt's keys and values as a model hands them over: [batch, tokens, heads, d], seen as [batch, heads, ...]."""
    codec = random_codec(config.layout, HEADS, device=DEVICE, **config.options)
    every = []
    for i in range(sets):
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_rows(codec, 1, tokens, config.dtype, i))
        every.append(inputs(codec, k, v, 0, tokens // PAGE, 0))
    store = CudaStore(**config.tuning)
    for x in every:
        store(*x.arguments())
    torch.cuda.synchronize()
    ms = time_graph([partial(store, *x.arguments()) for x in every], replays=9)
    layout = config.layout
    size = tokens * HEADS * (2 * (layout.k_dim + layout.v_dim) + layout.page_bytes / PAGE)
    share = size / ms / 1e9 / report.copy if report.copy else None
    report.add(
        "prompt",
        f"{config} {tokens} tokens x {HEADS} heads: {ms:.3f} ms, {tokens * HEADS / ms / 1e6:.3f} G token-heads/s, "
        f"share {share or 0:.3f}",
        config=str(config), tokens=tokens, kv_heads=HEADS, ms=ms, bytes=size, share=share,
    )  # fmt: skip


def dequantise(report: Report, layout: PageLayout, dtype: torch.dtype, tokens: int = 65536, sets: int = 3) -> None:
    g = torch.Generator(device=DEVICE).manual_seed(0)
    n, every = tokens // PAGE, []
    for _ in range(sets):
        pages = torch.randint(0, 256, (n, HEADS, layout.page_bytes), dtype=torch.uint8, device=DEVICE, generator=g)
        meta = torch.rand(n, HEADS, 256, device=DEVICE, generator=g).half()
        pages[..., layout.metadata_offset :] = meta.view(torch.uint8).view(n, HEADS, -1)
        blocks = torch.randperm(n, device=DEVICE, generator=g).int()[None]
        k, v = (torch.empty(1, tokens, HEADS, d, dtype=dtype, device=DEVICE) for d in (layout.k_dim, layout.v_dim))
        every.append((pages, blocks, layout, k, v))
    call = CudaDequantise()
    for x in every:
        call(*x)
    pages, blocks, _, k, v = every[0]
    good = True
    for got, q in zip((k, v), read_pages(layout, pages[blocks[0, :64].long()]), strict=True):
        want = q.dequantise(torch.float32).transpose(1, 2).flatten(0, 1).to(dtype)
        good &= torch.equal(got[0, : 64 * PAGE], want)
    ms = time_graph([partial(call, *x) for x in every])
    width = torch.empty(0, dtype=dtype).element_size()
    size = tokens * HEADS * (width * (layout.k_dim + layout.v_dim) + layout.page_bytes / PAGE)
    share = size / ms / 1e9 / report.copy if report.copy else None
    label = f"dk{layout.k_dim} dv{layout.v_dim} {layout.k_bits}/{layout.v_bits} {str(dtype)[6:]}"
    report.add(
        "dequantise",
        f"{'ok  ' if good else 'FAIL'} {label} {tokens} tokens x {HEADS} heads: {ms:.3f} ms, share {share or 0:.3f}",
        config=label, good=good, tokens=tokens, kv_heads=HEADS, ms=ms, bytes=size, share=share,
    )  # fmt: skip
    if not good:
        report.failed.append(f"dequantise {label}")


def compile_only(capability: tuple[int, int], parts: list[str]) -> None:
    wanted = [
        *(CHECKS if "checks" in parts else []),
        *(STEP_CONFIGS if "steps" in parts else []),
        *(TIMED if "prompt" in parts else []),
        *(TUNED if "tune" in parts else []),
    ]
    stores = {c.spec(capability).header: str(c) for c in wanted}
    jobs = [("store.cu", header, STORE_HEADERS) for header in stores]
    if "dequantise" in parts:
        jobs += [("dequantise.cu", DequantiseSpec(s, t, capability).header, DEQUANTISE_HEADERS) for s, t in DEQUANTISED]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda j: compile_cached(j[0], j[1], capability, j[2]), jobs))
    print(f"{len(jobs)} specialisations compiled for sm_{capability[0]}{capability[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile-only", metavar="CAPABILITY")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--some-checks", type=int, default=len(CHECKS), help="the first so many only")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if args.compile_only:
        major, minor = args.compile_only.split(".")
        compile_only((int(major), int(minor)), parts)
        return
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False  # the oracle's products are fp32
    report = Report(args.out)
    report.say(f"{torch.cuda.get_device_name()} {torch.__version__}")
    if "checks" in parts:
        for c in CHECKS[: args.some_checks]:
            report.tried(f"check {c}", partial(check, report, c))
    if "copy" in parts:
        report.copy = copy_bandwidth(DEVICE)
        report.say(f"copy {report.copy:.2f} TB/s")
    if "steps" in parts:
        for c in STEP_CONFIGS:
            for batch in (1, 8, 32):
                report.tried(f"step {c} {batch}", partial(steps, report, c, batch))
                torch.cuda.empty_cache()
    for part, configs in (("prompt", TIMED), ("tune", TUNED)):
        for c in configs if part in parts else []:
            report.tried(f"prompt {c}", partial(prompt, report, c))
            torch.cuda.empty_cache()
    if "dequantise" in parts:
        for layout, dtype in DEQUANTISED:
            report.tried(f"dequantise {layout} {dtype}", partial(dequantise, report, layout, dtype))
    report.say(f"{len(report.failed)} failures {report.failed or ''}")
    if report.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
