"""From a Plan and tensors to launched kernels: workspaces, the packed Params, grids, torch's current stream.

The same code launches on a GPU (CuPy) and in the emulator; the kernels cannot tell the difference. What depends on
shapes, strides and scalars alone is computed once per signature (`Forward`, `Backward`) and kept by the caller; a
call then costs its allocations, the packing of its pointers and the launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import struct
import threading
from collections import Counter
from dataclasses import replace

import torch

from . import compiler, emulator, planning, tensor_maps
from .call import TENSORS, Call, out_dtype
from .planning import shared_memory, value_parts
from .problem import Config, Device, Plan, Reason
from .tile_counts import Shapes, splits, takes_maps

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
    "alibi_stride_batch", "total_q",
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
_INPUTS, _RESULTS, _ALL = (struct.Struct(f"={count}Q") for count in (3, 2, 13))
_OPTIONAL = struct.Struct("=18Q")
_RECORDS = struct.Struct("=5Q")
_NO_BACKWARD = bytes(_ALL.size - _INPUTS.size - _RESULTS.size)
_NO_RECORDS = bytes(_RECORDS.size)
_REST = struct.Struct(f"={len(STRIDES)}q{len(INTEGERS)}i{len(FLOATS)}f")
# struct ParamsSm90 of cuda_src/params_sm90.cuh: maps of q, k, v, out, dout, then Params, then the tile counters
_COUNTERS = struct.Struct("=Q")
_MAPS_BYTES = 5 * tensor_maps.BYTES
_ARGUMENT_BYTES = _MAPS_BYTES + 8 * len(POINTERS) + _REST.size + _COUNTERS.size
# cuLaunchKernel's limit for gridDim.x
_MAX_BLOCKS = 2**31 - 1

_MOST_MAPS = 1024
# The emulator runs the CTAs of a persistent grid one after another; a few are enough to share out tiles.
_EMULATED_MULTIPROCESSORS = 3

launched: Counter[str] = Counter()  # kernel -> launches of this process; verify counts by it


def unavailable(backend: str) -> Reason | None:
    """Why nothing can be launched through a backend ("gpu" or "emulated"), or None."""
    return compiler.available() if backend == "gpu" else emulator.available()


def launches(config: Config) -> tuple[str, ...]:
    """The kernels one call of this Config launches, by source name."""
    return tuple(part.kernel for part in configs(config))


def configs(config: Config) -> tuple[Config, ...]:
    """Every Config that must be compiled to run this one, in the order of their launches."""
    if config.kernel in ("forward_sm80", "forward_sm75"):
        return (
            *((_mask_helper(config),) if config.has_mask else ()),
            *((_split_helper(config),) if planning.takes_pairs(config) else ()),
            config,
        )
    if config.kernel in ("backward_sm80", "backward_sm75"):
        suffix = "" if config.kernel == "backward_sm80" else "_sm75"
        return (
            *((_mask_helper(config),) if config.has_mask else ()),
            _helper(config, "backward_delta", 4),
            *((_split_helper(config),) if planning.takes_pairs(config) else ()),
            config,
            _helper(config, f"backward_dq{suffix}", 4),
            *((_bias_helper(config, config.wide_bias),) if config.has_bias else ()),
        )
    if planning.takes_value_tiles(config):
        return (_values_helper(config), config)
    if config.kernel.startswith("backward"):
        around = [_helper(config, *kernel) for kernel in (("backward_prepare_sm90", 8), ("backward_finish_sm90", 4))]
        before, after = (replace(helper, block_n=config.block_n) for helper in around)
        return (before, config, after)
    return (config,)


def digest(config: Config) -> str:
    """What evidence of this Config stands for: all that is compiled to run it, the small kernels around it included."""
    parts = [compiler.digest(part) for part in configs(config)]
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _helper(config: Config, kernel: str, num_warps: int) -> Config:
    """The Config of a small kernel before or after the main one: only what its source reads, so that few are built."""
    return Config(kernel, config.dtype, config.head_dim, config.head_dim_v, config.block_m, 0, num_warps)


def _mask_helper(config: Config) -> Config:
    """What packs the boolean mask for the threads of a kernel: nothing in it depends on the head dim."""
    kernel = f"{config.kernel.split('_')[0]}_mask"
    return Config(kernel, config.dtype, 32, 32, config.block_m, config.block_n, config.num_warps)


def _split_helper(config: Config) -> Config:
    """What splits q, k, v and dout in fp32 into pairs of fp16, in the blocks of a kernel."""
    return replace(_helper(config, f"{config.kernel.split('_')[0]}_split", 8), block_n=config.block_n)


def _values_helper(config: Config) -> Config:
    """What transposes v of 8 bits into the tiles of a kernel: it knows no q."""
    helper = _helper(config, "forward_values_sm90", 4)
    return replace(helper, head_dim=config.head_dim_v, block_m=64, block_n=config.block_n)


def _bias_helper(config: Config, wide: bool) -> Config:
    """What brings the gradient of a bias from the order of a kernel's threads into its own, in fp32 or q's dtype."""
    wide = wide and config.dtype != "float32"
    tile = config.block_m, config.block_n, config.num_warps
    kernel = "backward_bias" if config.kernel == "backward_sm80" else "backward_bias_sm75"
    return Config(
        kernel, config.dtype, 32, 32, *tile, deterministic=config.deterministic, wide_bias=wide, has_bias=True
    )


# The small kernels before (delta) and after (dq from fp32) a backward, by family.
_BEFORE = ("backward_delta", "backward_prepare_sm90")
_AFTER = ("backward_dq", "backward_dq_sm75", "backward_finish_sm90")


# ---- the two directions ----


class Forward:
    """A forward ready to launch for one signature of tensors and one Plan."""

    __slots__ = (
        "after", "blocks", "inputs", "kernel", "mask", "new_out", "new_statistics", "plan", "records", "rest", "tma",
        "varlen",
    )  # fmt: skip

    def __init__(self, plan: Plan, q, k, v, call: Call):
        self.plan = plan
        q, k, v = map(_readable, (q, k, v))
        out_shape = (*q.shape[:-1], v.shape[-1])
        self.new_out = _like(out_shape, out_dtype(q.dtype), q.device)
        self.new_statistics = _like(_statistics_shape(q, call), torch.float32, q.device)
        self.varlen = call.cu_seqlens_q is not None
        shapes = Shapes(plan.config, q, k, call)
        self.blocks = value_parts(plan.config) * shapes.m_blocks * q.shape[-2] * shapes.rows_of_blocks
        self.rest = _rest(shapes, call, q, k, v, out=_contiguous_strides(out_shape))
        self.kernel = _Kernel(plan.device, plan.config)
        self.mask = _PackedMask(plan, shapes, call) if plan.config.has_mask else None
        self.records = None
        if planning.takes_pairs(plan.config):
            self.records = _Pairs(plan, shapes, q, k, self.varlen)
        elif planning.takes_value_tiles(plan.config):
            self.records = _ValueTiles(plan, shapes, k)
        self.tma = takes_maps(plan.config)
        bare = call.is_plain() and self.records is None
        self.after = self._after_results(_optional_pointers(call), _NO_RECORDS) if bare else None
        # Maps and addresses of q, k, v by address: torch's allocator hands out the same ones again.
        self.inputs: dict[tuple, bytes] = {}
        if self.tma:  # persistent: one CTA per multiprocessor takes tiles from a counter
            self.blocks = min(self.blocks, plan.device.multiprocessors or _EMULATED_MULTIPROCESSORS)

    def _after_results(self, optional: bytes, records: bytes) -> bytes:
        """Params from dout on; a forward has no pointers of a backward."""
        return b"".join((_NO_BACKWARD, optional, records, self.rest))

    def run(self, q, k, v, call: Call, statistics: bool = True) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Launch. Returns out, logsumexp (None without `statistics`) and how many inputs had to be copied into a
        layout kernels read."""
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        inputs = self.inputs.get(addresses)
        if inputs is None:
            copied = [_readable(tensor) for tensor in (q, k, v)]
            if copies := _copies(copied, (q, k, v)):
                out, logsumexp, _ = Forward(self.plan, *copied, call).run(*copied, call, statistics)
                return out, logsumexp, copies
            maps = _maps(self.plan.config, q, k, v, None, None, None) if self.tma else b""
            inputs = _keep(self.inputs, addresses, maps + _INPUTS.pack(*addresses))
        out = torch.empty_like(self.new_out)
        logsumexp = torch.empty_like(self.new_statistics) if statistics else None
        if self.varlen:  # rows of no sequence are nobody's to write
            out.zero_()
            if statistics:
                _fill_empty(logsumexp, call)
        results = _RESULTS.pack(out.data_ptr(), logsumexp.data_ptr() if statistics else 0)
        bits = flags = room = counters = None
        after, address = self.after, b""
        if after is None:
            records = _NO_RECORDS
            if self.mask is not None:
                bits, flags = self.mask.workspace()
            if self.records is not None:
                room, records = self.records.workspace()
            after = self._after_results(_optional_pointers(call, mask_bits=bits, mask_flags=flags), records)
        if self.tma:
            counters, address = _tile_counters(self.plan.device)
        argument = b"".join((inputs, results, after, address))
        tensors = (q, k, v, out, logsumexp, bits, flags, room, counters)
        if self.mask is not None:
            self.mask.kernel.launch(self.mask.tiles, argument, tensors, call)
        if self.records is not None:
            params = argument[_MAPS_BYTES : -_COUNTERS.size] if self.tma else argument
            self.records.kernel.launch(self.records.blocks, params, tensors, call)
        self.kernel.launch(self.blocks, argument, tensors, call)
        return out, logsumexp, 0


