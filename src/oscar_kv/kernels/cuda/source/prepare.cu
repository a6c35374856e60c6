// SPDX-License-Identifier: Apache-2.0
// Before the decode kernel: query heads, scaled and multiplied by R_K, and their products with the keys' centre.
// One block a (request, block of query heads, 32 columns), so that R_K comes once and all at a time.
#include "common.cuh"

constexpr int THREADS = 256, PART = 32, PARTS = (K_DIM + PART - 1) / PART, GROUPS = THREADS / (PART / 4);
constexpr int ROWS = (K_DIM + GROUPS - 1) / GROUPS;

extern "C" __global__ void __launch_bounds__(THREADS, 2) prepare(const __grid_constant__ Params p) {
  __shared__ float raw[K_DIM][HEADS], sums[THREADS / 32][HEADS][PART];
#if CHAIN_FIRST
  wait_for_predecessor();
#endif
  release_successor();
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, heads = p.kv_heads * BLOCKS;
  const int b = blockIdx.x, hv = blockIdx.y / PARTS, part = blockIdx.y % PARTS;
  const int head = hv / BLOCKS, head0 = (hv % BLOCKS) * HEADS, column = part * PART + tid % 8 * 4, group = tid / 8;
  float4 turn[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = group + r * GROUPS;
    turn[r] = {0.f, 0.f, 0.f, 0.f};
    if (p.k_rotation && row < K_DIM && column < K_DIM)
      turn[r] = *(const float4*)(p.k_rotation + ((u64)head * K_DIM + row) * K_DIM + column);
  }
#pragma unroll 4
  for (int i = tid; i < HEADS * (K_DIM / 2); i += THREADS) {
    const int g = i / (K_DIM / 2), d = i % (K_DIM / 2) * 2;
    u32 pair = 0;
    if (head0 + g < GROUP) pair = *(const u32*)(p.q + (((u64)b * p.kv_heads + head) * GROUP + head0 + g) * (K_DIM * 2) + d * 2);
    raw[d][g] = raw_low(pair) * p.query_scale, raw[d + 1][g] = raw_high(pair) * p.query_scale;
  }
  __syncthreads();
  const u64 first = ((u64)b * heads + hv) * HEADS;
  if (part == 0)
    for (int g = warp; g < HEADS; g += THREADS / 32) {
      float sum = 0.f;
      for (int i = lane; i < K_DIM; i += 32) sum += raw[i][g] * p.k_centre[head * K_DIM + i];
#pragma unroll
      for (int i = 1; i < 32; i *= 2) sum += __shfl_xor_sync(FULL, sum, i);
      if (lane == 0) p.turned_centre[first + g] = sum;
    }
  if (!p.k_rotation) {
    for (int i = tid; i < HEADS * PART; i += THREADS)
      if (part * PART + i % PART < K_DIM) p.turned[(first + i / PART) * K_DIM + part * PART + i % PART] = raw[part * PART + i % PART][i / PART];
    return;
  }
#pragma unroll
  for (int g = 0; g < HEADS; ++g) {
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = group + r * GROUPS;
      if (row >= K_DIM) continue;
      const float x = raw[row][g];
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
  for (int i = tid; i < HEADS * PART; i += THREADS) {
    const int g = i / PART, c = i % PART;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) sum += sums[w][g][c];
    if (part * PART + c < K_DIM) p.turned[(first + g) * K_DIM + part * PART + c] = sum;
  }
}
