// What the sm80 family's kernels ask of the hardware and Turing lacks, made of what it has: the product of 16 columns,
// copies that go on in the background, reductions of four floats. Same names, same arguments, same results.
#pragma once
#include "ptx_sm75.cuh"

// Fragments as tile.cuh draws them: columns 0-7 of A lie in a0 and a1, rows 0-7 of B in b0, the others in the rest.
template <bool kIsBf16> DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(!kIsBf16, "Turing's tensor cores take no bfloat16");
  mma_m16n8k8(d, a[0], a[1], b0);
  mma_m16n8k8(d, a[2], a[3], b1);
}

// 16 bytes through registers, zeroes where not valid (the source is not read then). They are in shared memory when the
// thread goes on, so there is nothing to wait for but the other threads: the barrier after a wait does that.
DEVICE void cp_async_16(u32 destination, const void* source, bool valid) {
  U32x4 bytes = {0, 0, 0, 0};
  if (valid) bytes = ld_global((const U32x4*)source);
  st_shared(destination, bytes);
}
DEVICE void cp_async_commit() {}
template <int kPending> DEVICE void cp_async_wait() {}

// One float at a time, on newer devices too: the order of dq_accum depends on it.
constexpr bool kHasVectorReduction = false;
DEVICE void red_add_global(float* pointer, F32x4 v) {
  red_add_global(pointer, v.x);
  red_add_global(pointer + 1, v.y);
  red_add_global(pointer + 2, v.z);
  red_add_global(pointer + 3, v.w);
}
