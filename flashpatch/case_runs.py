"""One case: its kernels run forward and backward, every result compared with the fp64 reference."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import compiler, emulator, kernel_launch, kernel_sets, launcher, planning, reference, tolerance
from .cases import Case, Inputs, make_inputs
from .problem import SCALED, BuildFailure, Config, Decline, Device, Plan, Problem

# What a kernel that cannot be built, loaded or run raises. Anything else is a defect of flashpatch and shows as such.
FAILURES = (BuildFailure, emulator.EmulationError)

FORWARD_OUTPUTS = ("out", "logsumexp")
OUTPUTS = (*FORWARD_OUTPUTS, "dq", "dk", "dv", "dbias", "dsinks")


@dataclass(frozen=True)
class Check:
    """One compared tensor: how far from the reference the kernel is, how far PyTorch in the same dtype, the bound."""

    tensor: Annotated[str, "out, logsumexp, dq, dk, dv, dbias or dsinks"]
    error: Annotated[float, "largest absolute difference between the kernel and the fp64 reference; null if NaN"]
    eager_error: Annotated[float, "the same for PyTorch's own operations in the kernel's dtype"]
    bound: Annotated[float, "what error may be at most: 2 x eager_error (gradients 3 x) + what rounding alone costs"]
    passed: Annotated[bool, "error is within bound"]
    message: Annotated[str, "where the largest difference is, if it is too large"]

    @property
    def of_forward(self) -> bool:
        return self.tensor in FORWARD_OUTPUTS


@dataclass(frozen=True)
class CaseResult:
    """What came of one case."""

    case: Annotated[str, "the case's name: dtype, head dims, features, sizes, inputs, layout"]
    seed: Annotated[int, "seed of its inputs"]
    backend: Annotated[str, "gpu: ran on the GPU; emulated: ran in the CPU emulator; compiled: only compiled"]
    cells: Annotated[list[str], "cells of compat_matrix.yaml this case reaches"]
    configs: Annotated[dict[str, str], "kernel -> digest of all that is compiled for it"]
    launches: Annotated[dict[str, int], "kernel -> launches counted"]
    checks: Annotated[list[Check], "every compared tensor"]
    seconds: Annotated[float, "time the case took, compilation included"]
    error: Annotated[str, "a kernel that failed to compile or run, in its own words; empty otherwise"]

    @property
    def passed(self) -> bool:
        return not self.error and all(check.passed for check in self.checks)


class _Poison(TorchDispatchMode):
    """Fresh memory holds NaN (integers: their largest value), so that what a kernel forgets to write shows."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in _ALLOCATIONS:
            result.fill_(math.nan if result.is_floating_point() else torch.iinfo(result.dtype).max)
        return result


_ALLOCATIONS = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


def run_case(case: Case, device: Device, seed: int) -> CaseResult:
    """Run one case forward and, where the matrix has it, backward, and compare with the reference."""
    started = time.perf_counter()
    plans = [plan for plan in plans_of(case.problem, device) if isinstance(plan, Plan)]
    configs = [config for plan in plans for config in kernel_sets.configs(plan.config)]
    checks, launches, error = [], Counter(), ""
    if device.backend == "compiled":
        error = _compile_all(configs, device)
    else:
        before = Counter(kernel_launch.launched)
        try:
            checks = _compare(case, device, seed, plans)
        except FAILURES as failure:
            error = str(failure)
        launches = Counter(kernel_launch.launched) - before
    return CaseResult(
        case.name,
        seed,
        device.backend,
        sorted(cell for plan in plans for cell in plan.cells),
        {plan.config.kernel: kernel_sets.digest(plan.config) for plan in plans},
        dict(launches),
        checks,
        time.perf_counter() - started,
        error,
    )


def plans_of(problem: Problem, device: Device) -> tuple[Plan | Decline, Plan | Decline]:
    """The decision for both directions of a problem."""
    return planning.resolve(problem, device), planning.resolve(problem.backward(), device)


