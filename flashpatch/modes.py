"""What surrounds a call: autocast, also on devices that have none such as meta, tracers, function transforms."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

# Looked up once: each call asks.
_is_compiling = torch.compiler.is_compiling
_jit_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to on such devices, or None where it is off or not there."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def is_untraced() -> bool:
    """Whether nobody traces or transforms what runs here."""
    return not (
        _is_compiling()
        or _jit_state() is not None
        or _dispatch_modes()
        or _transforms() is not None
        or forward_ad._current_level >= 0
    )


def is_eager(q: torch.Tensor) -> bool:
    """Whether nobody traces, transforms, casts or asks for shapes alone: then the operators' bodies can be called directly."""
    return is_untraced() and q.__class__ is torch.Tensor and not q.is_meta and not torch._C._is_any_autocast_enabled()
