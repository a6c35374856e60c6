// SPDX-License-Identifier: Apache-2.0
// Before the decode kernel: query heads, scaled and multiplied by R_K, as the operands of its MMAs; their products with
// the keys' centre; and which of its thread blocks will hold the pages of a (request, head), for finish.cu.
// One block takes 32 columns of R_K for TIMES requests, so that R_K comes once and all at a time.
#include "common.cuh"

constexpr int PREPARE_THREADS = 256, PREPARE_WARPS = PREPARE_THREADS / 32;
constexpr int TURN_ROWS = (K_DIM / 4 + PREPARE_WARPS - 1) / PREPARE_WARPS * 4;  // of R_K, a warp; a lane has a column

// A block of its own: one warp a (request, head) in turn.
DEVICE void find_ranges(const Params& p, int b0, int times) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = p.kv_heads * BLOCKS;
  for (int b = b0; b < min(b0 + times, p.batch); ++b) {
    const int count = units_of(p, b);
    const Count units = count_units(p, b);
    const Schedule plan(p, units.all);
    if (b == 0 && threadIdx.x == 0) p.ranges[0] = units.all;
    for (int hv = warp; hv < heads; hv += PREPARE_WARPS) {
      const int u0 = units.before * heads + hv * count + p.opening, u1 = u0 + count - p.opening;
      int low = 0, high = 0;  // blocks that begin at u0 or before, and before u1
      for (int c = lane; c < p.blocks; c += 32) low += plan.unit(c) <= u0, high += plan.unit(c) < u1;
#pragma unroll
      for (int i = 1; i < 32; i *= 2) low += __shfl_xor_sync(FULL, low, i), high += __shfl_xor_sync(FULL, high, i);
      int* range = p.ranges + 2 + 2 * (b * heads + hv);
      if (lane == 0) range[0] = count ? low - 1 : 0, range[1] = count ? high : 0;
    }
  }
}

// Power of two that brings the largest entry below 2^14, far from overflow, and that of its inverse. R_K is orthogonal, so
// no entry exceeds the norm of its head; 2^-23 of the norm is still normal. A head with infinities spoils itself alone.
struct Range {
  float up, down;
  DEVICE Range(float norm) {
    int exponent = (int)((__float_as_uint(norm) >> 23) & 255) - 127;
    exponent = max(-80, min(exponent, 100));
    up = __uint_as_float((u32)(127 + 13 - exponent) << 23), down = __uint_as_float((u32)(127 - 13 + exponent) << 23);
  }
};

