// Attention forward: out = softmax(scores of q k^T) v and logsumexp, one block of kBlockM query rows per CTA.
// Assumes unit last strides, 16-byte aligned rows, head_dim and head_dim_v multiples of 8, softmax_scale > 0.
// Stores out [rows, head_dim_v] and logsumexp for every row of every sequence, the empty ones too.
// Grid: kVParts * m_blocks * num_heads_q * batch; kNumWarps warps, each owning kBlockM / kNumWarps rows.
// Where all columns of V do not fit a warp's registers, kVParts CTAs share a query block: each computes its scores, and its own
// columns of out.
#include "bias.cuh"
#include "dropout.cuh"
#include "half_pairs.cuh"
#include "mask.cuh"
#include "mask_tiles.cuh"
#include "product.cuh"

using QTile = Tile<kBlockM, kHeadDim>;
using KTile = Tile<kBlockN, kHeadDim>;
constexpr int kVParts = kHeadDimV > 256 ? 2 : 1, kPartV = kHeadDimV / kVParts;
using VTile = Tile<kBlockN, kPartV>;
// In fp32, where all tiles of a query block are in range of fp16: a pair of fp16 tiles in place of each of these.
using QPair = PairTile<kBlockM, kHeadDim>;
using KPair = PairTile<kBlockN, kHeadDim>;
using VPair = PairTile<kBlockN, kPartV>;

constexpr int kRowsPerWarp = kBlockM / kNumWarps;
using OutTile = Tile<kRowsPerWarp, kPartV>;
constexpr int kMFrags = QueriesDown::kM, kNFrags = QueriesDown::kN, kOutFrags = kPartV / 8;
static_assert(kRowsPerWarp % 16 == 0 && kBlockN % 16 == 0 && (kNumStages == 1 || kNumStages == 2), "tile shape");

// Shared memory: Q | K stages | V stages | bias, later out over all of it | scratch of mask.cuh
constexpr int kKOffset = QTile::kBytes, kVOffset = kKOffset + kNumStages * KTile::kBytes;
constexpr int kBiasOffset = kVOffset + kNumStages * VTile::kBytes, kTilesEnd = kBiasOffset + kBiasTileBytes;
constexpr int kOutBytes = kNumWarps * OutTile::kBytes, kScratchOffset = kTilesEnd > kOutBytes ? kTilesEnd : kOutBytes;
constexpr int kSharedMemory = kScratchOffset + kBlockKeysBytes;

// Q stays in registers where S, O and Q leave room beside the addresses; else it is read from shared memory every time.
constexpr int kAccumulators = kMFrags * (kBlockN + kPartV) / 2;
constexpr bool kQInRegisters = !kIsFp32 && kAccumulators + kMFrags * kHeadDim / 4 <= 168;
constexpr int kQSteps = kQInRegisters ? kHeadDim / kMmaDepth : 1;

constexpr int kLiftP = 7;  // P becomes pairs times 2^kLiftP: it is at most 2^kLag, and fp16 ends at 2^16 and 2^-24

// NaN and Inf in V behind a mask are taken out only when they have shown in out: then the block is computed once more, with care,
// by code of its own, for what it adds to the loop costs a tenth where nothing is to be taken out. In fp32 products outweigh it,
// and pairs hold neither.
constexpr bool kMasks = kHasBounds || kHasMask, kLooksAgain = kMasks && !kIsFp32;

// Which code computes a block: on pairs, and with care for NaN and Inf.
enum Way { kPlainly, kCarefully, kInPairs };
template <Way kWay> DEVICE bool compute_block(const Params& p, u32 block);
// A call, so that its registers are no concern of the other way.
__device__ __noinline__ void compute_in_parts(const Params& p) { compute_block<kMasks ? kCarefully : kPlainly>(p, block_index()); }

