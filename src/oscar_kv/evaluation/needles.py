# SPDX-License-Identifier: Apache-2.0
"""Needle retrieval: four seven-digit numbers under different keys in a long text, and a question about one of them.

A sample is right if the likeliest token at every position of the answer, given the ones before it, is the answer's.
That is exactly when greedy decoding writes this number: as long as each greedy token is the answer's, the text so far
is the one that was given. So one forward pass does, and only the answer's positions need logits.

The pass is the strict emulation, in which the prompt too is read from codes wherever it is history. ``prefill="exact"``
is what a cache does that gets the prompt in one chunk: the prompt's queries (the one that writes the answer's first
token among them) read everything as it is, and only the answer's further tokens are decoded from codes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..artifact import Artifact
from ..errors import OscarError
from .emulation import Emulation, emulated
from .language import Head, NamedText, Progress, Subject, hidden_states
from .stats import wilson

NEEDLES = 4
_MARK = "\u2402haystack\u2403"
_ADJECTIVES = (
    "amber", "brisk", "copper", "dusty", "eager", "frozen", "gentle", "hollow", "ivory", "jolly", "keen", "lunar",
    "misty", "noble", "olive", "placid", "quiet", "rustic", "silver", "tidal", "urban", "velvet", "woven", "young",
)  # fmt: skip
_NOUNS = (
    "anchor", "badger", "canyon", "dolphin", "ember", "falcon", "garden", "harbor", "island", "jacket", "kettle",
    "lantern", "meadow", "needle", "orchard", "pepper", "quarry", "river", "saddle", "tunnel", "umbrella", "valley",
    "walnut", "yarn",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """ids int64 [context]: prompt, question, and the answer as the last tokens. depths: where the needles begin."""

    ids: Tensor
    answer: int
    key: str
    number: str
    depths: tuple[int, ...]

    @property
    def prompt(self) -> int:
        """Tokens before the answer."""
        return len(self.ids) - self.answer


class Haystack:
    """Makes samples of one length for one tokenizer. Sample i depends on the seed and i alone, so runs can be split."""

    def __init__(self, texts: Sequence[NamedText], tokenizer: Any, context: int, seed: int = 0) -> None:
        self.tokenizer, self.context, self.seed = tokenizer, context, seed
        self.corpus = [t for text in texts for t in self._ids(text.text + "\n\n")]
        if not self.corpus:
            raise OscarError("the haystack is empty: give it at least one text")
        self._ends: dict[int, bool] = {}
        self.before, self.after = self._frame()

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _frame(self) -> tuple[str, str]:
        """What the chat template puts before and after the user's words; without one, nothing and a blank line."""
        if not getattr(self.tokenizer, "chat_template", None):
            return "", "\n\n"
        chat = [{"role": "user", "content": _MARK}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise OscarError("the tokenizer's chat template does not keep the user's words: needles cannot be laid out")
        return before, after

    def _ends_line(self, token: int) -> bool:
        if token not in self._ends:
            self._ends[token] = "\n" in self.tokenizer.decode([token])
        return self._ends[token]

    def sample(self, i: int) -> Sample:
        """Sample i: its own stretch of text, keys, numbers, depths and question. OscarError for a context too short."""
        rng = random.Random(f"needles {self.seed} {i}")
        pairs = [f"{a} {n}" for a in _ADJECTIVES for n in _NOUNS]
        keys = rng.sample(pairs, NEEDLES)
        numbers = [str(rng.randrange(10**6, 10**7)) for _ in keys]
        needles = [self._ids(f"\nThe special number for {k} is {x}.\n") for k, x in zip(keys, numbers, strict=True)]
        key, number = keys[asked := rng.randrange(NEEDLES)], numbers[asked]
        begin = self._ids(self.before + "Some special numbers are hidden in the following text. Remember them.\n\n")
        if bos := getattr(self.tokenizer, "bos_token_id", None):
            begin = begin if begin[:1] == [bos] or self.before else [bos, *begin]
        question = (
            f"\n\nWhat is the special number for {key} in the text above?{self.after}The special number for {key} is"
        )
        end, answer = self._ids(question), self._ids(f" {number}")
        room = self.context - len(begin) - sum(map(len, needles)) - len(end) - len(answer)
        if room < 4 * NEEDLES:
            raise OscarError(
                f"a context of {self.context} tokens has no room for {NEEDLES} needles: "
                f"use at least {self.context - room + 256}"
            )
        offset = rng.randrange(len(self.corpus))
        hay = [self.corpus[(offset + j) % len(self.corpus)] for j in range(room)]
        places = sorted(self._snap(hay, rng.randrange(room)) for _ in needles)
        ids, at, depths = list(begin), 0, []
        for place, needle in zip(places, rng.sample(needles, NEEDLES), strict=True):
            ids += hay[at:place]
            depths.append(len(ids))
            ids += needle
            at = place
        ids += hay[at:] + end + answer
        return Sample(torch.tensor(ids, dtype=torch.int64), len(answer), key, number, tuple(depths))

    def _snap(self, hay: Sequence[int], place: int) -> int:
        """The next end of a line, if one is near."""
        return next((j + 1 for j in range(place, min(place + 64, len(hay))) if self._ends_line(hay[j])), place)


@dataclass(frozen=True)
class Retrieval:
    """One recipe: which samples were right, in order."""

    recipe: str
    context: int
    right: list[bool]

    @property
    def score(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def ci95(self) -> tuple[float, float]:
        """Wilson interval."""
        return wilson(sum(self.right), len(self.right))


@torch.no_grad()
def retrieved(model: nn.Module, head: Head, sample: Sample) -> bool:
    """Whether greedy decoding of the model, as it now attends, writes the sample's number."""
    hidden = hidden_states(model, sample.ids)[sample.prompt - 1 : -1]
    return bool((head(hidden).argmax(-1).cpu() == sample.ids[sample.prompt :]).all())


def retrieve(
    model: nn.Module,
    samples: Sequence[Sample],
    subjects: Mapping[str, Subject],
    *,
    prefill: Literal["strict", "exact"] = "strict",
    fast: bool = False,
    progress: Progress | None = None,
) -> list[Retrieval]:
    """Every recipe on the same samples; ``subjects``: recipe name → artifact (None: full precision).

    ``progress(done, total)`` counts forward passes. Raises what ``emulated`` raises.
    """
    if prefill not in ("strict", "exact"):
        raise OscarError(f"prefill={prefill!r}: it is 'strict' or 'exact'")
    if not samples:
        raise OscarError("there are no samples")
    was = model.training
    model.eval()
    out, done = [], 0
    try:
        head = Head(model, samples[0].ids)
        for name, subject in subjects.items():
            entry = Emulation.of(subject, model, fast=fast) if isinstance(subject, Artifact) else subject
            right = []
            for sample in samples:
                if entry is not None:
                    entry.prefill = sample.prompt if prefill == "exact" else 0
                with nullcontext() if entry is None else emulated(model, entry):
                    right.append(retrieved(model, head, sample))
                done += 1
                if progress is not None:
                    progress(done, len(samples) * len(subjects))
            out.append(Retrieval(name, len(samples[0].ids), right))
    finally:
        model.train(was)
    return out
