"""struct Params of cuda_src/params.cuh and ParamsSm90 of cuda_src/params_sm90.cuh, the one argument of every attention
kernel: its fields in order, and the packing of them in the pieces that change together."""

from __future__ import annotations

import struct

import torch

from . import tensor_maps
from .call import Call
from .tile_counts import Shapes

POINTERS = (
    "q", "k", "v", "out", "logsumexp", "dout", "dq", "dk", "dv", "dlogsumexp", "delta", "dq_accum", "dq_turns",
    "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "key_ranges", "mask", "bias", "dbias", "alibi_slopes", "sinks",
    "rng_state", "q_descale", "k_descale", "v_descale", "mask_bits", "mask_flags", "dbias_accum", "key_hulls", "dkv_accum",
    "q_pairs", "k_pairs", "v_pairs", "dout_pairs", "v_tiles",
)  # fmt: skip
STRIDES = (
    *(
        f"{name}_stride_{axis}"
        for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        for axis in ("batch", "row", "head")
    ),
    "key_ranges_stride_batch", "key_ranges_stride_row",
    *(f"{name}_stride_{axis}" for name in ("mask", "bias") for axis in ("batch", "head", "row", "column")),
    "alibi_stride_batch", "total_q", "total_k",
)  # fmt: skip
INTEGERS = (
    "batch", "num_heads_q", "num_heads_kv", "splits", "split_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "window_left",
    "window_right", "m_blocks", "n_blocks",
)  # fmt: skip
FLOATS = ("softmax_scale", "softcap", "dropout_p")
# In the order of struct Params in cuda_src/params.cuh.
FIELDS = POINTERS + STRIDES + INTEGERS + FLOATS
# The pointers in the pieces that a call packs: what a forward reads and writes, all of a backward, the call's own tensors
# and workspaces, the records of q, k, v and dout and the tiles of v.
INPUTS, RESULTS, ALL = (struct.Struct(f"={count}Q") for count in (3, 2, 13))
_OPTIONAL = struct.Struct("=18Q")
RECORDS = struct.Struct("=5Q")
NO_BACKWARD = bytes(ALL.size - INPUTS.size - RESULTS.size)
NO_RECORDS = bytes(RECORDS.size)
_REST = struct.Struct(f"={len(STRIDES)}q{len(INTEGERS)}i{len(FLOATS)}f")
# struct ParamsSm90 of cuda_src/params_sm90.cuh: maps of q, k, v, out, dout, then Params, then the tile counters
COUNTERS = struct.Struct("=Q")
MAPS_BYTES = 5 * tensor_maps.BYTES
ARGUMENT_BYTES = MAPS_BYTES + 8 * len(POINTERS) + _REST.size + COUNTERS.size


def address_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def optional_pointers(
    call: Call, dbias=None, mask_bits=None, mask_flags=None, dbias_accum=None, key_hulls=None, dkv_accum=None
) -> bytes:
    """The pointers of Params from cu_seqlens_q to dkv_accum: the call's own tensors, the gradient of its bias, workspaces."""
    given, own = call.pointers(), (mask_bits, mask_flags, dbias_accum, key_hulls, dkv_accum)
    return _OPTIONAL.pack(*given[:6], address_of(dbias), *given[6:], *map(address_of, own))


def contiguous_strides(shape) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _row_strides(strides) -> tuple[int, ...]:
    """(batch, row, head) strides in elements."""
    if not strides:
        return (0, 0, 0)
    return tuple(strides[:3]) if len(strides) == 4 else (0, strides[0], strides[1])


def scalars(shapes: Shapes, call: Call, q, k, v, *, out, dout=(), dq=(), dk=(), dv=()) -> bytes:
    """struct Params after its pointers: STRIDES, INTEGERS, FLOATS."""
    rows = [q.stride(), k.stride(), v.stride(), out, dout, dq, dk, dv]
    return _REST.pack(
        *(stride for strides in rows for stride in _row_strides(strides)),
        *((0, 0) if call.key_ranges is None else call.key_ranges.stride()[:2]),
        *((0, 0, 0, 0) if call.mask is None else call.mask.stride()),
        *((0, 0, 0, 0) if call.bias is None else call.bias.stride()),
        0 if call.alibi_slopes is None else call.alibi_slopes.stride(0),
        shapes.total_q, shapes.total_k,
        shapes.batch, q.shape[-2], k.shape[-2], shapes.splits, shapes.split_heads, call.max_seqlen_q, call.max_seqlen_k, q.shape[-1], v.shape[-1],
        call.window_left, call.window_right, shapes.m_blocks, shapes.n_blocks,
        call.softmax_scale, call.softcap, call.dropout_p,
    )  # fmt: skip
