// The C interface that flashpatch/emulator.py calls through ctypes.
#include "state.h"

#include <time.h>

#include <cstdio>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulation {
namespace {

void set_shared(u32 bytes) {
  machine.shared_bytes = bytes;
  machine.shared_storage.resize(bytes + kSharedBase);
  const u64 start = reinterpret_cast<u64>(machine.shared_storage.data());
  machine.shared = machine.shared_storage.data() + (kSharedBase - start % kSharedBase) % kSharedBase;
}

bool refuse(const char* text, u32 asked, u32 limit) {
  machine.failed = true;
  machine.failure = Failure{};
  snprintf(machine.failure.text, sizeof machine.failure.text, text, asked, limit);
  return true;
}

bool refused(u32 threads) {
  if (threads == 0 || threads % kLanes) return refuse("a block of %u threads is not whole warps of %u", threads, kLanes);
  if (threads > launch_bound) return refuse("launched with %u threads a block, compiled for at most %u", threads, launch_bound);
  if (!machine.stacks.get(threads - 1)) return refuse("no memory for the stacks of %u threads (of %u bytes)", threads, kStackBytes);
  return false;
}

u64 deadline_in(double seconds) {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<u64>((static_cast<double>(t.tv_sec) + seconds) * 1e9);
}

}  // namespace
}  // namespace emulation

// Runs a whole grid. 0: done; 1: failed, see flashpatch_failure. At most 4096 bytes of params, as CUDA has it.
EXPORT int flashpatch_launch(void (*entry)(const void*), const void* params, unsigned params_bytes, unsigned grid,
                             unsigned threads, unsigned shared_bytes, unsigned long long seed, const emulation::GlobalRange* ranges,
                             unsigned num_ranges, int ordered_additions, double time_limit) {
  using namespace emulation;
  machine.failed = false;
  machine.entry = entry;
  alignas(128) static u8 aligned_params[4096];
  __builtin_memcpy(aligned_params, params, params_bytes);
  machine.params = aligned_params;
  machine.grid = grid;
  machine.ranges = machine.last_range = ranges;
  machine.num_ranges = num_ranges;
  machine.ordered_additions = ordered_additions != 0;
  machine.random = seed * 0x9e3779b97f4a7c15ull;
  machine.deadline = deadline_in(time_limit);
  reset_records();
  if (refused(threads)) return 1;
  machine.num_threads = threads;
  machine.num_warps = threads / kLanes;
  machine.threads.resize(threads);
  machine.warps.resize(machine.num_warps);
  set_shared(shared_bytes);
  for (Thread& thread : machine.threads) thread.copies.clear();
  order_begin_launch();
  banks_begin_launch();
  global_begin_launch();
  for (u32 block = 0; block < grid && !machine.failed; ++block) run_block(block);
  machine.stacks.release();
  return machine.failed;
}

EXPORT const emulation::Failure* flashpatch_failure() { return &emulation::machine.failure; }

EXPORT unsigned flashpatch_records(const emulation::SiteRecord** records) { return emulation::all_records(records); }
