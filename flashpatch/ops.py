"""`attention`, the public call, and `attend`, the way from a checked call to the operators.

A plain eager call goes straight to the operators' bodies; the dispatcher's way there costs as much as the launch.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from . import execution
from .arguments import check
from .call import Call
from .counting import DIRECT
from .known_calls import NOTHING, find, latest, remember
from .modes import autocast_dtype, is_eager, is_untraced
from .operators import TransformedAttention, expanded, flat, forward_op, needs_gradient, with_gradients

_must_be_deterministic = torch._C._get_deterministic_algorithms


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_ranges: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    deterministic: bool = False,
    return_logsumexp: bool = False,
    on_decline: str = "error",
):
    """Exact attention, softmax(softmax_scale * q k^T + bias) v, in tiles (FlashAttention-2, arXiv 2307.08691).

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim], or [total_q, num_heads_q, head_dim] with `cu_seqlens_q`.
            Any strides; the last one should be 1, else it is copied (and the copy counted). So it is where its head_dim is
            no multiple of 8 (float8_e4m3fn: 16), with zeros behind it, which `stats()` has as `padded`; k and v likewise.
        k: [batch, seqlen_k, num_heads_kv, head_dim]; num_heads_q must be a multiple of num_heads_kv. Query head h
            reads key head h // (num_heads_q // num_heads_kv).
        v: [batch, seqlen_k, num_heads_kv, head_dim_v].
        causal: row i sees keys up to i + seqlen_k - seqlen_q (bottom-right aligned); a `window_size` beside it shows none to
            the right: (left, 0) or (left, -1).
        softmax_scale: default head_dim ** -0.5.
        window_size: (left, right) keys around that diagonal, both ends included, -1 unlimited.
        softcap: c > 0 replaces a score s by c * tanh(s / c) before bias and mask.
        bias: added to the scores, broadcast to [batch, num_heads_q, seqlen_q, seqlen_k]; gets a gradient.
        mask: boolean, True = attend, broadcast likewise. A key is seen where causal, window_size, key_ranges and mask all
            show it; only a mask that is nothing but a window itself, of another reach than `window_size`, is an error
            (looked for where its values can be read without waiting for a GPU).
        key_ranges: int32 [batch or 1, seqlen_q or 1, 2]; row i sees keys begin <= j < end. Packed documents,
            chunks, prefixes and image blocks without a dense mask.
        alibi_slopes: fp32 [num_heads_q] or [batch, num_heads_q]; adds -slope * |i + seqlen_k - seqlen_q - j|.
        sinks: [num_heads_q], one logit per head that joins the softmax denominator only; gets a gradient.
        dropout_p: in [0, 1), on the probabilities; the mask is drawn from torch's generator of the device.
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], where each packed sequence begins; with them
            `max_seqlen_q` and `max_seqlen_k`, the longest of each. On a GPU their values are not looked at but
            clamped to the tensors: where they fall, results are of no use.
        seqused_k: int32 [batch], keys in use; `causal` and `window_size` align to it.
        q_descale, k_descale, v_descale: with q, k and v in float8_e4m3fn, what their numbers are to be multiplied by: fp32,
            finite and not negative, broadcast to [batch, num_heads_kv] (of q: for the query heads that read that key head); None is 1.
        deterministic: gradients bit-equal from run to run (also under torch.use_deterministic_algorithms).
        return_logsumexp: also return log(sum(exp(scores))), fp32, natural log, [batch, num_heads_q, seqlen_q]
            (varlen: [num_heads_q, total_q]); differentiable.
        on_decline: "error" raises DeclinedError where no kernel takes the call; "fallback" computes it exactly with
            torch operators and counts it.

    Returns:
        out [batch, seqlen_q, num_heads_q, head_dim_v] in q's dtype (of mixed q, k and v, cast as autocast does, else to
        the widest; of float8_e4m3fn bfloat16); with `return_logsumexp`, (out, logsumexp).
        A row that sees no key is 0, its logsumexp -inf (or its sink), its gradients 0.

    Raises:
        ValueError, TypeError: arguments that contradict each other, each named.
        DeclinedError: no kernel takes the call and `on_decline="error"`; every reason at once.
    """
    key = None
    if (
        bias is None and mask is None and key_ranges is None and alibi_slopes is None and sinks is None
        and cu_seqlens_q is None and cu_seqlens_k is None and seqused_k is None
        and (dropout_p.__class__ is float or dropout_p.__class__ is int) and dropout_p == 0
        and q_descale is None and k_descale is None and v_descale is None
        and max_seqlen_q is None and max_seqlen_k is None and is_untraced()
    ):  # fmt: skip
        try:
            left, right = window_size
            options = (  # classes too: 2 == 2.0 == Decimal(2), and `check` may refuse one where it takes the other
                causal, softmax_scale, softmax_scale.__class__, left, left.__class__, right, right.__class__,
                window_size.__class__, softcap, softcap.__class__, deterministic or _must_be_deterministic(), on_decline,
            )  # fmt: skip
            known = latest.get(options, NOTHING)
            if not (known.alike(q, k, v) and (known.tf32 is None or known.tf32 == execution.takes_tf32(torch.float32))):
                key, known = find(q, k, v, options)
        except (AttributeError, TypeError, ValueError, RuntimeError):  # what `check` will refuse
            known = None
        if known is not None:
            call, strict = known.call, on_decline == "error"
            if known.differentiable and torch.is_grad_enabled():
                return with_gradients(q, k, v, None, None, call, DIRECT, strict, False, return_logsumexp)
            out, logsumexp = execution.forward(q, k, v, call, DIRECT, strict, return_logsumexp)
            return (out, logsumexp) if return_logsumexp else out
    problems = check(
        q, k, v, causal=causal, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap, bias=bias, mask=mask, key_ranges=key_ranges,
        alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, deterministic=deterministic, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k,
        descales={"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}, on_decline=on_decline,
    )  # fmt: skip
    if problems:
        raise ValueError("flashpatch.attention: " + "; ".join(problems))
    left, right = window_size
    call = Call(
        q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        q.shape[-3] if max_seqlen_q is None else _integer(max_seqlen_q),
        k.shape[-3] if max_seqlen_k is None else _integer(max_seqlen_k),
        _integer(left), 0 if causal else _integer(right), float(softcap), float(dropout_p), bool(deterministic),
        _four_dimensional(bias), _four_dimensional(mask), key_ranges, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k,
        seqused_k, None, q_descale, k_descale, v_descale,
    )  # fmt: skip
    out, logsumexp = attend(q, k, v, call, DIRECT, on_decline == "error", return_logsumexp)
    if key is not None and call.expanded:
        call.ready = execution.prepare(q, k, v, call)
        remember(key, q, k, v, call)
    return (out, logsumexp) if return_logsumexp else out


def attend(
    q, k, v, call: Call, layer: int, strict: bool = False, statistics: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One checked call through the operators, counted under `layer`. Returns (out, logsumexp); shapes as in `attention`.

    `statistics=False`: logsumexp is not asked for and may be None.

    Broadcastable masks and biases have four dimensions and are expanded inside. Dropout draws its seed here.
    """
    if call.dropout_p > 0.0 and call.rng_state is None:
        call.rng_state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=q.device)
    if not call.deterministic and torch.are_deterministic_algorithms_enabled():
        call.deterministic = True
    if k.dtype != q.dtype or v.dtype != q.dtype:
        q, k, v = _common_dtype(q, k, v)
    if not is_eager(q):
        learned = (tensor for tensor in (call.bias, call.sinks, call.alibi_slopes) if tensor is not None)
        if _transformed(q, k, v, *learned):
            return TransformedAttention.apply(q, k, v, *flat(call), strict, layer)
        return forward_op(q, k, v, *flat(call), strict, layer)
    return _run(q, k, v, call, layer, strict, statistics)


