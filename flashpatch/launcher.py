"""From a Plan and tensors to launched kernels: outputs, workspaces, the packed Params, grids.

What depends on shapes, strides and scalars alone is computed once per signature (`Forward`, `Backward`) and kept by
the caller; a call then costs its allocations, the packing of its pointers and the launch.
"""

from __future__ import annotations

import torch

from . import compiler, emulator, planning, tensor_maps
from .call import Call, out_dtype
from .kernel_launch import Kernel
from .kernel_sets import configs
from .padding import PaddedBackward, PaddedForward
from .params import (
    ALL,
    COUNTERS,
    INPUTS,
    MAPS_BYTES,
    NO_BACKWARD,
    NO_RECORDS,
    RESULTS,
    address_of,
    contiguous_strides,
    optional_pointers,
    scalars,
)
from .planning import value_parts
from .problem import Config, Device, Plan, Reason
from .tile_counts import Shapes, splits, takes_maps
from .workspaces import BiasGradient, PackedMask, Pairs, ValueTiles, like

_MOST_MAPS = 1024
# Of out that a warp of forward_sm90 stores at once
_OUT_ROWS = 16
# The emulator runs the CTAs of a persistent grid one after another; a few are enough to share out tiles.
_EMULATED_MULTIPROCESSORS = 3
# The small kernels before (delta) and after (dq from fp32) a backward, by family.
_BEFORE = ("backward_delta", "backward_prepare_sm90")
_AFTER = ("backward_dq", "backward_dq_sm75", "backward_finish_sm90")


def unavailable(backend: str) -> Reason | None:
    """Why nothing can be launched through a backend ("gpu" or "emulated"), or None."""
    return compiler.available() if backend == "gpu" else emulator.available()


def forward(plan: Plan, q, k, v, call: Call) -> tuple[torch.Tensor, torch.Tensor, int]:
    """One forward of a Plan. Raises problem.BuildFailure if the kernel cannot be built or loaded here."""
    return ready_forward(plan, q, k, v, call).run(q, k, v, call)


def backward(plan: Plan, dout, dlogsumexp, q, k, v, out, logsumexp, call: Call):
    """One backward of a Plan. Raises problem.BuildFailure if a kernel cannot be built or loaded here."""
    return ready_backward(plan, dout, q, k, v, out, call).run(dout, dlogsumexp, q, k, v, out, logsumexp, call)


def ready_forward(plan: Plan, q, k, v, call: Call) -> Forward | PaddedForward:
    """What runs a Plan's forward on tensors like these."""
    return PaddedForward(Forward, plan, q, k, v, call) if plan.padded_to else Forward(plan, q, k, v, call)


def ready_backward(plan: Plan, dout, q, k, v, out, call: Call) -> Backward | PaddedBackward:
    """What runs a Plan's backward on tensors like these."""
    if plan.padded_to:
        return PaddedBackward(Backward, plan, dout, q, k, v, out, call)
    return Backward(plan, dout, q, k, v, out, call)