class Backward:
    """A backward ready to launch for one signature of tensors and one Plan: a kernel before (delta), the main one,
    and one after (dq from fp32); with a mask one more before, with a gradient of the bias one more after."""

    __slots__ = (
        "after", "before", "bias", "blocks", "hulls", "kernel", "key_blocks", "maps", "mask", "new", "new_turns", "optional",
        "pairs", "plan", "query_blocks", "ragged", "rest", "shared_keys", "tma", "varlen",
    )  # fmt: skip

    def __init__(self, plan: Plan, dout, q, k, v, out, call: Call):
        self.plan = plan
        config = plan.config
        self.varlen = varlen = call.cu_seqlens_q is not None
        self.tma = takes_maps(config)
        self.ragged = (varlen, varlen or call.seqused_k is not None) if self.tma else (False, False)
        dout, q, k, v, out = self._readable(dout, q, k, v, out)
        shapes = Shapes(config, q, k, call)
        self.query_blocks = shapes.m_blocks * q.shape[-2] * shapes.rows_of_blocks
        self.key_blocks = self.blocks = shapes.n_blocks * k.shape[-2] * shapes.rows_of_blocks
        self.shared_keys = self.new_turns = None
        # query blocks with rows, at most: records of cuda_src/workspace_sm90.cuh, query_block_offset of seqlen.cuh
        if self.tma:
            turns = 1 + self.query_blocks  # a word that deals out tiles, a counter per record
            workspace = (self.query_blocks, config.block_m * (config.head_dim + 2))
            shapes.share_heads(splits(plan, shapes, self.key_blocks, call))
            tiles = self.key_blocks * shapes.splits
            self.blocks = min(tiles, plan.device.multiprocessors or _EMULATED_MULTIPROCESSORS)  # persistent
            if shapes.splits > 1:
                turns += self.key_blocks
                shared = (self.key_blocks, 2 * config.block_n * config.head_dim)
                self.shared_keys = _like(shared, torch.float32, q.device)
        else:
            blocks = shapes.total_q // config.block_m + shapes.batch if varlen else shapes.m_blocks * shapes.batch
            turns = blocks * q.shape[-2]
            workspace = (turns, config.block_m * config.head_dim)
        if config.deterministic:
            self.new_turns = _like((turns,), torch.int32, q.device)
        self.new = (
            *(_like(t.shape, q.dtype, q.device) for t in (q, k, v)),
            *(_like(shape, torch.float32, q.device) for shape in (_statistics_shape(q, call), workspace)),
        )
        self.rest = _rest(
            shapes, call, q, k, v, out=out.stride(), dout=dout.stride(), dq=_contiguous_strides(q.shape),
            dk=_contiguous_strides(k.shape), dv=_contiguous_strides(v.shape),
        )  # fmt: skip
        kernels = {part.kernel: _Kernel(plan.device, part) for part in configs(config)}
        self.kernel = kernels[config.kernel]
        self.before = next(kernels[name] for name in _BEFORE if name in kernels)
        self.after = next(kernels[name] for name in _AFTER if name in kernels)
        self.mask = _PackedMask(plan, shapes, call) if config.has_mask else None
        self.pairs = _Pairs(plan, shapes, q, k, varlen) if planning.takes_pairs(config) else None
        hulls = (shapes.batch, shapes.m_blocks, 4)
        self.hulls = _like(hulls, torch.int32, q.device) if config.has_key_ranges else None
        wanted = config.has_bias and call.bias_gradient
        self.bias = _BiasGradient(plan, shapes, q, k, call) if wanted else None
        self.optional = _optional_pointers(call) if call.is_plain() and self.shared_keys is None else None
        self.maps: dict[tuple, bytes] = {}  # by the addresses they are of, all of them found readable

    def _needs_whole_rows(self, *tensors) -> bool:
        """Whether a ragged map, which counts in rows, cannot say where a sequence of these tensors begins."""
        return self.ragged[1] and any(t.dim() == 4 and t.shape[0] > 1 and t.stride(0) % t.stride(1) for t in tensors)

    def _readable(self, dout, q, k, v, out):
        dout, q, k, v, out = map(_readable, (dout, q, k, v, out))
        k, v = (t.clone(memory_format=torch.contiguous_format) if self._needs_whole_rows(t) else t for t in (k, v))
        return dout, q, k, v, out

    def run(self, dout, dlogsumexp, q, k, v, out, logsumexp, call: Call):
        """Launch. Returns dq, dk, dv, dbias or None, dsinks or None, and the number of copied inputs."""
        inputs = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), dout.data_ptr()
        maps = self.maps.get(inputs)
        if maps is None:
            copied = self._readable(dout, q, k, v, out)
            if copies := _copies(copied, (dout, q, k, v, out)):
                dout, q, k, v, out = copied
                again = Backward(self.plan, *copied, call)
                return *again.run(dout, dlogsumexp, q, k, v, out, logsumexp, call)[:-1], copies
            maps = _maps(self.plan.config, q, k, v, dout, *self.ragged) if self.tma else b""
            _keep(self.maps, inputs, maps)
        new = torch.zeros_like if self.varlen else torch.empty_like  # rows of no sequence are nobody's to write
        new_dq, new_dk, new_dv, new_delta, new_accum = self.new
        dq, dk, dv, delta, dq_accum = new(new_dq), new(new_dk), new(new_dv), new(new_delta), torch.empty_like(new_accum)
        dq_turns = None if self.new_turns is None else torch.zeros_like(self.new_turns)
        if dlogsumexp is not None:
            dlogsumexp = dlogsumexp.contiguous()
        pointers = _ALL.pack(
            inputs[0], inputs[1], inputs[2], inputs[3], logsumexp.data_ptr(), inputs[4], dq.data_ptr(), dk.data_ptr(),
            dv.data_ptr(), _address(dlogsumexp), delta.data_ptr(), dq_accum.data_ptr(), _address(dq_turns),
        )  # fmt: skip
        bits = flags = dbias = dbias_accum = hulls = dkv_accum = pairs = counters = None
        if self.mask is not None:
            bits, flags = self.mask.workspace()
        if self.bias is not None:
            dbias, dbias_accum = self.bias.workspace()
        if self.hulls is not None:
            hulls = torch.empty_like(self.hulls)
        if self.shared_keys is not None:
            dkv_accum = torch.empty_like(self.shared_keys)
        optional, records = self.optional, _NO_RECORDS
        if optional is None:
            optional = _optional_pointers(call, dbias, bits, flags, dbias_accum, hulls, dkv_accum)
        if self.pairs is not None:
            pairs, records = self.pairs.workspace()
        params = argument = b"".join((pointers, optional, records, self.rest))
        before = after = self.query_blocks
        if self.tma:
            counters, address = _tile_counters(self.plan.device)
            argument = b"".join((maps, params, address))
            if dkv_accum is not None:  # a block for each record, and for each 64 rows of dk or dv
                before += self.key_blocks
                after += self.key_blocks * self.plan.config.block_n // 32
        tensors = (
            q, k, v, out, logsumexp, dout, dq, dk, dv, dlogsumexp, delta, dq_accum, dq_turns, bits, flags, dbias,
            dbias_accum, hulls, dkv_accum, pairs, counters,
        )  # fmt: skip
        if self.mask is not None:
            self.mask.kernel.launch(self.mask.tiles, params, tensors, call)
        self.before.launch(before, params, tensors, call)
        if self.pairs is not None:
            self.pairs.kernel.launch(self.pairs.blocks, params, tensors, call)
        self.kernel.launch(self.blocks, argument, tensors, call)
        self.after.launch(after, params, tensors, call)
        dsinks = None if call.sinks is None else _sink_gradient(call, logsumexp, delta)
        if dbias is not None:
            self.bias.kernel.launch(self.bias.tiles, params, tensors, call)
            dbias = self.bias.reduced(dbias)
        return dq, dk, dv, dbias, dsinks, 0


