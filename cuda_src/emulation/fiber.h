// Fibers: a stack each, and a switch that saves only what the calling convention asks for.
#pragma once
#include <sys/mman.h>

#include "machine.h"

#if defined(__ELF__) && (defined(__x86_64__) || defined(__aarch64__))
#define EMULATION_OWN_SWITCH 1
#else
#include <ucontext.h>
#endif

namespace emulation {

// Virtual size; pages are taken when touched. Register arrays of a large tile live here.
constexpr size_t kStackBytes = 256 * 1024;

#ifdef EMULATION_OWN_SWITCH

struct Context {
  void* stack_pointer = nullptr;
};

// Saves the running context into *from and continues `to`.
extern "C" void flashpatch_emulation_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl flashpatch_emulation_switch
.hidden flashpatch_emulation_switch
.type flashpatch_emulation_switch,@function
flashpatch_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size flashpatch_emulation_switch, .-flashpatch_emulation_switch
)");
constexpr int kSavedWords = 6;
#else
asm(R"(
.text
.p2align 4
.globl flashpatch_emulation_switch
.hidden flashpatch_emulation_switch
.type flashpatch_emulation_switch,%function
flashpatch_emulation_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size flashpatch_emulation_switch, .-flashpatch_emulation_switch
)");
#endif

inline void switch_context(Context& from, Context& to) { flashpatch_emulation_switch(&from.stack_pointer, to.stack_pointer); }

// A context that starts `entry`, which must never return, on the stack that ends at `top`.
inline void prepare(Context& context, char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + kStackBytes) & ~uintptr_t(15));
#if defined(__x86_64__)
  *--top = nullptr;  // keeps the alignment that a call would leave
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedWords; ++i) *--top = nullptr;
#else
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = nullptr;
  top[11] = reinterpret_cast<void*>(entry);  // x30
#endif
  context.stack_pointer = top;
}

#else

struct Context {
  ucontext_t state;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

inline void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = kStackBytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

#endif

// One stack per fiber; an overflow runs into an unmapped page instead of the neighbour.
class Stacks {
 public:
  char* get(u32 index) {
    const size_t slot = kStackBytes + kGuardBytes;
    if (index >= count_) grow(index + 1, slot);
    return base_ + index * slot + kGuardBytes;
  }
  // Every loaded kernel has a machine of its own, and a process may hold only so many mappings: two a stack add up.
  void release() {
    if (base_) munmap(base_, count_ * (kStackBytes + kGuardBytes));
    base_ = nullptr;
    count_ = 0;
  }

 private:
  static constexpr size_t kGuardBytes = 64 * 1024;  // a multiple of every page size in use

  void grow(u32 count, size_t slot) {
    release();
    void* p = mmap(nullptr, count * slot, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
    count_ = base_ ? count : 0;
    for (u32 i = 0; base_ && i < count; ++i) mprotect(base_ + i * slot, kGuardBytes, PROT_NONE);
  }

  char* base_ = nullptr;
  size_t count_ = 0;
};

}  // namespace emulation
