// SPDX-License-Identifier: Apache-2.0
// Steps, codes and unbiased scales of rows, as quantizer.py defines them.
#pragma once
#include "store_rows.cuh"

constexpr float MIN_STEP = 6.103515625e-05f;  // 2^-14
constexpr float MAGIC = 12582912.f;           // 1.5 * 2^23: added, it rounds to an integer, to even at a tie
DEVICE float to_half(float x) { const float y = clamped(x); return half_low(pack_half(y, y)); }
DEVICE float to_step(float x) { return to_half(fmaxf(x, MIN_STEP)); }
// (x - zero) / step rounded to the nearest code, plus MAGIC. The division is exact: ties fall as they do in PyTorch.
// d: x - zero.
template <int TOP> DEVICE float magic_code(float d, float step, float inverse) {
  float q = d * inverse;
  q = fmaf(fmaf(-q, step, d), inverse, q);
  return fminf(fmaxf(q, 0.f), (float)TOP) + MAGIC;
}

template <int N> struct Steps { float step[N], zero[N], mean[N]; };

// Step and zero of least squared error of each row.
template <int D, int BITS, bool TRY_RANGES> DEVICE void least_squares(Tile<D>& tile, Steps<2 * TILES>& out) {
  constexpr int R = 2 * TILES, TOP = (1 << BITS) - 1;
  float (&mean)[R] = out.mean;
  float first[R], low[R], high[R], best[R];
#pragma unroll
  for (int r = 0; r < R; ++r) mean[r] = first[r] = 0.f, low[r] = infinity(), high[r] = -infinity(), best[r] = infinity();
  tile.each([&](int r, int, float x) {
    mean[r] += x;
    if (TRY_RANGES) low[r] = fminf(low[r], x), high[r] = fmaxf(high[r], x);
  });
  quad_sums(mean);
#pragma unroll
  for (int r = 0; r < R; ++r) mean[r] /= D;
  tile.each([&](int r, int, float x) {
    const float dev = x - mean[r];
    if (BITS == 1) first[r] += fabsf(dev); else first[r] = fmaf(dev, dev, first[r]);
  });
  quad_sums(first);
#pragma unroll
  for (int r = 0; r < R; ++r) forget(mean[r]);
  if (TRY_RANGES)
#pragma unroll
    for (int i = 1; i <= 2; ++i)
#pragma unroll
      for (int r = 0; r < R; ++r)
        low[r] = fminf(low[r], __shfl_xor_sync(FULL, low[r], i)), high[r] = fmaxf(high[r], __shfl_xor_sync(FULL, high[r], i));
  constexpr float SIGMAS = BITS == 2 ? SIGMA_STEP_2 : BITS == 3 ? SIGMA_STEP_3 : SIGMA_STEP_4;
  const float fractions[4] = {RANGE_FRACTIONS};
#pragma unroll 1
  for (int start = 0; start < (TRY_RANGES ? 5 : 1); ++start) {
    float step[R], zero[R], inverse[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float raw = BITS == 1 ? 2.f * (first[r] / D) : SIGMAS * sqrtf(first[r] / D), middle = mean[r];
      if (TRY_RANGES && start) {
        const float fraction = start == 1 ? fractions[0] : start == 2 ? fractions[1] : start == 3 ? fractions[2] : fractions[3];
        raw = (high[r] - low[r]) * fraction / TOP, middle = (low[r] + high[r]) / 2;
      }
      step[r] = to_step(raw), zero[r] = to_half(__fadd_rn(middle, -__fmul_rn(TOP / 2.f, step[r])));
    }
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
      float codes[R], squares[R], product[R];
#pragma unroll
      for (int r = 0; r < R; ++r) inverse[r] = 1.f / step[r], codes[r] = squares[r] = product[r] = 0.f;
      tile.each([&](int r, int, float x) {
        const float d = x - zero[r], code = magic_code<TOP>(d, step[r], inverse[r]) - MAGIC;
        codes[r] += code, product[r] = fmaf(d, code, product[r]);
        if (BITS > 1) squares[r] = fmaf(code, code, squares[r]);
      });
      quad_sums(codes), quad_sums(product);
      if (BITS > 1) quad_sums(squares);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float all = BITS > 1 ? squares[r] : codes[r];
        const float spread = fmaf((float)D, all, -codes[r] * codes[r]);  // D^2 times the variance: integers, exact
        const float covariance = (product[r] - (mean[r] - zero[r]) * codes[r]) / D;
        if (spread > 0.f) step[r] = to_step(covariance / (spread / (D * D)));
        zero[r] = to_half(__fadd_rn(mean[r], -__fmul_rn(step[r], codes[r] / D)));
      }
    }
    if constexpr (!TRY_RANGES) {
#pragma unroll
      for (int r = 0; r < R; ++r) out.step[r] = step[r], out.zero[r] = zero[r];
    } else {
      float loss[R];
#pragma unroll
      for (int r = 0; r < R; ++r) inverse[r] = 1.f / step[r], loss[r] = 0.f;
      tile.each([&](int r, int, float x) {
        const float error = fmaf(magic_code<TOP>(x - zero[r], step[r], inverse[r]) - MAGIC, step[r], zero[r]) - x;
        loss[r] = fmaf(error, error, loss[r]);
      });
      quad_sums(loss);
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (loss[r] < best[r]) best[r] = loss[r], out.step[r] = step[r], out.zero[r] = zero[r];
    }
  }
}

