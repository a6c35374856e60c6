// SPDX-License-Identifier: Apache-2.0
// Where raw rows lie, and how a warp's rows are centred and rotated into MMA accumulators.
#pragma once
#include "config.cuh"
#include "store_ptx.cuh"

constexpr float HALF_MAX = 65504.f;

// Keys or values: their constants, and their part of the parameters.
template <bool KEYS> struct Side {
  static constexpr int D = KEYS ? K_DIM : V_DIM, BITS = KEYS ? K_BITS : V_BITS, TOP = (1 << BITS) - 1;
  static constexpr bool ROTATED = KEYS ? K_ROTATED : V_ROTATED, SHAPE = KEYS && SHAPED;
  static constexpr int TILES = KEYS ? K_TILES : V_TILES, ROWS = 16 * TILES;  // a warp's rows of a page
  static constexpr int WARPS = PAGE / ROWS, THREADS = 32 * WARPS;            // of a page
  static DEVICE const u8* input(const Params& p) { return KEYS ? p.k : p.v; }
  static DEVICE u8* ring(const Params& p) { return KEYS ? p.ring_k : p.ring_v; }
  static DEVICE u8* sink(const Params& p) { return KEYS ? p.sink_k : p.sink_v; }
  static DEVICE const u8* factor(const Params& p) { return KEYS ? p.k_factor : p.v_factor; }
  static DEVICE const float* rotation(const Params& p) { return KEYS ? p.k_rotation : p.v_rotation; }
  static DEVICE const float* centre(const Params& p, int head) { return (KEYS ? p.k_centre : p.v_centre) + head * D; }
  static DEVICE const float* shift(const Params& p, int head) { return (KEYS ? p.k_shift : p.v_shift) + head * D; }
  static DEVICE float unscale(const Params& p, int head) { return (KEYS ? p.k_unscale : p.v_unscale)[head]; }
  static DEVICE float least_norm(const Params& p, int head) { return (KEYS ? p.k_least_norm : p.v_least_norm)[head]; }
  static DEVICE const u8* input_row(const Params& p, int b, int head, int j) {
    return KEYS ? p.k + 2 * (b * p.k_batch + head * p.k_head + j * p.k_token)
                : p.v + 2 * (b * p.v_batch + head * p.v_head + j * p.v_token);
  }
  static DEVICE u64 ring_row(const Params& p, int slot, int head, int position) {
    return (((u64)slot * p.kv_heads + head) * p.ring_rows + position % p.ring_rows) * (2 * D);
  }
  static DEVICE u64 sink_row(const Params& p, int slot, int head, int position) {
    return (((u64)slot * p.kv_heads + head) * p.sink_rows + position) * (2 * D);
  }
};
DEVICE int slot_of(const Params& p, int b) { return p.slots ? p.slots[b] : b; }

// A page to be written: position `first` and on of request b; tokens before `start` are in the ring.
struct Page { int request, head, slot, first, start; };
template <bool KEYS> DEVICE const u8* raw_row(const Params& p, const Page& page, int token) {
  using S = Side<KEYS>;
  const int position = page.first + token, j = position - page.start;
  return j >= 0 ? S::input_row(p, page.request, page.head, j)
                : S::ring(p) + S::ring_row(p, page.slot, page.head, position);
}
// This call's rows of one request and head into sink and ring.
template <bool KEYS> DEVICE void keep_rows(const Params& p, int b, int head, int start, int count, int from, int step) {
  using S = Side<KEYS>;
  constexpr int chunks = S::D / 8;
  const int sinks = min(p.n, p.sink_rows), total = (sinks + min(p.n, p.ring_rows)) * chunks, slot = slot_of(p, b);
  for (int i = from; i < total; i += step) {
    const int r = i / chunks, at = i % chunks * 16, j = r < sinks ? r : count - 1 - (r - sinks);
    const int position = start + j;
    if (j < 0 || j >= count || (r < sinks && position >= p.sink_rows)) continue;
    u8* to = r < sinks ? S::sink(p) + S::sink_row(p, slot, head, position) : S::ring(p) + S::ring_row(p, slot, head, position);
    *(Word4*)(to + at) = *(const Word4*)(S::input_row(p, b, head, j) + at);
  }
}

#if ROWS_BF16
DEVICE float raw_low(u32 x) { return bf16_low(x); }
DEVICE float raw_high(u32 x) { return bf16_high(x); }
DEVICE u32 raw_as_half(u32 x) { return pack_half(bf16_low(x), bf16_high(x)); }
#else
DEVICE float raw_low(u32 x) { return half_low(x); }
DEVICE float raw_high(u32 x) { return half_high(x); }
DEVICE u32 raw_as_half(u32 x) { return x; }
#endif

DEVICE float clamped(float x) { return fminf(fmaxf(x, -HALF_MAX), HALF_MAX); }
DEVICE float sane(float x) { return x == x ? clamped(x) : 0.f; }
template <int N> DEVICE void quad_sums(float (&s)[N]) {
#pragma unroll
  for (int i = 1; i <= 2; ++i)
#pragma unroll
    for (int r = 0; r < N; ++r) s[r] += __shfl_xor_sync(FULL, s[r], i);
}

