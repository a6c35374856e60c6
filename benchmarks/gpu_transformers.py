#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""OscarCache on a GPU's kernels, in Transformers: answers against the reference path, then a real model's.

    gpu_transformers.py tiny --out DIR                            random models: every way a cache is used; errors
    gpu_transformers.py qwen --model M --artifact A --out DIR     teacher-forced agreement, KL, tokens/s at 32K

--model: folder or .gguf. Without --artifact the model is calibrated on the package's texts first. --parts names the
parts to run, comma-separated; a part that fails is reported and the next one runs. --device cpu tries the script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import oscar_kv  # noqa: F401
except ImportError:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from oscar_kv import OscarCache, enable
from oscar_kv.artifact import Artifact
from oscar_kv.integrations.transformers import disable
from oscar_kv.integrations.transformers.compat import cache_argument
from oscar_kv.kernels import dense
from oscar_kv.kernels.torch_set import kernel_set

Result = dict[str, Any]


class Bench:
    """Where it runs, what is chosen, what has been found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.kernels: Any = options.kernels if self.device.type == "cuda" else kernel_set()
        self.dtype = torch.bfloat16
        self.results: list[Result] = []
        self.file = options.out / options.file

    def part(self, name: str, work: Callable[[], Result | list[Result]]) -> None:
        """Run one part; whatever happens, write down what is known."""
        if self.options.parts and name.split(":")[0] not in self.options.parts.split(","):
            return
        began = time.monotonic()
        try:
            found = work()
            rows = found if isinstance(found, list) else [found]
        except Exception as error:
            traceback.print_exc(limit=12)
            rows = [{"failed": f"{type(error).__name__}: {str(error)[:600]}"}]
        for row in rows:
            row = {"part": name, **row, "seconds": round(time.monotonic() - began, 1)}
            print(json.dumps(row), flush=True)
            self.results.append(row)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        about = {"torch": torch.__version__, "device": str(self.device), "dense": dense.chosen(self.device)}
        if self.device.type == "cuda":
            about["gpu"] = torch.cuda.get_device_name()
            torch.cuda.empty_cache()
        self.file.write_text(json.dumps({"meta": about, "rows": self.results}, indent=1) + "\n")


def forward(model: Any, ids: Tensor, cache: Any, keep: int = 0, **extra: Any) -> Tensor:
    """Logits [rows, n or keep, vocabulary]."""
    if keep:
        extra["logits_to_keep"] = keep
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{cache_argument(): cache}, **extra).logits


def take_state(to: OscarCache, source: OscarCache, pages_only: bool = False) -> None:
    """Give a cache another one's codes (and windows): both hold the same tokens."""
    for a, b in zip(to.packed_layers, source.packed_layers, strict=True):
        mine, theirs = a.store, b.store
        for row in range(mine.rows):
            places = mine.pool.tables[row]
            if places:
                data = theirs.pool.read(row, 0, len(places)).to(mine.device)
                mine.pool.pages[torch.tensor(places, device=mine.device)] = data
        if not pages_only:
            for name in ("sink_k", "sink_v", "ring_k", "ring_v"):
                getattr(mine, name).copy_(getattr(theirs, name))


def bytes_that_differ(a: OscarCache, b: OscarCache) -> float:
    """Share of the pages' bytes."""
    other = total = 0
    for x, y in zip(a.packed_layers, b.packed_layers, strict=True):
        p, q = x.store.state()["pages"], y.store.state()["pages"]
        other, total = other + int((p != q).sum()), total + p.numel()
    return other / max(1, total)


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def agreement(got: Tensor, wanted: Tensor) -> float:
    return float((got.argmax(-1) == wanted.argmax(-1)).double().mean())


# --- random models


def tiny_model(bench: Bench, family: str, **fields: Any) -> tuple[Any, Artifact]:
    import tiny

    size = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 1536, **fields}
    m = tiny.model(family, bench.dtype, **size).to(bench.device)
    with torch.no_grad():
        for weight in m.parameters():
            if weight.ndim == 2:
                weight.div_(6.0 if weight.shape[-1] > 64 else 1.0)  # wide layers need no help to be unlike flat
    artifact = tiny.artifact_of(m, bench.options.recipe)
    return enable(m, artifact, kernels=bench.kernels), artifact


