// SPDX-License-Identifier: Apache-2.0
// Decode attention over quantised pages and raw windows: partial results, merged by finish.cu.
#include "line.cuh"
#include "state.cuh"
#include "window.cuh"

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