// Rows of a warp as accumulators: row 16*mt + 8*h + lane/4, column 8*n + 2*(lane%4) + c is x[mt][n][2*h + c].
template <int D, int TILES> struct Tile {
  float x[TILES][D / 8][4];
  // f(row 2*mt + h, column 8*n + c of this lane, value)
  template <class F> DEVICE void each(F f) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int r = 0; r < 2 * TILES; ++r) f(r, 8 * n + c, x[r / 2][n][2 * (r % 2) + c]);
  }
};
template <bool KEYS> using SideTile = Tile<Side<KEYS>::D, Side<KEYS>::TILES>;

// Of each 16-dimension step of a product a lane has four dimensions; of two steps eight in a row, of a last odd one four.
template <int D> DEVICE int first_dim(int ks, int quad) {
  return ks < D / 32 * 2 ? 32 * (ks / 2) + 8 * quad + 4 * (ks % 2) : 16 * ks + 4 * quad;
}

// x' = x R - centre R, R in two fp16 numbers. Raw rows go to the tensor cores as they are: bf16 numbers from 2^-17 to
// 65504 are exact in fp16. What this does not suit (see least_norm) is done again by careful_rows.
template <bool KEYS> DEVICE void quick_rows(const Params& p, const Page& page, int warp_row, SideTile<KEYS>& tile) {
  using S = Side<KEYS>;
  constexpr int D = S::D, T = S::TILES, R = 2 * T, CHUNKS = D / 32;
  const int lane = lane_of(), row = lane / 4, quad = lane % 4;
  const u8* from[R];
#pragma unroll
  for (int r = 0; r < R; ++r) from[r] = raw_row<KEYS>(p, page, warp_row + 8 * r + row) + 16 * quad;
  Word4 raw[R];
  if (CHUNKS)
#pragma unroll
    for (int r = 0; r < R; ++r) raw[r] = load_once(from[r]);
  tile.each([](int, int, float& x) { x = 0.f; });
  const u8* factor = S::factor(p) + (u64)page.head * (D * D * 4) + lane * 16;
  auto multiply = [&](const u32 (&a)[T][4]) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const Word4 b = load_table(factor + n * 512);
#pragma unroll
      for (int mt = 0; mt < T; ++mt) mma_half(tile.x[mt][n], a[mt], b.z, b.w);
#pragma unroll
      for (int mt = 0; mt < T; ++mt) mma_half(tile.x[mt][n], a[mt], b.x, b.y);
    }
    factor += D / 8 * 512;
  };
#pragma unroll 1
  for (int ch = 0; ch < CHUNKS; ++ch) {
    u32 even[T][4], odd[T][4];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      even[r / 2][r % 2] = raw_as_half(raw[r].x), even[r / 2][2 + r % 2] = raw_as_half(raw[r].y);
      odd[r / 2][r % 2] = raw_as_half(raw[r].z), odd[r / 2][2 + r % 2] = raw_as_half(raw[r].w);
    }
    if (ch + 1 < CHUNKS)
#pragma unroll
      for (int r = 0; r < R; ++r) raw[r] = load_once(from[r] + 64 * (ch + 1));
    multiply(even), multiply(odd);
  }
  if (D % 32) {
    u32 a[T][4];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Word2 w = *(const Word2*)(from[r] + 64 * CHUNKS - 8 * quad);
      a[r / 2][r % 2] = raw_as_half(w.x), a[r / 2][2 + r % 2] = raw_as_half(w.y);
    }
    multiply(a);
  }
  const float* shift = S::shift(p, page.head);
  const float unscale = S::unscale(p, page.head);
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    const float2 away = *(const float2*)(shift + 8 * n + 2 * quad);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float* x = &tile.x[r / 2][n][2 * (r % 2)];
      x[0] = fmaf(x[0], unscale, -away.x), x[1] = fmaf(x[1], unscale, -away.y);
    }
  }
}