def _maps(config: Config, q, k, v, dout, ragged_q: bool | None, ragged_k: bool | None) -> bytes:
    """The tensor maps at the head of struct ParamsSm90; `out` is stored without one."""
    m, n = config.block_m, config.block_n
    q_rows = 64 if config.kernel == "forward_sm90" else m  # of one warpgroup
    return b"".join((
        tensor_maps.encode(q, q_rows, ragged_q),
        tensor_maps.encode(k, n, ragged_k),
        tensor_maps.NONE if planning.takes_value_tiles(config) else tensor_maps.encode(v, n, ragged_k),
        tensor_maps.NONE,
        tensor_maps.NONE if dout is None else tensor_maps.encode(dout, m, ragged_q),
    ))  # fmt: skip


_counters: dict[tuple[int, int], tuple[torch.Tensor, bytes]] = {}


def _tile_counters(device: Device) -> tuple[torch.Tensor, bytes]:
    """Two zeroed words that a persistent kernel takes its tiles from, and zeroes again, one pair per stream; and their
    address as the argument has it.

    A captured graph gets its own, zeroed by the graph itself, because it may be replayed beside eager calls. The
    default stream, 0, cannot be captured (CUDA driver API, cuStreamBeginCapture), which spares the question.
    """
    if device.backend == "emulated":
        return _new_counters(device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if stream and torch._C._cuda_isCurrentStreamCapturing():
        return _new_counters(device)
    key = (device.index, stream)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = _new_counters(device)
    return found


def _new_counters(device: Device) -> tuple[torch.Tensor, bytes]:
    where = "cpu" if device.backend == "emulated" else torch.device("cuda", device.index)
    counters = torch.zeros(2, dtype=torch.int32, device=where)
    return counters, _COUNTERS.pack(counters.data_ptr())


def forward(plan: Plan, q, k, v, call: Call) -> tuple[torch.Tensor, torch.Tensor, int]:
    """One forward of a Plan. Raises compiler.CompileError if the kernel cannot be built or loaded here."""
    return Forward(plan, q, k, v, call).run(q, k, v, call)


def backward(plan: Plan, dout, dlogsumexp, q, k, v, out, logsumexp, call: Call):
    """One backward of a Plan. Raises compiler.CompileError if a kernel cannot be built or loaded here."""
    return Backward(plan, dout, q, k, v, out, call).run(dout, dlogsumexp, q, k, v, out, logsumexp, call)


def _optional_pointers(
    call: Call, dbias=None, mask_bits=None, mask_flags=None, dbias_accum=None, key_hulls=None, dkv_accum=None
) -> bytes:
    """The pointers of Params from cu_seqlens_q to dkv_accum: the call's own tensors, the gradient of its bias, workspaces."""
    given, own = call.pointers(), (mask_bits, mask_flags, dbias_accum, key_hulls, dkv_accum)
    return _OPTIONAL.pack(*given[:6], _address(dbias), *given[6:], *map(_address, own))


def _keep(cache: dict, key: tuple, value: bytes) -> bytes:
    """Into a cache that what does not come again cannot fill up."""
    if len(cache) >= _MOST_MAPS:
        cache.clear()
    cache[key] = value
    return value


class _PackedMask:
    """What a boolean mask becomes before a kernel of the sm80 family reads it: cuda_src/mask_tiles.cuh."""

    __slots__ = ("bits", "flags", "kernel", "tiles")

    def __init__(self, plan: Plan, shapes: Shapes, call: Call):
        config = plan.config
        masks = math.prod(size for size, stride in zip(call.mask.shape[:2], call.mask.stride(), strict=False) if stride)
        self.tiles = masks * shapes.m_blocks * shapes.n_blocks
        threads = 32 * config.num_warps
        words = self.tiles * threads * -(-config.block_m * config.block_n // (32 * threads))
        self.bits = _like((words,), torch.int32, call.mask.device)
        self.flags = _like((self.tiles,), torch.uint8, call.mask.device)
        self.kernel = _Kernel(plan.device, _mask_helper(config))

    def workspace(self) -> tuple[torch.Tensor, torch.Tensor]:
        """mask_bits and mask_flags, to be filled."""
        return torch.empty_like(self.bits), torch.empty_like(self.flags)


class _Pairs:
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
        self.room = _like((size,), torch.uint8, q.device)
        self.kernel = _Kernel(plan.device, _split_helper(config))

    def workspace(self) -> tuple[torch.Tensor, bytes]:
        """Room for the records, to be filled, and where those of q, k, v and dout begin; no tiles of v."""
        room = torch.empty_like(self.room)
        first, (k, v, dout) = room.data_ptr(), self.ends
        return room, _RECORDS.pack(first, first + k, first + v, first + dout, 0)


class _ValueTiles:
    """v of 8 bits as Hopper's forward reads it, transposed block by block: cuda_src/values_sm90.cuh. As many bytes as v has,
    rounded up to whole blocks and padded head dims."""

    __slots__ = ("blocks", "kernel", "room")

    def __init__(self, plan: Plan, shapes: Shapes, k):
        config = plan.config
        self.blocks = shapes.n_blocks * shapes.rows_of_blocks * k.shape[-2]
        self.room = _like((self.blocks * config.block_n * config.head_dim_v,), torch.uint8, k.device)
        self.kernel = _Kernel(plan.device, _values_helper(config))

    def workspace(self) -> tuple[torch.Tensor, bytes]:
        """Room for the tiles, to be filled, and where they begin; no pairs."""
        room = torch.empty_like(self.room)
        return room, _RECORDS.pack(0, 0, 0, 0, room.data_ptr())


class _BiasGradient:
    """The gradient of a bias: summed up tile by tile, then brought into the bias's order (cuda_src/bias.cuh)."""

    __slots__ = ("accum", "broadcast", "dbias", "kernel", "tiles")

    def __init__(self, plan: Plan, shapes: Shapes, q, k, call: Call):
        config = plan.config
        per_batch, per_head, per_row, per_key = (stride != 0 for stride in call.bias.stride())
        batch = shapes.batch if per_batch or config.deterministic else 1
        heads = q.shape[-2] if per_head or config.deterministic else 1
        self.tiles = batch * heads * (shapes.m_blocks if per_row else 1) * (shapes.n_blocks if per_key else 1)
        self.accum = _like((self.tiles, config.block_m * config.block_n), torch.float32, q.device)
        rows, keys = call.max_seqlen_q if per_row else config.block_m, call.max_seqlen_k if per_key else config.block_n
        shape = (batch, heads, rows, keys)
        self.broadcast = tuple(axis for axis, apart in enumerate((per_batch, per_head, per_row, per_key)) if not apart)
        summed = any(shape[axis] > 1 for axis in self.broadcast)
        dtype = torch.float32 if summed else call.bias.dtype
        self.dbias = _like(shape, dtype, q.device)
        self.kernel = _Kernel(plan.device, _bias_helper(config, dtype == torch.float32))

    def workspace(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dbias, to be filled, and dbias_accum, zeroed."""
        return torch.empty_like(self.dbias), torch.zeros_like(self.accum)

    def reduced(self, dbias: torch.Tensor) -> torch.Tensor:
        """Summed over what the bias is broadcast along and kernels kept apart."""
        axes = [axis for axis in self.broadcast if dbias.shape[axis] > 1]
        return dbias.sum(axes, keepdim=True) if axes else dbias


def _fill_empty(logsumexp: torch.Tensor, call: Call) -> None:
    """What rows of no sequence have: nothing but the sink."""
    if call.sinks is None:
        logsumexp.fill_(-torch.inf)
    else:
        logsumexp.copy_(call.sinks[:, None].expand_as(logsumexp))


def _sink_gradient(call: Call, logsumexp: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """-sum over rows of exp(sink - logsumexp) * delta: a sink is one more softmax column, without a value."""
    heads_last = logsumexp.movedim(-2, -1)  # [..., seqlen_q, num_heads_q]
    weight = torch.exp(call.sinks - heads_last).masked_fill(heads_last == -torch.inf, 0.0)  # rows of no sequence
    return -(weight * delta.movedim(-2, -1)).flatten(0, -2).sum(0)


# ---- layouts ----


def _has_readable_strides(tensor: torch.Tensor) -> bool:
    """Whether kernels can read these strides: a unit last one, every row on a 16-byte boundary."""
    if tensor.numel() == 0:
        return True
    *strides, last = tensor.stride()
    step = 16 // tensor.element_size()
    return last == 1 and not any(s % step and size > 1 for s, size in zip(strides, tensor.shape, strict=False))


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if kernels can read it, else a contiguous copy."""
    if _has_readable_strides(tensor) and not tensor.data_ptr() & 15:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _copies(readable, given) -> int:
    return sum(new is not old for new, old in zip(readable, given, strict=True))


def _like(shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element that stands for a tensor of this shape: empty_like of it costs a third of torch.empty with its keywords."""
    return torch.empty(1, dtype=dtype, device=device).expand(shape)


def _contiguous_strides(shape) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _statistics_shape(q: torch.Tensor, call: Call) -> tuple[int, ...]:
    """[batch, num_heads_q, seqlen_q]; varlen: [num_heads_q, total_q]."""
    return (q.shape[0], q.shape[2], q.shape[1]) if call.cu_seqlens_q is None else (q.shape[1], q.shape[0])


# ---- Params ----


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _row_strides(strides) -> tuple[int, ...]:
    """(batch, row, head) strides in elements."""
    if not strides:
        return (0, 0, 0)
    return tuple(strides[:3]) if len(strides) == 4 else (0, strides[0], strides[1])


def _rest(shapes: Shapes, call: Call, q, k, v, *, out, dout=(), dq=(), dk=(), dv=()) -> bytes:
    """struct Params after its pointers: STRIDES, INTEGERS, FLOATS."""
    rows = [q.stride(), k.stride(), v.stride(), out, dout, dq, dk, dv]
    return _REST.pack(
        *(stride for strides in rows for stride in _row_strides(strides)),
        *((0, 0) if call.key_ranges is None else call.key_ranges.stride()[:2]),
        *((0, 0, 0, 0) if call.mask is None else call.mask.stride()),
        *((0, 0, 0, 0) if call.bias is None else call.bias.stride()),
        0 if call.alibi_slopes is None else call.alibi_slopes.stride(0),
        shapes.total_q,
        shapes.batch, q.shape[-2], k.shape[-2], shapes.splits, shapes.split_heads, call.max_seqlen_q, call.max_seqlen_k, q.shape[-1], v.shape[-1],
        call.window_left, call.window_right, shapes.m_blocks, shapes.n_blocks,
        call.softmax_scale, call.softcap, call.dropout_p,
    )  # fmt: skip


# ---- the launch ----


class _Thread(threading.local):
    """A buffer for a kernel's argument per thread: the driver copies it during the launch, with the GIL released."""

    def __init__(self):
        room = bytearray(_ARGUMENT_BYTES + 64)
        address = ctypes.addressof((ctypes.c_char * len(room)).from_buffer(room))
        start = -address % 64  # tensor maps inside it are read at 64-byte steps
        self.buffer = memoryview(room)[start:]
        self.pointers = (ctypes.c_void_p * 1)(address + start)
        self.parameters = ctypes.addressof(self.pointers)  # cuLaunchKernel's kernelParams: one argument


_thread = _Thread()


class _Kernel:
    """One Config on one device, built at the first launch. A source has one entry, named after it."""

    __slots__ = ("config", "device", "entry", "function", "index", "launch_kernel", "name", "shared", "threads")

    def __init__(self, device: Device, config: Config, entry: str = "", shared: int | None = None):
        self.device, self.config, self.index, self.name = device, config, device.index, config.kernel
        self.entry = entry or f"attention_{config.kernel}"
        self.threads = 32 * config.num_warps
        self.shared = shared_memory(config) if shared is None else shared
        self.function = 0

    def launch(self, blocks: int, argument: bytes, tensors, call: Call | None = None) -> None:
        """Launch `blocks` blocks on torch's current stream of the device, with that device current."""
        if not 0 < blocks <= _MAX_BLOCKS:
            if blocks == 0:
                return  # CuPy would launch one block for a grid of zero
            text = f"{blocks} tiles are more than one launch holds ({_MAX_BLOCKS}); split the batch"
            raise compiler.CompileError(Reason("grid", text))
        if self.device.backend == "emulated":
            emulator.load(self.config).launch(
                self.entry, blocks, self.threads, self.shared, argument, tensors=_ranges(tensors, call)
            )
            launched[self.name] += 1
            return
        if not self.function:
            self._load()
        index, thread = self.index, _thread
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self.launch(blocks, argument, tensors, call)
            return
        thread.buffer[: len(argument)] = argument
        self.launch_kernel(
            self.function, blocks, 1, 1, self.threads, 1, 1, self.shared, torch._C._cuda_getCurrentRawStream(index),
            thread.parameters, 0,
        )  # fmt: skip
        launched[self.name] += 1

    def _load(self) -> None:
        from cupy_backends.cuda.api import driver

        self.function = compiler.load(self.config, self.device).function(self.entry, self.shared).ptr
        self.launch_kernel = driver.launchKernel  # CuPy's Function call takes 4 us more to arrive there


def kernel(device: Device, config, entry: str, shared: int) -> _Kernel:
    """A kernel whose argument is a struct of its own: `config` as for any, its entry, its shared memory in bytes."""
    return _Kernel(device, config, entry, shared)


def _ranges(tensors, call: Call | None) -> list[tuple[int, int, str, bool]]:
    """The memory a launch may touch, for the emulator's bounds checks: (address, bytes, name, writable)."""
    ranges = []
    read_only = () if call is None else (getattr(call, name) for name in TENSORS)
    for tensor, writable in [*((t, True) for t in tensors), *((t, False) for t in read_only)]:
        if tensor is not None and tensor.numel():
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            ranges.append((tensor.data_ptr(), span * tensor.element_size(), "", writable))
    return ranges
