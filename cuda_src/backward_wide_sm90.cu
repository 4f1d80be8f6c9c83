// Attention backward for Hopper, head dims 192 and 256: dk and dv of 64 keys at a time, and their part of dq. Persistent.
// Assumes attention_backward_prepare_sm90 has run, unit last strides, 16-byte aligned rows, softmax_scale > 0; q, k, v and dout are
// tensor maps with boxes of 64 columns and 64 rows, see origin_of in packed_sm90.cuh.
// Stores dk and dv for every row of k and v, unused ones (seqused_k) as zero, or adds to the workspace's where CTAs share a key head;
// adds to the workspace's dq.
// Grid: at most one CTA per multiprocessor, at most one per tile (task_of in backward_sm90.cuh), kNumWarps = 12.
//
// dK and dV of 64 keys are all the accumulators two warpgroups can hold, so the products are dealt out: per query block j
//   warpgroup 1   S^T = K Q^T     P^T = exp2(S^T - logsumexp)     dV += P^T dO
//   warpgroup 2   dP^T = V dO^T   dS^T = P^T (dP^T - delta)       dK += dS^T Q
// P^T and dS^T are register operands where they were computed. P^T goes from the first to the second through shared memory in fp32,
// each thread to its counterpart, dS^T as 16-bit tile for dQ = dS K, which is computed one step late, half of the columns each
// (192: in turns), and added by red.global straight from the accumulators: there is no shared memory left to stage it.
// While one warpgroup computes exponentials, the other one's products keep the tensor cores busy.
#include "backward_sm90.cuh"

constexpr int kDqColumns = kHeadDim == 256 ? 128 : kHeadDim;  // of one warpgroup: what fits beside dK or dV
constexpr bool kTurns = kDqColumns == kHeadDim;
constexpr int kAddersPerBlock = kTurns ? 1 : 2;               // warpgroups that add to a query block's dQ
// Beside what both backwards have: dS^T stages | P^T in fp32.
constexpr int kDsOffset = kOwnOffset, kPOffset = kDsOffset + 2 * ScoreTile::kBytes;
constexpr int kPFull = kOwnBarriers, kPEmpty = kPFull + 8, kDsFull = kPEmpty + 8, kDsEmpty = kDsFull + 16;
constexpr int kSharedMemory = kPOffset + kBlockN * kBlockM * 4;
static_assert(kBlockM == 64 && kBlockN == 64 && kNumWarps == 12, "one tile of 64 keys, two warpgroups around it");

