"""FLOPs and bytes of a call, counted operator by operator while it runs: a fused operator reads its inputs and writes its
outputs once."""

from __future__ import annotations

import torch

from . import families, tracing
from .benchmarking import Shape
from .dense_tracking import MATMULS, size_of


class _Counter(tracing.Watching):
    """Adds up what operators read and write, and the FLOPs of matrix products."""

    def __init__(self):
        super().__init__()
        self.bytes = self.flops = 0
        self.fused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if types and any(kind is not torch.Tensor and not issubclass(kind, torch.nn.Parameter) for kind in types):
            return out
        read = {_address(value): value for value in _tensors((args, kwargs or {}))}
        written = [value for value in _tensors(out) if _address(value) not in read]
        in_place = isinstance(function, torch._ops.OpOverload) and function._schema.is_mutable
        if written or in_place:
            moved = [*read.values(), *written, *(list(read.values())[:1] if in_place else [])]
            self.bytes += sum(map(size_of, moved))
        if function in MATMULS:
            a = args[MATMULS[function][0]]
            self.flops += 2.0 * out.numel() * a.shape[-1]
        elif isinstance(function, torch._ops.OpOverload) and families.of_operator(function.name().partition(".")[0]):
            self.fused = True
        return out


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def count(run, shape: Shape, direction: str, itemsize: int) -> tuple[float, int]:
    """(FLOPs executed, bytes moved) of one call. What a compiled kernel does without an operator counts as fused."""
    with _Counter() as counter:
        run()
    if counter.flops and not counter.fused:
        return counter.flops, counter.bytes
    return shape.flops(direction), max(counter.bytes if counter.fused else 0, compulsory(shape, direction, itemsize))


def compulsory(shape: Shape, direction: str, itemsize: int) -> int:
    """Bytes that any attention moves at least: inputs read and outputs written once, logsumexp in fp32."""
    row = shape.batch * shape.seqlen * shape.head_dim * itemsize
    q, kv = row * shape.num_heads, row * shape.num_heads_kv
    logsumexp = 4 * shape.batch * shape.seqlen * shape.num_heads
    if direction == "forward":
        return 2 * q + 2 * kv + logsumexp
    return 4 * q + 4 * kv + logsumexp  # q, k, v, out, dout in; dq, dk, dv out
