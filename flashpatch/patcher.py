"""Patching a model: finding its attention modules, `apply`, `restore`, `report`, and `enable` for all models to come.

Switching a model over is transformers' own `set_attn_implementation` to the name of `interface`, undone by putting the
names back. What became of each attention module is proven by the calls counted for it, not by the switch.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass, field

import torch

from . import counting, inlined, interface, tagging
from .interface import NAME, source_of
from .tagging import Tag

# Source that makes a model fold its selection of keys into the mask for the two names it knows, and for no other.
_NAME_TEST = re.compile(r"_attn_implementation (?:not )?in \(\"eager\", \"sdpa\"\)")

# Source that picks a module class by the name while the model is built, and fails on ours.
_CLASS_BY_NAME = re.compile(r"_ATTENTION_CLASSES\[(?:self\.)?config\._attn_implementation\]")


# ---- which modules are attention ----


_dispatches_cache: dict[type, bool] = {}


def _dispatches(cls: type) -> bool:
    """Whether a module class calls whatever is registered under the implementation's name."""
    if cls not in _dispatches_cache:
        text = "".join(source_of(base) for base in cls.__mro__ if base is not torch.nn.Module and base is not object)
        _dispatches_cache[cls] = "ALL_ATTENTION_FUNCTIONS" in text
    return _dispatches_cache[cls]


_COMPUTES = re.compile(r"softmax\(|scaled_dot_product_attention|multi_head_attention_forward|flex_attention\(")


def _computes(cls: type) -> bool:
    """Whether a module class computes attention by itself."""
    if cls is torch.nn.MultiheadAttention:
        return True
    own = [base for base in cls.__mro__ if base is not object and base.__module__.split(".")[0] != "torch"]
    text = "".join(map(source_of, own))
    return bool(_COMPUTES.search(text))


def attention_modules(model) -> list[tuple[str, torch.nn.Module, str | None]]:
    """Every attention module of a model as (path, module, None or why it cannot be reached).

    Reachable ones dispatch by name, or compute attention in code that `inlined` reads. Of the others only those are
    listed that compute attention themselves: the wrappers around attention modules, which bear similar names, do not.
    """
    found = []
    for path, module in model.named_modules():
        cls = type(module)
        if isinstance(module, _pretrained()):
            continue
        if _dispatches(cls):
            found.append((path, module, _refusal(cls)))
        elif inlined.where(cls) is not None:
            found.append((path, module, None))
        elif "attention" in cls.__name__.lower() and _computes(cls):
            inner = [child for child in module.modules() if child is not module and _dispatches(type(child))]
            if not inner:
                found.append((path, module, f"{cls.__name__} computes attention itself and asks for no implementation"))
    return found


def _refusal(cls: type) -> str | None:
    """Why a dispatching class would compute something else under our name."""
    if _NAME_TEST.search(source_of(cls)):
        return (
            f"{cls.__name__} selects keys and tells attention only under the names eager and sdpa (kwarg_unknown: "
            "indices); patched it would attend to all keys"
        )
    return None


def _pretrained() -> type:
    from transformers import PreTrainedModel

    return PreTrainedModel


# ---- apply, report, restore ----


@dataclass
class ModuleRow:
    """One attention module. `dispatched` is proven by calls; `switched` says that it should come to us.

    `layer` is the number it counts under, None where nothing can reach it.
    """

    path: str
    class_name: str
    switched: bool
    dispatched: bool
    kernel: str | None
    reasons: list[tuple[str, str]]
    calls: int = 0
    recomputes: int = 0
    launches: dict[str, int] = field(default_factory=dict)
    copies: int = 0
    mask_materialised: int = 0
    statuses: dict[str, str] = field(default_factory=dict)  # kernel -> the matrix's word: verified or compiled
    backends: dict[str, str] = field(default_factory=dict)  # kernel -> gpu or emulated
    layer: int | None = None


@dataclass
class PatchReport:
    """What became of each attention module. `mask_materialised` counts masks that model code computed with itself."""

    model: str
    rows: list[ModuleRow]
    mask_materialised: int = 0
    honoured: list[tuple[str, str]] = field(default_factory=list)  # (model class, implementation asked for by name)

    @property
    def dispatched(self) -> int:
        return sum(row.dispatched for row in self.rows)

    @property
    def switched(self) -> int:
        return sum(row.switched for row in self.rows)

    @property
    def total(self) -> int:
        return len(self.rows)


