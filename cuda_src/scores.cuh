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
// In 8 bits, by factors that only the device knows, a scale may be anything: neither 0, which makes NaN of a hidden score's -inf, nor Inf
// (or NaN, which is what Inf divided is here), which makes it of a q.k of 0.
DEVICE float within_range(float scale) { return kIsE4m3 ? maximum(-maximum(-scale, -1e30f), 1e-30f) : scale; }
// What q.k is multiplied by.
DEVICE float score_scale(const Params& p, int batch, int head) {
  if constexpr (!kIsE4m3) return p.softmax_scale;
  else return within_range(p.softmax_scale * descale(p, p.q_descale, batch, head) * descale(p, p.k_descale, batch, head));
}

struct Scores {
  float scale_log2;        // softmax_scale * log2(e)
  float argument;          // softmax_scale / softcap: of tanh, for a q.k of 1
  float softcap_log2;      // softcap * log2(e)
  float slope_log2;        // ALiBi slope * log2(e)
};

// a / b to an ulp, without the branch a division takes: scores_of() may stand in a loop.
DEVICE float quotient(float a, float b) {
  const float inverse = rcp_approx(b), estimate = a * inverse;
  return estimate + inverse * (a - estimate * b);
}
DEVICE Scores scores_of(const Params& p, const Sequence& s, int head) {
  Scores scores = {};
  const float scale = score_scale(p, s.batch, head);
  scores.scale_log2 = scale * kLog2e;
  if constexpr (kHasSoftcap) {
    scores.argument = within_range(quotient(scale, p.softcap));
    scores.softcap_log2 = p.softcap * kLog2e;
  }
  if constexpr (kHasAlibi) scores.slope_log2 = ld_global(p.alibi_slopes + (s.batch * p.alibi_stride_batch + head)) * kLog2e;
  return scores;
}

DEVICE float widen(u16 bits) { return unpack<kIsBf16>(bits).x; }
DEVICE float widen(float x) { return x; }

// tanh as 1 - 2 / (1 + e^2x): exact to 1e-7. (tanh.approx would cost 5e-4 of the softcap, more than fp16 inputs lose.)
DEVICE float large_tanh_of(float x) { return 1.f - 2.f * rcp_approx(1.f + exp2_approx(x * (2.f * kLog2e))); }
// tanh to about 2 ulp of itself: of small arguments by the odd polynomial of its degree that is nearest relative to it, 4e-8.
DEVICE float tanh_of(float x) {
  const float w = x * x, rest = -0.33332947f + w * (0.13320725f + w * (-0.05267181f + w * 0.01643758f));
  return fabsf(x) < 0.55f ? x + x * w * rest : large_tanh_of(x);
}

// Score in base 2 of row i, key j from q.k, with a softcap from tanh(argument * q.k), and its bias. `derivative` becomes
// d(softcap)/d(its argument).
DEVICE float score_log2(const Sequence& s, const Scores& scores, float qk, float bias, int i, int j, float& derivative) {
  float x = qk * (kHasSoftcap ? scores.softcap_log2 : scores.scale_log2);
  derivative = kHasSoftcap ? 1.f - qk * qk : 1.f;
  if constexpr (kHasAlibi) {
    const int distance = i + s.diagonal - j;
    x -= scores.slope_log2 * (float)(distance < 0 ? -distance : distance);
  }
  if constexpr (kHasBias) x += bias * kLog2e;
  return x;
}

// c tanh(a x) where |a x| is at most kSmallTanh, without exp2 and reciprocal: an odd polynomial in x, the one of its degree that is
// nearest to tanh: absolute error 1.2e-6 c, relative error 2e-5, which 16-bit q and k hide and fp32 does not.
constexpr float kSmallTanh = 0.4f, kTanh1 = 0.99997883f, kTanh3 = -0.33225415f, kTanh5 = 0.11942328f;
struct Cap {
  float c1, c3, c5;  // c5 > 0: a hidden score stays -inf
  DEVICE float factor(float x) const {
    const float w = x * x;
    return c1 + w * (c3 + w * c5);
  }
  DEVICE float of(float x) const { return x * factor(x); }
  DEVICE float minus(float x, float, float offset) const { return x * factor(x) - offset; }
};
// Calls whose coefficients leave the range of fp32 are declined (execution.py). In 8 bits factors may do that here: where they are too
// small, q.k is far too small for what they add; where they are too large, only a q.k of 0 takes them.
DEVICE Cap small_cap_of(float c, float a) {
  const float first = c * a, third = first * a * a, fifth = third * a * a;
  const auto finite = [](float x) { return maximum(-maximum(-x, -1e37f), -1e37f); };
  if constexpr (kIsE4m3) return {finite(first * kTanh1), finite(third * kTanh3), maximum(finite(fifth * kTanh5), 1e-44f)};
  else return {first * kTanh1, third * kTanh3, fifth * kTanh5};
}
constexpr Cap kScoresThemselves = {1.f, 0.f, 1e-44f};  // to an ulp up to 1e9, the largest softcap taken

// f of every number of a fragment.
template <class F> DEVICE void each(float& x, const F& f) { f(x); }
template <class T, int kCount, class F> DEVICE void each(T (&frag)[kCount], const F& f) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) each(frag[i], f);
}
// No |q.k| of these is larger: the sums of four, one maximum in four.
template <int kCount> DEVICE float bound_of(const float (&frag)[kCount]) {
  float largest;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float sum = (fabsf(frag[i]) + fabsf(frag[i + 1])) + (fabsf(frag[i + 2]) + fabsf(frag[i + 3]));
    largest = i == 0 ? sum : maximum(largest, sum);
  }
  return largest;
}
template <class T, int kCount> DEVICE float bound_of(const T (&frags)[kCount]) {
  float largest = bound_of(frags[0]);
#pragma unroll
  for (int i = 1; i < kCount; ++i) largest = maximum(largest, bound_of(frags[i]));
  return largest;
}
// Whether a warp takes small_cap_of() for q.k up to `bound`.
DEVICE bool all_small(float bound, const Scores& scores) { return !kIsFp32 && vote_all(bound * scores.argument <= kSmallTanh); }

// c tanh(a x) of any x; `small` is small_cap_of(c, a). A 16-bit call's large scores need no more than an absolute error.
DEVICE float capped(float x, float c, float a, const Cap& small) {
  if constexpr (kIsFp32) return c * tanh_of(a * x);
  else return fabsf(x) * a <= kSmallTanh ? small.of(x) : c * large_tanh_of(a * x);
}

// q.k -> tanh(softmax_scale q.k / softcap), by a warp.
template <class Frag> DEVICE void apply_tanh(Frag& s_frag, const Scores& scores) {
  const Cap small = small_cap_of(1.f, scores.argument);
  if (all_small(bound_of(s_frag), scores)) each(s_frag, [&](float& s) { s = small.of(s); });
  else each(s_frag, [&](float& s) { s = capped(s, 1.f, scores.argument, small); });
}

// The Cap that makes scores in base 2 of a warp's q.k. Where one is too large for it, all are replaced by their scores, which the
// Cap returned leaves as they are.
template <class Frag> DEVICE Cap cap_of(Frag& s_frag, const Scores& scores) {
  const Cap small = small_cap_of(scores.softcap_log2, scores.argument);
  if (all_small(bound_of(s_frag), scores)) return small;
  each(s_frag, [&](float& s) { s = capped(s, scores.softcap_log2, scores.argument, small); });
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