def _transformed(*tensors: torch.Tensor) -> bool:
    """Whether torch.func differentiates here. Forward-mode derivatives are refused; their silence would be a zero."""
    if torch.compiler.is_compiling():
        return False
    names = {level.key().name for level in torch._C._functorch.get_interpreter_stack() or ()}
    dual = forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
    if "Jvp" in names or dual:
        raise NotImplementedError(
            "flashpatch attention has no forward-mode derivatives (jvp, jacfwd, hessian); use tensor.backward(), "
            "torch.autograd.grad, torch.func.grad, vjp or jacrev, or eager attention"
        )
    return "Grad" in names


def _run(q, k, v, call: Call, layer: int, strict: bool, statistics: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An eager call, straight to the bodies."""
    bias, sinks, differentiable = call.bias, call.sinks, needs_gradient(q, k, v, call)
    if not call.expanded:
        if call.is_plain():
            call = expanded(call, q, k)
        else:
            with torch.no_grad():
                call = expanded(call, q, k)
    if differentiable:
        result = with_gradients(q, k, v, bias, sinks, call, layer, strict, False, statistics)
        return result if statistics else (result, None)
    return execution.forward(q, k, v, call, layer, strict, statistics)


def _common_dtype(q, k, v):
    """q, k, v of mixed dtypes: under autocast its rule applies below; without it the widest of the three."""
    if autocast_dtype(q.device.type) is not None:
        return q, k, v
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _integer(value):
    """NumPy's integers and their like as Python's; one that a tracer keeps open stays it."""
    return value if isinstance(value, (int, torch.SymInt)) else int(value)


def _four_dimensional(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.dim() == 4:
        return tensor
    return tensor[(None,) * (4 - tensor.dim())]
