# SPDX-License-Identifier: Apache-2.0
"""Verbatim quotation across the borders of the quantised history: a passage lies on the border, the model repeats it.

A cache that loses, doubles or shifts tokens where windows and pages meet still passes fluency and needle tests; a
sentence that must be given back word for word shows it. Controls lie wholly in the history and wholly in the window.

The passage is made of random words and numbers, so nothing but the context can tell the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, get_args

import numpy as np

from ...errors import OscarError
from ...layout import PAGE
from .base import Measure, Sample, TaskBase, fill, rng_of
from .texts import HAYSTACK, haystack_slice, haystack_words, vocabulary

Border = Literal["recent", "edge", "sink", "history", "window"]
_OPEN, _CLOSE = "<passage>", "</passage>"
_CUE = 4
"""Words of the passage that the answer is begun with: what is tested is copying, not finding the tags."""


def edit_similarity(answer: str, reference: str) -> float:
    """1 − (edits that turn the reference into the best-fitting beginning of the answer) / its length, at least 0.

    Characters, runs of white space being one blank. What follows the quotation costs nothing.
    """
    wanted, given = " ".join(reference.split()), " ".join(answer.split())
    if not wanted:
        raise OscarError("a similarity needs a reference")
    given = given[: 2 * len(wanted)]
    letters, at = np.array([ord(c) for c in given], dtype=np.int64), np.arange(len(given) + 1)
    row = at.copy()  # row[j]: edits from the reference so far to the answer's first j characters
    for i, character in enumerate(wanted, 1):
        fresh = np.empty_like(row)
        fresh[0] = i
        fresh[1:] = np.minimum(row[:-1] + (letters != ord(character)), row[1:] + 1)
        row = np.minimum.accumulate(fresh - at) + at  # insertions
    return max(0.0, 1 - int(row.min()) / len(wanted))


def exact(answer: str, reference: str) -> bool:
    """Whether the answer begins with the reference, white space aside."""
    wanted, given = reference.split(), answer.split()
    return given[: len(wanted)] == wanted


@dataclass(frozen=True)
class Verbatim(TaskBase):
    """A passage of at most ``passage`` tokens on one border.

    border:
        "recent": half of the passage is history when the answer begins; the other half becomes history while the first
        is being repeated.
        "edge": the passage begins half a page before that border. Repeating token j reads, at position prompt + j, what
        stands at begin + j: for all of the passage the page that is being filled or has just been quantised.
        "sink": the passage reaches over position ``sink``.
        "history", "window" (controls): every token is read from the history, or from the recent window.
    sink, recent: the recipe's windows. passage: tokens.
    """

    border: Border = "recent"
    sink: int = 64
    recent: int = 256
    passage: int = 160
    suite: str = "verbatim"
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if self.border not in get_args(Border):
            raise OscarError(f"verbatim: border {self.border!r}; it is one of {', '.join(get_args(Border))}")
        if self.passage < 16:
            raise OscarError(f"verbatim: a passage of {self.passage} tokens cannot lie on a border; use 16 or more")
        object.__setattr__(self, "name", f"verbatim_{self.border}")

    def samples(self, measure: Any, context: int, n: int, seed: int = 0) -> list[Sample]:
        """See Task. OscarError where the windows or the context leave no room for the passage."""
        m = Measure.from_any(measure)
        return [self._one(m, context, f"{self.name} {context} {self.sink} {self.recent} {seed} {i}") for i in range(n)]

    def _one(self, m: Measure, context: int, seed: str) -> Sample:
        rng = rng_of(seed)
        quoted = passage_text(rng, m, self.passage)
        cue = " ".join(quoted.split()[:_CUE])
        first, second = (rng.randrange(len(haystack_words())) for _ in range(2))

        def build(before: int, after: int) -> Sample:
            lead = " ".join(haystack_slice(first, before)) + "\n" if before else ""
            tail = "\n" + " ".join(haystack_slice(second, after)) if after else ""
            text = f"{lead}{_OPEN}{quoted}{_CLOSE}{tail}\nRepeat the text between {_OPEN} and {_CLOSE} word for word."
            return Sample(
                id=seed.replace(" ", "/"), reference=(quoted[len(cue) + 1 :],),
                max_new_tokens=self.passage + self.passage // 2 + 16, stop=(_CLOSE,),
                meta={"haystack": HAYSTACK, "sink": self.sink, "recent": self.recent, "cue": cue},
                **m.ask(text, _OPEN + cue),
            )  # fmt: skip

        def span(sample: Sample) -> tuple[int, int, int]:
            """Tokens before the passage, up to its end, and of the whole prompt."""
            text = m.render(sample)
            at = text.index(_OPEN + quoted) + len(_OPEN)
            return m.tokens(sample, text[:at]), m.tokens(sample, text[: at + len(quoted)]), m.length(sample)

        if self.border == "sink":
            sample = fill(lambda words: build(0, words), m, context, 32)
        elif self.border == "history":
            sample = fill(lambda words: build(words // 2, words - words // 2), m, context, 32)
        else:
            # Tokens from the passage's beginning to the prompt's end; they do not depend on what comes before it.
            shift = {"recent": self.passage // 2, "edge": PAGE // 2, "window": -PAGE // 4}[self.border]

            def back(words: int) -> int:
                begin, _, total = span(build(32, words))
                return total - begin

            after = _most(self.recent + shift, back)
            sample = fill(lambda words: build(words, after), m, context, 32)
        begin, end, total = span(sample)
        border = self.sink if self.border == "sink" else total - self.recent
        inside = begin >= self.sink
        fine = {
            "recent": inside and begin < border < end,
            "edge": inside and border - PAGE < begin < border,
            "sink": begin < border < end and end <= total - self.recent,
            "history": inside and end <= border,
            "window": inside and border < begin,
        }[self.border]
        if not fine:
            raise OscarError(
                f"{self.name}: with {context} tokens, windows of {self.sink} and {self.recent} and a passage of "
                f"{self.passage}, the passage lies at {begin}…{end} of {total}: choose other lengths"
            )
        return replace(sample, meta={**sample.meta, "passage": [begin, end], "border_at": border, "prompt": total})

    def score(self, sample: Sample, answer: str) -> float:
        """Edit similarity."""
        return edit_similarity(_quotation(sample, answer), sample.reference[0])

    def details(self, sample: Sample, answer: str) -> dict[str, float]:
        """Similarity, and 1 where the quotation is exact."""
        return {
            "similarity": self.score(sample, answer),
            "exact": float(exact(_quotation(sample, answer), sample.reference[0])),
        }


def _quotation(sample: Sample, answer: str) -> str:
    """The answer between the tags, without the cue where the model was not given it or repeats it."""
    return answer.split(_CLOSE)[0].replace(_OPEN, " ").strip().removeprefix(str(sample.meta["cue"]))


def _most(limit: int, size: Callable[[int], int]) -> int:
    """The most words with size(words) <= limit, 0 if there are none."""
    low, high = 0, 1
    while size(high) <= limit:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return low


def passage_text(rng: Random, measure: Measure, tokens: int) -> str:
    """Random words, every sixth a number, until they make about ``tokens`` tokens (at most that many)."""
    words: list[str] = []
    while True:
        word = str(rng.randint(100, 999)) if len(words) % 6 == 5 else rng.choice(vocabulary())
        if measure.count(" ".join([*words, word])) > tokens:
            return " ".join(words)
        words.append(word)
