"""flashpatch: exact tiled attention for existing models; every kernel that runs and every fallback named.

Importing this package changes nothing and starts no CUDA context. `apply(model)` patches one model.
"""

from __future__ import annotations

import importlib

from . import registration

__version__ = "0.1.0"

# public name -> module; loaded on first use, so that importing flashpatch stays cheap
_PUBLIC = {
    "attention": "ops",
    "pairwise": "pairs",
    "stats": "counting",
    "reset_counts": "counting",
    "apply": "patcher",
    "enable": "enabling",
    "disable": "enabling",
    "Patch": "patcher",
    "load": "models",
    "plan": "auditing",
    "verify": "verification",
    "audit": "auditing",
    "cost": "costing",
    "trace": "tracing",
    "bench": "benchmarking",
    "DeclinedError": "problem",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'flashpatch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"flashpatch.{module}"), name)


def __dir__():
    return sorted(__all__)


registration.install()
