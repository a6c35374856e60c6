// SPDX-License-Identifier: Apache-2.0
// Decode attention over quantised pages and raw windows: partial results, merged by finish.cu.
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

// Merge the warps' states through shared memory and write one partial: output / mass and log2 of the mass.
// Rows of 8 dimensions carry 2^target(group) of the layout; centre: log2(e) * scale * q.centre, constant over the history.
// continued: the slot already holds this block's earlier pages of the same head; tensor cores truncate as they add, so
// no warp adds up more than FLUSH_PAGES pages before it starts from zero again.
constexpr int MERGE_STRIDE = V_DIM + 4;  // spreads the columns of a warp over the banks
DEVICE void merge_warps(const Params& p, State& s, u8* shared, const float* centre, u64 slot, bool continued) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  float* out = (float*)shared;                           // [WARPS][HEADS][MERGE_STRIDE]
  float* mass = out + WARPS * HEADS * MERGE_STRIDE;      // [WARPS][HEADS][2]: maximum, sum
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int i = 4; i < 32; i *= 2) {
        s.l[n][k] += __shfl_xor_sync(FULL, s.l[n][k], i);
        s.z[n][k] += __shfl_xor_sync(FULL, s.z[n][k], i);
      }
  __syncthreads();  // every warp has left the ring
  const float back = 16777216.f / s.step_scale;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int column = 8 * n + 2 * quad + k;
      if (column >= HEADS) continue;
      if (row == 0) mass[(warp * HEADS + column) * 2] = s.m[n][k], mass[(warp * HEADS + column) * 2 + 1] = s.l[n][k];
      float* to = out + (warp * HEADS + column) * MERGE_STRIDE;
#pragma unroll
      for (int j = 0; j < V_DIM / 16; ++j) {
        to[16 * j + row] = s.o[n][j][k] * (back / (1 << target_bit<V_BITS>(j))) + s.z[n][k];
        to[16 * j + 8 + row] = s.o[n][j][k + 2] * (back / (1 << target_bit<V_BITS>(V_DIM / 16 + j))) + s.z[n][k];
      }
    }
  __syncthreads();
  auto maximum = [&](int head) {
    float top = continued ? p.partial_lse[slot * HEADS + head] - (SOFTCAP ? 0.f : centre[head]) : -1e30f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, mass[(w * HEADS + head) * 2]);
    return top;
  };
  auto earlier = [&](int head, float top) {
    return continued ? ex2(p.partial_lse[slot * HEADS + head] - (SOFTCAP ? 0.f : centre[head]) - top) : 0.f;
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < HEADS * V_DIM; i += WARPS * 32) {
    const int head = i / V_DIM;
    const float top = maximum(head);
    float sum = earlier(head, top), value = continued ? sum * p.partial[slot * (HEADS * V_DIM) + i] : 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float f = ex2(mass[(w * HEADS + head) * 2] - top);
      sum += f * mass[(w * HEADS + head) * 2 + 1];
      value += f * out[(w * HEADS + head) * MERGE_STRIDE + i % V_DIM];
    }
    p.partial[slot * (HEADS * V_DIM) + i] = value / sum;
  }
  float log_mass = 0.f;
  if (threadIdx.x < HEADS) {
    const float top = maximum(threadIdx.x);
    float sum = earlier(threadIdx.x, top);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += ex2(mass[(w * HEADS + threadIdx.x) * 2] - top) * mass[(w * HEADS + threadIdx.x) * 2 + 1];
    log_mass = top + lg2(sum) + (SOFTCAP ? 0.f : centre[threadIdx.x]);
  }
#if BULK
  bulk_fence();  // the ring's next copies come through the other proxy
#endif
  __syncthreads();
  if (threadIdx.x < HEADS) p.partial_lse[slot * HEADS + threadIdx.x] = log_mass;
}

