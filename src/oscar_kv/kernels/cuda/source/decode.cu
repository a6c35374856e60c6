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

// A segment's query heads, as prepare.cu left them: the B operand of the MMAs, fetched while the segment before is put
// away. With two tiles they lie in shared memory, each lane's own: registers bound the number of warps.
constexpr bool QUERY_SHARED = TILES > 1;
struct Query {
  static constexpr int WORDS = K_DIM / 16 * TILES;
  Word2 x[WORDS], *room;
  float sum[TILES][2], centre[SOFTCAP ? TILES : 1][2], step_factor;
  DEVICE void fetch(const Params& p, u64 bh) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) x[i] = *(const Word2*)(p.query + bh * QUERY_WORDS + (i * 32 + lane) * 2);
    step_factor = p.query_step[bh];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      sum[n][0] = sum[n][1] = 0.f;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const float2 y = *(const float2*)(p.query_sum + (bh * PARTS + part) * COLUMNS + 8 * n + 2 * quad);
        sum[n][0] += y.x, sum[n][1] += y.y;
      }
#pragma unroll
      for (int k = 0; k < 2 && SOFTCAP; ++k)
        centre[SOFTCAP ? n : 0][k] = 8 * n + 2 * quad + k < HEADS ? p.query_centre[bh * HEADS + 8 * n + 2 * quad + k] : 0.f;
    }
  }
  DEVICE void put() {
#pragma unroll
    for (int i = 0; i < WORDS && QUERY_SHARED; ++i) room[i * 32 + threadIdx.x % 32] = x[i];
  }
  DEVICE Word2 word(int i) const { return QUERY_SHARED ? room[i * 32 + threadIdx.x % 32] : x[i]; }
};

// The segments of one thread block, in order: pages [from, to) of a (request, head). skew: the first of them that is this
// warp's; warps take turns over the whole line, so that all have equally many.
struct Line {
  int at, end, b, hv, units, from, to, skew;
  DEVICE Line(const Params& p, int begin, int end) : at(begin), end(end) {
    if (at >= end) return;
    const Place place = place_of(p, at);
    const int rest = at - place.before * (p.kv_heads * BLOCKS);
    b = place.request, units = place.units, hv = rest / units, skew = threadIdx.x / 32;
    cut(p, rest % units);
    if (from >= to) next(p);  // nothing but the opening
  }
  DEVICE bool open() const { return at < end; }
  DEVICE u64 bh(const Params& p) const { return (u64)b * (p.kv_heads * BLOCKS) + hv; }
  // The segment begins at unit ``rest`` of its (request, head); ``at`` moves to its end.
  DEVICE void cut(const Params& p, int rest) {
    const int last = min(units, rest + (end - at));
    from = max(rest - p.opening, 0), to = last - p.opening;
    stop = at + (last - rest);
  }
  int stop;
  DEVICE void next(const Params& p) {
    const int taken = max(to - from, 0);
    at = stop;
    if (at >= end) return;
    skew = (skew + (WARPS - taken % WARPS)) % WARPS;
    if (++hv == p.kv_heads * BLOCKS) {
      hv = 0;
      u32 found = 0;
      for (++b; !found; b += 32) {  // there is one, since at < end
        const int mine = b + threadIdx.x % 32, n = mine < p.batch ? units_of(p, mine) : 0;
        found = __ballot_sync(FULL, n > 0);
        if (found) {
          const int lane = __ffs(found) - 1;
          units = __shfl_sync(FULL, n, lane), b += lane - 32;
        }
      }
    }
    cut(p, 0);
    if (from >= to) at = end;  // the block's last units are an opening, which is the next block's
  }
};

// The pages of one warp, asked for ahead of their use: block numbers come 32 at a time, one a lane, a batch ahead.
struct Walk {
  Line line;
  const int* table;
  const u8* pool;
  int next, index, now, later;
  DEVICE Walk(const Params& p, const Line& line) : line(line) {
    if (line.open()) enter(p);
  }
  DEVICE void enter(const Params& p) {
    table = p.block_table + (u64)line.b * p.max_pages + p.hist_start[line.b] / PAGE;
    pool = p.pages + (u64)(line.hv / BLOCKS) * PAGE_BYTES;
    next = line.from + line.skew, index = 0;
    now = look(0), later = look(32);
  }
  DEVICE int look(int ahead) const {
    const int page = next + (ahead + (int)(threadIdx.x % 32)) * WARPS;
    return page < line.to ? table[page] : 0;
  }
  DEVICE void ask(const Params& p, Ring& ring, int stage) {
    while (line.open() && next >= line.to) {
      line.next(p);
      if (line.open()) enter(p);
    }
    if (line.open()) {
      const int block = __shfl_sync(FULL, now, index);
      ring.issue(pool + block * ((u64)p.kv_heads * PAGE_BYTES), stage, threadIdx.x % 32);
      next += WARPS;
      if (++index == 32) index = 0, now = later, later = look(32);
    }
    ring.commit();
  }
};

