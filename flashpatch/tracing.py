"""Every attention that happens inside `with flashpatch.trace() as t:`, by module, whoever computes it.

A dispatch mode sees each operator that reaches a device, also those that compiled graphs call; a wrapper around
`nn.Module.__call__` says whose call it is, and one around `F.scaled_dot_product_attention` what was asked for. All three
are there only inside the block. What has no operator is not seen: kernels that torch.compile generates (a compiled
FlexAttention) and libraries that launch kernels by themselves; `profile=True` finds those by their kernels' names.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from . import findings, operator_reading, patcher, profiles
from .call_reading import SDPA_WORDS, Asked, Reader
from .dense_tracking import aten
from .profiles import ProfileReport
from .trace_report import TraceReport, rows_of

# ---- watching ----


def trace(model: torch.nn.Module | None = None, *, profile: bool = False) -> Trace:
    """`with flashpatch.trace() as t:` watches every attention in the block; afterwards `t.report` (and `print(t)`).

    `model` fixes what module paths start from (by default the outermost module called). `profile=True` runs torch's
    profiler beside it and adds what only kernel names show. One trace per process at a time.
    """
    return Trace(model, profile)


def run(
    model: torch.nn.Module, inputs: dict, *, patch: bool = False, compile: bool = False, train: bool = False,
    profile: bool = False,
) -> TraceReport:  # fmt: skip
    """Trace one forward of a model (with `train` and its backward), after one that is not traced.

    `patch` applies flashpatch for it, `compile` runs it under torch.compile. `profile` runs it once more under torch's
    profiler, without the trace, and compares.
    """
    training = model.training
    runner = torch.compile(model) if compile else model

    def step():
        with torch.set_grad_enabled(train):
            output = runner(**inputs)
            if train:
                values = output.values() if hasattr(output, "values") else output
                tensors = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
                sum(tensor.float().mean() for tensor in tensors).backward()
                model.zero_grad(set_to_none=True)

    with patcher.apply(model) if patch else contextlib.nullcontext():
        model.train(train)
        try:
            step()
            with trace(model) as traced:
                step()
            report = traced.report
            if profile:
                with torch.profiler.profile() as profiler:
                    step()
                report.add_profile(kernels_of(profiler))
        finally:
            model.train(training)
    return report


class Watching(TorchDispatchMode):
    """Like torch's own modes: torch.compile neither falls back to eager because of this one nor traces it."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Mode(Watching):
    supports_higher_order_operators = True

    def __init__(self, trace: Trace):
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self._trace._operator(self, function, types, args, kwargs or {})


_active: Trace | None = None


