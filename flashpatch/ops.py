"""The operators `flashpatch::attention_forward` and `attention_backward`, and `attention`, the public call.

Everything that must not be traced (planning, counting, warning, falling back) happens inside the operators' bodies:
`torch.compile` sees one opaque node with a shape function, a backward and an autocast rule.
"""

from __future__ import annotations

import os

import torch

from . import fallback, launcher, planning
from .arguments import check
from .call import Call
from .compiler import CompileError
from .counting import DIRECT, layers, record_call, record_decline
from .problem import Decline, DeclinedError, Device, Plan, Problem, Reason

_DTYPE_NAMES = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64",
}  # fmt: skip

_CALL_SCHEMA = (
    "Tensor? bias, Tensor? mask, Tensor? key_ranges, Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? rng_state, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float softmax_scale, SymInt window_left, SymInt window_right, float softcap, float dropout_p, "
    "bool deterministic, bool strict, int layer"
)
_library = torch.library.Library("flashpatch", "DEF")
_library.define(f"attention_forward(Tensor q, Tensor k, Tensor v, {_CALL_SCHEMA}) -> (Tensor, Tensor)")
_library.define(
    "attention_backward(Tensor dout, Tensor? dlogsumexp, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    f"{_CALL_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_forward_op = torch.ops.flashpatch.attention_forward.default
_backward_op = torch.ops.flashpatch.attention_backward.default


# ---- deciding ----

_plans: dict[tuple, Plan | Decline] = {}
_failed: dict[tuple, Decline] = {}


def _decide(direction: str, q, k, v, call: Call) -> Plan | Decline:
    """The cached Plan or Decline of a call; the key is plain ints, strings and bools."""
    device = q.device
    emulate = device.type == "cpu" and os.environ.get("FLASHPATCH_EMULATE") == "1"
    causal = call.window_right == 0
    key = (
        direction, q.dtype, q.shape[-1], v.shape[-1], q.shape[-2] == k.shape[-2], causal,
        call.window_left >= 0 or call.window_right > 0, call.cu_seqlens_q is None, call.seqused_k is None,
        call.key_ranges is None, call.mask is None, call.bias is None, call.alibi_slopes is None, call.sinks is None,
        call.softcap == 0.0, call.dropout_p == 0.0, call.deterministic,
        device.index if device.type == "cuda" else emulate,
    )  # fmt: skip
    decision = _plans.get(key)
    if decision is None:
        problem = Problem(
            direction, _DTYPE_NAMES.get(q.dtype, str(q.dtype)), q.shape[-1], v.shape[-1], features(q, k, v, call)
        )
        decision = _plans[key] = _resolve(problem, device, emulate)
    return decision


def features(q, k, v, call: Call) -> frozenset[str]:
    """What a call asks for beyond plain attention, in the words of compat_matrix.yaml."""
    asked = {
        "causal": call.window_right == 0,
        "window": call.window_left >= 0 or call.window_right > 0,
        "gqa": q.shape[-2] != k.shape[-2],
        "unequal_head_dims": q.shape[-1] != v.shape[-1],
        "varlen": call.cu_seqlens_q is not None,
        "seqused_k": call.seqused_k is not None,
        "key_ranges": call.key_ranges is not None,
        "mask": call.mask is not None,
        "bias": call.bias is not None,
        "alibi": call.alibi_slopes is not None,
        "sinks": call.sinks is not None,
        "softcap": call.softcap != 0.0,
        "dropout": call.dropout_p != 0.0,
        "deterministic": call.deterministic,
    }
    return frozenset(name for name, wanted in asked.items() if wanted)


def _resolve(problem: Problem, device: torch.device, emulate: bool) -> Plan | Decline:
    target = device_of(device, emulate)
    if isinstance(target, Reason):
        return Decline(problem, (target,))
    reason = launcher.unavailable(target.backend)
    if reason is not None:
        return Decline(problem, (reason,))
    return planning.resolve(problem, target)


def device_of(device: torch.device, emulate: bool = False) -> Device | Reason:
    """The planner's Device behind a torch device, or why no kernel can run there."""
    if device.type == "cuda" and torch.version.cuda:
        facts = torch.cuda.get_device_properties(device)
        return planning.device_for(
            (facts.major, facts.minor), facts.name, shared_memory=facts.shared_memory_per_block_optin,
            multiprocessors=facts.multi_processor_count, index=device.index or 0,
        )  # fmt: skip
    if emulate:
        return planning.device_for((8, 0), "CPU emulator (Ampere)", backend="emulated")
    return Reason("no_gpu", f"the tensors are on {device.type}; kernels run on NVIDIA GPUs")


def clear_plans() -> None:
    """Forget every decision (after an environment variable changed, in tests)."""
    _plans.clear()


# ---- the operators' bodies ----


def _call(bias, mask, key_ranges, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, rng_state, max_seqlen_q,
          max_seqlen_k, softmax_scale, window_left, window_right, softcap, dropout_p, deterministic, q,
          k) -> Call:  # fmt: skip
    """The Call the layers below trust: broadcasts expanded by stride 0, windows that hide nothing dropped."""
    if window_left >= max_seqlen_k - 1 >= 0:
        window_left = -1
    if window_right >= max_seqlen_q - 1 and (cu_seqlens_q is None or window_right > 0):
        window_right = -1
    if q.dim() == 4:
        batch, seqlen_q, heads, _ = q.shape
        shape = (batch, heads, seqlen_q, k.shape[1])
        if bias is not None:
            bias = bias.expand(shape)
        if mask is not None:
            mask = mask.expand(shape)
        if key_ranges is not None:
            key_ranges = key_ranges.expand(batch, seqlen_q, 2)
        if alibi_slopes is not None:
            alibi_slopes = alibi_slopes.expand(batch, heads)
    elif alibi_slopes is not None:
        alibi_slopes = alibi_slopes.expand(cu_seqlens_q.shape[0] - 1, q.shape[1])
    return Call(
        softmax_scale, max_seqlen_q, max_seqlen_k, window_left, window_right, softcap, dropout_p, deterministic,
        bias, mask, key_ranges, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, rng_state,
    )  # fmt: skip


def _attention_forward(q, k, v, *arguments):
    *arguments, strict, layer = arguments
    call = _call(*arguments, q, k)
    counts = layers[layer]
    record_call(counts)
    decision = _decide("forward", q, k, v, call)
    if decision.__class__ is Plan:
        try:
            out, logsumexp, copies = launcher.forward(decision, q, k, v, call)
            counts.copies += copies
            counts.launched(decision)
            return out, logsumexp
        except CompileError as error:
            decision = _remember(decision, error)
    _declined(decision, layer, strict)
    return fallback.forward(q, k, v, call)


def _attention_backward(dout, dlogsumexp, q, k, v, out, logsumexp, *arguments):
    *arguments, strict, layer = arguments
    call = _call(*arguments, q, k)
    counts = layers[layer]
    decision = _decide("backward", q, k, v, call)
    gradients = None
    if decision.__class__ is Plan:
        try:
            *gradients, copies = launcher.backward(decision, dout, dlogsumexp, q, k, v, out, logsumexp, call)
            counts.copies += copies
            counts.launched(decision)
        except CompileError as error:
            decision = _remember(decision, error)
    if gradients is None:
        _declined(decision, layer, strict)
        gradients = fallback.backward(dout, dlogsumexp, q, k, v, out, logsumexp, call)
    dq, dk, dv, dbias, dsinks = gradients
    bias, sinks = arguments[0], arguments[4]
    return (
        dq, dk, dv,
        q.new_empty(0) if bias is None else dbias.sum_to_size(bias.shape).to(bias.dtype),
        q.new_empty(0) if sinks is None else dsinks.to(sinks.dtype),
    )  # fmt: skip


def _remember(plan: Plan, error: CompileError) -> Decline:
    """A kernel that cannot be built or loaded here is a decline from now on, never tried again per call."""
    decline = Decline(plan.problem, (error.reason,))
    for key, decision in _plans.items():
        if decision is plan:
            _plans[key] = decline
    return decline


def _declined(decline: Decline, layer: int, strict: bool) -> None:
    if strict or os.environ.get("FLASHPATCH_STRICT") == "1":
        raise DeclinedError(decline)
    for reason in decline.reasons:
        record_decline(layer, reason)


def _fake_forward(q, k, v, *arguments):
    cu_seqlens_q = arguments[5]
    shape = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(shape, dtype=dtype)


def _fake_backward(dout, dlogsumexp, q, k, v, out, logsumexp, *arguments):
    bias, sinks = arguments[0], arguments[4]

    def like(tensor):
        return q.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), like(bias), like(sinks)


# ---- autograd and autocast ----


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            out, logsumexp = _forward_op(q, k, v, *arguments)
        ctx.save_for_backward(q, k, v, out, logsumexp, *arguments[:9])
        ctx.scalars = arguments[9:]
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx, dout, dlogsumexp):
        q, k, v, out, logsumexp, *tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        with torch.no_grad():
            gradients = _backward_op(dout, dlogsumexp, q, k, v, out, logsumexp, *tensors, *ctx.scalars)
        if torch.is_grad_enabled():
            gradients = _OnceDifferentiable.apply(*gradients, q, k, v, dout, tensors[0], tensors[4])
        dq, dk, dv, dbias, dsinks = gradients
        others = [None] * (len(tensors) + len(ctx.scalars))
        others[0] = dbias if tensors[0] is not None else None
        others[4] = dsinks if tensors[4] is not None else None
        return dq, dk, dv, *others


