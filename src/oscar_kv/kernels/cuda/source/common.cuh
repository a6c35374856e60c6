// SPDX-License-Identifier: Apache-2.0
// Shapes and the division of work that the two kernels of one decode call share.
#pragma once
#include "config.cuh"
#include "ptx.cuh"

// Query heads of a group sit in the 8 columns of an MMA: TILES column tiles a warp, BLOCKS warps' worth of them a group.
constexpr int COLUMNS = 8 * TILES;
constexpr int BLOCKS = (GROUP + COLUMNS - 1) / COLUMNS;
constexpr int HEADS = (GROUP + BLOCKS - 1) / BLOCKS;  // query heads a block

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
DEVICE int sum_to_lane(int n) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int left = __shfl_up_sync(FULL, n, i);
    if (threadIdx.x % 32 >= i) n += left;
  }
  return n;
}
// Pages a head of all requests, and of those before request b. Each warp finds out for itself: no barrier, no launch.
struct Count { int all, before; };
DEVICE Count count_pages(const Params& p, int b) {
  int all = 0, before = 0;
  for (int b0 = 0; b0 < p.batch; b0 += 32) {
    const int mine = b0 + threadIdx.x % 32, n = mine < p.batch ? pages_of(p, mine) : 0;
    all += n, before += mine < b ? n : 0;
  }
#pragma unroll
  for (int i = 1; i < 32; i *= 2) all += __shfl_xor_sync(FULL, all, i), before += __shfl_xor_sync(FULL, before, i);
  return {all, before};
}
// The request in which unit u of the line of work lies, and the pages a head of the requests before it.
struct Place { int request, before, pages; };
DEVICE Place place_of(const Params& p, u64 u) {
  const u64 heads = p.kv_heads * BLOCKS;
  for (int b0 = 0, sum = 0;; b0 += 32) {
    const int mine = b0 + threadIdx.x % 32, n = mine < p.batch ? pages_of(p, mine) : 0, upto = sum + sum_to_lane(n);
    const u32 found = __ballot_sync(FULL, (u64)upto * heads > u);
    if (found) {
      const int lane = __ffs(found) - 1;
      return {b0 + lane, __shfl_sync(FULL, upto - n, lane), __shfl_sync(FULL, n, lane)};
    }
    sum = __shfl_sync(FULL, upto, 31);
  }
}

// Work is a line: pages of (request 0, head 0), (request 0, head 1) ..., cut into one piece a thread block. Raw window
// items, one a warp, are dealt out evenly first; a block that has some gets fewer pages.
struct Schedule {
  u64 pages, blocks, items, total;
  bool even;
  DEVICE Schedule(const Params& p, int pages_a_head) {
    blocks = p.blocks, items = p.items;
    pages = (u64)pages_a_head * (p.kv_heads * BLOCKS);
    total = pages + items * p.item_pages;
    even = total / blocks < p.item_pages * ((items + blocks - 1) / blocks) + 1;
  }
  DEVICE u64 item(u64 c) const { return c * items / blocks; }
  DEVICE u64 page(const Params& p, u64 c) const {
    return even ? c * pages / blocks : c * total / blocks - p.item_pages * item(c);
  }
};
