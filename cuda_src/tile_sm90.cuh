// Tiles as TMA writes and wgmma reads them, operand descriptors, products, and rings of stages.
//
// Layout of a tile: slabs of 128 bytes of columns; in a slab a row is 128 bytes, and chunk c (16 bytes) of row r lies where
// chunk c ^ (r % 8) would: the hardware's 128-byte swizzle. A last slab that columns fill in part takes the room of a whole
// one; products stop at kColumns. Tiles that TMA does not write may have slabs of 32 bytes, chunk c where c ^ (r / 4 % 2) would be.
#pragma once
#include "ptx_sm90.cuh"
#include "seqlen.cuh"

// An operand of wgmma in shared memory, in units of 16 bytes: its start in bits 0-13, the distance of slabs in 16-29 (read
// only where the reduced dimension runs across rows), the distance of 8 rows in 32-45; in 62-63 the swizzle, of 128 or 32 bytes.
template <int kPitch> struct OperandOf {
  static_assert(kPitch == 128 || kPitch == 32, "bytes of a row in a slab");
  u32 low;
  DEVICE u64 at(u32 bytes) const { return (u64)((kPitch == 128 ? 1u : 3u) << 30 | kPitch * 8 >> 4) << 32 | (low + (bytes >> 4)); }
};
using Operand = OperandOf<128>;

template <int kRowCount, int kColumnCount, int kElementBytes = sizeof(Element), int kPitchBytes = 128> struct SlabTile {
  static constexpr int kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kPitch = kPitchBytes, kSlabColumns = kPitch / kElementBytes;
  static constexpr int kSlabs = (kColumns + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabBytes = kRows * kPitch;
  static constexpr int kBytes = kSlabs * kSlabBytes;
  static_assert(kRows % 8 == 0 && kRows <= 256 && kColumns % 32 == 0, "whole swizzle patterns, one TMA box a slab");

  u32 base;  // multiple of 1024

  // One thread: rows [row, row + kRows) of (head, batch), arriving on `barrier`.
  DEVICE void load(const TensorMap* map, u32 barrier, int row, int head, int batch) const {
    mbarrier_arrive_expect_tx(barrier, kBytes);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      tma_load_4d(base + slab * kSlabBytes, map, barrier, slab * kSlabColumns, row, head, batch);
  }

  DEVICE OperandOf<kPitch> operand(int row = 0) const {
    return {((base + row * kPitch) & 0x3ffff) >> 4 | (u32)(kSlabBytes >> 4) << 16};
  }
  static constexpr int kPieces = kColumns * kElementBytes / 32;  // that one product reduces, along the rows
  // Byte offsets of the k-th such piece, and of 16 rows.
  static constexpr u32 along(int k) { return k * 32 / kPitch * kSlabBytes + k * 32 % kPitch; }
  static constexpr u32 across(int k) { return k * 16 * kPitch; }
};

// ---- products, issued as one group ----

// acc [64, B rows] = A B^T, both in shared memory.
template <class A, class B>
DEVICE void issue_multiply_transposed(float (&acc)[B::kRows / 2], Operand a, Operand b) {
  static_assert(A::kColumns == B::kColumns, "reduced dimension");
#pragma unroll
  for (int k = 0; k < A::kPieces; ++k) {
    if constexpr (kIsE4m3) wgmma_e4m3_ss<B::kRows>(acc, a.at(A::along(k)), b.at(B::along(k)), k != 0);
    else wgmma_ss<B::kRows, kIsBf16, false, false>(acc, a.at(A::along(k)), b.at(B::along(k)), k != 0);
  }
  wgmma_commit();
}

// acc [64, B columns] += A B, A in registers.
template <class B>
DEVICE void issue_multiply(float (&acc)[B::kColumns / 2], const u32 (&a_frag)[B::kRows / 4], Operand b) {
#pragma unroll
  for (int k = 0; k < B::kRows / 16; ++k)
    wgmma_rs<B::kColumns, kIsBf16, true>(acc, a_frag[4 * k], a_frag[4 * k + 1], a_frag[4 * k + 2], a_frag[4 * k + 3],
                                         b.at(B::across(k)), true);
  wgmma_commit();
}

// acc [64, B rows] += A B^T in e4m3, A in registers.
template <class B>
DEVICE void issue_multiply_e4m3(float (&acc)[B::kRows / 2], const u32 (&a_frag)[B::kColumns / 8], OperandOf<B::kPitch> b) {
#pragma unroll
  for (int k = 0; k < B::kPieces; ++k)
    wgmma_e4m3_rs<B::kRows>(acc, a_frag[4 * k], a_frag[4 * k + 1], a_frag[4 * k + 2], a_frag[4 * k + 3], b.at(B::along(k)), true);
  wgmma_commit();
}

// ---- rings: stages handed from a producer to consumers and back ----

// Barriers full[kStages], empty[kStages] at `base`; every user walks the stages in the same order with a Ring of its own.
template <int kStages> struct Ring {
  static constexpr int kBytes = kStages * 16;
  u32 base, position;

  DEVICE explicit Ring(u32 base) : base(base), position(0) {}
  DEVICE u32 stage() const { return position % kStages; }
  DEVICE u32 parity() const { return position / kStages & 1; }  // of this round through the stages
  DEVICE u32 full() const { return base + stage() * 8; }
  DEVICE u32 empty(int back = 0) const { return base + (kStages + (position - back) % kStages) * 8; }  // of so many stages back
  DEVICE void init(int producers, int consumers) const {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + i * 8, producers);
      mbarrier_init(base + (kStages + i) * 8, consumers);
    }
  }
  DEVICE void wait_full() const { mbarrier_wait(full(), parity()); }
  DEVICE void wait_empty() const { mbarrier_wait(empty(), parity() ^ 1); }  // a fresh ring is empty
  DEVICE void advance() { ++position; }
};

