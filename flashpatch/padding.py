"""Head dims that kernels do not take as they are: zeros behind q, k and v up to one they take, and results cut back.

Zeros add nothing to a score, and give columns of out and of the gradients that nobody reads. The softmax_scale of a call
is that of the true head dim, and logsumexp has none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .call import Call
from .problem import Plan


class PaddedForward:
    """A forward of padded copies, ready to launch for one signature of tensors; `make` prepares it for these."""

    __slots__ = ("inner", "plan")

    def __init__(self, make: Callable, plan: Plan, q, k, v, call: Call):
        self.plan = plan
        self.inner = make(plan, *self._padded(q, k, v), call)

    def _padded(self, q, k, v):
        head_dim, head_dim_v = self.plan.padded_to
        return _padded(q, head_dim), _padded(k, head_dim), _padded(v, head_dim_v)

    def run(self, q, k, v, call: Call, statistics: bool = True):
        """As launcher.Forward; what was padded counts as copied."""
        padded = self._padded(q, k, v)
        out, logsumexp, copies = self.inner.run(*padded, call, statistics)
        return _cut(out, v.shape[-1]), logsumexp, copies + _copied(padded, (q, k, v))


class PaddedBackward:
    """A backward of padded copies, ready to launch for one signature of tensors; `make` prepares it for these."""

    __slots__ = ("inner", "plan")

    def __init__(self, make: Callable, plan: Plan, dout, q, k, v, out, call: Call):
        self.plan = plan
        self.inner = make(plan, *self._padded(dout, q, k, v, out), call)

    def _padded(self, dout, q, k, v, out):
        head_dim, head_dim_v = self.plan.padded_to
        return (
            _padded(dout, head_dim_v), _padded(q, head_dim), _padded(k, head_dim), _padded(v, head_dim_v),
            _padded(out, head_dim_v),
        )  # fmt: skip

    def run(self, dout, dlogsumexp, q, k, v, out, logsumexp, call: Call):
        """As launcher.Backward; what was padded counts as copied."""
        given = dout, q, k, v, out
        padded = self._padded(*given)
        dq, dk, dv, *rest, copies = self.inner.run(padded[0], dlogsumexp, *padded[1:], logsumexp, call)
        gradients = (_cut(gradient, t.shape[-1]) for gradient, t in ((dq, q), (dk, k), (dv, v)))
        return *gradients, *rest, copies + _copied(padded, given)


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A contiguous copy with zeros behind it up to a head dim; the tensor itself where it has that one."""
    own = tensor.shape[-1]
    if own == size:
        return tensor
    padded = tensor.new_zeros((*tensor.shape[:-1], size))
    padded[..., :own].copy_(tensor)
    return padded


def _cut(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Without what was padded, contiguous and no view."""
    return tensor if tensor.shape[-1] == size else tensor[..., :size].clone(memory_format=torch.contiguous_format)


def _copied(padded, given) -> int:
    return sum(new is not old for new, old in zip(padded, given, strict=True))
