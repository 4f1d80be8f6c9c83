// Before a forward in fp32: q, k and v in pairs of fp16 for attention_forward_sm80, see half_pairs.cuh.
// Assumes what the forward assumes of q, k and v. Stores a record for every block of rows that a sequence has.
// Grid: batch * (m_blocks * num_heads_q + 2 * n_blocks * num_heads_kv), a tile a CTA.
#include "split_pairs.cuh"

KERNEL(kThreads, 1) attention_forward_split(GRID_CONSTANT Params p) { split_all<false>(p); }