// ---- accumulators ----

// Among the four lanes of a quad: lane t gets what lanes 0..3 have in r[t].
DEVICE void transpose_quad(u32 (&r)[4]) {
  const bool odd = lane_index() & 1, upper = lane_index() & 2;
  const u32 x = shfl_xor(odd ? r[0] : r[1], 1), y = shfl_xor(odd ? r[2] : r[3], 1);
  if (odd) r[0] = x, r[2] = y;
  else r[1] = x, r[3] = y;
  const u32 z = shfl_xor(upper ? r[0] : r[2], 2), w = shfl_xor(upper ? r[1] : r[3], 2);
  if (upper) r[0] = z, r[1] = w;
  else r[2] = z, r[3] = w;
}

// Accumulators [64 x kCount * 2] -> 16-bit rows in global memory, 16 bytes a store: this thread's rows are `row` and
// `row + 8`; rows below `row_end` and columns below head_dim are stored.
template <int kCount>
DEVICE void store_accumulators(Rows<u16> rows, int row, int row_end, int head_dim, const float (&acc)[kCount]) {
  static_assert(kCount % 16 == 0, "32 columns a turn");
  const int t = lane_index() & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + half * 8;
#pragma unroll
    for (int group = 0; group < kCount / 16; ++group) {
      u32 chunk[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int first = group * 16 + j * 4 + half * 2;
        chunk[j] = pack<kIsBf16>(acc[first], acc[first + 1]);
      }
      transpose_quad(chunk);
      const int column = group * 32 + t * 8;
      if (i < row_end && column < head_dim)
        st_global((U32x4*)(rows.from(i).first + column), U32x4{chunk[0], chunk[1], chunk[2], chunk[3]});
    }
  }
}

// Accumulators -> 16-bit rows [row, row + 16) of a tile, by one warp.
template <class T, int kCount> DEVICE void stage_accumulators(T tile, int row, const float (&acc)[kCount]) {
  static_assert(kCount == T::kColumns / 2 && kCount % 8 == 0, "whole rows, 16 columns a turn");
  const int lane = lane_index(), mine = row + (lane & 15);
  const u32 first = tile.base + mine * T::kPitch + (((lane >> 4) ^ (mine & 7)) << 4);
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
    u32 chunk[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) chunk[j] = pack<kIsBf16>(acc[8 * k + 2 * j], acc[8 * k + 2 * j + 1]);
    stmatrix_x4((first ^ k % 4 << 5) + k / 4 * T::kSlabBytes, chunk);
  }
}
