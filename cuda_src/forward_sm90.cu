// Attention forward for Hopper: out = softmax(scores of q k^T) v and logsumexp, warp-specialised and persistent.
//
// Warpgroup 0 produces: one of its warps takes tiles (kBlockM query rows of a head) from a counter and loads Q, K and V
// by TMA (forward_producer_sm90.cuh). Every other warpgroup consumes: it owns 64 of the rows. Over the key blocks n of a
// tile, first one first, it issues
//     S_n = Q K_n^T   and   O += P_{n-1} V_{n-1}
// together, and does the softmax of S_n while the products of the other warpgroups keep the tensor cores busy. Warpgroups
// issue in turns (kTakesTurns). A wgmma holds up its own warps until it has nearly run (measured: four of 64 clocks take 275 to
// issue), so a warpgroup's own product hides little of its softmax: three of 64 rows beat two with longer blocks of keys. P V in
// pieces under the exponentials of one warpgroup, tried instead: 5 to 10% slower.
//
// A tile's ends, where warpgroups work at the same things, are short: the producer says which keys each sees, the row sums are finished
// under the last product, and where Q of two tiles fits, that of the next is there before it begins and the copy engine stores O. Where
// causal rows see the fewer keys the earlier they are, a warpgroup is done before the next one, and stores O while that one goes on; last
// block first, all of them would be done at once (head dim 128, 2048 tokens: 609 TFLOP/s, first block first 621). The last product
// of a tile and the first scores of the next issued together, tried instead: up to 5% slower, nowhere faster.
//
// In 8 bits V comes transposed, in records that a kernel beforehand wrote (values_sm90.cuh); factors of q, k and v per key head go
// into the scale of the scores and of O, which is stored in bf16.
//
// Assumes what the tensor maps of params_sm90.cuh ask for, 16-byte aligned rows of out, softmax_scale > 0. Stores out
// [rows, head_dim_v] and logsumexp for every row of every sequence, the empty ones too.
// Grid: at most one CTA per multiprocessor, at most one per tile.
#include "forward_producer_sm90.cuh"
#include "recompute_sm90.cuh"

// Maxima move in a tile's first blocks. Past them P is computed before anybody has looked for a larger score, which takes
// registers for S beside P (an older build's TFLOP/s at 16384 tokens, full / causal: head dim 64 612 / 561 instead of 535 / 539, head
// dim 128 729 / 701 instead of 711 / 687; no gain at 256). What a thread computes is slow while products run, whatever its order:
// exponentials in groups, sums and packing a group behind, were no faster. With a soft cap bounded_cap_of has looked already.
// In 8 bits it is 7 to 17% slower. There one exponential of four from products (a polynomial) instead of the unit for them is 1 to
// 14% slower; exponentials in S while P V runs are 4 to 7% faster with two consumers at head dims 128 and 192, not with three
// consumers, causal or at 256.
constexpr bool kSpeculates = kHeadDim <= 128 && !kHasSoftcap && !kIsE4m3;
constexpr int kUnsettledBlocks = 3;  // after the first; two: up to 1% slower, four: no faster

