"""The attention probabilities themselves, where a model asks for them: whether it does, and attention that has them."""

from __future__ import annotations

import torch

from . import counting, masks
from .call import Call
from .masks import MaskSpec


def attentions_collected() -> bool:
    """Whether a model collects attention weights by hooks, which it does not tell the attention function."""
    collector = _collector()
    if collector is None or (torch.compiler.is_compiling() and not collector.compiling):
        return False
    collected = collector.get()
    return bool(collected) and any("attentions" in name for name in collected)


def _collector():
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector


def with_weights(q, k, v, call: Call, layer: int):
    """Attention in plain torch, weights included: the whole score matrix, rounded where eager rounds."""
    if not torch.compiler.is_compiling():
        counting.layers[layer].called()
    groups = q.shape[2] // k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q, k.transpose(2, 3)) * call.softmax_scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.bias is not None:
        scores = scores + call.bias
    spec = MaskSpec(
        q.shape[0], q.shape[2], k.shape[2], q.dtype, q.device,
        call.window_left if call.window_left >= 0 else masks.UNLIMITED,
        call.window_right if call.window_right >= 0 else masks.UNLIMITED,
        k.shape[2] - q.shape[2], call.key_ranges, call.mask,
    )  # fmt: skip
    scores = scores.masked_fill(~spec.visible(), torch.finfo(scores.dtype).min)
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    if call.sinks is not None:
        weights = weights[..., :-1]
    weights = torch.dropout(weights, call.dropout_p, call.dropout_p > 0)
    return torch.matmul(weights, v.to(weights.dtype)).transpose(1, 2).contiguous(), weights
