// SPDX-License-Identifier: Apache-2.0
// Shaped rounding of keys: dimension k is rounded after adding sum over j < k of e_j U_jk. Blocks of 16 dimensions: from
// block to block by tensor cores, within a block one lane a row.
#pragma once
#include "store_steps.cuh"

constexpr int TILES = Side<true>::TILES, ROWS = Side<true>::ROWS;

// Rows (fp32) in shared memory, 16-byte groups of four dimensions. Errors take the place of what is done: a group
// then holds four fp16 hi, four fp16 lo. Groups are spread so that neither eight rows of one column nor two rows of four
// columns meet in a bank.
constexpr int X_STRIDE = (K_DIM + 31) / 32 * 128;  // bytes a row
DEVICE int x_offset(int row, int group) { return row * X_STRIDE + ((group ^ ((row & 1) << 2 | (row >> 1 & 3))) << 4); }
constexpr int T_STRIDE = 20;  // floats a row of the transposing scratch

// A 16-column accumulator of the warp's rows, transposed: out[k] is column k of row lane % ROWS.
DEVICE void to_rows(const float (&acc)[TILES][2][4], float* scratch, float (&out)[16]) {
  const int lane = lane_of(), row = lane / 4, quad = lane % 4;
#pragma unroll
  for (int r = 0; r < 2 * TILES; ++r)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      *(float2*)(scratch + (8 * r + row) * T_STRIDE + 8 * n + 2 * quad) = {acc[r / 2][n][2 * (r % 2)], acc[r / 2][n][2 * (r % 2) + 1]};
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 v = *(const float4*)(scratch + lane % ROWS * T_STRIDE + 4 * i);
    out[4 * i] = v.x, out[4 * i + 1] = v.y, out[4 * i + 2] = v.z, out[4 * i + 3] = v.w;
  }
  __syncwarp();
}

// tile: y; s: the plain steps. Codes to shared memory, the stored pairs to the page.
// All is counted in steps from the zero point, halved until errors fit fp16: then code and error are one instruction each.
DEVICE void shaped_codes(const Params& p, int head, SideTile<true>& tile, Steps<2 * TILES>& s, u8* rows, float* scratch, u8* codes, u8* page, int warp_row) {
  constexpr int D = K_DIM, R = 2 * TILES, TOP = (1 << K_BITS) - 1;
  const int lane = lane_of(), row = lane / 4, quad = lane % 4, mine = lane % ROWS;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    // Feedback widens what is rounded. A row without spread stays: widening would move its exact zero.
    const float wider = s.step[r] > MIN_STEP ? SHAPED_STEP_FACTOR : 1.f;
    const float zero = to_half(__fadd_rn(s.zero[r], __fmul_rn(__fmul_rn(TOP / 2.f, s.step[r]), 1.f - wider)));
    const float step = to_step(__fmul_rn(s.step[r], wider)), inverse = reciprocal(step), offset = s.mean[r] - zero;
    const float bound = (root(s.square[r]) + fabsf(offset)) * inverse + TOP;  // of every error
    const int halvings = max((int)((__float_as_uint(bound) >> 23) & 255) - 127 - 13, 0);
    const float down = __uint_as_float((u32)(127 - halvings) << 23), scale = inverse * down, at = offset * inverse * down;
    if (quad == 0) *(float4*)(scratch + 4 * (8 * r + row)) = {step, zero, down, at};
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float* y = &tile.x[r / 2][n][2 * (r % 2)];
      *(float2*)(rows + x_offset(8 * r + row, 2 * n + quad / 2) + quad % 2 * 8) = {fmaf(y[0], scale, at), fmaf(y[1], scale, at)};
    }
  }
  __syncwarp();
  const float4 about = *(const float4*)(scratch + 4 * mine);
  __syncwarp();
  float step = about.x, zero = about.y;
  const float down = about.z, offset = about.w, unit = 1.f / down / TOP;
  const float upper_down = p.upper_unscale[head], code_down = 16777216.f * upper_down;
  const u8* factor = p.upper_factor + (u64)head * (D * D * 4) + lane * 16;  // of the block's columns
  const u8* upper = (const u8*)(p.upper + (u64)head * D * D);  // of the block: its square on the diagonal
  const float2* metric = (const float2*)(p.metric + (u64)head * D * 2);  // column sums of I + U, D
  float own = 0.f, with_error = 0.f, with_sum = 0.f, errors = 0.f, sum = 0.f;
#pragma unroll 1
  for (int b = 0; b < D / 16; ++b, factor += 1024, upper += 16 * (D + 1) * 4, metric += 16) {
    float main[TILES][2][4], rest[TILES][2][4], coded[TILES][2][4];
#pragma unroll
    for (int mt = 0; mt < TILES; ++mt)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k) main[mt][n][k] = rest[mt][n][k] = coded[mt][n][k] = 0.f;
    const u8* part = factor;
