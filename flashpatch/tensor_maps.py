"""TMA tensor maps: how Hopper's copy engine is told where a tensor's tiles lie.

A map covers (head_dim, rows, heads, batch) in the tensor's own strides; a box is 128 bytes of columns by the rows of a tile,
lands in a 128-byte swizzle and reads zeros outside the tensor. On a GPU the driver encodes it (cuTensorMapEncodeTiled,
CUDA driver API, "Tensor Map Object Management"), in the emulator `emulator.tensor_map` does.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from . import emulator
from .compiler import libcuda

BYTES = 128
NONE = bytes(BYTES)  # for a map the kernel does not use
# kRaggedRows of cuda_src/packed_sm90.cuh
RAGGED_ROWS = 1 << 30
_MANY = 0x7FFF0000

# Values of the driver's enums: CU_TENSOR_MAP_DATA_TYPE_*, _SWIZZLE_128B, _L2_PROMOTION_L2_256B
_DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9, torch.float8_e4m3fn: 0}  # bytes: the engine only copies
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def encode(tensor: torch.Tensor, tile_rows: int, ragged: bool | None) -> bytes:
    """The 128 bytes of the map of [batch, rows, heads, head_dim], or packed [rows, heads, head_dim], of 16 or 8 bits.

    `ragged` None: four dimensions. Otherwise five, (head_dim, rows, heads, batch, 1) or, ragged, (head_dim, x, heads,
    y, z) where x, y and z all move by rows, so that a kernel can cut a tile off at any row. Strides must be multiples
    of 16 bytes. An empty tensor has no map, and nothing is loaded from it.
    """
    if tensor.numel() == 0:
        return NONE
    strides = tensor.stride()
    return _encoded(
        tensor.data_ptr(), tuple(tensor.shape), strides, tensor.dtype, tile_rows, ragged, tensor.device.type == "cuda"
    )


@functools.lru_cache(maxsize=4096)
def _encoded(address: int, shape, strides, dtype, tile_rows: int, ragged: bool | None, on_gpu: bool) -> bytes:
    """A map says nothing about a tensor but its address and layout, so equal ones are encoded once."""
    head_dim, heads, rows = shape[-1], shape[-2], shape[-3]
    batch = shape[0] if len(shape) == 4 else 1

    def distance(axis: int, size: int) -> int:
        # a dimension of size 1 may have any stride in torch; the engine wants a multiple of 16 bytes even there
        return strides[axis] * dtype.itemsize if size > 1 else 16

    row, head = distance(-3, rows), distance(-2, heads)
    if ragged:
        row = strides[-3] * dtype.itemsize
        dims, steps = (head_dim, RAGGED_ROWS, heads, _MANY, _MANY), (row, head, row, (1 << 35) - row)
    else:
        dims = (head_dim, max(rows, 1), heads, max(batch, 1))
        steps = (row, head, distance(0, batch) if len(shape) == 4 else 16)
        if ragged is not None:
            dims, steps = (*dims, 1), (*steps, 16)
    box = (128 // dtype.itemsize, tile_rows, *(1,) * (len(dims) - 2))
    if on_gpu:
        return _encode_by_driver(address, dtype, dims, steps, box)
    return emulator.tensor_map(address, dims, steps, box, dtype.itemsize).ljust(BYTES, b"\0")


def _encode_by_driver(address: int, dtype: torch.dtype, dims, strides, box) -> bytes:
    rank = len(dims)
    u32s, u64s = ctypes.c_uint32 * rank, ctypes.c_uint64 * rank
    room = (ctypes.c_char * (BYTES + 64))()
    target = (ctypes.addressof(room) + 63) & ~63  # the driver wants 64-byte alignment
    arguments = (
        ctypes.c_void_p(target), _DATA_TYPES[dtype], ctypes.c_uint32(rank), ctypes.c_void_p(address), u64s(*dims),
        (ctypes.c_uint64 * (rank - 1))(*strides), u32s(*box), u32s(*(1,) * rank), 0, _SWIZZLE_128B,
        _L2_PROMOTION_256B, 0,
    )  # fmt: skip
    error = libcuda().cuTensorMapEncodeTiled(*arguments)
    if error == _INVALID_CONTEXT:  # a thread of autograd's that has not called CUDA yet
        _make_context_current()
        error = libcuda().cuTensorMapEncodeTiled(*arguments)
    if error:
        raise RuntimeError(f"cuTensorMapEncodeTiled returned {error} for dims {dims}, strides {strides}, box {box}")
    return ctypes.string_at(target, BYTES)


def _make_context_current() -> None:
    """Make the primary context of torch's current device, which torch itself uses, current in this thread."""
    context = ctypes.c_void_p()
    for error in (
        libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device()),
        libcuda().cuCtxSetCurrent(context),
    ):
        if error:
            raise RuntimeError(f"CUDA's context could not be made current in this thread: error {error}")
