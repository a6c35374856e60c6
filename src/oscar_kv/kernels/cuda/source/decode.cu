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
// low, high: factors of dimension groups (rows of 8 dimensions) are 2^-target(group) * factor in the history, 1 otherwise.
template <bool HISTORY> DEVICE void merge_warps(const Params& p, State& s, u8* shared, const float* query_meta, u64 slot) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  float* out = (float*)shared;                      // [WARPS][COLUMNS][V_DIM]
  float* mass = out + WARPS * COLUMNS * V_DIM;      // [WARPS][COLUMNS][2]: maximum, sum
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
  const float back = HISTORY ? 16777216.f / s.step_scale : 1.f;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int column = 8 * n + 2 * quad + k;
      if (row == 0) mass[(warp * COLUMNS + column) * 2] = s.m[n][k], mass[(warp * COLUMNS + column) * 2 + 1] = s.l[n][k];
      float* to = out + (warp * COLUMNS + column) * V_DIM;
#pragma unroll
      for (int j = 0; j < V_DIM / 16; ++j) {
        const float f0 = HISTORY ? back / (1 << target_bit<V_BITS>(j)) : 1.f;
        const float f1 = HISTORY ? back / (1 << target_bit<V_BITS>(V_DIM / 16 + j)) : 1.f;
        const float a = s.o[n][j][k] * f0 + s.z[n][k], b = s.o[n][j][k + 2] * f1 + s.z[n][k];
        if (HISTORY) to[16 * j + row] = a, to[16 * j + 8 + row] = b;
        else to[16 * j + 2 * row] = a, to[16 * j + 2 * row + 1] = b;  // windows pair adjacent dimensions
      }
    }
  __syncthreads();
  for (int i = threadIdx.x; i < HEADS * V_DIM; i += WARPS * 32) {
    const int head = i / V_DIM;
    float top = -1e30f, sum = 0.f, value = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, mass[(w * COLUMNS + head) * 2]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float f = ex2(mass[(w * COLUMNS + head) * 2] - top);
      sum += f * mass[(w * COLUMNS + head) * 2 + 1];
      value += f * out[(w * COLUMNS + head) * V_DIM + i % V_DIM];
    }
    p.partial[slot * (HEADS * V_DIM) + i] = value / sum;
    if (i % V_DIM == 0) {
      float lse = top + lg2(sum);
      if (HISTORY && !SOFTCAP) lse += query_meta[COLUMNS + head];
      p.partial_lse[slot * HEADS + head] = lse;
    }
  }
#if BULK
  bulk_fence();  // the ring's next copies come through the other proxy
#endif
  __syncthreads();
}

