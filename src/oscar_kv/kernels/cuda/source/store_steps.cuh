// SPDX-License-Identifier: Apache-2.0
// Steps, codes and unbiased scales of rows, as quantizer.py defines them.
#pragma once
#include "store_rows.cuh"

constexpr float MIN_STEP = 6.103515625e-05f;  // 2^-14
constexpr float MAGIC = 12582912.f;           // 1.5 * 2^23: added, it rounds to an integer, to even at a tie
constexpr u32 MAGIC_BITS = 0x4b400000;
constexpr float MOST_NORM = 1e9f;             // of a row that surely has no element beyond fp16's range
DEVICE float to_half(float x) { const float y = clamped(x); return half_low(pack_half(y, y)); }
DEVICE float to_step(float x) { return to_half(fmaxf(x, MIN_STEP)); }

// Of x - zero over step, cut to the codes, a unit is what the tensor pipes' cut (0 ... 1) leaves; times TOP plus MAGIC it
// is rounded, its code in the lowest bits. For rows as y = x - mean: unit = fma_unit(y, scale, add).
template <int TOP> struct Rounding {
  float scale, add;
  DEVICE Rounding(float step, float offset) {  // offset: mean - zero
    const float inverse = reciprocal(step);
    scale = inverse * (1.f / TOP), add = offset * inverse * (1.f / TOP);  // a tie of a row without spread stays one
  }
  DEVICE float operator()(float y) const { return fmaf(fma_unit(y, scale, add), (float)TOP, MAGIC); }
};

// Of each row: mean, sums of |y| and y^2 (y: x - mean), step and zero.
template <int N> struct Steps { float step[N], zero[N], mean[N], absolute[N], square[N]; };

// The tile becomes y.
template <int D, int BITS, int T> DEVICE void moments(Tile<D, T>& tile, Steps<2 * T>& s) {
  constexpr int R = 2 * T;
#pragma unroll
  for (int r = 0; r < R; ++r) s.mean[r] = s.absolute[r] = s.square[r] = 0.f;
  tile.each([&](int r, int, float x) { s.mean[r] += x; });
  quad_sums(s.mean);
#pragma unroll
  for (int r = 0; r < R; ++r) s.mean[r] /= D;
  tile.each([&](int r, int, float& x) {
    x -= s.mean[r], s.square[r] = fmaf(x, x, s.square[r]);
    if (BITS == 1) s.absolute[r] += fabsf(x);
  });
  quad_sums(s.square);
  if (BITS == 1) quad_sums(s.absolute);
}

