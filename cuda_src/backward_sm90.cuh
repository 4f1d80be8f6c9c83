// What both Hopper backwards share: shared memory and the loads into it, the walk over query blocks, masks, probabilities, turns.
//
// A masked key that holds NaN or Inf inside a tile some row sees: its P is 0, but 0 * NaN in dP or dS K reaches dq of rows that do not
// see it. Keys from k_length on never enter shared memory. The portable backward takes such keys out.
#pragma once
#include "packed_sm90.cuh"
#include "scores.cuh"
#include "tile_sm90.cuh"
#include "workspace_sm90.cuh"

static_assert(kHeadDim == kHeadDimV, "one head dim for q, k and v");
static_assert(!(kHasKeyRanges || kHasMask || kHasBias || kHasAlibi || kHasDropout), "features of the portable backward");
static_assert(kNumStages == 2, "stages and their phases are bits of a step counter");

using KeyTile = SlabTile<kBlockN, kHeadDim>;    // K, V
using QueryTile = SlabTile<kBlockM, kHeadDim>;  // Q, dO
using ScoreTile = SlabTile<kBlockN, kBlockM>;   // dS^T

// Shared memory: K | V | Q stages | dO stages | logsumexp stages | -delta stages | barriers, tile | what the kernel has beside these.
constexpr int kVOffset = KeyTile::kBytes, kQOffset = kVOffset + KeyTile::kBytes, kDoutOffset = kQOffset + 2 * QueryTile::kBytes;
constexpr int kStatisticsBytes = kBlockM * 4, kLogsumexpOffset = kDoutOffset + 2 * QueryTile::kBytes;
constexpr int kDeltaOffset = kLogsumexpOffset + 2 * kStatisticsBytes, kBarrierOffset = kDeltaOffset + 2 * kStatisticsBytes;
constexpr int kTileOffset = kBarrierOffset + 512;
constexpr int kOwnOffset = kBarrierOffset + 1024;  // a multiple of 1024 again
// Barriers, in bytes; those of Q and dO have two stages.
constexpr int kKFull = 0, kVFull = 8, kKeysEmpty = 16, kQFull = 24, kQEmpty = 40, kDoutFull = 56, kDoutEmpty = 72, kOwnBarriers = 88;
static_assert(kOwnOffset % 1024 == 0);

constexpr int kConsumerWarps = 8;
// The launch's 168 * 384 registers: 24 * 128 where one thread issues loads, 240 * 256 where the accumulators live.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

// A warp arrives with all lanes, together. One could arrive for all, after sync_warp(), and is no faster; compute-sanitizer's
// racecheck then takes the accesses of the others to be unordered.
constexpr int kWarpArrivals = 32;
DEVICE void arrive(u32 barrier) {
  sync_warp();
  mbarrier_arrive(barrier);
}

// A tile: a block of keys of a key head, and the share of its query heads that one CTA goes through (Params.splits).
struct alignas(16) KeyTask {
  int n_block, kv_head, split, batch;  // n_block < 0: there is no more
};

struct SharedMemory {
  u32 base;
  DEVICE KeyTile k() const { return {base}; }
  DEVICE KeyTile v() const { return {base + kVOffset}; }
  DEVICE QueryTile q(int stage) const { return {base + kQOffset + stage * QueryTile::kBytes}; }
  DEVICE QueryTile dout(int stage) const { return {base + kDoutOffset + stage * QueryTile::kBytes}; }
  DEVICE u32 logsumexp(int stage) const { return base + kLogsumexpOffset + stage * kStatisticsBytes; }
  DEVICE u32 negative_delta(int stage) const { return base + kDeltaOffset + stage * kStatisticsBytes; }
  DEVICE u32 barrier(int which, int stage = 0) const { return base + kBarrierOffset + which + stage * 8; }
  // The CTA's tile; the barrier of K says that it is there, kKeysEmpty that everybody has read it. Decoded once, by the producer: nobody
  // divides between two tiles.
  DEVICE KeyTask task() const { return ld_shared<KeyTask>(base + kTileOffset); }
  DEVICE void set_task(const KeyTask& task) const { st_shared(base + kTileOffset, task); }
  // What every CTA does first. `tile_readers`: threads that read the tile beside the consumers.
  template <class Init> DEVICE void start(int tile_readers, const Init& init_own_barriers) const {
    if (thread_index() == 0) {
      init_barriers(tile_readers);
      init_own_barriers();
      fence_mbarrier_init();  // TMA arrives at initialised barriers
    }
    sync_block();  // nobody waits at a barrier that is not initialised
  }

