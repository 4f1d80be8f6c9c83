"""Measured proof for a model, `flashpatch verify MODEL`: patched and unpatched against eager attention, upcast.

A pass always means that modules dispatched and something was compared: nothing compared, nothing verified. Results are
dataclasses; printing is the command line's job.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch

from . import attention_modules, model_runs, patcher
from .difference_explanations import (
    Explanation,
    chosen_path,
    explain,
    first_difference,
    heard_from,
    save_call,
)
from .model_comparisons import ModelComparison, TokenCheck, comparisons_of, tokens_of
from .problem import DeclinedError

# Where something differs, eager runs this many times more. One run says little about a model in which a last bit decides:
# gemma-3-270m in bf16 on an H200 had a gradient 14 times as far off as eager's, patched, and 12 times with torch's sdpa.
FURTHER_EAGER_RUNS = 3


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


class UnpatchedError(RuntimeError):
    """The model does not run on the given inputs by itself, so there is nothing to compare with."""


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
    modules = [(path, module) for path, module, _ in attention_modules.find(model)]
    default = str(getattr(model.config, "_attn_implementation", "its own"))

    largest: dict[str, float] = {}
    chosen = chosen_path([path for path, _ in modules], layer)

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
            comparisons = [] if patched is None else comparisons_of(patched, eagers, unpatched, expected)
            if not all(comparison.passed for comparison in comparisons):
                for draw in range(FURTHER_EAGER_RUNS):
                    with model_runs.implementation(model, "eager"), model_runs.rounded_anew(modules, seed + draw):
                        eagers.append(run("eager, attention outputs rounded anew", 3))
                comparisons = comparisons_of(patched, eagers, unpatched, expected)
            explanation, heard = None, None
            first = first_difference(comparisons, [path for path, _ in modules])
            if patched is not None and (first or capture):
                path = chosen or (first and first[0]) or (modules[0][0] if modules else "")
                heard = heard_from(model, inputs, modules, backward, seed, path, advance)
                if first:
                    own = (
                        heard
                        if path == first[0]
                        else heard_from(model, inputs, modules, backward, seed, first[0], advance)
                    )
                    explanation = explain(first, own, modules, (unpatched, eager), input_largest, dtype)
    finally:
        model.train(training)
    advance(4, 4, "")
    if capture:
        save_call(heard, capture, name or type(model).__name__, [path for path, _ in modules])
    tokens = None if patched is None else tokens_of(patched, expected, comparisons)
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
