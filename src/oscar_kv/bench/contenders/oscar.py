# SPDX-License-Identifier: Apache-2.0
"""Our decode attention, the whole operation: q·R_K, paged history, raw windows, merge, μ_V and R_Vᵀ."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, cast

import torch

from ...errors import OscarError
from ...kernels.base import KernelSet
from ..inputs import decode_arguments, sets_for
from ..reference import decode_error
from ..shapes import DecodeShape, Shape
from .base import BF16_LIMIT, Contender


def our_kernels(device: str, wanted: str) -> KernelSet:
    """The kernels of one implementation. Raises OscarError where it cannot run."""
    from ...kernels.registry import kernel_set

    return kernel_set(device, wanted)


def why_not(device: str, wanted: str) -> str | None:
    """Why an implementation cannot run here, or None."""
    if (torch.device(device).type == "cpu") != (wanted == "torch"):
        if wanted == "torch":
            return "the reference synchronises with the host, which no CUDA graph can capture"
        return "on the CPU the tiny case runs the PyTorch kernels"
    try:
        our_kernels(device, wanted)
    except (OscarError, ImportError) as error:
        return str(error)
    return None


class OscarDecode(Contender):
    """A kernel set's decode."""

    kernels: ClassVar[str]
    limit = 0.01

    def missing(self) -> str | None:
        return why_not(self.options.device, self.kernels)

    def bytes(self, shape: Shape) -> int:
        return cast(DecodeShape, shape).bytes

    def fields(self) -> dict[str, Any]:
        return {}

    def prepare(self, shape: Shape) -> None:
        shape, device = cast(DecodeShape, shape), self.options.device
        self.inputs = [decode_arguments(shape, device) for _ in range(sets_for(shape.bytes, device))]
        self.decode = our_kernels(device, self.kernels).decode

    def measure(self, way: str) -> dict[str, Any]:
        calls = [partial(self.decode, *x) for x in self.inputs]
        return self.timed(calls, lambda out: decode_error(out, self.inputs[0]))


class CudaDecode(OscarDecode):
    kernels = "cuda"


class TritonDecode(OscarDecode):
    kernels = "triton"
    limit = BF16_LIMIT


class TorchDecode(OscarDecode):
    kernels = "torch"
