// Packed sequences in the grids and the tensor maps of the Hopper kernels.
//
// Grids have the blocks of all sequences in one row: one of as many blocks per sequence as the longest has would mostly come for
// nothing where lengths differ.
#pragma once
#include "ptx_sm90.cuh"
#include "seqlen.cuh"

constexpr int kNoBlock = 1 << 22;  // begins behind the end of every sequence

// Sequence b has the blocks from here on.
DEVICE int first_block_of(const i32* cu_seqlens, int rows, int b) {
  return first_packed_block(larger(ld_global(cu_seqlens + b), 0), rows, b);
}

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

// ---- rows of one sequence by TMA ----

// By these maps (out's, and all of the backward) rows that are not of the sequence never enter shared memory, whatever they hold
// (another sequence, a stale cache, NaN), and are never stored: the tensor map cuts a tile off at the sequence's end; a load fills up
// with zeros. Padded batches end where the map does. For
// packed rows and for seqused_k the map (head_dim, x, heads, y, z) has row strides in x and y, 2^30 rows in x, and such a stride in z that
// z = 2^30 takes 2^30 rows back: x = 2^30 - length + row, y = start + length is row `row`, and beyond `length` x is outside.
constexpr int kRaggedRows = 1 << 30;
struct RowOrigin {
  int x, y, z;  // of row 0
};
DEVICE RowOrigin origin_of(bool ragged, int batch, i64 start, int length) {
  if (ragged) return {kRaggedRows - length, (int)start + length, kRaggedRows};
  return {0, batch, 0};
}
DEVICE RowOrigin uniform(RowOrigin origin) { return {uniform(origin.x), uniform(origin.y), uniform(origin.z)}; }
template <class T> DEVICE void load_rows(T tile, const TensorMap* map, u32 barrier, RowOrigin origin, int row, int head) {
#pragma unroll
  for (int slab = 0; slab < T::kSlabs; ++slab)
    tma_load_5d(tile.base + slab * T::kSlabBytes, map, barrier, slab * 64, origin.x + row, head, origin.y, origin.z);
}
// Rows of a tile from `first` on, as many as the map's box has, as a group of this thread.
template <class T> DEVICE void store_rows(T tile, int first, const TensorMap* map, RowOrigin origin, int row, int head) {
#pragma unroll
  for (int slab = 0; slab < T::kSlabs; ++slab)
    tma_store_5d(map, tile.base + slab * T::kSlabBytes + first * T::kPitch, slab * 64, origin.x + row, head, origin.y, origin.z);
  bulk_commit();
}
