# SPDX-License-Identifier: Apache-2.0
"""Rows and where they come from: the results file, written after every row, and the table on the screen."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..errors import OscarError
from ..evaluation.results import commit, machine, versions
from .timing import copy_bandwidth

Row = dict[str, Any]
KEY = ("q_heads", "kv_heads", "head_dim", "batch", "context", "prefix", "chunk", "layers", "hidden", "mlp", "vocab")
"""Fields in which rows must agree to be compared."""
FA3 = "fa3-bf16"
"""The contender that readers know best: compared with it too, where it was measured."""


def tidy(value: Any) -> Any:
    """Figures to six digits; infinities and NaN, which JSON lacks, as None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: tidy(v) for k, v in value.items()}
    return [tidy(v) for v in value] if isinstance(value, (list, tuple)) else value


@dataclass
class Report:
    """What was measured so far. deadline: time after which nothing new begins."""

    part: str
    device: str
    file: Path | None = None
    seed: int = 0
    deadline: float = math.inf
    notes: str = ""
    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    copy: float = 0.0
    extra: Row = field(default_factory=dict)

    @property
    def late(self) -> bool:
        return time.time() > self.deadline

    @property
    def is_benchmark(self) -> bool:
        """Whether the figures say anything about speed."""
        return torch.device(self.device).type == "cuda"

    def measure_copy(self, when: str) -> float:
        """Copy bandwidth in TB/s; the first measurement is the yardstick, later ones are recorded beside it."""
        found = copy_bandwidth(self.device)
        self.copy = self.copy or found
        self.extra[f"copy_tb_s_{when}"] = found
        if self.is_benchmark:
            torch.cuda.empty_cache()  # contenders have processes of their own
        self.save()
        return found

    def add(self, op: str, shape: Row, ms: float, size: int = 0, **more: Any) -> Row:
        """Append a row and save. size: bytes that a call must move; gives the share of copy bandwidth."""
        row = {"op": op, **shape, "ms": ms}
        if size:
            row |= {"bytes": size, "share": size / self.copy / 1e9 / ms if self.copy else None}
        row |= more
        self.rows.append(row)
        self._compare(row)
        self.save()
        return row

    def _compare(self, new: Row) -> None:
        """times_faster of our rows of the new row's shape: the time of the fastest BF16 kernel, which is named, over
        theirs; times_faster_fa3: that of FlashAttention-3. Neither is there without a row of that shape."""
        same = [r for r in self.rows if all(r.get(k) == new.get(k) for k in KEY)]
        theirs = {r["op"]: r["ms"] for r in same if r["op"].endswith("-bf16")}
        for row in same:
            if row["op"].startswith("oscar") and theirs:
                row["fastest_bf16"] = min(theirs, key=lambda op: theirs[op])
                row["times_faster"] = min(theirs.values()) / row["ms"]
                if FA3 in theirs:
                    row["times_faster_fa3"] = theirs[FA3] / row["ms"]

    def meta(self) -> Row:
        found = versions()
        for name in ("triton", "cuda-bindings", "vllm", "flashinfer-python", "sglang"):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        if torch.version.cuda:
            found["cuda"] = torch.version.cuda
        words = [Path(a).name if a.startswith(("/", "~", ".")) else a for a in sys.argv]
        words[0] = "oscar-kv" if words[0] == "__main__.py" else words[0]
        gpu = torch.cuda.get_device_name(self.device) if self.is_benchmark else None
        notes = self.notes if self.is_benchmark else f"NO BENCHMARK: a tiny case on the CPU. {self.notes}"
        return {
            "command": " ".join(words), "commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "machine": machine(), "gpu": gpu, "versions": found, "model": None, "artifact_sha256": None,
            "seed": self.seed, "copy_tb_s": self.copy, **self.extra, "missing": self.missing,
            "problems": self.problems, "wrong": self.wrong, "notes": notes,
        }  # fmt: skip

    def save(self) -> None:
        """Write the results file, whole or not at all. Raises OscarError."""
        if self.file is None:
            return
        part = self.file.with_name(self.file.name + ".part")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            document = tidy({"meta": self.meta(), "rows": self.rows})
            part.write_text(
                json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
            )
            part.replace(self.file)
        except OSError as error:
            raise OscarError(f"--json {self.file}: cannot be written ({error})") from error


def cells(rows: Sequence[Row], columns: Sequence[tuple[str, str, int]]) -> list[list[str]]:
    """Text of a table: columns are (title, field, digits); – where a row lacks the field."""

    def text(value: Any, digits: int) -> str:
        if value is None:
            return "–"
        if isinstance(value, float):
            return f"{value:.1e}" if digits < 0 else f"{value:.{digits}f}"
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

    return [[text(row.get(name), digits) for _, name, digits in columns] for row in rows]
