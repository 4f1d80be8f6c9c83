// Attention forward for Hopper: out = softmax(scores of q k^T) v and logsumexp, warp-specialised and persistent.
//
// Warpgroup 0 produces: one of its warps takes tiles (kBlockM query rows of a head) from a counter and loads Q, K and V
// by TMA. It runs converged, an elected lane issues: the compiler then knows addresses to be uniform. One thread alone took a
// loop of ten instructions a copy to prove it, which consumers waited for (2 to 4% in all). Every other warpgroup consumes: it owns 64 of the rows. Over the key blocks n of a tile, last one first, it
// issues
//     S_n = Q K_n^T   and   O += P_{n+1} V_{n+1}
// together, and does the softmax of S_n while the products of the other warpgroups keep the tensor cores busy. Warpgroups
// issue in turns. A wgmma holds up its own warps until it has nearly run (measured: four of 64 clocks take 275 to issue), so
// a warpgroup's own product hides little of its softmax: three of 64 rows beat two with longer blocks of keys. P V in pieces
// under the exponentials of one warpgroup, tried instead: 5 to 10% slower; the first block of keys first: causal head dim 256
// 1% faster, 64 2% slower.
//
// A tile's ends, where warpgroups work at the same things, are short: the producer says which keys each sees and has Q there before a
// tile begins, the row sums are finished under the last product, and the copy engine stores O. The last product of a tile and the
// first scores of the next issued together, tried instead: 1 to 5% slower.
//
// In 8 bits V comes transposed, in records that a kernel beforehand wrote (values_sm90.cuh); factors of q, k and v per key head go
// into the scale of the scores and of O, which is stored in bf16.
//
// Assumes what the tensor maps of params_sm90.cuh ask for, 16-byte aligned rows of out, softmax_scale > 0. Stores out
// [rows, head_dim_v] and logsumexp for every row of every sequence, the empty ones too.
// Grid: at most one CTA per multiprocessor, at most one per tile.
#include "forward_sm90.cuh"
#include "packed_sm90.cuh"
#include "recompute_sm90.cuh"

// ---- producer: one warp ----

// Rows by which tiles begin early, in whole warpgroups. Where causal rows see the more keys the later they are, warpgroups
// without rows belong into the first tile, which is the shortest, not into the last (head dim 128 at 2048: 6% less work).
DEVICE int missing_rows(const Sequence& s) {
  return kHasWindow ? (ceil_div(s.q_length, kBlockM) * kBlockM - s.q_length) / 64 * 64 : 0;
}

// Heads that are worked on together: as many as keep K and V in this much of the 50 MB of L2 (8192 tokens, causal, head dim
// 256: 779 TFLOP/s, with all heads at once 754).
constexpr i64 kL2Bytes = 32 << 20;
// Short sequences: two tiles a CTA. With more heads a section begins with tiles that all wait for memory, and ends with tiles that find
// K and V in L2 (512 tokens, causal, head dim 128: 340 TFLOP/s, as many as fit 318; at 2048 no faster, at 8192 1% slower).
constexpr int kShortKeys = 1024;

// The next tile is claimed, and its Q asked for, when this many blocks of a tile are still to be loaded: Q comes from memory, and
// consumers that are done with a tile have nothing else to do (one or three instead: at most 1% slower). Claimed when its predecessor
// began, a tile, which may be long, would wait while other CTAs run out of work (causal, head dim 256, 2048 tokens: 616 TFLOP/s
// instead of 633).
constexpr int kClaimedAhead = 2;