// The ring of one warp: pages arrive in order, STAGES - 1 ahead.
struct Ring {
  u8* base;
  u32 address, bars;
  int stage, parity;
  DEVICE void issue(const u8* page, int to, int lane) {
#if BULK
    if (lane == 0) bulk_copy(address + to * STAGE_BYTES, page, PAGE_BYTES, bars + 8 * to);
#else
    constexpr int chunks = PAGE_BYTES / 16;
#pragma unroll
    for (int i = 0; i < (chunks + 31) / 32; ++i)
      if (i * 32 + 31 < chunks || i * 32 + lane < chunks)
        copy16(address + to * STAGE_BYTES + (i * 32 + lane) * 16, page + (i * 32 + lane) * 16);
#endif
  }
  DEVICE void commit() {
#if !BULK
    copy_commit();
#endif
  }
  DEVICE void wait() {
#if BULK
    barrier_wait(bars + 8 * stage, parity);
#else
    copy_wait<STAGES - 2>();
#endif
    __syncwarp();
  }
  DEVICE void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

#if WINDOW_BF16
DEVICE float raw_low(u32 x) { return bf16_low(x); }
DEVICE float raw_high(u32 x) { return bf16_high(x); }
#else
DEVICE float raw_low(u32 x) { return half_low(x); }
DEVICE float raw_high(u32 x) { return half_high(x); }
#endif

// A block's query heads in the rotated basis, as the B operand of the MMAs.
struct Query {
  u32 words[TILES * K_DIM / 8];
  float sum[TILES][2], centre[TILES][2], step_factor;
};
constexpr int PADDED = (HEADS + 3) / 4 * 4;
constexpr int TURN = PADDED >= 8 && 32 * K_DIM <= STAGE_BYTES ? 8 : 4;  // heads turned at a time
constexpr int TURN_STRIDE = K_DIM + 8;
struct QueryRoom {  // shared memory
  float raw[K_DIM][PADDED], turned[HEADS][TURN_STRIDE], centre[COLUMNS], largest[WARPS];
  int scratch[WARPS];
};
static_assert(sizeof(QueryRoom) <= QUERY_BYTES, "spec.py reserves too little");

// Multiply by R_K: each warp takes every WARPS-th of its rows.
// free_stage: the stage of this warp's ring that no copy is under way to.
DEVICE void turn_query(const Params& p, QueryRoom& room, u8* shared, u8* free_stage, int b, int hv) {
  constexpr int THREADS = WARPS * 32, WIDE = (K_DIM + 127) / 128, ROWS = (K_DIM + WARPS - 1) / WARPS;
  constexpr int AHEAD = ROWS < 8 / WIDE ? ROWS : 8 / WIDE;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int head = hv / BLOCKS, head0 = (hv % BLOCKS) * HEADS;
  const float* turn = p.k_rotation ? p.k_rotation + (u64)head * K_DIM * K_DIM : nullptr;
  float4 ahead[AHEAD][WIDE];
  auto look = [&](int first) {
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
#pragma unroll
      for (int w = 0; w < WIDE; ++w) {
        const int i = warp + (first + k) * WARPS, column = 128 * w + 4 * lane;
        if (i < K_DIM && column < K_DIM) ahead[k][w] = *(const float4*)(turn + i * K_DIM + column);
      }
  };
  if (turn) look(0);
#pragma unroll 1
  for (int i = tid; i < PADDED * (K_DIM / 2); i += THREADS) {
    const int g = i / (K_DIM / 2), d = i % (K_DIM / 2) * 2;
    u32 pair = 0;
    if (g < HEADS && head0 + g < GROUP)
      pair = *(const u32*)(p.q + (((u64)b * p.kv_heads + head) * GROUP + head0 + g) * (K_DIM * 2) + d * 2);
    room.raw[d][g] = raw_low(pair) * p.query_scale, room.raw[d + 1][g] = raw_high(pair) * p.query_scale;
  }
  if (lane == 0) room.scratch[warp] = (int)(free_stage - shared);
  __syncthreads();
#pragma unroll 1
  for (int g = warp; g < HEADS; g += WARPS) {
    float sum = 0.f;
#pragma unroll 1
    for (int i = lane; i < K_DIM; i += 32) sum += room.raw[i][g] * p.k_centre[head * K_DIM + i];
#pragma unroll
    for (int i = 1; i < 32; i *= 2) sum += __shfl_xor_sync(FULL, sum, i);
    if (lane == 0) room.centre[g] = sum;
  }
  float top = 0.f;
  for (int g0 = 0; g0 < PADDED; g0 += TURN) {
    if (turn) {
      float sum[TURN][WIDE][4];
#pragma unroll
      for (int g = 0; g < TURN; ++g)
#pragma unroll
        for (int w = 0; w < WIDE; ++w) sum[g][w][0] = sum[g][w][1] = sum[g][w][2] = sum[g][w][3] = 0.f;
#pragma unroll 1
      for (int first = 0; first < ROWS; first += AHEAD) {
        if (first || g0) look(first);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
          const int i = warp + (first + k) * WARPS;
          if (first + k >= ROWS || i >= K_DIM) continue;
#pragma unroll
          for (int g4 = 0; g4 < TURN; g4 += 4) {
            const float4 x = *(const float4*)&room.raw[i][g0 + g4];
            const float xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int g = 0; g < 4; ++g)
#pragma unroll
              for (int w = 0; w < WIDE; ++w) {
                sum[g4 + g][w][0] += xs[g] * ahead[k][w].x, sum[g4 + g][w][1] += xs[g] * ahead[k][w].y;
                sum[g4 + g][w][2] += xs[g] * ahead[k][w].z, sum[g4 + g][w][3] += xs[g] * ahead[k][w].w;
              }
          }
        }
      }
#pragma unroll
      for (int g = 0; g < TURN; ++g)
#pragma unroll
        for (int w = 0; w < WIDE; ++w)
          if (128 * w + 4 * lane < K_DIM)
            *(float4*)((float*)free_stage + g * K_DIM + 128 * w + 4 * lane) = {sum[g][w][0], sum[g][w][1], sum[g][w][2], sum[g][w][3]};
      __syncthreads();
    }
#pragma unroll 1
    for (int i = tid; i < TURN * K_DIM; i += THREADS) {
      const int g = g0 + i / K_DIM, d = i % K_DIM;
      float x = 0.f;
      if (turn) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) x += ((const float*)(shared + room.scratch[w]))[i];
      } else {
        x = room.raw[d][g];
      }
      if (g < HEADS) room.turned[g][d] = x;
      if (fabsf(x) < infinity()) top = fmaxf(top, fabsf(x));  // a head with infinities spoils itself alone
    }
    if (turn && g0 + TURN < PADDED) __syncthreads();
  }
