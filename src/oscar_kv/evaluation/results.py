# SPDX-License-Identifier: Apache-2.0
"""Results files: what was measured, by which command, on which machine. One JSON document, validated both ways."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import OscarError
from .needles import Retrieval
from .stats import bootstrap_mean

Share = Annotated[float, Field(ge=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Meta(_Strict):
    """Where the rows come from. ``commit``: the checkout's, "-dirty" where files differ; "unknown" outside one."""

    command: str
    commit: str
    date: str
    machine: str
    gpu: str | None = None
    versions: dict[str, str]
    model: str
    artifact_sha256: str | None = None
    seed: int = 0
    notes: str = ""


class QualityRow(_Strict):
    """One recipe on one kind of text: means over texts, positions ≥ 512; ``tokens`` of all texts together.

    bpe: bits an element of the whole cache at this context; bpe_history: of the codes and their metadata alone.
    windows: (sink, recent) tokens in full precision; None where everything is.
    """

    recipe: str
    k_bits: int = Field(ge=1, le=16)
    v_bits: int = Field(ge=1, le=16)
    dataset: str
    context: int = Field(ge=1)
    tokens: int = Field(ge=1)
    kl: float
    ppl: float = Field(gt=0)
    ppl_bf16: float = Field(gt=0)
    bpe: float = Field(gt=0)
    bpe_history: float | None = Field(default=None, gt=0)
    windows: tuple[int, int] | None = None
    texts: int = Field(default=1, ge=1)
    kl_ci95: tuple[float, float] | None = None
    kl_by_text: list[float] = []
    top1: Share | None = None
    artifact_sha256: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return "quality", self.recipe, self.dataset, self.context


class NeedleRow(_Strict):
    """One recipe's retrieval; ``right`` holds a digit a sample (1: found), so that recipes can be compared in pairs."""

    recipe: str
    task: Literal["niah"] = "niah"
    context: int = Field(ge=1)
    n: int = Field(ge=1)
    score: Share
    ci95: tuple[Share, Share]
    prefill: Literal["strict", "exact"] = "strict"
    dataset: str = "prose"
    right: str = ""
    artifact_sha256: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.task, self.recipe, self.dataset, self.context, self.prefill


Row = QualityRow | NeedleRow


class Results(_Strict):
    """A whole file."""

    meta: Meta
    rows: list[Row]


def needle_row(
    found: Retrieval,
    dataset: str = "prose",
    prefill: Literal["strict", "exact"] = "strict",
    artifact_sha256: str | None = None,
) -> NeedleRow:
    """The row of a retrieval run."""
    return NeedleRow(
        recipe=found.recipe, context=found.context, n=len(found.right), score=found.score, ci95=found.ci95,
        prefill=prefill, dataset=dataset, right="".join(str(int(x)) for x in found.right),
        artifact_sha256=artifact_sha256,
    )  # fmt: skip


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Bootstrap interval of the mean over texts; None for a single text."""
    return bootstrap_mean(values, seed) if len(values) > 1 else None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> str:
    """What the environment variable OSCAR_KV_COMMIT says, for copies whose history is missing or another.

    Without it the checkout's commit, with "-dirty" if source files differ from it; outside a checkout "unknown".
    """
    if given := os.environ.get("OSCAR_KV_COMMIT"):
        return given
    head = _git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return head + ("-dirty" if changed else "")


def machine() -> str:
    """System, processor and number of cores; never the host's name."""
    name = platform.processor() or platform.machine()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        name = found.group(1) if found else name
    except OSError:
        pass
    return f"{platform.system()} {platform.machine()}, {name}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    out = {"python": platform.python_version()}
    for name in ("torch", "transformers", "gguf", "numpy"):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def make_meta(
    model: str, *, command: str | None = None, artifact_sha256: str | None = None, seed: int = 0, notes: str = "",
    device: str = "cpu",
    commit_id: str | None = None,
) -> Meta:  # fmt: skip
    """Meta of this process. ``model``: a name, no path. ``command``: by default this process's own, without folders."""
    import torch

    own = " ".join([Path(sys.argv[0]).name, *(_bare(a) for a in sys.argv[1:])])
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return Meta(
        command=command or own, commit=commit_id or commit(), date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=machine(), gpu=gpu, versions=versions(), model=model, artifact_sha256=artifact_sha256, seed=seed,
        notes=notes,
    )  # fmt: skip


def _bare(argument: str) -> str:
    """A path's last part: where files lie on one machine tells a reader nothing."""
    return Path(argument).name if argument.startswith(("/", "~", "..")) else argument


def write(path: str | Path, meta: Meta, rows: Sequence[Row]) -> Path:
    """Validate and write (atomically). OscarError that names the row and the field."""
    path = Path(path)
    try:
        results = Results.model_validate({"meta": meta.model_dump(), "rows": [r.model_dump() for r in rows]})
    except ValidationError as error:
        raise OscarError(f"{path}: results are not valid: {_problems(error)}") from error
    document = {"meta": results.meta.model_dump(mode="json"), "rows": [_tidy(r) for r in results.rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def _tidy(row: Row) -> dict[str, Any]:
    """A row without the optional fields that were not given, figures to six digits."""
    shown = row.model_dump(mode="json", exclude_defaults=False)
    fixed = {"task"}
    out = {k: v for k, v in shown.items() if k in fixed or v != type(row).model_fields[k].default}

    def short(x: Any) -> Any:
        if isinstance(x, float):
            return float(f"{x:.6g}")
        return [short(y) for y in x] if isinstance(x, list) else x

    return {k: short(v) for k, v in out.items()}


def read(path: str | Path) -> Results:
    """Read and validate. OscarError that names the file, the row and the field."""
    path = Path(path)
    try:
        return Results.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OscarError(f"{path}: cannot be read ({error})") from error
    except ValidationError as error:
        raise OscarError(f"{path}: not a results file: {_problems(error)}") from error


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4])


def merge(runs: Sequence[Results]) -> Results:
    """Rows of several runs of one measurement; a later run's row replaces an earlier one of the same key.

    Meta is the last run's; rows name their own artifacts. OscarError unless model, seed and GPU agree.
    """
    if not runs:
        raise OscarError("there is nothing to merge")
    last = runs[-1].meta
    for run in runs:
        for field in ("model", "seed", "gpu"):
            if getattr(run.meta, field) != getattr(last, field):
                raise OscarError(
                    f"runs cannot be merged: {field} is {getattr(run.meta, field)!r} in one and "
                    f"{getattr(last, field)!r} in another"
                )
    rows = {row.key: row for run in runs for row in run.rows}
    return Results(meta=last, rows=list(rows.values()))
