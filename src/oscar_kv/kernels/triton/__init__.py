# SPDX-License-Identifier: Apache-2.0
"""The portable implementation of the kernels, in Triton: NVIDIA sm_80 and newer, AMD.

Importing this package imports no Triton.
"""

from __future__ import annotations

import importlib.util

from ...errors import OscarError
from ..base import KernelSet


def kernel_set() -> KernelSet:
    """The Triton kernels. Raises OscarError where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise OscarError(
            "the Triton kernels need the package triton (Linux): pip install 'oscar-kv[triton]', "
            "or ask for kernels='torch'"
        )
    from .decode import TritonDecode
    from .dequantise import TritonDequantise
    from .store import TritonStore

    return KernelSet("triton", TritonDecode(), TritonStore(), TritonDequantise())
