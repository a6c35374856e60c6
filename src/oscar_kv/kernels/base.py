# SPDX-License-Identifier: Apache-2.0
"""The interface every implementation of the cache's kernels serves (PyTorch, Triton, CUDA C++).

Positions: a request's tokens [0, hist_start) are raw in the sink, [hist_start, hist_end) are read from pages, and
[hist_end, seq_len) are raw in the ring, position p in row p mod ring_rows. Page n of a request holds positions
64n … 64n+63 and is ``block_table[request, n]`` in the pool; both ends of the history may lie inside a page.
All lengths live on the device: nothing here synchronises with the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..codec import LayerCodec
from ..errors import OscarError
from ..layout import PageLayout
from ..transform import SideTransform


@dataclass(frozen=True)
class Windows:
    """Raw post-RoPE rows. sink_* [slots, kv_heads, sink_rows, d]; ring_* [slots, kv_heads, ring_rows, d]; fp16 or bf16.

    slots: int32 [batch], the slot of each request, or None where request i uses slot i.
    """

    sink_k: Tensor
    sink_v: Tensor
    ring_k: Tensor
    ring_v: Tensor
    slots: Tensor | None = None


@dataclass(frozen=True)
class LayerTables:
    """What a layer's kernels need of the artifact, contiguous fp32 on one device.

    k_rotation [kv_heads, dk, dk] is R_K; v_rotation_t [kv_heads, dv, dv] is R_Vᵀ; None means identity (or R_V absorbed
    into the output projection). Centres [kv_heads, d].
    """

    k_rotation: Tensor | None
    k_centre: Tensor
    v_rotation_t: Tensor | None
    v_centre: Tensor

    @classmethod
    def of(cls, k: SideTransform, v: SideTransform, device: torch.device | str) -> LayerTables:
        def ready(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, torch.float32).contiguous()

        k_centre, v_centre = ready(k.centre), ready(v.centre)
        assert k_centre is not None
        assert v_centre is not None
        return cls(ready(k.rotation), k_centre, ready(None if v.rotation is None else v.rotation.mT), v_centre)


class DecodeKernel(Protocol):
    """Attention of one new token a request over sink, history and ring."""

    def __call__(
        self,
        q: Tensor,
        pages: Tensor,
        block_table: Tensor,
        hist_start: Tensor,
        hist_end: Tensor,
        seq_len: Tensor,
        windows: Windows,
        tables: LayerTables,
        layout: PageLayout,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Raw post-RoPE q [batch, q_heads, dk] → out [batch, q_heads, dv] of q's dtype.

        pages uint8 [pool, kv_heads, page_bytes]; block_table int32 [batch, max_pages]; hist_start, hist_end, seq_len
        int32 [batch], the new token counted in seq_len. scale: None = dk^-0.5. softcap: 0 = none.
        Raises OscarError for shapes or dtypes the implementation does not serve.
        """
        ...


@dataclass(frozen=True)
class StoreTables:
    """What writing a layer's pages needs, contiguous fp32 on one device; x' = (x − centre)·rotation, then rounding.

    k_rotation [kv_heads, dk, dk] and v_rotation [kv_heads, dv, dv], None = identity; centres [kv_heads, d].
    upper [kv_heads, dk, dk] is I + U of the error weight A = (I+U) D (I+U)ᵀ, diagonal [kv_heads, dk] its D; both None
    where keys are rounded plainly. unbiased: whether scales are stretched (method: "unbiased scales").
    """

    k_rotation: Tensor | None
    k_centre: Tensor
    v_rotation: Tensor | None
    v_centre: Tensor
    upper: Tensor | None
    diagonal: Tensor | None
    unbiased: bool

    @classmethod
    def of(cls, codec: LayerCodec, device: torch.device | str) -> StoreTables:
        """Tables of a codec. Raises OscarError for a step rule that only the reference codec serves."""
        if codec.recipe.step != "least-squares":
            raise OscarError(f"step rule {codec.recipe.step!r} is written by the reference codec only: kernels='torch'")

        def ready(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, torch.float32).contiguous()

        upper = diagonal = None
        if codec.shaped and codec.weight is not None:
            upper = codec.weight.upper
            # The artifact keeps A and I + U only; two triangular solves give D back.
            half = torch.linalg.solve_triangular(upper.double(), codec.weight.matrix.double(), upper=True)
            diagonal = torch.linalg.solve_triangular(upper.double(), half.mT, upper=True).diagonal(dim1=-2, dim2=-1)
        k_centre, v_centre = ready(codec.k.centre), ready(codec.v.centre)
        assert k_centre is not None
        assert v_centre is not None
        return cls(
            ready(codec.k.rotation), k_centre, ready(codec.v.rotation), v_centre,
            ready(upper), ready(diagonal), codec.recipe.unbiased,
        )  # fmt: skip


class StoreKernel(Protocol):
    """Writes new tokens: raw rows into sink and ring, and each page whose 64th token is among them."""

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        pages: Tensor,
        block_table: Tensor,
        start: Tensor,
        count: Tensor,
        windows: Windows,
        tables: StoreTables,
        layout: PageLayout,
    ) -> None:
        """Raw post-RoPE k [batch, kv_heads, n, dk], v [batch, kv_heads, n, dv]; any strides, last dimension contiguous.

        start, count int32 [batch]: row j < count[i] of request i is position start[i] + j; later rows are not read.
        Position p goes to sink row p if p < sink_rows, and to ring row p mod ring_rows (of a chunk longer than
        the ring, its last ring_rows positions). Page n ≥ sink_rows // 64 with start ≤ 64n + 63 < start + count goes to
        pool block block_table[i, n], unless that is negative; its rows before ``start`` are read from the ring, before
        this call's rows overwrite them. Grids depend on shapes only, so a CUDA graph can capture it.
        Raises OscarError for shapes or dtypes the implementation does not serve.
        """
        ...


class DequantiseKernel(Protocol):
    """A tile of packed history as raw rows, for dense attention kernels."""

    def __call__(
        self,
        pages: Tensor,
        blocks: Tensor,
        layout: PageLayout,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Centred, rotated k̂ and v̂ of the pool blocks ``blocks`` (int32 [batch, n]) into k [batch, 64·n, kv_heads, dk]
        and v [batch, 64·n, kv_heads, dv], fp16, bf16 or fp32, any strides with a contiguous last dimension.

        Values beyond the dtype's range are saturated. Negative blocks give zeros.
        """
        ...


@dataclass(frozen=True)
class KernelSet:
    """One implementation of all three. ``store`` serves step rule "least-squares"; others are the reference codec's."""

    name: str
    decode: DecodeKernel
    store: StoreKernel
    dequantise: DequantiseKernel
