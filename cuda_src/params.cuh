// The one by-value argument of every attention kernel. flashpatch/params.py packs it: tests/test_layers.py
// compares the two field by field, so a field is added here and in params.FIELDS, in the same order.
// Pointers first, then 64-bit strides, then 32-bit values: no padding anywhere.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef int i32;

struct Params {
  // [batch, seqlen, num_heads, head_dim] in any strides with a unit last one; varlen: [total, num_heads, head_dim], batch stride 0.
  const u16* q;
  const u16* k;
  const u16* v;
  u16* out;
  float* logsumexp;           // natural log, [batch, num_heads_q, seqlen_q]; varlen: [num_heads_q, total_q]; null: nobody asks
  const u16* dout;
  u16* dq;
  u16* dk;
  u16* dv;
  const float* dlogsumexp;    // gradient of logsumexp in the layout of logsumexp, or null
  float* delta;               // rowsum(dout * out) - dlogsumexp, in the layout of logsumexp
  float* dq_accum;            // fp32 dq before scaling and rounding: [batch, num_heads_q, seqlen_q rounded up to kBlockM, kHeadDim]
  i32* dq_turns;              // deterministic: next key block allowed to add, per (batch, head, query block) (Hopper: see backward_sm90.cuh)
  const i32* cu_seqlens_q;    // [batch + 1] or null
  const i32* cu_seqlens_k;    // [batch + 1] or null
  const i32* seqused_k;       // [batch] keys in use, or null; causal and window align to it
  const i32* key_ranges;      // [batch, seqlen_q, 2]: row i sees keys begin <= j < end; any batch and row stride, also 0
  const u8* mask;             // [batch, num_heads_q, seqlen_q, seqlen_k] boolean (1 = attend), any strides, also 0
  const void* bias;           // as mask, in the dtype of q or fp32 (added after scale and softcap)
  void* dbias;                // gradient of bias, contiguous; or null: see bias.cuh
  const float* alibi_slopes;  // [num_heads_q] or [batch, num_heads_q] (batch stride 0 or num_heads_q)
  const float* sinks;         // [num_heads_q] logits that join the softmax denominator only
  const u64* rng_state;       // {seed, offset} of Philox, read on the device
  const float* q_descale;     // 8 bits: what q, k and v are to be multiplied by, [batch, num_heads_kv] each, or null for 1
  const float* k_descale;
  const float* v_descale;
  u32* mask_bits;             // the mask packed tile by tile, see mask_tiles.cuh
  u8* mask_flags;             // what each of those tiles holds
  float* dbias_accum;         // fp32 gradient of bias in fragment order, zeroed, see bias.cuh
  i32* key_hulls;             // backward with key_ranges: [batch, m_blocks, 4], first key and end of what some row of a block of
                              // kBlockM queries sees, then of what all of them see
  float* dkv_accum;           // Hopper: fp32 dk and dv where splits > 1, see workspace_sm90.cuh
  u8* q_pairs;                // fp32: q, k, v and dout in pairs of fp16, block by block, see half_pairs.cuh
  u8* k_pairs;
  u8* v_pairs;
  u8* dout_pairs;
  u8* v_tiles;                // 8 bits: v transposed, see values_sm90.cuh
  i64 q_stride_batch, q_stride_row, q_stride_head;
  i64 k_stride_batch, k_stride_row, k_stride_head;
  i64 v_stride_batch, v_stride_row, v_stride_head;
  i64 out_stride_batch, out_stride_row, out_stride_head;
  i64 dout_stride_batch, dout_stride_row, dout_stride_head;
  i64 dq_stride_batch, dq_stride_row, dq_stride_head;
  i64 dk_stride_batch, dk_stride_row, dk_stride_head;
  i64 dv_stride_batch, dv_stride_row, dv_stride_head;
  i64 key_ranges_stride_batch, key_ranges_stride_row;
  i64 mask_stride_batch, mask_stride_head, mask_stride_row, mask_stride_column;
  i64 bias_stride_batch, bias_stride_head, bias_stride_row, bias_stride_column;
  i64 alibi_stride_batch;
  i64 total_q, total_k;       // rows of q and of k over all sequences (varlen), else batch * seqlen
  i32 batch, num_heads_q, num_heads_kv;
  i32 splits, split_heads;    // Hopper's backward: tiles that share the query heads of a key head, query heads of each
  i32 seqlen_q, seqlen_k;     // varlen: max_seqlen_q, max_seqlen_k
  i32 head_dim, head_dim_v;   // as the caller has them; the kernel pads to kHeadDim, kHeadDimV in shared memory
  i32 window_left, window_right;  // inclusive, relative to the bottom-right aligned diagonal; -1 unlimited
  i32 m_blocks, n_blocks;     // ceil(seqlen_q / kBlockM), ceil(seqlen_k / kBlockN); varlen on Hopper: packed_sm90.cuh
  float softmax_scale;        // from the true head dim
  float softcap;              // 0: off
  float dropout_p;            // 0: off
};
