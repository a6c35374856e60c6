// SPDX-License-Identifier: Apache-2.0
// Shapes and the division of work that the three kernels of one decode call share.
#pragma once
#include "config.cuh"
#include "ptx.cuh"

// Query heads of a group sit in the 8 columns of an MMA: TILES column tiles a warp, BLOCKS warps' worth of them a group.
constexpr int COLUMNS = 8 * TILES;
constexpr int BLOCKS = (GROUP + COLUMNS - 1) / COLUMNS;
constexpr int HEADS = (GROUP + BLOCKS - 1) / BLOCKS;  // query heads a block
// A block's query heads as prepare.cu leaves them: 8 bytes a lane and MMA, and sums over PARTS pieces of the dimensions.
constexpr int QUERY_WORDS = K_DIM * TILES * 4, PART = 32, PARTS = (K_DIM + PART - 1) / PART;

#if WINDOW_BF16
DEVICE float raw_low(u32 x) { return bf16_low(x); }
DEVICE float raw_high(u32 x) { return bf16_high(x); }
#else
DEVICE float raw_low(u32 x) { return half_low(x); }
DEVICE float raw_high(u32 x) { return half_high(x); }
#endif
DEVICE float log2_of_e() { return 1.4426950408889634f; }
DEVICE int slot_of(const Params& p, int b) { return p.slots ? p.slots[b] : b; }
DEVICE int pages_of(const Params& p, int b) {
  const int lo = p.hist_start[b], hi = p.hist_end[b];
  return hi > lo ? (hi + PAGE - 1) / PAGE - lo / PAGE : 0;
}
// The line of work counts in pages. Taking up a (request, head) costs a block about as much as some more of them, so each
// begins with p.opening units that stand for no page: blocks with a border inside get fewer pages.
DEVICE int units_of(const Params& p, int b) {
  const int n = pages_of(p, b);
  return n ? n + p.opening : 0;
}
DEVICE int sum_to_lane(int n) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int left = __shfl_up_sync(FULL, n, i);
    if (threadIdx.x % 32 >= i) n += left;
  }
  return n;
}
// Units a head of all requests, and of those before request b. Each warp finds out for itself: no barrier, no launch.
struct Count { int all, before; };
DEVICE Count count_units(const Params& p, int b) {
  int all = 0, before = 0;
  for (int b0 = 0; b0 < p.batch; b0 += 32) {
    const int mine = b0 + threadIdx.x % 32, n = mine < p.batch ? units_of(p, mine) : 0;
    all += n, before += mine < b ? n : 0;
  }
#pragma unroll
  for (int i = 1; i < 32; i *= 2) all += __shfl_xor_sync(FULL, all, i), before += __shfl_xor_sync(FULL, before, i);
  return {all, before};
}
// The request in which unit u of the line of work lies, its units a head, and those of the requests before it.
struct Place { int request, before, units; };
DEVICE Place place_of(const Params& p, int u) {
  const int heads = p.kv_heads * BLOCKS;
  for (int b0 = 0, sum = 0;; b0 += 32) {
    const int mine = b0 + threadIdx.x % 32, n = mine < p.batch ? units_of(p, mine) : 0, upto = sum + sum_to_lane(n);
    const u32 found = __ballot_sync(FULL, upto * heads > u);
    if (found) {
      const int lane = __ffs(found) - 1;
      return {b0 + lane, __shfl_sync(FULL, upto - n, lane), __shfl_sync(FULL, n, lane)};
    }
    sum = __shfl_sync(FULL, upto, 31);
  }
}

// Work is a line: units of (request 0, head 0), (request 0, head 1) ..., cut into one piece a thread block. Raw window
// items, one a warp, are dealt out evenly first; a block that has some gets fewer units. (A page is at least 1 KB, so
// 31 bits count them.)
struct Share {  // c * n / blocks without a large division
  u32 whole, rest;
  DEVICE Share(u32 n, u32 blocks) : whole(n / blocks), rest(n % blocks) {}
  DEVICE u32 before(u32 c, u32 blocks) const { return c * whole + c * rest / blocks; }
};
struct Schedule {
  u32 blocks, item_pages;
  bool even;
  Share items, units;
  DEVICE Schedule(const Params& p, u32 units_a_head)
      : blocks(p.blocks), item_pages(p.item_pages), items(p.items, p.blocks), units(0, p.blocks) {
    const u32 all = units_a_head * (p.kv_heads * BLOCKS);
    units = Share(all + p.items * item_pages, blocks);
    even = units.whole < item_pages * (items.whole + (items.rest > 0)) + 1;
    if (even) units = Share(all, blocks);
  }
  DEVICE int item(u32 c) const { return (int)items.before(c, blocks); }
  DEVICE int unit(u32 c) const { return (int)(units.before(c, blocks) - (even ? 0 : item_pages * items.before(c, blocks))); }
};
