// From q.k to the score in base 2 where there is more than a scale: softcap, bias, ALiBi.
#pragma once
#include "mask.cuh"
#include "softmax.cuh"

// Without these the score stays q.k and softmax's own FFMA scales it.
constexpr bool kTransformsScores = kHasSoftcap || kHasBias || kHasAlibi;
constexpr bool kCapsInSoftmax = kHasSoftcap && !kHasBias && !kHasAlibi;  // forward_sm80: a softcap alone goes into softmax's FFMA too

// Per key head, of a query head: what numbers of 8 bits are to be multiplied by; 1 without.
DEVICE float descale(const Params& p, const float* factors, int batch, int head) {
  return factors ? ld_global(factors + ((i64)batch * p.num_heads_kv + head / (p.num_heads_q / p.num_heads_kv))) : 1.f;
}
// What q.k is multiplied by. A descale of 0, of a tensor of zeros, must not make -inf of a hidden score a NaN.
DEVICE float score_scale(const Params& p, int batch, int head) {
  if constexpr (!kIsE4m3) return p.softmax_scale;
  else return maximum(p.softmax_scale * descale(p, p.q_descale, batch, head) * descale(p, p.k_descale, batch, head), 1e-30f);
}

struct Scores {
  float scale_log2;        // softmax_scale * log2(e)
  float tanh_log2;         // softmax_scale / softcap * 2 log2(e): the argument of tanh, as exp2 takes it
  float softcap_log2;      // softcap * log2(e)
  float slope_log2;        // ALiBi slope * log2(e)
  DEVICE float argument() const { return tanh_log2 * (kLn2 / 2.f); }  // of tanh, for a q.k of 1
};

DEVICE Scores scores_of(const Params& p, const Sequence& s, int head) {
  Scores scores = {};
  const float scale = score_scale(p, s.batch, head);
  scores.scale_log2 = scale * kLog2e;
  if constexpr (kHasSoftcap) {
    scores.tanh_log2 = scale / p.softcap * (2.f * kLog2e);
    scores.softcap_log2 = p.softcap * kLog2e;
  }
  if constexpr (kHasAlibi) scores.slope_log2 = ld_global(p.alibi_slopes + (s.batch * p.alibi_stride_batch + head)) * kLog2e;
  return scores;
}

// tanh(x) for x_log2 = 2 x log2(e), as 1 - 2 / (1 + e^2x): absolute error near 1e-7, where tanh.approx would cost 5e-4 of
// the softcap, more than fp16 inputs lose.
DEVICE float tanh_of(float x_log2) { return 1.f - 2.f * rcp_approx(1.f + exp2_approx(x_log2)); }

DEVICE float widen(u16 bits) { return unpack<kIsBf16>(bits).x; }
DEVICE float widen(float x) { return x; }

// Score in base 2 of row i, key j from q.k and its bias. `derivative` becomes d(softcap)/d(its argument).
DEVICE float score_log2(const Sequence& s, const Scores& scores, float qk, float bias, int i, int j, float& derivative) {
  float x = qk * scores.scale_log2;
  derivative = 1.f;
  if constexpr (kHasSoftcap) {
    const float t = tanh_of(qk * scores.tanh_log2);
    x = scores.softcap_log2 * t;
    derivative = 1.f - t * t;
  }
  if constexpr (kHasAlibi) {
    const int distance = i + s.diagonal - j;
    x -= scores.slope_log2 * (float)(distance < 0 ? -distance : distance);
  }
  if constexpr (kHasBias) x += bias * kLog2e;
  return x;
}

// Softcap where tanh has an argument of at most kSmallTanh, without exp2 and reciprocal: c tanh(a x) as an odd polynomial in x,
// the one of its degree that is nearest to tanh: absolute error 1.2e-6 c, which 16-bit q and k hide and fp32 does not.
constexpr float kSmallTanh = 0.4f, kTanh1 = 0.99997883f, kTanh3 = -0.33225415f, kTanh5 = 0.11942328f;
struct Cap {
  float c1, c3, c5;  // c5 > 0: a hidden score stays -inf (calls in which it would underflow are declined, execution.py)
  DEVICE float factor(float x) const {
    const float w = x * x;
    return c1 + w * (c3 + w * c5);
  }
  DEVICE float of(float x) const { return x * factor(x); }
  DEVICE float minus(float x, float, float offset) const { return x * factor(x) - offset; }
};

DEVICE Cap small_cap_of(const Scores& scores) {
  const float argument = scores.argument(), square = argument * argument, first = scores.softcap_log2 * argument;
  return {first * kTanh1, first * square * kTanh3, first * square * square * kTanh5};
}
constexpr Cap kScoresThemselves = {1.f, 0.f, 1e-30f};

// The Cap that makes scores in base 2 of a warp's q.k. Where one is too large for it, all are replaced by their scores, which the
// Cap returned leaves as they are.
template <int kM, int kN> DEVICE Cap cap_of(float (&s_frag)[kM][kN][4], const Scores& scores) {
  float largest = 0.f;  // of the sums of four: one maximum in four
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; n += 2)
#pragma unroll
      for (int e = 0; e < 4; e += 2)
        largest = maximum(largest, (fabsf(s_frag[m][n][e]) + fabsf(s_frag[m][n][e + 1])) +
                                       (fabsf(s_frag[m][n + 1][e]) + fabsf(s_frag[m][n + 1][e + 1])));
  if (!kIsFp32 && vote_all(largest * scores.argument() <= kSmallTanh)) return small_cap_of(scores);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s_frag[m][n][e] = scores.softcap_log2 * tanh_of(s_frag[m][n][e] * scores.tanh_log2);
  return kScoresThemselves;
}

// Scores of C fragments [16 kM queries x 8 kN keys] in place; (i, j) is this thread's first element. bias_of(m, half, n) is the
// bias of the two elements of that row in fragment n.
template <int kM, int kN, class BiasOf>
DEVICE void transform(float (&s_frag)[kM][kN][4], const Sequence& s, const Scores& scores, int i, int j, const BiasOf& bias_of) {
  const float distance = (float)(i + s.diagonal - j);
  Cap cap = {};
  if constexpr (kHasSoftcap) cap = cap_of(s_frag, scores);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const F32x2 bias = bias_of(m, half, n);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = s_frag[m][n][half * 2 + e];
          score = kHasSoftcap ? cap.of(score) : score * scores.scale_log2;
          if constexpr (kHasAlibi) score -= scores.slope_log2 * fabsf(distance + (float)(m * 16 + half * 8 - n * 8 - e));
          if constexpr (kHasBias) score += (e ? bias.y : bias.x) * kLog2e;
        }
      }
}
