# SPDX-License-Identifier: Apache-2.0
"""Calibration text: from files, folders, the texts the package ships, or a dataset of the Hugging Face hub."""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CalibrationError

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
BUILTIN = {"builtin": ("code", "prose"), "builtin:code": ("code",), "builtin:prose": ("prose",)}
HUB_ROWS = 4096
"""Rows read of a hub dataset; it is streamed, and 8,192 tokens need far fewer."""


@dataclass(frozen=True)
class Document:
    """One text, or one conversation (``messages``: dicts with role and content); ``group`` is its kind, if any."""

    name: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    group: str = ""


TextSource = Iterable[Document]


def load_texts(source: str | Path) -> list[Document]:
    """Documents of a file, a folder, a built-in set of texts, or a dataset of the hub.

    FILE: .txt, .md, .py, .jsonl with "text" or "messages", or .gz of one; a folder of those; ``builtin`` (``:code``,
    ``:prose``); ``NAME`` or ``NAME:CONFIG`` of the hub, which needs the package ``datasets``.
    Raises CalibrationError that names the file, the line and the field.
    """
    name = str(source)
    if name in BUILTIN:
        from ..demo.texts import load

        return [
            Document(text.name, text.text, group=kind) for kind in BUILTIN[name] for text in load(kind, "calibration")
        ]
    if name.startswith("builtin"):
        raise CalibrationError(f"data {name!r}: built-in texts are {', '.join(BUILTIN)}")
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _suffix(p) in SUFFIXES)
        if not files:
            raise CalibrationError(f"{path}: no {', '.join(SUFFIXES)} file (or .gz of one) in this folder")
        return [document for file in files for document in _read(file)]
    if path.is_file():
        if _suffix(path) not in SUFFIXES:
            raise CalibrationError(
                f"{path}: cannot read {path.suffix or 'a file without suffix'}; use {', '.join(SUFFIXES)} or .gz of one"
            )
        return _read(path)
    if path.is_absolute() or name.startswith(".") or _suffix(path) in SUFFIXES:
        raise CalibrationError(f"data {name!r}: no such file or folder")
    return _hub(name)


def describe(source: Any, texts: Sequence[Document]) -> str:
    """One line for the artifact; of a path only its name."""
    what = "texts"
    if isinstance(source, (str, Path)):
        what = Path(source).name if Path(source).exists() else str(source)
    return f"{what} ({len(texts)} document{'s' if len(texts) != 1 else ''})"


def _suffix(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _read(path: Path) -> list[Document]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: not readable as UTF-8 text ({error})") from error
    if _suffix(path) != ".jsonl":
        if not text.strip():
            raise CalibrationError(f"{path}: the file is empty")
        return [Document(path.name, text)]
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise CalibrationError(f"{path}, line {number}: not JSON ({error})") from error
            out.append(_document(row, f"{path}, line {number}"))
    if not out:
        raise CalibrationError(f"{path}: the file is empty")
    return out


def _document(row: Any, where: str) -> Document:
    if isinstance(row, dict):
        text, messages = row.get("text"), row.get("messages")
        if isinstance(text, str) and text:
            return Document(where, text)
        if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
            return Document(where, messages=tuple(messages))
    raise CalibrationError(f'{where}: needs a field "text" (a string) or "messages" (a list of role and content)')


def _hub(name: str) -> list[Document]:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise CalibrationError(
            f"data {name!r}: no such file or folder, and datasets of the hub need the package: pip install datasets"
        ) from error
    repo, _, config = name.partition(":")
    try:
        rows = list(islice(load_dataset(repo, config or None, split="train", streaming=True), HUB_ROWS))
    except Exception as error:  # the package raises many kinds, each for a name, network or format problem
        raise CalibrationError(f"dataset {name!r} cannot be loaded: {error}") from error
    keep = [r for r in rows if r.get("text") or r.get("messages")]
    if rows and not keep:
        raise CalibrationError(f'dataset {name!r}: its rows have {", ".join(rows[0])}, not "text" or "messages"')
    return [_document(row, f"{name}, row {i}") for i, row in enumerate(keep)]


def _token_ids(document: Document, tokenizer: Any, chat_template: bool) -> list[int]:
    if chat_template:
        if not getattr(tokenizer, "chat_template", None):
            raise CalibrationError("chat_template: the tokenizer has no chat template; calibrate on plain text instead")
        messages = list(document.messages) or [{"role": "user", "content": document.text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if document.messages:
        raise CalibrationError(
            f"{document.name}: holds messages, which only the chat template can lay out: pass --chat-template"
        )
    return list(tokenizer(document.text, verbose=False)["input_ids"])


def _interleaved(documents: Iterable[Document]) -> Iterator[Document]:
    """One document of each group in turn, so that a small budget sees every kind."""
    groups: dict[str, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.group, []).append(document)
    for row in zip_longest(*groups.values()):
        yield from (document for document in row if document is not None)


def chunks(
    texts: Iterable[Document], tokenizer: Any, tokens: int = 8192, chunk: int = 2048, chat_template: bool = False
) -> list[Tensor]:
    """Token ids (1-D int64, on the CPU) of at most ``chunk`` tokens each and ``tokens`` in all.

    The first chunk of every document, then the second, and so on; short documents and remainders are joined. Warns if
    the texts hold fewer tokens than asked; ``collect`` refuses what lies below its floor.
    """
    if tokens < 1 or chunk < 1:
        raise CalibrationError(f"tokens={tokens}, chunk={chunk}: both must be at least 1")
    out: list[list[int]] = []
    rest: list[int] = []
    later: list[list[list[int]]] = []
    wanted = -(-tokens // chunk)
    for document in _interleaved(texts):
        ids = _token_ids(document, tokenizer, chat_template)
        whole = len(ids) // chunk
        pieces = [ids[i * chunk : (i + 1) * chunk] for i in range(whole)]
        rest += ids[whole * chunk :]
        out += pieces[:1]
        later.append(pieces[1:])
        while len(rest) >= chunk:
            out.append(rest[:chunk])
            rest = rest[chunk:]
        if len(out) >= wanted:
            break
    out += [piece for row in zip_longest(*later) for piece in row if piece is not None]
    if rest:
        out.append(rest)
    kept: list[Tensor] = []
    left = tokens
    for piece in out:
        if left > 0:
            kept.append(torch.tensor(piece[:left], dtype=torch.int64))
            left -= len(kept[-1])
    if left > 0:
        warnings.warn(f"the calibration texts hold {tokens - left} tokens, {tokens} were asked for", stacklevel=2)
    return kept
