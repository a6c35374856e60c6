// SPDX-License-Identifier: Apache-2.0
// Shaped rounding of keys: dimension k is rounded after adding sum over j < k of e_j U_jk. Blocks of 16 dimensions: from
// block to block by tensor cores, within a block one lane a row.
#pragma once
#include "store_steps.cuh"

constexpr int TILES = Side<true>::TILES, ROWS = Side<true>::ROWS;

// Rows (fp32) in shared memory, 16-byte groups of four dimensions. Errors take the place of what is done, as fragments of
// rows r and r + 8: the group of r then holds their fp16 high parts (dimensions 0, 1 of r, of r + 8, then 2, 3), that of
// r + 8 the low parts. Groups are spread so that neither eight rows of one column nor two rows of four columns meet in a
// bank.
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

// Of row lane % ROWS: yAy, yAe and the sum of yA; y: the row less its mean, e: its errors. All in fp16 products: a scale
// is rounded to fp16, and roundings average out. Rows beyond 2^14 steps may overflow; then stretch leaves them alone.
// The products of a row with itself are the diagonal of those of all rows: fragments of one operand serve as the other.
struct Products { float own, error, sum; };
DEVICE Products weighted_products(const Params& p, int head, const u8* rows, const u8* codes, int warp_row, float* scratch, float down, float offset) {
  constexpr int D = K_DIM, STEPS = D / 16;
  const int lane = lane_of(), row = lane / 4, quad = lane % 4, mine = lane % ROWS;
  u32 y[TILES][STEPS][4];
  const float most = 2.f * HALF_MAX;
#pragma unroll
  for (int r = 0; r < 2 * TILES; ++r) {
    const int at = 8 * r + row;
    const float d = __shfl_sync(FULL, down, at), o = -fminf(fmaxf(__shfl_sync(FULL, offset, at), -most), most);
    const u32 downs = pack_half(d, d), offsets = pack_half(o, o);
#pragma unroll
    for (int ks = 0; ks < STEPS; ++ks) {
      const u32* e = (const u32*)(rows + x_offset(at & ~8, 4 * ks + quad)) + r % 2;
      const u32 c = *(const u32*)(codes + (warp_row + at) * CODE_STRIDE + 16 * ks + 4 * quad);
      // A byte after 0x64 is the fp16 number 1024 + code.
      const u32 low = half_add(__byte_perm(c, 0x64646464, 0x4140), 0xe400e400), high = half_add(__byte_perm(c, 0x64646464, 0x4342), 0xe400e400);
      y[r / 2][ks][r % 2] = half_fma(low, downs, half_add(e[0], offsets));
      y[r / 2][ks][2 + r % 2] = half_fma(high, downs, half_add(e[2], offsets));
    }
  }
  float own[TILES][2][4], error[TILES][2][4], sum[TILES][4];  // [..][h]: with rows 8h ... 8h + 7
#pragma unroll
  for (int mt = 0; mt < TILES; ++mt)
#pragma unroll
    for (int k = 0; k < 4; ++k) own[mt][0][k] = own[mt][1][k] = error[mt][0][k] = error[mt][1][k] = sum[mt][k] = 0.f;
  const u8* factor = p.metric + (u64)head * (D * D * 2) + lane * 16;
#pragma unroll
  for (int block = 0; block < STEPS; ++block) {
    float g[TILES][2][4];
#pragma unroll
    for (int mt = 0; mt < TILES; ++mt)
#pragma unroll
      for (int k = 0; k < 4; ++k) g[mt][0][k] = g[mt][1][k] = 0.f;
#pragma unroll
    for (int ks = 0; ks < STEPS; ++ks) {
      const Word4 b = load_table(factor + (block * STEPS + ks) * 512);
#pragma unroll
      for (int mt = 0; mt < TILES; ++mt) mma_half(g[mt][0], y[mt][ks], b.x, b.y), mma_half(g[mt][1], y[mt][ks], b.z, b.w);
    }
#pragma unroll
    for (int mt = 0; mt < TILES; ++mt) {
      const u32 a[4] = {pack_half(g[mt][0][0], g[mt][0][1]), pack_half(g[mt][0][2], g[mt][0][3]),
                        pack_half(g[mt][1][0], g[mt][1][1]), pack_half(g[mt][1][2], g[mt][1][3])};
      const Word4 e = *(const Word4*)(rows + x_offset(16 * mt + row, 4 * block + quad));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        mma_half(own[mt][h], a, y[mt][block][h], y[mt][block][2 + h]);
        mma_half(error[mt][h], a, h ? e.y : e.x, h ? e.w : e.z);
      }
      mma_half(sum[mt], a, 0x3c003c00, 0x3c003c00);
    }
  }
  if (quad == row / 2)
