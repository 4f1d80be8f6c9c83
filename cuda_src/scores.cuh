// From q.k to the score in base 2 where there is more than a scale: softcap, bias, ALiBi. And dropout.
#pragma once
#include "mask.cuh"
#include "softmax.cuh"

// Without these the score stays q.k and softmax's own FFMA scales it.
constexpr bool kTransformsScores = kHasSoftcap || kHasBias || kHasAlibi;

struct Scores {
  float scale_log2;        // softmax_scale * log2(e)
  float tanh_log2;         // softmax_scale / softcap * 2 log2(e): the argument of tanh, as exp2 takes it
  float softcap_log2;      // softcap * log2(e)
  float slope_log2;        // ALiBi slope * log2(e)
};

DEVICE Scores scores_of(const Params& p, const Sequence& s, int head) {
  Scores scores = {};
  scores.scale_log2 = p.softmax_scale * kLog2e;
  if constexpr (kHasSoftcap) {
    scores.tanh_log2 = p.softmax_scale / p.softcap * (2.f * kLog2e);
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

// Softcap of scores whose tanh has an argument of at most kSmallTanh, without exp2 and reciprocal: c tanh(a x) as an odd
// polynomial in x, fitted to tanh at Chebyshev points; absolute error near 1e-7 c.
constexpr float kSmallTanh = 0.4f, kTanh1 = 0.999999881f, kTanh3 = -0.333313733f, kTanh5 = 0.13271156f, kTanh7 = -0.0475610755f;
struct SmallSoftcap {
  float c1, c3, c5, c7;
  DEVICE float operator()(float x) const {
    const float w = x * x;
    return x * (c1 + w * (c3 + w * (c5 + w * c7)));
  }
};
DEVICE SmallSoftcap small_softcap(float softcap, float argument) {
  const float square = argument * argument, first = softcap * argument;
  return {first * kTanh1, first * square * kTanh3, first * square * square * kTanh5, first * square * square * square * kTanh7};
}

// Scores of C fragments [16 kM queries x 8 kN keys] in place; (i, j) is this thread's first element. bias_of(m, half, n) is the
// bias of the two elements of that row in fragment n.
template <bool kSmall, int kM, int kN, class BiasOf>
DEVICE void transform_fragments(float (&s_frag)[kM][kN][4], const Sequence& s, const Scores& scores, int i, int j,
                                const BiasOf& bias_of) {
  const float distance = (float)(i + s.diagonal - j);
  const SmallSoftcap small = small_softcap(scores.softcap_log2, scores.tanh_log2 * (kLn2 / 2.f));
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
          if constexpr (kHasSoftcap)
            score = kSmall ? small(score) : scores.softcap_log2 * tanh_of(score * scores.tanh_log2);
          else
            score *= scores.scale_log2;
          if constexpr (kHasAlibi) score -= scores.slope_log2 * fabsf(distance + (float)(m * 16 + half * 8 - n * 8 - e));
          if constexpr (kHasBias) score += (e ? bias.y : bias.x) * kLog2e;
        }
      }
}
template <int kM, int kN, class BiasOf>
DEVICE void transform(float (&s_frag)[kM][kN][4], const Sequence& s, const Scores& scores, int i, int j, const BiasOf& bias_of) {
  bool small = kHasSoftcap;
  if constexpr (kHasSoftcap) {
    float largest = 0.f;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) largest = maximum(largest, fabsf(s_frag[m][n][e]));
    small = vote_all(largest * scores.tanh_log2 * (kLn2 / 2.f) <= kSmallTanh);
  }
  if (small) transform_fragments<true>(s_frag, s, scores, i, j, bias_of);
  else transform_fragments<false>(s_frag, s, scores, i, j, bias_of);
}

// The same without a bias, scores one by one.
template <int kM, int kN>
DEVICE void transform(float (&s_frag)[kM][kN][4], const Params& p, const Sequence& s, const Scores& scores, int i, int j) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float derivative;
        float& score = s_frag[m][n][e];
        score = score_log2(s, scores, score, 0.f, i + m * 16 + (e >> 1) * 8, j + n * 8 + (e & 1), derivative);
      }
}

// ---- dropout ----

