# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compiled ahead of time, which needs no GPU: NVIDIA sm_80 and sm_90, AMD gfx942."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from oscar_kv.layout import PageLayout
from oscar_kv.quantizer import SHAPED_STEP_FACTOR, SIGMA_STEP

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter is on: nothing would be compiled"
)

SM90, SM80, GFX942 = ("cuda", 90, 32), ("cuda", 80, 32), ("hip", "gfx942", 64)
INT32 = {"pages", "block_table", "hist_start", "hist_end", "seq_len", "slots", "start", "count", "blocks"}
RAW = {"q", "k", "v", "sink_k", "sink_v", "ring_k", "ring_v", "raw", "ring", "out"}


def build(kernel: Any, constants: dict[str, Any], target: tuple[str, Any, int], warps: int) -> Any:
    """Pointers aligned to 16 bytes, raw rows in bf16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in INT32 | RAW:
            return "*i32" if name in INT32 else "*bf16"
        if name in ("factor", "cap"):
            return "fp32"
        special = {"metadata": "*fp16", "scratch": "*u8", "k_codes": "*u8", "v_codes": "*u8"}
        tables = {"turned", "bias", "partial", "partial_lse", "rotation", "rotation_t", "centre", "upper", "diagonal"}
        return special.get(name, "*fp32" if name in tables else "i32")

    signature = {name: kind(name) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t.startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget(*target), options={"num_warps": warps})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def attend(layout: PageLayout, group: int, target: tuple[str, Any, int], softcap: bool = False) -> Any:
    from oscar_kv.kernels.triton.checks import next_power_of_2
    from oscar_kv.kernels.triton.decode import Tuning
    from oscar_kv.kernels.triton.decode_kernels import attend as kernel

    warps, stages, _ = Tuning().choose(layout)
    constants = {
        "K_DIM": layout.k_dim, "K_PAD": next_power_of_2(layout.k_dim), "V_DIM": layout.v_dim,
        "V_PAD": next_power_of_2(layout.v_dim), "K_BITS": layout.k_bits, "V_BITS": layout.v_bits, "GROUP": group,
        "HEAD_BLOCKS": -(-group // 16), "SOFTCAP": softcap, "STAGES": stages, "TILE": 16, "WIDEN": False,
    }  # fmt: skip
    return build(kernel, constants, target, warps)


@pytest.mark.parametrize("target", [pytest.param(SM80, marks=pytest.mark.slow), GFX942], ids=lambda x: str(x[1]))
def test_decode(target: tuple[str, Any, int]) -> None:
    assert attend(PageLayout(128, 128, 2, 2), 4, target).asm["hsaco" if target[0] == "hip" else "cubin"]


def test_codes_stay_with_their_lane() -> None:
    """The layout's point: words are loaded in the order of the MMA's operands.

    Moving a page's 16,384 codes between lanes took 256 shuffles or 516 stores when an index was in another order.
    """
    kernel = attend(PageLayout(128, 128, 2, 2), 4, SM90)
    assert kernel.asm["cubin"]
    ptx = kernel.asm["ptx"]
    assert len(re.findall(r"\bshfl\.", ptx)) < 64  # reductions of a row: the softmax's maximum and sums
    assert len(re.findall(r"\bst\.shared", ptx)) < 64


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("target", [SM90, SM80, GFX942], ids=lambda x: str(x[1]))
@pytest.mark.parametrize(
    "layout", [PageLayout(80, 80, 3, 1), PageLayout(256, 256, 2, 2), PageLayout(192, 128, 3, 4)], ids=str
)
def test_decode_of_other_shapes(layout: PageLayout, target: tuple[str, Any, int], softcap: bool) -> None:
    assert attend(layout, 20, target, softcap).asm


def test_turn_finish_pack_and_windows() -> None:
    from oscar_kv.kernels.triton.decode_kernels import finish, turn_queries
    from oscar_kv.kernels.triton.store_kernels import pack_pages, write_windows

    build(turn_queries, {"GROUP": 4, "D": 128, "PAD": 128, "COLUMNS": 32}, SM90, 4)
    build(finish, {"V_DIM": 128, "V_PAD": 128, "GROUP": 4, "BLOCK": 16}, SM90, 8)
    sizes = {"K_DIM": 128, "V_DIM": 128}
    build(pack_pages, {**sizes, "K_BITS": 3, "V_BITS": 2, "K_WORDS": 16, "V_WORDS": 16}, SM90, 4)
    build(write_windows, {**sizes, "PAD": 128, "ROWS": 16}, SM90, 4)


def quantise(d: int, bits: int, shaped: bool, rows: int, target: tuple[str, Any, int]) -> Any:
    from oscar_kv.kernels.triton.checks import next_power_of_2
    from oscar_kv.kernels.triton.store_kernels import quantise_rows

    constants: dict[str, Any] = {
        "D": d, "PAD": next_power_of_2(d), "BITS": bits, "UNBIASED": True, "SIGMA": SIGMA_STEP.get(bits, 0.0),
        "WIDEN": SHAPED_STEP_FACTOR[bits], "PAGE_WORDS": 1152, "FIELD": 0, "ROWS": rows, "PRECISION": "ieee",
    }  # fmt: skip
    if not shaped:
        constants.update(upper=None, diagonal=None)
    return build(quantise_rows, constants, target, 4)


def test_store() -> None:
    assert quantise(64, 2, True, 16, SM90).asm["cubin"]


@pytest.mark.slow
@pytest.mark.parametrize("target", [SM90, SM80, GFX942], ids=lambda x: str(x[1]))
@pytest.mark.parametrize(("d", "bits", "shaped"), [(128, 2, True), (256, 2, True), (128, 4, False), (80, 1, False)])
def test_store_of_other_shapes(d: int, bits: int, shaped: bool, target: tuple[str, Any, int]) -> None:
    kernel = quantise(d, bits, shaped, 16, target)
    assert kernel.metadata.shared <= 64 * 1024  # the smallest limit: AMD's
