// The machine that kernels run on when there is no GPU: what the emulated instruction headers may call.
// One fiber per CUDA thread; a warp collective is a rendezvous of the warp's fibers; blocks run one after another.
// Everything here is one block on one host thread: plain globals, no locks, no atomics.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulation {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kLanes = 32;
// Shared addresses start here, so that an offset used without shared_base() is out of bounds.
constexpr u32 kSharedBase = 1024;

// Where an instruction stands in the kernel's sources. As a default argument it names the caller.
struct Site {
  const char* file;
  u32 line;
  static constexpr Site here(const char* file = __builtin_FILE(), u32 line = __builtin_LINE()) { return {file, line}; }
};

// ---- who am I ----
struct Identity {
  u32 thread, lane, warp;
};
extern const Identity* identity;  // of the running fiber
extern u32 block_index;

// ---- an instruction of the whole warp: the last lane to arrive runs it for all ----
// `arguments[lane]` points at whatever that lane handed over; results are written back through it.
struct Collective {
  const char* name;
  void (*run)(void* const (&arguments)[kLanes], Site site);
};
void rendezvous(const Collective& collective, void* argument, Site site);

// ---- barriers ----
void sync_block(Site site);
bool sync_block_or(bool predicate, Site site);
void sync_warp(Site site);

// ---- memory: each call checks bounds, alignment and order, and returns where the bytes are on the host ----
const u8* shared_read(const char* instruction, u32 address, u32 bytes, u32 alignment, Site site);
u8* shared_write(const char* instruction, u32 address, u32 bytes, u32 alignment, Site site);
const u8* global_read(const char* instruction, const void* pointer, u32 bytes, u32 alignment, Site site);
const u8* global_read_only(const char* instruction, const void* pointer, u32 bytes, u32 alignment, Site site);  // never written by the launch
u8* global_write(const char* instruction, void* pointer, u32 bytes, u32 alignment, Site site);
float* global_add(const char* instruction, float* pointer, u32 bytes, Site site);  // where to add, one atom per float
int global_acquire(const char* instruction, const int* pointer, Site site);
void global_release_add(const char* instruction, int* pointer, int value, Site site);
// For loops that wait for another thread: gives the others a turn when nothing has happened since the last look.
void poll(const char* instruction, const void* what, Site site);

// ---- asynchronous copies: the bytes arrive at the wait that covers their group, not before ----
void copy_async(u32 destination, const void* source, bool valid, Site site);
void copy_async_commit(Site site);
void copy_async_wait(u32 pending, Site site);

// ---- collectives with a body of their own ----
void ldmatrix(u32 (&r)[4], u32 address, bool transposed, Site site);
void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bool is_bf16, Site site);
void mma_m16n8k8(float (&d)[4], u32 a0, u32 a1, u32 b0, Site site);
void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site);
u32 shfl_xor(u32 value, int mask, Site site);
u32 vote(bool predicate, Site site);  // the ballot

// Ends the launch with an error at the running thread; the caller of the launch gets it, the process lives on.
[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- how a kernel is entered ----
extern u32 launch_bound;  // the most threads any kernel of this file was compiled for
struct LaunchBounds {
  explicit LaunchBounds(u32 threads) {
    if (threads > launch_bound) launch_bound = threads;
  }
};
// A kernel takes one struct by value; the launch has its bytes.
template <class P>
void enter(void (*kernel)(P), const void* params) {
  kernel(*static_cast<const P*>(params));
}
template <class P>
constexpr u32 params_bytes(void (*)(P)) {
  return sizeof(P);
}
template <class P>
constexpr u32 params_alignment(void (*)(P)) {
  return alignof(P);
}

}  // namespace emulation
