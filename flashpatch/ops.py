"""The operators `flashpatch::attention_forward` and `attention_backward`, and `attention`, the public call.

Everything that must not be traced (planning, counting, warning, falling back) happens in `execution`, inside the
operators' bodies: `torch.compile` sees one opaque node with a shape function, a backward and an autocast rule. A plain
eager call goes straight to the bodies; the dispatcher's way there costs as much as the launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from . import batching, execution, tensor_layouts
from .arguments import check
from .autocasting import autocast_dtype
from .call import DESCALES, TENSORS, Call, out_dtype
from .counting import DIRECT

_CALL_SCHEMA = (
    "Tensor? bias, Tensor? mask, Tensor? key_ranges, Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? rng_state, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, SymInt max_seqlen_q, SymInt max_seqlen_k, "
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


# ---- Call <-> the operators' flat arguments ----


def _flat(call: Call) -> tuple:
    """A Call in the order of _CALL_SCHEMA, without strict and layer."""
    return (
        call.bias, call.mask, call.key_ranges, call.alibi_slopes, call.sinks, call.cu_seqlens_q, call.cu_seqlens_k,
        call.seqused_k, call.rng_state, call.q_descale, call.k_descale, call.v_descale, call.max_seqlen_q, call.max_seqlen_k, call.softmax_scale, call.window_left,
        call.window_right, call.softcap, call.dropout_p, call.deterministic,
    )  # fmt: skip


def call_of(bias, mask, key_ranges, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, rng_state,
             q_descale, k_descale, v_descale, max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, softcap, dropout_p,
             deterministic) -> Call:  # fmt: skip
    """The Call that the operators' flat arguments stand for, in their order (less `strict` and `layer`)."""
    return Call(
        softmax_scale, max_seqlen_q, max_seqlen_k, window_left, window_right, softcap, dropout_p, deterministic, bias,
        mask, key_ranges, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, rng_state, q_descale, k_descale, v_descale,
    )  # fmt: skip


def expanded(call: Call, q, k) -> Call:
    """The Call as the layers below take it: broadcasts expanded by stride 0, windows that hide nothing dropped."""
    call.expanded = True
    if call.window_left >= call.max_seqlen_k - 1:
        call.window_left = -1
    if call.window_right >= call.max_seqlen_q - 1:
        call.window_right = -1
    if call.is_plain():
        return call
    batch = q.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    for name in DESCALES:
        given = getattr(call, name)
        if given is not None:
            setattr(call, name, given.float().expand(batch, k.shape[-2]).contiguous())
    if call.alibi_slopes is not None:
        call.alibi_slopes = call.alibi_slopes.float().contiguous().expand(batch, q.shape[-2])
    if call.sinks is not None:
        call.sinks = call.sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()
    if q.dim() == 4:
        batch, seqlen_q, heads, _ = q.shape
        shape = (batch, heads, seqlen_q, k.shape[1])
        if call.bias is not None:
            # a gradient has all elements of a bias that came expanded; and rows in one piece are read fastest
            given = call.bias
            repeated = given.requires_grad and 0 in given.stride()
            scattered = given.stride(-1) != 1 and given.shape[-1] > 1
            call.bias = (given.contiguous() if repeated or scattered else given).expand(shape)
        if call.mask is not None:
            call.mask = call.mask.expand(shape)
        if call.key_ranges is not None:
            ranges = call.key_ranges if call.key_ranges.stride(-1) == 1 else call.key_ranges.contiguous()
            call.key_ranges = ranges.expand(batch, seqlen_q, 2)
    return call


# ---- the operators' bodies ----


def _forward_body(q, k, v, *arguments):
    *arguments, strict, layer = arguments
    return execution.forward(q, k, v, expanded(call_of(*arguments), q, k), layer, strict)


