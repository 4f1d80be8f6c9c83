"""Attention scores that are not computed yet: to a model's code a tensor, here a record of what it does to them.

Scaling, biases, masks, softmax and dropout are recorded, and the product with v ends the record. Whatever else is done to
scores is done to the tensor they stand for, computed from the model's own operations.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator

import torch

from .masks import MaskSpec


class Scores:
    """Attention scores, and after their softmax the probabilities: to the module a tensor, here a record of it.

    q and k are [batch, heads, length, head_dim]; `shape` is what the module sees, with batch and heads as one dimension
    or as two. `source` is the operation that gave this record, so that it can be computed after all.
    """

    __slots__ = (
        "bias", "changed", "dropout_p", "dtype", "k", "mask", "probabilities", "q", "reading", "scale", "shape", "source",
        "spec", "value",
    )  # fmt: skip

    def __init__(self, reading, q, k, shape, dtype, source):
        self.reading, self.q, self.k, self.shape, self.dtype, self.source = reading, q, k, shape, dtype, source
        self.scale, self.dropout_p, self.probabilities = 1.0, 0.0, False
        self.bias = self.mask = self.spec = self.value = None
        self.changed = False  # an operation in place that nothing here records has changed `value`: the record is void

    def derived(self, source, **changes) -> Scores:
        other = Scores(self.reading, self.q, self.k, self.shape, self.dtype, source)
        for name in ("scale", "dropout_p", "probabilities", "bias", "mask", "spec"):
            setattr(other, name, getattr(self, name))
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def become(self, result: Scores, function, args, kwargs) -> None:
        """An operation in place: these scores are its result from now on, and what they were is its argument."""
        before = self.derived(self.source, value=self.value)
        for name in Scores.__slots__:
            setattr(self, name, getattr(result, name))
        self.source = function, tuple(before if value is self else value for value in args), kwargs

    def tensor(self) -> torch.Tensor:
        """The tensor this stands for, from the module's own operations."""
        if self.value is None:
            function, args, kwargs = self.source
            self.value = function(*_computed(args), **_computed(kwargs))
        return self.value

    def __repr__(self):
        return f"{'probabilities' if self.probabilities else 'scores'} {list(self.shape)} of {self.reading.name}"

    # what a tensor says of itself

    @property
    def device(self):
        return self.q.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def __len__(self):
        return self.shape[0]

    def __getattr__(self, name):
        attribute = getattr(torch.Tensor, name)  # AttributeError as for a tensor
        if callable(attribute):
            return functools.partial(_operate, attribute, self)
        return getattr(_used(self, name), name)

    def __getitem__(self, index):
        return _used(self, "indexing")[index]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _operate(function, *args, **(kwargs or {}))

    # ---- scores in the shapes of q and k ----

    def aligned(self, other: torch.Tensor) -> torch.Tensor | None:
        """A tensor that the module broadcasts against these scores, as [batch, heads, rows, keys], any of them 1."""
        if other.dim() > self.ndim:
            return None
        other = other[(None,) * (self.ndim - other.dim())]
        if any(size not in (1, own) for size, own in zip(other.shape, self.shape, strict=True)):
            return None
        if not self.is_plain():
            return other.expand(self.shape).reshape(*self.q.shape[:2], self.q.shape[2], self.k.shape[2])
        if self.ndim == 4:
            return other
        if other.shape[0] == 1:
            return other[:, None]
        return other.reshape(self.q.shape[0], self.q.shape[1], *other.shape[1:])

    def is_plain(self) -> bool:
        """Whether the shape ends in rows and keys; while it does not, biases are added in a shape like [.., h, w, h, w]."""
        return self.ndim in (3, 4) and tuple(self.shape[-2:]) == (self.q.shape[2], self.k.shape[2])

    def regrouped(self, shape: tuple) -> Scores | None:
        """These scores in another shape, [batch * heads, rows, keys] and [batch, heads, rows, keys] above all."""
        outer = tuple(shape[:-2])
        batch, heads = self.q.shape[:2]
        if math.prod(shape) != math.prod(self.shape):
            return None
        plain = len(shape) in (3, 4) and tuple(shape[-2:]) == (self.q.shape[2], self.k.shape[2])
        if not plain or len(outer) == 1 or outer == (batch, heads):
            return self.derived(None, shape=torch.Size(shape))
        if heads != 1 or self.k.shape[1] != 1:
            return None

        def group(tensor):
            if tensor is None or tensor.shape[0] == 1:
                return tensor
            return tensor.reshape(*outer, *tensor.shape[2:])

        return self.derived(
            None,
            shape=torch.Size(shape),
            q=group(self.q),
            k=group(self.k),
            bias=group(self.bias),
            mask=group(self.mask),
        )