// Philox4x32-7 (Salmon et al., SC 2011: the fewest rounds that pass BigCrush). One call decides the eight elements
// (i & ~8 | {0, 8}, j & ~9 | {0, 1, 8, 9}) of a sequence and head, 16 bits each: word 2 (i >> 3 & 1) + (j & 1), upper half if j & 8.
DEVICE U32x4 philox(U32x4 counter, u32 key_low, u32 key_high) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const u64 product_x = (u64)0xD2511F53u * counter.x, product_z = (u64)0xCD9E8D57u * counter.z;
    counter = {(u32)(product_z >> 32) ^ counter.y ^ key_low, (u32)product_z,
               (u32)(product_x >> 32) ^ counter.w ^ key_high, (u32)product_x};
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

struct Dropout {
  u32 key_low, key_high, row, offset;
  u32 threshold;  // an element is kept if its 16 bits are not below, both taken as the upper half of a word
  float keep;     // 1 / (1 - dropout_p)
  DEVICE U32x4 words(int i, int j) const {
    return philox({(((u32)j >> 4) << 2) | ((u32)j >> 1 & 3), (((u32)i >> 4) << 3) | ((u32)i & 7), row, offset}, key_low, key_high);
  }
  DEVICE bool keeps(u32 word, bool upper) const { return (upper ? word : word << 16) >= threshold; }
};

DEVICE Dropout dropout_of(const Params& p, int batch, int head) {
  Dropout dropout = {};
  dropout.keep = 1.f;
  if constexpr (kHasDropout) {
    const u64 seed = ld_global(p.rng_state), offset = ld_global(p.rng_state + 1);
    const u32 steps = (u32)(p.dropout_p * 65536.f + 0.5f);
    dropout = {(u32)seed, (u32)(seed >> 32), (u32)(batch * p.num_heads_q + head), (u32)offset,
               (steps > 65535u ? 65535u : steps) << 16, p.dropout_p < 1.f ? 1.f / (1.f - p.dropout_p) : 0.f};
  }
  return dropout;
}

// Dropped elements of C fragments [16 kM queries x 8 kN keys] -> 0; the factor `keep` is left to the end. (i, j) is this thread's
// first element, of a tile that begins at a multiple of 16 both ways.
template <int kM, int kN>
DEVICE void drop(float (&p_frag)[kM][kN][4], const Dropout& dropout, int i, int j) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const U32x4 words = dropout.words(i + m * 16, j + n * 8);
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        float(&p)[4] = p_frag[m][n + upper];
        if (!dropout.keeps(words.x, upper)) p[0] = 0.f;
        if (!dropout.keeps(words.y, upper)) p[1] = 0.f;
        if (!dropout.keeps(words.z, upper)) p[2] = 0.f;
        if (!dropout.keeps(words.w, upper)) p[3] = 0.f;
      }
    }
}

// The same for fragments with keys down and queries across: bits[key] >> (2 n + query) & 1 where an element is kept. (i, j) is this
// thread's first element. Two lanes 4 apart hold neighbouring keys and need the same calls: each makes one of two.
template <int kM, int kN> DEVICE void kept_transposed(u32 (&bits)[kM][2], const Dropout& dropout, int i, int j) {
  const u32 odd = j & 1;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    bits[m][0] = bits[m][1] = 0;
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const U32x4 words = dropout.words(i + n * 8 + odd, j + m * 16);
      // bits 0 and 2: queries of fragments n and n + 1 beside the key of the first half; 16 and 18: of the second
      u32 even_key = 0, odd_key = 0;
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        even_key |= ((u32)dropout.keeps(words.x, upper) | (u32)dropout.keeps(words.z, upper) << 2) << (16 * upper);
        odd_key |= ((u32)dropout.keeps(words.y, upper) | (u32)dropout.keeps(words.w, upper) << 2) << (16 * upper);
      }
      const u32 mine = odd ? odd_key : even_key, theirs = shfl_xor(odd ? even_key : odd_key, 4);
      const u32 kept = mine << odd | theirs << (odd ^ 1);
      bits[m][0] |= (kept & 0xffffu) << (2 * n);
      bits[m][1] |= (kept >> 16) << (2 * n);
    }
  }
}