#pragma unroll 2
    for (int j = 0; j < b; ++j, part += D / 8 * 512) {
      Word4 t[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) t[n] = load_table(part + n * 512);
#pragma unroll
      for (int mt = 0; mt < TILES; ++mt) {
        const int at = 16 * mt + row;
        const Word4 e0 = *(const Word4*)(rows + x_offset(at, 4 * j + quad)), e1 = *(const Word4*)(rows + x_offset(at + 8, 4 * j + quad));
        const u32 hi[4] = {e0.x, e1.x, e0.y, e1.y}, lo[4] = {e0.z, e1.z, e0.w, e1.w};
        u32 code[4];
        if (UNBIASED) {  // a byte is, widened to 16 bits, the fp16 number code * 2^-24
          const u32 c0 = *(const u32*)(codes + (warp_row + at) * CODE_STRIDE + 16 * j + 4 * quad);
          const u32 c1 = *(const u32*)(codes + (warp_row + at + 8) * CODE_STRIDE + 16 * j + 4 * quad);
          code[0] = __byte_perm(c0, 0, 0x4140), code[1] = __byte_perm(c1, 0, 0x4140);
          code[2] = __byte_perm(c0, 0, 0x4342), code[3] = __byte_perm(c1, 0, 0x4342);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma_half(main[mt][n], hi, t[n].x, t[n].y);
          mma_half(rest[mt][n], hi, t[n].z, t[n].w), mma_half(rest[mt][n], lo, t[n].x, t[n].y);
          if (UNBIASED) mma_half(coded[mt][n], code, t[n].x, t[n].y);  // for scales: the low part does not count
        }
      }
    }
#pragma unroll
    for (int mt = 0; mt < TILES; ++mt)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k) main[mt][n][k] += rest[mt][n][k];
    float fed[16], walked[16], x[16];
    to_rows(main, scratch, fed);
    if (UNBIASED) to_rows(coded, scratch, walked);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = *(const float4*)(rows + x_offset(mine, 4 * b + i));
      x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) fed[k] = fmaf(fed[k], upper_down, x[k]), walked[k] = UNBIASED ? walked[k] * code_down : 0.f;
    u32 packed[4] = {0, 0, 0, 0}, hi[8], lo[8];
    float even = 0.f;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      float u[16];
#pragma unroll
      for (int i = (k + 1) / 4; i < 4; ++i) {
        const Word4 v = load_table(upper + (k * D + 4 * i) * 4);
        u[4 * i] = __uint_as_float(v.x), u[4 * i + 1] = __uint_as_float(v.y);
        u[4 * i + 2] = __uint_as_float(v.z), u[4 * i + 3] = __uint_as_float(v.w);
      }
      const float m = fmaf(fma_unit(fed[k], unit, 0.f), (float)TOP, MAGIC), code = m - MAGIC, error = fmaf(code, -down, x[k]);
      packed[k / 4] |= (__float_as_uint(m) & TOP) << 8 * (k % 4);
#pragma unroll
      for (int i = k + 1; i < 16; ++i) {
        fed[i] = fmaf(error, u[i], fed[i]);
        if (UNBIASED) walked[i] = fmaf(code, u[i], walked[i]);
      }
      if (UNBIASED) {  // w = (x - mean)(I + U); eta = e(I + U)
        const float2 column = metric[k];
        const float eta = fmaf(code, -down, fed[k]), w = fmaf(down, walked[k] + code, fmaf(-offset, column.x, eta)), t = column.y * w;
        own = fmaf(t, w, own), with_error = fmaf(t, eta, with_error), with_sum = fmaf(t, column.x, with_sum);
        errors += error, sum += code;
      }
      if (k % 2 == 0) {
        even = error;
      } else {
        hi[k / 2] = pack_half(even, error);
        lo[k / 2] = pack_half(even - half_low(hi[k / 2]), error - half_high(hi[k / 2]));
      }
    }
    if (lane < ROWS) {  // lanes beyond the rows only keep their fellows company
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *(Word4*)(rows + x_offset(mine, 4 * b + i)) = {hi[2 * i], hi[2 * i + 1], lo[2 * i], lo[2 * i + 1]};
      *(Word4*)(codes + (warp_row + mine) * CODE_STRIDE + 16 * b) = {packed[0], packed[1], packed[2], packed[3]};
    }
    __syncwarp();
  }
  if (UNBIASED) {
    const float cross = own - with_error + errors / D * with_sum;
    stretch(own, cross, __fadd_rn(__fmul_rn(step, sum / D), zero), step, zero);
  }
  if (lane < ROWS) write_pair(page, true, warp_row + mine, step, zero);
  if constexpr (packs_alone<true>()) {
    pack_bytes<low_bits(K_BITS)>(codes, page, warp_row, 0);
    if (K_BITS == 3) pack_bytes<1>(codes, page + PAGE * D * 2 / 8, warp_row, 2);
  }
}
