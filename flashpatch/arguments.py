"""The arguments of `flashpatch.attention`: what contradicts what, said in words before anything is launched."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Hashable

import torch

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)


def check(
    q, k, v, *, causal, softmax_scale, window_size, softcap, bias, mask, key_ranges, alibi_slopes, sinks, dropout_p, deterministic,
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, on_decline, descales=None,
) -> list[str]:  # fmt: skip
    """Everything wrong with one call's arguments, each with its value and what is allowed; empty when nothing is."""
    problems: list[str] = []
    descales = descales or {}
    _check_scalars(problems, causal, softmax_scale, window_size, softcap, dropout_p, deterministic, on_decline)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length is not None and not (is_integer(length) and length >= 0):
            problems.append(f"{name} is {_value(length)}; an int is needed, 0 or more")
    for name, tensor in (
        ("q", q), ("k", k), ("v", v), ("bias", bias), ("mask", mask), ("key_ranges", key_ranges),
        ("alibi_slopes", alibi_slopes), ("sinks", sinks), ("cu_seqlens_q", cu_seqlens_q),
        ("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k), *descales.items(),
    ):  # fmt: skip
        if tensor is None and name not in "qkv":
            continue
        if problem := not_dense(name, tensor):
            hint = (
                "; sequences of different lengths go end to end with cu_seqlens"
                if getattr(tensor, "is_nested", False)
                else ""
            )
            problems.append(problem + hint)
    if problems:
        return problems
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    layout = "[total, num_heads, head_dim] (with cu_seqlens)" if varlen else "[batch, seqlen, num_heads, head_dim]"
    rank = 3 if varlen else 4
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != rank:
            problems.append(f"{name} has shape {_shape(tensor)}; {layout} is needed")
        if tensor.dtype not in FLOATING:
            problems.append(
                f"{name} has dtype {tensor.dtype}; one of float16, bfloat16, float32, float64, float8_e4m3fn is needed"
            )
        if tensor.device != q.device:
            problems.append(f"{name} is on {tensor.device}, q on {q.device}; all must be on one device")
    if problems:
        return problems
    _check_shapes(problems, q, k, v, varlen)
    if not problems:
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
        _check_extras(problems, q, k, batch, bias, mask, key_ranges, alibi_slopes, sinks, varlen)
        _check_eight_bits(problems, q, k, v, batch, bias, sinks, descales)
        _check_lengths(problems, q, k, varlen, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    if not problems and mask is not None and seqused_k is None:
        _check_mask_beside_window(problems, mask, causal, window_size, q.shape[1], k.shape[1])
    return problems


def not_dense(name: str, value) -> str:
    """Why a value is no tensor that a kernel or torch's ordinary operators can compute with; empty if it is one."""
    if not isinstance(value, torch.Tensor):
        return f"{name} is {type(value).__name__}, not a torch.Tensor"
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.layout is torch.strided else str(value.layout).removeprefix("torch.")
        return f"{name} is a {kind} tensor; a dense (strided) one is needed"
    return ""


def _shape(tensor: torch.Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"


def _value(value) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    return repr(value) if isinstance(value, (str, int, float, tuple, list)) or value is None else type(value).__name__


NUMBERS = (numbers.Real, torch.SymInt, torch.SymFloat)
_INTEGERS = (numbers.Integral, torch.SymInt)
_LARGEST = torch.finfo(torch.float32).max


def is_integer(value) -> bool:
    return isinstance(value, _INTEGERS) and not isinstance(value, bool)


def is_finite(value) -> bool:
    """Whether a number is one in fp32, as kernels hold it: neither NaN nor too large."""
    if not isinstance(value, NUMBERS):
        return False
    exact = isinstance(value, (numbers.Rational, torch.SymInt, torch.SymFloat))
    return abs(value if exact else float(value)) <= _LARGEST


def _is_truth(value) -> bool:
    """True, False or what equals them, as NumPy's and 0 and 1 do. Not a tensor, whose value is not to be waited for."""
    if isinstance(value, (bool, torch.SymBool)):
        return True
    return isinstance(value, Hashable) and not isinstance(value, torch.Tensor) and value in (0, 1)


def _check_scalars(
    problems, causal, softmax_scale, window_size, softcap, dropout_p, deterministic, on_decline
) -> None:  # fmt: skip
    for name, value in (("causal", causal), ("deterministic", deterministic)):
        if not _is_truth(value):
            problems.append(f"{name} is {_value(value)}; True or False is needed")
    if softmax_scale is not None and not is_finite(softmax_scale):
        problems.append(
            f"softmax_scale is {_value(softmax_scale)}; it must be finite in fp32, or None for head_dim ** -0.5"
        )
    if not (isinstance(dropout_p, NUMBERS) and 0.0 <= dropout_p < 1.0):
        problems.append(f"dropout_p is {_value(dropout_p)}; it must be in [0, 1)")
    if not (is_finite(softcap) and softcap >= 0.0):
        problems.append(
            f"softcap is {_value(softcap)}; it must be finite and positive in fp32, or 0 for none: a number"
        )
    if not _is_window(window_size):
        problems.append(
            f"window_size is {_value(window_size)}; two numbers of keys (left, right) are needed, -1 for unlimited"
        )
    elif _is_truth(causal) and causal and window_size[1] > 0:
        left, right = map(int, window_size)
        problems.append(
            f"causal is True, which hides every key to the right, and window_size is {(left, right)}, which shows {right}; "
            f"pass causal=False for that window, or window_size=({left}, 0) or ({left}, -1) for a causal one"
        )
    if on_decline not in ("error", "fallback"):
        problems.append(f'on_decline is {on_decline!r}; it must be "error" or "fallback"')


def _is_window(window_size) -> bool:
    return (
        isinstance(window_size, (tuple, list))
        and len(window_size) == 2
        and all(is_integer(reach) and reach >= -1 for reach in window_size)
    )


def _check_shapes(problems: list[str], q, k, v, varlen: bool) -> None:
    if q.shape[-1] != k.shape[-1]:
        problems.append(f"q has head_dim {q.shape[-1]} and k has {k.shape[-1]}; they must be equal")
    if k.shape[:-1] != v.shape[:-1]:
        problems.append(f"k is {_shape(k)} and v is {_shape(v)}; they may differ in head_dim only")
    if not varlen and q.shape[0] != k.shape[0]:
        problems.append(f"q has batch {q.shape[0]} and k has {k.shape[0]}; they must be equal")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q % heads_kv:
        problems.append(f"q has {heads_q} heads and k has {heads_kv}; the first must be a multiple of the second")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        problems.append("head_dim is 0; at least 1 is needed")


def _check_extras(
    problems: list[str], q, k, batch: int, bias, mask, key_ranges, alibi_slopes, sinks, varlen: bool
) -> None:
    heads = q.shape[-2]
    if varlen:
        for name, tensor in (("bias", bias), ("mask", mask), ("key_ranges", key_ranges)):
            if tensor is not None:
                problems.append(f"{name} cannot be combined with cu_seqlens; use a padded batch with key_ranges")
    else:
        target = (q.shape[0], heads, q.shape[1], k.shape[1])
        for name, tensor in (("bias", bias), ("mask", mask)):
            if tensor is not None and not _broadcasts(tuple(tensor.shape), target):
                problems.append(
                    f"{name} has shape {_shape(tensor)}; it must broadcast to "
                    f"[batch, num_heads_q, seqlen_q, seqlen_k] = {list(target)}"
                )
        if key_ranges is not None and (
            key_ranges.dim() != 3 or not _broadcasts(tuple(key_ranges.shape), (q.shape[0], q.shape[1], 2))
            or key_ranges.shape[-1] != 2
        ):  # fmt: skip
            problems.append(
                f"key_ranges has shape {_shape(key_ranges)}; [batch or 1, seqlen_q or 1, 2] = "
                f"[{q.shape[0]}, {q.shape[1]}, 2] is needed"
            )
    if key_ranges is not None and key_ranges.dtype != torch.int32:
        problems.append(f"key_ranges has dtype {key_ranges.dtype}; int32 is needed")
    if mask is not None and mask.dtype != torch.bool:
        problems.append(f"mask has dtype {mask.dtype}; bool is needed (True = attend), an additive one goes to bias")
    if bias is not None and (not bias.is_floating_point() or bias.dtype.itemsize == 1):
        problems.append(
            f"bias has dtype {bias.dtype}; a floating-point one of 16 bits or more is needed, a boolean one goes to mask"
        )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        problems.append(f"sinks has shape {_shape(sinks)}; [num_heads_q] = [{heads}] is needed")
    for name, tensor in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if tensor is not None and not tensor.is_floating_point():
            problems.append(f"{name} has dtype {tensor.dtype}; a floating-point one is needed")
    if alibi_slopes is not None:
        allowed = ((heads,), (batch, heads))
        if tuple(alibi_slopes.shape) not in allowed:
            problems.append(
                f"alibi_slopes has shape {_shape(alibi_slopes)}; [{heads}] or [batch, {heads}] = [{batch}, {heads}] is needed"
            )
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            problems.append(
                "alibi_slopes requires a gradient, which nothing here gives it; pass alibi_slopes.detach(), "
                "or what it adds to the scores as bias, which gets one"
            )
    for name, tensor in (("bias", bias), ("mask", mask), ("key_ranges", key_ranges), ("alibi_slopes", alibi_slopes),
                         ("sinks", sinks)):  # fmt: skip
        if tensor is not None and tensor.device != q.device:
            problems.append(f"{name} is on {tensor.device}, q on {q.device}; all must be on one device")


def _check_eight_bits(problems: list[str], q, k, v, batch: int, bias, sinks, descales) -> None:
    """What goes with numbers of 8 bits: all three have them, factors, no gradients."""
    eight = [tensor.dtype.itemsize == 1 for tensor in (q, k, v)]
    if any(eight) and not all(eight):
        problems.append(f"q, k and v are {q.dtype}, {k.dtype}, {v.dtype}; float8_e4m3fn is taken for all three or none")
    if any(eight):
        for name, tensor in (("q", q), ("k", k), ("v", v), ("bias", bias), ("sinks", sinks)):
            if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
                problems.append(
                    f"{name} requires a gradient, and attention in 8 bits has a forward only; pass {name}.detach()"
                )
    target = (batch, k.shape[-2])
    for name, factors in descales.items():
        if factors is None:
            continue
        if not all(eight):
            problems.append(
                f"{name} belongs to q, k and v in float8_e4m3fn, and {name[0]} is {q.dtype}; scale {name[0]} itself"
            )
        elif factors.dtype != torch.float32 or not _broadcasts(tuple(factors.shape), target):
            problems.append(
                f"{name} is {factors.dtype} {_shape(factors)}; float32 that broadcasts to [batch, num_heads_kv] = {list(target)} is needed"
            )
        elif factors.device != q.device:
            problems.append(f"{name} is on {factors.device}, q on {q.device}; all must be on one device")
        elif factors.requires_grad and torch.is_grad_enabled():
            problems.append(f"{name} requires a gradient, which nothing here gives it; pass {name}.detach()")
        elif _can_be_read(factors) and not bool(((factors >= 0) & factors.isfinite()).all()):
            wrong = factors[~((factors >= 0) & factors.isfinite())]
            problems.append(f"{name} has the value {float(wrong[0])}; factors must be finite and not negative")


def _check_mask_beside_window(problems: list[str], mask, causal, window_size, seqlen_q: int, seqlen_k: int) -> None:
    """A mask that is a window of its own, of another reach: one of the two is a mistake. Any other mask (documents, padding,
    holes) says something else than how far a query sees, and a key is then seen where both show it."""
    left, right = map(int, window_size)
    given = (left if left < seqlen_k - 1 else -1, 0 if causal else right if right < seqlen_q - 1 else -1)
    if given == (-1, -1) or not _can_be_read(mask):
        return
    own = _window_of(mask, seqlen_q, seqlen_k)
    if own is not None and any(-1 not in pair and pair[0] != pair[1] for pair in zip(own, given, strict=True)):
        problems.append(
            f"mask is a window of its own, {own}, and window_size with causal is {given}; pass one of them, or twice the same"
        )


def _window_of(mask: torch.Tensor, seqlen_q: int, seqlen_k: int) -> tuple[int, int] | None:
    """(left, right) of a mask that is nothing but a window around the bottom-right diagonal, -1 where it has no end; else None."""
    if mask.dim() < 2 or mask.shape[-2:] != (seqlen_q, seqlen_k) or min(seqlen_q, seqlen_k) < 2 or mask.numel() == 0:
        return None
    first = mask[(0,) * (mask.dim() - 2)]
    if not (torch.equal(first[1:, 1:], first[:-1, :-1]) and torch.equal(mask, first.expand_as(mask))):
        return None
    nearest = seqlen_k - seqlen_q  # the key on the diagonal of query 0
    by_distance = torch.cat([first[1:, 0].flip(0), first[0]])  # from -(seqlen_q - 1) - nearest on
    shown = by_distance.nonzero().flatten()
    if len(shown) == 0 or int(shown[-1] - shown[0]) >= len(shown):
        return None
    begin, end = int(shown[0]), int(shown[-1])
    left, right = seqlen_q - 1 + nearest - begin, end - (seqlen_q - 1) - nearest
    if left == right == 0:  # documents of a token each are that, too
        return None
    return left if begin > 0 else -1, right if end < seqlen_q + seqlen_k - 2 else -1


def _can_be_read(tensor: torch.Tensor) -> bool:
    """Whether values are there without waiting for a GPU: not while a graph is compiled, of a fake tensor, or under vmap."""
    return (
        tensor.device.type == "cpu"
        and tensor.__class__ is torch.Tensor
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _broadcasts(shape: tuple, target: tuple) -> bool:
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )


def _check_lengths(
    problems: list[str], q, k, varlen: bool, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k
) -> None:
    if varlen:
        if cu_seqlens_q is None or cu_seqlens_k is None:
            problems.append("cu_seqlens_q and cu_seqlens_k must be given together")
        if max_seqlen_q is None or max_seqlen_k is None:
            problems.append("cu_seqlens needs max_seqlen_q and max_seqlen_k, the longest sequence of each, as ints")
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        problems.append("max_seqlen_q and max_seqlen_k belong to cu_seqlens_q and cu_seqlens_k, which are missing")
    batch = None if varlen else q.shape[0]
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k)):
        if tensor is None:
            continue
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            problems.append(f"{name} is {tensor.dtype} {_shape(tensor)}; a contiguous int32 vector is needed")
        elif tensor.device != q.device:
            problems.append(f"{name} is on {tensor.device}, q on {q.device}; all must be on one device")
        elif name.startswith("cu_"):
            sequences = tensor.shape[0] - 1
            if sequences < 0 or (batch is not None and sequences != batch):
                problems.append(f"{name} has {sequences + 1} entries; batch + 1 are needed, as in the other cu_seqlens")
            batch = sequences if batch is None else batch
            if _can_be_read(tensor):
                longest = max_seqlen_q if name.endswith("q") else max_seqlen_k
                _check_offsets(problems, name, tensor, (q if name.endswith("q") else k).shape[0], longest)
        elif batch is not None and tensor.shape[0] != batch:
            problems.append(f"seqused_k has {tensor.shape[0]} entries for a batch of {batch}")
        elif _can_be_read(tensor):
            most = math.inf if varlen else k.shape[1]
            if not all(0 <= n <= most for n in tensor.tolist()):
                limit = "0 or more" if varlen else f"0 to {most}"
                problems.append(f"seqused_k is {tensor.tolist()[:8]}; numbers of keys are needed, {limit}")


def _check_offsets(problems: list[str], name: str, offsets: torch.Tensor, total: int, longest: int | None) -> None:
    """What can be seen without waiting for a GPU; kernels clamp the rest."""
    values = offsets.tolist()
    if values and (values[0] != 0 or values != sorted(values) or values[-1] > total):
        shown = str(values[:8])[:-1] + (", ...]" if len(values) > 8 else "]")
        problems.append(f"{name} is {shown}; it must start at 0, never decrease and end at most at {total}")
    elif longest is not None and (found := max((b - a for a, b in itertools.pairwise(values)), default=0)) > longest:
        problems.append(f"max_seqlen_{name[-1]} is {longest}, but {name} has a sequence of {found}")
