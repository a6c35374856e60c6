# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one layer to page bytes and back: transform, quantiser and layout put together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import OscarError
from .layout import PAGE, PageLayout, read_pages, write_pages
from .quantizer import ErrorWeight, Quantised, quantise
from .recipe import Recipe
from .transform import SideTransform

# Rows a call: bounds the working memory of a long prompt (a page of 8 heads at d=128 is 256 KB in fp32).
_PAGES_A_CALL = 64


@dataclass(frozen=True)
class LayerCodec:
    """The reference codec of one layer, on one device.

    Arithmetic is in ``dtype`` (fp32 in use, fp64 in tests). ``weight`` is None where keys are rounded plainly.
    """

    recipe: Recipe
    k: SideTransform
    v: SideTransform
    weight: ErrorWeight | None
    dtype: torch.dtype = torch.float32
    layout: PageLayout = field(init=False)

    def __post_init__(self) -> None:
        dims = self.k.centre.shape[-1], self.v.centre.shape[-1]
        object.__setattr__(self, "layout", PageLayout(*dims, self.recipe.k_bits, self.recipe.v_bits))

    @property
    def num_kv_heads(self) -> int:
        return self.k.centre.shape[0]

    @property
    def shaped(self) -> bool:
        """Whether keys are rounded with error feedback (needs the recipe's wish and the artifact's error weight)."""
        return self.recipe.shaping and self.weight is not None

    def quantise(self, k: Tensor, v: Tensor) -> tuple[Quantised, Quantised]:
        """Raw post-RoPE k [pages, heads, 64, k_dim] and v [pages, heads, 64, v_dim], any float dtype → codes."""
        r = self.recipe
        weight = self.weight if self.shaped else None
        kx, vx = self.k.apply(k.to(self.dtype)), self.v.apply(v.to(self.dtype))
        kq = quantise(kx, r.k_bits, step_rule=r.step, clip=r.k_clip, weight=weight, unbias=r.unbiased)
        vq = quantise(vx, r.v_bits, step_rule=r.step, clip=r.v_clip, unbias=r.unbiased)
        return kq, vq

    def encode(self, k: Tensor, v: Tensor) -> Tensor:
        """Raw rows of whole pages [pages, heads, 64, d] → uint8 [pages, heads, page_bytes]. OscarError on others."""
        for name, x, d in (("k", k, self.layout.k_dim), ("v", v, self.layout.v_dim)):
            if x.ndim != 4 or tuple(x.shape) != (k.shape[0], self.num_kv_heads, PAGE, d):
                raise OscarError(
                    f"{name} has shape {tuple(x.shape)}, the codec takes whole pages "
                    f"[pages, {self.num_kv_heads}, {PAGE}, {d}]"
                )
        out = torch.empty(*k.shape[:2], self.layout.page_bytes, dtype=torch.uint8, device=k.device)
        for i in range(0, k.shape[0], _PAGES_A_CALL):
            part = slice(i, i + _PAGES_A_CALL)
            out[part] = write_pages(self.layout, *self.quantise(k[part], v[part]))
        return out

    def decode_rotated(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [pages, heads, page_bytes] → centred, rotated k̂ and v̂ [pages, heads, 64, d] in ``dtype``."""
        k, v = read_pages(self.layout, pages)
        return k.dequantise(self.dtype), v.dequantise(self.dtype)

    def decode(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [pages, heads, page_bytes] → k̂ and v̂ [pages, heads, 64, d] in the model's own basis."""
        k, v = self.decode_rotated(pages)
        return self.k.undo(k), self.v.undo(v)
