// Attention forward for Hopper: out = softmax(scores of q k^T) v and logsumexp, warp-specialised and persistent.
//
// Warpgroup 0 produces: one of its threads takes tiles (kBlockM query rows of a head) from a counter and loads Q, K and V
// by TMA. Every other warpgroup consumes: it owns 64 of the rows. Over the key blocks n of a tile, last one first, it
// issues
//     S_n = Q K_n^T   and   O += P_{n+1} V_{n+1}
// together, and does the softmax of S_n while the second product and those of the other warpgroups keep the tensor
// cores busy. Warpgroups issue in turns.
//
// Assumes what the tensor maps of params_sm90.cuh ask for, 16-byte aligned rows of out, softmax_scale > 0. Stores out
// [rows, head_dim_v] and logsumexp for every row of every sequence, the empty ones too.
// Grid: at most one CTA per multiprocessor, at most one per tile.
#include "packed_sm90.cuh"
#include "recompute_sm90.cuh"
#include "scores.cuh"
#include "softmax_sm90.cuh"
#include "tile_sm90.cuh"

constexpr int kConsumers = kNumWarps / 4 - 1;
static_assert(kConsumers >= 2 && kConsumers <= 4 && kNumWarps % 4 == 0, "a producer and two to four consumers");
static_assert(kBlockM == 64 * kConsumers, "64 rows a consumer");
static_assert(kBlockN % 16 == 0, "P V reduces 16 keys at a time");
static_assert(!kHasKeyRanges && !kHasMask && !kHasBias && !kHasAlibi && !kHasDropout, "forward_sm80 has these");

// What the launch gives (65536 / kThreads, in eights) moved from the producer to the consumers.
constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;

using QTile = SlabTile<kBlockM, kHeadDim>;
using KTile = SlabTile<kBlockN, kHeadDim>;
using VTile = SlabTile<kBlockN, kHeadDimV>;
constexpr int kScores = kBlockN / 2, kOutputs = kHeadDimV / 2;  // accumulators a thread
// Exponentials (of kScores a thread) taken while the warpgroup's own P V runs. With three or more consumers the products of
// the others are cover enough.
constexpr int kUnderProduct = kConsumers == 2 && kHeadDimV <= 128 ? kScores / 2 : 0;

// A tile of work, decoded by the producer. m_block < 0: there is no more.
struct alignas(64) Work {
  Sequence sequence;
  int m_block, head;
  Span blocks;  // key blocks that some row sees
};

// Shared memory: Q | K stages | V stages | rings | Work of two tiles
constexpr int kKOffset = QTile::kBytes, kVOffset = kKOffset + kNumStages * KTile::kBytes;
constexpr int kQRing = kVOffset + kNumStages * VTile::kBytes, kKRing = kQRing + Ring<1>::kBytes;
constexpr int kVRing = kKRing + Ring<kNumStages>::kBytes, kWorkRing = kVRing + Ring<kNumStages>::kBytes;
constexpr int kWorkOffset = (kWorkRing + Ring<2>::kBytes + 63) / 64 * 64;
constexpr int kSharedMemory = kWorkOffset + 2 * sizeof(Work);

// Named barriers: one per consumer for its turn, one for all consumers.
constexpr int kTurn = 1, kAllConsumers = kTurn + kConsumers;

struct Shared {
  u32 base;
  QTile q;
  DEVICE explicit Shared(u32 base) : base(base), q{base} {}
  DEVICE KTile k(int stage) const { return {base + kKOffset + stage * KTile::kBytes}; }
  DEVICE VTile v(int stage) const { return {base + kVOffset + stage * VTile::kBytes}; }
  DEVICE u32 work(int stage) const { return base + kWorkOffset + stage * (u32)sizeof(Work); }
};

struct Rings {
  Ring<1> q;
  Ring<kNumStages> k, v;
  Ring<2> work;
  DEVICE explicit Rings(u32 base) : q(base + kQRing), k(base + kKRing), v(base + kVRing), work(base + kWorkRing) {}
  DEVICE void init() const {
    q.init(1, kConsumers * 4);
    k.init(1, kConsumers * 4);
    v.init(1, kConsumers * 4);
    work.init(1, kConsumers * 128);
    fence_mbarrier_init();
  }
};

