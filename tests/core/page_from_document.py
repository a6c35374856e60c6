# SPDX-License-Identifier: Apache-2.0
"""An encoder and a decoder of pages written from docs/format.md alone, one code at a time, in plain Python.

They share nothing with ``oscar_kv.layout``. ``python tests/core/page_from_document.py`` writes docs/test_vectors.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

VECTORS = Path(__file__).resolve().parents[2] / "docs" / "test_vectors"
CASES = [  # k_dim, v_dim, k_bits, v_bits
    (128, 128, 2, 2),
    (64, 64, 2, 1),
    (80, 80, 3, 2),
    (16, 16, 1, 4),
    (192, 128, 4, 3),
    (112, 96, 1, 1),
    (256, 256, 2, 3),
]


def name_of(case: tuple[int, int, int, int]) -> str:
    return "page_k{0}x{2}_v{1}x{3}.bin".format(*case)


def example_code(side: str, t: int, i: int, bits: int) -> int:
    index = 256 * t + i if side == "k" else 64 * i + t
    return index * 40503 % 65536 >> (16 - bits)


def example_metadata(t: int) -> tuple[float, float, float, float]:
    return (t + 1) / 64, -t / 32, (64 - t) / 128, (t - 32) / 16


def byte_and_bit(side: str, t: int, i: int, d: int, bits: int) -> tuple[int, int]:
    """Where a plane of 1, 2 or 4 bits holds the code of token t, dimension i."""
    if side == "k":
        lane, half, slot = 4 * (t % 8) + (i % 8) // 2, i % 2, (t // 8) * (d // 8) + i // 8
    else:
        lane, half = 4 * (i % 8) + (t % 8) // 2, t % 2
        slot = (t // 8) * (d // 8) + (i // 8) % 2 * (d // 16) + i // 16
    per_half = 16 // bits
    word, j = divmod(slot, per_half)
    bit = 16 * half + (bits * j if bits > 1 else j // 8 * 8 + 2 * (j % 4) + j % 8 // 4)

    words, offset, first = d * bits // 16, 0, 0
    while True:  # chunks of four words a lane, then two, then one
        chunk = next(c for c in (4, 2, 1) if c <= words - first)
        if word < first + chunk:
            break
        offset += 32 * 4 * chunk
        first += chunk
    return offset + 4 * chunk * lane + 4 * (word - first) + bit // 8, bit % 8


def planes_of(bits: int) -> list[tuple[int, int]]:
    """(bits of the plane, how far its codes are shifted left)."""
    return [(2, 0), (1, 2)] if bits == 3 else [(bits, 0)]


def encode(case: tuple[int, int, int, int], code: dict[str, list[list[int]]], meta: list[tuple[float, ...]]) -> bytes:
    page = b""
    for side, d, bits in (("k", case[0], case[2]), ("v", case[1], case[3])):
        for width, shift in planes_of(bits):
            plane = bytearray(64 * d * width // 8)
            for t in range(64):
                for i in range(d):
                    byte, bit = byte_and_bit(side, t, i, d, width)
                    plane[byte] |= (code[side][t][i] >> shift) % 2**width << bit
            page += plane
    return page + b"".join(struct.pack("<4e", *m) for m in meta)


def decode(case: tuple[int, int, int, int], page: bytes) -> tuple[dict[str, list[list[int]]], list[tuple[float, ...]]]:
    code, base = {}, 0
    for side, d, bits in (("k", case[0], case[2]), ("v", case[1], case[3])):
        rows = [[0] * d for _ in range(64)]
        for width, shift in planes_of(bits):
            for t in range(64):
                for i in range(d):
                    byte, bit = byte_and_bit(side, t, i, d, width)
                    rows[t][i] |= (page[base + byte] >> bit) % 2**width << shift
            base += 64 * d * width // 8
        code[side] = rows
    return code, [struct.unpack_from("<4e", page, base + 8 * t) for t in range(64)]


def example(case: tuple[int, int, int, int]) -> tuple[dict[str, list[list[int]]], list[tuple[float, ...]]]:
    code = {
        side: [[example_code(side, t, i, bits) for i in range(d)] for t in range(64)]
        for side, d, bits in (("k", case[0], case[2]), ("v", case[1], case[3]))
    }
    return code, [example_metadata(t) for t in range(64)]


if __name__ == "__main__":
    VECTORS.mkdir(exist_ok=True)
    manifest = {}
    for case in CASES:
        page = encode(case, *example(case))
        (VECTORS / name_of(case)).write_bytes(page)
        manifest[name_of(case)] = {
            **dict(zip(("k_dim", "v_dim", "k_bits", "v_bits"), case, strict=True)),
            "bytes": len(page), "sha256": hashlib.sha256(page).hexdigest(), "first_16": page[:16].hex(),
        }  # fmt: skip
    (VECTORS / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
