// Products of tiles: acc [16 kM x 8 kN] += A [16 kM x kMmaDepth kSteps] B; load_a(a_frag, k) fills the A fragments of step k.
// A comes from a tile or from the accumulators of another product, B from a tile.
#pragma once
#include "product_fp32.cuh"

// ---- A ----

// Stored [m][k], for multiply_transposed.
template <class T> DEVICE Window16<T> left_rows(T tile, int row) { return down_first(tile, row, 0); }
// From row `first` of the window on, `step` rows from one fragment to the next.
template <class T, int kM> DEVICE void load_rows(u32 (&a_frag)[kM][4], Window16<T> rows, int k, int first = 0, int step = 16) {
#pragma unroll
  for (int m = 0; m < kM; ++m) ldmatrix_x4(a_frag[m], rows.at(first + m * step, k * 2));
}

// Stored [m][k], for multiply.
template <class T> DEVICE auto left_rows_of_packed(T tile, int row) {
  if constexpr (kIsFp32) return rows_of_pairs(tile, row);
  else return down_first(tile, row, 0);
}
template <class T, int kM> DEVICE void load_rows(u32 (&a_frag)[kM][4], WindowRows<T> rows, int k) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const U32x2 pair = ld_shared<U32x2>(rows.at(m * 16 + half * 8, k * 2));
      a_frag[m][half] = pair.x, a_frag[m][half + 2] = pair.y;
    }
}

// Stored [k][m], for multiply: m-fragments from `first` on.
template <class T> DEVICE auto left_columns(T tile) {
  if constexpr (kIsFp32) return columns_of(tile, 0, 0);
  else return right_first(tile, 0, 0);
}
template <class W, int kM> DEVICE void load_columns(u32 (&a_frag)[kM][4], W columns, int k, int first) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    const int chunk = (first + m) * kPairChunks;
    if constexpr (kIsFp32) {
      u32 pair[4];
      load_columns(pair, columns, k * kMmaDepth, chunk);
      a_frag[m][0] = pair[0], a_frag[m][1] = pair[2], a_frag[m][2] = pair[1], a_frag[m][3] = pair[3];
    } else {
      ldmatrix_x4_trans(a_frag[m], columns.at(k * kMmaDepth, chunk));
    }
  }
}

// Accumulators, for multiply.
template <int kM, int kN> DEVICE void load_packed(u32 (&a_frag)[kM][4], const u32 (&packed)[kM][kN][kPacked], int k) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) a_frag[m][e] = kIsFp32 ? packed[m][k][(e & 1) * 2 + (e >> 1)] : packed[m][2 * k + (e >> 1)][e & 1];
}
template <int kM, int kN> DEVICE void load_packed(u32 (&a_frag)[kM][4], const float (&acc)[kM][kN][4], int k) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (kIsFp32) {
        a_frag[m][e] = bits_of(acc[m][k][(e & 1) * 2 + (e >> 1)]);
      } else {
        const float(&c)[4] = acc[m][2 * k + (e >> 1)];
        a_frag[m][e] = pack<kIsBf16>(c[(e & 1) * 2], c[(e & 1) * 2 + 1]);
      }
    }
}

// ---- the products ----

// Steps unrolled where A comes from a tile: in TF32 there are many, of many instructions each; in its parts, which only numbers
// beyond pairs of fp16 take, few are compiled sooner.
constexpr int kStepsAtATime = !kIsFp32 ? 64 : !kTf32 ? 2 : kHeadDim <= 64 ? 8 : kHeadDim <= 128 ? 4 : 2;

// 16 bits: acc += A B over all steps; load_b(b_frag, pair, k) fills the B fragments of a column pair.
template <int kSteps, int kM, int kN, class LoadA, class LoadB>
DEVICE void multiply_steps(float (&acc)[kM][kN][4], const LoadA& load_a, const LoadB& load_b) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    u32 a_frag[kM][4];
    load_a(a_frag, k);
#pragma unroll
    for (int pair = 0; pair < kN / 2; ++pair) {
      u32 b_frag[4];
      load_b(b_frag, pair, k);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_m16n8k16<kIsBf16>(acc[m][2 * pair], a_frag[m], b_frag[0], b_frag[1]);
        mma_m16n8k16<kIsBf16>(acc[m][2 * pair + 1], a_frag[m], b_frag[2], b_frag[3]);
      }
    }
  }
}

// B stored [n][k] (`b` from right_first): acc += A B^T in the tile's own terms; acc is 0 before.
template <int kSteps, int kRegisters = 64, class T, int kM, int kN, class LoadA>
DEVICE void multiply_transposed(float (&acc)[kM][kN][4], const LoadA& load_a, Window16<T> b) {
  const auto load_b = [&](u32 (&b_frag)[4], int pair, int k) { ldmatrix_x4(b_frag, b.at(pair * 16, k * 2)); };
  if constexpr (!kIsFp32) multiply_steps<kSteps>(acc, load_a, load_b);
  else if constexpr (kSteps <= kLongestSum) multiply_tile<kSteps, kStepsAtATime, kRegisters>(acc, load_a, load_b);
  else add_tiles<kSteps, kStepsAtATime>(acc, load_a, load_b);
}

// B stored [k][n], from row `row` and column pair `pair` on, for multiply.
template <class T> DEVICE auto right_rows(T tile, int row, int pair = 0) {
  if constexpr (kIsFp32) return columns_of(tile, row, pair * kPairChunks);
  else return down_first(tile, row, pair * kPairChunks);
}

// acc += A B. Column pairs are kPairStride apart.
template <int kSteps, int kPairStride = 1, int kUnrolled = kSteps, class W, int kM, int kN, class LoadA>
DEVICE void multiply(float (&acc)[kM][kN][4], const LoadA& load_a, W b) {
  if constexpr (kIsFp32) {
    constexpr int kRegisters = kM == 1 && kHeadDim > 64 ? 64 : 32;
    add_tile<kSteps, kUnrolled, kRegisters>(acc, load_a, [&](u32 (&b_frag)[4], int pair, int k) {
      load_columns(b_frag, b, k * kMmaDepth, pair * kPairStride * kPairChunks);
    });
  } else {
    multiply_steps<kSteps>(acc, load_a, [&](u32 (&b_frag)[4], int pair, int k) {
      ldmatrix_x4_trans(b_frag, b.at(k * kMmaDepth, pair * kPairStride * kPairChunks));
    });
  }
}
