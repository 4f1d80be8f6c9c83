// Attention backward for Hopper, head dims up to 128: dk and dv of 128 keys at a time, and their part of dq. Persistent.
// Assumes attention_backward_prepare_sm90 has run, unit last strides, 16-byte aligned rows, softmax_scale > 0; q, k, v and dout are
// tensor maps with boxes of 64 columns and kBlockM (q, dout) or kBlockN (k, v) rows, see origin_of in packed_sm90.cuh.
// Stores dk and dv for every row of k and v, unused ones (seqused_k) as zero, or adds to the workspace's where CTAs share a key head;
// adds to the workspace's dq.
// Grid: at most one CTA per multiprocessor, at most one per tile (task_of in backward_sm90.cuh), kNumWarps = 12.
//
// Warpgroup 0 takes tiles and issues the loads; the next tile's run while this one's dk and dv are stored. Warpgroups 1 and 2 own 64
// keys each and go through the query blocks j of all query heads of the tile:
//   S^T = K Q^T, dP^T = V dO^T, P^T = exp2(S^T - logsumexp), dV += P^T dO, dS^T = P^T (dP^T - delta), dK += dS^T Q
// with P^T and dS^T as register operands. dS^T also goes to shared memory, for dQ = dS K over all 128 keys.
// Shared memory is the bottleneck (S and dP read both operands from it as fast as it can deliver), so everything else that needs it
// is placed where it waits least: a warp's loads and stores queue behind the wgmma it has issued. A step is, with what runs meanwhile:
//   dP_j starts | S_j done | P_j | both warpgroups finished step j - 1 | dP_j done
//   dV_j starts | dS_j, logsumexp of j + 1 | dK_j starts | fence, the staged dQ_{j-2} is added | both done
//   dQ_{j-1}, by the warpgroups in turns, staged | S_{j+1} starts
#include "backward_sm90.cuh"

constexpr int kWarpDqBytes = kWarpDqFloats * 4;
// Beside what both backwards have: dS^T stages | dQ of each warp.
constexpr int kDsOffset = kOwnOffset, kDqOffset = kDsOffset + 2 * ScoreTile::kBytes;
constexpr int kStepDone = kOwnBarriers, kDqFull = kStepDone + 8, kDqEmpty = kDqFull + 16;
constexpr int kSharedMemory = kDqOffset + kConsumerWarps * kWarpDqBytes;
// 128 queries a step leave no registers for P^T in fp32 between dV and dS: dS takes the packed one, with a softcap P^T * dtanh, packed too.
constexpr bool kKeepsP = kBlockM == 64, kPacksWeights = kHasSoftcap && !kKeepsP;
static_assert(kBlockN == 128 && kNumWarps == 12, "64 keys to each of two warpgroups");
static_assert(kBlockM == 64 || kBlockM == 128 && kHeadDim == 64, "accumulators in 240 registers");

// Deterministic, a thread for each warpgroup: adds the dQ that it stages, step by step, each in its turn. Threads of their own, so that
// only they wait for other CTAs, and two, so that one's sums are on their way to memory while the other waits for its turn (head dim 128,
// 4096 tokens: 565 TFLOP/s; one thread for both 467).
DEVICE void add_in_turns(const Params& p, SharedMemory smem, int warpgroup) {
  int step = 0;
  for (u32 parity = 0;; parity ^= 1) {
    mbarrier_wait(smem.barrier(kKFull), parity);                       // read after write: the tile is there
    const KeyTask task = smem.task();
    if (task.n_block < 0) return;
    mbarrier_arrive(smem.barrier(kKeysEmpty));
    const Sequence s = sequence_of(p, task.batch);
    for (Walk walk(p, s, task); walk.left > 0; walk.next(), ++step) {
      if ((step & 1) == warpgroup) continue;                           // the other one computes it
      mbarrier_wait(smem.barrier(kDqFull, warpgroup), step >> 1 & 1);  // read after write: dQ is staged
      await_turn(p, walk.record, turns_before(s, task.n_block, walk.m_block));
      bulk_reduce_add_f32(dq_sums(p, walk.record), smem.base + kDqOffset + warpgroup * 4 * kWarpDqBytes, 4 * kWarpDqBytes);
      bulk_commit();
      bulk_wait<0>();                                                  // the sums are in memory, the next key block may add
      pass_turn(p, walk.record);
      mbarrier_arrive(smem.barrier(kDqEmpty, warpgroup));
    }
  }
}