def pair(bench: Bench, m: Any, artifact: Artifact, **fixed: Any) -> tuple[OscarCache, OscarCache]:
    """On kernels, and on the reference path, same device."""
    return OscarCache(artifact, m.config, kernels=bench.kernels, **fixed), OscarCache(
        artifact, m.config, kernels="torch"
    )


def token_by_token(bench: Bench, family: str, rows: int, padded: bool) -> Result:
    """Decode with the same codes and windows on both sides, step by step."""
    import tiny

    m, artifact = tiny_model(bench, family)
    prompt, steps = 700, bench.options.steps
    ids = tiny.tokens(rows, prompt + steps).to(bench.device)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :290] = 0
        mask[-1, :33] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ours, reference = pair(bench, m, artifact)

    def feed(cache: Any, start: int, stop: int) -> Tensor:
        part = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        return forward(m, ids[:, start:stop], cache, **part)

    feed(ours, 0, prompt), feed(reference, 0, prompt)
    codes = bytes_that_differ(ours, reference)
    errors, same = [], []
    for at in range(prompt, prompt + steps):
        take_state(reference, ours)
        got, wanted = feed(ours, at, at + 1), feed(reference, at, at + 1)
        errors.append(relative(got, wanted))
        same.append(agreement(got, wanted))
    take_state(reference, ours)
    got, wanted = feed_chunk(m, ours, 9), feed_chunk(m, reference, 9)
    return {
        "family": family, "rows": rows, "padded": padded, "error_mean": sum(errors) / len(errors),
        "error_max": max(errors), "top1": sum(same) / len(same), "prompt_bytes_that_differ": codes,
        "short_chunk_error": relative(got, wanted) if not padded else None, "kernels": ours.describe()["kernels"],
    }  # fmt: skip


def feed_chunk(m: Any, cache: OscarCache, n: int) -> Tensor | None:
    """A few more tokens at once, as drafts are verified."""
    import tiny

    rows = cache.packed_layers[0].store.rows
    if cache.slots.mask is not None:
        return torch.zeros(1)
    return forward(m, tiny.tokens(rows, n, seed=5).to(m.device), cache)


def long_chunk(bench: Bench, family: str) -> Result:
    """A long chunk over a packed prefix: dense tiles against the reference."""
    import tiny

    m, artifact = tiny_model(bench, family)
    prefix, chunk = bench.options.prefix, bench.options.chunk
    ids = tiny.tokens(1, prefix + chunk).to(bench.device)
    ours, reference = pair(bench, m, artifact)
    forward(m, ids[:, :prefix], ours), forward(m, ids[:, :prefix], reference)
    take_state(reference, ours)
    got, wanted = forward(m, ids[:, prefix:], ours), forward(m, ids[:, prefix:], reference)
    return {
        "family": family, "prefix": prefix, "chunk": chunk, "error": relative(got, wanted),
        "top1": agreement(got, wanted), "chunk_bytes_that_differ": bytes_that_differ(ours, reference),
        "dense": dense.chosen(bench.device),
    }  # fmt: skip


