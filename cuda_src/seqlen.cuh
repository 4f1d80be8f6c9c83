// Which sequence a block works on: where its rows start and how many there are, and which tile of it.
#pragma once
#include "ptx_sm80.cuh"

// What q, k, v, their gradients and the bias hold, and what out and its gradient do. Params has pointers to 16 bits whichever it is.
template <int kBytes> struct ElementOf { typedef u16 Type; };
template <> struct ElementOf<4> { typedef float Type; };
template <> struct ElementOf<1> { typedef u8 Type; };
typedef ElementOf<kIsFp32 ? 4 : kIsE4m3 ? 1 : 2>::Type Element;
typedef ElementOf<kIsFp32 ? 4 : 2>::Type OutElement;

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }
DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Sequence {
  int batch;
  int q_length, k_length;          // rows of q, keys in use
  int k_rows;                      // rows of k the tensor has for this sequence, in use or not
  int diagonal;                    // k_length - q_length: row i sits at key i + diagonal (bottom-right alignment)
  int window_left, window_right;   // -1 unlimited
  i64 q_start, k_start;            // first row in the packed tensors; 0 unless varlen
};

struct PackedRows {
  i64 start;
  int length;
};
// Sequence `batch` of `total` packed rows. What device memory says is clamped: to the tensor, and to `longest` (what the grid and the
// workspaces were sized for).
DEVICE PackedRows packed_rows(const i32* cu_seqlens, int batch, i64 total, int longest) {
  const auto clamp = [](i64 x, i64 least, i64 most) { return x < least ? least : x > most ? most : x; };
  const i64 start = clamp(ld_global(cu_seqlens + batch), 0, total), end = clamp(ld_global(cu_seqlens + batch + 1), start, total);
  return {start, smaller((int)(end - start), longest)};
}

DEVICE Sequence sequence_of(const Params& p, int batch) {
  Sequence s;
  s.batch = batch;
  s.q_start = 0;
  s.k_start = 0;
  s.q_length = p.seqlen_q;
  s.k_length = p.seqlen_k;
  if (p.cu_seqlens_q) {
    const PackedRows rows = packed_rows(p.cu_seqlens_q, batch, p.total_q, p.seqlen_q);
    s.q_start = rows.start;
    s.q_length = rows.length;
  }
  if (p.cu_seqlens_k) {
    const PackedRows rows = packed_rows(p.cu_seqlens_k, batch, p.total_k, p.seqlen_k);
    s.k_start = rows.start;
    s.k_length = rows.length;
  }
  s.k_rows = s.k_length;
  if (p.seqused_k) s.k_length = smaller(s.k_length, larger(ld_global(p.seqused_k + batch), 0));
  s.diagonal = s.k_length - s.q_length;
  // A window as wide as everything is none; it also keeps i + diagonal + window within 32 bits.
  constexpr int kUnlimited = 1 << 30;
  s.window_left = p.window_left >= kUnlimited ? -1 : p.window_left;
  s.window_right = p.window_right >= kUnlimited ? -1 : p.window_right;
  return s;
}

// Rows of one sequence and head, from one of them on.
template <class T> struct Rows {
  T* first;
  i64 stride;
  DEVICE Rows from(int row) const { return {first + row * stride, stride}; }
  DEVICE Rows columns_from(int column) const { return {first + column, stride}; }
  DEVICE Rows forgotten() const { return {forget(first), stride}; }
};

template <class T>
DEVICE Rows<T> rows_of(T* tensor, int batch, i64 start, int head, i64 stride_batch, i64 stride_row, i64 stride_head) {
  return {tensor + (batch * stride_batch + start * stride_row + head * stride_head), stride_row};
}
DEVICE Rows<const Element> q_of(const Params& p, const Sequence& s, int head) {
  return rows_of((const Element*)p.q, s.batch, s.q_start, head, p.q_stride_batch, p.q_stride_row, p.q_stride_head);
}
DEVICE Rows<const Element> k_of(const Params& p, const Sequence& s, int head) {
  return rows_of((const Element*)p.k, s.batch, s.k_start, head, p.k_stride_batch, p.k_stride_row, p.k_stride_head);
}
DEVICE Rows<const Element> v_of(const Params& p, const Sequence& s, int head) {
  return rows_of((const Element*)p.v, s.batch, s.k_start, head, p.v_stride_batch, p.v_stride_row, p.v_stride_head);
}
DEVICE Rows<OutElement> out_of(const Params& p, const Sequence& s, int head) {
  return rows_of((OutElement*)p.out, s.batch, s.q_start, head, p.out_stride_batch, p.out_stride_row, p.out_stride_head);
}
DEVICE Rows<const OutElement> dout_of(const Params& p, const Sequence& s, int head) {
  return rows_of((const OutElement*)p.dout, s.batch, s.q_start, head, p.dout_stride_batch, p.dout_stride_row, p.dout_stride_head);
}
DEVICE Rows<Element> dq_of(const Params& p, const Sequence& s, int head) {
  return rows_of((Element*)p.dq, s.batch, s.q_start, head, p.dq_stride_batch, p.dq_stride_row, p.dq_stride_head);
}
DEVICE Rows<Element> dk_of(const Params& p, const Sequence& s, int head) {
  return rows_of((Element*)p.dk, s.batch, s.k_start, head, p.dk_stride_batch, p.dk_stride_row, p.dk_stride_head);
}
DEVICE Rows<Element> dv_of(const Params& p, const Sequence& s, int head) {
  return rows_of((Element*)p.dv, s.batch, s.k_start, head, p.dv_stride_batch, p.dv_stride_row, p.dv_stride_head);
}
// Element offset of (row 0 of the sequence, head) in logsumexp, dlogsumexp and delta.
DEVICE i64 statistics_offset(const Params& p, const Sequence& s, int head) {
  return p.cu_seqlens_q ? head * p.total_q + s.q_start : ((i64)s.batch * p.num_heads_q + head) * p.seqlen_q;
}
// First block of a packed sequence that begins at row `start`, among the blocks of `rows` rows of all: enough for its rows, and at most
// one too many, so that short sequences beside a long one take no more than their rows, rounded up. total / rows + batch in all.
DEVICE int first_packed_block(int start, int rows, int batch) { return start / rows + batch; }

