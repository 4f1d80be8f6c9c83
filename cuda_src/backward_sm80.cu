// Attention backward: dk and dv of one block of kBlockN keys per CTA, and its part of dq, added to dq_accum in fp32.
// Assumes backward_delta has run, unit last strides, 16-byte aligned rows, head_dim and head_dim_v multiples of 8.
// Stores dk and dv for every row of k and v, unused ones (seqused_k) as zero; adds to dq_accum and dbias_accum.
// Grid: n_blocks * num_heads_kv * batch. A CTA goes through the query heads of its group and their query blocks, so dk and dv
// need no atomics. The scores are computed transposed, S^T = K Q^T: a warp owns 16 kKeyFrags keys, and its P^T and dS^T are
// A fragments of dV = P^T dO and dK = dS^T Q as they are. Only dS^T goes through shared memory, for dQ = dS K.
// Where dK and dV of 16 keys do not fit a warp's registers (kSplit = 2), two warps share the keys: each computes half of the
// queries' columns of S^T, P^T goes through shared memory too, and each keeps half of the columns of dK and dV.
#include "backward_products.cuh"
#include "query_blocks.cuh"

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
  const int first_key = position.block * kBlockN, group = p.num_heads_q / p.num_heads_kv;
  const Sequence sequence = sequence_of(p, position.batch);
  if (first_key >= sequence.k_rows) return;
  QueryBlocks blocks(p, sequence, position, group);

  const u32 smem = shared_base();
  // Of S^T this warp's and this thread's first element, within the tile
  const int key_warp = first_key_of_warp(), key_lane = key_warp + (lane_index() >> 2), j_first = first_key + key_lane;
  const int query_warp = first_query_of_warp(), query_lane = KeysDown::column();

  // ---- query blocks, one after the other ----

  Products<kPaired> products(p, sequence, position.head, position.block, smem);
  if constexpr (kPaired) {
    if (products.out_of_range(position.head * group, group, blocks.m_blocks)) return backward_in_parts(p);
  }
  const auto load_queries = [&](QueryBlock b, int stage) { products.load_queries(blocks.head_of(b), b.m_block, stage); };
  QueryRow row;
  TileBits<KeysDown> mask_bits, next_mask_bits;
  // The whole tile at once, as soon as all have read the one before.
  const BiasTile bias_smem = {smem + kBiasOffset};
  const auto load_next_bias = [&](QueryBlock b) {
    const Bias bias = bias_of(p, sequence, blocks.head_of(b));
    load_bias<kBlockM, kThreads>(bias_smem, bias, sequence, b.m_block * kBlockM, first_key, 0, thread_index());
  };

  float dk_frag[kKeyFrags][kDkFrags][4], dv_frag[kKeyFrags][kDvFrags][4];  // [keys of the warp, head_dim / kSplit]
  clear(dk_frag);
  clear(dv_frag);
  QueryBlock block = blocks.find({0, blocks.m_blocks.begin}), before = block;
  if (blocks.contains(block)) {
    products.load_keys(position.head, first_key);
    products.fetch_exponents(blocks.head_of(block), block.m_block);
    load_queries(block, 0);
    if constexpr (kHasBias) load_next_bias(block);
    cp_async_commit();
    if constexpr (kHasMask) blocks.fetch_mask(next_mask_bits, block);
    row.fetch(p, sequence, blocks.head_of(block), block.m_block);
    row.put(smem);
  }

  // Where NaN or Inf is taken out of K, V becomes NaN: then dP and dS are NaN in the rows that see such a key, and so are their dQ and
  // its dK. The loop has nothing to do for that; dV follows at the end. By bounds K is looked through before the loop. A boolean
  // mask's loop came out 5% slower so: there the scores of the first tile that hides something are looked at, where NaN and Inf show.
  constexpr bool kLooks = kMasks && !kPaired, kLooksLater = kLooks && kHasMask;
  u32 non_finite = 0;  // this thread's keys taken out of K
  const auto take_out = [&] {
    const auto key_of = [&](int c) { return key_lane + (c >> 1) * kKeyStep + (c & 1) * 8; };
    non_finite = take_out_non_finite<2 * kKeyFrags>(products.k_tile(), key_of);
    if (share_of_warp() == 0 && (lane_index() & 3) == 0) {
#pragma unroll
      for (int c = 0; c < 2 * kKeyFrags; ++c)
        if (non_finite >> c & 1) st_shared(products.v_tile().address(key_of(c), 0), kNaNs);
    }
  };
  bool looked = false, found = false;
  if constexpr (kLooks && !kLooksLater) {
    if (blocks.contains(block)) {
      cp_async_wait<1>();
      sync_block();  // K is there for all
      if (holds_non_finite(products.k_tile())) {
        cp_async_wait<0>();  // and V: take_out has barriers before it stores
        take_out();
      }
    }
  }

  int stage = 0;
  bool first_round = true;
  while (blocks.contains(block)) {
    cp_async_wait<0>();
    sync_block();  // Q, dO and statistics are there for all; nobody reads the other stage or dS^T, all of dQ before is added
    if constexpr (kDeterministic) {
      if (!first_round) blocks.pass_turn(before);
    }
    products.take_exponents();
    first_round = false;
    bool masked = blocks.masked;
    if constexpr (kHasWindow && !kHasKeyRanges && !kHasMask) {
      const BlockKeys keys = keys_of_rows(sequence, block.m_block * kBlockM, kBlockM);
      masked = keys.need_mask({first_key + key_warp, first_key + key_warp + (kKeyFrags - 1) * kKeyStep + 16});
    }
    if constexpr (kHasMask) {
      mask_bits = next_mask_bits;
      if (blocks.bounded) blocks.hide_unseen(mask_bits, block, smem);
    }
    const QueryBlock next = blocks.find({block.head, block.m_block + 1});
    if (blocks.contains(next)) {
      if constexpr (kHasMask) blocks.fetch_mask(next_mask_bits, next);
      if constexpr (kNumStages == 2) load_queries(next, stage ^ 1);
      row.fetch(p, sequence, blocks.head_of(next), next.m_block);
      products.fetch_exponents(blocks.head_of(next), next.m_block);
    }
    cp_async_commit();

    const int head = blocks.head_of(block);
    const Scores scores = scores_of(p, sequence, head);
    const Dropout dropout = dropout_of(p, position.batch, head);
    // A part of the queries and kM fragments of the warp's keys, from the `first` on
    const auto visit_part = [&](auto mask, auto fragments, int part, int first) {
      constexpr int kM = fragments.kValue;
      const int column_warp = query_warp + part * 8, column = query_lane + part * 8, i_first = block.m_block * kBlockM + column;

      // S^T = K Q^T, dP^T = V dO^T
      float s_frag[kM][kPartFrags][4], dp_frag[kM][kPartFrags][4];  // [keys, queries]
      products.multiply_scores(s_frag, stage, column_warp, first);
      products.multiply_dp(dp_frag, stage, column_warp, first);

      if constexpr (kLooksLater && mask.kOn) {
        if (!looked) found |= any_non_finite(s_frag);
      }

      if constexpr (kHasSoftcap) apply_tanh(s_frag, scores);
      float* dbias = nullptr;
      if (kHasBias && p.dbias_accum) dbias = bias_gradient_tile(p, position.batch, head, position.block, block.m_block);
      BiasColumns<kM> bias;

      // P = exp2(S - logsumexp), dS = P (dP - delta)
      ColumnDraws<kM> draws;
#pragma unroll
      for (int n = 0; n < kPartFrags; ++n) {
        const F32x2 logsumexp = logsumexp_of_rows(smem, column + n * 8);
        const F32x2 delta = delta_of_rows(smem, column + n * 8);
        const int row_group = (query_warp >> 3) + part + n;  // of 8 queries
        if constexpr (kHasDropout) {
          if (n == 0 || (part + n) % 4 == 0) draws.draw(dropout, i_first + n * 8, j_first);
        }
        U32x4 ranges = {};
        if constexpr (mask.kOn && kHasKeyRanges && !kHasMask) ranges = ranges_of_rows(smem, column + n * 8);
        if constexpr (kHasBias) {
          if (n % 2 == 0) bias.load(bias_smem, query_warp + (part + n) * 8, key_warp);
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          float dbias_frag[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int half = e >> 1, i = i_first + n * 8 + (e & 1), j = j_first + (first + m) * kKeyStep + half * 8;
            float& s = s_frag[m][n][e];
            float& dp = dp_frag[m][n][e];
            float derivative = 1.f;
            float score = s * scores.scale_log2;
            if constexpr (kTransformsScores)
              score = score_log2(sequence, scores, s, kHasBias ? bias.value(m, n & 1, e) : 0.f, i, j, derivative);
            s = exp2_approx(score - (e & 1 ? logsumexp.y : logsumexp.x));
            if constexpr (kHasDropout) {  // s holds P / (1 - dropout_p), delta as much less
              const bool right = kM == 1 ? j_first >> 4 & 1 : m;
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
      products.add_part(dv_frag, dk_frag, s_frag, dp_frag, stage, column_warp, part * 8, first);
    };
    // One part of the queries after the other; straight-line code, so that one part's exp2 can run beside another's products
    const auto visit = [&](auto mask) {
      if constexpr (!mask.kOn || !kHasBounds || kHasMask || kSplit > 1 || kIsFp32) {
#pragma unroll kPartsAtATime
        for (int part = 0; part < kQueryFrags; part += kPartFrags) visit_part(mask, Number<kKeyFrags>{}, part, 0);
      } else {
        // By bounds few tiles are masked: short code for them leaves registers to the others. Keys that no query of the part sees
        // are left out: their dS is 0, their dK and dV stay.
#pragma unroll 1
        for (int part = 0; part < kQueryFrags; part += kPartFrags) {
          const int column_warp = query_warp + part * 8;
          const BlockKeys keys = keys_of_rows(sequence, block.m_block * kBlockM + column_warp, kPartFrags * 8);
          bool seen[kKeyFrags / kNeighbours], all = true;
#pragma unroll
          for (int first = 0; first < kKeyFrags; first += kNeighbours) {
            const int key = first_key + key_warp + first * kKeyStep;
            all &= seen[first / kNeighbours] = !kSkips || vote_all(keys.sees({key, key + 16 * kNeighbours}));
          }
          if (all) visit_part(mask, Number<kKeyFrags>{}, part, 0);
          else
#pragma unroll
            for (int first = 0; first < kKeyFrags; first += kNeighbours) {
              if (kDealsKeys && seen[first / kNeighbours]) visit_part(mask, Number<kNeighbours>{}, part, first);
              else products.template store_no_ds<kNeighbours>(column_warp, first);
            }
        }
      }
    };
    if (masked) visit(Switch<true>{}), looked = true;
    else visit(Switch<false>{});

    if constexpr (kSplit > 1) {
      sync_block();  // P^T and dS^T are complete
      if constexpr (kHasBias) {
        if (blocks.contains(next)) load_next_bias(next);
        cp_async_commit();
      }
      products.add_shared(dv_frag, dk_frag, stage);
    }
    if constexpr (kDeterministic) blocks.await_turn(block);
    // dS^T is complete, Q, dO and statistics are free; deterministic: our turn has come, for all threads
    if (!kLooksLater || !masked) sync_block();
    else if (sync_block_or(found)) take_out(), found = false;

    if constexpr (kHasBias && kSplit == 1) {
      if (blocks.contains(next)) load_next_bias(next);
      cp_async_commit();
    }
    if (blocks.contains(next)) {
      if constexpr (kNumStages == 1) load_queries(next, 0), cp_async_commit();
      row.put(smem);
    }

    // dQ += dS K
    const int dq_m = warp_index() / kDqWarpsN * kDqRowFrags, dq_n = warp_index() % kDqWarpsN;
    Span some_keys = {0, kBlockN};  // that some query of this warp's sees: dS of the others is 0
    if constexpr (kSkips && kPartFrags < kQueryFrags) {
      const Span any = keys_of_rows(sequence, block.m_block * kBlockM + dq_m * 16, kDqRowFrags * 16).any;
      some_keys = {larger(any.begin - first_key, 0) / (2 * kMmaDepth) * (2 * kMmaDepth), smaller(any.end - first_key, kBlockN)};
    }
    float* const dq_accum = p.dq_accum + query_block_offset(p, sequence, head, block.m_block) * (kBlockM * kHeadDim);
    float* const first_fragment = dq_accum + (dq_m * (kHeadDim / 8) + dq_n * 2) * 128;
#pragma unroll 1
    for (int pair = 0; pair < kDqPairs; pair += kPassPairs) {
      float dq_frag[kDqRowFrags][kPassPairs * 2][4];
      products.multiply_dq(dq_frag, dq_m, pair * kDqWarpsN + dq_n, some_keys);
#pragma unroll
      for (int m = 0; m < kDqRowFrags; ++m)
#pragma unroll
        for (int n = 0; n < kPassPairs * 2; ++n) {
          const int column = (pair + (n >> 1)) * kDqWarpsN * 2 + (n & 1);
          add_fragment(first_fragment + (m * (kHeadDim / 8) + column) * 128, dq_frag[m][n]);
        }
    }

    if constexpr (kNumStages == 2) stage ^= 1;
    before = block;
    block = next;
  }

  // ---- dk, dv ----

  sync_block();  // nobody reads K and V any more, all of dQ is added
  if constexpr (kDeterministic) {
    if (!first_round) blocks.pass_turn(before);
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
  store_accumulators<kSplit>(products.k_tile(), key_warp, share_of_warp(), dk_frag, kKeyStep);
  store_accumulators<kSplit>(products.v_tile(), key_warp, share_of_warp(), dv_frag, kKeyStep);
  sync_block();  // dK and dV are in shared memory
  const int rows = sequence.k_rows - first_key;
  store_tile<kThreads>(products.k_tile(), dk_of(p, sequence, position.head).from(first_key), rows, p.head_dim, thread_index());
  store_tile<kThreads>(products.v_tile(), dv_of(p, sequence, position.head).from(first_key), rows, p.head_dim_v, thread_index());
}

KERNEL(kThreads, 1) attention_backward_sm80(GRID_CONSTANT Params p) { backward<kHalfPairs>(p); }
