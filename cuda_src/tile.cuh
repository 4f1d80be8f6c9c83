// Tiles in shared memory, their way in from global memory and out to it, and tensor-core fragments read from them.
//
// Layout of a tile: row-major, rows of kColumns elements cut into 16-byte chunks; chunk c of row r lies where chunk
// c ^ f(r) would. f takes 8 values over 8 rows when a row fills whole 128-byte bank lines, and 4 values over row pairs
// when it fills half lines (32 or 96 columns of 16 bits): either way the 8 rows of an ldmatrix hit all 32 banks once.
//
// Fragments of mma.m16n8k16, lane = 4 * g + t (g = lane / 4, t = lane % 4), two 16-bit elements to a register:
//
//   A [16 x 16]  a0 (g, 2t..) a1 (g + 8, 2t..) a2 (g, 2t + 8..) a3 (g + 8, 2t + 8..)
//   B [16 x 8]   b0 (2t.., g) b1 (2t + 8.., g)
//   C [16 x 8]   c0 (g, 2t)   c1 (g, 2t + 1)   c2 (g + 8, 2t)   c3 (g + 8, 2t + 1)      fp32
//
// C of one product, packed in pairs, is A of the next: n-fragments 2k and 2k + 1 make the A fragment of step k.
// product_fp32.cuh says how it is for fp32 elements, where a step is 8 columns: 2 chunks as well.
#pragma once
#include "ptx_bits.cuh"
#include "seqlen.cuh"

constexpr int kThreads = kNumWarps * 32;
constexpr int kChunkElements = 16 / sizeof(Element);
constexpr int kMmaDepth = 2 * kChunkElements;    // columns of A that one mma takes
constexpr int kPairChunks = 16 / kChunkElements; // chunks in a pair of n-fragments, 16 columns

// A compile-time flag or number as an argument.
template <bool kValue> struct Switch {
  static constexpr bool kOn = kValue;
};
template <int kNumber> struct Number {
  static constexpr int kValue = kNumber;
};

template <int kRowCount, int kColumnCount, class E = Element> struct Tile {
  static constexpr int kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kPitch = kColumns * sizeof(E);  // bytes
  static constexpr int kBytes = kRows * kPitch;
  static constexpr int kChunks = kPitch / 16;
  static constexpr int kSwizzle = kPitch % 128 == 0 ? 7 : 3;
  static constexpr int kRowsPerStep = kPitch % 128 == 0 ? 1 : 2;
  static_assert(kPitch % 64 == 0, "rows are whole or half bank lines");

  u32 base;  // multiple of 128

  // f. fp32: rows 2t, rows 2t + 1, rows 0-3 and rows 4-7 must also differ in the upper two bits, for lanes that read a
  // pair of chunks in each of four rows.
  static DEVICE int fold(int row) {
    if constexpr (sizeof(E) == 4 && kSwizzle == 7) return ((row ^ row >> 2) & 1) << 2 | (row & 2) | (row >> 2 & 1);
    return (row / kRowsPerStep) & kSwizzle;
  }
  static DEVICE u32 offset(int row, int chunk) { return row * kPitch + ((chunk ^ fold(row)) << 4); }
  DEVICE u32 address(int row, int chunk) const { return base + offset(row, chunk); }
};

// ---- global memory -> tile ----

// Starts the copy of `source` into the tile. Rows outside [row_begin, row_end) and columns from
// head_dim on are never read and become zero. The caller commits.
template <class T> DEVICE void load_tile(T tile, Rows<const Element> source, int row_begin, int row_end, int head_dim) {
  constexpr int kLanes = T::kChunks & -T::kChunks;  // threads along a row: the power of two in its chunks
  constexpr int kStep = kThreads / kLanes;          // rows a round
  const int lane = thread_index() % kLanes;
  int row = thread_index() / kLanes;
  const u32 first = tile.address(row, lane);
  const Element* from = source.from(row).first + lane * kChunkElements;
  const u32 rows = row_end > row_begin ? row_end - row_begin : 0;
  const u32 from_begin = forget((u32)(row - row_begin));  // one register, not one a round
#pragma unroll
  for (int round = 0; round < (T::kRows + kStep - 1) / kStep; ++round) {
    if (T::kRows % kStep != 0 && row >= T::kRows) break;
#pragma unroll
    for (int chunk = 0; chunk < T::kChunks; chunk += kLanes) {
      // The swizzle repeats every 8 rows
      const u32 to = kStep % 8 == 0 && T::kChunks == kLanes ? first + round * kStep * T::kPitch : tile.address(row, chunk + lane);
      cp_async_16(to, from + chunk * kChunkElements, from_begin + round * kStep < rows && (chunk + lane) * kChunkElements < head_dim);
    }
    row += kStep;
    from += kStep * source.stride;
  }
}