#pragma unroll
  for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, i));
  if (lane == 0) room.largest[warp] = top;
#if BULK
  bulk_fence();  // the free stage was written by ordinary stores and is next written by a copy
#endif
  __syncthreads();
}
// The turned heads as fp16 fragments, at a power of two.
DEVICE void load_query(Query& q, const QueryRoom& room) {
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  float top = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) top = fmaxf(top, room.largest[w]);
  // Power of two that brings the largest entry into [2^13, 2^14): far from overflow, and 2^-27 of it is still normal.
  int exponent = (int)((__float_as_uint(top) >> 23) & 255) - 127;
  exponent = max(-80, min(exponent, 100));
  const float up = __uint_as_float((u32)(127 + 13 - exponent) << 23), down = __uint_as_float((u32)(127 - 13 + exponent) << 23);
  q.step_factor = down * 16777216.f;
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int column = 8 * n + row;
    const bool real = column < HEADS;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < K_DIM / 8; ++j) {
      const float f = up / (1 << target_bit<K_BITS>(j));
      const float2 x = *(const float2*)&room.turned[real ? column : 0][8 * j + 2 * quad];
      const u32 pair = real ? pack_half(x.x * f, x.y * f) : 0;
      q.words[n * (K_DIM / 8) + j] = pair;
      sum += (half_low(pair) + half_high(pair)) * (float)(1 << target_bit<K_BITS>(j));
    }
    sum += __shfl_xor_sync(FULL, sum, 1);
    sum += __shfl_xor_sync(FULL, sum, 2);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int c = 2 * quad + k;
      q.sum[n][k] = __shfl_sync(FULL, sum, 4 * c) * down;
      q.centre[n][k] = 8 * n + c < HEADS ? room.centre[8 * n + c] : 0.f;
    }
  }
}

