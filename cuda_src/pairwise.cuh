// Tiles of scores between two sets of points, in registers only: score(i, j) = scale * cost(x_i, y_j) + terms.
//
// A CTA holds kBlockM rows and walks over the columns, kBlockN at a time, and within those over the features, kDim at a
// time. Both tiles lie in shared memory as [feature][point] in fp32, so that a thread reads four neighbouring points with
// one load. A warp has 32 x 64 scores: lane 8 * g + t has rows 4g.. and 16 + 4g.., columns 4t.. and 32 + 4t...
#pragma once
#include "params_pairwise.cuh"

// In the order of pair_planning.COSTS.
constexpr int kSqeuclidean = 0, kEuclidean = 1, kL1 = 2, kNegativeDot = 3, kGiou = 4;

constexpr int kThreads = kNumWarps * 32;
constexpr int kWarpsAcross = kBlockN / 64;
constexpr int kPitch = kBlockM + 4;              // floats from feature to feature; four more than a row spread the banks
constexpr int kTileBytes = kDim * kPitch * 4;
constexpr int kStageBytes = 2 * kTileBytes;      // x and y
constexpr int kScoreBytes = 2 * kStageBytes;
constexpr int kHeld = kBlockM * kDim / kThreads; // elements of a tile a thread carries from global to shared memory
constexpr int kUnrolled = kDim > 4 ? 2 : kDim;   // all of eight features' loads at once would spill
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
static_assert(kBlockM == kBlockN && kBlockM / 32 * kWarpsAcross == kNumWarps, "a warp has 32 x 64 scores");
static_assert(kBlockM * kDim % kThreads == 0 && (kCost != kGiou || kDim == 4), "whole rounds of copies; a box has four features");

DEVICE float infinity() { return -negative_infinity(); }
DEVICE bool is_nan(float value) { return value != value; }

// ---- which rows and columns ----

struct Place {
  int batch, first_row, split;
  int first_block, end_block;  // of columns
};
// Parts of the features, if any, next to each other, then blocks of rows: they share what they read.
DEVICE Place place_of(const PairParams& p, u32 index) {
  const u32 row = index / (u32)p.row_blocks;
  Place place;
  place.first_row = (int)(index % (u32)p.row_blocks) * kBlockM;
  place.split = (int)(row % (u32)p.splits);
  place.batch = (int)(row / (u32)p.splits);
  place.first_block = place.split * p.split_blocks;
  place.end_block = min(place.first_block + p.split_blocks, (p.columns + kBlockN - 1) / kBlockN);
  return place;
}
// Of a row's first result.
DEVICE i64 result_offset(const PairParams& p, const Place& place, int row) {
  return (((i64)place.split * p.batch + place.batch) * p.rows + row) * p.k;
}

// Row and column of this thread's score (m, n) within the CTA's tile.
DEVICE int score_row(int m) { return warp_index() / kWarpsAcross * 32 + (m >> 2) * 16 + (lane_index() >> 3) * 4 + (m & 3); }
DEVICE int score_column(int n) { return warp_index() % kWarpsAcross * 64 + (n >> 2) * 32 + (lane_index() & 7) * 4 + (n & 3); }

// ---- points: global memory -> registers -> shared memory ----

struct Points {
  const void* tensor;
  i64 offset, stride;  // elements: the first point, from point to point
  int count, dim;
};
DEVICE Points x_of(const PairParams& p, int batch) { return {p.x, batch * p.x_stride_batch, p.x_stride_row, p.rows, p.dim}; }
DEVICE Points y_of(const PairParams& p, int batch) { return {p.y, batch * p.y_stride_batch, p.y_stride_row, p.columns, p.dim}; }

// Zero beyond the last point and the last feature: there it adds nothing to any cost.
DEVICE float load_feature(const Points& points, int point, int feature) {
  if (point >= points.count || feature >= points.dim) return 0.f;
  const i64 index = points.offset + point * points.stride + feature;
  if constexpr (kElementBytes == 4) return ld_global((const float*)points.tensor + index);
  else return unpack<kIsBf16>((u32)ld_global((const u16*)points.tensor + index)).x;
}
DEVICE void fetch(float (&held)[kHeld], const Points& points, int first_point, int first_feature) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int element = thread_index() + i * kThreads;
    held[i] = load_feature(points, first_point + element / kDim, first_feature + element % kDim);
  }
}
DEVICE u32 point_address(u32 tile, int feature, int point) { return tile + (feature * kPitch + point) * 4; }
DEVICE void put(u32 tile, const float (&held)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int element = thread_index() + i * kThreads;
    st_shared(point_address(tile, element % kDim, element / kDim), held[i]);
  }
}

// ---- costs ----