// ---- tile -> global memory ----

// Rows [0, row_end), columns [0, head_dim), 16 bytes a store, by kCount threads, of which this is number `index`.
template <int kCount, class T> DEVICE void store_tile(T tile, Rows<Element> destination, int row_end, int head_dim, int index) {
  constexpr int kAcross = T::kChunks & -T::kChunks;             // as in load_tile
  constexpr int kLanes = kAcross < kCount ? kAcross : kCount;
  constexpr int kStep = kCount / kLanes;
  const int lane = index % kLanes;
  int row = index / kLanes;
  Element* to = destination.from(row).first + lane * kChunkElements;
#pragma unroll
  for (int round = 0; round < (T::kRows + kStep - 1) / kStep; ++round) {
    if (T::kRows % kStep != 0 && row >= T::kRows) break;
#pragma unroll
    for (int chunk = 0; chunk < T::kChunks; chunk += kLanes) {
      const U32x4 elements = ld_shared<U32x4>(tile.address(row, chunk + lane));
      if (row < row_end && (chunk + lane) * kChunkElements < head_dim) st_global((U32x4*)(to + chunk * kChunkElements), elements);
    }
    row += kStep;
    to += kStep * destination.stride;
  }
}

// Accumulators [16 kM x 8 kN] as elements: in 16 bits [0] of row g, [1] of row g + 8; in fp32 as they are.
constexpr int kPacked = kIsFp32 ? 4 : 2;  // registers of a packed n-fragment
// Goes to n-fragments from `first` on.
template <int kM, int kN, int kNPacked>
DEVICE void pack_accumulators(u32 (&packed)[kM][kNPacked][kPacked], const float (&acc)[kM][kN][4], int first = 0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < kPacked; ++i) {
        if constexpr (kIsFp32) packed[m][first + n][i] = bits_of(acc[m][n][i]);
        else packed[m][first + n][i] = pack<kIsBf16>(acc[m][n][i * 2], acc[m][n][i * 2 + 1]);
      }
}

// Elements c0, c1 of fragment column `fragment` (8 columns) in row `row` of a tile, at this lane's place.
template <class T> DEVICE void store_pair(T tile, int row, int fragment, const u32* packed) {
  const int t = lane_index() & 3;
  if constexpr (kIsFp32) st_shared(tile.address(row, fragment * 2 + (t >> 1)) + (t & 1) * 8, U32x2{packed[0], packed[1]});
  else st_shared(tile.address(row, fragment) + t * 4, packed[0]);
}
// -> tile, from row `row` on, `step` rows from one m-fragment to the next. Pair j of n-fragments (16 columns) lands at column pair
// j * kPairStride + pair: column pairs may be dealt out to kPairStride warps.
template <int kPairStride = 1, class T, int kM, int kN>
DEVICE void store_packed(T tile, int row, int pair, const u32 (&packed)[kM][kN][kPacked], int step = 16) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_pair(tile, row + m * step + half * 8 + (lane_index() >> 2), ((n >> 1) * kPairStride + pair) * 2 + (n & 1),
                   packed[m][n] + half * (kPacked / 2));
}
template <int kPairStride = 1, class T, int kM, int kN>
DEVICE void store_accumulators(T tile, int row, int pair, const float (&acc)[kM][kN][4], int step = 16) {
  u32 packed[kM][kN][kPacked];
  pack_accumulators(packed, acc);
  store_packed<kPairStride>(tile, row, pair, packed, step);
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
DEVICE void load_fragment(float (&c)[4], const float* fragment) {  // of an earlier launch
  if constexpr (kHasVectorReduction) {
    const F32x4 v = ld_global((const F32x4*)(fragment + fragment_index(0)));
    c[0] = v.x, c[1] = v.y, c[2] = v.z, c[3] = v.w;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[e] = ld_global(fragment + fragment_index(e));
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
