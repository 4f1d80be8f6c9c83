// Packed sequences in the grids of the Hopper kernels: the blocks of all sequences in one row. A grid of as many blocks per sequence
// as the longest has would mostly come for nothing where lengths differ.
#pragma once
#include "seqlen.cuh"

constexpr int kNoBlock = 1 << 22;  // begins behind the end of every sequence

// Sequence b has the blocks from here on: enough for its rows, and at most one too many. All have total_rows / rows + batch.
DEVICE int first_block_of(const i32* cu_seqlens, int rows, int b) { return larger(ld_global(cu_seqlens + b), 0) / rows + b; }

// Block at.block of all sequences -> its sequence, and the block there. `batch` >= 1 sequences.
DEVICE Position in_sequence(Position at, const i32* cu_seqlens, int rows, int batch) {
  int b = 0, last = batch - 1;
  while (b < last) {
    const int middle = (b + last + 1) / 2;
    if (first_block_of(cu_seqlens, rows, middle) <= at.block) b = middle;
    else last = middle - 1;
  }
  const int block = at.block - first_block_of(cu_seqlens, rows, b);
  return {block < 0 ? kNoBlock : block, at.head, b};
}

// Query block `index` of a grid of m_blocks * num_heads_q * batch, packed: m_blocks * num_heads_q. The heads of a block next to each
// other, as their rows and records lie in memory.
DEVICE Position query_block_of(const Params& p, u32 index) {
  const Position at = heads_together(index, p.m_blocks, p.num_heads_q);
  return p.cu_seqlens_q ? in_sequence(at, p.cu_seqlens_q, kBlockM, p.batch) : at;
}
