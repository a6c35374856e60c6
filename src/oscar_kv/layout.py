# SPDX-License-Identifier: Apache-2.0
"""The bytes of a page: 64 tokens of one KV head as K planes, V planes, metadata. Specified in docs/format.md.

Codes lie in the order in which the lanes of a warp feed them to ``mma.m16n8k16``; nothing is padded. Whoever writes or
reads pages, in any language, takes the numbers from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal

import torch
from torch import Tensor

from .errors import OscarError
from .quantizer import Quantised

FORMAT_VERSION = 1
PAGE = 64
LANES = 32
METADATA_BYTES = 8  # a token: fp16 step and zero of K, then of V
Side = Literal["k", "v"]


def check_head_dim(d: int, what: str = "head_dim") -> int:
    """d if it is a multiple of 16 from 16 to 256; OscarError otherwise."""
    if not 16 <= d <= 256 or d % 16:
        raise OscarError(f"{what} {d} is not supported: it must be a multiple of 16 from 16 to 256")
    return d


def planes(bits: int) -> tuple[int, ...]:
    """Bits of the planes a code is cut into, in storage order: 3 = a 2-bit plane (low bits), then a 1-bit plane."""
    try:
        return {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}[bits]
    except KeyError:
        raise OscarError(f"{bits} bits are not supported: 1, 2, 3 or 4") from None


@dataclass(frozen=True)
class PageLayout:
    """Sizes and offsets, in bytes, of one page of one KV head."""

    k_dim: int
    v_dim: int
    k_bits: int
    v_bits: int

    def __post_init__(self) -> None:
        check_head_dim(self.k_dim, "key head_dim")
        check_head_dim(self.v_dim, "value head_dim")
        planes(self.k_bits), planes(self.v_bits)

    @property
    def k_bytes(self) -> int:
        return PAGE * self.k_dim * self.k_bits // 8

    @property
    def v_bytes(self) -> int:
        return PAGE * self.v_dim * self.v_bits // 8

    @property
    def v_offset(self) -> int:
        return self.k_bytes

    @property
    def metadata_offset(self) -> int:
        return self.k_bytes + self.v_bytes

    @property
    def page_bytes(self) -> int:
        return self.metadata_offset + PAGE * METADATA_BYTES

    @property
    def bits_per_element(self) -> float:
        """Bits an element of the history takes, metadata included."""
        return self.page_bytes * 8 / (PAGE * (self.k_dim + self.v_dim))


def _position(side: Side, token: Tensor, dim: Tensor, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """(lane, half-word, slot) of a code."""
    if side == "k":
        return 4 * (token % 8) + (dim % 8) // 2, dim % 2, (token // 8) * (d // 8) + dim // 8
    slot = (token // 8) * (d // 8) + ((dim // 8) % 2) * (d // 16) + dim // 16
    return 4 * (dim % 8) + (token % 8) // 2, token % 2, slot


def _word_byte(lane: Tensor, word: Tensor, words: int) -> Tensor:
    """Byte offset of a lane's word: chunks of 16 bytes a lane, the remainder in 8 and then 4 bytes."""
    full = words // 4
    offset = (word // 4) * (LANES * 16) + lane * 16 + (word % 4) * 4
    base, first = full * LANES * 16, full * 4
    for width in (2, 1):
        if words % (2 * width) >= width:
            inside = (word >= first) & (word < first + width)
            offset = torch.where(inside, base + lane * 4 * width + (word - first) * 4, offset)
            base, first = base + LANES * 4 * width, first + width
    return offset


@cache
def code_positions(side: Side, d: int, bits: int) -> tuple[Tensor, Tensor]:
    """Byte offset in the plane and bit in the byte of every code, each [64, d] int64, for a plane of 1, 2 or 4 bits."""
    token, dim = torch.meshgrid(torch.arange(PAGE), torch.arange(d), indexing="ij")
    lane, half, slot = _position(side, token, dim, d)
    per_word = 16 // bits
    word, in_word = slot // per_word, slot % per_word
    if bits == 1:  # so that one shift by 2 or 1 aligns the plane with a 2-bit plane
        in_byte = in_word % 8
        bit = (in_word - in_byte) + 2 * (in_byte % 4) + in_byte // 4
    else:
        bit = bits * in_word
    bit = bit + 16 * half
    return _word_byte(lane, word, d * bits // 16) + bit // 8, bit % 8


# Eight codes of one token, dims 8i … 8i+7, share a slot: packing and unpacking treat them as one int64 of eight bytes.
# Shifts of a whole int64 move bits between its bytes; the masks drop what has crossed.


@cache
def _mask(bits: int) -> int:
    return int.from_bytes(bytes([2**bits - 1] * 8), "little")


@cache
def _shifts(bits: int, device: torch.device) -> Tensor:
    """Bit in the byte of the slots that share it, int64 [8/bits, 1]."""
    shifts = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 1 else range(0, 8, bits)
    return torch.tensor(shifts, device=device)[:, None]


def _slots_first(octet: Tensor, side: Side) -> Tensor:
    """[n, 64, d/8] (token, octet of dims) → [n, d, 8] (slot, token mod 8)."""
    n, _, octets = octet.shape
    if side == "k":
        return octet.view(n, 8, 8, octets).transpose(2, 3).reshape(n, 8 * octets, 8)
    return octet.view(n, 8, 8, octets // 2, 2).permute(0, 1, 4, 3, 2).reshape(n, 8 * octets, 8)


def _tokens_first(slot: Tensor, side: Side) -> Tensor:
    """The inverse of ``_slots_first``: [n, d, 8] → [n, 64, d/8]."""
    n, d, _ = slot.shape
    if side == "k":
        return slot.view(n, 8, d // 8, 8).transpose(2, 3).reshape(n, PAGE, d // 8)
    return slot.view(n, 8, 2, d // 16, 8).permute(0, 1, 4, 3, 2).reshape(n, PAGE, d // 8)


@cache
def _byte_order(side: Side, d: int, bits: int, device: torch.device) -> Tensor:
    """Index [64·d·bits/8] into a plane's bytes that sorts them as (slots that share a byte, token mod 8, dim mod 8)."""
    byte, _ = code_positions(side, d, bits)
    octets = [_slots_first(byte[None, :, i::8], side)[0, :: 8 // bits] for i in range(8)]
    return torch.stack(octets, -1).reshape(-1).to(device)


@cache
def _byte_order_back(side: Side, d: int, bits: int, device: torch.device) -> Tensor:
    return _byte_order(side, d, bits, device).argsort()


def _permuted(data: Tensor, order: Tensor) -> Tensor:
    """Bytes [n, size] in this order. (gather takes bytes two to four times faster than indexing does.)"""
    return data.gather(1, order.expand(len(data), -1))


def pack_codes(code: Tensor, side: Side, bits: int) -> Tensor:
    """uint8 codes [..., 64, d] → plane bytes [..., 64·d·bits/8]. Bits of a code beyond ``bits`` are dropped."""
    if code.dtype != torch.uint8 or code.ndim < 2 or code.shape[-2] != PAGE:
        raise OscarError(f"codes of a page are uint8 [..., {PAGE}, d], got {code.dtype} {tuple(code.shape)}")
    lead, d = code.shape[:-2], check_head_dim(code.shape[-1])
    flat = code.reshape(prod(lead), PAGE, d).contiguous()
    if flat.storage_offset() % 8:  # an int64 view must be aligned
        flat = flat.clone()
    slot, low, out = _slots_first(flat.view(torch.int64), side), 0, []
    for b in planes(bits):
        part = (slot >> low) & _mask(b)
        shifted = part.view(len(flat), d * b // 8, 8 // b, 8) << _shifts(b, code.device)
        part = shifted.sum(2)  # their bits are disjoint: the sum is an or
        out.append(_permuted(part.view(torch.uint8).flatten(1), _byte_order_back(side, d, b, code.device)))
        low += b
    return (out[0] if len(out) == 1 else torch.cat(out, -1)).view(*lead, PAGE * d * bits // 8)


def unpack_codes(data: Tensor, side: Side, d: int, bits: int) -> Tensor:
    """Plane bytes [..., 64·d·bits/8] → uint8 codes [..., 64, d]."""
    if data.dtype != torch.uint8 or data.shape[-1] != PAGE * check_head_dim(d) * sum(planes(bits)) // 8:
        raise OscarError(
            f"the planes of {bits} bits at head_dim {d} are {PAGE * d * bits // 8} uint8, got {tuple(data.shape)}"
        )
    lead, slot, low, offset = data.shape[:-1], None, 0, 0
    flat = data.reshape(prod(lead), data.shape[-1])
    for b in planes(bits):
        size = PAGE * d * b // 8
        part = _permuted(flat[:, offset : offset + size], _byte_order(side, d, b, data.device))
        part = part.view(torch.int64).view(len(flat), d * b // 8, 1, 8) >> _shifts(b, data.device)
        part = (part & _mask(b)).view(len(flat), d, 8)
        slot = part if slot is None else slot | (part << low)
        low, offset = low + b, offset + size
    assert slot is not None
    return _tokens_first(slot, side).view(torch.uint8).view(*lead, PAGE, d)


def write_pages(layout: PageLayout, k: Quantised, v: Quantised) -> Tensor:
    """Quantised keys and values of whole pages, rows [..., 64, d] → uint8 [..., page_bytes]. OscarError on others."""
    if (k.code.shape[-1], v.code.shape[-1]) != (layout.k_dim, layout.v_dim):
        raise OscarError(
            f"rows have head_dim {k.code.shape[-1]} (K) and {v.code.shape[-1]} (V), "
            f"the layout {layout.k_dim} and {layout.v_dim}"
        )
    meta = torch.stack([k.step, k.zero, v.step, v.zero], -1).half().contiguous()
    meta = meta.view(torch.uint8).reshape(*meta.shape[:-2], PAGE * METADATA_BYTES)
    return torch.cat([pack_codes(k.code, "k", layout.k_bits), pack_codes(v.code, "v", layout.v_bits), meta], -1)


def read_pages(layout: PageLayout, data: Tensor) -> tuple[Quantised, Quantised]:
    """uint8 [..., page_bytes] → quantised keys and values, rows [..., 64, d]. OscarError on another size."""
    if data.dtype != torch.uint8 or data.shape[-1] != layout.page_bytes:
        raise OscarError(f"a page of this layout has {layout.page_bytes} uint8, got {data.shape[-1]} of {data.dtype}")
    k = unpack_codes(data[..., : layout.k_bytes], "k", layout.k_dim, layout.k_bits)
    v = unpack_codes(data[..., layout.v_offset : layout.metadata_offset], "v", layout.v_dim, layout.v_bits)
    meta = data[..., layout.metadata_offset :].contiguous().view(torch.float16)
    meta = meta.reshape(*data.shape[:-1], PAGE, 4)
    return Quantised(k, meta[..., 0], meta[..., 1]), Quantised(v, meta[..., 2], meta[..., 3])
