"""What is here and what would run: the environment, the matrix for one GPU, and each attention module of a model.

Nothing is launched and no CUDA context is created beyond asking for the GPU's name; a model is built without weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch

from . import dry_runs, execution, planning
from .environment import Environment, environment
from .problem import DIRECTIONS, DTYPES, SCALED, Decline, Device, Problem, Reason
from .support_table import Support, support_of


class NoSuchDevice(RuntimeError):
    """The torch device asked for is not here."""


@dataclass(frozen=True)
class Choice:
    """What one direction of a module's attention runs on."""

    direction: Annotated[str, "forward or backward"]
    kernel: Annotated[str | None, "kernel; null: flashpatch's exact fallback"]
    tile: Annotated[str, "queries x keys of a block, warps, stages; empty for the fallback"]
    shared_memory: Annotated[int, "bytes of shared memory per block; 0 for the fallback"]
    status: Annotated[str, "verified, compiled or fallback"]
    reasons: Annotated[tuple[str, ...], "why no kernel; of a kernel, what is to be said of it"]


@dataclass(frozen=True)
class ModuleAudit:
    """One attention module of a model."""

    path: Annotated[str, "the module's name in the model"]
    module: Annotated[str, "its class"]
    now: Annotated[str, "the attention implementation the unpatched model uses"]
    dispatched: Annotated[bool, "patched, the module calls flashpatch; false: its attention is hard-coded, untouched"]
    dtype: Annotated[str, "dtype of its q, k, v; empty if it was not dispatched"]
    head_dim: Annotated[int, "head dim of q and k; 0 if it was not dispatched"]
    head_dim_v: Annotated[int, "head dim of v; 0 if it was not dispatched"]
    features: Annotated[list[str], "what its call asks for beyond plain attention"]
    forward: Annotated[str, "kernel and status, or fallback"]
    backward: Annotated[str, "kernel and status, or fallback"]
    reasons: Annotated[list[str], "why not a kernel"]
    choices: Annotated[list[Choice], "both directions in detail, one entry for each way its calls differ"]


@dataclass(frozen=True)
class AuditReport:
    """`flashpatch audit`: environment, matrix, and with a model its attention modules."""

    environment: Annotated[Environment, "this machine and process"]
    gpu: Annotated[str | None, "the GPU planned for; null: there is none and none was named"]
    generation: Annotated[str | None, "its generation in compat_matrix.yaml"]
    statement: Annotated[str, "what the following is about, in a sentence"]
    support: Annotated[list[Support], "the matrix for that GPU"]
    model: Annotated[str, "the model; empty without one"]
    modules: Annotated[list[ModuleAudit], "its attention modules"]


@dataclass(frozen=True)
class Tally:
    """Modules of a model that run the same way."""

    modules: Annotated[int, "how many"]
    choice: Annotated[Choice, "what they run on"]


@dataclass
class Square:
    """One generation, dtype and direction for a model."""

    generation: Annotated[str, "as in compat_matrix.yaml"]
    title: Annotated[str, "what people call it"]
    capabilities: Annotated[list[str], "compute capabilities that decide alike"]
    gpus: Annotated[list[str], "GPUs of them"]
    shared_memory: Annotated[list[int], "bytes a block may have on each of these compute capabilities"]
    dtype: Annotated[str, "dtype of q, k, v"]
    direction: Annotated[str, "forward or backward"]
    status: Annotated[str, "the weakest of its modules: verified, compiled or fallback"]
    tallies: Annotated[list[Tally], "what its modules run on"]


@dataclass(frozen=True)
class GridReport:
    """`flashpatch audit --all MODEL`: every generation and dtype for one model."""

    model: Annotated[str, "the model"]
    modules: Annotated[int, "attention modules it has"]
    dispatched: Annotated[int, "of which call flashpatch when patched"]
    features: Annotated[list[str], "what their calls ask for beyond plain attention"]
    head_dims: Annotated[list[int], "head dims of q, k and v"]
    reasons: Annotated[list[str], "why the others do not"]
    squares: Annotated[list[Square], "one entry per generation, dtype and direction"]


def audit(model=None, *, gpu: str | None = None, dtype: str | None = None, device: str | None = None, **load):
    """What is here, what the kernels support on a GPU (this machine's, or one named), what a model would run on."""
    target, statement = _target(gpu, device)
    modules = plan(model, gpu=gpu, dtype=dtype, device=device, **load) if model is not None else []
    return AuditReport(
        environment(),
        target.name if isinstance(target, Device) else None,
        target.generation if isinstance(target, Device) else None,
        statement,
        support_of(target, dtype) if isinstance(target, Device) else [],
        "" if model is None else model if isinstance(model, str) else type(model).__name__,
        modules,
    )


def plan(
    model, *, gpu: str | None = None, dtype: str | None = None, device: str | None = None, inputs=None, **load
) -> list[ModuleAudit]:
    """What each attention module of a model runs on now and would run on patched; nothing is computed, no GPU needed.

    `model` is a module, a transformers configuration, a hub id or a folder; of the latter three only the configuration
    is read. `gpu` plans for a GPU that need not be here. `inputs` are the keyword arguments of one forward, taken
    without padding.
    """
    target, _ = _target(gpu, device)
    return [_module_audit(call, target) for call in dry_runs.traced(model, dtype, inputs, load)]


