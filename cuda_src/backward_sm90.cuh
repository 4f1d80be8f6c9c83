// What both Hopper backwards are made of: tiles as TMA writes and wgmma reads them, the three kinds of products, the walk over
// query blocks, probabilities, turns.
#pragma once
#include "ptx_sm90.cuh"
#include "scores.cuh"
#include "workspace_sm90.cuh"

static_assert(kHeadDim == kHeadDimV, "one head dim for q, k and v");
static_assert(!(kHasKeyRanges || kHasMask || kHasBias || kHasAlibi || kHasDropout), "features of the portable backward");

// ---- tiles: slabs of 64 columns (128 bytes, the swizzle's width), slab after slab; 16-byte chunk c of row r lies at c ^ r % 8 ----
template <int kRowCount, int kColumnCount> struct SlabTile {
  static constexpr int kRows = kRowCount, kSlabs = (kColumnCount + 63) / 64;
  static constexpr int kSlabBytes = kRows * 128, kBytes = kSlabs * kSlabBytes;
  u32 base;  // multiple of 1024, where the swizzle's pattern starts
};

// A wgmma descriptor is 64 bits of which only the lower half varies here: address and distance of neighbouring slabs, in 16-byte
// units. The upper half: 1024 bytes from one group of 8 rows to the next, 128-byte swizzle. Kept as 32 bits and completed at
// the use: as 64-bit values ptxas would hold (and spill) dozens of them.
DEVICE u64 descriptor(u32 low) { return (u64)(1u << 30 | 1024 / 16) << 32 | low; }
template <class T> DEVICE u32 operand(T tile, int row = 0) {
  return (u32)(T::kSlabBytes / 16) << 16 | (tile.base + row * 128 & 0x3ffff) >> 4;
}
// Step k of 16 in the reduced dimension: 32 bytes on in a row, or 16 rows on.
template <class T> DEVICE u32 along_row(u32 operand, int k) { return operand + k / 4 * (T::kSlabBytes / 16) + k % 4 * 2; }
DEVICE u32 down_rows(u32 operand, int k) { return operand + k * (16 * 128 / 16); }

// ---- products, started and committed as one group; operands as operand() gives them ----

// acc [64 x N] = A B^T over kHeadDim: 64 rows of tile A, N rows of tile B.
template <class A, class B> DEVICE void start_abt(float (&acc)[B::kRows / 2], u32 a, u32 b) {
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k)
    wgmma_ss<B::kRows, kIsBf16, false, false>(acc, descriptor(along_row<A>(a, k)), descriptor(along_row<B>(b, k)), k > 0);
  wgmma_commit();
}
// acc [64 x N] += A B over the rows of B: A in registers.
template <int N, int kSteps> DEVICE void start_ab(float (&acc)[N / 2], const u32 (&a_frag)[4 * kSteps], u32 b) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    wgmma_rs<N, kIsBf16, true>(acc, a_frag[4 * k], a_frag[4 * k + 1], a_frag[4 * k + 2], a_frag[4 * k + 3], descriptor(down_rows(b, k)), true);
  wgmma_commit();
}
// acc [64 x N] = A^T B over the rows of both.
template <int N, int kSteps> DEVICE void start_atb(float (&acc)[N / 2], u32 a, u32 b) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma_ss<N, kIsBf16, true, true>(acc, descriptor(down_rows(a, k)), descriptor(down_rows(b, k)), k > 0);
  wgmma_commit();
}

// ---- TMA ----

// Rows that are not of the sequence never enter shared memory, whatever they hold (another sequence, a stale cache, NaN): the
// tensor map cuts a tile off at the sequence's end and fills up with zeros. Padded batches end where the map does. For packed
// rows and for seqused_k the map (head_dim, x, heads, y, z) has row strides in x and y, 2^30 rows in x, and such a stride in z that
// z = 2^30 takes 2^30 rows back: x = 2^30 - length + row, y = start + length is row `row`, and beyond `length` x is outside.
constexpr int kRaggedRows = 1 << 30;
struct RowOrigin {
  int x, y, z;  // of row 0
};
DEVICE RowOrigin origin_of(bool ragged, int batch, i64 start, int length) {
  if (ragged) return {kRaggedRows - length, (int)start + length, kRaggedRows};
  return {0, batch, 0};
}
template <class T> DEVICE void load_rows(T tile, const TensorMap* map, u32 barrier, RowOrigin origin, int row, int head) {
#pragma unroll
  for (int slab = 0; slab < T::kSlabs; ++slab)
    tma_load_5d(tile.base + slab * T::kSlabBytes, map, barrier, slab * 64, origin.x + row, head, origin.y, origin.z);
}
// First row of the sequence in a tensor of keys; without cu_seqlens batches are whole numbers of rows apart (the launcher sees to it).
DEVICE RowOrigin key_origin(const Params& p, const Sequence& s, i64 stride_batch, i64 stride_row) {
  if (p.cu_seqlens_k || !p.seqused_k) return origin_of(p.cu_seqlens_k != nullptr, s.batch, s.k_start, s.k_length);
  return origin_of(true, s.batch, s.batch * (stride_batch / stride_row), s.k_length);
}

