# SPDX-License-Identifier: Apache-2.0
"""What a compiled store kernel is specialised for, and the header that tells its source."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch

from ...errors import OscarError
from ...layout import PAGE, PageLayout
from ...quantizer import RANGE_FRACTIONS, SHAPED_STEP_FACTOR, SIGMA_STEP, STRETCH_RANGE
from ..base import StoreTables
from .spec import _shared_limit

STORE_HEADERS = ("fragments.cuh", "ptx.cuh", "store_ptx.cuh", "store_rows.cuh", "store_steps.cuh", "store_shape.cuh")
_POINTERS = (
    ("k", "const u8*"), ("v", "const u8*"), ("pages", "u8*"), ("block_table", "const int*"), ("start", "const int*"),
    ("count", "const int*"), ("slots", "const int*"), ("sink_k", "u8*"), ("sink_v", "u8*"), ("ring_k", "u8*"),
    ("ring_v", "u8*"), ("k_factor", "const u8*"), ("v_factor", "const u8*"), ("k_rotation", "const float*"),
    ("v_rotation", "const float*"), ("k_centre", "const float*"), ("v_centre", "const float*"),
    ("k_shift", "const float*"), ("v_shift", "const float*"), ("k_unscale", "const float*"),
    ("v_unscale", "const float*"), ("upper_factor", "const u8*"), ("upper", "const float*"),
    ("upper_unscale", "const float*"), ("metric", "const float*"),
)  # fmt: skip
_STRIDES = ("k_batch", "k_head", "k_token", "v_batch", "v_head", "v_token")
_INTS = (
    "batch", "kv_heads", "n", "max_pages", "sink_rows", "ring_rows", "request_pages", "groups", "parts", "apart",
    "keep", "row_blocks",
)  # fmt: skip


class StoreParams(ctypes.Structure):
    """The one argument of both kernels, by value; the C++ struct is written from the same lists."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name, _ in _POINTERS]
        + [(name, ctypes.c_int64) for name in _STRIDES]
        + [(name, ctypes.c_int32) for name in _INTS]
    )


def _params_struct() -> str:
    fields = [f"{kind} {name};" for name, kind in _POINTERS]
    fields += [f"long long {name};" for name in _STRIDES] + [f"int {name};" for name in _INTS]
    return "struct Params { " + " ".join(fields) + " };"


