// wgmma, warp by warp: a warp of the warpgroup computes its 16 rows of d. The product is carried out at the wait that
// covers it: until then its accumulators are NaN, and its operands in shared memory count as being read.
#include "numbers.h"
#include "state_sm90.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>

namespace emulation {
namespace {

constexpr u32 kInFlightBits = 0xffaaaaaau;  // a signalling NaN: whatever computes with it leaves another one
constexpr u32 kWarpsPerGroup = 4;

struct Arguments {
  float* d;
  const WgmmaShape* shape;
  u64 a, b;
  const u32* a_registers;
  bool accumulate;
};

// Accumulators of a warp with products under way: their values beside them.
struct Accumulators {
  float* at[kLanes];
  std::vector<float> values;  // [lane][n / 2]
  u32 products = 0;
};

struct Product {
  WgmmaShape shape;
  u64 a, b;
  u32 a_registers[kLanes][4];
  bool accumulate;
  std::shared_ptr<Accumulators> d;
  std::vector<u32> a_pieces, b_pieces;  // shared addresses of 16 bytes each
  Site site;
};

struct WarpState {
  bool fenced = false;
  std::vector<Product> open;
  std::deque<std::vector<Product>> closed;
  std::map<float*, std::shared_ptr<Accumulators>> in_flight;  // by lane 0's array
  u32 issued = 0;
};

struct Issue {
  Site site;
  u64 a, b;
  u32 n;
};

std::vector<WarpState> states;           // [warp]
std::vector<std::vector<Issue>> issues;  // [warpgroup]: what its first warp issued, which the others must repeat

WarpState& running_state() { return states[machine.running->identity.warp]; }

// ---- operands in shared memory ----

struct Descriptor {
  u32 start, leading, stride, swizzle_bytes;
};

Descriptor decode(u64 bits, Site site) {
  static constexpr u32 kSwizzle[4] = {16, 128, 64, 32};
  if (bits >> 49 & 7) fail(site, "a matrix descriptor with a base offset: tiles start where their swizzle pattern does");
  return {static_cast<u32>(bits & 0x3fff) << 4, static_cast<u32>(bits >> 16 & 0x3fff) << 4,
          static_cast<u32>(bits >> 32 & 0x3fff) << 4, kSwizzle[bits >> 62]};
}

// Address of the 8 elements (m, k .. k + 7), or with kTransposed (m .. m + 7, k); `m` counts rows of A, columns of B.
template <bool kTransposed>
u32 piece(const Descriptor& d, u32 m, u32 k) {
  const u32 width = d.swizzle_bytes;
  u32 address = d.start;
  if (width == 16)  // no swizzle: 8x8 matrices of 128 bytes, one after the other
    address += kTransposed ? m / 8 * d.leading + k / 8 * d.stride + k % 8 * 16 : m / 8 * d.stride + k / 8 * d.leading + m % 8 * 16;
  else if (kTransposed)
    address += m / (width / 2) * d.leading + k / 8 * d.stride + k % 8 * width + m % (width / 2) * 2;
  else
    address += m / 8 * d.stride + m % 8 * width + k * 2;
  return swizzled(address, width);
}

// Pieces of [count x 16], in e4m3 [count x 32], from row `first` on, in the order in which read_operand takes them.
std::vector<u32> pieces_of(u64 bits, bool transposed, u32 first, u32 count, Site site) {
  const Descriptor d = decode(bits, site);
  std::vector<u32> addresses;
  if (transposed) {
    for (u32 k = 0; k < 16; ++k)
      for (u32 m = 0; m < count; m += 8) addresses.push_back(piece<true>(d, first + m, k));
  } else {
    for (u32 m = 0; m < count; ++m)
      for (u32 k = 0; k < 16; k += 8) addresses.push_back(piece<false>(d, first + m, k));
  }
  return addresses;
}

// The elements of a type: how many a product reduces, and element i of some bytes.
template <WgmmaType kType> struct Elements {
  static constexpr u32 kBytes = kType == WgmmaType::kE4m3 ? 1 : 2, kDepth = 32 / kBytes;
  static float at(const void* bytes, u32 i) {
    const u8* from = static_cast<const u8*>(bytes) + i * kBytes;
    if constexpr (kType == WgmmaType::kE4m3) return e4m3_to_float(*from);
    else return widen<kType == WgmmaType::kBf16>(from[0] | from[1] << 8);
  }
};

template <WgmmaType kType>
void read_operand(float (*to)[256], const std::vector<u32>& pieces, bool transposed, u32 count) {
  constexpr u32 kInPiece = 16 / Elements<kType>::kBytes;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const u32 a_row = count / kInPiece;
    for (u32 e = 0; e < kInPiece; ++e) {
      const float x = Elements<kType>::at(shared_host(pieces[i]), e);
      if (transposed) to[i / a_row][i % a_row * kInPiece + e] = x;
      else to[i % 2 * kInPiece + e][i / 2] = x;
    }
  }
}

// ---- the product of one warp ----

template <WgmmaType kType>
void multiply(const Product& p) {
  static float a[32][256], b[32][256], d[16][256];  // [k][row], [k][column], [row][column]
  constexpr u32 kDepth = Elements<kType>::kDepth, kInRegister = kDepth / 8;
  const u32 n = p.shape.n, per_lane = n / 2;
  if (p.shape.a_in_registers) {
    for (u32 lane = 0; lane < kLanes; ++lane)
      for (u32 i = 0; i < 4; ++i)
        for (u32 e = 0; e < kInRegister; ++e)
          a[lane % 4 * kInRegister + i / 2 * (kDepth / 2) + e][lane / 4 + i % 2 * 8] = Elements<kType>::at(&p.a_registers[lane][i], e);
  } else {
    read_operand<kType>(a, p.a_pieces, p.shape.transposed_a, 16);
  }
  read_operand<kType>(b, p.b_pieces, p.shape.transposed_b, n);
  for (u32 row = 0; row < 16; ++row) {
    float* sums = d[row];
    std::fill(sums, sums + n, 0.0f);
    for (u32 k = 0; k < kDepth; ++k) {
      const float x = a[k][row];
      for (u32 column = 0; column < n; ++column) sums[column] += x * b[k][column];
    }
  }
  for (u32 lane = 0; lane < kLanes; ++lane)
    for (u32 e = 0; e < per_lane; ++e) {
      float& value = p.d->values[lane * per_lane + e];
      const float product = d[lane / 4 + e / 2 % 2 * 8][e / 4 * 8 + lane % 4 * 2 + e % 2];
      value = p.accumulate ? value + product : product;
    }
}

void release_operands(const Product& p, u32 warp) {
  for (u32 address : p.a_pieces) order_finish_read(warp, address, 16);
  for (u32 address : p.b_pieces) order_finish_read(warp, address, 16);
}

void land(const Product& p, WarpState& state) {
  if (p.shape.type == WgmmaType::kE4m3) multiply<WgmmaType::kE4m3>(p);
  else if (p.shape.type == WgmmaType::kBf16) multiply<WgmmaType::kBf16>(p);
  else multiply<WgmmaType::kFp16>(p);
  if (--p.d->products) return;
  const u32 per_lane = p.shape.n / 2;
  for (u32 lane = 0; lane < kLanes; ++lane)
    for (u32 e = 0; e < per_lane; ++e) {
      u32 bits;
      __builtin_memcpy(&bits, p.d->at[lane] + e, 4);
      if (bits != kInFlightBits) {
        machine.acting = &lane_of_running_warp(lane);
        fail(p.site, "accumulator %u of lane %u was written while this product was under way", e, lane);
      }
      p.d->at[lane][e] = p.d->values[lane * per_lane + e];
    }
  state.in_flight.erase(p.d->at[0]);
}

std::shared_ptr<Accumulators> take(const Arguments* const* lanes, WarpState& state) {
  auto& entry = state.in_flight[lanes[0]->d];
  if (!entry) {
    entry = std::make_shared<Accumulators>();
    const u32 per_lane = lanes[0]->shape->n / 2;
    for (u32 lane = 0; lane < kLanes; ++lane) {
      entry->at[lane] = lanes[lane]->d;
      entry->values.insert(entry->values.end(), lanes[lane]->d, lanes[lane]->d + per_lane);
      for (u32 e = 0; e < per_lane; ++e) __builtin_memcpy(lanes[lane]->d + e, &kInFlightBits, 4);
    }
  }
  ++entry->products;
  return entry;
}

void check_same_as_first_warp(const Arguments& in, WarpState& state, Site site) {
  const u32 group = machine.running->identity.warp / kWarpsPerGroup;
  auto& log = issues[group];
  if (state.issued == log.size()) log.push_back({site, in.a, in.b, in.shape->n});
  const Issue& first = log[state.issued++];
  if (first.site.line != site.line || first.site.file != site.file || first.a != in.a || first.b != in.b || first.n != in.shape->n)
    fail(site, "the warps of warpgroup %u do not issue the same wgmma: another one is at %s", group, describe(first.site).c_str());
}

void run_wgmma(void* const (&arguments)[kLanes], Site site) {
  const u16 index = count("wgmma", site);
  const auto* lanes = reinterpret_cast<const Arguments* const*>(&arguments[0]);
  const Arguments& in = *lanes[0];
  WarpState& state = running_state();
  for (u32 lane = 1; lane < kLanes; ++lane)
    if (lanes[lane]->a != in.a || lanes[lane]->b != in.b || lanes[lane]->accumulate != in.accumulate)
      fail(site, "wgmma with different descriptors or scale in lanes 0 and %u", lane);
  if (machine.num_warps % kWarpsPerGroup) fail(site, "wgmma in a block of %u warps: not whole warpgroups", machine.num_warps);
  check_same_as_first_warp(in, state, site);
  if (!state.fenced) fail(site, "wgmma without wgmma_fence since its registers were last touched (start or wgmma_wait)");
  Product p{*in.shape, in.a, in.b, {}, in.accumulate, nullptr, {}, {}, site};
  const u32 first_row = machine.running->identity.warp % kWarpsPerGroup * 16;
  if (in.shape->a_in_registers) {
    for (u32 lane = 0; lane < kLanes; ++lane) __builtin_memcpy(p.a_registers[lane], lanes[lane]->a_registers, 16);
  } else {
    p.a_pieces = pieces_of(in.a, in.shape->transposed_a, first_row, 16, site);
  }
  p.b_pieces = pieces_of(in.b, in.shape->transposed_b, 0, in.shape->n, site);
  for (const auto* pieces : {&p.a_pieces, &p.b_pieces})
    for (u32 address : *pieces) {
      check_shared("wgmma", address, 16, 16, site);
      order_begin_read("wgmma", index, address, 16, ~0u, site);
    }
  p.d = take(lanes, state);
  state.open.push_back(std::move(p));
}

void run_fence(void* const (&)[kLanes], Site site) {
  count("wgmma_fence", site);
  running_state().fenced = true;
}

void run_commit(void* const (&)[kLanes], Site site) {
  count("wgmma_commit", site);
  WarpState& state = running_state();
  state.closed.push_back(std::move(state.open));
  state.open.clear();
}

void run_wait(void* const (&arguments)[kLanes], Site site) {
  count("wgmma_wait", site);
  WarpState& state = running_state();
  const u32 pending = *static_cast<const u32*>(arguments[0]), warp = machine.running->identity.warp;
  state.fenced = false;
  order_align_clocks(warp);
  while (state.closed.size() > pending) {
    for (const Product& p : state.closed.front()) {
      land(p, state);
      release_operands(p, warp);
    }
    state.closed.pop_front();
  }
  for (const auto& group : state.closed)
    for (const Product& p : group)
      for (const auto* pieces : {&p.a_pieces, &p.b_pieces})
        for (u32 address : *pieces) order_resume_read(warp, address, 16);
}

const Collective kWgmma{"wgmma", run_wgmma};
const Collective kFence{"wgmma_fence", run_fence};
const Collective kCommit{"wgmma_commit", run_commit};
const Collective kWait{"wgmma_wait", run_wait};

}  // namespace

