// Attention backward: dk and dv of one block of kBlockN keys per CTA, and its part of dq, added to dq_accum in fp32.
// Assumes backward_delta has run, unit last strides, 16-byte aligned rows, head_dim and head_dim_v multiples of 8.
// Stores dk and dv for every row of k and v, unused ones (seqused_k) as zero; adds to dq_accum and dbias_accum.
// Grid: n_blocks * num_heads_kv * batch. A CTA goes through the query heads of its group and their query blocks, so dk and dv
// need no atomics. The scores are computed transposed, S^T = K Q^T: a warp owns 16 kKeyFrags keys, and its P^T and dS^T are
// A fragments of dV = P^T dO and dK = dS^T Q as they are. Only dS^T goes through shared memory, for dQ = dS K.
// Where dK and dV of 16 keys do not fit a warp's registers (kSplit = 2), two warps share the keys: each computes half of the
// queries' columns of S^T, P^T goes through shared memory too, and each keeps half of the columns of dK and dV.
#include "bias.cuh"
#include "dropout.cuh"
#include "half_pairs.cuh"
#include "mask.cuh"
#include "mask_tiles.cuh"
#include "product.cuh"

using KTile = Tile<kBlockN, kHeadDim>;
using VTile = Tile<kBlockN, kHeadDimV>;
using QTile = Tile<kBlockM, kHeadDim>;
using DoutTile = Tile<kBlockM, kHeadDimV>;
using ScoreTile = Tile<kBlockN, kBlockM>;  // dS^T, P^T
// In fp32, where all tiles are in range of fp16: a pair of fp16 tiles in place of each of these.
using KPair = PairTile<kBlockN, kHeadDim>;
using VPair = PairTile<kBlockN, kHeadDimV>;
using QPair = PairTile<kBlockM, kHeadDim>;
using DoutPair = PairTile<kBlockM, kHeadDimV>;
using ScorePair = PairTile<kBlockN, kBlockM>;

constexpr int kSplit = KeysDown::kSplit;
constexpr int kKeyFrags = KeysDown::kM, kQueryFrags = KeysDown::kN;  // of 16 keys, of 8 queries, per warp
constexpr int kDkFrags = kHeadDim / 8 / kSplit, kDvFrags = kHeadDimV / 8 / kSplit;
static_assert(kBlockN % 16 == 0 && kKeyFrags * kNumWarps * 16 == kBlockN * kSplit && kKeyFrags >= 1, "warps share out the keys evenly");
static_assert(kQueryFrags % 2 == 0 && kQueryFrags <= 16 && kDkFrags % 2 == 0 && kDvFrags % 2 == 0, "fragments come in pairs");

constexpr int kScoreBudget = kIsFp32 ? 112 : 192;  // registers of dK, dV, S and dP together: more spills
// Fragments of queries whose S and dP are held at a time: what dK and dV leave of the registers.
constexpr int kGradientRegisters = kKeyFrags * (kHeadDim + kHeadDimV) / 2 / kSplit;
constexpr int part_frags(int wanted) {
  const bool fits = kQueryFrags % wanted == 0 && kGradientRegisters + kKeyFrags * wanted * 8 <= kScoreBudget;
  return fits || wanted == 2 ? wanted : part_frags(wanted / 2);
}
constexpr int kPartFrags = part_frags(8);
constexpr int kPartsAtATime = kIsFp32 ? 1 : kQueryFrags / kPartFrags;

// dQ [kBlockM, kHeadDim] is dealt out to kDqWarpsM x kDqWarpsN warps: 32 rows each where the columns allow it, for then every
// fragment of K read serves two products.
constexpr bool dq_fits(int warps_m) {
  return warps_m > 0 && kNumWarps % warps_m == 0 && kBlockM % (16 * warps_m) == 0 && kHeadDim / 16 % (kNumWarps / warps_m) == 0;
}
constexpr int kDqWarpsM = dq_fits(kBlockM / 32) ? kBlockM / 32 : dq_fits(kBlockM / 16) ? kBlockM / 16 : kNumWarps;
constexpr int kDqWarpsN = kNumWarps / kDqWarpsM;
constexpr int kDqRowFrags = kBlockM / 16 / kDqWarpsM, kDqColumnFrags = kHeadDim / 8 / kDqWarpsN;
static_assert(dq_fits(kDqWarpsM), "warps share out dQ evenly");
// Pairs of column fragments, so many at a time that their sums fit 64 registers beside dK and dV.
constexpr int kDqPairs = kDqColumnFrags / 2;
constexpr int dq_passes(int passes) {
  return kDqPairs % passes == 0 && kDqRowFrags * kDqPairs / passes * 8 <= 64 ? passes : dq_passes(passes + 1);
}
constexpr int kDqPasses = dq_passes(1), kPassPairs = kDqPairs / kDqPasses;

