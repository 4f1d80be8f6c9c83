// One inline function per instruction the Hopper kernels use beyond ptx_sm80.cuh: mbarriers, TMA, wgmma.
// The same rules hold: kernels contain no asm, and emulation/ptx_sm90.cuh has a second body for each function.
#pragma once
#include "params_sm90.cuh"
#include "ptx_sm80.cuh"

// ---- e4m3: 4 exponent and 3 mantissa bits, up to 448, no infinity ----
// Four numbers as the nearest e4m3, saturated, the first in the low byte.
DEVICE u32 pack_e4m3(float a, float b, float c, float d) {
  u32 r;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
DEVICE float unpack_e4m3(u8 bits) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)bits));
  return unpack<false>(pair).x;
}
// Four of the eight bytes of low and high, by the nibbles of the selector.
DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }


// ---- roles ----
// The value of lane 0, which the compiler then knows to be the same in the whole warp.
DEVICE int uniform(int value) { return __shfl_sync(~0u, value, 0); }
// True in one lane of a converged warp, the same one each time: what it arrives for, it has written.
DEVICE bool elect() {
  u32 elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}
DEVICE u32 grid_size() { return gridDim.x; }
// Moves registers between warpgroups; every warp of the warpgroup executes it.
template <int kRegisters> DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

DEVICE u32 atomic_add_global(u32* pointer, u32 value) { return atomicAdd(pointer, value); }

// ---- named barriers of `threads` threads; 0 is sync_block's ----
DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- mbarriers: 8 bytes of shared memory; a wait names the parity of the phase it waits for ----
DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// May suspend the thread for a while.
DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
// Never suspends.
DEVICE bool mbarrier_test_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {}
}
// Makes initialised mbarriers visible to TMA.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Orders this thread's ordinary accesses to shared memory before later ones by wgmma and TMA.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- TMA: one thread moves a box; a load completes `bytes` on an mbarrier, a store belongs to a bulk group ----
DEVICE void tma_load_4d(u32 destination, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];"
               ::"r"(destination), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
DEVICE void tma_load_5d(u32 destination, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], [%2];"
               ::"r"(destination), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
DEVICE void tma_store_5d(const TensorMap* map, u32 source, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];"
               ::"l"(map), "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
