"""What flashpatch needs of torch, and the words where it is not there. Imports nothing until asked."""

from __future__ import annotations

import re

OLDEST_TORCH = "2.11"  # as in pyproject.toml


class RequirementError(ImportError):
    """torch is missing or too old; the text has the line to type."""


def check_torch() -> None:
    """Imports torch. Raises RequirementError where flashpatch's modules would fail on it somewhere."""
    if reason := torch_fault():
        raise RequirementError(reason)


def torch_fault() -> str | None:
    """Why flashpatch cannot work with the torch that is here, or None."""
    install = f"flashpatch needs torch {OLDEST_TORCH} or newer; type: pip install 'torch>={OLDEST_TORCH}'"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return f"torch is not installed; {install}"
    version = str(getattr(torch, "__version__", "of no version"))
    if _numbers(version) < _numbers(OLDEST_TORCH):
        return f"torch {version} is too old; {install}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
