// Instructions of a whole warp. Fragment layouts as the PTX manual draws them: lane = 4 * group + pair.
#include "numbers.h"
#include "state_sm90.h"

namespace emulation {
namespace {

struct MmaArguments {
  float* d;
  const u32* a;
  u32 b[2];
};

// d[16x8] += a[16x16] b[16x8]. a[0..3]: (row g, columns 2p), (g + 8, 2p), (g, 2p + 8), (g + 8, 2p + 8);
// b[0..1]: rows 2p and 2p + 8 of column g; d[0..3]: (g, 2p), (g, 2p + 1), (g + 8, 2p), (g + 8, 2p + 1).
template <bool kIsBf16>
void run_mma(void* const (&arguments)[kLanes], Site site) {
  count("mma_m16n8k16", site);
  float a[16][16], b[16][8], d[16][8];
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const MmaArguments& in = *static_cast<const MmaArguments*>(arguments[lane]);
    const u32 g = lane / 4, p = lane % 4 * 2;
    for (u32 i = 0; i < 4; ++i) {
      a[g + i % 2 * 8][p + i / 2 * 8] = widen<kIsBf16>(in.a[i] & 0xffffu);
      a[g + i % 2 * 8][p + i / 2 * 8 + 1] = widen<kIsBf16>(in.a[i] >> 16);
      d[g + i / 2 * 8][p + i % 2] = in.d[i];
    }
    for (u32 i = 0; i < 2; ++i) {
      b[p + i * 8][g] = widen<kIsBf16>(in.b[i] & 0xffffu);
      b[p + i * 8 + 1][g] = widen<kIsBf16>(in.b[i] >> 16);
    }
  }
  if constexpr (kIsBf16) {
    for (u32 row = 0; row < 16; ++row)
      for (u32 k = 0; k < 16; ++k)
        for (u32 column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
  } else {  // rounded as run_mma_tf32 has it: fp32 products are made of these too
    for (u32 row = 0; row < 16; ++row) {
      double sum[8];
      for (u32 column = 0; column < 8; ++column) sum[column] = d[row][column];
      for (u32 k = 0; k < 16; ++k)
        for (u32 column = 0; column < 8; ++column) sum[column] += static_cast<double>(a[row][k]) * b[k][column];
      for (u32 column = 0; column < 8; ++column) d[row][column] = towards_zero(sum[column]);
    }
  }
  for (u32 lane = 0; lane < kLanes; ++lane) {
    float* out = static_cast<const MmaArguments*>(arguments[lane])->d;
    const u32 g = lane / 4, p = lane % 4 * 2;
    for (u32 i = 0; i < 4; ++i) out[i] = d[g + i / 2 * 8][p + i % 2];
  }
}

struct MmaK8Arguments {
  float* d;
  u32 a[2], b;
};

// d[16x8] += a[16x8] b[8x8] in fp16. a[0..1]: (row g, columns 2p), (g + 8, 2p); b: rows 2p of column g; d as above.
void run_mma_k8(void* const (&arguments)[kLanes], Site site) {
  count("mma_m16n8k8", site);
  float a[16][8], b[8][8], d[16][8];
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const MmaK8Arguments& in = *static_cast<const MmaK8Arguments*>(arguments[lane]);
    const u32 g = lane / 4, p = lane % 4 * 2;
    for (u32 half = 0; half < 2; ++half) {
      a[g + half * 8][p] = widen<false>(in.a[half] & 0xffffu);
      a[g + half * 8][p + 1] = widen<false>(in.a[half] >> 16);
      for (u32 i = 0; i < 2; ++i) d[g + half * 8][p + i] = in.d[half * 2 + i];
    }
    b[p][g] = widen<false>(in.b & 0xffffu);
    b[p + 1][g] = widen<false>(in.b >> 16);
  }
  for (u32 row = 0; row < 16; ++row)
    for (u32 k = 0; k < 8; ++k)
      for (u32 column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
  for (u32 lane = 0; lane < kLanes; ++lane) {
    float* out = static_cast<const MmaK8Arguments*>(arguments[lane])->d;
    const u32 g = lane / 4, p = lane % 4 * 2;
    for (u32 i = 0; i < 4; ++i) out[i] = d[g + i / 2 * 8][p + i % 2];
  }
}

// d[16x8] += a[16x8] b[8x8]. a[0..3]: (row g, column t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b[0..1]: rows t and t + 4 of
// column g; d as above. Products are exact and the sum is rounded once, towards zero (Fasi et al., "Numerical behavior of
// NVIDIA tensor cores", 2021), so that a sum kept in the accumulators for too long shows here too.
void run_mma_tf32(void* const (&arguments)[kLanes], Site site) {
  count("mma_m16n8k8_tf32", site);
  float a[16][8], b[8][8], d[16][8];
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const MmaArguments& in = *static_cast<const MmaArguments*>(arguments[lane]);
    const u32 g = lane / 4, t = lane % 4;
    for (u32 i = 0; i < 4; ++i) {
      a[g + i % 2 * 8][t + i / 2 * 4] = tf32_to_float(in.a[i]);
      d[g + i / 2 * 8][2 * t + i % 2] = in.d[i];
    }
    for (u32 i = 0; i < 2; ++i) b[t + i * 4][g] = tf32_to_float(in.b[i]);
  }
  for (u32 row = 0; row < 16; ++row)
    for (u32 column = 0; column < 8; ++column) {
      double sum = d[row][column];
      for (u32 k = 0; k < 8; ++k) sum += static_cast<double>(a[row][k]) * b[k][column];
      d[row][column] = towards_zero(sum);
    }
  for (u32 lane = 0; lane < kLanes; ++lane) {
    float* out = static_cast<const MmaArguments*>(arguments[lane])->d;
    const u32 g = lane / 4, t = lane % 4;
    for (u32 i = 0; i < 4; ++i) out[i] = d[g + i / 2 * 8][2 * t + i % 2];
  }
}

struct LdmatrixArguments {
  u32* r;
  u32 address;
};

template <bool kTransposed>
void run_ldmatrix(void* const (&arguments)[kLanes], Site site) {
  const char* name = kTransposed ? "ldmatrix_x4_trans" : "ldmatrix_x4";
  const u16 index = count(name, site);
  u16 matrices[4][8][8];
  u32 addresses[kLanes];
  for (u32 lane = 0; lane < kLanes; ++lane) {
    machine.acting = &lane_of_running_warp(lane);
    addresses[lane] = static_cast<const LdmatrixArguments*>(arguments[lane])->address;
    __builtin_memcpy(matrices[lane / 8][lane % 8], shared_read_by_warp(name, index, addresses[lane], 16, site), 16);
  }
  machine.acting = nullptr;
  for (u32 m = 0; m < 4; ++m) record(index).bank_conflicts += banks_conflicts_of_rows(addresses + m * 8);
  for (u32 lane = 0; lane < kLanes; ++lane) {
    u32* r = static_cast<const LdmatrixArguments*>(arguments[lane])->r;
    const u32 g = lane / 4, p = lane % 4 * 2;
    for (u32 m = 0; m < 4; ++m) {
      const u32 low = kTransposed ? matrices[m][p][g] : matrices[m][g][p];
      const u32 high = kTransposed ? matrices[m][p + 1][g] : matrices[m][g][p + 1];
      r[m] = low | high << 16;
    }
  }
}

struct ShflArguments {
  u32 value;
  int mask;
};

void run_shfl(void* const (&arguments)[kLanes], Site site) {
  count("shfl_xor", site);
  u32 values[kLanes];
  for (u32 lane = 0; lane < kLanes; ++lane) values[lane] = static_cast<const ShflArguments*>(arguments[lane])->value;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    auto* argument = static_cast<ShflArguments*>(arguments[lane]);
    if (argument->mask < 0 || argument->mask >= static_cast<int>(kLanes))
      fail(site, "shfl_xor with mask %d: lanes are 0 to 31", argument->mask);
    argument->value = values[lane ^ static_cast<u32>(argument->mask)];
  }
}

