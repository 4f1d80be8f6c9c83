// After the Hopper backward: dq = softmax_scale * the fp32 sums of the workspace's records (workspace_sm90.cuh), as 16-bit rows.
// Stores dq for the rows of every sequence.
// Grid: m_blocks * num_heads_q * batch (see packed_sm90.cuh), four warps, kBlockM rows a CTA.
#include "workspace_sm90.cuh"

constexpr int kSharedMemory = 0;
static_assert(kNumWarps == 4, "a record is the accumulators of four warps");

KERNEL(kThreads, 1) attention_backward_finish_sm90(GRID_CONSTANT Params p) {
  const Position position = query_block_of(p, block_index());
  const Sequence sequence = sequence_of(p, position.batch);
  const int first = position.block * kBlockM;
  if (first >= sequence.q_length) return;

  const u32 record = record_of(p, first_query_block(p, sequence) + position.block, position.head);
  const Rows<u16> dq = dq_of(p, sequence, position.head);
#pragma unroll
  for (int tile = 0; tile < kDqTiles; ++tile) {
    const F32x4* sums = (const F32x4*)(dq_sums(p, record) + (warp_index() * kDqTiles + tile) * (16 * kHeadDim)) + lane_index();
    float acc[kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      const F32x4 sum = ld_global(sums + i * 32);
      acc[4 * i] = sum.x * p.softmax_scale, acc[4 * i + 1] = sum.y * p.softmax_scale;
      acc[4 * i + 2] = sum.z * p.softmax_scale, acc[4 * i + 3] = sum.w * p.softmax_scale;
    }
    const int row = first + tile * 64 + warp_index() * 16 + (lane_index() >> 2);
    store_accumulators(dq, row, sequence.q_length, p.head_dim, acc);
  }
}
