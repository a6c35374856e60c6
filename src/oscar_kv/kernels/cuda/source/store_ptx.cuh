// SPDX-License-Identifier: Apache-2.0
// What writing needs of PTX beyond ptx.cuh.
#pragma once
#include "ptx.cuh"
// A barrier of the warps that share a page; 0 is __syncthreads.
DEVICE void group_sync(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}
// What the compiler must not remember: values derived before are derived anew, instead of being kept in registers.
DEVICE void forget(float& x) { asm volatile("" : "+f"(x)); }
DEVICE void forget(u32& x) { asm volatile("" : "+r"(x)); }
DEVICE int lane_of() {  // nor addresses made of it
  u32 lane = threadIdx.x % 32;
  forget(lane);
  return (int)lane;
}
// Tables are read over and over by every warp of a multiprocessor: through the L1 cache.
DEVICE Word4 load_table(const void* p) {
  Word4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Rows are read once: they should not drive tables out of the L1 cache.
DEVICE Word4 load_once(const void* p) {
  Word4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE u32 half_add(u32 x, u32 y) { u32 z; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y)); return z; }
DEVICE u32 half_fma(u32 x, u32 y, u32 z) {
  u32 v; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(x), "r"(y), "r"(z)); return v;
}
// 1 / x of a normal number, to its last bit or so, without the branches of a division; exact for powers of two.
DEVICE float reciprocal(float x) {
  float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(y, fmaf(-x, y, 1.f), y);
}
DEVICE float root(float x) { float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// x * y + z, cut to 0 ... 1
DEVICE float fma_unit(float x, float y, float z) {
  float v; asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(v) : "f"(x), "f"(y), "f"(z)); return v;
}