 private:
  DEVICE void init_barriers(int tile_readers) const {
    mbarrier_init(barrier(kKFull), 1);
    mbarrier_init(barrier(kVFull), 1);
    mbarrier_init(barrier(kKeysEmpty), kConsumerWarps * kWarpArrivals + tile_readers);
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(barrier(kQFull, stage), 1);
      mbarrier_init(barrier(kQEmpty, stage), kConsumerWarps * kWarpArrivals);
      mbarrier_init(barrier(kDoutFull, stage), 1);
      mbarrier_init(barrier(kDoutEmpty, stage), kConsumerWarps * kWarpArrivals);
    }
  }
};

// ---- which keys, which queries ----

DEVICE KeyTask uniform(const KeyTask& task) { return {uniform(task.n_block), uniform(task.kv_head), uniform(task.split), uniform(task.batch)}; }
DEVICE u32 tile_count(const Params& p) { return (u32)p.n_blocks * (p.cu_seqlens_k ? 1 : p.batch) * p.num_heads_kv * p.splits; }

// Key blocks in an order in which the CTAs that run at the same time share q, dout and dq in L2; heads are those of the shares.
// Windows: the first key block first, which causally is the longest. Deterministic: the last one first, which causally is the first
// to reach its diagonal, so nobody waits; without a window the key blocks of a head run a few steps behind each other, so few of a
// head should run at a time.
DEVICE Position place_of(const Params& p, u32 index) {
  const u32 heads = p.num_heads_kv * p.splits;
  if constexpr (!kHasWindow && !kDeterministic) return position_of(index, p.n_blocks, heads);
  constexpr i64 kL2Bytes = 32 << 20;            // of Hopper's 50 MB
  constexpr u32 kHeadsInLockstep = 33;          // a quarter of 132 SMs: four CTAs still share what one of them loads
  const i64 head_bytes = (i64)larger(p.seqlen_q, 1) * (kHeadDim * (2 + 2 + 4)) * p.split_heads;
  const u32 rows = (u32)(p.cu_seqlens_k ? 1 : p.batch) * heads;
  const u32 fitting = kHasWindow ? larger((int)(kL2Bytes / head_bytes), 1) : kHeadsInLockstep;
  const Section section = section_of(index / p.n_blocks, rows, fitting);
  const u32 within = index - section.first * p.n_blocks, row = section.first + within % section.rows;
  const int block = (int)(within / section.rows);
  return {kDeterministic ? p.n_blocks - 1 - block : block, (int)(row % heads), (int)(row / heads)};
}
DEVICE KeyTask task_of(const Params& p, u32 index) {
  Position at = place_of(p, index);
  if (p.cu_seqlens_k) at = in_sequence(at, p.cu_seqlens_k, kBlockN, p.batch);
  return {at.block, at.head / p.splits, at.head % p.splits, at.batch};
}

// Steps of a tile: the query blocks that see its keys, query head after query head of its share.
struct Walk {
  int left, m_block, head;
  u32 record;       // of m_block and head
  u32 heads;        // of all: from one query block's record to the next
  Span m_blocks;
  DEVICE Walk(const Params& p, const Sequence& s, const KeyTask& task) {
    m_blocks = query_blocks_of(s, task.n_block);
    left = larger(m_blocks.end - m_blocks.begin, 0) * p.split_heads;
    m_block = m_blocks.begin;
    head = (task.kv_head * p.splits + task.split) * p.split_heads;
    heads = p.num_heads_q;
    record = record_of(p, first_query_block(p, s) + m_block, head);
  }
  DEVICE void next() {
    --left;
    ++m_block;
    record += heads;
    if (m_block == m_blocks.end) {
      record -= (m_blocks.end - m_blocks.begin) * heads - 1;
      m_block = m_blocks.begin;
      ++head;
    }
  }
};

// By all lanes of a warp, which then know that it is the same for all.
DEVICE Walk uniform(Walk walk) {
  walk.left = uniform(walk.left), walk.m_block = uniform(walk.m_block), walk.head = uniform(walk.head);
  walk.record = uniform(walk.record), walk.m_blocks = {uniform(walk.m_blocks.begin), uniform(walk.m_blocks.end)};
  return walk;
}

