"""`pairwise`, the public call: reductions of a cost matrix between two sets that is never there as a whole.

Planning, counting and falling back happen inside torch operators' bodies, as they do for attention.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from . import batching, execution, launcher, pair_fallback, pair_launching, pair_planning
from .arguments import is_finite, is_integer, not_dense
from .counting import layers, record_decline, register_layer, switched_on
from .pair_planning import COSTS, GRADIENT, REDUCTIONS, PairPlan, PairProblem
from .problem import BuildFailure, Decline, DeclinedError, Reason


class Smallest(NamedTuple):
    """What min and topk found: the scores, fp32 (fp64 for fp64 inputs), and where, int64."""

    values: torch.Tensor
    indices: torch.Tensor


def pairwise(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    cost: str = "sqeuclidean",
    reduce: str = "min",
    dim: int = -1,
    k: int | None = None,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    on_decline: str = "error",
):
    """Reduce the score matrix of two sets, scale * cost(x_i, y_j) + bias, without ever holding it.

    Nearest neighbours, Chamfer distance, k-NN graphs, Sinkhorn and auction steps, soft assignments: what would build
    an n x m matrix and reduce it at once. Memory is that of the inputs and the result.

    Args:
        x: [..., n, d], float16, bfloat16, float32 or float64.
        y: [..., m, d], of x's dtype and device; leading dimensions broadcast with x's.
        cost: "sqeuclidean", sum((x_i - y_j) ** 2); "euclidean", its square root; "l1", sum(|x_i - y_j|);
            "negative_dot", -x_i . y_j; "giou", minus the generalised IoU of boxes (x0, y0, x1, y1), d = 4
            (Rezatofighi et al., arXiv 1902.09630; boxes without an area overlap with nothing).
        reduce: "min", the smallest score and its index; "topk", the `k` smallest, ascending; "logsumexp".
        dim: -1 reduces over y and gives a result per x_i, -2 over x and gives one per y_j.
        k: for "topk", from 1 to the size of what is reduced; kernels take up to 32.
        scale: factor of the cost. Largest instead of smallest: -1. Sinkhorn with temperature epsilon: -1 / epsilon.
        bias: added to the scores, one number for each element that is reduced over: [..., m] for dim=-1, [..., n] for
            dim=-2, fp32 or the inputs' dtype. Auction prices; Sinkhorn's potential / epsilon + log weight.
        on_decline: "error" raises DeclinedError where no kernel takes the call; "fallback" computes it exactly with
            torch operators, tile by tile, and counts it.

    Returns:
        "min": (values, indices), each [..., n] (dim=-2: [..., m]). "topk": (values, indices), each [..., n, k].
        "logsumexp": [..., n], natural logarithm, -inf over an empty set. Values are fp32 (fp64 for fp64 inputs),
        computed and summed in that; differences are taken before squaring, so nothing cancels. Of equal scores the
        one of the lowest index is taken. A NaN is the smallest of all for "min" and the largest for "topk", as in torch.
        All values have gradients for x, y and bias: those of "min" and "topk" flow to the chosen pairs.

    Raises:
        ValueError: arguments that contradict each other, each named.
        DeclinedError: no kernel takes the call and `on_decline="error"`; every reason at once.
    """
    if problems := _check(x, y, cost, reduce, dim, k, scale, bias, on_decline):
        raise ValueError("flashpatch.pairwise: " + "; ".join(problems))
    rows, columns = (x, y) if dim == -1 else (y, x)
    leading = torch.broadcast_shapes(rows.shape[:-2], columns.shape[:-2], () if bias is None else bias.shape[:-1])
    batch = math.prod(leading)
    rows, columns = (t.expand(*leading, *t.shape[-2:]).reshape(batch, *t.shape[-2:]) for t in (rows, columns))
    if bias is not None:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        bias = bias.to(wide).expand(*leading, columns.shape[-2]).reshape(batch, columns.shape[-2])
    strict = on_decline == "error"
    if reduce == "logsumexp":
        return _LogSumExp.apply(rows, columns, bias, cost, float(scale), strict).reshape(*leading, rows.shape[-2])
    wanted = int(k) if reduce == "topk" else 1
    with torch.no_grad():
        values, indices = torch.ops.flashpatch.pairwise(
            rows, columns, bias, cost, REDUCTIONS[reduce], wanted, float(scale), strict
        )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, y, bias)):
        values = _scores_of(rows, columns, bias, indices, cost, scale)
    shape = (*leading, rows.shape[-2], *((wanted,) if reduce == "topk" else ()))
    return Smallest(values.reshape(shape), indices.reshape(shape))


def _check(x, y, cost, reduce, dim, k, scale, bias, on_decline) -> list[str]:
    """Everything wrong with the arguments, in words."""
    problems = []
    for name, value, known in (("cost", cost, COSTS), ("reduce", reduce, tuple(REDUCTIONS))):
        if value not in known:
            problems.append(f"{name}={value!r} is not one of {', '.join(known)}")
    if on_decline not in ("error", "fallback"):
        problems.append(f"on_decline={on_decline!r} is neither 'error' nor 'fallback'")
    if not (is_integer(dim) and dim in (-1, -2)):
        problems.append(f"dim={dim}: -1 reduces over y, -2 over x")
    if not is_finite(scale.item() if isinstance(scale, torch.Tensor) and scale.numel() == 1 else scale):
        problems.append(f"scale={scale} is not a number that is finite in fp32")
    if not (k is None or is_integer(k)):
        problems.append(f"k={k!r} is not an int")
    tensors = {"x": x, "y": y, **({} if bias is None else {"bias": bias})}
    problems += filter(None, (not_dense(name, tensor) for name, tensor in tensors.items()))
    if problems:
        return problems
    if x.dim() < 2 or y.dim() < 2:
        return [*problems, f"x and y are [..., points, features], got {list(x.shape)} and {list(y.shape)}"]
    if x.dtype != y.dtype or x.device != y.device:
        problems.append(f"x is {x.dtype} on {x.device}, y {y.dtype} on {y.device}; cast or move one of them")
    elif execution.DTYPES.get(x.dtype) not in pair_planning.DTYPES:
        problems.append(f"x and y are {x.dtype}; float16, bfloat16, float32 and float64 are taken")
    if x.shape[-1] != y.shape[-1]:
        problems.append(f"x has {x.shape[-1]} features, y has {y.shape[-1]}")
    elif cost == "giou" and x.shape[-1] != 4:
        problems.append(f"cost='giou' takes boxes (x0, y0, x1, y1), got {x.shape[-1]} features")
    over, name = (y, "y") if dim == -1 else (x, "x")
    size = over.shape[-2]
    if reduce == "topk":
        if k is None or not 1 <= k <= size:
            problems.append(f"reduce='topk' needs k from 1 to {size}, the points of {name}, got {k}")
    elif k is not None:
        problems.append(f"k={k} goes with reduce='topk'")
    if reduce == "min" and size == 0:
        problems.append(f"there is no smallest score over an empty {name}")
    if bias is not None:
        if not bias.is_floating_point() or bias.device != x.device:
            problems.append(f"bias is {bias.dtype} on {bias.device}; a floating-point tensor on {x.device} is needed")
        if bias.dim() == 0 or bias.shape[-1] not in (1, size):
            problems.append(f"bias is {list(bias.shape)}; its last dimension is one number per point of {name}, {size}")
    try:
        torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], () if bias is None else bias.shape[:-1])
    except RuntimeError:
        shapes = ", ".join(str(list(t.shape)) for t in (x, y, bias) if t is not None)
        problems.append(f"the leading dimensions of {shapes} do not broadcast")
    return problems


def _scores_of(x, y, bias, indices, cost: str, scale: float) -> torch.Tensor:
    """The scores of the chosen pairs [batch, rows, k] once more, by operators that autograd knows."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    batch, rows, k = indices.shape
    flat = indices.reshape(batch, rows * k, 1).expand(-1, -1, y.shape[-1])
    a, b = x.to(wide).unsqueeze(2), y.to(wide).gather(1, flat).reshape(batch, rows, k, y.shape[-1])
    if cost == "negative_dot":
        costs = -(a * b).sum(-1)
    elif cost == "giou":
        costs = pair_fallback.giou_of_pairs(a.expand_as(b), b)
    elif cost == "l1":
        costs = (a - b).abs().sum(-1)
    elif cost == "euclidean":
        costs = torch.linalg.vector_norm(a - b, dim=-1)
    else:
        costs = (a - b).square().sum(-1)
    scores = costs * scale
    return scores if bias is None else scores + bias.gather(1, indices.reshape(batch, -1)).reshape(batch, rows, k)


