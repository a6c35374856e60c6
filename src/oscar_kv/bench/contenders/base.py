# SPDX-License-Identifier: Apache-2.0
"""What every contender is: named, checked, and measured in one of several ways to call it."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..shapes import Shape
from ..timing import time_calls

Check = Callable[[Any], float]
BF16_LIMIT = 0.02
"""Relative error above which an answer in 16 bits is wrong, whatever rounds inside; right ones stay below 0.005."""
FP8_LIMIT = 0.1
"""The same where probabilities are rounded to FP8 (three bits of significand)."""


@dataclass(frozen=True)
class Options:
    """What a run is asked for. fa3: path of a FlashAttention-3 extension, or None."""

    device: str = "cuda"
    fa3: str | None = None
    seed: int = 0
    replays: int = 15
    compiled: bool = False

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


class Contender(ABC):
    """One implementation. Life cycle: prepare(shape), measure(way) for each of ways(shape), release()."""

    name: str
    limit: ClassVar[float] = BF16_LIMIT

    def __init__(self, options: Options) -> None:
        self.options = options

    def missing(self) -> str | None:
        """Why it cannot run here, or None. Loads nothing that could crash."""
        return None

    def ways(self, shape: Shape) -> list[str]:
        """Ways to call it; the fastest whose answer is right counts."""
        return ["default"]

    @abstractmethod
    def prepare(self, shape: Shape) -> None:
        """Make the inputs, the same for all ways."""

    @abstractmethod
    def measure(self, way: str) -> dict[str, Any]:
        """{"ms": …, "error": relative error of its answer, …}; further keys become fields of the row."""

    @abstractmethod
    def bytes(self, shape: Shape) -> int:
        """What a call must move."""

    def fields(self) -> dict[str, Any]:
        """Fields of its rows that differ from the shape's (an unquantised cache has 16 bits)."""
        return {"k_bits": 16, "v_bits": 16}

    def release(self) -> None:
        """Drop the inputs."""
        keep = {"options", "name"}
        for key in [k for k in self.__dict__ if k not in keep]:
            del self.__dict__[key]
        if self.options.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def timed(self, calls: Sequence[Callable[[], Any]], check: Check) -> dict[str, Any]:
        """Check the first call's answer, then time all."""
        error = check(calls[0]())
        return {"ms": time_calls(calls, self.options.device, self.options.replays), "error": error}