def _backward_body(dout, dlogsumexp, q, k, v, out, logsumexp, *arguments):
    *arguments, strict, layer = arguments
    call = expanded(call_of(*arguments), q, k)
    gradients = execution.backward(dout, dlogsumexp, q, k, v, out, logsumexp, call, layer, strict)
    bias, sinks = arguments[0], arguments[4]
    # an operator returns tensors only: empty ones stand for gradients nobody asked for
    dbias, dsinks = (
        q.new_empty(0) if wanted is None else _like(gradient, wanted)
        for gradient, wanted in zip(gradients[3:], (bias, sinks), strict=True)
    )
    # contiguous, as _fake_backward promises
    return *(gradient.contiguous() for gradient in gradients[:3]), dbias, dsinks


def _like(gradient: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    if wanted.numel() == 0:
        return torch.zeros_like(wanted)
    return gradient.sum_to_size(wanted.shape).to(wanted.dtype).contiguous()


def _has_no_tensors(places: slice, arguments: tuple) -> bool:
    return all(argument is None for argument in arguments[places])


def _fake_forward(q, k, v, *arguments):
    cu_seqlens_q = arguments[5]
    shape = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype(q.dtype)), q.new_empty(shape, dtype=dtype)


def _fake_backward(dout, dlogsumexp, q, k, v, out, logsumexp, *arguments):
    bias, sinks = arguments[0], arguments[4]

    def like(tensor):
        return q.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), like(bias), like(sinks)


# ---- autograd and autocast ----


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out and logsumexp; the backward recomputes the scores (FlashAttention-2, Algorithm 2).

    `traced` says whether the bodies are reached through the operators, so that a tracer sees them. bias and sinks are
    arguments of their own because they get gradients. Without `statistics` the logsumexp is no output: one tensor
    less for autograd to wrap.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, call, layer, strict, traced, statistics):
        if traced:
            with torch._C._AutoDispatchBelowAutograd():
                out, logsumexp = _forward_op(q, k, v, *_flat(call), strict, layer)
        else:
            out, logsumexp = execution.forward(q, k, v, call, layer, strict)
        ctx.save_for_backward(q, k, v, out, logsumexp, bias, sinks)
        ctx.how = (call, layer, strict, traced)
        ctx.set_materialize_grads(False)
        return (out, logsumexp) if statistics else out

    @staticmethod
    def backward(ctx, dout, dlogsumexp=None):
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *_Attention.gradients(ctx, dout, dlogsumexp, *saved), None, None, None, None, None
        with torch.no_grad():
            gradients = _Attention.gradients(ctx, dout, dlogsumexp, *saved)
        q, k, v, _, _, bias, sinks = saved
        return *_OnceDifferentiable.apply(*gradients, q, k, v, dout, bias, sinks), None, None, None, None, None

    @staticmethod
    def gradients(ctx, dout, dlogsumexp, q, k, v, out, logsumexp, bias, sinks):
        call, layer, strict, traced = ctx.how
        if dout is None:
            dout = torch.zeros_like(out)
        inputs = (dout, dlogsumexp, q, k, v, out, logsumexp)
        call.bias_gradient = ctx.needs_input_grad[3]
        if traced:
            gradients = _backward_op(*inputs, *_flat(call), strict, layer)
        else:
            gradients = execution.backward(*inputs, call, layer, strict)
        dq, dk, dv, dbias, dsinks = gradients
        dbias = _like(dbias, bias) if dbias is not None and ctx.needs_input_grad[3] else None
        return dq, dk, dv, dbias, None if sinks is None else _like(dsinks, sinks)


# What torch's Function.apply comes down to where no function transform is active (`_is_eager`): 2 us less.
_apply = super(torch.autograd.Function, _Attention).apply


NO_SECOND_DERIVATIVE = (
    "flashpatch attention has no second derivative; for create_graph=True use the model's eager attention "
    '(model.set_attn_implementation("eager"), or Patch.restore())'
)


