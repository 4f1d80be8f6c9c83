// After the backward: dq = softmax_scale * dq_accum, from fp32 in fragment order to rows of elements.
// Assumes dq_accum complete. Stores dq for the rows of every sequence.
// Grid: m_blocks * num_heads_q * batch, the heads of a block next to each other, kNumWarps warps, kBlockM rows a CTA.
#include "seqlen.cuh"
#include "tile.cuh"

using DqTile = Tile<kBlockM, kHeadDim>;
constexpr int kSharedMemory = DqTile::kBytes;
constexpr int kColumnFrags = kHeadDim / 8;
// Fragments of 16x8, one a warp and round; of so many rounds the loads are under way together.
constexpr int kRounds = kBlockM / 16 * kColumnFrags / kNumWarps;
constexpr int most_together(int wanted) { return kRounds % wanted == 0 ? wanted : most_together(wanted - 1); }
constexpr int kTogether = most_together(8);
static_assert(kRounds * kNumWarps * 16 == kBlockM * kColumnFrags, "whole rounds");

KERNEL(kThreads, 1) attention_backward_dq(GRID_CONSTANT Params p) {
  const u32 from_end = p.m_blocks * p.num_heads_q * p.batch - 1 - block_index();  // what was added to last is in L2
  const Position position = heads_together(from_end, p.m_blocks, p.num_heads_q);
  const Sequence sequence = sequence_of(p, position.batch);
  const int first = position.block * kBlockM;
  if (first >= sequence.q_length) return;

  const DqTile dq_smem = {shared_base()};
  const float* accum = p.dq_accum + query_block_offset(p, sequence, position.head, position.block) * (kBlockM * kHeadDim);
#pragma unroll 1
  for (int round = 0; round < kRounds; round += kTogether) {
    const int fragment = round * kNumWarps + warp_index();
    float c[1][kTogether][4];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) load_fragment(c[0][k], accum + (fragment + k * kNumWarps) * 128);
    scale(c, p.softmax_scale);
    u32 packed[1][kTogether][kPacked];
    pack_accumulators(packed, c);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int at = fragment + k * kNumWarps, row = at / kColumnFrags * 16 + (lane_index() >> 2), column = at % kColumnFrags;
      store_pair(dq_smem, row, column, packed[0][k]);
      store_pair(dq_smem, row + 8, column, packed[0][k] + kPacked / 2);
    }
  }
  sync_block();  // the whole tile is in shared memory
  store_tile<kThreads>(dq_smem, dq_of(p, sequence, position.head).from(first), sequence.q_length - first, p.head_dim, thread_index());
}
