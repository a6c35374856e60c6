// SPDX-License-Identifier: Apache-2.0
// ptx.cuh for a CPU: a thread block runs as fibers, warp-wide instructions exchange their operands. For tests only.
// Stricter than a GPU: shared memory ends at an unmapped page, a fault ends the launch with a message, and asynchronous
// copies land as early or as late as the memory model lets them (both must give the right answer).
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#define DEVICE inline
#define __global__
#define __device__
#define __noinline__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#include "fragments.cuh"
#define FULL 0xffffffffu
#define DYNAMIC_SHARED(name) u8* name = emulator::shared
struct Index { unsigned x, y; };
static Index threadIdx, blockIdx, gridDim;
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
using std::max;
using std::min;
static u64 max(u64 a, u64 b) { return a > b ? a : b; }
static u64 min(u64 a, u64 b) { return a < b ? a : b; }

namespace emulator {
static u8* shared;  // its end is the last address that may be touched, up to alignment
struct Gate { int arrived; u64 generation; };
static Gate warp_gate[32], block_gate, named_gate[16];
static u32 exchanged[32][2][32][6];
static ucontext_t scheduler, fresh;
static jmp_buf back, fiber[1024];  // switching contexts properly costs two system calls
static std::vector<char> stacks;
static bool alive[1024], begun[1024];
static int threads, living, now;
static bool late;  // asynchronous copies land when they are waited for, else at once
struct Copy { u32 to; const u8* from; u32 bytes; };
static std::vector<Copy> under_way[1 << 12];         // by barrier
static std::vector<std::vector<Copy>> groups[1024];  // by thread: committed, then the open one
static u64 phase[1 << 12];
static void (*body)();
static sigjmp_buf fault;
static char message[256];

static void yield() {
  if (!_setjmp(fiber[now])) _longjmp(back, 1);
}
static void on_fault(int signal, siginfo_t* info, void*) {
  const char* what = signal == SIGILL ? "misaligned, an index out of its array, or a division by zero" : "outside every buffer";
  snprintf(message, sizeof message, "%s: block %u,%u thread %d, address %p", what, blockIdx.x, blockIdx.y, now, info->si_addr);
  siglongjmp(fault, 1);
}
static void land(std::vector<Copy>& copies) {
  for (auto& c : copies) memcpy(shared + c.to, c.from, c.bytes);
  copies.clear();
}
static void begin_copy(std::vector<Copy>& list, Copy c) {
  list.push_back(c);
  if (late) memset(shared + c.to, 0xff, c.bytes); else land(list);
}
static bool arrive(Gate& g, int count) {
  if (++g.arrived < count) return false;
  g.arrived = 0, ++g.generation;
  return true;
}
static void pass(Gate& g, int count) {
  const u64 mine = g.generation;
  if (!arrive(g, count)) while (g.generation == mine) yield();
}
// All lanes' operands.
template <int N> static u32 (*exchange(const u32 (&x)[N]))[6] {
  const int warp = now / 32;
  auto& slots = exchanged[warp][warp_gate[warp].generation & 1];
  memcpy(slots[now % 32], x, sizeof x);
  pass(warp_gate[warp], 32);
  return slots;
}
static void start() {
  body();
  alive[now] = false, --living;
  if (block_gate.arrived && block_gate.arrived == living) block_gate.arrived = 0, ++block_gate.generation;
  _longjmp(back, 1);
}
static void resume(int i) {
  static const size_t size = 1 << 16;
  now = i, threadIdx.x = i;
  if (_setjmp(back)) return;
  if (begun[i]) _longjmp(fiber[i], 1);
  begun[i] = true;
  getcontext(&fresh);
  fresh.uc_stack.ss_sp = stacks.data() + size * i, fresh.uc_stack.ss_size = size, fresh.uc_link = &scheduler;
  makecontext(&fresh, start, 0);
  setcontext(&fresh);
}
static void run_block(int count) {
  memset(phase, 0, sizeof phase);
  block_gate = {0, 0}, living = count;
  for (auto& g : warp_gate) g = {0, 0};
  for (auto& g : named_gate) g = {0, 0};
  for (auto& u : under_way) u.clear();
  for (int i = 0; i < count; ++i) alive[i] = true, begun[i] = false, groups[i].assign(1, {});
  for (u64 idle = 0; living;) {
    const int before = living;
    const u64 seen = block_gate.generation;
    u64 sum = 0, sum2 = 0;
    for (auto& g : warp_gate) sum += g.generation + g.arrived;
    for (auto& g : named_gate) sum += g.generation + g.arrived;
    for (int i = 0; i < count; ++i)
      if (alive[i]) resume(i);
    for (auto& g : warp_gate) sum2 += g.generation + g.arrived;
    for (auto& g : named_gate) sum2 += g.generation + g.arrived;
    idle = before == living && seen == block_gate.generation && sum == sum2 ? idle + 1 : 0;
    if (idle > 8) {
      snprintf(message, sizeof message, "deadlock: block %u,%u", blockIdx.x, blockIdx.y);
      siglongjmp(fault, 1);
    }
  }
  for (auto& g : named_gate)
    if (g.arrived) snprintf(message, sizeof message, "a barrier is left half full: block %u,%u", blockIdx.x, blockIdx.y);
  for (auto& u : under_way)
    if (!u.empty()) snprintf(message, sizeof message, "a copy nobody waited for: block %u,%u", blockIdx.x, blockIdx.y);
}
// Empty, or what went wrong.
static const char* launch(void (*f)(), int gx, int gy, int count, int shared_bytes, bool copies_late) {
  const size_t room = 1 << 18, page = 1 << 16;
  static u8* mapped = nullptr;
  if (!mapped) {
    mapped = (u8*)mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(mapped + room, page, PROT_NONE);
  }
  shared = mapped + room - (shared_bytes + 127) / 128 * 128;
  stacks.resize((1 << 16) * 1024);
  body = f, threads = count, late = copies_late, message[0] = 0;
  struct sigaction own = {}, old[3];
  const int signals[3] = {SIGSEGV, SIGBUS, SIGILL};
  own.sa_sigaction = on_fault, own.sa_flags = SA_SIGINFO;
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &own, &old[i]);
  gridDim = {(unsigned)gx, (unsigned)gy};
  if (!sigsetjmp(fault, 1))
    for (unsigned y = 0; y < (unsigned)gy && !message[0]; ++y)
      for (unsigned x = 0; x < (unsigned)gx && !message[0]; ++x) {
        blockIdx = {x, y};
        memset(shared, 0xff, mapped + room - shared);  // NaN
        run_block(count);
      }
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &old[i], nullptr);
  return message;
}
static float half(u32 h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const float x = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024.f + m, e - 25) : std::ldexp((float)m, -24);
  return h & 0x8000 ? -x : x;
}
static u32 to_half(float x) {
  if (std::isnan(x)) return 0x7fff;
  const u32 sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (x >= 65520.f) return sign | 0x7c00;
  int e;
  std::frexp(x, &e);
  if (x == 0 || e < -13) return sign | (u32)std::nearbyint(std::ldexp(x, 24));
  const u32 m = (u32)std::nearbyint(std::ldexp(x, 11 - e));
  return sign | ((u32)(e + 14) * 1024 + m - 1024);
}
static float bits(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static u32 bits(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static u32 to_bf16(float x) {
  const u32 u = bits(x);
  return std::isnan(x) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
template <float (*F)(u32)> static void mma(float* c, const u32* a, u32 b0, u32 b1) {
  auto all = exchange({a[0], a[1], a[2], a[3], b0, b1});
  const int lane = now % 32, row = lane / 4, quad = lane % 4;
  for (int i = 0; i < 4; ++i) {  // c[i]: row or row + 8, column 2*quad + i%2
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const u32* from = all[row * 4 + k % 8 / 2];
      const u32 x = from[i / 2 + 2 * (k / 8)] >> 16 * (k % 2), y = all[(2 * quad + i % 2) * 4 + k % 8 / 2][4 + k / 8] >> 16 * (k % 2);
      sum += (double)F(x & 0xffff) * F(y & 0xffff);
    }
    c[i] = (float)sum;
  }
}
static float bf16(u32 x) { return bits(x << 16); }
}  // namespace emulator

static float __uint_as_float(u32 x) { return emulator::bits(x); }
static float __int_as_float(int x) { return emulator::bits((u32)x); }
static u32 __float_as_uint(float x) { return emulator::bits(x); }
static u32 __byte_perm(u32 x, u32 y, u32 s) {
  const u64 all = (u64)y << 32 | x;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= (u32)(all >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
static void __syncthreads() { emulator::pass(emulator::block_gate, emulator::living); }
static void __syncwarp() { emulator::exchange({0u}); }
static bool __any_sync(u32, bool x) {
  auto all = emulator::exchange({(u32)x});
  u32 any = 0;
  for (int i = 0; i < 32; ++i) any |= all[i][0];
  return any;
}
static float __shfl_xor_sync(u32, float x, int mask) {
  return emulator::bits(emulator::exchange({emulator::bits(x)})[emulator::now % 32 ^ mask][0]);
}
static int __shfl_xor_sync(u32, int x, int mask) { return (int)emulator::exchange({(u32)x})[emulator::now % 32 ^ mask][0]; }
static float __shfl_sync(u32, float x, int from) { return emulator::bits(emulator::exchange({emulator::bits(x)})[from][0]); }
static u32 __ballot_sync(u32, bool x) {
  auto all = emulator::exchange({(u32)x});
  u32 out = 0;
  for (int i = 0; i < 32; ++i) out |= all[i][0] << i;
  return out;
}
static int __ffs(u32 x) { return __builtin_ffs(x); }
static int __shfl_up_sync(u32, int x, int by) {
  auto all = emulator::exchange({(u32)x});
  const int lane = emulator::now % 32;
  return (int)all[lane >= by ? lane - by : lane][0];
}
static int __shfl_sync(u32, int x, int from) { return (int)emulator::exchange({(u32)x})[from][0]; }
DEVICE u32 shared_address(const void* p) { return (u32)((const u8*)p - emulator::shared); }
DEVICE float ex2(float x) { return std::exp2(x); }
DEVICE float lg2(float x) { return std::log2(x); }
DEVICE float sqrt_of(float x) { return std::sqrt(x); }
DEVICE float infinity() { return INFINITY; }
DEVICE u32 pack_half(float lo, float hi) { return emulator::to_half(lo) | emulator::to_half(hi) << 16; }
DEVICE float half_low(u32 x) { return emulator::half(x & 0xffff); }
DEVICE float half_high(u32 x) { return emulator::half(x >> 16); }
DEVICE u32 pack_bf16(float lo, float hi) { return emulator::to_bf16(lo) | emulator::to_bf16(hi) << 16; }
DEVICE float bf16_low(u32 x) { return emulator::bits(x << 16); }
DEVICE float bf16_high(u32 x) { return emulator::bits(x & 0xffff0000u); }
DEVICE u32 transpose8(u32 x) {
  auto all = emulator::exchange({x});
  const int row = emulator::now % 32 / 4, quad = emulator::now % 4;
  auto at = [&](int r, int c) { return all[r * 4 + c / 2][0] >> 16 * (c % 2) & 0xffff; };
  return at(2 * quad, row) | at(2 * quad + 1, row) << 16;
}
DEVICE void mma_half(float* c, const u32* a, u32 b0, u32 b1) { emulator::mma<emulator::half>(c, a, b0, b1); }
DEVICE void mma_bf16(float* c, const u32* a, u32 b0, u32 b1) { emulator::mma<emulator::bf16>(c, a, b0, b1); }
DEVICE void copy16(u32 to, const u8* from) { emulator::begin_copy(emulator::groups[emulator::now].back(), {to, from, 16}); }
DEVICE void prefetch(const u8* p) { (void)*(const volatile u8*)p; }
DEVICE void copy_commit() { emulator::groups[emulator::now].emplace_back(); }
template <int N> DEVICE void copy_wait() {
  auto& g = emulator::groups[emulator::now];
  for (; g.size() > N + 1; g.erase(g.begin())) emulator::land(g[0]);
}
DEVICE void barrier_init(u32) {}
DEVICE void bulk_fence() {}
DEVICE void bulk_copy(u32 to, const u8* from, u32 bytes, u32 bar) {
  emulator::begin_copy(emulator::under_way[bar / 8 % 4096], {to, from, bytes});
  if (!emulator::late) ++emulator::phase[bar / 8 % 4096];
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  auto& copies = emulator::under_way[bar / 8 % 4096];
  if (!copies.empty()) emulator::land(copies), ++emulator::phase[bar / 8 % 4096];
  while ((emulator::phase[bar / 8 % 4096] & 1) == parity) emulator::yield();
}
DEVICE void named_wait(int id, int count) { emulator::pass(emulator::named_gate[id], count); }
DEVICE void named_arrive(int id, int count) { emulator::arrive(emulator::named_gate[id], count); }
DEVICE void wait_for_predecessor() {}
DEVICE void release_successor() {}
