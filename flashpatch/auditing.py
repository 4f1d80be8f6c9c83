"""What is here and what would run: the environment, the matrix for one GPU, and each attention module of a model.

Nothing is launched and no CUDA context is created beyond asking for the GPU's name; a model is built without weights.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import execution, models, ops, patcher, planning
from .environment import Environment, environment
from .problem import DIRECTIONS, DTYPES, Decline, DeclinedError, Device, Plan, Problem, Reason

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
                    head_dim_v = min(head_dim, matrix.head_dims_v[-1])
                    decision = planning.resolve(Problem(direction, name, head_dim, head_dim_v, features), device)
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
    largest = {d: max(cell.head_dim for cell in matrix.cells.values() if cell.dtype == d) for d in dtypes}
    smaller = "".join(f", {d} up to {size}" for d, size in largest.items() if size < max(largest.values()))
    lines += [
        "",
        f"Kernels take {', '.join(dtypes[:-1])} and {dtypes[-1]} with head dims up to {max(matrix.head_dims)}{smaller} (padded "
        f"to {dims}; every multiple of 8). A word stands for forward and backward; two words are forward / backward. "
        "*verified*: ran on that generation and passed, the evidence is in `tests/evidence`. *compiled*: builds for "
        "it and passes in the CPU emulator, no run of it there is on record. *fallback*: no kernel; computed exactly by torch operators "
        "in tiles, and counted.",
    ]
    for name, title in matrix.generations.items():
        here = sorted({cell.dtype for cell in matrix.cells.values() if cell.generation == name})
        if here and here != dtypes:
            lines[-1] += f" On {title} only {' and '.join(here)}."
    lines[-1] += f" Largest head dims, forward / backward: {_largest_head_dims(matrix)}."
    together = [
        f"{' + '.join(sorted(names))}{'' if len(directions) == 2 else f' in the {min(directions)}'} ({reason})"
        for names, directions, reason in matrix.excludes
    ]
    if together:
        lines.append(f"Not together in one kernel: {'; '.join(together)}.")
    return "\n".join(lines)


def _largest_head_dims(matrix: planning.Matrix) -> str:
    """Per generation, and per capability where a smaller shared memory holds less; those without kernels are left out."""
    words = []
    for name, title in matrix.generations.items():
        found: dict[tuple[int, int], list[str]] = {}
        for number in (n for n, capability in matrix.capabilities.items() if capability.generation == name):
            device = planning.device_for(number)
            largest = tuple(_largest_head_dim(matrix, device, direction) for direction in DIRECTIONS)
            found.setdefault(largest, []).append(".".join(map(str, number)))
        for (forward, backward), numbers in found.items():
            if forward:
                which = f" ({', '.join(numbers)})" if len(found) > 1 else ""
                words.append(f"{title}{which} {forward} / {backward}")
    return ", ".join(words)


def _largest_head_dim(matrix: planning.Matrix, device: Device, direction: str) -> int:
    sizes = [
        head_dim
        for head_dim in matrix.head_dims
        for dtype in DTYPES
        if isinstance(
            planning.resolve(Problem(direction, dtype, head_dim, min(head_dim, matrix.head_dims_v[-1])), device),
            Plan,
        )
    ]
    return max(sizes, default=0)


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
        dtypes = {dtype for dtype, _ in found}
        plain = {
            (cell.dtype, cell.head_dim)
            for cell in matrix.cells.values()
            if (cell.generation, cell.direction, cell.feature) == (generation, direction, "plain")
            and cell.dtype in dtypes
        }
        if not found:
            words.append("fallback")
        elif set(found) < plain:
            words.append(f"{_statuses(found)} (head dims {', '.join(map(str, sorted({d for _, d in found})))})")
        else:
            words.append(_statuses(found))
    return words[0] if words[0] == words[1] else " / ".join(words)


def _statuses(found: dict[tuple[str, int], str]) -> str:
    """The weakest status of some cells, (dtype, head dim) -> status; where dtypes differ, those of the weaker named."""
    weaker = sorted({dtype for (dtype, _), status in found.items() if status == "compiled"})
    if not weaker:
        return "verified"
    return "compiled" if {dtype for dtype, _ in found} == set(weaker) else f"verified, {' and '.join(weaker)} compiled"


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


@dataclass(frozen=True)
class Square:
    """One generation, dtype and direction for a model."""

    generation: Annotated[str, "as in compat_matrix.yaml"]
    title: Annotated[str, "what people call it"]
    capabilities: Annotated[list[str], "compute capabilities that decide alike"]
    gpus: Annotated[list[str], "GPUs of them"]
    shared_memory: Annotated[int, "bytes a block may have there"]
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
    return [_module_audit(call, target) for call in _traced(model, dtype, inputs, load)]


def grid(model, *, dtype: str | None = None, inputs=None, **load) -> GridReport:
    """What a model would run on, on every generation and in every dtype; nothing is computed, no GPU needed."""
    calls = _traced(model, None, inputs, load)
    asked = [call.problems for call in calls if call.problems]
    found: dict[tuple, Square] = {}
    matrix = planning.support()
    for capability in matrix.capabilities.values():
        device = planning.device_for(capability.number)
        number = ".".join(map(str, capability.number))
        squares = [
            Square(
                capability.generation, matrix.generations[capability.generation], [number], list(capability.gpus),
                device.shared_memory, name, direction, *_tallied(asked, device, name, direction),
            )
            for name in DTYPES if dtype in (None, name) for direction in DIRECTIONS
        ]  # fmt: skip
        key = (capability.generation, *(str(square.tallies) for square in squares))
        if key in found:  # decides as one before it
            for square in found[key]:
                square.capabilities.append(number)
                square.gpus.extend(capability.gpus)
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
    notes = (decision.note,) if decision.note else ()
    return Choice(problem.direction, config.kernel, tile, planning.shared_memory(config), decision.status, notes)


@dataclass(frozen=True)
class _Traced:
    """One attention module and what its calls ask for."""

    row: object  # of the patch's report
    now: str
    problems: list[Problem]
    refusal: str

    def reasons(self) -> list[str]:
        """Why it was not dispatched."""
        found = [f"{code}: {text}" for code, text in self.row.reasons if self.row.switched is False]
        return found or [self.refusal or "not_dispatched: one forward did not bring it to flashpatch"]


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a model without values, in numbers."""

    path: str  # the module that made it
    q_shape: tuple[int, ...]  # [batch, seqlen_q, num_heads_q, head_dim]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    window: tuple[int, int]  # (left, right) as `flashpatch.attention` has them; causal is right = 0
    problem: Problem


