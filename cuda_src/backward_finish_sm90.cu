// After the Hopper backward: dq = softmax_scale * the fp32 sums of the workspace's records (workspace_sm90.cuh), as 16-bit rows.
// Stores dq for the rows of every sequence.
// Grid: m_blocks * num_heads_q * batch, four warps, kBlockM rows a CTA.
#include "workspace_sm90.cuh"

constexpr int kSharedMemory = 0;
static_assert(kNumWarps == 4, "a record is the accumulators of four warps");

KERNEL(kThreads, 1) attention_backward_finish_sm90(GRID_CONSTANT Params p) {
  const Position position = position_of(block_index(), p.m_blocks, p.num_heads_q);
  const Sequence sequence = sequence_of(p, position.batch);
  const int first = position.block * kBlockM;
  if (first >= sequence.q_length) return;

  const F32x4* dq_accum = (const F32x4*)(dq_of(p, record_of(p, first_query_block(p, sequence) + position.block, position.head)) + warp_index() * kWarpDqFloats);
  float acc[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 8; ++i) {
    const F32x4 v = ld_global(dq_accum + (i * 32 + lane_index()));
    acc[4 * i] = v.x, acc[4 * i + 1] = v.y, acc[4 * i + 2] = v.z, acc[4 * i + 3] = v.w;
  }
  const i64 i = first + warp_index() * 16 + (lane_index() >> 2);
  u16* dq = p.dq + head_offset(position.batch, sequence.q_start, position.head, p.dq_stride_batch, p.dq_stride_row, p.dq_stride_head) +
            i * p.dq_stride_row;
#pragma unroll
  for (int column = 0; column < kHeadDim; column += 32)
    store_rows(acc + column / 2, p.softmax_scale, dq + column, p.dq_stride_row, sequence.q_length - (int)i, p.head_dim - column);
}
