// SPDX-License-Identifier: Apache-2.0
// Where raw rows lie, and how a warp's rows are centred and rotated into MMA accumulators.
#pragma once
#include "config.cuh"
#include "store_ptx.cuh"

constexpr int ROWS = 16 * TILES;           // a warp's rows of a page
constexpr int GROUP_WARPS = PAGE / ROWS;   // warps a page
constexpr int GROUP_THREADS = 32 * GROUP_WARPS;
constexpr float HALF_MAX = 65504.f;

// Keys or values: their constants, and their part of the parameters.
template <bool KEYS> struct Side {
  static constexpr int D = KEYS ? K_DIM : V_DIM, BITS = KEYS ? K_BITS : V_BITS, TOP = (1 << BITS) - 1;
  static constexpr bool ROTATED = KEYS ? K_ROTATED : V_ROTATED, SHAPE = KEYS && SHAPED;
  static DEVICE const u8* input(const Params& p) { return KEYS ? p.k : p.v; }
  static DEVICE u8* ring(const Params& p) { return KEYS ? p.ring_k : p.ring_v; }
  static DEVICE u8* sink(const Params& p) { return KEYS ? p.sink_k : p.sink_v; }
  static DEVICE const u8* factor(const Params& p) { return KEYS ? p.k_factor : p.v_factor; }
  static DEVICE const float* rotation(const Params& p) { return KEYS ? p.k_rotation : p.v_rotation; }
  static DEVICE const float* centre(const Params& p, int head) { return (KEYS ? p.k_centre : p.v_centre) + head * D; }
  static DEVICE const float* shift(const Params& p, int head) { return (KEYS ? p.k_shift : p.v_shift) + head * D; }
  static DEVICE float unscale(const Params& p, int head) { return (KEYS ? p.k_unscale : p.v_unscale)[head]; }
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
#else
DEVICE float raw_low(u32 x) { return half_low(x); }
DEVICE float raw_high(u32 x) { return half_high(x); }
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
template <int D> struct Tile {
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

// x' = (x - centre) R. Raw rows are brought to a power of two and R to another, both cut in two fp16 numbers: hi*hi +
// hi*lo + lo*hi is as exact as fp32. Where centring does not shorten a tile's rows by half, their products are taken
// before centring: then lo of a raw row is zero, and two of the three products do.
// kept: shared memory for the warp's raw rows (each lane reads what itself has written), scratch: for one row.
template <bool KEYS> DEVICE void rotated_rows(const Params& p, const Page& page, int warp_row, u8* kept, float* scratch, Tile<Side<KEYS>::D>& tile) {
  using S = Side<KEYS>;
  constexpr int D = S::D, R = 2 * TILES, FULL_CHUNKS = D / 32;
  const int lane = lane_of(), row = lane / 4, quad = lane % 4;
  const float* centre = S::centre(p, page.head);
  // Of each 16-dimension step a lane has four dimensions; of two steps eight in a row, of a last odd one four.
  auto first_dim = [&](int ks) { return ks / 2 < FULL_CHUNKS ? 32 * (ks / 2) + 8 * quad + 4 * (ks % 2) : 16 * ks + 4 * quad; };
  auto kept_at = [&](int ks, int r) { return (Word2*)(kept + ((ks * R + r) * 32 + lane) * 8); };
  float own[R], shifted[R];
#pragma unroll
  for (int r = 0; r < R; ++r) own[r] = shifted[r] = 0.f;
  auto take = [&](int ks, int r, Word2 w) {
    const float4 c = *(const float4*)(centre + first_dim(ks));
    const float v[4] = {raw_low(w.x), raw_high(w.x), raw_low(w.y), raw_high(w.y)}, cs[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y = v[i] - cs[i];
      own[r] = fmaf(v[i], v[i], own[r]), shifted[r] = fmaf(y, y, shifted[r]);
    }
    *kept_at(ks, r) = w;
  };
  const u8* from[R];
#pragma unroll
  for (int r = 0; r < R; ++r) from[r] = raw_row<KEYS>(p, page, warp_row + 8 * r + row);
#pragma unroll
  for (int ch = 0; ch < FULL_CHUNKS; ++ch)
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Word4 v = *(const Word4*)(from[r] + 64 * ch + 16 * quad);
      take(2 * ch, r, {v.x, v.y}), take(2 * ch + 1, r, {v.z, v.w});
    }
  if (D % 32)
#pragma unroll
    for (int r = 0; r < R; ++r) take(D / 16 - 1, r, *(const Word2*)(from[r] + 64 * FULL_CHUNKS + 8 * quad));
  quad_sums(own), quad_sums(shifted);
  float scale[R], unscale[R];
  bool first[TILES], broken[R], any_first = false, any_broken = false, large = false;
#pragma unroll
  for (int mt = 0; mt < TILES; ++mt) {
    bool shorter = false;
#pragma unroll
    for (int r = 2 * mt; r < 2 * mt + 2; ++r) shorter |= !(own[r] <= 4.f * shifted[r]);
    first[mt] = __any_sync(FULL, shorter), any_first |= first[mt];
#pragma unroll
    for (int r = 2 * mt; r < 2 * mt + 2; ++r) {
      const float norm = first[mt] ? shifted[r] : own[r];
      broken[r] = !(shifted[r] < 1e37f && own[r] < 1e37f), any_broken |= broken[r], large |= shifted[r] > 1e9f;
      int half = 0;  // |row| < 2^half
      if (norm > 1e-30f) half = ((int)((__float_as_uint(norm) >> 23) & 255) - 127 + 2) >> 1;
      half = min(half, 64);
      scale[r] = __uint_as_float((u32)(127 + 14 - half) << 23);
      unscale[r] = __uint_as_float((u32)(127 - 14 + half) << 23) * S::unscale(p, page.head);
    }
  }
#pragma unroll
  for (int mt = 0; mt < TILES; ++mt)
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int k = 0; k < 4; ++k) tile.x[mt][n][k] = 0.f;
  const u8* factor = S::factor(p) + (u64)page.head * (D * D * 4) + lane * 16;
#pragma unroll 1
  for (int ks = 0; ks < D / 16; ++ks, factor += D / 8 * 512) {
    const float4 c = *(const float4*)(centre + first_dim(ks));
    u32 hi[TILES][4], lo[TILES][4];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Word2 w = *kept_at(ks, r);
      const bool f = first[r / 2];
      const float v0 = (raw_low(w.x) - (f ? c.x : 0.f)) * scale[r], v1 = (raw_high(w.x) - (f ? c.y : 0.f)) * scale[r];
      const float v2 = (raw_low(w.y) - (f ? c.z : 0.f)) * scale[r], v3 = (raw_high(w.y) - (f ? c.w : 0.f)) * scale[r];
      const u32 h0 = pack_half(v0, v1), h1 = pack_half(v2, v3);
      hi[r / 2][r % 2] = h0, hi[r / 2][2 + r % 2] = h1;
      lo[r / 2][r % 2] = f ? pack_half(v0 - half_low(h0), v1 - half_high(h0)) : 0u;
      lo[r / 2][2 + r % 2] = f ? pack_half(v2 - half_low(h1), v3 - half_high(h1)) : 0u;
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const Word4 b = load_table(factor + n * 512);
#pragma unroll
      for (int mt = 0; mt < TILES; ++mt) mma_half(tile.x[mt][n], hi[mt], b.z, b.w);
#pragma unroll
      for (int mt = 0; mt < TILES; ++mt) mma_half(tile.x[mt][n], hi[mt], b.x, b.y);
    }
    if (any_first) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        const Word2 b = load_table2(factor + n * 512);
#pragma unroll
        for (int mt = 0; mt < TILES; ++mt) mma_half(tile.x[mt][n], lo[mt], b.x, b.y);
      }
    }
  }
  const float* shift = S::shift(p, page.head);
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    const float2 away = *(const float2*)(shift + 8 * n + 2 * quad);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float* x = &tile.x[r / 2][n][2 * (r % 2)];
      x[0] = x[0] * unscale[r] - (first[r / 2] ? 0.f : away.x), x[1] = x[1] * unscale[r] - (first[r / 2] ? 0.f : away.y);
    }
  }
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
template <bool KEYS> DEVICE void plain_rows(const Params& p, const Page& page, int warp_row, Tile<Side<KEYS>::D>& tile) {
  using S = Side<KEYS>;
  const int lane = lane_of(), row = lane / 4, quad = lane % 4;
  const float* centre = S::centre(p, page.head);
#pragma unroll
  for (int r = 0; r < 2 * TILES; ++r) {
    const u8* from = raw_row<KEYS>(p, page, warp_row + 8 * r + row);
#pragma unroll
    for (int n = 0; n < S::D / 8; ++n) {
      const u32 w = *(const u32*)(from + 16 * n + 4 * quad);
      const float2 c = *(const float2*)(centre + 8 * n + 2 * quad);
      tile.x[r / 2][n][2 * (r % 2)] = sane(raw_low(w) - c.x), tile.x[r / 2][n][2 * (r % 2) + 1] = sane(raw_high(w) - c.y);
    }
  }
}
