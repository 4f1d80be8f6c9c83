// What the three kernels of the Hopper backward hand to each other.
//
// Params.dq_accum is one record for every block of kBlockM queries that a sequence has, per query head:
//   kBlockM * kHeadDim floats   dq before scaling, in the order of wgmma's accumulators: [4 warps][tiles of 64 rows]
//                               [kHeadDim / 8][32 lanes][4], so that a warp adds one run of bytes
//   kBlockM floats              logsumexp * log2(e), +inf for rows that are none or see nothing: exp2(s - inf) = 0
//   kBlockM floats              -delta, 0 for rows that are none
// Records: [query blocks][num_heads_q] with batch * m_blocks query blocks, or those of packed_sm90.cuh.
//
// Params.dkv_accum, where several CTAs share the query heads of a key head, is one record for every block of kBlockN keys that a
// sequence has, per key head: kBlockN * kHeadDim floats of dk (scaled), as many of dv: [tiles of 64 keys][4 warps]
// [kHeadDim / 8][32 lanes][4].
#pragma once
#include "packed_sm90.cuh"
#include "tile.cuh"
#include "tile_sm90.cuh"

static_assert(kBlockM % 64 == 0 && kHeadDim % 32 == 0, "a record is wgmma tiles of 64 rows");
constexpr int kDqTiles = kBlockM / 64;
constexpr int kDqFloats = kBlockM * kHeadDim, kRecordFloats = kDqFloats + 2 * kBlockM;
constexpr int kWarpDqFloats = kDqFloats / 4;

// First query block of a sequence among all.
DEVICE u32 first_query_block(const Params& p, const Sequence& s) {
  return p.cu_seqlens_q ? (u32)first_block_of(p.cu_seqlens_q, kBlockM, s.batch) : (u32)s.batch * p.m_blocks;
}
DEVICE u32 record_of(const Params& p, u32 query_block, int head) { return query_block * p.num_heads_q + head; }
DEVICE float* dq_sums(const Params& p, u32 record) { return p.dq_accum + (i64)record * kRecordFloats; }
DEVICE float* logsumexp_rows(const Params& p, u32 record) { return dq_sums(p, record) + kDqFloats; }
DEVICE float* negative_delta_rows(const Params& p, u32 record) { return dq_sums(p, record) + kDqFloats + kBlockM; }
// Records of all sequences.
DEVICE u32 query_records(const Params& p) { return (u32)p.m_blocks * (p.cu_seqlens_q ? 1 : p.batch) * p.num_heads_q; }

constexpr int kKeyFloats = kBlockN * kHeadDim;  // of dk, and of dv
DEVICE u32 key_record_of(const Params& p, const Sequence& s, int n_block, int kv_head) {
  const u32 first = p.cu_seqlens_k ? (u32)first_block_of(p.cu_seqlens_k, kBlockN, s.batch) : (u32)s.batch * p.n_blocks;
  return (first + n_block) * p.num_heads_kv + kv_head;
}
DEVICE float* dk_sums(const Params& p, u32 record) { return p.dkv_accum + (i64)record * (2 * kKeyFloats); }
DEVICE float* dv_sums(const Params& p, u32 record) { return dk_sums(p, record) + kKeyFloats; }