// The ring of one warp: pages arrive in order, STAGES - 1 ahead.
struct Ring {
  u8* base;
  u32 address, bars;
  int stage, parity;
  DEVICE void issue(const u8* page, int to, int lane) {
#if BULK
    if (lane == 0) bulk_copy(address + to * PAGE_BYTES, page, PAGE_BYTES, bars + 8 * to);
#else
    constexpr int chunks = PAGE_BYTES / 16;
#pragma unroll
    for (int i = 0; i < (chunks + 31) / 32; ++i)
      if (i * 32 + 31 < chunks || i * 32 + lane < chunks)
        copy16(address + to * PAGE_BYTES + (i * 32 + lane) * 16, page + (i * 32 + lane) * 16);
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

// Pages [from, to) of one request's history, for one block of one KV head's query heads.
DEVICE void history(const Params& p, Ring& ring, State& s, const float* query_meta, int b, int hv, int from, int to) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int head = hv / BLOCKS;
  const int start = p.hist_start[b], end = p.hist_end[b], first = start / PAGE;
  const int* table = p.block_table + (u64)b * p.max_pages + first;
  const u64 stride = (u64)p.kv_heads * PAGE_BYTES;
  const u8* pool = p.pages + (u64)head * PAGE_BYTES;

  int next = from + warp;  // the next page to ask for; its block number is read one step ahead
  int block = next < to ? table[next] : 0;
  auto ask = [&](int stage) {
    if (next < to) ring.issue(pool + block * stride, stage, lane);
    ring.commit();
    next += WARPS;
    if (next < to) block = table[next];
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) ask((ring.stage + i) % STAGES);

  u32 query[QUERY_WORDS];
  {
    const Word4* from4 = (const Word4*)(p.query + ((u64)(b * p.kv_heads * BLOCKS + hv) * 32 + lane) * QUERY_WORDS);
    if (QUERY_WORDS % 4 == 0) {
#pragma unroll
      for (int i = 0; i < QUERY_WORDS / 4; ++i) {
        const Word4 v = from4[i];
        query[4 * i] = v.x, query[4 * i + 1] = v.y, query[4 * i + 2] = v.z, query[4 * i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < QUERY_WORDS / 2; ++i) {
        const Word2 v = ((const Word2*)from4)[i];
        query[2 * i] = v.x, query[2 * i + 1] = v.y;
      }
    }
  }
  float q_sum[TILES][2], q_centre[TILES][2];
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      q_sum[n][k] = query_meta[8 * n + 2 * quad + k];
      q_centre[n][k] = SOFTCAP ? query_meta[COLUMNS + 8 * n + 2 * quad + k] : 0.f;
    }
  const float key_factor = query_meta[2 * COLUMNS];

  for (int page = from + warp; page < to; page += WARPS) {
    ring.wait();
    const u8* data = ring.base + ring.stage * PAGE_BYTES;
    ask((ring.stage + STAGES - 1) % STAGES);
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
          const float step = half_low(meta.x) * key_factor, zero = half_high(meta.x);
          value_meta[2 * t + r] = meta.y;
#pragma unroll
          for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int k = 0; k < 2; ++k)
              score[n][2 * t + r][k] = capped(p, step * c[n][2 * r + k] + (zero * q_sum[n][k] + q_centre[n][k]));
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

// Window item: item_tokens raw tokens of one request and KV head; each warp takes every WARPS-th tile of 16.
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
// False where the item is empty.
DEVICE bool window(const Params& p, State& s, int b, int hv, int from) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int head = hv / BLOCKS, head0 = (hv % BLOCKS) * HEADS, slot = slot_of(p, b);
  const int sink = p.hist_start[b], recent_from = max(p.hist_end[b], sink);
  const int count = sink + max(p.seq_len[b] - recent_from, 0);
  if (from >= count) return false;
  const int to = min(from + p.item_tokens, count);
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
  for (int first = from + 16 * warp; first < to; first += 16 * WARPS) {
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
  return true;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) decode(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int heads = p.kv_heads * BLOCKS;
  Ring ring;
  ring.base = shared + warp * STAGES * PAGE_BYTES;
  ring.address = shared_address(ring.base);
  ring.stage = ring.parity = 0;
#if BULK
  ring.bars = shared_address(shared + BARRIER_OFFSET) + warp * STAGES * 8;
  if (lane == 0)
    for (int i = 0; i < STAGES; ++i) barrier_init(ring.bars + 8 * i);
  bulk_fence();
  __syncthreads();
#endif
  State s;
  wait_for_predecessor();
  release_successor();
  const Schedule plan(p, p.first_page[p.batch]);
  const u64 c = blockIdx.x;
  u64 at = plan.page(p, c);
  const u64 end = plan.page(p, c + 1);
  while (at < end) {
    const int b = request_at(p, at);
    const int count = p.first_page[b + 1] - p.first_page[b];
    const u64 base = (u64)p.first_page[b] * heads;
    const int hv = (int)((at - base) / count), from = (int)((at - base) % count);
    const int to = (int)min((u64)count, from + (end - at));
    const float* query_meta = p.query_meta + (u64)(b * heads + hv) * QUERY_META;
    s.reset();
    history(p, ring, s, query_meta, b, hv, from, to);
    merge_warps<true>(p, s, shared, query_meta, c + (u64)b * heads + hv);
    at += to - from;
  }
  const u64 windows = p.blocks + (u64)p.batch * heads;
  for (u64 i = plan.item(c); i < plan.item(c + 1); ++i) {
    const u64 bh = i / p.items_a_head;
    s.reset();
    s.step_scale = 1.f;
    if (window(p, s, (int)(bh / heads), (int)(bh % heads), (int)(i % p.items_a_head) * p.item_tokens))
      merge_warps<false>(p, s, shared, nullptr, windows + i);
    else if (threadIdx.x < HEADS)
      p.partial_lse[(windows + i) * HEADS + threadIdx.x] = -infinity();
  }
}
