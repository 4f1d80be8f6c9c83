"""A wheel holds the whole product: every module, every kernel source, the matrix; and works where the tree is not."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the tracked files, so that no build folder is left behind or picked up."""
    pytest.importorskip("setuptools", reason="the test extra brings setuptools")
    tree = tmp_path_factory.mktemp("tree")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    tracked = names.stdout.decode().split("\0")[:-1] if names.returncode == 0 else _files()
    for name in tracked:
        if (ROOT / name).is_file():
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(out),
        str(tree),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def _files() -> list[str]:
    """The tree without git: everything but environments and caches."""
    kept = ("flashpatch", "cuda_src", "cli")
    return [
        str(path.relative_to(ROOT))
        for path in (*ROOT.iterdir(), *(path for name in kept for path in (ROOT / name).rglob("*")))
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    ]


def sources(folder: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def test_a_wheel_has_every_file_of_the_tree_and_no_other(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = (
        sources("flashpatch")
        | {f"flashpatch/{name}" for name in sources("cuda_src") | sources("cli")}
        | {"flashpatch/compat_matrix.yaml"}
    )
    assert names == expected


def test_a_wheel_is_pure_python_and_declares_the_command(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "flashpatch = flashpatch.cli:main" in archive.read(entry_points).decode()
    assert any(name.endswith("LICENSE") for name in archive.namelist())


def test_an_unpacked_wheel_works_away_from_the_tree(wheel, tmp_path):
    """In a folder with a space and an umlaut in its name, with nothing of the checkout on the path."""
    site = tmp_path / "säte packages"
    zipfile.ZipFile(wheel).extractall(site)
    program = (
        "import flashpatch, flashpatch.planning as planning, flashpatch.compiler as compiler\n"
        f"assert flashpatch.__file__.startswith(r'{site}'), flashpatch.__file__\n"
        "assert planning.support().cells\n"
        "assert compiler.headers()\n"
        "import flashpatch.cli; flashpatch.cli.main(['audit', '--gpu', 'h200'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "forward_sm80" in done.stdout


def test_one_version():
    import flashpatch

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{flashpatch.__version__}"' in text