class Forward:
    """A forward ready to launch for one signature of tensors and one Plan."""

    __slots__ = (
        "after", "blocks", "inputs", "kernel", "mask", "new_out", "new_statistics", "optional", "out_maps", "plan",
        "records", "rest", "tma", "varlen",
    )  # fmt: skip

    def __init__(self, plan: Plan, q, k, v, call: Call):
        self.plan = plan
        q, k, v = map(_readable, (q, k, v))
        out_shape = (*q.shape[:-1], v.shape[-1])
        self.new_out = like(out_shape, out_dtype(q.dtype), q.device)
        self.new_statistics = like(_statistics_shape(q, call), torch.float32, q.device)
        self.varlen = call.cu_seqlens_q is not None
        shapes = Shapes(plan.config, q, k, call)
        self.blocks = value_parts(plan.config) * shapes.m_blocks * q.shape[-2] * shapes.rows_of_blocks
        self.rest = scalars(shapes, call, q, k, v, out=contiguous_strides(out_shape))
        self.kernel = Kernel(plan.device, plan.config)
        self.mask = PackedMask(plan, shapes, call) if plan.config.has_mask else None
        self.records = None
        if planning.takes_pairs(plan.config):
            self.records = Pairs(plan, shapes, q, k, self.varlen)
        elif planning.takes_value_tiles(plan.config):
            self.records = ValueTiles(plan, shapes, k)
        self.tma = takes_maps(plan.config)
        self.optional = optional_pointers(call) if call.is_plain() else None
        bare = self.optional is not None and self.records is None
        self.after = self._after_results(self.optional, NO_RECORDS) if bare else None
        # Maps and addresses of q, k, v, and the map of out, by address: torch's allocator hands out the same ones again.
        self.inputs: dict[tuple, tuple[bytes, bytes]] = {}
        self.out_maps: dict[int, bytes] = {}
        if self.tma:  # persistent: one CTA per multiprocessor takes tiles from a counter
            self.blocks = min(self.blocks, plan.device.multiprocessors or _EMULATED_MULTIPROCESSORS)

    def _after_results(self, optional: bytes, records: bytes) -> bytes:
        """Params from dout on; a forward has no pointers of a backward."""
        return b"".join((NO_BACKWARD, optional, records, self.rest))

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
            maps, pointers = b"", INPUTS.pack(*addresses)
            if self.tma:
                maps, pointers = _maps(self.plan.config, q, k, v, None), tensor_maps.NONE + pointers
            inputs = _keep(self.inputs, addresses, (maps, pointers))
        out = torch.empty_like(self.new_out)
        logsumexp = torch.empty_like(self.new_statistics) if statistics else None
        if self.varlen:  # rows of no sequence are nobody's to write
            out.zero_()
            if statistics:
                _fill_empty(logsumexp, call)
        out_address = out.data_ptr()
        results = RESULTS.pack(out_address, logsumexp.data_ptr() if statistics else 0)
        bits = flags = room = counters = None
        after, address = self.after, b""
        if after is None:
            records = NO_RECORDS
            if self.mask is not None:
                bits, flags = self.mask.workspace()
            if self.records is not None:
                room, records = self.records.workspace()
            optional = self.optional or optional_pointers(call, mask_bits=bits, mask_flags=flags)
            after = self._after_results(optional, records)
        maps, pointers = inputs
        if self.tma:
            counters, address = _tile_counters(self.plan.device)
            out_map = self.out_maps.get(out_address)
            if out_map is None:
                out_map = _keep(self.out_maps, out_address, tensor_maps.encode(out, _OUT_ROWS, self.varlen))
            maps += out_map
        argument = b"".join((maps, pointers, results, after, address))
        tensors = (q, k, v, out, logsumexp, bits, flags, room, counters)
        if self.mask is not None:
            self.mask.kernel.launch(self.mask.tiles, argument, tensors, call)
        if self.records is not None:
            params = argument[MAPS_BYTES : -COUNTERS.size] if self.tma else argument
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
                self.shared_keys = like(shared, torch.float32, q.device)
        else:
            blocks = shapes.total_q // config.block_m + shapes.batch if varlen else shapes.m_blocks * shapes.batch
            turns = blocks * q.shape[-2]
            workspace = (turns, config.block_m * config.head_dim)
        if not shapes.group:
            self.blocks = 0  # no query heads: dk and dv are zeros, and kernels divide by the heads of a group
        if config.deterministic:
            self.new_turns = like((turns,), torch.int32, q.device)
        self.new = (
            *(like(t.shape, q.dtype, q.device) for t in (q, k, v)),
            *(like(shape, torch.float32, q.device) for shape in (_statistics_shape(q, call), workspace)),
        )
        self.rest = scalars(
            shapes, call, q, k, v, out=out.stride(), dout=dout.stride(), dq=contiguous_strides(q.shape),
            dk=contiguous_strides(k.shape), dv=contiguous_strides(v.shape),
        )  # fmt: skip
        kernels = {part.kernel: Kernel(plan.device, part) for part in configs(config)}
        self.kernel = kernels[config.kernel]
        self.before = next(kernels[name] for name in _BEFORE if name in kernels)
        self.after = next(kernels[name] for name in _AFTER if name in kernels)
        self.mask = PackedMask(plan, shapes, call) if config.has_mask else None
        self.pairs = Pairs(plan, shapes, q, k, varlen) if planning.takes_pairs(config) else None
        hulls = (shapes.batch, shapes.m_blocks, 4)
        self.hulls = like(hulls, torch.int32, q.device) if config.has_key_ranges else None
        wanted = config.has_bias and call.bias_gradient
        self.bias = BiasGradient(plan, shapes, q, k, call) if wanted else None
        self.optional = optional_pointers(call) if call.is_plain() and self.shared_keys is None else None
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
        # rows of no sequence are nobody's to write
        new = torch.zeros_like if self.varlen or not self.blocks else torch.empty_like
        new_dq, new_dk, new_dv, new_delta, new_accum = self.new
        dq, dk, dv, delta, dq_accum = new(new_dq), new(new_dk), new(new_dv), new(new_delta), torch.empty_like(new_accum)
        dq_turns = None
        if self.new_turns is not None:  # backward_delta zeroes its own
            dq_turns = torch.zeros_like(self.new_turns) if self.tma else torch.empty_like(self.new_turns)
        if dlogsumexp is not None:
            dlogsumexp = dlogsumexp.contiguous()
        pointers = ALL.pack(
            inputs[0], inputs[1], inputs[2], inputs[3], logsumexp.data_ptr(), inputs[4], dq.data_ptr(), dk.data_ptr(),
            dv.data_ptr(), address_of(dlogsumexp), delta.data_ptr(), dq_accum.data_ptr(), address_of(dq_turns),
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
        optional, records = self.optional, NO_RECORDS
        if optional is None:
            optional = optional_pointers(call, dbias, bits, flags, dbias_accum, hulls, dkv_accum)
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


def _maps(config: Config, q, k, v, dout, ragged_q: bool | None = None, ragged_k: bool | None = None) -> bytes:
    """Of struct ParamsSm90: the maps of q, k and v for a forward, which puts that of its out behind them at each call; with
    dout all of them."""
    m, n = config.block_m, config.block_n
    q_rows = 64 if config.kernel == "forward_sm90" else m  # of one warpgroup
    return b"".join((
        tensor_maps.encode(q, q_rows, ragged_q),
        tensor_maps.encode(k, n, ragged_k),
        tensor_maps.NONE if planning.takes_value_tiles(config) else tensor_maps.encode(v, n, ragged_k),
        *(() if dout is None else (tensor_maps.NONE, tensor_maps.encode(dout, m, ragged_q))),
    ))  # fmt: skip


def _keep(cache: dict, key: tuple, value: bytes) -> bytes:
    """Into a cache that what does not come again cannot fill up."""
    if len(cache) >= _MOST_MAPS:
        cache.clear()
    cache[key] = value
    return value


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
    return counters, COUNTERS.pack(counters.data_ptr())


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


def _statistics_shape(q: torch.Tensor, call: Call) -> tuple[int, ...]:
    """[batch, num_heads_q, seqlen_q]; varlen: [num_heads_q, total_q]."""
    return (q.shape[0], q.shape[2], q.shape[1]) if call.cu_seqlens_q is None else (q.shape[1], q.shape[0])


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
