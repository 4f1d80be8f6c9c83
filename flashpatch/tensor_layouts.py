"""Whether tensors are like others seen before, by one check in C++: what torch.compile guards its graphs with."""

from __future__ import annotations

from collections.abc import Callable

import torch

_guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def never(*tensors: torch.Tensor) -> bool:
    """The check of tensors that nothing is alike to."""
    return False


def check(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A function of as many tensors that says whether each is like the one given here: its class, dispatch keys under
    the modes of the moment (device, autocast, function transforms, inference), dtype, device, sizes, strides, and
    whether it requires a gradient (not whether gradients are enabled). It may say no to tensors that are alike, and
    keeps none of them alive.
    """
    if _guards is None:
        return never
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    try:
        return _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except TypeError:  # it is private to torch, and another torch's may take other arguments: keys recognise calls too
        return never
