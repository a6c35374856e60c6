// SPDX-License-Identifier: Apache-2.0
// Shapes, the schedule and the intermediate buffers that the three kernels of one decode call share.
#pragma once
#include "config.cuh"
#include "ptx.cuh"

// Query heads of a group sit in the 8 columns of an MMA: TILES column tiles a warp, BLOCKS warps' worth of them a group.
constexpr int COLUMNS = 8 * TILES;
constexpr int BLOCKS = (GROUP + COLUMNS - 1) / COLUMNS;
constexpr int HEADS = (GROUP + BLOCKS - 1) / BLOCKS;  // query heads a block
constexpr int QUERY_WORDS = TILES * K_DIM / 8;         // fp16 pairs a lane
constexpr int QUERY_META = 2 * COLUMNS + 4;            // floats: sum of q, q.centre a column, then the step's factor

DEVICE float log2_of_e() { return 1.4426950408889634f; }
DEVICE int slot_of(const Params& p, int b) { return p.slots ? p.slots[b] : b; }
DEVICE int pages_of(const Params& p, int b) {
  const int lo = p.hist_start[b], hi = p.hist_end[b];
  return hi > lo ? (hi + PAGE - 1) / PAGE - lo / PAGE : 0;
}

// Work is a line: pages of (request 0, head 0), (request 0, head 1) ..., cut into one piece a thread block. Raw window
// items are dealt out evenly first; a block that has one gets fewer pages.
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
// Last request whose pages begin at or before unit u of the line (requests without pages share the next one's start).
DEVICE int request_at(const Params& p, u64 u) {
  int lo = 0, hi = p.batch - 1;
  const u64 heads = p.kv_heads * BLOCKS;
  while (lo < hi) {
    const int mid = (lo + hi + 1) / 2;
    if ((u64)p.first_page[mid] * heads <= u) lo = mid; else hi = mid - 1;
  }
  return lo;
}
