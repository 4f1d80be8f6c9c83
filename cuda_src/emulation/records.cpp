// Counters per instruction and place, found by a small hash table: a kernel has a few hundred of them.
#include "state.h"

namespace emulation {
namespace {

constexpr u32 kSlots = 4096;  // a power of two, far above what a kernel needs
u16 slots[kSlots];            // index + 1 into the records, 0: free
std::vector<SiteRecord> records;

u32 hash(const char* instruction, Site site) {
  const u64 key = reinterpret_cast<u64>(site.file) * 31 + site.line + (reinterpret_cast<u64>(instruction) << 20);
  return static_cast<u32>((key * 0x9e3779b97f4a7c15ull) >> 52);
}

}  // namespace

u32 record_index(const char* instruction, Site site) {
  for (u32 at = hash(instruction, site) % kSlots;; at = (at + 1) % kSlots) {
    if (!slots[at]) {
      if (records.size() + 1 >= kSlots) fail(site, "a kernel with more than %u places that use memory", kSlots);
      records.push_back({site.file, instruction, site.line, 0, 0, 0});
      slots[at] = static_cast<u16>(records.size());
    }
    const SiteRecord& r = records[slots[at] - 1u];
    if (r.line == site.line && r.file == site.file && r.instruction == instruction) return slots[at] - 1u;
  }
}

SiteRecord& record(u32 index) { return records[index]; }

void reset_records() {
  for (SiteRecord& r : records) r.executions = r.bank_conflicts = 0;
}

u32 all_records(const SiteRecord** first) {
  *first = records.data();
  return static_cast<u32>(records.size());
}

}  // namespace emulation
