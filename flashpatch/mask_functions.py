"""transformers' mask functions, read back as structure: `recover` makes a MaskSpec of what a model asks for.

A mask function says for one (batch, head, query, key) whether the key may be seen. transformers builds it from a few
factories (causal, sliding window, chunk, packed documents, blocks of image tokens) and `and_masks` / `or_masks`.
Here such a composition becomes a band and key ranges; functions that are not recognised become a boolean mask.

Recovering asks the device nothing, except whether the blocks of a mask are contiguous (`_contiguous`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from .masks import UNLIMITED, MaskSpec, ranges_of, readable, run_bounds

# ---- mask functions as data: the same meanings as transformers', as partials whose arguments can be read ----


def _causal(batch, head, q, k):
    return k <= q


def _everything(batch, head, q, k):
    return q >= 0


def _conjunction(functions, batch, head, q, k):
    result = q.new_ones((), dtype=torch.bool)
    for function in functions:
        result = result & function(batch, head, q, k).to(result.device)
    return result


def _disjunction(functions, batch, head, q, k):
    result = q.new_zeros((), dtype=torch.bool)
    for function in functions:
        result = result | function(batch, head, q, k).to(result.device)
    return result


def _newer_than(window, batch, head, q, k):
    return k > q - window


def _near(window, batch, head, q, k):
    return abs(q - k) <= window


def _same_chunk(size, starts, batch, head, q, k):
    return (k - starts[batch]) // size == (q - starts[batch]) // size


def _same_document(ids, batch, head, q, k):
    return ids[batch, q] == ids[batch, k]


def _same_block(ids, batch, head, q, k):
    return (ids[batch, q] == ids[batch, k]) & (ids[batch, q] >= 0)


def _remapped(function, positions, batch, head, q, k):
    return function(batch, head, positions[batch, q], positions[batch, k])


# transformers' factory -> (what it returns, as a function above; the closure's variables in that order)
_FACTORIES = {
    "and_masks": (_conjunction, ("mask_functions",)),
    "or_masks": (_disjunction, ("mask_functions",)),
    "sliding_window_overlay": (_newer_than, ("sliding_window",)),
    "sliding_window_bidirectional_overlay": (_near, ("sliding_window",)),
    "chunked_overlay": (_same_chunk, ("chunk_size", "left_padding")),
    "packed_sequence_mask_function": (_same_document, ("packed_sequence_mask",)),
    "blockwise_overlay": (_same_block, ("block_sequence_ids",)),
    "remap_positions_for_packed_sequence": (_remapped, ("mask_function", "position_ids")),  # since 5.23
}
_taught = None  # transformers.masking_utils, once `teach` has seen it


def teach(masking_utils) -> None:
    """Learn transformers' mask functions, and let torch.compile build ours in their place.

    A compiled graph cannot look into closures, so while tracing (only) the factories return partials that can be read.
    """
    global _taught
    if _taught is masking_utils:
        return
    _taught = masking_utils
    for name, (function, variables) in _FACTORIES.items():
        factory = getattr(masking_utils, name, None)
        if factory is not None:
            polyfill = _variadic(function) if variables == ("mask_functions",) else _fixed(function)
            torch.compiler.substitute_in_graph(factory, skip_signature_check=True)(polyfill)


def _variadic(function):
    def factory(*mask_functions):
        return partial(function, mask_functions)

    return factory


def _fixed(function):
    def factory(*arguments):
        return partial(function, *arguments)

    return factory


def _read(function):
    """A mask function as a partial of one of the functions above (or one of them); None when it is unknown."""
    if isinstance(function, partial) or function is _causal or function is _everything:
        return function
    if _taught is None:
        return None
    if function is _taught.causal_mask_function:
        return _causal
    if function is _taught.bidirectional_mask_function:
        return _everything
    if torch.compiler.is_compiling():
        return None
    if getattr(function, "__module__", None) != _taught.__name__:
        return None
    factory, _, inner = function.__qualname__.partition(".<locals>.")
    target, variables = _FACTORIES.get(factory, (None, ()))
    if target is None or "." in inner:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if set(cells) != set(variables):
        return None
    return partial(target, *(cells[name].cell_contents for name in variables))


def _conjuncts(function) -> list:
    """The functions whose conjunction `function` is, each read where it can be."""
    read = _read(function)
    if read is None:
        return [function]
    if _is(read, _conjunction):
        return [part for inner in read.args[0] for part in _conjuncts(inner)]
    if _is(read, _remapped):
        return [partial(_remapped, part, read.args[1]) for part in _conjuncts(read.args[0])]
    return [read]


def _is(read, function) -> bool:
    """Whether a mask function that was read is one of `function`'s."""
    return isinstance(read, partial) and read.func is function


