// The one by-value argument of the pairwise kernels. flashpatch/pair_launching.py packs it, in the same order:
// pointers, 64-bit strides, 32-bit values.
#pragma once
#include "ptx_sm80.cuh"

struct PairParams {
  const void* x;              // [batch, rows, dim], unit last stride: what a result is given for
  const void* y;              // [batch, columns, dim]: what is reduced over
  const float* row_term;      // [batch, rows] added to the scores, or null
  const float* column_term;   // [batch, columns] added to the scores, or null
  const float* row_weight;    // [batch, rows] factor of the gradient, or null
  const float* column_weight; // [batch, columns] factor of the gradient, or null
  float* values;              // [splits, batch, rows, k]: minima, the smallest k, logsumexp, or sums of the gradient's weights
  i32* indices;               // as values: the column of each
  float* gradient;            // [splits, batch, rows, dim]
  i64 x_stride_batch, x_stride_row, y_stride_batch, y_stride_row;  // elements
  i32 batch, rows, columns, dim;
  i32 k;                      // results a row
  i32 row_blocks;             // ceil(rows / kBlockM)
  i32 splits;                 // parts of the columns, each reduced by a CTA of its own
  i32 split_blocks;           // blocks of kBlockN columns in a part
  float scale;                // score = scale * cost + row_term + column_term
};