template <int TIMES> DEVICE void prepare(const Params& p) {
  constexpr int ALL = HEADS * TIMES;
  __shared__ __align__(16) float raw[ALL][K_DIM], sums[PREPARE_WARPS][ALL][PART], norms[ALL];
#if CHAIN_FIRST
  wait_for_predecessor();
#endif
  release_successor();
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, heads = p.kv_heads * BLOCKS;
  if (blockIdx.y == heads * PARTS) {
    find_ranges(p, blockIdx.x * TIMES, TIMES);
    return;
  }
  const int b0 = blockIdx.x * TIMES, hv = blockIdx.y / PARTS, part = blockIdx.y % PARTS, head = hv / BLOCKS;
  const int head0 = (hv % BLOCKS) * HEADS, column = part * PART + lane, row0 = warp * TURN_ROWS;
  float turn[TURN_ROWS];
#pragma unroll
  for (int r = 0; r < TURN_ROWS; ++r)
    turn[r] = p.k_rotation && row0 + r < K_DIM && column < K_DIM ? p.k_rotation[((u64)head * K_DIM + row0 + r) * K_DIM + column] : 0.f;
#pragma unroll 4
  for (int i = tid; i < ALL * (K_DIM / 2); i += PREPARE_THREADS) {
    const int row = i / (K_DIM / 2), d = i % (K_DIM / 2) * 2, b = b0 + row / HEADS, g = head0 + row % HEADS;
    u32 pair = 0;
    if (b < p.batch && g < GROUP) pair = *(const u32*)(p.q + (((u64)b * p.kv_heads + head) * GROUP + g) * (K_DIM * 2) + d * 2);
    *(float2*)&raw[row][d] = {raw_low(pair) * p.query_scale, raw_high(pair) * p.query_scale};
  }
  __syncthreads();
  for (int row = warp; row < ALL; row += PREPARE_WARPS) {
    float sum = 0.f, square = 0.f;
    for (int i = lane; i < K_DIM; i += 32) {
      const float x = raw[row][i];
      square += x * x;
      if (part == 0) sum += x * p.k_centre[head * K_DIM + i];
    }
#pragma unroll
    for (int i = 1; i < 32; i *= 2) sum += __shfl_xor_sync(FULL, sum, i), square += __shfl_xor_sync(FULL, square, i);
    if (lane == 0) norms[row] = square < infinity() ? square : 0.f;
    if (part == 0 && lane == 0 && b0 + row / HEADS < p.batch)
      p.query_centre[((u64)(b0 + row / HEADS) * heads + hv) * HEADS + row % HEADS] = sum;
  }
  if (p.k_rotation) {
#pragma unroll
    for (int g = 0; g < ALL; ++g) {
      float sum = 0.f;
#pragma unroll
      for (int r = 0; r < TURN_ROWS; r += 4) {
        if (row0 + r >= K_DIM) continue;
        const float4 x = *(const float4*)&raw[g][row0 + r];
        sum += x.x * turn[r], sum += x.y * turn[r + 1], sum += x.z * turn[r + 2], sum += x.w * turn[r + 3];
      }
      sums[warp][g][lane] = sum;
    }
  }
  __syncthreads();
  // A pair of columns a thread, 16 threads a head; columns of the MMA beyond the heads are zero.
  for (int i = tid; i < TIMES * COLUMNS * (PART / 2); i += PREPARE_THREADS) {
    const int pair = i % (PART / 2), n = i / (PART / 2) % COLUMNS, time = i / (PART / 2) / COLUMNS;
    const int c = part * PART + 2 * pair, j = c / 8, row = time * HEADS + n;
    const bool real = n < HEADS && c < K_DIM;
    float x = 0.f, y = 0.f, top = 0.f;
#pragma unroll
    for (int g = 0; g < HEADS; ++g) top = fmaxf(top, norms[time * HEADS + g]);
    const Range range(sqrt_of(top));
    if (real && !p.k_rotation) x = raw[row][c], y = raw[row][c + 1];
    if (real && p.k_rotation) {
#pragma unroll
      for (int w = 0; w < PREPARE_WARPS; ++w) {
        const float2 z = *(const float2*)&sums[w][row][2 * pair];
        x += z.x, y += z.y;
      }
    }
    const float power = (float)(1 << target_bit<K_BITS>(j)), f = range.up / power;
    const u32 word = pack_half(x * f, y * f);
    float sum = (half_low(word) + half_high(word)) * (power * range.down);
#pragma unroll
    for (int k = 1; k < PART / 2; k *= 2) sum += __shfl_xor_sync(FULL, sum, k);
    const u64 bh = (u64)(b0 + time) * heads + hv;
    if (b0 + time >= p.batch) continue;
    if (c < K_DIM) p.query[bh * QUERY_WORDS + ((j / 2 * TILES + n / 8) * 32 + n % 8 * 4 + pair % 4) * 2 + j % 2] = word;
    if (pair == 0) p.query_sum[(bh * PARTS + part) * COLUMNS + n] = sum;
    if (i % (COLUMNS * PART / 2) == 0 && part == 0) p.query_step[bh] = range.down * 16777216.f;
  }
}
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS, 2) prepare_one(const __grid_constant__ Params p) { prepare<1>(p); }
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS, 2) prepare_many(const __grid_constant__ Params p) { prepare<PREPARE_TIMES>(p); }
