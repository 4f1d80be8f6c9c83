// V in 8 bits, as the Hopper forward multiplies with it. wgmma reads 8-bit operands along the reduced dimension only, so V is
// needed transposed; a kernel beforehand writes it into records, one for every block of kBlockN keys that a sequence has and every
// key head, exactly as they will lie in shared memory (ValueTile in forward_sm90.cuh):
//   [kBlockN / 32 slabs of keys][kHeadDimV columns of V][32 bytes]
// with the two chunks of 16 bytes swapped in rows r where r / 4 is odd: the 32-byte swizzle. Keys behind the last are 0, those in
// use of another sequence or nobody's NaN do not get in. Params.v_tiles has them in the order of packed_sm90.cuh, heads innermost.
//
// The keys of a chunk are permuted: byte 4 t + i holds key 2 t + i % 2 + 8 (i / 2). Accumulators of the scores are then, packed by
// fours, the A fragments of the product with V: a thread of quad position t has keys 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of every 16.
#pragma once
#include "packed_sm90.cuh"

static_assert(!kIsE4m3 || kBlockN % 32 == 0, "whole slabs");
constexpr int kValueBytes = kBlockN * kHeadDimV;  // of a record

DEVICE u8* value_record(const Params& p, int record) { return p.v_tiles + (i64)record * kValueBytes; }

// Number of the record of a sequence's block n.
DEVICE int value_record_of(const Params& p, const Sequence& s, int n_block, int kv_head) {
  const int first = p.cu_seqlens_k ? first_block_of(p.cu_seqlens_k, kBlockN, s.batch) : s.batch * p.n_blocks;
  return (first + n_block) * p.num_heads_kv + kv_head;
}