// ---- the producer: one warp, of which one thread loads ----

// First row of the sequence in a tensor of keys; without cu_seqlens batches are whole numbers of rows apart (the launcher sees to it).
DEVICE RowOrigin key_origin(const Params& p, const Sequence& s, i64 stride_batch, i64 stride_row) {
  if (p.cu_seqlens_k || !p.seqused_k) return origin_of(p.cu_seqlens_k != nullptr, s.batch, s.k_start, s.k_length);
  return origin_of(true, s.batch, s.batch * (stride_batch / stride_row), s.k_length);
}

// Loads K and V of the tile.
DEVICE void load_keys(const ParamsSm90& params, SharedMemory smem, const KeyTask& task) {
  const Params& p = params.common;
  const Sequence s = sequence_of(p, task.batch);
  const auto load = [&](KeyTile tile, const TensorMap& map, u32 full, i64 stride_batch, i64 stride_row) {
    const RowOrigin origin = uniform(key_origin(p, s, stride_batch, stride_row));
    if (!elect()) return;
    mbarrier_arrive_expect_tx(full, KeyTile::kBytes);
    load_rows(tile, &map, full, origin, task.n_block * kBlockN, task.kv_head);
  };
  load(smem.k(), params.k, smem.barrier(kKFull), p.k_stride_batch, p.k_stride_row);
  load(smem.v(), params.v, smem.barrier(kVFull), p.v_stride_batch, p.v_stride_row);
}

// Takes tiles until there are no more. Per tile K and V, and for every step Q with logsumexp and dO with -delta, Q first because it
// is needed first. Those of the next tile's first step are loaded before its K and V, whose room is free last.
DEVICE void produce(const ParamsSm90& params, SharedMemory smem) {
  const Params& p = params.common;
  const u32 tiles = tile_count(p);
  const auto take = [&] {  // deterministic: first come, first served, see turns_before
    u32 next = 0;
    if (lane_index() == 0) next = atomic_add_global(kDeterministic ? (u32*)p.dq_turns : params.tile_counters, 1);
    return (u32)uniform(next) + (kDeterministic ? 0 : grid_size());
  };
  u32 parity = 1;                                                 // of kKeysEmpty: a fresh one is empty
  const auto hand_over = [&](const KeyTask& task) {
    mbarrier_wait(smem.barrier(kKeysEmpty), parity);              // write after read: the tile before is done with K and V
    parity ^= 1;
    if (elect()) smem.set_task(task);
  };
  int step = 0;
  u32 index = kDeterministic ? take() : block_index();
  while (index < tiles) {
    const KeyTask task = uniform(task_of(p, index));
    const Sequence s = sequence_of(p, task.batch);
    const RowOrigin queries = uniform(origin_of(p.cu_seqlens_q != nullptr, s.batch, s.q_start, s.q_length));
    const auto load_queries = [&](QueryTile tile, const TensorMap& map, u32 statistics, const float* source, u32 full, const Walk& at) {
      if (!elect()) return;
      mbarrier_arrive_expect_tx(full, QueryTile::kBytes + kStatisticsBytes);
      load_rows(tile, &map, full, queries, at.m_block * kBlockM, at.head);
      bulk_load(statistics, source, kStatisticsBytes, full);
    };
    const auto load_step = [&](const Walk& at) {
      const int stage = step & 1, parity = (step >> 1 & 1) ^ 1;
      mbarrier_wait(smem.barrier(kQEmpty, stage), parity);        // write after read: two steps ago is done with Q and logsumexp
      load_queries(smem.q(stage), params.q, smem.logsumexp(stage), logsumexp_rows(p, at.record), smem.barrier(kQFull, stage), at);
      mbarrier_wait(smem.barrier(kDoutEmpty, stage), parity);     // write after read: two steps ago is done with dO and delta
      load_queries(smem.dout(stage), params.dout, smem.negative_delta(stage), negative_delta_rows(p, at.record), smem.barrier(kDoutFull, stage), at);
      ++step;
    };
    Walk walk = uniform(Walk(p, s, task));
    if (walk.left == 0 && task.n_block * kBlockN < s.k_rows) {    // nobody sees these keys
      hand_over(task);
      if (elect()) {
        mbarrier_arrive(smem.barrier(kKFull));
        mbarrier_arrive(smem.barrier(kVFull));
      }
    }
    for (bool first = true; walk.left > 0; walk.next(), first = false) {
      load_step(walk);
      if (first) hand_over(task), load_keys(params, smem, task);
    }
    index = take();                                               // as late as it can be: whoever is free first goes on
  }
  hand_over({-1, 0, 0, 0});
  if (elect()) mbarrier_arrive(smem.barrier(kKFull));

  // The last CTA to get here leaves the counters as it found them.
  if (!kDeterministic && lane_index() == 0 && atomic_add_global(params.tile_counters + 1, 1) == grid_size() - 1) {
    st_global(params.tile_counters, 0u);
    st_global(params.tile_counters + 1, 0u);
  }
}

