// Online softmax in the pieces that the Hopper forward puts around its waits. A thread has two rows of the accumulators.
//
// The subtracted maximum may lag behind the true one: rescaling O and exchanging maxima between lanes is then rare. In
// exact arithmetic any maximum will do, but P is rounded to 16 bits: with the true maximum the heaviest key of a row has
// p = 1 exactly; with another one its p is rounded like any other, and where one key holds most of a row that error is
// the largest of all (2x, measured; rounding the maximum up to an integer is as bad). So the maximum stays only while no
// key above it weighs more than kMostShare of what its lane has summed up so far, and p stays below kMostLag. The largest
// error is then that of the true maximum.
//
// In 8 bits P has 3 bits of mantissa and ends at 2^-9 and 448. So the maximum's p is 256, which e4m3 has exactly and which keeps p
// down to 2^-17 of it apart from 0; the lag is what is left up to 448, beyond which a p would be cut off. row_max is then 8 less
// than the maximum, row_sum 256 times as much, and nothing else changes. Sums are those of p before it is rounded: logsumexp is
// as exact as the scores, and what rounding does to P does not add up.
#pragma once
#include "mask.cuh"
#include "ptx_sm90.cuh"
#include "scores.cuh"

constexpr float kMostShare = 0.5f;
constexpr float kTopP = kIsE4m3 ? 256.f : 1.f, kTopLog2 = kIsE4m3 ? 8.f : 0.f;  // p of the maximum
constexpr float kMostLag = kIsE4m3 ? 448.f : 256.f;                             // largest p; kTopP: always the true maximum
constexpr int kInRegister = kIsE4m3 ? 4 : 2;                                    // numbers of P
constexpr float kLowest = -3.4028234e38f;  // no maximum yet; finite, so that -inf - kLowest is no NaN

// Multiplies this thread's rows of the accumulators.
template <int kCount> DEVICE void scale_rows(float (&acc)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] *= factor[i >> 1 & 1];
}

// A soft cap on its way into the exponent, and what no score of this thread's two rows is above.
struct BoundedCap : Cap {
  float bound[2];
};
// By a warp. Where q.k is too large for the polynomial, all become scores, as by cap_of. (Here one maximum a score: it is the bound, too.
// Maxima of sums of two, one vote on both questions, or P before either, with another one where that was wrong: 1 to 5% slower.)
template <int kCount> DEVICE BoundedCap bounded_cap_of(float (&s_frag)[kCount], const Scores& scores) {
  float largest[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) largest[i & 3] = maximum(largest[i & 3], fabsf(s_frag[i]));
  const float rows[2] = {maximum(largest[0], largest[1]), maximum(largest[2], largest[3])};
  const Cap small = small_cap_of(scores.softcap_log2, scores.argument);
  if (all_small(maximum(rows[0], rows[1]), scores)) return {small, {small.of(rows[0]), small.of(rows[1])}};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s_frag[i] = capped(s_frag[i], scores.softcap_log2, scores.argument, small);
    if (i + 4 < kCount) pin_order(s_frag[i], s_frag[i + 4]);  // four at a time: more take registers from the main loop
  }
  return {kScoresThemselves, {scores.softcap_log2, scores.softcap_log2}};
}

struct LaggingSoftmax {
  float row_max[2];  // base 2, common to a row's lanes
  float row_sum[2];  // this lane's part
  float limit[2];    // a score above it asks for a new maximum

  DEVICE LaggingSoftmax() {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_max[half] = limit[half] = kLowest, row_sum[half] = 0.f;
  }

  // The largest p that does not ask for a new maximum.
  DEVICE float largest_p(int half) const {
    const float share = maximum(row_sum[half] * kMostShare, kTopP);
    return share < kMostLag ? share : kMostLag;
  }

  DEVICE void set_limit() {
#pragma unroll
    for (int half = 0; half < 2; ++half) limit[half] = row_max[half] + log2_approx(largest_p(half));
  }

