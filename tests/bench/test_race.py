# SPDX-License-Identifier: Apache-2.0
"""The fastest right way counts, a wrong one never, and a contender that ends its process loses that attempt alone."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from oscar_kv.bench import race as module
from oscar_kv.bench.contenders.base import Contender, Options
from oscar_kv.bench.race import attempts, outcome, race
from oscar_kv.bench.report import Report
from oscar_kv.bench.run import Job, compete, distinct
from oscar_kv.bench.shapes import PRESETS, TINY, DecodeShape, Shape

OTHER = DecodeShape(q_heads=4, kv_heads=2, head_dim=16, batch=1, context=400)


class Made(Contender):
    """Ways with given times and errors; None stands for a way that raises."""

    name = "made-bf16"
    table: dict[str, tuple[float, float] | None] = {"slow": (2.0, 0.001), "fast": (1.0, 0.001)}  # noqa: RUF012

    def ways(self, shape: Shape) -> list[str]:
        return list(self.table)

    def prepare(self, shape: Shape) -> None:
        self.prepared = shape

    def measure(self, way: str) -> dict[str, Any]:
        found = self.table[way]
        if found is None:
            raise KeyError("no such kernel")
        return {"ms": found[0], "error": found[1], "more": way}

    def bytes(self, shape: Shape) -> int:
        return 4_000_000


def run(table: dict[str, tuple[float, float] | None], deadline: float = float("inf")) -> module.Outcome:
    c = Made(Options(device="cpu"))
    c.table = table
    return next(iter(race(c, "decode", [TINY], deadline, print)))


def test_the_fastest_right_way_counts() -> None:
    found = run(
        {"slow": (2.0, 0.001), "fast": (1.0, 0.001), "wrong": (0.1, 0.5), "broken": None, "nan": (0.1, float("nan"))}
    )
    assert found.best is not None
    assert found.best["way"] == "fast"
    assert [line.split(":")[0] for line in found.wrong] == ["wrong", "nan"]
    assert found.failed == ["broken: KeyError: 'no such kernel'"]


def test_without_a_right_way_there_is_no_time() -> None:
    assert run({"wrong": (0.1, 0.5)}).best is None


def test_nothing_begins_after_the_deadline() -> None:
    found = run({"slow": (2.0, 0.001)}, time.time() - 1)
    assert found.best is None
    assert "budget" in found.failed[0]


WORKER = """
import json, os, sys
job, notes = json.loads(sys.argv[1]), sys.argv[2]
seen = [json.loads(line) for line in open(notes)]
with open(notes, "a") as out:
    def note(**x):
        out.write(json.dumps(x) + "\\n")
        out.flush()
    for row in job["shapes"]:
        ways = [n["way"] for n in seen if n["shape"] == row and "way" in n]
        if "crashes" not in ways:
            note(shape=row, way="crashes", state="begun")
            if row["batch"] == 2:
                print("about to crash", file=sys.stderr, flush=True)
                os._exit(139)
            note(shape=row, way="crashes", state="done", ms=3.0, error=0.001)
        note(shape=row, way="right", state="begun")
        note(shape=row, way="right", state="done", ms=5.0, error=0.001)
        note(shape=row, state="end")
"""


def test_a_crash_costs_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, said = tmp_path / "worker.py", []
    script.write_text(WORKER)
    monkeypatch.setattr(module, "command", lambda job, file: [sys.executable, str(script), json.dumps(job), str(file)])
    found = list(race(Made(Options(device="cuda")), "decode", [TINY, OTHER], time.time() + 60, said.append))
    assert [f.shape for f in found] == [TINY, OTHER]
    assert [f.best["way"] for f in found if f.best] == ["right", "crashes"]
    assert found[0].failed == ["crashes: ended its process, or took too long"]
    assert found[1].failed == []
    assert "about to crash" in said[0]


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(module, "command", lambda job, file: [sys.executable, str(script)])
    monkeypatch.setattr(module, "GRACE", 0.2)
    began = time.time()
    found = list(race(Made(Options(device="cuda")), "decode", [TINY], time.time() + 0.2, print))
    assert found[0].best is None
    assert found[0].failed
    assert time.time() - began < 30


def test_the_real_worker_measures_in_a_process_of_its_own(tmp_path: Path) -> None:
    """What a GPU run starts, on the CPU."""
    import subprocess

    job = {
        "part": "decode", "name": "sdpa-bf16", "options": {"device": "cpu", "replays": 1},
        "deadline": time.time() + 100, "shapes": [TINY.row()],
    }  # fmt: skip
    notes = tmp_path / "notes"
    notes.touch()
    subprocess.run(module.command(job, notes), check=True, timeout=120)
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    found = outcome(TINY, lines, 0.01)
    assert [n["state"] for n in lines] == ["begun", "done", "end"]
    assert found.best is not None
    assert found.best["ms"] > 0


def test_ways_seen_before_are_not_tried_again() -> None:
    notes: list[Any] = []
    attempts(Made(Options(device="cpu")), TINY, float("inf"), {"slow"}, notes.append)
    assert [n.get("way") for n in notes] == ["fast", "fast", None]


def test_a_dense_cache_is_measured_once_for_all_bits() -> None:
    shapes = [DecodeShape(k_bits=k, v_bits=v) for k, v in ((2, 2), (4, 4), (3, 2))] + [DecodeShape(batch=8)]
    assert len(distinct(shapes, {"k_bits": 16, "v_bits": 16})) == 2
    assert distinct(shapes, {}) == shapes
    eight = DecodeShape(batch=8)
    for fields in ({}, {"k_bits": 16, "v_bits": 16}):
        found = distinct(PRESETS["all"], fields)
        alike = [s for s in found if (s.q_heads, s.head_dim, s.batch) == (32, 128, 8)]
        assert len(alike) == (5 if not fields else 1)
        assert found.index(eight) == PRESETS["all"].index(eight), "its place, should time run out, is the first one"


def test_a_wrong_answer_of_ours_is_reported_even_if_another_way_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    import oscar_kv.bench.run as runner

    def find(part: str, name: str, options: Options) -> Contender:
        c = Made(options)
        c.name = name
        c.table = {"wrong": (0.1, 0.5), "right": (1.0, 0.001)}
        return c

    monkeypatch.setattr(runner, "find", find)
    for name, wrong in (("oscar-cuda", 1), ("fa3-bf16", 0)):
        report = Report("decode", "cpu", copy=4.0)
        compete(Job(Options(device="cpu"), (name,), print), report, "decode", [TINY])
        assert len(report.wrong) == wrong
        assert report.rows[0]["ms"] == 1.0
        assert report.rows[0]["share"] == pytest.approx(0.001)