@dataclass(frozen=True)
class ModelFacts:
    """A model as its configuration builds it: attention calls of one forward, and what is beside them."""

    config: object
    parameters: int
    active_parameters: int  # of them those that a token is multiplied by: no table it is looked up in, its experts only
    parameter_bytes: int
    context: int  # tokens of that forward; 0: its lengths are the model's own, as an image's are
    calls: list[AttentionCall]
    undispatched: list[str]  # attention modules that made no call through flashpatch


def facts(model, *, dtype: str | None = None, seqlen: int | None = None, **load) -> ModelFacts:
    """One forward of a model without values (a module, a configuration, a hub id or a folder), batch 1, by default of
    twice as many tokens as its longest window, so that every window shows."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        if not isinstance(model, torch.nn.Module):
            model = _skeleton(model, dtype, load)
        config = model.config.get_text_config()
        wide = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "local_attention")]
        seqlen = seqlen or max(1024, *(2 * size for size in wide if isinstance(size, int)), 0)
        inputs = models.dummy_inputs(model, batch=1, seqlen=seqlen)
        recorder = _Recorder()
        traced = _trace(model, inputs, recorder)
        parameters = list({id(parameter): parameter for parameter in model.parameters()}.values())
    paths = {call.row.layer: call.row.path for call in traced if call.row.layer is not None}
    tokens = [inputs[name].shape[1] for name in ("decoder_input_ids", "input_ids") if name in inputs]
    longest = max((shapes[0][1] for shapes in recorder.shapes), default=0)
    calls = [
        AttentionCall(paths[layer], *shapes, problem=problem)
        for (layer, problem), shapes in zip(recorder.problems, recorder.shapes, strict=True)
        if layer in paths
    ]
    return ModelFacts(
        config,
        sum(parameter.numel() for parameter in parameters),
        _active_parameters(model, config),
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        tokens[0] if tokens else 0 if any(name.startswith("pixel_values") for name in inputs) else longest,
        calls,
        [call.row.path for call in traced if not call.problems],
    )


def _active_parameters(model, config) -> int:
    embeddings = [child.weight for child in model.modules() if isinstance(child, torch.nn.Embedding)]
    projections = {id(child.weight) for child in model.modules() if isinstance(child, torch.nn.Linear)}
    looked_up = {id(weight) for weight in embeddings} - projections
    counts = [getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    experts = next((count for count in counts if isinstance(count, int) and count > 0), None)
    chosen = getattr(config, "num_experts_per_tok", None) if experts else None
    total = 0
    for name, parameter in model.named_parameters():
        if id(parameter) not in looked_up:
            share = chosen / experts if isinstance(chosen, int) and "experts" in name.split(".") else 1
            total += round(parameter.numel() * share)
    return total


def _traced(model, dtype: str | None, inputs, load: dict) -> list[_Traced]:
    """Every attention module of a model, from one forward of a model without values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        if not isinstance(model, torch.nn.Module):
            model = _skeleton(model, dtype, load)
        if inputs is None:
            inputs = models.dummy_inputs(model, **_only(load, "batch", "seqlen"))
        return _trace(model, inputs, _Recorder())