void run_vote(void* const (&arguments)[kLanes], Site site) {
  count("vote", site);
  u32 ballot = 0;
  for (u32 lane = 0; lane < kLanes; ++lane) ballot |= (*static_cast<const u32*>(arguments[lane]) & 1u) << lane;
  for (u32 lane = 0; lane < kLanes; ++lane) *static_cast<u32*>(arguments[lane]) = ballot;
}

void run_shfl_index(void* const (&arguments)[kLanes], Site site) {
  count("shfl", site);
  u32 values[kLanes];
  for (u32 lane = 0; lane < kLanes; ++lane) values[lane] = static_cast<const ShflArguments*>(arguments[lane])->value;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    auto* argument = static_cast<ShflArguments*>(arguments[lane]);
    argument->value = values[argument->mask & 31];
  }
}

void run_elect(void* const (&arguments)[kLanes], Site site) {
  count("elect", site);
  for (u32 lane = 0; lane < kLanes; ++lane) *static_cast<u32*>(arguments[lane]) = lane == 0;
}

struct StmatrixArguments {
  const u32* r;
  u32 address;
};

void run_stmatrix(void* const (&arguments)[kLanes], Site site) {
  const char* name = "stmatrix_x4";
  const u16 index = count(name, site);
  u16 matrices[4][8][8];
  u32 addresses[kLanes];
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32* r = static_cast<const StmatrixArguments*>(arguments[lane])->r;
    const u32 g = lane / 4, p = lane % 4 * 2;
    for (u32 m = 0; m < 4; ++m) {
      matrices[m][g][p] = static_cast<u16>(r[m]);
      matrices[m][g][p + 1] = static_cast<u16>(r[m] >> 16);
    }
  }
  Thread* running = machine.running;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    addresses[lane] = static_cast<const StmatrixArguments*>(arguments[lane])->address;
    check_shared(name, addresses[lane], 16, 16, site);
    machine.running = &machine.threads[running->identity.warp * kLanes + lane];  // each lane writes its row
    order_write(name, index, addresses[lane], 16, site);
    __builtin_memcpy(shared_host(addresses[lane]), matrices[lane / 8][lane % 8], 16);
  }
  machine.running = running;
  for (u32 m = 0; m < 4; ++m) record(index).bank_conflicts += banks_conflicts_of_rows(addresses + m * 8);
}

