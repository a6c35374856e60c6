# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel is specialised for, and the header that tells its source. Constants come from layout.py."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ...errors import OscarError
from ...layout import PAGE, PageLayout

SHARED_LIMITS = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}
"""KB of shared memory a thread block may ask for, by compute capability (CUDA C++ programming guide)."""
MAX_GROUP = 64
_POINTERS = (
    ("q", "const u8*"), ("k_rotation", "const float*"), ("k_centre", "const float*"), ("v_rotation_t", "const float*"),
    ("v_centre", "const float*"), ("pages", "const u8*"), ("block_table", "const int*"), ("hist_start", "const int*"),
    ("hist_end", "const int*"), ("seq_len", "const int*"), ("slots", "const int*"), ("sink_k", "const u8*"),
    ("sink_v", "const u8*"), ("ring_k", "const u8*"), ("ring_v", "const u8*"), ("partial", "float*"),
    ("partial_lse", "float*"), ("query", "u32*"), ("query_sum", "float*"),
    ("query_step", "float*"), ("query_centre", "float*"), ("ranges", "int*"), ("out", "u8*"),
)  # fmt: skip
_INTS = (
    "batch",
    "kv_heads",
    "max_pages",
    "sink_rows",
    "ring_rows",
    "blocks",
    "items",
    "items_a_head",
    "item_tokens",
    "item_pages",
    "opening",
)
_FLOATS = ("query_scale", "cap")


