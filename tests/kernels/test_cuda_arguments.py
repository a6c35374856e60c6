# SPDX-License-Identifier: Apache-2.0
"""What the CUDA decode call refuses, and that it takes what is right, without a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_reference import Case, random_case

from oscar_kv.errors import OscarError
from oscar_kv.kernels.cuda.decode import CudaDecode
from oscar_kv.layout import PageLayout

LAYOUT = PageLayout(64, 80, 2, 3)


def decode(c: Case, **changed: Any) -> None:
    CudaDecode()(*replace(c, **changed).arguments(), LAYOUT)  # type: ignore[arg-type]


def test_right_arguments_only_lack_a_device() -> None:
    with pytest.raises(OscarError, match="need tensors on a CUDA device"):
        decode(random_case(LAYOUT, 4, [(64, 400, 500), (0, 0, 0)], dtype=torch.float16))


def test_wrong_arguments_are_named() -> None:
    c = random_case(LAYOUT, 4, [(64, 400, 500), (0, 0, 0)], dtype=torch.float16)
    w, t = c.windows, c.tables
    wrong: list[tuple[str, dict[str, Any]]] = [
        (r"q must be \[batch, q_heads, 64\]", {"q": c.q[..., :32]}),
        ("7 query heads cannot share 2 KV heads", {"q": c.q[:, :7]}),
        (r"pages must be uint8 \[pool, kv_heads, ", {"pages": c.pages[..., :64]}),
        (r"block_table must be \[2, max_pages\]", {"block_table": c.block_table[:1]}),
        ("must be int32", {"block_table": c.block_table.long()}),
        (r"hist_end must be \[2\]", {"hist_end": c.hist_end[:1]}),
        (r"ring_v must be \[slots, 2, rows, 80\]", {"windows": replace(w, ring_v=w.ring_k)}),
        ("sink_k is torch.bfloat16", {"windows": replace(w, sink_k=w.sink_k.bfloat16())}),
        ("K and V windows differ in rows", {"windows": replace(w, ring_v=w.ring_v[:, :, 1:])}),
        ("v_centre must be contiguous float32", {"tables": replace(t, v_centre=t.v_centre.double())}),
        ("every tensor must be contiguous", {"pages": c.pages.mT.contiguous().mT}),
    ]
    for match, changed in wrong:
        with pytest.raises(OscarError, match=match):
            decode(c, **changed)
