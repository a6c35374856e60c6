# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Page words to tiles of fp16 codes, without moving data between lanes.

A page's words lie in the order of the fragments of ``mma.m16n8k16`` (docs/format.md). Where the head size is a power of
two, the tile is the words' own array with its axes reshaped, so one warp's loads are already the dot product's operand.
Other head sizes load each word where it is needed (the cache serves the repeats).

A code of b bits becomes the fp16 number 2ᵇ + code: shifted to the top of the mantissa, with the exponent ORed in. No
conversion instruction, no subnormals, exact; whoever uses a tile takes ``code_bias`` = 2ᵇ off again.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAGE = tl.constexpr(64)


def exponent_of(bits: int) -> int:
    """The fp16 exponents of 2ᵇ, one a half-word: the ``exponent`` of the tiles.

    It comes to the kernels as a number they do not know beforehand: mask and exponent are then one instruction (two
    constants would not fit into one).
    """
    return (0x3C00 + 0x400 * bits) * 0x10001


@triton.jit
def code_bias(BITS: tl.constexpr):
    """What a tile's numbers exceed the codes by."""
    return 1 << BITS


@triton.jit
def contracted(index):
    """The dimension (K) or token (V) at an index of a tile's contracted axis.

    16 at a time, as the MMA's lanes hold them: two octets side by side, two neighbours each. With that order and
    ``tl.join`` the compiler finds every code already in its place (it picks operands of 4 numbers a lane).
    """
    return index // 16 * 16 + index % 4 // 2 * 8 + index % 16 // 4 * 2 + index % 2


@triton.jit
def contracted_columns(x):
    """x [rows, 64 tokens] with its columns in a V tile's order."""
    x = tl.reshape(x, [x.shape[0], 4, 2, 4, 2])
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), [x.shape[0], PAGE])