void wgmma_begin_block() {
  states.assign(machine.num_warps, WarpState{});
  issues.assign(machine.num_warps / kWarpsPerGroup + 1, {});
}

void wgmma_end_block() {
  for (u32 warp = 0; warp < machine.num_warps; ++warp) {
    const auto& log = issues[warp / kWarpsPerGroup];
    if (const u32 issued = states[warp].issued; issued != log.size())
      fail(log[issued].site, "the warps of warpgroup %u do not issue the same wgmma: warp %u leaves this one out",
           warp / kWarpsPerGroup, warp);
  }
  for (const WarpState& state : states) {
    for (const Product& p : state.open) fail(p.site, "the block ended with this product uncommitted");
    for (const auto& group : state.closed)
      for (const Product& p : group) fail(p.site, "the block ended with this product under way: no wgmma_wait covers it");
  }
}

void wgmma(float* d, const WgmmaShape& shape, u64 a, const u32* a_registers, u64 b, bool accumulate, Site site) {
  Arguments arguments{d, &shape, a, b, a_registers, accumulate};
  rendezvous(kWgmma, &arguments, site);
}
void wgmma_fence(Site site) { rendezvous(kFence, nullptr, site); }
void wgmma_commit(Site site) { rendezvous(kCommit, nullptr, site); }
void wgmma_wait(u32 pending, Site site) { rendezvous(kWait, &pending, site); }

}  // namespace emulation
