# SPDX-License-Identifier: Apache-2.0
"""Fills the kernel cache for a device that is not here: ``oscar-kv bench WHAT --compile-only 9.0``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from ..errors import OscarError
from ..kernels.base import StoreTables
from .inputs import random_codec
from .shapes import Shape

Unit = tuple[str, str, tuple[str, ...]]
"""(source file, config.cuh, other headers)"""


def parse_capability(text: str) -> tuple[int, int]:
    """``9.0`` → (9, 0). Raises OscarError."""
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise OscarError(f"--compile-only {text}: give a compute capability, such as 9.0")
    return int(major), int(minor)


def units(part: str, s: Shape, capability: tuple[int, int]) -> Iterator[Unit]:
    """What a part compiles for a shape in BF16 when it runs."""
    from ..kernels.cuda.compiler import HEADERS
    from ..kernels.cuda.dequantise import DEQUANTISE_HEADERS, DequantiseSpec
    from ..kernels.cuda.launch import _FILES
    from ..kernels.cuda.spec import DecodeSpec
    from ..kernels.cuda.store_spec import STORE_HEADERS, StoreSpec

    if part == "prefill":
        yield "dequantise.cu", DequantiseSpec(s.layout, torch.bfloat16, capability).header, DEQUANTISE_HEADERS
        return
    decode = DecodeSpec.choose(s.layout, s.group, torch.bfloat16, capability)
    for file in dict.fromkeys(_FILES.values()):
        yield file, decode.header, HEADERS
    for shaped in {"store": (True, False), "model": (True,)}.get(part, ()):
        tables = StoreTables.of(random_codec(s, shaped), "cpu")
        yield "store.cu", StoreSpec.choose(s.layout, torch.bfloat16, tables, capability).header, STORE_HEADERS


def precompile(part: str, shapes: Iterable[Shape], capability: tuple[int, int], say: Callable[[str], None]) -> int:
    """Compile what ``bench`` of this part runs with CUDA C++; returns how many files of machine code that makes."""
    from ..kernels.cuda.compiler import compile_cached

    done: set[Unit] = set()
    for s in shapes:
        for unit in units(part, s, capability):
            if unit not in done:
                done.add(unit)
                compile_cached(unit[0], unit[1], capability, unit[2])
                say(f"{unit[0]}: {s.group} heads a group, d {s.head_dim}, {s.k_bits}/{s.v_bits} bits")
    return len(done)