KERNEL(kThreads, 1) attention_backward_wide_sm90(GRID_CONSTANT ParamsSm90 params) {
  const Params& p = params.common;
  const SharedMemory smem = {shared_base()};
  smem.start(0, [&] {
    mbarrier_init(smem.barrier(kPFull), 4 * kWarpArrivals);
    mbarrier_init(smem.barrier(kPEmpty), 4 * kWarpArrivals);
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(smem.barrier(kDsFull, stage), 4 * kWarpArrivals);
      mbarrier_init(smem.barrier(kDsEmpty, stage), 4 * kAddersPerBlock * kWarpArrivals);
    }
  });

  const int warpgroup = uniform(thread_index() / 128) - 1;
  if (warpgroup < 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (uniform(warp_index()) == 0) produce(params, smem);
    return;
  }

  setmaxnreg_inc<kConsumerRegisters>();
  const int warp = warp_index() & 3, lane = lane_index();
  const int column = kTurns ? 0 : warpgroup * kDqColumns;             // of dQ
  const Operand k = smem.k().operand(), v = smem.v().operand(), k_columns = Operand{k.low + column / 64 * (KeyTile::kSlabBytes / 16)};
  const auto ds_smem = [&](int stage) { return ScoreTile{smem.base + kDsOffset + stage * ScoreTile::kBytes}; };
  const u32 p_smem = smem.base + kPOffset + (warp * 32 + lane) * 16;  // of this thread and its counterpart
  const auto wait = [&](int barrier, int step) { mbarrier_wait(smem.barrier(barrier, step & 1), step >> 1 & 1); };  // of the step's stage

  int step = 0;                                                       // of all tiles; stage step % 2, phase step / 2 % 2
  for (u32 parity = 0;; parity ^= 1) {
    mbarrier_wait(smem.barrier(kKFull), parity);                        // read after write: the tile is there, and K, for S and dQ
    const KeyTask task = uniform(smem.task());
    if (task.n_block < 0) break;
    const Sequence sequence = sequence_of(p, task.batch);
    Walk walk(p, sequence, task);
    const u32 record = key_record_of(p, sequence, task.n_block, task.kv_head);
    const int first_step = step;
    float gradient[kHeadDim / 2];                                       // [64 keys, kHeadDim]: dV or dK
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) gradient[i] = 0.f;

    // ---- dQ of the step before: its share of the columns, or every other step ----
    u32 previous = 0;                                                   // its record
    int previous_m = 0;
    const auto dq_is_due = [&] { return step > first_step && (!kTurns || (step - 1 & 1) == warpgroup); };
    const auto issue_dq = [&](float (&dq_frag)[kDqColumns / 2]) {
      wait(kDsFull, step - 1);                                          // read after write: dS^T is there, from all its warps
      wgmma_fence();
      issue_transposed_multiply<kDqColumns, ScoreTile, KeyTile>(dq_frag, ds_smem(step - 1 & 1).operand(), k_columns);
    };
    // Deterministic: a turn is passed one addition late, when its sums have long been in memory and nobody waits for them to be; but before
    // the next one is waited for, and at the end of the tile, so that a turn that is held holds nobody up for ever.
    constexpr u32 kNone = ~0u;
    u32 held = kNone;                                                   // the record of that turn
    const auto pass_held_turn = [&](const auto& then) {
      barrier_sync(1 + warpgroup, 128);                                 // everybody's sums come before the turn is passed
      if (warp != 0 || lane != 0) return;
      if (held != kNone) pass_turn(p, held);
      then();
    };
    const auto add_dq = [&](const float (&dq_frag)[kDqColumns / 2]) {
      arrive(smem.barrier(kDsEmpty, step - 1 & 1));
      if constexpr (kDeterministic) {
        pass_held_turn([&] { await_turn(p, previous, kAddersPerBlock * turns_before(sequence, task.n_block, previous_m)); });
        barrier_sync(1 + warpgroup, 128);                               // our turn has come, for all threads
        held = previous;
      }
      float* dq = dq_sums(p, previous) + warp * kWarpDqFloats + column / 8 * 128 + lane * 4;
#pragma unroll
      for (int i = 0; i < kDqColumns / 8; ++i)
        red_add_global(dq + i * 128, F32x4{dq_frag[4 * i], dq_frag[4 * i + 1], dq_frag[4 * i + 2], dq_frag[4 * i + 3]});
    };
    // gradient += A B, dQ of the step before ahead of it where it is due: the sums leave while this product runs.
    const auto multiply = [&](const u32 (&a_frag)[kBlockM / 4], Operand b) {
      if (dq_is_due()) {
        float dq_frag[kDqColumns / 2];                                  // [kBlockM, kDqColumns]
        issue_dq(dq_frag);
        issue_multiply<QueryTile>(gradient, a_frag, b);
        wgmma_wait<1>();
        pin(dq_frag);
        add_dq(dq_frag);
      } else {
        wgmma_fence();
        issue_multiply<QueryTile>(gradient, a_frag, b);
      }
      wgmma_wait<0>();
      pin(gradient);
      previous = walk.record;
      previous_m = walk.m_block;
    };
    const auto last_dq = [&] {
      if (dq_is_due()) {
        float dq_frag[kDqColumns / 2];
        issue_dq(dq_frag);
        wgmma_wait<0>();
        pin(dq_frag);
        add_dq(dq_frag);
      }
      if constexpr (kDeterministic) pass_held_turn([] {});
    };

    if (warpgroup == 0) {
      const Scores scores = scores_of(p, sequence, walk.head);
      const KeyMask mask(sequence, task.n_block * kBlockN);
      for (; walk.left > 0; walk.next(), ++step) {
        const int stage = step & 1;
        // S^T = K Q^T
        float s_frag[kBlockM / 2], logsumexp[kBlockM / 4];              // [64 keys, kBlockM]
        wait(kQFull, step);                                             // read after write: Q and logsumexp are there
        load_statistics(logsumexp, smem.logsumexp(stage));
        wgmma_fence();
        issue_multiply_transposed<KeyTile, QueryTile>(s_frag, k, smem.q(stage).operand());
        wgmma_wait<0>();
        pin(s_frag);
        arrive(smem.barrier(kQEmpty, stage));
        // P^T = exp2(S^T - logsumexp)
        u32 p_frag[kBlockM / 4];
        if constexpr (kHasSoftcap) apply_tanh(s_frag, scores);
        mask.apply(s_frag, walk.m_block * kBlockM);
        probabilities(s_frag, p_frag, logsumexp, scores, [&](int pair, float first, float second) {
          s_frag[2 * pair] = first, s_frag[2 * pair + 1] = second;
        });
        mbarrier_wait(smem.barrier(kPEmpty), (step & 1) ^ 1);           // write after read: P^T of the step before has been read
#pragma unroll
        for (int i = 0; i < kBlockM / 8; ++i)
          st_shared(p_smem + i * 2048, F32x4{s_frag[4 * i], s_frag[4 * i + 1], s_frag[4 * i + 2], s_frag[4 * i + 3]});
        arrive(smem.barrier(kPFull));
        // dV += P^T dO
        wait(kDoutFull, step);                                          // read after write: dO is there
        multiply(p_frag, smem.dout(stage).operand());
        arrive(smem.barrier(kDoutEmpty, stage));
      }
      last_dq();
      arrive(smem.barrier(kKeysEmpty));
      await_shares(p, task, record);
      store_gradient(p, gradient, 1.f, dv_of(p, sequence, task.kv_head), dv_sums(p, record), task, warp * 16, sequence);
    } else {
      if (walk.left > 0) mbarrier_wait(smem.barrier(kVFull), parity);   // read after write: V is there
      for (; walk.left > 0; walk.next(), ++step) {
        const int stage = step & 1;
        // dP^T = V dO^T
        float dp_frag[kBlockM / 2], p_frag[kBlockM / 2], negative_delta[kBlockM / 4];  // [64 keys, kBlockM]
        wait(kDoutFull, step);                                          // read after write: dO and delta are there
        load_statistics(negative_delta, smem.negative_delta(stage));
        wgmma_fence();
        issue_multiply_transposed<KeyTile, QueryTile>(dp_frag, v, smem.dout(stage).operand());
        wgmma_wait<0>();
        pin(dp_frag);
        arrive(smem.barrier(kDoutEmpty, stage));
        // dS^T = P^T (dP^T - delta)
        mbarrier_wait(smem.barrier(kPFull), step & 1);                  // read after write: P^T is there
#pragma unroll
        for (int i = 0; i < kBlockM / 8; ++i) {
          const F32x4 part = ld_shared<F32x4>(p_smem + i * 2048);
          p_frag[4 * i] = part.x, p_frag[4 * i + 1] = part.y, p_frag[4 * i + 2] = part.z, p_frag[4 * i + 3] = part.w;
        }
        arrive(smem.barrier(kPEmpty));
        u32 ds_frag[kBlockM / 4];
        score_gradients(ds_frag, p_frag, dp_frag, negative_delta);
        mbarrier_wait(smem.barrier(kDsEmpty, stage), (step >> 1 & 1) ^ 1);  // write after read: dQ of two steps ago is done
        store_scores(ds_smem(stage), warp * 16, ds_frag);
        fence_proxy_async();                                            // dS^T is written by stores and read by wgmma
        arrive(smem.barrier(kDsFull, stage));
        // dK += dS^T Q
        wait(kQFull, step);                                             // read after write: Q is there
        multiply(ds_frag, smem.q(stage).operand());
        arrive(smem.barrier(kQEmpty, stage));
      }
      last_dq();
      arrive(smem.barrier(kKeysEmpty));
      await_shares(p, task, record);
      store_gradient(p, gradient, p.softmax_scale, dk_of(p, sequence, task.kv_head), dk_sums(p, record), task, warp * 16, sequence);
    }
    pass_share(p, record);
  }
}