// Key blocks that rows [first, end) of a sequence visit, empty if there are none.
DEVICE Span blocks_of(const BlockKeys& keys) {
  if (keys.any.begin >= keys.any.end) return {0, 0};
  return {keys.any.begin / kBlockN, ceil_div(keys.any.end, kBlockN)};
}
DEVICE BlockKeys keys_of_rows(const Params& p, const Sequence& s, int first, int end) {
  if (first >= end) return {{0, 0}, {0, 0}};
  const Span top = keys_of(p, s, first), bottom = keys_of(p, s, end - 1);
  return {{top.begin, bottom.end}, {bottom.begin, top.end}};
}

DEVICE Span uniform(Span span) { return {uniform(span.begin), uniform(span.end)}; }

// ---- producer: one thread ----

DEVICE void produce(const ParamsSm90& params, Shared smem, Rings rings) {
  const Params& p = params.common;
  const int rows = p.num_heads_q * (p.cu_seqlens_q ? 1 : p.batch);  // of m_blocks tiles each
  const u32 tiles = (u32)p.m_blocks * rows;
  u32 index = block_index();
  while (index < tiles) {
    const u32 next = atomic_add_global(params.tile_counters, 1) + grid_size();  // arrives while this tile loads
    constexpr i64 kL2Bytes = 32 << 20;  // of 50 MB: head dim 128 causal at 8192 reads 667 TFLOP/s, with 16 MB 644
    Position position = kHasWindow ? longest_first<kL2Bytes>(p, index, rows) : position_of(index, p.m_blocks, p.num_heads_q);
    if (p.cu_seqlens_q) position = in_sequence(position, p.cu_seqlens_q, kBlockM, p.batch);
    const Sequence s = sequence_of(p, position.batch);
    const int first_row = position.block * kBlockM;
    index = next;
    if (first_row >= s.q_length) continue;
    const BlockKeys keys = keys_of_rows(p, s, first_row, smaller(first_row + kBlockM, s.q_length));
    const Work work = {s, position.block, position.head, blocks_of(keys)};

    rings.work.wait_empty();  // every consumer has read what was there
    st_shared(smem.work(rings.work.stage()), work);
    mbarrier_arrive(rings.work.full());
    rings.work.advance();

    const int q_batch = p.cu_seqlens_q ? 0 : s.batch, k_batch = p.cu_seqlens_k ? 0 : s.batch;
    const int kv_head = position.head / (p.num_heads_q / p.num_heads_kv);
    const auto load_k = [&](int n) {
      rings.k.wait_empty();
      smem.k(rings.k.stage()).load(&params.k, rings.k.full(), (int)s.k_start + n * kBlockN, kv_head, k_batch);
      rings.k.advance();
    };
    const auto load_v = [&](int n) {
      rings.v.wait_empty();
      smem.v(rings.v.stage()).load(&params.v, rings.v.full(), (int)s.k_start + n * kBlockN, kv_head, k_batch);
      rings.v.advance();
    };
    int n = work.blocks.end - 1;
    if (n >= work.blocks.begin) load_k(n);
    rings.q.wait_empty();  // the last scores of the tile before are done
    smem.q.load(&params.q, rings.q.full(), (int)s.q_start + first_row, position.head, q_batch);
    rings.q.advance();
    for (; n >= work.blocks.begin; --n) {
      if (n > work.blocks.begin) load_k(n - 1);
      load_v(n);
    }
  }
  rings.work.wait_empty();
  Work none = {};
  none.m_block = -1;
  st_shared(smem.work(rings.work.stage()), none);
  mbarrier_arrive(rings.work.full());

  // The last CTA to get here leaves the counters as it found them.
  if (atomic_add_global(params.tile_counters + 1, 1) == grid_size() - 1) {
    st_global(params.tile_counters, 0u);
    st_global(params.tile_counters + 1, 0u);
  }
}

// ---- consumers ----

// This thread's first row of the accumulators, of kBlockM; the second is 8 below.
DEVICE int row_of_thread(int consumer) { return consumer * 64 + (warp_index() & 3) * 16 + (lane_index() >> 2); }

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

