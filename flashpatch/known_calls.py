"""Plain calls that were checked and found right once: they are recognised by their options and their tensors' layouts, and
go to their prepared launch without being looked at anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import execution, tensor_layouts
from .call import Call
from .modes import is_eager


@dataclass(slots=True)
class Known:
    """A plain call that is not checked again."""

    alike: Callable[..., bool]  # whether q, k and v are like those it came with
    call: Call | None
    differentiable: bool  # whether one of q, k and v requires a gradient
    tf32: bool | None  # in fp32: whether products are rounded to TF32


_known: dict[tuple, Known] = {}
_MOST_KNOWN = 4096
# The last one with the same options. Layers of a model mostly call alike, and one check in C++ costs a third of a key.
latest: dict[tuple, Known] = {}
NOTHING = Known(tensor_layouts.never, None, False, None)


def find(q, k, v, options: tuple) -> tuple[tuple | None, Known | None]:
    """The key of a plain call and what is known of it. No key: it is not to be remembered."""
    index, dtype = q.get_device(), q.dtype
    if index < 0 or k.get_device() != index or v.get_device() != index or k.dtype != dtype or v.dtype != dtype:
        return None, None
    if not is_eager(q) or (dtype.itemsize == 1 and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return None, None  # of 8 bits only `check` knows whether gradients are asked for
    key = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), dtype, index, q.requires_grad, k.requires_grad,
        v.requires_grad, q.is_inference(), execution.takes_tf32(dtype), options,
    )  # fmt: skip
    found = _known.get(key)
    if found is not None:
        latest[options] = found
    return key, found


def remember(key: tuple, q, k, v, call: Call) -> None:
    """Keep a Call that was checked, expanded and prepared, under the key that `find` gave."""
    if len(_known) >= _MOST_KNOWN:
        forget()
    differentiable = q.requires_grad or k.requires_grad or v.requires_grad
    tf32 = execution.takes_tf32(q.dtype) if q.dtype == torch.float32 else None
    _known[key] = Known(tensor_layouts.check(q, k, v), call, differentiable, tf32)


def forget() -> None:
    """Look at every call anew."""
    _known.clear()
    latest.clear()
