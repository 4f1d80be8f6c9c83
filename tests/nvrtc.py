"""NVRTC of a given major version, beside the one CuPy has taken: the same kernels must build with either."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path

from flashpatch import compiler

# Where NVIDIA's wheels of each major put the library, below the namespace package `nvidia`.
LIBRARIES = {12: "cuda_nvrtc/lib/libnvrtc.so.12", 13: "cu13/lib/libnvrtc.so.13"}
WHEELS = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}


class BuildError(RuntimeError):
    """NVRTC refused a source; the text is its log."""


def wheel_file(*below_nvidia: str) -> Path | None:
    """The first of these files that NVIDIA's wheels have installed, wherever on sys.path."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec and spec.submodule_search_locations else ()
    found = (Path(root) / name for root in roots for name in below_nvidia)
    return next((path for path in found if path.exists()), None)


@functools.cache
def load(major: int) -> Nvrtc | None:
    """NVRTC of a major version, or None where its wheel is not installed."""
    # CuPy takes whatever libnvrtc is in the process already, so it goes first: which one it takes is for it to say.
    compiler.available()
    path = wheel_file(LIBRARIES[major])
    return Nvrtc(path) if path else None


class Nvrtc:
    """The few calls of NVRTC's C interface that `compiler.compile_cubin` makes through CuPy."""

    def __init__(self, path: Path):
        # CuPy loads its NVRTC with global symbols: without DEEPBIND one major's code would call the other's, and
        # the built-in headers are looked up by a soname that only a library loaded before can answer to.
        mode = os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0)
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode)
        self._library = ctypes.CDLL(str(path), mode)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = major.value, minor.value

    def compile(self, source: str, name: str, headers: dict[str, str], options: tuple[str, ...]) -> tuple[bytes, str]:
        """A cubin and NVRTC's log. Raises BuildError."""
        program = ctypes.c_void_p()
        texts, names = _strings(headers.values()), _strings(headers)
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
            )
        )
        try:
            status = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode()
            if status:
                raise BuildError(log or self._message(status))
            return self._read(program, "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _check(self, status: int) -> None:
        if status:
            raise BuildError(self._message(status))

    def _message(self, status: int) -> str:
        return self._library.nvrtcGetErrorString(status).decode()


def _strings(values) -> ctypes.Array:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)
