"""What attention a model asks for, from one forward of it without values: nothing is computed, no weights are read."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import attention_modules, dummy_inputs, execution, models, operators, patcher
from .problem import DeclinedError, Problem


@dataclass(frozen=True)
class Traced:
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
        inputs = dummy_inputs.make(model, batch=1, seqlen=seqlen)
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


def traced(model, dtype: str | None, inputs, load: dict) -> list[Traced]:
    """Every attention module of a model, from one forward of a model without values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        if not isinstance(model, torch.nn.Module):
            model = _skeleton(model, dtype, load)
        if inputs is None:
            inputs = dummy_inputs.make(model, **_only(load, "batch", "seqlen"))
        return _trace(model, inputs, _Recorder())


def _trace(model, inputs, recorder: _Recorder) -> list[Traced]:
    now = {id(module): _implementation(module) for _, module, _ in attention_modules.find(model)}
    classes = {path: module for path, module, _ in attention_modules.find(model)}
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
        found.append(Traced(row, now[id(module)], problems, refusal))
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
            call = operators.expanded(operators.call_of(*arguments), q, k)
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
