// Who sees whom: the keys a row sees (window, lengths, key_ranges, boolean mask), the key blocks a query block visits and
// which of them need a mask at all, and the same from the side of a key block.
//
// What a masked key can do to a result, exactly (the Hopper kernels say what differs there):
// - Its score is set to -inf by select, never by adding, so NaN in K or in the bias is gone; p and dS are selected to 0 likewise.
// - Keys from k_length on, and in the forward keys outside the hull of what a block's rows see, are never read.
// - Other masked keys lie in the same tile as visible ones, and 0 * NaN is NaN: in tiles that need a mask the forward takes
//   chunks of V with NaN or Inf out of P V, the backward those of K out of dS K (take_out_non_finite). A row that does see
//   such a key becomes NaN, also where V held Inf. So no masked key shows in any row, whatever it holds.
// Without window, key_ranges and mask there is nothing to take out, and NaN and Inf go through the products as they are.
#pragma once
#include "seqlen.cuh"
#include "tile.cuh"

constexpr bool kHasBounds = kHasWindow || kHasKeyRanges;
constexpr int kNever = 0x7fffffff;

DEVICE float not_a_number() { return negative_infinity() - negative_infinity(); }

struct Span {
  int begin, end;
  DEVICE bool holds(int i) const { return i >= begin && i < end; }
};

// Keys row i sees by window and lengths.
DEVICE Span window_of(const Sequence& s, int i) {
  Span keys = {0, s.k_length};
  if constexpr (kHasWindow) {
    if (s.window_left >= 0) keys.begin = larger(keys.begin, i + s.diagonal - s.window_left);
    if (s.window_right >= 0) keys.end = smaller(keys.end, i + s.diagonal + s.window_right + 1);
  }
  return keys;
}

// Keys row i sees, the boolean mask aside.
DEVICE Span keys_of(const Params& p, const Sequence& s, int i) {
  Span keys = window_of(s, i);
  if constexpr (kHasKeyRanges) {
    const i32* range = p.key_ranges + (s.batch * p.key_ranges_stride_batch + i * p.key_ranges_stride_row);
    keys.begin = larger(keys.begin, ld_global(range));
    keys.end = smaller(keys.end, ld_global(range + 1));
  }
  return keys;
}

// What a query block sees: `any` spans what some row sees, `all` what every row sees.
struct BlockKeys {
  Span any, all;
  DEVICE bool sees(Span keys) const { return keys.begin < any.end && keys.end > any.begin; }
  DEVICE bool need_mask(Span keys) const { return keys.begin < all.begin || keys.end > all.end; }
};

// The same for rows [first, first + count), key_ranges aside: both ends grow with the row, the outer rows decide.
DEVICE BlockKeys keys_of_rows(const Sequence& s, int first, int count) {
  const Span top = window_of(s, smaller(first, s.q_length - 1)), bottom = window_of(s, smaller(first + count, s.q_length) - 1);
  return {{top.begin, bottom.end}, {bottom.begin, top.end}};
}

constexpr int kBlockKeysBytes = kNumWarps * 16;

// `scratch` holds kBlockKeysBytes; nobody else may use it before the next barrier after the call.
DEVICE BlockKeys keys_of_block(const Params& p, const Sequence& s, int m_block, u32 scratch) {
  const int first = m_block * kBlockM, end = smaller(first + kBlockM, s.q_length);
  if constexpr (!kHasKeyRanges) {
    return keys_of_rows(s, first, kBlockM);
  } else {
    BlockKeys keys = {{kNever, 0}, {0, kNever}};
    for (int i = first + thread_index(); i < end; i += kThreads) {
      const Span row = keys_of(p, s, i);
      keys.all.begin = larger(keys.all.begin, row.begin);
      keys.all.end = smaller(keys.all.end, row.end);
      if (row.begin < row.end) {
        keys.any.begin = smaller(keys.any.begin, row.begin);
        keys.any.end = larger(keys.any.end, row.end);
      }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) {
      keys.any.begin = smaller(keys.any.begin, shfl_xor(keys.any.begin, lanes));
      keys.any.end = larger(keys.any.end, shfl_xor(keys.any.end, lanes));
      keys.all.begin = larger(keys.all.begin, shfl_xor(keys.all.begin, lanes));
      keys.all.end = smaller(keys.all.end, shfl_xor(keys.all.end, lanes));
    }
    if (lane_index() == 0)
      st_shared(scratch + warp_index() * 16, U32x4{(u32)keys.any.begin, (u32)keys.any.end, (u32)keys.all.begin, (u32)keys.all.end});
    sync_block();  // every warp's part is in scratch
#pragma unroll
    for (int warp = 0; warp < kNumWarps; ++warp) {
      const U32x4 part = ld_shared<U32x4>(scratch + warp * 16);
      keys.any.begin = smaller(keys.any.begin, (int)part.x);
      keys.any.end = larger(keys.any.end, (int)part.y);
      keys.all.begin = larger(keys.all.begin, (int)part.z);
      keys.all.end = smaller(keys.all.end, (int)part.w);
    }
    return keys;
  }
}

// Query blocks in which some row may see a key of block n by its window. First key block that query block m visits, by the
// same rule: over m and n both, the visited tiles form a band without holes.
DEVICE Span query_blocks_of(const Sequence& s, int n_block) {
  Span m = {0, n_block * kBlockN < s.k_length ? ceil_div(s.q_length, kBlockM) : 0};
  if constexpr (kHasWindow) {
    const int first = n_block * kBlockN, last = smaller(first + kBlockN, s.k_length) - 1;
    if (s.window_right >= 0) m.begin = larger(0, first - s.diagonal - s.window_right) / kBlockM;
    if (s.window_left >= 0) m.end = smaller(m.end, ceil_div(larger(0, last - s.diagonal + s.window_left + 1), kBlockM));
  }
  return m;
}
DEVICE int first_key_block_of(const Sequence& s, int m_block) {
  if (kHasWindow && s.window_left >= 0) return larger(0, m_block * kBlockM + s.diagonal - s.window_left) / kBlockN;
  return 0;
}

