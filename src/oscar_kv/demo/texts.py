# SPDX-License-Identifier: Apache-2.0
"""The texts that the package ships; calibration and evaluation share no file. Sources and licences: data/README.md."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Literal

from ..errors import OscarError

Kind = Literal["code", "prose"]
Split = Literal["calibration", "evaluation"]

# Fixed, so that results name the same texts in the same order everywhere.
NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("code", "calibration"): ("statistics", "tarfile", "difflib", "shutil"),
    ("prose", "calibration"): ("devils_dictionary", "python_howtos"),
    ("code", "evaluation"): ("click_core", "networkx_graph", "scipy_optimize", "mailbox"),
    ("prose", "evaluation"): ("persuasion", "jargon_essays", "northanger_abbey", "python_faq"),
}


@dataclass(frozen=True)
class Text:
    """One shipped text; ``name`` is how results and reports call it."""

    name: str
    text: str


def load(kind: str, split: str) -> list[Text]:
    """The texts of one kind and split. Evaluation: four texts of at least 9,000 tokens each (SmolLM2's tokenizer).

    Raises:
        OscarError: no such kind or split, or the installation lacks a file.
    """
    if (kind, split) not in NAMES:
        raise OscarError(
            f"no shipped texts of kind {kind!r}, split {split!r}: "
            "kinds are code and prose, splits calibration and evaluation"
        )
    return [Text(name, _read(split, kind, name)) for name in NAMES[kind, split]]


def haystack() -> str:
    """One novel of about 200,000 tokens, in neither split, from which needle tests cut their haystacks."""
    return _read("haystack", "emma")


def _read(*parts: str) -> str:
    file: Traversable = files("oscar_kv") / "data"
    for part in (*parts[:-1], f"{parts[-1]}.txt.gz"):
        file = file / part
    try:
        return gzip.decompress(file.read_bytes()).decode()
    except OSError as error:
        raise OscarError(f"{file}: a shipped text is missing or damaged ({error}); reinstall oscar-kv.") from error