DEVICE void load_four(float (&four)[4], u32 tile, int feature, int point) {
  const F32x4 v = ld_shared<F32x4>(point_address(tile, feature, point));
  four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
}
// Not fmaxf: a NaN stays one.
DEVICE float not_negative(float x) { return x < 0.f ? 0.f : x; }
DEVICE float ratio(float a, float b) { return b == 0.f ? 0.f : a / b; }

// Minus the generalised intersection over union of two boxes (x0, y0, x1, y1): Rezatofighi et al., arXiv 1902.09630.
DEVICE float negative_giou(const float (&a)[4], const float (&b)[4]) {
  const float area_a = not_negative(a[2] - a[0]) * not_negative(a[3] - a[1]);
  const float area_b = not_negative(b[2] - b[0]) * not_negative(b[3] - b[1]);
  const float common = not_negative(fminf(a[2], b[2]) - fmaxf(a[0], b[0])) * not_negative(fminf(a[3], b[3]) - fmaxf(a[1], b[1]));
  const float hull = not_negative(fmaxf(a[2], b[2]) - fminf(a[0], b[0])) * not_negative(fmaxf(a[3], b[3]) - fminf(a[1], b[1]));
  const float joined = area_a + area_b - common;
  return ratio(hull - joined, hull) - ratio(common, joined);
}

// acc[m][n] += what kDim features add to the cost of the pair.
DEVICE void add_features(float (&acc)[8][8], u32 x_tile, u32 y_tile) {
  const int row = score_row(0), column = score_column(0);
  if constexpr (kCost == kGiou) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      float x[4][4], y[4][4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        load_four(x[c], x_tile, c, row + (part >> 1) * 16);
        load_four(y[c], y_tile, c, column + (part & 1) * 32);
      }
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float a[4] = {x[0][m], x[1][m], x[2][m], x[3][m]}, b[4] = {y[0][n], y[1][n], y[2][n], y[3][n]};
          acc[(part >> 1) * 4 + m][(part & 1) * 4 + n] = negative_giou(a, b);
        }
    }
  } else {
#pragma unroll kUnrolled
    for (int c = 0; c < kDim; ++c) {
      float x[2][4], y[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_four(x[half], x_tile, c, row + half * 16);
        load_four(y[half], y_tile, c, column + half * 32);
      }
#pragma unroll
      for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float u = x[m >> 2][m & 3], w = y[n >> 2][n & 3], difference = u - w;
          if constexpr (kCost == kNegativeDot) acc[m][n] -= u * w;
          else if constexpr (kCost == kL1) acc[m][n] += fabsf(difference);
          else acc[m][n] += difference * difference;
        }
    }
  }
}
DEVICE float cost_of(float sum) { return kCost == kEuclidean ? sqrtf(sum) : sum; }

// ---- all scores of a CTA's rows ----

// consume(acc, column) gets each tile: sums over the features (cost_of makes them costs), and its first column.
template <class Consume> DEVICE void for_each_tile(const PairParams& p, const Place& place, u32 smem, const Consume& consume) {
  const Points x = x_of(p, place.batch), y = y_of(p, place.batch);
  const int chunks = kResident ? 1 : (p.dim + kDim - 1) / kDim;
  const int steps = max(place.end_block - place.first_block, 0) * chunks;
  float x_held[kHeld], y_held[kHeld], acc[8][8];
  int block = place.first_block, chunk = 0;
  if (steps > 0) {
    fetch(x_held, x, place.first_row, 0);
    fetch(y_held, y, block * kBlockN, 0);
    put(smem, x_held);
    put(smem + kTileBytes, y_held);
  }
  for (int step = 0; step < steps; ++step) {
    sync_block();  // this step's tiles are complete, and nobody reads those of the step before
    const bool last_chunk = chunk + 1 == chunks;
    const int next_block = last_chunk ? block + 1 : block, next_chunk = last_chunk ? 0 : chunk + 1;
    const u32 stage = smem + (step & 1) * kStageBytes, next = smem + (step & 1 ^ 1) * kStageBytes;
    if (step + 1 < steps) {
      if constexpr (!kResident) fetch(x_held, x, place.first_row, next_chunk * kDim);
      fetch(y_held, y, next_block * kBlockN, next_chunk * kDim);
    }
    if (chunk == 0) {
#pragma unroll
      for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n) acc[m][n] = 0.f;
    }
    add_features(acc, kResident ? smem : stage, stage + kTileBytes);
    if (step + 1 < steps) {
      if constexpr (!kResident) put(next, x_held);
      put(next + kTileBytes, y_held);
    }
    if (last_chunk) consume(acc, block * kBlockN);
    block = next_block, chunk = next_chunk;
  }
}

DEVICE float term_of(const float* terms, i64 offset, int index, int count) {
  return terms && index < count ? ld_global(terms + offset + index) : 0.f;
}
