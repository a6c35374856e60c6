# SPDX-License-Identifier: Apache-2.0
"""The store kernels of one specialisation, loaded on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .compiler import compile_cached
from .launch import _check, _driver, submit
from .store_spec import STORE_HEADERS, StoreParams, StoreSpec

KERNELS = ("store_step", "store_keys", "store_values", "store_rows")


class StoreKernels:
    """The kernels' functions, ready to launch."""

    def __init__(self, spec: StoreSpec, device: int) -> None:
        self.spec, self.device = spec, device
        d = _driver()
        self._module = _check(
            d.cuModuleLoadData(compile_cached("store.cu", spec.header, spec.capability, STORE_HEADERS))
        )
        self.functions: dict[str, Any] = {
            name: _check(d.cuModuleGetFunction(self._module, name.encode())) for name in KERNELS
        }
        attribute = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for name in KERNELS[:-1]:
            _check((*d.cuFuncSetAttribute(self.functions[name], attribute, spec.shared_bytes), None))

    def launch(self, name: str, grid: tuple[int, int], threads: int, shared: int, params: StoreParams) -> None:
        """Launch on the current stream."""
        submit(self.functions[name], self.device, grid, threads, shared, params)


@cache
def load_store(spec: StoreSpec, device: int) -> StoreKernels:
    """Compile (or find) and load; once a process, specialisation and device."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes the primary context current
        return StoreKernels(spec, device)
