# SPDX-License-Identifier: Apache-2.0
"""Calibration: stream moments from a model's attention, then fit an artifact to them.

``calibrate`` does both; ``collect`` and ``fit`` do one each, so that one pass over the text serves every recipe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ..artifact import MIN_TOKENS, Artifact
from ..recipe import Recipe, get_recipe
from .collect import MIN_HISTORY_QUERIES, Progress, collect
from .data import TextSource, chunks, describe, load_texts
from .fit import Plan, data_free, fit
from .moments import Moments

__all__ = [
    "MIN_HISTORY_QUERIES",
    "MIN_TOKENS",
    "Moments",
    "calibrate",
    "chunks",
    "collect",
    "data_free",
    "fit",
    "load_texts",
]


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    data: str | Path | TextSource = "builtin",
    *,
    tokens: int = 8192,
    chunk: int = 2048,
    recipe: str | Recipe = "k2v2",
    plan: Plan | None = None,
    chat_template: bool = False,
    progress: Progress = True,
    model_id: str | None = None,
) -> Artifact:
    """Calibrate a Transformers causal model on its own device and fit a recipe.

    ``data``: what ``load_texts`` takes, or texts. Raises CalibrationError (too little text, NaN …) and
    UnsupportedModelError.
    """
    chosen = get_recipe(recipe)
    texts = load_texts(data) if isinstance(data, (str, Path)) else list(data)
    pieces = chunks(texts, tokenizer, tokens, chunk, chat_template)
    moments = collect(
        model, pieces, sink=chosen.sink, recent=chosen.recent, progress=progress, model_id=model_id,
        data=describe(data, texts), chat_template=chat_template,
    )  # fmt: skip
    return fit(moments, chosen, plan)
