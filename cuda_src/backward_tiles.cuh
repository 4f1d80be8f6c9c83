// What a CTA of the backward holds: its tiles and where they lie in shared memory, how keys and queries are dealt out to its warps, and
// how much of the products is in registers at a time.
#pragma once
#include "bias.cuh"
#include "half_pairs.cuh"
#include "mask.cuh"
#include "parts.cuh"

using KTile = Tile<kBlockN, kHeadDim>;
using VTile = Tile<kBlockN, kHeadDimV>;
using QTile = Tile<kBlockM, kHeadDim>;
using DoutTile = Tile<kBlockM, kHeadDimV>;
using ScoreTile = Tile<kBlockN, kBlockM>;  // dS^T, P^T
// In fp32, where all tiles are in range of fp16: a pair of fp16 tiles in place of each of these.
using KPair = PairTile<kBlockN, kHeadDim>;
using VPair = PairTile<kBlockN, kHeadDimV>;
using QPair = PairTile<kBlockM, kHeadDim>;
using DoutPair = PairTile<kBlockM, kHeadDimV>;
using ScorePair = PairTile<kBlockN, kBlockM>;

constexpr int kSplit = KeysDown::kSplit;
constexpr int kKeyFrags = KeysDown::kM, kQueryFrags = KeysDown::kN;  // of 16 keys, of 8 queries, per warp
constexpr int kDkFrags = kHeadDim / 8 / kSplit, kDvFrags = kHeadDimV / 8 / kSplit;
static_assert(kBlockN % 16 == 0 && kKeyFrags * kNumWarps * 16 == kBlockN * kSplit && kKeyFrags >= 1, "warps share out the keys evenly");
static_assert(kQueryFrags % 2 == 0 && kQueryFrags <= 16 && kDkFrags % 2 == 0 && kDvFrags % 2 == 0, "fragments come in pairs");

constexpr int kScoreBudget = kIsFp32 ? 112 : 192;  // registers of dK, dV, S and dP together: more spills
// Fragments of queries whose S and dP are held at a time: what dK and dV leave of the registers.
constexpr int kGradientRegisters = kKeyFrags * (kHeadDim + kHeadDimV) / 2 / kSplit;
constexpr int part_frags(int wanted) {
  const bool fits = kQueryFrags % wanted == 0 && kGradientRegisters + kKeyFrags * wanted * 8 <= kScoreBudget;
  return fits || wanted == 2 ? wanted : part_frags(wanted / 2);
}
constexpr int kPartFrags = part_frags(8);
constexpr int kPartsAtATime = kIsFp32 || kQueryFrags == kPartFrags ? 1 : 2;

// dQ [kBlockM, kHeadDim] is dealt out to kDqWarpsM x kDqWarpsN warps: 32 rows each where the columns allow it, for then every
// fragment of K read serves two products.
constexpr bool dq_fits(int warps_m) {
  return warps_m > 0 && kNumWarps % warps_m == 0 && kBlockM % (16 * warps_m) == 0 && kHeadDim / 16 % (kNumWarps / warps_m) == 0;
}
constexpr int kDqWarpsM = dq_fits(kBlockM / 32) ? kBlockM / 32 : dq_fits(kBlockM / 16) ? kBlockM / 16 : kNumWarps;
constexpr int kDqWarpsN = kNumWarps / kDqWarpsM;
constexpr int kDqRowFrags = kBlockM / 16 / kDqWarpsM, kDqColumnFrags = kHeadDim / 8 / kDqWarpsN;
static_assert(dq_fits(kDqWarpsM), "warps share out dQ evenly");
// Pairs of column fragments, so many at a time that their sums fit 64 registers beside dK and dV.
constexpr int kDqPairs = kDqColumnFrags / 2;
constexpr int dq_passes(int passes) {
  return kDqPairs % passes == 0 && kDqRowFrags * kDqPairs / passes * 8 <= 64 ? passes : dq_passes(passes + 1);
}
constexpr int kDqPasses = dq_passes(1), kPassPairs = kDqPairs / kDqPasses;

// kCount of the m-fragments of accumulators, from `first` on.
template <int kCount, int kM, int kN> DEVICE float (&fragments_of(float (&acc)[kM][kN][4], int first))[kCount][kN][4] {
  return (float(&)[kCount][kN][4])acc[first];
}

// Shared memory: K | V (later dK | dV) | Q stages | dO stages | dS^T | P^T (kSplit 2) | bias | statistics of the query block
constexpr int kVOffset = KTile::kBytes, kQOffset = kVOffset + VTile::kBytes;
constexpr int kDoutOffset = kQOffset + kNumStages * QTile::kBytes;
constexpr int kDsOffset = kDoutOffset + kNumStages * DoutTile::kBytes;
constexpr int kPOffset = kDsOffset + ScoreTile::kBytes;
constexpr int kBiasOffset = kPOffset + (kSplit > 1 ? ScoreTile::kBytes : 0), kLogsumexpOffset = kBiasOffset + kBiasTileBytes;
constexpr int kDeltaOffset = kLogsumexpOffset + kBlockM * 4, kRangesOffset = kDeltaOffset + kBlockM * 4;
constexpr int kSharedMemory = kRangesOffset + (kHasKeyRanges ? kBlockM * 8 : 0);
static_assert(kBlockM <= kThreads, "one thread a row of statistics");

constexpr bool kMasks = kHasBounds || kHasMask;
// By a window alone it is known beforehand which parts of a tile see nothing of each other.
constexpr bool kSkips = kHasWindow && !kHasKeyRanges && !kHasMask && kSplit == 1 && !kIsFp32;

// In tiles as long as wide, which an end of the window cuts from corner to corner, keys are then dealt out to the warps 16 at a time:
// what is cut off is as much for every warp, and they wait for each other. In shorter tiles that saved nothing. Dropout draws for 32
// neighbouring keys, and the gradient of a bias lies as KeysDown has it.
constexpr bool kDealsKeys = kSkips && kKeyFrags > 1 && kBlockM >= kBlockN && !kHasDropout && !kHasBias;
constexpr int kKeyStep = kDealsKeys ? 16 * kNumWarps : 16;  // from one fragment of a warp's keys to the next
constexpr int kNeighbours = kDealsKeys ? 1 : kKeyFrags;     // of them without others' in between

// This warp's first key of the tile and its first query, and its share of the columns of dK and dV.
DEVICE int first_key_of_warp() { return warp_index() / kSplit * 16 * kNeighbours; }
DEVICE int share_of_warp() { return warp_index() % kSplit; }
DEVICE int first_query_of_warp() { return share_of_warp() * kQueryFrags * 8; }