// ---- which keys, which queries ----

// Key blocks in an order in which the CTAs that run at the same time share q, dout and dq in L2. Windows: the first key block first,
// which causally is the longest. Deterministic: the last one first: causally it is the first to reach its diagonal, so nobody waits.
DEVICE Position key_block_of(const Params& p, u32 index) {
  if constexpr (!kHasWindow && !kDeterministic) return position_of(index, p.n_blocks, p.num_heads_kv);
  constexpr i64 kL2Bytes = 32 << 20;  // of Hopper's 50 MB
  const i64 head_bytes = (i64)larger(p.seqlen_q, 1) * (kHeadDim * (2 + 2 + 4)) * (p.num_heads_q / p.num_heads_kv);
  const u32 rows = (u32)p.batch * p.num_heads_kv;
  const u32 fitting = larger((int)(kL2Bytes / head_bytes), 1), section_rows = fitting < rows ? fitting : rows;
  const u32 section = index / (section_rows * p.n_blocks), within = index % (section_rows * p.n_blocks);
  const u32 left = rows - section * section_rows, here = left < section_rows ? left : section_rows;
  const u32 row = section * section_rows + within % here;
  const int block = (int)(within / here);
  return {kDeterministic ? p.n_blocks - 1 - block : block, (int)(row % p.num_heads_kv), (int)(row / p.num_heads_kv)};
}

// Steps of a CTA: the query blocks that see its keys, query head after query head of the group.
struct Walk {
  int left, m_block, head;
  Span m_blocks;
  DEVICE Walk(const Params& p, const Sequence& s, int kv_head, int n_block) {
    const int group = p.num_heads_q / p.num_heads_kv;
    m_blocks = query_blocks_of(s, n_block);
    left = larger(m_blocks.end - m_blocks.begin, 0) * group;
    m_block = m_blocks.begin;
    head = kv_head * group;
  }
  DEVICE void next() {
    --left;
    if (++m_block == m_blocks.end) m_block = m_blocks.begin, ++head;
  }
};

// Queries that see the two keys (j, j + 8) of a thread, and those that see all 64 from `first_key` on. Ends without a left window lie
// beyond all rows: rows that are none have logsumexp +inf.
struct KeyMask {
  int begin[2], count[2];
  Span all;
  DEVICE KeyMask(const Sequence& s, int first_key, int j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Span rows = queries_of(s, j + 8 * half);
      begin[half] = rows.begin;
      count[half] = larger(rows.end - rows.begin, 0);
    }
    all = {0, kNever};
    if constexpr (kHasWindow) {
      all.begin = queries_of(s, smaller(first_key + 63, s.k_length - 1)).begin;
      if (s.window_left >= 0) all.end = queries_of(s, first_key).end;
    }
    if (first_key + 64 > s.k_length) all.end = 0;
  }
  // S^T of 64 queries from `i` on: what must not be seen -> -inf.
  template <int kCount> DEVICE void apply(float (&s_frag)[kCount], int i) const {
    if (i >= all.begin && i + 64 <= all.end) return;
    i += (lane_index() & 3) * 2;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const int half = e >> 1 & 1;
      if ((u32)(i + e / 4 * 8 + (e & 1) - begin[half]) >= (u32)count[half]) s_frag[e] = negative_infinity();
    }
  }
};

// ---- elements: accumulator e of S^T belongs to statistic e / 4 * 2 + e % 2 of the queries this thread holds ----

