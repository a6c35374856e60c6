# SPDX-License-Identifier: Apache-2.0
"""Data sets of others, read where the user has them: by path, or out of an installed package. None comes with us."""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import OscarError


def package_file(package: str, distribution: str, *parts: str) -> Path:
    """A data file of an installed package (which is not imported). OscarError that says how to install it."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise OscarError(f"the package {distribution} is not installed: pip install {distribution}, or give a path")
    path = Path(places[0]).joinpath(*parts)
    if not path.is_file():
        raise OscarError(f"{distribution} is installed, but lacks {'/'.join(parts)}: give a path")
    return path


def read_jsonl(path: str | Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Objects, one a line (.gz too), each with ``fields`` as texts. OscarError that names the line and the field."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise OscarError(f"{path}: cannot be read as JSON lines ({error})") from error
    out = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise OscarError(f"{path}, line {number}: not JSON ({error})") from error
        for field in fields:
            if not isinstance(item, dict) or not isinstance(item.get(field), str):
                raise OscarError(f"{path}, line {number}: the field {field!r} is missing or not a text")
        out.append(item)
    if not out:
        raise OscarError(f"{path}: there are no items in it")
    return out


def take(lengths: Sequence[int], room: int, most: int | None = None) -> list[int]:
    """Indices, in order, of items that fit together: each that still fits is taken, at most ``most`` of them."""
    out: list[int] = []
    for i, length in enumerate(lengths):
        if most is not None and len(out) == most:
            break
        if length <= room:
            out.append(i)
            room -= length
    return out
