# SPDX-License-Identifier: Apache-2.0
"""Loading compiled kernels and launching them on PyTorch's current stream, through cuda-python's driver bindings."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from ...errors import OscarError
from .compiler import compile_cached
from .spec import DecodeSpec, Params

THREADS = {"prepare_one": 256, "prepare_many": 256, "finish_one": 512, "finish_some": 512, "finish_many": 256}
"""Threads a block, as in the sources."""
_FILES = {
    "prepare_one": "prepare.cu",
    "prepare_many": "prepare.cu",
    "finish_one": "finish.cu",
    "finish_some": "finish.cu",
    "finish_many": "finish.cu",
    "decode": "decode.cu",
}


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(result: tuple[Any, ...]) -> Any:
    if result[0] != _driver().CUresult.CUDA_SUCCESS:
        _, text = _driver().cuGetErrorString(result[0])
        raise OscarError(f"CUDA driver: {result[0].name} ({text.decode() if text else 'no text'})")
    return result[1] if len(result) == 2 else result[1:]


def submit(
    function: Any,
    device: int,
    grid: tuple[int, int],
    threads: int,
    shared: int,
    params: ctypes.Structure,
    chained: bool = False,
) -> None:
    """Launch a kernel on the device's current stream. chained: it may start before the kernel ahead of it has ended."""
    d = _driver()
    config = d.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    config.attrs, config.numAttrs = [], 0
    if chained:
        attribute = d.CUlaunchAttribute()
        attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    _check((*d.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0), None))


@dataclass
class DeviceKernels:
    """The kernels of one specialisation, loaded on one device. ``blocks``: thread blocks of one full wave."""

    spec: DecodeSpec
    device: int
    functions: dict[str, Any] = field(default_factory=dict)
    blocks: int = 0
    multiprocessors: int = 0

    def __post_init__(self) -> None:
        d = _driver()
        modules = {}
        for file in dict.fromkeys(_FILES.values()):
            modules[file] = _check(d.cuModuleLoadData(compile_cached(file, self.spec.header, self.spec.capability)))
        for name, file in _FILES.items():
            self.functions[name] = _check(d.cuModuleGetFunction(modules[file], name.encode()))
        decode, size = self.functions["decode"], self.spec.shared_bytes
        attribute = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check((*d.cuFuncSetAttribute(decode, attribute, size), None))
        per = _check(d.cuOccupancyMaxActiveBlocksPerMultiprocessor(decode, 32 * self.spec.warps, size))
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.blocks = max(1, per) * self.multiprocessors
        self._modules = modules  # functions live as long as their modules

    def launch(self, name: str, grid: tuple[int, int], params: Params) -> None:
        """Launch on the current stream. Where the device can chain kernels, the one after the first starts early."""
        chained = self.spec.chained and (not name.startswith("prepare") or self.spec.chain_first)
        shared = self.spec.shared_bytes if name == "decode" else 0
        threads = THREADS.get(name, 32 * self.spec.warps)
        submit(self.functions[name], self.device, grid, threads, shared, params, chained)


@cache
def load(spec: DecodeSpec, device: int) -> DeviceKernels:
    """Compile (or find) and load; once a process, specialisation and device."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes the primary context current
        return DeviceKernels(spec, device)
