// The products of the backward and the way of their operands into shared memory, in two kinds: of tiles as they are, and of fp32 in
// pairs of fp16 (half_pairs.cuh).
//   S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q    dQ = dS K
// S^T and dP^T are of a warp's keys and a part of the queries; what they become, P^T and dS^T, are A fragments as they are. dS^T goes
// through shared memory too, for dQ, and where warps share keys (kSplit 2) P^T as well, for dV and dK.
#pragma once
#include "backward_tiles.cuh"
#include "product.cuh"

// P is at most 1 / (1 - dropout_p). It and dS become pairs times a power of two, dS one that brings a bound of it to below 2^14.
constexpr int kLiftP = kHasDropout ? 10 : 14, kLiftDs = kHasDropout ? 10 : 14;
constexpr float kMostDropout = 0.9f;  // P / (1 - dropout_p) is then at most 10, and 10 * 2^kLiftP below fp16's 2^16

template <bool kPaired> struct Products {
  const Params& p;
  const Sequence& sequence;
  const u32 smem;
  const int key_warp, warp_d;  // this warp's first key, and its share of the columns of dK and dV
  const u8* const k_record;
  const u8* const v_record;
  const Window16<KTile> k_rows;
  const Window16<VTile> v_rows;
  const PairWindow<KPair::Half> k_pair_rows;
  const PairWindow<VPair::Half> v_pair_rows;
  const int k_exponent, v_exponent;
  // Exponents of q, dout and dS of the query block at hand and the next.
  int q_exponent = 0, dout_exponent = 0, ds_exponent = 0, next_q_exponent = 0, next_dout_exponent = 0, next_ds_exponent = 0;

  DEVICE Products(const Params& params, const Sequence& s, int kv_head, int n_block, u32 base)
      : p(params), sequence(s), smem(base), key_warp(first_key_of_warp()), warp_d(share_of_warp()),
        k_record(record_of<KPair>(params.k_pairs, key_block_offset(params, s, kv_head, n_block))),
        v_record(record_of<VPair>(params.v_pairs, key_block_offset(params, s, kv_head, n_block))),
        k_rows(left_rows(KTile{base}, first_key_of_warp())), v_rows(left_rows(VTile{base + kVOffset}, first_key_of_warp())),
        k_pair_rows(pair_down_first(KPair{base}, first_key_of_warp())), v_pair_rows(pair_down_first(VPair{base + kVOffset}, first_key_of_warp())),
        k_exponent(kPaired ? exponent_of<KPair>(k_record) : 0), v_exponent(kPaired ? exponent_of<VPair>(v_record) : 0) {}

  DEVICE KTile k_tile() const { return {smem}; }
  DEVICE VTile v_tile() const { return {smem + kVOffset}; }
  DEVICE QTile q_tile(int stage) const { return {smem + kQOffset + stage * QTile::kBytes}; }
  DEVICE DoutTile dout_tile(int stage) const { return {smem + kDoutOffset + stage * DoutTile::kBytes}; }
  DEVICE ScoreTile ds_tile() const { return {smem + kDsOffset}; }
  DEVICE ScoreTile p_tile() const { return {smem + kPOffset}; }
  DEVICE QPair q_pair(int stage) const { return {smem + kQOffset + stage * QPair::kBytes}; }
  DEVICE DoutPair dout_pair(int stage) const { return {smem + kDoutOffset + stage * DoutPair::kBytes}; }
  DEVICE ScorePair ds_pair() const { return {smem + kDsOffset}; }
  DEVICE ScorePair p_pair() const { return {smem + kPOffset}; }

  DEVICE const u8* q_record(int head, int m_block) const { return record_of<QPair>(p.q_pairs, query_block_offset(p, sequence, head, m_block)); }
  DEVICE const u8* dout_record(int head, int m_block) const {
    return record_of<DoutPair>(p.dout_pairs, query_block_offset(p, sequence, head, m_block));
  }

  // Whether pairs do for these keys and all their query blocks, in `group` heads from `first_head` on; one answer for the CTA.
  DEVICE bool out_of_range(int first_head, int group, Span m_blocks) const {
    const int count = m_blocks.end - m_blocks.begin;
    bool found = p.dropout_p > kMostDropout;
    if (count > 0) found |= exponent_of<KPair>(k_record) == kOutOfRange || exponent_of<VPair>(v_record) == kOutOfRange;
    for (int i = thread_index(); i < group * count; i += kThreads) {
      const int head = first_head + i / count, m_block = m_blocks.begin + i % count;
      found |= exponent_of<QPair>(q_record(head, m_block)) == kOutOfRange || exponent_of<DoutPair>(dout_record(head, m_block)) == kOutOfRange;
    }
    return sync_block_or(found);
  }

  // ---- operands; the caller commits ----

  // K as a group of its own: it is looked at first.
  DEVICE void load_keys(int kv_head, int first_key) const {
    if constexpr (kPaired) {
      load_pairs(KPair{smem}, k_record);
      load_pairs(VPair{smem + kVOffset}, v_record);
    } else {
      const int rows = sequence.k_length - first_key;
      load_tile(k_tile(), k_of(p, sequence, kv_head).from(first_key), 0, rows, p.head_dim);
      cp_async_commit();
      load_tile(v_tile(), v_of(p, sequence, kv_head).from(first_key), 0, rows, p.head_dim_v);
    }
  }
  DEVICE void load_queries(int head, int m_block, int stage) const {
    const int first = m_block * kBlockM;
    if constexpr (kPaired) {
      load_pairs(q_pair(stage), q_record(head, m_block));
      load_pairs(dout_pair(stage), dout_record(head, m_block));
    } else {
      load_tile(q_tile(stage), q_of(p, sequence, head).from(first), 0, sequence.q_length - first, p.head_dim);
      load_tile(dout_tile(stage), dout_of(p, sequence, head).from(first), 0, sequence.q_length - first, p.head_dim_v);
    }
  }
  // Of the next query block; |dS| <= P (|v| |dout| + |delta|).
  DEVICE void fetch_exponents(int head, int m_block) {
    if constexpr (kPaired) {
      const u8* const record = dout_record(head, m_block);
      const float bound = norm_of<VPair>(v_record) * norm_of<DoutPair>(record) + delta_of<DoutPair>(record);
      next_q_exponent = exponent_of<QPair>(q_record(head, m_block));
      next_dout_exponent = exponent_of<DoutPair>(record);
      next_ds_exponent = larger((int)(bits_of(bound) >> 23) - 126, -2 * kLargestExponent) - kLiftDs;
    }
  }
  DEVICE void take_exponents() {
    if constexpr (kPaired) q_exponent = next_q_exponent, dout_exponent = next_dout_exponent, ds_exponent = next_ds_exponent;
  }

  // ---- of a part of the queries, from `column` of the tile on, and kM fragments of the warp's keys, from the `first` on (0 in pairs) ----

  template <int kM, int kN> DEVICE void multiply_scores(float (&s_frag)[kM][kN][4], int stage, int column, int first) const {
    if constexpr (kPaired) {
      multiply_pairs_transposed<kHeadDim / 16>(s_frag, [&](PairFrags<kM>& a, int k) { load_pair_rows(a, k_pair_rows, k); },
                                               pair_right_first(q_pair(stage), column), power_of_two(k_exponent + q_exponent));
    } else {
      clear(s_frag);
      multiply_transposed<kHeadDim / kMmaDepth>(s_frag, [&](u32 (&a_frag)[kM][4], int k) { load_rows(a_frag, k_rows, k, first * kKeyStep, kKeyStep); },
                                                right_first(q_tile(stage), column, 0));
    }
  }
  template <int kM, int kN> DEVICE void multiply_dp(float (&dp_frag)[kM][kN][4], int stage, int column, int first) const {
    if constexpr (kPaired) {
      multiply_pairs_transposed<kHeadDimV / 16>(dp_frag, [&](PairFrags<kM>& a, int k) { load_pair_rows(a, v_pair_rows, k); },
                                                pair_right_first(dout_pair(stage), column), power_of_two(v_exponent + dout_exponent));
    } else {
      clear(dp_frag);
      multiply_transposed<kHeadDimV / kMmaDepth>(dp_frag, [&](u32 (&a_frag)[kM][4], int k) { load_rows(a_frag, v_rows, k, first * kKeyStep, kKeyStep); },
                                                 right_first(dout_tile(stage), column, 0));
    }
  }
  // dS = 0: dK and dV stay as they are.
  template <int kM> DEVICE void store_no_ds(int column, int first) const {
    const u32 zeros[kM][kPartFrags][kPacked] = {};
    store_packed(ds_tile(), key_warp + first * kKeyStep, column / 16, zeros, kKeyStep);
  }
  // dS^T to shared memory, and dV += P^T dO, dK += dS^T Q or what those take, P^T to shared memory. `row` of dO and Q.
  template <int kM>
  DEVICE void add_part(float (&dv_frag)[kKeyFrags][kDvFrags][4], float (&dk_frag)[kKeyFrags][kDkFrags][4], const float (&p_acc)[kM][kPartFrags][4],
                       const float (&ds_acc)[kM][kPartFrags][4], int stage, int column, int row, int first) const {
    if constexpr (kPaired) {
      PairFrags<kKeyFrags> p_frag[kPartFrags / 2], ds_frag[kPartFrags / 2];
      split_accumulators(p_frag, p_acc, power_of_two(kLiftP));
      split_accumulators(ds_frag, ds_acc, power_of_two(-ds_exponent));
      store_pairs(ds_pair(), key_warp, column / 16, ds_frag);
      if constexpr (kSplit == 1) {
        add_pairs<kPartFrags / 2>(dv_frag, [&](PairFrags<kKeyFrags>& a, int k) { a = p_frag[k]; }, pair_down_first(dout_pair(stage), row),
                                  power_of_two(dout_exponent - kLiftP));
        add_pairs<kPartFrags / 2>(dk_frag, [&](PairFrags<kKeyFrags>& a, int k) { a = ds_frag[k]; }, pair_down_first(q_pair(stage), row),
                                  power_of_two(q_exponent + ds_exponent));
      } else {
        store_pairs(p_pair(), key_warp, column / 16, p_frag);
      }
    } else {
      u32 p_packed[kM][kPartFrags][kPacked], ds_packed[kM][kPartFrags][kPacked];
      pack_accumulators(p_packed, p_acc);
      pack_accumulators(ds_packed, ds_acc);
      store_packed(ds_tile(), key_warp + first * kKeyStep, column / 16, ds_packed, kKeyStep);
      if constexpr (kSplit == 1) {
        multiply<kPartFrags * 8 / kMmaDepth>(fragments_of<kM>(dv_frag, first), [&](u32 (&a_frag)[kM][4], int k) { load_packed(a_frag, p_packed, k); },
                                             right_rows(dout_tile(stage), row));
        multiply<kPartFrags * 8 / kMmaDepth>(fragments_of<kM>(dk_frag, first), [&](u32 (&a_frag)[kM][4], int k) { load_packed(a_frag, ds_packed, k); },
                                             right_rows(q_tile(stage), row));
      } else {
        store_packed(p_tile(), key_warp, column / 16, p_packed);
      }
    }
  }

  // ---- of all queries ----

  // kSplit 2: dV += P^T dO, dK += dS^T Q from shared memory, this warp's share of the columns.
  DEVICE void add_shared(float (&dv_frag)[kKeyFrags][kDvFrags][4], float (&dk_frag)[kKeyFrags][kDkFrags][4], int stage) const {
    if constexpr (kPaired) {
      const auto p_rows = pair_down_first(p_pair(), key_warp), ds_rows = pair_down_first(ds_pair(), key_warp);
      add_pairs<kBlockM / 16, kSplit>(dv_frag, [&](PairFrags<kKeyFrags>& a, int k) { load_pair_rows(a, p_rows, k); },
                                      pair_down_first(dout_pair(stage), 0), power_of_two(dout_exponent - kLiftP), warp_d);
      add_pairs<kBlockM / 16, kSplit>(dk_frag, [&](PairFrags<kKeyFrags>& a, int k) { load_pair_rows(a, ds_rows, k); },
                                      pair_down_first(q_pair(stage), 0), power_of_two(q_exponent + ds_exponent), warp_d);
    } else {
      const auto p_rows = left_rows_of_packed(p_tile(), key_warp), ds_rows = left_rows_of_packed(ds_tile(), key_warp);
      multiply<kBlockM / kMmaDepth, kSplit, kStepsAtATime>(dv_frag, [&](u32 (&a_frag)[kKeyFrags][4], int k) { load_rows(a_frag, p_rows, k); },
                                                           right_rows(dout_tile(stage), 0, warp_d));
      multiply<kBlockM / kMmaDepth, kSplit, kStepsAtATime>(dk_frag, [&](u32 (&a_frag)[kKeyFrags][4], int k) { load_rows(a_frag, ds_rows, k); },
                                                           right_rows(q_tile(stage), 0, warp_d));
    }
  }
  // dQ = dS K of the row fragments from `first` on and the column pairs from `pair` on, kDqWarpsN apart; dS of keys outside of
  // some_keys is 0.
  template <int kM, int kN> DEVICE void multiply_dq(float (&dq_frag)[kM][kN][4], int first, int pair, Span some_keys) const {
    const auto ds_columns = left_columns(ds_tile());
    const auto ds_pair_columns = pair_right_first(ds_pair(), 0);
    clear(dq_frag);
    if constexpr (kPaired)
      add_pairs<kBlockN / 16, kDqWarpsN>(dq_frag, [&](PairFrags<kM>& a, int k) { load_pair_columns(a, ds_pair_columns, k, first); },
                                         pair_down_first(KPair{smem}, 0), power_of_two(k_exponent + ds_exponent), pair);
    else if (!kSkips || kPartFrags == kQueryFrags || some_keys.end - some_keys.begin == kBlockN)
      multiply<kBlockN / kMmaDepth, kDqWarpsN, kStepsAtATime>(
          dq_frag, [&](u32 (&a_frag)[kM][4], int k) { load_columns(a_frag, ds_columns, k, first); }, right_rows(k_tile(), 0, pair));
    else
#pragma unroll 1
      for (int key = some_keys.begin; key < some_keys.end; key += 2 * kMmaDepth)
        multiply<2, kDqWarpsN>(dq_frag, [&](u32 (&a_frag)[kM][4], int k) { load_columns(a_frag, ds_columns, key / kMmaDepth + k, first); },
                               right_rows(k_tile(), key, pair));
  }
};
