#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quality on a GPU machine without a network: the model arrives in parts, results leave as one JSON file.

Every step takes --work (models, moments; stays on the machine) and the measuring ones --out (figures; brought back).
A step that is repeated goes on where it stopped: what the results file holds of the same artifact is not done again.

    quality_gpu.py join PARTS --work DIR --sha256 HEX     put the parts of a GGUF file together as they come
    quality_gpu.py calibrate --work DIR --out DIR         moments over the shipped calibration texts
    quality_gpu.py language --work DIR --out DIR          KL and perplexity of every recipe
    quality_gpu.py needles --work DIR --out DIR           retrieval
    quality_gpu.py fast --work DIR                        fast emulation against fp32: what it changes, what it costs
    quality_gpu.py all --work DIR --out DIR               calibrate, fast, language, needles, in one process
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import oscar_kv  # noqa: F401
except ImportError:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from oscar_kv.artifact import Artifact
from oscar_kv.calibration import Moments, chunks, collect
from oscar_kv.calibration.data import load_texts
from oscar_kv.evaluation.emulation import Emulation
from oscar_kv.evaluation.language import REFERENCE, evaluate, summarise, tokenise
from oscar_kv.evaluation.needles import Haystack, Retrieval, retrieve
from oscar_kv.evaluation.results import NeedleRow, QualityRow, Results, Row, make_meta, merge, needle_row, read, write
from oscar_kv.evaluation.run import KINDS, evaluation_texts, fit_all, haystack_texts, quality_rows, subjects_of
from oscar_kv.integrations.transformers.loading import load_model

RECIPES = "naive,quarot,oscar-paper,k2v2-plain,k2v1,k2v2,k3v2,k3v3,k4v4"
BATCH = 16
"""Needle samples between two writes of the results file."""


def join(parts: Path, work: Path, sha256: str | None, expected: int | None) -> Path | None:
    """Append the parts that lie in ``parts`` to those seen before; the model file once all ``expected`` are there."""
    store = work / "parts"
    store.mkdir(parents=True, exist_ok=True)
    for part in sorted(p for p in parts.iterdir() if p.suffix[1:].isdigit()):
        shutil.copyfile(part, store / part.name)
    have = sorted(store.iterdir())
    print(
        f"{len(have)} parts{f' of {expected}' if expected else ''}: {', '.join(p.suffix[1:] for p in have)}", flush=True
    )
    if not have or (expected is not None and len(have) < expected):
        return None
    numbers = [int(p.suffix[1:]) for p in have]
    if numbers != list(range(len(numbers))):
        raise SystemExit(f"parts are missing: have {numbers}")
    target = work / have[0].stem
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for part in have:
            data = part.read_bytes()
            digest.update(data)
            out.write(data)
    if sha256 and digest.hexdigest() != sha256:
        raise SystemExit(f"{target.name}: sha256 is {digest.hexdigest()}, expected {sha256}; parts stay in {store}")
    shutil.rmtree(store)
    print(f"joined {target.name}, {target.stat().st_size:,} bytes, sha256 {digest.hexdigest()}", flush=True)
    return target


