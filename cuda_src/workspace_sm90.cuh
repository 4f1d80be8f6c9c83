// What the three kernels of the Hopper backward hand to each other, and how accumulators become rows of a gradient.
//
// Params.dq_accum is one record for every block of kBlockM queries that a sequence has, per query head:
//   kBlockM * kHeadDim floats   dq before scaling, in the order of wgmma's accumulators: [4 warps][kHeadDim / 8][32 lanes][4],
//                               so that each warp adds a run of bytes and no address is computed for an element
//   kBlockM floats              logsumexp * log2(e), +inf for rows that are none or see nothing: exp2(s - inf) = 0
//   kBlockM floats              -delta, 0 for rows that are none
// Params.dq_turns has one counter a record: warps that have added to it (deterministic).
// Records: [query blocks][num_heads_q] with batch * m_blocks query blocks; varlen: total_q / kBlockM + batch, sequence by sequence,
// so that short sequences beside a long one take no more than their rows, rounded up.
#pragma once
#include "seqlen.cuh"
#include "tile.cuh"

static_assert(kBlockM == 64 && kHeadDim % 32 == 0, "a record is one wgmma tile of 64 rows");
constexpr int kDqFloats = kBlockM * kHeadDim, kRecordFloats = kDqFloats + 2 * kBlockM;
constexpr int kWarpDqFloats = kDqFloats / 4;

// First query block of a sequence among all.
DEVICE u32 first_query_block(const Params& p, const Sequence& s) {
  return p.cu_seqlens_q ? (u32)(s.q_start / kBlockM) + s.batch : (u32)s.batch * p.m_blocks;
}
DEVICE u32 record_of(const Params& p, u32 query_block, int head) { return query_block * p.num_heads_q + head; }
DEVICE float* dq_of(const Params& p, u32 record) { return p.dq_accum + (i64)record * kRecordFloats; }
DEVICE float* logsumexp_of(const Params& p, u32 record) { return dq_of(p, record) + kDqFloats; }
DEVICE float* negative_delta_of(const Params& p, u32 record) { return dq_of(p, record) + kDqFloats + kBlockM; }

// Lane t of a quad gives a[j] and gets lane j's a[t].
DEVICE void transpose_in_quad(u32 (&a)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit <<= 1) {
    const bool upper = lane_index() & bit;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & bit) continue;
      const u32 received = shfl_xor(upper ? a[low] : a[low | bit], bit);
      if (upper) a[low] = received;
      else a[low | bit] = received;
    }
  }
}

// A warp's accumulators of 32 columns (16 rows) -> 16-bit rows; a lane stores 8 neighbouring columns of rows g and g + 8.
// `destination` is row g, column 0 of the 32; `rows` and `columns` are how many exist from there on.
DEVICE void store_rows(const float* acc, float scale, u16* destination, i64 stride_row, int rows, int columns) {
  const int column = (lane_index() & 3) * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = pack<kIsBf16>(acc[4 * j + 2 * half] * scale, acc[4 * j + 2 * half + 1] * scale);
    transpose_in_quad(a);
    if (half * 8 < rows && column < columns)
      st_global((U32x4*)(destination + (half * 8 * stride_row + column)), U32x4{a[0], a[1], a[2], a[3]});
  }
}
