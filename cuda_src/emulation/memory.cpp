// Bounds and alignment of every access, and the copies that are under way.
#include "state.h"

namespace emulation {
namespace {

void check_shared(const char* instruction, u32 address, u32 bytes, Site site) {
  if (address % bytes)
    fail(site, "%s of %u bytes at shared address %u (offset %d): not aligned to %u", instruction, bytes, address,
         static_cast<int>(address - kSharedBase), bytes);
  if (address < kSharedBase || u64(address) + bytes > u64(kSharedBase) + machine.shared_bytes)
    fail(site, "%s of %u bytes at shared offset %d: outside the launch's %u bytes of shared memory", instruction, bytes,
         static_cast<int>(address - kSharedBase), machine.shared_bytes);
}

u8* host(u32 address) { return machine.shared + (address - kSharedBase); }

const GlobalRange* range_of(u64 begin, u64 end) {
  if (begin >= machine.last_range->begin && end <= machine.last_range->end) return machine.last_range;
  for (u32 i = 0; i < machine.num_ranges; ++i)
    if (begin >= machine.ranges[i].begin && end <= machine.ranges[i].end) return machine.last_range = &machine.ranges[i];
  return nullptr;
}

// "4 bytes behind the end of k": the tensor that is nearest, and on which side.
std::string nearest_range(u64 begin, u64 end) {
  u64 best = ~0ull;
  std::string text;
  for (u32 i = 0; i < machine.num_ranges; ++i) {
    const GlobalRange& r = machine.ranges[i];
    const bool before = begin < r.begin;
    const u64 distance = before ? r.begin - begin : end - r.end;
    if (distance >= best) continue;
    best = distance;
    text = std::to_string(distance) + (before ? " bytes before the start of " : " bytes behind the end of ") + r.name;
  }
  return text;
}

const GlobalRange* check_global(const char* instruction, const void* pointer, u32 bytes, Site site) {
  const u64 begin = reinterpret_cast<u64>(pointer);
  if (begin < 4096) fail(site, "%s through a null pointer (address %llu)", instruction, begin);
  if (begin % bytes) fail(site, "%s of %u bytes at global address 0x%llx: not aligned to %u", instruction, bytes, begin, bytes);
  if (!machine.num_ranges) return nullptr;
  const GlobalRange* range = range_of(begin, begin + bytes);
  if (!range)
    fail(site, "%s of %u bytes at global address 0x%llx: outside every tensor of the launch (%s)", instruction, bytes, begin,
         nearest_range(begin, begin + bytes).c_str());
  return range;
}

void land(u32 thread, const PendingCopy& copy) {
  if (copy.source) __builtin_memcpy(host(copy.destination), copy.source, 16);
  else __builtin_memset(host(copy.destination), 0, 16);
  order_land(thread, copy.destination, 16);
}

}  // namespace

const u8* shared_read(const char* instruction, u32 address, u32 bytes, Site site) {
  check_shared(instruction, address, bytes, site);
  const u16 index = count(instruction, site);
  order_read(instruction, index, address, bytes, site);
  banks_note(index, address, bytes);
  return host(address);
}

const u8* shared_read_by_warp(const char* instruction, u16 index, u32 address, u32 bytes, Site site) {
  check_shared(instruction, address, bytes, site);
  order_read_by_warp(instruction, index, address, bytes, site);
  return host(address);
}

u8* shared_write(const char* instruction, u32 address, u32 bytes, Site site) {
  check_shared(instruction, address, bytes, site);
  const u16 index = count(instruction, site);
  order_write(instruction, index, address, bytes, site);
  banks_note(index, address, bytes);
  return host(address);
}

const u8* global_read(const char* instruction, const void* pointer, u32 bytes, Site site) {
  check_global(instruction, pointer, bytes, site);
  count(instruction, site);
  return static_cast<const u8*>(pointer);
}

u8* global_write(const char* instruction, void* pointer, u32 bytes, Site site) {
  const GlobalRange* range = check_global(instruction, pointer, bytes, site);
  if (range && !range->writable) fail(site, "%s writes to %s, which this launch only reads", instruction, range->name);
  count(instruction, site);
  ++machine.progress;
  machine.idle_polls = 0;
  return static_cast<u8*>(pointer);
}

void copy_async(u32 destination, const void* source, bool valid, Site site) {
  const char* instruction = "cp_async_16";
  check_shared(instruction, destination, 16, site);
  if (valid) check_global(instruction, source, 16, site);
  const u16 index = count(instruction, site);
  order_issue(instruction, index, destination, 16, site);
  banks_note(index, destination, 16);
  Thread& self = *machine.running;
  self.copies.push_back({destination, valid ? source : nullptr, site});
  ++self.uncommitted_copies;
}

void copy_async_commit(Site) {
  Thread& self = *machine.running;
  self.copy_groups.push_back(self.uncommitted_copies);
  self.uncommitted_copies = 0;
}

void copy_async_wait(u32 pending, Site) {
  Thread& self = *machine.running;
  if (self.copy_groups.size() <= pending) return;
  const size_t groups = self.copy_groups.size() - pending;
  size_t copies = 0;
  for (size_t g = 0; g < groups; ++g) copies += self.copy_groups[g];
  for (size_t i = 0; i < copies; ++i) land(self.identity.thread, self.copies[i]);
  self.copies.erase(self.copies.begin(), self.copies.begin() + static_cast<std::ptrdiff_t>(copies));
  self.copy_groups.erase(self.copy_groups.begin(), self.copy_groups.begin() + static_cast<std::ptrdiff_t>(groups));
}

}  // namespace emulation