def _trace(model, inputs, recorder: _Recorder) -> list[_Traced]:
    now = {id(module): _implementation(module) for _, module, _ in patcher.attention_modules(model)}
    classes = {path: module for path, module, _ in patcher.attention_modules(model)}
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
        found.append(_Traced(row, now[id(module)], problems, refusal))
    return found


def _skeleton(source, dtype: str | None, load: dict) -> torch.nn.Module:
    """A model of the configuration without values in its weights; to be called under FakeTensorMode."""
    with models.uninitialised():  # some draw a truncated normal, and look at what they drew
        if isinstance(source, (str, os.PathLike)):
            options = _only(load, "trust_remote_code", "gguf_file", "revision")
            model = models.load(source, dtype=dtype, random_weights=True, patched=False, **options)
        else:
            model = models.build_random(source, dtype=dtype)
    model.tie_weights()
    with contextlib.suppress(ValueError, AttributeError):  # it has no experts, or one way to run them
        model.set_experts_implementation("batched_mm")  # a grouped product without values takes bfloat16 only
    return model


def _only(options: dict, *names: str) -> dict:
    return {name: value for name, value in options.items() if name in names}


def _implementation(module) -> str:
    config = getattr(module, "config", None)
    return str(getattr(config, "_attn_implementation", None) or "its own")


def _module_audit(call: _Traced, target: Device | Reason) -> ModuleAudit:
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


class _Recorder(TorchDispatchMode):
    """Hears flashpatch's operator being asked, and by which layer.

    Nothing has values here. Where they would decide, the batch is an ordinary one: `all` of it holds (no padding),
    not `any` of it is special (no packing).
    """

    def __init__(self):
        super().__init__()
        self.problems: list[tuple[int, Problem]] = []
        self.shapes: list[tuple] = []  # of the same calls: shapes of q, k, v, and the window
        self.answers: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.flashpatch.attention_forward.default:
            q, k, v, *arguments, _, layer = args
            call = ops.expanded(ops.call_of(*arguments), q, k)
            dtype = str(q.dtype).removeprefix("torch.")
            problem = Problem("forward", dtype, q.shape[-1], v.shape[-1], execution.features(q, k, v, call))
            self.problems.append((layer, problem))
            window = (call.window_left, call.window_right)
            self.shapes.append((*(tuple(map(int, t.shape)) for t in (q, k, v)), window))
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
    own = ".".join(map(str, target.capability))
    if target.stands_for:
        number = ".".join(map(str, target.stands_for))
        return f"{target.name} ({own}), which stands in for {title} ({number}) because of {planning.SWITCH}"
    return f"{target.name} ({title}, {own})"
