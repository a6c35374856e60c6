# SPDX-License-Identifier: Apache-2.0
"""What a run of ``oscar-kv bench`` is asked for, and the race that every part runs: contender by contender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .contenders import find, names
from .contenders.base import Options
from .race import Outcome, race
from .report import Report, Row
from .shapes import Shape

HIDDEN = {"shape", "way", "state", "ms", "error"}


@dataclass(frozen=True)
class Job:
    """Options of a run. contenders: empty for all of the part; say: prints a line of progress."""

    options: Options
    contenders: tuple[str, ...]
    say: Callable[[str], None]


def chosen(job: Job, part: str) -> list[str]:
    """The contenders asked for, of those that the part has; all if none of them is of this part."""
    have = names(part)
    if part != "layer":
        for name in job.contenders:
            if name not in have:
                find(part, name, job.options)  # says which there are
    return [n for n in have if not job.contenders or n in job.contenders] or have


def distinct(shapes: Sequence[Shape], fields: Row) -> list[Shape]:
    """Shapes that differ for this contender: an unquantised cache does not see the bits of the pages."""
    found: dict[tuple[object, ...], Shape] = {}
    for s in shapes:  # the first of equals keeps its place: what comes first is measured even if time runs out
        found.setdefault(tuple(v for k, v in s.row().items() if k not in fields), s)
    return list(found.values())


def compete(job: Job, report: Report, part: str, shapes: Sequence[Shape], size_of_row: bool = True) -> list[Outcome]:
    """Race every contender of a part over the shapes; rows, wrong answers and missing contenders go to the report."""
    out: list[Outcome] = []
    for name in chosen(job, part):
        contender = find(part, name, job.options)
        reason = contender.missing()
        if reason is not None:
            if part != "layer":
                report.missing[name] = reason
                job.say(f"missing: {name}: {reason}")
            continue
        if report.late:
            report.missing[name] = "not begun: the time budget was spent"
            job.say(f"skipped (budget): {name}")
            continue
        for found in race(contender, part, distinct(shapes, contender.fields()), report.deadline, job.say):
            out.append(found)
            _take(job, report, name, contender.fields(), found, contender.bytes(found.shape) if size_of_row else 0)
    report.save()
    return out


def _take(job: Job, report: Report, name: str, fields: Row, found: Outcome, size: int) -> None:
    for line in found.failed:
        report.problems.append(f"{name}, {found.shape}: {line}")
    for line in found.wrong:
        job.say(f"WRONG {name}, {found.shape}: {line}")
    if found.best is None:
        why = "; ".join([*found.wrong, *found.failed]) or "no attempt"
        job.say(f"no time for {name}, {found.shape}: {why}")
        if found.wrong:
            report.wrong.append(f"{name}, {found.shape}: {'; '.join(found.wrong)}")
        return
    if found.wrong and name.startswith("oscar"):
        report.wrong.append(f"{name}, {found.shape}: {'; '.join(found.wrong)}")
    best = found.best
    more = {k: v for k, v in best.items() if k not in HIDDEN}
    way = {} if best["way"] == "default" else {"way": best["way"]}
    row = report.add(name, {**found.shape.row(), **fields}, best["ms"], size, error=best["error"], **way, **more)
    share = f", share {row['share']:.3f}" if row.get("share") else ""
    times = f", {row['times_faster']:.2f} times {row['fastest_bf16']}" if row.get("times_faster") else ""
    job.say(f"{name}, {found.shape}: {best['ms']:.4f} ms{share}{times}, error {best['error']:.1e}")
