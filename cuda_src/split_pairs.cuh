// fp32 rows -> records of pairs, see half_pairs.cuh: what the small kernels before a forward and a backward do, a tile a CTA.
#pragma once
#include "half_pairs.cuh"

constexpr int kSharedMemory = kNumWarps * 16;

constexpr int power_above(int n, int power = 1) { return power < n ? power_above(n, power * 2) : power; }

// Magnitudes as bits: in the order of the numbers, NaN above all. What a thread has seen of a tile, then what all have.
struct Magnitudes {
  u32 largest = 0, smallest_row = ~0u, norm = 0, delta = 0;  // smallest_row: of the largest numbers of rows that are not zero

  DEVICE void join(const Magnitudes& other) {
    largest = max(largest, other.largest), smallest_row = min(smallest_row, other.smallest_row);
    norm = max(norm, other.norm), delta = max(delta, other.delta);
  }
  DEVICE Magnitudes of_lane(int lanes) const {
    return {shfl_xor(largest, lanes), shfl_xor(smallest_row, lanes), shfl_xor(norm, lanes), shfl_xor(delta, lanes)};
  }
};
DEVICE u32 magnitude_of(float x) { return bits_of(x) & 0x7fffffffu; }

// Rows from `rows` on and columns from `head_dim` on are zero. delta, unless null, has a number a row.
template <class T> DEVICE void split_tile(Rows<const Element> source, int rows, int head_dim, const float* delta, u8* record) {
  typedef typename T::Half Half;
  constexpr int kLanes = power_above(Half::kChunks), kStep = kThreads / kLanes;  // threads along a row, rows a round
  constexpr int kRounds = (Half::kRows + kStep - 1) / kStep;
  static_assert(kLanes <= 32, "a row within a warp");
  const int chunk = thread_index() % kLanes, first = thread_index() / kLanes;

  float x[kRounds][8];
  Magnitudes found;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = first + round * kStep;
    const bool valid = row < rows && row < Half::kRows && chunk * 8 < head_dim;
    u32 largest = 0;
    float squares = 0.f;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      F32x4 four = {0.f, 0.f, 0.f, 0.f};
      if (valid) four = ld_global((const F32x4*)(source.from(row).first + chunk * 8 + part * 4));
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[round][part * 4 + e] = values[e];
        largest = max(largest, magnitude_of(values[e]));
        squares += values[e] * values[e];
      }
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes >>= 1) {
      largest = max(largest, shfl_xor(largest, lanes));
      squares += shfl_xor(squares, lanes);
    }
    found.join({largest, largest == 0 ? ~0u : largest, magnitude_of(sqrtf(squares)), 0});
  }
  if (delta) {
    for (int row = thread_index(); row < smaller(rows, Half::kRows); row += kThreads)
      found.delta = max(found.delta, magnitude_of(ld_global(delta + row)));
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) found.join(found.of_lane(lanes));
  const u32 smem = shared_base();
  if (lane_index() == 0) st_shared(smem + warp_index() * 16, U32x4{found.largest, found.smallest_row, found.norm, found.delta});
  sync_block();  // every warp's part is in shared memory
#pragma unroll
  for (int warp = 0; warp < kNumWarps; ++warp) {
    const U32x4 part = ld_shared<U32x4>(smem + warp * 16);
    found.join({part.x, part.y, part.z, part.w});
  }

  // The exponents of fp32 as it stores them, from 127 on; 0 in a tile of zeros
  const bool zero = found.largest == 0;
  const int top = zero ? 127 : (int)(found.largest >> 23), bottom = zero ? 127 : (int)(found.smallest_row >> 23);
  const bool in_range = top <= 127 + kLargestExponent && top >= 127 - kLargestExponent && bottom >= top - kSpread &&
                        (int)(found.delta >> 23) <= 127 + 2 * kLargestExponent;
  const int exponent = top - 127 - (kTop - 1);
  if (thread_index() == 0)
    st_global((U32x4*)(record + T::kBytes), U32x4{(u32)(in_range ? exponent : kOutOfRange), found.norm, found.delta, 0});
  if (!in_range) return;
  const float factor = power_of_two(-exponent);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = first + round * kStep;
    if (row >= Half::kRows || chunk >= Half::kChunks) continue;
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const PairOfHalves pair = split_pair(x[round][2 * i] * factor, x[round][2 * i + 1] * factor);
      high[i] = pair.high, low[i] = pair.low;
    }
    const u32 offset = Half::offset(row, chunk);
    st_global((U32x4*)(record + offset), U32x4{high[0], high[1], high[2], high[3]});
    st_global((U32x4*)(record + Half::kBytes + offset), U32x4{low[0], low[1], low[2], low[3]});
  }
}

// Tile `index` of all of a tensor: block, head, sequence.
template <class T> DEVICE void split_queries(const Params& p, u32 index, bool of_dout) {
  const Position position = position_of(index, p.m_blocks, p.num_heads_q);
  const Sequence s = sequence_of(p, position.batch);
  const int first = position.block * kBlockM;
  if (first >= s.q_length) return;
  u8* record = record_of<T>(of_dout ? p.dout_pairs : p.q_pairs, query_block_offset(p, s, position.head, position.block));
  const Rows<const Element> rows = of_dout ? dout_of(p, s, position.head) : q_of(p, s, position.head);
  const float* delta = of_dout ? p.delta + statistics_offset(p, s, position.head) + first : nullptr;
  split_tile<T>(rows.from(first), s.q_length - first, of_dout ? p.head_dim_v : p.head_dim, delta, record);
}
template <class T> DEVICE void split_keys(const Params& p, u32 index, bool of_v) {
  const Position position = position_of(index, p.n_blocks, p.num_heads_kv);
  const Sequence s = sequence_of(p, position.batch);
  const int first = position.block * kBlockN;
  if (first >= s.k_length) return;
  u8* record = record_of<T>(of_v ? p.v_pairs : p.k_pairs, key_block_offset(p, s, position.head, position.block));
  const Rows<const Element> rows = of_v ? v_of(p, s, position.head) : k_of(p, s, position.head);
  split_tile<T>(rows.from(first), s.k_length - first, of_v ? p.head_dim_v : p.head_dim, nullptr, record);
}

// Every tile of q, k, v and, in a backward, dout, one after the other.
template <bool kWithDout> DEVICE void split_all(const Params& p) {
  const u32 queries = p.batch * p.m_blocks * p.num_heads_q, keys = p.batch * p.n_blocks * p.num_heads_kv;
  u32 index = block_index();
  if (index < queries) return split_queries<PairTile<kBlockM, kHeadDim>>(p, index, false);
  index -= queries;
  if (index < keys) return split_keys<PairTile<kBlockN, kHeadDim>>(p, index, false);
  index -= keys;
  if (index < keys) return split_keys<PairTile<kBlockN, kHeadDimV>>(p, index, true);
  if constexpr (kWithDout) split_queries<PairTile<kBlockM, kHeadDimV>>(p, index - keys, true);
}
