"""What ran: calls, kernel launches and named declines per layer, counted inside the operators' bodies."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch

from .problem import Plan, Reason


@dataclass
class LayerCounts:
    """The counters of one attention layer (or of all direct calls)."""

    name: str
    calls: int = 0
    recomputes: int = 0  # forwards run again inside a backward (activation checkpointing)
    launches: Counter = field(default_factory=Counter)  # kernel -> calls that ran on it
    declines: Counter = field(default_factory=Counter)  # (code, text) -> times
    copies: int = 0  # inputs copied because kernels cannot read their layout or head dim
    padded: Counter = field(default_factory=Counter)  # which head dims were padded to what -> calls
    mask_materialised: int = 0
    statuses: dict[str, str] = field(default_factory=dict)  # kernel -> "verified" or "compiled"
    backends: dict[str, str] = field(default_factory=dict)  # kernel -> "gpu" or "emulated"

    def called(self) -> None:
        """Count a forward; one that runs inside a backward is activation checkpointing's recompute."""
        if torch._C._current_graph_task_id() == -1:
            self.calls += 1
        else:
            self.recomputes += 1

    def launched(self, plan: Plan, copies: int = 0) -> None:
        kernel = plan.label
        self.launches[kernel] += 1
        if copies:
            self.copies += copies
            if plan.padding:
                self.padded[plan.padding] += 1
        if kernel not in self.statuses:
            self.statuses[kernel] = plan.status
            self.backends[kernel] = plan.device.backend

    def reset(self) -> None:
        self.__init__(self.name)


# Layer numbers are plain ints, so that a compiled graph can carry them.
DIRECT = 0
layers: list[LayerCounts] = [LayerCounts("flashpatch.attention")]
_warned: set[tuple[str, str]] = set()


def switched_on(variable: str) -> bool:
    """Whether an environment variable of ours is on: 1, true, yes or on. Raises ValueError for what is neither that nor off."""
    value = os.environ.get(variable, "").lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{variable}={value!r}: 1 (or true, yes, on) or 0 (or false, no, off) is needed")


def register_layer(name: str) -> int:
    """A new layer to count under; returns its number."""
    layers.append(LayerCounts(name))
    return len(layers) - 1


def counts(layer: int) -> LayerCounts:
    return layers[layer]


def reset_counts() -> None:
    """Set every counter to zero; warnings already given stay given."""
    for layer in layers:
        layer.reset()


def record_decline(layer: int, reason: Reason) -> None:
    """Count a decline under its layer and warn the first time this reason appears in the process."""
    key = (reason.code, reason.text)
    layers[layer].declines[key] += 1
    if key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"flashpatch: {layers[layer].name} runs exactly but without a kernel ({reason.code}: {reason.text}); "
            "counted in flashpatch.stats(), FLASHPATCH_STRICT=1 makes this an error",
            stacklevel=callers_level(),
        )


# "" is code that torch generates: its globals bear no name
_LIBRARIES = ("", "flashpatch", "torch", "transformers", "contextlib", "functools")


def callers_level() -> int:
    """How far up the stack the code is that called the model or the operator: where a warning is of use.

    A backward on a GPU runs in a thread of torch's own, which nobody called: then the outermost frame.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def stats() -> dict[str, dict]:
    """This process so far: calls that ran per kernel, declines per reason, copies, padded head dims, over all layers."""
    launches, declines, padded = Counter(), Counter(), Counter()
    for layer in layers:
        launches.update(layer.launches)
        padded.update(layer.padded)
        declines.update({f"{code}: {text}": n for (code, text), n in layer.declines.items()})
    return {
        "calls": sum(layer.calls for layer in layers),
        "recomputes": sum(layer.recomputes for layer in layers),
        "launches": dict(launches),
        "declines": dict(declines),
        "copies": sum(layer.copies for layer in layers),
        "padded": dict(padded),
        "mask_materialised": sum(layer.mask_materialised for layer in layers),
    }
