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

  finish_record(p, sequence, position.head, position.block);
}