DEVICE void produce(const ParamsSm90& params, Shared smem, Rings rings) {
  const Params& p = params.common;
  const int rows = p.num_heads_q * (p.cu_seqlens_q ? 1 : p.batch);  // of m_blocks tiles each
  const u32 tiles = (u32)p.m_blocks * rows;
  const u32 together = p.seqlen_k <= kShortKeys && !p.cu_seqlens_q ? 2 * grid_size() : tiles;  // tiles of a section, at most
  u32 index = block_index();
  const auto take_tile = [&] {
    return (u32)uniform(lane_index() == 0 ? (int)(atomic_add_global(params.tile_counters, 1) + grid_size()) : 0);
  };

  // What loads of one tile need: where its rows begin, which head and which row of the batch.
  struct Source {
    int row, head, batch;
  };
  const auto queries_of = [&](u32 slot) -> Source {
    const Work work = ld_shared<Work>(slot);
    const int row = (int)work.sequence.q_start + work.first_row;
    return {uniform(row), uniform(work.head), uniform(p.cu_seqlens_q ? 0 : work.sequence.batch)};
  };
  const auto keys_of = [&](u32 slot) -> Source {
    const Work work = ld_shared<Work>(slot);
    const int head = work.head / (p.num_heads_q / p.num_heads_kv);
    return {uniform((int)work.sequence.k_start), uniform(head), uniform(p.cu_seqlens_k ? 0 : work.sequence.batch)};
  };
  const auto load_q = [&](Source q, int consumer) {
    rings.q.wait_empty();
    if (elect()) smem.q(rings.q.stage()).load(&params.q, rings.q.full(), q.row + consumer * 64, q.head, q.batch);
    rings.q.advance();
  };
  const auto load_k = [&](Source k, int n) {
    rings.k.wait_empty();
    if (elect()) smem.k(rings.k.stage()).load(&params.k, rings.k.full(), k.row + n * kBlockN, k.head, k.batch);
    rings.k.advance();
  };
  const auto load_v = [&](u32 slot, Source k, int n) {
    rings.v.wait_empty();
    const VTile v_smem = smem.v(rings.v.stage());
    if constexpr (kIsE4m3) {
      if (elect()) {
        mbarrier_arrive_expect_tx(rings.v.full(), kValueBytes);
        const int record = value_record_of(p, ld_shared<Work>(slot).sequence, n, k.head);
        bulk_load(v_smem.base, value_record(p, record), kValueBytes, rings.v.full());
      }
    } else {
      if (elect()) v_smem.load(&params.v, rings.v.full(), k.row + n * kBlockN, k.head, k.batch);
    }
    rings.v.advance();
  };
  // Publishes the next tile with rows, or that there is none, and loads as much of its Q as fits beside that of the tile before.
  const auto claim = [&] {
    Work work = {};
    work.head = -1;
    for (; index < tiles; index = take_tile()) {
      Position position = kHasWindow ? longest_first<kL2Bytes>(p, index, rows, together)
                                     : position_of(index, p.m_blocks, p.num_heads_q);
      if (p.cu_seqlens_q) position = in_sequence(position, p.cu_seqlens_q, kBlockM, p.batch);
      const Sequence s = sequence_of(p, position.batch);
      const int first_row = position.block * kBlockM - missing_rows(s);
      if (first_row >= s.q_length) continue;
      const BlockKeys keys = keys_of_rows(p, s, larger(first_row, 0), first_row + kBlockM);
      work = {s, first_row, position.head, blocks_of(keys)};
      break;
    }
    rings.work.wait_empty();  // every consumer has read what was there
    const u32 slot = smem.work(rings.work.stage());
    if (elect()) st_shared(slot, work);
    if (lane_index() < kConsumers) {  // a lane for a consumer, none of which divides between two tiles
      const int first = work.first_row + lane_index() * 64;
      const BlockKeys keys = keys_of_rows(p, work.sequence, first, first + 64);
      st_shared(smem.own(rings.work.stage(), lane_index()), OwnKeys{blocks_of(keys), keys.all});
    }
    sync_warp();  // written by and for all lanes
    if (elect()) mbarrier_arrive(rings.work.full());
    rings.work.advance();
    if (work.head < 0) return;
    const Source q = queries_of(slot);
#pragma unroll
    for (int consumer = 0; consumer < kQStages - kConsumers; ++consumer) load_q(q, consumer);
  };

  claim();
  for (u32 tile = 0; uniform(ld_shared<Work>(smem.work(tile % 2)).head) >= 0; ++tile) {
    const u32 slot = smem.work(tile % 2);
    const Span blocks = uniform(ld_shared<Work>(slot).blocks);
    Source keys = keys_of(slot);
    int n = blocks.end - 1;
    if (n >= blocks.begin) load_k(keys, n);
    // The rest of Q waits for the last scores of the tile before, or for its O to be stored.
#pragma unroll
    for (int consumer = kQStages - kConsumers; consumer < kConsumers; ++consumer) load_q(queries_of(slot), consumer);
    const int claimed_at = larger(smaller(blocks.begin + kClaimedAhead, n) - 1, blocks.begin);
    for (; n > claimed_at; --n) {
      load_k(keys, n - 1);
      load_v(slot, keys, n);
    }
    index = take_tile();
    claim();
    for (; n >= blocks.begin; --n) {
      if (n > blocks.begin) load_k(keys, n - 1);
      load_v(slot, keys, n);
    }
  }

  // The last CTA to get here leaves the counters as it found them.
  if (lane_index() == 0 && atomic_add_global(params.tile_counters + 1, 1) == grid_size() - 1) {
    st_global(params.tile_counters, 0u);
    st_global(params.tile_counters + 1, 0u);
  }
}

