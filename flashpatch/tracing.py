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
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from . import (
    counting,
    families,
    findings,
    inlined,
    mask_kinds,
    module_reading,
    operator_reading,
    patcher,
    profiles,
    sdpa_reasons,
)
from .dense_tracking import MATMULS, Tags, Tracker, aten, nbytes
from .observations import Call, Facts
from .profiles import ProfileReport
from .trace_report import Attention, TraceReport

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


@dataclass
class _Frame:
    module: torch.nn.Module
    path: str
    root: torch.nn.Module
    position_ids: torch.Tensor | None
    compiled: bool
    calls_before: int = 0
    declines_before: dict = field(default_factory=dict)  # of a patched module: (code, text) -> times
    attentions: list[str] = field(default_factory=list)  # a compiled module's attention modules, in order
    seen: int = 0


@dataclass
class _Asked:
    """The arguments of a running F.scaled_dot_product_attention."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


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
        self._model, self._profile = model, profile
        self._stack: list[_Frame] = []
        self._calls: list[Call] = []
        self._tracker = Tracker()
        self._outputs = Tags()
        self._mask_kinds = Tags()
        self._documents = Tags()
        self._names: dict[int, tuple[Any, dict[int, str]]] = {}
        self._refusals: dict[tuple, dict[str, str]] = {}
        self._asked: _Asked | None = None
        self._categories: dict[Any, str] = {}
        self._missing: list[str] = []
        self._by_order: list[str] = []
        self._statements: dict[str, None] = {}
        self._operators = 0
        self._overhead = 0.0
        self._cuda = False
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
        if self._cuda:
            torch.cuda.synchronize()
        wall = (time.perf_counter() - self._began) * 1e3
        self._exits.close()
        self._report = self._summary(wall)
        self._stack, self._names = [], {}

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
        self._statements["what other threads ran; a trace watches the thread that began it"] = None
        return False

    # ---- modules ----

    def _enter(self, module, args, kwargs):
        began = time.perf_counter()
        frame = self._frame(module, kwargs)
        self._stack.append(frame)
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
            if len(self._stack) == 1:
                self._look_for_attentions(frame, out)
            return out
        finally:
            self._stack.pop()

    def _frame(self, module, kwargs) -> _Frame:
        outer = self._stack[-1] if self._stack else None
        root = outer.root if outer else self._root_of(module)
        path = self._paths(root).get(id(module))
        if path is None:
            path = f"{outer.path}.{type(module).__name__}"
        positions = kwargs.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            positions = outer.position_ids if outer else None
        compiled = isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        frame = _Frame(module, path, root, positions, compiled, len(self._calls))
        tag = getattr(module, "_flashpatch", None)
        if tag is not None:
            frame.declines_before = dict(counting.counts(tag.layer).declines)
        if compiled:
            inner = {
                name: child for name, child in module.named_modules() if "attention" in type(child).__name__.lower()
            }
            outermost = [name for name in inner if not any(name.startswith(f"{other}.") for other in inner)]
            frame.attentions = [module_reading.plain(f"{path}.{name}".strip(".")) for name in outermost if name]
        return frame

    def _root_of(self, module):
        """What an outermost module's path starts from: itself, unless it was seen inside another before (a layer that
        activation checkpointing runs again is called by nobody)."""
        if self._model is not None:
            self._paths(self._model)
        return next((root for root, names in self._names.values() if id(module) in names), module)

    def _paths(self, root) -> dict[int, str]:
        entry = self._names.get(id(root))
        if entry is None:
            names = {id(module): module_reading.plain(name) for name, module in root.named_modules()}
            for parameter in root.parameters():
                with contextlib.suppress(NotImplementedError, RuntimeError):
                    self._tracker.parameters.add(parameter.untyped_storage()._cdata)
            entry = self._names[id(root)] = (root, names)
        return entry[1]

    def _look_for_attentions(self, frame: _Frame, out) -> None:
        """A result with an empty tuple, or a tuple of None, where attention weights were asked for.

        transformers puts an empty tuple also where there is no such attention: one says something only of a model that
        attended, and as cross-attention only of one that has it.
        """
        if len(self._calls) == frame.calls_before:
            return
        for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
            weights = getattr(out, name, None)
            if not isinstance(weights, (tuple, list)) or any(weight is not None for weight in weights):
                continue
            if weights or name != "cross_attentions" or module_reading.has_cross_attention(frame.module):
                where = f"{frame.path or type(frame.module).__name__} ({name})"
                if where not in self._missing:
                    self._missing.append(where)

    def _facts(self) -> Facts:
        """Whose call this is."""
        if not self._stack:
            return Facts("", "")
        frame = self._stack[-1]
        module, compiled = frame.module, next((outer for outer in self._stack if outer.compiled), None)
        path = frame.path
        if compiled is not None:
            inside = compiled.module
            count = len(compiled.attentions)
            if count:
                path = compiled.attentions[compiled.seen % count]
                names = {module_reading.plain(name): child for name, child in inside.named_modules()}
                relative = path.removeprefix(f"{compiled.path}.") if compiled.path else path
                module = names.get(relative, module)
            compiled.seen += 1
            name = compiled.path or type(inside).__name__
            if name not in self._by_order:
                self._by_order.append(name)
        root = self._stack[0].module
        config = next(
            (found for owner in (module, *(f.module for f in reversed(self._stack)))
             if (found := getattr(owner, "config", None)) is not None and hasattr(found, "_attn_implementation")), None
        )  # fmt: skip
        implementation = getattr(config, "_attn_implementation", None)
        weight = next((p for p in module.parameters() if p.is_floating_point()), None)
        softcap = module_reading.number(module, config, "attn_logit_softcapping", "softcap")
        window = getattr(module, "sliding_window", None)
        return Facts(
            path or type(module).__name__, type(module).__name__, type(root).__name__, implementation,
            getattr(getattr(root, "config", None), "_attn_implementation", None), module_reading.mask_registered(implementation),
            module_reading.function_of(implementation),
            module_reading.supports_sdpa([f.module for f in self._stack]), module_reading.dispatches(module) if implementation else None, softcap, isinstance(getattr(module, "sinks", None), torch.Tensor),
            window if isinstance(window, int) else None, "" if weight is None else module_reading.word(weight.dtype),
            compiled is not None, inlined.where(type(module)) is not None,
        )  # fmt: skip

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
        handle = getattr(self, f"_on_{category}")
        watching = category != "other" or self._tracker.tags
        prepared = None
        if watching and category in ("matmul", "attention"):
            prepared = self._read(handle, function, args, kwargs)
        ran = time.perf_counter()
        out = function(*args, **kwargs)
        inner = time.perf_counter() - ran
        if prepared is not None:
            self._read(prepared, out)
        elif watching and category not in ("matmul", "attention"):
            self._read(handle, function, args, out)
        self._overhead += time.perf_counter() - began - inner
        return out

    def _read(self, reading, *arguments):
        """What is watched must run as it does unwatched: a call that cannot be read is said, not raised."""
        try:
            return reading(*arguments)
        except Exception as error:
            self._statements[f"{findings.UNREADABLE} ({type(error).__name__}: {error}): worth an issue"] = None
            return None

    def _composite(self, mode, function, args, kwargs):
        """An operator that torch spells out in others; under inference_mode it arrives here whole."""
        outer = self._asked
        if function is aten.scaled_dot_product_attention.default:
            self._asked = _Asked(**operator_reading.named(function, args, kwargs, _SDPA_WORDS))
        try:
            with mode:
                return function.decompose(*args, **kwargs)
        finally:
            self._asked = outer

    def _on_other(self, function, args, out) -> None:
        self._tracker.follows(function, args, out)

    def _on_clone(self, function, args, out) -> None:
        self._tracker.copies(args, out)
        if self._tracker.tags:
            self._tracker.follows(function, args, out)

    def _on_softmax(self, function, args, out) -> None:
        self._tracker.normalises(function, args, out)

    def _on_softmax_backward(self, function, args, out) -> None:
        note = self._tracker.tags.get(args[1])
        if note is not None and note.call is not None:
            note.call.backwards.append((None, None))

    def _on_matmul(self, function, args, kwargs):
        if torch._C._current_graph_task_id() != -1 and not self._stack:
            return None  # the matmuls of a backward
        note = self._tracker.closes(function, args)
        mark = self._mark(args[0].device) if note is None else None
        if kwargs.get("out") is not None:
            return lambda out: self._after_matmul(function, args, kwargs["out"], note, mark)
        return lambda out: self._after_matmul(function, args, out, note, mark)

    def _after_matmul(self, function, args, out, note, mark) -> None:
        if note is None:
            self._tracker.opens(function, args, out, mark)
            return
        a, b = (args[position] for position in MATMULS[function])
        transposed = self._tracker.tags.get(a) is not note
        values = a if transposed else b
        head_dim_v = values.shape[-2] if transposed else values.shape[-1]
        note.flops += (
            2.0 * note.rows * note.columns * head_dim_v * (out.numel() / max(1, out.shape[-1] * out.shape[-2]))
        )
        note.bytes += nbytes(a, b, out)
        shape = note.shape if len(note.shape) == 4 else (1, *((1, *a.shape)[-3:-2]), note.rows, note.columns)
        batch, heads = shape[:2]
        family = "sdpa_math" if note.softmax == "_safe_softmax" else "eager"
        expanded = max(note.expanded, self._tracker.expanded.get(values) or 1)
        q, k, v = (batch, heads, note.rows, note.q[-1]), (batch, heads, note.columns, note.q[-1]), None
        v = (batch, heads, note.columns, head_dim_v)
        call = self._note(family, q, k, v, note.dtype, note.device, note.mask, features=note.features)
        call.flops, call.bytes, call.expanded = note.flops, note.bytes, expanded
        call.matrix_shape, call.matrix_dtype, call.matrix_bytes = note.largest
        if call.matrix_shape and len(note.shape) == 4:
            call.matrix_shape = (*note.shape[:2], *call.matrix_shape[-2:])
        call.matrices = note.matrices
        call.declines = self._declined()
        call.start, call.stop = note.start, self._mark(note.device)
        note.call, note.mask = call, None

    def _on_attention(self, function, args, kwargs):
        family = families.of_operator(operator_reading.full_name(function))
        named = operator_reading.named(function, args, kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not tensors:
            return None
        device = tensors[0].device
        if families.is_backward(operator_reading.full_name(function)):
            call = next(
                (
                    c
                    for name in ("out", "output", "logsumexp", "softmax_lse")
                    if (c := self._outputs.get(named.get(name)))
                ),
                None,
            )
            mark = self._mark(device)
            return lambda out: call.backwards.append((mark, self._mark(device))) if call else None
        if family.name == "native_mha":
            mark = self._mark(device)
            return lambda out: self._after_native(named, tensors, mark)
        q, k, v = operator_reading.tensors(named, tensors)
        if q is None:
            return None
        before = operator_reading.counted(named) if family.name == "flashpatch" else None
        mark = self._mark(device)
        return lambda out: self._after_attention(function, family, named, (q, k, v), before, mark, out)

    def _after_attention(self, function, family, named, qkv, before, mark, out) -> None:
        q, k, v = qkv
        stop = self._mark(q.device)
        name, kernel, declines = family.name, "", []
        if before is not None:
            name, kernel, declines = operator_reading.ran(named, before)
        heads_last = family.name not in operator_reading.HEADS_SECOND
        shapes = [operator_reading.shape(tensor, heads_last) for tensor in qkv]
        mask = next((named[word] for word in operator_reading.MASKS if isinstance(named.get(word), torch.Tensor)), None)
        causal = bool(named.get("is_causal") or named.get("causal"))
        left, right = (operator_reading.window(named, side) for side in ("left", "right"))
        if family.name == "flashpatch":
            causal = right == 0
        call = self._note(
            name, *shapes, q.dtype, q.device, mask, features=operator_reading.features(named), causal=causal
        )
        call.window = left is not None and left >= 0
        if call.window and call.mask in ("none", "causal"):
            call.mask = (
                f"causal window of {left + 1}" if causal or right == 0 else f"window of {left} before, {right} after"
            )
        call.kernel, call.declines = kernel, declines
        pairs = operator_reading.pairs(named, shapes, causal, left if call.window else None)
        call.flops = 2.0 * shapes[0][1] * pairs * (shapes[0][-1] + shapes[2][-1])
        call.bytes = nbytes(q, k, v, mask, out)
        call.start, call.stop = mark, stop
        call.expanded = max(call.expanded, *(self._tracker.expanded.get(tensor) or 1 for tensor in (k, v)))
        if name == "flex_eager":
            batch, heads, rows, _ = shapes[0]
            call.matrix_shape, call.matrix_dtype = (batch, heads, rows, shapes[1][2]), "float32"
            call.matrix_bytes, call.matrices = 4 * batch * heads * rows * shapes[1][2], 2
            score, blocks = named.get("score_mod"), named.get("block_mask")
            call.mask = "in code (mask_mod)" if blocks is not None else "none"
            call.features |= {"score_mod"} if score is not None else set()
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self._outputs.put(value, call)

    def _declined(self) -> list[str]:
        """Why flashpatch left the running module's call to torch's operators, where it did."""
        frame = self._stack[-1] if self._stack else None
        tag = getattr(frame.module, "_flashpatch", None) if frame else None
        return [] if tag is None else operator_reading.declined_since(tag.layer, frame.declines_before)

    def _after_native(self, named, tensors, mark) -> None:
        """torch's C++ path: on a CPU it spells attention out, on a GPU it chooses."""
        first = tensors[0]
        shapes, dense = operator_reading.native(named), first.device.type == "cpu"
        mask = named.get("mask")
        name = "native_mha_dense" if dense else "native_mha"
        call = self._note(name, *shapes, first.dtype, first.device, mask)
        batch, heads, rows, head_dim = shapes[0]
        columns = shapes[1][2]
        call.flops = 4.0 * batch * heads * rows * columns * head_dim
        call.bytes = nbytes(*tensors)
        if dense:
            call.matrix_shape, call.matrix_dtype = (batch, heads, rows, columns), module_reading.word(first.dtype)
            call.matrix_bytes, call.matrices = batch * heads * rows * columns * first.element_size(), 2
            call.bytes += 4 * call.matrix_bytes
        call.start, call.stop = mark, self._mark(first.device)

    # ---- one call ----

    def _note(self, family, q, k, v, dtype, device, mask, *, features=(), causal=False) -> Call:
        facts, asked = self._facts(), self._asked if family.startswith("sdpa") else None
        if asked is None and family == "sdpa_math":
            asked = _reconstructed(q, k, v, dtype, device, mask, features)
        recompute = torch._C._current_graph_task_id() != -1
        call = Call(
            facts,
            family,
            q,
            k,
            v,
            module_reading.word(dtype),
            str(device),
            recompute,
            causal=causal,
            features=set(features),
        )
        if asked is not None:
            given = asked.mask
            call.causal = asked.is_causal
            call.dtype = module_reading.word(asked.q.dtype)
            if asked.k.dim() == 4:
                call.q, call.k, call.v = (tuple(tensor.shape) for tensor in (asked.q, asked.k, asked.v))
            heads, heads_kv = ((1, *tensor.shape[:-2])[-1] for tensor in (asked.q, asked.k))  # of 2-D tensors: one
            if family in ("sdpa_math", "sdpa_efficient") and heads_kv != heads:
                call.expanded = heads // max(1, heads_kv)
            if asked.dropout_p:
                call.features.add("dropout")
            call.refused = self._why_not(asked, family)
            mask = given
        if isinstance(mask, torch.Tensor):
            call.mask, call.mask_shape = self._kind(mask, call), tuple(mask.shape)
            call.mask_bytes = nbytes(mask)
        elif call.causal:
            call.mask = "causal"
        if device.type == "cpu" and family.startswith("sdpa"):
            call.forecast = sdpa_reasons.forecast(call.q, call.k, call.v, mask, getattr(torch, call.dtype))
        self._check_documents(call, mask)
        self._calls.append(call)
        return call

    def _kind(self, mask: torch.Tensor, call: Call) -> str:
        key = (tuple(mask.shape), mask.stride(), mask.storage_offset(), _version(mask), call.lengths)
        known = self._mask_kinds.get(mask)
        if known is None or known[0] != key:
            known = (key, mask_kinds.kind(mask, *call.lengths))
            self._mask_kinds.put(mask, known)
        return known[1]

    def _check_documents(self, call: Call, mask) -> None:
        """Whether tokens of packed documents see each other's."""
        positions = self._stack[-1].position_ids if self._stack else None
        if positions is None or call.lengths[0] != call.lengths[1]:
            return
        if call.features & {"varlen", "key_ranges"} or call.family in (
            "flex",
            "flex_eager",
            "native_mha",
            "native_mha_dense",
            "unknown",
        ):
            return
        known = self._documents.get(positions)
        if known is None:
            known = (mask_kinds.documents(positions, call.lengths[0]),)
            self._documents.put(positions, known)
        if known[0] is not None:
            call.mixes_documents = mask_kinds.mixes_documents(
                mask, known[0].to(mask.device if mask is not None else "cpu")
            )

    def _why_not(self, asked: _Asked, family: str) -> dict[str, str]:
        tensors = (asked.q, asked.k, asked.v, asked.mask)
        key = (
            family, asked.dropout_p > 0, asked.is_causal, asked.enable_gqa, sdpa_reasons.enabled(),
            *((t.shape, t.stride(), t.dtype, t.requires_grad) if t is not None else None for t in tensors),
        )  # fmt: skip
        if key not in self._refusals:
            self._refusals[key] = sdpa_reasons.refusals(
                *tensors, asked.dropout_p, asked.is_causal, asked.enable_gqa, family
            )
        return self._refusals[key]

    def _mark(self, device: torch.device):
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                self._statements["a CUDA graph was captured; its calls have no time, its replays are not seen"] = None
                return None
            self._cuda = True
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    # ---- the end ----

    def _summary(self, wall: float) -> TraceReport:
        rows: dict[tuple, Attention] = {}
        for call in self._calls:
            facts = call.facts
            key = (
                facts.path, call.family, call.q, call.k, call.v, call.dtype, call.device, call.mask, call.mask_shape,
                call.causal, tuple(sorted(call.features)), call.kernel, tuple(call.declines), facts.compiled,
            )  # fmt: skip
            if (row := rows.get(key)) is None:
                row = rows[key] = Attention(
                    facts.path, facts.class_name, call.family, families.BY_NAME[call.family].kind, call.kernel,
                    facts.compiled, 0, 0, 0, list(call.q), list(call.k), list(call.v), call.dtype, call.device, call.mask,
                    list(call.mask_shape), call.causal, sorted(call.features), None, None, 0.0, 0,
                    list(call.matrix_shape), call.matrix_dtype, call.matrix_bytes, call.matrices, call.expanded,
                    call.refused, call.forecast, call.declines,
                )  # fmt: skip
            row.calls += not call.recompute
            row.recomputes += call.recompute
            row.flops += call.flops
            row.bytes += call.bytes
            row.milliseconds = _add(row.milliseconds, _between(call.start, call.stop))
            row.backward_calls += len(call.backwards)
            for mark in call.backwards:
                row.backward_milliseconds = _add(row.backward_milliseconds, _between(*mark))
        gpu = next((call.device for call in self._calls if call.device.startswith("cuda")), None)
        found = findings.find(self._calls, self._missing, self._by_order)
        report = TraceReport(
            torch.cuda.get_device_name(gpu) if gpu else "CPU", torch.__version__, list(rows.values()), found,
            self._operators, wall, self._overhead * 1e3, list(self._statements),
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


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; those of inference_mode do not say."""
    return -1 if tensor.is_inference() else tensor._version


def _add(total: float | None, value: float | None) -> float | None:
    return total if value is None else value + (total or 0.0)


def _between(start, stop) -> float | None:
    """Milliseconds between two marks."""
    if start is None or stop is None:
        return None
    return start.elapsed_time(stop) if hasattr(start, "elapsed_time") else (stop - start) * 1e3


def _reconstructed(q, k, v, dtype, device, mask, features) -> _Asked:
    """The arguments of a scaled_dot_product_attention that was not called by that name, from what its operators got."""
    tensors = (torch.empty(shape, dtype=dtype, device=device) for shape in (q, k, v))
    causal = (
        isinstance(mask, torch.Tensor) and not mask.requires_grad and mask_kinds.kind(mask, q[-2], k[-2]) == "causal"
    )
    return _Asked(*tensors, None if causal else mask, 0.1 if "dropout" in features else 0.0, causal)


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
        outer = trace._asked
        words = dict(zip(_SDPA_WORDS.values(), args, strict=False))
        words.update({_SDPA_WORDS[name]: value for name, value in kwargs.items() if name in _SDPA_WORDS})
        try:
            trace._asked = _Asked(**words)
        except TypeError:
            return original(*args, **kwargs)  # torch explains what is wrong with the arguments
        try:
            return original(*args, **kwargs)
        finally:
            trace._asked = outer

    return scaled_dot_product_attention


# argument of scaled_dot_product_attention, in order -> field of _Asked
_SDPA_WORDS = {
    "query": "q", "key": "k", "value": "v", "attn_mask": "mask", "dropout_p": "dropout_p", "is_causal": "is_causal",
    "scale": "scale", "enable_gqa": "enable_gqa",
}  # fmt: skip