def _computed(value):
    if isinstance(value, Scores):
        return value.tensor()
    if isinstance(value, (tuple, list)):
        return type(value)(_computed(part) for part in value)
    if isinstance(value, dict):
        return {name: _computed(part) for name, part in value.items()}
    return value


def _used(scores: Scores, name: str) -> torch.Tensor:
    """The tensor after all, for an operation that nothing here records."""
    scores.reading.declined(f"its own code uses the scores themselves ({name})")
    return scores.tensor()


def _operate(function, *args, **kwargs):
    """An operation on scores: recorded, or done."""
    name = function.__name__.strip("_").removesuffix("_")
    scores = next((value for value in (*args, *kwargs.values()) if isinstance(value, Scores)), None)
    recorder = _RECORDERS.get(name)
    result = None
    in_place = function.__name__.endswith("_") and not function.__name__.endswith("__")
    known = recorder is not None and not (in_place and scores is not args[0])
    if scores is not None and not scores.changed and known and _fits(recorder, args, kwargs):
        result = recorder(*args, **kwargs)
    if result is None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Scores):
                _used(value, name)
        computed = function(*_computed(args), **_computed(kwargs))
        if in_place and isinstance(args[0], Scores):
            args[0].changed = True
        return computed
    if isinstance(result, Scores) and result is not scores:
        if in_place:
            scores.become(result, function, args, kwargs)
            return scores
        result.source = function, args, kwargs
    return result


def _fits(recorder, args, kwargs) -> bool:
    """Whether a recorder knows an operation called with these arguments."""
    try:
        _parameters(recorder).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


_parameters = functools.cache(inspect.signature)


# ---- operations that are recorded: None from any of them means that it is not ----