class _LogSumExp(torch.autograd.Function):
    """Saves the inputs and the result; the backward computes the scores again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y, bias, cost, scale, strict):
        values, _ = torch.ops.flashpatch.pairwise(x, y, bias, cost, REDUCTIONS["logsumexp"], 1, scale, strict)
        return values[..., 0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, bias, *ctx.call = inputs
        ctx.save_for_backward(x, y, bias, output)

    @staticmethod
    def backward(ctx, grad):
        x, y, bias, logsumexp = ctx.saved_tensors
        for_x, for_y, for_bias = ctx.needs_input_grad[:3]
        with torch.no_grad():
            dx, dy, dbias = torch.ops.flashpatch.pairwise_gradient(
                grad, logsumexp, x, y, bias, *ctx.call, for_x, for_y or for_bias
            )
        if torch.is_grad_enabled():
            dx, dy, dbias = _OnceDifferentiable.apply(dx, dy, dbias, grad, x, y, bias)
        return dx if for_x else None, dy if for_y else None, dbias if for_bias else None, None, None, None


class _OnceDifferentiable(torch.autograd.Function):
    """The gradients as they are, tied to what they depend on: differentiating them raises instead of giving 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*gradients_and_inputs):
        return gradients_and_inputs[:3]

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("the logsumexp of flashpatch.pairwise has no second derivative")