def fixed_length(bench: Bench, family: str, rows: int) -> list[Result]:
    """Caches of fixed length: eager, one CUDA graph, compiled; all against a growing cache, token by token."""
    import tiny

    m, artifact = tiny_model(bench, family)
    prompt, steps = 700, bench.options.steps
    ids = tiny.tokens(rows, prompt + steps).to(bench.device)
    growing = OscarCache(artifact, m.config, kernels=bench.kernels)
    forward(m, ids[:, :prompt], growing)
    wanted = torch.cat([forward(m, ids[:, i : i + 1], growing) for i in range(prompt, prompt + steps)], 1)

    def fresh() -> OscarCache:
        cache = OscarCache(artifact, m.config, kernels=bench.kernels, max_cache_len=prompt + steps + 64)
        forward(m, ids[:, :prompt], cache)
        return cache

    def result(how: str, got: Tensor, cache: OscarCache) -> Result:
        return {
            "family": family, "rows": rows, "how": how, "error": relative(got, wanted), "top1": agreement(got, wanted),
            "tokens": int(cache.get_seq_length()),
        }  # fmt: skip

    def eager() -> Result:
        cache = fresh()
        return result(
            "eager", torch.cat([forward(m, ids[:, i : i + 1], cache) for i in range(prompt, prompt + steps)], 1), cache
        )

    def graph() -> Result:
        cache, token = fresh(), ids[:, prompt : prompt + 1].clone()
        first = forward(m, token, cache)  # also the warm-up: kernels are compiled and tables prepared
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        captured = torch.cuda.CUDAGraph()
        token.copy_(ids[:, prompt + 1 : prompt + 2])
        with torch.cuda.graph(captured):  # recorded, not run
            out = forward(m, token, cache)
        answers = [first]
        for i in range(prompt + 1, prompt + steps):
            token.copy_(ids[:, i : i + 1])
            captured.replay()
            answers.append(out.clone())
        return result("CUDA graph", torch.cat(answers, 1), cache)

    def compiled(mode: str | None, backend: str) -> Result:
        torch._dynamo.reset()
        run = torch.compile(m, fullgraph=True, mode=mode, backend=backend)
        cache = fresh()
        held = torch.cuda.memory_allocated() if bench.device.type == "cuda" else 0
        answers = [forward(run, ids[:, i : i + 1], cache).clone() for i in range(prompt, prompt + steps)]
        more = torch.cuda.memory_allocated() - held if bench.device.type == "cuda" else 0
        return {**result(f"compiled, {mode or backend}", torch.cat(answers, 1), cache), "bytes_more": more,
                "page_bytes": cache.memory()["pages"]}  # fmt: skip

    ways: list[Callable[[], Result]] = [eager]
    if bench.device.type == "cuda":
        ways += [graph, lambda: compiled("reduce-overhead", "inductor")]
    else:
        ways += [lambda: compiled(None, "aot_eager")]
    rows_found = []
    for way in ways:
        try:
            rows_found.append(way())
        except Exception as error:
            traceback.print_exc(limit=12)
            rows_found.append({"failed": f"{type(error).__name__}: {str(error)[:600]}"})
    return rows_found


def generated(bench: Bench, family: str) -> Result:
    """Plain ``generate``: growing, and fixed (which Transformers compiles by itself on a GPU)."""
    import tiny

    m, artifact = tiny_model(bench, family)
    ids = tiny.tokens(2, 600).to(bench.device)
    mask = torch.ones_like(ids)
    mask[1, :200] = 0
    outs = []
    for length in (None, 700):
        cache = OscarCache(artifact, m.config, kernels=bench.kernels, max_cache_len=length)
        outs.append(
            m.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False, **{cache_argument(): cache})
        )
    return {"family": family, "same_tokens": float((outs[0] == outs[1])[:, 600:].double().mean())}


def tiny_parts(bench: Bench) -> None:
    for family in bench.options.families.split(","):
        for rows, padded in ((1, False), (4, False), (3, True)):
            bench.part(f"decode:{family}", lambda f=family, r=rows, p=padded: token_by_token(bench, f, r, p))
        bench.part(f"chunk:{family}", lambda f=family: long_chunk(bench, f))
        bench.part(f"fixed:{family}", lambda f=family: fixed_length(bench, f, 2))
        bench.part(f"generate:{family}", lambda f=family: generated(bench, f))


# --- a real model


def kl(logits: Tensor, reference: Tensor) -> float:
    """Mean KL(reference ‖ logits) over positions [n, vocabulary], nats."""
    total = 0.0
    for a, b in zip(logits.split(64), reference.split(64), strict=True):
        p, q = b.float().log_softmax(-1), a.float().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
    return total / len(logits)


