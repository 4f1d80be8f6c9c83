// Tiles of 16-bit elements in shared memory, their way in from global memory and out to it, and tensor-core
// fragments read from them.
//
// Layout of a tile: row-major, rows of kColumns elements cut into 16-byte chunks; chunk c of row r lies where chunk
// c ^ f(r) would. f takes 8 values over 8 rows when a row fills whole 128-byte bank lines, and 4 values over row pairs
// when it fills half lines (32 or 96 columns): either way the 8 rows of an ldmatrix hit all 32 banks once.
//
// Fragments of mma.m16n8k16, lane = 4 * g + t (g = lane / 4, t = lane % 4), two 16-bit elements to a register:
//
//   A [16 x 16]  a0 (g, 2t..) a1 (g + 8, 2t..) a2 (g, 2t + 8..) a3 (g + 8, 2t + 8..)
//   B [16 x 8]   b0 (2t.., g) b1 (2t + 8.., g)
//   C [16 x 8]   c0 (g, 2t)   c1 (g, 2t + 1)   c2 (g + 8, 2t)   c3 (g + 8, 2t + 1)      fp32
//
// C of one product, packed in pairs, is A of the next: n-fragments 2k and 2k + 1 make the A fragment of step k.
#pragma once
#include "seqlen.cuh"

constexpr int kThreads = kNumWarps * 32;

// A compile-time flag as an argument.
template <bool kValue> struct Switch {
  static constexpr bool kOn = kValue;
};

template <int kRowCount, int kColumnCount> struct Tile {
  static constexpr int kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kPitch = kColumns * 2;  // bytes
  static constexpr int kBytes = kRows * kPitch;
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kSwizzle = kPitch % 128 == 0 ? 7 : 3;
  static constexpr int kRowsPerStep = kPitch % 128 == 0 ? 1 : 2;
  static_assert(kPitch % 64 == 0, "rows are whole or half bank lines");

  u32 base;  // multiple of 128

  static DEVICE u32 offset(int row, int chunk) { return row * kPitch + ((chunk ^ ((row / kRowsPerStep) & kSwizzle)) << 4); }
  DEVICE u32 address(int row, int chunk) const { return base + offset(row, chunk); }
};

// ---- global memory -> tile ----

// Starts the copy of `source` into the tile. Rows outside [row_begin, row_end) and columns from
// head_dim on are never read and become zero. The caller commits.
template <class T> DEVICE void load_tile(T tile, Rows<const u16> source, int row_begin, int row_end, int head_dim) {
  constexpr int kLanes = T::kChunks & -T::kChunks;  // threads along a row: the power of two in its chunks
  constexpr int kStep = kThreads / kLanes;          // rows a round
  const int lane = thread_index() % kLanes;
  int row = thread_index() / kLanes;
  const u32 first = tile.address(row, lane);
  const u16* from = source.from(row).first + lane * 8;
  const u32 rows = row_end > row_begin ? row_end - row_begin : 0;
#pragma unroll
  for (int round = 0; round < (T::kRows + kStep - 1) / kStep; ++round) {
    if (T::kRows % kStep != 0 && row >= T::kRows) break;
#pragma unroll
    for (int chunk = 0; chunk < T::kChunks; chunk += kLanes) {
      // The swizzle repeats every 8 rows
      const u32 to = kStep % 8 == 0 && T::kChunks == kLanes ? first + round * kStep * T::kPitch : tile.address(row, chunk + lane);
      cp_async_16(to, from + chunk * 8, (u32)(row - row_begin) < rows && (chunk + lane) * 8 < head_dim);
    }
    row += kStep;
    from += kStep * source.stride;
  }
}

// ---- tile -> global memory ----

// Rows [0, row_end), columns [0, head_dim), 16 bytes a store. All threads of the block.
template <class T> DEVICE void store_tile(T tile, Rows<u16> destination, int row_end, int head_dim) {
#pragma unroll 4
  for (int copy = thread_index(); copy < T::kRows * T::kChunks; copy += kThreads) {
    const int row = copy / T::kChunks, chunk = copy % T::kChunks;
    if (row < row_end && chunk * 8 < head_dim)
      st_global((U32x4*)(destination.from(row).first + chunk * 8), ld_shared<U32x4>(tile.address(row, chunk)));
  }
}

// Accumulators [16 kM x 8 kN] in 16 bits: [0] of row g, [1] of row g + 8.
// Goes to n-fragments from `first` on.
template <int kM, int kN, int kNPacked>
DEVICE void pack_accumulators(u32 (&packed)[kM][kNPacked][2], const float (&acc)[kM][kN][4], int first = 0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) packed[m][first + n][half] = pack<kIsBf16>(acc[m][n][half * 2], acc[m][n][half * 2 + 1]);
}

// -> tile, from row `row` on. Pair j of n-fragments (16 columns) lands at column pair j * kPairStride + pair: column pairs may
// be dealt out to kPairStride warps.
template <int kPairStride = 1, class T, int kM, int kN>
DEVICE void store_packed(T tile, int row, int pair, const u32 (&packed)[kM][kN][2]) {
  const int g = lane_index() >> 2, t = lane_index() & 3;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        st_shared(tile.address(row + m * 16 + half * 8 + g, ((n >> 1) * kPairStride + pair) * 2 + (n & 1)) + t * 4,
                  packed[m][n][half]);
}
template <int kPairStride = 1, class T, int kM, int kN>
DEVICE void store_accumulators(T tile, int row, int pair, const float (&acc)[kM][kN][4]) {
  u32 packed[kM][kN][2];
  pack_accumulators(packed, acc);
  store_packed<kPairStride>(tile, row, pair, packed);
}