class _OnceDifferentiable(torch.autograd.Function):
    """The five gradients as they are, tied to what they depend on: differentiating them raises instead of giving zero."""

    @staticmethod
    def forward(ctx, *gradients_and_inputs):
        return gradients_and_inputs[:5]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "flashpatch attention has no second derivative; for create_graph=True use the model's eager attention "
            '(model.set_attn_implementation("eager"), or Patch.restore())'
        )


def _autograd_forward(q, k, v, *arguments):
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (q, k, v, arguments[0], arguments[4])
    ):
        return _Attention.apply(q, k, v, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(q, k, v, *arguments)


def _autocast_forward(device_type: str):
    """Autocast as torch's own scaled_dot_product_attention does: fp32 inputs take the autocast dtype."""

    def forward(q, k, v, bias, *arguments):
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor):
            eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
            return tensor.to(dtype) if eligible else tensor

        with torch.amp.autocast(device_type, enabled=False):
            return _forward_op(cast(q), cast(k), cast(v), cast(bias), *arguments)

    return forward


for _key in ("CUDA", "CPU"):
    _library.impl("attention_forward", _attention_forward, _key)
    _library.impl("attention_backward", _attention_backward, _key)
    _library.impl("attention_forward", _autocast_forward(_key.lower()), f"Autocast{_key}")
