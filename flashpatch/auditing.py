"""What is here and what would run: the environment, the matrix for one GPU, and each attention module of a model.

Nothing is launched and no CUDA context is created beyond asking for the GPU's name; a model is built without weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import execution, models, ops, patcher, planning
from .environment import Environment, environment
from .problem import Decline, DeclinedError, Device, Plan, Problem, Reason

# ---- the matrix ----


@dataclass(frozen=True)
class Support:
    """One line of the matrix for a GPU: a feature in one direction and dtype, over the head dims that share a status."""

    direction: Annotated[str, "forward or backward"]
    dtype: Annotated[str, "dtype of q, k, v"]
    feature: Annotated[str, "plain: attention itself; otherwise what is asked beside it"]
    head_dims: Annotated[list[int], "padded head dims; every multiple of 8 runs in the next one up"]
    status: Annotated[str, "verified, compiled or unsupported"]
    kernel: Annotated[str | None, "kernel that runs it"]
    reason: Annotated[str, "why no kernel does, or a note"]


def support_of(device: Device, dtype: str | None = None) -> list[Support]:
    """The matrix for one GPU, as planning decides it there (a GPU's shared memory counts)."""
    matrix = planning.support()
    rows: dict[tuple, list[int]] = {}
    for direction in ("forward", "backward"):
        for name in ("bfloat16", "float16", "float32", "float64"):
            if dtype not in (None, name):
                continue
            for feature in matrix.features:
                for head_dim in matrix.head_dims:
                    features = frozenset() if feature == "plain" else frozenset([feature])
                    decision = planning.resolve(Problem(direction, name, head_dim, head_dim, features), device)
                    if isinstance(decision, Plan):
                        outcome = (decision.status, decision.config.kernel, decision.note)
                    else:
                        outcome = ("unsupported", None, "; ".join(reason.text for reason in decision.reasons))
                    rows.setdefault((direction, name, feature, *outcome), []).append(head_dim)
    return [
        Support(direction, name, feature, head_dims, status, kernel, reason)
        for (direction, name, feature, status, kernel, reason), head_dims in rows.items()
    ]


MARKERS = ("<!-- support:begin -->", "<!-- support:end -->")


def markdown(matrix: planning.Matrix) -> str:
    """The support table of the README, from the matrix alone."""
    generations = list(matrix.generations)
    lines = ["| | " + " | ".join(matrix.generations[name] for name in generations) + " |"]
    lines.append("|---" * (len(generations) + 1) + "|")
    lines.append("| for example | " + " | ".join(_examples(matrix, name) for name in generations) + " |")
    dims = ", ".join(map(str, matrix.head_dims))
    for feature, meaning in matrix.features.items():
        cells = [_cell_words(matrix, name, feature) for name in generations]
        lines.append(f"| `{feature}`: {meaning} | " + " | ".join(cells) + " |")
    dtypes = sorted({cell.dtype for cell in matrix.cells.values()})
    lines += [
        "",
        f"Kernels take {' and '.join(dtypes)} with head dims up to {max(matrix.head_dims)} (padded to {dims}; every "
        "multiple of 8). A word stands for forward and backward; two words are forward / backward. "
        "*verified*: ran on that generation and passed, the evidence is in `tests/evidence`. *compiled*: builds for "
        "it and passes in the CPU emulator, never ran there. *fallback*: no kernel; computed exactly by torch operators "
        "in tiles, and counted.",
    ]
    together = [
        f"{' + '.join(sorted(names))}{'' if len(directions) == 2 else f' in the {min(directions)}'} ({reason})"
        for names, directions, reason in matrix.excludes
    ]
    if together:
        lines.append(f"Not together in one kernel: {'; '.join(together)}.")
    return "\n".join(lines)


def _examples(matrix: planning.Matrix, generation: str) -> str:
    gpus = [gpu for item in matrix.capabilities.values() if item.generation == generation for gpu in item.gpus]
    return ", ".join(gpus[:3])


def _cell_words(matrix: planning.Matrix, generation: str, feature: str) -> str:
    words = []
    for direction in ("forward", "backward"):
        found = {
            (cell.dtype, cell.head_dim): cell.status
            for cell in matrix.cells.values()
            if (cell.generation, cell.direction, cell.feature) == (generation, direction, feature)
        }
        plain = {
            (cell.dtype, cell.head_dim)
            for cell in matrix.cells.values()
            if (cell.generation, cell.direction, cell.feature) == (generation, direction, "plain")
        }
        if not found:
            words.append("fallback")
        elif set(found) < plain:
            words.append(f"{_weakest(found.values())} (head dims {', '.join(map(str, sorted({d for _, d in found})))})")
        else:
            words.append(_weakest(found.values()))
    return words[0] if words[0] == words[1] else " / ".join(words)


def _weakest(statuses) -> str:
    return "compiled" if "compiled" in statuses else "verified"


def with_table(text: str, table: str) -> str:
    """A document with what is between its markers replaced by the table. Raises ValueError without markers."""
    begin, end = (text.find(marker) for marker in MARKERS)
    if begin < 0 or end < begin:
        raise ValueError(f"the document has no {MARKERS[0]} ... {MARKERS[1]}")
    return f"{text[: begin + len(MARKERS[0])]}\n{table}\n{text[end:]}"


# ---- the report ----


class NoSuchDevice(RuntimeError):
    """The torch device asked for is not here."""


class UnknownGpu(ValueError):
    """`--gpu` names none that is known; the text lists those that are."""


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
    with FakeTensorMode(allow_non_fake_inputs=True):
        if not isinstance(model, torch.nn.Module):
            model = _skeleton(model, dtype, load)
        if inputs is None:
            inputs = models.dummy_inputs(model, **_only(load, "batch", "seqlen"))
        now = {id(module): _implementation(module) for _, module, _ in patcher.attention_modules(model)}
        classes = {path: module for path, module, _ in patcher.attention_modules(model)}
        recorder = _Recorder()
        training = model.training
        model.eval()
        try:
            with patcher.apply(model) as patch, torch.no_grad(), recorder:
                try:
                    model(**inputs)
                    refusal = ""
                except DeclinedError as declined:
                    refusal = str(declined.decline)
                rows = patch.report.rows
                layers = {row.layer: classes[row.path] for row in rows if row.layer is not None}
        finally:
            model.train(training)
    asked: dict[int, list[Problem]] = {}
    for layer, problem in recorder.problems:
        if layer in layers:
            asked.setdefault(id(layers[layer]), []).append(problem)
    found = []
    for row in rows:
        module = classes[row.path]
        problems = list(dict.fromkeys(asked.get(id(module), ())))
        found.append(_module_audit(row, now[id(module)], problems, target, refusal))
    return found


def _skeleton(source, dtype: str | None, load: dict) -> torch.nn.Module:
    """A model of the configuration without values in its weights; to be called under FakeTensorMode."""
    if isinstance(source, (str, os.PathLike)):
        options = _only(load, "trust_remote_code", "gguf_file", "revision")
        return models.load(source, dtype=dtype, random_weights=True, patched=False, **options)
    return models.build_random(source, dtype=dtype)


def _only(options: dict, *names: str) -> dict:
    return {name: value for name, value in options.items() if name in names}


def _implementation(module) -> str:
    config = getattr(module, "config", None)
    return str(getattr(config, "_attn_implementation", None) or "its own")


def _module_audit(row, now: str, problems: list[Problem], target: Device | Reason, refusal: str) -> ModuleAudit:
    if not problems:
        reasons = [f"{code}: {text}" for code, text in row.reasons if row.switched is False]
        reasons = reasons or [refusal or "not_dispatched: one forward did not bring it to flashpatch"]
        return ModuleAudit(row.path, row.class_name, now, False, "", 0, 0, [], "its own", "its own", reasons)
    words, reasons = {}, {}
    for direction in ("forward", "backward"):
        for problem in problems:
            problem = replace(problem, direction=direction)
            named = isinstance(target, Reason)
            decision = Decline(problem, (target,)) if named else planning.resolve(problem, target)
            if isinstance(decision, Plan):
                words.setdefault(direction, f"{decision.config.kernel} ({decision.status})")
            else:
                words[direction] = "fallback"
                reasons.update({f"{reason.code}: {reason.text}": None for reason in decision.reasons})
    first = problems[0]
    features = sorted(set().union(*(problem.features for problem in problems)))
    return ModuleAudit(
        row.path, row.class_name, now, True, first.dtype, first.head_dim, first.head_dim_v, features,
        words["forward"], words["backward"], list(reasons),
    )  # fmt: skip


class _Recorder(TorchDispatchMode):
    """Hears flashpatch's operator being asked, and by which layer.

    Nothing has values here. Where they would decide, the batch is an ordinary one: `all` of it holds (no padding),
    not `any` of it is special (no packing).
    """

    def __init__(self):
        super().__init__()
        self.problems: list[tuple[int, Problem]] = []
        self.answers: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.flashpatch.attention_forward.default:
            q, k, v, *arguments, _, layer = args
            call = ops.expanded(ops.call_of(*arguments), q, k)
            dtype = str(q.dtype).removeprefix("torch.")
            problem = Problem("forward", dtype, q.shape[-1], v.shape[-1], execution.features(q, k, v, call))
            self.problems.append((layer, problem))
        if function is torch.ops.aten._local_scalar_dense.default and id(args[0]) in self.answers:
            return self.answers[id(args[0])][1]
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.all.default, torch.ops.aten.any.default):
            # kept with its answer, so that its id stays its own
            self.answers[id(result)] = (result, function is torch.ops.aten.all.default)
        return result


def _target(gpu: str | None, device: str | None) -> tuple[Device | Reason, str]:
    if gpu:
        try:
            target = planning.gpu(gpu)
        except ValueError as error:
            raise UnknownGpu(str(error)) from None
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
    return f"{target.name} ({title}, {'.'.join(map(str, target.capability))})"
