# SPDX-License-Identifier: Apache-2.0
"""From results of single texts to rows of a results file: what ``eval``, ``demo`` and the benchmarks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from ..artifact import Artifact
from ..calibration import Moments, fit
from ..errors import OscarError
from ..memory import bits_per_element
from ..recipe import get_recipe
from .baselines import BaselineEmulation
from .language import REFERENCE, NamedText, TextResult, summarise
from .results import QualityRow, interval

KINDS: tuple[Literal["code", "prose"], ...] = ("code", "prose")
Contestant = Artifact | BaselineEmulation
"""What is evaluated beside full precision: a recipe fitted to the model, or a rival method bound to it."""
T = TypeVar("T", bound=Contestant)
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


def bits_of(subject: Contestant | None, context: int | None = None) -> float:
    """Bits an element: of the whole cache at a context, or of the history alone. Full precision (None): 16."""
    if subject is None:
        return 16.0
    if isinstance(subject, BaselineEmulation):
        return subject.bits_per_element(context)
    return bits_per_element(subject, context)


def quality_rows(
    results: Sequence[TextResult], subjects: Mapping[str, Contestant | None], seed: int = 0
) -> list[QualityRow]:
    """A row for each recipe, kind and context. Full precision (None) stands at 16 bits."""
    rows = []
    for s in summarise(results):
        subject = subjects[s.recipe]
        bits, windows, sha256 = (16, 16), None, None
        if isinstance(subject, BaselineEmulation):
            method = subject.method
            bits, windows = (method.k_bits, method.v_bits), (method.windows.sink, method.windows.recent)
        elif subject is not None:
            recipe = subject.recipe
            bits, windows, sha256 = (recipe.k_bits, recipe.v_bits), recipe.windows, subject.sha256
        rows.append(
            QualityRow(
                recipe=s.recipe, k_bits=bits[0], v_bits=bits[1], dataset=s.kind, context=s.context,
                tokens=s.texts * s.context, texts=s.texts, kl=s.kl, ppl=s.ppl, ppl_bf16=s.ppl_reference, top1=s.top1,
                bpe=bits_of(subject, s.context), bpe_history=bits_of(subject), windows=windows,
                kl_ci95=interval(s.kl_by_text, seed), kl_by_text=s.kl_by_text, artifact_sha256=sha256,
            )
        )  # fmt: skip
    return rows


def subjects_of(contestants: Mapping[str, T]) -> dict[str, T | None]:
    """The recipes with full precision before them."""
    return {REFERENCE: None, **contestants}
