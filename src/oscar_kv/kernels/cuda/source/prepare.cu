// SPDX-License-Identifier: Apache-2.0
// Before the decode kernel: query heads, scaled and multiplied by R_K, their products with the keys' centre, and which
// thread blocks of the decode kernel will hold the pages of a (request, head), for finish.cu.
// One block takes 32 columns of R_K for TIMES requests, so that R_K comes once and all at a time.
#include "common.cuh"

constexpr int PREPARE_THREADS = 256, PREPARE_WARPS = PREPARE_THREADS / 32, PART = 32, PARTS = (K_DIM + PART - 1) / PART;
constexpr int TURN_GROUPS = PREPARE_THREADS / (PART / 4), TURN_ROWS = (K_DIM + TURN_GROUPS - 1) / TURN_GROUPS;

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

template <int TIMES> DEVICE void prepare(const Params& p) {
  constexpr int ALL = HEADS * TIMES;
  __shared__ float raw[ALL][K_DIM], sums[PREPARE_WARPS][ALL][PART];
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
  const int head0 = (hv % BLOCKS) * HEADS, column = part * PART + tid % 8 * 4, group = tid / 8;
  float4 turn[TURN_ROWS];
#pragma unroll
  for (int r = 0; r < TURN_ROWS; ++r) {
    const int row = group + r * TURN_GROUPS;
    turn[r] = {0.f, 0.f, 0.f, 0.f};
    if (p.k_rotation && row < K_DIM && column < K_DIM)
      turn[r] = *(const float4*)(p.k_rotation + ((u64)head * K_DIM + row) * K_DIM + column);
  }
#pragma unroll 4
  for (int i = tid; i < ALL * (K_DIM / 2); i += PREPARE_THREADS) {
    const int row = i / (K_DIM / 2), d = i % (K_DIM / 2) * 2, b = b0 + row / HEADS, g = head0 + row % HEADS;
    u32 pair = 0;
    if (b < p.batch && g < GROUP) pair = *(const u32*)(p.q + (((u64)b * p.kv_heads + head) * GROUP + g) * (K_DIM * 2) + d * 2);
    *(float2*)&raw[row][d] = {raw_low(pair) * p.query_scale, raw_high(pair) * p.query_scale};
  }
  __syncthreads();
  auto place = [&](int row) { return ((u64)(b0 + row / HEADS) * heads + hv) * HEADS + row % HEADS; };
  if (part == 0)
    for (int row = warp; row < ALL; row += PREPARE_WARPS) {
      float sum = 0.f;
      for (int i = lane; i < K_DIM; i += 32) sum += raw[row][i] * p.k_centre[head * K_DIM + i];
#pragma unroll
      for (int i = 1; i < 32; i *= 2) sum += __shfl_xor_sync(FULL, sum, i);
      if (lane == 0 && b0 + row / HEADS < p.batch) p.turned_centre[place(row)] = sum;
    }
  if (p.k_rotation) {
#pragma unroll
    for (int g = 0; g < ALL; ++g) {
      float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int r = 0; r < TURN_ROWS; ++r) {
        const int row = group + r * TURN_GROUPS;
        if (row >= K_DIM) continue;
        const float x = raw[g][row];
        sum.x += x * turn[r].x, sum.y += x * turn[r].y, sum.z += x * turn[r].z, sum.w += x * turn[r].w;
      }
#pragma unroll
      for (int i = 8; i < 32; i *= 2) {
        sum.x += __shfl_xor_sync(FULL, sum.x, i), sum.y += __shfl_xor_sync(FULL, sum.y, i);
        sum.z += __shfl_xor_sync(FULL, sum.z, i), sum.w += __shfl_xor_sync(FULL, sum.w, i);
      }
      if (lane < 8) *(float4*)&sums[warp][g][4 * lane] = sum;
    }
    __syncthreads();
  }
  for (int i = tid; i < ALL * PART; i += PREPARE_THREADS) {
    const int row = i / PART, c = part * PART + i % PART;
    if (c >= K_DIM || b0 + row / HEADS >= p.batch) continue;
    float sum = 0.f;
    if (!p.k_rotation) {
      sum = raw[row][c];
    } else {
#pragma unroll
      for (int w = 0; w < PREPARE_WARPS; ++w) sum += sums[w][row][i % PART];
    }
    p.turned[place(row) * K_DIM + c] = sum;
  }
}
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS, 2) prepare_one(const __grid_constant__ Params p) { prepare<1>(p); }
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS, 2) prepare_many(const __grid_constant__ Params p) { prepare<PREPARE_TIMES>(p); }
