// Products of fp32 tiles on tensor cores that take TF32 (11 significant bits): every element is split into a TF32 number and
// what that leaves, x = high + low, and a b = high high' + (high low' + low high') to 2^-22, the error of fp32 itself
// (numbers below 2^-113 to 2^-137: TF32 has no smaller steps).
//
// Tensor cores round sums towards zero (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021), so the small products
// have sums of their own, and neither goes on for longer than one tile: the result is added to `acc` in fp32, rounded to nearest.
//
// Fragments of mma.m16n8k8, lane = 4 * g + t, one element to a register:
//
//   A [16 x 8]  a0 (g, t) a1 (g + 8, t) a2 (g, t + 4) a3 (g + 8, t + 4)       B [8 x 8]  b0 (t, g) b1 (t + 4, g)
//
// and C as for 16 bits. An 8x8 matrix of ldmatrix is 8 rows of 4 elements: with the same addresses it fills these A, and B
// of a tile stored [n][k]. C holds columns 2t and 2t + 1 where A wants t and t + 4; `multiply` therefore takes the columns of
// A and the rows of B in another order, 2t for t and 2t + 1 for t + 4, whoever they come from: a sum has no order.
#pragma once
#include "tile.cuh"

// `high` is x rounded to nearest, so that `low` has either sign and products of two of them, which are left out, cancel;
// the tensor core ignores the two bits of `low` that TF32 may lack. An infinity leaves NaN in `low`: see sum_of; a NaN may
// leave `high`, but not `low`.
struct Parts {
  u32 high, low;
};
DEVICE Parts split(u32 x) {
  if constexpr (kTf32) return {round_tf32(float_of(x)), 0};
  const u32 high = (x + 0x1000u) & 0xffffe000u;
  return {high, bits_of(float_of(x) - float_of(high))};
}

template <int kCount> DEVICE void split(Parts (&parts)[kCount][4], const u32 (&frag)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) parts[i][e] = split(frag[i][e]);
}

// high + low of a sum of kSteps products, and what rounding towards zero took from `high` at each: half a unit in the last
// place of a sum that has grown so far, which is 0.36 x 2^-23 of it on average, times the steps / 2 for a sum that grows
// evenly. `low` counts only beside a finite number: a product with an infinity in it leaves NaN there.
constexpr float lost_of(int steps) { return steps * 0.18f / (1 << 23); }
template <int kSteps> DEVICE float sum_of(float high, float low) {
  constexpr float kLost = lost_of(kSteps);
  return fabsf(high) < -negative_infinity() ? high + (low + high * kLost) : high;
}

// high, from n-fragment `first` on, and low += a step's products. b[pair]: b0 and b1 of the pair's first n-fragment, then of its
// second.
template <int kM, int kN, int kPairs>
DEVICE void multiply_parts(float (&high)[kM][kN][4], int first, float (&low)[kM][2 * kPairs][4], const Parts (&a)[kM][4],
                           const Parts (&b)[kPairs][4]) {
  const auto each = [&](const auto& product) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) product(m, pair, half * 2, pair * 2 + half);
  };
  if constexpr (!kTf32) {
    each([&](int m, int pair, int e, int n) {
      mma_m16n8k8_tf32(low[m][n], {a[m][0].low, a[m][1].low, a[m][2].low, a[m][3].low}, b[pair][e].high, b[pair][e + 1].high);
    });
    each([&](int m, int pair, int e, int n) {
      mma_m16n8k8_tf32(low[m][n], {a[m][0].high, a[m][1].high, a[m][2].high, a[m][3].high}, b[pair][e].low, b[pair][e + 1].low);
    });
  }
  each([&](int m, int pair, int e, int n) {
    mma_m16n8k8_tf32(high[m][first + n], {a[m][0].high, a[m][1].high, a[m][2].high, a[m][3].high}, b[pair][e].high, b[pair][e + 1].high);
  });
}

// Pairs of n-fragments at a time, of `pairs`, where one needs `registers` for its sums: A is read and split anew for the next.
constexpr int pairs_at_a_time(int pairs, int registers, int most, int wanted = 8) {
  return (pairs % wanted == 0 && registers * wanted <= most) || wanted == 1 ? wanted : pairs_at_a_time(pairs, registers, most, wanted / 2);
}

