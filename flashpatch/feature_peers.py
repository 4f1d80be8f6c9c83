"""What users have for a feature today: SDPA's efficient backend, compiled FlexAttention and eager attention.

Each gives one callable that runs a forward, or a backward through a graph it keeps, on tensors [batch, seqlen, heads,
head_dim] and a Call; None where it has no such feature, or needs the lengths of sequences on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .call import Call


def sdpa_efficient(q, k, v, call: Call, direction: str) -> Callable | None:
    """With a mask or a bias, and without any. It takes a bias in the dtype of q only; one in fp32 is rounded beforehand."""
    both = call.mask is not None and call.bias is not None
    if both or not _is_plain(replace(call, mask=None, bias=None)) or q.shape[-2] != k.shape[-2]:
        return None
    bias = None if call.bias is None else _without_copies(call.bias).to(q.dtype)

    def attend(q, k, v, *bias):
        added = bias[0].expand(call.bias.shape) if bias else call.mask
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=call.softmax_scale)

    return _run(attend, q, k, v, call, direction, bias)


def flex(q, k, v, call: Call, direction: str) -> Callable | None:
    """torch.compile(flex_attention) with a block mask for windows and masks, and a score_mod for softcap and ALiBi."""
    if _is_packed(call) or call.dropout_p or call.sinks is not None or call.bias is not None or call.deterministic:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    left, right, mask, ranges = call.window_left, call.window_right, call.mask, call.key_ranges
    softcap, slopes = call.softcap, call.alibi_slopes

    def visible(b, h, i, j):
        seen = j >= 0
        if left >= 0:
            seen = seen & (j >= i - left)
        if right >= 0:
            seen = seen & (j <= i + right)
        if mask is not None:
            seen = seen & mask[b, h, i, j]
        if ranges is not None:
            seen = seen & (j >= ranges[b, i, 0]) & (j < ranges[b, i, 1])
        return seen

    def score(x, b, h, i, j):
        if softcap > 0:
            x = softcap * torch.tanh(x / softcap)
        if slopes is not None:
            x = x - slopes[b, h] * (i - j).abs()
        return x

    blocks = None
    if left >= 0 or right >= 0 or mask is not None or ranges is not None:
        batch, heads = (q.shape[0] if ranges is not None else None), None
        if mask is not None:  # one block mask where all rows and heads have the same
            batch, heads = (
                size if stride else None for size, stride in zip(mask.shape[:2], mask.stride()[:2], strict=True)
            )
        blocks = create_block_mask(visible, batch, heads, q.shape[1], k.shape[1], device=q.device)
    changes = softcap > 0 or slopes is not None
    torch.compiler.reset()  # what is compiled is found by its code, which all features share, and only a few are kept
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q, k, v):
        gqa = q.shape[1] != k.shape[1]
        score_mod = score if changes else None
        return compiled(q, k, v, score_mod=score_mod, block_mask=blocks, scale=call.softmax_scale, enable_gqa=gqa)

    return _run(attend, q, k, v, call, direction)


def eager(q, k, v, call: Call, direction: str) -> Callable | None:
    """As transformers' eager attention: the whole score matrix, one additive mask, softmax in fp32."""
    if _is_packed(call) or call.deterministic:
        return None
    i = torch.arange(q.shape[1], device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)
    visible = torch.ones_like(i + j, dtype=torch.bool)
    if call.window_left >= 0:
        visible &= j >= i - call.window_left
    if call.window_right >= 0:
        visible &= j <= i + call.window_right
    if call.key_ranges is not None:
        first, end = call.key_ranges[:, None, :, :1], call.key_ranges[:, None, :, 1:]
        visible = visible & (j >= first) & (j < end)
    if call.mask is not None:
        visible = visible & call.mask
    added = []
    if not _is_plain(call) and not visible.all():
        added.append(torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min))
    if call.alibi_slopes is not None:
        added.append(-(call.alibi_slopes[:, :, None, None] * (i - j).abs()).to(q.dtype))
    group = q.shape[-2] // k.shape[-2]
    bias = None if call.bias is None else _without_copies(call.bias)

    def attend(q, k, v, *bias):
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(2, 3) * call.softmax_scale
        if call.softcap > 0:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        for addend in (*bias, *added):
            scores = scores + addend
        if call.sinks is not None:
            sinks = call.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        p = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
        return F.dropout(p, call.dropout_p) @ v

    return _run(attend, q, k, v, call, direction, bias)


PEERS = {"sdpa_efficient": sdpa_efficient, "flex": flex, "eager": eager}


def _is_packed(call: Call) -> bool:
    return call.cu_seqlens_q is not None or call.seqused_k is not None


def _is_plain(call: Call) -> bool:
    """Nothing is asked beyond softmax(q k^T) v."""
    nothing = (call.mask, call.bias, call.alibi_slopes, call.sinks, call.key_ranges, call.cu_seqlens_q, call.seqused_k)
    asked = call.softcap or call.dropout_p or call.deterministic or max(call.window_left, call.window_right) >= 0
    return not asked and all(x is None for x in nothing)


def _without_copies(bias: torch.Tensor) -> torch.Tensor:
    """A bias as it was before it was expanded."""
    return bias[tuple(slice(None) if stride else slice(0, 1) for stride in bias.stride())]


def _run(attend, q, k, v, call: Call, direction: str, bias: torch.Tensor | None = None) -> Callable:
    """attend(q, k, v) or attend(q, k, v, bias), or the backward of it; a bias has a gradient where the Call asks for it."""
    backward = direction == "backward"
    q, k, v = (tensor.transpose(1, 2).detach().requires_grad_(backward) for tensor in (q, k, v))
    others = () if bias is None else (bias.detach().requires_grad_(backward and call.bias_gradient),)
    if not backward:
        return lambda: torch.no_grad()(attend)(q, k, v, *others)
    out = attend(q, k, v, *others)
    dout = torch.randn_like(out)
    leaves = [tensor for tensor in (q, k, v, *others) if tensor.requires_grad]
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
