// What the Hopper part of the machine shares among its files.
#pragma once
#include "machine_sm90.h"
#include "state.h"

namespace emulation {

// 128-byte swizzle: 16-byte piece c of row r lies where piece c ^ (r % 8) would; narrower ones accordingly.
inline u32 swizzled(u32 address, u32 swizzle_bytes) {
  const u32 mask = swizzle_bytes / 16;
  return mask > 1 ? address ^ (address >> 7 & (mask - 1)) << 4 : address;
}

// ---- order (order.cpp) ----
void order_release_to(std::vector<u32>& carrier, u32 thread);
void order_acquire_from(const std::vector<u32>& carrier, u32 thread);
void order_fence_proxy(u32 thread);
void order_engine_issue(const char* instruction, u16 index, u32 address, u32 bytes, Site site);
u32 order_engine_land(u32 address, u32 bytes);
void order_engine_done(std::vector<u32>& carrier);
void order_begin_read(const char* instruction, u16 index, u32 address, u32 bytes, u32 lanes, Site site);
void order_finish_read(u32 warp, u32 address, u32 bytes);
void order_align_clocks(u32 warp);
void order_resume_read(u32 warp, u32 address, u32 bytes);

// ---- barriers_sm90.cpp ----
void barriers_begin_block();
void barriers_end_block();
// The engine is about to use this barrier; later it delivers that many bytes to it.
void mbarrier_check_engine(const char* instruction, u32 barrier, Site site);
void mbarrier_complete(u32 barrier, u32 bytes);

// ---- copies_sm90.cpp ----
void copies_begin_block();
void copies_end_block();
bool copies_land_one();  // false if nothing is under way

// ---- wgmma_sm90.cpp ----
void wgmma_begin_block();
void wgmma_end_block();

}  // namespace emulation
