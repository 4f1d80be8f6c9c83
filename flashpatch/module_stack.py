"""Whose attention it is: the modules that run while a trace watches, by path, and what they say of themselves."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch

from . import counting, inlined, module_reading
from .observations import Facts


@dataclass
class Frame:
    """A module that runs."""

    module: torch.nn.Module
    path: str
    root: torch.nn.Module
    position_ids: torch.Tensor | None
    compiled: bool
    calls_before: int = 0
    declines_before: dict = field(default_factory=dict)  # of a patched module: (code, text) -> times
    attentions: list[str] = field(default_factory=list)  # a compiled module's attention modules, in order
    seen: int = 0


class Modules:
    """The stack of running modules. `parameters` takes the storages of every parameter met."""

    def __init__(self, model: torch.nn.Module | None, parameters: set):
        self._model, self._parameters = model, parameters
        self._names: dict[int, tuple[Any, dict[int, str]]] = {}
        self.stack: list[Frame] = []
        self.missing: list[str] = []  # where attention weights were asked for and came back empty
        self.by_order: list[str] = []  # compiled modules, whose attention is named by order of execution

    def clear(self) -> None:
        """Let go of every module."""
        self.stack, self._names = [], {}

    def frame(self, module, kwargs, calls_before: int) -> Frame:
        """What is to be known of a module that begins to run."""
        outer = self.stack[-1] if self.stack else None
        root = outer.root if outer else self._root_of(module)
        path = self._paths(root).get(id(module))
        if path is None:
            path = f"{outer.path}.{type(module).__name__}"
        positions = kwargs.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            positions = outer.position_ids if outer else None
        compiled = isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        frame = Frame(module, path, root, positions, compiled, calls_before)
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
                    self._parameters.add(parameter.untyped_storage()._cdata)
            entry = self._names[id(root)] = (root, names)
        return entry[1]

    def look_for_attentions(self, frame: Frame, out) -> None:
        """A result with an empty tuple, or a tuple of None, where attention weights were asked for.

        transformers puts an empty tuple also where there is no such attention: one says something only of a model that
        attended, and as cross-attention only of one that has it.
        """
        for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
            weights = getattr(out, name, None)
            if not isinstance(weights, (tuple, list)) or any(weight is not None for weight in weights):
                continue
            if weights or name != "cross_attentions" or module_reading.has_cross_attention(frame.module):
                where = f"{frame.path or type(frame.module).__name__} ({name})"
                if where not in self.missing:
                    self.missing.append(where)

    def facts(self) -> Facts:
        """Whose call this is."""
        if not self.stack:
            return Facts("", "")
        frame = self.stack[-1]
        module, compiled = frame.module, next((outer for outer in self.stack if outer.compiled), None)
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
            if name not in self.by_order:
                self.by_order.append(name)
        root = self.stack[0].module
        config = next(
            (found for owner in (module, *(f.module for f in reversed(self.stack)))
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
            module_reading.supports_sdpa([f.module for f in self.stack]), module_reading.dispatches(module) if implementation else None, softcap, isinstance(getattr(module, "sinks", None), torch.Tensor),
            window if isinstance(window, int) else None, "" if weight is None else module_reading.word(weight.dtype),
            compiled is not None, inlined.where(type(module)) is not None,
        )  # fmt: skip
