// A boolean mask packed before the kernel that uses it: each thread's bits of a tile of scores lie in the words it loads, and
// one flag per tile says whether it holds anything. So reading a mask costs one coalesced load a tile, whatever its strides,
// tiles that are hidden or visible as a whole cost none, and heads and sequences that share a mask share the packed one.
//
// Tiles of one query block (forward) or key block (backward) follow each other; kThreads words lie between one word of a
// thread and its next.
#pragma once
#include "parts.cuh"

constexpr u32 kAnyVisible = 1, kAllVisible = 2;  // flags of a tile; what lies outside of the mask counts for neither

template <class Part> struct TileBits {
  static constexpr int kWords = (4 * Part::kM * Part::kN + 31) / 32;
  u32 word[kWords];

  static constexpr int index(int m, int half, int n, int e) { return ((m * 2 + half) * Part::kN + n) * 2 + e; }
  DEVICE bool at(int m, int half, int n, int e) const {
    const int i = index(m, half, n, e);
    return word[i >> 5] >> (i & 31) & 1;
  }
  DEVICE void set(int m, int half, int n, int e, bool visible) {
    const int i = index(m, half, n, e);
    word[i >> 5] |= (u32)visible << (i & 31);
  }
  DEVICE void hide(int m, int half, int n, int e) {
    const int i = index(m, half, n, e);
    word[i >> 5] &= ~(1u << (i & 31));
  }
  DEVICE void fill(u32 value) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) word[w] = value;
  }
};

// Scores that the mask hides -> -inf.
template <class Part, int kM, int kN> DEVICE void apply_mask_bits(float (&s_frag)[kM][kN][4], const TileBits<Part>& bits) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s_frag[m][n][e] = bits.at(m, e >> 1, n, e & 1) ? s_frag[m][n][e] : negative_infinity();
}

// Masks that differ, along the heads and in all.
DEVICE int mask_heads(const Params& p) { return p.mask_stride_head == 0 ? 1 : p.num_heads_q; }
DEVICE i64 mask_number(const Params& p, int batch, int head) {
  return (i64)(p.mask_stride_batch == 0 ? 0 : batch) * mask_heads(p) + (p.mask_stride_head == 0 ? 0 : head);
}
template <class Part> DEVICE i64 first_mask_tile(const Params& p, i64 number, int block) {
  return Part::kKeysDown ? (number * p.n_blocks + block) * p.m_blocks : (number * p.m_blocks + block) * p.n_blocks;
}

// The tiles of one query or key block of one head. Holds the flags of 32 at a time; the same in every warp.
template <class Part> struct MaskTiles {
  i64 first;
  int group = -1;
  u32 any, all;

  DEVICE void open(const Params& p, int batch, int head, int block) {
    first = first_mask_tile<Part>(p, mask_number(p, batch, head), block);
    group = -1;
  }
  DEVICE void look(const Params& p, int i) {
    if (i >> 5 == group) return;
    group = i >> 5;
    const int at = group * 32 + lane_index();
    const u32 flags = at < (Part::kKeysDown ? p.m_blocks : p.n_blocks) ? ld_global((const u8*)p.mask_flags + (first + at)) : 0;
    any = ballot(flags & kAnyVisible);
    all = ballot(flags & kAllVisible);
  }
  // Of the tile `look` was last called for, or of one in its group of 32.
  DEVICE bool sees(int i) const { return any >> (i & 31) & 1; }
  DEVICE bool hides(int i) const { return !(all >> (i & 31) & 1); }

  DEVICE void load(TileBits<Part>& bits, const Params& p, int i) const {
    const u32* source = p.mask_bits + ((first + i) * (kThreads * TileBits<Part>::kWords) + thread_index());
#pragma unroll
    for (int w = 0; w < TileBits<Part>::kWords; ++w) bits.word[w] = ld_global(source + w * kThreads);
  }
};

// ---- packing: one tile a CTA ----

constexpr int kPackedPitch = kBlockN / 8, kPackedBytes = kBlockM * kPackedPitch;  // bits in shared memory, [query][key]

// Sixteen neighbouring bytes of 0 or 1 as sixteen bits.
DEVICE u32 bits_of_bytes(U32x4 bytes) {
  const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  u32 bits = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) bits |= ((words[w] & 0x01010101u) * 0x10204080u >> 28) << (4 * w);
  return bits;
}

template <class Part> DEVICE void pack_mask(const Params& p) {
  const i64 tile = block_index();
  const int inner_count = Part::kKeysDown ? p.m_blocks : p.n_blocks, outer_count = Part::kKeysDown ? p.n_blocks : p.m_blocks;
  const int inner = (int)(tile % inner_count), outer = (int)(tile / inner_count % outer_count);
  const int number = (int)(tile / inner_count / outer_count), heads = mask_heads(p);
  const int i_first = (Part::kKeysDown ? inner : outer) * kBlockM, j_first = (Part::kKeysDown ? outer : inner) * kBlockN;
  const u8* mask = p.mask + (number / heads * p.mask_stride_batch + number % heads * p.mask_stride_head);
  const u32 smem = shared_base();

  bool any = false, all = true;
#pragma unroll 2
  for (int copy = thread_index(); copy < kBlockM * kBlockN / 16; copy += kThreads) {
    const int row = copy / (kBlockN / 16), column = copy % (kBlockN / 16) * 16;
    const int i = i_first + row, j = j_first + column, count = i < p.seqlen_q ? smaller(p.seqlen_k - j, 16) : 0;
    const u8* source = mask + (i * p.mask_stride_row + j * p.mask_stride_column);
    u32 bits = 0;
    if (count == 16 && p.mask_stride_column == 1 && ((u64)source & 15) == 0) {
      bits = bits_of_bytes(ld_global((const U32x4*)source));
    } else {
#pragma unroll 1
      for (int e = 0; e < count; ++e) bits |= (u32)(ld_global(source + e * p.mask_stride_column) != 0) << e;
    }
    any |= bits != 0;
    all &= count <= 0 || bits == (1u << count) - 1;
    st_shared(smem + row * kPackedPitch + column / 8, (u16)bits);
  }
  const bool any_visible = sync_block_or(any), all_visible = !sync_block_or(!all);  // all bits are in shared memory

  TileBits<Part> bits;
  bits.fill(0);
#pragma unroll
  for (int m = 0; m < Part::kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < Part::kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = Part::row() + m * 16 + half * 8, column = Part::column() + n * 8 + e;
          const int query = Part::kKeysDown ? column : row, key = Part::kKeysDown ? row : column;
          bits.set(m, half, n, e, ld_shared<u8>(smem + query * kPackedPitch + key / 8) >> (key & 7) & 1);
        }
#pragma unroll
  for (int w = 0; w < TileBits<Part>::kWords; ++w)
    st_global(p.mask_bits + (tile * TileBits<Part>::kWords + w) * kThreads + thread_index(), bits.word[w]);
  if (thread_index() == 0)
    st_global(p.mask_flags + tile, (u8)((any_visible ? kAnyVisible : 0) | (all_visible ? kAllVisible : 0)));
}