// Block m of a sequence and head among all query blocks: turns, and dq_accum in units of kBlockM * kHeadDim floats.
DEVICE i64 query_block_offset(const Params& p, const Sequence& s, int head, int m_block) {
  const i64 first = p.cu_seqlens_q ? first_packed_block((int)s.q_start, kBlockM, s.batch) : (i64)s.batch * p.m_blocks;
  return (first + m_block) * p.num_heads_q + head;
}

struct Position {
  int block, head, batch;
};

// Blocks of one head next to each other: they share K and V in L2.
DEVICE Position position_of(u32 index, int blocks, int heads) {
  const u32 row = index / (u32)blocks;
  return {(int)(index % (u32)blocks), (int)(row % (u32)heads), (int)(row / (u32)heads)};
}

// The heads of a block next to each other, as their rows lie in memory.
DEVICE Position heads_together(u32 index, int blocks, int heads) {
  const Position swapped = position_of(index, heads, blocks);
  return {swapped.head, swapped.block, swapped.batch};
}

// Rows dealt out in sections of at most `most`, as equal as they can be: a short last one would end in tiles too long to share out
// (causal, 2048 tokens, 128 heads in sections of 25: 553 TFLOP/s, of 32: 603).
struct Section {
  u32 first, rows;
};
DEVICE Section section_of(u32 row, u32 rows, u32 most) {
  const u32 sections = (rows + most - 1) / most, each = rows / sections, longer = rows % sections;  // by one: the first ones
  const u32 section = row < longer * (each + 1) ? row / (each + 1) : longer + (row - longer * (each + 1)) / each;
  return {section * each + (section < longer ? section : longer), each + (section < longer ? 1 : 0)};
}

// Of `rows` of `blocks` each, a section of at most `most` after the other, and in a section a block of every row after the other.
DEVICE Position in_sections(u32 index, int blocks, int heads, u32 rows, u32 most) {
  const Section section = section_of(index / blocks, rows, most);
  const u32 within = index - section.first * blocks, row = section.first + within % section.rows;
  return {(int)(within / section.rows), (int)(row % (u32)heads), (int)(row / (u32)heads)};
}

// Of `seqlen` rows those that blocks which run at the same time have to do with.
DEVICE int rows_at_a_time(const Params& p, int seqlen) {
  if (kHasWindow && p.window_left >= 0 && p.window_right >= 0 && p.window_left < seqlen && p.window_right < seqlen)
    return smaller(seqlen, p.window_left + p.window_right + 1);
  return larger(seqlen, 1);
}

// Longest query block first (with a window the last ones see the most keys), over a section of heads at a time: as many as keep their K
// and V, `keys` rows of each, in kL2Bytes of L2, at most so many that they have `tiles` query blocks. `rows`: of m_blocks each;
// batch * num_heads_q, or fewer where the blocks of all sequences are in one.
template <i64 kL2Bytes> DEVICE Position longest_first(const Params& p, u32 index, u32 rows, u32 tiles, int keys) {
  constexpr u32 kL2Rows = kL2Bytes / ((kHeadDim + kHeadDimV) * sizeof(Element));  // of K and V
  const u32 fitting = kL2Rows / (u32)keys, most = tiles / p.m_blocks;
  const u32 together = (fitting < 1 ? 1 : fitting > 4096 ? 4096 : fitting) * (p.num_heads_q / p.num_heads_kv);
  const Position at = in_sections(index, p.m_blocks, p.num_heads_q, rows, together < most ? together : most < 1 ? 1 : most);
  return {p.m_blocks - 1 - at.block, at.head, at.batch};
}
template <i64 kL2Bytes> DEVICE Position longest_first(const Params& p, u32 index, u32 rows, u32 tiles) {
  return longest_first<kL2Bytes>(p, index, rows, tiles, larger(p.seqlen_k, 1));
}
