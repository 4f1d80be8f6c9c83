"""What a trace notes down: one attention call, and the facts about the module it happened in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Facts:
    """What a module and its configuration say about their attention; None where they say nothing."""

    path: str
    class_name: str
    root: str = ""
    implementation: str | None = None
    root_implementation: str | None = None
    mask_registered: bool | None = None  # None: the implementation is none that transformers dispatches to by name
    function_of: str | None = None  # whose attention function its implementation names: flashpatch, transformers, user
    supports_sdpa: bool | None = None
    dispatches: bool | None = (
        None  # whether the class asks transformers for an implementation; None: no transformers module
    )
    softcap: float | None = None
    sinks: bool = False
    window: int | None = None
    weights: str = ""  # dtype of the module's weights
    compiled: bool = False
    read: bool = False  # it computes attention in code that flashpatch reads: apply can send it to a kernel


@dataclass
class Call:
    """One attention call. Shapes are [batch, heads, seqlen, head_dim]; `start` and `stop` are clock marks."""

    facts: Facts
    family: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: str
    device: str
    recompute: bool = False
    mask: str = "none"
    mask_shape: tuple[int, ...] = ()
    mask_bytes: int = 0
    causal: bool = False
    window: bool = False
    features: set[str] = field(default_factory=set)
    flops: float = 0.0
    bytes: int = 0
    matrix_shape: tuple[int, ...] = ()
    matrix_dtype: str = ""
    matrix_bytes: int = 0
    matrices: int = 0
    expanded: int = 1  # copies of each key/value head that were made in memory
    mixes_documents: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    forecast: str = ""
    declines: list[str] = field(default_factory=list)
    kernel: str = ""
    start: Any = None
    stop: Any = None
    backwards: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q[-2], self.k[-2]
