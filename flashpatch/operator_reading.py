"""What an attention operator was asked for, read from its name and arguments: whoever wrote it names them differently."""

from __future__ import annotations

from typing import Any

import torch

from . import counting, families
from .dense_tracking import MATMULS, SOFTMAX_BACKWARDS, SOFTMAXES, aten

HEADS_SECOND = {
    "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_flash_cpu", "sdpa_overrideable", "flex_eager", "native_mha",
}  # fmt: skip
MASKS = ("attn_mask", "attn_bias", "mask", "bias")
_FLEX_WORDS = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options")


def full_name(function) -> str:
    name = function.name() if callable(getattr(function, "name", None)) else str(function)
    if isinstance(function, torch._ops.HigherOrderOperator):
        return f"higher_order::{name}"
    return name.partition(".")[0] if "::" in name else name


def category(function) -> str:
    if function in MATMULS:
        return "matmul"
    if function in SOFTMAXES:
        return "softmax"
    if function in SOFTMAX_BACKWARDS:
        return "softmax_backward"
    if function is aten.clone.default:
        return "clone"
    name = full_name(function)
    if families.of_operator(name) is not None and name != "aten::_scaled_dot_product_attention_math":
        return "attention"
    if isinstance(function, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        function.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    ):
        return "composite"
    return "other"


def named(function, args, kwargs, words: dict[str, str] | None = None) -> dict[str, Any]:
    """The arguments of an operator by the names of its schema (or what `words` calls them)."""
    if isinstance(function, torch._ops.HigherOrderOperator):
        return {**dict(zip(_FLEX_WORDS, args, strict=False)), **kwargs}
    names = [argument.name for argument in function._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return {words[name]: value for name, value in named.items() if name in words} if words else named


def tensors(named: dict, tensors: list):
    for names in (("query", "key", "value"), ("q", "k", "v")):
        if all(isinstance(named.get(name), torch.Tensor) for name in names):
            return tuple(named[name] for name in names)
    dense = [tensor for tensor in tensors if tensor.dim() >= 3 and not tensor.is_nested]
    return tuple(dense[:3]) if len(dense) >= 3 else (None, None, None)


def shape(tensor: torch.Tensor, heads_last: bool) -> tuple[int, int, int, int]:
    """[batch, heads, seqlen, head_dim]."""
    shape = tuple(tensor.shape)
    if len(shape) == 5:  # xFormers' grouped heads
        shape = (shape[0], shape[1], shape[2] * shape[3], shape[4])
    if len(shape) == 3:
        shape = (1, *shape)
    return (shape[0], shape[2], shape[1], shape[3]) if heads_last else shape


def native(named: dict) -> list[tuple[int, int, int, int]]:
    """Shapes of q, k and v inside torch's C++ nn.MultiheadAttention and encoder layer, which project them themselves."""
    q = named.get("query", named.get("src"))
    heads = named.get("num_head", named.get("num_heads"))
    found = []
    for tensor in (q, named.get("key", q), named.get("value", q)):
        if tensor.is_nested:
            sizes = tensor._nested_tensor_size()
            batch, seqlen = len(sizes), int(sizes[:, 0].max())
        else:
            batch, seqlen = tensor.shape[:2]
        found.append((batch, heads, seqlen, named["embed_dim"] // heads))
    return found


def window(named: dict, side: str) -> int | None:
    for word in (f"window_{side}", f"window_size_{side}"):
        if isinstance(named.get(word), int):
            return named[word]
    pair = named.get("window_size")
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        return pair[side == "right"]
    return None


def features(named: dict) -> set[str]:
    found = set()
    if named.get("softcap"):
        found.add("softcap")
    if any(isinstance(named.get(word), torch.Tensor) for word in ("sinks", "s_aux", "sink", "learnable_sink")):
        found.add("sinks")
    if any(name.startswith("cu_seqlen") and isinstance(value, torch.Tensor) for name, value in named.items()):
        found.add("varlen")
    if isinstance(named.get("key_ranges"), torch.Tensor):
        found.add("key_ranges")
    if isinstance(named.get("alibi_slopes"), torch.Tensor):
        found.add("alibi")
    if named.get("dropout_p") or named.get("dropout"):
        found.add("dropout")
    return found


def pairs(named: dict, shapes, causal: bool, window: int | None) -> float:
    """Query-key pairs of one head that the call computes, over the batch."""
    starts = [
        value for name, value in named.items() if name.startswith("cu_seqlen") and isinstance(value, torch.Tensor)
    ]
    if starts:
        lengths = [value.diff().tolist() for value in (starts[0], starts[-1])]
    else:
        lengths = [[shapes[0][2]] * shapes[0][0], [shapes[1][2]] * shapes[0][0]]
    total = 0.0
    for rows, columns in zip(*lengths, strict=True):
        seen = rows * columns / 2 if causal and rows > 1 and columns >= rows else rows * columns
        total += min(seen, rows * (window + 1)) if window is not None else seen
    return total


# ---- flashpatch's own operators ----


def counted(named: dict):
    counts = counting.counts(named["layer"])
    return dict(counts.launches), dict(counts.declines)


def ran(named: dict, before) -> tuple[str, str, list[str]]:
    """(family, kernel, declines) of flashpatch's operator, by what it counted."""
    counts = counting.counts(named["layer"])
    kernels = [kernel for kernel, count in counts.launches.items() if count > before[0].get(kernel, 0)]
    declines = [
        f"{code}: {text}" for (code, text), count in counts.declines.items() if count > before[1].get((code, text), 0)
    ]
    if kernels:
        return "flashpatch", ", ".join(kernels), []
    return "flashpatch_fallback", "", declines
