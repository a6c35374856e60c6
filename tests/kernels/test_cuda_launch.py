# SPDX-License-Identifier: Apache-2.0
"""What a launch hands to the driver, without a device: its own structures, and a stand-in for its last call."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kv.errors import OscarError
from oscar_kv.kernels.cuda import launch

driver = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)


class Params(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int32),)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("result", ["CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE"])
def test_submit(monkeypatch: pytest.MonkeyPatch, chained: bool, result: str) -> None:
    seen: list[Any] = []

    def launched(config: Any, function: Any, arguments: int, extra: int) -> tuple[Any]:
        pointer = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        seen.append((config, function, Params.from_address(pointer or 0).number))
        return (getattr(driver.CUresult, result),)

    fake = SimpleNamespace(
        CUlaunchConfig=driver.CUlaunchConfig, CUlaunchAttribute=driver.CUlaunchAttribute,
        CUlaunchAttributeID=driver.CUlaunchAttributeID, CUresult=driver.CUresult, cuLaunchKernelEx=launched,
        cuGetErrorString=lambda code: (driver.CUresult.CUDA_SUCCESS, b"refused"),
    )  # fmt: skip
    monkeypatch.setattr(launch, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=device + 40))
    call = (7, 2, (3, 5), 96, 1024, Params(11), chained)
    if result == "CUDA_SUCCESS":
        launch.submit(*call)
    else:
        with pytest.raises(OscarError, match="CUDA_ERROR_INVALID_VALUE"):
            launch.submit(*call)
    ((config, function, number),) = seen
    assert (function, number) == (7, 11)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 5, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (96, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream), config.numAttrs) == (1024, 42, int(chained))
    if chained:
        (attribute,) = config.attrs
        assert attribute.value.programmaticStreamSerializationAllowed == 1
