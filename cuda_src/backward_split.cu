// Before a backward in fp32: q, k, v and dout in pairs of fp16 for attention_backward_sm80, see half_pairs.cuh.
// Assumes what the backward assumes of them, and that backward_delta has run. Stores a record for every block of rows that a
// sequence has.
// Grid: 2 * batch * (m_blocks * num_heads_q + n_blocks * num_heads_kv), a tile a CTA.
#include "split_pairs.cuh"

KERNEL(kThreads, 1) attention_backward_split(GRID_CONSTANT Params p) { split_all<true>(p); }
