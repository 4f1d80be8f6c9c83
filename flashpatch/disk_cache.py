"""A private folder of built files: nobody else can write there, and every entry is proven by its hash.

What is in it gets executed. So no folder is used that somebody else owns or may write to, and no folder changes its mode
that was there before.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from . import counting

VARIABLE = "FLASHPATCH_CACHE_DIR"
EMULATOR = "emulator"  # the part with libraries for the CPU; cubins are in the folder itself


# ---- the folder ----


def folder(part: str = "") -> Path | None:
    """The folder of that part of the cache, or None where there can be none (`fault` says why)."""
    path, _ = _checked(_base())
    return _checked(path / part)[0] if path and part else path


def fault() -> str:
    """Which folder cannot keep built files, and why, be it that of a part; empty where all can."""
    path, why = _checked(_base())
    return why if path is None else _checked(path / EMULATOR)[1]


def _base() -> Path:
    if configured := os.environ.get(VARIABLE):
        return Path(configured).absolute()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "flashpatch"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashpatch"


@functools.cache
def _checked(path: Path) -> tuple[Path | None, str]:
    """The folder itself if it is private, made where it is missing, else one of this user's in it; or None and why."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid"):  # a profile's folders on Windows are private as they are
            status = path.stat()
            why = _exposed(path, status)
            if why and status.st_mode & stat.S_ISVTX and status.st_uid in (0, os.getuid()):
                # as in /tmp nobody can rename what others have there
                path /= f"flashpatch-{os.getuid()}"
                path.mkdir(exist_ok=True, mode=0o700)
                why = _exposed(path, path.lstat())
            if why:
                return None, why
        with tempfile.TemporaryFile(dir=path):
            return path, ""
    except OSError as error:
        return None, f"{path} cannot be written ({error.strerror})"


def _exposed(path: Path, status: os.stat_result) -> str:
    """How somebody else could have put something into a folder; empty: nobody could."""
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is no folder"
    if status.st_uid != os.getuid():
        return f"{path} belongs to somebody else (user {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


@functools.cache
def temporary_folder() -> Path:
    """A private folder of this process, removed when it ends."""
    path, owner = Path(tempfile.mkdtemp(prefix="flashpatch-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child leaves it to its parent
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


# ---- its entries ----


def content(place: Path | None, name: str, make: Callable[[], bytes]) -> bytes:
    """The content of an entry, made by `make()` and stored if it is missing or damaged.

    No folder, or a full or read-only disk, costs the caching, not the result; no folder is said once.
    """
    if place is None:
        _warn_of_no_folder()
        return make()
    found = _read(place / name)
    if found is None:
        found = make()
        with contextlib.suppress(OSError):
            _write(place / name, found)
    return found


def file(place: Path | None, name: str, make: Callable[[], bytes]) -> Path:
    """The same for what is loaded by its path: in a temporary folder where it cannot be kept."""
    if place is None:
        _warn_of_no_folder()
    path = (place or temporary_folder()) / name
    if _read(path) is None:
        made = make()
        try:
            _write(path, made)
        except OSError:
            path = temporary_folder() / name
            _write(path, made)
    return path


@functools.cache
def _warn_of_no_folder() -> None:
    text = f"flashpatch: every process compiles its kernels anew, they cannot be kept: {fault()}"
    warnings.warn(f"{text}; type: export {VARIABLE}=/a/folder/of/yours", stacklevel=counting.callers_level())


def _read(path: Path) -> bytes | None:
    """What an entry holds; None where it is missing or damaged. The SHA-256 is its end: loaders ignore what follows an ELF."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    return entry[:-32] if hashlib.sha256(entry[:-32]).digest() == entry[-32:] else None


def _write(path: Path, made: bytes) -> None:
    """Through a temporary file that is renamed, so that readers never see half of an entry."""
    number, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with open(number, "wb") as file:
            file.write(made + hashlib.sha256(made).digest())
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