def _compare(case: Case, device: Device, seed: int, plans: list[Plan]) -> list[Check]:
    torch_device = torch.device("cuda", device.index) if device.backend == "gpu" else torch.device("cpu")
    inputs = make_inputs(case, torch_device, seed)
    directions = {plan.problem.direction: plan for plan in plans}
    actual = dict.fromkeys(OUTPUTS)
    with _Poison():
        out, logsumexp, _ = launcher.forward(directions["forward"], inputs.q, inputs.k, inputs.v, inputs.call)
        actual["out"], actual["logsumexp"] = out, logsumexp
        if "backward" in directions:
            arguments = (inputs.dout, inputs.dlogsumexp, inputs.q, inputs.k, inputs.v, out, logsumexp, inputs.call)
            gradients = launcher.backward(directions["backward"], *arguments)
            actual.update(zip(OUTPUTS[2:], gradients, strict=False))
            again = launcher.backward(directions["backward"], *arguments) if inputs.call.deterministic else gradients
    expected, eager = (_expected(case, inputs, upcast, "backward" in directions) for upcast in (True, False))
    largest_logsumexp = _largest(expected["logsumexp"])
    lost = _lost_in_products(case, inputs) if device.backend == "gpu" else 0.0
    checks = [
        _check(
            name,
            actual[name],
            eager[name],
            expected[name],
            out.dtype,
            largest_logsumexp,
            expected.get(f"{name} of rounded out"),
            lost if name == "logsumexp" else 0.0,
        )
        for name in OUTPUTS
        if actual[name] is not None
    ]
    for name, first, second in zip(OUTPUTS[2:], gradients, again, strict=False) if "backward" in directions else ():
        if first is not None and not _bit_equal(first, second):
            message = f"{name} differs between two runs of the same deterministic backward"
            checks.append(Check(name, math.nan, 0.0, 0.0, False, message))
    return checks