// Whether the next step's fragments are read before this one's products; measured, as are the steps unrolled (product.cuh).
constexpr bool kPrefetch = kHeadDim <= 64 || kHeadDim > 128;
// The sum of one tile's products, which has been 0 before; small products have kRegisters. load_b(b_frag, pair, k) fills the B
// fragments of a pair.
template <int kSteps, int kUnrolled, int kRegisters, int kM, int kN, class LoadA, class LoadB>
DEVICE void multiply_tile(float (&acc)[kM][kN][4], const LoadA& load_a, const LoadB& load_b) {
  constexpr int kPairs = pairs_at_a_time(kN / 2, 8 * kM, kRegisters);
#pragma unroll
  for (int first = 0; first < kN / 2; first += kPairs) {
    float low[kM][2 * kPairs][4];
    clear(low);
    u32 a_frag[kM][4], b_frag[kPairs][4];
    const auto load = [&](int k) {
      load_a(a_frag, k);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) load_b(b_frag[pair], first + pair, k);
    };
    if constexpr (kPrefetch) load(0);
#pragma unroll kUnrolled
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (!kPrefetch) load(k);
      Parts a[kM][4], b[kPairs][4];
      split(a, a_frag);
      split(b, b_frag);
      if (kPrefetch && k + 1 < kSteps) load(k + 1);
      multiply_parts(acc, first * 2, low, a, b);
    }
    if constexpr (!kTf32) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < 2 * kPairs; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[m][first * 2 + n][e] = sum_of<kSteps>(acc[m][first * 2 + n][e], low[m][n][e]);
    }
  }
}

// acc += the sum of one tile's products; sums take kRegisters at a time.
template <int kSteps, int kUnrolled, int kRegisters, int kM, int kN, class LoadA, class LoadB>
DEVICE void add_tile(float (&acc)[kM][kN][4], const LoadA& load_a, const LoadB& load_b) {
  constexpr int kPairs = pairs_at_a_time(kN / 2, 16 * kM, kRegisters);
#pragma unroll
  for (int first = 0; first < kN / 2; first += kPairs) {
    float tile[kM][2 * kPairs][4];
    clear(tile);
    multiply_tile<kSteps, kUnrolled, 64>(tile, load_a, [&](u32 (&b_frag)[4], int pair, int k) { load_b(b_frag, first + pair, k); });
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][first * 2 + n][e] += tile[m][n][e];
  }
}

// A longer sum, in tiles of kLongestSum steps.
constexpr int kLongestSum = 8;
template <int kSteps, int kUnrolled, int kM, int kN, class LoadA, class LoadB>
DEVICE void add_tiles(float (&acc)[kM][kN][4], const LoadA& load_a, const LoadB& load_b) {
  constexpr int kTile = kSteps % kLongestSum == 0 ? kLongestSum : kLongestSum / 2;
  static_assert(kSteps % kTile == 0, "head dims are multiples of 32");
#pragma unroll 1
  for (int k_first = 0; k_first < kSteps; k_first += kTile)
    add_tile<kTile, kUnrolled, 64>(acc, [&](u32 (&a_frag)[kM][4], int k) { load_a(a_frag, k_first + k); },
                               [&](u32 (&b_frag)[4], int pair, int k) { load_b(b_frag, pair, k_first + k); });
}

// This lane's elements of a tile stored [k][n] as `multiply` takes them: column g of rows 2t and 2t + 1. Moves like Window16.
template <class T> struct WindowColumns {
  static_assert(T::kSwizzle == 7, "rows are whole bank lines");
  u32 base, lane_offset;
  DEVICE u32 even(int row, int chunk) const { return at(row, chunk & T::kSwizzle, chunk & ~T::kSwizzle); }
  // Row 2t + 1 is folded as row 2t, with the highest bit flipped.
  DEVICE u32 odd(int row, int chunk) const { return at(row, chunk & T::kSwizzle ^ 4, chunk & ~T::kSwizzle) + T::kPitch; }
  DEVICE u32 at(int row, int folded, int line) const { return (lane_offset ^ (folded << 4)) + (base + (line << 4) + row * T::kPitch); }
};
template <class T> DEVICE WindowColumns<T> columns_of(T tile, int row, int chunk) {
  const int g = lane_index() >> 2, t = lane_index() & 3;
  return {tile.base, T::offset(row + 2 * t, chunk + (g >> 2)) + (g & 3) * 4};
}
// B fragments of a pair, from chunk `chunk` on.
template <class T> DEVICE void load_columns(u32 (&b_frag)[4], WindowColumns<T> b, int row, int chunk) {
  b_frag[0] = ld_shared<u32>(b.even(row, chunk));
  b_frag[1] = ld_shared<u32>(b.odd(row, chunk));
  b_frag[2] = ld_shared<u32>(b.even(row, chunk + 2));
  b_frag[3] = ld_shared<u32>(b.odd(row, chunk + 2));
}

// This lane's elements of a tile stored [m][k]: columns 2t and 2t + 1 of row g.
template <class T> struct WindowRows {
  u32 base, lane_offset;
  DEVICE u32 at(int row, int chunk) const { return Window16<T>{base, lane_offset}.at(row, chunk); }
};
template <class T> DEVICE WindowRows<T> rows_of_pairs(T tile, int row) {
  const int g = lane_index() >> 2, t = lane_index() & 3;
  return {tile.base, T::offset(row + g, t >> 1) + (t & 1) * 8};
}
