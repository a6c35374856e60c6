# SPDX-License-Identifier: Apache-2.0
"""The layout as the input of ``mma.sync.m16n8k16``: masked words are operand fragments, for every head_dim and width.

The fragment mapping is that of the PTX ISA (m16n8k16, f16): with g = lane / 4 and t = lane % 4,
A (16×16): registers 0 … 3 hold row g, g+8, g, g+8 and columns 2t+{0,1} (registers 0, 1), 2t+8+{0,1} (2, 3);
B (16×8): registers 0, 1 hold rows 2t+{0,1} and 2t+8+{0,1} of column g;
C (16×8): values 0, 1 are row g, columns 2t+{0,1}; values 2, 3 row g+8.
Numbers are small integers, so every product is compared exactly.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oscar_kv.layout import pack_codes, planes

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
HALF = np.arange(2)
DIMS = range(16, 257, 16)


def mma(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A [32 lanes, 4 registers, 2 halves], B [32, 2, 2] → C [32, 4 values], products and sums in fp64."""
    ma, mb = np.zeros((16, 16)), np.zeros((16, 8))
    col = 2 * T[:, None] + HALF
    for r in range(4):
        ma[(G + 8 * (r % 2))[:, None], col + 8 * (r // 2)] = a[:, r]
    for r in range(2):
        mb[col + 8 * r, G[:, None]] = b[:, r]
    c = ma @ mb
    low, high = c[G[:, None], col], c[G[:, None] + 8, col]
    return np.concatenate([low, high], 1)


def rows_of_c(c: np.ndarray) -> np.ndarray:
    """C fragment [32, 4] → matrix [16, 8]."""
    out, col = np.zeros((16, 8)), 2 * T[:, None] + HALF
    out[G[:, None], col], out[G[:, None] + 8, col] = c[:, :2], c[:, 2:]
    return out


def lane_words(plane: np.ndarray, words: int) -> np.ndarray:
    """The uint32 words [32, words] that each lane gets from loads of 16, 8 and 4 bytes."""
    out, at = [], 0
    for chunk in (4,) * (words // 4) + ((2,) if words & 2 else ()) + ((1,) if words & 1 else ()):
        size = 32 * 4 * chunk
        out.append(np.frombuffer(plane[at : at + size].tobytes(), "<u4").reshape(32, chunk))
        at += size
    assert at == len(plane)
    return np.concatenate(out, 1)


def bit_of(slot: int, bits: int) -> int:
    """Bit of a slot inside its 16-bit half."""
    j = slot % (16 // bits)
    return bits * j if bits > 1 else j // 8 * 8 + 2 * (j % 4) + j % 8 // 4


class Side:
    """A page of keys or values as the lanes see it: two codes of a slot become two fp16 numbers by shift and mask."""

    def __init__(self, side: str, d: int, bits: int, code: np.ndarray) -> None:
        self.side, self.d, self.bits, self.shifts = side, d, bits, set()
        data, at, self.planes = pack_codes(torch.from_numpy(code), side, bits).numpy(), 0, []
        for b in planes(bits):
            size = 64 * d * b // 8
            self.planes.append((b, lane_words(data[at : at + size], d * b // 16)))
            at += size

    def slot(self, block: int, octet: int) -> int:
        """block = token / 8, octet = dimension / 8."""
        if self.side == "k":
            return block * (self.d // 8) + octet
        return block * (self.d // 8) + octet % 2 * (self.d // 16) + octet // 2

    def exponent(self, octet: int) -> int:
        """Codes of this octet arrive as code·2^(exponent−24), for every token alike: q or the epilogue undoes it."""
        return bit_of(self.slot(0, octet), self.planes[0][0]) % 8

    def fragment(self, block: int, octet: int) -> np.ndarray:
        """[32 lanes, 2 halves] fp64 values of one register: (word shifted) AND mask, read as two fp16 numbers."""
        slot, to, out = self.slot(block, octet), self.exponent(octet), np.zeros(32, np.uint32)
        for b, words in self.planes:
            target = to if b == self.planes[0][0] else to + 2  # the 1-bit plane of 3 bits is ORed above the 2-bit one
            shift = bit_of(slot, b) - target
            self.shifts.add((b, shift))
            word = words[:, slot // (16 // b)]
            moved = word >> np.uint32(shift) if shift >= 0 else word << np.uint32(-shift)
            out |= moved & np.uint32(((2**b - 1) << target) * 0x10001)
        halves = out.view(np.uint16).reshape(32, 2)
        assert halves.max() < 1024  # an fp16 subnormal: exact, no exponent bit is touched
        return halves.view(np.float16).astype(np.float64)


def page(side: str, d: int, bits: int) -> tuple[Side, np.ndarray]:
    code = np.random.default_rng(d + bits).integers(0, 2**bits, (64, d), dtype=np.uint8)
    return Side(side, d, bits, code), code.astype(np.float64)


def undo(side: Side) -> np.ndarray:
    """2^(24−exponent) of every dimension."""
    return np.repeat([2.0 ** (24 - side.exponent(o)) for o in range(side.d // 8)], 8)


CASES = pytest.mark.parametrize("bits", [1, 2, 3, 4])
ALL_D = pytest.mark.parametrize("d", DIMS)


@ALL_D
@CASES
def test_keys_with_tokens_as_rows(d: int, bits: int) -> None:
    """A = 16 tokens × 16 dimensions of codes, B = 16 dimensions × 8 heads of q: S = code·q."""
    side, code = page("k", d, bits)
    q = np.random.default_rng(1).integers(-9, 10, (8, d)).astype(np.float64)
    scaled = q * undo(side)
    for tile in range(4):
        c = np.zeros((32, 4))
        for step in range(d // 16):
            pair = (2 * step, 2 * step + 1)
            a = np.stack([side.fragment(2 * tile + r % 2, pair[r // 2]) for r in range(4)], 1)
            dims = np.stack([8 * o + 2 * T[:, None] + HALF for o in pair], 1)
            c += mma(a, scaled[G[:, None, None], dims])
        np.testing.assert_array_equal(rows_of_c(c), code[16 * tile : 16 * tile + 16] @ q.T)


@ALL_D
@CASES
def test_values_with_dimensions_as_rows(d: int, bits: int) -> None:
    """A = 16 dimensions × 16 tokens of codes, B = 16 tokens × 8 heads of p: Oᵀ = codeᵀ·p."""
    side, code = page("v", d, bits)
    p = np.random.default_rng(2).integers(0, 99, (64, 8)).astype(np.float64)
    for tile in range(d // 16):
        c = np.zeros((32, 4))
        for step in range(4):
            a = np.stack([side.fragment(2 * step + r // 2, 2 * tile + r % 2) for r in range(4)], 1)
            tokens = 16 * step + np.stack([2 * T[:, None] + HALF, 2 * T[:, None] + HALF + 8], 1)
            c += mma(a, p[tokens, G[:, None, None]])
        dims = slice(16 * tile, 16 * tile + 16)
        np.testing.assert_array_equal(rows_of_c(c) * undo(side)[dims, None], code[:, dims].T @ p)


@ALL_D
@CASES
def test_heads_as_rows(d: int, bits: int) -> None:
    """9–16 heads: A = q (then p), heads as the 16 rows; the same bytes as B, 8 tokens (dimensions) as columns."""
    keys, code = page("k", d, bits)
    q = np.random.default_rng(3).integers(-9, 10, (16, d)).astype(np.float64)
    scaled = q * undo(keys)
    row = np.stack([G + 8 * (r % 2) for r in range(4)], 1)[..., None]
    for block in range(8):
        c = np.zeros((32, 4))
        for step in range(d // 16):
            col = np.stack([16 * step + 2 * T[:, None] + HALF + 8 * (r // 2) for r in range(4)], 1)
            b = np.stack([keys.fragment(block, 2 * step + r) for r in range(2)], 1)
            c += mma(scaled[row, col], b)
        np.testing.assert_array_equal(rows_of_c(c), q @ code[8 * block : 8 * block + 8].T)

    values, code = page("v", d, bits)
    p = np.random.default_rng(4).integers(0, 99, (16, 64)).astype(np.float64)
    for octet in range(d // 8):
        c = np.zeros((32, 4))
        for step in range(4):
            col = np.stack([16 * step + 2 * T[:, None] + HALF + 8 * (r // 2) for r in range(4)], 1)
            b = np.stack([values.fragment(2 * step + r, octet) for r in range(2)], 1)
            c += mma(p[row, col], b)
        dims = slice(8 * octet, 8 * octet + 8)
        np.testing.assert_array_equal(rows_of_c(c) * undo(values)[dims], p @ code[:, dims])


def test_the_scores_transpose_into_the_values_operand() -> None:
    """``movmatrix`` (an 8×8 transpose of one register) turns S's C fragment, tokens × heads, into B of the values."""
    s = np.arange(128.0).reshape(16, 8)
    for r in range(2):
        c = s[(G + 8 * r)[:, None], 2 * T[:, None] + HALF]
        block = np.zeros((8, 8))
        block[G[:, None], 2 * T[:, None] + HALF] = c
        moved = block.T[G[:, None], 2 * T[:, None] + HALF]
        np.testing.assert_array_equal(moved, s[8 * r + 2 * T[:, None] + HALF, G[:, None]])


@pytest.mark.parametrize(("bits", "multiple"), [(1, 64), (2, 32), (3, 64), (4, 16)])
@pytest.mark.parametrize("side", ["k", "v"])
def test_shifts_needed(side: str, bits: int, multiple: int) -> None:
    """Where head_dim is a multiple of ``multiple``, shifts are the upper byte's (and those of 1 bit's odd slots)."""
    allowed = {1: {0, 1, 8, 9}, 2: {0, 8}, 4: {0, 8}}
    joined = {-2, -1, 6, 7}  # the 1-bit plane under a 2-bit one
    for d in DIMS:
        kind, _ = page(side, d, bits)
        for block in range(8):
            for octet in range(d // 8):
                kind.fragment(block, octet)
        few = all(shift in (joined if (bits, b) == (3, 1) else allowed[b]) for b, shift in kind.shifts)
        assert few or d % multiple, (d, kind.shifts)
