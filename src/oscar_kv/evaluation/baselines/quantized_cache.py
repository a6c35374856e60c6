# SPDX-License-Identifier: Apache-2.0
"""Transformers' own ``QuantizedCache`` for real generation: quanto (2, 4 bits) or HQQ (1, 2, 3, 4, 8 bits).

It is no row of the exact emulation: when its residual fills up, it quantises the whole cache anew from what it reads
back, so a token's codes depend on when the text was cut. ``cache()`` gives a cache to hand to ``model.generate``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from ...errors import OscarError
from ...integrations.transformers.geometry import text_config
from .base import check_bits

if TYPE_CHECKING:
    from transformers import Cache

_PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}
_BITS = {"quanto": (2, 4), "hqq": (1, 2, 3, 4, 8)}
_AXES = {"quanto": (0, -1), "hqq": (0, 1)}


@dataclass(frozen=True, kw_only=True)
class TransformersCache:
    """The knobs of ``transformers.QuantizedCache`` (its defaults, but 2 bits).

    bits: of keys and values alike. axis_key, axis_value: along which axis groups run, in the back end's own terms.
    group: numbers a scale and zero. residual: newest tokens in full precision.
    """

    backend: Literal["quanto", "hqq"] = "quanto"
    bits: int = 2
    axis_key: int = 0
    axis_value: int = 0
    group: int = 64
    residual: int = 128

    def __post_init__(self) -> None:
        if self.backend not in _PACKAGES:
            raise OscarError(f"backend={self.backend!r}: it is one of {', '.join(_PACKAGES)}")
        check_bits("bits", self.bits, _BITS[self.backend])
        for field in ("axis_key", "axis_value"):
            if getattr(self, field) not in _AXES[self.backend]:
                raise OscarError(
                    f"{field}={getattr(self, field)}: for {self.backend} it is one of {_AXES[self.backend]}"
                )

    @property
    def name(self) -> str:
        return f"hf-{self.backend}-{self.bits}"

    def cache(self, model: nn.Module) -> Cache:
        """A new cache for one call of ``generate(past_key_values=…)``. OscarError names what must be installed."""
        self.check_installed()
        from transformers import QuantizedCache

        return QuantizedCache(
            backend=self.backend, config=text_config(model.config), nbits=self.bits, axis_key=self.axis_key,
            axis_value=self.axis_value, q_group_size=self.group, residual_length=self.residual,
        )  # fmt: skip

    def check_installed(self) -> None:
        """Raises OscarError unless Transformers and the back end's package can be imported."""
        from importlib.util import find_spec

        if find_spec("transformers") is None:
            raise OscarError("Transformers' QuantizedCache needs the extra: pip install 'oscar-kv[transformers]'")
        from transformers.utils import is_hqq_available, is_optimum_quanto_available

        available = {"quanto": is_optimum_quanto_available, "hqq": is_hqq_available}[self.backend]
        if not available():
            raise OscarError(
                f"Transformers' QuantizedCache with backend {self.backend!r} needs the package "
                f"{_PACKAGES[self.backend]}: pip install {_PACKAGES[self.backend]}"
            )
