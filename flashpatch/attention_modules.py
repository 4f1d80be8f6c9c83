"""The attention modules of a model, and transformers' own switch that sends those which dispatch by name to `interface`."""

from __future__ import annotations

import re

import torch

from . import inlined
from .interface import NAME, source_of

# Source that makes a model fold its selection of keys into the mask for the two names it knows, and for no other.
NAME_TEST = re.compile(r"_attn_implementation (?:not )?in \(\"eager\", \"sdpa\"\)")

_dispatches_cache: dict[type, bool] = {}


def dispatches(cls: type) -> bool:
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


def find(model) -> list[tuple[str, torch.nn.Module, str | None]]:
    """Every attention module of a model as (path, module, None or why it cannot be reached).

    Reachable ones dispatch by name, or compute attention in code that `inlined` reads. Of the others only those are
    listed that compute attention themselves: the wrappers around attention modules, which bear similar names, do not.
    """
    found = []
    for path, module in model.named_modules():
        cls = type(module)
        if isinstance(module, pretrained_class()):
            continue
        if dispatches(cls):
            found.append((path, module, _refusal(cls)))
        elif inlined.where(cls) is not None:
            found.append((path, module, None))
        elif "attention" in cls.__name__.lower() and _computes(cls):
            inner = [child for child in module.modules() if child is not module and dispatches(type(child))]
            if not inner:
                found.append((path, module, f"{cls.__name__} computes attention itself and asks for no implementation"))
    return found


def _refusal(cls: type) -> str | None:
    """Why a dispatching class would compute something else under our name."""
    if NAME_TEST.search(source_of(cls)):
        return (
            f"{cls.__name__} selects keys and tells attention only under the names eager and sdpa (kwarg_unknown: "
            "indices); patched it would attend to all keys"
        )
    return None


def pretrained_class() -> type:
    from transformers import PreTrainedModel

    return PreTrainedModel


def roots(model) -> list:
    """The outermost transformers models in `model` (itself, or inside PEFT, DDP or torch.compile wrappers)."""
    if isinstance(model, pretrained_class()):
        return [model]
    return [root for child in model.children() for root in roots(child)]


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


def switch(root) -> None:
    """transformers' own switch, silenced: what it could not switch is in the report, module by module."""
    from transformers.utils import logging

    pretrained = pretrained_class()
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
