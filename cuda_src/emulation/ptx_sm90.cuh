// The CPU body of every function in cuda_src/ptx_sm90.cuh: same names, same arguments, checked by the machine.
#pragma once
#include "params_sm90.cuh"
#include "ptx_sm80.cuh"

#include "machine_sm90.h"

static_assert(sizeof(emulation::TensorMapFields) <= sizeof(TensorMap), "fits where the real map lies");

// ---- e4m3 ----
DEVICE u32 pack_e4m3(float a, float b, float c, float d) {
  using emulation::float_to_e4m3;
  return float_to_e4m3(a) | float_to_e4m3(b) << 8 | float_to_e4m3(c) << 16 | float_to_e4m3(d) << 24;
}
DEVICE float unpack_e4m3(u8 bits) { return emulation::e4m3_to_float(bits); }
DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
  const u64 bytes = static_cast<u64>(high) << 32 | low;
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) result |= static_cast<u32>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}


// ---- roles ----
DEVICE int uniform(int value, SITE) { return static_cast<int>(emulation::shfl(static_cast<u32>(value), 0, site)); }
DEVICE float shfl(float value, int lane, SITE) {
  return emulation::float_of(emulation::shfl(emulation::bits_of(value), lane, site));
}
DEVICE bool elect(SITE) { return emulation::elect(site); }
DEVICE u32 grid_size() { return emulation::grid_size(); }
template <int kRegisters> DEVICE void setmaxnreg_inc(SITE) { emulation::set_max_registers(kRegisters, true, site); }
template <int kRegisters> DEVICE void setmaxnreg_dec(SITE) { emulation::set_max_registers(kRegisters, false, site); }
DEVICE u32 atomic_add_global(u32* pointer, u32 value, SITE) { return emulation::atomic_add(pointer, value, site); }

// ---- named barriers ----
DEVICE void barrier_sync(int id, int threads, SITE) {
  emulation::barrier_sync(static_cast<u32>(id), static_cast<u32>(threads), site);
}
DEVICE void barrier_arrive(int id, int threads, SITE) {
  emulation::barrier_arrive(static_cast<u32>(id), static_cast<u32>(threads), site);
}

// ---- mbarriers ----
DEVICE void mbarrier_init(u32 barrier, u32 arrivals, SITE) { emulation::mbarrier_init(barrier, arrivals, site); }
DEVICE void mbarrier_arrive(u32 barrier, SITE) { emulation::mbarrier_arrive("mbarrier_arrive", barrier, 0, site); }
DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes, SITE) {
  emulation::mbarrier_arrive("mbarrier_arrive_expect_tx", barrier, bytes, site);
}
DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity, SITE) {
  return emulation::mbarrier_done("mbarrier_try_wait", barrier, parity, site);
}
DEVICE bool mbarrier_test_wait(u32 barrier, u32 parity, SITE) {
  return emulation::mbarrier_done("mbarrier_test_wait", barrier, parity, site);
}
DEVICE void mbarrier_wait(u32 barrier, u32 parity, SITE) {
  while (!emulation::mbarrier_done("mbarrier_wait", barrier, parity, site)) {}
}
DEVICE void fence_mbarrier_init(SITE) { emulation::fence_mbarrier_init(site); }
DEVICE void fence_proxy_async(SITE) { emulation::fence_proxy_async(site); }

// ---- TMA and bulk copies ----
DEVICE void tma_load_4d(u32 destination, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, SITE) {
  emulation::tma_load(destination, map, barrier, 4, {c0, c1, c2, c3, 0}, site);
}
DEVICE void tma_load_5d(u32 destination, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4, SITE) {
  emulation::tma_load(destination, map, barrier, 5, {c0, c1, c2, c3, c4}, site);
}
DEVICE void tma_store_5d(const TensorMap* map, u32 source, int c0, int c1, int c2, int c3, int c4, SITE) {
  emulation::tma_store(map, source, {c0, c1, c2, c3, c4}, site);
}
DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, SITE) {
  emulation::bulk_load(destination, source, bytes, barrier, site);
}
DEVICE void bulk_reduce_add_f32(float* destination, u32 source, u32 bytes, SITE) {
  emulation::bulk_reduce_add_f32(destination, source, bytes, site);
}
DEVICE void bulk_commit(SITE) { emulation::bulk_commit(site); }
template <int kPending> DEVICE void bulk_wait_read(SITE) { emulation::bulk_wait(kPending, site); }
template <int kPending> DEVICE void bulk_wait(SITE) { emulation::bulk_wait(kPending, site); }

DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4], SITE) { emulation::stmatrix(address, r, site); }

// ---- wgmma ----
DEVICE void wgmma_fence(SITE) { emulation::wgmma_fence(site); }
DEVICE void wgmma_commit(SITE) { emulation::wgmma_commit(site); }
template <int kPending> DEVICE void wgmma_wait(SITE) { emulation::wgmma_wait(kPending, site); }
// Holds back an optimiser that does not know wgmma; here the wait is a call like any other.
DEVICE void pin(float&) {}
DEVICE void pin_order(float&, float&) {}
template <int kCount> DEVICE void pin(float (&)[kCount]) {}
template <int kCount> DEVICE void pin(u32 (&)[kCount]) {}

template <int N, bool kIsBf16, bool kTransA, bool kTransB>
DEVICE void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, bool accumulate, SITE) {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256, "columns of a wgmma");
  emulation::wgmma(d, {N, emulation::half_type(kIsBf16), false, kTransA, kTransB}, a, nullptr, b, accumulate, site);
}
template <int N, bool kIsBf16, bool kTransB>
DEVICE void wgmma_rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate, SITE) {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256, "columns of a wgmma");
  const u32 a[4] = {a0, a1, a2, a3};
  emulation::wgmma(d, {N, emulation::half_type(kIsBf16), true, false, kTransB}, 0, a, b, accumulate, site);
}
template <int N> DEVICE void wgmma_e4m3_ss(float (&d)[N / 2], u64 a, u64 b, bool accumulate, SITE) {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256, "columns of a wgmma");
  emulation::wgmma(d, {N, emulation::WgmmaType::kE4m3, false, false, false}, a, nullptr, b, accumulate, site);
}
template <int N>
DEVICE void wgmma_e4m3_rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate, SITE) {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256, "columns of a wgmma");
  const u32 a[4] = {a0, a1, a2, a3};
  emulation::wgmma(d, {N, emulation::WgmmaType::kE4m3, true, false, false}, 0, a, b, accumulate, site);
}
