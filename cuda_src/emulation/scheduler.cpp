// Who runs next. A fiber goes on until it has to wait; lanes of the same warp come first, then another warp,
// by turns or shuffled by the seed. When nobody can go on, that is a deadlock and it says who waits where.
#include "state_sm90.h"

#include <time.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>

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

const char* base_name(const char* path) {
  const char* name = path;
  for (const char* p = path; *p; ++p)
    if (*p == '/') name = p + 1;
  return name;
}

[[noreturn]] void leave() {
  Thread* self = machine.running;
  machine.failed = true;
  if (self) {
    machine.running = nullptr;
    switch_context(self->context, machine.scheduler);
  }
  __builtin_unreachable();
}

void record_failure(u32 thread, Site site, const char* format, va_list arguments) {
  Failure& f = machine.failure;
  f.block = block_index;
  f.thread = thread;
  f.file = site.file ? base_name(site.file) : "";
  f.line = site.line;
  vsnprintf(f.text, sizeof f.text, format, arguments);
}

// "threads 0-31, 40 wait in sync_block at forward_sm80.cu:88; ..."
std::string who_waits_where() {
  std::vector<bool> listed(machine.num_threads);
  std::string text;
  for (u32 i = 0; i < machine.num_threads; ++i) {
    const Thread& first = machine.threads[i];
    if (listed[i] || first.state == State::kExited) continue;
    std::string members;
    for (u32 j = i; j < machine.num_threads; ++j) {
      auto same = [&](u32 k) {
        const Thread& t = machine.threads[k];
        return k < machine.num_threads && t.state == first.state && t.waits_for == first.waits_for &&
               t.site.line == first.site.line && t.site.file == first.site.file;
      };
      if (!same(j)) continue;
      u32 last = j;
      while (last + 1 < machine.num_threads && same(last + 1)) ++last;
      members += (members.empty() ? "" : ", ") + std::to_string(j) + (last > j ? "-" + std::to_string(last) : "");
      for (; j <= last; ++j) listed[j] = true;
      --j;
    }
    text += (text.empty() ? "" : "; ") + ("threads " + members) + " wait in " + first.waits_for + " at " + describe(first.site);
  }
  const u32 exited = machine.num_threads - machine.alive;
  if (exited) text += "; " + std::to_string(exited) + " threads have exited";
  return text;
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
  while (!next && (copies_land_one() | wake_pollers())) next = pick(self);
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

std::string describe(Site site) { return std::string(base_name(site.file)) + ":" + std::to_string(site.line); }

std::string lanes_text(u32 lanes) {
  std::string text;
  for (u32 i = 0; i < kLanes; ++i) {
    if (!(lanes >> i & 1u)) continue;
    u32 last = i;
    while (last + 1 < kLanes && lanes >> (last + 1) & 1u) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(i) + (last > i ? "-" + std::to_string(last) : "");
    i = last;
  }
  return text;
}

void fail(Site site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const Thread* blamed = machine.acting ? machine.acting : machine.running;
  record_failure(blamed ? blamed->identity.thread : 0, site, format, arguments);
  va_end(arguments);
  leave();
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
