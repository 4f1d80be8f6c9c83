// The smallest score of each row and its column; of equal ones the first. A NaN is smaller than everything, as for torch.min.
// Assumes columns > 0. Stores one value and index a row and split.
// Grid: row_blocks * splits * batch.
#include "pairwise.cuh"

constexpr int kSharedMemory = kScoreBytes;

struct Best {
  float value;
  int column;
};
DEVICE bool comes_first(float a, float b) { return a < b || (is_nan(a) && !is_nan(b)); }
DEVICE void take_better(Best& best, Best other) {
  const bool equal = !comes_first(other.value, best.value) && !comes_first(best.value, other.value);
  if (comes_first(other.value, best.value) || (equal && other.column < best.column)) best = other;
}

KERNEL(kThreads, kCtas) pairwise_min(GRID_CONSTANT PairParams p) {
  const Place place = place_of(p, block_index());
  const u32 smem = shared_base();
  Best best[8];
#pragma unroll
  for (int m = 0; m < 8; ++m) best[m] = {infinity(), place.first_block * kBlockN};

  const i64 columns = (i64)place.batch * p.columns;
  for_each_tile(p, place, smem, [&](float (&acc)[8][8], int first_column) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int column = first_column + score_column(n);
      const float term = term_of(p.column_term, columns, column, p.columns);
#pragma unroll
      for (int m = 0; m < 8; ++m) {
        const float score = column < p.columns ? cost_of(acc[m][n]) * p.scale + term : infinity();
        // columns come in order, so that of equal scores the first stays
        if (!(score >= best[m].value) && !is_nan(best[m].value)) best[m] = {score, column};
      }
    }
  });

#pragma unroll
  for (int m = 0; m < 8; ++m)
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes <<= 1)
      take_better(best[m], {shfl_xor(best[m].value, lanes), shfl_xor(best[m].column, lanes)});
  sync_block();  // nobody reads the tiles any more
  if (warp_index() % kWarpsAcross == 1 && lane_index() % 8 == 0) {
#pragma unroll
    for (int m = 0; m < 8; ++m) st_shared(smem + score_row(m) * 8, best[m]);
  }
  sync_block();  // the other half of the columns is there
  if (warp_index() % kWarpsAcross == 0 && lane_index() % 8 == 0) {
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      take_better(best[m], ld_shared<Best>(smem + score_row(m) * 8));
      const int row = place.first_row + score_row(m);
      if (row < p.rows) {
        st_global(p.values + result_offset(p, place, row), best[m].value);
        st_global(p.indices + result_offset(p, place, row), best[m].column);
      }
    }
  }
}