// O and logsumexp of a warpgroup's rows to global memory.
DEVICE void store(const Params& p, const Work& work, int consumer, float (&o_frag)[kOutputs], LaggingSoftmax& softmax) {
  const Sequence& s = work.sequence;
  const int lane = lane_index(), i_first = work.m_block * kBlockM + row_of_thread(consumer);
  float logsumexp[1][2];
  float sink_log2 = negative_infinity();
  if constexpr (kHasSinks) sink_log2 = ld_global(p.sinks + work.head) * kLog2e;
  softmax.finalize(logsumexp, fragments(o_frag), sink_log2);
  float* logsumexp_ptr = p.logsumexp + statistics_offset(p, s, work.head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = i_first + half * 8;
    if (p.logsumexp && (lane & 3) == 0 && i < s.q_length) st_global(logsumexp_ptr + i, logsumexp[0][half]);
  }
  store_accumulators(out_of(p, s, work.head), i_first, s.q_length, p.head_dim_v, o_frag);

  // NaN or Inf may come from values of V that a row does not see.
  bool finite[2] = {true, true};
  if constexpr (kHasWindow) {
    float zero[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) zero[i >> 1 & 1] += o_frag[i] * 0.f;
    finite[0] = zero[0] == 0.f, finite[1] = zero[1] == 0.f;
  }
  if (kHasWindow && vote_any(!finite[0] || !finite[1])) {
    sync_warp();  // the rows stored above are overwritten
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const bool upper = row >= 8, mine = lane >> 2 == (row & 7);
      const bool redo = vote_any(mine && !(upper ? finite[1] : finite[0]));
      const int i = uniform(i_first - (lane >> 2) + row);
      float row_logsumexp = mine && (lane & 3) == 0 ? (upper ? logsumexp[0][1] : logsumexp[0][0]) : 0.f;
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes >>= 1) row_logsumexp += shfl_xor(row_logsumexp, lanes);
      if (redo && i < uniform(s.q_length)) recompute_row(p, s, work.head, i, row_logsumexp);
    }
  }
}