// Shared memory: K | V (later dK | dV) | Q stages | dO stages | dS^T | P^T (kSplit 2) | bias | statistics of the query block
constexpr int kVOffset = KTile::kBytes, kQOffset = kVOffset + VTile::kBytes;
constexpr int kDoutOffset = kQOffset + kNumStages * QTile::kBytes;
constexpr int kDsOffset = kDoutOffset + kNumStages * DoutTile::kBytes;
constexpr int kPOffset = kDsOffset + ScoreTile::kBytes;
constexpr int kBiasOffset = kPOffset + (kSplit > 1 ? ScoreTile::kBytes : 0), kLogsumexpOffset = kBiasOffset + kBiasTileBytes;
constexpr int kDeltaOffset = kLogsumexpOffset + kBlockM * 4, kRangesOffset = kDeltaOffset + kBlockM * 4;
constexpr int kSharedMemory = kRangesOffset + (kHasKeyRanges ? kBlockM * 8 : 0);
static_assert(kBlockM <= kThreads, "one thread a row of statistics");

constexpr bool kMasks = kHasBounds || kHasMask;
// By a window alone it is known beforehand which parts of a tile see nothing of each other.
constexpr bool kSkips = kHasWindow && !kHasKeyRanges && !kHasMask && kSplit == 1 && !kIsFp32;

// The threads that pass turns and wait for them, of two warps: either holds its warp up (4.75 ms where one warp did both in 4.93).
constexpr int kPassing = 0, kAwaiting = kThreads - 1;

struct QueryBlock {
  int head, m_block;  // head within the group
};

// P is at most 1 / (1 - dropout_p). It and dS become pairs times a power of two, dS one that brings a bound of it to below 2^14.
constexpr int kLiftP = kHasDropout ? 10 : 14, kLiftDs = kHasDropout ? 10 : 14;
constexpr float kMostDropout = 0.9f;  // P / (1 - dropout_p) is then at most 10, and 10 * 2^kLiftP below fp16's 2^16

// With bounds the first key blocks first, which causally are the longest, over as many heads as keep what they read and add to at a
// time in L2.
DEVICE Position position_in_order(const Params& p) {
  if constexpr (!kHasBounds) return position_of(block_index(), p.n_blocks, p.num_heads_kv);
  constexpr u32 kL2Rows = (16 << 20) / (kHeadDim * (sizeof(Element) + 4) + kHeadDimV * sizeof(Element));  // of q, dout and dq_accum
  const u32 fitting = kL2Rows / ((u32)rows_at_a_time(p, p.seqlen_q) * (p.num_heads_q / p.num_heads_kv));
  return in_sections(block_index(), p.n_blocks, p.num_heads_kv, p.batch * p.num_heads_kv, fitting < 1 ? 1 : fitting);
}

template <bool kPaired> DEVICE void backward(const Params& p);
// A call, so that its registers are no concern of the other way.
__device__ __noinline__ void backward_in_parts(const Params& p) { backward<false>(p); }

