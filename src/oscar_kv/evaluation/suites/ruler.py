# SPDX-License-Identifier: Apache-2.0
"""RULER's retrieval, multi-hop and aggregation families (Hsieh et al., arXiv 2404.06654), generated locally.

Kinds, counts, distributions, needle and noise sentences, answer lengths and scores are RULER's; instructions and
opening words say the same in our words; haystack, keys and word lists are our own. qa_1 and qa_2: ruler_qa.py.
"""

from __future__ import annotations

import math
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from ...errors import OscarError
from .base import Measure, Sample, Task, TaskBase, fill, rng_of
from .texts import ADJECTIVES, HAYSTACK, NOISE, NOUNS, haystack_slice, haystack_words, sentences, vocabulary

Kind = Literal["words", "numbers", "uuids"]


def string_match_all(answer: str, reference: tuple[str, ...]) -> float:
    """Share of the references that occur in the answer, whatever their case."""
    return sum(r.lower() in answer.lower() for r in reference) / len(reference)


def string_match_part(answer: str, reference: tuple[str, ...]) -> float:
    """1 if any reference occurs in the answer, whatever its case."""
    return float(any(r.lower() in answer.lower() for r in reference))


def enumerated(items: list[str]) -> str:
    """a / a, and b / a, b, and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"


@dataclass(frozen=True)
class RulerTask(TaskBase):
    """A family whose samples ``build(measure, context, rng_name, units)`` makes, filled to the context."""

    name: str
    least: int
    suite: str = "ruler"

    def build(self, measure: Measure, context: int, seed: str, units: int) -> Sample:
        raise NotImplementedError

    def samples(self, measure: Any, context: int, n: int, seed: int = 0) -> list[Sample]:
        """See Task. Prompt and answer together lie at most 2 % below ``context``, from 4,096 tokens on."""
        m = Measure.from_any(measure)

        def one(i: int) -> Sample:
            def build(units: int) -> Sample:
                return self.build(m, context, f"{self.name} {context} {seed} {i}", units)

            return fill(build, m, context, self.least, self.most())

        return [one(i) for i in range(n)]

    def most(self) -> int | None:
        """Units that exist; None without a limit."""
        return None

    def score(self, sample: Sample, answer: str) -> float:
        return string_match_all(answer, sample.reference)

    def _sample(
        self, measure: Measure, seed: str, text: str, opening: str, reference: list[str], tokens: int, **meta: Any
    ) -> Sample:
        return Sample(
            id=seed.replace(" ", "/"), reference=tuple(reference), max_new_tokens=tokens,
            meta={"family": self.name, **meta}, **measure.ask(text, opening),
        )  # fmt: skip


@dataclass(frozen=True)
class Niah(RulerTask):
    """Needles in a haystack. Units: words of the novel, lines of noise, or needles nobody asks for."""

    haystack: Literal["repeat", "essay", "needle"] = "essay"
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"

    def build(self, measure: Measure, context: int, seed: str, units: int) -> Sample:
        rng = rng_of(seed)
        known: set[str] = set()

        def fresh(kind: Kind) -> str:
            while (made := _random(rng, kind)) in known:
                pass
            known.add(made)
            return made

        def needle(key: str, value: str) -> str:
            return f"One of the special magic {self.value_kind} for {key} is: {value}."

        keys = [fresh(self.key_kind) for _ in range(max(self.keys, self.queries))]
        held = {k: [fresh(self.value_kind) for _ in range(self.values)] for k in keys}
        needles = [needle(k, v) for k in keys for v in held[k]]
        rng.shuffle(needles)
        asked = rng.sample(keys, self.queries)
        start = rng.randrange(len(haystack_words()))
        depths = sorted(rng.sample(range(40), len(needles)))
        if self.haystack == "essay":
            hay, join = sentences(haystack_slice(start, units)), " "
            # 40 depths from 0 to 100 %, RULER's own grid.
            places = [int(len(hay) * depth / 39) for depth in depths]
        else:
            # One needle more, one line more: what is drawn above does not depend on units.
            if self.haystack == "repeat":
                hay, join = [NOISE] * units, "\n"
            else:
                hay, join = [needle(fresh(self.key_kind), fresh(self.value_kind)) for _ in range(units)], "\n"
            places = sorted(rng.sample(range(len(hay)), len(needles)))
        text = list(hay)
        for place, own in reversed(list(zip(places, needles, strict=True))):
            text.insert(place, own)
        one = self.queries * self.values == 1
        what = f"magic {self.value_kind[:-1] if one else self.value_kind}"
        some, verb, them, every = ("A", "is", "it", "the") if one else ("Some", "are", "them", "all the")
        query = enumerated(asked)
        question = (
            f"{some} special {what} {verb} hidden in the text below. Keep {them} in mind: you will be asked about "
            f"{them}.\n{join.join(text)}\nWhat {verb} {every} special {what} for {query} that the text above mentions?"
        )
        opening = f"The special {what} for {query} that the text above mentions {verb}"
        depth = [round(p / max(1, len(hay)), 4) for p in places]
        source = {"repeat": "RULER's noise sentences", "essay": HAYSTACK, "needle": "needles nobody asks for"}
        return self._sample(
            measure, seed, question, opening, [v for k in asked for v in held[k]], 128,
            haystack=source[self.haystack], depths=depth, keys=asked,
        )  # fmt: skip


def _random(rng: Random, kind: Kind) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


@dataclass(frozen=True)
class VariableTracking(RulerTask):
    """Chains of assignments in noise, behind one worked example. Units: lines of noise."""

    chains: int = 1
    hops: int = 4

    def build(self, measure: Measure, context: int, seed: str, units: int) -> Sample:
        rng = rng_of(seed)
        example, opened, solved, _ = self._question(rng, 12, 3)
        text, opening, names, value = self._question(rng, units, 5)
        return self._sample(
            measure, seed, f"{example}\n{opened} {' '.join(solved)}\n\n{text}", opening, names, 30,
            haystack="RULER's noise sentences", value=value, hops=self.hops, chains=self.chains,
        )  # fmt: skip

    def _question(self, rng: Random, units: int, letters: int) -> tuple[str, str, list[str], str]:
        """Text, opening, the variables that hold the value, the value."""
        names: list[str] = []
        while len(names) < self.chains * (self.hops + 1):
            name = "".join(rng.choices(string.ascii_uppercase, k=letters))
            if name not in names:
                names.append(name)
        values = rng.sample(range(10_000, 99_999), self.chains)
        lines = [NOISE] * units
        for c in range(self.chains):
            chain = names[c * (self.hops + 1) : (c + 1) * (self.hops + 1)]
            steps = [f"VAR {chain[0]} = {values[c]}"]
            steps += [f"VAR {chain[h + 1]} = VAR {chain[h]}" for h in range(self.hops)]
            places = sorted(rng.sample(range(len(lines)), len(steps)))
            for shift, (place, step) in enumerate(zip(places, steps, strict=True)):
                lines.insert(place + shift, step)
        body = "\n".join(lines)
        text = (
            "Follow the chain(s) of variable assignments hidden in the text below and remember them.\n\n"
            f"{body}\nQuestion: Which variables have been assigned the value {values[0]} in the text above?"
        )
        opening = (
            f"Answer: By the chain(s) of assignments in the text above, {self.hops + 1} variables hold the value "
            f"{values[0]}, namely:"
        )
        return text, opening, names[: self.hops + 1], str(values[0])


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """Ten words that a numbered list repeats 30 times among words it has 3 times. Units: distinct words."""

    common: int = 10
    often: int = 30
    seldom: int = 3

    def most(self) -> int:
        return len(vocabulary()) - 40

    def build(self, measure: Measure, context: int, seed: str, units: int) -> Sample:
        rng = rng_of(seed)
        # Lists below 4,096 tokens have no room for 30 repetitions: RULER's smaller counts.
        small = context < 4096
        words = rng.sample(vocabulary(), len(vocabulary()))
        shown_words, shown_counts = (words[:20], (3, 1)) if small else (words[:40], (10, 3))
        first, opening, solved = self._question(rng, shown_words, *shown_counts)
        counts = (6, 1) if small else (self.often, self.seldom)
        text, _, answer = self._question(rng, words[40 : 40 + units], *counts)
        shown = " ".join(f"{i + 1}. {w}" for i, w in enumerate(solved))
        if units >= self.most():
            raise OscarError(f"{self.name}: the vocabulary of {self.most():,} words does not fill {context:,} tokens")
        return self._sample(
            measure, seed, f"{first}\n{opening} {shown}\n\n{text}", opening, answer, 120,
            haystack="words of the prose shipped with oscar-kv", words=units, often=counts[0], seldom=counts[1],
        )  # fmt: skip

    def _question(self, rng: Random, words: list[str], often: int, seldom: int) -> tuple[str, str, list[str]]:
        common, others = words[: self.common], words[self.common :]
        listed = common * often + others * seldom
        rng.shuffle(listed)
        body = " ".join(f"{i + 1}. {w}" for i, w in enumerate(listed))
        text = (
            "Here is a numbered list of words. Some of the words appear in it more often than others; remember those "
            f"that appear most often.\n{body}\nQuestion: Which {self.common} words are the most common ones in the "
            "list above?"
        )
        return text, f"Answer: The {self.common} words that appear most often in the list are:", common


@dataclass(frozen=True)
class FrequentWords(RulerTask):
    """Coded words whose counts follow a zeta law; the most frequent one is noise ("..."). Units: words drawn."""

    alpha: float = 2.0
    letters: int = 6

    def build(self, measure: Measure, context: int, seed: str, units: int) -> Sample:
        rng = rng_of(seed)
        coded: list[str] = []
        known: set[str] = set()
        while len(coded) < max(8, context // 50):
            word = "".join(rng.choices(string.ascii_lowercase, k=self.letters))
            if word not in known:
                known.add(word)
                coded.append(word)
        coded[0] = "..."
        scale = units / zeta(self.alpha)
        counts = [int(scale * rank**-self.alpha) for rank in range(1, len(coded) + 1)]
        text = [w for w, count in zip(coded, counts, strict=True) for _ in range(count)]
        rng.shuffle(text)
        question = (
            "The text below is made of coded words. Count how often each of them appears and find the three most "
            f"frequent ones. {' '.join(text)}\nQuestion: Explain nothing and leave the dots '....' aside. Which three "
            "words appear most frequently in the coded text above?"
        )
        return self._sample(
            measure, seed, question, "Answer: The three words that appear most frequently in the coded text above are:",
            coded[1:4], 50, haystack="random coded words", counts=counts[1:5], alpha=self.alpha,
        )  # fmt: skip


def zeta(s: float) -> float:
    """Riemann's zeta for s > 1: 64 terms, the rest by Euler and Maclaurin (error below 1e-8 for s >= 1.5)."""
    if s <= 1:
        raise OscarError(f"zeta({s}): the sum converges for s > 1 only")
    n = 64
    return math.fsum(k**-s for k in range(1, n)) + n ** (1 - s) / (s - 1) + n**-s / 2 + s * n ** (-s - 1) / 12


