"""Whether autocast is on, and which dtype it takes; also on devices that have none, such as meta."""

from __future__ import annotations

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to on such devices, or None where it is off or not there."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
