# SPDX-License-Identifier: Apache-2.0
"""Who is measured: one small file each, found by part and name, imported when asked for."""

from __future__ import annotations

from importlib import import_module

from ...errors import OscarError
from .base import Contender, Options

_CLASSES: dict[str, dict[str, str]] = {
    "decode": {
        "oscar-cuda": "oscar.CudaDecode",
        "oscar-triton": "oscar.TritonDecode",
        "oscar-torch": "oscar.TorchDecode",
        "fa3-bf16": "fa3.DecodeBf16",
        "fa3-fp8": "fa3.DecodeFp8",
        "flashinfer-bf16": "flashinfer.DecodeBf16",
        "flashinfer-fp8": "flashinfer.DecodeFp8",
        "sdpa-bf16": "sdpa.Decode",
        "triton-bf16": "sglang_triton.Decode",
    },
    "prefill": {
        "oscar-cuda": "oscar_prefill.CudaPrefill",
        "oscar-triton": "oscar_prefill.TritonPrefill",
        "oscar-torch": "oscar_prefill.TorchPrefill",
        "fa3-bf16": "dense.Fa3Prefill",
        "cudnn-bf16": "dense.CudnnPrefill",
        "fa2-bf16": "dense.Fa2Prefill",
        "sdpa-bf16": "dense.MathPrefill",
        "flashinfer-bf16": "dense.FlashinferPrefill",
    },
    "layer": {
        "fa3-bf16": "layer.Fa3Layer",
        "cudnn-bf16": "layer.CudnnLayer",
        "fa2-bf16": "layer.Fa2Layer",
        "sdpa-bf16": "layer.MathLayer",
    },
    "model": {
        "oscar-cuda": "model.CudaModel",
        "oscar-triton": "model.TritonModel",
        "oscar-torch": "model.TorchModel",
        "fa3-bf16": "model.Fa3Model",
        "sdpa-bf16": "model.SdpaModel",
    },
}
"""Part → contender → its class. The first ones are measured first."""


def names(part: str) -> list[str]:
    """Contenders of a part, in the order in which they are measured."""
    return list(_CLASSES[part])


def find(part: str, name: str, options: Options) -> Contender:
    """A contender. Raises OscarError for a name that the part does not have."""
    try:
        module, _, cls = _CLASSES[part][name].partition(".")
    except KeyError:
        raise OscarError(f"--contenders: {part} has no {name!r}; it has {', '.join(_CLASSES[part])}") from None
    made: Contender = getattr(import_module(f".{module}", __name__), cls)(options)
    made.name = name
    return made
