"""From a Plan and tensors to launched kernels: workspaces, the packed Params, grids, torch's current stream.

The same code launches on a GPU (CuPy) and in the emulator; the kernels cannot tell the difference.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import Counter

import torch

from . import compiler, emulator
from .call import Call
from .planning import shared_memory
from .problem import Config, Plan, Reason

POINTERS = (
    "q", "k", "v", "out", "logsumexp", "dout", "dq", "dk", "dv", "dlogsumexp", "delta", "dq_accum", "dq_turns",
    "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "key_ranges", "mask", "bias", "dbias", "alibi_slopes", "sinks",
    "rng_state",
)  # fmt: skip
STRIDES = (
    *(f"{name}_stride_{axis}" for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
      for axis in ("batch", "row", "head")),
    "key_ranges_stride_batch", "key_ranges_stride_row",
    *(f"{name}_stride_{axis}" for name in ("mask", "bias") for axis in ("batch", "head", "row", "column")),
    "alibi_stride_batch", "total_q",
)  # fmt: skip
INTEGERS = (
    "batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "window_left",
    "window_right", "m_blocks", "n_blocks",
)  # fmt: skip
FLOATS = ("softmax_scale", "softcap", "dropout_p")
# In the order of struct Params in cuda_src/params.cuh.
FIELDS = POINTERS + STRIDES + INTEGERS + FLOATS
_PARAMS = struct.Struct(f"={len(POINTERS)}Q{len(STRIDES)}q{len(INTEGERS)}i{len(FLOATS)}f")
# cuLaunchKernel's limit for gridDim.x
_MAX_BLOCKS = 2**31 - 1

_zero_strides = (0, 0, 0)


class _Thread(threading.local):
    """A parameter buffer per thread: the driver copies it during the launch, with the GIL released."""

    def __init__(self):
        self.buffer = bytearray(_PARAMS.size)
        self.address = ctypes.addressof((ctypes.c_char * _PARAMS.size).from_buffer(self.buffer))
        self.pointer = None  # CuPy's wrapping of the address, made at the first launch


class _Stream:
    """What CuPy needs of a stream: its handle."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int):
        self.ptr = ptr


_thread = _Thread()
launched: Counter[str] = Counter()  # kernel -> launches of this process; verify counts by it


def unavailable(backend: str) -> Reason | None:
    """Why nothing can be launched through a backend ("gpu" or "emulated"), or None."""
    return compiler.available() if backend == "gpu" else emulator.available()


# ---- the two directions ----


