# SPDX-License-Identifier: Apache-2.0
"""What a rival quantiser is: a frozen dataclass that turns rows into what is stored of them, and says how much that is.

A method sees one layer at a time: keys and values of the positions from its sink on, post-RoPE, and the queries of the
prompt. Rows that do not fill a group yet come back as they are: they are still in the window when a query reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ...errors import OscarError
from ...quantizer import range_step, round_to


@dataclass(frozen=True)
class Windows:
    """Which rows a query reads as they came.

    sink: the first tokens. recent: the newest tokens, the query's own included; 0: it reads its own from codes too.
    key_block: 0, or R: keys are quantised R at a time, so that the query at i reads keys from ⌊i/R⌋·R on as they came
    (1 to R of them), while values slide.
    """

    sink: int = 0
    recent: int = 0
    key_block: int = 0

    def __post_init__(self) -> None:
        if min(self.sink, self.recent, self.key_block) < 0:
            raise OscarError(f"windows are numbers of tokens from 0 on, got {self}")
        if self.key_block and (self.sink or self.key_block != self.recent):
            raise OscarError(f"key_block needs sink=0 and recent=key_block, got {self}")

    @property
    def exact(self) -> int:
        """Positions before which no query reads a code."""
        return self.sink + self.recent

    def __str__(self) -> str:
        return f"{self.sink}+{self.recent}"


OURS = Windows(64, 256)
"""The windows of this package's own presets."""


@dataclass(frozen=True)
class Stored:
    """Rows as they would be read back, and the bits they take.

    hat [B, heads, n, d]; bits: of codes and of metadata that comes with tokens, all heads; fixed: bits a request pays
    once, whatever its length.
    """

    hat: Tensor
    bits: int
    fixed: int = 0


@dataclass(frozen=True, kw_only=True)
class Baseline(ABC):
    """One rival. Subclasses add their knobs and check them in ``__post_init__``.

    name: in tables and files. k_bits, v_bits: of a code. windows: as published, unless replaced.
    """

    name: str
    k_bits: int
    v_bits: int
    windows: Windows = Windows()

    @abstractmethod
    def keys(self, k: Tensor, q: Tensor) -> Stored:
        """k [B, Hkv, n, d] from the sink on; q [B, Hq, m, d]: queries of the prompt. Both fp32 or fp64."""

    @abstractmethod
    def values(self, v: Tensor) -> Stored:
        """v [B, Hkv, n, d] from the sink on."""

    def quantise_layer(self, layer: int, k: Tensor, v: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """k̂ and v̂ of all positions [B, Hkv, n, d]; the sink's rows come back as they are.

        ``layer`` is for methods that treat layers differently; none here does.
        """
        sink = self.windows.sink
        done = self.keys(k[:, :, sink:], q).hat, self.values(v[:, :, sink:]).hat
        return torch.cat([k[:, :, :sink], done[0]], 2), torch.cat([v[:, :, :sink], done[1]], 2)

    def at_windows(self, windows: str) -> Self:
        """The method with windows "published" or "ours" (sink 64, recent 256; named NAME@ours). OscarError else."""
        if windows == "published":
            return self
        if windows != "ours":
            raise OscarError(f"windows={windows!r}: it is 'published' or 'ours'")
        return replace(self, name=f"{self.name}@ours", windows=OURS)


@dataclass(frozen=True)
class Groups:
    """Groups of numbers quantised between their extremes: x̂ = step·code + zero, step and zero in fp16.

    code [..., g] as floats; step, zero [..., 1].
    """

    code: Tensor
    step: Tensor
    zero: Tensor
    bits_a_code: int

    @classmethod
    def of(cls, x: Tensor, bits: int) -> Groups:
        """Asymmetric min–max along the last axis."""
        step, zero = range_step(x, bits)
        return cls(round_to(x, step, zero, 2**bits - 1), step, zero, bits)

    @property
    def hat(self) -> Tensor:
        return self.code * self.step + self.zero

    @property
    def bits(self) -> int:
        return self.code.numel() * self.bits_a_code + 16 * (self.step.numel() + self.zero.numel())


def by_token(x: Tensor, bits: int, group: int) -> Stored:
    """Rows [B, H, n, d] in groups of ``group`` channels of one token."""
    if x.shape[-1] % group:
        raise OscarError(f"groups of {group} channels do not divide a head of {x.shape[-1]}")
    groups = Groups.of(x.unflatten(-1, (-1, group)), bits)
    return Stored(groups.hat.flatten(-2), groups.bits)


def by_channel(x: Tensor, bits: int, group: int) -> Stored:
    """Rows [B, H, n, d] in groups of ``group`` tokens of one channel; an unfinished group stays as it is."""
    count = x.shape[2] // group
    whole = count * group
    groups = Groups.of(x[:, :, :whole].unflatten(2, (count, group)).transpose(-1, -2), bits)
    hat = groups.hat.transpose(-1, -2).flatten(2, 3)
    tail = x[:, :, whole:]
    return Stored(torch.cat([hat, tail], 2), groups.bits + 16 * tail.numel())


def check_bits(name: str, bits: int, allowed: tuple[int, ...]) -> None:
    if bits not in allowed:
        raise OscarError(f"{name}={bits}: it is one of {', '.join(map(str, allowed))}")


def check_token_groups(name: str, group: int, windows: Windows) -> None:
    """A query may read a code only when its group of tokens is complete."""
    if group < 1 or windows.recent < group or windows.key_block % group:
        raise OscarError(
            f"{name}: groups of {group} tokens need a recent window of at least that, and whole groups in a block of "
            f"keys; the windows are {windows}, key_block={windows.key_block}"
        )