// ---- consumers ----

// Maxima move in a tile's first blocks. Past them P is computed before anybody has looked for a larger score, which takes
// registers for S beside P (TFLOP/s at 16384 tokens, full / causal: head dim 64 612 / 561 instead of 535 / 539, head dim 128
// 729 / 701 instead of 711 / 687; no gain at 256). What a thread computes is slow while products run, whatever its order:
// exponentials in groups, sums and packing a group behind, were no faster.
// In 8 bits it is 7 to 17% slower. There one exponential of four from products (a polynomial) instead of the unit for them is 1 to
// 14% slower; exponentials in S while P V runs are 4 to 7% faster with two consumers at head dims 128 and 192, not with three
// consumers, causal or at 256.
constexpr bool kSpeculates = kHeadDim <= 128 && !kTransformsScores && !kIsE4m3;
constexpr int kUnsettledBlocks = 3;  // after the first

// This thread's first row of the accumulators, of the 64 of its warpgroup; the second is 8 below.
DEVICE int row_of_thread() { return (warp_index() & 3) * 16 + (lane_index() >> 2); }

// Rows of V behind the last key hold other keys (of the next sequence, or not in use): p = 0 there, but 0 * NaN is not 0.
DEVICE void clear_tail(VTile v_smem, int first_row) {
  constexpr int kChunks = 8 * VTile::kSlabs;
  for (int copy = thread_index() - 128 + first_row * kChunks; copy < kBlockN * kChunks; copy += kConsumers * 128) {
    const int row = copy / kChunks, chunk = copy % kChunks;
    const u32 address = v_smem.base + (chunk >> 3) * VTile::kSlabBytes + row * VTile::kPitch + (chunk & 7) * 16;
    st_shared(address, U32x4{0, 0, 0, 0});
  }
  fence_proxy_async();
  barrier_sync(kAllConsumers, kConsumers * 128);  // cleared for the wgmma of all
}

