// One inline function per instruction the sm80 family uses, named as PTX names it, no logic inside.
// Kernels hold no asm and no raw dereference: everything that touches memory or other threads goes through
// here, and emulation/ptx_sm80.cuh gives each function a second body that runs on a CPU and checks it.
#pragma once
#include "params.cuh"

#define DEVICE __device__ __forceinline__
// A kernel: unmangled, so that it is found by name; one by-value Params.
#define KERNEL(threads, blocks_per_sm) extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm)
#define GRID_CONSTANT const __grid_constant__

struct alignas(8) U32x2 { u32 x, y; };
struct alignas(16) U32x4 { u32 x, y, z, w; };
struct alignas(8) F32x2 { float x, y; };
struct alignas(16) F32x4 { float x, y, z, w; };

// ---- who am I ----
DEVICE int thread_index() { return threadIdx.x; }
DEVICE int lane_index() { return threadIdx.x & 31; }
DEVICE int warp_index() { return threadIdx.x >> 5; }
DEVICE u32 block_index() { return blockIdx.x; }
// The same value, of which the compiler no longer knows where it comes from: what it is made of need not be kept in registers, and
// what follows from it is worked out anew.
DEVICE u32 forget(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <class T> DEVICE T* forget(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// ---- shared memory: 32-bit addresses, never pointers ----
DEVICE u32 shared_base() {
  extern __shared__ __align__(1024) u8 dynamic_shared_memory[];
  return (u32)__cvta_generic_to_shared(dynamic_shared_memory);
}
template <class T> DEVICE T ld_shared(u32 address) { return *(const T*)__cvta_shared_to_generic(address); }
template <class T> DEVICE void st_shared(u32 address, T value) { *(T*)__cvta_shared_to_generic(address) = value; }

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// ---- global memory ----
template <class T> DEVICE T ld_global(const T* pointer) { return __ldg(pointer); }          // read-only for the whole launch
template <> DEVICE U32x4 ld_global(const U32x4* pointer) {
  U32x4 v;
  asm volatile("ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
  return v;
}
template <> DEVICE F32x2 ld_global(const F32x2* pointer) {
  F32x2 v;
  asm volatile("ld.global.nc.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(pointer));
  return v;
}
template <> DEVICE F32x4 ld_global(const F32x4* pointer) {
  F32x4 v;
  asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(pointer));
  return v;
}
template <class T> DEVICE T ld_global_coherent(const T* pointer) { return *(const volatile T*)pointer; }  // written in this launch
template <class T> DEVICE void st_global(T* pointer, T value) { *pointer = value; }
DEVICE void red_add_global(float* pointer, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(pointer), "f"(value) : "memory");
}
#ifndef WORDS_OF_SM75  // ptx_sm75.cuh takes all that is not so guarded, and has its own for the rest
// Four neighbouring floats; one instruction where the hardware has it.
#if __CUDA_ARCH__ >= 900
constexpr bool kHasVectorReduction = true;
DEVICE void red_add_global(float* pointer, F32x4 v) {
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(pointer), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
#else
constexpr bool kHasVectorReduction = false;
DEVICE void red_add_global(float* pointer, F32x4 v) {
  red_add_global(pointer, v.x); red_add_global(pointer + 1, v.y); red_add_global(pointer + 2, v.z); red_add_global(pointer + 3, v.w);
}
#endif
#endif
DEVICE i32 ld_acquire_global(const i32* pointer) {
  i32 v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
  return v;
}
DEVICE void red_release_add_global(i32* pointer, i32 value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
DEVICE void fence_global() { __threadfence(); }

#ifndef WORDS_OF_SM75
// ---- asynchronous copy: 16 bytes, zero-filled where not valid (source is not read then) ----
DEVICE void cp_async_16(u32 destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// ---- tensor cores: d[16x8] += a[16x16] b[16x8], fp32 accumulators ----
template <bool kIsBf16> DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kIsBf16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// d[16x8] += a[16x8] b[8x8] of TF32: fp32 numbers whose 13 low bits count for nothing.
DEVICE void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- threads with each other ----
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shfl_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE u32 shfl_xor(u32 value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE i32 shfl_xor(i32 value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE bool vote_any(bool predicate) { return __any_sync(~0u, predicate); }
DEVICE bool vote_all(bool predicate) { return __all_sync(~0u, predicate); }
DEVICE u32 ballot(bool predicate) { return __ballot_sync(~0u, predicate); }  // bit l: lane l's
DEVICE bool sync_block_or(bool predicate) { return __syncthreads_or(predicate); }

// ---- arithmetic ----
DEVICE float negative_infinity() { return __int_as_float(0xff800000); }
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two fp16 values in one register.
DEVICE u32 abs_f16x2(u32 pair) {
  u32 r;
  asm("abs.f16x2 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
DEVICE u32 set_lt_f16x2(u32 a, u32 b) {  // 0xffff where a < b, else 0
  u32 r;
  asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// The nearest TF32 number, ties away from zero.
DEVICE u32 round_tf32(float x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
#ifndef WORDS_OF_SM75
// Two 16-bit values in one register, the first in the low half.
template <bool kIsBf16> DEVICE u32 pack(float low, float high) {
  u32 r;
  if constexpr (kIsBf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
#endif
template <bool kIsBf16> DEVICE F32x2 unpack(u32 pair) {
  if constexpr (kIsBf16) return {__int_as_float(pair << 16), __int_as_float(pair & 0xffff0000u)};
  F32x2 v;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(v.x), "=f"(v.y) : "r"(pair));
  return v;
}
