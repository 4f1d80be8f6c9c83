// What went wrong, in words: the first error ends the launch, and the fibers are left where they stand.
#include "state.h"

#include <cstdarg>
#include <cstdio>

namespace emulation {
namespace {

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

}  // namespace

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

}  // namespace emulation
