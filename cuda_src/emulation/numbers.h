// Floating point of 16 and 8 bits on the host: exact widening, narrowing to nearest even; TF32 in 32 bits.
#pragma once
#include "machine.h"

namespace emulation {

inline u32 bits_of(float x) {
  u32 bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(u32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

inline float bf16_to_float(u32 half) { return float_of(half << 16); }

inline u32 float_to_bf16(float x) {
  const u32 bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

inline float fp16_to_float(u32 half) {
  const u32 sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return float_of(sign | bits_of(subnormal));
}

inline u32 float_to_fp16(float x) {
  const u32 bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65536 or beyond
  if (magnitude < 0x38800000u) {                        // subnormal: the addition rounds at 2^-24
    const u32 shifted = bits_of(float_of(magnitude) + 0.5f);
    return sign | (shifted - 0x3f000000u);
  }
  const u32 rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | ((rounded - 0x38000000u) >> 13);
}

inline float towards_zero(double x) {
  const float rounded = static_cast<float>(x);
  const double excess = x < 0 ? x - rounded : rounded - x;
  return excess > 0 && bits_of(rounded) << 1 < 0xff000000u ? float_of(bits_of(rounded) - 1) : rounded;
}

// What a tensor core sees of an operand: the 13 low bits are ignored.
inline float tf32_to_float(u32 bits) { return float_of(bits & 0xffffe000u); }

inline u32 float_to_tf32(float x) {  // ties away from zero
  const u32 bits = bits_of(x);
  return ((bits & 0x7fffffffu) < 0x7f800000u ? bits + 0x1000u : bits) & 0xffffe000u;
}

inline float e4m3_to_float(u32 bits) {
  const u32 sign = (bits & 0x80u) << 24, magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return float_of(sign | 0x7fc00000u);
  if (magnitude >= 8u) return float_of(sign | ((magnitude << 20) + 0x3c000000u));
  return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-9f));
}

inline u32 float_to_e4m3(float x) {  // saturating: there is no infinity
  const u32 bits = bits_of(x), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;  // 448
  if (magnitude < 0x3c800000u) {                      // subnormal: the addition rounds at 2^-9
    const u32 shifted = bits_of(float_of(magnitude) + 0x1p14f);
    return sign | (shifted - bits_of(0x1p14f));
  }
  const u32 rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return sign | ((rounded - 0x3c000000u) >> 20);
}

template <bool kIsBf16>
float widen(u32 half) {
  if constexpr (kIsBf16) return bf16_to_float(half);
  else return fp16_to_float(half);
}

template <bool kIsBf16>
u32 narrow(float x) {
  if constexpr (kIsBf16) return float_to_bf16(x);
  else return float_to_fp16(x);
}

}  // namespace emulation
