// Which scores of a tile [kBlockM queries x kBlockN keys] a thread holds, in each direction: C fragments (m, n) of
// [16 kM rows x 8 kN columns] whose element (half, e) lies at row() + m * 16 + half * 8, column() + n * 8 + e of the tile.
#pragma once
#include "tile.cuh"

// Forward: rows are queries, columns keys; a warp owns rows.
struct QueriesDown {
  static constexpr bool kKeysDown = false;
  static constexpr int kM = kBlockM / kNumWarps / 16, kN = kBlockN / 8;
  static DEVICE int row() { return warp_index() * kM * 16 + (lane_index() >> 2); }
  static DEVICE int column() { return (lane_index() & 3) * 2; }
};

// Backward: rows are keys, columns queries; a warp owns rows, or shares them with kSplit - 1 others that have other columns.
struct KeysDown {
  static constexpr bool kKeysDown = true;
  static constexpr int kSplit = kNumWarps * 16 > kBlockN ? kNumWarps * 16 / kBlockN : 1;
  static constexpr int kM = kBlockN * kSplit / (kNumWarps * 16), kN = kBlockM / 8 / kSplit;
  static DEVICE int row() { return warp_index() / kSplit * kM * 16 + (lane_index() >> 2); }
  static DEVICE int column() { return warp_index() % kSplit * kN * 8 + (lane_index() & 3) * 2; }
};
