"""Registers the attention implementation `fpatch` as soon as transformers' modelling code is imported, and not before.

`import flashpatch` stays cheap (no torch, no transformers), and `from_pretrained(..., attn_implementation="fpatch")`
works after it, in whichever order the two are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys

from . import requirements

_TARGET = "transformers.modeling_utils"


class _Loader(importlib.abc.Loader):
    """The target's own loader, with one step after it."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        _register()

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the target to be imported, once."""

    def find_spec(self, name, path=None, target=None):
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Register now if transformers' modelling code is there, else when it comes."""
    if _TARGET in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    """A transformers without the interfaces, or a torch too old, is named by `flashpatch.apply`, not by importing transformers."""
    if requirements.torch_fault() is not None:
        return
    from . import interface

    if interface.unavailable() is None:
        interface.register()
