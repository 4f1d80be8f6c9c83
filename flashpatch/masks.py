"""`MaskSpec`: what an attention mask means, and how that is said to the kernels.

    a band      key position in [query position - left, query position + right]
    key ranges  row i sees keys begin <= j < end: documents, chunks, blocks, and bands whose offset is on the device
    mask        boolean, whatever is left: the 2-D padding mask (broadcast over rows), and functions not recognised

Everything is lowered when the mask is built: a static cache advances its offset in place during the forward.
`mask_functions` makes these of the masks transformers composes.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch

# Called with a reason when a mask is turned into the dense tensor a model's own code asked for.
on_materialise = None

UNLIMITED = 1 << 30  # the reach of a band without an end


# ---- key ranges: for each row, the keys begin <= j < end ----


def run_bounds(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each position, where the run of equal ids it lies in begins and ends."""
    total = ids.shape[1]
    position = torch.arange(total, device=ids.device).expand(ids.shape[0], -1)
    change = ids[:, 1:] != ids[:, :-1]
    edge = change.new_ones((ids.shape[0], 1))
    begin = torch.where(torch.cat([edge, change], 1), position, 0).cummax(1).values
    end = torch.where(torch.cat([change, edge], 1), position + 1, total).flip(1).cummin(1).values.flip(1)
    return begin, end


def ranges_of(intervals: list, q_length: int, kv_length: int, kv_offset: int):
    """Absolute intervals, all of which must hold, as int32 key ranges [batch or 1, q_length, 2]."""
    if not intervals:
        return None
    begin, end = intervals[0]
    for other_begin, other_end in intervals[1:]:
        begin, end = torch.maximum(begin, other_begin), torch.minimum(end, other_end)
    ranges = torch.stack(torch.broadcast_tensors(begin, end), -1) - kv_offset
    return ranges.clamp(0, kv_length).to(torch.int32)


def document_ranges(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, q_length: int) -> torch.Tensor:
    """Key ranges [1, q_length, 2] of documents packed one after another; rows behind the last document see nothing."""
    rows = torch.arange(q_length, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    document = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True)
    edges = torch.cat([cu_seqlens_k, cu_seqlens_k[-1:]]).to(torch.int32)
    return torch.stack([edges[document], edges[document + 1]], -1)[None]


def readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be asked for: not while a graph is traced or captured, nor on the meta device."""
    blind = torch.compiler.is_compiling() or tensor.is_meta
    return not (blind or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()))


def position_ranges(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Key ranges of the documents that position ids [batch, length] restart for; None when they never do.

    A document begins where positions return to 0. Rows whose positions also repeat or jump elsewhere count something
    else (the rows, columns or frames of images), and stay whole.

    Whether there are restarts is asked of the device once per forward, as transformers itself asks where there is no
    cache. While a graph is traced or captured, and on the meta device, it cannot be asked, and the ranges are always made.
    """
    breaks = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    packed = (~breaks | (position_ids == 0)).all(-1, keepdim=True)
    restarts = breaks & packed
    if readable(position_ids) and not bool(restarts.any()):
        return None
    return torch.stack(run_bounds(restarts.cumsum(-1)), -1).to(torch.int32)


# ---- the mask ----


class Lowered(NamedTuple):
    """A mask in the words of `Call`, for keys [:key_length] (the rest is hidden from every row)."""

    key_length: int
    window_left: int
    window_right: int
    key_ranges: torch.Tensor | None
    mask: torch.Tensor | None


def lower_band(left: int, right: int, shift: int, q_length: int, k_length: int):
    """A band around j = i + shift as (key_length, window_left, window_right), which align bottom-right.

    Keys beyond the last row's reach are cut off, so a static cache's top-left prefill is plain causal on fewer keys.
    None where rows lie so far beyond the keys that a window cannot say it.
    """
    if left >= UNLIMITED and right >= UNLIMITED:
        return k_length, -1, -1
    key_length = k_length
    if right < UNLIMITED and q_length + shift + right < k_length:
        key_length = q_length + shift + right
        if key_length <= 0:
            return None
    slack = shift - (key_length - q_length)
    window_left = -1
    if left < UNLIMITED:
        window_left = left - slack
        if window_left < 0:
            return None
    return key_length, window_left, right + slack if right < UNLIMITED else -1


