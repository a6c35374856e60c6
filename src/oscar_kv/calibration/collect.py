# SPDX-License-Identifier: Apache-2.0
"""Run a model over chunks of text and sum its moments; nothing else is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..artifact import MIN_TOKENS
from ..errors import CalibrationError, UnsupportedModelError
from ..geometry import LayerGeometry
from ..integrations.transformers.capture import capture
from ..integrations.transformers.geometry import layer_geometries, text_config
from ..integrations.transformers.identity import model_identity
from .moments import Moments, MomentsMeta, shapes
from .stream import chunk_sums

MIN_HISTORY_QUERIES = 512
"""Fewest positions that have a history to read, i.e. lie at sink + recent or later in their chunk."""

Progress = bool | Callable[[int, int], None]


def check_floor(lengths: Sequence[int], sink: int, recent: int) -> int:
    """Number of queries with a history. Raises CalibrationError below the floor, with what was given and what to do."""
    tokens = sum(lengths)
    queries = sum(max(0, n - sink - recent) for n in lengths)
    if tokens < MIN_TOKENS:
        raise CalibrationError(
            f"{tokens} calibration tokens, the floor is MIN_TOKENS = {MIN_TOKENS}: give more text or raise --tokens "
            "(8,192 is the default), or use --data-free"
        )
    if queries < MIN_HISTORY_QUERIES:
        raise CalibrationError(
            f"only {queries} of {tokens} calibration tokens have a history beyond sink ({sink}) and recent ({recent}), "
            f"the floor is {MIN_HISTORY_QUERIES}: use longer chunks (the longest has {max(lengths)} tokens; "
            "2,048 is the default) or longer texts"
        )
    return queries


def check_positions(config: Any, longest: int) -> None:
    """Raise CalibrationError for a sequence of more tokens than the model has positions."""
    limit = getattr(text_config(config), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < longest:
        raise CalibrationError(
            f"a chunk of {longest} tokens, but the model has positions for {limit} (max_position_embeddings): "
            f"use --chunk {limit} or less"
        )


@contextmanager
def _ticker(progress: Progress, total: int) -> Iterator[Callable[[int], None]]:
    if callable(progress):
        yield lambda done: progress(done, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


class _Sums:
    """The callback of ``capture``: adds each full-attention layer's sums in place."""

    def __init__(self, layers: tuple[LayerGeometry, ...], sink: int, recent: int, device: torch.device):
        self.geometry, self.sink, self.recent = layers, sink, recent
        home = torch.device("cpu") if device.type == "mps" else device  # MPS has no fp64
        self.layers = {
            i: {f: torch.zeros(shape, dtype=torch.float64, device=home) for f, shape in shapes(layer).items()}
            for i, layer in enumerate(layers)
            if layer.kind == "full"
        }
        self.seen: dict[int, int] = {}
        self.step: Callable[[], None] = lambda: None

    def __call__(self, i: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None) -> None:
        if i not in self.layers:
            return
        g = self.geometry[i]
        have = (q.shape[1], k.shape[1], k.shape[-1], v.shape[-1])
        if have != (g.num_q_heads, g.num_kv_heads, g.k_head_dim, g.v_head_dim) or v.shape[1] != g.num_kv_heads:
            raise UnsupportedModelError(
                f"layer {i} attends with {have[0]} query heads, {have[1]} KV heads, head sizes {have[2]}/{have[3]}; "
                f"its config says {g.num_q_heads}, {g.num_kv_heads}, {g.k_head_dim}/{g.v_head_dim}: report this model"
            )
        sums = chunk_sums(q[0], k[0], v[0], scaling=scaling, softcap=softcap, sink=self.sink, recent=self.recent)
        total = self.layers[i]
        for field, x in sums.items():
            total[field] += x.to(total[field].device)
        bad = [f for f in ("k_outer", "v_outer", "q_outer") if not bool(torch.isfinite(sums[f]).all())]
        if bad or not bool(torch.isfinite(sums["wv_outer"]).all() & torch.isfinite(sums["uq_outer"]).all()):
            which = {"k_outer": "keys", "v_outer": "values", "q_outer": "queries"}
            what = ", ".join(which[f] for f in bad) or "attention probabilities"
            raise CalibrationError(
                f"layer {i}: {what} hold NaN or infinity; check the weights, or load the model in bfloat16 or float32 "
                "instead of float16"
            )
        self.seen[i] = self.seen.get(i, 0) + 1
        self.step()


@torch.no_grad()
def collect(
    model: nn.Module,
    chunks: Sequence[Tensor],
    *,
    sink: int = 64,
    recent: int = 256,
    progress: Progress = True,
    model_id: str | None = None,
    data: str = "",
    chat_template: bool = False,
) -> Moments:
    """Moments of a Transformers causal model over chunks of token ids (1-D integer tensors), on the model's device.

    Each chunk is one causal sequence from position 0. ``progress``: a bar on stderr, nothing, or a function of
    (done, total). Raises CalibrationError below the floor (``MIN_TOKENS``, ``MIN_HISTORY_QUERIES``) and for non-finite
    activations, UnsupportedModelError for attention that cannot be held.
    """
    if sink < 0 or recent < 1:
        raise CalibrationError(f"windows sink={sink}, recent={recent}: sink must be at least 0, recent at least 1")
    for i, chunk in enumerate(chunks):
        if chunk.ndim != 1 or chunk.is_floating_point():
            raise CalibrationError(
                f"chunk {i}: expected a 1-D integer tensor of token ids, got {chunk.dtype} {tuple(chunk.shape)}"
            )
    lengths = [len(chunk) for chunk in chunks]
    queries = check_floor(lengths, sink, recent)
    config: Any = model.config
    layers = layer_geometries(config)
    check_positions(config, max(lengths))
    if not any(layer.kind == "full" for layer in layers):
        raise UnsupportedModelError(f"{config.model_type}: no full-attention layer, there is nothing to quantise")
    identity = model_identity(model, model_id or getattr(config, "_name_or_path", "") or type(model).__name__)
    body: Any = getattr(model, "base_model", model)  # without the head: no [tokens, vocabulary] logits
    device = next(model.parameters()).device
    sums = _Sums(layers, sink, recent, device)
    digest = hashlib.sha256()
    training = model.training
    model.eval()
    try:
        with _ticker(progress, len(chunks) * len(sums.layers)) as tick, capture(model, sums):
            sums.step = lambda: tick(sum(sums.seen.values()))
            for chunk in chunks:
                digest.update(chunk.to("cpu", torch.int64).numpy().astype("<i8").tobytes())
                body(input_ids=chunk.to(device)[None], use_cache=False)
    finally:
        model.train(training)
    for i in sums.layers:
        if sums.seen.get(i) != len(chunks):
            raise UnsupportedModelError(
                f"layer {i} called attention {sums.seen.get(i, 0)} times for {len(chunks)} chunks; report this model"
            )
    meta = MomentsMeta(
        model=identity,
        layers=layers,
        tokens=sum(lengths),
        history_queries=queries,
        chunk=max(lengths),
        sink=sink,
        recent=recent,
        data=data,
        data_sha256=digest.hexdigest(),
        chat_template=chat_template,
    )
    return Moments(meta, {i: {f: x.cpu() for f, x in fields.items()} for i, fields in sums.layers.items()})
