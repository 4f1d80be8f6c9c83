// Named barriers, mbarriers, proxy fences, and registers that move between warps.
#include "state_sm90.h"

#include <algorithm>
#include <unordered_map>

namespace emulation {
namespace {

// ---- named barriers ----

struct NamedBarrier {
  u32 expected = 0;  // 0: nobody has come yet
  std::vector<u32> arrived, waiting;
  std::vector<u32> carried;  // what all who arrived know
};

constexpr u32 kNamedBarriers = 16;
NamedBarrier named[kNamedBarriers];

NamedBarrier& arrive(const char* instruction, u32 id, u32 threads, Site site) {
  if (id == 0 || id >= kNamedBarriers) fail(site, "%s of barrier %u: 1 to 15 are free, 0 is sync_block's", instruction, id);
  if (threads == 0 || threads % kLanes || threads > machine.num_threads)
    fail(site, "%s for %u threads: a multiple of %u, at most %u", instruction, threads, kLanes, machine.num_threads);
  NamedBarrier& b = named[id];
  const u32 self = machine.running->identity.thread;
  if (b.expected && b.expected != threads)
    fail(site, "%s of barrier %u for %u threads, while others are there for %u", instruction, id, threads, b.expected);
  if (std::find(b.arrived.begin(), b.arrived.end(), self) != b.arrived.end())
    fail(site, "%s: thread %u comes to barrier %u twice before it is complete", instruction, self, id);
  count(instruction, site);
  b.expected = threads;
  b.arrived.push_back(self);
  order_release_to(b.carried, self);
  ++machine.progress;
  machine.idle_polls = 0;
  return b;
}

void complete_if_full(NamedBarrier& b) {
  if (b.arrived.size() < b.expected) return;
  for (u32 thread : b.waiting) {
    order_acquire_from(b.carried, thread);
    wake(machine.threads[thread]);
  }
  b = NamedBarrier{};
}

// ---- mbarriers ----

struct Mbarrier {
  u32 count, pending, phase;
  long long bytes;  // expected and not delivered
  u32 init_thread, init_time;
  bool visible_to_engine;
  std::vector<u32> gathering, completed;  // what those who arrived know; that of the phases that are over
};

std::unordered_map<u32, Mbarrier> mbarriers;

Mbarrier& mbarrier_at(const char* instruction, u32 address, Site site) {
  check_shared(instruction, address, 8, 8, site);
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end())
    fail(site, "%s at shared offset %u, where no mbarrier was initialised", instruction, address - kSharedBase);
  Mbarrier& b = found->second;
  if (!order_knows(machine.running->identity.thread, b.init_thread, b.init_time))
    fail(site, "race: %s at shared offset %u is not ordered after its mbarrier_init by thread %u", instruction,
         address - kSharedBase, b.init_thread);
  return b;
}

void complete_if_over(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.completed = b.gathering;
  b.pending = b.count;
  ++b.phase;
  ++machine.progress;
  machine.idle_polls = 0;
}

// ---- registers ----

std::vector<u32> registers_of_warp;
u32 free_registers;

u32 registers_at_launch() { return std::min(65536 / machine.num_threads / 8 * 8, 256u); }

}  // namespace

void barriers_begin_block() {
  for (NamedBarrier& b : named) b = NamedBarrier{};
  mbarriers.clear();
  registers_of_warp.assign(machine.num_warps, registers_at_launch());
  free_registers = 0;
}

void barriers_end_block() {
  for (auto& [address, b] : mbarriers)
    if (b.bytes > 0)
      fail({"", 0}, "the block ended while the mbarrier at shared offset %u still expected %lld bytes", address - kSharedBase,
           b.bytes);
}

void barrier_sync(u32 id, u32 threads, Site site) {
  NamedBarrier& b = arrive("barrier_sync", id, threads, site);
  Thread& self = *machine.running;
  b.waiting.push_back(self.identity.thread);
  self.state = State::kBarrier;
  warp_of(self).runnable &= ~(1u << self.identity.lane);
  complete_if_full(b);
  if (self.state == State::kBarrier) suspend(State::kBarrier, "barrier_sync", site);
}

