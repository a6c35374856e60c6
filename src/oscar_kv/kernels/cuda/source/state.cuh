// SPDX-License-Identifier: Apache-2.0
// A warp's online softmax, and the desk in shared memory where the warps of a block put their states together.
#pragma once
#include "common.cuh"

constexpr float SLACK = 4.f;         // the running maximum moves when it is exceeded by this much (log2)
constexpr float STEP_LIMIT = 1024.f; // largest scaled value step: exp2(SLACK) * STEP_LIMIT < 65504

// One warp's online softmax: columns are query heads, lane (row, quad) holds columns 2*quad, 2*quad+1 of each tile.
struct State {
  float o[TILES][V_DIM / 16][4], m[TILES][2], l[TILES][2], z[TILES][2], step_scale;
  DEVICE void reset() {
    step_scale = 16777216.f;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int j = 0; j < V_DIM / 16; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) o[n][j][k] = 0.f;
#pragma unroll
      for (int k = 0; k < 2; ++k) m[n][k] = -1e30f, l[n][k] = z[n][k] = 0.f;
    }
  }
  // Move the maxima to cover s [tiles][rows of 8 tokens][column], and the scale of value steps to cover largest_step.
  template <int ROWS> DEVICE void cover(const float (*s)[ROWS][2], float largest_step) {
    float top[TILES][2];
    bool moved = largest_step * step_scale > STEP_LIMIT;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        top[n][k] = s[n][0][k];
#pragma unroll
        for (int r = 1; r < ROWS; ++r) top[n][k] = fmaxf(top[n][k], s[n][r][k]);
        moved |= top[n][k] > m[n][k] + SLACK;
      }
    if (!__any_sync(FULL, moved)) return;
#pragma unroll
    for (int i = 4; i < 32; i *= 2) largest_step = fmaxf(largest_step, __shfl_xor_sync(FULL, largest_step, i));
    float ratio = 1.f;
    if (largest_step * step_scale > STEP_LIMIT) {
      const int exponent = (int)((__float_as_uint(largest_step) >> 23) & 255) - 127;
      const float next = __uint_as_float((u32)(127 + 9 - exponent) << 23);
      ratio = next / step_scale, step_scale = next;
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float t = top[n][k];
#pragma unroll
        for (int i = 4; i < 32; i *= 2) t = fmaxf(t, __shfl_xor_sync(FULL, t, i));
        t = fmaxf(t, m[n][k]);
        const float f = ex2(m[n][k] - t);
        m[n][k] = t, l[n][k] *= f, z[n][k] *= f;
#pragma unroll
        for (int j = 0; j < V_DIM / 16; ++j) o[n][j][k] *= f * ratio, o[n][j][k + 2] *= f * ratio;
      }
  }
};

DEVICE float capped(const Params& p, float x) {
  return SOFTCAP ? p.cap * (1.f - 2.f / (1.f + ex2(2.f * log2_of_e() * x))) : x;
}

// Where the warps of a block put their states together, in shared memory. A segment is what a block has of one request
// and head. After its pages of a segment each warp leaves its state here and goes on to the next; one warp waits
// for all and writes the partial: output / mass and log2 of the mass. BUFFERS segments may be open at once.
// Tensor cores truncate as they add, so a warp starts from zero after FLUSH_PAGES pages and adds up here, in float32.
// Rows of 8 dimensions carry 2^target(group) of the layout; centre: log2(e) * scale * q.centre, constant over the history.
constexpr int STRIDE = V_DIM + 4;  // spreads the columns of a warp over the banks
struct Desk {
  float values[BUFFERS][WARPS][HEADS][STRIDE], mass[BUFFERS][WARPS][HEADS][2];  // mass: maximum, sum
};
static_assert(sizeof(Desk) <= DESK_BYTES, "spec.py reserves too little");

DEVICE void leave(State& s, Desk& desk, const float* centre, int buffer, bool first) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const float back = 16777216.f / s.step_scale;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 4; i < 32; i *= 2) {
        s.l[n][k] += __shfl_xor_sync(FULL, s.l[n][k], i);
        s.z[n][k] += __shfl_xor_sync(FULL, s.z[n][k], i);
      }
      const int column = 8 * n + 2 * quad + k;
      float *to = desk.values[buffer][warp][column < HEADS ? column : 0], *mass = desk.mass[buffer][warp][column < HEADS ? column : 0];
      const float top = s.m[n][k] + (SOFTCAP || column >= HEADS ? 0.f : centre[column]);
      float keep = 0.f, f = 1.f, next = top, sum = s.l[n][k];
      if (!first) next = fmaxf(mass[0], top), keep = ex2(mass[0] - next), f = ex2(top - next), sum = keep * mass[1] + f * sum;
      __syncwarp();  // all rows have read the mass
      if (column >= HEADS) continue;
      if (row == 0) mass[0] = next, mass[1] = sum;
#pragma unroll
      for (int j = 0; j < V_DIM / 16; ++j) {
        const float x = s.o[n][j][k] * (back / (1 << target_bit<V_BITS>(j))) + s.z[n][k];
        const float y = s.o[n][j][k + 2] * (back / (1 << target_bit<V_BITS>(V_DIM / 16 + j))) + s.z[n][k];
        to[16 * j + row] = first ? x : keep * to[16 * j + row] + f * x;
        to[16 * j + 8 + row] = first ? y : keep * to[16 * j + 8 + row] + f * y;
      }
    }
}
// One warp: all warps' states of a segment into its partial.
DEVICE void collect(const Params& p, const Desk& desk, int buffer, u64 slot) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int head = 0; head < HEADS; ++head) {
    float top = -1e30f, sum = 0.f, f[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) f[w] = desk.mass[buffer][w][head][0], top = fmaxf(top, f[w]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) f[w] = ex2(f[w] - top), sum += f[w] * desk.mass[buffer][w][head][1];
#pragma unroll
    for (int d = 4 * lane; d < V_DIM; d += 128) {
      float4 x = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        if (f[w] == 0.f) continue;  // perhaps a warp without pages, which has left no values
        const float4 y = *(const float4*)&desk.values[buffer][w][head][d];
        x.x += f[w] * y.x, x.y += f[w] * y.y, x.z += f[w] * y.z, x.w += f[w] * y.w;
      }
      const float norm = 1.f / sum;
      *(float4*)(p.partial + (slot * HEADS + head) * V_DIM + d) = {x.x * norm, x.y * norm, x.z * norm, x.w * norm};
    }
    if (lane == 0) p.partial_lse[slot * HEADS + head] = top + lg2(sum);
  }
}
