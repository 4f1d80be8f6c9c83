// Before a forward in 8 bits: V transposed into the records of values_sm90.cuh.
// Assumes rows of v that start at multiples of 4 bytes, head_dim_v a multiple of 4. Stores every record that has a key in use.
// Grid: n_blocks * num_heads_kv * batch, packed sequences n_blocks * num_heads_kv: a record a CTA.
#include "ptx_sm90.cuh"
#include "tile.cuh"
#include "values_sm90.cuh"

// A thread takes 4 columns of 32 keys, which are 128 neighbouring bytes of the record. They go out through shared memory, so that
// neighbouring threads store neighbouring chunks; there the 8 chunks of a thread are swapped about against bank conflicts.
constexpr int kGroups = kHeadDimV / 4, kItems = kBlockN / 32 * kGroups;
constexpr int kSharedMemory = kThreads * 128;

// Bytes i of four words, i = 0..3, into word i.
DEVICE void transpose_bytes(u32 (&r)[4]) {
  const u32 even_low = permute_bytes(r[0], r[1], 0x5140), even_high = permute_bytes(r[2], r[3], 0x5140);
  const u32 odd_low = permute_bytes(r[0], r[1], 0x7362), odd_high = permute_bytes(r[2], r[3], 0x7362);
  r[0] = permute_bytes(even_low, even_high, 0x5410), r[1] = permute_bytes(even_low, even_high, 0x7632);
  r[2] = permute_bytes(odd_low, odd_high, 0x5410), r[3] = permute_bytes(odd_low, odd_high, 0x7632);
}

KERNEL(kThreads, 1) attention_forward_values_sm90(GRID_CONSTANT Params p) {
  const int kv_head = block_index() % p.num_heads_kv, block = block_index() / p.num_heads_kv;
  Position position = {block % p.n_blocks, kv_head, block / p.n_blocks};
  if (p.cu_seqlens_k) position = in_sequence({block, kv_head, 0}, p.cu_seqlens_k, kBlockN, p.batch);
  const Sequence s = sequence_of(p, position.batch);
  const int first_key = position.block * kBlockN;
  if (first_key >= s.k_length) return;
  const Rows<const Element> v = v_of(p, s, kv_head).from(first_key);
  u8* record = value_record(p, block_index());
  const u32 staged = shared_base() + (thread_index() & ~7) * 128;  // of eight threads

  for (int start = 0; start < kItems; start += kThreads) {
    const int item = start + thread_index(), group = item % kGroups, first = item / kGroups * 32;
    u32 keys[32];
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const bool valid = item < kItems && first_key + first + j < s.k_length && group * 4 < p.head_dim_v;
      keys[j] = valid ? ld_global((const u32*)(v.from(first + j).first + group * 4)) : 0u;
    }
    U32x4 chunks[4][2];  // of four columns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 words[4][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int j = half * 16 + 2 * t;
        words[t][0] = keys[j], words[t][1] = keys[j + 1], words[t][2] = keys[j + 8], words[t][3] = keys[j + 9];
        transpose_bytes(words[t]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) chunks[c][half] = U32x4{words[0][c], words[1][c], words[2][c], words[3][c]};
    }
    const int mine = thread_index() & 7, swap = group & 1;
#pragma unroll
    for (int c = 0; c < 8; ++c) st_shared(staged + mine * 128 + ((c ^ mine) << 4), swap ? chunks[c >> 1][(c & 1) ^ 1] : chunks[c >> 1][c & 1]);
    sync_warp();  // eight threads' chunks are there
#pragma unroll
    for (int turn = 0; turn < 8; ++turn) {
      const int item_of_chunk = item - mine + turn;
      if (item_of_chunk < kItems)
        st_global((U32x4*)(record + (i64)item_of_chunk * 128 + mine * 16), ld_shared<U32x4>(staged + turn * 128 + ((mine ^ turn) << 4)));
    }
    sync_warp();
  }
}