def _number(value, reading) -> float | None:
    """A scalar whose value the host knows."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad:
        if id(value) in reading.constants:
            return reading.constants[id(value)][1]
        if value.device.type == "cpu":
            return float(value)
    return None


def _scaled(scores, factor, inverse: bool):
    if not isinstance(scores, Scores):
        scores, factor = factor, scores
        if inverse:
            return None
    if scores.probabilities or isinstance(factor, Scores):
        return None
    number = _number(factor, scores.reading)
    if number is not None:
        number = 1.0 / number if inverse else number
        if not 0.0 < number < math.inf:
            return None
        bias = None if scores.bias is None else scores.bias * number
        return scores.derived(None, scale=scores.scale * number, bias=bias)
    if not isinstance(factor, torch.Tensor):
        return None
    factor = scores.aligned(factor)
    if factor is None or factor.shape[-1] != 1 or scores.mask is not None or scores.spec is not None:
        return None  # its sign is unknown, and a mask multiplied by it might no longer be one
    if inverse:
        factor = factor.reciprocal()
    bias = None if scores.bias is None else scores.bias * factor
    return scores.derived(None, q=scores.q * factor, bias=bias)


def _mul(scores, other):
    return _scaled(scores, other, False)


def _div(scores, other):
    return _scaled(scores, other, True)


def _add(scores, other):
    if not isinstance(scores, Scores):
        scores, other = other, scores
    if scores.probabilities or isinstance(other, Scores):
        return None
    if isinstance(other, MaskSpec):
        if (
            scores.spec is None
            and scores.is_plain()
            and other.shape[-2:] == scores.shape[-2:]
            and other.shape[0] in (1, scores.q.shape[0])
        ):
            return scores.derived(None, spec=other)
        other = other.materialise()
    if isinstance(other, (int, float)):
        return scores.derived(None) if math.isfinite(other) else None  # a softmax does not see it
    if not isinstance(other, torch.Tensor) or not other.is_floating_point():
        return None
    bias = scores.aligned(other)
    if bias is None:
        return None
    return scores.derived(None, bias=bias if scores.bias is None else scores.bias + bias)


def _kept(scores, keep: torch.Tensor, value):
    """Scores with all but `keep` replaced by a number so low that its exponential is 0."""
    number = _number(value, scores.reading)
    lowest = torch.finfo(scores.dtype).min
    keep = scores.aligned(keep)
    if scores.probabilities or keep is None or number is None or number > lowest / 2:
        return None
    return scores.derived(None, mask=keep if scores.mask is None else scores.mask & keep)


def _masked_fill(scores, mask, value):
    if not isinstance(scores, Scores) or not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return None
    return _kept(scores, ~mask, value)


def _where(condition, chosen, other):
    if not isinstance(condition, torch.Tensor) or condition.dtype != torch.bool:
        return None
    if isinstance(chosen, Scores):
        return _kept(chosen, condition, other)
    return _kept(other, ~condition, chosen)


def _maximum(scores, other):
    """The largest of the scores and the lowest number, which keeps -inf out of them."""
    if not isinstance(scores, Scores) or isinstance(other, Scores):
        return None
    number = _number(other, scores.reading)
    return scores.derived(None) if number is not None and number <= torch.finfo(scores.dtype).min else None


def _softmax(scores, dim=None, _stacklevel=3, dtype=None):
    if scores.probabilities or not scores.is_plain() or dim not in (-1, scores.ndim - 1):
        return None
    return scores.derived(None, probabilities=True, dtype=dtype or scores.dtype)


def _dropout(scores, p=0.5, training=True, inplace=False):
    if not training or p == 0.0:
        return scores
    if not scores.probabilities or scores.dropout_p or not scores.reading.module.training:
        return None
    return scores.derived(None, dropout_p=p)


def _to(scores, *args, **kwargs):
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if device not in (None, scores.device) or (dtype is not None and not dtype.is_floating_point):
        return None
    return scores.derived(None, dtype=dtype or scores.dtype)


def _view(scores, *shape):
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    if isinstance(shape, torch.dtype):
        return None
    shape = list(shape)
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = math.prod(scores.shape) // max(1, known)
    return scores.regrouped(tuple(shape))


def _shaped_as(tensor, scores):
    """Another tensor in the shape of the scores."""
    return None if isinstance(tensor, Scores) else tensor.reshape(scores.shape)


def _product(scores, v):
    """The product with v: the attention itself."""
    if not isinstance(scores, Scores) or not scores.probabilities or not isinstance(v, torch.Tensor):
        return None
    if not scores.is_plain() or v.dim() != scores.ndim or v.dtype != scores.dtype or v.shape[-2] != scores.shape[-1]:
        return None
    if v.dim() == 3:
        v = v.reshape(*scores.q.shape[:2], *v.shape[1:])
    if v.shape[:2] != scores.k.shape[:2]:
        return None
    return scores.reading.attend(scores, v)


_RECORDERS = {
    "mul": _mul, "multiply": _mul, "rmul": _mul, "imul": _mul, "div": _div, "divide": _div, "true_divide": _div,
    "truediv": _div, "itruediv": _div, "add": _add, "radd": _add, "iadd": _add, "masked_fill": _masked_fill,
    "where": _where, "max": _maximum, "maximum": _maximum, "softmax": _softmax, "dropout": _dropout, "to": _to,
    "float": lambda scores: _to(scores, torch.float32), "double": lambda scores: _to(scores, torch.float64),
    "half": lambda scores: _to(scores, torch.float16), "bfloat16": lambda scores: _to(scores, torch.bfloat16),
    "type": lambda scores, dtype: _to(scores, dtype), "type_as": lambda scores, other: _to(scores, other.dtype), "view": _view, "reshape": _view,
    "contiguous": lambda scores: scores, "matmul": _product, "bmm": _product,
    "reshape_as": _shaped_as, "view_as": _shaped_as,
}  # fmt: skip


def _operators() -> None:
    """Python's operators on scores, as those of a tensor."""

    def binary(name, reflected):
        function = getattr(torch.Tensor, name)

        def forward(self, other):
            return _operate(function, other, self) if reflected else _operate(function, self, other)

        return forward

    for symbol in ("add", "mul", "matmul", "truediv"):
        setattr(Scores, f"__{symbol}__", binary(f"__{symbol}__" if symbol == "matmul" else _METHODS[symbol], False))
    for symbol in ("add", "mul"):
        setattr(Scores, f"__r{symbol}__", binary(_METHODS[symbol], True))
    for symbol in ("sub", "pow", "neg", "lt", "le", "gt", "ge", "invert"):
        function = getattr(operator, symbol)

        def used(self, *others, function=function, symbol=symbol):
            return function(_used(self, symbol), *_computed(others))

        setattr(Scores, f"__{symbol}__", used)


_METHODS = {"add": "add", "mul": "mul", "truediv": "div"}
_operators()
