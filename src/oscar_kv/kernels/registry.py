# SPDX-License-Identifier: Apache-2.0
"""Which implementation of the kernels serves a device. The choice is logged once; it never changes silently."""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch

from ..errors import OscarError
from .base import KernelSet

log = logging.getLogger(__name__)
Name = Literal["cuda", "triton", "torch"]
NAMES: tuple[str, ...] = get_args(Name)
ENVIRONMENT = "OSCAR_KV_KERNELS"
"""Names the kernels where the caller does not."""
_INSTALL_CUDA = "pip install 'oscar-kv[cuda]'"
_INSTALL_TRITON = "pip install 'oscar-kv[triton]'"
_said: set[tuple[str, ...]] = set()


def _say(level: int, device: torch.device, text: str) -> None:
    """Log a choice once a process and device."""
    if (str(device), text) not in _said:
        _said.add((str(device), text))
        log.log(level, "kernels on %s: %s", device, text)


def _installed(*modules: str) -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in modules)
    except ModuleNotFoundError:
        return False


def has_nvrtc() -> bool:
    """Whether cuda-python, which brings NVRTC, is installed."""
    return _installed("cuda.bindings")


def has_triton() -> bool:
    return _installed("triton")


def interpreted() -> bool:
    """Whether Triton's kernels run on the CPU, by its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check(name: str, source: str) -> Name:
    if name not in NAMES:
        raise OscarError(f"{source}={name!r}: the kernels are {', '.join(NAMES)}")
    return name  # type: ignore[return-value]


def choose(device: torch.device | str, wanted: str | None = None) -> Name:
    """The implementation for a device; ``wanted``, else the environment's OSCAR_KV_KERNELS, overrides.

    CUDA C++ from compute capability 8.0; Triton for older NVIDIA GPUs and AMD's, where it is installed; else PyTorch.
    Raises OscarError where the wanted one cannot run, and where a GPU needs NVRTC and neither it nor Triton is there.
    """
    device = torch.device(device)
    source = "kernels"
    if wanted is None and (wanted := os.environ.get(ENVIRONMENT) or None) is not None:
        source = ENVIRONMENT
    if wanted is not None:
        return _wanted(_check(wanted, source), device, source)
    if device.type != "cuda":
        _say(logging.INFO, device, "torch")
        return "torch"
    if torch.version.hip is not None:
        return _portable(device, "an AMD GPU")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        return _portable(device, f"compute capability {major}.{minor} is older than the CUDA kernels' 8.0")
    if has_nvrtc():
        _say(logging.INFO, device, f"cuda (sm_{major}{minor})")
        return "cuda"
    if not has_triton():
        raise OscarError(
            f"the CUDA kernels need cuda-python (NVRTC): {_INSTALL_CUDA}; or take Triton's, {_INSTALL_TRITON}; or ask "
            "for kernels='torch' (slow)"
        )
    _say(logging.WARNING, device, f"triton, because cuda-python (NVRTC) is not installed: {_INSTALL_CUDA} is faster")
    return "triton"


def _portable(device: torch.device, why: str) -> Name:
    if has_triton():
        _say(logging.WARNING, device, f"triton ({why})")
        return "triton"
    _say(logging.WARNING, device, f"torch, slow ({why}, and Triton is not installed: {_INSTALL_TRITON})")
    return "torch"


def _wanted(name: Name, device: torch.device, source: str) -> Name:
    if name == "cuda":
        if device.type != "cuda" or torch.version.hip is not None:
            raise OscarError(f"{source}='cuda' needs an NVIDIA GPU, this is {device}: leave the choice open")
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 0):
            raise OscarError(
                f"{source}='cuda' needs compute capability 8.0, {device} has {major}.{minor}: use 'triton' or 'torch'"
            )
        if not has_nvrtc():
            raise OscarError(f"{source}='cuda' needs cuda-python (NVRTC): {_INSTALL_CUDA}")
    if name == "triton":
        if not has_triton():
            raise OscarError(f"{source}='triton' needs Triton: {_INSTALL_TRITON}")
        if device.type != "cuda" and not interpreted():
            raise OscarError(
                f"{source}='triton' needs a GPU, this is {device}: leave the choice open, or set TRITON_INTERPRET=1 "
                "(its interpreter, for tests)"
            )
    _say(logging.INFO, device, f"{name} (asked for by {source})")
    return name


@cache
def _make(name: Name) -> KernelSet:
    if name == "cuda":
        from .cuda.decode import CudaDecode
        from .cuda.dequantise import CudaDequantise
        from .cuda.store import CudaStore

        return KernelSet("cuda", CudaDecode(), CudaStore(), CudaDequantise())
    if name == "triton":
        from .triton import kernel_set as triton_set

        return triton_set()
    from .torch_set import kernel_set as torch_set

    return torch_set()


def kernel_set(device: torch.device | str, wanted: str | None = None) -> KernelSet:
    """The kernels of ``choose``. Raises OscarError."""
    return _make(choose(device, wanted))


@dataclass(frozen=True)
class Served:
    """Which implementation serves what, for one model on one device.

    decode, store, prefill: names. kernels: what is called, or None where all is the reference codec and attention in
    PyTorch. stores: whether ``kernels.store`` writes the pages (the reference codec does otherwise).
    """

    decode: str
    store: str
    prefill: str
    kernels: KernelSet | None
    stores: bool

    def as_dict(self) -> dict[str, str]:
        return {"decode": self.decode, "store": self.store, "prefill": self.prefill}


REFERENCE = Served("torch", "torch", "torch", None, False)


def serve(
    device: torch.device | str, dtype: torch.dtype, step_rule: str, wanted: str | KernelSet | None = None
) -> Served:
    """What serves a model of this dtype whose recipe has this step rule; what is not the device's own is announced.

    A KernelSet is called as it is, for every dtype. Raises OscarError like ``choose``.
    """
    device = torch.device(device)
    kernels = wanted if isinstance(wanted, KernelSet) else None
    if kernels is None:
        assert not isinstance(wanted, KernelSet)
        name = choose(device, wanted)
        if name == "torch":
            return REFERENCE
        if dtype not in (torch.float16, torch.bfloat16):
            short = str(dtype).removeprefix("torch.")
            _say(
                logging.WARNING, device,
                f"decode, store and prefill by torch (slow), because the model is {short} and {name} serves float16 "
                "and bfloat16: load the model with dtype=torch.bfloat16",
            )  # fmt: skip
            return REFERENCE
        kernels = kernel_set(device, name)
    stores = step_rule == "least-squares"
    if not stores:
        _say(
            logging.WARNING, device,
            f"store by torch (slow), because step rule {step_rule!r} is written by the reference codec only",
        )  # fmt: skip
    return Served(kernels.name, kernels.name if stores else "torch", kernels.name, kernels, stores)