@dataclass(frozen=True)
class StoreSpec:
    """One specialisation: layout, dtype of the raw rows, what the recipe asks for, and the tuning of the launch.

    tiles: 16-row tiles a warp holds in registers (a page is 4 / tiles warps); groups: pages a thread block works on
    at a time when there are many; min_blocks: thread blocks a multiprocessor should hold.
    """

    layout: PageLayout
    dtype: torch.dtype
    k_rotated: bool
    v_rotated: bool
    shaped: bool
    unbiased: bool
    capability: tuple[int, int]
    tiles: int
    groups: int
    min_blocks: int = 1

    @classmethod
    def choose(
        cls,
        layout: PageLayout,
        dtype: torch.dtype,
        tables: StoreTables,
        capability: tuple[int, int],
        **tuning: int,
    ) -> StoreSpec:
        """The default tuning for a device; keyword arguments override it. OscarError for what cannot be served."""
        if capability < (8, 0):
            raise OscarError(
                f"the CUDA kernels need compute capability 8.0, this device has {capability[0]}.{capability[1]}: "
                "use Triton or torch"
            )
        if dtype not in (torch.float16, torch.bfloat16):
            raise OscarError(f"the CUDA store kernel takes float16 or bfloat16 rows, got {dtype}")
        widest = max(layout.k_dim, layout.v_dim)
        choice = {"tiles": 2 if widest <= 128 else 1, "groups": 1, "min_blocks": 1, **tuning}
        spec = cls(
            layout, dtype, tables.k_rotation is not None, tables.v_rotation is not None, tables.upper is not None,
            tables.unbiased, capability, **choice,
        )  # fmt: skip
        if "groups" not in tuning:
            # Eight warps take all registers; the tables of a head should fit in what is left of shared memory as cache.
            room = spec.shared_limit * 5 // 8 if tables.upper is not None else spec.shared_limit
            fit = max(1, min(8 // spec.group_warps, room // spec.group_bytes))
            spec = cls(**{**spec.__dict__, "groups": fit})
        if spec.shared_bytes > spec.shared_limit:
            raise OscarError(
                f"this tuning needs {spec.shared_bytes} bytes of shared memory a block, the device has "
                f"{spec.shared_limit}"
            )
        return spec

    @property
    def shared_limit(self) -> int:
        return _shared_limit(self.capability)

    @property
    def group_warps(self) -> int:
        return 4 // self.tiles

    @property
    def group_threads(self) -> int:
        return 32 * self.group_warps

    @property
    def code_stride(self) -> int:
        return max(self.layout.k_dim, self.layout.v_dim) + 16

    @property
    def scratch_bytes(self) -> int:
        """A warp's: 16 columns of its rows while they are transposed, or one row."""
        return max(16 * self.tiles * 20 * 4, 4 * max(self.layout.k_dim, self.layout.v_dim))

    @property
    def warp_bytes(self) -> int:
        """A warp's raw rows before they are turned; with shaping, turned rows of keys in their place, in float32."""
        raw = max(self.layout.k_dim * self.k_rotated, self.layout.v_dim * self.v_rotated) * 2
        rows = 16 * self.tiles * max(raw, -(-self.layout.k_dim // 32) * 128 if self.shaped else 0)
        return -(-(self.scratch_bytes + rows) // 128) * 128

    @property
    def group_bytes(self) -> int:
        return PAGE * self.code_stride + self.group_warps * self.warp_bytes

    @property
    def shared_bytes(self) -> int:
        return self.groups * self.group_bytes

    @cached_property
    def header(self) -> str:
        """config.cuh."""
        layout = self.layout
        defines = {
            "PAGE": PAGE, "K_DIM": layout.k_dim, "V_DIM": layout.v_dim, "K_BITS": layout.k_bits,
            "V_BITS": layout.v_bits, "PAGE_BYTES": layout.page_bytes, "V_OFFSET": layout.v_offset,
            "METADATA_OFFSET": layout.metadata_offset, "ROWS_BF16": int(self.dtype == torch.bfloat16),
            "K_ROTATED": int(self.k_rotated), "V_ROTATED": int(self.v_rotated), "SHAPED": int(self.shaped),
            "UNBIASED": int(self.unbiased), "TILES": self.tiles, "MAX_THREADS": self.groups * self.group_threads,
            "MIN_BLOCKS": self.min_blocks, "CODE_STRIDE": self.code_stride, "SCRATCH_BYTES": self.scratch_bytes,
            "WARP_BYTES": self.warp_bytes, "GROUP_BYTES": self.group_bytes, "BULK": 0, "CHAINED": 0,
            "SIGMA_STEP_2": f"{SIGMA_STEP[2]!r}f", "SIGMA_STEP_3": f"{SIGMA_STEP[3]!r}f",
            "SIGMA_STEP_4": f"{SIGMA_STEP[4]!r}f", "SHAPED_STEP_FACTOR": f"{SHAPED_STEP_FACTOR[layout.k_bits]!r}f",
            "RANGE_FRACTIONS": ", ".join(f"{x!r}f" for x in RANGE_FRACTIONS),
            "STRETCH_LOW": f"{STRETCH_RANGE[0]!r}f", "STRETCH_HIGH": f"{STRETCH_RANGE[1]!r}f",
        }  # fmt: skip
        lines = ["#pragma once", *(f"#define {k} {v}" for k, v in defines.items()), '#include "fragments.cuh"']
        return "\n".join([*lines, _params_struct()]) + "\n"