void run_nothing(void* const (&)[kLanes], Site) {}

void run_sync_warp(void* const (&)[kLanes], Site site) {
  count("sync_warp", site);
  u32 threads[kLanes];
  for (u32 lane = 0; lane < kLanes; ++lane) threads[lane] = lane_of_running_warp(lane).identity.thread;
  order_join(threads, kLanes);
}

const Collective kMmaBf16{"mma_m16n8k16", run_mma<true>};
const Collective kMmaFp16{"mma_m16n8k16", run_mma<false>};
const Collective kMmaK8{"mma_m16n8k8", run_mma_k8};
const Collective kMmaTf32{"mma_m16n8k8_tf32", run_mma_tf32};
const Collective kLdmatrix{"ldmatrix_x4", run_ldmatrix<false>};
const Collective kLdmatrixTrans{"ldmatrix_x4_trans", run_ldmatrix<true>};
const Collective kShflXor{"shfl_xor", run_shfl};
const Collective kVote{"vote", run_vote};
const Collective kShflIndex{"shfl", run_shfl_index};
const Collective kElect{"elect", run_elect};
const Collective kStmatrix{"stmatrix_x4", run_stmatrix};
const Collective kMeet{"setmaxnreg", run_nothing};
const Collective kSyncWarp{"sync_warp", run_sync_warp};

}  // namespace

void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bool is_bf16, Site site) {
  MmaArguments arguments{d, a, {b0, b1}};
  rendezvous(is_bf16 ? kMmaBf16 : kMmaFp16, &arguments, site);
}

void mma_m16n8k8(float (&d)[4], u32 a0, u32 a1, u32 b0, Site site) {
  MmaK8Arguments arguments{d, {a0, a1}, b0};
  rendezvous(kMmaK8, &arguments, site);
}

void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  MmaArguments arguments{d, a, {b0, b1}};
  rendezvous(kMmaTf32, &arguments, site);
}

void ldmatrix(u32 (&r)[4], u32 address, bool transposed, Site site) {
  LdmatrixArguments arguments{r, address};
  rendezvous(transposed ? kLdmatrixTrans : kLdmatrix, &arguments, site);
}

u32 shfl_xor(u32 value, int mask, Site site) {
  ShflArguments arguments{value, mask};
  rendezvous(kShflXor, &arguments, site);
  return arguments.value;
}

u32 vote(bool predicate, Site site) {
  u32 ballot = predicate;
  rendezvous(kVote, &ballot, site);
  return ballot;
}

void sync_warp(Site site) { rendezvous(kSyncWarp, nullptr, site); }

void sync_lanes(Site site) { rendezvous(kMeet, nullptr, site); }

u32 shfl(u32 value, int lane, Site site) {
  ShflArguments arguments{value, lane};
  rendezvous(kShflIndex, &arguments, site);
  return arguments.value;
}

bool elect(Site site) {
  u32 elected = 0;
  rendezvous(kElect, &elected, site);
  return elected != 0;
}

void stmatrix(u32 address, const u32 (&r)[4], Site site) {
  StmatrixArguments arguments{r, address};
  rendezvous(kStmatrix, &arguments, site);
}

u32 grid_size() { return machine.grid; }

}  // namespace emulation
