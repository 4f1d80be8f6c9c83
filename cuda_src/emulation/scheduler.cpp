// Who runs next. A fiber goes on until it has to wait; lanes of the same warp come first, then another warp,
// by turns or shuffled by the seed. When nobody can go on, that is a deadlock and it says who waits where.
#include "state_sm90.h"

#include <time.h>

#include <algorithm>

namespace emulation {

Machine machine;
const Identity* identity;
u32 block_index;
u32 launch_bound;

namespace {

// A thread may look this often at something that does not change while nobody else can do anything.
constexpr u32 kIdlePolls = 16;
constexpr u32 kStepsPerClock = 1u << 18;

u64 now_nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<u64>(t.tv_sec) * 1000000000ull + static_cast<u64>(t.tv_nsec);
}

// Polling threads get another look; if that has been fruitless for long enough, nobody will ever go on.
bool wake_pollers() {
  bool any = false;
  for (Thread& t : machine.threads)
    if (t.state == State::kPolling) {
      wake(t);
      any = true;
    }
  return any && ++machine.idle_polls <= kIdlePolls;
}

u32 next_warp(u32 after) {
  const u32 n = machine.num_warps;
  const u32 start = machine.random ? random_below(n) : after + 1;
  for (u32 i = 0; i < n; ++i)
    if (const u32 w = (start + i) % n; machine.warps[w].runnable) return w;
  return n;
}

// The lane after this one, round and round; the seed sometimes moves on to another warp early.
Thread* pick(const Thread& self) {
  u32 w = self.identity.warp;
  const bool leave_warp = machine.random && random_below(64) == 0;
  if (leave_warp || !machine.warps[w].runnable) {
    w = next_warp(w);
    if (w == machine.num_warps) return nullptr;
  }
  const u32 runnable = machine.warps[w].runnable;
  const u32 after = w == self.identity.warp ? self.identity.lane + 1 : 0;
  const u32 later = after < kLanes ? runnable >> after << after : 0;
  return &machine.threads[w * kLanes + static_cast<u32>(__builtin_ctz(later ? later : runnable))];
}

void switch_to_next(Thread& self) {
  if (machine.alive == 0) {
    wgmma_end_block();
    copies_end_block();
    while (copies_land_one()) {}
    barriers_end_block();
    machine.running = nullptr;
    switch_context(self.context, machine.scheduler);
  }
  if (machine.random && random_below(256) == 0) copies_land_one();
  Thread* next = pick(self);
  while (!next) {
    const bool landed = copies_land_one();
    if (!wake_pollers() && !landed) break;
    next = pick(self);
  }
  if (!next) fail(self.site, "deadlock: %s", who_waits_where().c_str());
  if (next == &self) return;
  machine.running = next;
  identity = &next->identity;
  switch_context(self.context, next->context);
}

void check_lanes_left_behind(const Thread& self) {
  const Warp& warp = warp_of(self);
  if (warp.arrived)
    fail(self.site, "lane %u exits while lanes %s of its warp wait for it in %s at %s", self.identity.lane,
         lanes_text(warp.arrived).c_str(), warp.collective->name,
         describe(machine.threads[self.identity.warp * kLanes + static_cast<u32>(__builtin_ctz(warp.arrived))].site).c_str());
}

void thread_main() {
  machine.entry(machine.params);
  Thread& self = *machine.running;
  Warp& warp = warp_of(self);
  check_lanes_left_behind(self);
  self.state = State::kExited;
  warp.runnable &= ~(1u << self.identity.lane);
  warp.exited |= 1u << self.identity.lane;
  --machine.alive;
  ++machine.progress;
  finish_barrier_if_complete();
  switch_to_next(self);
  __builtin_unreachable();
}

void reset_threads() {
  for (u32 i = 0; i < machine.num_threads; ++i) {
    Thread& t = machine.threads[i];
    t.identity = {i, i % kLanes, i / kLanes};
    t.state = State::kRunnable;
    t.waits_for = "its first instruction";
    t.site = {"", 0};
    t.poll_target = nullptr;
    t.copies.clear();
    t.copy_groups.clear();
    t.uncommitted_copies = 0;
    prepare(t.context, machine.stacks.get(i), thread_main);
  }
  for (Warp& w : machine.warps) w = Warp{~0u, 0, 0, nullptr, {}};
}

}  // namespace

u32 random_below(u32 bound) {
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return static_cast<u32>((machine.random >> 32) % bound);
}

void check_clock(Site site) {
  static u32 steps = 0;
  if (++steps % kStepsPerClock == 0 && now_nanoseconds() > machine.deadline)
    fail(site, "the launch does not end: stopped at its time limit. %s", who_waits_where().c_str());
}

void wake(Thread& thread) {
  thread.state = State::kRunnable;
  warp_of(thread).runnable |= 1u << thread.identity.lane;
}

void suspend(State state, const char* waits_for, Site site) {
  Thread& self = *machine.running;
  self.state = state;
  self.waits_for = waits_for;
  self.site = site;
  warp_of(self).runnable &= ~(1u << self.identity.lane);
  switch_to_next(self);
}

void poll(const char* instruction, const void* target, Site site) {
  Thread& self = *machine.running;
  if (self.poll_target == target && self.poll_progress == machine.progress)
    suspend(State::kPolling, instruction, site);
  self.poll_target = target;
  self.poll_progress = machine.progress;
}

void run_block(u32 index) {
  block_index = index;
  machine.alive = machine.num_threads;
  machine.at_barrier = 0;
  machine.barrier_or = machine.barrier_result = false;
  machine.idle_polls = 0;
  machine.acting = nullptr;
  std::fill(machine.shared, machine.shared + machine.shared_bytes, u8(0xff));  // a NaN in every format
  order_begin_block();
  barriers_begin_block();
  copies_begin_block();
  wgmma_begin_block();
  reset_threads();
  Thread& first = machine.threads[machine.random ? random_below(machine.num_warps) * kLanes : 0];
  machine.running = &first;
  identity = &first.identity;
  switch_context(machine.scheduler, first.context);
  for (u32 w = 0; w < machine.num_warps && !machine.failed; ++w) banks_meet(w);
}

}  // namespace emulation
