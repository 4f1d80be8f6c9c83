// After the Hopper backward: dq = softmax_scale * the fp32 sums of the workspace's records (workspace_sm90.cuh), as 16-bit rows; dk and
// dv likewise (scaled before) where CTAs share key heads.
// Stores dq for the rows of every sequence, dk and dv for the rows of every sequence of keys.
// Grid: m_blocks * num_heads_q * batch (see packed_sm90.cuh), four warps, kBlockM rows a CTA; then one CTA for 64 rows of dk or dv.
#include "workspace_sm90.cuh"

constexpr int kSharedMemory = 0;
static_assert(kNumWarps == 4, "a record is the accumulators of four warps");

// 64 rows from `row` on, from the accumulators of a warpgroup; `sums` are the warp's.
DEVICE void round_rows(Rows<u16> rows, int row, int row_end, int head_dim, const float* sums, float scale) {
  float acc[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 8; ++i) {
    const F32x4 sum = ld_global((const F32x4*)sums + i * 32 + lane_index());
    acc[4 * i] = sum.x * scale, acc[4 * i + 1] = sum.y * scale, acc[4 * i + 2] = sum.z * scale, acc[4 * i + 3] = sum.w * scale;
  }
  store_accumulators(rows, row + warp_index() * 16 + (lane_index() >> 2), row_end, head_dim, acc);
}

// Tile `index` of 64 rows of all records of dk and dv.
DEVICE void finish_keys(const Params& p, u32 index) {
  constexpr u32 kTiles = kBlockN / 64;
  const Position at = position_of(index / (2 * kTiles), p.n_blocks, p.num_heads_kv);
  const Position position = p.cu_seqlens_k ? in_sequence(at, p.cu_seqlens_k, kBlockN, p.batch) : at;
  const Sequence sequence = sequence_of(p, position.batch);
  const int tile = index % kTiles, first = position.block * kBlockN + tile * 64;
  if (first >= sequence.k_rows) return;
  const bool of_v = index / kTiles % 2;
  const u32 record = key_record_of(p, sequence, position.block, position.head);
  const float* sums = (of_v ? dv_sums(p, record) : dk_sums(p, record)) + (tile * 4 + warp_index()) * (16 * kHeadDim);
  round_rows(of_v ? dv_of(p, sequence, position.head) : dk_of(p, sequence, position.head), first, sequence.k_rows, p.head_dim, sums, 1.f);
}

KERNEL(kThreads, 1) attention_backward_finish_sm90(GRID_CONSTANT Params p) {
  if (block_index() >= query_records(p)) {
    finish_keys(p, block_index() - query_records(p));
    return;
  }
  const Position position = query_block_of(p, block_index());
  const Sequence sequence = sequence_of(p, position.batch);
  const int first = position.block * kBlockM;
  if (first >= sequence.q_length) return;

  const u32 record = record_of(p, first_query_block(p, sequence) + position.block, position.head);
  const Rows<u16> dq = dq_of(p, sequence, position.head);
#pragma unroll
  for (int tile = 0; tile < kDqTiles; ++tile) {
    const float* sums = dq_sums(p, record) + (warp_index() * kDqTiles + tile) * (16 * kHeadDim);
    round_rows(dq, first + tile * 64, sequence.q_length, p.head_dim, sums, p.softmax_scale);
  }
}