// The stored pair: stretched about the mean of x^ until <x^, x> = <x, x>.
DEVICE void stretch(float own, float cross, float mean, float& step, float& zero) {
  float g = cross > 1e-3f * own && own > 0.f ? own / cross : 1.f;
  g = fminf(fmaxf(g, STRETCH_LOW), STRETCH_HIGH);
  step = to_step(__fmul_rn(g, step)), zero = to_half(__fadd_rn(mean, __fmul_rn(g, zero - mean)));
}

DEVICE void write_pair(u8* page, bool keys, int token, float step, float zero) {
  *(u32*)(page + METADATA_OFFSET + 8 * token + (keys ? 0 : 4)) = pack_half(step, zero);
}

// Codes of plain rounding to shared memory, the stored pairs to the page.
template <bool KEYS> DEVICE void plain_codes(Tile<Side<KEYS>::D>& tile, Steps<2 * TILES>& s, u8* codes, u8* page, int warp_row) {
  using S = Side<KEYS>;
  constexpr int R = 2 * TILES, D = S::D;
  const int lane = lane_of(), row = lane / 4, quad = lane % 4;
  float inverse[R], sum[R], own[R], cross[R];
#pragma unroll
  for (int r = 0; r < R; ++r) inverse[r] = 1.f / s.step[r], sum[r] = own[r] = cross[r] = 0.f;
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int r = 0; r < R; ++r) {
      u32 pair = 0;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float x = tile.x[r / 2][n][2 * (r % 2) + c], m = magic_code<S::TOP>(x - s.zero[r], s.step[r], inverse[r]);
        pair |= (__float_as_uint(m) & S::TOP) << 8 * c;
        if (UNBIASED) {
          const float code = m - MAGIC, dev = x - s.mean[r];
          sum[r] += code, own[r] = fmaf(dev, dev, own[r]), cross[r] = fmaf(dev, code, cross[r]);
        }
      }
      *(unsigned short*)(codes + (warp_row + 8 * r + row) * CODE_STRIDE + 8 * n + 2 * quad) = (unsigned short)pair;
    }
  if (UNBIASED) {
    quad_sums(sum), quad_sums(own), quad_sums(cross);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float mean = __fadd_rn(__fmul_rn(s.step[r], sum[r] / D), s.zero[r]);
      stretch(own[r], s.step[r] * cross[r], mean, s.step[r], s.zero[r]);
    }
  }
  if (quad == 0)
#pragma unroll
    for (int r = 0; r < R; ++r) write_pair(page, KEYS, warp_row + 8 * r + row, s.step[r], s.zero[r]);
}
