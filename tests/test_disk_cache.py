"""The cache of built files: what is damaged is made anew, what others could write is never used, no mode is changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashpatch import disk_cache

ROOT = Path(__file__).resolve().parent.parent
posix = pytest.mark.skipif(os.name != "posix", reason="modes and owners are POSIX's")


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A folder that FLASHPATCH_CACHE_DIR names, with the mode it has."""

    def be(mode: int | None) -> Path:
        folder = tmp_path / "named"
        if mode is not None:
            folder.mkdir()
            folder.chmod(mode)
        monkeypatch.setenv("FLASHPATCH_CACHE_DIR", str(folder))
        disk_cache._checked.cache_clear()
        return folder

    yield be
    disk_cache._checked.cache_clear()


def mode_of(folder: Path) -> int:
    return folder.stat().st_mode & 0o7777


@posix
@pytest.mark.parametrize("mode", [None, 0o700, 0o755])
def test_a_folder_that_only_its_owner_writes_is_used_as_it_is(named, mode):
    folder = named(mode)
    assert disk_cache.folder() == folder and disk_cache.folder("emulator") == folder / "emulator"
    assert mode_of(folder) == (0o700 if mode is None else mode) and mode_of(folder / "emulator") == 0o700


@posix
def test_a_shared_folder_gets_a_private_one_in_it(named):
    folder = named(0o1777)
    own = folder / f"flashpatch-{os.getuid()}"
    assert disk_cache.folder() == own and mode_of(own) == 0o700 and mode_of(folder) == 0o1777


@posix
@pytest.mark.parametrize("trap", ["a link", "open to others"])
def test_what_others_prepared_in_a_shared_folder_is_refused(named, trap):
    own = named(0o1777) / f"flashpatch-{os.getuid()}"
    if trap == "a link":
        own.with_name("real").mkdir(mode=0o700)
        own.symlink_to(own.with_name("real"))
    else:
        own.mkdir()
        own.chmod(0o777)
    assert disk_cache.folder() is None and str(own) in disk_cache.fault()


@posix
@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_a_folder_that_others_can_rename_in_is_refused_with_words(named, mode):
    folder = named(mode)
    assert disk_cache.folder() is None and mode_of(folder) == mode and list(folder.iterdir()) == []
    assert disk_cache.fault() == f"others can write to {folder} (mode {mode:o})"


@posix
def test_no_folder_is_said_once(named):
    folder = named(0o777)
    disk_cache._warn_of_no_folder.cache_clear()
    with pytest.warns(UserWarning) as warned:
        for _ in range(2):
            assert disk_cache.content(disk_cache.folder(), "entry", lambda: b"content") == b"content"
    (warning,) = warned
    assert str(folder) in str(warning.message) and "export FLASHPATCH_CACHE_DIR=" in str(warning.message)
    assert warning.filename == __file__


@posix
@pytest.mark.parametrize("obstacle", ["a file", "open to others"])
def test_a_part_that_cannot_be_kept_is_named_with_its_reason(named, obstacle):
    part = named(0o700) / disk_cache.EMULATOR
    if obstacle == "a file":
        part.touch()
    else:
        part.mkdir()
        part.chmod(0o777)
    assert disk_cache.folder() == part.parent and disk_cache.folder(disk_cache.EMULATOR) is None
    disk_cache._warn_of_no_folder.cache_clear()
    why = f"{part} cannot be written" if obstacle == "a file" else f"others can write to {part} "
    with pytest.warns(UserWarning, match=f"cannot be kept: {why}"):
        disk_cache.file(disk_cache.folder(disk_cache.EMULATOR), "entry", lambda: b"content")


@posix
def test_somebody_elses_folder_is_refused(named, monkeypatch):
    named(0o755)
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    assert disk_cache.folder() is None and "belongs to somebody else" in disk_cache.fault()


@pytest.mark.parametrize("get", [disk_cache.content, lambda *entry: disk_cache.file(*entry).read_bytes()[:-32]])
@pytest.mark.parametrize("damage", [lambda entry: entry[:-1], lambda entry: b"x" + entry[1:], lambda entry: b""])
def test_an_entry_is_made_once_and_again_when_damaged(tmp_path, get, damage):
    made = []

    def make():
        made.append(1)
        return b"content"

    assert [get(tmp_path, "entry", make) for _ in range(2)] == [b"content"] * 2 and len(made) == 1
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert get(tmp_path, "entry", make) == b"content" and len(made) == 2
    assert get(tmp_path, "entry", make) == b"content" and len(made) == 2


def test_a_folder_that_vanished_costs_the_caching_not_the_result(tmp_path):
    gone = tmp_path / "gone"
    assert disk_cache.content(gone, "entry", lambda: b"content") == b"content"
    assert disk_cache.file(gone, "vanished", lambda: b"content").parent == disk_cache.temporary_folder()


def test_the_temporary_folder_goes_with_its_process(tmp_path):
    program = (
        "import os\n"
        "from flashpatch import disk_cache\n"
        "path = disk_cache.file(disk_cache.folder(), 'entry', lambda: b'content')\n"
        "if hasattr(os, 'fork') and os.fork() == 0:\n"
        "    raise SystemExit\n"
        "os.wait() if hasattr(os, 'wait') else None\n"
        "print(path.read_bytes()[:-32].decode(), path.parent.parent)\n"
    )
    variables = {"FLASHPATCH_CACHE_DIR": os.devnull, "TMPDIR": str(tmp_path), "TEMP": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **variables}, check=False,
    )  # fmt: skip
    assert done.stdout == f"content {tmp_path}\n", done.stderr
    assert list(tmp_path.iterdir()) == []
