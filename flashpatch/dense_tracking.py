"""Finds attention spelled out in operators: matmul, then anything elementwise, then softmax, then matmul.

Tensors are followed by their storage. What a matmul makes may turn out to be scores; what a softmax makes of scores are
probabilities; a matmul that takes probabilities closes one attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

aten = torch.ops.aten
# operator -> positions of its two factors
MATMULS = {
    aten.bmm.default: (0, 1), aten.bmm.out: (0, 1), aten.baddbmm.default: (1, 2), aten.baddbmm.out: (1, 2),
    aten.mm.default: (0, 1), aten.mm.out: (0, 1),
}  # fmt: skip
SOFTMAXES = {aten._softmax.default, aten._safe_softmax.default, aten.exp.default, aten._softmax.out}
SOFTMAX_BACKWARDS = {aten._softmax_backward_data.default, aten._softmax_backward_data.out}
_MASK_ADDS = {aten.add.Tensor, aten.add_.Tensor}
_FILLS = {aten.masked_fill.Scalar, aten.masked_fill_.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Tensor}
_DROPOUTS = {aten.native_dropout.default, aten.bernoulli_.float, aten.bernoulli.p}
_MOST_TAGS = 20000


class Tags:
    """Notes on storages, gone when the storage is."""

    def __init__(self):
        self._notes: dict[int, tuple[StorageWeakRef, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._notes)

    def put(self, tensor, note) -> None:
        if (storage := _storage(tensor)) is None:
            return
        if len(self._notes) > _MOST_TAGS:
            self._notes = {key: entry for key, entry in self._notes.items() if not entry[0].expired()}
        # the weak reference keeps the address from being used again
        self._notes[storage._cdata] = (StorageWeakRef(storage), note)

    def get(self, tensor):
        if not self._notes or (storage := _storage(tensor)) is None:
            return None
        entry = self._notes.get(storage._cdata)
        if entry is None:
            return None
        if entry[0].expired():
            del self._notes[storage._cdata]
            return None
        return entry[1]


def _storage(tensor):
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def size_of(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor: an expanded one is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def nbytes(*values) -> int:
    """Bytes of all plain tensors in these values."""
    total = 0
    for value in values:
        if isinstance(value, (tuple, list)):
            total += nbytes(*value)
        elif _storage(value) is not None:
            total += size_of(value)
    return total


@dataclass
class Dense:
    """One attention in the making. `rows` x `columns` is the score matrix."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    rows: int
    columns: int
    start: Any
    expanded: int
    flops: float
    bytes: int
    shape: tuple[int, ...] = ()
    softmax: str = ""
    mask: torch.Tensor | None = None
    features: set[str] = field(default_factory=set)
    matrices: int = 0
    matrix_bytes: int = 0
    largest: tuple[tuple[int, ...], str, int] = ((), "", 0)
    call: Any = None

    def hides(self, mask: torch.Tensor) -> None:
        """One more mask on the scores; beside a bias that a product began with, it stands alone."""
        self.mask = mask if self.mask is None or "bias" in self.features else _both(self.mask, mask)

    def holds(self, tensor: torch.Tensor) -> None:
        """Count a new tensor as one more materialised matrix."""
        self.matrices += 1
        size = tensor.numel() * tensor.element_size()
        self.matrix_bytes += size
        if size > self.largest[2]:
            shape = tuple(tensor.shape)
            self.largest = (shape, str(tensor.dtype).removeprefix("torch."), size)