def _row(path: str, class_name: str, tag: Tag | None, obstacle: str | None, config=None) -> ModuleRow:
    if tag is None:
        return ModuleRow(path, class_name, False, False, None, [("not_dispatched", obstacle)])
    counts = counting.counts(tag.layer)
    reasons = list(counts.declines)
    reached = counts.calls + counts.recomputes > 0
    if not reached:
        shared = counting.counts(interface.unattributed)
        if shared.calls + shared.recomputes > 0 and tag.shares_a_graph():
            reached = True
            reasons = [
                ("shared_graph", f"it is compiled together with layers like it and counted under {shared.name!r}")
            ]
            reasons += list(shared.declines)
            counts = counting.LayerCounts(
                counts.name, launches=shared.launches, statuses=shared.statuses, backends=shared.backends
            )
        else:
            reasons.insert(0, ("not_dispatched", "no forward has brought it to flashpatch since it was patched"))
    now = getattr(config, "_attn_implementation", NAME)
    if now != NAME:
        text = f"its configuration was set to {now!r} after it was patched; flashpatch.apply(model) switches it again"
        reasons = [("switched_away", text), *(reason for reason in reasons if reason[0] != "not_dispatched")]
    forward = sorted(kernel for kernel in counts.launches if "forward" in kernel)
    return ModuleRow(
        path, class_name, True, reached, ", ".join(forward) or None, reasons, counts.calls, counts.recomputes,
        dict(counts.launches), counts.copies, counts.mask_materialised, dict(counts.statuses), dict(counts.backends),
        tag.layer,
    )  # fmt: skip


UNDONE = "an earlier patch of this model was restored, which unpatched it; flashpatch.apply(model) patches it again"


class Patch:
    """A patched model. `report` says what ran; `restore()` (or leaving `with`) puts everything back as it was."""

    def __init__(self, model, entries, configs, tags, handles):
        self.model = model
        self._entries = entries  # (path, class name, tag or None, obstacle or None, config it reads or None)
        self._configs = configs  # (config, implementation before)
        self._tags = tags  # (module, our tag, tag before)
        self._handles = handles  # of the hooks on modules whose attention is read
        self._masks_before = counting.counts(interface.model_code).mask_materialised
        self._restored = False

    @property
    def undone(self) -> bool:
        """Whether restoring an earlier patch of the same modules has unpatched them beneath this one."""
        dead = bool(self._tags) and all(
            not tag.alive or (before is not None and not before.alive) for _, tag, before in self._tags
        )
        return dead and not self._restored

    @property
    def active(self) -> bool:
        return not (self._restored or self.undone)

    @property
    def report(self) -> PatchReport:
        rows = [_row(*entry[:4], entry[4] if self.active else None) for entry in self._entries]
        if self.undone:
            for row in rows:
                row.reasons.insert(0, ("undone", UNDONE))
        made = counting.counts(interface.model_code).mask_materialised - self._masks_before
        return PatchReport(type(self.model).__name__, rows, made)

    def restore(self) -> None:
        """Undo this patch and nothing else: what somebody has changed since then is left alone."""
        if self._restored:
            return
        self._restored = True
        _put_back(self._configs, self._tags, self._handles)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "restored" if self._restored else "undone by restoring an earlier patch" if self.undone else "active"
        switched = sum(entry[2] is not None for entry in self._entries)
        return f"<Patch of {type(self.model).__name__}: {switched} of {len(self._entries)} attention modules, {state}>"


def _put_back(configs, tags, handles) -> None:
    for handle in handles:
        handle.remove()
    for config, before in configs:
        if config._attn_implementation_internal == NAME:
            config._attn_implementation_internal = before
    for module, tag, before in tags:
        tag.alive = False
        current = getattr(module, "_flashpatch", None)
        if current is not None and current is not tag:
            current.alive = False  # a later patch: it has nothing to stand on now
        if current is tag:
            if before is not None and before.alive:
                module._flashpatch = before
            else:
                del module._flashpatch