// ---- dQ = dS K ----

// acc [64, kColumns] = A^T B over the rows of both tiles, of one slab (64 columns) of A.
template <int kColumns, class A, class B> DEVICE void issue_transposed_multiply(float (&acc)[kColumns / 2], Operand a, Operand b) {
  static_assert(A::kRows == B::kRows, "reduced dimension");
#pragma unroll
  for (int k = 0; k < B::kRows / 16; ++k) wgmma_ss<kColumns, kIsBf16, true, true>(acc, a.at(A::across(k)), b.at(B::across(k)), k != 0);
  wgmma_commit();
}

// ---- masks ----

// Who sees 64 keys from `first_key` on: key c of them is seen by the queries first + c <= i <= first + c + span. Unlimited sides are
// wider than the sequence. Rows that are none need no mask: their logsumexp is +inf (but a key that holds Inf gets NaN of their zeros).
struct KeyMask {
  int first;
  u32 span;
  int keys;          // of the sequence, from first_key on
  bool ends;         // among these
  int own_first[2];  // of this thread's keys; kNever beyond the end
  DEVICE KeyMask(const Sequence& s, int first_key) {
    const int unlimited = s.q_length + s.k_length;
    const int right = s.window_right >= 0 ? s.window_right : unlimited, left = s.window_left >= 0 ? s.window_left : unlimited;
    first = first_key - s.diagonal - right;
    span = (u32)left + (u32)right;
    keys = s.k_length - first_key;
    ends = keys < 64;
#pragma unroll
    for (int half = 0; half < 2; ++half) own_first[half] = own_key(half) < keys ? first + own_key(half) : kNever;
  }
  DEVICE static int own_key(int half) { return (warp_index() & 3) * 16 + (lane_index() >> 2) + 8 * half; }
  // S^T of the queries from `i` on: what must not be seen -> -inf.
  template <int kCount> DEVICE void apply(float (&s_frag)[kCount], int i) const {
    const bool all = !kHasWindow || (i >= first + 63 && (u32)(i + kBlockM - 1 - first) <= span);
    if (all && !ends) return;
    i += (lane_index() & 3) * 2;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const int half = e >> 1 & 1;
      const bool hidden = kHasWindow ? (u32)(i + e / 4 * 8 + (e & 1) - own_first[half]) > span : own_key(half) >= keys;
      if (hidden) s_frag[e] = negative_infinity();
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
// P^T = exp2(S^T - logsumexp), packed as the A operand of dV; S^T is q.k, with a softcap its tanh, -inf where it is hidden. keep(pair,
// first, second) gets what dS^T takes of it: P^T, with a softcap P^T * dtanh.
template <int kCount, class Keep>
DEVICE void probabilities(const float (&s)[kCount], u32 (&p_frag)[kCount / 2], const float (&logsumexp)[kCount / 2], const Scores& scores, const Keep& keep) {
#pragma unroll
  for (int pair = 0; pair < kCount / 2; ++pair) {
    float probability[2], weight[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float x = s[2 * pair + e], subtracted = logsumexp[pair / 2 * 2 + e];
      if constexpr (kHasSoftcap) {
        probability[e] = exp2_approx(x * scores.softcap_log2 - subtracted);
        weight[e] = probability[e] * maximum(1.f - x * x, 0.f);  // hidden: 0 * 0, not 0 * -inf
      } else {
        weight[e] = probability[e] = exp2_approx(x * scores.scale_log2 - subtracted);
      }
    }
    keep(pair, weight[0], weight[1]);
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
// The same from P^T as packed for dV: a bit less exact (eager attention rounds P here, too), but P^T in fp32 need not live until dP^T is there.
template <int kCount> DEVICE void score_gradients(u32 (&ds_frag)[kCount / 2], const u32 (&p_frag)[kCount / 2], const float (&dp)[kCount], const float (&negative_delta)[kCount / 2]) {
#pragma unroll
  for (int pair = 0; pair < kCount / 2; ++pair) {
    const F32x2 p = unpack<kIsBf16>(p_frag[pair]);
    ds_frag[pair] = pack<kIsBf16>(p.x * (dp[2 * pair] + negative_delta[pair / 2 * 2]), p.y * (dp[2 * pair + 1] + negative_delta[pair / 2 * 2 + 1]));
  }
}
// A warp's 16 keys of dS^T into the tile [key][query], `warp_row` on, which the product dS K reads as a transposed A.
DEVICE void store_scores(ScoreTile tile, int warp_row, const u32 (&ds_frag)[kBlockM / 4]) {
  const u32 address = tile.base + (warp_row + (lane_index() & 15)) * 128 + (((lane_index() >> 4) ^ (lane_index() & 7)) << 4);
#pragma unroll
  for (int k = 0; k < kBlockM / 16; ++k)
    stmatrix_x4((address ^ k % 4 << 5) + k / 4 * ScoreTile::kSlabBytes, {ds_frag[4 * k], ds_frag[4 * k + 1], ds_frag[4 * k + 2], ds_frag[4 * k + 3]});
}

// ---- dK and dV ----

// Where several CTAs share a key head, each adds to the workspace; deterministic: in the order of their shares, warp by warp. A share
// waits for one that place_of() has put before it, which ends the argument of turns_before in the same way.
DEVICE i32* adders_of(const Params& p, u32 record) { return p.dq_turns + 1 + query_records(p) + record; }
DEVICE void await_shares(const Params& p, const KeyTask& task, u32 record) {
  if (!kDeterministic || p.splits == 1) return;
  while (uniform(ld_acquire_global(adders_of(p, record))) < uniform(task.split) * kConsumerWarps) {}
}
DEVICE void pass_share(const Params& p, u32 record) {
  if (!kDeterministic || p.splits == 1) return;
  fence_global();  // this thread's sums are in memory
  sync_warp();     // the warp's
  if (lane_index() == 0) red_release_add_global(adders_of(p, record), 1);
}
// dK or dV of a warpgroup's 64 keys, scaled; `warp_row` is the warp's first of the CTA's rows, `sums` those of the workspace.
template <int kCount> DEVICE void store_gradient(const Params& p, float (&acc)[kCount], float scale, Rows<u16> rows, float* sums, const KeyTask& task, int warp_row, const Sequence& s) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] *= scale;
  if (p.splits == 1) {
    store_accumulators(rows, task.n_block * kBlockN + warp_row + (lane_index() >> 2), s.k_rows, p.head_dim, acc);
    return;
  }
  sums += warp_row * kHeadDim + lane_index() * 4;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) red_add_global(sums + i * 128, F32x4{acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]});
}