class Session:
    """What the steps share in one process: model, artifacts, results file, clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self._model: Any = None
        self._moments: Moments | None = None
        self._fitted: dict[str, Artifact] = {}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    @property
    def model_path(self) -> Path:
        if self.options.model:
            return Path(self.options.model)
        found = sorted(self.options.work.glob("*.gguf"))
        if len(found) != 1:
            raise SystemExit(f"{self.options.work}: {len(found)} .gguf files; join the parts first, or pass --model")
        return found[0]

    @property
    def name(self) -> str:
        return self.options.name or self.model_path.name.removesuffix(".gguf")

    def model(self) -> tuple[Any, Any]:
        if self._model is None:
            source = self.model_path
            ready = self.options.work / f"{source.name}.folder"
            if source.suffix == ".gguf" and ready.exists():
                source = ready
            self._model = load_model(str(source), self.options.dtype, self.options.device)
            if source.suffix == ".gguf":  # de-quantising takes a minute: keep the result for the next call
                part = ready.with_name(ready.name + ".part")
                shutil.rmtree(part, ignore_errors=True)
                for piece in self._model:
                    piece.save_pretrained(part)
                part.rename(ready)
            net = self._model[0]
            size = sum(p.numel() for p in net.parameters()) / 1e9
            self.say(f"{self.name}: {size:.2f} B parameters, {net.dtype}, {net.device}")
        return self._model  # type: ignore[no-any-return]

    def moments(self) -> Moments:
        file = self.options.work / f"{self.name}.{self.options.tokens}.{self.options.chunk}.moments.safetensors"
        if self._moments is None and file.exists():
            self._moments = Moments.load(file)
        if self._moments is None:
            net, tokenizer = self.model()
            pieces = []
            for kind in KINDS:
                pieces += chunks(load_texts(f"builtin:{kind}"), tokenizer, self.options.tokens, self.options.chunk)
            self._moments = collect(net, pieces, progress=False, model_id=self.name, data="builtin (code and prose)")
            self._moments.save(file)
            sizes = sorted({len(p) for p in pieces})
            self.say(f"calibrated on {self._moments.meta.tokens:,} tokens, {len(pieces)} chunks of {sizes} tokens")
        return self._moments

    def artifacts(self, recipes: Sequence[str]) -> dict[str, Artifact]:
        """Fitted once a process; full precision among the names has none."""
        wanted = [r for r in recipes if r != REFERENCE]
        self._fitted |= fit_all(self.moments(), [r for r in wanted if r not in self._fitted])
        return {name: self._fitted[name] for name in wanted}

    @property
    def file(self) -> Path:
        return Path(self.options.out / self.options.file)

    def rows(self) -> list[Row]:
        return read(self.file).rows if self.file.exists() else []

    def add(self, rows: Sequence[Row]) -> None:
        """Put rows into the results file; rows of the same key are replaced."""
        o = self.options
        how = "history by fp16 flash attention" if o.fast else "fp32"
        meta = make_meta(
            self.name,
            commit_id=o.commit,
            artifact_sha256=self.artifacts(["k2v2"])["k2v2"].sha256,
            seed=o.seed,
            device=str(self.model()[0].device),
            notes=f"exact emulation ({how}), {o.dtype} model; KL and perplexity over positions >= 512; calibration: "
            f"{self.moments().meta.tokens} tokens of the shipped texts",
        )
        runs = [read(self.file)] if self.file.exists() else []
        merged = merge([*runs, Results(meta=meta, rows=list(rows))])
        write(self.file, merged.meta, merged.rows)


def calibrate(session: Session) -> None:
    session.model()
    session.moments()


def fast(session: Session) -> None:
    """Fast emulation against fp32 on one text: KL of both, time of both."""
    net, tokenizer = session.model()
    (text,) = tokenise(evaluation_texts("prose", 1), "prose", tokenizer, session.options.context)
    for recipe, artifact in session.artifacts(["k2v2-plain", "k2v2"]).items():
        for mode in (False, True) if net.device.type == "cuda" else (False,):
            entry = {recipe: Emulation.of(artifact, net, fast=mode)}
            evaluate(net, [text], entry)
            began = time.monotonic()
            (result,) = evaluate(net, [text], entry)
            took = time.monotonic() - began
            how = f"{recipe:12s} {'fast' if mode else 'fp32'}"
            session.say(f"{how}: KL {result.kl:.6f}, PPL {result.ppl:.5f}, {took:.2f} s with full precision")
            if net.device.type == "cuda":
                session.say(f"             peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def language(session: Session) -> None:
    """Text by text would save the full-precision pass, recipe by recipe can be resumed: kinds are the unit."""
    o = session.options
    net, tokenizer = session.model()
    for kind in KINDS:
        old = [r for r in session.rows() if isinstance(r, QualityRow)]
        done = {(r.recipe, r.artifact_sha256) for r in old if (r.dataset, r.context) == (kind, o.context)}
        subjects = {
            name: a
            for name, a in subjects_of(session.artifacts(o.recipes.split(","))).items()
            if (name, None if a is None else a.sha256) not in done
        }
        if not subjects:
            continue
        texts = tokenise(evaluation_texts(kind, o.texts), kind, tokenizer, o.context)
        results = evaluate(net, texts, subjects, fast=o.fast)
        session.add(quality_rows(results, subjects, o.seed))
        for s in summarise(results):
            change = f"{100 * (s.ppl / s.ppl_reference - 1):+6.2f} %"
            name = f"{kind:6s} {s.recipe:12s}"
            session.say(f"{name} KL {s.kl:8.4f}  PPL {s.ppl:10.4f} ({change})  top-1 {100 * s.top1:5.1f} %")


def needles(session: Session) -> None:
    """A few samples of every recipe at a time, so that a stopped run has paired samples."""
    o = session.options
    net, tokenizer = session.model()
    hay = Haystack(haystack_texts(), tokenizer, o.needle_context, o.seed)
    names = o.needle_recipes.split(",")
    subjects: dict[str, Emulation | None] = {
        name: None if a is None else Emulation.of(a, net, fast=o.fast)
        for name, a in subjects_of(session.artifacts(names)).items()
        if name in names
    }
    hashes = {name: None if s is None else s.artifact.sha256 for name, s in subjects.items()}
    for recipe, first, right in _batches(session, hashes):
        samples = [hay.sample(i) for i in range(first, min(first // BATCH * BATCH + BATCH, o.samples))]
        began = time.monotonic()
        (run,) = retrieve(net, samples, {recipe: subjects[recipe]}, prefill=o.prefill, fast=o.fast)
        row = needle_row(Retrieval(recipe, o.needle_context, right + run.right), "prose", o.prefill, hashes[recipe])
        session.add([row])
        low, high = row.ci95
        each = (time.monotonic() - began) / len(samples)
        found = f"{round(row.score * row.n):3d} of {row.n:3d} ({100 * low:.0f} to {100 * high:.0f} %)"
        session.say(f"needles {recipe:12s} {found}  {each:.2f} s a sample")


def _batches(session: Session, hashes: Mapping[str, str | None]) -> Iterator[tuple[str, int, list[bool]]]:
    """(recipe, first sample, what is known of the samples before it) of what is still to do."""
    o = session.options
    for first in range(0, o.samples, BATCH):
        for recipe, sha256 in hashes.items():
            wanted = recipe, o.needle_context, o.prefill, sha256
            rows = [r for r in session.rows() if isinstance(r, NeedleRow)]
            known = [r.right for r in rows if (r.recipe, r.context, r.prefill, r.artifact_sha256) == wanted]
            right = [c == "1" for c in known[0]] if known else []
            if first <= len(right) < min(first + BATCH, o.samples):
                yield recipe, len(right), right


def everything(session: Session) -> None:
    for step in (calibrate, fast, language, needles):
        step(session)


STEPS = {"calibrate": calibrate, "language": language, "needles": needles, "fast": fast, "all": everything}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    joining = steps.add_parser("join")
    joining.add_argument("parts", type=Path)
    joining.add_argument("--work", type=Path, required=True)
    joining.add_argument("--sha256")
    joining.add_argument("--expected", type=int, help="how many parts there are in all")
    for name in STEPS:
        step = steps.add_parser(name)
        step.add_argument("--work", type=Path, required=True)
        step.add_argument("--out", type=Path, default=Path("benchmarks/results"))
        step.add_argument("--file", default="quality_qwen.json")
        step.add_argument("--model", help="folder or .gguf file instead of the joined one")
        step.add_argument("--name", help="what results call the model")
        step.add_argument("--dtype", default="bfloat16")
        step.add_argument("--device", default="auto")
        step.add_argument("--tokens", type=int, default=16384, help="calibration tokens of each kind")
        step.add_argument("--chunk", type=int, default=8192)
        step.add_argument("--context", type=int, default=8192)
        step.add_argument("--texts", type=int, default=4, help="evaluation texts of each kind")
        step.add_argument("--recipes", default=RECIPES)
        step.add_argument("--needle-recipes", default="bf16,k2v2,k2v2-plain")
        step.add_argument("--needle-context", type=int, default=24576)
        step.add_argument("--samples", type=int, default=128)
        step.add_argument("--prefill", choices=("strict", "exact"), default="strict")
        step.add_argument("--seed", type=int, default=0)
        step.add_argument("--commit", help="the checkout's commit, where the copy that runs has no .git")
        step.add_argument("--fast", action="store_true", help="history by flash attention with fp16 operands")
    options = parser.parse_args(arguments)
    if options.step == "join":
        join(options.parts, options.work, options.sha256, options.expected)
        return
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    STEPS[options.step](Session(options))


if __name__ == "__main__":
    main()
