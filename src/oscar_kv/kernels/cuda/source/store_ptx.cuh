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
DEVICE Word2 load_table2(const void* p) {
  Word2 v;
  asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