def forward(plan: Plan, q, k, v, call: Call) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Launch the forward. Returns out, logsumexp and how many inputs had to be copied into a layout kernels read.

    Shapes as in `flashpatch.attention`; raises compiler.CompileError if the kernel cannot be built here.
    """
    (q, k, v), copies = _readable(q, k, v)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    logsumexp = torch.empty(_statistics_shape(q, call), dtype=torch.float32, device=q.device)
    config = plan.config
    batch, heads = _batch(q, call), q.shape[-2]
    m_blocks = -(-call.max_seqlen_q // config.block_m)
    params = _pack(config, call, q, k, v, out=out, logsumexp=logsumexp)
    _launch(
        plan,
        config,
        f"attention_{config.kernel}",
        m_blocks * heads * batch,
        32 * config.num_warps,
        params,
        (q, k, v, out, logsumexp),
        call,
    )
    return out, logsumexp, copies


def backward(plan: Plan, dout, dlogsumexp, q, k, v, out, logsumexp, call: Call):
    """Launch the backward. Returns dq, dk, dv, dbias or None, dsinks or None, and the number of copied inputs."""
    (q, k, v, out, dout), copies = _readable(q, k, v, out, dout)
    config = plan.config
    batch, heads, heads_kv = _batch(q, call), q.shape[-2], k.shape[-2]
    dq, dk, dv = torch.empty_like(q, memory_format=torch.contiguous_format), _new(k), _new(v)
    m_blocks, n_blocks = -(-call.max_seqlen_q // config.block_m), -(-call.max_seqlen_k // config.block_n)
    rows = batch * heads * m_blocks * config.block_m
    delta = torch.empty_like(logsumexp)
    dq_accum = torch.empty((rows, config.head_dim), dtype=torch.float32, device=q.device)
    turns = batch * heads * m_blocks
    dq_turns = torch.zeros(turns, dtype=torch.int32, device=q.device) if config.deterministic else None
    dbias = None
    if call.bias is not None:
        shape = [1 if stride == 0 else size for size, stride in zip(call.bias.shape, call.bias.stride(), strict=True)]
        dbias = torch.zeros(shape, dtype=torch.float32, device=q.device).expand(call.bias.shape)
    params = _pack(
        config,
        call,
        q,
        k,
        v,
        out=out,
        logsumexp=logsumexp,
        dout=dout,
        dq=dq,
        dk=dk,
        dv=dv,
        dlogsumexp=dlogsumexp,
        delta=delta,
        dq_accum=dq_accum,
        dq_turns=dq_turns,
        dbias=dbias,
    )
    tensors = (q, k, v, out, logsumexp, dout, dq, dk, dv, dlogsumexp, delta, dq_accum, dq_turns, dbias)
    before, after = _helper(config, "backward_delta"), _helper(config, "backward_dq")
    threads = 32 * config.num_warps
    _launch(plan, before, "attention_backward_delta", turns, 32 * before.num_warps, params, tensors, call)
    _launch(plan, config, f"attention_{config.kernel}", n_blocks * heads_kv * batch, threads, params, tensors, call)
    _launch(plan, after, "attention_backward_dq", turns, 32 * after.num_warps, params, tensors, call)
    dsinks = None
    if call.sinks is not None:
        dsinks = _sink_gradient(call, logsumexp, delta)
    if dbias is not None:
        dbias = dbias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in dbias.stride())]
    return dq, dk, dv, dbias, dsinks, copies


def _sink_gradient(call: Call, logsumexp: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """-sum over rows of exp(sink - logsumexp) * delta: a sink is one more softmax column, without a value."""
    heads_last = logsumexp.movedim(-2, -1)  # [..., seqlen_q, num_heads_q]
    weight = torch.exp(call.sinks.float() - heads_last)
    return -(weight * delta.movedim(-2, -1)).flatten(0, -2).sum(0)


def _helper(config: Config, kernel: str) -> Config:
    """The Config of a small kernel before or after the main one: only what its source reads, so that few are built."""
    return Config(kernel, config.dtype, config.head_dim, config.head_dim_v, config.block_m, 0, 4)


def launches(config: Config) -> tuple[str, ...]:
    """The kernels one call of this Config launches, by source name."""
    if config.kernel.startswith("backward"):
        return ("backward_delta", config.kernel, "backward_dq")
    return (config.kernel,)


def configs(config: Config) -> tuple[Config, ...]:
    """Every Config that must be compiled to run this one."""
    return tuple(config if kernel == config.kernel else _helper(config, kernel) for kernel in launches(config))


# ---- layouts ----


def _readable(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """The tensors as kernels read them: unit last stride, rows on 16-byte boundaries; others are copied, counted."""
    readable, copies = [], 0
    for tensor in tensors:
        if not _is_readable(tensor):
            tensor, copies = tensor.contiguous(), copies + 1
            if tensor.data_ptr() % 16:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
        readable.append(tensor)
    return readable, copies


def _is_readable(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    *strides, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % 16:
        return False
    return not any(stride % 8 and size > 1 for stride, size in zip(strides, tensor.shape, strict=False))


def _new(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _batch(q: torch.Tensor, call: Call) -> int:
    return q.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1


def _statistics_shape(q: torch.Tensor, call: Call) -> tuple[int, ...]:
    if call.cu_seqlens_q is None:
        return (q.shape[0], q.shape[2], q.shape[1])
    return (q.shape[1], q.shape[0])


# ---- Params ----


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rows(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """Strides over (batch, row, head) in elements."""
    if tensor is None:
        return _zero_strides
    strides = tensor.stride()
    return strides[:3] if len(strides) == 4 else (0, strides[0], strides[1])


def _pack(config, call, q, k, v, *, out, logsumexp, dout=None, dq=None, dk=None, dv=None, dlogsumexp=None, delta=None,
          dq_accum=None, dq_turns=None, dbias=None) -> bytearray:  # fmt: skip
    """struct Params of cuda_src/params.cuh in this thread's buffer; the order is FIELDS."""
    mask, bias, ranges = call.mask, call.bias, call.key_ranges
    alibi = call.alibi_slopes
    buffer = _thread.buffer
    _PARAMS.pack_into(
        buffer, 0,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), logsumexp.data_ptr(), _address(dout), _address(dq),
        _address(dk), _address(dv), _address(dlogsumexp), _address(delta), _address(dq_accum), _address(dq_turns),
        _address(call.cu_seqlens_q), _address(call.cu_seqlens_k), _address(call.seqused_k), _address(ranges),
        _address(mask), _address(bias), _address(dbias), _address(alibi), _address(call.sinks),
        _address(call.rng_state),
        *_rows(q), *_rows(k), *_rows(v), *_rows(out), *_rows(dout), *_rows(dq), *_rows(dk), *_rows(dv),
        *((0, 0) if ranges is None else ranges.stride()[:2]),
        *((0, 0, 0, 0) if mask is None else mask.stride()),
        *((0, 0, 0, 0) if bias is None else bias.stride()),
        0 if alibi is None else alibi.stride(0),
        q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1],
        _batch(q, call), q.shape[-2], k.shape[-2], call.max_seqlen_q, call.max_seqlen_k, q.shape[-1], v.shape[-1],
        call.window_left, call.window_right,
        -(-call.max_seqlen_q // config.block_m), -(-call.max_seqlen_k // config.block_n),
        call.softmax_scale, call.softcap, call.dropout_p,
    )  # fmt: skip
    return buffer


