// SPDX-License-Identifier: Apache-2.0
// After the decode kernel: partial results into outputs. One block a (block of ROWS query heads) and some requests, so
// that R_V^T is read once for them.
#include "common.cuh"

#if WINDOW_BF16
DEVICE void store(u8* x, u64 i, float y) { ((unsigned short*)x)[i] = (unsigned short)pack_bf16(y, y); }
#else
DEVICE void store(u8* x, u64 i, float y) { ((unsigned short*)x)[i] = (unsigned short)pack_half(y, y); }
#endif

template <int ROWS, int THREADS> DEVICE void finish(const Params& p) {
  constexpr int FINISH_WARPS = THREADS / 32;
  constexpr int WIDE = (V_DIM + 127) / 128, AT_ONCE = ROWS >= 4 ? 1 : 4 / ROWS;
  constexpr int PARTS = THREADS / V_DIM >= 4 ? 4 : THREADS / V_DIM >= 2 ? 2 : 1, DEPTH = V_DIM / PARTS;
  constexpr bool EARLY = DEPTH <= 32;  // R_V^T fits in registers: read it while the decode kernel still runs
  __shared__ float sums[FINISH_WARPS][ROWS][V_DIM], tops[FINISH_WARPS][ROWS], masses[FINISH_WARPS][ROWS], old[ROWS][V_DIM];
  const int heads = p.kv_heads * BLOCKS, per = (HEADS + ROWS - 1) / ROWS;
  const int hv = blockIdx.y / per, row0 = blockIdx.y % per * ROWS;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  // The rotation was written before the decode kernel began, so it may be read before its end.
  const int column = tid % V_DIM, part = tid / V_DIM;
  const float* turn = p.v_rotation_t && part < PARTS ? p.v_rotation_t + ((u64)(hv / BLOCKS) * V_DIM + part * DEPTH) * V_DIM + column : nullptr;
  float early[EARLY ? DEPTH : 1];
  if (EARLY && turn) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) early[i] = turn[i * V_DIM];
  }
  const int side = warp % 2;  // even warps take the history, odd ones the windows, some partials at a time

  for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
    const u64 bh = (u64)b * heads + hv;
    float top[ROWS], mass[ROWS], sum[ROWS][WIDE][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      top[r] = -infinity(), mass[r] = 0.f;
#pragma unroll
      for (int k = 0; k < WIDE; ++k) sum[r][k][0] = sum[r][k][1] = sum[r][k][2] = sum[r][k][3] = 0.f;
    }
    // Ranges too: decode.cu releases this kernel when prepare.cu has ended.
    const Schedule plan(p, p.ranges[0]);
    const int low = p.ranges[2 + 2 * bh], history = p.ranges[3 + 2 * bh] - low, all = history + p.items_a_head;
    const u64 windows = plan.blocks + (u64)p.batch * heads + bh * p.items_a_head;
    const int begin = side ? history : 0, end = side ? all : history;
    wait_for_predecessor();
    for (int i0 = begin + warp / 2; i0 < end; i0 += FINISH_WARPS / 2 * AT_ONCE) {
      float lse[AT_ONCE][ROWS];
      float4 x[AT_ONCE][ROWS][WIDE];
#pragma unroll
      for (int a = 0; a < AT_ONCE; ++a) {
        const int i = i0 + a * (FINISH_WARPS / 2);
        const bool used = i < end && (side || plan.unit(low + i) < plan.unit(low + i + 1));  // a block may have none
        const u64 slot = side ? windows + (i - history) : low + i + bh;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const bool real = used && row0 + r < HEADS;
          lse[a][r] = real ? p.partial_lse[slot * HEADS + row0 + r] : -infinity();
#pragma unroll
          for (int k = 0; k < WIDE; ++k)
            if (real && k * 128 + lane * 4 < V_DIM)
              x[a][r][k] = *(const float4*)(p.partial + (slot * HEADS + row0 + r) * V_DIM + k * 128 + lane * 4);
        }
      }