DEVICE void consume(const ParamsSm90& params, Shared smem, Rings rings, int consumer) {
  const Params& p = params.common;
  const Operand q_operand = smem.q.operand(consumer * 64);
  const u32 k_operand = smem.k(0).operand().low, v_operand = smem.v(0).operand().low;

  // One arrival a warp, after all of its lanes.
  const auto release = [&](auto& ring) {
    sync_warp();
    if (lane_index() == 0) mbarrier_arrive(ring.empty());
    ring.advance();
  };
  const auto take_turn = [&] { barrier_sync(kTurn + consumer, 256); };
  const auto pass_turn = [&] { barrier_arrive(kTurn + (consumer + 1) % kConsumers, 256); };
  const float scale_log2 = kTransformsScores ? 1.f : p.softmax_scale * kLog2e;
  if (consumer == kConsumers - 1) pass_turn();  // the first turn is that of consumer 0

  for (;;) {
    rings.work.wait_full();
    const u32 slot = smem.work(rings.work.stage());
    const int m_block = uniform(ld_shared<Work>(slot).m_block);
    if (m_block < 0) break;
    rings.q.position = rings.work.position;  // one Q a tile

    float o_frag[kOutputs];   // O, [64, kHeadDimV] a warpgroup
    u32 p_frag[kScores / 2];  // P of the block before, the A operand of P V
    LaggingSoftmax softmax;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o_frag[i] = 0.f;

    // What is rarely needed is read from `slot` when it is: the main loop has no registers to spare.
    const auto score = [&](float (&s_frag)[kScores], int n, bool masked) {
      if (!kTransformsScores && !masked) return;
      const Work work = ld_shared<Work>(slot);
      const int i = work.m_block * kBlockM + row_of_thread(consumer), j = n * kBlockN + (lane_index() & 3) * 2;
      const Sequence& s = work.sequence;
      if constexpr (kTransformsScores) transform(fragments(s_frag), p, s, scores_of(p, s, work.head), i, j);
      if (masked) {
        const MaskBits<1> no_mask = {};
        apply_mask(fragments(s_frag), p, s, no_mask, 0, i, j);
      }
    };
    const auto issue_scores = [&](float (&s_frag)[kScores]) {
      const Operand k{k_operand + rings.k.stage() * (KTile::kBytes >> 4)};
      issue_multiply_transposed<QTile, KTile>(s_frag, q_operand, k);
    };
    const auto issue_output = [&] {
      issue_multiply<VTile>(o_frag, p_frag, Operand{v_operand + rings.v.stage() * (VTile::kBytes >> 4)});
    };
    const auto set_operand = [&](const float (&s_frag)[kScores]) {
      pack_operand(p_frag, s_frag);
      pin(p_frag);  // written before the next product's fence
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
      release(rings.k);
      score(s_frag, n, masked);
      softmax.grow(factor, s_frag, scale_log2);
      softmax.exponentiate<0, kScores>(s_frag, scale_log2);
      set_operand(s_frag);
    };
    // S_n = Q K_n^T, O += P V of block n + 1, P = softmax of S_n.
    const auto step = [&](int n, auto masked) {
      float s_frag[kScores], factor[2];
      rings.k.wait_full();
      rings.v.wait_full();
      take_turn();
      wgmma_fence();
      issue_scores(s_frag);
      issue_output();
      pass_turn();
      softmax.set_limit();
      wgmma_wait<1>();
      pin(s_frag);
      release(rings.k);
      score(s_frag, n, masked.kOn);
      const bool grew = softmax.grow(factor, s_frag, scale_log2);
      if constexpr (kUnderProduct > 0) {
        softmax.exponentiate<0, kUnderProduct>(s_frag, scale_log2);
        hold(softmax.row_sum[0] + softmax.row_sum[1], slot);
      }
      wgmma_wait<0>();
      pin(o_frag);
      release(rings.v);
      if (grew) scale_rows(o_frag, factor);
      softmax.exponentiate<kUnderProduct, kScores>(s_frag, scale_log2);
      set_operand(s_frag);
    };
    // O += P V of the last block.
    const auto finish = [&] {
      rings.v.wait_full();
      wgmma_fence();
      issue_output();
      wgmma_wait<0>();
      pin(o_frag);
      release(rings.v);
    };
    // A block only other warpgroups see.
    const auto skip = [&] {
      take_turn();
      pass_turn();
      rings.k.wait_full();
      rings.v.wait_full();
      release(rings.k);
      release(rings.v);
    };

    const Sequence s = ld_shared<Work>(slot).sequence;
    const Span blocks = uniform(ld_shared<Work>(slot).blocks);
    const int first_row = m_block * kBlockM + consumer * 64;
    const BlockKeys keys = keys_of_rows(p, s, first_row, smaller(first_row + 64, s.q_length));
    const Span own = uniform(blocks_of(keys)), unmasked = uniform(keys.all);
    int n = blocks.end - 1;
    if ((p.cu_seqlens_k || p.seqused_k) && n >= blocks.begin && s.k_length < blocks.end * kBlockN) {
      rings.v.wait_full();
      clear_tail(smem.v(rings.v.stage()), s.k_length - n * kBlockN);
    }
    for (; n >= own.end && n >= blocks.begin; --n) skip();
    rings.q.wait_full();
    if (own.begin < own.end) {
      const auto needs_mask = [&](int n) { return n * kBlockN < unmasked.begin || (n + 1) * kBlockN > unmasked.end; };
      begin(n, needs_mask(n));
      for (--n; n >= own.begin; --n) {
        if (kHasWindow && needs_mask(n)) step(n, Switch<true>{});
        else step(n, Switch<false>{});
      }
      release(rings.q);  // the next tile's Q is loaded under the last product and the store
      finish();
    } else {
      release(rings.q);
    }
    for (; n >= blocks.begin; --n) skip();
    store(p, ld_shared<Work>(slot), consumer, o_frag, softmax);
    mbarrier_arrive(rings.work.empty());  // every thread has read it itself
    rings.work.advance();
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
    if (thread_index() == 0) produce(params, smem, rings);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(params, smem, rings, warpgroup - 1);
  }
}
