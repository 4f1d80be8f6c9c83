"""Which layer an attention module counts under: the tag that a module carries, and where its name comes from."""

from __future__ import annotations

import weakref

import torch

from . import counting


class Tag:
    """What a patched attention module knows: the number it counts under, and whether a decline is an error there.

    Copies and pickles of the module come without it; a pickle brings flashpatch in, whose name its config has.
    """

    __slots__ = ("alive", "layer", "parents", "strict")

    def __init__(self, layer: int, strict: bool, parents: tuple = ()):
        self.layer, self.strict, self.parents, self.alive = layer, strict, parents, True

    def shares_a_graph(self) -> bool:
        """Whether a part of the model around this module is compiled by itself.

        Such a part is compiled once and used for every layer like it; a number that differs from layer to layer
        would compile it anew for each, and soon not at all.
        """
        for parent in self.parents:
            if parent._compiled_call_impl is not None or isinstance(parent, torch._dynamo.OptimizedModule):
                return True
        return False

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return untagged, ()


def untagged() -> None:
    """What a pickled tag becomes. Importing it has registered the name `fpatch`, so that the model runs patched."""
    return None


_adopted: list[weakref.ref] = []  # models that took the name while they were built, as `enable` makes them


def adopt(model) -> None:
    """Remember a model that came to the name `fpatch` by itself, so that its modules count under their paths."""
    _adopted.append(weakref.ref(model))


def adopted_models() -> list:
    """The adopted models that are still alive, in the order they came."""
    return [model for model in (ref() for ref in _adopted) if model is not None]


def tag_of(module) -> Tag | None:
    """A module's tag, made now if it has none; not while a graph is traced."""
    tag = getattr(module, "_flashpatch", None)
    if tag is None and not torch.compiler.is_compiling():
        tag = _tag_unseen(module)
    return tag


def _tag_unseen(module) -> Tag:
    """A layer number for a module nobody applied flashpatch to: it was loaded under the name `fpatch`."""
    for model in adopted_models():
        paths = [path for path, candidate in model.named_modules() if candidate is module]
        if paths:
            return tag_module(module, paths[0], False, parents_of(model, paths[0]))
    index = getattr(module, "layer_idx", None)
    return tag_module(module, type(module).__name__ + ("" if index is None else f" of layer {index}"), False)


def tag_module(module, name: str, strict: bool, parents: tuple = ()) -> Tag:
    """Give an attention module a layer number of its own, counted under `name`."""
    tag = Tag(counting.register_layer(name), strict, parents)
    module._flashpatch = tag
    return tag


def parents_of(model, path: str) -> tuple:
    """The modules between a model (not itself) and the module at `path` (itself included)."""
    found, parent = [], model
    for name in filter(None, path.split(".")):
        parent = getattr(parent, name)
        found.append(parent)
    return tuple(found)