# ---- the operators' bodies: decide, run, count ----

_library = torch.library.Library("flashpatch", "FRAGMENT")
_library.define(
    "pairwise(Tensor x, Tensor y, Tensor? bias, str cost, str kernel, int k, float scale, bool strict) -> (Tensor, Tensor)"
)
_library.define(
    "pairwise_gradient(Tensor grad, Tensor logsumexp, Tensor x, Tensor y, Tensor? bias, str cost, float scale, bool strict, "
    "bool for_x, bool for_y) -> (Tensor, Tensor, Tensor)"
)
_layer = register_layer("flashpatch.pairwise")
_failures: dict[tuple, Reason] = {}  # (config, device) that could not be built or loaded


def _decide(kernel: str, cost: str, x, k: int, scale: float) -> PairPlan | Decline:
    problem = PairProblem(kernel, cost, execution.DTYPES[x.dtype], x.shape[-1], k, scale)
    device = execution.device_of(x.device)
    if isinstance(device, Reason):
        return Decline(problem, (device,))
    if reason := launcher.unavailable(device.backend):
        return Decline(problem, (reason,))
    decision = pair_planning.resolve(problem, device)
    if isinstance(decision, PairPlan) and (reason := _failures.get((decision.config, device))):
        return Decline(problem, (reason,))
    return decision


def _run(decision: PairPlan | Decline, launch, compute, strict: bool):
    """`launch(plan)` if there is one and it can be built, else `compute()` without a kernel, counted."""
    if isinstance(decision, PairPlan):
        try:
            result = launch(decision)
            layers[_layer].launched(decision)
            return result
        except BuildFailure as error:
            _failures[decision.config, decision.device] = error.reason
            decision = Decline(decision.problem, (error.reason,))
    if strict or switched_on("FLASHPATCH_STRICT"):
        raise DeclinedError(decision)
    for reason in decision.reasons:
        record_decline(_layer, reason)
    return compute()


def _readable(tensor):
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _body(x, y, bias, cost: str, kernel: str, k: int, scale: float, strict: bool):
    layers[_layer].called()
    if x.shape[0] == 0 or x.shape[1] == 0 or y.shape[1] == 0:  # nothing to compute
        return _fake(x, y, bias, cost, kernel, k, scale, strict, fill=-torch.inf)
    bias = None if bias is None else bias.contiguous()
    values, indices = _run(
        _decide(kernel, cost, x, k, scale),
        lambda plan: pair_launching.reduce(plan, _readable(x), _readable(y), bias),
        lambda: pair_fallback.reduce(x, y, bias, cost, kernel, k, scale),
        strict,
    )
    if kernel == REDUCTIONS["logsumexp"]:
        indices = torch.empty(0, dtype=torch.int64, device=x.device)
    return values.contiguous(), indices.contiguous()


def _fake(x, y, bias, cost, kernel, k, scale, strict, fill=None):
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = (x.shape[0], x.shape[1], k)
    values = x.new_empty(shape, dtype=dtype) if fill is None else x.new_full(shape, fill, dtype=dtype)
    return values, x.new_empty((0,) if kernel == REDUCTIONS["logsumexp"] else shape, dtype=torch.int64)


def _gradient_body(grad, logsumexp, x, y, bias, cost: str, scale: float, strict: bool, for_x: bool, for_y: bool):
    if x.numel() == 0 or y.numel() == 0:
        dx, dy, dbias = x.new_zeros(x.shape), y.new_zeros(y.shape), logsumexp.new_zeros(y.shape[:2])
    else:
        bias = None if bias is None else bias.contiguous()
        dx, dy, dbias = _run(
            _decide(GRADIENT, cost, x, 1, scale),
            lambda plan: pair_launching.gradient(plan, grad, logsumexp, _readable(x), _readable(y), bias, for_x, for_y),
            lambda: pair_fallback.gradient(grad, logsumexp, x, y, bias, cost, scale),
            strict,
        )
    empty = x.new_empty(0)
    return (
        dx.to(x.dtype).contiguous() if for_x else empty,
        dy.to(y.dtype).contiguous() if for_y else empty.clone(),
        dbias.contiguous() if for_y else logsumexp.new_empty(0),
    )


def _fake_gradient(grad, logsumexp, x, y, bias, cost, scale, strict, for_x, for_y):
    dx, dy = x.new_empty(x.shape if for_x else 0), y.new_empty(y.shape if for_y else 0)
    return dx, dy, logsumexp.new_empty(y.shape[:2] if for_y else 0)


for _key in ("CUDA", "CPU"):
    _library.impl("pairwise", _body, _key)
    _library.impl("pairwise_gradient", _gradient_body, _key)
torch.library.register_fake("flashpatch::pairwise", _fake, lib=_library)
torch.library.register_fake("flashpatch::pairwise_gradient", _fake_gradient, lib=_library)
for _op in (torch.ops.flashpatch.pairwise.default, torch.ops.flashpatch.pairwise_gradient.default):
    torch.library.register_vmap(_op, batching.rule(_op, lambda arguments: True), lib=_library)