// This warp's pages of one segment. Whether nothing of it has been left on the desk yet.
DEVICE bool history(const Params& p, Ring& ring, Walk& walk, State& s, Desk& desk, const Query& q, const Line& line, int buffer) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const int start = p.hist_start[line.b], end = p.hist_end[line.b], first = start / PAGE;
  const float* centre = p.query_centre + line.bh(p) * HEADS;
  int pages = 0;
  bool left = false;
  for (int page = line.from + line.skew; page < line.to; page += WARPS) {
    if (pages == FLUSH_PAGES) {
      leave(s, desk, centre, buffer, !left);
      s.reset();
      pages = 0, left = true;
    }
    ++pages;
    ring.wait();
    const u8* data = ring.base + ring.stage * STAGE_BYTES;
    walk.ask(p, ring, (ring.stage + STAGES - 1) % STAGES);
    const int lo = start - (first + page) * PAGE, hi = end - (first + page) * PAGE;
    const bool partial = lo > 0 || hi < PAGE;

    float score[TILES][8][2];
    u32 value_meta[8];  // fp16 step and zero of the values of tokens 8r + row
    float largest_step = 0.f;
    {
      Codes<K_BITS, K_DIM> codes;
      float c[4][TILES][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        codes.load(data, lane, t);
#pragma unroll
        for (int n = 0; n < TILES; ++n) c[t][n][0] = c[t][n][1] = c[t][n][2] = c[t][n][3] = 0.f;
      }
      auto multiply = [&](int t, int ks) {
        u32 a[4];
        codes.keys(a, t, ks);
#pragma unroll
        for (int n = 0; n < TILES; ++n) mma_half(c[t][n], a, q.word(ks * TILES + n).x, q.word(ks * TILES + n).y);
      };
#pragma unroll
      for (int i = 0; i < 4 * (K_DIM / 16); ++i)
        if (QUERY_SHARED) multiply(i % 4, i / 4);  // so that each word is read once
        else multiply(i / (K_DIM / 16), i % (K_DIM / 16));
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const Word2 meta = *(const Word2*)(data + METADATA_OFFSET + (8 * r + row) * 8);
        const float step = half_low(meta.x) * q.step_factor, zero = half_high(meta.x);
        value_meta[r] = meta.y;
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int k = 0; k < 2; ++k)
            score[n][r][k] = capped(p, step * c[r / 2][n][2 * (r % 2) + k] + (zero * q.sum[n][k] + (SOFTCAP ? q.centre[SOFTCAP ? n : 0][k] : 0.f)));
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
  return !left;
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

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) decode(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = p.kv_heads * BLOCKS;
  Desk& desk = *(Desk*)(shared + DESK_OFFSET);
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
  const Schedule plan(p, count_units(p, 0).all);
  const int c = blockIdx.x, windows = p.blocks + p.batch * heads;
  const int begin = plan.unit(c), end = plan.unit(c + 1);
  const int last_item = plan.item(c + 1);
  int item = plan.item(c) + warp;
  if (item < last_item) prefetch_window(p, item / p.items_a_head / heads, item / p.items_a_head % heads, item % p.items_a_head * p.item_tokens);
  // The first pages are under way while raw windows are read and prepare.cu, which may still run, turns the queries.
  Line line(p, begin, end);
  Walk walk(p, line);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) walk.ask(p, ring, i);
#pragma unroll 1
  for (; item < last_item; item += WARPS) {
    const int bh = item / p.items_a_head;
    window(p, bh / heads, bh % heads, item % p.items_a_head * p.item_tokens, windows + item);
  }
  wait_for_predecessor();
  release_successor();  // not before: finish.cu reads what prepare.cu has written
  int segment = 0;
  u32 collectors = 0;  // of the open segments, a byte a buffer
  auto collector_of = [&](int buffer) { return (int)(collectors >> 8 * buffer & 255); };
  Query query;
  query.room = (Word2*)(shared + QUERY_OFFSET) + warp * (QUERY_WORDS / 2);
  if (line.open()) query.fetch(p, line.bh(p));
#pragma unroll 1
  for (; line.open(); ++segment) {
    const int buffer = segment % BUFFERS;
    if (segment >= BUFFERS && warp != collector_of(buffer)) named_wait(1 + BUFFERS + buffer, WARPS * 32);  // it is free
    // The warp that has the last page: it comes last, and has the fewest pages of the next segment.
    const int collector = (warp - line.skew + line.to - line.from - 1 + WARPS) % WARPS;
    collectors = (collectors & ~(255u << 8 * buffer)) | (u32)collector << 8 * buffer;
    query.put();
    State s;
    s.reset();
    const bool first = history(p, ring, walk, s, desk, query, line, buffer);
    const u64 bh = line.bh(p);
    line.next(p);
    if (line.open()) query.fetch(p, line.bh(p));
    leave(s, desk, p.query_centre + bh * HEADS, buffer, first);
    if (warp != collector) {
      named_arrive(1 + buffer, WARPS * 32);
    } else {
      named_wait(1 + buffer, WARPS * 32);
      collect(p, desk, buffer, c + bh);
      named_arrive(1 + BUFFERS + buffer, WARPS * 32);
    }
  }
  for (int i = max(segment - BUFFERS, 0); i < segment; ++i)  // no barrier is left half full
    if (warp != collector_of(i % BUFFERS)) named_wait(1 + BUFFERS + i % BUFFERS, WARPS * 32);
}