// ---- deterministic dq: key blocks add to a query block in falling order ----
// Params.dq_turns: a word that deals out key blocks, then one counter a record, of what has been added to it; all zeroed.
//
// Nobody waits for ever. A tile waits only for tiles of its own head that come before it in task_of's order. A CTA takes tiles in
// that order and goes through them in that order, so those it waits for have been taken before, by CTAs that run, and a CTA that
// runs keeps its multiprocessor. All tiles of a head add in the same order of steps and never wait for anything between two adds but
// their own loads and products, and turns of such tiles (each warpgroup's, where two add). So the first unfinished tile waits for
// nobody and finishes, then the next.

// Key blocks that add to query block m before block n does. By the rule of query_blocks_of those are all between n and the last
// one whose first key some row of m sees.
DEVICE int turns_before(const Sequence& s, int n_block, int m_block) {
  int last = ceil_div(s.k_length, kBlockN) - 1;
  if (kHasWindow && s.window_right >= 0) last = smaller(last, (m_block * kBlockM + kBlockM - 1 + s.diagonal + s.window_right) / kBlockN);
  return last - n_block;
}
DEVICE void await_turn(const Params& p, u32 record, int turn) {
  while (ld_acquire_global(p.dq_turns + 1 + record) < turn) {}
}
DEVICE void pass_turn(const Params& p, u32 record) { red_release_add_global(p.dq_turns + 1 + record, 1); }