class Params(ctypes.Structure):
    """The one argument of every kernel, by value; the C++ struct is written from the same lists."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name, _ in _POINTERS]
        + [(name, ctypes.c_int32) for name in _INTS]
        + [(name, ctypes.c_float) for name in _FLOATS]
    )


def _params_struct() -> str:
    fields = [f"{kind} {name};" for name, kind in _POINTERS]
    fields += [f"int {name};" for name in _INTS] + [f"float {name};" for name in _FLOATS]
    return "struct Params { " + " ".join(fields) + " };"


def _shared_limit(capability: tuple[int, int]) -> int:
    known = {k: v for k, v in SHARED_LIMITS.items() if k <= capability and k[0] == capability[0]}
    return 1024 * (known[max(known)] if known else 99)


@dataclass(frozen=True)
class DecodeSpec:
    """One specialisation: layout, query heads a KV head, dtype of the raw rows, soft-cap, and the tuning of the launch.

    tiles: columns of 8 query heads a warp serves; warps a block, stages a warp's ring; bulk: cp.async.bulk (sm_90+);
    chained: programmatic dependent launch (sm_90+); chain_first: of the first kernel too, behind whatever ran before;
    buffers: states of so many (request, head) pairs may wait to be put together;
    opening: what taking up another (request, head) costs a block, in pages;
    flush_pages: pages a warp's tensor cores add up before they start from zero again (they truncate).
    """

    layout: PageLayout
    group: int
    dtype: torch.dtype
    softcap: bool
    capability: tuple[int, int]
    tiles: int
    warps: int
    stages: int
    min_blocks: int
    bulk: bool
    chained: bool
    buffers: int
    chain_first: bool = False
    flush_pages: int = 512
    opening: int = 16

    @classmethod
    def choose(
        cls,
        layout: PageLayout,
        group: int,
        dtype: torch.dtype,
        capability: tuple[int, int],
        softcap: bool = False,
        **tuning: object,
    ) -> DecodeSpec:
        """The default tuning for a device; keyword arguments override it. OscarError for what cannot be served."""
        if capability < (8, 0):
            raise OscarError(
                f"the CUDA kernels need compute capability 8.0, this device has {capability[0]}.{capability[1]}: "
                "use Triton or torch"
            )
        if dtype not in (torch.float16, torch.bfloat16):
            raise OscarError(f"the CUDA kernels take float16 or bfloat16 queries and windows, got {dtype}")
        if not 1 <= group <= MAX_GROUP:
            raise OscarError(f"{group} query heads a KV head are not supported: 1 to {MAX_GROUP}")
        wide = max(layout.k_dim, layout.v_dim) > 128
        new = capability >= (9, 0)
        tiles = 2 if group > 8 and not wide else 1
        # Where shared memory allows, one block of 12 warps, else as many blocks as registers allow: codes of more bits
        # need more than 168. Independent of the batch, so that a layer needs one compilation.
        roomy = not wide and tiles == 1 and _shared_limit(capability) >= 200 * 1024
        many = layout.k_bits + layout.v_bits > 6 or capability >= (10, 0)
        choice: dict[str, object] = {
            "tiles": tiles,
            "warps": 12 if roomy else 4,
            "stages": 2 if roomy else 4,
            "min_blocks": 1 if roomy or wide or tiles == 2 else 2 if many else 3,
            "bulk": new,
            "chained": new,
            "buffers": 2,
        }
        given = set(tuning)
        choice.update(tuning)
        spec = cls(layout, group, dtype, softcap, capability, **choice)  # type: ignore[arg-type]
        room = spec.shared_limit
        # So that min_blocks fit (two of those that cap no registers).
        goal = room if roomy else room // (2 if wide or tiles == 2 else spec.min_blocks) - 1024
        for name, least in (("buffers", 1), ("stages", 2), ("warps", 8 if roomy else 4)):
            while name not in given and spec.shared_bytes > goal and getattr(spec, name) > least:
                spec = replace(spec, **{name: getattr(spec, name) - (4 if name == "warps" else 1)})
        while "warps" not in given and spec.shared_bytes > room and spec.warps > 1:
            spec = replace(spec, warps=spec.warps // 2)
        if spec.shared_bytes > room:
            raise OscarError(
                f"this tuning needs {spec.shared_bytes} bytes of shared memory a block, the device has {room}"
            )
        return spec

    @property
    def shared_limit(self) -> int:
        return _shared_limit(self.capability)

    @property
    def columns(self) -> int:
        return 8 * self.tiles

    @property
    def head_blocks(self) -> int:
        """Pieces a group's query heads are cut into; each reads the pages again."""
        return -(-self.group // self.columns)

    @property
    def heads(self) -> int:
        """Query heads of one piece."""
        return -(-self.group // self.head_blocks)

    @property
    def stage_bytes(self) -> int:
        return -(-self.layout.page_bytes // 128) * 128

    @property
    def prepare_times(self) -> int:
        """Requests a block of prepare_many takes, as static shared memory allows."""
        room = 40 * 1024 // (4 * (self.layout.k_dim + 8 * 32)) // self.heads
        return max(1, min(room, 16 // self.heads))

    @property
    def prepare_parts(self) -> int:
        """Blocks of 32 columns of R_K (prepare.cu)."""
        return -(-self.layout.k_dim // 32)

    @property
    def finish_rows(self) -> int:
        return max(1, min(self.heads, 512 // self.layout.v_dim))

    @property
    def desk_offset(self) -> int:
        return self.warps * self.stages * self.stage_bytes

    @property
    def desk_bytes(self) -> int:
        """Where the warps leave their states (Desk in decode.cu)."""
        return -(-4 * self.buffers * self.warps * self.heads * (self.layout.v_dim + 6) // 16) * 16

    @property
    def query_offset(self) -> int:
        return self.desk_offset + self.desk_bytes

    @property
    def barrier_offset(self) -> int:
        return self.query_offset + (self.warps * self.tiles * self.layout.k_dim * 16 if self.tiles > 1 else 0)

    @property
    def shared_bytes(self) -> int:
        return self.barrier_offset + (8 * self.warps * self.stages if self.bulk else 0)

    @cached_property
    def header(self) -> str:
        """config.cuh."""
        defines = {
            "PAGE": PAGE, "K_DIM": self.layout.k_dim, "V_DIM": self.layout.v_dim, "K_BITS": self.layout.k_bits,
            "V_BITS": self.layout.v_bits, "PAGE_BYTES": self.layout.page_bytes, "V_OFFSET": self.layout.v_offset,
            "METADATA_OFFSET": self.layout.metadata_offset, "GROUP": self.group, "TILES": self.tiles,
            "WARPS": self.warps, "STAGES": self.stages, "MIN_BLOCKS": self.min_blocks, "BULK": int(self.bulk),
            "CHAINED": int(self.chained), "SOFTCAP": int(self.softcap), "FINISH_ROWS": self.finish_rows,
            "WINDOW_BF16": int(self.dtype == torch.bfloat16), "BARRIER_OFFSET": self.barrier_offset,
            "STAGE_BYTES": self.stage_bytes, "DESK_OFFSET": self.desk_offset, "DESK_BYTES": self.desk_bytes,
            "QUERY_OFFSET": self.query_offset,
            "BUFFERS": self.buffers, "PREPARE_TIMES": self.prepare_times, "FLUSH_PAGES": self.flush_pages,
            "CHAIN_FIRST": int(self.chained and self.chain_first),
        }  # fmt: skip
        lines = [
            "#pragma once",
            *(f"#define {k} {v}" for k, v in defines.items()),
            '#include "fragments.cuh"',
            _params_struct(),
        ]
        return "\n".join(lines) + "\n"
