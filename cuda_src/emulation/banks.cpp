// Shared-memory bank conflicts: 32 banks of 4 bytes; a warp's access takes as many passes as the busiest bank has
// different words. Accesses wider than 4 bytes are made in halves or quarters of the warp, which is their least.
//
// Lanes are fibers and come by one at a time, so each notes its accesses; at the next meeting of the warp the n-th
// access of every lane at a place is taken as one instruction.
#include "state.h"

#include <algorithm>
#include <map>

namespace emulation {
namespace {

constexpr u32 kBanks = 32;

struct Access {
  u32 record;
  u32 address;
  u32 bytes;
};

struct Group {
  u32 bytes;
  u32 lanes;
  u32 addresses[kLanes];
};

std::vector<std::vector<Access>> logs;  // [thread]
std::vector<u8> logged;                 // [warp]

// Extra passes of up to 32 words asked for at once.
class Pass {
 public:
  void add(u32 address, u32 bytes) {
    for (u32 word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
      const u32 bank = word % kBanks;
      if (std::find(words_[bank], words_[bank] + count_[bank], word) == words_[bank] + count_[bank])
        words_[bank][count_[bank]++] = word;
    }
  }
  u32 conflicts() const {
    const u32 most = *std::max_element(count_, count_ + kBanks);
    return most ? most - 1 : 0;
  }

 private:
  u32 words_[kBanks][kLanes];
  u32 count_[kBanks] = {};
};

u32 conflicts_of(const Group& group) {
  const u32 lanes_a_pass = group.bytes <= 4 ? 32 : 128 / group.bytes;
  u32 conflicts = 0;
  for (u32 first = 0; first < kLanes; first += lanes_a_pass) {
    Pass pass;
    for (u32 lane = first; lane < first + lanes_a_pass; ++lane)
      if (group.lanes >> lane & 1u) pass.add(group.addresses[lane], group.bytes);
    conflicts += pass.conflicts();
  }
  return conflicts;
}

bool same_path(u32 first_thread) {
  const auto& first = logs[first_thread];
  for (u32 lane = 1; lane < kLanes; ++lane) {
    const auto& other = logs[first_thread + lane];
    if (other.size() != first.size()) return false;
    for (size_t i = 0; i < first.size(); ++i)
      if (other[i].record != first[i].record || other[i].bytes != first[i].bytes) return false;
  }
  return true;
}

void count_same_path(u32 first_thread) {
  const auto& first = logs[first_thread];
  for (size_t i = 0; i < first.size(); ++i) {
    Group group{first[i].bytes, ~0u, {}};
    for (u32 lane = 0; lane < kLanes; ++lane) group.addresses[lane] = logs[first_thread + lane][i].address;
    record(first[i].record).bank_conflicts += conflicts_of(group);
  }
}

void count_different_paths(u32 first_thread) {
  std::map<std::pair<u32, u32>, Group> groups;  // by record and occurrence
  for (u32 lane = 0; lane < kLanes; ++lane) {
    std::map<u32, u32> occurrences;
    for (const Access& access : logs[first_thread + lane]) {
      Group& group = groups[{access.record, occurrences[access.record]++}];
      group.bytes = access.bytes;
      group.lanes |= 1u << lane;
      group.addresses[lane] = access.address;
    }
  }
  for (const auto& [key, group] : groups) record(key.first).bank_conflicts += conflicts_of(group);
}

}  // namespace

void banks_begin_launch() {
  logs.resize(machine.num_threads);
  for (auto& log : logs) log.clear();
  logged.assign(machine.num_warps, 0);
}

void banks_note(u32 index, u32 address, u32 bytes) {
  if (bytes > 16) return;  // a struct, read in pieces of the compiler's choice
  const Identity& self = machine.running->identity;
  logs[self.thread].push_back({index, address, bytes});
  logged[self.warp] = 1;
}

void banks_meet(u32 warp) {
  if (!logged[warp]) return;
  logged[warp] = 0;
  const u32 first_thread = warp * kLanes;
  if (same_path(first_thread)) count_same_path(first_thread);
  else count_different_paths(first_thread);
  for (u32 lane = 0; lane < kLanes; ++lane) logs[first_thread + lane].clear();
}

u32 banks_conflicts_of_rows(const u32* addresses) {
  Pass pass;
  for (u32 i = 0; i < 8; ++i) pass.add(addresses[i], 16);
  return pass.conflicts();
}

}  // namespace emulation
