// The one by-value argument of the Hopper kernels: Params, and what TMA needs beside it.
// flashpatch/params.py packs it; a map a kernel does not use stays zero.
#pragma once
#include "params.cuh"

// What cuTensorMapEncodeTiled writes: dimensions (head_dim, rows, heads, batch) in the tensor's own strides, box
// (128 bytes of columns, rows of the kernel's tile, 1, 1; in the forward 64 of q, 16 of out), 128-byte swizzle, zeros outside. varlen:
// all rows of the packed tensor, batch 1. Those of out and of the backward have five, which cut a tile off at a sequence's end
// (packed_sm90.cuh).
struct alignas(64) TensorMap { u64 opaque[16]; };

struct alignas(64) ParamsSm90 {
  TensorMap q, k, v, out, dout;
  Params common;
  u32* tile_counters;  // two zeroed words: next tile, CTAs that are done; zero again when the kernel ends
};
