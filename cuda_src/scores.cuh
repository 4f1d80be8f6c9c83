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
  const Element* bias;     // (batch, head)
};

DEVICE Scores scores_of(const Params& p, const Sequence& s, int head) {
  Scores scores = {};
  scores.scale_log2 = p.softmax_scale * kLog2e;
  if constexpr (kHasSoftcap) {
    scores.tanh_log2 = p.softmax_scale / p.softcap * (2.f * kLog2e);
    scores.softcap_log2 = p.softcap * kLog2e;
  }
  if constexpr (kHasAlibi) scores.slope_log2 = ld_global(p.alibi_slopes + (s.batch * p.alibi_stride_batch + head)) * kLog2e;
  if constexpr (kHasBias) scores.bias = (const Element*)p.bias + (s.batch * p.bias_stride_batch + head * p.bias_stride_head);
  return scores;
}

// tanh(x) for x_log2 = 2 x log2(e), as 1 - 2 / (1 + e^2x): absolute error near 1e-7, where tanh.approx would cost 5e-4 of
// the softcap, more than fp16 inputs lose.
DEVICE float tanh_of(float x_log2) { return 1.f - 2.f * rcp_approx(1.f + exp2_approx(x_log2)); }

DEVICE float widen(u16 bits) { return unpack<kIsBf16>(bits).x; }
DEVICE float widen(float x) { return x; }

// Bias of row i, key j, and of (i, j) and (i, j + 1): one load where the two lie in one aligned word. 0 outside.
DEVICE float bias_at(const Params& p, const Sequence& s, const Scores& scores, int i, int j) {
  if (!kHasBias || i >= s.q_length || j >= s.k_length) return 0.f;
  return widen(ld_global(scores.bias + (i * p.bias_stride_row + j * p.bias_stride_column)));
}
DEVICE F32x2 bias_pair(const Params& p, const Sequence& s, const Scores& scores, int i, int j) {
  if constexpr (kHasBias) {
    const Element* first = scores.bias + (i * p.bias_stride_row + j * p.bias_stride_column);
    if (i < s.q_length && j + 1 < s.k_length && p.bias_stride_column == 1 && ((u64)first & (2 * sizeof(Element) - 1)) == 0) {
      if constexpr (kIsFp32) return ld_global((const F32x2*)first);
      else return unpack<kIsBf16>(ld_global((const u32*)first));
    }
  }
  return {bias_at(p, s, scores, i, j), bias_at(p, s, scores, i, j + 1)};
}

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

// dbias += the score's gradient
DEVICE void add_bias_gradient(const Params& p, const Sequence& s, int head, int i, int j, float gradient) {
  if (p.dbias && gradient != 0.f && i < s.q_length && j < s.k_length)
    red_add_global(p.dbias + (s.batch * p.bias_stride_batch + head * p.bias_stride_head + i * p.bias_stride_row +
                              j * p.bias_stride_column), gradient);
}

// Scores of C fragments [16 kM queries x 8 kN keys] in place; (i, j) is this thread's first element.
template <int kM, int kN>
DEVICE void transform(float (&s_frag)[kM][kN][4], const Params& p, const Sequence& s, const Scores& scores, int i, int j) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i + m * 16 + half * 8, key = j + n * 8;
        const F32x2 bias = bias_pair(p, s, scores, row, key);
        float derivative;
        float& first = s_frag[m][n][half * 2];
        float& second = s_frag[m][n][half * 2 + 1];
        first = score_log2(s, scores, first, bias.x, row, key, derivative);
        second = score_log2(s, scores, second, bias.y, row, key + 1, derivative);
      }
}

// ---- dropout ----

// Philox4x32-10. One call decides the four elements (i & ~8 | {0, 8}, j & ~1 | {0, 1}) of a sequence and head.
DEVICE U32x4 philox(U32x4 counter, u32 key_low, u32 key_high) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
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
  u32 threshold;  // an element is kept if its word is not below
  float keep;     // 1 / (1 - dropout_p)
  DEVICE U32x4 words(int i, int j) const {
    return philox({(u32)j >> 1, (((u32)i >> 4) << 3) | ((u32)i & 7), row, offset}, key_low, key_high);
  }
};

DEVICE Dropout dropout_of(const Params& p, int batch, int head) {
  Dropout dropout = {};
  dropout.keep = 1.f;
  if constexpr (kHasDropout) {
    const u64 seed = ld_global(p.rng_state), offset = ld_global(p.rng_state + 1);
    const double threshold = (double)p.dropout_p * 4294967296.0;
    dropout = {(u32)seed, (u32)(seed >> 32), (u32)(batch * p.num_heads_q + head), (u32)offset,
               threshold >= 4294967295.0 ? 0xffffffffu : (u32)threshold, p.dropout_p < 1.f ? 1.f / (1.f - p.dropout_p) : 0.f};
  }
  return dropout;
}

// Dropped elements of C fragments [16 kM queries x 8 kN keys] -> 0; the factor `keep` is left to the end.
template <int kM, int kN>
DEVICE void drop(float (&p_frag)[kM][kN][4], const Dropout& dropout, int i, int j) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const U32x4 words = dropout.words(i + m * 16, j + n * 8);
      if (words.x < dropout.threshold) p_frag[m][n][0] = 0.f;
      if (words.y < dropout.threshold) p_frag[m][n][1] = 0.f;
      if (words.z < dropout.threshold) p_frag[m][n][2] = 0.f;
      if (words.w < dropout.threshold) p_frag[m][n][3] = 0.f;
    }
}

// The same for fragments with keys down and queries across: bits[key] >> (2 n + query) & 1 where an element is kept. (i, j) is this
// thread's first element; i is even. Two lanes 4 apart hold neighbouring keys and need the same calls: each makes one of two.
template <int kM, int kN> DEVICE void kept_transposed(u32 (&bits)[kM][2], const Dropout& dropout, int i, int j) {
  const u32 odd = j & 1;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 kept = 0;
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        const U32x4 words = dropout.words(i + n * 8 + odd, j + m * 16 + half * 8);
        const u32 even_key = (u32)(words.x >= dropout.threshold) | (u32)(words.z >= dropout.threshold) << 2;
        const u32 odd_key = (u32)(words.y >= dropout.threshold) | (u32)(words.w >= dropout.threshold) << 2;
        const u32 mine = odd ? odd_key : even_key, theirs = shfl_xor(odd ? even_key : odd_key, 4);
        kept |= (mine << odd | theirs << (odd ^ 1)) << (2 * n);
      }
      bits[m][half] = kept;
    }
}
