# SPDX-License-Identifier: Apache-2.0
"""What the commands share: messages, tables with a JSON twin, progress, reading input, missing extras."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ..errors import OscarError

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)
EXTRAS = {"transformers": "transformers", "matplotlib": "demo", "gguf": "demo"}
"""Package → the extra of oscar-kv that installs it."""


def print_error(message: str) -> None:
    """One red message on stderr, never wrapped, never read as markup."""
    errors.print(Text(f"error: {message}", style="bold red"), soft_wrap=True)


def need(package: str, what_for: str) -> ModuleType:
    """Import an optional package. Raises OscarError that says how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        extra = EXTRAS.get(package.split(".")[0], "demo")
        raise OscarError(f"{what_for} needs {package} ({error}): pip install 'oscar-kv[{extra}]'") from error


def quiet_transformers() -> None:
    """Switch off Transformers' own bars, which would draw over ours."""
    need("transformers", "loading a model")
    from transformers.utils import logging

    logging.disable_progress_bar()


def model_name(model: str) -> str:
    """What artifacts and results call a model: of a folder or file its name, not where it lies on this machine."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def number(value: float | None, digits: int = 4) -> str:
    """A figure for a table; ``–`` where there is none."""
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.3g}"


def size(n: int) -> str:
    """Bytes for people: 1024-based, three significant digits."""
    value = float(n)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """A rich table: the first column is text, the rest are figures."""
    out = Table(title=title, title_justify="left", title_style="bold", caption=caption or None, caption_justify="left")
    for i, name in enumerate(columns):
        words = [word for text in (name, *(row[i] for row in rows)) for word in text.split()]
        least = max(map(cell_len, words), default=0)
        out.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0, min_width=least)
    for row in rows:
        out.add_row(*(Text(cell) for cell in row))
    return out


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Print a table with every figure whole: on narrow terminals, and in pipes, it is wider than the screen."""
    made = table(title, columns, rows, caption)
    least = Measurement.get(console, console.options.update(width=1000), made).minimum
    if least > console.width:
        made.width = least
    console.print(made, crop=False)


def check_outputs(*named: tuple[str, Path | None], devices: Sequence[str] = ("--json",)) -> None:
    """Raise OscarError for an output file that could not be written, before minutes of work go into it.

    named: (option, path or None). devices: options that may name a pipe or a device, such as /dev/stdout.
    """
    seen: dict[Path, str] = {}
    for option, path in named:
        if path is None or (path.exists() and not path.is_file() and not path.is_dir() and option in devices):
            continue
        if path.is_dir():
            raise OscarError(f"{option} {path}: is a folder; name a file in it, such as {path / _example(option)}")
        if path.exists() and not path.is_file():
            raise OscarError(f"{option} {path}: is no ordinary file; name one")
        other = seen.setdefault(path.absolute(), option)
        if other != option:
            raise OscarError(f"{option} {path}: {other} names the same file; give each its own")
        _check_writable(option, path)


def _check_writable(option: str, path: Path) -> None:
    folder = next(p for p in path.absolute().parents if p.exists())
    if not folder.is_dir():
        raise OscarError(f"{option} {path}: {folder} is a file, not a folder; name a file in a folder")
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError("the file is there and write-protected")
        with tempfile.TemporaryFile(dir=folder):  # permission bits say nothing of read-only or virtual file systems
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise OscarError(f"{option} {path}: cannot be written, {folder} takes no file ({why}); name another") from error


def _example(option: str) -> str:
    return {"-o": "model.oscar.safetensors", "--json": "out.json", "--png": "out.png", "--html": "out.html"}.get(
        option, option.strip("-").split("-")[-1] + ".safetensors"
    )


def write_json(path: str | Path, document: Any) -> None:
    """The JSON twin of what was printed. Raises OscarError if the file cannot be written."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OscarError(f"--json {path}: cannot be written ({error})") from error


def read_text(path: str | Path, option: str) -> str:
    """A UTF-8 text file named by an option. Raises OscarError that names file and option."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OscarError(f"{option} {path}: cannot be read as UTF-8 text ({error})") from error
    if not text.strip():
        raise OscarError(f"{option} {path}: the file is empty; give it some text")
    return text


class Steps:
    """Progress of a job of known steps: a live bar on a terminal, a line a step elsewhere (logs, CI)."""

    def __init__(self) -> None:
        self._live = console.is_terminal
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    @contextmanager
    def task(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """A named step. Yields a callback (done, total) for what the step itself can count."""
        began, last = time.monotonic(), -1
        task = self._bar.add_task(name, total=None) if self._live else None
        if task is None:
            console.print(f"[{began - self._start:5.0f} s] {name} …", markup=False)

        def report(done: int, total: int) -> None:
            nonlocal last
            if task is not None:
                self._bar.update(task, completed=done, total=total)
            elif total > 1 and done < total and done * 10 // total > max(last, 0):
                last = done * 10 // total
                now = time.monotonic()
                left = (now - began) / done * (total - done)
                console.print(
                    f"[{now - self._start:5.0f} s]   {100 * done // total} %, about {left:.0f} s left", markup=False
                )

        yield report
        if task is not None:
            total = self._bar.tasks[task].total or 1
            self._bar.update(task, completed=total, total=total)
        else:
            took = time.monotonic() - began
            console.print(f"[{time.monotonic() - self._start:5.0f} s]   done in {took:.0f} s", markup=False)


def versions() -> dict[str, str | None]:
    """Versions of what results depend on; None where a package is not installed. Imports nothing."""

    def of(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    found = {name: of(name) for name in ("torch", "transformers", "safetensors", "numpy", "pydantic")}
    return {"python": platform.python_version(), **found}


def show_versions(own: str, json_file: str | None) -> None:
    """Print the versions, and write them as JSON if asked to."""
    found = {"oscar-kv": own, **versions()}
    for name, value in found.items():
        console.print(f"{name:13s} {value or 'not installed'}", markup=False)
    if json_file:
        write_json(json_file, {"versions": found, "platform": platform.platform(), "argv": sys.argv[1:]})