// ---- accumulators -> fp32 in global memory, added ----

// dq_accum is private to the kernels, so it lies in the order of the fragments: [16-row block][8-column block][128 floats], the
// 128 by lane, or by element where only single floats can be added (then 32 lanes still cover 128 bytes).
DEVICE int fragment_index(int element) {
  return kHasVectorReduction ? lane_index() * 4 + element : element * 32 + lane_index();
}
DEVICE void add_fragment(float* fragment, const float (&c)[4]) {
  if constexpr (kHasVectorReduction) {
    red_add_global(fragment + fragment_index(0), F32x4{c[0], c[1], c[2], c[3]});
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) red_add_global(fragment + fragment_index(e), c[e]);
  }
}

// ---- tile -> fragments ----

// This lane's place in the ldmatrix pattern of a tile. at(row, chunk) moves the 16x16 window; row a multiple of 8, chunk
// even and, in its low bits, free of the chunk the window started at, so that moving is one XOR. Kept apart from the tile's
// base, so that tiles of one shape share the few registers with XORed offsets.
template <class T> struct Window16 {
  u32 base, lane_offset;
  DEVICE u32 at(int row, int chunk) const {
    return (lane_offset ^ ((chunk & T::kSwizzle) << 4)) + (base + ((chunk & ~T::kSwizzle) << 4) + row * T::kPitch);
  }
};
// Matrices in the order (upper left, lower left, upper right, lower right): an A fragment, or with .trans two B fragments
// of a tile stored [k][n].
template <class T> DEVICE Window16<T> down_first(T tile, int row, int chunk) {
  return {tile.base, T::offset(row + (lane_index() & 15), chunk + (lane_index() >> 4))};
}
// Matrices in the order (upper left, upper right, lower left, lower right): two B fragments of a tile stored [n][k], or
// with .trans an A fragment of a tile stored [k][m].
template <class T> DEVICE Window16<T> right_first(T tile, int row, int chunk) {
  return {tile.base, T::offset(row + (lane_index() & 7) + ((lane_index() >> 4) << 3), chunk + ((lane_index() >> 3) & 1))};
}

// A fragment of step k out of accumulators.
template <int kM, int kN> DEVICE void load_packed(u32 (&a_frag)[kM][4], const u32 (&packed)[kM][kN][2], int k) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) a_frag[m][e] = packed[m][2 * k + (e >> 1)][e & 1];
}
template <int kM, int kN> DEVICE void load_packed(u32 (&a_frag)[kM][4], const float (&acc)[kM][kN][4], int k) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float(&c)[4] = acc[m][2 * k + (e >> 1)];
      a_frag[m][e] = pack<kIsBf16>(c[(e & 1) * 2], c[(e & 1) * 2 + 1]);
    }
}

// A fragments of step k from a tile (`rows` from down_first).
template <class T, int kM> DEVICE void load_rows(u32 (&a_frag)[kM][4], Window16<T> rows, int k) {
#pragma unroll
  for (int m = 0; m < kM; ++m) ldmatrix_x4(a_frag[m], rows.at(m * 16, k * 2));
}

template <int kM, int kN> DEVICE void clear(float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;
}

template <int kM, int kN> DEVICE void scale(float (&acc)[kM][kN][4], float factor) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] *= factor;
}

// ---- products: acc [16 kM x 8 kN] += A [16 kM x 16 kSteps] B; load_a(a_frag, k) fills the A fragments of step k ----

// B stored [n][k] (`b` from right_first): acc += A B^T in the tile's own terms.
template <int kSteps, class T, int kM, int kN, class LoadA>
DEVICE void multiply_transposed(float (&acc)[kM][kN][4], const LoadA& load_a, Window16<T> b) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    u32 a_frag[kM][4];
    load_a(a_frag, k);
#pragma unroll
    for (int pair = 0; pair < kN / 2; ++pair) {
      u32 b_frag[4];
      ldmatrix_x4(b_frag, b.at(pair * 16, k * 2));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_m16n8k16<kIsBf16>(acc[m][2 * pair], a_frag[m], b_frag[0], b_frag[1]);
        mma_m16n8k16<kIsBf16>(acc[m][2 * pair + 1], a_frag[m], b_frag[2], b_frag[3]);
      }
    }
  }
}

// B stored [k][n] (`b` from down_first): acc += A B. Column pairs are kPairStride apart.
template <int kSteps, int kPairStride = 1, class T, int kM, int kN, class LoadA>
DEVICE void multiply(float (&acc)[kM][kN][4], const LoadA& load_a, Window16<T> b) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    u32 a_frag[kM][4];
    load_a(a_frag, k);
#pragma unroll
    for (int pair = 0; pair < kN / 2; ++pair) {
      u32 b_frag[4];
      ldmatrix_x4_trans(b_frag, b.at(k * 16, pair * kPairStride * 2));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_m16n8k16<kIsBf16>(acc[m][2 * pair], a_frag[m], b_frag[0], b_frag[1]);
        mma_m16n8k16<kIsBf16>(acc[m][2 * pair + 1], a_frag[m], b_frag[2], b_frag[3]);
      }
    }
  }
}
