// SPDX-License-Identifier: Apache-2.0
// Before and after the decode kernel: queries into the rotated basis and fragment order; partials into outputs.
#include "common.cuh"

constexpr int THREADS = 512;
#if WINDOW_BF16
DEVICE float raw(const u8* x, u64 i) { return bf16_low(((const unsigned short*)x)[i]); }
DEVICE void store(u8* x, u64 i, float y) { ((unsigned short*)x)[i] = (unsigned short)pack_bf16(y, y); }
#else
DEVICE float raw(const u8* x, u64 i) { return half_low(((const unsigned short*)x)[i]); }
DEVICE void store(u8* x, u64 i, float y) { ((unsigned short*)x)[i] = (unsigned short)pack_half(y, y); }
#endif

// One block a (request, KV head), and one more that sums the pages of the requests.
extern "C" __global__ void __launch_bounds__(THREADS, 1) prepare(const __grid_constant__ Params p) {
  release_successor();
  if (blockIdx.x == p.batch) {
    if (blockIdx.y || threadIdx.x >= 32) return;
    int sum = 0;
    for (int b0 = 0; b0 < p.batch; b0 += 32) {
      const int b = b0 + threadIdx.x;
      int n = b < p.batch ? pages_of(p, b) : 0;
#pragma unroll
      for (int i = 1; i < 32; i *= 2) {
        const int left = __shfl_up_sync(FULL, n, i);
        if (threadIdx.x >= i) n += left;
      }
      if (b < p.batch) p.first_page[b + 1] = sum + n;
      sum += __shfl_sync(FULL, n, 31);
    }
    if (threadIdx.x == 0) p.first_page[0] = 0;
    return;
  }
  constexpr int FIT = 45056 / (4 * GROUP * K_DIM) - 1, WANT = THREADS / K_DIM > 4 ? 4 : THREADS / K_DIM;
  constexpr int PARTS = FIT < 1 ? 1 : FIT < WANT ? FIT : WANT;
  __shared__ float q[GROUP][K_DIM], parts[PARTS][GROUP][K_DIM], largest[THREADS / 32], centre[GROUP];
  const int b = blockIdx.x, head = blockIdx.y, tid = threadIdx.x;
  if (pages_of(p, b) == 0) return;
  const u64 first = ((u64)b * p.kv_heads + head) * GROUP * K_DIM;
  for (int i = tid; i < GROUP * K_DIM; i += THREADS) q[i / K_DIM][i % K_DIM] = raw(p.q, first + i) * p.query_scale;
  __syncthreads();
  for (int g = tid / 32; g < GROUP; g += THREADS / 32) {  // q . centre
    float sum = 0.f;
    for (int i = tid % 32; i < K_DIM; i += 32) sum += q[g][i] * p.k_centre[head * K_DIM + i];
#pragma unroll
    for (int i = 1; i < 32; i *= 2) sum += __shfl_xor_sync(FULL, sum, i);
    if (tid % 32 == 0) centre[g] = sum;
  }
  if (p.k_rotation) {
    const int column = tid % K_DIM, part = tid / K_DIM;
    if (part < PARTS) {
      const float* r = p.k_rotation + (u64)head * K_DIM * K_DIM + column;
      float sum[GROUP];
#pragma unroll
      for (int g = 0; g < GROUP; ++g) sum[g] = 0.f;
#pragma unroll 16
      for (int i = part * (K_DIM / PARTS); i < (part + 1) * (K_DIM / PARTS); ++i) {
        const float x = r[i * K_DIM];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) sum[g] += q[g][i] * x;
      }
      if (part == PARTS - 1)
        for (int i = PARTS * (K_DIM / PARTS); i < K_DIM; ++i)
          for (int g = 0; g < GROUP; ++g) sum[g] += q[g][i] * r[i * K_DIM];
#pragma unroll
      for (int g = 0; g < GROUP; ++g) parts[part][g][column] = sum[g];
    }
    __syncthreads();
  }
  float top = 0.f;
  for (int i = tid; i < GROUP * K_DIM; i += THREADS) {
    const int g = i / K_DIM, d = i % K_DIM;
    float x = q[g][d];
    if (p.k_rotation) {
      x = 0.f;
#pragma unroll
      for (int k = 0; k < PARTS; ++k) x += parts[k][g][d];
    }
    q[g][d] = x;
    const float size = fabsf(x);
    if (size < infinity()) top = fmaxf(top, size);  // a head with infinities spoils itself alone
  }
