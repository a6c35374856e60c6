# SPDX-License-Identifier: Apache-2.0
"""From results of single texts to rows of a results file: what ``eval``, ``demo`` and the benchmarks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..artifact import Artifact
from ..calibration import Moments, fit
from ..errors import OscarError
from ..memory import bits_per_element
from ..recipe import get_recipe
from .language import REFERENCE, NamedText, TextResult, summarise
from .results import QualityRow, interval

KINDS: tuple[Literal["code", "prose"], ...] = ("code", "prose")
RECIPES = ("naive", "quarot", "oscar-paper", "k2v2-plain", "k2v2", "k3v2", "k4v4")


def evaluation_texts(kind: Literal["code", "prose"], count: int | None = None) -> list[NamedText]:
    """The package's evaluation texts of a kind, disjoint from its calibration texts. OscarError if there are fewer."""
    from ..demo import texts

    found: list[Any] = list(texts.load(kind, "evaluation"))
    if count is not None and len(found) < count:
        raise OscarError(f"{count} evaluation texts of kind {kind!r} were asked for, the package ships {len(found)}")
    return found[:count]


def haystack_texts() -> list[NamedText]:
    """What needles are hidden in: a novel, in neither the calibration nor the evaluation texts."""
    from ..demo import texts

    return [texts.Text("haystack", texts.haystack())]


def fit_all(moments: Moments, recipes: Sequence[str]) -> dict[str, Artifact]:
    """One artifact a recipe, all from the same moments."""
    return {get_recipe(name).name: fit(moments, name) for name in recipes}


def quality_rows(
    results: Sequence[TextResult], artifacts: Mapping[str, Artifact | None], seed: int = 0
) -> list[QualityRow]:
    """A row for each recipe, kind and context. Full precision (an artifact of None) stands at 16 bits."""
    rows = []
    for s in summarise(results):
        artifact = artifacts[s.recipe]
        recipe = None if artifact is None else artifact.recipe
        rows.append(
            QualityRow(
                recipe=s.recipe, k_bits=recipe.k_bits if recipe else 16, v_bits=recipe.v_bits if recipe else 16,
                dataset=s.kind, context=s.context, tokens=s.texts * s.context, texts=s.texts, kl=s.kl, ppl=s.ppl,
                ppl_bf16=s.ppl_reference, top1=s.top1,
                bpe=16.0 if artifact is None else bits_per_element(artifact, s.context),
                kl_ci95=interval(s.kl_by_text, seed), kl_by_text=s.kl_by_text,
                artifact_sha256=None if artifact is None else artifact.sha256,
            )
        )  # fmt: skip
    return rows


def subjects_of(artifacts: Mapping[str, Artifact]) -> dict[str, Artifact | None]:
    """The recipes with full precision before them."""
    return {REFERENCE: None, **artifacts}