@triton.jit
def bit_of(slot, BITS: tl.constexpr):
    """The lowest bit, in its half-word, of a slot of a plane of 1, 2 or 4 bits."""
    if BITS == 1:
        return 8 * (slot // 8) + 2 * (slot % 4) + (slot % 8) // 4
    else:
        return BITS * slot


@triton.jit
def word_offset(lane, word, WORDS: tl.constexpr):
    """Where a lane's word is in its plane, in words: chunks of 4 words a lane, of the remainder 2, then 1."""
    FULL: tl.constexpr = WORDS // 4
    offset = (word // 4) * 128 + lane * 4 + word % 4
    if WORDS % 4 == 1:
        offset = tl.where(word >= 4 * FULL, FULL * 128 + lane, offset)
    if WORDS % 4 >= 2:
        offset = tl.where(word >= 4 * FULL, FULL * 128 + lane * 2 + word - 4 * FULL, offset)
    if WORDS % 4 == 3:
        offset = tl.where(word >= 4 * FULL + 2, FULL * 128 + 64 + lane, offset)
    return offset


@triton.jit
def _slots(words, D: tl.constexpr, BITS: tl.constexpr):
    """A plane's words, in memory order → [8, 4, slots] with a slot's two codes (one a half-word) in the lowest bits."""
    WORDS: tl.constexpr = D * BITS // 16
    CHUNK: tl.constexpr = WORDS if WORDS < 4 else 4
    SLOTS: tl.constexpr = 16 // BITS
    x = tl.reshape(words, [WORDS // CHUNK, 32, CHUNK])
    x = tl.reshape(tl.permute(x, (1, 0, 2)), [32, WORDS, 1])
    shift = bit_of(tl.arange(0, SLOTS), BITS).to(tl.uint32)
    x = (x >> shift[None, None, :]) & (((1 << BITS) - 1) * 0x10001)
    return tl.reshape(x, [8, 4, D])


@triton.jit
def _k_slots(words, D: tl.constexpr, BITS: tl.constexpr):
    """→ [D/2 pairs of dimensions, 64 tokens]."""
    x = tl.reshape(_slots(words, D, BITS), [8, 4, 8, D // 16, 2])
    return tl.reshape(tl.permute(x, (3, 1, 4, 2, 0)), [D // 2, PAGE])


@triton.jit
def _v_slots(words, D: tl.constexpr, BITS: tl.constexpr):
    """→ [32 pairs of tokens, D dimensions]."""
    x = tl.reshape(_slots(words, D, BITS), [8, 4, 4, 2, 2, D // 16])
    return tl.reshape(tl.permute(x, (2, 1, 3, 5, 4, 0)), [PAGE // 2, D])


@triton.jit
def _gathered(plane, lane, slot, mask, D: tl.constexpr, BITS: tl.constexpr):
    SLOTS: tl.constexpr = 16 // BITS
    at = word_offset(lane, slot // SLOTS, D * BITS // 16)
    x = tl.load(plane + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return (x >> bit_of(slot % SLOTS, BITS).to(tl.uint32)) & (((1 << BITS) - 1) * 0x10001)


@triton.jit
def _octet_and_lane(pair):
    """Octet and place in it (0 … 3) of a pair of a tile's contracted axis: see ``contracted``."""
    return pair // 8 * 2 + pair % 2, pair // 2 % 4


@triton.jit
def _k_gather(plane, D: tl.constexpr, PAD: tl.constexpr, BITS: tl.constexpr):
    pair, token = tl.arange(0, PAD // 2)[:, None], tl.arange(0, PAGE)[None, :]
    octet, lane = _octet_and_lane(pair)
    slot = (token // 8) * (D // 8) + octet
    return _gathered(plane, 4 * (token % 8) + lane, slot, (octet < D // 8) & (token >= 0), D, BITS)


@triton.jit
def _v_gather(plane, D: tl.constexpr, PAD: tl.constexpr, BITS: tl.constexpr):
    pair, dim = tl.arange(0, PAGE // 2)[:, None], tl.arange(0, PAD)[None, :]
    block, lane = _octet_and_lane(pair)
    octet = dim // 8
    slot = block * (D // 8) + (octet % 2) * (D // 16) + octet // 2
    return _gathered(plane, 4 * (dim % 8) + lane, slot, (dim < D) & (pair >= 0), D, BITS)


@triton.jit
def _as_half(x, exponent, BITS: tl.constexpr):
    """Two codes a word (uint32) → [..., 2] fp16 of 2ᵇ + code."""
    x = (x << (10 - BITS)) | exponent.to(tl.uint32)
    low = (x & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (x >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def load_words(plane, D: tl.constexpr, BITS: tl.constexpr):
    """A side's words of one page, in memory order; of 3 bits the 2-bit plane. For head sizes that are powers of two."""
    COUNT: tl.constexpr = 2 * D * (2 if BITS == 3 else BITS)
    return tl.load(plane + tl.arange(0, COUNT)).to(tl.uint32, bitcast=True)


@triton.jit
def load_high_words(plane, D: tl.constexpr):
    """The 1-bit plane of 3-bit codes."""
    return tl.load(plane + 4 * D + tl.arange(0, 2 * D)).to(tl.uint32, bitcast=True)


@triton.jit
def k_codes(plane, exponent, D: tl.constexpr, PAD: tl.constexpr, BITS: tl.constexpr):
    """plane: a page's K words (int32 pointer) → fp16 2ᵇ + code [PAD dimensions in contracted order, 64 tokens].

    Padding is finite.
    """
    if D == PAD:
        if BITS == 3:
            x = _k_slots(load_words(plane, D, 3), D, 2) | (_k_slots(load_high_words(plane, D), D, 1) << 2)
        else:
            x = _k_slots(load_words(plane, D, BITS), D, BITS)
    else:
        if BITS == 3:
            x = _k_gather(plane, D, PAD, 2) | (_k_gather(plane + 4 * D, D, PAD, 1) << 2)
        else:
            x = _k_gather(plane, D, PAD, BITS)
    return tl.reshape(tl.permute(_as_half(x, exponent, BITS), (0, 2, 1)), [PAD, PAGE])


@triton.jit
def v_codes(plane, exponent, D: tl.constexpr, PAD: tl.constexpr, BITS: tl.constexpr):
    """plane: a page's V words (int32 pointer) → fp16 2ᵇ + code [64 tokens in contracted order, PAD dimensions].

    Padding is finite.
    """
    if D == PAD:
        if BITS == 3:
            x = _v_slots(load_words(plane, D, 3), D, 2) | (_v_slots(load_high_words(plane, D), D, 1) << 2)
        else:
            x = _v_slots(load_words(plane, D, BITS), D, BITS)
    else:
        if BITS == 3:
            x = _v_gather(plane, D, PAD, 2) | (_v_gather(plane + 4 * D, D, PAD, 1) << 2)
        else:
            x = _v_gather(plane, D, PAD, BITS)
    return tl.reshape(tl.permute(_as_half(x, exponent, BITS), (0, 2, 1)), [PAGE, PAD])