def teacher_forced(
    model: Any, artifact: Artifact, ids: Tensor, kernels: Any, prompt: int, oracle_model: Any = None
) -> Result:
    """Agreement of the kernels with the reference path over ids [1, n]: ``prompt`` in one chunk, then slack + 1 at a
    time (read as if decoded one by one). oracle_model: where the reference runs; None: the same model.

    top1_same_codes: both read the reference's pages. kl_own, kl_oracle: to the model with its full-precision cache.
    """
    oracle_model = oracle_model or model
    step, n = artifact.recipe.slack + 1, ids.shape[1]
    spans = [(at, min(at + step, n)) for at in range(prompt, n, step)]
    disable(model)
    with torch.no_grad():
        full = model(input_ids=ids, use_cache=False, logits_to_keep=n - prompt).logits[0].cpu()
    for m in {id(x): x for x in (model, oracle_model)}.values():
        enable(m, artifact)
    config = model.config
    own, fed = (OscarCache(artifact, config, kernels=kernels) for _ in range(2))
    oracle = OscarCache(artifact, config, kernels="torch")
    there = ids.to(oracle_model.device)
    forward(model, ids[:, :prompt], own, 1), forward(model, ids[:, :prompt], fed, 1)
    forward(oracle_model, there[:, :prompt], oracle, 1)
    answers: dict[str, list[Tensor]] = {"own": [], "fed": [], "oracle": []}
    differ = bytes_that_differ_across(own, oracle)
    for start, stop in spans:
        take_state(fed, oracle, pages_only=True)
        answers["oracle"].append(forward(oracle_model, there[:, start:stop], oracle)[0].cpu())
        for name, cache in (("own", own), ("fed", fed)):
            answers[name].append(forward(model, ids[:, start:stop], cache)[0].cpu())
    device = ids.device
    got = {name: torch.cat(parts).to(device) for name, parts in answers.items()}
    full = full.to(device)
    out = {
        "context": n, "positions": n - prompt, "oracle": f"{oracle_model.dtype} on {oracle_model.device}",
        "top1_same_codes": agreement(got["fed"], got["oracle"]), "top1_own_codes": agreement(got["own"], got["oracle"]),
        "kl_own": kl(got["own"], full), "kl_oracle": kl(got["oracle"], full),
        "kl_same_codes_to_oracle": kl(got["fed"], got["oracle"]), "top1_own_to_full": agreement(got["own"], full),
        "top1_oracle_to_full": agreement(got["oracle"], full), "bytes_that_differ": differ,
        "kernels": own.describe()["kernels"],
    }  # fmt: skip
    out["kl_ratio"] = out["kl_own"] / out["kl_oracle"]
    return out


def bytes_that_differ_across(a: OscarCache, b: OscarCache) -> float:
    """The same over two devices."""
    other = total = 0
    for x, y in zip(a.packed_layers, b.packed_layers, strict=True):
        p, q = x.store.state()["pages"], y.store.state()["pages"]
        other, total = other + int((p.cpu() != q.cpu()).sum()), total + p.numel()
    return other / max(1, total)


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        value.cpu()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""


