// Before the backward: delta = rowsum(dout * out) - dlogsumexp, dq_accum = 0, dq_turns = 0, and key_hulls where there are key_ranges.
// Assumes what the forward assumes. Stores delta for the rows of every sequence, and of the others the blocks that hold any.
// Grid: m_blocks * num_heads_q * batch, the heads of a block next to each other, kNumWarps warps, kBlockM rows a CTA.
#include "seqlen.cuh"
#include "tile.cuh"

constexpr int kSharedMemory = 0;
constexpr int kChunks = kHeadDimV / kChunkElements;                              // 16-byte pieces of a row
constexpr int kLanes = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // of a row, a power of two for the shuffles
constexpr int kRowsPerPass = kThreads / kLanes, kPasses = (kBlockM + kRowsPerPass - 1) / kRowsPerPass;
constexpr int kPieces = (kChunks + kLanes - 1) / kLanes;                         // of a row, per lane
// Passes whose loads are under way together: with few of them, or one behind another, the kernel is slower than memory.
constexpr int kTogether = kPieces > 8 ? 1 : 8 / kPieces < kPasses ? 8 / kPieces : kPasses;

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

// By one warp, for all heads.
DEVICE void store_key_hull(const Params& p, const Sequence& s, int m_block) {
  constexpr int kNever = 0x7fffffff;
  int any_begin = kNever, any_end = 0, all_begin = 0, all_end = kNever;
  for (int i = m_block * kBlockM + lane_index(); i < smaller((m_block + 1) * kBlockM, s.q_length); i += 32) {
    const i32* range = p.key_ranges + (s.batch * p.key_ranges_stride_batch + i * p.key_ranges_stride_row);
    const int begin = larger(ld_global(range), 0), end = smaller(ld_global(range + 1), s.k_length);
    all_begin = larger(all_begin, begin);
    all_end = smaller(all_end, end);
    if (begin < end) any_begin = smaller(any_begin, begin), any_end = larger(any_end, end);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) {
    any_begin = smaller(any_begin, shfl_xor(any_begin, lanes));
    any_end = larger(any_end, shfl_xor(any_end, lanes));
    all_begin = larger(all_begin, shfl_xor(all_begin, lanes));
    all_end = smaller(all_end, shfl_xor(all_end, lanes));
  }
  if (lane_index() == 0)
    st_global((U32x4*)p.key_hulls + ((i64)s.batch * p.m_blocks + m_block),
              U32x4{(u32)any_begin, (u32)any_end, (u32)all_begin, (u32)all_end});
}

KERNEL(kThreads, 1) attention_backward_delta(GRID_CONSTANT Params p) {
  const Position position = heads_together(block_index(), p.m_blocks, p.num_heads_q);
  const Sequence sequence = sequence_of(p, position.batch);
  const int first = position.block * kBlockM;
  if (first >= sequence.q_length) return;

  if (p.key_hulls && position.head == 0 && warp_index() == 0) store_key_hull(p, sequence, position.block);

  const Rows<Element> out = out_of(p, sequence, position.head);
  const Rows<const Element> dout = dout_of(p, sequence, position.head);
  const i64 statistics = statistics_offset(p, sequence, position.head);
  const int lane = thread_index() % kLanes;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; pass += kTogether) {
    const int row = pass * kRowsPerPass + thread_index() / kLanes;
    U32x4 out_frag[kTogether][kPieces], dout_frag[kTogether][kPieces];
#pragma unroll
    for (int k = 0; k < kTogether; ++k)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int local = row + k * kRowsPerPass, i = first + local, column = (piece * kLanes + lane) * kChunkElements;
        out_frag[k][piece] = dout_frag[k][piece] = U32x4{0, 0, 0, 0};
        if (local < kBlockM && i < sequence.q_length && column < p.head_dim_v) {
          out_frag[k][piece] = ld_global((const U32x4*)(out.from(i).first + column));
          dout_frag[k][piece] = ld_global((const U32x4*)(dout.from(i).first + column));
        }
      }
    if (pass == 0) {
      const i64 block = query_block_offset(p, sequence, position.head, position.block);
      if (p.dq_turns && thread_index() == 0) st_global(p.dq_turns + block, 0);
#pragma unroll 8
      for (int i = thread_index() * 4; i < kBlockM * kHeadDim; i += kThreads * 4)
        st_global((F32x4*)(p.dq_accum + block * (kBlockM * kHeadDim) + i), F32x4{0.f, 0.f, 0.f, 0.f});
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      float sum = 0.f;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) sum += dot(out_frag[k][piece], dout_frag[k][piece]);
#pragma unroll
      for (int lanes = kLanes / 2; lanes > 0; lanes >>= 1) sum += shfl_xor(sum, lanes);
      const int local = row + k * kRowsPerPass, i = first + local;
      if (lane == 0 && local < kBlockM && i < sequence.q_length) {
        if (p.dlogsumexp) sum -= ld_global(p.dlogsumexp + statistics + i);
        st_global(p.delta + statistics + i, sum);
      }
    }
  }
}
