// Where threads meet: collectives of a warp, and the barrier of the block.
#include "state.h"

namespace emulation {

void rendezvous(const Collective& collective, void* argument, Site site) {
  Thread& self = *machine.running;
  Warp& warp = warp_of(self);
  if (warp.exited)
    fail(site, "%s needs the whole warp, but lanes %s have exited", collective.name, lanes_text(warp.exited).c_str());
  if (warp.arrived) {
    const Thread& other = machine.threads[self.identity.warp * kLanes + static_cast<u32>(__builtin_ctz(warp.arrived))];
    if (warp.collective != &collective || other.site.line != site.line || other.site.file != site.file)
      fail(site, "divergent warp: lane %u is at %s, lanes %s are at %s at %s", self.identity.lane, collective.name,
           lanes_text(warp.arrived).c_str(), warp.collective->name, describe(other.site).c_str());
  }
  warp.collective = &collective;
  warp.arguments[self.identity.lane] = argument;
  warp.arrived |= 1u << self.identity.lane;
  if (warp.arrived != ~0u) return suspend(State::kWarp, collective.name, site);
  banks_meet(self.identity.warp);
  collective.run(warp.arguments, site);
  ++machine.progress;
  machine.idle_polls = 0;
  warp.arrived = 0;
  for (u32 lane = 0; lane < kLanes; ++lane) machine.threads[self.identity.warp * kLanes + lane].state = State::kRunnable;
  warp.runnable = ~0u;
}

namespace {

// Lanes of one warp must have come to the same barrier instruction; other warps may be at another one.
void check_barrier_sites() {
  for (const Thread& t : machine.threads) {
    const Thread& first = machine.threads[t.identity.warp * kLanes];
    if (t.state != State::kBlock || first.state != State::kBlock) continue;
    if (t.site.line != first.site.line || t.site.file != first.site.file || t.waits_for != first.waits_for)
      fail(t.site, "divergent barrier: thread %u is at %s at %s, thread %u of the same warp at %s at %s",
           t.identity.thread, t.waits_for, describe(t.site).c_str(), first.identity.thread, first.waits_for,
           describe(first.site).c_str());
  }
}

void arrive_at_barrier(const char* name, bool predicate, Site site) {
  count(name, site);
  machine.barrier_or |= predicate;
  ++machine.at_barrier;
  Thread& self = *machine.running;
  self.state = State::kBlock;
  self.waits_for = name;
  self.site = site;
  warp_of(self).runnable &= ~(1u << self.identity.lane);
  finish_barrier_if_complete();
  if (self.state == State::kBlock) suspend(State::kBlock, name, site);
}

}  // namespace

void finish_barrier_if_complete() {
  if (machine.alive == 0 || machine.at_barrier != machine.alive) return;
  check_barrier_sites();
  machine.barrier_result = machine.barrier_or;
  machine.barrier_or = false;
  machine.at_barrier = 0;
  ++machine.progress;
  machine.idle_polls = 0;
  static std::vector<u32> met;
  met.clear();
  for (Thread& t : machine.threads)
    if (t.state == State::kBlock) {
      wake(t);
      met.push_back(t.identity.thread);
    }
  order_join(met.data(), static_cast<u32>(met.size()));
  for (u32 w = 0; w < machine.num_warps; ++w) banks_meet(w);
}

void sync_block(Site site) { arrive_at_barrier("sync_block", false, site); }

bool sync_block_or(bool predicate, Site site) {
  arrive_at_barrier("sync_block_or", predicate, site);
  return machine.barrier_result;
}

}  // namespace emulation
