// What the machine's own files share: the threads, warps and memory of the block that is running.
#pragma once
#include <string>
#include <vector>

#include "fiber.h"
#include "machine.h"

namespace emulation {

enum class State : u8 { kRunnable, kWarp, kBlock, kBarrier, kPolling, kExited };

struct PendingCopy {
  u32 destination;
  const void* source;  // null: zeros
  Site site;
};

struct Thread {
  Identity identity;
  Context context;
  State state;
  const char* waits_for;  // the instruction it last stopped at
  Site site;
  const void* poll_target;
  u64 poll_progress;  // the machine's progress when it last looked there
  std::vector<PendingCopy> copies;
  std::vector<u32> copy_groups;  // number of copies in each committed group, oldest first
  u32 uncommitted_copies;
};

struct Warp {
  u32 runnable;  // lanes that can go on
  u32 arrived;   // lanes at the collective
  u32 exited;
  const Collective* collective;
  void* arguments[kLanes];
};

struct GlobalRange {
  u64 begin, end;
  const char* name;
  u32 writable;
};

struct Failure {
  u32 block, thread, line;
  const char* file;
  char text[2000];
};

struct Machine {
  // The launch.
  void (*entry)(const void*);
  const void* params;
  u32 grid, num_threads, num_warps, shared_bytes;
  const GlobalRange* ranges;
  u32 num_ranges;
  const GlobalRange* last_range;
  bool ordered_additions;  // deterministic kernels: additions to the same word need an order
  u64 random;  // state of the shuffle; 0: warps take turns
  // The block.
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<u8> shared_storage;
  u8* shared;
  u32 alive, at_barrier;
  bool barrier_or, barrier_result;
  // The scheduler.
  Thread* running;
  Context scheduler;
  Stacks stacks;
  u64 progress;  // counts everything that another thread could be waiting for
  u32 idle_polls;
  u64 deadline;  // nanoseconds of the monotonic clock
  const Thread* acting;  // whom to blame while one thread runs a collective for all; null: the running one
  bool failed;
  Failure failure;
};

extern Machine machine;

inline Warp& warp_of(const Thread& thread) { return machine.warps[thread.identity.warp]; }

// ---- scheduler ----
u32 random_below(u32 bound);
void check_clock(Site site);  // at every instruction: a loop that never ends is an error in the end
void sync_lanes(Site site);  // the warp meets, nothing else
void suspend(State state, const char* waits_for, Site site);
void wake(Thread& thread);
void run_block(u32 index);
void finish_barrier_if_complete();
inline Thread& lane_of_running_warp(u32 lane) { return machine.threads[machine.running->identity.warp * kLanes + lane]; }

std::string describe(Site site);          // "forward_sm80.cu:88"
std::string who_waits_where();            // of all threads that have not exited
std::string lanes_text(u32 lanes);        // "0-7,9"

// ---- counters: one record per instruction and place in the source ----
struct SiteRecord {
  const char* file;
  const char* instruction;
  u32 line;
  u32 unused;
  u64 executions;      // warp collectives once per warp, everything else once per thread
  u64 bank_conflicts;  // extra passes over shared memory beyond the least possible
};
u32 record_index(const char* instruction, Site site);
SiteRecord& record(u32 index);
void reset_records();
u32 all_records(const SiteRecord** first);
inline u16 count(const char* instruction, Site site) {
  check_clock(site);
  const u32 index = record_index(instruction, site);
  ++record(index).executions;
  return static_cast<u16>(index);
}

// ---- shared memory (shared_memory.cpp); these count nothing ----
void check_shared(const char* instruction, u32 address, u32 bytes, u32 alignment, Site site);
u8* shared_host(u32 address);  // no check
const u8* shared_read_by_warp(const char* instruction, u16 index, u32 address, u32 bytes, Site site);

// ---- order of accesses to shared memory (order.cpp) ----
void order_begin_launch();
void order_begin_block();
void order_read(const char* instruction, u16 index, u32 address, u32 bytes, Site site);
void order_read_by_warp(const char* instruction, u16 index, u32 address, u32 bytes, Site site);
void order_write(const char* instruction, u16 index, u32 address, u32 bytes, Site site);
void order_issue(const char* instruction, u16 index, u32 address, u32 bytes, Site site);
void order_land(u32 thread, u32 address, u32 bytes);
void order_join(const u32* threads, u32 count);
u32 order_clock(u32 thread);
bool order_knows(u32 thread, u32 other, u32 time);  // is what `other` did up to `time` ordered before `thread`'s next access?
std::vector<u32> order_release(u32 thread);         // what it knows; its later accesses are not part of that

// ---- global memory (global_memory.cpp) ----
void global_begin_launch();
void global_source(const char* instruction, const void* pointer, u32 bytes, u32 alignment, Site site);

// ---- bank conflicts (banks.cpp) ----
void banks_begin_launch();
void banks_note(u32 index, u32 address, u32 bytes);
void banks_meet(u32 warp);
u32 banks_conflicts_of_rows(const u32* addresses);  // 8 rows of 16 bytes

}  // namespace emulation
