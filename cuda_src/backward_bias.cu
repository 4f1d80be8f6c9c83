// After a backward with a bias: its gradient from tiles in fragment order to [batch or 1, num_heads_q or 1, rows, keys], where rows
// and keys are those of one tile if the bias is broadcast along them; the launcher sums over what is left.
// Assumes dbias_accum complete. Stores all of dbias, in fp32 (kBiasIsFp32) or the dtype of q.
// Grid: tiles of dbias_accum; kNumWarps and tile as the backward has them.
#include "bias.cuh"

constexpr int kSharedMemory = 0;

DEVICE void store_gradient(const Params& p, i64 at, float value) {
  if constexpr (kBiasIsFp32) st_global((float*)p.dbias + at, value);
  else st_global((u16*)p.dbias + at, (u16)pack<kIsBf16>(value, 0.f));
}

KERNEL(kThreads, 1) attention_backward_bias(GRID_CONSTANT Params p) {
  const BiasGradient g = bias_gradient_of(p);
  const i64 tile = block_index(), copy = tile / g.m_tiles / g.n_tiles;
  const int m_tile = (int)(tile % g.m_tiles), n_tile = (int)(tile / g.m_tiles % g.n_tiles);
  const int rows = p.bias_stride_row != 0 ? p.seqlen_q : kBlockM, keys = p.bias_stride_column != 0 ? p.seqlen_k : kBlockN;
  const float* accum = p.dbias_accum + (tile * (kBlockM * kBlockN) + warp_index() * (KeysDown::kM * KeysDown::kN * 128));
#pragma unroll 1
  for (int m = 0; m < KeysDown::kM; ++m)
#pragma unroll 4
    for (int n = 0; n < KeysDown::kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = n_tile * kBlockN + KeysDown::row() + m * 16 + (e >> 1) * 8;
        const int i = m_tile * kBlockM + KeysDown::column() + n * 8 + (e & 1);
        if (i < rows && j < keys)
          store_gradient(p, (copy * rows + i) * keys + j, ld_global(accum + (m * KeysDown::kN + n) * 128 + fragment_index(e)));
      }
}
