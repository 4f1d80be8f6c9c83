// The k smallest scores of each row and their columns, ascending; of equal ones the first. A NaN is larger than everything, as
// for torch.topk. Stores k values and indices a row and split; a split with fewer columns ends in NaN.
// Grid: row_blocks * splits * batch.
//
// A tile of scores goes through shared memory; two threads a row then scan half of it each and keep the smallest kK in registers.
#include "pairwise.cuh"
#include "ptx_bits.cuh"

constexpr int kScorePitch = kBlockN + 1;  // lanes read one column of 32 rows: 32 banks
constexpr int kSharedMemory = kScoreBytes + kBlockM * kScorePitch * 4;
constexpr int kHalf = kBlockN / 2;
constexpr u32 kNan = 0xfffffffeu, kAbsent = 0xffffffffu;
static_assert(kThreads == 2 * kBlockM, "two threads a row");
static_assert(kBlockM * kK * 8 <= kBlockM * kScorePitch * 4, "half of the lists fit where the scores were");

// Unsigned numbers in the order of the floats, with a NaN behind +inf; -0 is 0.
DEVICE u32 key_of(float score) {
  if (is_nan(score)) return kNan;
  const u32 bits = bits_of(score + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float score_of(u32 key) {
  return float_of(key >= kNan ? 0x7fffffffu : key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct Smallest {
  u32 keys[kK];
  int columns[kK];

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kK; ++i) keys[i] = kAbsent, columns[i] = 0x7fffffff;
  }
  DEVICE bool takes(u32 key, int column) const {
    return key < keys[kK - 1] || (key == keys[kK - 1] && column < columns[kK - 1]);
  }
  // Moves up what comes behind (key, column) and drops the last.
  DEVICE void insert(u32 key, int column) {
#pragma unroll
    for (int i = kK - 1; i > 0; --i) {
      const bool before = key < keys[i - 1] || (key == keys[i - 1] && column < columns[i - 1]);
      const bool here = !before && (key < keys[i] || (key == keys[i] && column < columns[i]));
      keys[i] = before ? keys[i - 1] : here ? key : keys[i];
      columns[i] = before ? columns[i - 1] : here ? column : columns[i];
    }
    if (key < keys[0] || (key == keys[0] && column < columns[0])) keys[0] = key, columns[0] = column;
  }
};

KERNEL(kThreads, kCtas) pairwise_topk(GRID_CONSTANT PairParams p) {
  const Place place = place_of(p, block_index());
  const u32 smem = shared_base(), scores = smem + kScoreBytes;
  const int row = thread_index() % kBlockM, half = thread_index() / kBlockM;
  Smallest smallest;
  smallest.clear();

  const i64 columns = (i64)place.batch * p.columns;
  for_each_tile(p, place, smem, [&](float (&acc)[8][8], int first_column) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float term = term_of(p.column_term, columns, first_column + score_column(n), p.columns);
#pragma unroll
      for (int m = 0; m < 8; ++m)
        st_shared(scores + (score_row(m) * kScorePitch + score_column(n)) * 4, cost_of(acc[m][n]) * p.scale + term);
    }
    sync_block();  // the scores are complete; the next tile's are written behind another barrier
    const int count = min(p.columns - first_column - half * kHalf, kHalf);
    for (int i = 0; i < count; ++i) {
      const u32 key = key_of(ld_shared<float>(scores + (row * kScorePitch + half * kHalf + i) * 4));
      const int column = first_column + half * kHalf + i;
      if (smallest.takes(key, column)) smallest.insert(key, column);
    }
  });

  sync_block();  // nobody reads scores any more
  if (half == 1) {
#pragma unroll
    for (int i = 0; i < kK; ++i) st_shared(scores + (i * kBlockM + row) * 8, U32x2{smallest.keys[i], (u32)smallest.columns[i]});
  }
  sync_block();  // the other half's are there
  if (half == 1 || place.first_row + row >= p.rows) return;
  for (int i = 0; i < kK; ++i) {
    const U32x2 other = ld_shared<U32x2>(scores + (i * kBlockM + row) * 8);
    if (smallest.takes(other.x, (int)other.y)) smallest.insert(other.x, (int)other.y);
  }
  const i64 offset = result_offset(p, place, place.first_row + row);
#pragma unroll
  for (int i = 0; i < kK; ++i) {
    if (i < p.k) {
      st_global(p.values + offset + i, score_of(smallest.keys[i]));
      st_global(p.indices + offset + i, smallest.columns[i]);
    }
  }
}
