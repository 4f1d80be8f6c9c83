// One inline function per instruction the Turing kernels use: what ptx_sm80.cuh has for every generation, and those Turing
// has in another form. Included before anything else, it stands in the place of ptx_sm80.cuh; what Turing has no
// instruction for is made of others in substitutes_sm75.cuh. emulation/ptx_sm75.cuh has a second body for each function.
#pragma once
#define WORDS_OF_SM75
#include "ptx_sm80.cuh"

// The kernels are the sm80 family's sources; their entries carry this family's name.
#define attention_forward_sm80 attention_forward_sm75
#define attention_backward_sm80 attention_backward_sm75
#define attention_backward_dq attention_backward_dq_sm75
#define attention_backward_bias attention_backward_bias_sm75

// ---- tensor cores: d[16x8] += a[16x8] b[8x8], fp16 in, fp32 accumulators ----
DEVICE void mma_m16n8k8(float (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b0));
}

// ---- arithmetic ----
// Two fp16 values in one register, the first in the low half; Turing converts one at a time and has no bf16.
template <bool kIsBf16> DEVICE u32 pack(float low, float high) {
  static_assert(!kIsBf16, "Turing has no bfloat16");
  u32 r;
  asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(r) : "f"(low), "f"(high));
  return r;
}
