// What the machine offers beyond machine.h for Hopper: barriers by address and number, the copy engine, wgmma.
#pragma once
#include "machine.h"

namespace emulation {

// What flashpatch/emulator.py writes where cuTensorMapEncodeTiled writes the real thing. Dimension 0 is contiguous.
struct TensorMapFields {
  u64 magic;
  u64 base;
  u64 strides[4];  // bytes, of dimensions 1 to 4
  u32 dims[5];
  u32 box[5];
  u32 rank, element_bytes, swizzle_bytes;
};
constexpr u64 kTensorMapMagic = 0x70616d726f736e65ull;

// ---- roles ----
u32 grid_size();
u32 shfl(u32 value, int lane, Site site);
bool elect(Site site);
void set_max_registers(u32 registers, bool increase, Site site);
u32 atomic_add(u32* pointer, u32 value, Site site);

// ---- barriers ----
void barrier_sync(u32 id, u32 threads, Site site);
void barrier_arrive(u32 id, u32 threads, Site site);
void mbarrier_init(u32 barrier, u32 arrivals, Site site);
void mbarrier_arrive(const char* instruction, u32 barrier, u32 bytes_expected, Site site);
bool mbarrier_done(const char* instruction, u32 barrier, u32 parity, Site site);
void fence_mbarrier_init(Site site);
void fence_proxy_async(Site site);

// ---- the copy engine: nothing arrives before somebody has to wait for it ----
void tma_load(u32 destination, const void* map, u32 barrier, u32 rank, const int (&coordinates)[5], Site site);
void tma_store(const void* map, u32 source, const int (&coordinates)[5], Site site);
void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, Site site);
void bulk_reduce_add_f32(float* destination, u32 source, u32 bytes, Site site);
void bulk_commit(Site site);
void bulk_wait(u32 pending, Site site);

void stmatrix(u32 address, const u32 (&r)[4], Site site);

// ---- wgmma: accumulators are NaN from the issue to the wait that covers it ----
enum class WgmmaType : u8 { kFp16, kBf16, kE4m3 };
constexpr WgmmaType half_type(bool is_bf16) { return is_bf16 ? WgmmaType::kBf16 : WgmmaType::kFp16; }
struct WgmmaShape {
  u32 n;
  WgmmaType type;
  bool a_in_registers, transposed_a, transposed_b;
};
void wgmma(float* d, const WgmmaShape& shape, u64 a, const u32* a_registers, u64 b, bool accumulate, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(u32 pending, Site site);

}  // namespace emulation
