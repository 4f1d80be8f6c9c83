// What the backward needs of a query block's rows beside Q and dO: logsumexp, delta and, where there are any, key_ranges. They are
// fetched for the next block while one is worked on, a row a thread, and put into shared memory when all have read the one before.
#pragma once
#include "backward_tiles.cuh"
#include "dropout.cuh"

struct QueryRow {
  float logsumexp = 0.f, delta = 0.f;  // base 2; +inf where a row sees nothing or is none: exp2(S - inf) = 0
  Span keys = {0, 0};

  DEVICE void fetch(const Params& p, const Sequence& s, int head, int m_block) {
    const int i = m_block * kBlockM + thread_index();
    logsumexp = -negative_infinity(), delta = 0.f, keys = {0, 0};
    if (thread_index() < kBlockM && i < s.q_length) {
      const i64 at = statistics_offset(p, s, head) + i;
      const float natural = ld_global(p.logsumexp + at);
      if (natural != negative_infinity()) logsumexp = natural * kLog2e;
      delta = ld_global(p.delta + at);
      if constexpr (kHasDropout) logsumexp -= log2_approx(keep_factor(p)), delta *= 1.f - p.dropout_p;
      if constexpr (kHasKeyRanges) keys = keys_of(p, s, i);
    }
  }
  DEVICE void put(u32 smem) const {
    if (thread_index() < kBlockM) {
      st_shared(smem + kLogsumexpOffset + thread_index() * 4, logsumexp);
      st_shared(smem + kDeltaOffset + thread_index() * 4, delta);
      if constexpr (kHasKeyRanges) st_shared(smem + kRangesOffset + thread_index() * 8, U32x2{(u32)keys.begin, (u32)keys.end});
    }
  }
};

// Of rows `row` and `row` + 1 of the block.
DEVICE F32x2 logsumexp_of_rows(u32 smem, int row) { return ld_shared<F32x2>(smem + kLogsumexpOffset + row * 4); }
DEVICE F32x2 delta_of_rows(u32 smem, int row) { return ld_shared<F32x2>(smem + kDeltaOffset + row * 4); }
// Keys that a row sees by key_ranges, window and lengths.
DEVICE U32x4 ranges_of_rows(u32 smem, int row) { return ld_shared<U32x4>(smem + kRangesOffset + row * 8); }
DEVICE U32x2 range_of_row(u32 smem, int row) { return ld_shared<U32x2>(smem + kRangesOffset + row * 8); }
