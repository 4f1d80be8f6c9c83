// The CPU body of every function in cuda_src/ptx_sm80.cuh: same names, same arguments, checked by the machine.
#pragma once
#include "params.cuh"

#include "machine.h"
#include "numbers.h"

#define DEVICE inline
#define EMULATION_JOIN2(a, b) a##b
#define EMULATION_JOIN(a, b) EMULATION_JOIN2(a, b)
#define KERNEL(threads, blocks_per_sm)                                                            \
  static const emulation::LaunchBounds EMULATION_JOIN(launch_bounds_, __LINE__){threads};        \
  extern "C" void
#define GRID_CONSTANT const
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __restrict__

// Every function takes the place it was called from last, filled in by the compiler.
#define SITE emulation::Site site = emulation::Site::here()

struct alignas(8) U32x2 { u32 x, y; };
struct alignas(16) U32x4 { u32 x, y, z, w; };
struct alignas(8) F32x2 { float x, y; };
struct alignas(16) F32x4 { float x, y, z, w; };

// ---- what CUDA has without a header ----
template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }
inline float fmaxf(float a, float b) { return a != a || a < b ? b : a; }  // a NaN loses, as on the device
inline float fminf(float a, float b) { return a != a || b < a ? b : a; }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u32>((static_cast<u64>(a) * b) >> 32); }
inline float __int_as_float(u32 bits) { return emulation::float_of(bits); }
inline u32 __float_as_uint(float x) { return emulation::bits_of(x); }
inline float __uint_as_float(u32 bits) { return emulation::float_of(bits); }

// ---- who am I ----
DEVICE int thread_index() { return static_cast<int>(emulation::identity->thread); }
DEVICE int lane_index() { return static_cast<int>(emulation::identity->lane); }
DEVICE int warp_index() { return static_cast<int>(emulation::identity->warp); }
DEVICE u32 block_index() { return emulation::block_index; }
DEVICE u32 forget(u32 value) { return value; }
template <class T> DEVICE T* forget(T* pointer) { return pointer; }

// ---- shared memory ----
DEVICE u32 shared_base() { return emulation::kSharedBase; }
template <class T> DEVICE T ld_shared(u32 address, SITE) {
  T value;
  __builtin_memcpy(&value, emulation::shared_read("ld_shared", address, sizeof(T), alignof(T), site), sizeof(T));
  return value;
}
template <class T> DEVICE void st_shared(u32 address, T value, SITE) {
  __builtin_memcpy(emulation::shared_write("st_shared", address, sizeof(T), alignof(T), site), &value, sizeof(T));
}
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address, SITE) { emulation::ldmatrix(r, address, false, site); }
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address, SITE) { emulation::ldmatrix(r, address, true, site); }

// ---- global memory ----
template <class T> DEVICE T ld_global(const T* pointer, SITE) {
  T value;
  __builtin_memcpy(&value, emulation::global_read_only("ld_global", pointer, sizeof(T), alignof(T), site), sizeof(T));
  return value;
}
template <class T> DEVICE T ld_global_coherent(const T* pointer, SITE) {
  T value;
  __builtin_memcpy(&value, emulation::global_read("ld_global_coherent", pointer, sizeof(T), alignof(T), site), sizeof(T));
  return value;
}
template <class T> DEVICE void st_global(T* pointer, T value, SITE) {
  __builtin_memcpy(emulation::global_write("st_global", pointer, sizeof(T), alignof(T), site), &value, sizeof(T));
}
DEVICE void red_add_global(float* pointer, float value, SITE) {
  *emulation::global_add("red_add_global", pointer, 4, site) += value;
}
#ifndef WORDS_OF_SM75
constexpr bool kHasVectorReduction = true;
DEVICE void red_add_global(float* pointer, F32x4 v, SITE) {
  float* sum = emulation::global_add("red_add_global", pointer, 16, site);
  sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
}
#endif
DEVICE i32 ld_acquire_global(const i32* pointer, SITE) { return emulation::global_acquire("ld_acquire_global", pointer, site); }
DEVICE void red_release_add_global(i32* pointer, i32 value, SITE) {
  emulation::global_release_add("red_release_add_global", pointer, value, site);
}
DEVICE void fence_global() {}

#ifndef WORDS_OF_SM75
// ---- asynchronous copy ----
DEVICE void cp_async_16(u32 destination, const void* source, bool valid, SITE) {
  emulation::copy_async(destination, source, valid, site);
}
DEVICE void cp_async_commit(SITE) { emulation::copy_async_commit(site); }
template <int kPending> DEVICE void cp_async_wait(SITE) { emulation::copy_async_wait(kPending, site); }

// ---- tensor cores ----
template <bool kIsBf16> DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE) {
  emulation::mma_m16n8k16(d, a, b0, b1, kIsBf16, site);
}
#endif

DEVICE void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE) {
  emulation::mma_m16n8k8_tf32(d, a, b0, b1, site);
}

// ---- threads with each other ----
DEVICE void sync_block(SITE) { emulation::sync_block(site); }
DEVICE void sync_warp(SITE) { emulation::sync_warp(site); }
DEVICE u32 shfl_xor(u32 value, int mask, SITE) { return emulation::shfl_xor(value, mask, site); }
DEVICE i32 shfl_xor(i32 value, int mask, SITE) {
  return static_cast<i32>(emulation::shfl_xor(static_cast<u32>(value), mask, site));
}
DEVICE float shfl_xor(float value, int mask, SITE) {
  return emulation::float_of(emulation::shfl_xor(emulation::bits_of(value), mask, site));
}
DEVICE bool vote_any(bool predicate, SITE) { return emulation::vote(predicate, site) != 0; }
DEVICE bool vote_all(bool predicate, SITE) { return emulation::vote(predicate, site) == ~0u; }
DEVICE u32 ballot(bool predicate, SITE) { return emulation::vote(predicate, site); }
DEVICE bool sync_block_or(bool predicate, SITE) { return emulation::sync_block_or(predicate, site); }

// ---- arithmetic: the approximate instructions are within 2 ulp of these ----
DEVICE float negative_infinity() { return -__builtin_inff(); }
DEVICE float exp2_approx(float x) {
  const float y = __builtin_exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;  // .ftz
}
DEVICE float log2_approx(float x) { return __builtin_log2f(x); }
DEVICE float rcp_approx(float x) { return 1.0f / x; }
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
DEVICE float tanh_approx(float x) { return __builtin_tanhf(x); }
DEVICE u32 abs_f16x2(u32 pair) { return pair & 0x7fff7fffu; }
DEVICE u32 set_lt_f16x2(u32 a, u32 b) {
  const bool low = emulation::widen<false>(a & 0xffffu) < emulation::widen<false>(b & 0xffffu);
  const bool high = emulation::widen<false>(a >> 16) < emulation::widen<false>(b >> 16);
  return (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u);
}
DEVICE u32 round_tf32(float x) { return emulation::float_to_tf32(x); }
#ifndef WORDS_OF_SM75
template <bool kIsBf16> DEVICE u32 pack(float low, float high) {
  return emulation::narrow<kIsBf16>(low) | emulation::narrow<kIsBf16>(high) << 16;
}
#endif
template <bool kIsBf16> DEVICE F32x2 unpack(u32 pair) {
  return {emulation::widen<kIsBf16>(pair & 0xffffu), emulation::widen<kIsBf16>(pair >> 16)};
}