class _OnceDifferentiable(torch.autograd.Function):
    """The five gradients as they are, tied to what they depend on: differentiating them raises instead of giving 0."""

    @staticmethod
    def forward(ctx, *gradients_and_inputs):
        return gradients_and_inputs[:5]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


class _TransformedAttention(torch.autograd.Function):
    """The same for torch.func (grad, vjp, jacrev, and vmap of them), which needs every tensor as an argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        return _forward_op(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        ctx.save_for_backward(*output, *tensors)
        ctx.places = [isinstance(value, torch.Tensor) for value in inputs]
        ctx.values = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlogsumexp):
        out, logsumexp, *tensors = ctx.saved_tensors
        tensors = iter(tensors)
        inputs = [next(tensors) if place else value for place, value in zip(ctx.places, ctx.values, strict=True)]
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, dbias, dsinks = _TransformedBackward.apply(
            dout, dlogsumexp, *inputs[:3], out, logsumexp, *inputs[3:]
        )
        gradients = [None] * len(inputs)
        gradients[:3] = dq, dk, dv
        for index, gradient in ((3, dbias), (7, dsinks)):  # bias and sinks in the order of _CALL_SCHEMA
            gradients[index] = gradient if ctx.places[index] else None
        return tuple(gradients)


class _TransformedBackward(torch.autograd.Function):
    """The backward operator with no derivative of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        return _backward_op(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def _needs_gradient(q, k, v, call: Call) -> bool:
    return torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (call.bias is not None and call.bias.requires_grad)
        or (call.sinks is not None and call.sinks.requires_grad)
    )


def _autograd_forward(q, k, v, *arguments):
    *flat, strict, layer = arguments
    call = call_of(*flat)
    if _needs_gradient(q, k, v, call):
        return _Attention.apply(q, k, v, call.bias, call.sinks, call, layer, strict, True, True)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(q, k, v, *arguments)


def _autocast_forward(device_type: str):
    """Autocast as torch's own scaled_dot_product_attention does: fp32 inputs take the autocast dtype."""

    def forward(q, k, v, bias, *arguments):
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor):
            eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize in (2, 4)
            return tensor.to(dtype) if eligible else tensor

        with torch.amp.autocast(device_type, enabled=False):
            return _forward_op(cast(q), cast(k), cast(v), cast(bias), *arguments)

    return forward


for _key in ("CUDA", "CPU"):
    _library.impl("attention_forward", _forward_body, _key)
    _library.impl("attention_backward", _backward_body, _key)
    _library.impl("attention_forward", _autocast_forward(_key.lower()), f"Autocast{_key}")
_library.impl("attention_forward", _autograd_forward, "Autograd")
torch.library.register_fake("flashpatch::attention_forward", _fake_forward, lib=_library)
torch.library.register_fake("flashpatch::attention_backward", _fake_backward, lib=_library)
# of the tensors of _CALL_SCHEMA, which come first in it, some have no batch
for _name, _op, _own in (("forward", _forward_op, 3), ("backward", _backward_op, 7)):
    _plain = functools.partial(_has_no_tensors, slice(_own, _own + len(TENSORS)))
    torch.library.register_vmap(f"flashpatch::attention_{_name}", batching.rule(_op, _plain), lib=_library)


# ---- the public call ----

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
        and max_seqlen_q is None and max_seqlen_k is None and _is_untraced()
    ):  # fmt: skip
        try:
            left, right = window_size
            options = (  # classes too: 2 == 2.0 == Decimal(2), and `check` may refuse one where it takes the other
                causal, softmax_scale, softmax_scale.__class__, left, left.__class__, right, right.__class__,
                window_size.__class__, softcap, softcap.__class__, deterministic or _must_be_deterministic(), on_decline,
            )  # fmt: skip
            known = _latest.get(options, _NOTHING)
            if not (known.alike(q, k, v) and (known.tf32 is None or known.tf32 == execution.takes_tf32(torch.float32))):
                key, known = _find(q, k, v, options)
        except (AttributeError, TypeError, ValueError, RuntimeError):  # what `check` will refuse
            known = None
        if known is not None:
            call, strict = known.call, on_decline == "error"
            if known.differentiable and torch.is_grad_enabled():
                return _apply(q, k, v, None, None, call, DIRECT, strict, False, return_logsumexp)
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
        _remember(key, q, k, v, call)
    return (out, logsumexp) if return_logsumexp else out


