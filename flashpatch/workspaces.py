"""What a kernel needs beside its inputs and outputs, and the small kernels that make or read it: a mask packed, fp32 split
into pairs, v of 8 bits transposed, the gradient of a bias summed up tile by tile."""

from __future__ import annotations

import itertools
import math

import torch

from .call import Call
from .kernel_launch import Kernel
from .kernel_sets import bias_helper, mask_helper, split_helper, values_helper
from .params import RECORDS
from .problem import Plan
from .tile_counts import Shapes


def like(shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element that stands for a tensor of this shape: empty_like of it costs a third of torch.empty with its keywords."""
    return torch.empty(1, dtype=dtype, device=device).expand(shape)


class PackedMask:
    """What a boolean mask becomes before a kernel of the sm80 family reads it: cuda_src/mask_tiles.cuh."""

    __slots__ = ("bits", "flags", "kernel", "tiles")

    def __init__(self, plan: Plan, shapes: Shapes, call: Call):
        config = plan.config
        masks = math.prod(size for size, stride in zip(call.mask.shape[:2], call.mask.stride(), strict=False) if stride)
        self.tiles = masks * shapes.m_blocks * shapes.n_blocks if call.mask.numel() else 0
        threads = 32 * config.num_warps
        words = self.tiles * threads * -(-config.block_m * config.block_n // (32 * threads))
        self.bits = like((words,), torch.int32, call.mask.device)
        self.flags = like((self.tiles,), torch.uint8, call.mask.device)
        self.kernel = Kernel(plan.device, mask_helper(config))

    def workspace(self) -> tuple[torch.Tensor, torch.Tensor]:
        """mask_bits and mask_flags, to be filled."""
        return torch.empty_like(self.bits), torch.empty_like(self.flags)


class Pairs:
    """q, k, v and dout in fp32 as a kernel of the sm80 family reads them, in pairs of fp16: cuda_src/half_pairs.cuh. As
    many bytes as they have themselves, rounded up to whole blocks and padded head dims."""

    __slots__ = ("blocks", "ends", "kernel", "room")

    def __init__(self, plan: Plan, shapes: Shapes, q, k, varlen: bool):
        config = plan.config
        heads_q, heads_kv = q.shape[-2], k.shape[-2]
        query_sides = 2 if config.kernel.startswith("backward") else 1  # q and dout
        self.blocks = shapes.batch * (query_sides * shapes.m_blocks * heads_q + 2 * shapes.n_blocks * heads_kv)
        m_blocks, n_blocks = shapes.m_blocks * shapes.batch, shapes.n_blocks * shapes.batch
        if varlen:  # query_block_offset and key_block_offset
            m_blocks, n_blocks = (
                t.shape[0] // block + shapes.batch for t, block in ((q, config.block_m), (k, config.block_n))
            )
        record = 4 * config.head_dim, 4 * config.head_dim_v
        sizes = (
            m_blocks * heads_q * (config.block_m * record[0] + 128),
            n_blocks * heads_kv * (config.block_n * record[0] + 128),
            n_blocks * heads_kv * (config.block_n * record[1] + 128),
            (query_sides - 1) * m_blocks * heads_q * (config.block_m * record[1] + 128),
        )
        *self.ends, size = itertools.accumulate(sizes)
        self.room = like((size,), torch.uint8, q.device)
        self.kernel = Kernel(plan.device, split_helper(config))

    def workspace(self) -> tuple[torch.Tensor, bytes]:
        """Room for the records, to be filled, and where those of q, k, v and dout begin; no tiles of v."""
        room = torch.empty_like(self.room)
        first, (k, v, dout) = room.data_ptr(), self.ends
        return room, RECORDS.pack(first, first + k, first + v, first + dout, 0)


class ValueTiles:
    """v of 8 bits as Hopper's forward reads it, transposed block by block: cuda_src/values_sm90.cuh. As many bytes as v has,
    rounded up to whole blocks and padded head dims."""

    __slots__ = ("blocks", "kernel", "room")

    def __init__(self, plan: Plan, shapes: Shapes, k):
        config = plan.config
        self.blocks = shapes.n_blocks * shapes.rows_of_blocks * k.shape[-2]
        self.room = like((self.blocks * config.block_n * config.head_dim_v,), torch.uint8, k.device)
        self.kernel = Kernel(plan.device, values_helper(config))

    def workspace(self) -> tuple[torch.Tensor, bytes]:
        """Room for the tiles, to be filled, and where they begin; no pairs."""
        room = torch.empty_like(self.room)
        return room, RECORDS.pack(0, 0, 0, 0, room.data_ptr())


class BiasGradient:
    """The gradient of a bias: summed up tile by tile, then brought into the bias's order (cuda_src/bias.cuh)."""

    __slots__ = ("accum", "broadcast", "dbias", "kernel", "tiles")

    def __init__(self, plan: Plan, shapes: Shapes, q, k, call: Call):
        config = plan.config
        per_batch, per_head, per_row, per_key = (stride != 0 for stride in call.bias.stride())
        batch = shapes.batch if per_batch or config.deterministic else 1
        heads = q.shape[-2] if per_head or config.deterministic else 1
        self.tiles = batch * heads * (shapes.m_blocks if per_row else 1) * (shapes.n_blocks if per_key else 1)
        self.accum = like((self.tiles, config.block_m * config.block_n), torch.float32, q.device)
        rows, keys = call.max_seqlen_q if per_row else config.block_m, call.max_seqlen_k if per_key else config.block_n
        shape = (batch, heads, rows, keys)
        self.broadcast = tuple(axis for axis, apart in enumerate((per_batch, per_head, per_row, per_key)) if not apart)
        summed = any(shape[axis] > 1 for axis in self.broadcast)
        dtype = torch.float32 if summed else call.bias.dtype
        self.dbias = like(shape, dtype, q.device)
        self.kernel = Kernel(plan.device, bias_helper(config, dtype == torch.float32))

    def workspace(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dbias, to be filled, and dbias_accum, zeroed."""
        return torch.empty_like(self.dbias), torch.zeros_like(self.accum)

    def reduced(self, dbias: torch.Tensor) -> torch.Tensor:
        """Summed over what the bias is broadcast along and kernels kept apart."""
        axes = [axis for axis in self.broadcast if dbias.shape[axis] > 1]
        return dbias.sum(axes, keepdim=True) if axes else dbias