// x' = (x - centre) R for any rows. Rows are brought to a power of two, as R was, both cut in two fp16 numbers:
// hi*hi + hi*lo + lo*hi is as exact as fp32. scratch: for one row. The rare path: small rather than fast.
template <bool KEYS> DEVICE void careful_rows(const Params& p, const Page& page, int warp_row, float* scratch, SideTile<KEYS>& tile) {
  using S = Side<KEYS>;
  constexpr int D = S::D, T = S::TILES, R = 2 * T;
  const int lane = lane_of(), row = lane / 4, quad = lane % 4;
  const float* centre = S::centre(p, page.head);
  auto take = [&](int ks, int r, float (&v)[4]) {
    const int at = first_dim<D>(ks, quad);
    const Word2 w = *(const Word2*)(raw_row<KEYS>(p, page, warp_row + 8 * r + row) + 2 * at);
    const float4 c = *(const float4*)(centre + at);
    v[0] = raw_low(w.x) - c.x, v[1] = raw_high(w.x) - c.y, v[2] = raw_low(w.y) - c.z, v[3] = raw_high(w.y) - c.w;
  };
  float norm[R], scale[R], unscale[R];
  bool broken[R], any_broken = false, large = false;
#pragma unroll
  for (int r = 0; r < R; ++r) norm[r] = 0.f;
#pragma unroll 1
  for (int ks = 0; ks < D / 16; ++ks)
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float v[4];
      take(ks, r, v);
#pragma unroll
      for (int i = 0; i < 4; ++i) norm[r] = fmaf(v[i], v[i], norm[r]);
    }
  quad_sums(norm);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    broken[r] = !(norm[r] < 1e37f), any_broken |= broken[r], large |= norm[r] > 1e9f;
    int half = 0;  // |row| < 2^half
    if (norm[r] > 1e-30f) half = ((int)((__float_as_uint(norm[r]) >> 23) & 255) - 127 + 2) >> 1;
    half = min(half, 64);
    scale[r] = __uint_as_float((u32)(127 + 14 - half) << 23);
    unscale[r] = __uint_as_float((u32)(127 - 14 + half) << 23) * S::unscale(p, page.head);
  }
  tile.each([](int, int, float& x) { x = 0.f; });
  const u8* factor = S::factor(p) + (u64)page.head * (D * D * 4) + lane * 16;
#pragma unroll 1
  for (int ks = 0; ks < D / 16; ++ks, factor += D / 8 * 512) {
    u32 hi[T][4], lo[T][4];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float v[4];
      take(ks, r, v);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float v0 = v[2 * i] * scale[r], v1 = v[2 * i + 1] * scale[r];
        const u32 h = pack_half(v0, v1);
        hi[r / 2][2 * i + r % 2] = h, lo[r / 2][2 * i + r % 2] = pack_half(v0 - half_low(h), v1 - half_high(h));
      }
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const Word4 b = load_table(factor + n * 512);
#pragma unroll
      for (int mt = 0; mt < T; ++mt) mma_half(tile.x[mt][n], hi[mt], b.z, b.w);
#pragma unroll
      for (int mt = 0; mt < T; ++mt) mma_half(tile.x[mt][n], lo[mt], b.x, b.y);
#pragma unroll
      for (int mt = 0; mt < T; ++mt) mma_half(tile.x[mt][n], hi[mt], b.x, b.y);
    }
  }
  tile.each([&](int r, int, float& x) { x *= unscale[r]; });
  if (__any_sync(FULL, large)) tile.each([](int, int, float& x) { x = clamped(x); });
  if (!__any_sync(FULL, any_broken)) return;
  // Rows with infinities (or close to them): plain sums, so that they end as they would in fp32.
#pragma unroll
  for (int r = 0; r < R; ++r) {
    for (u32 left = __ballot_sync(FULL, broken[r]); left;) {
      const int its = (__ffs(left) - 1) / 4;
      left &= ~(15u << 4 * its);
      const u8* from = raw_row<KEYS>(p, page, warp_row + 8 * r + its);
      const float* turn = S::rotation(p) + (u64)page.head * D * D;
#pragma unroll 1
      for (int column = lane; column < D; column += 32) {
        float sum = 0.f;
#pragma unroll 1
        for (int i = 0; i < D; i += 2) {
          const u32 w = *(const u32*)(from + 2 * i);
          sum += (raw_low(w) - centre[i]) * turn[i * D + column];
          sum += (raw_high(w) - centre[i + 1]) * turn[(i + 1) * D + column];
        }
        scratch[column] = sane(sum);
      }
      __syncwarp();
      if (row == its)
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
          tile.x[r / 2][n][2 * (r % 2)] = scratch[8 * n + 2 * quad];
          tile.x[r / 2][n][2 * (r % 2) + 1] = scratch[8 * n + 2 * quad + 1];
        }
      __syncwarp();
    }
  }
}
// x' = x - centre.
template <bool KEYS> DEVICE void plain_rows(const Params& p, const Page& page, int warp_row, SideTile<KEYS>& tile) {
  using S = Side<KEYS>;
  const int lane = lane_of(), row = lane / 4, quad = lane % 4;
  const float* centre = S::centre(p, page.head);
#pragma unroll
  for (int r = 0; r < 2 * S::TILES; ++r) {
    const u8* from = raw_row<KEYS>(p, page, warp_row + 8 * r + row);
#pragma unroll
    for (int n = 0; n < S::D / 8; ++n) {
      const u32 w = *(const u32*)(from + 16 * n + 4 * quad);
      const float2 c = *(const float2*)(centre + 8 * n + 2 * quad);
      tile.x[r / 2][n][2 * (r % 2)] = sane(raw_low(w) - c.x), tile.x[r / 2][n][2 * (r % 2) + 1] = sane(raw_high(w) - c.y);
    }
  }
}