#pragma unroll
  for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, i));
  if (tid % 32 == 0) largest[tid / 32] = top;
  __syncthreads();
  top = largest[tid % (THREADS / 32)];
#pragma unroll
  for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, i));
  // Power of two that brings the largest entry into [2^13, 2^14): far from overflow, and 2^-27 of it is still normal.
  int exponent = (int)((__float_as_uint(top) >> 23) & 255) - 127;
  exponent = max(-80, min(exponent, 100));
  const float up = __uint_as_float((u32)(127 + 13 - exponent) << 23), down = __uint_as_float((u32)(127 - 13 + exponent) << 23);
  const int warp = tid / 32, lane = tid % 32, row = lane / 4, quad = lane % 4;
  for (int tile = warp; tile < BLOCKS * TILES; tile += THREADS / 32) {
    const int block = tile / TILES, n = tile % TILES, column = 8 * n + row, h = block * HEADS + column;
    const bool real = column < HEADS && h < GROUP;
    const u64 bh = ((u64)b * p.kv_heads + head) * BLOCKS + block;
    u32* to = p.query + (bh * 32 + lane) * QUERY_WORDS + n * (K_DIM / 8);
    float sum = 0.f;
    for (int j = 0; j < K_DIM / 8; ++j) {
      const float f = 1.f / (1 << target_bit<K_BITS>(j));
      const float x0 = real ? q[h][8 * j + 2 * quad] * up * f : 0.f, x1 = real ? q[h][8 * j + 2 * quad + 1] * up * f : 0.f;
      const u32 pair = pack_half(x0, x1);
      to[j] = pair;
      sum += (half_low(pair) + half_high(pair)) * (float)(1 << target_bit<K_BITS>(j));
    }
    sum += __shfl_xor_sync(FULL, sum, 1);
    sum += __shfl_xor_sync(FULL, sum, 2);
    float* meta = p.query_meta + bh * QUERY_META;
    if (quad == 0) meta[column] = sum * down, meta[COLUMNS + column] = real ? centre[h] : 0.f;
    if (n == 0 && lane == 0) meta[2 * COLUMNS] = down * 16777216.f;
  }
}

// One block a (request, block of ROWS query heads): merge its partials, undo the rotation, add the centre.
template <int ROWS> DEVICE void finish(const Params& p) {
  constexpr int WARPS_HERE = THREADS / 32, LANES4 = (V_DIM / 4 + 31) / 32;
  constexpr int PARTS = THREADS / V_DIM > 4 ? 4 : THREADS / V_DIM;
  __shared__ float sums[2][WARPS_HERE / 2][ROWS][V_DIM], weight[2][ROWS], old[ROWS][V_DIM], raw_sum[ROWS][V_DIM];
  __shared__ float tops[WARPS_HERE][ROWS];
  wait_for_predecessor();
  const int heads = p.kv_heads * BLOCKS, per = (HEADS + ROWS - 1) / ROWS;
  const int b = blockIdx.x, hv = blockIdx.y / per, row0 = blockIdx.y % per * ROWS;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const u64 bh = (u64)b * heads + hv;
  const Schedule plan(p, p.first_page[p.batch]);
  // Thread blocks that hold pages of this request and head: [low, high).
  const int count = p.first_page[b + 1] - p.first_page[b];
  const u64 u0 = (u64)p.first_page[b] * heads + (u64)hv * count, u1 = u0 + count;
  u64 low = 0, high = 0;
  if (count) {
    u64 hi = plan.blocks - 1;
    while (low < hi) {
      const u64 mid = (low + hi + 1) / 2;
      if (plan.page(p, mid) <= u0) low = mid; else hi = mid - 1;
    }
    high = low, hi = plan.blocks - 1;
    while (high < hi) {
      const u64 mid = (high + hi + 1) / 2;
      if (plan.page(p, mid) < u1) high = mid; else hi = mid - 1;
    }
    ++high;
  }
  const int history = (int)(high - low), all = history + p.items_a_head;
  const u64 windows = plan.blocks + (u64)p.batch * heads + bh * p.items_a_head;
  auto slot = [&](int i) { return i < history ? low + i + bh : windows + (i - history); };
  auto used = [&](int i) { return i >= history || max(plan.page(p, low + i), u0) < min(plan.page(p, low + i + 1), u1); };
  auto lse_of = [&](int i, int r) { return row0 + r < HEADS ? p.partial_lse[slot(i) * HEADS + row0 + r] : 0.f; };

  float top[ROWS], total[2][ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) top[r] = -infinity(), total[0][r] = total[1][r] = 0.f;
  for (int i = tid; i < all; i += THREADS)
    if (used(i))
#pragma unroll
      for (int r = 0; r < ROWS; ++r) top[r] = fmaxf(top[r], lse_of(i, r));
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) top[r] = fmaxf(top[r], __shfl_xor_sync(FULL, top[r], i));
    if (lane == 0) tops[warp][r] = top[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < WARPS_HERE; ++w) top[r] = fmaxf(top[r], tops[w][r]);

  // Even warps take the history, odd ones the windows, a partial at a time.
  const int side = warp % 2;
  float sum[ROWS][LANES4][4];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int k = 0; k < LANES4; ++k) sum[r][k][0] = sum[r][k][1] = sum[r][k][2] = sum[r][k][3] = 0.f;