// This thread's first row of the accumulators, of the 64 of its warpgroup; the second is 8 below.
DEVICE int row_of_thread() { return (warp_index() & 3) * 16 + (lane_index() >> 2); }

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
  const auto take_turn = [&] {
    if (kTakesTurns) barrier_sync(kTurn + consumer, 256);
  };
  const auto pass_turn = [&] {
    if (kTakesTurns) barrier_arrive(kTurn + (consumer + 1) % kConsumers, 256);
  };
  float scale_log2 = kHasSoftcap ? 1.f : p.softmax_scale * kLog2e;
  if (consumer == kConsumers - 1) pass_turn();  // the first turn is that of consumer 0

  for (rings.q.position = consumer;; rings.q.position += kConsumers, rings.work.advance()) {
    rings.work.wait_full();
    const u32 slot = smem.work(rings.work.stage());
    if (uniform(ld_shared<Work>(slot).head) < 0) break;
    const Operand q{q_operand + rings.q.stage() * (kQStageBytes >> 4)};
    if constexpr (kIsE4m3 && !kHasSoftcap)
      scale_log2 = score_scale(p, ld_shared<Work>(slot).sequence.batch, ld_shared<Work>(slot).head) * kLog2e;

    if (kStagesOut && rings.work.position > 0 && elect()) {  // O of the tile before has made room for another Q
      bulk_wait_read<0>();
      mbarrier_arrive(rings.q.empty(kConsumers));
    }

    float o_frag[kOutputs];   // O, [64, kHeadDimV] a warpgroup
    u32 p_frag[kScores / kInRegister];  // P of the block before, the A operand of P V
    LaggingSoftmax softmax;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o_frag[i] = 0.f;

    // What is rarely needed is read from `slot` when it is: the main loop has no registers to spare.
    const auto cap_of_block = [&](float (&s_frag)[kScores]) {
      if constexpr (kHasSoftcap) {
        const Work work = ld_shared<Work>(slot);
        return bounded_cap_of(s_frag, scores_of(p, work.sequence, work.head));
      } else {
        return NoCap{};
      }
    };
    const auto mask = [&](float (&s_frag)[kScores], int n) {
      const Work work = ld_shared<Work>(slot);
      const int i = work.first_row + consumer * 64 + row_of_thread(), j = n * kBlockN + (lane_index() & 3) * 2;
      const Sequence& s = work.sequence;
      Span columns[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Span keys = keys_of(p, s, smaller(i + half * 8, s.q_length - 1));
        columns[half] = {keys.begin - j, keys.end - j};
      }
      hide(s_frag, columns);
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
      const auto cap = cap_of_block(s_frag);
      if (masked) mask(s_frag, n);
      softmax.grow(factor, s_frag, scale_log2, cap);
      softmax.exponentiate(p_frag, s_frag, scale_log2, cap);
      pin(p_frag);  // written before the next product's fence
    };
    // S_n = Q K_n^T, O += P V of block n - 1, P = softmax of S_n.
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
      wgmma_wait<1>();
      pin(s_frag);
      release_next(rings.k);
      const auto cap = cap_of_block(s_frag);
      if (masked) mask(s_frag, n);
      const bool grew = !speculative && softmax.grow(factor, s_frag, scale_log2, cap);
      wgmma_wait<0>();
      pin(o_frag);
      release_next(rings.v);
      if (grew) scale_rows(o_frag, factor);
      if (speculative) softmax.speculate(p_frag, s_frag, o_frag, scale_log2, cap);
      else softmax.exponentiate(p_frag, s_frag, scale_log2, cap);
      pin(p_frag);
    };
    const Span blocks = uniform(ld_shared<Work>(slot).blocks);
    const OwnKeys keys = ld_shared<OwnKeys>(smem.own(rings.work.stage(), consumer));
    const Span own = uniform(keys.blocks), unmasked = uniform(keys.unmasked);
    // A block only other warpgroups see. The turn of the first one behind our own went to the last product.
    const auto skip = [&](int n) {
      if (n != own.end || own.begin == own.end) {
        take_turn();
        pass_turn();
      }
      rings.k.wait_full();
      rings.v.wait_full();
      release_next(rings.k);
      release_next(rings.v);
    };
    int n = blocks.begin;
    for (; n < own.begin && n < blocks.end; ++n) skip(n);
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
      const auto unsettled = [&](int n) { return kSpeculates && n <= own.begin + kUnsettledBlocks; };
      for (++n; n < own.end;) {
        for (; n < own.end && (unsettled(n) || needs_mask(n)); ++n) step(n, needs_mask(n), false);
        for (const int end = smaller(own.end, unmasked.end / kBlockN); n < end; ++n) step(n, false, kSpeculates);
        for (; kHasWindow && kSpeculates && n < own.end; ++n) step(n, true, true);  // else masked as the first blocks are
      }
      // O += P V of the last block; meanwhile what does not need O.
      rings.v.wait_full();
      const bool others_go_on = n < uniform(ld_shared<Work>(slot).blocks.end);
      if (others_go_on) take_turn();
      wgmma_fence();
      issue_output();
      if (others_go_on) pass_turn();
      finish_rows();
      wgmma_wait<0>();
      pin(o_frag);
      release_next(rings.v);
    } else {
      finish_rows();
    }

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
      if (first_row >= 0 && elect()) store_rows(out_smem, warp_row, &params.out, origin, first_row + warp_row, head);
    } else {
      if (first_row >= 0) store_accumulators(out_of(p, s, head), i_first, s.q_length, p.head_dim_v, o_frag);
    }
    if (kHasWindow && vote_any(!finite[0] || !finite[1])) {
      if (kStagesOut && elect()) bulk_wait<0>();
      sync_warp();  // write after write: rows stored above are stored once more
      recompute_rows(p, s, head, i_first, logsumexp, finite);
    }
    for (const int end = uniform(ld_shared<Work>(slot).blocks.end); n < end; ++n) skip(n);
    mbarrier_arrive(rings.work.empty());  // every thread has read it itself
  }
  if (kStagesOut) bulk_wait_read<0>();  // shared memory is the copy engine's until then
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