// logsumexp or -delta of the thread's queries; `address` is that of the block's.
template <int kCount> DEVICE void load_statistics(float (&statistics)[kCount], u32 address) {
#pragma unroll
  for (int j = 0; j < kCount / 2; ++j) {
    const F32x2 pair = ld_shared<F32x2>(address + j * 32 + (lane_index() & 3) * 8);
    statistics[2 * j] = pair.x, statistics[2 * j + 1] = pair.y;
  }
}
// P^T = exp2(S^T - logsumexp), packed as the A operand of dV. `s` becomes what dS^T takes of it: P^T, with softcap P^T * dtanh.
template <int kCount> DEVICE void probabilities(float (&s)[kCount], u32 (&p_frag)[kCount / 2], const float (&logsumexp)[kCount / 2], const Scores& scores) {
#pragma unroll
  for (int pair = 0; pair < kCount / 2; ++pair) {
    float probability[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = s[2 * pair + e];
      const float subtracted = logsumexp[pair / 2 * 2 + e];
      if constexpr (kHasSoftcap) {
        const float t = tanh_of(x * scores.tanh_log2);  // finite for a hidden score (-inf) too, and so is the derivative
        const float capped = x == negative_infinity() ? x : scores.softcap_log2 * t;
        probability[e] = exp2_approx(capped - subtracted);
        x = probability[e] * (1.f - t * t);
      } else {
        x = probability[e] = exp2_approx(x * scores.scale_log2 - subtracted);
      }
    }
    p_frag[pair] = pack<kIsBf16>(probability[0], probability[1]);
  }
}
// dS^T = P^T (dP^T - delta), packed as the A operand of dK.
template <int kCount> DEVICE void score_gradients(u32 (&ds_frag)[kCount / 2], const float (&p)[kCount], const float (&dp)[kCount], const float (&negative_delta)[kCount / 2]) {
#pragma unroll
  for (int pair = 0; pair < kCount / 2; ++pair)
    ds_frag[pair] = pack<kIsBf16>(p[2 * pair] * (dp[2 * pair] + negative_delta[pair / 2 * 2]),
                                  p[2 * pair + 1] * (dp[2 * pair + 1] + negative_delta[pair / 2 * 2 + 1]));
}
// A warp's 16 keys of dS^T into the tile [key][query], `warp_row` on: rows of 64 queries, which the product dS K reads as a transposed A.
template <class T, int kCount> DEVICE void store_scores(T tile, int warp_row, const u32 (&ds_frag)[kCount]) {
  static_assert(T::kSlabs == 1 && kCount == 16, "64 queries");
  const u32 address = tile.base + (warp_row + (lane_index() & 15)) * 128 + (((lane_index() >> 4) ^ (lane_index() & 7)) << 4);
#pragma unroll
  for (int k = 0; k < 4; ++k) stmatrix_x4(address ^ k << 5, {ds_frag[4 * k], ds_frag[4 * k + 1], ds_frag[4 * k + 2], ds_frag[4 * k + 3]});
}

// dK or dV of a warp's 16 keys, from `warp_row` of the CTA's on. Where the CTA stands is computed again: that costs less than holding it
// in registers through the main loop (`uniform` keeps the compiler from finding out).
template <int kCount>
DEVICE void store_gradient(const float (&acc)[kCount], float scale, const Params& p, int warp_row, u16* gradient, i64 stride_batch, i64 stride_row, i64 stride_head) {
  const Position position = key_block_of(p, uniform(block_index()));
  const Sequence sequence = sequence_of(p, position.batch);
  const int key = position.block * kBlockN + warp_row + (lane_index() >> 2);
  gradient += head_offset(position.batch, sequence.k_start + key, position.head, stride_batch, stride_row, stride_head);
#pragma unroll
  for (int column = 0; column < kHeadDim; column += 32)
    store_rows(acc + column / 2, scale, gradient + column, stride_row, sequence.k_rows - key, p.head_dim - column);
}

// ---- deterministic dq: key blocks add to a query block in falling order ----
// No deadlock: a CTA waits only for key blocks of its head that come before it in the grid, which started earlier and never wait for it.

// Key blocks that add to query block m before block n does. By the rule of query_blocks_of those are all between n and the last
// one whose first key some row of m sees.
DEVICE int turns_before(const Sequence& s, int n_block, int m_block) {
  int last = ceil_div(s.k_length, kBlockN) - 1;
  if (kHasWindow && s.window_right >= 0) last = smaller(last, (m_block * kBlockM + kBlockM - 1 + s.diagonal + s.window_right) / kBlockN);
  return last - n_block;
}
DEVICE void await_turn(const Params& p, u32 record, int turn) {
  while (ld_acquire_global(p.dq_turns + record) < turn) {}
}
DEVICE void pass_turn(const Params& p, u32 record) { red_release_add_global(p.dq_turns + record, 1); }
