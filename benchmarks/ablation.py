#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each choice inside the preset is worth: KL with one choice changed at a time (exact emulation).

    ablation.py --work DIR --out DIR --file ablation_MODEL.json [--model FOLDER|FILE.gguf] [--context N --chunk N]

Rotations (eigenvectors and Hadamard, or Hadamard alone), which query covariance gives them, one or two rounding passes,
the factor on the step of shaped rounding for each width, and the damping of the error weight.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from quality_gpu import Session

from oscar_kv import codec as codec_module
from oscar_kv import quantizer
from oscar_kv.artifact import Artifact
from oscar_kv.calibration import Moments, fit
from oscar_kv.evaluation.language import evaluate, summarise, tokenise
from oscar_kv.evaluation.results import make_meta
from oscar_kv.evaluation.run import KINDS, evaluation_texts
from oscar_kv.quantizer import ErrorWeight, Quantised
from oscar_kv.recipe import Recipe, get_recipe
from oscar_kv.transform import rotation

FACTORS = {1: (0.7, 0.85, 1.0, 1.15), 2: (1.0, 1.05, 1.1, 1.15, 1.2), 3: (1.0, 1.05, 1.1, 1.15), 4: (1.0, 1.05, 1.1)}


def turned(moments: Moments, base: Artifact, side: str, kind: str, plain: bool = False) -> Artifact:
    """``base`` with the keys' or values' rotation made another way, and the error weight in that basis."""
    layers = {}
    for i, tensors in base.layers.items():
        sums = moments.layers[i]
        if side == "k":
            r = rotation(kind, sums["q_outer" if plain else "uq_outer"])
            weight = quantizer.normalised_weight(sums["uq_outer"], r).float()
            layers[i] = replace(tensors, k=replace(tensors.k, rotation=r.float()), error_weight=weight)
        else:
            r = rotation(kind, sums["wv_outer"])
            layers[i] = replace(tensors, v=replace(tensors.v, rotation=r.float()))
    return Artifact(base.meta, layers)


def damped(moments: Moments, base: Artifact, damping: float) -> Artifact:
    layers = {}
    for i, t in base.layers.items():
        assert t.k.rotation is not None
        weight = quantizer.normalised_weight(moments.layers[i]["uq_outer"], t.k.rotation, damping).float()
        layers[i] = replace(t, error_weight=weight)
    return Artifact(base.meta, layers)


@contextmanager
def step_factor(bits: int, factor: float) -> Iterator[None]:
    before = quantizer.SHAPED_STEP_FACTOR[bits]
    quantizer.SHAPED_STEP_FACTOR[bits] = factor
    try:
        yield
    finally:
        quantizer.SHAPED_STEP_FACTOR[bits] = before


@contextmanager
def two_passes() -> Iterator[None]:
    """Shaped rounding, (step, zero) refitted by least squares under A, shaped rounding again."""
    once = codec_module.quantise

    def quantise(x: torch.Tensor, bits: int, *, weight: ErrorWeight | None = None, **how: Any) -> Quantised:
        first = once(x, bits, weight=weight, **how)
        if weight is None:
            return first
        x, a, c = quantizer.sanitise(x), weight.matrix, first.code.to(x.dtype)
        ones = torch.ones_like(c)
        ca, oa = c @ a, ones @ a
        cc, co, oo, cx, ox = (
            (p * r).sum(-1, keepdim=True) for p, r in ((ca, c), (ca, ones), (oa, ones), (ca, x), (oa, x))
        )
        det = cc * oo - co * co
        step = torch.where(
            det > 1e-4 * cc * oo, (cx * oo - ox * co) / det.clamp(min=1e-9), first.step.to(x.dtype)[..., None]
        )
        step = quantizer.to_step(step)
        zero = quantizer.to_half((ox - step * co) / oo)
        code = quantizer.shaped_codes(x, weight.upper, step, zero, 2**bits - 1)
        step, zero = quantizer.unbiased(x, code, step, zero, a)
        return Quantised(code.to(torch.uint8), step[..., 0].half(), zero[..., 0].half())

    codec_module.quantise = quantise  # type: ignore[assignment]
    try:
        yield
    finally:
        codec_module.quantise = once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--file", required=True)
    for name, kind, default in (
        ("model", str, None), ("name", str, None), ("dtype", str, "bfloat16"), ("device", str, "auto"),
        ("tokens", int, 16384), ("chunk", int, 8192), ("context", int, 8192), ("texts", int, 4), ("seed", int, 0),
        ("commit", str, None),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--fast", action="store_true")
    o = parser.parse_args()
    o.work.mkdir(parents=True, exist_ok=True)
    session = Session(o)
    net, tokenizer = session.model()
    moments = session.moments()
    texts = [t for kind in KINDS for t in tokenise(evaluation_texts(kind, o.texts), kind, tokenizer, o.context)]
    rows: list[dict[str, object]] = []

    def run(label: str, artifact: Artifact) -> None:
        out = {s.kind: s.kl for s in summarise(evaluate(net, texts, {"x": artifact}, fast=o.fast))}
        rows.append({"variant": label, **{f"kl_{kind}": kl for kind, kl in out.items()}})
        session.say(f"{label:36s} " + "  ".join(f"{k} {v:.5f}" for k, v in out.items()))

    base = fit(moments, "k2v2")
    variants: list[tuple[str, Callable[[], Artifact]]] = [
        ("k2v2 as shipped", lambda: base),
        ("keys: Hadamard alone", lambda: turned(moments, base, "k", "hadamard")),
        ("values: Hadamard alone", lambda: turned(moments, base, "v", "hadamard")),
        ("both: Hadamard alone", lambda: turned(moments, turned(moments, base, "k", "hadamard"), "v", "hadamard")),
        ("keys: eigenvectors of the plain C_Q", lambda: turned(moments, base, "k", "eigen", plain=True)),
        ("damping 0.005", lambda: damped(moments, base, 0.005)),
        ("damping 0.06", lambda: damped(moments, base, 0.06)),
    ]
    for label, make in variants:
        run(label, make())
    with two_passes():
        run("two rounding passes", base)
    for bits, factors in FACTORS.items():
        recipe: Recipe = get_recipe("k4v4").replace(name=f"k{bits}v4", k_bits=bits)
        for factor in factors:
            with step_factor(bits, factor):
                run(f"k{bits}v4, step factor {factor}", base.with_recipe(recipe))
    o.out.mkdir(parents=True, exist_ok=True)
    notes = f"mean KL in nats over {o.texts} texts a kind, context {o.context}, {o.dtype} model, exact emulation"
    meta = make_meta(
        session.name, commit_id=o.commit, artifact_sha256=base.sha256, seed=o.seed, device=str(net.device), notes=notes
    )
    (o.out / o.file).write_text(json.dumps({"meta": meta.model_dump(mode="json"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
