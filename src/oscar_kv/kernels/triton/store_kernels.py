# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Pages and windows written in Triton: rows quantised to codes a byte each, then packed a page at a time.

A page is written whole because tokens t and t ± 8 may share bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import PAGE, bit_of, word_offset
from .quantise import SMALLEST, least_squares_step, mean, round_to, sanitise, stretched, to_half, to_step

BLOCK = tl.constexpr(16)  # dimensions between which error feedback is sequential


@triton.jit
def _rows(raw, ring, position, new, j, dim, row_stride, ring_rows, centre, D: tl.constexpr):
    """Centred rows [rows, dims] in fp32: those before this call from the ring, the others from its input."""
    inside = (dim < D)[None, :]
    fresh = tl.load(raw + (j * row_stride)[:, None] + dim[None, :], mask=new[:, None] & inside, other=0)
    at = (position % ring_rows)[:, None] * D + dim[None, :]
    old = tl.load(ring + at, mask=(position >= 0)[:, None] & (new == 0)[:, None] & inside, other=0)
    x = tl.where(new[:, None], fresh.to(tl.float32), old.to(tl.float32))
    return x - tl.load(centre + dim, mask=dim < D, other=0)[None, :]


@triton.jit
def _shaped(
    x, upper, diagonal, step, zero, codes, token,
    D: tl.constexpr, PAD: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Codes with error feedback, written to ``codes`` [rows, D]; what the unbiased scale needs.

    16 dimensions at a time: the feedback of earlier blocks is one product E·(I+U), inside a block it is sequential. As
    e(I+U) = (x + feedback) − x̂, the weighted products of ``quantizer.unbiased`` come along, with one more product.
    Returns own = ⟨x, x⟩_A, cross = ⟨x̂, x⟩_A, row means removed, and the mean of x̂.
    """
    dim, c, block = tl.arange(0, PAD), tl.arange(0, BLOCK), tl.arange(0, PAD // BLOCK)
    average = mean(x, D)
    centred = tl.where((dim < D)[None, :], x - average[:, None], 0.0)
    blocks = tl.reshape(x, [ROWS, PAD // BLOCK, BLOCK])
    errors = tl.zeros([ROWS, PAD // BLOCK, BLOCK], tl.float32)
    own, with_errors = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    with_ones = tl.zeros([ROWS], tl.float32)
    for n in range(D // BLOCK):
        column = n * BLOCK + c
        u = tl.load(upper + dim[:, None] * D + column[None, :], mask=(dim < D)[:, None] & (c >= 0)[None, :], other=0)
        here = (block == n)[None, :, None]
        part = tl.sum(tl.where(here, blocks, 0.0), 1)
        fed = part + tl.dot(tl.reshape(errors, [ROWS, PAD]), u, input_precision=PRECISION)
        code = tl.zeros([ROWS, BLOCK], tl.float32)
        for k in range(BLOCK):
            now = (c == k)[None, :]
            rounded = round_to(tl.sum(tl.where(now, fed, 0.0), 1), step, zero, TOP)
            error = tl.sum(tl.where(now, part, 0.0), 1) - (rounded * step + zero)
            code = tl.where(now, rounded[:, None], code)
            row = tl.load(upper + (n * BLOCK + k) * D + column)
            fed += tl.where((c > k)[None, :], error[:, None] * row[None, :], 0.0)
        restored = code * step[:, None] + zero[:, None]
        errors = tl.where(here, (part - restored)[:, None, :], errors)
        tl.store(codes + token[:, None] * D + column[None, :], code.to(tl.uint8))
        left = tl.dot(centred, u, input_precision=PRECISION)
        weighted = left * tl.load(diagonal + column)[None, :]
        own += tl.sum(weighted * left, 1)
        with_errors += tl.sum(weighted * (fed - restored), 1)
        with_ones += tl.sum(weighted * tl.sum(u, 0)[None, :], 1)
    mean_error = mean(tl.reshape(errors, [ROWS, PAD]), D)
    return own, own - with_errors + mean_error * with_ones, average - mean_error


@triton.jit
def _pack(codes, plane, D: tl.constexpr, BITS: tl.constexpr, WORDS_PAD: tl.constexpr, VALUES: tl.constexpr):
    """Codes [64, D] → the planes of a side (int32 pointer)."""
    if BITS == 3:
        _pack_plane(codes, plane, 0, D, 2, WORDS_PAD, VALUES)
        _pack_plane(codes, plane + 4 * D, 2, D, 1, WORDS_PAD, VALUES)
    else:
        _pack_plane(codes, plane, 0, D, BITS, WORDS_PAD, VALUES)


@triton.jit
def _pack_plane(
    codes, plane,
    LOW: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, WORDS_PAD: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Bits LOW … LOW+BITS−1 of codes [64, D] → one plane (int32 pointer)."""
    SLOTS: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = D * BITS // 16
    lane, word = tl.arange(0, 32)[:, None], tl.arange(0, WORDS_PAD)[None, :]
    mask = (word < WORDS) & (lane >= 0)
    packed = tl.zeros([32, WORDS_PAD], tl.int32)
    for j in range(SLOTS):
        slot = word * SLOTS + j
        block, rest = slot // (D // 8), slot % (D // 8)
        for half in tl.static_range(2):
            if VALUES:
                token = block * 8 + lane % 4 * 2 + half
                dim = (rest % (D // 16) * 2 + rest // (D // 16)) * 8 + lane // 4
            else:
                token = block * 8 + lane // 4
                dim = rest * 8 + lane % 4 * 2 + half
            code = tl.load(codes + token * D + dim, mask=mask, other=0).to(tl.int32)
            packed |= ((code >> LOW) & ((1 << BITS) - 1)) << (bit_of(j, BITS) + 16 * half)
    tl.store(plane + word_offset(lane, word, WORDS), packed, mask=mask)


@triton.jit
def _page(start, count, block_table, request, index, max_pages, first_page):
    """(first position of the call, page number, pool block or −1) of the index-th page that the call may complete."""
    begin, new_rows = tl.load(start + request), tl.load(count + request)
    number = begin // PAGE + index
    complete = (number * PAGE + PAGE - 1 < begin + new_rows) & (number >= first_page) & (number < max_pages)
    block = tl.load(block_table + request.to(tl.int64) * max_pages + number, mask=complete, other=-1)
    return begin, number, block.to(tl.int64)


@triton.jit(do_not_specialize=["kv_heads", "max_pages", "ring_rows", "first_page"])
def quantise_rows(
    raw, ring, metadata, block_table, start, count, slots, rotation, centre, upper, diagonal, scratch,
    batch_stride, head_stride, row_stride, kv_heads, max_pages, ring_rows, first_page,
    D: tl.constexpr, PAD: tl.constexpr, BITS: tl.constexpr, UNBIASED: tl.constexpr, SIGMA: tl.constexpr,
    WIDEN: tl.constexpr, PAGE_WORDS: tl.constexpr, FIELD: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Codes (to scratch), steps and zeros (to pages) of one side of pages whose 64th token has come.

    Grid (pages a request at most · 64/ROWS, kv_heads, batch). raw [batch, kv_heads, n, D] with strides; metadata: the
    pool as fp16; scratch uint8 [batch, kv_heads, pages, 64, D]. FIELD: 0 for keys, 2 for values. upper None: plain
    rounding. WIDEN: SHAPED_STEP_FACTOR.
    """
    PARTS: tl.constexpr = PAGE // ROWS
    index, head, request = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2)
    begin, number, block = _page(start, count, block_table, request, index, max_pages, first_page)
    if block >= 0:
        TOP: tl.constexpr = (1 << BITS) - 1
        slot = request.to(tl.int64)
        if slots is not None:
            slot = tl.load(slots + request).to(tl.int64)
        ring += (slot * kv_heads + head) * ring_rows * D
        raw += request.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
        centre += head * D
        page = (request.to(tl.int64) * kv_heads + head) * (tl.num_programs(0) // PARTS) + index
        codes = scratch + page * PAGE * D
        token, dim = tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS), tl.arange(0, PAD)
        position = number * PAGE + token
        new, j = position >= begin, (position - begin).to(tl.int64)
        if rotation is None:
            x = _rows(raw, ring, position, new, j, dim, row_stride, ring_rows, centre, D)
        else:
            x = tl.zeros([ROWS, PAD], tl.float32)
            matrix = rotation + head.to(tl.int64) * D * D
            for k in range(0, D, 16):
                few = k + tl.arange(0, 16)
                part = _rows(raw, ring, position, new, j, few, row_stride, ring_rows, centre, D)
                r = tl.load(
                    matrix + few[:, None] * D + dim[None, :], mask=(few < D)[:, None] & (dim < D)[None, :], other=0
                )
                x = tl.dot(part, r, x, input_precision=PRECISION)
        real = (dim < D)[None, :] & (token >= 0)[:, None]
        x = tl.where(real, sanitise(x), 0.0)
        step, zero = least_squares_step(x, real, D, BITS, SIGMA, BITS > 2 and upper is None)
        if upper is None:
            code = round_to(x, step[:, None], zero[:, None], TOP)
            tl.store(codes + token[:, None] * D + dim[None, :], code.to(tl.uint8), mask=real)
            if UNBIASED:
                average = mean(x, D)
                y = code * step[:, None] + zero[:, None]
                mean_y = mean(tl.where(real, y, 0.0), D)
                dx, dy = tl.where(real, x - average[:, None], 0.0), tl.where(real, y - mean_y[:, None], 0.0)
                step, zero = stretched(tl.sum(dx * dx, 1), tl.sum(dx * dy, 1), mean_y, step, zero)
        else:
            factor = tl.where(step > SMALLEST, WIDEN, 1.0)
            zero = to_half(zero + TOP / 2 * step * (1 - factor))
            step = to_step(step * factor)
            own, cross, mean_y = _shaped(
                x, upper + head.to(tl.int64) * D * D, diagonal + head * D, step, zero, codes, token,
                D, PAD, TOP, ROWS, PRECISION,
            )  # fmt: skip
            if UNBIASED:
                step, zero = stretched(own, cross, mean_y, step, zero)
        at = metadata + (block * kv_heads + head) * (2 * PAGE_WORDS) + (2 * PAGE_WORDS - 4 * PAGE) + 4 * token + FIELD
        tl.store(at, step.to(tl.float16))
        tl.store(at + 1, zero.to(tl.float16))


@triton.jit(do_not_specialize=["kv_heads", "max_pages", "first_page"])
def pack_pages(
    k_codes, v_codes, pages, block_table, start, count, kv_heads, max_pages, first_page,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    K_WORDS: tl.constexpr, V_WORDS: tl.constexpr,
):  # fmt: skip
    """Codes to planes. Grid (pages a request at most, kv_heads, batch); pages: the pool as int32."""
    PAGE_WORDS: tl.constexpr = 2 * (K_DIM * K_BITS + V_DIM * V_BITS) + 2 * PAGE
    head, request = tl.program_id(1), tl.program_id(2)
    _, _, block = _page(start, count, block_table, request, tl.program_id(0), max_pages, first_page)
    if block >= 0:
        page = (request.to(tl.int64) * kv_heads + head) * tl.num_programs(0) + tl.program_id(0)
        plane = pages + (block * kv_heads + head) * PAGE_WORDS
        _pack(k_codes + page * PAGE * K_DIM, plane, K_DIM, K_BITS, K_WORDS, False)
        _pack(v_codes + page * PAGE * V_DIM, plane + 2 * K_DIM * K_BITS, V_DIM, V_BITS, V_WORDS, True)


@triton.jit(do_not_specialize=["kv_heads", "sink_rows", "ring_rows"])
def write_windows(
    k, v, sink_k, sink_v, ring_k, ring_v, start, count, slots,
    k_batch, k_head, k_row, v_batch, v_head, v_row, kv_heads, sink_rows, ring_rows,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Raw rows into sink and ring. Grid (⌈n/ROWS⌉, kv_heads, batch)."""
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    new_rows = tl.load(count + request)
    slot = request
    if slots is not None:
        slot = tl.load(slots + request).to(tl.int64)
    slot = slot * kv_heads + head
    j, dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PAD)
    position = tl.load(start + request) + j
    ring = (j < new_rows) & (j >= new_rows - ring_rows)
    sink = (j < new_rows) & (position < sink_rows)
    row = j.to(tl.int64)
    x = tl.load(
        k + request * k_batch + head.to(tl.int64) * k_head + (row * k_row)[:, None] + dim[None, :],
        mask=(ring | sink)[:, None] & (dim < K_DIM)[None, :],
    )
    y = tl.load(
        v + request * v_batch + head.to(tl.int64) * v_head + (row * v_row)[:, None] + dim[None, :],
        mask=(ring | sink)[:, None] & (dim < V_DIM)[None, :],
    )
    at = (slot * ring_rows + position % ring_rows)[:, None]
    tl.store(ring_k + at * K_DIM + dim[None, :], x, mask=ring[:, None] & (dim < K_DIM)[None, :])
    tl.store(ring_v + at * V_DIM + dim[None, :], y, mask=ring[:, None] & (dim < V_DIM)[None, :])
    at = (slot * sink_rows + position)[:, None]
    tl.store(sink_k + at * K_DIM + dim[None, :], x, mask=sink[:, None] & (dim < K_DIM)[None, :])
    tl.store(sink_v + at * V_DIM + dim[None, :], y, mask=sink[:, None] & (dim < V_DIM)[None, :])