_MAKERS: dict[str, Callable[[str], RulerTask]] = {
    "niah_single_1": lambda name: Niah(name, 8, haystack="repeat"),
    "niah_single_2": lambda name: Niah(name, 64),
    "niah_single_3": lambda name: Niah(name, 64, value_kind="uuids"),
    "niah_multikey_1": lambda name: Niah(name, 64, keys=4),
    "niah_multikey_2": lambda name: Niah(name, 8, haystack="needle"),
    "niah_multikey_3": lambda name: Niah(name, 8, haystack="needle", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": lambda name: Niah(name, 64, values=4),
    "niah_multiquery": lambda name: Niah(name, 64, queries=4),
    "vt": lambda name: VariableTracking(name, 8),
    "cwe": lambda name: CommonWords(name, 20),
    "fwe": lambda name: FrequentWords(name, 64),
}
RULER_TASKS = tuple(_MAKERS)
"""RULER's eleven tasks that need no data of others."""


def ruler_task(name: str) -> Task:
    """A task by RULER's name. OscarError for an unknown one; qa_1 and qa_2 are made by ``ruler_qa.RulerQa``."""
    if name in ("qa_1", "qa_2"):
        raise OscarError(f"{name} needs {'SQuAD' if name == 'qa_1' else 'HotpotQA'}: RulerQa({name!r}, path) reads it")
    if name not in _MAKERS:
        raise OscarError(f"no RULER task {name!r}; there are {', '.join(_MAKERS)}, and by path qa_1, qa_2")
    return _MAKERS[name](name)
