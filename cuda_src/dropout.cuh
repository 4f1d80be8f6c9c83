// Dropout: which elements of P are kept, the same in forward and backward, whatever their tiles.
//
// One Philox call draws two pairs (a, b) of words for rows i & 7 of 32 and keys j & 6, j & 7 | 1 of 32: the first pair for the lower
// 16 keys, the second for the upper. An element's word is a * m + b, m a constant of its own for i & 24 and j & 8; its 15 bits are the
// lower half's of even keys, the upper half's of odd ones, without the top bit. With a and b uniform, the words of any two m are
// uniform and independent (Dietzfelbinger, STACS 1996) in all but the lowest bits m has in common: elements are pairwise
// independent, and where no call is shared, independent.
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

// m of rows 8 r.. and keys 8 k.. of a pair: words of pi, the last three bits all different.
template <int kRow, int kKey> struct Multiplier {
  static constexpr u32 kWords[8] = {0x243F6A88u, 0x85A308D1u, 0x13198A2Au, 0x03707343u, 0xA4093824u, 0x299F31D5u, 0x082EFA9Eu, 0xEC4E6C8Fu};
  static constexpr u32 kWord = kWords[kRow * 2 + kKey];
};
// Of rows 16 upper + 8 half..
template <int kHalf, int kKey> DEVICE u32 multiplier(bool upper) {
  return upper ? Multiplier<2 + kHalf, kKey>::kWord : Multiplier<kHalf, kKey>::kWord;
}

struct Dropout {
  u32 key_low, key_high, row, offset;
  u32 share;    // of 2^15: what is rarer of dropped and kept elements has bits below it
  u32 dropped;  // ~0 where these are the dropped ones
  float keep;   // 1 / (1 - dropout_p)
  DEVICE U32x4 words(int i, int j) const {
    return philox({(((u32)j >> 5) << 2) | ((u32)j >> 1 & 3), (((u32)i >> 5) << 3) | ((u32)i & 7), row, offset}, key_low, key_high);
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
// element of a tile that begins at a multiple of 16 kM rows and of 32 keys. `words` lives from an even step to the next.
template <int kM> DEVICE void drop(u32 (&p_frag)[kM][4], U32x4 (&words)[(kM + 1) / 2], const Dropout& dropout, int i, int j, int k) {
  const u32 share = dropout.share << 16 | dropout.share;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    if (m % 2 == 0 && k % 2 == 0) words[m / 2] = dropout.words(i + m * 16, j + k * 16);
    const bool upper = kM == 1 ? i >> 4 & 1 : m & 1;
    const u32 a = k % 2 ? words[m / 2].z : words[m / 2].x, b = k % 2 ? words[m / 2].w : words[m / 2].y;
    const auto zero = [&](u32& pair, u32 multiplier) {
      // Bits below 2^14, the share among them, are finite fp16 numbers in the same order; NaN is below nothing.
      pair &= set_lt_f16x2(abs_f16x2(a * multiplier + b), share) ^ dropout.dropped;
    };
    zero(p_frag[m][0], multiplier<0, 0>(upper));
    zero(p_frag[m][1], multiplier<1, 0>(upper));
    zero(p_frag[m][2], multiplier<0, 1>(upper));
    zero(p_frag[m][3], multiplier<1, 1>(upper));
  }
}

// ---- keys down, queries across ----

// A thread's pairs (a, b) for fragments of [16 kM keys x 8 queries], its two queries beside its keys, shifted so that the bits of its
// keys come last, from bit 17 on.
template <int kM> struct ColumnDraws {
  u32 a[kM][2], b[kM][2];

  // (i, j) is this thread's first element; of a row of 32 queries, and keys that begin at a multiple of 16 kM.
  DEVICE void draw(const Dropout& dropout, int i, int j) {
    const int shift = j & 1 ? 1 : 17;
#pragma unroll
    for (int m = 0; m < kM; m += 2)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const U32x4 words = dropout.words(i + e, j + m * 16);
        const bool second = kM == 1 && (j >> 4 & 1);
        a[m][e] = (second ? words.z : words.x) << shift;
        b[m][e] = (second ? words.w : words.y) << shift;
        if constexpr (kM > 1) a[m + 1][e] = words.z << shift, b[m + 1][e] = words.w << shift;
      }
  }
  DEVICE bool keeps(const Dropout& dropout, int m, int e, u32 multiplier) const {
    return (a[m][e] * multiplier + b[m][e] < dropout.share << 17) != (dropout.dropped != 0);
  }
};
