# SPDX-License-Identifier: Apache-2.0
"""Load a Transformers causal model by folder, hub name or GGUF file: what every command does first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...errors import OscarError, UnsupportedModelError
from .geometry import layer_geometries

_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16,
}  # fmt: skip


_ADAPTER = "adapter_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "tiktoken.model", "tekken.json",
)  # fmt: skip


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
        if path.is_file():
            raise OscarError(f"model {name!r}: is a file; name its folder, or a .gguf file")
        if path.is_dir() and not any((path / file).is_file() for file in ("config.json", _ADAPTER)):
            raise OscarError(f"model {name!r}: no model here: config.json is missing in this folder")
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


def check_config(name: str) -> Any:
    """The config of a model whose layers can be held, from its config file alone; None where that is not cheap.

    Raises OscarError for a config that cannot be read, UnsupportedModelError for attention that cannot be held.
    """
    where, extra = _source(name)
    if extra or (Path(where) / _ADAPTER).is_file():  # a GGUF header takes seconds; an adapter's config is its base's
        return None
    config = load_config(name)
    layer_geometries(config)
    return config


def _load_tokenizer(transformers: Any, name: str, where: str, extra: dict[str, Any]) -> Any:
    folder = Path(where)
    if folder.is_dir() and not extra and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise OscarError(
            f"model {name!r}: tokenizer files are missing in this folder (tokenizer.json, tokenizer_config.json …): "
            "put those of the model there"
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(where, **extra)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise OscarError(f"model {name!r}: its tokenizer cannot be loaded ({error})") from error


def load_model(name: str, dtype: str = "auto", device: str = "auto") -> tuple[Any, Any]:
    """(model in eval mode on the device, tokenizer) of a folder, a hub name or a .gguf file (de-quantised on load).

    Raises OscarError that names the model and the reason; UnsupportedModelError before weights are read.
    """
    transformers = _transformers()
    where, extra = _source(name)
    place = choose_device(device)
    wanted = choose_dtype(dtype, place)
    check_config(name)
    tokenizer = _load_tokenizer(transformers, name, where, extra)
    model_extra = dict(extra)
    if extra:
        wanted = torch.bfloat16 if wanted == "auto" else wanted
        if hasattr(transformers, "GgufConfig"):  # newer releases keep GGUF blocks packed unless told otherwise
            model_extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=wanted, **model_extra)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "Unrecognized configuration class" in str(error):  # goes on with a list of all there are
            raise UnsupportedModelError(
                f"model {name!r}: Transformers knows no causal language model of this kind; name one"
            ) from error
        raise OscarError(f"model {name!r} cannot be loaded: {error}") from error
    return model.to(place).eval(), tokenizer