// True: it is to be computed once more, with care. The stores are not waited for before that is known.
template <Way kWay> DEVICE bool compute_block(const Params& p, u32 block) {
  constexpr bool kCareful = kWay == kCarefully, kPaired = kWay == kInPairs;
  constexpr i64 kL2Bytes = 16 << 20;  // what even half of a 40 MB L2 holds beside q and out
  const u32 index = block / kVParts;
  const int first_v = (int)(block % kVParts) * kPartV;
  const Position position = kHasBounds ? longest_first<kL2Bytes>(p, index, p.batch * p.num_heads_q, ~0u, rows_at_a_time(p, p.seqlen_k))
                                       : position_of(index, p.m_blocks, p.num_heads_q);
  const int m_block = position.block, head = position.head;
  const Sequence sequence = sequence_of(p, position.batch);
  if (m_block * kBlockM >= sequence.q_length) return false;

  const u32 smem = shared_base();
  const QTile q_smem = {smem};
  const BlockKeys keys = keys_of_block(p, sequence, m_block, smem + kScratchOffset);
  const int n_first = keys.any.begin / kBlockN, n_last = ceil_div(keys.any.end, kBlockN) - 1;

  const auto keys_of_tile = [&](int n) { return Span{n * kBlockN, (n + 1) * kBlockN}; };

  const int kv_head = head / (p.num_heads_q / p.num_heads_kv);
  const Rows<const Element> k_rows = k_of(p, sequence, kv_head).forgotten();
  const Rows<const Element> v_rows = v_of(p, sequence, kv_head).columns_from(first_v).forgotten();
  const int q_rows = sequence.q_length - m_block * kBlockM;

  const auto k_smem = [&](int stage) { return KTile{smem + kKOffset + stage * KTile::kBytes}; };
  const auto v_smem = [&](int stage) { return VTile{smem + kVOffset + stage * VTile::kBytes}; };
  const auto k_pair = [&](int stage) { return KPair{smem + kKOffset + stage * KPair::kBytes}; };
  const auto v_pair = [&](int stage) { return VPair{smem + kVOffset + stage * VPair::kBytes}; };
  const u8* const q_record = record_of<QPair>(p.q_pairs, query_block_offset(p, sequence, head, m_block));
  const auto k_record = [&](int n) { return record_of<KPair>(p.k_pairs, key_block_offset(p, sequence, kv_head, n)); };
  const auto v_record = [&](int n) { return record_of<VPair>(p.v_pairs, key_block_offset(p, sequence, kv_head, n)); };
  // Tiles come as they are, keys no row of this block sees not read; or paired, from records.
  const auto load_q = [&] {
    if constexpr (kPaired) load_pairs(QPair{smem}, q_record);
    else load_tile(q_smem, q_of(p, sequence, head).from(m_block * kBlockM), 0, q_rows, p.head_dim);
  };
  const auto load_k = [&](int n, int stage) {
    const int first = n * kBlockN;
    if constexpr (kPaired) load_pairs(k_pair(stage), k_record(n));
    else load_tile(k_smem(stage), k_rows.from(first), keys.any.begin - first, keys.any.end - first, p.head_dim);
  };
  const auto load_v = [&](int n, int stage) {
    const int first = n * kBlockN;
    if constexpr (kPaired) load_pairs(v_pair(stage), v_record(n));
    else load_tile(v_smem(stage), v_rows.from(first), keys.any.begin - first, keys.any.end - first, p.head_dim_v - first_v);
  };
  if constexpr (kPaired) {
    bool out_of_range = exponent_of<QPair>(q_record) == kOutOfRange;
    for (int n = n_first + thread_index(); n <= n_last; n += kThreads)
      out_of_range |= exponent_of<KPair>(k_record(n)) == kOutOfRange || exponent_of<VPair>(v_record(n)) == kOutOfRange;
    if (sync_block_or(out_of_range)) {
      compute_in_parts(p);
      return false;
    }
  }
  int k_exponent = 0, v_exponent = 0, next_k_exponent = 0, next_v_exponent = 0;
  const auto fetch_exponents = [&](int n) {
    next_k_exponent = exponent_of<KPair>(k_record(n));
    next_v_exponent = exponent_of<VPair>(v_record(n));
  };

  // This thread's first element of a C fragment
  const int warp_row = warp_index() * kRowsPerWarp;
  const int i_first = m_block * kBlockM + QueriesDown::row(), j_lane = QueriesDown::column();
  // By a window alone, warps at the top of a block see other keys than those at its bottom.
  constexpr bool kWarpsDiffer = kHasWindow && !kHasKeyRanges;
  const BlockKeys warp_keys = kWarpsDiffer ? keys_of_rows(sequence, m_block * kBlockM + warp_row, kRowsPerWarp) : keys;

  const Scores scores = scores_of(p, sequence, head);
  const Dropout dropout = dropout_of(p, position.batch, head);
  const float scale_log2 = kTransformsScores ? 1.f : scores.scale_log2;

  // Bias of this warp's rows; one tile, filled again as soon as the warp has read it.
  const Bias bias = bias_of(p, sequence, head);
  const BiasTile bias_smem = {smem + kBiasOffset};
  const auto load_next_bias = [&](int n) {
    load_bias<kRowsPerWarp, 32>(bias_smem, bias, sequence, m_block * kBlockM, n * kBlockN, warp_row, lane_index());
  };

  // The next key block to visit, downwards from n; a tile the boolean mask hides entirely is skipped.
  MaskTiles<QueriesDown> mask_tiles;
  if constexpr (kHasMask) mask_tiles.open(p, position.batch, head, m_block);
  const auto find_block = [&](int n) {
    if constexpr (kHasMask) {
      for (; n >= n_first; --n) {
        mask_tiles.look(p, n);
        if (mask_tiles.sees(n)) break;
      }
    }
    return n;
  };
  bool hidden = false, next_hidden = false;  // whether the mask hides some of a tile
  TileBits<QueriesDown> mask_bits, next_mask_bits;
  const auto fetch_mask = [&](int n) {
    if constexpr (kHasMask) {
      next_hidden = mask_tiles.hides(n);
      if (next_hidden) mask_tiles.load(next_mask_bits, p, n);
    }
  };

  float out_frag[kMFrags][kOutFrags][4];  // [rows of the warp, kPartV]
  OnlineSoftmax<kMFrags> softmax;
  clear(out_frag);
  bool first = true;
  int n = find_block(n_last), stage = 0;
  if (n >= n_first) {
    load_q();
    load_k(n, 0);
    if constexpr (kNumStages == 2) load_v(n, 0);
    if constexpr (kHasBias) load_next_bias(n);
    cp_async_commit();
    fetch_mask(n);
    if constexpr (kPaired) fetch_exponents(n);
  }

  const Window16<QTile> q_window = left_rows(q_smem, warp_row);
  const auto q_pair_rows = pair_down_first(QPair{smem}, warp_row);
  u32 q_frag[kQSteps][kMFrags][4];
  const auto load_q_frag = [&](u32 (&a_frag)[kMFrags][4], int k) {
#pragma unroll
    for (int m = 0; m < kMFrags; ++m) {
      if constexpr (kQInRegisters) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a_frag[m][e] = q_frag[k][m][e];
      } else {
        ldmatrix_x4(a_frag[m], q_window.at(m * 16, k * 2));
      }
    }
  };

  while (n >= n_first) {
    cp_async_wait<0>();
    sync_block();  // K (with two stages V too) has landed for all; nobody reads the buffers of the block before any more
    if constexpr (kQInRegisters) {
      if (first) {
#pragma unroll
        for (int k = 0; k < kQSteps; ++k)
#pragma unroll
          for (int m = 0; m < kMFrags; ++m) ldmatrix_x4(q_frag[k][m], q_window.at(m * 16, k * 2));
      }
    }
    first = false;
    if constexpr (kHasMask) hidden = next_hidden, mask_bits = next_mask_bits;
    if constexpr (kPaired) k_exponent = next_k_exponent, v_exponent = next_v_exponent;
    const int n_next = find_block(n - 1);
    if constexpr (kNumStages == 2) {
      if (n_next >= n_first) load_k(n_next, stage ^ 1), load_v(n_next, stage ^ 1);
    } else {
      load_v(n, 0);
    }
    cp_async_commit();
    if (n_next >= n_first) {
      fetch_mask(n_next);
      if constexpr (kPaired) fetch_exponents(n_next);
    }

    u32 non_finite = 0;
    const auto take_out_of_v = [&] {
      if constexpr (kCareful) {
        if ((keys.need_mask(keys_of_tile(n)) || hidden) && holds_non_finite(v_smem(stage)))
          non_finite = take_out_non_finite<2 * kNFrags>(v_smem(stage), [&](int c) { return (c >> 1) * 8 + j_lane + (c & 1); });
      }
    };
    if constexpr (kNumStages == 2) take_out_of_v();

    // S = Q K^T
    float s_frag[kMFrags][kNFrags][4];  // [rows of the warp, kBlockN]
    if constexpr (kPaired) {
      multiply_pairs_transposed<kHeadDim / 16>(
          s_frag, [&](PairFrags<kMFrags>& a, int k) { load_pair_rows(a, q_pair_rows, k); }, pair_right_first(k_pair(stage), 0),
          power_of_two(exponent_of<QPair>(q_record) + k_exponent));
    } else {
      clear(s_frag);
      multiply_transposed<kHeadDim / kMmaDepth, kHalfPairs ? 32 : 64>(s_frag, load_q_frag, right_first(k_smem(stage), 0, 0));
    }

    if constexpr (kNumStages == 1) {
      cp_async_wait<0>();
      sync_block();  // V has landed for all; nobody reads K any more
      take_out_of_v();
      if (n_next >= n_first) load_k(n_next, 0);
      cp_async_commit();
    }

    Cap cap = {};
    if constexpr (kCapsInSoftmax)
      cap = cap_of(s_frag, scores);
    else if constexpr (kTransformsScores)
      transform(s_frag, sequence, scores, i_first, n * kBlockN + j_lane, [&](int m, int half, int f) {
        return bias_pair(bias_smem, QueriesDown::row() + m * 16 + half * 8, j_lane + f * 8);
      });
    if constexpr (kHasBias) {
      sync_warp();  // all lanes have read the warp's rows of the bias
      if (n_next >= n_first) load_next_bias(n_next);
      cp_async_commit();
    }
    if (warp_keys.need_mask(keys_of_tile(n))) apply_mask(s_frag, p, sequence, non_finite, i_first, n * kBlockN + j_lane);
    else if (kCareful && non_finite != 0) blot_out(s_frag, non_finite);
    if (hidden) apply_mask_bits(s_frag, mask_bits);

    // P = exp2(S - row_max), O rescaled
    if constexpr (kCapsInSoftmax) softmax.update(s_frag, out_frag, scale_log2, cap);
    else softmax.update(s_frag, out_frag, scale_log2);

    // O += P V
    if constexpr (kHasDropout && kIsFp32) drop_scores(s_frag, dropout, i_first, n * kBlockN + j_lane);
    if constexpr (kPaired) {
      PairFrags<kMFrags> p_frag[kNFrags / 2];
      split_accumulators(p_frag, s_frag, power_of_two(kLiftP));
      add_pairs<kNFrags / 2>(out_frag, [&](PairFrags<kMFrags>& a, int k) { a = p_frag[k]; }, pair_down_first(v_pair(stage), 0),
                             power_of_two(v_exponent - kLiftP));
    } else {
      U32x4 words[(kMFrags + 1) / 2];
      multiply<kBlockN / kMmaDepth>(out_frag, [&](u32 (&p_frag)[kMFrags][4], int k) {
        load_packed(p_frag, s_frag, k);
        if constexpr (kHasDropout && !kIsFp32) drop(p_frag, words, dropout, i_first, n * kBlockN + j_lane, k);
      }, right_rows(v_smem(stage), 0));
    }
    if constexpr (kNumStages == 2) stage ^= 1;
    n = n_next;
  }
  const bool again = kLooksAgain && !kCareful && any_non_finite(out_frag);

  float sink_log2 = negative_infinity();
  if constexpr (kHasSinks) sink_log2 = ld_global(p.sinks + head) * kLog2e;
  float logsumexp[kMFrags][2];
  softmax.finalize(logsumexp, out_frag, scale_log2, sink_log2, dropout.keep);

  float* logsumexp_ptr = p.logsumexp + statistics_offset(p, sequence, head);
