// Dropout: which elements of P are kept, the same in forward and backward, whatever their tiles.
//
// One Philox call draws two pairs (a, b) of words for rows i & 7 of 32 and keys j & 6, j & 7 | 1 of 64: the first pair for the lower
// 32 keys, the second for the upper. An element's word is a * m + b, m a constant of its own for i & 24 and j & 24; its 15 bits are
// the lower half's of even keys, the upper half's of odd ones, without the top bit. With a and b uniform, the words of any two m are
// uniform and independent (Dietzfelbinger, STACS 1996) in all but the lowest bits the two have in common, three at most: elements are
// pairwise independent to 2^-12, and where no call is shared, independent.
#pragma once
#include "seqlen.cuh"

// Philox4x32-7 (Salmon et al., SC 2011: the fewest rounds that pass BigCrush).
DEVICE U32x4 philox(U32x4 counter, u32 key_low, u32 key_high) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const u64 product_x = (u64)0xD2511F53u * counter.x, product_z = (u64)0xCD9E8D57u * counter.z;
    counter = {(u32)(product_z >> 32) ^ counter.y ^ key_low, (u32)product_z,
               (u32)(product_x >> 32) ^ counter.w ^ key_high, (u32)product_x};
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

// m of rows 8 r.. and keys 8 k..: words of pi, the last four bits all different.
constexpr u32 kMultipliers[4][4] = {{0x243F6A80u, 0x85A308D1u, 0x13198A22u, 0x03707343u}, {0xA4093824u, 0x299F31D5u, 0x082EFA96u, 0xEC4E6C87u}, {0x452821E8u, 0x38D01379u, 0xBE5466CAu, 0x34E90C6Bu}, {0xC0AC29BCu, 0xC97C50DDu, 0x3F84D5BEu, 0xB547091Fu}};
// Of rows 16 `lower` + 8 half.. and keys 16 `right` + 8 k..: a constant where these are.
DEVICE u32 multiplier(bool lower, int half, bool right, int k) {
  return lower ? right ? kMultipliers[2 + half][2 + k] : kMultipliers[2 + half][k]
               : right ? kMultipliers[half][2 + k] : kMultipliers[half][k];
}

struct Dropout {
  u32 key_low, key_high, row, offset;
  u32 share;    // of 2^15: what is rarer of dropped and kept elements has bits below it
  u32 dropped;  // ~0 where these are the dropped ones
  float keep;   // 1 / (1 - dropout_p)
  DEVICE U32x4 words(int i, int j) const {
    return philox({(((u32)j >> 6) << 2) | ((u32)j >> 1 & 3), (((u32)i >> 5) << 3) | ((u32)i & 7), row, offset}, key_low, key_high);
  }
};

DEVICE float keep_factor(const Params& p) { return p.dropout_p < 1.f ? 1.f / (1.f - p.dropout_p) : 0.f; }

DEVICE Dropout dropout_of(const Params& p, int batch, int head) {
  Dropout dropout = {};
  dropout.keep = 1.f;
  if constexpr (kHasDropout) {
    const u64 seed = ld_global(p.rng_state), offset = ld_global(p.rng_state + 1);
    const bool rare = p.dropout_p <= 0.5f;
    const float share = (rare ? p.dropout_p : 1.f - p.dropout_p) * 32768.f;
    const u32 floor = (u32)share;
    dropout = {(u32)seed, (u32)(seed >> 32), (u32)(batch * p.num_heads_q + head), (u32)offset,
               floor + (share - (float)floor >= 0.5f ? 1u : 0u), rare ? ~0u : 0u, keep_factor(p)};
  }
  return dropout;
}

// ---- queries down, keys across ----

// Zeroes what is dropped of P in A fragments of step k, 16 keys; the factor `keep` is left to the end. (i, j) is this thread's first
// element of a tile that begins at a multiple of 16 kM rows and of kBlockN keys, 32 or a multiple of 64. `words` lives from step to
// step.
template <int kM> DEVICE void drop(u32 (&p_frag)[kM][4], U32x4 (&words)[(kM + 1) / 2], const Dropout& dropout, int i, int j, int k) {
  constexpr bool kWhole = kBlockN % 64 == 0;  // a call's keys lie in one tile
  static_assert(kIsFp32 || kWhole || kBlockN == 32, "the second of a call's pairs begins with a tile");
  const u32 share = dropout.share << 16 | dropout.share;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    if (m % 2 == 0 && k % (kWhole ? 4 : 2) == 0) words[m / 2] = dropout.words(i + m * 16, j + k * 16);
    const bool lower = kM == 1 ? i >> 4 & 1 : m & 1, second = kWhole ? k >> 1 & 1 : j >> 5 & 1;
    const u32 a = second ? words[m / 2].z : words[m / 2].x, b = second ? words[m / 2].w : words[m / 2].y;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      // Bits below 2^14, the share among them, are finite fp16 numbers in the same order; NaN is below nothing.
      p_frag[m][e] &= set_lt_f16x2(abs_f16x2(a * multiplier(lower, e & 1, k & 1, e >> 1) + b), share) ^ dropout.dropped;
  }
}

// The same for P as C fragments [16 kM queries x 8 kN keys] of floats; tiles begin at a multiple of 8 kN keys.
template <int kM, int kN> DEVICE void drop_scores(float (&p_frag)[kM][kN][4], const Dropout& dropout, int i, int j) {
  U32x4 words;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if (n % 8 == 0) words = dropout.words(i + m * 16, j + n * 8);
      const int keys = j + n * 8;
      const bool second = keys >> 5 & 1;
      const u32 a = second ? words.z : words.x, b = second ? words.w : words.y;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 word = a * multiplier((i + m * 16) >> 4 & 1, half, keys >> 4 & 1, n & 1) + b;
        if ((word << 17 < dropout.share << 17) == (dropout.dropped != 0)) p_frag[m][n][half * 2] = 0.f;
        if ((word << 1 < dropout.share << 17) == (dropout.dropped != 0)) p_frag[m][n][half * 2 + 1] = 0.f;
      }
    }
}

// ---- keys down, queries across ----

// A thread's pairs (a, b) of two queries beside 16 kM keys, shifted so that the bits of its keys come last, from bit 17 on.
template <int kM> struct ColumnDraws {
  u32 a[2], b[2];

  // (i, j) is this thread's first element, of 32 queries and of keys that begin at a multiple of 16 kM.
  DEVICE void draw(const Dropout& dropout, int i, int j) {
    static_assert(kM <= 2, "keys of one call");
    const int shift = j & 1 ? 1 : 17;
    const bool second = j >> 5 & 1;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const U32x4 words = dropout.words(i + e, j);
      a[e] = (second ? words.z : words.x) << shift;
      b[e] = (second ? words.w : words.y) << shift;
    }
  }
  DEVICE bool keeps(const Dropout& dropout, int e, u32 multiplier) const {
    return (a[e] * multiplier + b[e] < dropout.share << 17) != (dropout.dropped != 0);
  }
};