DEVICE void consume(const ParamsSm90& params, Shared smem, Rings rings, int consumer) {
  const Params& p = params.common;
  const u32 q_operand = smem.q(0).operand().low, k_operand = smem.k(0).operand().low, v_operand = smem.v(0).operand().low;

  // One arrival a warp, after all of its lanes.
  const auto release = [&](u32 empty) {
    sync_warp();
    if (lane_index() == 0) mbarrier_arrive(empty);
  };
  const auto release_next = [&](auto& ring) {
    release(ring.empty());
    ring.advance();
  };
  const auto take_turn = [&] { barrier_sync(kTurn + consumer, 256); };
  const auto pass_turn = [&] { barrier_arrive(kTurn + (consumer + 1) % kConsumers, 256); };
  float scale_log2 = kTransformsScores ? 1.f : p.softmax_scale * kLog2e;
  if (consumer == kConsumers - 1) pass_turn();  // the first turn is that of consumer 0

  for (rings.q.position = consumer;; rings.q.position += kConsumers, rings.work.advance()) {
    rings.work.wait_full();
    const u32 slot = smem.work(rings.work.stage());
    if (uniform(ld_shared<Work>(slot).head) < 0) break;
    const Operand q{q_operand + rings.q.stage() * (kQStageBytes >> 4)};
    if constexpr (kIsE4m3 && !kTransformsScores)
      scale_log2 = score_scale(p, ld_shared<Work>(slot).sequence.batch, ld_shared<Work>(slot).head) * kLog2e;

    float o_frag[kOutputs];   // O, [64, kHeadDimV] a warpgroup
    u32 p_frag[kScores / kInRegister];  // P of the block before, the A operand of P V
    LaggingSoftmax softmax;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o_frag[i] = 0.f;

    // What is rarely needed is read from `slot` when it is: the main loop has no registers to spare.
    const auto score = [&](float (&s_frag)[kScores], int n, bool masked) {
      if (!kTransformsScores && !masked) return;
      const Work work = ld_shared<Work>(slot);
      const int i = work.first_row + consumer * 64 + row_of_thread(), j = n * kBlockN + (lane_index() & 3) * 2;
      const Sequence& s = work.sequence;
      if constexpr (kTransformsScores) transform<kHeadDim <= 128>(fragments(s_frag), s, scores_of(p, s, work.head), i, j);
      if (!masked) return;
      Span columns[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Span keys = keys_of(p, s, smaller(i + half * 8, s.q_length - 1));
        columns[half] = {keys.begin - j, keys.end - j};
      }
      if (kHasWindow && p.window_left >= 0) hide<true>(s_frag, columns);
      else hide<false>(s_frag, columns);
    };

    const auto issue_scores = [&](float (&s_frag)[kScores]) {
      issue_multiply_transposed<QTile, KTile>(s_frag, q, Operand{k_operand + rings.k.stage() * (KTile::kBytes >> 4)});
    };
    const auto issue_output = [&] {
      issue_values<VTile>(o_frag, p_frag, {v_operand + rings.v.stage() * (VTile::kBytes >> 4)});
    };

    // First block of this warpgroup: scores alone.
    const auto begin = [&](int n, bool masked) {
      float s_frag[kScores], factor[2];
      rings.k.wait_full();
      take_turn();
      wgmma_fence();
      issue_scores(s_frag);
      pass_turn();
      wgmma_wait<0>();
      pin(s_frag);
      release_next(rings.k);
      score(s_frag, n, masked);
      softmax.grow(factor, s_frag, scale_log2);
      softmax.exponentiate(p_frag, s_frag, scale_log2);
      pin(p_frag);  // written before the next product's fence
    };
    // S_n = Q K_n^T, O += P V of block n + 1, P = softmax of S_n.
    const auto step = [&](int n, bool masked, bool speculative) {
      float s_frag[kScores], factor[2];
      if (!speculative) softmax.set_limit();  // not between the turn and the products
      rings.k.wait_full();
      rings.v.wait_full();
      take_turn();
      wgmma_fence();  // P, and O if it was rescaled, were written by ordinary instructions
      issue_scores(s_frag);
      issue_output();
      pass_turn();
      wgmma_wait<kTransformsScores ? 0 : 1>();  // softcap needs the registers of P
      pin(s_frag);
      release_next(rings.k);
      score(s_frag, n, masked);
      const bool grew = !speculative && softmax.grow(factor, s_frag, scale_log2);
      wgmma_wait<0>();
      pin(o_frag);
      release_next(rings.v);
      if (grew) scale_rows(o_frag, factor);
      if (speculative) softmax.speculate(p_frag, s_frag, o_frag, scale_log2);
      else softmax.exponentiate(p_frag, s_frag, scale_log2);
      pin(p_frag);
    };
    // A block only other warpgroups see.
    const auto skip = [&] {
      take_turn();
      pass_turn();
      rings.k.wait_full();
      rings.v.wait_full();
      release_next(rings.k);
      release_next(rings.v);
    };

    const Span blocks = uniform(ld_shared<Work>(slot).blocks);
    const OwnKeys keys = ld_shared<OwnKeys>(smem.own(rings.work.stage(), consumer));
    const Span own = uniform(keys.blocks), unmasked = uniform(keys.unmasked);
    int n = blocks.end - 1;
    const int tail = ld_shared<Work>(slot).sequence.k_length - n * kBlockN;  // keys of the last block
    if (!kIsE4m3 && (p.cu_seqlens_k || p.seqused_k) && n >= blocks.begin && tail < kBlockN) {
      rings.v.wait_full();
      clear_tail(smem.v(rings.v.stage()), tail);
    }
    for (; n >= own.end && n >= blocks.begin; --n) skip();
    rings.q.wait_full();

    float factor[2], logsumexp[2];
    const auto finish_rows = [&] {
      const Work work = ld_shared<Work>(slot);
      softmax.finalize(factor, logsumexp, kHasSinks ? ld_global(p.sinks + work.head) * kLog2e : negative_infinity());
      if constexpr (kIsE4m3) {
        const float scale = descale(p, p.v_descale, work.sequence.batch, work.head);
        factor[0] *= scale, factor[1] *= scale;
      }
      if (!kStagesOut) release(rings.q.empty());  // the next tile's Q is loaded under the last product and the store
      float* logsumexp_ptr = p.logsumexp + statistics_offset(p, work.sequence, work.head);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = work.first_row + consumer * 64 + row_of_thread() + half * 8;
        if (p.logsumexp && (lane_index() & 3) == 0 && i >= 0 && i < work.sequence.q_length) st_global(logsumexp_ptr + i, logsumexp[half]);
      }
    };
    if (own.begin < own.end) {
      const auto needs_mask = [&](int n) { return n * kBlockN < unmasked.begin || (n + 1) * kBlockN > unmasked.end; };
      begin(n, needs_mask(n));
      for (--n; n >= own.begin;) {
        const bool masked = kHasWindow && needs_mask(n);
        if (masked || (kSpeculates && n >= uniform(ld_shared<Work>(slot).blocks.end) - 1 - kUnsettledBlocks)) {
          step(n--, masked, false);
        } else {  // a loop of its own, without a test a block
          const int end = kHasWindow ? larger(own.begin, ceil_div(unmasked.begin, kBlockN)) : own.begin;
          for (; n >= end; --n) step(n, false, kSpeculates);
        }
      }
      // O += P V of the last block; meanwhile what does not need O.
      rings.v.wait_full();
      wgmma_fence();
      issue_output();
      finish_rows();
      wgmma_wait<0>();
      pin(o_frag);
      release_next(rings.v);
    } else {
      finish_rows();
    }
    for (; n >= blocks.begin; --n) skip();

    scale_rows(o_frag, factor);
    bool finite[2] = {true, true};
    if constexpr (kHasWindow) all_finite(finite, o_frag);
    const Work work = ld_shared<Work>(slot);
    const Sequence& s = work.sequence;
    const int head = uniform(work.head), first_row = uniform(work.first_row) + consumer * 64, i_first = first_row + row_of_thread();
    if constexpr (kStagesOut) {
      // Where Q was: all four warps have waited for its last scores before any could issue the last product.
      const OutTile out_smem = smem.out(rings.q.stage());
      const int warp_row = (uniform(warp_index()) & 3) * 16;
      const RowOrigin origin = uniform(origin_of(p.cu_seqlens_q != nullptr, s.batch, s.q_start, s.q_length));
      stage_accumulators(out_smem, warp_row, o_frag);
      fence_proxy_async();  // ordinary stores before the copy engine's reads
      sync_warp();          // of all lanes
      if (elect()) {
        if (first_row >= 0) store_rows(out_smem, warp_row, &params.out, origin, first_row + warp_row, head);
        bulk_wait_read<0>();
        mbarrier_arrive(rings.q.empty());
      }
    } else {
      if (first_row >= 0) store_accumulators(out_of(p, s, head), i_first, s.q_length, p.head_dim_v, o_frag);
    }
    if (kHasWindow && vote_any(!finite[0] || !finite[1])) {
      if (kStagesOut && elect()) bulk_wait<0>();
      sync_warp();  // write after write: rows stored above are stored once more
      recompute_rows(p, s, head, i_first, logsumexp, finite);
    }
    mbarrier_arrive(rings.work.empty());  // every thread has read it itself
  }
}

KERNEL(kThreads, 1) attention_forward_sm90(GRID_CONSTANT ParamsSm90 params) {
  const Shared smem(shared_base());
  const Rings rings(smem.base);
  if (thread_index() == 0) rings.init();
  sync_block();  // nobody waits on a barrier that is not there yet

  const int warpgroup = uniform(warp_index() >> 2);
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (uniform(warp_index()) == 0) produce(params, smem, rings);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(params, smem, rings, warpgroup - 1);
  }
}