# ---- the launch ----


def _launch(plan: Plan, config: Config, entry: str, blocks: int, threads: int, params, tensors, call: Call) -> None:
    if blocks == 0:
        return  # CuPy would launch one block for a grid of zero
    launched[config.kernel] += 1
    if blocks > _MAX_BLOCKS:
        raise compiler.CompileError(
            Reason("grid", f"{blocks} tiles are more than one launch holds ({_MAX_BLOCKS}); split the batch")
        )
    if plan.device.backend == "emulated":
        emulator.load(config).launch(
            entry, blocks, threads, shared_memory(config), bytes(params), tensors=_ranges(tensors, call)
        )
        return
    _launch_cuda(plan.device.index, compiler.load(config, plan.device), entry, blocks, threads, shared_memory(config))


def _launch_cuda(index: int, kernel, entry: str, blocks: int, threads: int, shared: int) -> None:
    """Launch on torch's current stream of the tensors' device, with that device current."""
    if _thread.pointer is None:
        from cupy.cuda.function import CPointer

        _thread.pointer = CPointer(_thread.address)
    launch = kernel.function(entry, shared)
    stream = _Stream(torch._C._cuda_getCurrentRawStream(index))
    if torch.cuda.current_device() == index:
        launch((blocks, 1, 1), (threads, 1, 1), (_thread.pointer,), shared, stream)
    else:
        with torch.cuda.device(index):
            launch((blocks, 1, 1), (threads, 1, 1), (_thread.pointer,), shared, stream)


def _ranges(tensors, call: Call) -> list[tuple[int, int, str, bool]]:
    """The memory a launch may touch, for the emulator's bounds checks: (address, bytes, name, writable)."""
    read = [getattr(call, name) for name in (
        "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "key_ranges", "mask", "bias", "alibi_slopes", "sinks", "rng_state"
    )]  # fmt: skip
    ranges = []
    for tensor, writable in [*((t, True) for t in tensors), *((t, False) for t in read)]:
        if tensor is not None and tensor.numel():
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            ranges.append((tensor.data_ptr(), span * tensor.element_size(), "", writable))
    return ranges
