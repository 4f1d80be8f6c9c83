// The query blocks that a key block goes through, head by head: which of them see any of it, which need a mask, and when each is added
// to in deterministic order.
#pragma once
#include "mask_tiles.cuh"
#include "query_rows.cuh"

struct QueryBlock {
  int head, m_block;  // head within the group
};

// Deterministic: key blocks add to a query block in rising order, each when the ones before it are through. No deadlock: a CTA waits
// only for CTAs of lower index, which started earlier and never wait for it. One thread passes turns and one of another warp waits for
// them: either holds its warp up (4.65 ms, where one did both 4.93).
constexpr int kPassing = 0, kAwaiting = kThreads - 1;

struct QueryBlocks {
  const Params& p;
  const Sequence& sequence;
  const int batch, first_head, group, n_block, first_key;
  const Span m_blocks;
  // Of the block found last: whether some row of it does not see every key, and whether that is so by more than the boolean mask.
  bool masked = false, bounded = false;
  MaskTiles<KeysDown> mask_tiles;
  int mask_head = -1;  // whose tiles they are

  DEVICE QueryBlocks(const Params& params, const Sequence& s, const Position& position, int heads)
      : p(params), sequence(s), batch(position.batch), first_head(position.head * heads), group(heads), n_block(position.block),
        first_key(position.block * kBlockN), m_blocks(query_blocks_of(s, position.block)) {}

  DEVICE int head_of(QueryBlock b) const { return first_head + b.head; }
  DEVICE bool contains(QueryBlock b) const { return b.head < group; }

  DEVICE i32* turn_of(QueryBlock b) const { return p.dq_turns + query_block_offset(p, sequence, head_of(b), b.m_block); }
  DEVICE void await_turn(QueryBlock b) const {
    if (thread_index() == kAwaiting)
      while (ld_acquire_global(turn_of(b)) < n_block - first_key_block_of(sequence, b.m_block)) {}
  }
  DEVICE void pass_turn(QueryBlock b, int thread = kPassing) const {
    if (thread_index() == thread) red_release_add_global(turn_of(b), 1);
  }

  // The first query block from b on that sees anything here.
  DEVICE QueryBlock find(QueryBlock b) {
    for (; b.head < group; ++b.m_block) {
      if (b.m_block >= m_blocks.end) b.m_block = m_blocks.begin, ++b.head;
      if (b.head == group || m_blocks.begin >= m_blocks.end) { b.head = group; break; }
      const int first = b.m_block * kBlockM, last = smaller(first + kBlockM, sequence.q_length) - 1;
      bool visible = true;
      const Span top = window_of(sequence, first), bottom = window_of(sequence, last);
      masked = bottom.begin > first_key || top.end < first_key + kBlockN;
      if constexpr (kHasKeyRanges) {
        const U32x4 hull = ld_global((const U32x4*)p.key_hulls + ((i64)batch * p.m_blocks + b.m_block));
        const Span any = {(int)hull.x, (int)hull.y}, all = {(int)hull.z, (int)hull.w};
        visible = larger(any.begin, first_key) < smaller(any.end, first_key + kBlockN);
        masked = masked || all.begin > first_key || all.end < first_key + kBlockN;
      }
      if constexpr (kHasMask) {
        if (mask_head != b.head) mask_tiles.open(p, batch, first_head + (mask_head = b.head), n_block);
        mask_tiles.look(p, b.m_block);
        visible = visible && mask_tiles.sees(b.m_block);
        bounded = masked;
        masked = bounded || mask_tiles.hides(b.m_block);
      }
      if (visible) break;
      if constexpr (kDeterministic) {
        await_turn(b);
        pass_turn(b, kAwaiting);
      }
    }
    return b;
  }

  // The boolean mask of the block found last.
  DEVICE void fetch_mask(TileBits<KeysDown>& bits, QueryBlock b) const {
    if (mask_tiles.hides(b.m_block)) mask_tiles.load(bits, p, b.m_block);
    else bits.fill(~0u);
  }
  // What a row does not see by window, lengths and key_ranges is taken out of the mask.
  DEVICE void hide_unseen(TileBits<KeysDown>& bits, QueryBlock b, u32 smem) const {
#pragma unroll
    for (int n = 0; n < kQueryFrags; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = KeysDown::column() + n * 8 + e, i = b.m_block * kBlockM + column;
        Span keys = {0, kNever};
        if constexpr (kHasKeyRanges) {
          const U32x2 range = range_of_row(smem, column);
          keys = {(int)range.x, (int)range.y};
        }
#pragma unroll
        for (int m = 0; m < kKeyFrags; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int j = first_key + KeysDown::row() + m * 16 + half * 8;
            if (!(kHasKeyRanges ? keys.holds(j) : queries_of(sequence, j).holds(i))) bits.hide(m, half, n, e);
          }
      }
  }
};