class Trace:
    """A running or finished trace; see `trace`."""

    def __init__(self, model: torch.nn.Module | None = None, profile: bool = False):
        self._profile = profile
        self._reader = Reader(model)
        self._categories: dict[Any, str] = {}
        self._operators = 0
        self._overhead = 0.0
        self._report: TraceReport | None = None

    @property
    def report(self) -> TraceReport:
        """What was seen. Raises RuntimeError inside the block."""
        if self._report is None:
            raise RuntimeError("the trace has not ended; read t.report after the with block")
        return self._report

    def __str__(self) -> str:
        return "a running trace" if self._report is None else str(self._report)

    def __enter__(self) -> Trace:
        global _active
        if _active is not None:
            raise RuntimeError("another flashpatch.trace() is running in this process; one at a time")
        if self._report is not None:
            raise RuntimeError("this trace has ended; make another with flashpatch.trace()")
        if self._profile and torch.autograd._profiler_enabled():
            raise RuntimeError(
                "a torch profiler is running already: trace without profile=True, and read the file it exports with "
                "flashpatch audit --profile FILE"
            )
        self._thread = threading.get_ident()
        self._exits = contextlib.ExitStack()
        if self._profile:
            self._profiler = torch.profiler.profile(acc_events=True)
            self._exits.enter_context(self._profiler)
        self._exits.enter_context(_Mode(self))
        self._module_call = torch.nn.Module.__call__
        self._wrapped = (
            (torch.nn.Module, "__call__", self._module_call, _module_wrapper(self)),
            (F, "scaled_dot_product_attention", F.scaled_dot_product_attention, _sdpa_wrapper(self)),
        )
        self._patch()
        _active = self
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        global _active
        _active = None
        self._unpatch()
        if self._reader.cuda:
            torch.cuda.synchronize()
        wall = (time.perf_counter() - self._began) * 1e3
        self._exits.close()
        self._report = self._summary(wall)
        self._reader.modules.clear()

    def _patch(self) -> None:
        for owner, name, original, ours in self._wrapped:
            if getattr(owner, name) is original:
                setattr(owner, name, ours)

    def _unpatch(self) -> None:
        """Everything back, but what somebody replaced meanwhile, which is theirs."""
        for owner, name, original, ours in self._wrapped:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)

    def _mine(self) -> bool:
        """Whether the running thread is the traced one, or the backward that it waits for."""
        if threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1:
            return True
        self._reader.statements["what other threads ran; a trace watches the thread that began it"] = None
        return False

    # ---- modules ----

    def _enter(self, module, args, kwargs):
        began = time.perf_counter()
        frame = self._reader.modules.frame(module, kwargs, len(self._reader.calls))
        stack = self._reader.modules.stack
        stack.append(frame)
        self._overhead += time.perf_counter() - began
        try:
            if frame.compiled:
                # a compiled graph is guarded on the functions it was made with
                self._unpatch()
                try:
                    out = self._module_call(module, *args, **kwargs)
                finally:
                    self._patch()
            else:
                out = self._module_call(module, *args, **kwargs)
            if len(stack) == 1 and len(self._reader.calls) > frame.calls_before:
                self._reader.modules.look_for_attentions(frame, out)
            return out
        finally:
            stack.pop()

    # ---- operators ----

    def _operator(self, mode, function, types, args, kwargs):
        if types and any(not issubclass(kind, torch.nn.Parameter) and kind is not torch.Tensor for kind in types):
            return function(*args, **kwargs)
        category = self._categories.get(function)
        if category is None:
            category = self._categories[function] = operator_reading.category(function)
        if category == "composite":
            return self._composite(mode, function, args, kwargs)
        self._operators += 1
        began = time.perf_counter()
        inner = 0.0
        handle = getattr(self._reader, f"on_{category}")
        watching = category != "other" or self._reader.tracker.tags
        prepared = None
        if watching and category in ("matmul", "attention"):
            prepared = self._reader.read(handle, function, args, kwargs)
        ran = time.perf_counter()
        out = function(*args, **kwargs)
        inner = time.perf_counter() - ran
        if prepared is not None:
            self._reader.read(prepared, out)
        elif watching and category not in ("matmul", "attention"):
            self._reader.read(handle, function, args, out)
        self._overhead += time.perf_counter() - began - inner
        return out

    def _composite(self, mode, function, args, kwargs):
        """An operator that torch spells out in others; under inference_mode it arrives here whole."""
        outer = self._reader.asked
        if function is aten.scaled_dot_product_attention.default:
            self._reader.asked = Asked(**operator_reading.named(function, args, kwargs, SDPA_WORDS))
        try:
            with mode:
                return function.decompose(*args, **kwargs)
        finally:
            self._reader.asked = outer

    # ---- the end ----

    def _summary(self, wall: float) -> TraceReport:
        gpu = next((call.device for call in self._reader.calls if call.device.startswith("cuda")), None)
        found = findings.find(self._reader.calls, self._reader.modules.missing, self._reader.modules.by_order)
        report = TraceReport(
            torch.cuda.get_device_name(gpu) if gpu else "CPU", torch.__version__, rows_of(self._reader.calls), found,
            self._operators, wall, self._overhead * 1e3, list(self._reader.statements),
        )  # fmt: skip
        if self._profile:
            report.add_profile(kernels_of(self._profiler))
        return report


def kernels_of(profiler) -> ProfileReport:
    """What a finished torch.profiler.profile saw, classified."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        return profiles.read(path)


# ---- wrappers ----


def _module_wrapper(trace: Trace):
    original = torch.nn.Module.__call__
    owner = weakref.ref(trace)

    def __call__(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        running = owner()
        if running is None or running._report is not None or not running._mine():
            return original(self, *args, **kwargs)
        return running._enter(self, args, kwargs)

    return __call__


def _sdpa_wrapper(trace: Trace):
    original = F.scaled_dot_product_attention

    def scaled_dot_product_attention(*args, **kwargs):
        if torch.compiler.is_compiling() or trace._report is not None or not trace._mine():
            return original(*args, **kwargs)
        outer = trace._reader.asked
        words = dict(zip(SDPA_WORDS.values(), args, strict=False))
        words.update({SDPA_WORDS[name]: value for name, value in kwargs.items() if name in SDPA_WORDS})
        try:
            trace._reader.asked = Asked(**words)
        except TypeError:
            return original(*args, **kwargs)  # torch explains what is wrong with the arguments
        try:
            return original(*args, **kwargs)
        finally:
            trace._reader.asked = outer

    return scaled_dot_product_attention
