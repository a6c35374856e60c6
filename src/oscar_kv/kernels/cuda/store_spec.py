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
    ("v_unscale", "const float*"), ("k_least_norm", "const float*"), ("v_least_norm", "const float*"),
    ("upper_factor", "const u8*"), ("upper", "const float*"),
    ("upper_unscale", "const float*"), ("metric", "const u8*"),
)  # fmt: skip
_STRIDES = ("k_batch", "k_head", "k_token", "v_batch", "v_head", "v_token")
_INTS = (
    "batch", "kv_heads", "n", "max_pages", "sink_rows", "ring_rows", "request_pages", "groups", "parts", "row_blocks",
)  # fmt: skip


class StoreParams(ctypes.Structure):
    """The one argument of all kernels, by value; the C++ struct is written from the same lists."""

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

    tiles, value_tiles: 16-row tiles of keys and of values that a warp holds in registers (a page is 4 / tiles warps).
    key_pages, value_pages: pages a thread block of a prompt's keys or values writes. key_warps, value_warps: warps that
    a multiprocessor should hold then, which caps a thread's registers.
    """

    layout: PageLayout
    dtype: torch.dtype
    k_rotated: bool
    v_rotated: bool
    shaped: bool
    unbiased: bool
    capability: tuple[int, int]
    tiles: int
    value_tiles: int
    key_warps: int
    value_warps: int
    key_pages: int = 1
    value_pages: int = 1

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
        shaped = tables.upper is not None
        # 32 rows of up to 128 numbers a warp, eight warps an SM: with shaping a lane rounds a row, without it
        # that is a little faster than sixteen warps of 16 rows (measured on an H200).
        choice: dict[str, int] = {}
        for tiles, warps, d, wide in (
            ("tiles", "key_warps", layout.k_dim, shaped), ("value_tiles", "value_warps", layout.v_dim, False),
        ):  # fmt: skip
            choice[tiles] = tuning.get(tiles, 2 if d <= 128 else 1)
            choice[warps] = 16 if choice[tiles] * d <= 128 and not wide else 8
        choice |= tuning
        spec = cls(
            layout, dtype, tables.k_rotation is not None, tables.v_rotation is not None, shaped, tables.unbiased,
            capability, **choice,
        )  # fmt: skip
        if spec.shared_bytes > spec.shared_limit:
            raise OscarError(
                f"this tuning needs {spec.shared_bytes} bytes of shared memory a block, the device has "
                f"{spec.shared_limit}"
            )
        return spec

    @property
    def shared_limit(self) -> int:
        return _shared_limit(self.capability)

    def group_threads(self, keys: bool) -> int:
        """Threads that work on a page of one side."""
        return 128 // (self.tiles if keys else self.value_tiles)

    @property
    def step_threads(self) -> int:
        """Threads that write a page of either side at a decode step: few, for many blocks in one wave."""
        most = 64 if max(self.layout.k_dim, self.layout.v_dim) <= 128 else 128
        return min(most, self.group_threads(True), self.group_threads(False))

    @property
    def code_stride(self) -> int:
        return max(self.layout.k_dim, self.layout.v_dim) + 16

    @property
    def scratch_bytes(self) -> int:
        """A warp's: 16 columns of its rows while they are transposed, or one row."""
        return max(16 * self.tiles * 20 * 4, 4 * max(self.layout.k_dim, self.layout.v_dim))

    def warp_bytes(self, keys: bool) -> int:
        """A warp's scratch, and with shaping its rows of keys in float32."""
        rows = 16 * self.tiles * -(-self.layout.k_dim // 32) * 128 if keys and self.shaped else 0
        return -(-(self.scratch_bytes + rows) // 128) * 128

    def _codes_in_registers(self, keys: bool) -> bool:
        """packs_alone of store_steps.cuh, and no shaping: a group needs no shared memory for its codes."""
        layout = self.layout
        d, bits = (layout.k_dim, layout.k_bits) if keys else (layout.v_dim, layout.v_bits)
        low = 2 if bits == 3 else bits
        return not (keys and self.shaped) and d // 8 % (16 // low) == 0 and (bits != 3 or d % 128 == 0)

    def group_bytes(self, keys: bool) -> int:
        """Shared memory of the warps of a page of one side."""
        codes = 0 if self._codes_in_registers(keys) else PAGE * self.code_stride
        return codes + self.group_threads(keys) // 32 * self.warp_bytes(keys)

    @property
    def shared_bytes(self) -> int:
        return max(self.key_pages * self.group_bytes(True), self.value_pages * self.group_bytes(False))

    @cached_property
    def header(self) -> str:
        """config.cuh."""
        layout = self.layout
        defines = {
            "PAGE": PAGE, "K_DIM": layout.k_dim, "V_DIM": layout.v_dim, "K_BITS": layout.k_bits,
            "V_BITS": layout.v_bits, "PAGE_BYTES": layout.page_bytes, "V_OFFSET": layout.v_offset,
            "METADATA_OFFSET": layout.metadata_offset, "ROWS_BF16": int(self.dtype == torch.bfloat16),
            "K_ROTATED": int(self.k_rotated), "V_ROTATED": int(self.v_rotated), "SHAPED": int(self.shaped),
            "UNBIASED": int(self.unbiased), "K_TILES": self.tiles, "V_TILES": self.value_tiles,
            "STEP_THREADS": self.step_threads, "CODE_STRIDE": self.code_stride, "SCRATCH_BYTES": self.scratch_bytes,
            "BULK": 0, "CHAINED": 0,
            "SIGMA_STEP_2": f"{SIGMA_STEP[2]!r}f", "SIGMA_STEP_3": f"{SIGMA_STEP[3]!r}f",
            "SIGMA_STEP_4": f"{SIGMA_STEP[4]!r}f", "SHAPED_STEP_FACTOR": f"{SHAPED_STEP_FACTOR[layout.k_bits]!r}f",
            "RANGE_FRACTIONS": ", ".join(f"{x!r}f" for x in RANGE_FRACTIONS),
            "STRETCH_LOW": f"{STRETCH_RANGE[0]!r}f", "STRETCH_HIGH": f"{STRETCH_RANGE[1]!r}f",
        }  # fmt: skip
        for side, keys, pages, warps in (
            ("K", True, self.key_pages, self.key_warps), ("V", False, self.value_pages, self.value_warps),
        ):  # fmt: skip
            threads = pages * self.group_threads(keys)
            defines |= {
                f"{side}_THREADS": threads, f"{side}_BLOCKS": max(1, 32 * warps // threads),
                f"{side}_WARP_BYTES": self.warp_bytes(keys), f"{side}_GROUP_BYTES": self.group_bytes(keys),
            }  # fmt: skip
        lines = ["#pragma once", *(f"#define {k} {v}" for k, v in defines.items()), '#include "fragments.cuh"']
        return "\n".join([*lines, _params_struct()]) + "\n"
