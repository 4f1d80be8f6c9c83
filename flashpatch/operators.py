"""The operators `flashpatch::attention_forward` and `attention_backward`: schemas, bodies, shapes, autograd, autocast, vmap.

Everything that must not be traced (planning, counting, warning, falling back) happens in `execution`, inside the
operators' bodies: `torch.compile` sees one opaque node with a shape function, a backward and an autocast rule.
"""

from __future__ import annotations

import functools

import torch

from . import batching, execution
from .call import DESCALES, TENSORS, Call, out_dtype

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
forward_op = torch.ops.flashpatch.attention_forward.default
backward_op = torch.ops.flashpatch.attention_backward.default


# ---- Call <-> the operators' flat arguments ----


def flat(call: Call) -> tuple:
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
    call = call_of(*arguments)
    _check_lengths(q, k, call)
    return execution.forward(q, k, v, expanded(call, q, k), layer, strict)


def _check_lengths(q, k, call: Call) -> None:
    """Raises RuntimeError where a recorded call is given other lengths: torch.jit.trace keeps those it saw as constants."""
    recorded, given = (call.max_seqlen_q, call.max_seqlen_k), (q.shape[-3], k.shape[-3])
    if call.cu_seqlens_q is None and recorded != given:
        raise RuntimeError(
            f"flashpatch::attention_forward was recorded for {recorded[0]} queries and {recorded[1]} keys and is given {given[0]} "
            f"and {given[1]}; torch.jit.trace keeps lengths as constants: trace it with these lengths, or use torch.compile"
        )


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


class Attention(torch.autograd.Function):
    """Saves q, k, v, out and logsumexp; the backward recomputes the scores (FlashAttention-2, Algorithm 2).

    `traced` says whether the bodies are reached through the operators, so that a tracer sees them. bias and sinks are
    arguments of their own because they get gradients. Without `statistics` the logsumexp is no output: one tensor
    less for autograd to wrap.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, call, layer, strict, traced, statistics):
        if traced:
            with torch._C._AutoDispatchBelowAutograd():
                out, logsumexp = forward_op(q, k, v, *flat(call), strict, layer)
        else:
            out, logsumexp = execution.forward(q, k, v, call, layer, strict)
        ctx.save_for_backward(q, k, v, out, logsumexp, bias, sinks)
        ctx.how = (call, layer, strict, traced)
        ctx.versions = {} if call.is_plain() else versions_of(call)
        ctx.set_materialize_grads(False)
        return (out, logsumexp) if statistics else out

    @staticmethod
    def backward(ctx, dout, dlogsumexp=None):
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *Attention.gradients(ctx, dout, dlogsumexp, *saved), None, None, None, None, None
        with torch.no_grad():
            gradients = Attention.gradients(ctx, dout, dlogsumexp, *saved)
        q, k, v, _, _, bias, sinks = saved
        return *_OnceDifferentiable.apply(*gradients, q, k, v, dout, bias, sinks), None, None, None, None, None

    @staticmethod
    def gradients(ctx, dout, dlogsumexp, q, k, v, out, logsumexp, bias, sinks):
        call, layer, strict, traced = ctx.how
        if ctx.versions and (now := versions_of(call)) != ctx.versions:
            changed = " and ".join(name for name in now if now[name] != ctx.versions.get(name))
            raise RuntimeError(
                f"{changed} of flashpatch attention changed in place between the forward and its backward, which reads it "
                "again; give each forward a tensor of its own (clone it)"
            )
        if dout is None:
            dout = torch.zeros_like(out)
        inputs = (dout, dlogsumexp, q, k, v, out, logsumexp)
        call.bias_gradient = ctx.needs_input_grad[3]
        if traced:
            gradients = backward_op(*inputs, *flat(call), strict, layer)
        else:
            gradients = execution.backward(*inputs, call, layer, strict)
        dq, dk, dv, dbias, dsinks = gradients
        dbias = _like(dbias, bias) if dbias is not None and ctx.needs_input_grad[3] else None
        return dq, dk, dv, dbias, None if sinks is None else _like(dsinks, sinks)


# What torch's Function.apply comes down to where no function transform is active (`modes.is_eager`): 2 us less.
with_gradients = super(torch.autograd.Function, Attention).apply


def versions_of(call: Call) -> dict[str, int]:
    """How often the tensors beside q, k and v have been changed in place; those of inference mode do not know."""
    given = ((name, getattr(call, name)) for name in TENSORS)
    return {name: tensor._version for name, tensor in given if tensor is not None and not tensor.is_inference()}


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


class TransformedAttention(torch.autograd.Function):
    """The same for torch.func (grad, vjp, jacrev, and vmap of them), which needs every tensor as an argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        return forward_op(*inputs)

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
        return backward_op(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def needs_gradient(q, k, v, call: Call) -> bool:
    return torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (call.bias is not None and call.bias.requires_grad)
        or (call.sinks is not None and call.sinks.requires_grad)
    )


def _autograd_forward(q, k, v, *arguments):
    *values, strict, layer = arguments
    call = call_of(*values)
    if needs_gradient(q, k, v, call):
        return Attention.apply(q, k, v, call.bias, call.sinks, call, layer, strict, True, True)
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op(q, k, v, *arguments)


def _autocast_forward(device_type: str):
    """Autocast as torch's own scaled_dot_product_attention does: fp32 inputs take the autocast dtype."""

    def forward(q, k, v, bias, *arguments):
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor):
            eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize in (2, 4)
            return tensor.to(dtype) if eligible else tensor

        with torch.amp.autocast(device_type, enabled=False):
            return forward_op(cast(q), cast(k), cast(v), cast(bias), *arguments)

    return forward


for _key in ("CUDA", "CPU"):
    _library.impl("attention_forward", _forward_body, _key)
    _library.impl("attention_backward", _backward_body, _key)
    _library.impl("attention_forward", _autocast_forward(_key.lower()), f"Autocast{_key}")
_library.impl("attention_forward", _autograd_forward, "Autograd")
torch.library.register_fake("flashpatch::attention_forward", _fake_forward, lib=_library)
torch.library.register_fake("flashpatch::attention_backward", _fake_backward, lib=_library)
# of the tensors of _CALL_SCHEMA, which come first in it, some have no batch
for _name, _op, _own in (("forward", forward_op, 3), ("backward", backward_op, 7)):
    _plain = functools.partial(_has_no_tensors, slice(_own, _own + len(TENSORS)))
    torch.library.register_vmap(f"flashpatch::attention_{_name}", batching.rule(_op, _plain), lib=_library)
