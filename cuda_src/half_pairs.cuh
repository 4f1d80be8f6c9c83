// fp32 tiles as pairs of fp16 tiles: x = 2^exponent (high + low), high = x / 2^exponent rounded to fp16, low what that leaves. Two
// times 11 significant bits and a sign keep 23 of x's 24, and a b = high high' + (high low' + low high') to 2^-22, as with the TF32
// parts of product_fp32.cuh, but fp16 products take half the time and their fragments come from ldmatrix as they are.
//
// fp16 ends at 2^16 and has steps of 2^-24 at its lower end. So a tile has one exponent, which brings its largest number to below
// 2^kTop: what is lost of any other is at most 2^-25, which is 2^-(kTop + 25) of the largest. A tile that this would not do is out of
// range: with NaN or Inf, with rows more than 2^kSpread smaller than its largest (but for rows of zeros), or with a largest number
// whose products might leave fp32. A query block that meets one takes TF32 parts throughout.
//
// attention_forward_split writes the tiles of q, k and v into records, in the order of their bytes in shared memory:
//   high tile | low tile | exponent, or kOutOfRange | 124 bytes of nothing
#pragma once
#include "product_fp32.cuh"

constexpr bool kHalfPairs = kIsFp32 && !kTf32;
constexpr int kTop = 15, kSpread = 15, kLargestExponent = 40;
constexpr i32 kOutOfRange = 1 << 20;

template <int kRowCount, int kColumnCount> struct PairTile {
  typedef Tile<kRowCount, kColumnCount, u16> Half;
  static constexpr int kBytes = 2 * Half::kBytes, kRecordBytes = kBytes + 128;
  u32 base;
  DEVICE Half high() const { return {base}; }
  DEVICE Half low() const { return {base + Half::kBytes}; }
};

template <class T> DEVICE u8* record_of(u8* records, i64 block) { return records + block * T::kRecordBytes; }
template <class T> DEVICE i32 exponent_of(const u8* record) { return ld_global((const i32*)(record + T::kBytes)); }
DEVICE float power_of_two(int exponent) { return float_of((u32)(127 + exponent) << 23); }

// Block n of a sequence and key head among all key blocks; as query_block_offset.
DEVICE i64 key_block_offset(const Params& p, const Sequence& s, int kv_head, int n) {
  const i64 first = p.cu_seqlens_k ? s.k_start / kBlockN + s.batch : (i64)s.batch * p.n_blocks;
  return (first + n) * p.num_heads_kv + kv_head;
}

// Starts the copy of a record's tiles. The caller commits.
template <class T> DEVICE void load_pairs(T tile, const u8* record) {
  constexpr int kChunks = T::kBytes / 16;
#pragma unroll
  for (int first = 0; first < kChunks; first += kThreads) {
    const int chunk = first + thread_index();
    if (kChunks % kThreads == 0 || chunk < kChunks) cp_async_16(tile.base + chunk * 16, record + chunk * 16, true);
  }
}

// ---- products ----

struct PairOfHalves {
  u32 high, low;
};
DEVICE PairOfHalves split_pair(float x, float y) {
  const u32 high = pack<false>(x, y);
  const F32x2 rounded = unpack<false>(high);
  return {high, pack<false>(x - rounded.x, y - rounded.y)};
}

// Fragments of both tiles, 16 bits as tile.cuh has them.
template <int kM> struct PairFrags {
  u32 high[kM][4], low[kM][4];
};

// Accumulators, for multiply_pairs: all steps at once.
template <int kM, int kN> DEVICE void split_accumulators(PairFrags<kM> (&a)[kN / 2], const float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int k = 0; k < kN / 2; ++k)
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float(&c)[4] = acc[m][2 * k + (e >> 1)];
        const PairOfHalves pair = split_pair(c[(e & 1) * 2], c[(e & 1) * 2 + 1]);
        a[k].high[m][e] = pair.high, a[k].low[m][e] = pair.low;
      }
}

// take(m, n, e, x) for every element x of A B; load_a(a, k) and load_b(high, low, pair, k) fill the fragments of a step. Sums are
// those of product_fp32.cuh: apart for small products, and none longer than a tile.
template <int kSteps, int kM, int kN, int kRegisters, class LoadA, class LoadB, class Take>
DEVICE void multiply_pairs(const LoadA& load_a, const LoadB& load_b, const Take& take) {
  constexpr int kPairs = pairs_at_a_time(kN / 2, 16 * kM, kRegisters);
  constexpr float kLost = lost_of(kSteps);
#pragma unroll
  for (int first = 0; first < kN / 2; first += kPairs) {
    float high[kM][2 * kPairs][4], low[kM][2 * kPairs][4];
    clear(high);
    clear(low);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      PairFrags<kM> a;
      load_a(a, k);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        u32 b_high[4], b_low[4];
        load_b(b_high, b_low, first + pair, k);
        const auto each = [&](float (&sum)[kM][2 * kPairs][4], const u32 (&a_frag)[kM][4], const u32 (&b_frag)[4]) {
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < 2; ++n) mma_m16n8k16<false>(sum[m][2 * pair + n], a_frag[m], b_frag[2 * n], b_frag[2 * n + 1]);
        };
        each(low, a.low, b_high);
        each(high, a.high, b_high);
        each(low, a.high, b_low);
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) take(m, first * 2 + n, e, high[m][n][e] + (low[m][n][e] + high[m][n][e] * kLost));
  }
}

// acc = A B^T * factor in the tile's own terms; A from row `row` on, B from its first.
template <int kSteps, class A, class B, int kM, int kN>
DEVICE void multiply_pairs_transposed(float (&acc)[kM][kN][4], A a, int row, B b, float factor) {
  const Window16<typename A::Half> a_high = down_first(a.high(), row, 0), a_low = down_first(a.low(), row, 0);
  const Window16<typename B::Half> b_high = right_first(b.high(), 0, 0), b_low = right_first(b.low(), 0, 0);
  const auto load_a = [&](PairFrags<kM>& frags, int k) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ldmatrix_x4(frags.high[m], a_high.at(m * 16, k * 2));
      ldmatrix_x4(frags.low[m], a_low.at(m * 16, k * 2));
    }
  };
  const auto load_b = [&](u32 (&high)[4], u32 (&low)[4], int pair, int k) {
    ldmatrix_x4(high, b_high.at(pair * 16, k * 2));
    ldmatrix_x4(low, b_low.at(pair * 16, k * 2));
  };
  multiply_pairs<kSteps, kM, kN, 128>(load_a, load_b, [&](int m, int n, int e, float x) { acc[m][n][e] = x * factor; });
}

// acc += P B * factor, P in accumulators.
template <class B, int kM, int kN, int kKeys>
DEVICE void add_pairs(float (&acc)[kM][kN][4], const float (&p)[kM][kKeys][4], B b, float factor) {
  PairFrags<kM> p_frag[kKeys / 2];
  split_accumulators(p_frag, p);
  const Window16<typename B::Half> b_high = down_first(b.high(), 0, 0), b_low = down_first(b.low(), 0, 0);
  const auto load_b = [&](u32 (&high)[4], u32 (&low)[4], int pair, int k) {
    ldmatrix_x4_trans(high, b_high.at(k * 16, pair * 2));
    ldmatrix_x4_trans(low, b_low.at(k * 16, pair * 2));
  };
  multiply_pairs<kKeys / 2, kM, kN, 32>([&](PairFrags<kM>& frags, int k) { frags = p_frag[k]; }, load_b,
                                        [&](int m, int n, int e, float x) { acc[m][n][e] += x * factor; });
}