#pragma unroll
      for (int a = 0; a < AT_ONCE; ++a)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          if (lse[a][r] == -infinity()) continue;
          const float next = fmaxf(top[r], lse[a][r]), keep = ex2(top[r] - next), f = ex2(lse[a][r] - next);
          top[r] = next, mass[r] = mass[r] * keep + f;
#pragma unroll
          for (int k = 0; k < WIDE; ++k) {
            sum[r][k][0] = sum[r][k][0] * keep + f * x[a][r][k].x, sum[r][k][1] = sum[r][k][1] * keep + f * x[a][r][k].y;
            sum[r][k][2] = sum[r][k][2] * keep + f * x[a][r][k].z, sum[r][k][3] = sum[r][k][3] * keep + f * x[a][r][k].w;
          }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (lane == 0) tops[warp][r] = top[r], masses[warp][r] = mass[r];
#pragma unroll
      for (int k = 0; k < WIDE; ++k)
        if (k * 128 + lane * 4 < V_DIM)
          *(float4*)&sums[warp][r][k * 128 + lane * 4] = {sum[r][k][0], sum[r][k][1], sum[r][k][2], sum[r][k][3]};
    }
    __syncthreads();
    constexpr int MINE = (ROWS * V_DIM + THREADS - 1) / THREADS;
    float raw_sum[MINE];  // of the elements this thread will write: windows, and the centre's share
#pragma unroll
    for (int m = 0; m < MINE; ++m) {
      const int i = tid + m * THREADS, r = i / V_DIM, d = i % V_DIM;
      if (i >= ROWS * V_DIM) continue;
      float best = -infinity(), value[2] = {0.f, 0.f}, weight[2] = {0.f, 0.f};
#pragma unroll
      for (int w = 0; w < FINISH_WARPS; ++w) best = fmaxf(best, tops[w][r]);
#pragma unroll
      for (int w = 0; w < FINISH_WARPS; ++w) {
        const float f = tops[w][r] == -infinity() ? 0.f : ex2(tops[w][r] - best);
        value[w % 2] += f * sums[w][r][d], weight[w % 2] += f * masses[w][r];
      }
      const float total = weight[0] + weight[1], norm = total == 0.f ? 0.f : 1.f / total;  // a request without tokens: zeros
      old[r][d] = value[0] * norm;
      raw_sum[m] = value[1] * norm + p.v_centre[hv / BLOCKS * V_DIM + d] * (weight[0] * norm);
    }
    __syncthreads();
    float(*parts)[ROWS][V_DIM] = sums;  // PARTS <= FINISH_WARPS
    if (turn && history) {
      float acc[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) acc[r] = 0.f;
#pragma unroll EARLY ? DEPTH : 8
      for (int i = 0; i < DEPTH; ++i) {
        const float x = EARLY ? early[EARLY ? i : 0] : turn[i * V_DIM];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) acc[r] += old[r][part * DEPTH + i] * x;
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) parts[part][r][column] = acc[r];
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MINE; ++m) {
      const int i = tid + m * THREADS, r = i / V_DIM, d = i % V_DIM, g = (hv % BLOCKS) * HEADS + row0 + r;
      if (i >= ROWS * V_DIM || row0 + r >= HEADS || g >= GROUP) continue;
      float x = raw_sum[m];
      if (!p.v_rotation_t) x += old[r][d];
      else if (history)
#pragma unroll
        for (int k = 0; k < PARTS; ++k) x += parts[k][r][d];
      store(p.out, (((u64)b * p.kv_heads + hv / BLOCKS) * GROUP + g) * V_DIM + d, x);
    }  __syncthreads();  // sums are used again
  }
}
extern "C" __global__ void __launch_bounds__(512, 1) finish_one(const __grid_constant__ Params p) { finish<1, 512>(p); }
extern "C" __global__ void __launch_bounds__(512, 1) finish_some(const __grid_constant__ Params p) { finish<FINISH_ROWS, 512>(p); }
extern "C" __global__ void __launch_bounds__(256, V_DIM > 128 ? 2 : 3) finish_many(const __grid_constant__ Params p) { finish<FINISH_ROWS, 256>(p); }