class Tracker:
    """Follows score matrices through operators. Each method gets an operator that has run, with its result."""

    def __init__(self):
        self.tags = Tags()
        self.expanded = Tags()
        self.parameters: set[int] = set()

    def is_parameter(self, tensor) -> bool:
        storage = _storage(tensor)
        return storage is not None and storage._cdata in self.parameters

    def closes(self, function, args) -> Dense | None:
        """The attention that this matmul ends, if one of its factors are probabilities."""
        for position in MATMULS[function]:
            note = self.tags.get(args[position])
            if note is not None and note.softmax:
                return note
        return None

    def opens(self, function, args, out, start) -> None:
        """A matmul whose result may be scores."""
        a, b = (args[position] for position in MATMULS[function])
        if a.dim() == 2 and self.is_parameter(b):
            return
        note = Dense(
            tuple(a.shape), tuple(b.shape), a.dtype, a.device, a.shape[-2], b.shape[-1], start,
            max(self.expanded.get(b) or 1, self.expanded.get(a) or 1), 2.0 * out.numel() * a.shape[-1], nbytes(a, b, out),
        )  # fmt: skip
        note.holds(out)
        if len(args) > 2 and MATMULS[function] == (1, 2) and args[0].numel() > 1:
            note.mask, note.features = args[0], {"bias"}
        self.tags.put(out, note)

    def follows(self, function, args, out) -> None:
        """Any other operator: its result is a score matrix too if an argument was one and the shape still fits."""
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, torch.Tensor):
            return
        tagged = [(value, note) for value in args if (note := self.tags.get(value)) is not None]
        if not tagged:
            if function is aten.cat.default:
                tagged = [(value, note) for value in args[0] if (note := self.tags.get(value)) is not None]
            if not tagged:
                return
        scores, note = tagged[0]
        if first.dim() == 4 and self.tags.get(first) is note and not note.softmax:
            note.shape = tuple(first.shape)  # a view that shows batch and heads
        if first.dim() < 2 or first.shape[-1] not in (note.columns, note.columns + 1):
            return
        fresh = self.tags.get(first) is not note
        if fresh:
            self.tags.put(first, note)
            note.holds(first)
        if fresh or function in _FILLS or function in _MASK_ADDS:
            note.bytes += nbytes(scores, first)
        self._features(function, args, scores, note)

    def _features(self, function, args, scores, note: Dense) -> None:
        before_softmax = not note.softmax
        if function is aten.tanh.default and before_softmax:
            note.features.add("softcap")
        elif function is aten.cat.default and before_softmax:
            note.features.add("sinks")
        elif function in _DROPOUTS:
            note.features.add("dropout")
        elif function in _MASK_ADDS and before_softmax:
            for other in args[:2]:
                if isinstance(other, torch.Tensor) and other is not scores and _fits(other, note):
                    note.hides(other)
        elif function in _FILLS and before_softmax and _fits(args[1], note):
            note.hides(~args[1])
        elif function is aten.where.self and before_softmax and _fits(args[0], note):
            note.hides(args[0] if self.tags.get(args[1]) is note else ~args[0])

    def normalises(self, function, args, out) -> None:
        """A softmax: of scores it makes probabilities."""
        note = self.tags.get(args[0])
        if note is None or note.softmax:
            return
        note.softmax = function.name().partition("::")[2].partition(".")[0]
        if args[0].dim() >= 3:
            note.shape = tuple(args[0].shape)
        note.bytes += nbytes(args[0], out)
        self.tags.put(out, note)
        note.holds(out)

    def copies(self, args, out) -> None:
        """A clone: of a tensor expanded by stride 0 it writes every repetition out."""
        source = args[0]
        factor = 1
        for extent, stride in zip(source.shape, source.stride(), strict=True):
            if stride == 0 and extent > 1:
                factor *= extent
        if factor > 1 and source.dim() >= 4:
            self.expanded.put(out, factor)


def _both(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two masks as one, boolean (True: seen) or additive."""
    if first.dtype == second.dtype == torch.bool:
        return first & second
    if second.dtype == torch.bool:
        first, second = second, first
    if first.dtype == torch.bool:
        return second.masked_fill(~first, torch.finfo(second.dtype).min)
    return first + second


def _fits(mask, note: Dense) -> bool:
    """Whether a tensor broadcasts over a score matrix along its rows and columns."""
    return (
        isinstance(mask, torch.Tensor)
        and mask.dim() >= 2
        and mask.shape[-1] == note.columns
        and mask.shape[-2] in (1, note.rows)
        and mask.numel() > 1
    )