  // New maxima where scores, cap.of(s) * scale_log2, ask for them. True (for the whole warp): O must be multiplied by `factor`.
  template <int kCount, class C> DEVICE bool grow(float (&factor)[2], const float (&s_frag)[kCount], float scale_log2, const C& cap) {
    if constexpr (kHasSoftcap)
      if (!vote_any(cap.bound[0] > limit[0] || cap.bound[1] > limit[1])) return false;
    float largest[4] = {s_frag[0], s_frag[1], s_frag[2], s_frag[3]};
#pragma unroll
    for (int i = 4; i < kCount; ++i) largest[i & 3] = maximum(largest[i & 3], s_frag[i]);
    const float tile_max[2] = {cap.of(maximum(largest[0], largest[1])) * scale_log2,
                               cap.of(maximum(largest[2], largest[3])) * scale_log2};
    if (!vote_any(tile_max[0] > limit[0] || tile_max[1] > limit[1])) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float pair_max = maximum(tile_max[half], shfl_xor(tile_max[half], 1));
      const float grown = maximum(row_max[half], maximum(pair_max, shfl_xor(pair_max, 2)) - kTopLog2);
      factor[half] = exp2_approx(row_max[half] - grown);
      row_sum[half] *= factor[half];
      row_max[half] = grown;
    }
    return true;
  }

  // S -> P, the A operand of the next product.
  template <int kCount, class C>
  DEVICE void exponentiate(u32 (&p_frag)[kCount / kInRegister], const float (&s_frag)[kCount], float scale_log2, const C& cap) {
    if constexpr (kIsE4m3) {
#pragma unroll
      for (int i = 0; i < kCount; i += 8)  // the keys of a row in two fragments, see values_sm90.cuh
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float p[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) p[e] = exp2_approx(cap.minus(s_frag[i + e / 2 * 4 + half * 2 + e % 2], scale_log2, row_max[half]));
          row_sum[half] += (p[0] + p[1]) + (p[2] + p[3]);
          p_frag[i / 4 + half] = pack_e4m3(p[0], p[1], p[2], p[3]);
        }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const int half = i >> 1 & 1;
        const float even = exp2_approx(cap.minus(s_frag[i], scale_log2, row_max[half]));
        const float odd = exp2_approx(cap.minus(s_frag[i + 1], scale_log2, row_max[half]));
        row_sum[half] += even;
        row_sum[half] += odd;
        p_frag[i / 2] = pack<kIsBf16>(even, odd);
      }
    }
  }

  // The same without a look at the scores before: none of them asks for a new maximum if all of their p together do not.
  // Where they do (rarely, past the first blocks), grow() decides, O is multiplied here, and P computed again.
  template <int kCount, int kOutputs, class C>
  DEVICE void speculate(u32 (&p_frag)[kCount / kInRegister], float (&s_frag)[kCount], float (&o_frag)[kOutputs], float scale_log2,
                        const C& cap) {
    const float before[2] = {row_sum[0], row_sum[1]};
    const float allowed[2] = {row_sum[0] + largest_p(0), row_sum[1] + largest_p(1)};
    exponentiate(p_frag, s_frag, scale_log2, cap);
    const bool stays = row_sum[0] <= allowed[0] && row_sum[1] <= allowed[1];  // not where a sum is NaN
    if (!vote_any(!stays)) return;
    const float after[2] = {row_sum[0], row_sum[1]};
    float factor[2];
    row_sum[0] = before[0], row_sum[1] = before[1];
    set_limit();
    pin(s_frag);  // no product with the scale is kept from above
    if (grow(factor, s_frag, scale_log2, cap)) {
      scale_rows(o_frag, factor);
      exponentiate(p_frag, s_frag, scale_log2, cap);
    } else {
      row_sum[0] = after[0], row_sum[1] = after[1];
    }
  }

  // What O is to be multiplied by, and logsumexp of both rows in natural log. sink_log2 joins the denominator (-inf: none).
  DEVICE void finalize(float (&factor)[2], float (&logsumexp)[2], float sink_log2) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = row_sum[half], top = row_max[half], share = 1.f;
      total += shfl_xor(total, 1);
      total += shfl_xor(total, 2);
      const bool empty = top == kLowest && total == 0.f, has_sink = kHasSinks && sink_log2 != negative_infinity();
      if (has_sink) {
        top = maximum(top, sink_log2);
        share = exp2_approx(row_max[half] - top);
        total = total * share + exp2_approx(sink_log2 - top);
      }
      factor[half] = empty ? 0.f : share * rcp_approx(total);
      logsumexp[half] = (empty && !has_sink ? negative_infinity() : top + log2_approx(total)) * kLn2;
    }
  }
};

// Of this thread's rows: whether all accumulators are finite. 0 * x is NaN where x is NaN or Inf.
template <int kCount> DEVICE void all_finite(bool (&finite)[2], const float (&acc)[kCount]) {
  float zero[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kCount; ++i) zero[i & 3] += acc[i] * 0.f;
  finite[0] = zero[0] + zero[1] == 0.f, finite[1] = zero[2] + zero[3] == 0.f;
}

// A thread has two neighbours of every eight columns of a row. Bit c: its c-th key from the `first` on is one of the first `count` columns.
DEVICE u32 keys_before(int count, int first) {
  const int keys = (count >> 3) * 2 + smaller(count & 7, 2) - first;
  return keys >= 32 ? ~0u : (1u << larger(keys, 0)) - 1;
}
// Scores of keys outside a row's span -> -inf. Spans count from this thread's first column. Bits become predicates eight at a time,
// which two comparisons a score would be (head dim 64, a window of 1024, 4096 tokens: 386 TFLOP/s instead of 368).
template <int kCount> DEVICE void hide(float (&s_frag)[kCount], const Span (&columns)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int first = 0; first < kCount / 2; first += 32) {
      const u32 visible = keys_before(columns[half].end, first) & ~keys_before(columns[half].begin, first);
#pragma unroll
      for (int c = first; c < first + 32 && c < kCount / 2; ++c) {
        float& score = s_frag[c / 2 * 4 + half * 2 + c % 2];
        score = visible >> (c - first) & 1 ? score : negative_infinity();
      }
    }
}