#pragma unroll
  for (int m = 0; m < kMFrags; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = i_first + m * 16 + half * 8;
      if (p.logsumexp && first_v == 0 && j_lane == 0 && i < sequence.q_length) st_global(logsumexp_ptr + i, logsumexp[m][half]);
    }

  // Where a warp's rows of out fit where its rows of Q were, which nobody else reads, it stores them without waiting for others.
  constexpr bool kOutInQ = kPartV <= kHeadDim && !kPaired;
  const OutTile out_smem = {smem + warp_row * (kOutInQ ? QTile::kPitch : OutTile::kPitch)};
  if constexpr (kOutInQ) sync_warp();  // all lanes have read the warp's rows of Q
  else sync_block();  // out overwrites K and V: nobody reads them any more
  store_accumulators(out_smem, 0, 0, out_frag);
  sync_warp();  // the warp's rows of out are in shared memory
  store_tile<32>(out_smem, out_of(p, sequence, head).columns_from(first_v).from(m_block * kBlockM + warp_row), q_rows - warp_row,
                 p.head_dim_v - first_v, lane_index());
  return kLooksAgain && !kCareful && sync_block_or(again);
}

KERNEL(kThreads, 1) attention_forward_sm80(GRID_CONSTANT Params p) {
  const bool again = compute_block<kHalfPairs ? kInPairs : kMasks && kIsFp32 ? kCarefully : kPlainly>(p, block_index());
  // Forgotten, because what the compiler would keep through the loop for the second time takes registers from it.
  if constexpr (kLooksAgain) {
    if (again) compute_block<kCarefully>(p, forget(block_index()));
  }
}
