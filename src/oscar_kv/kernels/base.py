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
