# SPDX-License-Identifier: Apache-2.0
"""RULER's question answering over many documents (qa_1: SQuAD, qa_2: HotpotQA), from files that the user has.

Neither data set comes with this package: give the path of SQuAD 2.0's ``dev-v2.0.json`` or of HotpotQA's
``hotpot_dev_distractor_v1.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import OscarError
from .base import Measure, Sample, TaskBase, fill, rng_of
from .ruler import string_match_part


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, the documents that hold them, as indices, and others of the same article."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class RulerQa(TaskBase):
    """One of RULER's two tasks. OscarError for a file that is missing or of another form."""

    name: str
    path: str | Path
    suite: str = "ruler"

    def __post_init__(self) -> None:
        if self.name not in ("qa_1", "qa_2"):
            raise OscarError(f"RulerQa: {self.name!r}; it is qa_1 (SQuAD) or qa_2 (HotpotQA)")

    @cached_property
    def _data(self) -> tuple[list[str], list[Question]]:
        try:
            raw = json.loads(Path(self.path).read_text(encoding="utf-8"))
            return _squad(raw) if self.name == "qa_1" else _hotpot(raw)
        except OSError as error:
            raise OscarError(f"{self.name}: {self.path} cannot be read ({error})") from error
        except (ValueError, KeyError, TypeError) as error:
            wanted = "SQuAD 2.0's dev-v2.0.json" if self.name == "qa_1" else "HotpotQA's hotpot_dev_distractor_v1.json"
            raise OscarError(f"{self.name}: {self.path} is not {wanted} ({error!r})") from error

    def samples(self, measure: Any, context: int, n: int, seed: int = 0) -> list[Sample]:
        """See Task. Question i is the file's i-th answerable one."""
        m = Measure.from_any(measure)
        documents, questions = self._data
        if n > len(questions):
            raise OscarError(f"{self.name}: {n} samples were asked for, {self.path} has {len(questions)} questions")

        def one(i: int) -> Sample:
            q = questions[i]
            # Related documents first, then any others, as many as fit.
            rest = sorted(set(range(len(documents))) - set(q.gold) - set(q.near))
            rng = rng_of(self.name, context, seed, i)
            order = [*q.gold, *q.near, *rng.sample(rest, len(rest))]

            def build(units: int) -> Sample:
                chosen = order[:units]
                rng_of(self.name, context, seed, i, "order").shuffle(chosen)
                text = "\n\n".join(f"Document {j + 1}:\n{documents[d]}" for j, d in enumerate(chosen))
                ask = (
                    "Answer the question from the documents below. Give the answer alone, without any other words.\n\n"
                    f"{text}\n\nAnswer the question from the documents above. Give the answer alone, without any other "
                    f"words.\n\nQuestion: {q.text}"
                )
                return Sample(
                    id=f"{self.name}/{context}/{seed}/{i}", reference=q.answers, max_new_tokens=32,
                    meta={"family": self.name, "documents": len(chosen)}, **m.ask(ask, "Answer:"),
                )  # fmt: skip

            return fill(build, m, context, len(q.gold), len(order))

        return [one(i) for i in range(n)]

    def score(self, sample: Sample, answer: str) -> float:
        return string_match_part(answer, sample.reference)


def _squad(raw: Any) -> tuple[list[str], list[Question]]:
    documents: dict[str, int] = {}
    out = []
    for article in raw["data"]:
        own = [documents.setdefault(p["context"], len(documents)) for p in article["paragraphs"]]
        for index, paragraph in zip(own, article["paragraphs"], strict=True):
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible"):
                    near = tuple(d for d in dict.fromkeys(own) if d != index)
                    out.append(Question(qa["question"], tuple(a["text"] for a in qa["answers"]), (index,), near))
    return list(documents), out


def _hotpot(raw: Any) -> tuple[list[str], list[Question]]:
    documents: dict[str, int] = {}
    out = []
    for item in raw:
        own = [(t, documents.setdefault(f"{t}\n{''.join(s)}", len(documents))) for t, s in item["context"]]
        titles = {t for t, _ in item["supporting_facts"]}
        gold = tuple(dict.fromkeys(d for t, d in own if t in titles))
        near = tuple(dict.fromkeys(d for t, d in own if d not in gold))
        out.append(Question(item["question"], (item["answer"],), gold, near))
    return list(documents), out
