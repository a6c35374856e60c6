// SPDX-License-Identifier: Apache-2.0
// Packed pages to raw rows: x^ = step * code + zero, in the rotated basis. A block takes one side of one page of one head.
#include "config.cuh"
#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int SIDE_BYTES = (K_DIM * K_BITS > V_DIM * V_BITS ? K_DIM * K_BITS : V_DIM * V_BITS) * PAGE / 8;

// Where word w of a lane lies in a plane.
template <int WORDS> DEVICE int word_at(int lane, int w) {
  constexpr int full = WORDS / 4 * 4;
  if (w < full) return w / 4 * 512 + lane * 16 + w % 4 * 4;
  if (WORDS % 4 >= 2 && w < full + 2) return full * 128 + lane * 8 + (w - full) * 4;
  return full * 128 + (WORDS % 4 >= 2 ? 256 : 0) + lane * 4;
}
// Bit of a slot of a word, known only at run time.
template <int B> DEVICE int bit_of(int in_word) {
  if (B != 1) return B * in_word;
  const int in_byte = in_word % 8;
  return in_word - in_byte + 2 * (in_byte % 4) + in_byte / 4;
}
template <int D, int B> DEVICE u32 plane_pair(const u8* plane, int lane, int slot) {  // halves 0 and 1, in bits 0 and 16 up
  constexpr int per = 16 / B;
  return *(const u32*)(plane + word_at<plane_words(D, B)>(lane, slot / per)) >> bit_of<B>(slot % per) & ((1u << B) - 1) * 0x10001u;
}
template <int D, int BITS> DEVICE u32 pair_of(const u8* side, int lane, int slot) {
  u32 pair = plane_pair<D, low_bits(BITS)>(side, lane, slot);
  if (BITS == 3) pair |= plane_pair<D, 1>(side + PAGE * D * 2 / 8, lane, slot) << 2;
  return pair;
}

#if OUT_KIND == 2
typedef float Out;
DEVICE void put_pair(Out* to, float x, float y) { to[0] = x, to[1] = y; }
DEVICE void put(Out* to, const float (&x)[8]) {
  *(float4*)to = {x[0], x[1], x[2], x[3]}, *(float4*)(to + 4) = {x[4], x[5], x[6], x[7]};
}
#else
typedef unsigned short Out;
DEVICE u32 pack_out(float x, float y) {
#if OUT_KIND == 1
  return pack_bf16(x, y);
#else
  return pack_half(fminf(fmaxf(x, -65504.f), 65504.f), fminf(fmaxf(y, -65504.f), 65504.f));
#endif
}
DEVICE void put_pair(Out* to, float x, float y) {
  const u32 pair = pack_out(x, y);
  to[0] = (Out)pair, to[1] = (Out)(pair >> 16);
}
DEVICE void put(Out* to, const float (&x)[8]) {
  *(Word4*)to = {pack_out(x[0], x[1]), pack_out(x[2], x[3]), pack_out(x[4], x[5]), pack_out(x[6], x[7])};
}
#endif
DEVICE void put_row(const Params& p, Out* to, const float (&x)[8]) {
  if (p.aligned) {
    put(to, x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 2) put_pair(to + i, x[i], x[i + 1]);
  }
}

template <bool KEYS> DEVICE void side_of(const Params& p, u8* shared) {
  constexpr int D = KEYS ? K_DIM : V_DIM, BITS = KEYS ? K_BITS : V_BITS, bytes = PAGE * D * BITS / 8;
  const int b = blockIdx.x / p.n, j = blockIdx.x % p.n, head = blockIdx.y / 2, block = p.blocks[blockIdx.x];
  const float* pairs = (const float*)(shared + SIDE_BYTES);  // step, zero of each token
  if (block >= 0) {
    const u8* page = p.pages + ((u64)block * p.kv_heads + head) * PAGE_BYTES;
    const u8* side = page + (KEYS ? 0 : V_OFFSET);
    for (int i = threadIdx.x; i < bytes / 16; i += THREADS) *(Word4*)(shared + 16 * i) = *(const Word4*)(side + 16 * i);
    if (threadIdx.x < PAGE) {
      const u32 pair = *(const u32*)(page + METADATA_OFFSET + 8 * threadIdx.x + (KEYS ? 0 : 4));
      *(float2*)(pairs + 2 * threadIdx.x) = {half_low(pair), half_high(pair)};
    }
  }
  __syncthreads();
  Out* out = KEYS ? (Out*)p.k + b * p.k_batch + head * p.k_head : (Out*)p.v + b * p.v_batch + head * p.v_head;
  const long long stride = KEYS ? p.k_token : p.v_token;
  constexpr int octets = D / 8;
  // Eight dimensions of one token (keys) or of two (values) at a time.
#pragma unroll 2
  for (int i = threadIdx.x; i < octets * (KEYS ? PAGE : PAGE / 2); i += THREADS) {
    const int t = i / octets * (KEYS ? 1 : 2), o = i % octets;
    Out* to = out + ((long long)j * PAGE + t) * stride + 8 * o;
    float x[8], y[8];
    if (block < 0) {
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] = y[c] = 0.f;
    } else if (KEYS) {
      const float2 s = *(const float2*)(pairs + 2 * t);
      const int slot = t / 8 * octets + o;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const u32 pair = pair_of<D, BITS>(shared, 4 * (t % 8) + c, slot);
        x[2 * c] = fmaf((float)(pair & 255), s.x, s.y), x[2 * c + 1] = fmaf((float)(pair >> 16), s.x, s.y);
      }
    } else {
      const float2 s0 = *(const float2*)(pairs + 2 * t), s1 = *(const float2*)(pairs + 2 * t + 2);
      const int slot = t / 8 * octets + o % 2 * (octets / 2) + o / 2;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const u32 pair = pair_of<D, BITS>(shared, 4 * c + t % 8 / 2, slot);
        x[c] = fmaf((float)(pair & 255), s0.x, s0.y), y[c] = fmaf((float)(pair >> 16), s1.x, s1.y);
      }
    }
    put_row(p, to, x);
    if (!KEYS) put_row(p, to + stride, y);
  }
}
extern "C" __global__ void __launch_bounds__(THREADS) dequantise(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(shared);
  if (blockIdx.y % 2) side_of<false>(p, shared); else side_of<true>(p, shared);
}
