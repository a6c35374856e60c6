# SPDX-License-Identifier: Apache-2.0
"""Random inputs: pages, windows, queries, tables and codecs. Nothing is zero, nothing is shared between input sets.

Scales are such that attention is peaked (a few dozen tokens carry most of the weight) and the answer depends on the
history: with flat attention over a long context the centre alone would be nearly the whole answer, and no check of
the answer could see a wrong history.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..codec import LayerCodec
from ..kernels.base import LayerTables, Windows
from ..layout import PAGE, PageLayout
from ..quantizer import ErrorWeight, normalised_weight
from ..recipe import get_recipe
from ..transform import SideTransform, rotation
from .shapes import RECENT, RING, SINK, DecodeShape, Shape

SPREAD = 0.3
"""Standard deviation of raw keys and values, about that of random codes times their steps."""
CENTRE = 0.05
SHARPNESS = 3.0
"""Standard deviation of the logits."""


class DecodeArguments(NamedTuple):
    """Positional arguments of a ``DecodeKernel``."""

    q: Tensor
    pages: Tensor
    block_table: Tensor
    hist_start: Tensor
    hist_end: Tensor
    seq_len: Tensor
    windows: Windows
    tables: LayerTables
    layout: PageLayout


def sets_for(bytes_a_set: int, device: torch.device | str, most: int = 24) -> int:
    """Input sets: 2 GB in all, at least 3, so that a set has left the L2 cache when its turn comes again."""
    if torch.device(device).type != "cuda":
        return 2
    return max(3, min(most, (2 << 30) // bytes_a_set))


def model_dtype(device: torch.device | str) -> torch.dtype:
    """BF16, and FP32 on the CPU, where the tiny cases check the path and not the speed."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def queries(shape: Shape, *lead: int, device: torch.device | str, keys: float = SPREAD) -> Tensor:
    """[*lead, q_heads, d] whose logits with keys of this spread have standard deviation SHARPNESS."""
    q = torch.randn(*lead, shape.q_heads, shape.head_dim, device=device, dtype=model_dtype(device))
    return q.mul_(SHARPNESS / keys)


def fill_pages_(pages: Tensor, layout: PageLayout) -> Tensor:
    """Random codes, and steps and zeros that centre each row, in place: pages uint8 [count, heads, page_bytes]."""
    pages.view(torch.int64).random_(-(1 << 63), None)
    meta = pages[..., layout.metadata_offset :].view(torch.float16).unflatten(-1, (PAGE, 4))
    for side, bits in ((0, layout.k_bits), (2, layout.v_bits)):
        top = 2**bits - 1
        typical = SPREAD / (((top + 1) ** 2 - 1) / 12) ** 0.5  # codes are uniform: their deviation is known
        meta[..., side].uniform_(0.5 * typical, 1.5 * typical)
        meta[..., side + 1] = meta[..., side] * (-top / 2)
    return pages


def random_windows(shape: Shape, device: torch.device | str) -> Windows:
    """Sink and ring of every request, request i in slot i."""

    def raw(rows: int) -> Tensor:
        size = (shape.batch, shape.kv_heads, rows, shape.head_dim)
        return torch.randn(*size, device=device, dtype=model_dtype(device)).mul_(SPREAD)

    return Windows(raw(SINK), raw(SINK), raw(RING), raw(RING))


def random_tables(shape: Shape, device: torch.device | str) -> LayerTables:
    """Random orthogonal rotations and small centres."""
    h, d = shape.kv_heads, shape.head_dim
    turn = torch.linalg.qr(torch.randn(2, h, d, d, device=device)).Q
    centre = torch.randn(2, h, d, device=device) * CENTRE
    return LayerTables(turn[0].contiguous(), centre[0].contiguous(), turn[1].contiguous(), centre[1].contiguous())


def lengths(shape: DecodeShape, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """hist_start, hist_end, seq_len."""
    ones = torch.ones(shape.batch, dtype=torch.int32, device=device)
    return ones * SINK, ones * (shape.context - RECENT), ones * shape.context


def block_table(batch: int, pages: int, device: torch.device | str) -> Tensor:
    """A pool's pages dealt out in random order: int32 [batch, pages]."""
    return torch.randperm(batch * pages, device=device).int().view(batch, pages).contiguous()


def decode_arguments(shape: DecodeShape, device: torch.device | str) -> DecodeArguments:
    """One input set."""
    layout, n = shape.layout, -(-shape.context // PAGE)
    pages = torch.empty(shape.batch * n, shape.kv_heads, layout.page_bytes, dtype=torch.uint8, device=device)
    return DecodeArguments(
        queries(shape, shape.batch, device=device),
        fill_pages_(pages, layout),
        block_table(shape.batch, n, device),
        *lengths(shape, device),
        random_windows(shape, device),
        random_tables(shape, device),
        layout,
    )


def random_codec(shape: Shape, shaped: bool, seed: int = 0) -> LayerCodec:
    """A codec as calibration would fit it to keys and queries with decaying spectra, on the CPU, in fp32."""
    g = torch.Generator().manual_seed(seed)
    heads, d = shape.kv_heads, shape.head_dim

    def covariance() -> Tensor:
        basis = torch.linalg.qr(torch.randn(heads, d, d, generator=g, dtype=torch.float64)).Q
        return basis * torch.logspace(0, -2, d, dtype=torch.float64) @ basis.mT

    def side(cov: Tensor) -> SideTransform:
        return SideTransform(torch.randn(heads, d, generator=g) * CENTRE, rotation("eigen", cov).float().contiguous())

    of_queries, of_values = covariance(), covariance()
    k, v = side(of_queries), side(of_values)
    assert k.rotation is not None
    weight = ErrorWeight.of(normalised_weight(of_queries, k.rotation.double())).to("cpu", torch.float32)
    recipe = get_recipe("k2v2").replace(k_bits=shape.k_bits, v_bits=shape.v_bits, shaping=shaped)
    return LayerCodec(recipe, k, v, weight if shaped else None)
