"""Measured proof, `flashpatch verify`: every cell the matrix claims, against the fp64 reference.

A pass always means that something was launched and compared: nothing launched, nothing verified. Results are
dataclasses; printing is the command line's job. `case_runs` runs one case, `model_verification` does the same for a
patched model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Annotated

import torch

from . import compiler, emulator, execution, kernel_sets, launcher, model_verification, planning, support_matrix
from .case_runs import FAILURES, CaseResult, Check, plans_of, run_case
from .cases import Case, cases, claimed
from .problem import Config, Decline, Device, Plan, Problem


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

    `wanted` is a torch device; `gpu` names the one whose kernels are emulated or compiled (default: that of
    FLASHPATCH_GENERATION, else an A100). Raises NothingToRunOn with what is missing and what to type, ValueError for an
    unknown `gpu` or switch.
    """
    asked = torch.device(wanted or ("cuda" if torch.cuda.is_available() and torch.version.cuda else "cpu"))
    if asked.type == "cuda" and not emulate:
        index = asked.index if asked.index is not None else (torch.cuda.current_device() if _has_cuda() else 0)
        if not _has_cuda() or index >= torch.cuda.device_count():
            raise NothingToRunOn(f"torch sees no GPU {asked}; leave out --device, or see `flashpatch audit`")
        if gpu is not None:
            raise ValueError("--gpu names a GPU to emulate; add --emulate, or leave it out to use the one that is here")
        found = execution.device_of(torch.device("cuda", index))
        if reason := launcher.unavailable("gpu"):
            raise NothingToRunOn(f"{found.name}: {reason.text}")
        return found
    if (no_emulator := emulator.available()) is None:
        emulator.warp_order(), emulator.time_limit()  # bad values are better known now than in the middle
        return _stand_in(gpu, "emulated", "CPU emulator")
    if emulate or os.environ.get("FLASHPATCH_CXX"):  # a compiler that was named and is none is not to be passed over
        raise NothingToRunOn(no_emulator.text)
    if no_compiler := compiler.available():
        raise NothingToRunOn(f"there is no GPU; {no_emulator.text}; {no_compiler.text}")
    return _stand_in(gpu, "compiled", "no GPU, compiled for")


def _stand_in(gpu: str | None, backend: str, label: str) -> Device:
    wanted = os.environ.get(planning.SWITCH)
    device = planning.of_switch(wanted) if wanted and gpu is None else planning.gpu("a100" if gpu is None else gpu)
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
    results = []
    with _building(wanted, device) as wait_for:
        for number, case in enumerate(wanted):
            advance(number, len(wanted), case.name)
            wait_for(case)
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
    statement = STATEMENTS[device.backend] if cells else _nothing_claimed(device, dtype)
    if device.stands_for:
        title = planning.support().generations[device.generation]
        statement += f" It stood in for {title}, with its kernels and limits: that is no evidence for {title} itself."
    return KernelReport(device.name, device.generation, device.backend, statement, quick, cells, results, seconds)


def _nothing_claimed(device: Device, dtype: str | None) -> str:
    """Why no cell of the matrix is about a device, or about a dtype on it, and where there are some."""
    matrix = planning.support()
    kind = f"{dtype} kernel" if dtype else "kernel"
    here = f"Nothing ran: there is no {kind} for {matrix.generations[device.generation]}"
    there = {cell.generation for cell in matrix.cells.values() if dtype in (None, cell.dtype)}
    others = [generation for generation in matrix.generations if generation in there]
    if not others:
        return f"{here}, nor for any other GPU."
    names = ", ".join(matrix.generations[generation] for generation in others)
    options = ("--emulate " if device.backend == "gpu" else "") + f"--gpu {others[0]}"
    return f"{here}, but for {names}. Type: flashpatch verify {options}" + (f" --dtype {dtype}" if dtype else "")


@contextlib.contextmanager
def _building(wanted: list[Case], device: Device) -> Iterator[Callable[[Case], None]]:
    """Builds what the cases need in the background, in their order and several at a time, so that the first ones run soon.

    Yields what waits for the builds of a case; a failed one is reported when the case runs.
    """

    def configs(case: Case) -> list[Config]:
        plans = [plan for plan in plans_of(case.problem, device) if isinstance(plan, Plan)]
        return [config for plan in plans for config in kernel_sets.configs(plan.config)]

    with ThreadPoolExecutor(max(2, min(os.cpu_count() or 2, 16))) as pool:
        needed = dict.fromkeys(config for case in wanted for config in configs(case))
        builds = {config: pool.submit(_build, config, device) for config in needed}

        def wait_for(case: Case) -> None:
            wait([builds[config] for config in configs(case)])

        try:
            yield wait_for
        finally:
            pool.shutdown(cancel_futures=True)


def _build(config: Config, device: Device) -> None:
    with contextlib.suppress(*FAILURES):
        if device.backend == "emulated":
            emulator.load(config)
        elif device.backend == "gpu":
            compiler.load(config, device)


def _cell_result(cell: support_matrix.Cell, results: list[CaseResult], device: Device, quick: bool) -> CellResult:
    forward = cell.direction == "forward"
    checks = [check for result in results for check in result.checks if check.of_forward == forward]
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
        cell.name, cell.direction, cell.dtype, cell.head_dim, cell.feature,
        "compiled" if device.stands_for else cell.status, verdict, device.backend,
        [result.case for result in results], launches,
        sorted({result.configs[cell.kernel] for result in results if cell.kernel in result.configs}),
        worst.tensor if worst else "", worst.error if worst else None, worst.eager_error if worst else None,
        worst.bound if worst else None, sum(result.seconds for result in results), reason,
    )  # fmt: skip


def strain(check: Check) -> float:
    if math.isnan(check.error):
        return math.inf
    return check.error / check.bound if check.bound else check.error


def _why_unreached(cell: support_matrix.Cell, device: Device, quick: bool) -> str:
    features = frozenset() if cell.feature == "plain" else frozenset([cell.feature])
    head_dim_v = min(cell.head_dim, max(planning.support().head_dims_v))
    decision = planning.resolve(Problem(cell.direction, cell.dtype, cell.head_dim, head_dim_v, features), device)
    if isinstance(decision, Decline):
        return str(decision)
    return "left out by --quick" if quick else "no case reaches it: another kernel is preferred"


# ---- either ----


def verify(
    model: torch.nn.Module | None = None, inputs: dict | None = None, **options
) -> KernelReport | model_verification.ModelReport:
    """`verify()`: every kernel the matrix claims for this machine. `verify(model, inputs)`: a patched model."""
    if model is None:
        return verify_kernels(**options)
    if inputs is None:
        raise TypeError(
            "verify(model, inputs) needs the keyword arguments of one forward, such as the tokenizer's output"
        )
    return model_verification.verify_model(model, dict(inputs), **options)