// Rows that see key j by the window.
DEVICE Span queries_of(const Sequence& s, int j) {
  Span rows = {0, s.q_length};
  if (j >= s.k_length) rows.end = 0;
  if constexpr (kHasWindow) {
    if (s.window_right >= 0) rows.begin = larger(rows.begin, j - s.diagonal - s.window_right);
    if (s.window_left >= 0) rows.end = smaller(rows.end, j - s.diagonal + s.window_left + 1);
  }
  return rows;
}

// Scores of keys that were taken out of a product -> NaN. Keys are bits, across a fragment's columns.
template <int kM, int kN> DEVICE void blot_out(float (&s_frag)[kM][kN][4], u32 keys) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (keys >> (2 * n + (e & 1)) & 1) s_frag[m][n][e] = not_a_number();
}

// Scores of C fragments [16 kM queries x 8 kN keys] that a row must not see by window, lengths and key_ranges -> -inf; (i, j) is this
// thread's first element. `non_finite` marks keys whose V was taken out of the product: they turn the rows that see them into NaN.
template <int kM, int kN>
DEVICE void apply_mask(float (&s_frag)[kM][kN][4], const Params& p, const Sequence& s, u32 non_finite, int i, int j) {
  if constexpr (kHasBounds || kHasMask) {
    if (non_finite != 0) blot_out(s_frag, non_finite);  // rare: not among the comparisons
  }
  const auto hide = [](float& score, bool visible) { score = visible ? score : negative_infinity(); };
  if constexpr (kHasWindow && !kHasKeyRanges) {
    // The window moves with the row, so one comparison decides for all elements as far from the diagonal. Rows from q_length
    // on are not stored, whatever they see.
    const int diagonal = i + s.diagonal - j;
    const int begin = s.window_left < 0 ? -kNever : diagonal - s.window_left, end = s.window_right < 0 ? kNever : diagonal + s.window_right + 1;
#pragma unroll
    for (int distance = 1 - 2 * kM; distance < kN; ++distance)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool visible = Span{begin, end}.holds(distance * 8 + e);
#pragma unroll
        for (int row = 0; row < 2 * kM; ++row)
          if (distance + row >= 0 && distance + row < kN) hide(s_frag[row >> 1][distance + row][(row & 1) * 2 + e], visible);
      }
    if (s.k_length - (j & ~7) >= 8 * kN) return;
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Span keys = kHasKeyRanges ? keys_of(p, s, smaller(i + m * 16 + half * 8, s.q_length - 1)) : Span{0, s.k_length};
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) hide(s_frag[m][n][half * 2 + e], Span{keys.begin - j, keys.end - j}.holds(n * 8 + e));
    }
}

// ---- NaN and Inf behind a mask ----

// Whether one of the elements in a chunk is NaN or Inf: its exponent is all ones, and one more carries into the sign.
DEVICE bool non_finite(U32x4 chunk) {
  constexpr u32 kOne = kIsFp32 ? 0x00800000 : kIsBf16 ? 0x00800080 : 0x04000400, kSigns = kIsFp32 ? 0x80000000 : 0x80008000;
  const auto carried = [](u32 word) { return (word & (kSigns - kOne)) + kOne; };
  return ((carried(chunk.x) | carried(chunk.y) | carried(chunk.z) | carried(chunk.w)) & kSigns) != 0;
}

template <int kM, int kN> DEVICE bool any_non_finite(const float (&acc)[kM][kN][4]) {
  float sum[4] = {};  // 0 while nothing but finite numbers is multiplied by 0
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += acc[m][n][e] * 0.f;
  return !(sum[0] + sum[1] + sum[2] + sum[3] == 0.f);
}

constexpr U32x4 kNaNs = {0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff};  // in every dtype

// Whether a tile holds NaN or Inf. All threads of the block, one barrier.
template <class T> DEVICE bool holds_non_finite(T tile) {
  bool found = false;
  constexpr int kTotal = T::kBytes / 16;
#pragma unroll 8
  for (int first = 0; first < kTotal; first += kThreads) {
    const int chunk = first + thread_index();
    if (kTotal % kThreads == 0 || chunk < kTotal) found |= non_finite(ld_shared<U32x4>(tile.base + chunk * 16));
  }
  return sync_block_or(found);
}

// Zeroes every 16-byte chunk of the tile that holds NaN or Inf, for 0 * NaN is NaN. Returns bit c where something of row
// row_of(c) was zeroed. All threads of the block.
template <int kCount, class T, class RowOf> DEVICE u32 take_out_non_finite(T tile, const RowOf& row_of) {
  static_assert(kCount <= 32, "32 bits a thread");
  u32 bits = 0;
#pragma unroll 1
  for (int c = 0; c < kCount; ++c)
#pragma unroll 1
    for (int chunk = 0; chunk < T::kChunks; ++chunk)
      if (non_finite(ld_shared<U32x4>(tile.address(row_of(c), chunk)))) bits |= 1u << c;
  sync_block();  // everybody has looked before anything is zeroed
#pragma unroll 1
  for (int chunk = thread_index(); chunk < T::kBytes / 16; chunk += kThreads)
    if (non_finite(ld_shared<U32x4>(tile.base + chunk * 16))) st_shared(tile.base + chunk * 16, U32x4{0, 0, 0, 0});
  sync_block();  // zeroed for all
  return bits;
}
