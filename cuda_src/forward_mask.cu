// Before a forward with a boolean mask: the mask packed for attention_forward_sm80's threads.
// Assumes nothing of the mask's strides. Stores mask_bits and mask_flags of every tile of every mask that differs.
// Grid: n_blocks * m_blocks * masks that differ; kNumWarps and tile as the forward has them.
#include "mask_tiles.cuh"

constexpr int kSharedMemory = kPackedBytes;

KERNEL(kThreads, 1) attention_forward_mask(GRID_CONSTANT Params p) { pack_mask<QueriesDown>(p); }
