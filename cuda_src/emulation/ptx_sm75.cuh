// The CPU body of every function in cuda_src/ptx_sm75.cuh: same names, same arguments, checked by the machine.
#pragma once
#define WORDS_OF_SM75
#include "ptx_sm80.cuh"

#define attention_forward_sm80 attention_forward_sm75
#define attention_backward_sm80 attention_backward_sm75
#define attention_backward_dq attention_backward_dq_sm75
#define attention_backward_bias attention_backward_bias_sm75

// ---- tensor cores ----
DEVICE void mma_m16n8k8(float (&d)[4], u32 a0, u32 a1, u32 b0, SITE) { emulation::mma_m16n8k8(d, a0, a1, b0, site); }

// ---- arithmetic ----
template <bool kIsBf16> DEVICE u32 pack(float low, float high) {
  static_assert(!kIsBf16, "Turing has no bfloat16");
  return emulation::narrow<false>(low) | emulation::narrow<false>(high) << 16;
}
