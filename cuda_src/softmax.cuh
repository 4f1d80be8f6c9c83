// Online softmax over C fragments of [16 kM rows x 8 kN keys], in base 2.
//
// p = exp2(scale_log2 * (s - row_max)): the scale goes into the one FFMA before exp2. row_max is allowed to lag behind by
// kLag (a factor 2^kLag in p, exact after the division by row_sum): rescaling `out` is rare, and so is exchanging maxima
// between the four lanes of a row.
#pragma once
#include "tile.cuh"

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kLag = 8.f;  // p <= 256: far from fp16's 65504, and it keeps more small p above fp16's floor

DEVICE float finite_or_zero(float row_max) { return row_max == negative_infinity() ? 0.f : row_max; }

// S holds scores but for a factor. What else may be between S and scores (Cap in scores.cuh) grows with S and leaves -inf.
struct NoCap {
  DEVICE float of(float s) const { return s; }
  DEVICE float minus(float s, float scale_log2, float offset) const { return s * scale_log2 - offset; }
};

template <int kM> struct OnlineSoftmax {
  float row_max[kM][2], row_sum[kM][2];  // row_max common to a row's lanes; row_sum this lane's part

  DEVICE OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) row_max[m][half] = negative_infinity(), row_sum[m][half] = 0.f;
  }

  // S -> P in place; rescales `out` where a row's maximum grew by more than kLag.
  template <int kN, int kNOut, class C = NoCap>
  DEVICE void update(float (&s_frag)[kM][kN][4], float (&out_frag)[kM][kNOut][4], float scale_log2, const C& cap = {}) {
    float tile_max[kM][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = s_frag[m][0][half * 2];
#pragma unroll
        for (int n = 0; n < kN; ++n) largest = maximum(largest, maximum(s_frag[m][n][half * 2], s_frag[m][n][half * 2 + 1]));
        tile_max[m][half] = largest = cap.of(largest);
        grew |= (largest - row_max[m][half]) * scale_log2 > kLag;  // -inf after -inf: NaN, not grown
      }
    if (vote_any(grew)) rescale(tile_max, out_frag, scale_log2);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float offset = finite_or_zero(row_max[m][half]) * scale_log2;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = half * 2; e < half * 2 + 2; ++e) {
            s_frag[m][n][e] = exp2_approx(cap.minus(s_frag[m][n][e], scale_log2, offset));
            sum += s_frag[m][n][e];
          }
        row_sum[m][half] += sum;
      }
  }

  template <int kNOut>
  DEVICE void rescale(const float (&tile_max)[kM][2], float (&out_frag)[kM][kNOut][4], float scale_log2) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = maximum(tile_max[m][half], shfl_xor(tile_max[m][half], 1));
        largest = maximum(row_max[m][half], maximum(largest, shfl_xor(largest, 2)));
        const float factor = exp2_approx((row_max[m][half] - finite_or_zero(largest)) * scale_log2);
        row_max[m][half] = largest;
        row_sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < kNOut; ++n) out_frag[m][n][half * 2] *= factor, out_frag[m][n][half * 2 + 1] *= factor;
      }
  }

  // O / row_sum in place; logsumexp in natural log. sink_log2 joins the denominator (-inf: none). `keep` multiplies O.
  template <int kNOut>
  DEVICE void finalize(float (&logsumexp)[kM][2], float (&out_frag)[kM][kNOut][4], float scale_log2, float sink_log2, float keep) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = row_sum[m][half];
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
        const bool empty = row_max[m][half] == negative_infinity() && sum == 0.f;
        const float max_log2 = empty ? negative_infinity() : row_max[m][half] * scale_log2;
        float factor, total_log2;
        if (sink_log2 == negative_infinity()) {
          factor = empty ? 0.f : 1.f / sum;
          total_log2 = empty ? negative_infinity() : max_log2 + log2_approx(sum);
        } else {
          const float top = maximum(max_log2, sink_log2), scale = exp2_approx(max_log2 - top);
          const float total = sum * scale + exp2_approx(sink_log2 - top);
          factor = empty ? 0.f : scale / total;
          total_log2 = top + log2_approx(total);
        }
        logsumexp[m][half] = total_log2 * kLn2;
#pragma unroll
        for (int n = 0; n < kNOut; ++n) out_frag[m][n][half * 2] *= factor * keep, out_frag[m][n][half * 2 + 1] *= factor * keep;
      }
  }
};
