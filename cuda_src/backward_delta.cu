// Before the backward: delta = rowsum(dout * out) - dlogsumexp, and dq_accum = 0.
// Assumes what the forward assumes. Stores delta for the rows of every sequence, and zeroes of dq_accum the blocks that hold any.
// Grid: m_blocks * num_heads_q * batch, kNumWarps warps, kBlockM rows a CTA.
#include "seqlen.cuh"
#include "tile.cuh"

constexpr int kSharedMemory = 0;
constexpr int kChunks = kHeadDimV / kChunkElements;                              // 16-byte pieces of a row
constexpr int kLanes = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // of a row, a power of two for the shuffles
constexpr int kRowsPerPass = kThreads / kLanes;

DEVICE float dot(U32x4 a, U32x4 b) {
  const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kIsFp32) {
      sum += float_of(x[i]) * float_of(y[i]);
    } else {
      const F32x2 u = unpack<kIsBf16>(x[i]), w = unpack<kIsBf16>(y[i]);
      sum += u.x * w.x + u.y * w.y;
    }
  }
  return sum;
}

KERNEL(kThreads, 1) attention_backward_delta(GRID_CONSTANT Params p) {
  const Position position = position_of(block_index(), p.m_blocks, p.num_heads_q);
  const Sequence sequence = sequence_of(p, position.batch);
  const int first = position.block * kBlockM;
  if (first >= sequence.q_length) return;

  float* dq_accum = p.dq_accum + query_block_offset(p, position.batch, position.head, position.block) * (kBlockM * kHeadDim);
  for (int i = thread_index() * 4; i < kBlockM * kHeadDim; i += kThreads * 4)
    st_global((F32x4*)(dq_accum + i), F32x4{0.f, 0.f, 0.f, 0.f});

  const Rows<Element> out = out_of(p, sequence, position.head);
  const Rows<const Element> dout = dout_of(p, sequence, position.head);
  const i64 statistics = statistics_offset(p, sequence, position.head);
  const int lane = thread_index() % kLanes;
#pragma unroll 4
  for (int row = thread_index() / kLanes; row < kBlockM; row += kRowsPerPass) {
    const int i = first + row;
    const bool valid = i < sequence.q_length;
    float sum = 0.f;
#pragma unroll
    for (int chunk = lane; chunk < kChunks; chunk += kLanes) {
      const int column = chunk * kChunkElements;
      if (valid && column < p.head_dim_v)
        sum += dot(ld_global((const U32x4*)(out.from(i).first + column)), ld_global((const U32x4*)(dout.from(i).first + column)));
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes >>= 1) sum += shfl_xor(sum, lanes);
    if (valid && lane == 0) {
      if (p.dlogsumexp) sum -= ld_global(p.dlogsumexp + statistics + i);
      st_global(p.delta + statistics + i, sum);
    }
  }
}