def _lost_in_products(case: Case, inputs: Inputs) -> float:
    """What Hopper's tensor cores lose of a score in 8 bits: they add products with about 14 bits of the largest (DeepSeek-V3,
    arXiv 2412.19437, section 3.5.2). 2^-11 of the sum of all products' magnitudes; half of it was the most that was seen."""
    if case.problem.dtype not in SCALED or not inputs.q.numel() or not inputs.k.numel():
        return 0.0
    q, k = (tensor.double().nan_to_num(0.0).abs().transpose(-3, -2) for tensor in (inputs.q, inputs.k))
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    factor = float((inputs.call.q_descale * inputs.call.k_descale).max())
    return 2.0**-11 * inputs.call.softmax_scale * factor * float((q @ k.transpose(-1, -2)).max())


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude in a tensor, 0 if there is none."""
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _check(
    name: str, actual, eager, expected, dtype: torch.dtype, largest_logsumexp: float, of_rounded_out, lost: float = 0.0
) -> Check:
    factor = tolerance.FORWARD_FACTOR if name in FORWARD_OUTPUTS else tolerance.GRADIENT_FACTOR
    outcome = tolerance.compare(actual, eager, expected, factor=factor)
    if of_rounded_out is not None:
        bound = outcome.bound + 2.0 * _largest(of_rounded_out)
        outcome = dataclasses.replace(outcome, bound=bound, ok=math.isfinite(outcome.error) and outcome.error <= bound)
    if name in ("dbias", "dsinks") and expected.numel():
        # fp32 sums of products with out, which is rounded to the inputs' dtype; and a few heads are too few numbers for
        # eager's largest error to say what that rounding costs
        bound = outcome.bound + torch.finfo(dtype).eps * float(expected.abs().max())
        outcome = dataclasses.replace(outcome, bound=bound, ok=math.isfinite(outcome.error) and outcome.error <= bound)
    if name == "logsumexp" and expected.numel():
        # the device's exp2 and log2 are good to 2 ulp each; of a few rows eager may hit every one exactly
        bound = outcome.bound + lost + 4 * torch.finfo(torch.float32).eps * max(1.0, largest_logsumexp)
        outcome = dataclasses.replace(outcome, bound=bound, ok=math.isfinite(outcome.error) and outcome.error <= bound)
    if dtype == torch.float32 and name != "logsumexp":
        # p = exp(score - row maximum or logsumexp): a score is rounded to fp32 as a sum and once more in base 2, a logsumexp in
        # natural log and in base 2, half an ulp each, and p is off by so much of itself; of a few rows eager may hit every one
        rounding = 2 * torch.finfo(dtype).eps * largest_logsumexp
        bound = outcome.bound + rounding * _largest(expected)
        outcome = dataclasses.replace(outcome, bound=bound, ok=math.isfinite(outcome.error) and outcome.error <= bound)
    eager_error = tolerance.compare(eager, eager, expected, factor=factor).error
    message = "" if outcome.ok else outcome.message(name)
    return Check(name, outcome.error, eager_error, outcome.bound, outcome.ok, message)


def _bit_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if not first.numel():  # whose strides may be anything, which a view does not bear
        return first.shape == second.shape
    first, second = (tensor.clone(memory_format=torch.contiguous_format).view(-1) for tensor in (first, second))
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _expected(case: Case, inputs: Inputs, upcast: bool, backward: bool) -> dict[str, torch.Tensor]:
    """The reference's outputs and gradients, in fp64 or as eager PyTorch in the inputs' dtype."""
    # what no row sees does not matter to the definition, so the reference need not bear NaN there
    names = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **{n: inputs.keywords.get(n) for n in ("bias", "sinks")}}
    wide = torch.float64 if upcast else None
    leaves = {
        name: tensor.double().nan_to_num(0.0).to(wide or tensor.dtype).detach().requires_grad_(backward)
        for name, tensor in names.items()
        if tensor is not None
    }
    keywords = {**inputs.keywords, **leaves}
    for name in ("max_seqlen_q", "max_seqlen_k", "deterministic"):
        keywords.pop(name, None)
    if inputs.call.dropout_p:
        shape = (_sequences(inputs, case), case.num_heads_q, inputs.call.max_seqlen_q, inputs.call.max_seqlen_k)
        keep = reference.dropout_keep(inputs.call.rng_state.tolist(), inputs.call.dropout_p, *shape)
        keywords["keep"] = keep.to(inputs.q.device)
    out, logsumexp = reference.attention(**keywords, upcast=upcast)
    found = {"out": out.detach(), "logsumexp": logsumexp.detach()}
    if backward:
        # an empty row's logsumexp is -inf, a constant
        dlogsumexp = inputs.dlogsumexp.to(logsumexp.dtype).masked_fill(logsumexp.isinf(), 0.0)
        outputs, incoming = [out, logsumexp], [inputs.dout.to(out.dtype), dlogsumexp]
        kept = [(o, g) for o, g in zip(outputs, incoming, strict=True) if o.requires_grad]
        gradients = [torch.zeros_like(leaf) for leaf in leaves.values()]
        if kept:
            outputs, incoming = zip(*kept, strict=True)
            computed = torch.autograd.grad(
                outputs, list(leaves.values()), incoming, allow_unused=True, retain_graph=True
            )
            gradients = [g if c is None else c for c, g in zip(computed, gradients, strict=True)]
        found.update({f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)})
        if upcast and logsumexp.requires_grad:
            found.update(_of_rounded_out(out, logsumexp, inputs, leaves))
    return found


def _of_rounded_out(out, logsumexp, inputs: Inputs, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the stored out's error does to the gradients of scores, by the name of the gradient.

    The backward takes dout . out from the out that was stored (FlashAttention, Dao et al. 2022, appendix B.2) and subtracts it
    from dP; where one key has most of a row's weight, eager subtracts a number from itself and has no error at all. out is
    rounded to the inputs' dtype, and all of a row is off by the 2 ulp of the device's exp2. A row's error in dout . out acts
    like a gradient of the row's logsumexp.
    """
    dout, out = inputs.dout.to(out.dtype), out.detach()
    of_row = (dout * (out.to(inputs.q.dtype).to(out.dtype) - out)).sum(-1).abs()
    of_row = of_row + 2 * torch.finfo(torch.float32).eps * (dout * out).sum(-1).abs()
    of_row = of_row.transpose(-1, -2).reshape(logsumexp.shape).masked_fill(logsumexp.isinf(), 0.0)
    named = {name: leaf for name, leaf in leaves.items() if name != "v"}
    costs = torch.autograd.grad(logsumexp, list(named.values()), of_row, allow_unused=True)
    return {f"d{name} of rounded out": cost for name, cost in zip(named, costs, strict=True) if cost is not None}


def _sequences(inputs: Inputs, case: Case) -> int:
    return case.batch if inputs.call.cu_seqlens_q is None else len(inputs.call.cu_seqlens_q) - 1


def _compile_all(configs: list[Config], device: Device) -> str:
    """Compile without running; the first failure in the compiler's words, or nothing."""
    for config in configs:
        try:
            compiler.compile_cubin(config, compiler.arch(config, device))
        except compiler.CompileError as failure:
            return str(failure)
    return ""
