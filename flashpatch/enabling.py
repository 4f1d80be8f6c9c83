"""`enable`: models that are built from now on use flashpatch, without a line about it where they are built."""

from __future__ import annotations

import re
import sys
from collections import Counter

import torch

from . import inlined, interface, tagging
from .attention_modules import NAME_TEST, pretrained_class, switch
from .interface import NAME, source_of

# Source that picks a module class by the name while the model is built, and fails on ours.
_CLASS_BY_NAME = re.compile(r"_ATTENTION_CLASSES\[(?:self\.)?config\._attn_implementation\]")


class _Enabled:
    """What `enable` replaced, and the implementations it saw scripts ask for by name."""

    def __init__(self):
        self.original = None
        self.override = False
        self.honoured: list[tuple[str, str]] = []
        self.unreachable: Counter = Counter()
        self.defaults: dict[str, str] = {}

    def default(self, name: str) -> str:
        """The name of an implementation that nobody asked for, as a string object of its own.

        A configuration hands it on to the models inside, copies of it do too, and it is told from a name that a script
        gave by its identity alone.
        """
        return self.defaults.setdefault(name, name.encode().decode())

    def is_default(self, name: str | None) -> bool:
        return name is None or name is self.defaults.get(name)


_enabled = _Enabled()


def enable(override: bool = False) -> None:
    """From now on, models that are built without a chosen attention implementation use flashpatch.

    An implementation asked for by name is honoured and listed (`honoured`, reports); `override=True` replaces it
    too. Attention that a model computes in its own code is read where `inlined.MODULES` names it, from the model's first
    forward on; compiled by torch.compile too, if without `fullgraph=True`. Models that can neither be switched nor read
    keep their default (`unreachable`).
    """
    interface.register()
    pretrained = pretrained_class()
    _enabled.override = override
    if _enabled.original is not None:
        return
    original = pretrained._check_and_adjust_attn_implementation

    def choose(self, attn_implementation, is_init_check=False, **kwargs):
        if not is_init_check:
            return original(self, attn_implementation, is_init_check, **kwargs)
        default = _enabled.is_default(attn_implementation)
        name = original(self, _choose(self, None if default else attn_implementation), is_init_check, **kwargs)
        return _enabled.default(name) if default and name != NAME else name

    _enabled.original = original
    pretrained._check_and_adjust_attn_implementation = choose


def _choose(model, asked: str | None) -> str | None:
    name = type(model).__name__
    source = source_of(sys.modules.get(type(model).__module__))
    by_class = bool(_CLASS_BY_NAME.search(source))
    if asked == NAME and not by_class:
        tagging.adopt(model)
        return asked
    refused = bool(NAME_TEST.search(source))
    now = model._can_set_attn_implementation() and not refused and not by_class
    later = not refused and (by_class or inlined.may_have(type(model)))
    if not now and not later:
        _enabled.unreachable[name] += 1
        return asked
    if asked not in (None, NAME) and not _enabled.override:
        if (name, asked) not in _enabled.honoured:
            _enabled.honoured.append((name, asked))
        return asked
    tagging.adopt(model)
    if later:
        model.register_forward_pre_hook(_at_first_forward)
    return NAME if now else None


@torch.compiler.disable(reason="flashpatch.enable() finishes this model before its first forward")
def _at_first_forward(model, args) -> None:
    """What could not be done while `enable` saw a model built: its implementation, and attention that has to be read."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _at_first_forward:
            del model._forward_pre_hooks[key]
    switch(model)
    for path, module in model.named_modules():
        if inlined.where(type(module)) is not None and getattr(module, "_flashpatch", None) is None:
            inlined.attach(module)
            tagging.tag_module(module, path, False, tagging.parents_of(model, path))


def disable() -> None:
    """Undo `enable` for models built from now on; those already built keep what they have."""
    if _enabled.original is not None:
        pretrained_class()._check_and_adjust_attn_implementation = _enabled.original
        _enabled.original = None


def unreachable() -> list[str]:
    """Classes of the models built since `enable` that compute attention themselves and were left alone."""
    return list(_enabled.unreachable)


def honoured() -> list[tuple[str, str]]:
    """(model class, implementation) that scripts asked for by name since `enable`, and got."""
    return list(_enabled.honoured)