// Plain runs of bytes, multiples of 16 in size and address.
DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(destination), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void bulk_reduce_add_f32(float* destination, u32 source, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(destination), "r"(source), "r"(bytes) : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the latest kPending groups of this thread have read their shared memory (wait_read), are complete (wait).
template <int kPending> DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending> DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// ---- wgmma: d [64 x N] (+)= a [64 x 16] b [16 x N] by a warpgroup, asynchronous until wgmma_wait ----
// Accumulators of thread (warp w, lane 4 g + t): d[4 j + e] is row 16 w + g + 8 (e / 2), column 8 j + 2 t + e % 2: the C
// fragments of mma.m16n8k16 side by side, and packed in pairs the A fragments of the next product.

// Before the first wgmma of a batch: its registers were last touched by ordinary instructions.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// After a wait: the compiler must not read accumulators before this point. No instruction.
DEVICE void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
template <int kCount> DEVICE void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) pin(registers[i]);
}
// What is computed from `second` comes after `first`. No instruction.
DEVICE void pin_order(float& first, float& second) { asm volatile("" : "+f"(first), "+f"(second)::"memory"); }
template <int kCount> DEVICE void pin(u32 (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Text and operands of the first n accumulators.
#define WGMMA_TEXT_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_TEXT_24 WGMMA_TEXT_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_TEXT_32 WGMMA_TEXT_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_TEXT_40 WGMMA_TEXT_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_TEXT_48 WGMMA_TEXT_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_TEXT_56 WGMMA_TEXT_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_TEXT_64 WGMMA_TEXT_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_TEXT_72 WGMMA_TEXT_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_TEXT_80 WGMMA_TEXT_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_TEXT_88 WGMMA_TEXT_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_TEXT_96 WGMMA_TEXT_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_TEXT_112                                                                                                \
  WGMMA_TEXT_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_TEXT_128                                                                                                \
  WGMMA_TEXT_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,"   \
                "%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_OF_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_OF_16 WGMMA_OF_8(0), WGMMA_OF_8(8)
#define WGMMA_OF_24 WGMMA_OF_16, WGMMA_OF_8(16)
#define WGMMA_OF_32 WGMMA_OF_24, WGMMA_OF_8(24)
#define WGMMA_OF_40 WGMMA_OF_32, WGMMA_OF_8(32)
#define WGMMA_OF_48 WGMMA_OF_40, WGMMA_OF_8(40)
#define WGMMA_OF_56 WGMMA_OF_48, WGMMA_OF_8(48)
#define WGMMA_OF_64 WGMMA_OF_56, WGMMA_OF_8(56)
#define WGMMA_OF_72 WGMMA_OF_64, WGMMA_OF_8(64)
#define WGMMA_OF_80 WGMMA_OF_72, WGMMA_OF_8(72)
#define WGMMA_OF_88 WGMMA_OF_80, WGMMA_OF_8(80)
#define WGMMA_OF_96 WGMMA_OF_88, WGMMA_OF_8(88)
#define WGMMA_OF_112 WGMMA_OF_96, WGMMA_OF_8(96), WGMMA_OF_8(104)
#define WGMMA_OF_128 WGMMA_OF_96, WGMMA_OF_8(96), WGMMA_OF_8(104), WGMMA_OF_8(112), WGMMA_OF_8(120)

// One instruction. N columns, n = N / 2 accumulators, and the numbers of the operands that follow those.
#define WGMMA_SS(N, n, type, o0, o1, o2, o3, o4)                                                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #o2 ", 0; "                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" WGMMA_TEXT_##n "}, "            \
               "%" #o0 ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 ";}"                                                  \
               : WGMMA_OF_##n : "l"(a), "l"(b), "r"((int)accumulate), "n"((int)kTransA), "n"((int)kTransB))
#define WGMMA_RS(N, n, type, o0, o1, o2, o3, o4, o5, o6)                                                            \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #o5 ", 0; "                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" WGMMA_TEXT_##n "}, "            \
               "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, %" #o6 ";}"                            \
               : WGMMA_OF_##n : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"((int)accumulate), "n"((int)kTransB))

// The same in e4m3: k32, the reduced dimension always along the rows.
#define WGMMA_SS_E4M3(N, n, o0, o1, o2)                                                                             \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #o2 ", 0; "                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_TEXT_##n "}, "                    \
               "%" #o0 ", %" #o1 ", p, 1, 1;}"                                                                      \
               : WGMMA_OF_##n : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA_RS_E4M3(N, n, o0, o1, o2, o3, o4, o5)                                                                 \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #o5 ", 0; "                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_TEXT_##n "}, "                    \
               "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1;}"                                      \
               : WGMMA_OF_##n : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"((int)accumulate))

template <int N> struct Wgmma;
#define WGMMA_SHAPE(N, n, o0, o1, o2, o3, o4, o5, o6)                                                               \
  template <> struct Wgmma<N> {                                                                                     \
    template <bool kIsBf16, bool kTransA, bool kTransB>                                                             \
    static DEVICE void ss(float (&d)[n], u64 a, u64 b, bool accumulate) {                                           \
      if constexpr (kIsBf16) WGMMA_SS(N, n, "bf16", o0, o1, o2, o3, o4);                                            \
      else WGMMA_SS(N, n, "f16", o0, o1, o2, o3, o4);                                                               \
    }                                                                                                               \
    template <bool kIsBf16, bool kTransB>                                                                           \
    static DEVICE void rs(float (&d)[n], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate) {                  \
      if constexpr (kIsBf16) WGMMA_RS(N, n, "bf16", o0, o1, o2, o3, o4, o5, o6);                                    \
      else WGMMA_RS(N, n, "f16", o0, o1, o2, o3, o4, o5, o6);                                                       \
    }                                                                                                               \
    static DEVICE void ss_e4m3(float (&d)[n], u64 a, u64 b, bool accumulate) {                                      \
      WGMMA_SS_E4M3(N, n, o0, o1, o2);                                                                              \
    }                                                                                                               \
    static DEVICE void rs_e4m3(float (&d)[n], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate) {             \
      WGMMA_RS_E4M3(N, n, o0, o1, o2, o3, o4, o5);                                                                  \
    }                                                                                                               \
  };
WGMMA_SHAPE(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA_SHAPE(48, 24, 24, 25, 26, 27, 28, 29, 30)
WGMMA_SHAPE(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_SHAPE(80, 40, 40, 41, 42, 43, 44, 45, 46)
WGMMA_SHAPE(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_SHAPE(112, 56, 56, 57, 58, 59, 60, 61, 62)
WGMMA_SHAPE(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_SHAPE(144, 72, 72, 73, 74, 75, 76, 77, 78)
WGMMA_SHAPE(160, 80, 80, 81, 82, 83, 84, 85, 86)
WGMMA_SHAPE(176, 88, 88, 89, 90, 91, 92, 93, 94)
WGMMA_SHAPE(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_SHAPE(224, 112, 112, 113, 114, 115, 116, 117, 118)
WGMMA_SHAPE(256, 128, 128, 129, 130, 131, 132, 133, 134)

// Operands: a descriptor of shared memory (see tile_sm90.cuh), or A in registers. Without kTrans an operand is stored with
// the reduced dimension (k16) along its rows, with kTrans across them. accumulate = false: d is overwritten.
template <int N, bool kIsBf16, bool kTransA, bool kTransB>
DEVICE void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  Wgmma<N>::template ss<kIsBf16, kTransA, kTransB>(d, a, b, accumulate);
}
template <int N, bool kIsBf16, bool kTransB>
DEVICE void wgmma_rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate) {
  Wgmma<N>::template rs<kIsBf16, kTransB>(d, a0, a1, a2, a3, b, accumulate);
}
// k32 of e4m3. A in registers: a0 is row g, k 4 t .. 4 t + 3; a1 row g + 8; a2 and a3 the same 16 further.
template <int N> DEVICE void wgmma_e4m3_ss(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  Wgmma<N>::ss_e4m3(d, a, b, accumulate);
}
template <int N>
DEVICE void wgmma_e4m3_rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate) {
  Wgmma<N>::rs_e4m3(d, a0, a1, a2, a3, b, accumulate);
}
