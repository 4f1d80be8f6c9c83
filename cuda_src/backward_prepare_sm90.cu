// Before the Hopper backward: delta = rowsum(dout * out) - dlogsumexp, and every record of the workspace (workspace_sm90.cuh):
// dq = 0, logsumexp in base 2, -delta; dk = dv = 0 where CTAs share key heads.
// Assumes unit last strides, 16-byte aligned rows. Also stores delta as it is where Params.delta is given (sinks need it).
// Grid: m_blocks * num_heads_q * batch (see packed_sm90.cuh), kNumWarps warps, kBlockM rows a CTA; then one CTA for each record of dk and dv.
#include "workspace_sm90.cuh"

constexpr int kSharedMemory = 0;
constexpr int kChunks = kHeadDim / 8;                                     // 16-byte pieces of a row
constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;        // lanes to a row, a power of two for the shuffles
constexpr int kRowsPerPass = kThreads / kLanes, kPasses = kBlockM / kRowsPerPass;
constexpr float kLog2e = 1.4426950408889634f;
static_assert(kPasses * kRowsPerPass == kBlockM && kPasses <= kLanes && kDqFloats % (4 * kThreads) == 0, "whole passes");

DEVICE float dot(U32x4 a, U32x4 b) {
  const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const F32x2 u = unpack<kIsBf16>(x[i]), w = unpack<kIsBf16>(y[i]);
    sum += u.x * w.x + u.y * w.y;
  }
  return sum;
}

// Deterministic: where starts of keys fall, in_sequence() deals some key blocks to nobody, and those after them would wait for ever.
// So none is dealt out: Params.dq_turns begins with their counter.
DEVICE void withhold_if_falling(const Params& p) {
  if (!p.dq_turns || !p.cu_seqlens_k) return;
  for (int b = thread_index(); b < p.batch; b += kThreads)
    if (ld_global(p.cu_seqlens_k + b) > ld_global(p.cu_seqlens_k + b + 1)) st_global((u32*)p.dq_turns, 1u << 31);
}

KERNEL(kThreads, 1) attention_backward_prepare_sm90(GRID_CONSTANT Params p) {
  if (block_index() >= query_records(p)) {
    float* sums = dk_sums(p, block_index() - query_records(p));
    for (int i = thread_index(); i < 2 * kKeyFloats / 4; i += kThreads) st_global((F32x4*)sums + i, F32x4{0.f, 0.f, 0.f, 0.f});
    return;
  }
  if (block_index() == 0) withhold_if_falling(p);
  const Position position = query_block_of(p, block_index());
  const Sequence sequence = sequence_of(p, position.batch);
  const int first = position.block * kBlockM;
  if (first >= sequence.q_length) return;
  const u32 record = record_of(p, first_query_block(p, sequence) + position.block, position.head);

  // All loads first: the kernel is as fast as memory only with many of them under way, and none behind another.
  const Rows<u16> out = out_of(p, sequence, position.head);
  const Rows<const u16> dout = dout_of(p, sequence, position.head);
  const int chunk = thread_index() % kLanes, row = thread_index() / kLanes;
  U32x4 out_frag[kPasses], dout_frag[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int i = first + row + pass * kRowsPerPass;
    out_frag[pass] = dout_frag[pass] = U32x4{0, 0, 0, 0};
    if (i < sequence.q_length && chunk * 8 < p.head_dim_v) {
      out_frag[pass] = ld_global((const U32x4*)(out.from(i).first + chunk * 8));
      dout_frag[pass] = ld_global((const U32x4*)(dout.from(i).first + chunk * 8));
    }
  }
  // Of a row's lanes one finishes each pass.
  const int local = row + chunk * kRowsPerPass;
  const bool finishes = chunk < kPasses, exists = finishes && first + local < sequence.q_length;
  const i64 statistics = statistics_offset(p, sequence, position.head) + first + local;
  const float logsumexp = exists ? ld_global(p.logsumexp + statistics) : negative_infinity();
  const float dlogsumexp = exists && p.dlogsumexp ? ld_global(p.dlogsumexp + statistics) : 0.f;

  float* dq = dq_sums(p, record);
#pragma unroll
  for (int i = 0; i < kDqFloats / (4 * kThreads); ++i) st_global((F32x4*)dq + (i * kThreads + thread_index()), F32x4{0.f, 0.f, 0.f, 0.f});

  float delta = -dlogsumexp;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float sum = dot(out_frag[pass], dout_frag[pass]);
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes >>= 1) sum += shfl_xor(sum, lanes);
    if (chunk == pass) delta += sum;
  }
  if (!finishes) return;
  if (exists && p.delta) st_global(p.delta + statistics, delta);
  st_global(logsumexp_rows(p, record) + local, logsumexp == negative_infinity() ? -negative_infinity() : logsumexp * kLog2e);
  st_global(negative_delta_rows(p, record) + local, exists ? -delta : 0.f);
}