def apply(model: torch.nn.Module, *, strict: bool | None = None) -> Patch:
    """Send a transformers model's attention through flashpatch, in place and without touching its weights.

    `strict=True` makes any decline an error for this model (`FLASHPATCH_STRICT=1` for all). Either every reachable
    attention module is switched over or, after an error, none. A layer that is called by itself with
    `attention_mask=None` computes full attention, as eager does; sdpa would be causal there: pass a mask.
    Models that compute attention themselves are left untouched, and the report says so per module.
    """
    interface.register()
    pretrained = _pretrained()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"flashpatch.apply needs a transformers model, got {type(model).__name__}")
    roots = _roots(model, pretrained)
    if not roots:
        raise TypeError(
            f"{type(model).__name__} contains no transformers model; flashpatch.apply patches transformers models, "
            "flashpatch.attention(q, k, v) serves any other code"
        )
    configs = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    modules = attention_modules(model)
    strict = bool(strict)
    entries, tags, handles = [], [], []
    try:
        if not any(_is_refused(obstacle, module) for _, module, obstacle in modules):
            for root in roots:
                _switch(root)
        for path, module, obstacle in modules:
            config = getattr(module, "config", None)
            read = inlined.where(type(module)) is not None
            if obstacle is None and not read and getattr(config, "_attn_implementation", NAME) != NAME:
                obstacle = f"its configuration still says {config._attn_implementation!r}"
            tag = None
            if obstacle is None:
                before = getattr(module, "_flashpatch", None)
                before = before if before is not None and before.alive else None
                if read and before is None:
                    handles += inlined.attach(module)
                tag = tagging.tag_module(module, path or type(module).__name__, strict, tagging.parents_of(model, path))
                tags.append((module, tag, before))
            entries.append((path, type(module).__name__, tag, obstacle, None if read else config))
    except BaseException:
        _put_back(configs, tags, handles)
        for config, _ in configs:
            config.__dict__.pop("_attn_was_changed", None)
        raise
    return Patch(model, entries, configs, tags, handles)


def _is_refused(obstacle: str | None, module) -> bool:
    return obstacle is not None and _dispatches(type(module))


def _roots(model, pretrained: type) -> list:
    """The outermost transformers models in `model` (itself, or inside PEFT, DDP or torch.compile wrappers)."""
    if isinstance(model, pretrained):
        return [model]
    return [root for child in model.children() for root in _roots(child, pretrained)]


def configs_of(model) -> list:
    """Every configuration that a module of the model may read its implementation from."""
    found: dict[int, object] = {}

    def add(config):
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", None) or ():
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def _switch(root) -> None:
    """transformers' own switch, silenced: what it could not switch is in the report, module by module."""
    from transformers.utils import logging

    pretrained = _pretrained()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        root.set_attn_implementation(NAME)
        for submodel in root.modules():
            # A stack with its own copy of the configuration (T5's encoder and decoder) is not reached from above.
            if isinstance(submodel, pretrained) and submodel.config._attn_implementation != NAME:
                submodel.set_attn_implementation(NAME)
            # Where attention is hard-coded the name still says how masks are built.
            if isinstance(submodel, pretrained) and inlined.masks_by_name(submodel):
                submodel.config._attn_implementation_internal = NAME
    finally:
        logging.set_verbosity(level)


def report(model: torch.nn.Module) -> PatchReport:
    """The report of any model, however it came to `fpatch`: `apply`, `enable` or `attn_implementation="fpatch"`."""
    interface.register()
    rows = []
    for path, module, obstacle in attention_modules(model):
        tag = getattr(module, "_flashpatch", None)
        config = getattr(module, "config", None)
        if obstacle is None and tag is None and inlined.where(type(module)) is not None:
            obstacle = (
                f"{type(module).__name__} computes attention itself; flashpatch.apply(model) reads it there, and "
                "flashpatch.enable(), called before the model is built, from its first forward on"
            )
        elif obstacle is None and tag is None and getattr(config, "_attn_implementation", None) != NAME:
            obstacle = f"its configuration says {getattr(config, '_attn_implementation', None)!r}"
        if obstacle is None and tag is None:
            tag = tagging.tag_module(module, path, False, tagging.parents_of(model, path))
        rows.append(_row(path, type(module).__name__, tag if obstacle is None else None, obstacle))
    made = counting.counts(interface.model_code).mask_materialised
    return PatchReport(type(model).__name__, rows, made, list(_enabled.honoured))


# ---- every model loaded from now on ----


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
    pretrained = _pretrained()
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
    refused = bool(_NAME_TEST.search(source))
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
    _switch(model)
    for path, module in model.named_modules():
        if inlined.where(type(module)) is not None and getattr(module, "_flashpatch", None) is None:
            inlined.attach(module)
            tagging.tag_module(module, path, False, tagging.parents_of(model, path))


def disable() -> None:
    """Undo `enable` for models built from now on; those already built keep what they have."""
    if _enabled.original is not None:
        _pretrained()._check_and_adjust_attn_implementation = _enabled.original
        _enabled.original = None


def unreachable() -> list[str]:
    """Classes of the models built since `enable` that compute attention themselves and were left alone."""
    return list(_enabled.unreachable)


def honoured() -> list[tuple[str, str]]:
    """(model class, implementation) that scripts asked for by name since `enable`, and got."""
    return list(_enabled.honoured)
