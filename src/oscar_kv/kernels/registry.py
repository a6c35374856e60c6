# SPDX-License-Identifier: Apache-2.0
"""Which implementation of the kernels serves a device. The choice is logged; it never changes silently."""

from __future__ import annotations

import importlib.util
import logging
from typing import Literal

import torch

from ..errors import OscarError
from .base import DecodeKernel

log = logging.getLogger(__name__)
Name = Literal["cuda", "torch"]


def choose(device: torch.device | str, wanted: Name | None = None) -> Name:
    """The implementation for a device: CUDA C++ from compute capability 8.0, else PyTorch; ``wanted`` overrides.

    Raises OscarError where the wanted one cannot run, or where a CUDA device would need NVRTC and it is missing.
    """
    device = torch.device(device)
    if wanted == "torch" or (wanted is None and device.type != "cuda"):
        log.info("kernels on %s: torch", device)
        return "torch"
    if device.type != "cuda":
        raise OscarError(
            f"kernels={wanted!r} need a CUDA device, this is {device}: leave the choice open or use 'torch'"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        if wanted == "cuda":
            raise OscarError(f"kernels='cuda' need compute capability 8.0, {device} has {major}.{minor}: use 'torch'")
        log.warning(
            "kernels on %s: torch, because compute capability %d.%d is older than 8.0 (slow)", device, major, minor
        )
        return "torch"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise OscarError(
            "the CUDA kernels need cuda-python (NVRTC): pip install 'oscar-kv[cuda]', or ask for kernels='torch'"
        )
    log.info("kernels on %s: cuda (sm_%d%d)", device, major, minor)
    return "cuda"


def cuda_decode(device: torch.device | str) -> DecodeKernel:
    """The CUDA C++ decode kernel for a device that ``choose`` gave it to."""
    from .cuda.decode import CudaDecode

    if choose(device, "cuda") != "cuda":
        raise OscarError(f"{device} has no CUDA kernels")
    return CudaDecode()
