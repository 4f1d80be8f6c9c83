// Before a forward in fp32: q, k and v in pairs of fp16 for attention_forward_sm80, see half_pairs.cuh.
// Assumes what the forward assumes of q, k and v. Stores a record for every block of rows that a sequence has; rows beyond its
// length and columns beyond the head dim are zero.
// Grid: batch * (m_blocks * num_heads_q + 2 * n_blocks * num_heads_kv), a tile a CTA: first q, then k, then v.
#include "half_pairs.cuh"

constexpr int kSharedMemory = kNumWarps * 8;

constexpr int power_above(int n, int power = 1) { return power < n ? power_above(n, power * 2) : power; }

template <class T> DEVICE void split_tile(Rows<const Element> source, int rows, int head_dim, u8* record) {
  typedef typename T::Half Half;
  constexpr int kLanes = power_above(Half::kChunks), kStep = kThreads / kLanes;  // threads along a row, rows a round
  constexpr int kRounds = (Half::kRows + kStep - 1) / kStep;
  static_assert(kLanes <= 32, "a row within a warp");
  const int chunk = thread_index() % kLanes, first = thread_index() / kLanes;

  float x[kRounds][8];
  u32 largest = 0, smallest = ~0u;  // magnitudes of rows that are not zero: as numbers, NaN above all
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = first + round * kStep;
    const bool valid = row < rows && row < Half::kRows && chunk * 8 < head_dim;
    u32 magnitude = 0;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      F32x4 four = {0.f, 0.f, 0.f, 0.f};
      if (valid) four = ld_global((const F32x4*)(source.from(row).first + chunk * 8 + part * 4));
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[round][part * 4 + e] = values[e];
        const u32 bits = bits_of(values[e]) & 0x7fffffffu;
        magnitude = bits > magnitude ? bits : magnitude;
      }
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes >>= 1) {
      const u32 other = shfl_xor(magnitude, lanes);
      magnitude = other > magnitude ? other : magnitude;
    }
    largest = magnitude > largest ? magnitude : largest;
    smallest = magnitude != 0 && magnitude < smallest ? magnitude : smallest;
  }
#pragma unroll
  for (int lanes = 16; lanes >= kLanes; lanes >>= 1) {
    const u32 other_largest = shfl_xor(largest, lanes), other_smallest = shfl_xor(smallest, lanes);
    largest = other_largest > largest ? other_largest : largest;
    smallest = other_smallest < smallest ? other_smallest : smallest;
  }
  const u32 smem = shared_base();
  if (lane_index() == 0) st_shared(smem + warp_index() * 8, U32x2{largest, smallest});
  sync_block();  // every warp's part is in shared memory
#pragma unroll
  for (int warp = 0; warp < kNumWarps; ++warp) {
    const U32x2 part = ld_shared<U32x2>(smem + warp * 8);
    largest = part.x > largest ? part.x : largest;
    smallest = part.y < smallest ? part.y : smallest;
  }

  // The exponents of fp32 as it stores them, from 127 on. A tile of zeros has 0 for either.
  const int top = largest == 0 ? 127 : (int)(largest >> 23), bottom = largest == 0 ? 127 : (int)(smallest >> 23);
  const bool in_range = top <= 127 + kLargestExponent && top >= 127 - kLargestExponent && bottom >= top - kSpread;
  const i32 exponent = top - 127 - (kTop - 1);
  if (thread_index() == 0) st_global((i32*)(record + T::kBytes), in_range ? exponent : kOutOfRange);
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

KERNEL(kThreads, 1) attention_forward_split(GRID_CONSTANT Params p) {
  const u32 q_tiles = p.batch * p.m_blocks * p.num_heads_q, k_tiles = p.batch * p.n_blocks * p.num_heads_kv;
  if (block_index() < q_tiles) {
    typedef PairTile<kBlockM, kHeadDim> T;
    const Position position = position_of(block_index(), p.m_blocks, p.num_heads_q);
    const Sequence s = sequence_of(p, position.batch);
    const int first = position.block * kBlockM;
    if (first >= s.q_length) return;
    split_tile<T>(q_of(p, s, position.head).from(first), s.q_length - first, p.head_dim,
                  record_of<T>(p.q_pairs, query_block_offset(p, s, position.head, position.block)));
    return;
  }
  const u32 index = block_index() - q_tiles;
  const bool is_v = index >= k_tiles;
  const Position position = position_of(is_v ? index - k_tiles : index, p.n_blocks, p.num_heads_kv);
  const Sequence s = sequence_of(p, position.batch);
  const int first = position.block * kBlockN;
  if (first >= s.k_length) return;
  const i64 block = key_block_offset(p, s, position.head, position.block);
  if (is_v) {
    typedef PairTile<kBlockN, kHeadDimV> T;
    split_tile<T>(v_of(p, s, position.head).from(first), s.k_length - first, p.head_dim_v, record_of<T>(p.v_pairs, block));
  } else {
    typedef PairTile<kBlockN, kHeadDim> T;
    split_tile<T>(k_of(p, s, position.head).from(first), s.k_length - first, p.head_dim, record_of<T>(p.k_pairs, block));
  }
}