# ---- intervals: for each row, the keys begin <= j < end in absolute positions ----


class _Rows(NamedTuple):
    """The query rows a mask is for: absolute positions [1, q_length] and how to look per-position values up."""

    positions: torch.Tensor
    offset: object  # int, or a tensor when only the device knows
    trusted: bool  # document ids come from transformers' own detection, so they never decrease
    packed: bool  # the mask keeps documents apart, so only positions within a row's own document matter

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Per-position `values` [batch, total] at the rows."""
        if isinstance(self.offset, torch.Tensor):
            index = self.positions.clamp(0, values.shape[1] - 1).expand(values.shape[0], -1)
            return values.gather(1, index)
        return values[:, self.offset : self.offset + self.positions.shape[1]]


def _contiguous(ids: torch.Tensor) -> bool:
    """Whether equal ids (negative ones aside) are always neighbours.

    Only then are blocks intervals, and only the device knows: this waits for it, once per mask with image blocks.
    While a graph is traced or captured, or on the meta device, nobody can wait, and the blocks stay a dense mask.
    """
    if not readable(ids):
        return False
    before = torch.nn.functional.pad(ids, (1, 0), value=-1)[:, :-1]
    runs = ((ids >= 0) & (ids != before)).sum(1)
    ordered = ids.sort(1).values
    before = torch.nn.functional.pad(ordered, (1, 0), value=-1)[:, :-1]
    distinct = ((ordered >= 0) & (ordered != before)).sum(1)
    return bool((runs == distinct).all())


def _band(read) -> tuple[int, int] | None:
    """(left, right) reach of a band function, `UNLIMITED` when unlimited; None for anything else."""
    if read is _causal:
        return UNLIMITED, 0
    if read is _everything:
        return UNLIMITED, UNLIMITED
    if isinstance(read, partial):
        if read.func is _newer_than:
            return read.args[0] - 1, UNLIMITED
        if read.func is _near:
            return read.args[0], read.args[0]
    return None


def _interval(function, rows: _Rows):
    """(begin, end) of a function whose rows see one interval around themselves (or none); None when it has none."""
    read = _read(function)
    if read is None:
        return None
    band = _band(read)
    if band is not None:
        left, right = band
        if left < 0 or right < 0:
            return None
        return rows.positions - left, rows.positions + right + 1
    name, arguments = read.func, read.args
    if name is _conjunction or name is _disjunction:
        parts = [_interval(part, rows) for part in arguments[0]]
        if not parts or any(part is None for part in parts):
            return None
        begin, end = parts[0]
        for other_begin, other_end in parts[1:]:
            if name is _conjunction:
                begin, end = torch.maximum(begin, other_begin), torch.minimum(end, other_end)
            else:
                # Non-empty intervals all hold the row's own position, so their union is an interval.
                empty, other_empty = begin >= end, other_begin >= other_end
                begin, end = (
                    torch.where(empty, other_begin, torch.where(other_empty, begin, torch.minimum(begin, other_begin))),
                    torch.where(empty, other_end, torch.where(other_empty, end, torch.maximum(end, other_end))),
                )
        return begin, end
    if name is _remapped:
        inner, positions = _read(arguments[0]), arguments[1]
        if not rows.packed or inner is None:
            return None
        if _band(inner) is not None:
            return _interval(inner, rows)  # within a document positions and places differ by a constant
        if inner.func is _conjunction:
            return _interval(
                partial(_conjunction, [partial(_remapped, part, positions) for part in inner.args[0]]), rows
            )
        if inner.func is _same_chunk:
            size, starts = inner.args
            begin = rows.positions - (rows.take(positions) - starts[:, None]) % size
            return begin, begin + size
        return None
    if name is _same_chunk:
        size, starts = arguments
        starts = starts[:, None]
        begin = starts + (rows.positions - starts) // size * size
        return begin, begin + size
    if name is _same_document:
        (ids,) = arguments
        if not rows.trusted and not _contiguous(ids - ids.min()):
            return None
        begin, end = run_bounds(ids)
        return rows.take(begin), rows.take(end)
    if name is _same_block:
        (ids,) = arguments
        if not _contiguous(ids):
            return None
        begin, end = run_bounds(ids)
        return rows.take(begin), rows.take(torch.where(ids >= 0, end, 0))
    return None


# ---- a mask as a MaskSpec ----


_WORDS = (
    (_causal, "causal"),
    (_newer_than, "window"),
    (_near, "window"),
    (_same_chunk, "chunk"),
    (_same_document, "packed"),
    (_same_block, "blocks"),
    (_disjunction, "union"),
)


def _word(read) -> str | None:
    """What reports call a mask function. A loop, because guards of compiled graphs cannot look functions up."""
    if _is(read, _remapped):
        read = _read(read.args[0])
    function = read.func if isinstance(read, partial) else read
    for known, word in _WORDS:
        if function is known:
            return word
    return None


def recover(
    *, batch_size: int, q_length: int, kv_length: int, q_offset, kv_offset: int, mask_function, attention_mask,
    use_vmap: bool, dtype: torch.dtype, device, materialise,
) -> MaskSpec:  # fmt: skip
    """The MaskSpec of one mask transformers asks for.

    `q_offset` is an int, or a tensor where only the device knows (static caches). `attention_mask` is the 2-D
    padding mask or None. `materialise(function)` returns the dense boolean mask of a function that is not recognised.
    """
    on_device = isinstance(q_offset, torch.Tensor)
    positions = torch.arange(q_length, device=device)[None]
    parts = _conjuncts(mask_function)
    packed = any(_is(part, _same_document) for part in parts)
    rows = _Rows(positions + q_offset, q_offset, not use_vmap, packed)
    left = right = UNLIMITED
    ranges, unknown, words = [], [], []
    for part in parts:
        if packed and _is(part, _remapped) and _band(_read(part.args[0])) is not None:
            part = _read(part.args[0])
        band = _band(part)
        word = "unrecognised"
        if band is not None:
            left, right = min(left, band[0]), min(right, band[1])
            word = _word(part)
        else:
            interval = _interval(part, rows)
            if interval is None:
                unknown.append(part)
            else:
                ranges.append(interval)
                word = _word(part)
        if word:
            words.append(word)
    shift = 0
    if on_device:
        if left < UNLIMITED or right < UNLIMITED:
            ranges.append((rows.positions - left, rows.positions + right + 1))
            left = right = UNLIMITED
    else:
        shift = q_offset - kv_offset
    mask = None
    if unknown:
        mask = materialise(unknown)
    padding = _padding(attention_mask, kv_length, kv_offset)
    if padding is not None:
        words.append("padding")
        mask = padding if mask is None else mask & padding
    return MaskSpec(
        batch_size, q_length, kv_length, dtype, torch.device(device), left, right, shift,
        ranges_of(ranges, q_length, kv_length, kv_offset), mask,
        given=attention_mask is not None, dense=bool(unknown), on_device=on_device, words=tuple(words),
    )  # fmt: skip


def _padding(attention_mask, kv_length: int, kv_offset: int):
    """The 2-D mask of the keys at hand as [batch, 1, 1, kv_length]; None where it is known to hide nothing.

    On a GPU nobody knows without waiting for it, so the mask stays. Positions beyond the given mask are hidden.
    """
    if attention_mask is None:
        return None
    attention_mask = attention_mask.to(torch.bool)
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    if attention_mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(attention_mask.all()):
        return None
    return attention_mask[:, None, None, :]
