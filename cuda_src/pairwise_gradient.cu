// The gradient of logsumexp for the rows' points, and the sums of its weights, which are the gradient of a term of the rows:
//   weight(i, j) = exp(score(i, j)) * row_weight_i * column_weight_j;   gradient_i = sum over j of weight * scale * dcost / dx_i
// with -logsumexp as one of the terms. Rows and columns change places for the gradient of the other set.
// Grid: row_blocks * splits * batch * ceil(dim / kGradientDim): a CTA has kGradientDim features of kBlockM rows.
//
// A warp has 16 rows; lane = (a quarter of them, four features, every so manieth column).
#include "pairwise.cuh"

constexpr int kGradientPitch = kGradientDim + 4;
constexpr int kWeightBytes = kBlockN * kPitch * 4;
constexpr int kSharedMemory = kScoreBytes + kWeightBytes + kBlockN * kGradientPitch * 4;
constexpr int kFeatureGroups = kGradientDim / 4, kColumnGroups = 8 / kFeatureGroups;
static_assert(kBlockM == 16 * kNumWarps, "16 rows a warp");
static_assert(kBlockN * kGradientDim % kThreads == 0, "whole rounds of copies");

// dcost / d(first point), of one feature, less the factor of the whole pair.
DEVICE float slope(float x, float y) {
  if constexpr (kCost == kNegativeDot) return -y;
  else if constexpr (kCost == kL1) return x > y ? 1.f : x < y ? -1.f : x - y;
  else return x - y;
}
DEVICE float pair_factor(float cost) { return kCost == kSqeuclidean ? 2.f : kCost == kEuclidean ? ratio(1.f, cost) : 1.f; }

KERNEL(kThreads, kCtas) pairwise_gradient(GRID_CONSTANT PairParams p) {
  const u32 parts = (p.dim + kGradientDim - 1) / kGradientDim;
  const int first_feature = (int)(block_index() % parts) * kGradientDim;
  const Place place = place_of(p, block_index() / parts);
  const u32 smem = shared_base(), weights_smem = smem + kScoreBytes, y_smem = weights_smem + kWeightBytes;
  const Points x_points = x_of(p, place.batch), y_points = y_of(p, place.batch);
  const i64 rows = (i64)place.batch * p.rows, columns = (i64)place.batch * p.columns;

  const int row_group = lane_index() & 3, feature_group = lane_index() / 4 % kFeatureGroups, column_group = lane_index() / 4 / kFeatureGroups;
  const int own_row = warp_index() * 16 + row_group * 4, own_feature = feature_group * 4;
  float x[4][4], gradient[4][4], row_term[8], row_weight[8], sums[8];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      x[i][c] = load_feature(x_points, place.first_row + own_row + i, first_feature + own_feature + c);
      gradient[i][c] = 0.f;
    }
#pragma unroll
  for (int m = 0; m < 8; ++m) {
    const int row = place.first_row + score_row(m);
    row_term[m] = term_of(p.row_term, rows, row, p.rows);
    row_weight[m] = p.row_weight ? term_of(p.row_weight, rows, row, p.rows) : 1.f;
    sums[m] = 0.f;
  }

  for_each_tile(p, place, smem, [&](float (&acc)[8][8], int first_column) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int column = first_column + score_column(n);
      const float term = term_of(p.column_term, columns, column, p.columns);
      const float column_weight = p.column_weight ? term_of(p.column_weight, columns, column, p.columns) : 1.f;
      float weights[8];
#pragma unroll
      for (int m = 0; m < 8; ++m) {
        const float cost = cost_of(acc[m][n]);
        const float weight = column < p.columns ? exp2_approx((cost * p.scale + (row_term[m] + term)) * kLog2e) * row_weight[m] * column_weight : 0.f;
        sums[m] += weight;
        weights[m] = weight * pair_factor(cost);
      }
#pragma unroll
      for (int part = 0; part < 2; ++part)
        st_shared(weights_smem + (score_column(n) * kPitch + score_row(part * 4)) * 4,
                  F32x4{weights[part * 4], weights[part * 4 + 1], weights[part * 4 + 2], weights[part * 4 + 3]});
    }
#pragma unroll
    for (int i = 0; i < kBlockN * kGradientDim / kThreads; ++i) {
      const int element = thread_index() + i * kThreads, column = element / kGradientDim, feature = element % kGradientDim;
      st_shared(y_smem + (column * kGradientPitch + feature) * 4, load_feature(y_points, first_column + column, first_feature + feature));
    }
    sync_block();  // weights and features of this tile are complete; the next tile's are written behind another barrier
#pragma unroll 4
    for (int column = column_group; column < kBlockN; column += kColumnGroups) {
      const F32x4 w = ld_shared<F32x4>(weights_smem + (column * kPitch + own_row) * 4);
      const F32x4 v = ld_shared<F32x4>(y_smem + (column * kGradientPitch + own_feature) * 4);
      const float weight[4] = {w.x, w.y, w.z, w.w}, y[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) gradient[i][c] += weight[i] * slope(x[i][c], y[c]);
    }
  });

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = place.first_row + own_row + i;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int lanes = 4 * kFeatureGroups; lanes < 32; lanes <<= 1) gradient[i][c] += shfl_xor(gradient[i][c], lanes);
      const int feature = first_feature + own_feature + c;
      if (column_group == 0 && row < p.rows && feature < p.dim)
        st_global(p.gradient + (((i64)place.split * p.batch + place.batch) * p.rows + row) * p.dim + feature, gradient[i][c] * p.scale);
    }
  }
  if (first_feature > 0) return;  // of the sums, one CTA of a row block is enough
#pragma unroll
  for (int m = 0; m < 8; ++m)
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes <<= 1) sums[m] += shfl_xor(sums[m], lanes);
  sync_block();  // nobody reads the tiles any more
  if (warp_index() % kWarpsAcross == 1 && lane_index() % 8 == 0) {
#pragma unroll
    for (int m = 0; m < 8; ++m) st_shared(smem + score_row(m) * 4, sums[m]);
  }
  sync_block();  // the other half of the columns is there
  if (warp_index() % kWarpsAcross == 0 && lane_index() % 8 == 0) {
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      const int row = place.first_row + score_row(m);
      if (row < p.rows) st_global(p.values + result_offset(p, place, row), sums[m] + ld_shared<float>(smem + score_row(m) * 4));
    }
  }
}
