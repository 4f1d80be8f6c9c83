// One row of attention without tensor cores, from the keys it sees alone. A masked value of V enters a product of tiles with
// p = 0, and 0 * NaN is NaN: rows whose O came out not finite are computed here once more. Slow, and taken only where V
// (or what a row sees) holds NaN or Inf.
#pragma once
#include "ptx_sm90.cuh"
#include "scores.cuh"

DEVICE float widen(u8 bits) { return unpack_e4m3(bits); }

// Row i of `out` again, by one warp. Control flow is uniform and known to be: were it not, the compiler would keep what the
// caller has in uniform registers (descriptors above all) in ordinary ones.
DEVICE void recompute_row(const Params& p, const Sequence& s, int head, int i, float logsumexp) {
  const int kv_head = head / (p.num_heads_q / p.num_heads_kv);
  const Element* q = q_of(p, s, head).from(i).first;
  const Rows<const Element> k = k_of(p, s, kv_head), v = v_of(p, s, kv_head);
  const Scores scores = scores_of(p, s, head);
  const Span seen = keys_of(p, s, i), keys = {uniform(seen.begin), uniform(seen.end)};
  float acc[kHeadDimV / 32];  // columns lane, lane + 32, ...
#pragma unroll
  for (int c = 0; c < kHeadDimV / 32; ++c) acc[c] = 0.f;
#pragma unroll 1
  for (int j = keys.begin; j < keys.end; ++j) {
    float dot = 0.f, derivative;
#pragma unroll 1
    for (int d = lane_index(); d < p.head_dim; d += 32)
      dot += widen(ld_global(q + d)) * widen(ld_global(k.from(j).first + d));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) dot += shfl_xor(dot, lanes);
    if constexpr (kHasSoftcap) dot = capped(dot, 1.f, scores.argument, small_cap_of(1.f, scores.argument));
    const float x = score_log2(s, scores, dot, 0.f, i, j, derivative);
    const float probability = exp2_approx(x - logsumexp * kLog2e);
#pragma unroll
    for (int c = 0; c < kHeadDimV / 32; ++c) {
      const int d = lane_index() + c * 32;
      if (d < p.head_dim_v) acc[c] += probability * widen(ld_global(v.from(j).first + d));
    }
  }
  const float scale = kIsE4m3 ? descale(p, p.v_descale, s.batch, head) : 1.f;
#pragma unroll
  for (int c = 0; c < kHeadDimV / 32; ++c) {
    const int d = lane_index() + c * 32;
    if (d < p.head_dim_v) st_global(out_of(p, s, head).from(i).first + d, (u16)pack<kIsBf16>(acc[c] * scale, 0.f));
  }
}

// Of the 16 rows of a warp those that are not `finite`. A lane has rows i_first and i_first + 8, the four of a quad the same.
DEVICE void recompute_rows(const Params& p, const Sequence& s, int head, int i_first, const float (&logsumexp)[2],
                           const bool (&finite)[2]) {
  const int lane = lane_index();
#pragma unroll 1
  for (int row = 0; row < 16; ++row) {
    const bool upper = row >= 8, mine = lane >> 2 == (row & 7);
    const bool redo = vote_any(mine && !(upper ? finite[1] : finite[0]));
    const int i = uniform(i_first - (lane >> 2) + row);
    float row_logsumexp = mine && (lane & 3) == 0 ? (upper ? logsumexp[1] : logsumexp[0]) : 0.f;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) row_logsumexp += shfl_xor(row_logsumexp, lanes);
    if (redo && i < uniform(s.q_length)) recompute_row(p, s, head, i, row_logsumexp);
  }
}