def speed(bench: Bench, model: Any, artifact: Artifact, ids: Tensor, how: str, new: int) -> Result:
    """``generate`` after ids [1, n]: seconds to the first token, and the median time between later ones."""
    from transformers import DynamicCache, StaticCache

    length = ids.shape[1] + new + 8
    ours = how.startswith("oscar")
    if ours:
        enable(model, artifact, kernels=bench.kernels)
        cache = OscarCache(
            artifact, model.config, kernels=bench.kernels, max_cache_len=length if how == "oscar fixed" else None
        )
    else:
        disable(model)
        cache = DynamicCache(config=model.config) if how == "dynamic" else StaticCache(model.config, length)
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock, began = Clock(), time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        streamer=clock, **{cache_argument(): cache},
    )  # fmt: skip
    times = clock.times[1:]  # the first call hands over the prompt
    gaps = sorted(b - a for a, b in zip(times[new // 2 : -1], times[new // 2 + 1 :], strict=True))
    held = cache.nbytes if ours else 2 * sum(
        t.numel() for layer in cache.layers for t in (layer.keys, layer.values) if t is not None
    )  # fmt: skip
    return {
        "how": how, "context": ids.shape[1], "first_token_s": times[0] - began,
        "tokens_per_s": 1 / gaps[len(gaps) // 2], "cache_bytes": held,
        "peak_bytes": torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else None,
        "first_ids": out[0, ids.shape[1] : ids.shape[1] + 8].tolist(),
    }  # fmt: skip


def calibrated(bench: Bench, model: Any, tokenizer: Any) -> Artifact:
    """The given artifact, or one from the package's calibration texts."""
    from oscar_kv.calibration import chunks, collect, fit
    from oscar_kv.calibration.data import load_texts
    from oscar_kv.evaluation.run import KINDS

    if bench.options.artifact:
        return Artifact.load(bench.options.artifact).with_recipe(bench.options.recipe)
    pieces: list[Any] = []
    for kind in KINDS:
        pieces += chunks(load_texts(f"builtin:{kind}"), tokenizer, bench.options.tokens, 4096)
    moments = collect(model, pieces, progress=False, model_id=Path(bench.options.model).name, data="builtin")
    artifact = fit(moments, bench.options.recipe)
    artifact.save(bench.options.out / "gpu_transformers.oscar.safetensors")
    return artifact


def qwen_parts(bench: Bench) -> None:
    from oscar_kv.evaluation.language import tokenise
    from oscar_kv.evaluation.run import evaluation_texts, haystack_texts
    from oscar_kv.integrations.transformers.loading import load_model

    o = bench.options
    o.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(o.model, "bfloat16" if bench.device.type == "cuda" else "float32", str(bench.device))
    artifact = calibrated(bench, model, tokenizer)
    for kind in ("code", "prose"):
        (text,) = tokenise(evaluation_texts(kind, 1), kind, tokenizer, o.context)  # type: ignore[arg-type]
        ids = text.ids[None].to(bench.device)
        bench.part(
            f"forced:{kind}", lambda x=ids: teacher_forced(model, artifact, x, bench.kernels, o.context - o.positions)
        )
        if o.cpu_oracle:
            from copy import deepcopy

            disable(model)
            twin = deepcopy(model).float().to("cpu")
            bench.part(
                f"forced:{kind}, oracle in fp32 on the CPU",
                lambda x=ids, t=twin: teacher_forced(model, artifact, x, bench.kernels, o.context - o.positions, t),
            )
    (text,) = tokenise(haystack_texts(), "prose", tokenizer, o.long)
    ids = text.ids[None].to(bench.device)
    for how in ("dynamic", "oscar", "oscar fixed", "static"):
        bench.part(f"speed:{how}", lambda h=how: speed(bench, model, artifact, ids, h, o.new))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)
    for name, run in (("tiny", tiny_parts), ("qwen", qwen_parts)):
        step = steps.add_parser(name)
        step.set_defaults(run=run)
        step.add_argument("--out", type=Path, default=Path("benchmarks/results"))
        step.add_argument("--file", default=f"transformers_{name}.json")
        step.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        step.add_argument("--kernels", default="cuda", help="cuda or triton")
        step.add_argument("--recipe", default="k2v2")
        step.add_argument("--parts", default="", help="names before the colon, comma-separated; all if left out")
        step.add_argument("--fa3", help="vLLM's FlashAttention-3 extension (.so), loaded before anything runs")
        if name == "tiny":
            step.add_argument("--families", default="llama,qwen2")
            step.add_argument("--steps", type=int, default=100)
            step.add_argument("--prefix", type=int, default=20000)
            step.add_argument("--chunk", type=int, default=1500)
        else:
            step.add_argument("--model", required=True)
            step.add_argument("--artifact")
            step.add_argument("--tokens", type=int, default=16384, help="calibration tokens of each kind")
            step.add_argument("--context", type=int, default=4096)
            step.add_argument("--positions", type=int, default=1024, help="of the context, teacher-forced and compared")
            step.add_argument("--long", type=int, default=32768)
            step.add_argument("--new", type=int, default=96)
            step.add_argument("--cpu-oracle", action="store_true")
    options = parser.parse_args()
    sys.path.insert(
        0, str(Path(__file__).resolve().parents[1] / "tests" / "integrations")
    )  # the random models of the tests
    if options.fa3:
        torch.ops.load_library(options.fa3)
    bench = Bench(options)
    options.run(bench)
    failed = [row["part"] for row in bench.results if "failed" in row]
    print(f"{len(bench.results)} results, failed: {failed or 'none'}; {bench.file}", flush=True)


if __name__ == "__main__":
    main()