#pragma unroll
    for (int r = 0; r < 2 * TILES; ++r) {
      const int h = r % 2;
      const float (&o)[4] = own[r / 2][h], (&e)[4] = error[r / 2][h];
      *(float4*)(scratch + 4 * (8 * r + row)) = {row % 2 ? o[2 * h + 1] : o[2 * h], row % 2 ? e[2 * h + 1] : e[2 * h], sum[r / 2][2 * h], 0.f};
    }
  __syncwarp();
  const float4 all = *(const float4*)(scratch + 4 * mine);
  return {all.x, all.y, all.z};
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
  const float upper_down = p.upper_unscale[head];
  const u8* factor = p.upper_factor + (u64)head * (D * D * 4) + lane * 16;  // of the block's columns
  const u8* upper = (const u8*)(p.upper + (u64)head * D * D);  // of the block: its square on the diagonal
  float sum = 0.f;
#pragma unroll 1
  for (int b = 0; b < D / 16; ++b, factor += 1024, upper += 16 * (D + 1) * 4) {
    float main[TILES][2][4], rest[TILES][2][4];
#pragma unroll
    for (int mt = 0; mt < TILES; ++mt)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k) main[mt][n][k] = rest[mt][n][k] = 0.f;
    const u8* part = factor;
#pragma unroll 1
    for (int j = 0; j < b; ++j, part += D / 8 * 512) {
      Word4 t[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) t[n] = load_table(part + n * 512);
#pragma unroll
      for (int mt = 0; mt < TILES; ++mt) {
        const int at = 16 * mt + row;
        const Word4 high = *(const Word4*)(rows + x_offset(at, 4 * j + quad)), low = *(const Word4*)(rows + x_offset(at + 8, 4 * j + quad));
        const u32 hi[4] = {high.x, high.y, high.z, high.w}, lo[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma_half(main[mt][n], hi, t[n].x, t[n].y);
          mma_half(rest[mt][n], hi, t[n].z, t[n].w), mma_half(rest[mt][n], lo, t[n].x, t[n].y);
        }
      }
    }
#pragma unroll
    for (int mt = 0; mt < TILES; ++mt)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k) main[mt][n][k] += rest[mt][n][k];
    float fed[16], x[16];
    to_rows(main, scratch, fed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = *(const float4*)(rows + x_offset(mine, 4 * b + i));
      x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) fed[k] = fmaf(fed[k], upper_down, x[k]);
    __syncwarp();  // x is read before its place is taken
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
      for (int i = k + 1; i < 16; ++i) fed[i] = fmaf(error, u[i], fed[i]);
      if (UNBIASED) sum += code;
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
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          u32* high = (u32*)(rows + x_offset(mine & ~8, 4 * b + i)) + 2 * part + mine / 8 % 2;
          high[0] = hi[2 * i + part], high[8 * X_STRIDE / 4] = lo[2 * i + part];
        }
      *(Word4*)(codes + (warp_row + mine) * CODE_STRIDE + 16 * b) = {packed[0], packed[1], packed[2], packed[3]};
    }
    __syncwarp();
  }
  if (UNBIASED) {
    const Products all = weighted_products(p, head, rows, codes, warp_row, scratch, down, offset);
    const float mean_error = offset - down * sum / D;
    stretch(all.own, all.own - all.error + mean_error * all.sum, __fadd_rn(__fmul_rn(step, sum / D), zero), step, zero);
  }
  if (lane < ROWS) write_pair(page, true, warp_row + mine, step, zero);
  if constexpr (packs_alone<true>()) {
    pack_bytes<low_bits(K_BITS)>(codes, page, warp_row, 0);
    if (K_BITS == 3) pack_bytes<1>(codes, page + PAGE * D * 2 / 8, warp_row, 2);
  }
}
