// A float as its bits and back; the same text on a GPU and in the emulator.
#pragma once
#include "ptx_sm80.cuh"

DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
