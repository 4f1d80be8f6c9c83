// log(sum over the columns of exp(score)) of each row, natural; -inf where there is no column.
// Stores one value a row and split.
// Grid: row_blocks * splits * batch.
#include "pairwise.cuh"

constexpr int kSharedMemory = kScoreBytes;

// A running sum of exp(score) * 2^shift(): the largest score so far, and the sum. The shift is rounded once and then exact, so
// that a score costs one FFMA and one exponential.
struct alignas(8) Sum {
  float largest, sum;
  DEVICE float reference() const { return fabsf(largest) == infinity() ? 0.f : largest; }
  DEVICE float shift() const { return -reference() * kLog2e; }
  // What is there, with the shift of another.
  DEVICE float shifted(float shift_of_other) const { return sum == 0.f ? 0.f : sum * exp2_approx(shift_of_other - shift()); }
  DEVICE float logarithm() const { return reference() + (log2_approx(sum) - (reference() * kLog2e + shift())) * kLn2; }
};
DEVICE Sum joined(const Sum& a, const Sum& b) {
  Sum both = {fmaxf(a.largest, b.largest), 0.f};
  both.sum = a.shifted(both.shift()) + b.shifted(both.shift());
  return both;
}

KERNEL(kThreads, kCtas) pairwise_logsumexp(GRID_CONSTANT PairParams p) {
  const Place place = place_of(p, block_index());
  const u32 smem = shared_base();
  Sum sums[8];
#pragma unroll
  for (int m = 0; m < 8; ++m) sums[m] = {negative_infinity(), 0.f};

  const i64 columns = (i64)place.batch * p.columns;
  for_each_tile(p, place, smem, [&](float (&acc)[8][8], int first_column) {
    float term[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) term[n] = term_of(p.column_term, columns, first_column + score_column(n), p.columns);
    const int left = p.columns - first_column - score_column(0);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      Sum sum = {sums[m].largest, 0.f};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        acc[m][n] = (n >> 2) * 32 + (n & 3) < left ? cost_of(acc[m][n]) * p.scale + term[n] : negative_infinity();
        sum.largest = fmaxf(sum.largest, acc[m][n]);
      }
      const float shift = sum.shift();
      sum.sum = sums[m].shifted(shift);
#pragma unroll
      for (int n = 0; n < 8; ++n) sum.sum += exp2_approx(acc[m][n] * kLog2e + shift);
      sums[m] = sum;
    }
  });

#pragma unroll
  for (int m = 0; m < 8; ++m)
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes <<= 1)
      sums[m] = joined(sums[m], {shfl_xor(sums[m].largest, lanes), shfl_xor(sums[m].sum, lanes)});
  sync_block();  // nobody reads the tiles any more
  if (warp_index() % kWarpsAcross == 1 && lane_index() % 8 == 0) {
#pragma unroll
    for (int m = 0; m < 8; ++m) st_shared(smem + score_row(m) * 8, sums[m]);
  }
  sync_block();  // the other half of the columns is there
  if (warp_index() % kWarpsAcross == 0 && lane_index() % 8 == 0) {
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      const Sum sum = joined(sums[m], ld_shared<Sum>(smem + score_row(m) * 8));
      const int row = place.first_row + score_row(m);
      if (row < p.rows) st_global(p.values + result_offset(p, place, row), sum.logarithm());
    }
  }
}