KERNEL(kThreads, 1) attention_backward_sm90(GRID_CONSTANT ParamsSm90 params) {
  const Params& p = params.common;
  const SharedMemory smem = {shared_base()};
  smem.start(2 * kDeterministic, [&] {
    mbarrier_init(smem.barrier(kStepDone), kConsumerWarps * kWarpArrivals);
    if constexpr (kDeterministic) {
      for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
        mbarrier_init(smem.barrier(kDqFull, warpgroup), 4 * kWarpArrivals);
        mbarrier_init(smem.barrier(kDqEmpty, warpgroup), 1);
      }
    }
  });

  const int warpgroup = uniform(thread_index() / 128) - 1;
  if (warpgroup < 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (uniform(warp_index()) == 0) produce(params, smem);
    if constexpr (kDeterministic)
      if (lane_index() == 0 && (warp_index() == 1 || warp_index() == 2)) add_in_turns(p, smem, warp_index() - 1);
    return;
  }

  setmaxnreg_inc<kConsumerRegisters>();
  const int warp = warp_index() & 3, lane = lane_index();
  const int warp_row = warpgroup * 64 + warp * 16;
  const Operand k_keys = smem.k().operand(warpgroup * 64), v_keys = smem.v().operand(warpgroup * 64), k_all = smem.k().operand();
  const Operand q = smem.q(0).operand(), dout = smem.dout(0).operand(), ds = ScoreTile{smem.base + kDsOffset}.operand();
  const auto at_stage = [](Operand first, int stage, int bytes) { return Operand{first.low + stage * (bytes / 16)}; };
  const auto q_at = [&](int stage) { return at_stage(q, stage, QueryTile::kBytes); };
  const auto dout_at = [&](int stage) { return at_stage(dout, stage, QueryTile::kBytes); };
  const auto ds_at = [&](int stage) { return at_stage(ds, stage, ScoreTile::kBytes); };
  const u32 dq_smem = uniform(smem.base + kDqOffset + (warpgroup * 4 + warp) * kWarpDqBytes);

  int step = 0;                                                     // of all tiles; stage step % 2, phase step / 2 % 2
  // The same operand, not known to be: else the compiler computes its descriptors once and, short of uniform registers, spills them
  // (where there is a mask those of V too).
  const auto fresh = [&](Operand same) { return Operand{same.low + (u32)(step >> 30)}; };
  for (u32 parity = 0;; parity ^= 1) {
    mbarrier_wait(smem.barrier(kKFull), parity);                      // read after write: the tile and its K are there
    const KeyTask task = uniform(smem.task());
    if (task.n_block < 0) break;
    const Sequence sequence = sequence_of(p, task.batch);
    Walk walk(p, sequence, task);
    const Scores scores = scores_of(p, sequence, walk.head);  // the same for all heads
    const KeyMask mask(sequence, task.n_block * kBlockN + warpgroup * 64);

    float dk_frag[kHeadDim / 2], dv_frag[kHeadDim / 2];             // [64 keys, kHeadDim]
    float s_frag[kBlockM / 2], dp_frag[kBlockM / 2];                // [64 keys, kBlockM]: S^T, then P^T; dP^T
    u32 p_frag[kBlockM / 4], ds_frag[kBlockM / 4];                  // P^T and dS^T as A operands
    u32 weight_frag[kBlockM / 4];                                   // P^T * dtanh
    float logsumexp[kBlockM / 4];
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk_frag[i] = dv_frag[i] = 0.f;

    const auto load_logsumexp = [&](int step) {
      mbarrier_wait(smem.barrier(kQFull, step & 1), step >> 1 & 1);      // read after write: Q and logsumexp of the step are there
      load_statistics(logsumexp, smem.logsumexp(step & 1));
    };
    const auto issue_scores = [&] {
      wgmma_fence();
      issue_multiply_transposed<KeyTile, QueryTile>(s_frag, fresh(k_keys), q_at(step & 1));
    };

    // dQ is staged by one step's end and added after the next step's fence, which the copy engine needs.
    constexpr u32 kNone = ~0u;
    u32 previous = kNone, staged = kNone;                           // records
    const auto add_staged = [&] {
      fence_proxy_async();                                          // dS_j for wgmma, the staged dQ for the copy engine
      if constexpr (kDeterministic) {
        if (staged != kNone) arrive(smem.barrier(kDqFull, warpgroup));
      } else {
        sync_warp();
        if (lane == 0 && staged != kNone) {
          bulk_reduce_add_f32(dq_sums(p, staged) + warp * kWarpDqFloats, dq_smem, kWarpDqBytes);
          bulk_commit();
        }
      }
      staged = kNone;
    };
    // dQ = dS K of a step, one step late: by then the other warpgroup's half of its dS has long been there.
    const auto compute_dq = [&](int dq_step, bool signal) {
      float dq_frag[kDqTiles][kHeadDim / 2];                        // [kBlockM, kHeadDim]
      wgmma_fence();
#pragma unroll
      for (int tile = 0; tile < kDqTiles; ++tile)
        issue_transposed_multiply<kHeadDim, ScoreTile, KeyTile>(dq_frag[tile], at_stage(ds_at(dq_step & 1), tile, ScoreTile::kSlabBytes), k_all);
      wgmma_wait<0>();
#pragma unroll
      for (int tile = 0; tile < kDqTiles; ++tile) pin(dq_frag[tile]);
      if (signal) arrive(smem.barrier(kStepDone));
      // Write after read: the copy engine has read the dQ that lies there.
      if constexpr (kDeterministic) mbarrier_wait(smem.barrier(kDqEmpty, warpgroup), (dq_step >> 1 & 1) ^ 1);
      else if (lane == 0) bulk_wait_read<0>();
      sync_warp();
#pragma unroll
      for (int tile = 0; tile < kDqTiles; ++tile)
#pragma unroll
        for (int i = 0; i < kHeadDim / 8; ++i) {
          const auto& part = dq_frag[tile];
          st_shared(dq_smem + ((tile * (kHeadDim / 8) + i) * 32 + lane) * 16,
                    F32x4{part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3]});
        }
      staged = previous;
    };

    // S_j is under way, its logsumexp loaded; afterwards nothing is in flight.
    bool dout_is_there = false;
    const auto compute_p = [&] {
      const int stage = step & 1;
      if (!dout_is_there) mbarrier_wait(smem.barrier(kDoutFull, stage), step >> 1 & 1);  // read after write: dO and delta are there
      wgmma_fence();
      issue_multiply_transposed<KeyTile, QueryTile>(dp_frag, kHasWindow ? fresh(v_keys) : v_keys, dout_at(stage));
      wgmma_wait<1>();
      pin(s_frag);
      if constexpr (kHasSoftcap) apply_tanh(s_frag, scores);
      mask.apply(s_frag, walk.m_block * kBlockM);
      probabilities(s_frag, p_frag, logsumexp, scores, [&](int pair, float first, float second) {
        if constexpr (kPacksWeights) weight_frag[pair] = pack<kIsBf16>(first, second);
        else s_frag[2 * pair] = first, s_frag[2 * pair + 1] = second;
      });
      if constexpr (kPacksWeights) pin(weight_frag);
      if constexpr (kKeepsP) pin(s_frag);
      pin(p_frag);
      // Both warpgroups are through with step j - 1: dS_{j-1} is there (read after write), dQ_{j-2} has read what dS_j overwrites.
      // Passes at once at step 0. It also keeps ptxas from waiting for dP before the exponentials.
      mbarrier_wait(smem.barrier(kStepDone), (step - 1) & 1);
      wgmma_wait<0>();
      pin(dp_frag);
    };
    // The rest of step j; unless it is the last, S_{j+1} is left under way.
    const auto compute_gradients = [&](auto last) {
      constexpr bool kLast = decltype(last)::kOn;
      const int stage = step & 1;
      float negative_delta[kBlockM / 4];
      load_statistics(negative_delta, smem.negative_delta(stage));
      wgmma_fence();
      issue_multiply<QueryTile>(dv_frag, p_frag, dout_at(stage));
      if constexpr (kKeepsP) score_gradients(ds_frag, s_frag, dp_frag, negative_delta);
      else score_gradients(ds_frag, kPacksWeights ? weight_frag : p_frag, dp_frag, negative_delta);
      store_scores(ScoreTile{smem.base + kDsOffset + stage * ScoreTile::kBytes}, warp_row, ds_frag);
      if constexpr (!kLast) load_logsumexp(step + 1);
      wgmma_fence();
      issue_multiply<QueryTile>(dk_frag, ds_frag, q_at(stage));
      add_staged();
      ++step;
      if constexpr (!kLast) dout_is_there = mbarrier_test_wait(smem.barrier(kDoutFull, step & 1), step >> 1 & 1);
      wgmma_wait<0>();
      arrive(smem.barrier(kDoutEmpty, stage));
      arrive(smem.barrier(kQEmpty, stage));
      // After the last step nothing overwrites a dS before both warpgroups have released the tile, so both compute their dQ at once.
      if (kLast) arrive(smem.barrier(kStepDone));
      if ((stage ^ warpgroup) == 0 && previous != kNone) compute_dq(step - 2, !kLast);
      else if (!kLast) arrive(smem.barrier(kStepDone));
      if constexpr (!kLast) issue_scores();
      previous = walk.record;
    };

    if (walk.left > 0) {
      load_logsumexp(step);
      issue_scores();
      mbarrier_wait(smem.barrier(kVFull), parity);                    // read after write: V is there
      compute_p();
      while (walk.left > 1) {
        compute_gradients(Switch<false>{});
        walk.next();
        compute_p();
      }
      compute_gradients(Switch<true>{});
      add_staged();
      if ((step & 1) == warpgroup) {
        mbarrier_wait(smem.barrier(kStepDone), (step - 1) & 1);          // read after write: the other warpgroup's half of the last dS
        compute_dq(step - 1, false);
        add_staged();
      }
    }

    pin(dk_frag);
    pin(dv_frag);
    // Where the CTA stands is read again: that costs less than holding it in registers through the main loop.
    const KeyTask here = uniform(smem.task());
    arrive(smem.barrier(kKeysEmpty));
    const Sequence keys = sequence_of(p, here.batch);
    const u32 record = key_record_of(p, keys, here.n_block, here.kv_head);
    await_shares(p, here, record);
    store_gradient(p, dv_frag, 1.f, dv_of(p, keys, here.kv_head), dv_sums(p, record), here, warp_row, keys);
    store_gradient(p, dk_frag, p.softmax_scale, dk_of(p, keys, here.kv_head), dk_sums(p, record), here, warp_row, keys);
    pass_share(p, record);
  }
  if (!kDeterministic && lane == 0) bulk_wait_read<0>();          // shared memory outlives the last add
}
