"""A torch that is missing or too old is named with the line to type, on every way into flashpatch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashpatch import requirements

ROOT = Path(__file__).resolve().parent.parent
OLD = "torch 1.13.1 is too old; flashpatch needs torch 2.11 or newer; type: pip install 'torch>=2.11'"


def with_torch(folder: Path, text: str, program: str) -> subprocess.CompletedProcess:
    """A Python program where torch is a module of that text."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(text)
    path = os.pathsep.join((str(folder), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "way", ["flashpatch.attention", "flashpatch.apply", "from flashpatch import auditing", "flashpatch.Patch"]
)
def test_an_old_torch_is_named_where_it_is_needed_and_not_before(tmp_path, way):
    program = f"import flashpatch, sys\nassert 'torch' not in sys.modules\n{way}"
    done = with_torch(tmp_path, "__version__ = '1.13.1'", program)
    assert done.stderr.splitlines()[-1] == f"flashpatch.requirements.RequirementError: {OLD}"


@pytest.mark.parametrize("arguments", [["audit"], ["verify"], ["bench", "--json-schema"], ["run", "-m", "this"]])
def test_an_old_torch_is_one_line_on_the_command_line(tmp_path, arguments):
    pytest.importorskip("flashpatch.cli", reason="needs the editable install: pip install -e .")
    program = f"from flashpatch.cli import main\nmain({arguments})"
    done = with_torch(tmp_path, "__version__ = '1.13.1'", program)
    assert (done.returncode, done.stdout, done.stderr) == (4, "", f"flashpatch: {OLD}\n")


def test_a_missing_torch_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert requirements.torch_fault().startswith("torch is not installed; flashpatch needs torch")


@pytest.mark.parametrize(
    ("version", "suffices"),
    [("2.10.1", False), ("2.9.1+cu130", False), ("2.11.0", True), ("2.11.0a0+git1", True), ("3.0", True)],
)
def test_versions_are_compared_as_numbers(monkeypatch, version, suffices):
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    assert (requirements.torch_fault() is None) == suffices


def test_the_oldest_torch_is_the_one_that_pip_is_told():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'"torch>=([\d.]+)"', text)[1] == requirements.OLDEST_TORCH
