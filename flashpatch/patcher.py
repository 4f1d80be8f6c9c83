"""Patching a model: `apply`, `restore`, `report`.

Switching a model over is transformers' own `set_attn_implementation` to the name of `interface`, undone by putting the
names back. What became of each attention module is proven by the calls counted for it, not by the switch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from . import attention_modules, counting, enabling, inlined, interface, tagging
from .attention_modules import configs_of, dispatches, roots, switch
from .interface import NAME
from .tagging import Tag


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
    padded: dict[str, int] = field(default_factory=dict)  # which head dims were padded to what -> calls
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
                counts.name,
                launches=shared.launches,
                padded=shared.padded,
                statuses=shared.statuses,
                backends=shared.backends,
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
        dict(counts.launches), counts.copies, dict(counts.padded), counts.mask_materialised, dict(counts.statuses), dict(counts.backends),
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
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"flashpatch.apply needs a transformers model, got {type(model).__name__}")
    outermost = roots(model)
    if not outermost:
        raise TypeError(
            f"{type(model).__name__} contains no transformers model; flashpatch.apply patches transformers models, "
            "flashpatch.attention(q, k, v) serves any other code"
        )
    configs = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    modules = attention_modules.find(model)
    strict = bool(strict)
    entries, tags, handles = [], [], []
    try:
        if not any(_is_refused(obstacle, module) for _, module, obstacle in modules):
            for root in outermost:
                switch(root)
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
    return obstacle is not None and dispatches(type(module))


def report(model: torch.nn.Module) -> PatchReport:
    """The report of any model, however it came to `fpatch`: `apply`, `enable` or `attn_implementation="fpatch"`."""
    interface.register()
    rows = []
    for path, module, obstacle in attention_modules.find(model):
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
    return PatchReport(type(model).__name__, rows, made, enabling.honoured())
