// SPDX-License-Identifier: Apache-2.0
// Where a code lies in a lane's words and how it becomes an fp16 subnormal. Mirrors layout.py; host-compilable for tests.
//
// A code of b bits left at mantissa bit t of an fp16 is the number code * 2^(t-24), exact as long as t + b <= 10. The
// factor 2^t is undone in q (keys) or in the epilogue (values), so unpacking is one AND a pair (and shared shifts).
#pragma once
#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif
typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned long long u64;

// Bit of slot s in its 16-bit half-word, in a plane of B bits (1, 2 or 4).
template <int B> DEVICE constexpr int slot_bit(int s) {
  int in_word = s % (16 / B);
  if (B != 1) return B * in_word;
  int in_byte = in_word % 8;
  return in_word - in_byte + 2 * (in_byte % 4) + in_byte / 4;
}
// Mantissa bit at which dimension group j is fed to the tensor cores, whatever its token.
template <int BITS> DEVICE constexpr int target_bit(int j) {
  return BITS == 1 ? 2 * (j % 4) + (j % 8) / 4 : BITS == 4 ? 4 * (j % 2) : 2 * (j % 4);
}
DEVICE constexpr int plane_words(int d, int b) { return d * b / 16; }  // words a lane and page
DEVICE constexpr int low_bits(int bits) { return bits == 3 ? 2 : bits; }
// 16-byte chunks first, then 8, then 4.
DEVICE constexpr int plane_chunks(int w) { return w / 4 + (w % 4 >= 2) + w % 2; }
DEVICE constexpr int chunk_of(int w, int words) {
  return w / 4 < words / 4 ? w / 4 : words / 4 + (words % 4 == 3 && w % 4 == 2);
}
template <int B> DEVICE u32 aligned(u32 word, int slot, int target) {
  const int shift = slot_bit<B>(slot) - target;
  const u32 mask = ((1u << B) - 1) * 0x00010001u << target;
  return (shift >= 0 ? word >> shift : word << -shift) & mask;
}
// The pair of codes (half-words 0 and 1) of a slot, at the mantissa bit of group j.
template <int BITS> DEVICE u32 code_pair(const u32* low, const u32* high, int slot, int j) {
  constexpr int B = low_bits(BITS);
  u32 pair = aligned<B>(low[slot / (16 / B)], slot, target_bit<BITS>(j));
  if (BITS == 3) pair |= aligned<1>(high[slot / 16], slot, target_bit<BITS>(j) + 2);
  return pair;
}
struct alignas(16) Word4 { u32 x, y, z, w; };
struct alignas(8) Word2 { u32 x, y; };
// Load chunk c of a lane's WORDS words of a plane.
template <int WORDS> DEVICE void load_chunk(u32* out, const u8* plane, int lane, int c) {
  constexpr int full = WORDS / 4;
  if (c < full) {
    Word4 v = *(const Word4*)(plane + c * 512 + lane * 16);
    out[4 * c] = v.x, out[4 * c + 1] = v.y, out[4 * c + 2] = v.z, out[4 * c + 3] = v.w;
  } else if (c == full && WORDS % 4 >= 2) {
    Word2 v = *(const Word2*)(plane + full * 512 + lane * 8);
    out[4 * full] = v.x, out[4 * full + 1] = v.y;
  } else {
    out[WORDS - 1] = *(const u32*)(plane + full * 512 + (WORDS % 4 >= 2 ? 256 : 0) + lane * 4);
  }
}
// Load the chunks that 16-token tile t is the first to need (slots of a tile: t*D/4 ... (t+1)*D/4 - 1).
template <int B, int D> DEVICE void load_tile(u32* out, const u8* plane, int lane, int t) {
  constexpr int words = plane_words(D, B), per = 16 / B;
  const int before = t == 0 ? -1 : chunk_of((t * (D / 4) - 1) / per, words);
  const int last = chunk_of(((t + 1) * (D / 4) - 1) / per, words);
#pragma unroll
  for (int c = 0; c < plane_chunks(words); ++c)
    if (c > before && c <= last) load_chunk<words>(out, plane, lane, c);
}
template <int BITS, int D> struct Codes {
  static constexpr int B = low_bits(BITS);
  u32 low[plane_words(D, B)], high[BITS == 3 ? plane_words(D, 1) : 1];
  DEVICE void load(const u8* side, int lane, int t) {
    load_tile<B, D>(low, side, lane, t);
    if (BITS == 3) load_tile<1, D>(high, side + 64 * D * 2 / 8, lane, t);
  }
  DEVICE u32 pair(int slot, int j) const { return code_pair<BITS>(low, high, slot, j); }
  // A fragment of keys: 16 tokens of tile t by dimensions 16ks ... 16ks+15.
  DEVICE void keys(u32* a, int t, int ks) const {
    const int r = 2 * t * (D / 8) + 2 * ks;
    a[0] = pair(r, 2 * ks), a[1] = pair(r + D / 8, 2 * ks);
    a[2] = pair(r + 1, 2 * ks + 1), a[3] = pair(r + D / 8 + 1, 2 * ks + 1);
  }
  // A fragment of values, transposed: dimensions 16m ... 16m+15 by the 16 tokens of tile t.
  DEVICE void values(u32* a, int t, int m) const {
    const int r = 2 * t * (D / 8) + m;
    a[0] = pair(r, m), a[1] = pair(r + D / 16, D / 16 + m);
    a[2] = pair(r + D / 8, m), a[3] = pair(r + D / 8 + D / 16, D / 16 + m);
  }
};