class MaskSpec:
    """The meaning of one attention mask, shared by every layer of one forward.

    flashpatch's attention reads it through `lower`. To everybody else it is the additive tensor that eager attention
    would have got: [batch, 1, q_length, kv_length], 0 where a key may be seen and the dtype's lowest number elsewhere,
    made when somebody first computes with it.
    """

    def __init__(
        self, batch_size, q_length, kv_length, dtype, device, left, right, shift, key_ranges, mask, *,
        given=False, dense=False, on_device=False, words=(),
    ):  # fmt: skip
        self.batch_size, self.q_length, self.kv_length = batch_size, q_length, kv_length
        self.dtype, self.device = dtype, device
        self.left, self.right, self.shift = left, right, shift
        self.key_ranges, self.mask = key_ranges, mask
        self.given = given  # a 2-D attention mask was passed
        self.dense = dense  # `mask` holds functions that were not recognised
        self.on_device = on_device  # the query offset is known to the device only
        self.words = words
        self.joined = None  # (the tensor that says where documents begin, this spec with them)
        self.moved = {}
        self.tensor = None

    def __repr__(self):
        return f"MaskSpec({', '.join(self.words) or 'everything'}, {list(self.shape)}, {self.dtype})"

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def packed(self) -> bool:
        return "packed" in self.words

    def same_for_all_rows(self) -> bool:
        """Whether nothing but padding is hidden: then one row of it stands for any number of them."""
        unlimited = self.left >= UNLIMITED and self.right >= UNLIMITED
        return unlimited and self.key_ranges is None and (self.mask is None or self.mask.shape[-2] == 1)

    def hides_nothing(self) -> bool:
        return self.mask is None and self.same_for_all_rows()

    def lower(self, k_length: int) -> Lowered:
        """This mask for `k_length` keys (at most `kv_length`: newer keys are then cut off)."""
        band = lower_band(self.left, self.right, self.shift, self.q_length, k_length)
        key_ranges = self.key_ranges
        if band is None:
            rows = torch.arange(self.q_length, device=self.device)[None] + self.shift
            intervals = [(rows - self.left, rows + self.right + 1)]
            if key_ranges is not None:
                intervals.append((key_ranges[..., 0], key_ranges[..., 1]))
            key_ranges = ranges_of(intervals, self.q_length, k_length, 0)
            band = k_length, -1, -1
        key_length, window_left, window_right = band
        mask = self.mask
        if mask is not None and mask.shape[-1] != key_length:
            mask = mask[..., :key_length]
        return Lowered(key_length, window_left, window_right, key_ranges, mask)

    def with_ranges(self, source: torch.Tensor, ranges: torch.Tensor | None) -> MaskSpec:
        """This mask and the documents in `ranges`; remembered under `source`, the tensor they come from."""
        spec = self
        if ranges is not None:
            if self.key_ranges is not None:
                ranges = torch.stack(
                    [
                        torch.maximum(self.key_ranges[..., 0], ranges[..., 0]),
                        torch.minimum(self.key_ranges[..., 1], ranges[..., 1]),
                    ],
                    -1,
                )
            spec = self._replace(key_ranges=ranges, words=(*self.words, "packed"))
        if not torch.compiler.is_compiling():
            self.joined = (source, spec)
        return spec

    def _replace(self, **changes) -> MaskSpec:
        values = {
            "batch_size": self.batch_size, "q_length": self.q_length, "kv_length": self.kv_length,
            "dtype": self.dtype, "device": self.device, "left": self.left, "right": self.right, "shift": self.shift,
            "key_ranges": self.key_ranges, "mask": self.mask, "given": self.given, "dense": self.dense,
            "on_device": self.on_device, "words": self.words,
        }  # fmt: skip
        values.update(changes)
        return MaskSpec(**values)

    # ---- as a tensor, for everybody else ----

    def visible(self) -> torch.Tensor:
        """Boolean [batch, 1, q_length, kv_length], True where a key may be seen."""
        column = torch.arange(self.kv_length, device=self.device)
        diagonal = torch.arange(self.q_length, device=self.device)[:, None] + self.shift
        visible = (column >= diagonal - self.left) & (column <= diagonal + self.right)
        visible = visible[None, None]
        if self.key_ranges is not None:
            begin, end = self.key_ranges[:, None, :, :1], self.key_ranges[:, None, :, 1:]
            visible = visible & (column >= begin) & (column < end)
        if self.mask is not None:
            visible = visible & self.mask
        return visible.expand(self.shape)

    def materialise(self) -> torch.Tensor:
        """Eager's additive mask."""
        if self.tensor is None:
            if on_materialise is not None and not torch.compiler.is_compiling():
                on_materialise("the model computes with the mask itself")
            zero = torch.zeros((), dtype=self.dtype, device=self.device)
            self.tensor = torch.where(self.visible(), zero, torch.finfo(self.dtype).min)
        return self.tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch_size, 1, self.q_length, self.kv_length))

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> MaskSpec:
        return self

    def detach(self) -> MaskSpec:
        return self

    def to(self, *args, **kwargs):
        """As Tensor.to. Other devices and floating dtypes stay a MaskSpec; any other dtype is a tensor."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device = self.device if device is None else device
        dtype = self.dtype if dtype is None else dtype
        if not dtype.is_floating_point:
            return self.materialise().to(*args, **kwargs)
        if device == self.device and dtype == self.dtype:
            return self
        moved = self.moved.get((device, dtype))
        if moved is None:

            def move(tensor):
                return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

            moved = self._replace(device=device, dtype=dtype, key_ranges=move(self.key_ranges), mask=move(self.mask))
            self.moved[device, dtype] = moved
        return moved

    def __getitem__(self, index):
        if isinstance(index, tuple) and len(index) == 4 and all(isinstance(part, slice) for part in index):
            *outer, columns = index
            keeps_rows = all(part == slice(None) for part in outer)
            if keeps_rows and columns.start in (None, 0) and columns.step in (None, 1):
                if columns.stop is None or columns.stop >= self.kv_length:
                    return self
                if columns.stop >= 0:
                    return self._first(columns.stop)
        return self.materialise()[index]

    def _first(self, k_length: int) -> MaskSpec:
        mask = self.mask
        if mask is not None and mask.shape[-1] != 1:
            mask = mask[..., :k_length]
        return self._replace(kv_length=k_length, mask=mask)

    def __len__(self):
        return self.batch_size

    def __iter__(self):
        return iter(self.materialise())

    def __bool__(self):
        return bool(self.materialise())

    __hash__ = object.__hash__

    def __getattr__(self, name):
        if name.startswith("__") or name not in _TENSOR_NAMES:
            raise AttributeError(f"'MaskSpec' object has no attribute {name!r}")
        return getattr(self.materialise(), name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*_as_tensors(args), **_as_tensors(kwargs or {}))


_TENSOR_NAMES = frozenset(name for name in dir(torch.Tensor) if not name.startswith("__"))


def _as_tensors(value):
    if isinstance(value, MaskSpec):
        return value.materialise()
    if isinstance(value, (tuple, list)):
        return type(value)(_as_tensors(part) for part in value)
    if isinstance(value, dict):
        return {name: _as_tensors(part) for name, part in value.items()}
    return value


def _forward_operators() -> None:
    """Arithmetic and comparison on a MaskSpec are arithmetic and comparison on eager's tensor."""

    def binary(function):
        return lambda self, other: function(self.materialise(), _as_tensors(other))

    def reflected(function):
        return lambda self, other: function(_as_tensors(other), self.materialise())

    def unary(function):
        return lambda self: function(self.materialise())

    for name in ("add", "sub", "mul", "truediv", "matmul", "and", "or", "xor", "pow", "mod", "floordiv"):
        function = getattr(operator, f"__{name}__")
        setattr(MaskSpec, f"__{name}__", binary(function))
        setattr(MaskSpec, f"__r{name}__", reflected(function))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(MaskSpec, f"__{name}__", binary(getattr(operator, name)))
    for name in ("neg", "invert", "abs"):
        setattr(MaskSpec, f"__{name}__", unary(getattr(operator, name)))


_forward_operators()
