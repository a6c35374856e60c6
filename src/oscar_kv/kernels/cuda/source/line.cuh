// SPDX-License-Identifier: Apache-2.0
// A block's line of work: its segments and their queries, and the pages of one warp, asked for ahead of their use.
#pragma once
#include "common.cuh"

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