void barrier_arrive(u32 id, u32 threads, Site site) { complete_if_full(arrive("barrier_arrive", id, threads, site)); }

void mbarrier_init(u32 address, u32 arrivals, Site site) {
  check_shared("mbarrier_init", address, 8, 8, site);
  if (arrivals == 0 || arrivals >= 1u << 20) fail(site, "mbarrier_init for %u arrivals: 1 to 2^20 - 1", arrivals);
  const u16 index = count("mbarrier_init", site);
  order_write("mbarrier_init", index, address, 8, site);
  const u32 self = machine.running->identity.thread;
  mbarriers[address] = {arrivals, arrivals, 0, 0, self, order_clock(self), false, {}, {}};
}

void mbarrier_arrive(const char* instruction, u32 address, u32 bytes_expected, Site site) {
  Mbarrier& b = mbarrier_at(instruction, address, site);
  if (b.pending == 0)
    fail(site, "%s at shared offset %u: more arrivals than the %u it was initialised for", instruction, address - kSharedBase,
         b.count);
  count(instruction, site);
  order_release_to(b.gathering, machine.running->identity.thread);
  b.bytes += bytes_expected;
  --b.pending;
  ++machine.progress;
  machine.idle_polls = 0;
  complete_if_over(b);
}

bool mbarrier_done(const char* instruction, u32 address, u32 parity, Site site) {
  Mbarrier& b = mbarrier_at(instruction, address, site);
  if (parity > 1) fail(site, "%s for parity %u: a phase is even (0) or odd (1)", instruction, parity);
  if ((b.phase & 1) == parity) poll(instruction, &b, site);
  if ((b.phase & 1) == parity) return false;
  count(instruction, site);
  order_acquire_from(b.completed, machine.running->identity.thread);
  return true;
}

void fence_mbarrier_init(Site site) {
  count("fence_mbarrier_init", site);
  for (auto& [address, b] : mbarriers)
    if (order_knows(machine.running->identity.thread, b.init_thread, b.init_time)) b.visible_to_engine = true;
}

void fence_proxy_async(Site site) {
  count("fence_proxy_async", site);
  const u32 self = machine.running->identity.thread;
  for (auto& [address, b] : mbarriers)
    if (order_knows(self, b.init_thread, b.init_time)) b.visible_to_engine = true;
  order_fence_proxy(self);
}

void mbarrier_check_engine(const char* instruction, u32 address, Site site) {
  const Mbarrier& b = mbarrier_at(instruction, address, site);
  if (!b.visible_to_engine)
    fail(site, "%s with the mbarrier at shared offset %u: no fence_mbarrier_init made it visible to the copy engine",
         instruction, address - kSharedBase);
}

void mbarrier_complete(u32 address, u32 bytes) {
  Mbarrier& b = mbarriers.at(address);
  b.bytes -= bytes;
  order_engine_done(b.gathering);
  complete_if_over(b);
}

// A warp gives registers back or takes what others gave; the launch gave every warp the same.
void set_max_registers(u32 registers, bool increase, Site site) {
  const char* instruction = increase ? "setmaxnreg_inc" : "setmaxnreg_dec";
  if (registers < 24 || registers > 256 || registers % 8)
    fail(site, "%s to %u: a multiple of 8 from 24 to 256", instruction, registers);
  sync_lanes(site);
  const Identity& self = machine.running->identity;
  u32& mine = registers_of_warp[self.warp];
  if (self.lane == 0) {
    if (increase ? registers < mine : registers > mine)
      fail(site, "%s to %u, but this warp has %u a thread", instruction, registers, mine);
    while (increase && registers - mine > free_registers) suspend(State::kPolling, instruction, site);
    count(instruction, site);
    if (increase) free_registers -= registers - mine;
    else free_registers += mine - registers;
    mine = registers;
    ++machine.progress;
    machine.idle_polls = 0;
  }
  sync_lanes(site);
}

}  // namespace emulation
