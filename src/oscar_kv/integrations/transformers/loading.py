# SPDX-License-Identifier: Apache-2.0
"""Load a Transformers causal model by folder, hub name or GGUF file: what every command does first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...errors import OscarError

_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16,
}  # fmt: skip


def choose_device(name: str = "auto") -> torch.device:
    """``auto`` is a CUDA GPU where there is one, else the CPU. Raises OscarError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OscarError(f"device {name!r} is unknown: use cpu, cuda, cuda:1 … or auto") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OscarError(f"device {name!r} is not there ({torch.cuda.device_count()} CUDA devices): use cpu or auto")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """``auto`` is float32 on a CPU (bfloat16 is emulated on many) and the checkpoint's own dtype elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in _DTYPES:
        raise OscarError(f"dtype {name!r} is unknown: use float32, bfloat16, float16 or auto")
    return _DTYPES[name]


def _source(name: str) -> tuple[str, dict[str, Any]]:
    """First argument and further ones of from_pretrained: a .gguf file is named by its folder and gguf_file."""
    path = Path(name)
    if path.suffix != ".gguf":
        if not path.exists() and (path.is_absolute() or name.startswith(".")):
            raise OscarError(f"model {name!r}: no such folder")
        return name, {}
    if not path.is_file():
        raise OscarError(f"model {name!r}: no such file")
    try:
        import gguf  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise OscarError(
            f"model {name!r}: reading GGUF files needs the package: pip install 'oscar-kv[demo]'"
        ) from error
    return str(path.parent), {"gguf_file": path.name}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise OscarError(
            f"models are loaded with Transformers ({error}): pip install 'oscar-kv[transformers]'"
        ) from error
    return transformers


def load_config(name: str) -> Any:
    """The config of a model. Raises OscarError that names the model and the reason."""
    where, extra = _source(name)
    try:
        return _transformers().AutoConfig.from_pretrained(where, **extra)
    except (OSError, ValueError, KeyError) as error:
        raise OscarError(f"model {name!r}: its config cannot be loaded ({error})") from error


def load_model(name: str, dtype: str = "auto", device: str = "auto") -> tuple[Any, Any]:
    """(model in eval mode on the device, tokenizer) of a folder, a hub name or a .gguf file (de-quantised on load).

    Raises OscarError that names the model and the reason.
    """
    transformers = _transformers()
    where, extra = _source(name)
    place = choose_device(device)
    wanted = choose_dtype(dtype, place)
    model_extra = dict(extra)
    if extra:
        wanted = torch.bfloat16 if wanted == "auto" else wanted
        if hasattr(transformers, "GgufConfig"):  # newer releases keep GGUF blocks packed unless told otherwise
            model_extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **extra)
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=wanted, **model_extra)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise OscarError(f"model {name!r} cannot be loaded: {error}") from error
    return model.to(place).eval(), tokenizer
