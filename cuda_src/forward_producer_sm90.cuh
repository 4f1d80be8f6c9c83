// The producer of the Hopper forward: which tile comes next, and Q, K and V of it by TMA.
//
// One warp, converged; an elected lane issues. So the compiler knows addresses to be the same in all lanes. Where one thread ran
// alone, each copy came with a loop of ten instructions that proved it, which consumers waited for. Without that, and with Q asked for
// early, head dims 128 and 256 are 1 to 3% faster.
#pragma once
#include "forward_sm90.cuh"
#include "packed_sm90.cuh"

// Rows by which tiles begin early, in whole warpgroups. Where causal rows see the more keys the later they are, warpgroups
// without rows belong into the first tile, which is the shortest, not into the last (head dim 128 at 2048: 6% less work).
DEVICE int missing_rows(const Sequence& s) {
  return kHasWindow ? (ceil_div(s.q_length, kBlockM) * kBlockM - s.q_length) / 64 * 64 : 0;
}

// Heads that are worked on together: as many as keep K and V in this much of the 50 MB of L2 (8192 tokens, causal, head dim
// 256: 779 TFLOP/s, with all heads at once 754; 8 bits, 2048 tokens: 866, with twice as many 852).
constexpr i64 kL2Bytes = (kIsE4m3 && kHeadDim > 128 ? 16 : 32) << 20;
// Short sequences: a tile or two a CTA. With more heads a section begins with tiles that all wait for memory, and ends with tiles that
// find K and V in L2 (512 tokens, causal, head dim 128: 340 TFLOP/s, as many as fit 318; head dim 256: one 383, two 334).
constexpr int kShortKeys = 1024, kShortTiles = kHeadDim > 128 ? 1 : 2;

// The next tile is claimed, and its Q asked for, when this many blocks of a tile (of a short one: one) are still to be loaded: Q comes
// from memory, and consumers that are done with a tile have nothing else to do (one or three instead: within 2%). Claimed when its
// predecessor began, a tile, which may be long, would wait while other CTAs run out of work (causal, head dim 256, 2048 tokens:
// 616 TFLOP/s instead of 633).
constexpr int kClaimedAhead = 2;

// Rows of V behind the last key hold other keys (of the next sequence, or not in use): p = 0 there, but 0 * NaN is not 0. By a warp.
DEVICE void clear_rows(VTile v_smem, int first_row) {
  constexpr int kChunks = 8 * VTile::kSlabs;
  for (int copy = lane_index() + first_row * kChunks; copy < kBlockN * kChunks; copy += 32) {
    const int row = copy / kChunks, chunk = copy % kChunks;
    st_shared(v_smem.base + (chunk >> 3) * VTile::kSlabBytes + row * VTile::kPitch + (chunk & 7) * 16, U32x4{0, 0, 0, 0});
  }
  fence_proxy_async();  // written by stores and read by wgmma
  sync_warp();          // by all lanes, before one arrives for the consumers
}

DEVICE void produce(const ParamsSm90& params, Shared smem, Rings rings) {
  const Params& p = params.common;
  const int rows = p.num_heads_q * (p.cu_seqlens_q ? 1 : p.batch);  // of m_blocks tiles each
  const u32 tiles = (u32)p.m_blocks * rows;
  const u32 together = p.seqlen_k <= kShortKeys && !p.cu_seqlens_q ? kShortTiles * grid_size() : tiles;  // tiles of a section, at most
  u32 index = block_index();
  const auto take_tile = [&] {
    return (u32)uniform(lane_index() == 0 ? (int)(atomic_add_global(params.tile_counters, 1) + grid_size()) : 0);
  };

  // What loads of one tile need: where its rows begin, which head and which row of the batch.
  struct Source {
    int row, head, batch;
  };
  const auto source_of_queries = [&](u32 slot) {
    const Work work = ld_shared<Work>(slot);
    const int row = (int)work.sequence.q_start + work.first_row;
    return Source{uniform(row), uniform(work.head), uniform(p.cu_seqlens_q ? 0 : work.sequence.batch)};
  };
  const auto source_of_keys = [&](u32 slot) {
    const Work work = ld_shared<Work>(slot);
    const int head = work.head / (p.num_heads_q / p.num_heads_kv);
    return Source{uniform((int)work.sequence.k_start), uniform(head), uniform(p.cu_seqlens_k ? 0 : work.sequence.batch)};
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
      const int keys = uniform(ld_shared<Work>(slot).sequence.k_length) - n * kBlockN;
      const bool cut = (p.cu_seqlens_k || p.seqused_k) && keys < kBlockN;
      if (elect()) v_smem.load(&params.v, cut ? rings.cut.full() : rings.v.full(), k.row + n * kBlockN, k.head, k.batch);
      if (cut) {
        rings.cut.wait_full();  // write after write: what the copy engine brought is there
        rings.cut.advance();
        clear_rows(v_smem, keys);
        if (elect()) mbarrier_arrive(rings.v.full());
      }
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
      const BlockKeys keys = keys_of_span(s, {larger(first_row, 0), first_row + kBlockM});
      work = {s, first_row, position.head, blocks_of(keys)};
      break;
    }
    rings.work.wait_empty();  // every consumer has read what was there
    sync_warp();              // write after read: so have all lanes here
    const u32 slot = smem.work(rings.work.stage());
    if (lane_index() == 0) st_shared(slot, work);
    if (lane_index() < kConsumers) {  // a lane for a consumer, none of which divides between two tiles
      const int first = work.first_row + lane_index() * 64;
      const BlockKeys keys = keys_of_span(work.sequence, {first, first + 64});
      st_shared(smem.own(rings.work.stage(), lane_index()), OwnKeys{blocks_of(keys), keys.all});
      mbarrier_arrive(rings.work.full());  // each for what it has written
    }
    sync_warp();  // read after write: all lanes read the slot
    rings.work.advance();
    if (work.head < 0) return;
    const Source q = source_of_queries(slot);
#pragma unroll
    for (int consumer = 0; consumer < kQStages - kConsumers; ++consumer) load_q(q, consumer);
  };

  claim();
  for (u32 tile = 0; uniform(ld_shared<Work>(smem.work(tile % 2)).head) >= 0; ++tile) {
    const u32 slot = smem.work(tile % 2);
    const Span blocks = uniform(ld_shared<Work>(slot).blocks);
    const Source keys = source_of_keys(slot);
    int n = blocks.begin;
    if (n < blocks.end) load_k(keys, n);
    // The rest of Q waits for the last scores of the tile before, or for its O to be stored.
#pragma unroll
    for (int consumer = kQStages - kConsumers; consumer < kConsumers; ++consumer) load_q(source_of_queries(slot), consumer);
    const auto load_until = [&](int end) {
      for (; n < end; ++n) {
        if (n + 1 < blocks.end) load_k(keys, n + 1);
        load_v(slot, keys, n);
      }
    };
    load_until(larger(blocks.end - kClaimedAhead, smaller(blocks.begin + 1, blocks.end - 1)));
    index = take_tile();
    claim();
    load_until(blocks.end);
  }

  // The last CTA to get here leaves the counters as it found them.
  if (lane_index() == 0 && atomic_add_global(params.tile_counters + 1, 1) == grid_size() - 1) {
    st_global(params.tile_counters, 0u);
    st_global(params.tile_counters + 1, 0u);
  }
}
