# SPDX-License-Identifier: Apache-2.0
"""Runs a contender over shapes and takes the fastest way whose answer is right.

On a GPU each contender has a process of its own, because a kernel that crashes takes its process along. It notes each
attempt before it begins, and is started again behind an attempt that ended it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .contenders import find
from .contenders.base import Contender, Options
from .shapes import DecodeShape, ModelShape, PrefillShape, PromptShape, Shape

SHAPES: dict[str, type[Shape]] = {
    "decode": DecodeShape,
    "prefill": PrefillShape,
    "layer": PromptShape,
    "model": ModelShape,
}
STARTS = 6
"""How often a process that a kernel ended is started again, each time behind the attempt that ended it."""
GRACE = 90.0
"""Seconds beyond the budget after which a process that has not ended is ended."""
Note = dict[str, Any]
Say = Callable[[str], None]


@dataclass
class Outcome:
    """What came of one shape: the best attempt, or why there is none. wrong: an answer was off (best: of the rest)."""

    shape: Shape
    best: Note | None = None
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    error: float | None = None


def attempts(c: Contender, shape: Shape, deadline: float, seen: set[str], note: Callable[[Note], None]) -> None:
    """All ways of one shape that ``seen`` does not name. Notes each before it begins and after it ended."""
    row = shape.row()
    ways = [w for w in c.ways(shape) if w not in seen]
    prepared = False
    for way in ways:
        if time.time() > deadline:
            note({"shape": row, "state": "late"})
            break
        note({"shape": row, "way": way, "state": "begun"})
        try:
            if not prepared:
                torch.manual_seed(c.options.seed)
                c.prepare(shape)
                prepared = True
            note({"shape": row, "way": way, "state": "done", **c.measure(way)})
        except Exception as error:  # whatever a foreign library raises ends one attempt, not the run
            note({"shape": row, "way": way, "state": "failed", "why": f"{type(error).__name__}: {str(error)[:300]}"})
            if "memory access" in str(error) or "AcceleratorError" in type(error).__name__:
                raise
    c.release()
    note({"shape": row, "state": "end"})


def outcome(shape: Shape, notes: Sequence[Note], limit: float) -> Outcome:
    """The best of a shape's notes."""
    out, ended = Outcome(shape), {n["way"] for n in notes if n["state"] in ("done", "failed")}
    for n in notes:
        if n["state"] == "failed":
            out.failed.append(f"{n['way']}: {n['why']}")
        elif n["state"] == "begun" and n["way"] not in ended:
            out.failed.append(f"{n['way']}: ended its process, or took too long")
        elif n["state"] == "late":
            out.failed.append("not begun: the time budget was spent")
        elif n["state"] == "done":
            if not n["error"] <= limit:
                out.wrong.append(f"{n['way']}: relative error {n['error']:.2g}")
                out.error = n["error"]
            elif out.best is None or n["ms"] < out.best["ms"]:
                out.best = n
    return out


def race(c: Contender, part: str, shapes: Sequence[Shape], deadline: float, say: Say) -> Iterator[Outcome]:
    """Outcomes, a shape at a time, as they come."""
    if not c.options.on_gpu:
        for shape in shapes:
            notes: list[Note] = []
            attempts(c, shape, deadline, set(), notes.append)
            yield outcome(shape, notes, c.limit)
        return
    yield from _isolated(c, part, list(shapes), deadline, say)


def _isolated(c: Contender, part: str, shapes: list[Shape], deadline: float, say: Say) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="oscar-kv-bench-") as folder:
        file, errors, given = Path(folder, "notes.jsonl"), Path(folder, "stderr"), 0
        file.touch()
        job = {"part": part, "name": c.name, "options": asdict(c.options), "deadline": deadline}
        for _ in range(STARTS):
            job["shapes"] = [s.row() for s in shapes[given:]]
            with errors.open("w") as sink:
                process = subprocess.Popen(command(job, file), stdout=sink, stderr=sink)
            try:
                while True:
                    code = process.poll()
                    for shape in shapes[given:]:
                        notes = _notes(file, shape)
                        if not any(n["state"] == "end" for n in notes):
                            break
                        given += 1
                        yield outcome(shape, notes, c.limit)
                    if code is not None or time.time() > deadline + GRACE:
                        break
                    time.sleep(0.1)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            if given == len(shapes) or time.time() > deadline:
                break
            tail = " ".join(errors.read_text(errors="replace").split())[-300:]
            say(f"{c.name}: its process ended with {process.returncode} ({tail or 'no message'}); started again")
        for shape in shapes[given:]:
            out = outcome(shape, _notes(file, shape), c.limit)
            out.failed = out.failed or [" ".join(errors.read_text(errors="replace").split())[-300:] or "no attempt"]
            yield out


def command(job: Note, file: Path) -> list[str]:
    """What starts the process of its own."""
    return [sys.executable, "-m", "oscar_kv.bench.race", json.dumps(job), str(file)]


def _notes(file: Path, shape: Shape) -> list[Note]:
    lines = file.read_text().splitlines(keepends=True)
    notes = [json.loads(line) for line in lines if line.endswith("\n")]
    return [n for n in notes if n["shape"] == shape.row()]


def worker(job: Note, file: Path) -> None:
    """The process of its own: every shape and way of the job that the notes do not name yet."""
    c = find(job["part"], job["name"], Options(**job["options"]))
    with file.open("a") as out:

        def note(n: Note) -> None:
            out.write(json.dumps(n) + "\n")
            out.flush()

        for row in job["shapes"]:
            shape = SHAPES[job["part"]](**row)
            seen = {n["way"] for n in _notes(file, shape) if "way" in n}
            attempts(c, shape, job["deadline"], seen, note)


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]), Path(sys.argv[2]))
