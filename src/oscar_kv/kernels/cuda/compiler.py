# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ to machine code with NVRTC, cached on disk by the hash of everything that goes in."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ...errors import OscarError

HEADERS = ("common.cuh", "fragments.cuh", "line.cuh", "ptx.cuh", "state.cuh", "window.cuh")
"""Of the decode kernels."""
_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--extra-device-vectorization")


class CompileError(OscarError):
    """NVRTC is missing or refused the source."""


@dataclass(frozen=True)
class Usage:
    """What a kernel takes of a multiprocessor, as the assembler reports it."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Binary:
    """Machine code for one architecture, and the use of registers of its kernels by name (empty on a cache hit)."""

    cubin: bytes
    usage: dict[str, Usage]


def source(name: str) -> str:
    """A file of the ``source`` folder."""
    return resources.files(__package__).joinpath("source", name).read_text(encoding="utf-8")


def cache_folder() -> Path:
    """$OSCAR_KV_CACHE, else $XDG_CACHE_HOME/oscar_kv, else ~/.cache/oscar_kv."""
    own = os.environ.get("OSCAR_KV_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "oscar_kv"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(
            f"the CUDA kernels need NVRTC ({error}): pip install 'oscar-kv[cuda]', or choose Triton or torch"
        ) from None
    return nvrtc


def _check(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


def parse_usage(log: str) -> dict[str, Usage]:
    """The assembler's report (-v) by kernel name."""
    out: dict[str, Usage] = {}
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", log):
        name = re.search(r"Compiling entry function '(\w+)'", part)
        used = re.search(r"Used (\d+) registers", part)
        if not name or not used:
            continue
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        frame, stores, loads = (int(x) for x in stack.groups()) if stack else (0, 0, 0)
        out[name[1]] = Usage(int(used[1]), stores + loads, frame, int(shared[1]) if shared else 0)
    return out


def compile_source(name: str, header: str, capability: tuple[int, int], headers: tuple[str, ...] = HEADERS) -> Binary:
    """Compile a file of the ``source`` folder with ``header`` as config.cuh, without the cache.

    headers: the files of that folder that it includes.

    Raises CompileError with the compiler's log.
    """
    nvrtc = _nvrtc()
    included = {"config.cuh": header, **{h: source(h) for h in headers}}
    options = [o.encode() for o in (*_OPTIONS, f"--gpu-architecture=sm_{capability[0]}{capability[1]}")]
    program = _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            source(name).encode(),
            name.encode(),
            len(included),
            [h.encode() for h in included.values()],
            [h.encode() for h in included],
        ),
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        size = _check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
        raw = bytearray(b" " * size)
        _check(nvrtc, (*nvrtc.nvrtcGetProgramLog(program, raw), None))
        log = raw.decode(errors="replace").rstrip("\0 ")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name} does not compile for sm_{capability[0]}{capability[1]} ({status.name}):\n{log}")
        cubin = bytearray(b" " * _check(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc, (*nvrtc.nvrtcGetCUBIN(program, cubin), None))
        return Binary(bytes(cubin), parse_usage(log))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_cached(name: str, header: str, capability: tuple[int, int], headers: tuple[str, ...] = HEADERS) -> bytes:
    """Machine code, from the disk cache where the same source, header, options and compiler were seen before."""
    version = _check(_nvrtc(), _nvrtc().nvrtcVersion())
    digest = hashlib.sha256()
    for part in (name, source(name), header, *(source(h) for h in headers), *_OPTIONS, str(version), str(capability)):
        digest.update(part.encode() + b"\0")
    path = cache_folder() / "cuda" / f"{digest.hexdigest()[:32]}.sm_{capability[0]}{capability[1]}.cubin"
    if path.is_file():
        return path.read_bytes()
    cubin = compile_source(name, header, capability, headers).cubin
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as fresh:
        fresh.write(cubin)
    os.replace(fresh.name, path)
    return cubin