_library.impl("attention_forward", _autograd_forward, "Autograd")
torch.library.register_fake("flashpatch::attention_forward", _fake_forward, lib=_library)
torch.library.register_fake("flashpatch::attention_backward", _fake_backward, lib=_library)


# ---- the public call ----


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
    deterministic: bool = False,
    return_logsumexp: bool = False,
    on_decline: str = "error",
):
    """Exact attention, softmax(softmax_scale * q k^T + bias) v, in tiles (FlashAttention-2, arXiv 2307.08691).

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim], or [total_q, num_heads_q, head_dim] with `cu_seqlens_q`.
            Any strides; the last one should be 1, else it is copied (and the copy counted).
        k: [batch, seqlen_k, num_heads_kv, head_dim]; num_heads_q must be a multiple of num_heads_kv. Query head h
            reads key head h // (num_heads_q // num_heads_kv).
        v: [batch, seqlen_k, num_heads_kv, head_dim_v].
        causal: row i sees keys up to i + seqlen_k - seqlen_q (bottom-right aligned).
        softmax_scale: default head_dim ** -0.5.
        window_size: (left, right) keys around that diagonal, both ends included, -1 unlimited.
        softcap: c > 0 replaces a score s by c * tanh(s / c) before bias and mask.
        bias: added to the scores, broadcast to [batch, num_heads_q, seqlen_q, seqlen_k]; gets a gradient.
        mask: boolean, True = attend, broadcast likewise.
        key_ranges: int32 [batch or 1, seqlen_q or 1, 2]; row i sees keys begin <= j < end. Packed documents,
            chunks, prefixes and image blocks without a dense mask.
        alibi_slopes: fp32 [num_heads_q] or [batch, num_heads_q]; adds -slope * |i + seqlen_k - seqlen_q - j|.
        sinks: [num_heads_q], one logit per head that joins the softmax denominator only; gets a gradient.
        dropout_p: in [0, 1), on the probabilities; the mask is drawn from torch's generator of the device.
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], where each packed sequence begins; with them
            `max_seqlen_q` and `max_seqlen_k`, the longest of each.
        seqused_k: int32 [batch], keys in use; `causal` and `window_size` align to it.
        deterministic: gradients bit-equal from run to run (also under torch.use_deterministic_algorithms).
        return_logsumexp: also return log(sum(exp(scores))), fp32, natural log, [batch, num_heads_q, seqlen_q]
            (varlen: [num_heads_q, total_q]); differentiable.
        on_decline: "error" raises DeclinedError where no kernel takes the call; "fallback" computes it exactly with
            torch operators and counts it.

    Returns:
        out [batch, seqlen_q, num_heads_q, head_dim_v] in q's dtype; with `return_logsumexp`, (out, logsumexp).
        A row that sees no key is 0, its logsumexp -inf (or its sink), its gradients 0.

    Raises:
        ValueError, TypeError: arguments that contradict each other, each named.
        DeclinedError: no kernel takes the call and `on_decline="error"`; every reason at once.
    """
    problems = check(
        q, k, v, window_size=window_size, softcap=softcap, bias=bias, mask=mask, key_ranges=key_ranges,
        alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k,
        on_decline=on_decline,
    )  # fmt: skip
    if problems:
        raise ValueError("flashpatch.attention: " + "; ".join(problems))
    left, right = window_size
    call = Call(
        q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        q.shape[-3] if max_seqlen_q is None else max_seqlen_q,
        k.shape[-3] if max_seqlen_k is None else max_seqlen_k,
        left, 0 if causal else right, float(softcap), float(dropout_p), deterministic,
        _four_dimensional(bias), _four_dimensional(mask), key_ranges,
        alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k,
    )  # fmt: skip
    out, logsumexp = attend(q, k, v, call, DIRECT, strict=on_decline == "error")
    return (out, logsumexp) if return_logsumexp else out


def attend(q, k, v, call: Call, layer: int, strict: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """One checked call through the operator, counted under `layer`. Returns (out, logsumexp); shapes as in `attention`.

    Broadcastable masks and biases need four dimensions and are expanded inside. Dropout draws its seed here.
    """
    rng_state = call.rng_state
    if call.dropout_p > 0.0 and rng_state is None:
        rng_state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=q.device)
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype:
        q, k, v = _common_dtype(q, k, v)
    out, logsumexp = _forward_op(
        q, k, v, call.bias, call.mask, call.key_ranges, call.alibi_slopes, call.sinks, call.cu_seqlens_q,
        call.cu_seqlens_k, call.seqused_k, rng_state, call.max_seqlen_q, call.max_seqlen_k, call.softmax_scale,
        call.window_left, call.window_right, call.softcap, call.dropout_p,
        call.deterministic or torch.are_deterministic_algorithms_enabled(), strict, layer,
    )  # fmt: skip
    return out, logsumexp


def _common_dtype(q, k, v):
    """q, k, v of mixed dtypes: under autocast its rule applies below; without it the widest of the three."""
    if torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _four_dimensional(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.dim() == 4:
        return tensor
    return tensor[(None,) * (4 - tensor.dim())]