template <bool kPaired> DEVICE void backward(const Params& p) {
  const Position position = position_in_order(p);
  const int n_block = position.block, first_key = n_block * kBlockN, group = p.num_heads_q / p.num_heads_kv;
  const Sequence sequence = sequence_of(p, position.batch);
  if (first_key >= sequence.k_rows) return;
  const Span m_blocks = query_blocks_of(sequence, n_block);

  const u32 smem = shared_base();
  const KTile k_smem = {smem};
  const VTile v_smem = {smem + kVOffset};
  const ScoreTile ds_smem = {smem + kDsOffset}, p_smem = {smem + kPOffset};
  const ScorePair ds_pair = {smem + kDsOffset}, p_pair = {smem + kPOffset};
  const auto q_smem = [&](int stage) { return QTile{smem + kQOffset + stage * QTile::kBytes}; };
  const auto dout_smem = [&](int stage) { return DoutTile{smem + kDoutOffset + stage * DoutTile::kBytes}; };

  // This thread's first element of S^T, within the tile
  const int warp_n = warp_index() / kSplit, warp_d = warp_index() % kSplit;
  const int key_warp = warp_n * 16 * kKeyFrags, key_lane = key_warp + (lane_index() >> 2);
  const int query_warp = warp_d * kQueryFrags * 8, query_lane = query_warp + (lane_index() & 3) * 2;
  const int j_first = first_key + key_lane;

  // ---- query blocks, one after the other ----

  const u8* const k_record = record_of<KPair>(p.k_pairs, key_block_offset(p, sequence, position.head, n_block));
  const u8* const v_record = record_of<VPair>(p.v_pairs, key_block_offset(p, sequence, position.head, n_block));
  const auto block_of = [&](QueryBlock b) { return query_block_offset(p, sequence, position.head * group + b.head, b.m_block); };
  const auto q_pair = [&](int stage) { return QPair{smem + kQOffset + stage * QPair::kBytes}; };
  const auto dout_pair = [&](int stage) { return DoutPair{smem + kDoutOffset + stage * DoutPair::kBytes}; };
  if constexpr (kPaired) {
    const int count = m_blocks.end - m_blocks.begin;
    bool out_of_range = p.dropout_p > kMostDropout;
    if (count > 0) out_of_range |= exponent_of<KPair>(k_record) == kOutOfRange || exponent_of<VPair>(v_record) == kOutOfRange;
    for (int i = thread_index(); i < group * count; i += kThreads) {
      const i64 at = block_of({i / count, m_blocks.begin + i % count});
      out_of_range |= exponent_of<QPair>(record_of<QPair>(p.q_pairs, at)) == kOutOfRange ||
                      exponent_of<DoutPair>(record_of<DoutPair>(p.dout_pairs, at)) == kOutOfRange;
    }
    if (sync_block_or(out_of_range)) return backward_in_parts(p);
  }
  const auto load_queries = [&](QueryBlock b, int stage) {
    const int head = position.head * group + b.head, first = b.m_block * kBlockM;
    if constexpr (kPaired) {
      load_pairs(q_pair(stage), record_of<QPair>(p.q_pairs, block_of(b)));
      load_pairs(dout_pair(stage), record_of<DoutPair>(p.dout_pairs, block_of(b)));
    } else {
      load_tile(q_smem(stage), q_of(p, sequence, head).from(first), 0, sequence.q_length - first, p.head_dim);
      load_tile(dout_smem(stage), dout_of(p, sequence, head).from(first), 0, sequence.q_length - first, p.head_dim_v);
    }
  };
  // Exponents of q, dout and dS; |dS| <= P (|v| |dout| + |delta|).
  int q_exponent = 0, dout_exponent = 0, ds_exponent = 0, next_q_exponent = 0, next_dout_exponent = 0, next_ds_exponent = 0;
  const auto fetch_exponents = [&](QueryBlock b) {
    const u8* const dout_record = record_of<DoutPair>(p.dout_pairs, block_of(b));
    const float bound = norm_of<VPair>(v_record) * norm_of<DoutPair>(dout_record) + delta_of<DoutPair>(dout_record);
    next_q_exponent = exponent_of<QPair>(record_of<QPair>(p.q_pairs, block_of(b)));
    next_dout_exponent = exponent_of<DoutPair>(dout_record);
    next_ds_exponent = larger((int)(bits_of(bound) >> 23) - 126, -2 * kLargestExponent) - kLiftDs;
  };
  // logsumexp in base 2 and delta of row thread_index(), on their way to shared memory. +inf where a row sees nothing or is
  // none: exp2(S - inf) = 0.
  float row_logsumexp = 0.f, row_delta = 0.f;
  Span row_keys = {0, 0};
  const auto fetch_statistics = [&](QueryBlock b) {
    const int i = b.m_block * kBlockM + thread_index();
    row_logsumexp = -negative_infinity(), row_delta = 0.f, row_keys = {0, 0};
    if (thread_index() < kBlockM && i < sequence.q_length) {
      const i64 at = statistics_offset(p, sequence, position.head * group + b.head) + i;
      const float logsumexp = ld_global(p.logsumexp + at);
      if (logsumexp != negative_infinity()) row_logsumexp = logsumexp * kLog2e;
      row_delta = ld_global(p.delta + at);
      if constexpr (kHasDropout) row_logsumexp -= log2_approx(keep_factor(p)), row_delta *= 1.f - p.dropout_p;
      if constexpr (kHasKeyRanges) row_keys = keys_of(p, sequence, i);
    }
  };
  const auto put_statistics = [&] {
    if (thread_index() < kBlockM) {
      st_shared(smem + kLogsumexpOffset + thread_index() * 4, row_logsumexp);
      st_shared(smem + kDeltaOffset + thread_index() * 4, row_delta);
      if constexpr (kHasKeyRanges) st_shared(smem + kRangesOffset + thread_index() * 8, U32x2{(u32)row_keys.begin, (u32)row_keys.end});
    }
  };

  // Deterministic: key blocks add to a query block in rising order, each when the ones before it are through. No deadlock:
  // a CTA waits only for CTAs of lower index, which started earlier and never wait for it.
  const auto turn_of = [&](QueryBlock b) {
    return p.dq_turns + query_block_offset(p, sequence, position.head * group + b.head, b.m_block);
  };
  const auto await_turn = [&](QueryBlock b) {
    if (thread_index() == kAwaiting)
      while (ld_acquire_global(turn_of(b)) != n_block - first_key_block_of(sequence, b.m_block)) {}
  };
  const auto pass_turn = [&](QueryBlock b, int thread = kPassing) {
    if (thread_index() == thread) red_release_add_global(turn_of(b), 1);
  };

  // The first query block from b on that sees anything here. `masked`: whether some row of it does not see every key.
  TileBits<KeysDown> mask_bits, next_mask_bits;
  MaskTiles<KeysDown> mask_tiles;
  int mask_head = -1;  // whose tiles they are
  bool next_masked = false, next_bounded = false;  // bounded: not by the boolean mask alone
  const auto find_block = [&](QueryBlock b) {
    for (; b.head < group; ++b.m_block) {
      if (b.m_block >= m_blocks.end) b.m_block = m_blocks.begin, ++b.head;
      if (b.head == group || m_blocks.begin >= m_blocks.end) { b.head = group; break; }
      const int first = b.m_block * kBlockM, last = smaller(first + kBlockM, sequence.q_length) - 1;
      bool visible = true;
      const Span top = window_of(sequence, first), bottom = window_of(sequence, last);
      next_masked = bottom.begin > first_key || top.end < first_key + kBlockN;
      if constexpr (kHasKeyRanges) {
        const U32x4 hull = ld_global((const U32x4*)p.key_hulls + ((i64)position.batch * p.m_blocks + b.m_block));
        const Span any = {(int)hull.x, (int)hull.y}, all = {(int)hull.z, (int)hull.w};
        visible = larger(any.begin, first_key) < smaller(any.end, first_key + kBlockN);
        next_masked = next_masked || all.begin > first_key || all.end < first_key + kBlockN;
      }
      if constexpr (kHasMask) {
        if (mask_head != b.head) mask_tiles.open(p, position.batch, position.head * group + (mask_head = b.head), n_block);
        mask_tiles.look(p, b.m_block);
        visible = visible && mask_tiles.sees(b.m_block);
        next_bounded = next_masked;
        next_masked = next_bounded || mask_tiles.hides(b.m_block);
      }
      if (visible) break;
      if constexpr (kDeterministic) {
        await_turn(b);
        pass_turn(b, kAwaiting);
      }
    }
    return b;
  };

  const auto fetch_mask = [&](QueryBlock b) {
    if (mask_tiles.hides(b.m_block)) mask_tiles.load(next_mask_bits, p, b.m_block);
    else next_mask_bits.fill(~0u);
  };
  // What a row does not see by window, lengths and key_ranges is taken out of the mask.
  const auto hide_unseen = [&](TileBits<KeysDown>& bits, QueryBlock b) {
#pragma unroll
    for (int n = 0; n < kQueryFrags; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = query_lane + n * 8 + e, i = b.m_block * kBlockM + column;
        Span keys = {0, kNever};
        if constexpr (kHasKeyRanges) {
          const U32x2 range = ld_shared<U32x2>(smem + kRangesOffset + column * 8);
          keys = {(int)range.x, (int)range.y};
        }
#pragma unroll
        for (int m = 0; m < kKeyFrags; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int j = j_first + m * 16 + half * 8;
            if (!(kHasKeyRanges ? keys.holds(j) : queries_of(sequence, j).holds(i))) bits.hide(m, half, n, e);
          }
      }
  };
  // The whole tile at once, as soon as all have read the one before.
  const BiasTile bias_smem = {smem + kBiasOffset};
  const auto load_next_bias = [&](QueryBlock b) {
    const Bias bias = bias_of(p, sequence, position.head * group + b.head);
    load_bias<kBlockM, kThreads>(bias_smem, bias, sequence, b.m_block * kBlockM, first_key, 0, thread_index());
  };

  float dk_frag[kKeyFrags][kDkFrags][4], dv_frag[kKeyFrags][kDvFrags][4];  // [keys of the warp, head_dim / kSplit]
  clear(dk_frag);
  clear(dv_frag);
  QueryBlock block = find_block({0, m_blocks.begin}), before = block;
  if (block.head < group) {
    const int rows = sequence.k_length - first_key;
    if constexpr (kPaired) {
      load_pairs(KPair{smem}, k_record);
      load_pairs(VPair{smem + kVOffset}, v_record);
      fetch_exponents(block);
    } else {
      load_tile(k_smem, k_of(p, sequence, position.head).from(first_key), 0, rows, p.head_dim);
      load_tile(v_smem, v_of(p, sequence, position.head).from(first_key), 0, rows, p.head_dim_v);
    }
    load_queries(block, 0);
    if constexpr (kHasBias) load_next_bias(block);
    cp_async_commit();
    if constexpr (kHasMask) fetch_mask(block);
    fetch_statistics(block);
    put_statistics();
  }

  // Where NaN or Inf is taken out of K, V becomes NaN: then dP and dS are NaN in the rows that see such a key, and so are their dQ and
  // its dK. The loop has nothing to do for that; dV follows at the end. By bounds K is looked through before the loop. A boolean
  // mask's loop came out 5% slower so: there the scores of the first tile that hides something are looked at, where NaN and Inf show.
  constexpr bool kLooks = kMasks && !kPaired, kLooksLater = kLooks && kHasMask;
  u32 non_finite = 0;  // this thread's keys taken out of K
  const auto take_out = [&] {
    non_finite = take_out_non_finite<2 * kKeyFrags>(k_smem, [&](int c) { return key_lane + c * 8; });
    if (warp_d == 0 && (lane_index() & 3) == 0) {
#pragma unroll
      for (int c = 0; c < 2 * kKeyFrags; ++c)
        if (non_finite >> c & 1) st_shared(v_smem.address(key_lane + c * 8, 0), kNaNs);
    }
  };
  bool looked = false, found = false;
  if constexpr (kLooks && !kLooksLater) {
    if (block.head < group) {
      cp_async_wait<0>();
      sync_block();  // K and V are there for all
      take_out();
    }
  }

  const Window16<KTile> k_rows = left_rows(k_smem, key_warp);
  const Window16<VTile> v_rows = left_rows(v_smem, key_warp);
  const auto k_pair_rows = pair_down_first(KPair{smem}, key_warp);
  const auto v_pair_rows = pair_down_first(VPair{smem + kVOffset}, key_warp);
  const int k_exponent = kPaired ? exponent_of<KPair>(k_record) : 0, v_exponent = kPaired ? exponent_of<VPair>(v_record) : 0;

  int stage = 0;
  bool first_round = true;
  while (block.head < group) {
    cp_async_wait<0>();
    sync_block();  // Q, dO and statistics are there for all; nobody reads the other stage or dS^T, all of dQ before is added
    if constexpr (kDeterministic) {
      if (!first_round) pass_turn(before);
    }
    if constexpr (kPaired) q_exponent = next_q_exponent, dout_exponent = next_dout_exponent, ds_exponent = next_ds_exponent;
    first_round = false;
    bool masked = next_masked;
    if constexpr (kHasWindow && !kHasKeyRanges && !kHasMask) {
      const BlockKeys keys = keys_of_rows(sequence, block.m_block * kBlockM, kBlockM);
      masked = keys.need_mask({first_key + key_warp, first_key + key_warp + 16 * kKeyFrags});
    }
    if constexpr (kHasMask) {
      mask_bits = next_mask_bits;
      if (next_bounded) hide_unseen(mask_bits, block);
    }
    const QueryBlock next = find_block({block.head, block.m_block + 1});
    if (next.head < group) {
      if constexpr (kHasMask) fetch_mask(next);
      if constexpr (kNumStages == 2) load_queries(next, stage ^ 1);
      fetch_statistics(next);
      if constexpr (kPaired) fetch_exponents(next);
    }
    cp_async_commit();

    const int head = position.head * group + block.head;
    const Scores scores = scores_of(p, sequence, head);
    const Dropout dropout = dropout_of(p, position.batch, head);
    // One part of the queries after the other; straight-line code, so that one part's exp2 can run beside another's products
    const auto visit = [&](auto mask) {
      // By bounds few tiles are masked: short code for them leaves registers to the others.
      constexpr bool kOneByOne = mask.kOn && kHasBounds && !kHasMask && kSplit == 1 && !kIsFp32;
#pragma unroll kOneByOne ? 1 : kPartsAtATime
      for (int part = 0; part < kQueryFrags; part += kPartFrags) {
        const int column_warp = query_warp + part * 8, column = query_lane + part * 8, i_first = block.m_block * kBlockM + column;

        if constexpr (kOneByOne && kSkips) {
          const BlockKeys seen = keys_of_rows(sequence, block.m_block * kBlockM + column_warp, kPartFrags * 8);
          if (vote_all(!seen.sees({first_key + key_warp, first_key + key_warp + 16 * kKeyFrags}))) {  // dS = 0, dK and dV stay
            const u32 zeros[kKeyFrags][kPartFrags][kPacked] = {};
            store_packed(ds_smem, key_warp, column_warp / 16, zeros);
            continue;
          }
        }

        // S^T = K Q^T, dP^T = V dO^T
        float s_frag[kKeyFrags][kPartFrags][4], dp_frag[kKeyFrags][kPartFrags][4];  // [keys of the warp, queries of the part]
        if constexpr (kPaired) {
          multiply_pairs_transposed<kHeadDim / 16>(s_frag, [&](PairFrags<kKeyFrags>& a, int k) { load_pair_rows(a, k_pair_rows, k); },
                                                   pair_right_first(q_pair(stage), column_warp), power_of_two(k_exponent + q_exponent));
          multiply_pairs_transposed<kHeadDimV / 16>(dp_frag, [&](PairFrags<kKeyFrags>& a, int k) { load_pair_rows(a, v_pair_rows, k); },
                                                    pair_right_first(dout_pair(stage), column_warp), power_of_two(v_exponent + dout_exponent));
        } else {
          clear(s_frag);
          multiply_transposed<kHeadDim / kMmaDepth>(s_frag, [&](u32 (&a_frag)[kKeyFrags][4], int k) { load_rows(a_frag, k_rows, k); },
                                             right_first(q_smem(stage), column_warp, 0));
          clear(dp_frag);
          multiply_transposed<kHeadDimV / kMmaDepth>(dp_frag, [&](u32 (&a_frag)[kKeyFrags][4], int k) { load_rows(a_frag, v_rows, k); },
                                              right_first(dout_smem(stage), column_warp, 0));
        }

        if constexpr (kLooksLater && mask.kOn) {
          if (!looked) found |= any_non_finite(s_frag);
        }

        float* dbias = nullptr;
        if (kHasBias && p.dbias_accum) dbias = bias_gradient_tile(p, position.batch, head, n_block, block.m_block);
        BiasColumns<kKeyFrags> bias;

        // P = exp2(S - logsumexp), dS = P (dP - delta)
        ColumnDraws<kKeyFrags> draws;
#pragma unroll
        for (int n = 0; n < kPartFrags; ++n) {
          const F32x2 logsumexp = ld_shared<F32x2>(smem + kLogsumexpOffset + (column + n * 8) * 4);
          const F32x2 delta = ld_shared<F32x2>(smem + kDeltaOffset + (column + n * 8) * 4);
          const int row_group = (query_warp >> 3) + part + n;  // of 8 queries
          if constexpr (kHasDropout) {
            if (n == 0 || (part + n) % 4 == 0) draws.draw(dropout, i_first + n * 8, j_first);
          }
          U32x4 ranges = {};
          if constexpr (mask.kOn && kHasKeyRanges && !kHasMask) ranges = ld_shared<U32x4>(smem + kRangesOffset + (column + n * 8) * 8);
          if constexpr (kHasBias) {
            if (n % 2 == 0) bias.load(bias_smem, query_warp + (part + n) * 8, key_warp);
          }
#pragma unroll
          for (int m = 0; m < kKeyFrags; ++m) {
            float dbias_frag[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int half = e >> 1, i = i_first + n * 8 + (e & 1), j = j_first + m * 16 + half * 8;
              float& s = s_frag[m][n][e];
              float& dp = dp_frag[m][n][e];
              float derivative = 1.f;
              float score = s * scores.scale_log2;
              if constexpr (kTransformsScores)
                score = score_log2(sequence, scores, s, kHasBias ? bias.value(m, n & 1, e) : 0.f, i, j, derivative);
              s = exp2_approx(score - (e & 1 ? logsumexp.y : logsumexp.x));
              if constexpr (kHasDropout) {  // s holds P / (1 - dropout_p), delta as much less
                const bool right = kKeyFrags == 1 ? j_first >> 4 & 1 : m;
                const float kept = draws.keeps(dropout, e & 1, multiplier(row_group >> 1 & 1, n & 1, right, half)) ? s : 0.f;
                dp = kept * dp - s * (e & 1 ? delta.y : delta.x);
                s = kept;
              } else {
                dp = s * (dp - (e & 1 ? delta.y : delta.x));
              }
              if constexpr (mask.kOn) {
                bool visible;
                if constexpr (kHasMask) visible = mask_bits.at(m, half, part + n, e & 1);
                else if constexpr (kHasKeyRanges)  // they are cut to window and lengths
                  visible = (e & 1 ? Span{(int)ranges.z, (int)ranges.w} : Span{(int)ranges.x, (int)ranges.y}).holds(j);
                else visible = queries_of(sequence, j).holds(i);
                s = visible ? s : 0.f;
                dp = visible ? dp : 0.f;
                if constexpr (kHasSoftcap) derivative = visible ? derivative : 0.f;  // NaN of a hidden key times 0 is NaN
              }
              dbias_frag[e] = dp;
              dp *= derivative;
            }
            if constexpr (kHasBias) {
              if (dbias) add_fragment(dbias + (m * kQueryFrags + part + n) * 128, dbias_frag);
            }
          }
        }
        // dV += P^T dO, dK += dS^T Q
        if constexpr (kPaired) {
          PairFrags<kKeyFrags> p_frag[kPartFrags / 2], ds_frag[kPartFrags / 2];
          split_accumulators(p_frag, s_frag, power_of_two(kLiftP));
          split_accumulators(ds_frag, dp_frag, power_of_two(-ds_exponent));
          store_pairs(ds_pair, key_warp, column_warp / 16, ds_frag);
          if constexpr (kSplit == 1) {
            add_pairs<kPartFrags / 2>(dv_frag, [&](PairFrags<kKeyFrags>& a, int k) { a = p_frag[k]; },
                                      pair_down_first(dout_pair(stage), part * 8), power_of_two(dout_exponent - kLiftP));
            add_pairs<kPartFrags / 2>(dk_frag, [&](PairFrags<kKeyFrags>& a, int k) { a = ds_frag[k]; },
                                      pair_down_first(q_pair(stage), part * 8), power_of_two(q_exponent + ds_exponent));
          } else {
            store_pairs(p_pair, key_warp, column_warp / 16, p_frag);
          }
        } else {
          u32 p_packed[kKeyFrags][kPartFrags][kPacked], ds_packed[kKeyFrags][kPartFrags][kPacked];
          pack_accumulators(p_packed, s_frag);
          pack_accumulators(ds_packed, dp_frag);
          store_packed(ds_smem, key_warp, column_warp / 16, ds_packed);

          if constexpr (kSplit == 1) {
            multiply<kPartFrags * 8 / kMmaDepth>(dv_frag, [&](u32 (&a_frag)[kKeyFrags][4], int k) { load_packed(a_frag, p_packed, k); },
                                     right_rows(dout_smem(stage), part * 8));
            multiply<kPartFrags * 8 / kMmaDepth>(dk_frag, [&](u32 (&a_frag)[kKeyFrags][4], int k) { load_packed(a_frag, ds_packed, k); },
                                     right_rows(q_smem(stage), part * 8));
          } else {
            store_packed(p_smem, key_warp, column_warp / 16, p_packed);
          }
        }
      }
    };
    if (masked) visit(Switch<true>{}), looked = true;
    else visit(Switch<false>{});

    if constexpr (kSplit > 1) {
      sync_block();  // P^T and dS^T are complete
      if constexpr (kHasBias) {
        if (next.head < group) load_next_bias(next);
        cp_async_commit();
      }
      if constexpr (kPaired) {
        const auto p_rows = pair_down_first(p_pair, key_warp), ds_rows = pair_down_first(ds_pair, key_warp);
        add_pairs<kBlockM / 16, kSplit>(dv_frag, [&](PairFrags<kKeyFrags>& a, int k) { load_pair_rows(a, p_rows, k); },
                                        pair_down_first(dout_pair(stage), 0), power_of_two(dout_exponent - kLiftP), warp_d);
        add_pairs<kBlockM / 16, kSplit>(dk_frag, [&](PairFrags<kKeyFrags>& a, int k) { load_pair_rows(a, ds_rows, k); },
                                        pair_down_first(q_pair(stage), 0), power_of_two(q_exponent + ds_exponent), warp_d);
      } else {
        const auto p_rows = left_rows_of_packed(p_smem, key_warp), ds_rows = left_rows_of_packed(ds_smem, key_warp);
        multiply<kBlockM / kMmaDepth, kSplit, kStepsAtATime>(dv_frag, [&](u32 (&a_frag)[kKeyFrags][4], int k) { load_rows(a_frag, p_rows, k); },
                                       right_rows(dout_smem(stage), 0, warp_d));
        multiply<kBlockM / kMmaDepth, kSplit, kStepsAtATime>(dk_frag, [&](u32 (&a_frag)[kKeyFrags][4], int k) { load_rows(a_frag, ds_rows, k); },
                                       right_rows(q_smem(stage), 0, warp_d));
      }
    }
    if constexpr (kDeterministic) await_turn(block);
    // dS^T is complete, Q, dO and statistics are free; deterministic: our turn has come, for all threads
    if (!kLooksLater || !masked) sync_block();
    else if (sync_block_or(found)) take_out(), found = false;

    if constexpr (kHasBias && kSplit == 1) {
      if (next.head < group) load_next_bias(next);
      cp_async_commit();
    }
    if (next.head < group) {
      if constexpr (kNumStages == 1) load_queries(next, 0), cp_async_commit();
      put_statistics();
    }

    // dQ += dS K
    const int dq_m = warp_index() / kDqWarpsN * kDqRowFrags, dq_n = warp_index() % kDqWarpsN;
    const auto ds_columns = left_columns(ds_smem);
    const auto ds_pair_columns = pair_right_first(ds_pair, 0);
    Span some_keys = {0, kBlockN};  // that some query sees: dS of the others is 0
    if constexpr (kSkips && kPartFrags < kQueryFrags) {
      const Span any = keys_of_rows(sequence, block.m_block * kBlockM, kBlockM).any;
      some_keys = {larger(any.begin - first_key, 0) / kMmaDepth * kMmaDepth, smaller(any.end - first_key, kBlockN)};
    }
    float* dq_accum = p.dq_accum + query_block_offset(p, sequence, head, block.m_block) * (kBlockM * kHeadDim);
#pragma unroll 1
    for (int pair = 0; pair < kDqPairs; pair += kPassPairs) {
      float dq_frag[kDqRowFrags][kPassPairs * 2][4];
      clear(dq_frag);
      if constexpr (kPaired)
        add_pairs<kBlockN / 16, kDqWarpsN>(dq_frag, [&](PairFrags<kDqRowFrags>& a, int k) { load_pair_columns(a, ds_pair_columns, k, dq_m); },
                                           pair_down_first(KPair{smem}, 0), power_of_two(k_exponent + ds_exponent), pair * kDqWarpsN + dq_n);
      else if (!kSkips || kPartFrags == kQueryFrags || some_keys.end - some_keys.begin == kBlockN)
        multiply<kBlockN / kMmaDepth, kDqWarpsN, kStepsAtATime>(
            dq_frag, [&](u32 (&a_frag)[kDqRowFrags][4], int k) { load_columns(a_frag, ds_columns, k, dq_m); },
            right_rows(k_smem, 0, pair * kDqWarpsN + dq_n));
      else
#pragma unroll 1
        for (int key = some_keys.begin; key < some_keys.end; key += kMmaDepth)
          multiply<1, kDqWarpsN>(dq_frag, [&](u32 (&a_frag)[kDqRowFrags][4], int) { load_columns(a_frag, ds_columns, key / kMmaDepth, dq_m); },
                                 right_rows(k_smem, key, pair * kDqWarpsN + dq_n));
#pragma unroll
      for (int m = 0; m < kDqRowFrags; ++m)
#pragma unroll
        for (int n = 0; n < kPassPairs * 2; ++n) {
          const int column = ((pair + (n >> 1)) * kDqWarpsN + dq_n) * 2 + (n & 1);
          add_fragment(dq_accum + ((dq_m + m) * (kHeadDim / 8) + column) * 128, dq_frag[m][n]);
        }
    }

    if constexpr (kNumStages == 2) stage ^= 1;
    before = block;
    block = next;
  }

  // ---- dk, dv ----

  sync_block();  // nobody reads K and V any more, all of dQ is added
  if constexpr (kDeterministic) {
    if (!first_round) pass_turn(before);
  }
  if constexpr (kLooks) {
    if (non_finite != 0) {
#pragma unroll
      for (int m = 0; m < kKeyFrags; ++m)
#pragma unroll
        for (int n = 0; n < kDvFrags; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (non_finite >> (2 * m + (e >> 1)) & 1) dv_frag[m][n][e] += dk_frag[m][0][e] * 0.f;  // NaN with dK: somebody sees it
    }
  }
  scale(dk_frag, p.softmax_scale);
  store_accumulators<kSplit>(k_smem, key_warp, warp_d, dk_frag);
  store_accumulators<kSplit>(v_smem, key_warp, warp_d, dv_frag);
  sync_block();  // dK and dV are in shared memory
  const int rows = sequence.k_rows - first_key;
  store_tile<kThreads>(k_smem, dk_of(p, sequence, position.head).from(first_key), rows, p.head_dim, thread_index());
  store_tile<kThreads>(v_smem, dv_of(p, sequence, position.head).from(first_key), rows, p.head_dim_v, thread_index());
}

KERNEL(kThreads, 1) attention_backward_sm80(GRID_CONSTANT Params p) { backward<kHalfPairs>(p); }