// The pages of one warp: block numbers come 32 at a time, one a lane, a batch ahead of their use.
struct Walk {
  const int* table;
  const u8* pool;
  u64 stride;
  int next, to, index, now, later;
  DEVICE Walk(const Params& p, int b, int head, int first, int from, int to) : to(to), index(0) {
    table = p.block_table + (u64)b * p.max_pages + first;
    pool = p.pages + (u64)head * PAGE_BYTES, stride = (u64)p.kv_heads * PAGE_BYTES;
    next = from + threadIdx.x / 32;
    now = look(0), later = look(32);
  }
  DEVICE int look(int ahead) const {
    const int page = next + (ahead + (int)(threadIdx.x % 32)) * WARPS;
    return page < to ? table[page] : 0;
  }
  DEVICE void ask(Ring& ring, int stage) {
    const int block = __shfl_sync(FULL, now, index);
    if (next < to) ring.issue(pool + block * stride, stage, threadIdx.x % 32);
    ring.commit();
    next += WARPS;
    if (++index == 32) index = 0, now = later, later = look(32);
  }
};

// Pages [from, to) of one request's history, whose first page is ``first``, for one block of one KV head's query heads.
DEVICE void history(const Params& p, Ring& ring, Walk& walk, State& s, const Query& q, int b, int first, int from, int to) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
  const int start = p.hist_start[b], end = p.hist_end[b];
  const u32* query = q.words;
  for (int page = from + warp; page < to; page += WARPS) {
    ring.wait();
    const u8* data = ring.base + ring.stage * STAGE_BYTES;
    walk.ask(ring, (ring.stage + STAGES - 1) % STAGES);
    const int lo = start - (first + page) * PAGE, hi = end - (first + page) * PAGE;
    const bool partial = lo > 0 || hi < PAGE;

    float score[TILES][8][2];
    u32 value_meta[8];  // fp16 step and zero of the values of tokens 8r + row
    float largest_step = 0.f;
    {
      Codes<K_BITS, K_DIM> codes;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        codes.load(data, lane, t);
        float c[TILES][4];
#pragma unroll
        for (int n = 0; n < TILES; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
#pragma unroll
        for (int ks = 0; ks < K_DIM / 16; ++ks) {
          u32 a[4];
          codes.keys(a, t, ks);
#pragma unroll
          for (int n = 0; n < TILES; ++n)
            mma_half(c[n], a, query[n * (K_DIM / 8) + 2 * ks], query[n * (K_DIM / 8) + 2 * ks + 1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int token = 16 * t + 8 * r + row;
          const Word2 meta = *(const Word2*)(data + METADATA_OFFSET + token * 8);
          const float step = half_low(meta.x) * q.step_factor, zero = half_high(meta.x);
          value_meta[2 * t + r] = meta.y;
#pragma unroll
          for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int k = 0; k < 2; ++k)
              score[n][2 * t + r][k] = capped(p, step * c[n][2 * r + k] + (zero * q.sum[n][k] + (SOFTCAP ? q.centre[n][k] : 0.f)));
        }
      }
    }
    if (partial) {
#pragma unroll
      for (int r = 0; r < 8; ++r)
        if (8 * r + row < lo || 8 * r + row >= hi) {
          value_meta[r] = 0;  // what lies there may be anything
#pragma unroll
          for (int n = 0; n < TILES; ++n) score[n][r][0] = score[n][r][1] = -1e30f;
        }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) largest_step = fmaxf(largest_step, half_low(value_meta[r]));
    s.cover<8>(score, largest_step);

    Codes<V_BITS, V_DIM> codes;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      codes.load(data + V_OFFSET, lane, t);
      u32 pr[TILES][2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float step = half_low(value_meta[2 * t + r]) * s.step_scale, zero = half_high(value_meta[2 * t + r]);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const float e0 = ex2(score[n][2 * t + r][0] - s.m[n][0]), e1 = ex2(score[n][2 * t + r][1] - s.m[n][1]);
          s.l[n][0] += e0, s.l[n][1] += e1;
          s.z[n][0] += e0 * zero, s.z[n][1] += e1 * zero;
          pr[n][r] = transpose8(pack_half(e0 * step, e1 * step));
        }
      }
#pragma unroll
      for (int j = 0; j < V_DIM / 16; ++j) {
        u32 a[4];
        codes.values(a, t, j);
#pragma unroll
        for (int n = 0; n < TILES; ++n) mma_half(s.o[n][j], a, pr[n][0], pr[n][1]);
      }
    }
    __syncwarp();  // the stage may be overwritten by the next step's request
    ring.advance();
  }
}

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
// Ask for the rows of an item, so that they are near when their turn comes.
DEVICE void prefetch_window(const Params& p, int b, int hv, int from) {
  const int lane = threadIdx.x % 32, head = hv / BLOCKS, slot = slot_of(p, b);
  const int sink = p.hist_start[b], recent_from = max(p.hist_end[b], sink);
  const int to = min(from + p.item_tokens, sink + max(p.seq_len[b] - recent_from, 0));
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
    {
      const Rows r0(p, slot, head, min(first + row, to - 1), sink, recent_from);
      const Rows r1(p, slot, head, min(first + 8 + row, to - 1), sink, recent_from);
      float c[TILES][4];
#pragma unroll
      for (int n = 0; n < TILES; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
#pragma unroll
      for (int ks = 0; ks < K_DIM / 16; ++ks) {
        const Word2 x = *(const Word2*)(r0.k + (16 * ks + 4 * quad) * 2), y = *(const Word2*)(r1.k + (16 * ks + 4 * quad) * 2);
        const u32 a[4] = {x.x, y.x, x.y, y.y};
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
    const u8* v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = Rows(p, slot, head, min(first + 2 * quad + (i & 1) + 8 * (i >> 1), to - 1), sink, recent_from).v;
#pragma unroll
    for (int j = 0; j < V_DIM / 16; ++j) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = *(const u32*)(v[i] + (16 * j + 2 * row) * 2);
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

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) decode(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int heads = p.kv_heads * BLOCKS;
  QueryRoom& room = *(QueryRoom*)(shared + QUERY_OFFSET);
  Ring ring;
  ring.base = shared + warp * STAGES * STAGE_BYTES;
  ring.address = shared_address(ring.base);
  ring.stage = ring.parity = 0;
#if BULK
  ring.bars = shared_address(shared + BARRIER_OFFSET) + warp * STAGES * 8;
  if (lane == 0)
    for (int i = 0; i < STAGES; ++i) barrier_init(ring.bars + 8 * i);
  bulk_fence();
  __syncwarp();
#endif
#if CHAIN_FIRST
  wait_for_predecessor();
#endif
  release_successor();
  const Schedule plan(p, count_pages(p, 0).all);
  const int c = blockIdx.x, windows = p.blocks + p.batch * heads;
  int at = (int)plan.page(p, c);  // pages are at least 1 KB: their number fits
  const int end = (int)plan.page(p, c + 1);
  // A warp takes its window items when the first pages have been asked for.
  int item = (int)plan.item(c) + warp;
  const int last_item = (int)plan.item(c + 1);
  int last_slot = -1;
  if (item < last_item) prefetch_window(p, item / p.items_a_head / heads, item / p.items_a_head % heads, item % p.items_a_head * p.item_tokens);
  do {
    const bool pages = at < end;
    Place place = {0, 0, 1};
    if (pages) place = place_of(p, at);
    const int b = place.request, rest = at - place.before * heads, hv = rest / place.pages, from = rest % place.pages;
    const int to = pages ? min(min(place.pages, from + (end - at)), from + FLUSH_PAGES * WARPS) : from, first = p.hist_start[b] / PAGE;
    if (pages) {
      Walk walk(p, b, hv / BLOCKS, first, from, to);
#pragma unroll
      for (int i = 0; i < STAGES - 1; ++i) walk.ask(ring, (ring.stage + i) % STAGES);
      turn_query(p, room, shared, ring.base + (ring.stage + STAGES - 1) % STAGES * STAGE_BYTES, b, hv);
    }
#pragma unroll 1
    for (; item < last_item; item += WARPS) {
      const int bh = item / p.items_a_head;
      window(p, bh / heads, bh % heads, item % p.items_a_head * p.item_tokens, windows + item);
    }
    if (pages) {
      // Made anew: across the windows it would cost registers.
      Walk walk(p, b, hv / BLOCKS, first, from + (STAGES - 1) * WARPS, to);
      State s;
      Query query;
      load_query(query, room);
      s.reset();
      history(p, ring, walk, s, query, b, first, from, to);
      const int slot = c + b * heads + hv;
      merge_warps(p, s, shared, room.centre, slot, slot == last_slot);
      last_slot = slot;
      at += to - from;
    }
  } while (at < end);
}
