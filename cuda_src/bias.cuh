// Additive bias: tiles of it on their way through shared memory, in the bias's own dtype, and its gradient.
#pragma once
#include "parts.cuh"
#include "scores.cuh"

constexpr bool kBiasIsFp32 = kIsFp32 || kWideBias;  // else it has the dtype of q
constexpr int kBiasBytes = kBiasIsFp32 ? 4 : 2;
using BiasTile = Tile<kBlockM, kBlockN * kBiasBytes / (int)sizeof(Element)>;  // [query][key]
constexpr int kBiasTileBytes = kHasBias ? BiasTile::kBytes : 0;

// Bias of one (batch, head), in bytes.
struct Bias {
  const u8* first;
  i64 stride_row, stride_column;
  bool aligned;  // keys next to each other, every row on a 16-byte boundary
};
DEVICE Bias bias_of(const Params& p, const Sequence& s, int head) {
  Bias bias = {};
  if constexpr (kHasBias) {
    bias.first = (const u8*)p.bias + (s.batch * p.bias_stride_batch + head * p.bias_stride_head) * kBiasBytes;
    bias.stride_row = p.bias_stride_row * kBiasBytes;
    bias.stride_column = p.bias_stride_column * kBiasBytes;
    bias.aligned = p.bias_stride_column == 1 && (((u64)bias.first | (u64)bias.stride_row) & 15) == 0;
  }
  return bias;
}

DEVICE u32 bias_bits(const u8* at) { return kBiasIsFp32 ? ld_global((const u32*)at) : ld_global((const u16*)at); }

// Starts the copy of rows [row, row + kRows) of the tile whose first element is (i, j), by the kCopiers threads that call it.
// What lies outside of the sequence becomes zero. The caller commits.
template <int kRows, int kCopiers>
DEVICE void load_bias(BiasTile tile, const Bias& bias, const Sequence& s, int i, int j, int row, int thread) {
  constexpr int kPerChunk = 16 / kBiasBytes;
#pragma unroll 4
  for (int copy = thread; copy < kRows * BiasTile::kChunks; copy += kCopiers) {
    const int r = row + copy / BiasTile::kChunks, chunk = copy % BiasTile::kChunks;
    const int count = i + r < s.q_length ? s.k_length - (j + chunk * kPerChunk) : 0;  // elements of the chunk that exist
    const u8* source = bias.first + ((i + r) * bias.stride_row + (j + chunk * kPerChunk) * bias.stride_column);
    if (count <= 0 || (bias.aligned && count >= kPerChunk)) {
      cp_async_16(tile.address(r, chunk), source, count > 0);
    } else {
      u32 words[4] = {};
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e)
        if (e < count) words[e * kBiasBytes / 4] |= bias_bits(source + e * bias.stride_column) << (e * kBiasBytes % 4 * 8);
      st_shared(tile.address(r, chunk), U32x4{words[0], words[1], words[2], words[3]});
    }
  }
}

// ---- tile -> registers ----

// Elements (row, column) and (row, column + 1); column even.
DEVICE F32x2 bias_pair(BiasTile tile, int row, int column) {
  if constexpr (!kHasBias) return {0.f, 0.f};
  if constexpr (kBiasIsFp32) return ld_shared<F32x2>(tile.address(row, column >> 2) + (column & 3) * 4);
  return unpack<kIsBf16>(ld_shared<u32>(tile.address(row, column >> 3) + (column & 7) * 2));
}

// Bias beside 16 kM keys x 16 queries of S^T, two n-fragments: value(m, n & 1, e) belongs to C element e.
template <int kM> struct BiasColumns {
  u32 frag[kM][4];
  BiasTile tile;
  int query, key;  // this thread's first element

  // `query`, `key`: where the fragments begin in the tile
  DEVICE void load(BiasTile from, int first_query, int first_key) {
    tile = from;
    query = first_query + (lane_index() & 3) * 2;
    key = first_key + (lane_index() >> 2);
    if constexpr (!kBiasIsFp32) {
      const Window16<BiasTile> window = right_first(tile, first_query, 0);
#pragma unroll
      for (int m = 0; m < kM; ++m) ldmatrix_x4_trans(frag[m], window.at(0, (first_key + m * 16) / 8));
    }
  }
  DEVICE float value(int m, int n, int e) const {
    if constexpr (kBiasIsFp32) {
      const int column = key + m * 16 + (e >> 1) * 8;
      return ld_shared<float>(tile.address(query + n * 8 + (e & 1), column >> 2) + (column & 3) * 4);
    } else {
      const F32x2 pair = unpack<kIsBf16>(frag[m][n * 2 + (e >> 1)]);
      return e & 1 ? pair.y : pair.x;
    }
  }
};

// ---- gradient ----

// dbias_accum holds a gradient per tile of scores, [fragment of the block][128 floats] as dq_accum does. Sequences, heads, query
// blocks and key blocks over which the bias is broadcast share tiles; but deterministic kernels keep sequences and heads
// apart, for then one CTA at most adds to a tile. attention_backward_bias brings the tiles into the order of the bias.
struct BiasGradient {
  int heads, m_tiles, n_tiles;
  bool per_batch;
};
DEVICE BiasGradient bias_gradient_of(const Params& p) {
  return {kDeterministic || p.bias_stride_head != 0 ? p.num_heads_q : 1, p.bias_stride_row != 0 ? p.m_blocks : 1,
          p.bias_stride_column != 0 ? p.n_blocks : 1, kDeterministic || p.bias_stride_batch != 0};
}
DEVICE float* bias_gradient_tile(const Params& p, int batch, int head, int n_block, int m_block) {
  const BiasGradient g = bias_gradient_of(p);
  const i64 copy = (i64)(g.per_batch ? batch : 0) * g.heads + (g.heads > 1 ? head : 0);
  const i64 tile = (copy * g.n_tiles + (g.n_tiles > 1 ? n_block : 0)) * g.m_tiles + (g.m_tiles > 1 ? m_block : 0);
  return p.dbias_accum + (tile * (kBlockM * kBlockN) + warp_index() * (KeysDown::kM * KeysDown::kN * 128));
}
