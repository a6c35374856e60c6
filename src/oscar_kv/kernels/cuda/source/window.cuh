// SPDX-License-Identifier: Apache-2.0
// Raw windows: sink and ring rows of one request and KV head, some tokens a warp.
#pragma once
#include "state.cuh"

// Window item: item_tokens raw tokens of one request and KV head, for one warp. Writes its own partial.
#if WINDOW_BF16
#define MMA_WINDOW mma_bf16
#define PACK_WINDOW pack_bf16
#else
#define MMA_WINDOW mma_half
#define PACK_WINDOW pack_half
#endif
struct Rows {
  const u8 *k, *v;
  DEVICE Rows(const Params& p, int slot, int head, int index, int sink, int recent_from) {
    const bool in_sink = index < sink;
    const int row = in_sink ? index : (recent_from + index - sink) % p.ring_rows;
    const u64 at = ((u64)slot * p.kv_heads + head) * (in_sink ? p.sink_rows : p.ring_rows) + row;
    k = (in_sink ? p.sink_k : p.ring_k) + at * (K_DIM * 2);
    v = (in_sink ? p.sink_v : p.ring_v) + at * (V_DIM * 2);
  }
};
DEVICE void prefetch_rows(const Params& p, int slot, int head, int from, int to, int sink, int recent_from) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = from + lane / 2; i < to; i += 16) {
    const Rows r(p, slot, head, i, sink, recent_from);
#pragma unroll
    for (int k = 0; k < K_DIM * 2; k += 256)
      if (k + lane % 2 * 128 < K_DIM * 2) prefetch(r.k + k + lane % 2 * 128);
#pragma unroll
    for (int k = 0; k < V_DIM * 2; k += 256)
      if (k + lane % 2 * 128 < V_DIM * 2) prefetch(r.v + k + lane % 2 * 128);
  }
}
// Ask for the first rows of an item, so that they are near when their turn comes.
constexpr int PREFETCH = 32;  // tokens: all of a long item would push itself out of L2
DEVICE void prefetch_window(const Params& p, int b, int hv, int from) {
  const int head = hv / BLOCKS, slot = slot_of(p, b);
  const int sink = p.hist_start[b], recent_from = max(p.hist_end[b], sink);
  const int to = min(from + min(p.item_tokens, PREFETCH), sink + max(p.seq_len[b] - recent_from, 0));
  prefetch_rows(p, slot, head, from, to, sink, recent_from);
}
DEVICE void window(const Params& p, int b, int hv, int from, u64 to_slot) {
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int head = hv / BLOCKS, head0 = (hv % BLOCKS) * HEADS, slot = slot_of(p, b);
  const int sink = p.hist_start[b], recent_from = max(p.hist_end[b], sink);
  const int count = sink + max(p.seq_len[b] - recent_from, 0);
  if (from >= count) {
    if (lane < HEADS) p.partial_lse[to_slot * HEADS + lane] = -infinity();
    return;
  }
  const int to = min(from + p.item_tokens, count);
  State s;
  s.reset();
  s.step_scale = 1.f;
  u32 query[TILES][K_DIM / 8];
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int h = head0 + 8 * n + row;
    const bool real = 8 * n + row < HEADS && h < GROUP;
    const u8* q = p.q + ((u64)b * p.kv_heads * GROUP + head * GROUP + (real ? h : 0)) * (K_DIM * 2);
#pragma unroll
    for (int ks = 0; ks < K_DIM / 16; ++ks) {
      const Word2 v = *(const Word2*)(q + (16 * ks + 4 * quad) * 2);
      query[n][2 * ks] = real ? v.x : 0, query[n][2 * ks + 1] = real ? v.y : 0;
    }
  }
#pragma unroll 1
  for (int first = from; first < to; first += 16) {
    float score[TILES][2][2];
    u32 values[V_DIM / 16][4];
    auto load_values = [&]() {
      const u8* v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        v[i] = Rows(p, slot, head, min(first + 2 * quad + (i & 1) + 8 * (i >> 1), to - 1), sink, recent_from).v;
#pragma unroll
      for (int j = 0; j < V_DIM / 16; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) values[j][i] = *(const u32*)(v[i] + (16 * j + 2 * row) * 2);
    };
    // Where registers allow, one wait for the keys and the values of a tile.
    constexpr bool AT_ONCE = K_DIM + V_DIM <= 256 && TILES == 1 && WARPS * MIN_BLOCKS <= 12;
    {
      const Rows r0(p, slot, head, min(first + row, to - 1), sink, recent_from);
      const Rows r1(p, slot, head, min(first + 8 + row, to - 1), sink, recent_from);
      float c[TILES][4];
      Word2 keys[K_DIM / 16][2];
#pragma unroll
      for (int ks = 0; ks < K_DIM / 16; ++ks)
        keys[ks][0] = *(const Word2*)(r0.k + (16 * ks + 4 * quad) * 2), keys[ks][1] = *(const Word2*)(r1.k + (16 * ks + 4 * quad) * 2);
      if (AT_ONCE) load_values();
#pragma unroll
      for (int n = 0; n < TILES; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
#pragma unroll
      for (int ks = 0; ks < K_DIM / 16; ++ks) {
        const u32 a[4] = {keys[ks][0].x, keys[ks][1].x, keys[ks][0].y, keys[ks][1].y};
#pragma unroll
        for (int n = 0; n < TILES; ++n) MMA_WINDOW(c[n], a, query[n][2 * ks], query[n][2 * ks + 1]);
      }
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int k = 0; k < 2; ++k)
            score[n][r][k] = first + 8 * r + row < to ? capped(p, c[n][2 * r + k] * p.query_scale) : -1e30f;
    }
    s.cover<2>(score, 0.f);
    u32 pr[TILES][2], low[TILES][2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const float e0 = ex2(score[n][r][0] - s.m[n][0]), e1 = ex2(score[n][r][1] - s.m[n][1]);
        s.l[n][0] += e0, s.l[n][1] += e1;
        const u32 x = PACK_WINDOW(e0, e1);
        pr[n][r] = transpose8(x);
#if WINDOW_BF16  // 8 bits of mantissa are few: the remainder goes in as a second product
        low[n][r] = transpose8(pack_bf16(e0 - bf16_low(x), e1 - bf16_high(x)));
#endif
      }
    if (!AT_ONCE) load_values();
#pragma unroll
    for (int j = 0; j < V_DIM / 16; ++j) {
      const u32* x = values[j];
      const u32 a[4] = {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[0], x[1], 0x7632),
                        __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[2], x[3], 0x7632)};
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        MMA_WINDOW(s.o[n][j], a, pr[n][0], pr[n][1]);
#if WINDOW_BF16
        MMA_WINDOW(s.o[n][j], a, low[n][0], low[n][1]);
#endif
      }
    }
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 4; i < 32; i *= 2) s.l[n][k] += __shfl_xor_sync(FULL, s.l[n][k], i);
      const int column = 8 * n + 2 * quad + k;
      if (column >= HEADS) continue;
      const float norm = 1.f / s.l[n][k];
      float* out = p.partial + (to_slot * HEADS + column) * V_DIM + 2 * row;
#pragma unroll
      for (int j = 0; j < V_DIM / 16; ++j)  // windows pair adjacent dimensions
        *(float2*)(out + 16 * j) = {s.o[n][j][k] * norm, s.o[n][j][k + 2] * norm};
      if (row == 0) p.partial_lse[to_slot * HEADS + column] = s.m[n][k] + lg2(s.l[n][k]);
    }
}