// Step and zero of least squared error of each row of y.
template <int D, int BITS, bool TRY_RANGES, int T> DEVICE void least_squares(Tile<D, T>& tile, Steps<2 * T>& s) {
  constexpr int R = 2 * T, TOP = (1 << BITS) - 1;
  float low[R], high[R], best[R];
#pragma unroll
  for (int r = 0; r < R; ++r) low[r] = infinity(), high[r] = -infinity(), best[r] = infinity();
  if (TRY_RANGES) {
    tile.each([&](int r, int, float y) { low[r] = fminf(low[r], y), high[r] = fmaxf(high[r], y); });
#pragma unroll
    for (int i = 1; i <= 2; ++i)
#pragma unroll
      for (int r = 0; r < R; ++r)
        low[r] = fminf(low[r], __shfl_xor_sync(FULL, low[r], i)), high[r] = fmaxf(high[r], __shfl_xor_sync(FULL, high[r], i));
  }
  constexpr float SIGMAS = BITS == 2 ? SIGMA_STEP_2 : BITS == 3 ? SIGMA_STEP_3 : SIGMA_STEP_4;
  const float fractions[4] = {RANGE_FRACTIONS};
#pragma unroll 1
  for (int start = 0; start < (TRY_RANGES ? 5 : 1); ++start) {
    float step[R], zero[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float raw = BITS == 1 ? 2.f * (s.absolute[r] / D) : SIGMAS * root(s.square[r] / D), middle = s.mean[r];
      if (TRY_RANGES && start) {
        const float fraction = start == 1 ? fractions[0] : start == 2 ? fractions[1] : start == 3 ? fractions[2] : fractions[3];
        raw = (high[r] - low[r]) * fraction / TOP, middle = s.mean[r] + (low[r] + high[r]) / 2;
      }
      step[r] = to_step(raw), zero[r] = to_half(__fadd_rn(middle, -__fmul_rn(TOP / 2.f, step[r])));
    }
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
      u32 bits[R];
      float codes[R], squares[R], product[R], scale[R], add[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const Rounding<TOP> rounding(step[r], s.mean[r] - zero[r]);
        scale[r] = rounding.scale, add[r] = rounding.add, bits[r] = 0, squares[r] = product[r] = 0.f;
      }
      tile.each([&](int r, int, float y) {
        const float m = fmaf(fma_unit(y, scale[r], add[r]), (float)TOP, MAGIC), code = m - MAGIC;
        bits[r] += __float_as_uint(m), product[r] = fmaf(y, code, product[r]);
        if (BITS > 1) squares[r] = fmaf(code, code, squares[r]);
      });
#pragma unroll
      for (int r = 0; r < R; ++r) codes[r] = (float)(int)(bits[r] - D / 4 * MAGIC_BITS);
      quad_sums(codes), quad_sums(product);
      if (BITS > 1) quad_sums(squares);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float all = BITS > 1 ? squares[r] : codes[r];
        const float spread = fmaf((float)D, all, -codes[r] * codes[r]);  // D^2 times the variance: integers, exact
        if (spread > 0.f) step[r] = to_step(product[r] * D * reciprocal(spread));
        zero[r] = to_half(__fadd_rn(s.mean[r], -__fmul_rn(step[r], codes[r] / D)));
      }
    }
    if constexpr (!TRY_RANGES) {
#pragma unroll
      for (int r = 0; r < R; ++r) s.step[r] = step[r], s.zero[r] = zero[r];
    } else {
      float loss[R], scale[R], add[R], offset[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        offset[r] = s.mean[r] - zero[r], loss[r] = 0.f;
        const Rounding<TOP> rounding(step[r], offset[r]);
        scale[r] = rounding.scale, add[r] = rounding.add;
      }
      tile.each([&](int r, int, float y) {
        const float m = fmaf(fma_unit(y, scale[r], add[r]), (float)TOP, MAGIC);
        const float error = fmaf(m - MAGIC, step[r], -offset[r]) - y;
        loss[r] = fmaf(error, error, loss[r]);
      });
      quad_sums(loss);
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (loss[r] < best[r]) best[r] = loss[r], s.step[r] = step[r], s.zero[r] = zero[r];
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

// Where a plane's words do not span eight-token tiles, a warp has all codes of its words in registers: a lane's pairs of
// keys lie as accumulators do, those of values transposed.
template <bool KEYS> DEVICE constexpr bool packs_alone() {
  using S = Side<KEYS>;
  return S::D / 8 % (16 / low_bits(S::BITS)) == 0 && (S::BITS != 3 || S::D % 128 == 0);
}
// The 8-dimension group of a slot of an eight-token tile.
template <bool KEYS> DEVICE constexpr int group_of(int slot) {
  constexpr int half = Side<KEYS>::D / 16;
  return KEYS ? slot : 2 * (slot % half) + slot / half;
}
// Words of a plane of B bits of a warp's tile. word(r, first): the codes of slots first and on, a pair each, of tile r.
template <bool KEYS, int B, class F> DEVICE void pack_tile(u8* plane, int warp_row, F word) {
  using S = Side<KEYS>;
  constexpr int R = 2 * S::TILES, per = 16 / B, each = S::D / 8 / per, all = R * each;
  u32 words[all ? all : 1];  // never none where this runs, but it is compiled for other shapes too
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int w = 0; w < each; ++w) {
      const u32 pairs = word(r, w * per);
      words[r * each + w] = KEYS ? pairs : transpose8(pairs);
    }
  const int lane = lane_of(), first = warp_row / 8 * each;
  if constexpr (all % 4 == 0) {
#pragma unroll
    for (int w = 0; w < all; w += 4)
      *(Word4*)(plane + (first + w) / 4 * 512 + lane * 16) = {words[w], words[w + 1], words[w + 2], words[w + 3]};
  } else {
#pragma unroll
    for (int w = 0; w < all; w += 2)
      *(Word2*)(plane + (first + w) / 4 * 512 + lane * 16 + (first + w) % 4 * 4) = {words[w], words[w + 1]};
  }
}
// code(r, n, c): the code as a float.
template <bool KEYS, int B, class F> DEVICE void pack_floats(u8* plane, int warp_row, F code) {
  pack_tile<KEYS, B>(plane, warp_row, [&](int r, int first) {
    float half[2] = {8388608.f, 8388608.f};  // 2^23: below it an integer adds its bits
#pragma unroll
    for (int i = 0; i < 16 / B; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        half[c] = fmaf(code(r, group_of<KEYS>(first + i), c), (float)(1 << slot_bit<B>(first + i)), half[c]);
    return __byte_perm(__float_as_uint(half[0]), __float_as_uint(half[1]), 0x5410);
  });
}
// Keys' codes [PAGE][CODE_STRIDE] of this warp's rows, from bit `low` on.
template <int B> DEVICE void pack_bytes(const u8* codes, u8* plane, int warp_row, int low) {
  const int lane = lane_of();
  const u8* from = codes + (warp_row + lane / 4) * CODE_STRIDE + lane % 4 * 2;
  pack_tile<true, B>(plane, warp_row, [&](int r, int first) {
    u32 out = 0;
#pragma unroll
    for (int i = 0; i < 16 / B; ++i) {
      u32 pair = __byte_perm(*(const unsigned short*)(from + 8 * r * CODE_STRIDE + 8 * (first + i)), 0, 0x4140);
      if (K_BITS == 3) pair = pair >> low & ((1 << B) - 1) * 0x10001;
      out += pair << slot_bit<B>(first + i);
    }
    return out;
  });
}

// Codes of plain rounding of y: packed into the page, or to shared memory; the stored pairs to the page.
template <bool KEYS> DEVICE void plain_codes(SideTile<KEYS>& tile, Steps<2 * Side<KEYS>::TILES>& s, u8* codes, u8* page, int warp_row) {
  using S = Side<KEYS>;
  constexpr int R = 2 * S::TILES, D = S::D;
  const int lane = lane_of(), row = lane / 4, quad = lane % 4;
  float scale[R], add[R], cross[R], sum[R];
  u32 bits[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const Rounding<S::TOP> rounding(s.step[r], s.mean[r] - s.zero[r]);
    scale[r] = rounding.scale, add[r] = rounding.add, cross[r] = 0.f, bits[r] = 0;
  }
  tile.each([&](int r, int, float& y) {
    const float m = fmaf(fma_unit(y, scale[r], add[r]), (float)S::TOP, MAGIC), code = m - MAGIC;
    if (UNBIASED) bits[r] += __float_as_uint(m), cross[r] = fmaf(y, code, cross[r]);
    y = code;
  });
  if constexpr (packs_alone<KEYS>()) {
    u8* side = page + (KEYS ? 0 : V_OFFSET);
    auto code = [&](int r, int n, int c) { return tile.x[r / 2][n][2 * (r % 2) + c]; };
    if constexpr (S::BITS == 3) {
      pack_floats<KEYS, 2>(side, warp_row, [&](int r, int n, int c) { const float x = code(r, n, c); return x >= 4.f ? x - 4.f : x; });
      pack_floats<KEYS, 1>(side + PAGE * D * 2 / 8, warp_row, [&](int r, int n, int c) { return code(r, n, c) >= 4.f ? 1.f : 0.f; });
    } else {
      pack_floats<KEYS, S::BITS>(side, warp_row, code);
    }
  } else {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float* x = &tile.x[r / 2][n][2 * (r % 2)];
        *(unsigned short*)(codes + (warp_row + 8 * r + row) * CODE_STRIDE + 8 * n + 2 * quad) = (unsigned short)((u32)x[0] | (u32)x[1] << 8);
      }
  }
  if (UNBIASED) {
#pragma unroll
    for (int r = 0; r < R; ++r) sum[r] = (float)(int)(bits[r] - D / 4 * MAGIC_BITS);
    quad_sums(sum), quad_sums(cross);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float mean = __fadd_rn(__fmul_rn(s.step[r], sum[r] / D), s.zero[r]);
      stretch(s.square[r], s.step[r] * cross[r], mean, s.step[r], s.zero[r]);
    }
  }
  if (quad == 0)
#pragma unroll
    for (int r = 0; r < R; ++r) write_pair(page, KEYS, warp_row + 8 * r + row, s.step[r], s.zero[r]);
}
