#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rebuild src/oscar_kv/data: fetch the Debian and Python packages below, cut the texts, write them gzipped.

    python tools/make_data.py [--packages FOLDER]

Needs a Debian system with ``apt-get download`` and ``dpkg-deb``, and pip. FOLDER keeps the downloads. Debian moves on:
where the version named here is no longer offered, take it from snapshot.debian.org and put it in FOLDER.
"""

from __future__ import annotations

import argparse
import gzip
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "src" / "oscar_kv" / "data"
STDLIB = "libpython3.11-stdlib=3.11.2-6+deb12u9"
PYTHON_DOC = "python3.11-doc=3.11.2-6+deb12u9"
AUSTEN = "r-cran-janeaustenr=1.0.0-1"
JARGON = "jargon=4.0.0-5.3"
DEVIL = "dict-devil=1.0-13.1"
DEBIAN = (STDLIB, PYTHON_DOC, AUSTEN, JARGON, DEVIL)
WHEELS = ("click==8.1.8", "networkx==3.4.2", "scipy==1.15.3")
CODE_CHARS = 52_000
PROSE_CHARS = 56_000


def fetch(folder: Path) -> Path:
    """Download and unpack every package into ``folder/NAME``."""
    for package in DEBIAN:
        name = package.split("=")[0]
        if not list(folder.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)
        (deb,) = folder.glob(f"{name}_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(deb), str(folder / name)], check=True)
    for package in WHEELS:
        name = package.split("==")[0]
        if not list(folder.glob(f"{name}-*.whl")):
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*pip, "-d", str(folder), package], check=True)
        (wheel,) = folder.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / name)
    return folder


def cut(text: str, chars: int) -> str:
    """The beginning of ``text``, up to the last whole line within ``chars``."""
    text = text.replace("\r\n", "\n")
    if len(text) <= chars:
        return text
    return text[: text.rindex("\n", 0, chars) + 1]


def austen(folder: Path) -> dict[str, str]:
    """The six novels of an R package: a database of compressed, serialised character vectors, one element a line."""
    database = folder / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    raw = database.read_bytes()
    novels, position = {}, 0  # the records follow one another: the index file is not needed
    while position + 8 < len(raw):
        stream = zlib.decompressobj()
        data = stream.decompress(raw[position + 4 :])
        position = len(raw) - len(stream.unused_data)
        lines = character_vector(data)
        title = next(line.strip() for line in lines if line.strip()).title()
        novels[title] = "\n".join(lines) + "\n"
    return novels


def character_vector(data: bytes) -> list[str]:
    """The strings of an R object serialised in XDR format that is a single character vector (STRSXP of CHARSXP)."""
    start = data.index(b"\x00\x00\x00\x10", 10)
    count, at = int.from_bytes(data[start + 4 : start + 8], "big"), start + 8
    lines = []
    for _ in range(count):
        if data[at + 3] != 9:
            raise SystemExit("unexpected element in the R character vector")
        length = int.from_bytes(data[at + 4 : at + 8], "big")
        lines.append(data[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return lines


def novel(title: str) -> Callable[[Path], str]:
    """From the first chapter on: what stands before is title and date."""

    def read(folder: Path) -> str:
        text = austen(folder)[title]
        return text[re.search(r"^\s*chapter (1|i)\b", text, re.IGNORECASE | re.MULTILINE).start() :].lstrip()  # type: ignore[union-attr]

    return read


def jargon(folder: Path) -> str:
    """The essays before the lexicon, without the markup of the info format."""
    raw = (folder / "jargon/usr/share/info/jargon.info.gz").read_bytes()
    text = gzip.decompress(raw).decode("latin-1")
    essays = text[text.index("Node: Jargon Construction,") : text.index("Node: The Jargon Lexicon,")]
    nodes = [node.split("\n", 1)[1] for node in essays.split("\x1f\nFile: jargon.info, ") if "\n" in node]
    return re.sub(r"\* Menu:\n(\n|\*.*\n)*", "", "\n".join(nodes)).replace("\x1f", "")


def devil(folder: Path) -> str:
    raw = gzip.decompress((folder / "dict-devil/usr/share/dictd/devil.dict.dz").read_bytes()).decode()
    return raw[raw.index("_The Devil's Dictionary_ was begun") :]


def manual(*pages: str) -> Callable[[Path], str]:
    root = "python3.11-doc/usr/share/doc/python3.11/html/_sources"
    return lambda folder: "\n".join((folder / root / f"{page}.rst.txt").read_text() for page in pages)


def module(path: str) -> Callable[[Path], str]:
    return lambda folder: (folder / path).read_text()


def stdlib(name: str) -> Callable[[Path], str]:
    return module(f"libpython3.11-stdlib/usr/lib/python3.11/{name}.py")


TEXTS: dict[str, tuple[Callable[[Path], str], int]] = {
    "calibration/code/statistics": (stdlib("statistics"), CODE_CHARS),
    "calibration/code/tarfile": (stdlib("tarfile"), CODE_CHARS),
    "calibration/code/difflib": (stdlib("difflib"), CODE_CHARS),
    "calibration/code/shutil": (stdlib("shutil"), CODE_CHARS),
    "calibration/prose/devils_dictionary": (devil, PROSE_CHARS),
    "calibration/prose/python_howtos": (manual("howto/functional", "howto/unicode", "howto/sockets"), PROSE_CHARS),
    "evaluation/code/mailbox": (stdlib("mailbox"), CODE_CHARS),
    "evaluation/code/click_core": (module("click/click/core.py"), CODE_CHARS),
    "evaluation/code/networkx_graph": (module("networkx/networkx/classes/graph.py"), CODE_CHARS),
    "evaluation/code/scipy_optimize": (module("scipy/scipy/optimize/_optimize.py"), CODE_CHARS),
    "evaluation/prose/persuasion": (novel("Persuasion"), PROSE_CHARS),
    "evaluation/prose/jargon_essays": (jargon, PROSE_CHARS),
    "evaluation/prose/northanger_abbey": (novel("Northanger Abbey"), PROSE_CHARS),
    "evaluation/prose/python_faq": (manual("faq/general", "faq/design", "faq/programming"), PROSE_CHARS),
    "haystack/emma": (novel("Emma"), 1_000_000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="folder that keeps the downloads")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.packages or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        fetch(folder)
        for name, (read, chars) in TEXTS.items():
            text = cut(read(folder), chars)
            path = DATA / f"{name}.txt.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
            print(f"{name:40s} {len(text):9,d} characters {path.stat().st_size:9,d} bytes")


if __name__ == "__main__":
    main()
