// Tiles as TMA writes and wgmma reads them, the three kinds of products of the backward, and the loads.
#pragma once
#include "ptx_sm90.cuh"
#include "seqlen.cuh"

// ---- tiles: slabs of 64 columns (128 bytes, the swizzle's width), slab after slab; 16-byte chunk c of row r lies at c ^ r % 8 ----
template <int kRowCount, int kColumnCount> struct SlabTile {
  static constexpr int kRows = kRowCount, kSlabs = (kColumnCount + 63) / 64;
  static constexpr int kSlabBytes = kRows * 128, kBytes = kSlabs * kSlabBytes;
  u32 base;  // multiple of 1024, where the swizzle's pattern starts
};

// A wgmma descriptor is 64 bits of which only the lower half varies here: address and distance of neighbouring slabs, in 16-byte
// units. The upper half: 1024 bytes from one group of 8 rows to the next, 128-byte swizzle. Kept as 32 bits and completed at
// the use: as 64-bit values ptxas would hold (and spill) dozens of them.
DEVICE u64 descriptor(u32 low) { return (u64)(1u << 30 | 1024 / 16) << 32 | low; }
template <class T> DEVICE u32 operand(T tile, int row = 0) {
  return (u32)(T::kSlabBytes / 16) << 16 | (tile.base + row * 128 & 0x3ffff) >> 4;
}
// Step k of 16 in the reduced dimension: 32 bytes on in a row, or 16 rows on.
template <class T> DEVICE u32 along_row(u32 operand, int k) { return operand + k / 4 * (T::kSlabBytes / 16) + k % 4 * 2; }
DEVICE u32 down_rows(u32 operand, int k) { return operand + k * (16 * 128 / 16); }

// ---- products, started and committed as one group; operands as operand() gives them ----

// acc [64 x N] = A B^T over kHeadDim: 64 rows of tile A, N rows of tile B.
template <class A, class B> DEVICE void start_abt(float (&acc)[B::kRows / 2], u32 a, u32 b) {
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k)
    wgmma_ss<B::kRows, kIsBf16, false, false>(acc, descriptor(along_row<A>(a, k)), descriptor(along_row<B>(b, k)), k > 0);
  wgmma_commit();
}
// acc [64 x N] += A B over the rows of B: A in registers.
template <int N, int kSteps> DEVICE void start_ab(float (&acc)[N / 2], const u32 (&a_frag)[4 * kSteps], u32 b) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    wgmma_rs<N, kIsBf16, true>(acc, a_frag[4 * k], a_frag[4 * k + 1], a_frag[4 * k + 2], a_frag[4 * k + 3], descriptor(down_rows(b, k)), true);
  wgmma_commit();
}
// acc [64 x N] = A^T B over the rows of both.
template <int N, int kSteps> DEVICE void start_atb(float (&acc)[N / 2], u32 a, u32 b) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma_ss<N, kIsBf16, true, true>(acc, descriptor(down_rows(a, k)), descriptor(down_rows(b, k)), k > 0);
  wgmma_commit();
}

// ---- TMA ----

// Rows that are not of the sequence never enter shared memory, whatever they hold (another sequence, a stale cache, NaN): the
// tensor map cuts a tile off at the sequence's end and fills up with zeros. Padded batches end where the map does. For packed
// rows and for seqused_k the map (head_dim, x, heads, y, z) has row strides in x and y, 2^30 rows in x, and such a stride in z that
// z = 2^30 takes 2^30 rows back: x = 2^30 - length + row, y = start + length is row `row`, and beyond `length` x is outside.
constexpr int kRaggedRows = 1 << 30;
struct RowOrigin {
  int x, y, z;  // of row 0
};
DEVICE RowOrigin origin_of(bool ragged, int batch, i64 start, int length) {
  if (ragged) return {kRaggedRows - length, (int)start + length, kRaggedRows};
  return {0, batch, 0};
}
template <class T> DEVICE void load_rows(T tile, const TensorMap* map, u32 barrier, RowOrigin origin, int row, int head) {
#pragma unroll
  for (int slab = 0; slab < T::kSlabs; ++slab)
    tma_load_5d(tile.base + slab * T::kSlabBytes, map, barrier, slab * 64, origin.x + row, head, origin.y, origin.z);
}
