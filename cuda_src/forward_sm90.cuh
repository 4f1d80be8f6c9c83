// The parts of the Hopper forward: who does what with how many registers, what lies where in shared memory, and which key
// blocks rows visit.
#pragma once
#include "scores.cuh"
#include "softmax_sm90.cuh"
#include "tile_sm90.cuh"
#include "values_sm90.cuh"

constexpr int kConsumers = kNumWarps / 4 - 1;
static_assert(kConsumers >= 2 && kConsumers <= 4 && kNumWarps % 4 == 0, "a producer and two to four consumers");
static_assert(kBlockM == 64 * kConsumers, "64 rows a consumer");
static_assert(kBlockN % 16 == 0, "P V reduces 16 keys at a time");
static_assert(!kHasKeyRanges && !kHasMask && !kHasBias && !kHasAlibi && !kHasDropout, "forward_sm80 has these");

using QTile = SlabTile<64, kHeadDim>;  // of one consumer
using KTile = SlabTile<kBlockN, kHeadDim>;
template <bool kTransposed> struct ValueTile { typedef SlabTile<kBlockN, kHeadDimV> Type; };
template <> struct ValueTile<true> { typedef SlabTile<kHeadDimV, kBlockN, 1, 32> Type; };
using VTile = ValueTile<kIsE4m3>::Type;
using OutTile = SlabTile<64, kHeadDimV, 2>;
constexpr int kScores = kBlockN / 2, kOutputs = kHeadDimV / 2;  // accumulators a thread

// What the launch gives (65536 / kThreads, in eights) moved from the producer to the consumers. Where S, O and P are full, what
// the producer has is too little for working out its next tile; a consumer that spills would wait for every product at once.
constexpr bool kFull = kScores + kOutputs + kScores / kInRegister > 200;
constexpr int kProducerRegisters = kConsumers == 2 ? (kFull ? 24 : 40) : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? (kFull ? 240 : 232) : kConsumers == 3 ? 160 : 112;

// A tile of work, decoded by the producer. head < 0: there is no more.
struct alignas(64) Work {
  Sequence sequence;
  int first_row, head;
  Span blocks;  // key blocks that some row sees
};
// Of a consumer's rows: key blocks that some of them see, none where there are no rows, and keys that all of them see.
struct alignas(16) OwnKeys {
  Span blocks, unmasked;
};

// Shared memory: Q stages | K stages | V stages | rings | Work and OwnKeys of two tiles
// A Q stage holds one consumer's rows; there are as many as fit beside 640 bytes of rings and Work, for two tiles at most.
constexpr int kKeyBytes = kNumStages * (KTile::kBytes + VTile::kBytes), kQRoom = 227 * 1024 - 640 - kKeyBytes;
constexpr int kOutOrQBytes = OutTile::kBytes > QTile::kBytes ? OutTile::kBytes : QTile::kBytes;
// With Q of two tiles, O takes the place of its tile's Q on its way out, by the copy engine; else it is stored from registers.
constexpr bool kStagesOut = kHeadDimV <= kHeadDim && kQRoom >= 2 * kConsumers * kOutOrQBytes;
constexpr int kQStageBytes = kStagesOut ? kOutOrQBytes : QTile::kBytes, kQFitting = kQRoom / kQStageBytes;
constexpr int kQStages = kQFitting < 2 * kConsumers ? kQFitting : 2 * kConsumers;
static_assert(kQStages >= kConsumers, "Q of a whole tile");
constexpr int kKOffset = kQStages * kQStageBytes, kVOffset = kKOffset + kNumStages * KTile::kBytes;
constexpr int kQRing = kVOffset + kNumStages * VTile::kBytes, kKRing = kQRing + Ring<kQStages>::kBytes;
constexpr int kVRing = kKRing + Ring<kNumStages>::kBytes, kWorkRing = kVRing + Ring<kNumStages>::kBytes;
constexpr int kCutRing = kWorkRing + Ring<2>::kBytes, kWorkOffset = (kCutRing + Ring<1>::kBytes + 63) / 64 * 64;
constexpr int kOwnOffset = kWorkOffset + 2 * sizeof(Work), kSharedMemory = kOwnOffset + 2 * kConsumers * sizeof(OwnKeys);

// O += P V, V as its tile has it.
template <class V> DEVICE void issue_values(float (&o_frag)[kOutputs], const u32 (&p_frag)[kScores / kInRegister], OperandOf<V::kPitch> v) {
  if constexpr (V::kPitch == 32) issue_multiply_e4m3<V>(o_frag, p_frag, v);
  else issue_multiply<V>(o_frag, p_frag, v);
}

// Turns keep warpgroups apart where products are what takes time. Where exponentials do, they cost more than they give (TFLOP/s
// without and with: head dim 64, four consumers, full, 512 tokens, 451 and 441; causal, 2048 tokens, 8 bits, head dim 64, 468 and 452,
// but 16 bits, head dim 128, 611 and 621). Nor do three warpgroups need them that are a block apart by what they see (head dim 128, a
// window of 1024: 526 and 505; causal, 512, 2048, 16384 tokens: 335 572 749 and 329 568 750).
constexpr bool kBlockApart = kHasWindow && kConsumers == 3 && kBlockN == 64;
constexpr bool kTakesTurns = kConsumers < 4 && !kIsE4m3 && !kBlockApart;

constexpr int kTurn = 1;  // named barriers, one per consumer

struct Shared {
  u32 base;
  DEVICE explicit Shared(u32 base) : base(base) {}
  DEVICE QTile q(int stage) const { return {base + stage * kQStageBytes}; }
  DEVICE OutTile out(int q_stage) const { return {q(q_stage).base}; }
  DEVICE KTile k(int stage) const { return {base + kKOffset + stage * KTile::kBytes}; }
  DEVICE VTile v(int stage) const { return {base + kVOffset + stage * VTile::kBytes}; }
  DEVICE u32 work(int stage) const { return base + kWorkOffset + stage * (u32)sizeof(Work); }
  DEVICE u32 own(int stage, int consumer) const { return base + kOwnOffset + (stage * kConsumers + consumer) * (u32)sizeof(OwnKeys); }
};

struct Rings {
  Ring<kQStages> q;  // a tile takes kConsumers stages, in the order of the consumers
  Ring<kNumStages> k, v;
  Ring<2> work;
  Ring<1> cut;  // the producer's own: V of a last block, before what lies behind the last key is taken out
  DEVICE explicit Rings(u32 base) : q(base + kQRing), k(base + kKRing), v(base + kVRing), work(base + kWorkRing), cut(base + kCutRing) {}
  DEVICE void init() const {
    q.init(1, 4);
    k.init(1, kConsumers * 4);
    v.init(1, kConsumers * 4);
    work.init(kConsumers, kConsumers * 128);
    cut.init(1, 1);
    fence_mbarrier_init();
  }
};

// What rows of a sequence see, and the key blocks they visit: nothing where there are no such rows.
DEVICE BlockKeys keys_of_span(const Sequence& s, Span rows) {
  if (rows.begin < 0 || rows.begin >= s.q_length) return {{0, 0}, {0, 0}};
  return keys_of_rows(s, rows.begin, rows.end - rows.begin);
}
DEVICE Span blocks_of(const BlockKeys& keys) {
  if (keys.any.begin >= keys.any.end) return {0, 0};
  return {keys.any.begin / kBlockN, ceil_div(keys.any.end, kBlockN)};
}

DEVICE Span uniform(Span span) { return {uniform(span.begin), uniform(span.end)}; }