#pragma unroll 2
  for (int i = (side ? history : 0) + warp / 2; i < (side ? all : history); i += WARPS_HERE / 2) {
    if (!used(i)) continue;
    const float* from = p.partial + slot(i) * (HEADS * V_DIM);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float lse = lse_of(i, r);
      if (row0 + r >= HEADS || lse == -infinity()) continue;
      const float f = ex2(lse - top[r]);
      total[0][r] += f;
#pragma unroll
      for (int k = 0; k < LANES4; ++k)
        if (k * 128 + lane * 4 < V_DIM) {
          const float4 x = *(const float4*)(from + (row0 + r) * V_DIM + k * 128 + lane * 4);
          sum[r][k][0] += f * x.x, sum[r][k][1] += f * x.y, sum[r][k][2] += f * x.z, sum[r][k][3] += f * x.w;
        }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int k = 0; k < LANES4; ++k)
      if (k * 128 + lane * 4 < V_DIM)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[side][warp / 2][r][k * 128 + lane * 4 + j] = sum[r][k][j];
  }
  __syncthreads();  // tops has been read by all
  if (lane == 0)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) tops[warp][r] = total[0][r];
  __syncthreads();
  if (tid < 2 * ROWS) {
    float x = 0.f;
    for (int w = tid / ROWS; w < WARPS_HERE; w += 2) x += tops[w][tid % ROWS];
    weight[tid / ROWS][tid % ROWS] = x;
  }
  __syncthreads();
  for (int i = tid; i < ROWS * V_DIM; i += THREADS) {
    const int r = i / V_DIM, d = i % V_DIM;
    const float mass = weight[0][r] + weight[1][r], norm = mass == 0.f ? 0.f : 1.f / mass;  // a request without tokens: zeros
    float x = 0.f, y = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS_HERE / 2; ++w) x += sums[0][w][r][d], y += sums[1][w][r][d];
    old[r][d] = x * norm;
    raw_sum[r][d] = y * norm + p.v_centre[hv / BLOCKS * V_DIM + d] * (weight[0][r] * norm);
  }
  __syncthreads();
  float(*parts)[ROWS][V_DIM] = sums[0];  // PARTS <= WARPS_HERE / 2
  const int column = tid % V_DIM, part = tid / V_DIM;
  if (p.v_rotation_t && count && part < PARTS) {
    const float* rt = p.v_rotation_t + (u64)(hv / BLOCKS) * V_DIM * V_DIM + column;
    float acc[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) acc[r] = 0.f;
    const int stop = part == PARTS - 1 ? V_DIM : (part + 1) * (V_DIM / PARTS);
#pragma unroll 16
    for (int i = part * (V_DIM / PARTS); i < stop; ++i) {
      const float x = rt[i * V_DIM];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) acc[r] += old[r][i] * x;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) parts[part][r][column] = acc[r];
  }
  __syncthreads();
  for (int i = tid; i < ROWS * V_DIM; i += THREADS) {
    const int r = i / V_DIM, d = i % V_DIM, g = (hv % BLOCKS) * HEADS + row0 + r;
    if (row0 + r >= HEADS || g >= GROUP) continue;
    float x = raw_sum[r][d];
    if (!p.v_rotation_t) x += old[r][d];
    else if (count)
      for (int k = 0; k < PARTS; ++k) x += parts[k][r][d];
    store(p.out, (((u64)b * p.kv_heads + hv / BLOCKS) * GROUP + g) * V_DIM + d, x);
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) finish_one(const __grid_constant__ Params p) { finish<1>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) finish_many(const __grid_constant__ Params p) { finish<FINISH_ROWS>(p); }
