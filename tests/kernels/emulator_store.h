// SPDX-License-Identifier: Apache-2.0
// store_ptx.cuh for a CPU. For tests only.
#pragma once
#include "emulator.h"
namespace emulator {
static Gate named[16];
}
static void group_sync(int group, int threads) { emulator::pass(emulator::named[group + 1], threads); }
static float __fadd_rn(float x, float y) { return x + y; }
static float __fmul_rn(float x, float y) { return x * y; }
DEVICE void forget(float&) {}
DEVICE void forget(u32&) {}
DEVICE int lane_of() { return threadIdx.x % 32; }
DEVICE Word4 load_table(const void* p) { return *(const Word4*)p; }
DEVICE Word4 load_once(const void* p) { return *(const Word4*)p; }
DEVICE u32 half_add(u32 x, u32 y) { return pack_half(half_low(x) + half_low(y), half_high(x) + half_high(y)); }
DEVICE u32 half_fma(u32 x, u32 y, u32 z) {
  return pack_half(half_low(x) * half_low(y) + half_low(z), half_high(x) * half_high(y) + half_high(z));
}
DEVICE float reciprocal(float x) { return 1.f / x; }
DEVICE float root(float x) { return std::sqrt(x); }
DEVICE float fma_unit(float x, float y, float z) {
  const float v = std::fma(x, y, z);
  return v > 0.f ? v < 1.f ? v : 1.f : 0.f;
}
