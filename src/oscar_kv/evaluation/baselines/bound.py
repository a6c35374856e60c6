# SPDX-License-Identifier: Apache-2.0
"""A rival on one model: what the evaluation runs, and how many bits it takes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from ...errors import OscarError
from ...geometry import LayerGeometry
from .attend import attend
from .base import Baseline

PROMPT = 512
"""Queries that count as the prompt's where none is prefilled: the positions before those that are scored."""


@dataclass
class BaselineEmulation:
    """A method on a model with these layers, for ``emulated``, ``evaluate`` and ``retrieve``.

    Every query reads what lies outside the windows from codes, as if the text were decoded token by token. ``prefill``:
    queries before this position read everything as it is. Arithmetic is in fp32, or fp64 for a model in fp64.
    """

    method: Baseline
    geometry: tuple[LayerGeometry, ...]
    prefill: int = 0

    @classmethod
    def of(cls, method: Baseline, model: nn.Module) -> BaselineEmulation:
        """Raises UnsupportedModelError for attention that cannot be held, OscarError where there is none."""
        from ...integrations.transformers.geometry import layer_geometries

        bound = cls(method, tuple(layer_geometries(model.config)))
        bound.bits_per_element()  # a head that the method cannot serve is refused here
        return bound

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(i for i, layer in enumerate(self.geometry) if layer.kind == "full")

    @property
    def exact(self) -> int:
        return self.method.windows.exact

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """q [B, Hq, n, d], k and v [B, Hkv, n, d], post-RoPE → [B, n, Hq, v_dim] in q's dtype."""
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        rows = k.to(dtype), v.to(dtype)
        prompt = q[:, :, : self.prefill or PROMPT].to(dtype)
        hats = self.method.quantise_layer(layer, *rows, prompt)
        return attend(q, rows, hats, self.method.windows, scaling, softcap)

    def bits_per_element(self, context: int | None = None, window_bits: int = 16) -> float:
        """Bits an element of the full-attention layers' caches, for one request, counted on what is really stored.

        ``context`` tokens: codes and metadata of those outside the windows, windows in ``window_bits`` (allocated from
        the start, so at least sink + recent rows), and what a request pays once. None: codes and their metadata alone.
        """
        if context is not None and context < 1:
            raise OscarError(f"context is {context}: bits an element are defined from one token on")
        window = self.method.windows.exact
        history = _SAMPLE if context is None else max(0, context - window)
        bits = elements = 0.0
        for layer in self.geometry:
            if layer.kind != "full":
                continue
            codes, fixed = _stored_bits(self.method, layer, min(history, _SAMPLE))
            if history > _SAMPLE:
                codes = round(codes * history / _SAMPLE)
            row = layer.num_kv_heads * (layer.k_head_dim + layer.v_head_dim)
            bits += codes
            elements += row * (history if context is None else context)
            if context is not None:
                bits += fixed + window * row * window_bits
        if not elements:
            raise OscarError("no full-attention layer: there is nothing to quantise")
        return bits / elements


_SAMPLE = 1024
"""Tokens of the sample that bits are counted on: a multiple of every group; bits grow with tokens beyond it."""


@cache
def _stored_bits(method: Baseline, layer: LayerGeometry, tokens: int) -> tuple[int, int]:
    """(bits that grow with tokens, bits a request pays once) of one layer's random rows."""
    if not tokens:
        return 0, 0
    gen = torch.Generator().manual_seed(0)

    def rows(heads: int, d: int) -> Tensor:
        return torch.randn(1, heads, tokens, d, generator=gen)

    k = method.keys(rows(layer.num_kv_heads, layer.k_head_dim), rows(layer.num_q_heads, layer.k_head_dim))
    v = method.values(rows(layer.num_kv_heads, layer.v_head_dim))
    return k.bits + v.bits, k.fixed + v.fixed


def bind(methods: Sequence[Baseline], model: nn.Module) -> dict[str, BaselineEmulation]:
    """Methods by name, ready for this model."""
    return {m.name: BaselineEmulation.of(m, model) for m in methods}
