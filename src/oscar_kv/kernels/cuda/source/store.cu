// SPDX-License-Identifier: Apache-2.0
// Writing: raw rows into sink and ring, and each page whose 64th token has come. A page of one side of one KV head is the
// work of a group of warps; a warp's rows are its own but for the packing.
#include "store_shape.cuh"

// Word `index` of a plane in memory order, of B bits from bit `low` of the codes [PAGE][CODE_STRIDE] on.
template <bool KEYS, int B> DEVICE u32 plane_word(const u8* codes, int index, int low) {
  constexpr int D = Side<KEYS>::D, words = plane_words(D, B), full = words / 4, per = 16 / B;
  int lane, w;
  if (index < full * 128) {
    lane = index % 128 / 4, w = index / 128 * 4 + index % 4;
  } else {
    index -= full * 128;
    if (words % 4 >= 2 && index < 64) lane = index / 2, w = 4 * full + index % 2;
    else lane = index % 32, w = words - 1;
  }
  u32 out = 0;
#pragma unroll
  for (int i = 0; i < per; ++i) {
    const int slot = w * per + i, t = slot / (D / 8), r = slot % (D / 8);
    u32 c0, c1;
    if (KEYS) {
      const u32 pair = *(const unsigned short*)(codes + (8 * t + lane / 4) * CODE_STRIDE + 8 * r + 2 * (lane % 4));
      c0 = pair & 255, c1 = pair >> 8;
    } else {
      const u8* at = codes + (8 * t + 2 * (lane % 4)) * CODE_STRIDE + 16 * (r % (D / 16)) + 8 * (r / (D / 16)) + lane / 4;
      c0 = at[0], c1 = at[CODE_STRIDE];
    }
    const u32 mask = (1 << B) - 1;
    out |= ((c0 >> low & mask) | (c1 >> low & mask) << 16) << slot_bit<B>(i);
  }
  return out;
}
template <bool KEYS, int THREADS> DEVICE void pack(const u8* codes, u8* page, int thread) {
  using S = Side<KEYS>;
  constexpr int B = low_bits(S::BITS), size = 32 * plane_words(S::D, B);
  u32* to = (u32*)(page + (KEYS ? 0 : V_OFFSET));
#pragma unroll 1
  for (int i = thread; i < size; i += THREADS) to[i] = plane_word<KEYS, B>(codes, i, 0);
  if (S::BITS == 3)
#pragma unroll 1
    for (int i = thread; i < 32 * plane_words(S::D, 1); i += THREADS) to[size + i] = plane_word<KEYS, 1>(codes, i, 2);
}

template <bool KEYS, int THREADS> DEVICE void write_page(const Params& p, const Page& where, u8* page, u8* shared, int group) {
  using S = Side<KEYS>;
  const int thread = threadIdx.x % THREADS, warp = thread / 32;
  u8* codes = shared + group * (KEYS ? K_GROUP_BYTES : V_GROUP_BYTES);
  float* scratch = (float*)(codes + (packs_alone<KEYS>() && !S::SHAPE ? 0 : PAGE * CODE_STRIDE) + warp * (KEYS ? K_WARP_BYTES : V_WARP_BYTES));
#pragma unroll 1
  for (int turn = 0; turn < S::THREADS / THREADS; ++turn) {  // a number known to be the same in all threads
    const int warp_row = (turn * (THREADS / 32) + warp) * S::ROWS;
    SideTile<KEYS> tile;
    Steps<2 * S::TILES> steps;
    if constexpr (S::ROTATED) {
      const float least = S::least_norm(p, where.head);
#pragma unroll 1
      for (bool again = false;; again = true) {
        if (again) careful_rows<KEYS>(p, where, warp_row, scratch, tile);
        else quick_rows<KEYS>(p, where, warp_row, tile);
        moments<S::D, S::BITS>(tile, steps);
        bool good = true;
#pragma unroll
        for (int r = 0; r < 2 * S::TILES; ++r) {
          const float norm = fmaf(S::D * steps.mean[r], steps.mean[r], steps.square[r]);
          good &= norm >= least && norm < MOST_NORM;
        }
        if (again || !__any_sync(FULL, !good)) break;
      }
    } else {
      plain_rows<KEYS>(p, where, warp_row, tile);
      moments<S::D, S::BITS>(tile, steps);
    }
    least_squares<S::D, S::BITS, (S::BITS > 2 && !S::SHAPE)>(tile, steps);
    if constexpr (S::SHAPE) shaped_codes(p, where.head, tile, steps, (u8*)scratch + SCRATCH_BYTES, scratch, codes, page, warp_row);
    else plain_codes<KEYS>(tile, steps, codes, page, warp_row);
    __syncwarp();
  }
  if constexpr (!packs_alone<KEYS>()) {
    group_sync(group, THREADS);
    pack<KEYS, THREADS>(codes, page, thread);
  }
}

// A unit of work is a page that a request could complete, of one head; a block has one for each of its groups.
template <bool KEYS, bool KEEP, int THREADS> DEVICE void write_side(const Params& p, u8* shared) {
  const int group = threadIdx.x / THREADS, head = blockIdx.x / p.parts;
  const int unit = blockIdx.x % p.parts * p.groups + group;
  if (unit >= p.batch * p.request_pages) return;
  const int b = unit / p.request_pages, j = unit % p.request_pages, start = p.start[b], count = p.count[b];
  if (KEEP && j == 0) keep_rows<KEYS>(p, b, head, start, count, threadIdx.x % THREADS, THREADS);
  const int number = max(start / PAGE, p.sink_rows / PAGE) + j;
  if (number * PAGE + PAGE - 1 >= start + count || number >= p.max_pages) return;
  const int block = p.block_table[(u64)b * p.max_pages + number];
  if (block < 0) return;
  u8* page = p.pages + ((u64)block * p.kv_heads + head) * PAGE_BYTES;
  write_page<KEYS, THREADS>(p, {b, head, slot_of(p, b), number * PAGE, start}, page, shared, group);
}
// A prompt's keys and its values each have a launch of their own, what a step writes has one.
extern "C" __global__ void __launch_bounds__(K_THREADS, K_BLOCKS) store_keys(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(shared);
  write_side<true, false, Side<true>::THREADS>(p, shared);
}
extern "C" __global__ void __launch_bounds__(V_THREADS, V_BLOCKS) store_values(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(shared);
  write_side<false, false, Side<false>::THREADS>(p, shared);
}
extern "C" __global__ void __launch_bounds__(STEP_THREADS) store_step(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(shared);
  if (blockIdx.y == 0) write_side<true, true, STEP_THREADS>(p, shared);
  else write_side<false, true, STEP_THREADS>(p, shared);
}
// Raw rows alone, after the pages of a chunk that may overwrite ring rows they are made of.
extern "C" __global__ void __launch_bounds__(256) store_rows(const __grid_constant__ Params p) {
  const int b = blockIdx.y / p.kv_heads, head = blockIdx.y % p.kv_heads, from = blockIdx.x * 256 + threadIdx.x;
  const int start = p.start[b], count = p.count[b];
  keep_rows<true>(p, b, head, start, count, from, p.row_blocks * 256);
  keep_rows<false>(p, b, head, start, count, from, p.row_blocks * 256);
}
