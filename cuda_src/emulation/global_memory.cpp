// Global memory: bounds, alignment, permission, and the order of accesses to what the launch writes.
//
// Blocks run one after another here, at once on a GPU. So two blocks may touch the same bytes, one of them writing, only
// by additions, or where the later one has acquired what the earlier one released. In a deterministic kernel additions
// need an order too.
#include "state_sm90.h"

#include <memory>
#include <unordered_map>

namespace emulation {
namespace {

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

const GlobalRange* check_global(const char* instruction, const void* pointer, u32 bytes, u32 alignment, Site site) {
  const u64 begin = reinterpret_cast<u64>(pointer);
  if (begin < 4096) fail(site, "%s through a null pointer (address %llu)", instruction, begin);
  if (begin % alignment)
    fail(site, "%s of %u bytes at global address 0x%llx: not aligned to %u", instruction, bytes, begin, alignment);
  if (!machine.num_ranges) return nullptr;
  const GlobalRange* range = range_of(begin, begin + bytes);
  if (!range)
    fail(site, "%s of %u bytes at global address 0x%llx: outside every tensor of the launch (%s)", instruction, bytes, begin,
         nearest_range(begin, begin + bytes).c_str());
  return range;
}

enum class Kind : u8 { kNone, kStore, kAddition };

struct LastWrite {
  u32 block, time;
  u16 thread, record;
  Kind kind;
};

constexpr u64 kPageBytes = 4096;
struct Page {
  LastWrite words[kPageBytes / 4];
};

// What a block had done when it released: its threads' clocks as the releasing thread knew them.
struct Release {
  u32 block;
  std::vector<u32> known;
};
// A release as the running block sees it: from this clock of this thread on, and whoever is ordered after that.
struct Acquired {
  const Release* release;
  u32 thread, time;
};

std::unordered_map<u64, std::unique_ptr<Page>> pages;
u64 last_page_number;
Page* last_page;
std::unordered_map<u64, std::vector<std::unique_ptr<Release>>> releases;  // by address
std::vector<Acquired> acquired;
u32 acquired_block;

Page* page_of(u64 address, bool create) {
  const u64 number = address / kPageBytes;
  if (last_page && last_page_number == number) return last_page;
  auto found = pages.find(number);
  if (found == pages.end()) {
    if (!create) return nullptr;
    found = pages.emplace(number, std::make_unique<Page>()).first;
  }
  last_page_number = number;
  return last_page = found->second.get();
}

void forget_other_blocks() {
  if (acquired_block != block_index) acquired.clear();
  acquired_block = block_index;
}

bool is_ordered(const LastWrite& w) {
  const u32 self = machine.running->identity.thread;
  if (w.block == block_index && order_knows(self, w.thread, w.time)) return true;
  forget_other_blocks();
  for (const Acquired& a : acquired)
    if (a.release->block == w.block && a.release->known[w.thread] >= w.time && order_knows(self, a.thread, a.time)) return true;
  return false;
}

[[noreturn]] void report(const char* instruction, u64 address, const LastWrite& w, Site site) {
  const SiteRecord& r = record(w.record);
  const GlobalRange* range = range_of(address, address + 1);
  fail(site, "race in global memory: %s of byte %llu of %s is not ordered after the %s by thread %u of block %u (%s at %s)",
       instruction, range ? address - range->begin : address, range ? range->name : "memory",
       w.kind == Kind::kAddition ? "addition" : "write", w.thread, w.block, r.instruction, describe({r.file, r.line}).c_str());
}

void check_read(const char* instruction, u64 address, u32 bytes, Site site) {
  for (u64 word = address & ~3ull; word < address + bytes; word += 4)
    if (Page* page = page_of(word, false)) {
      const LastWrite& w = page->words[word % kPageBytes / 4];
      if (w.kind != Kind::kNone && !is_ordered(w)) report(instruction, address, w, site);
    }
}

void note_write(const char* instruction, u64 address, u32 bytes, Kind kind, u16 index, Site site) {
  const u32 thread = machine.running->identity.thread;
  for (u64 word = address & ~3ull; word < address + bytes; word += 4) {
    LastWrite& w = page_of(word, true)->words[word % kPageBytes / 4];
    const bool both_add = kind == Kind::kAddition && w.kind == Kind::kAddition;
    const bool needs_order = w.kind != Kind::kNone && (!both_add || machine.ordered_additions);
    // Neighbours may share a word: stores of less than four bytes are not tracked against each other.
    if (needs_order && bytes >= 4 && !is_ordered(w)) report(instruction, address, w, site);
    w = {block_index, order_clock(thread), static_cast<u16>(thread), index, kind};
  }
}

void acquire(u64 address) {
  forget_other_blocks();
  const u32 thread = machine.running->identity.thread;
  for (const auto& release : releases[address]) acquired.push_back({release.get(), thread, order_clock(thread)});
}

void release(u64 address) {
  auto entry = std::make_unique<Release>();
  entry->block = block_index;
  entry->known = order_release(machine.running->identity.thread);
  releases[address].push_back(std::move(entry));
}

u8* write(const char* instruction, void* pointer, u32 bytes, u32 alignment, Kind kind, Site site) {
  const GlobalRange* range = check_global(instruction, pointer, bytes, alignment, site);
  if (range && !range->writable) fail(site, "%s writes to %s, which this launch only reads", instruction, range->name);
  const u16 index = count(instruction, site);
  note_write(instruction, reinterpret_cast<u64>(pointer), bytes, kind, index, site);
  ++machine.progress;
  machine.idle_polls = 0;
  return static_cast<u8*>(pointer);
}

}  // namespace

void global_begin_launch() {
  pages.clear();
  last_page = nullptr;
  releases.clear();
  acquired.clear();
}

void global_source(const char* instruction, const void* pointer, u32 bytes, u32 alignment, Site site) {
  check_global(instruction, pointer, bytes, alignment, site);
  check_read(instruction, reinterpret_cast<u64>(pointer), bytes, site);
}

const u8* global_read(const char* instruction, const void* pointer, u32 bytes, u32 alignment, Site site) {
  check_global(instruction, pointer, bytes, alignment, site);
  count(instruction, site);
  check_read(instruction, reinterpret_cast<u64>(pointer), bytes, site);
  return static_cast<const u8*>(pointer);
}

const u8* global_read_only(const char* instruction, const void* pointer, u32 bytes, u32 alignment, Site site) {
  const GlobalRange* range = check_global(instruction, pointer, bytes, alignment, site);
  count(instruction, site);
  const u64 address = reinterpret_cast<u64>(pointer);
  for (u64 word = address & ~3ull; word < address + bytes; word += 4)
    if (Page* page = page_of(word, false); page && page->words[word % kPageBytes / 4].kind != Kind::kNone)
      fail(site, "%s of byte %llu of %s, which this launch has written: its cache may be stale", instruction,
           range ? address - range->begin : address, range ? range->name : "memory");
  return static_cast<const u8*>(pointer);
}

u8* global_write(const char* instruction, void* pointer, u32 bytes, u32 alignment, Site site) {
  return write(instruction, pointer, bytes, alignment, Kind::kStore, site);
}

float* global_add(const char* instruction, float* pointer, u32 bytes, Site site) {
  return reinterpret_cast<float*>(write(instruction, pointer, bytes, bytes, Kind::kAddition, site));
}

int global_acquire(const char* instruction, const int* pointer, Site site) {
  poll(instruction, pointer, site);
  check_global(instruction, pointer, 4, 4, site);
  count(instruction, site);
  acquire(reinterpret_cast<u64>(pointer));
  return *pointer;
}

void global_release_add(const char* instruction, int* pointer, int value, Site site) {
  const GlobalRange* range = check_global(instruction, pointer, 4, 4, site);
  if (range && !range->writable) fail(site, "%s writes to %s, which this launch only reads", instruction, range->name);
  count(instruction, site);
  release(reinterpret_cast<u64>(pointer));
  ++machine.progress;
  machine.idle_polls = 0;
  *pointer += value;
}

// Counters that hand out work: whoever adds later knows of whoever added earlier.
u32 atomic_add(u32* pointer, u32 value, Site site) {
  acquire(reinterpret_cast<u64>(pointer));
  auto* word = reinterpret_cast<u32*>(write("atomic_add_global", pointer, 4, 4, Kind::kAddition, site));
  release(reinterpret_cast<u64>(pointer));
  const u32 before = *word;
  *word += value;
  return before;
}

}  // namespace emulation
