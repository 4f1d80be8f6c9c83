// The copy engine: TMA boxes and bulk runs of bytes. A copy is carried out when somebody has to wait for it and nobody
// else can go on (or at random, with a seed), so that whatever is used without a wait is not there yet.
#include "state_sm90.h"

#include <algorithm>
#include <deque>

namespace emulation {
namespace {

enum class Direction : u8 { kLoad, kStore, kAdd };

// A contiguous run: this many bytes at a shared address (before swizzling) and a global one; null: zeros.
struct Run {
  u32 shared;
  u64 global;
  u32 bytes;
};

struct Copy {
  Direction direction;
  u32 thread, barrier;
  u32 swizzle_bytes;
  u32 shared, bytes;
  std::vector<Run> runs;
  const char* instruction;
  Site site;
  bool landed;
};

struct Groups {
  std::vector<u64> open;                // copies not committed yet
  std::deque<std::vector<u64>> closed;  // oldest first
};

std::deque<Copy> copies;  // all of the block; positions are their numbers
std::deque<u64> under_way;
std::vector<Groups> groups;  // by thread

const TensorMapFields& fields_of(const char* instruction, const void* map, u32 rank, Site site) {
  const auto& fields = *static_cast<const TensorMapFields*>(map);
  if (fields.magic != kTensorMapMagic) fail(site, "%s through a tensor map that nobody filled", instruction);
  if (fields.rank != rank) fail(site, "%s of rank %u through a tensor map of rank %u", instruction, rank, fields.rank);
  return fields;
}

// Cuts the box at `coordinates` into rows along dimension 0, each inside the tensor, partly or not at all.
std::vector<Run> runs_of(const TensorMapFields& map, u32 shared, const int (&coordinates)[5]) {
  std::vector<Run> runs;
  const u32 row_bytes = map.box[0] * map.element_bytes;
  u32 at[5] = {};
  u32 row = 0;
  for (;; ++row) {
    bool inside = true;
    u64 global = map.base;
    for (u32 d = 1; d < map.rank; ++d) {
      const long long position = static_cast<long long>(coordinates[d]) + at[d];
      inside = inside && position >= 0 && position < static_cast<long long>(map.dims[d]);
      global += static_cast<u64>(position) * map.strides[d - 1];
    }
    const long long first = std::max(0, -coordinates[0]);
    const long long end = std::min<long long>(map.box[0], static_cast<long long>(map.dims[0]) - coordinates[0]);
    const u32 to = shared + row * row_bytes;
    if (!inside || end <= first) {
      runs.push_back({to, 0, row_bytes});
    } else {
      const u32 begin_bytes = static_cast<u32>(first) * map.element_bytes, end_bytes = static_cast<u32>(end) * map.element_bytes;
      if (begin_bytes) runs.push_back({to, 0, begin_bytes});
      const long long column = coordinates[0] + first;
      runs.push_back({to + begin_bytes, global + static_cast<u64>(column) * map.element_bytes, end_bytes - begin_bytes});
      if (end_bytes < row_bytes) runs.push_back({to + end_bytes, 0, row_bytes - end_bytes});
    }
    u32 d = 1;
    while (d < map.rank && ++at[d] == map.box[d]) at[d++] = 0;
    if (d == map.rank) return runs;
  }
}

void land_load(const Copy& copy) {
  for (const Run& run : copy.runs) {
    for (u32 i = 0; i < run.bytes; i += 2) {
      u8* to = shared_host(swizzled(run.shared + i, copy.swizzle_bytes));
      if (run.global) __builtin_memcpy(to, reinterpret_cast<const u8*>(run.global) + i, 2);
      else __builtin_memset(to, 0, 2);
    }
  }
  order_engine_land(copy.shared, copy.bytes);
  mbarrier_complete(copy.barrier, copy.bytes);
}

void land_store(const Copy& copy) {
  for (const Run& run : copy.runs) {
    if (!run.global) continue;
    if (copy.direction == Direction::kAdd) {
      for (u32 i = 0; i < run.bytes; i += 4) {
        float value;
        __builtin_memcpy(&value, shared_host(run.shared + i), 4);
        *global_add(copy.instruction, reinterpret_cast<float*>(run.global + i), 4, copy.site) += value;
      }
    } else {
      for (u32 i = 0; i < run.bytes; i += 4) {
        u8* to = global_write(copy.instruction, reinterpret_cast<void*>(run.global + i), 4, 4, copy.site);
        __builtin_memcpy(to, shared_host(swizzled(run.shared + i, copy.swizzle_bytes)), 4);
      }
    }
  }
}

void land(u64 number) {
  Copy& copy = copies[number];
  if (copy.landed) return;
  copy.landed = true;
  under_way.erase(std::find(under_way.begin(), under_way.end(), number));
  Thread* running = machine.running;
  machine.running = &machine.threads[copy.thread];  // on whose behalf memory is touched
  if (copy.direction == Direction::kLoad) land_load(copy);
  else land_store(copy);
  machine.running = running;
  ++machine.progress;
  machine.idle_polls = 0;
}

void start(Copy copy) {
  const u16 index = count(copy.instruction, copy.site);
  if (copy.direction == Direction::kLoad) {
    order_engine_issue(copy.instruction, index, copy.shared, copy.bytes, copy.site);
  } else {
    order_begin_read(copy.instruction, index, copy.shared, copy.bytes, 1u << machine.running->identity.lane, copy.site);
    groups[copy.thread].open.push_back(copies.size());
  }
  under_way.push_back(copies.size());
  copies.push_back(std::move(copy));
}

Copy box_copy(const char* instruction, Direction direction, const TensorMapFields& map, u32 shared, const int (&coordinates)[5],
              Site site) {
  u32 bytes = map.element_bytes;
  for (u32 d = 0; d < map.rank; ++d) bytes *= map.box[d];
  check_shared(instruction, shared, bytes, 128, site);
  const u32 self = machine.running->identity.thread;
  return {direction, self, 0, map.swizzle_bytes, shared, bytes, runs_of(map, shared, coordinates), instruction, site, false};
}

Copy bulk_copy(const char* instruction, Direction direction, u32 shared, const void* global, u32 bytes, Site site) {
  const u64 address = reinterpret_cast<u64>(global);
  if (bytes % 16 || address % 16 || bytes == 0)
    fail(site, "%s of %u bytes at global address 0x%llx: both must be multiples of 16", instruction, bytes, address);
  check_shared(instruction, shared, bytes, 16, site);
  return {direction, machine.running->identity.thread, 0, 0, shared, bytes, {{shared, address, bytes}}, instruction, site, false};
}

void check_sources(const Copy& copy) {
  for (const Run& run : copy.runs)
    if (run.global) global_source(copy.instruction, reinterpret_cast<const void*>(run.global), run.bytes, 2, copy.site);
}

}  // namespace

void copies_begin_block() {
  copies.clear();
  under_way.clear();
  groups.assign(machine.num_threads, Groups{});
}

void copies_end_block() {
  for (u64 number : under_way)
    if (const Copy& copy = copies[number]; copy.direction == Direction::kLoad)
      fail(copy.site, "the block ended while this copy was under way: nobody waited for it");
  for (const Groups& g : groups) {
    for (u64 number : g.open)
      fail(copies[number].site, "the block ended before this copy had read its shared memory: it was never committed");
    for (const auto& group : g.closed)
      for (u64 number : group)
        fail(copies[number].site, "the block ended before this copy had read its shared memory: no bulk_wait covers it");
  }
}

bool copies_land_one() {
  if (under_way.empty()) return false;
  land(under_way[machine.random ? random_below(static_cast<u32>(under_way.size())) : 0]);
  return true;
}

void tma_load(u32 destination, const void* map, u32 barrier, u32 rank, const int (&coordinates)[5], Site site) {
  const char* instruction = rank == 4 ? "tma_load_4d" : "tma_load_5d";
  Copy copy = box_copy(instruction, Direction::kLoad, fields_of(instruction, map, rank, site), destination, coordinates, site);
  mbarrier_check_engine(instruction, barrier, site);
  copy.barrier = barrier;
  check_sources(copy);
  start(std::move(copy));
}

void tma_store(const void* map, u32 source, const int (&coordinates)[5], Site site) {
  const char* instruction = "tma_store_5d";
  start(box_copy(instruction, Direction::kStore, fields_of(instruction, map, 5, site), source, coordinates, site));
}

void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, Site site) {
  Copy copy = bulk_copy("bulk_load", Direction::kLoad, destination, source, bytes, site);
  mbarrier_check_engine("bulk_load", barrier, site);
  copy.barrier = barrier;
  check_sources(copy);
  start(std::move(copy));
}

void bulk_reduce_add_f32(float* destination, u32 source, u32 bytes, Site site) {
  start(bulk_copy("bulk_reduce_add_f32", Direction::kAdd, source, destination, bytes, site));
}

void bulk_commit(Site site) {
  count("bulk_commit", site);
  Groups& g = groups[machine.running->identity.thread];
  g.closed.push_back(std::move(g.open));
  g.open.clear();
}

// Having read shared memory and being complete are one event here: the later of the two.
void bulk_wait(u32 pending, Site site) {
  count("bulk_wait", site);
  Groups& g = groups[machine.running->identity.thread];
  while (g.closed.size() > pending) {
    for (u64 number : g.closed.front()) {
      land(number);
      order_finish_read(copies[number].thread / kLanes, copies[number].shared, copies[number].bytes);
    }
    g.closed.pop_front();
  }
}

}  // namespace emulation
