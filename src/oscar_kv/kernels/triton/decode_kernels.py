# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Decode attention in Triton: queries turned, history and raw windows in pieces, pieces merged.

Logits are in log2 units; with a soft-cap, in units of the cap until it has been applied. A piece is one program's share
of the history of one KV head, or 64 rows of a raw window; it leaves a normalised output and log2 of its mass
(−inf: no tokens, and no output written).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import PAGE, code_bias, contracted, contracted_columns, k_codes, v_codes

ROWS = tl.constexpr(16)  # query heads a program: the rows of one MMA


@triton.jit(do_not_specialize=["kv_heads"])
def turn_queries(
    q, rotation, centre, turned, bias, kv_heads, factor,
    GROUP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """turned [batch, q_heads, PAD] = factor·q·R_K in ``contracted`` order, padded with 0; bias = factor·q·μ_K; fp32.

    bias [batch, q_heads]. Grid (batch·kv_heads, ⌈GROUP/16⌉, PAD/COLUMNS). rotation None: identity.
    """
    head = tl.program_id(0) % kv_heads
    first = tl.program_id(0).to(tl.int64) * GROUP
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column = contracted(place)
    at = (first + row)[:, None] * D
    real = (row < GROUP)[:, None]
    if rotation is None:
        sums = tl.load(q + at + column[None, :], mask=real & (column < D)[None, :], other=0).to(tl.float32)
    else:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        matrix = rotation + head.to(tl.int64) * D * D
        for k in range(0, D, 16):
            dim = k + tl.arange(0, 16)
            x = tl.load(q + at + dim[None, :], mask=real, other=0).to(tl.float32)
            r = tl.load(
                matrix + dim[:, None] * D + column[None, :], mask=(column < D)[None, :] & (dim >= 0)[:, None], other=0
            )
            sums = tl.dot(x, r, sums, input_precision="ieee")
    tl.store(turned + (first + row)[:, None] * PAD + place[None, :], sums * factor, mask=real)
    if tl.program_id(2) == 0:
        dim = tl.arange(0, PAD)
        x = tl.load(q + at + dim[None, :], mask=real & (dim < D)[None, :], other=0).to(tl.float32)
        mu = tl.load(centre + head * D + dim, mask=dim < D, other=0)
        tl.store(bias + first + row, tl.sum(x * mu[None, :], 1) * factor, mask=row < GROUP)


@triton.jit
def _cap(x, cap):
    """cap·tanh(x); cap carries log2(e)."""
    return cap * (1 - 2 / (1 + tl.exp2(2.8853900817779268 * x)))


@triton.jit
def _inside(page, token, start, end):
    return (page * PAGE + token >= start) & (page * PAGE + token < end)


@triton.jit
def _step_and_zero(word):
    """A token's two fp16 numbers of a side, from the 32 bits that hold them → fp32."""
    step = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    zero = (word.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return step.to(tl.float32), zero.to(tl.float32)


@triton.jit
def _operand(x, first_row, rows, PAD: tl.constexpr):
    """Rows of x [rows, PAD] from first_row on → [ROWS, PAD], zeros beyond.

    Loaded in the order in which a warp holds the MMA's first operand, so that the loop finds it in its registers.
    """
    i = tl.arange(0, ROWS * PAD)
    row, column = i // 16 % 8 + i // 128 % 2 * 8 + first_row, i // 256 * 16 + i % 16
    x = tl.reshape(tl.load(x + row * PAD + column, mask=row < rows, other=0), [PAD // 16, 2, 8, 16])
    return tl.reshape(tl.permute(x, (1, 2, 0, 3)), [ROWS, PAD])


@triton.jit
def _history(
    turned, bias, pages, table, start, end, piece, pieces, head, kv_heads, head_block, real, first, cap,
    k_exponent, v_exponent,
    K_DIM: tl.constexpr, K_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, GROUP: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This piece's pages → (output [ROWS, V_PAD], log2 of the mass [ROWS])."""
    PAGE_WORDS: tl.constexpr = 2 * (K_DIM * K_BITS + V_DIM * V_BITS) + 2 * PAGE
    token, word = tl.arange(0, PAGE), tl.arange(0, 2 * PAGE)
    row = head_block * ROWS + tl.arange(0, ROWS)
    x = _operand(turned + first * K_PAD, head_block * ROWS, GROUP, K_PAD)
    offset = tl.load(bias + first + row, mask=real, other=0)
    # A power of two a head brings its largest entry to 2^14 … 2^15: fp16 holds what is 2^-28 times smaller, too. Heads
    # do not share it, so one with infinities spoils itself alone.
    size = tl.abs(x)
    top = tl.maximum(tl.max(tl.where(size < float("inf"), size, 0), 1), 2.0**-100)
    exponent = top.to(tl.int32, bitcast=True) & 0x7F800000
    up = ((254 << 23) - exponent + (14 << 23)).to(tl.float32, bitcast=True)
    down = (exponent - (14 << 23)).to(tl.float32, bitcast=True)
    query = (x * up[:, None]).to(tl.float16)
    query_sum = tl.sum(query.to(tl.float32), 1)

    one = tl.full([PAGE, ROWS], 1, tl.float16)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    mass, zeros = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    sums, weight = tl.zeros([ROWS, V_PAD], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
    unit = 1.0

    low = start // PAGE
    count = tl.where(end > start, tl.cdiv(end, PAGE) - low, 0)
    stop = low + (piece + 1) * count // pieces
    for n in tl.range(low + piece * count // pieces, stop, num_stages=STAGES):
        block = tl.load(table + n).to(tl.int64) * kv_heads + head
        page = pages + block * PAGE_WORDS
        meta = tl.load(page + (PAGE_WORDS - 2 * PAGE) + word, mask=_inside(n, word // 2, start, end), other=0)
        k_meta, v_meta = tl.split(tl.reshape(meta, [PAGE, 2]))
        k_step, k_zero = _step_and_zero(k_meta)
        v_step, v_zero = _step_and_zero(v_meta)
        k_zero -= code_bias(K_BITS) * k_step
        v_middle = v_zero + ((1 << V_BITS) - 1) * 0.5 * v_step

        s = tl.dot(query, k_codes(page, k_exponent, K_DIM, K_PAD, K_BITS))
        s = s * k_step[None, :] + query_sum[:, None] * k_zero[None, :]
        if SOFTCAP:
            s = _cap(s * down[:, None] + offset[:, None], cap)
        s = s + tl.where(_inside(n, token, start, end), 0.0, float("-inf"))[None, :]
        new = tl.maximum(most, tl.max(s, 1))
        if SOFTCAP:
            p, keep = tl.exp2(s - new[:, None]), tl.exp2(most - new)
        else:
            p, keep = tl.exp2(s * down[:, None] - (new * down)[:, None]), tl.exp2((most - new) * down)
        most = new
        mass = mass * keep + tl.sum(p, 1)
        zeros = zeros * keep + tl.sum(p * v_middle[None, :], 1)
        # p·step at the power of two that the page's largest step asks for: at most 2^14, and small weights stay normal.
        bits = tl.maximum(tl.max(v_step, 0), 2.0**-14).to(tl.int32, bitcast=True) & 0x7F800000
        scale = ((254 << 23) - bits + (13 << 23)).to(tl.float32, bitcast=True)
        keep = keep * (scale * unit)
        unit = (bits - (13 << 23)).to(tl.float32, bitcast=True)
        weighted = (p * (v_step * scale)[None, :]).to(tl.float16)
        values = v_codes(page + 2 * K_DIM * K_BITS, v_exponent, V_DIM, V_PAD, V_BITS)
        sums = tl.dot(contracted_columns(weighted), values, sums * keep[:, None])
        weight = tl.dot(weighted, one, weight * keep[:, None])  # so that rounding the weights cancels in what follows
    # Codes count from the middle one: a row's own rounding error then weighs as little as its values do.
    middle = code_bias(V_BITS) + ((1 << V_BITS) - 1) * 0.5
    share = tl.max(weight, 1)  # all columns are equal
    out = ((sums - middle * share[:, None]) * unit + zeros[:, None]) / mass[:, None]
    if SOFTCAP:  # noqa: SIM108
        lse = most + tl.log2(mass)
    else:
        lse = most * down + tl.log2(mass) + offset
    return out, lse


@triton.jit
def _window(
    q, keys, values, rows, first_row, low, high, row, real, first, factor, cap,
    K_DIM: tl.constexpr, K_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """64 rows of a raw window → (output [ROWS, V_PAD], log2 of the mass [ROWS]).

    Row r holds the last position below ``high`` that is r modulo ``rows``; positions below ``low`` are not seen.
    WIDEN: multiply in fp32 (Triton's interpreter cannot multiply bf16).
    """
    k_dim, v_dim = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    x = tl.load(
        q + (first + row)[:, None] * K_DIM + k_dim[None, :], mask=real[:, None] & (k_dim < K_DIM)[None, :], other=0
    )
    if WIDEN:
        x = x.to(tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    mass, sums = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, V_PAD], tl.float32)
    for n in tl.range(0, 64, TILE, num_stages=2):
        r = first_row + n + tl.arange(0, TILE)
        position = high - 1 - (high - 1 + rows - r) % rows
        seen = (r < rows) & (position >= low)
        k = tl.load(keys + r[None, :] * K_DIM + k_dim[:, None], mask=seen[None, :] & (k_dim < K_DIM)[:, None], other=0)
        if WIDEN:
            k = k.to(tl.float32)
        s = tl.dot(x, k, input_precision="ieee") * factor
        if SOFTCAP:
            s = _cap(s, cap)
        s = s + tl.where(seen, 0.0, float("-inf"))[None, :]
        new = tl.maximum(most, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # no row seen yet
        p, keep = tl.exp2(s - safe[:, None]), tl.exp2(most - safe)
        most = new
        mass = mass * keep + tl.sum(p, 1)
        v = tl.load(
            values + r[:, None] * V_DIM + v_dim[None, :], mask=seen[:, None] & (v_dim < V_DIM)[None, :], other=0
        )
        if WIDEN:
            v = v.to(tl.float32)
        sums = tl.dot(p.to(v.dtype), v, sums * keep[:, None], input_precision="ieee")
    return sums / mass[:, None], most + tl.log2(mass)


# Numbers that change from call to call must not ask for another compilation.
@triton.jit(
    do_not_specialize=[
        "kv_heads", "max_pages", "sink_rows", "ring_rows", "pieces", "sink_items", "items", "k_exponent", "v_exponent",
    ]
)  # fmt: skip
def attend(
    q, turned, bias, pages, block_table, hist_start, hist_end, seq_len, slots,
    sink_k, sink_v, ring_k, ring_v, partial, partial_lse,
    kv_heads, max_pages, sink_rows, ring_rows, pieces, sink_items, items, factor, cap, k_exponent, v_exponent,
    K_DIM: tl.constexpr, K_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, GROUP: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Items 0 … pieces−1 share the history's pages evenly, then come the sink's and the ring's, 64 rows each.

    Grid (items, kv_heads·HEAD_BLOCKS, batch). partial [batch, q_heads, items, V_DIM] and partial_lse without V_DIM.
    """
    item, head, request = tl.program_id(0), tl.program_id(1) // HEAD_BLOCKS, tl.program_id(2)
    row = (tl.program_id(1) % HEAD_BLOCKS) * ROWS + tl.arange(0, ROWS)
    real = row < GROUP
    first = (request.to(tl.int64) * kv_heads + head) * GROUP
    start, end, length = tl.load(hist_start + request), tl.load(hist_end + request), tl.load(seq_len + request)
    if item < pieces:
        out, lse = _history(
            turned, bias, pages, block_table + request.to(tl.int64) * max_pages, start, end, item, pieces,
            head, kv_heads, tl.program_id(1) % HEAD_BLOCKS, real, first, cap, k_exponent, v_exponent,
            K_DIM, K_PAD, V_DIM, V_PAD, K_BITS, V_BITS, GROUP, SOFTCAP, STAGES,
        )  # fmt: skip
    else:
        slot = request.to(tl.int64)
        if slots is not None:
            slot = tl.load(slots + request).to(tl.int64)
        slot = slot * kv_heads + head
        number = item - pieces
        if number < sink_items:
            keys, values, rows = (
                sink_k + slot * sink_rows * K_DIM,
                sink_v + slot * sink_rows * V_DIM,
                start * 0 + sink_rows,
            )
            low, high = start * 0, tl.minimum(start, length)
        else:
            keys, values, rows = (
                ring_k + slot * ring_rows * K_DIM,
                ring_v + slot * ring_rows * V_DIM,
                start * 0 + ring_rows,
            )
            low, high = tl.maximum(start, end), length
            number -= sink_items
        out, lse = _window(
            q, keys, values, rows, number * 64, low, high, row, real, first, factor, cap,
            K_DIM, K_PAD, V_DIM, V_PAD, SOFTCAP, TILE, WIDEN,
        )  # fmt: skip
    at = (first + row) * items + item
    tl.store(partial_lse + at, lse, mask=real)
    dim = tl.arange(0, V_PAD)
    some = real & (lse != float("-inf"))
    tl.store(partial + at[:, None] * V_DIM + dim[None, :], out, mask=some[:, None] & (dim < V_DIM)[None, :])


@triton.jit(do_not_specialize=["pieces", "items"])
def finish(
    partial, partial_lse, rotation_t, centre, out, pieces, items,
    V_DIM: tl.constexpr, V_PAD: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the pieces: out = (history·R_Vᵀ + μ_V·mass of the history + raw) / mass. Grid (q_heads, batch)."""
    head = tl.program_id(0) // GROUP
    at = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    dim = tl.arange(0, V_PAD)
    most = float("-inf")
    for n in range(0, items, BLOCK):
        item = n + tl.arange(0, BLOCK)
        lse = tl.load(partial_lse + at * items + item, mask=item < items, other=float("-inf"))
        most = tl.maximum(most, tl.max(lse, 0))
    most = tl.where(most == float("-inf"), 0.0, most)
    mass, history_mass = 0.0, 0.0
    history, raw = tl.zeros([V_PAD], tl.float32), tl.zeros([V_PAD], tl.float32)
    for n in range(0, items, BLOCK):
        item = n + tl.arange(0, BLOCK)
        lse = tl.load(partial_lse + at * items + item, mask=item < items, other=float("-inf"))
        some = lse != float("-inf")  # others wrote no output
        x = tl.load(
            partial + (at * items + item)[:, None] * V_DIM + dim[None, :],
            mask=some[:, None] & (dim < V_DIM)[None, :],
            other=0,
        )
        weight = tl.exp2(lse - most)
        packed = tl.where(item < pieces, weight, 0)
        mass += tl.sum(weight, 0)
        history_mass += tl.sum(packed, 0)
        history += tl.sum(packed[:, None] * x, 0)
        raw += tl.sum((weight - packed)[:, None] * x, 0)
    if rotation_t is not None:
        matrix = rotation_t + head.to(tl.int64) * V_DIM * V_DIM
        turn = tl.load(
            matrix + dim[:, None] * V_DIM + dim[None, :], mask=(dim < V_DIM)[:, None] & (dim < V_DIM)[None, :], other=0
        )
        history = tl.sum(history[:, None] * turn, 0)
    mu = tl.load(centre + head * V_DIM + dim, mask=dim < V_DIM, other=0)
    result = (history + mu * history_mass + raw) / tl.where(mass == 0, 1.0, mass)
    tl.store(out + at * V_DIM + dim, result.to(out.dtype.element_ty), mask=dim < V_DIM)