# ---- plain calls that were checked and found right ----


@dataclass(slots=True)
class _Known:
    """A plain call that is not checked again."""

    alike: Callable[..., bool]  # whether q, k and v are like those it came with
    call: Call | None
    differentiable: bool  # whether one of q, k and v requires a gradient
    tf32: bool | None  # in fp32: whether products are rounded to TF32


_known: dict[tuple, _Known] = {}
_MOST_KNOWN = 4096
# The last one with the same options. Layers of a model mostly call alike, and one check in C++ costs a third of a key.
_latest: dict[tuple, _Known] = {}
_NOTHING = _Known(tensor_layouts.never, None, False, None)


def _find(q, k, v, options: tuple) -> tuple[tuple | None, _Known | None]:
    """The key of a plain call and what is known of it. No key: it is not to be remembered."""
    index, dtype = q.get_device(), q.dtype
    if index < 0 or k.get_device() != index or v.get_device() != index or k.dtype != dtype or v.dtype != dtype:
        return None, None
    if not _is_eager(q) or (dtype.itemsize == 1 and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return None, None  # of 8 bits only `check` knows whether gradients are asked for
    key = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), dtype, index, q.requires_grad, k.requires_grad,
        v.requires_grad, q.is_inference(), execution.takes_tf32(dtype), options,
    )  # fmt: skip
    found = _known.get(key)
    if found is not None:
        _latest[options] = found
    return key, found


def _remember(key: tuple, q, k, v, call: Call) -> None:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
        _latest.clear()
    differentiable = q.requires_grad or k.requires_grad or v.requires_grad
    tf32 = execution.takes_tf32(q.dtype) if q.dtype == torch.float32 else None
    _known[key] = _Known(tensor_layouts.check(q, k, v), call, differentiable, tf32)


def _is_untraced() -> bool:
    """Whether nobody traces or transforms what runs here."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _is_eager(q: torch.Tensor) -> bool:
    """Whether nobody traces, transforms, casts or asks for shapes alone: then the operators' bodies can be called directly."""
    return _is_untraced() and q.__class__ is torch.Tensor and not q.is_meta and not torch._C._is_any_autocast_enabled()


def attend(
    q, k, v, call: Call, layer: int, strict: bool = False, statistics: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One checked call through the operator, counted under `layer`. Returns (out, logsumexp); shapes as in `attention`.

    `statistics=False`: logsumexp is not asked for and may be None.

    Broadcastable masks and biases have four dimensions and are expanded inside. Dropout draws its seed here.
    """
    if call.dropout_p > 0.0 and call.rng_state is None:
        call.rng_state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=q.device)
    if not call.deterministic and torch.are_deterministic_algorithms_enabled():
        call.deterministic = True
    if k.dtype != q.dtype or v.dtype != q.dtype:
        q, k, v = _common_dtype(q, k, v)
    if not _is_eager(q):
        if _transformed(q, k, v):
            return _TransformedAttention.apply(q, k, v, *_flat(call), strict, layer)
        return _forward_op(q, k, v, *_flat(call), strict, layer)
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
    bias, sinks, needs_gradient = call.bias, call.sinks, _needs_gradient(q, k, v, call)
    if not call.expanded:
        if call.is_plain():
            call = expanded(call, q, k)
        else:
            with torch.no_grad():
                call = expanded(call, q, k)
    if needs_gradient:
        result = _apply(q, k, v, bias, sinks, call, layer, strict, False, statistics)
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
