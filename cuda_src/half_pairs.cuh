// fp32 tiles as pairs of fp16 tiles: x = 2^exponent (high + low), high = x / 2^exponent rounded to fp16, low what that leaves. Two
// times 11 significant bits and a sign keep 23 of x's 24, and a b = high high' + (high low' + low high') to 2^-22, as with the TF32
// parts of product_fp32.cuh, but fp16 products take half the time and their fragments come from ldmatrix as they are.
//
// fp16 ends at 2^16 and has steps of 2^-24 at its lower end. So a tile has one exponent, which brings its largest number to below
// 2^kTop: what is lost of any other is at most 2^-25, which is 2^-(kTop + 25) of the largest. A tile that this would not do is out of
// range: with NaN or Inf, with rows more than 2^kSpread smaller than its largest (but for rows of zeros), or with a largest number
// whose products might leave fp32. A query block that meets one takes TF32 parts throughout.
//
// A kernel beforehand (split_pairs.cuh) writes the tiles of q, k, v and dout into records, as they will lie in shared memory:
//   high tile | low tile | exponent, or kOutOfRange | largest norm of a row | largest |delta| of a row (dout) | nothing, to 128 bytes
#pragma once
#include "product_fp32.cuh"

constexpr bool kHalfPairs = kIsFp32 && !kTf32;
constexpr int kTop = 15, kSpread = 15, kLargestExponent = 30;
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
// What records say of their rows: the largest norm; of dout also the largest |delta|.
template <class T> DEVICE float norm_of(const u8* record) { return float_of(ld_global((const u32*)(record + T::kBytes) + 1)); }
template <class T> DEVICE float delta_of(const u8* record) { return float_of(ld_global((const u32*)(record + T::kBytes) + 2)); }
DEVICE float power_of_two(int exponent) { return float_of((u32)(127 + exponent) << 23); }

// Block n of a sequence and key head among all key blocks; as query_block_offset.
DEVICE i64 key_block_offset(const Params& p, const Sequence& s, int kv_head, int n) {
  const i64 first = p.cu_seqlens_k ? first_packed_block((int)s.k_start, kBlockN, s.batch) : (i64)s.batch * p.n_blocks;
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

// ---- numbers and fragments ----

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

// ---- A: kSteps fragments in registers, or windows on a pair of tiles ----

// Accumulators * factor as A fragments, all steps at once.
template <int kM, int kN>
DEVICE void split_accumulators(PairFrags<kM> (&a)[kN / 2], const float (&acc)[kM][kN][4], float factor) {
#pragma unroll
  for (int k = 0; k < kN / 2; ++k)
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float(&c)[4] = acc[m][2 * k + (e >> 1)];
        const PairOfHalves pair = split_pair(c[(e & 1) * 2] * factor, c[(e & 1) * 2 + 1] * factor);
        a[k].high[m][e] = pair.high, a[k].low[m][e] = pair.low;
      }
}
// -> tiles, from row `row` and column pair `pair` on.
template <class T, int kM, int kSteps> DEVICE void store_pairs(T tile, int row, int pair, const PairFrags<kM> (&a)[kSteps]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int place = T::Half::offset(row + m * 16 + (e & 1) * 8 + (lane_index() >> 2), (pair + k) * 2 + (e >> 1)) + (lane_index() & 3) * 4;
        st_shared(tile.high().base + place, a[k].high[m][e]);
        st_shared(tile.low().base + place, a[k].low[m][e]);
      }
}

template <class Half> struct PairWindow {
  Window16<Half> high, low;
  template <bool kTransposed> DEVICE void load(u32 (&high_frag)[4], u32 (&low_frag)[4], int row, int chunk) const {
    if constexpr (kTransposed) ldmatrix_x4_trans(high_frag, high.at(row, chunk)), ldmatrix_x4_trans(low_frag, low.at(row, chunk));
    else ldmatrix_x4(high_frag, high.at(row, chunk)), ldmatrix_x4(low_frag, low.at(row, chunk));
  }
};
template <class T> DEVICE PairWindow<typename T::Half> pair_down_first(T tile, int row) {
  return {down_first(tile.high(), row, 0), down_first(tile.low(), row, 0)};
}
template <class T> DEVICE PairWindow<typename T::Half> pair_right_first(T tile, int row) {
  return {right_first(tile.high(), row, 0), right_first(tile.low(), row, 0)};
}

// A stored [m][k], `a` from pair_down_first.
template <int kM, class W> DEVICE void load_pair_rows(PairFrags<kM>& frags, const W& a, int k) {
#pragma unroll
  for (int m = 0; m < kM; ++m) a.template load<false>(frags.high[m], frags.low[m], m * 16, k * 2);
}
// A stored [k][m], `a` from pair_right_first: m-fragments from `first` on.
template <int kM, class W> DEVICE void load_pair_columns(PairFrags<kM>& frags, const W& a, int k, int first) {
#pragma unroll
  for (int m = 0; m < kM; ++m) a.template load<true>(frags.high[m], frags.low[m], k * 16, (first + m) * 2);
}

// ---- the products ----

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

// acc = A B^T * factor in the tile's own terms; B stored [n][k], `b` from pair_right_first.
template <int kSteps, int kM, int kN, class LoadA, class W>
DEVICE void multiply_pairs_transposed(float (&acc)[kM][kN][4], const LoadA& load_a, const W& b, float factor) {
  multiply_pairs<kSteps, kM, kN, 128>(
      load_a, [&](u32 (&high)[4], u32 (&low)[4], int pair, int k) { b.template load<false>(high, low, pair * 16, k * 2); },
      [&](int m, int n, int e, float x) { acc[m][n][e] = x * factor; });
}

// acc += A B * factor; B stored [k][n], `b` from pair_down_first. Column pairs are those from `first` on, kPairStride apart.
template <int kSteps, int kPairStride = 1, int kM, int kN, class LoadA, class W>
DEVICE void add_pairs(float (&acc)[kM][kN][4], const LoadA& load_a, const W& b, float factor, int first = 0) {
  multiply_pairs<kSteps, kM, kN, kM == 1 ? 64 : 32>(
      load_a,
      [&](u32 (&high)[4], u32 (&low)[4], int pair, int k) { b.template load<true>(high, low, k * 16, (first + pair * kPairStride) * 2); },
      [&](int m, int n, int e, float x) { acc[m][n][e] += x * factor; });
}
