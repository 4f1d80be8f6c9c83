// Shared memory: bounds and alignment of every access, and the copies that are under way.
#include "state.h"

namespace emulation {

void check_shared(const char* instruction, u32 address, u32 bytes, u32 alignment, Site site) {
  if (address % alignment)
    fail(site, "%s of %u bytes at shared address %u (offset %d): not aligned to %u", instruction, bytes, address,
         static_cast<int>(address - kSharedBase), alignment);
  if (address < kSharedBase || u64(address) + bytes > u64(kSharedBase) + machine.shared_bytes)
    fail(site, "%s of %u bytes at shared offset %d: outside the launch's %u bytes of shared memory", instruction, bytes,
         static_cast<int>(address - kSharedBase), machine.shared_bytes);
}

u8* shared_host(u32 address) { return machine.shared + (address - kSharedBase); }

namespace {

void land(u32 thread, const PendingCopy& copy) {
  if (copy.source) __builtin_memcpy(shared_host(copy.destination), copy.source, 16);
  else __builtin_memset(shared_host(copy.destination), 0, 16);
  order_land(thread, copy.destination, 16);
}

}  // namespace

const u8* shared_read(const char* instruction, u32 address, u32 bytes, u32 alignment, Site site) {
  check_shared(instruction, address, bytes, alignment, site);
  const u16 index = count(instruction, site);
  order_read(instruction, index, address, bytes, site);
  banks_note(index, address, bytes);
  return shared_host(address);
}

const u8* shared_read_by_warp(const char* instruction, u16 index, u32 address, u32 bytes, Site site) {
  check_shared(instruction, address, bytes, bytes, site);
  order_read_by_warp(instruction, index, address, bytes, site);
  return shared_host(address);
}

u8* shared_write(const char* instruction, u32 address, u32 bytes, u32 alignment, Site site) {
  check_shared(instruction, address, bytes, alignment, site);
  const u16 index = count(instruction, site);
  order_write(instruction, index, address, bytes, site);
  banks_note(index, address, bytes);
  return shared_host(address);
}

void copy_async(u32 destination, const void* source, bool valid, Site site) {
  const char* instruction = "cp_async_16";
  check_shared(instruction, destination, 16, 16, site);
  if (valid) global_source(instruction, source, 16, 16, site);
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
