// SPDX-License-Identifier: Apache-2.0
// The few PTX instructions the kernels use; no CUDA headers, so NVRTC needs no include path.
#pragma once
#include "fragments.cuh"
#define FULL 0xffffffffu
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float sqrt_of(float x) { float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE u32 pack_half(float lo, float hi) {
  u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y;
}
DEVICE float half_low(u32 x) {
  float y; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(x)); return y;
}
DEVICE float half_high(u32 x) {
  float y; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x)); return y;
}
DEVICE u32 pack_bf16(float lo, float hi) {
  u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y;
}
DEVICE float bf16_low(u32 x) { return __uint_as_float(x << 16); }
DEVICE float bf16_high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
DEVICE u32 transpose8(u32 x) {
  u32 y; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y;
}
#define MMA(TYPE)                                                                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"   \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
DEVICE void mma_half(float* c, const u32* a, u32 b0, u32 b1) { MMA("f16"); }
DEVICE void mma_bf16(float* c, const u32* a, u32 b0, u32 b1) { MMA("bf16"); }
#undef MMA
DEVICE void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void prefetch(const u8* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// Named barriers of a block: some warps only arrive, the others also wait. 0 is that of __syncthreads.
DEVICE void named_wait(int id, int threads) { asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_arrive(int id, int threads) { asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
#if BULK
DEVICE void barrier_init(u32 bar) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory"); }
DEVICE void bulk_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void bulk_copy(u32 to, const u8* from, u32 bytes, u32 bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{.reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra DONE; bra WAIT; DONE:}"
      ::"r"(bar), "r"(parity) : "memory");
}
#endif
// Programmatic dependent launch (sm_90 and newer): start while the kernel before still runs, wait before reading its results.
#if CHAINED
DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void release_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_predecessor() {}
DEVICE void release_successor() {}
#endif