def grid(model, *, dtype: str | None = None, inputs=None, **load) -> GridReport:
    """What a model would run on, on every generation and in every dtype; nothing is computed, no GPU needed."""
    calls = dry_runs.traced(model, None, inputs, load)
    asked = [call.problems for call in calls if call.problems]
    found: dict[tuple, Square] = {}
    matrix = planning.support()
    for capability in matrix.capabilities.values():
        device = planning.device_for(capability.number)
        number = ".".join(map(str, capability.number))
        squares = [
            Square(
                capability.generation, matrix.generations[capability.generation], [number], list(capability.gpus),
                [device.shared_memory], name, direction, *_tallied(asked, device, name, direction),
            )
            for name in DTYPES if name not in SCALED and dtype in (None, name) for direction in DIRECTIONS
        ]  # fmt: skip
        key = (capability.generation, *(str(square.tallies) for square in squares))
        if key in found:  # decides as one before it
            for square in found[key]:
                square.capabilities.append(number)
                square.gpus.extend(capability.gpus)
                square.shared_memory.append(device.shared_memory)
        else:
            found[key] = squares
    problems = [problem for of_module in asked for problem in of_module]
    return GridReport(
        model if isinstance(model, str) else type(model).__name__,
        len(calls),
        len(asked),
        sorted(set().union(*(problem.features for problem in problems))),
        sorted({size for problem in problems for size in (problem.head_dim, problem.head_dim_v)}),
        list(dict.fromkeys(reason for call in calls if not call.problems for reason in call.reasons())),
        [square for squares in found.values() for square in squares],
    )


def _tallied(asked: list[list[Problem]], device: Device, dtype: str, direction: str) -> tuple[str, list[Tally]]:
    counts: dict[Choice, int] = {}
    for problems in asked:
        kinds = {_choice(replace(problem, dtype=dtype, direction=direction), device) for problem in problems}
        weakest = max(sorted(kinds, key=str), key=lambda choice: STATUSES.index(choice.status))
        counts[weakest] = counts.get(weakest, 0) + 1
    tallies = [Tally(count, choice) for choice, count in counts.items()]
    return max((choice.status for choice in counts), key=STATUSES.index, default="fallback"), tallies


STATUSES = ("verified", "compiled", "fallback")


def _choice(problem: Problem, target: Device | Reason) -> Choice:
    """What a problem runs on, in words and numbers."""
    decision = Decline(problem, (target,)) if isinstance(target, Reason) else planning.resolve(problem, target)
    if isinstance(decision, Decline):
        reasons = tuple(f"{reason.code}: {reason.text}" for reason in decision.reasons)
        return Choice(problem.direction, None, "", 0, "fallback", reasons)
    config = decision.config
    tile = f"{config.block_m}x{config.block_n}, {config.num_warps} warps, {config.num_stages} stage{'s' if config.num_stages > 1 else ''}"
    notes = tuple(filter(None, (decision.note, decision.padding)))
    return Choice(problem.direction, config.kernel, tile, planning.shared_memory(config), decision.status, notes)


def _module_audit(call: dry_runs.Traced, target: Device | Reason) -> ModuleAudit:
    row = call.row
    if not call.problems:
        reasons = call.reasons()
        return ModuleAudit(row.path, row.class_name, call.now, False, "", 0, 0, [], "its own", "its own", reasons, [])
    choices = list(
        dict.fromkeys(
            _choice(replace(problem, direction=direction), target)
            for direction in DIRECTIONS
            for problem in call.problems
        )
    )
    words, reasons = {}, {}
    for choice in choices:
        if choice.kernel is None:
            words[choice.direction] = "fallback"
            reasons.update(dict.fromkeys(choice.reasons))
        else:
            words.setdefault(choice.direction, f"{choice.kernel} ({choice.status})")
    first = call.problems[0]
    features = sorted(set().union(*(problem.features for problem in call.problems)))
    return ModuleAudit(
        row.path, row.class_name, call.now, True, first.dtype, first.head_dim, first.head_dim_v, features,
        words["forward"], words["backward"], list(reasons), choices,
    )  # fmt: skip


def _target(gpu: str | None, device: str | None) -> tuple[Device | Reason, str]:
    if gpu is not None:
        target = planning.gpu(gpu)
        return target, f"Support on {_titled(target)}, which need not be here:"
    usable = torch.version.cuda is not None and torch.cuda.is_available()
    here = torch.device(device or ("cuda" if usable else "cpu"))
    if here.type == "cuda" and (not usable or (here.index or 0) >= torch.cuda.device_count()):
        raise NoSuchDevice(f"torch sees no GPU {here}; leave out --device, or plan for a GPU elsewhere with --gpu NAME")
    target = execution.device_of(here)
    if isinstance(target, Reason):
        return (
            target,
            "There is no GPU here, so nothing runs on a kernel; name one with --gpu (for example --gpu h200).",
        )
    return target, f"Support on {_titled(target)}:"


def _titled(target: Device) -> str:
    title = planning.support().generations[target.generation]
    own = ".".join(map(str, target.capability))
    if target.stands_for:
        number = ".".join(map(str, target.stands_for))
        return f"{target.name} ({own}), which stands in for {title} ({number}) because of {planning.SWITCH}"
    return f"{target.name} ({title}, {own})"
