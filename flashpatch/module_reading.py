"""What a trace reads off modules: paths as people write them, and what their configuration and code say of attention."""

from __future__ import annotations

import sys

import torch

from .interface import NAME, source_of


def plain(path: str) -> str:
    """A path without what wrappers add to it."""
    return ".".join(part for part in path.split(".") if part not in ("_orig_mod", "_fsdp_wrapped_module"))


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def number(module, config, *names: str) -> float | None:
    for owner in (module, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                return float(value)
    return None


def mask_registered(implementation: str | None) -> bool | None:
    """Whether transformers would build a mask for this attention implementation; None if it is not one of a user's."""
    masks = sys.modules.get("transformers.masking_utils")
    models = sys.modules.get("transformers.modeling_utils")
    if implementation is None or masks is None or models is None:
        return None
    functions = getattr(models, "ALL_ATTENTION_FUNCTIONS", {})
    if implementation not in functions or implementation.startswith("paged|"):
        return None
    return implementation in masks.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


def function_of(implementation: str | None) -> str | None:
    """Whose attention function this is; None where it is none that transformers dispatches to by name."""
    if implementation == NAME:
        return "flashpatch"
    models = sys.modules.get("transformers.modeling_utils")
    functions = getattr(models, "ALL_ATTENTION_FUNCTIONS", {})
    if implementation is None or implementation not in functions:
        return None
    module = getattr(functions[implementation], "__module__", None) or ""
    return "transformers" if module.split(".")[0] == "transformers" else "user"


_dispatching: dict[type, bool] = {}


def dispatches(module) -> bool:
    """Whether a module's class calls whatever is registered under its configuration's implementation."""
    kind = type(module)
    if kind not in _dispatching:
        classes = [base for base in kind.__mro__ if base not in (torch.nn.Module, object)]
        _dispatching[kind] = any("ALL_ATTENTION_FUNCTIONS" in source_of(base) for base in classes)
    return _dispatching[kind]


def has_cross_attention(module) -> bool:
    """Whether a model's configuration says that it attends to another sequence."""
    config = getattr(module, "config", None)
    return any(getattr(config, word, False) is True for word in ("is_encoder_decoder", "add_cross_attention"))


def supports_sdpa(modules: list[torch.nn.Module]) -> bool | None:
    """What the innermost class that says anything says of scaled_dot_product_attention."""
    for module in reversed(modules):
        value = getattr(type(module), "_supports_sdpa", None)
        if isinstance(value, bool):
            return value
    return None
