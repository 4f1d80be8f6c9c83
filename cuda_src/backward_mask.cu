// Before a backward with a boolean mask: the mask packed for attention_backward_sm80's threads.
// Assumes nothing of the mask's strides. Stores mask_bits and mask_flags of every tile of every mask that differs.
// Grid: m_blocks * n_blocks * masks that differ; kNumWarps and tile as the backward has them.
#include "mask_tiles.cuh"

constexpr int kSharedMemory = kPackedBytes;

KERNEL(kThreads, 1) attention_backward_mask(GRID_CONSTANT Params p) { pack_mask<KeysDown>(p); }
