// Which accesses to shared memory are ordered by barriers, and an error for those that are not.
//
// Each thread has a clock that advances when it synchronises, and knows of every other thread the clock up to which
// that thread's accesses happened before its own next one (a vector clock). Each 4 bytes of shared memory remember
// their last write and, per warp, the reads since. An access that does not know of an earlier one to the same bytes,
// where at least one of the two writes, is a race: only the order in which fibers happen to run made it look right.
#include "state.h"

#include <algorithm>

namespace emulation {
namespace {

constexpr u32 kInFlight = ~0u;  // the time of what has not landed yet: nobody knows of it, not even its own thread

struct Write {
  u32 time;
  u16 thread;
  u16 record;
  u8 bytes;  // which of the four
};

struct Reads {
  u32 time;   // of the earliest of these lanes' latest reads: never too late, so never a false alarm
  u32 lanes;  // 0: by the warp as one (wgmma); whoever knows of a lane since then knows of it
  u16 record;
  u8 bytes;
};

u32 columns;                  // threads, and one more: the copy engine (TMA), which writes on nobody's behalf
std::vector<u32> known;       // [thread][column]
std::vector<u32> warp_known;  // [warp][column]: what every lane knows
std::vector<u8> warp_known_is_current;
std::vector<Write> writes;    // [word]
std::vector<Reads> reads;     // [warp][word]
u32 words;
u32 block_begin;              // times before this belong to earlier blocks
u32 engine_time;
// fence.proxy.async: when each thread issued one, and what it knew then.
std::vector<std::vector<u32>> fences;
std::vector<std::vector<u32>> known_at_fence;

u32* row(u32 thread) { return &known[static_cast<size_t>(thread) * columns]; }
u32& clock_of(u32 thread) { return row(thread)[thread]; }

const u32* row_of_warp(u32 warp) {
  u32* least = &warp_known[static_cast<size_t>(warp) * columns];
  if (!warp_known_is_current[warp]) {
    std::copy_n(row(warp * kLanes), columns, least);
    for (u32 lane = 1; lane < kLanes; ++lane) {
      const u32* other = row(warp * kLanes + lane);
      for (u32 i = 0; i < columns; ++i) least[i] = std::min(least[i], other[i]);
    }
    warp_known_is_current[warp] = 1;
  }
  return least;
}

u8 byte_mask(u32 address, u32 bytes) { return bytes >= 4 ? 15 : static_cast<u8>(((1u << bytes) - 1) << address % 4); }

std::string place(u16 index) {
  const SiteRecord& r = record(index);
  return std::string(r.instruction) + " at " + describe({r.file, r.line});
}

[[noreturn]] void report(const char* instruction, Site site, u32 word, bool before_is_write, u32 other, u16 other_record,
                         bool in_flight) {
  const std::string who = other == machine.num_threads ? "the copy engine" : "thread " + std::to_string(other);
  if (in_flight && before_is_write)
    fail(site, "%s at shared offset %u, where the copy of %s (%s) has not arrived: no wait covers it", instruction, word * 4,
         who.c_str(), place(other_record).c_str());
  if (in_flight)
    fail(site, "%s at shared offset %u, which %s of %s may still read: no wait covers it", instruction, word * 4,
         place(other_record).c_str(), who.c_str());
  fail(site, "race: %s at shared offset %u is not ordered after the %s by %s (%s): no barrier lies between them", instruction,
       word * 4, before_is_write ? "write" : "read", who.c_str(), place(other_record).c_str());
}

void check_after_write(const char* instruction, Site site, u32 word, u8 bytes, const u32* knows) {
  const Write& w = writes[word];
  if (w.time > knows[w.thread] && (w.bytes & bytes))
    report(instruction, site, word, true, w.thread, w.record, w.time == kInFlight);
}

// Whether the thread knows of all these reads; if not, which lane's it does not.
bool knows_of(const Reads& r, const u32* knows_warp, u32& unknown_lane) {
  if (r.lanes == 0) return *std::max_element(knows_warp, knows_warp + kLanes) >= r.time;
  if (r.lanes == ~0u) {
    u32 least = ~0u;
    for (u32 lane = 0; lane < kLanes; ++lane) least = std::min(least, knows_warp[lane]);
    if (least >= r.time) return true;
  }
  for (u32 left = r.lanes; left; left &= left - 1) {
    unknown_lane = static_cast<u32>(__builtin_ctz(left));
    if (knows_warp[unknown_lane] < r.time) return false;
  }
  return true;
}

void check_after_reads(const char* instruction, Site site, u32 word, u8 bytes, const u32* knows) {
  for (u32 warp = 0; warp < machine.num_warps; ++warp) {
    Reads& r = reads[static_cast<size_t>(warp) * words + word];
    u32 lane = 0;
    if (r.time < block_begin || !(r.bytes & bytes)) continue;
    if (!knows_of(r, knows + warp * kLanes, lane)) report(instruction, site, word, false, warp * kLanes + lane, r.record, r.time == kInFlight);
    if (bytes == 15) r.time = 0;  // whoever is ordered after this write is ordered after those reads
  }
}

void note_read(Reads& r, u32 time, u32 lanes, u8 bytes, u16 index, const u32* knows_warp) {
  u32 unused;
  const bool supersedes = r.time < block_begin || (r.lanes & ~lanes) == 0 || knows_of(r, knows_warp, unused);
  if (supersedes) r = {time, lanes, index, bytes};
  else r = {std::min(r.time, time), r.lanes | lanes, index, static_cast<u8>(r.bytes | bytes)};
}

// `writer` is the running thread or the copy engine; what it must be ordered after is what the running thread knows.
void note_write(const char* instruction, u16 index, u32 address, u32 bytes, u32 writer, u32 time, Site site) {
  const u32* knows = row(machine.running->identity.thread);
  const u8 mask = byte_mask(address, bytes);
  const u32 begin = (address - kSharedBase) / 4;
  for (u32 word = begin; word < begin + (bytes + 3) / 4; ++word) {
    check_after_write(instruction, site, word, mask, knows);
    check_after_reads(instruction, site, word, mask, knows);
    Write& w = writes[word];
    const u8 kept = w.thread == writer && w.time == time ? w.bytes : 0;
    w = {time, static_cast<u16>(writer), index, static_cast<u8>(mask | kept)};
  }
}

// The asynchronous proxy (wgmma operands, TMA, bulk copies) sees an ordinary write only through fence.proxy.async: by the
// writer, and known to whoever issues the access, or by the issuer itself once it knows of the write.
void check_proxy(const char* instruction, u32 word, u32 issuer, const u32* knows, Site site) {
  const Write& w = writes[word];
  if (w.time < block_begin || w.thread == machine.num_threads) return;
  const auto& issued = fences[w.thread];
  const auto fence = std::lower_bound(issued.begin(), issued.end(), w.time);
  if (fence != issued.end() && (w.thread == issuer || knows[w.thread] >= *fence)) return;
  if (!known_at_fence[issuer].empty() && known_at_fence[issuer][w.thread] >= w.time) return;
  fail(site, "%s at shared offset %u, written by thread %u (%s): no fence_proxy_async makes that visible to it", instruction,
       word * 4, w.thread, place(w.record).c_str());
}

void advance_together(const u32* first, u32 count) {
  u32 latest = 0;
  for (u32 i = 0; i < count; ++i) latest = std::max(latest, clock_of(first[i]));
  for (u32 i = 0; i < count; ++i) clock_of(first[i]) = latest + 1;
}

}  // namespace

void order_begin_launch() {
  columns = machine.num_threads + 1;
  known.resize(static_cast<size_t>(machine.num_threads) * columns);
  warp_known.resize(static_cast<size_t>(machine.num_warps) * columns);
  fences.resize(machine.num_threads);
  known_at_fence.resize(machine.num_threads);
  engine_time = 0;
  warp_known_is_current.assign(machine.num_warps, 0);
  words = (machine.shared_bytes + 3) / 4;
  writes.assign(words, Write{0, 0, 0, 0});
  reads.assign(static_cast<size_t>(words) * machine.num_warps, Reads{0, 0, 0, 0});
  std::fill(known.begin(), known.end(), 0);
}

// Everything of earlier blocks is over; copies that were never waited for died with their block.
void order_begin_block() {
  for (u32 t = 0; t < machine.num_threads; ++t)
    for (const PendingCopy& copy : machine.threads[t].copies) order_land(t, copy.destination, 16);
  u32 latest = engine_time;
  for (u32 t = 0; t < machine.num_threads; ++t) latest = std::max(latest, clock_of(t));
  engine_time = latest;
  for (u32 t = 0; t < machine.num_threads; ++t) {
    fences[t].clear();
    known_at_fence[t].clear();
  }
  std::fill(known.begin(), known.end(), latest);
  std::fill(warp_known_is_current.begin(), warp_known_is_current.end(), u8(0));
  block_begin = latest + 1;
  for (u32 t = 0; t < machine.num_threads; ++t) clock_of(t) = block_begin;
}

void order_read(const char* instruction, u16 index, u32 address, u32 bytes, Site site) {
  const Identity& self = machine.running->identity;
  const u32* knows = row(self.thread);
  const u8 mask = byte_mask(address, bytes);
  const u32 begin = (address - kSharedBase) / 4;
  for (u32 word = begin; word < begin + (bytes + 3) / 4; ++word) {
    check_after_write(instruction, site, word, mask, knows);
    Reads& r = reads[static_cast<size_t>(self.warp) * words + word];
    note_read(r, clock_of(self.thread), 1u << self.lane, mask, index, knows + self.warp * kLanes);
  }
}

void order_read_by_warp(const char* instruction, u16 index, u32 address, u32 bytes, Site site) {
  const u32 warp = machine.running->identity.warp;
  const u32* knows = row_of_warp(warp);
  u32 time = ~0u;
  for (u32 lane = 0; lane < kLanes; ++lane) time = std::min(time, clock_of(warp * kLanes + lane));
  const u32 begin = (address - kSharedBase) / 4;
  for (u32 word = begin; word < begin + bytes / 4; ++word) {
    check_after_write(instruction, site, word, 15, knows);
    reads[static_cast<size_t>(warp) * words + word] = {time, ~0u, index, 15};
  }
}

void order_write(const char* instruction, u16 index, u32 address, u32 bytes, Site site) {
  const u32 thread = machine.running->identity.thread;
  note_write(instruction, index, address, bytes, thread, clock_of(thread), site);
}

// A copy occupies its destination from its issue to the wait that covers it.
void order_issue(const char* instruction, u16 index, u32 address, u32 bytes, Site site) {
  note_write(instruction, index, address, bytes, machine.running->identity.thread, kInFlight, site);
}

void order_land(u32 thread, u32 address, u32 bytes) {
  const u32 begin = (address - kSharedBase) / 4;
  for (u32 word = begin; word < begin + bytes / 4; ++word) {
    Write& w = writes[word];
    if (w.time == kInFlight && w.thread == thread) w.time = clock_of(thread);
  }
}

// All these threads know what any of them knows, and what each did so far.
void order_join(const u32* threads, u32 count) {
  static std::vector<u32> joint;
  joint.assign(columns, 0);
  if (count == machine.num_threads) {
    for (u32 t = 0; t < count; ++t) joint[t] = clock_of(t);  // each knows itself best
    for (u32 t = 0; t < count; ++t) joint[count] = std::max(joint[count], row(t)[count]);
  } else {
    for (u32 i = 0; i < count; ++i) {
      const u32* other = row(threads[i]);
      for (u32 u = 0; u < columns; ++u) joint[u] = std::max(joint[u], other[u]);
    }
  }
  advance_together(threads, count);
  for (u32 i = 0; i < count; ++i) {
    const u32 clock = clock_of(threads[i]);
    std::copy_n(joint.data(), columns, row(threads[i]));
    clock_of(threads[i]) = clock;
    warp_known_is_current[threads[i] / kLanes] = 0;
  }
}

u32 order_clock(u32 thread) { return clock_of(thread); }

bool order_knows(u32 thread, u32 other, u32 time) { return row(thread)[other] >= time; }

std::vector<u32> order_release(u32 thread) {
  std::vector<u32> snapshot(row(thread), row(thread) + columns);
  ++clock_of(thread);
  return snapshot;
}

// ---- what mbarriers and named barriers carry from thread to thread ----

void order_release_to(std::vector<u32>& carrier, u32 thread) {
  carrier.resize(columns);
  const u32* mine = row(thread);
  for (u32 i = 0; i < columns; ++i) carrier[i] = std::max(carrier[i], mine[i]);
  ++clock_of(thread);
}

void order_acquire_from(const std::vector<u32>& carrier, u32 thread) {
  if (carrier.empty()) return;
  u32* mine = row(thread);
  for (u32 i = 0; i < columns; ++i) mine[i] = std::max(mine[i], carrier[i]);
  warp_known_is_current[thread / kLanes] = 0;
}

// ---- the asynchronous proxy ----

void order_fence_proxy(u32 thread) {
  fences[thread].push_back(clock_of(thread));
  known_at_fence[thread].assign(row(thread), row(thread) + columns);
  ++clock_of(thread);
}

void order_engine_issue(const char* instruction, u16 index, u32 address, u32 bytes, Site site) {
  const u32 thread = machine.running->identity.thread;
  const u32 begin = (address - kSharedBase) / 4;
  for (u32 word = begin; word < begin + bytes / 4; ++word) check_proxy(instruction, word, thread, row(thread), site);
  note_write(instruction, index, address, bytes, machine.num_threads, kInFlight, site);
}

u32 order_engine_land(u32 address, u32 bytes) {
  const u32 begin = (address - kSharedBase) / 4;
  for (u32 word = begin; word < begin + bytes / 4; ++word) writes[word].time = engine_time + 1;
  return engine_time + 1;
}

void order_engine_done(std::vector<u32>& carrier) {
  carrier.resize(columns);
  carrier[machine.num_threads] = std::max(carrier[machine.num_threads], ++engine_time);
}

// `lanes` of the running warp read these bytes from now until order_finish_read.
void order_begin_read(const char* instruction, u16 index, u32 address, u32 bytes, u32 lanes, Site site) {
  const Identity& self = machine.running->identity;
  const u32* knows = lanes == ~0u ? row_of_warp(self.warp) : row(self.thread);
  const u32 begin = (address - kSharedBase) / 4;
  for (u32 word = begin; word < begin + bytes / 4; ++word) {
    check_after_write(instruction, site, word, 15, knows);
    check_proxy(instruction, word, self.thread, knows, site);
    reads[static_cast<size_t>(self.warp) * words + word] = {kInFlight, lanes, index, 15};
  }
}

void order_finish_read(u32 warp, u32 address, u32 bytes) {
  const u32 begin = (address - kSharedBase) / 4;
  for (u32 word = begin; word < begin + bytes / 4; ++word) {
    Reads& r = reads[static_cast<size_t>(warp) * words + word];
    if (r.time != kInFlight) continue;
    const bool by_warp = r.lanes == ~0u;
    r.time = clock_of(warp * kLanes + static_cast<u32>(__builtin_ctz(r.lanes)));
    if (by_warp) r.lanes = 0;
  }
}

void order_resume_read(u32 warp, u32 address, u32 bytes) {
  const u32 begin = (address - kSharedBase) / 4;
  for (u32 word = begin; word < begin + bytes / 4; ++word) {
    Reads& r = reads[static_cast<size_t>(warp) * words + word];
    r.time = kInFlight;
    r.lanes = ~0u;
  }
}

// The lanes are at one place in time, though they do not see each other's accesses.
void order_align_clocks(u32 warp) {
  u32 threads[kLanes];
  for (u32 lane = 0; lane < kLanes; ++lane) threads[lane] = warp * kLanes + lane;
  advance_together(threads, kLanes);
}

}  // namespace emulation
