// After the backward: dq = softmax_scale * dq_accum, from fp32 in fragment order to rows of elements.
// Assumes dq_accum complete. Stores dq for the rows of every sequence.
// Grid: m_blocks * num_heads_q * batch, kNumWarps warps, kBlockM rows a CTA.
#include "seqlen.cuh"
#include "tile.cuh"

using DqTile = Tile<kBlockM, kHeadDim>;
constexpr int kSharedMemory = DqTile::kBytes;
constexpr int kColumnFrags = kHeadDim / 8;

KERNEL(kThreads, 1) attention_backward_dq(GRID_CONSTANT Params p) {
  const Position position = position_of(block_index(), p.m_blocks, p.num_heads_q);
  const Sequence sequence = sequence_of(p, position.batch);
  const int first = position.block * kBlockM;
  if (first >= sequence.q_length) return;

  const DqTile dq_smem = {shared_base()};
  const float* accum = p.dq_accum + query_block_offset(p, sequence, position.head, position.block) * (kBlockM * kHeadDim);
  // One 16x8 fragment a warp and round
#pragma unroll 4
  for (int fragment = warp_index(); fragment < kBlockM / 16 * kColumnFrags; fragment += kNumWarps) {
    float c[4];
    if constexpr (kHasVectorReduction) {
      const F32x4 v = ld_global((const F32x4*)(accum + fragment * 128 + fragment_index(0)));
      c[0] = v.x, c[1] = v.y, c[2] = v.z, c[3] = v.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[e] = ld_global(accum + fragment * 128 + fragment_index(e));
    }
    float scaled[1][1][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) scaled[0][0][e] = c[e] * p.softmax_scale;
    u32 packed[1][1][kPacked];
    pack_accumulators(packed, scaled);
    const int row = fragment / kColumnFrags * 16 + (lane_index() >> 2), column = fragment % kColumnFrags;
    store_pair(dq_smem, row, column, packed[0][0]);
    store_pair(dq_smem, row + 8, column, packed[0][0] + kPacked / 2);
  }
  sync_block();  // the whole tile is in shared memory
  store_tile<kThreads>(dq_smem, dq_of(p, sequence, position.head).from(first), sequence.q_length - first, p.head_dim, thread_index());
}
