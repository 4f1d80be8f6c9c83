"""The emulator's builds: a kernel's source for one Config becomes a shared object, by a C++ compiler, with a cache on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from . import disk_cache
from .kernel_constants import constants
from .problem import BuildFailure, Config, Reason
from .support_matrix import find

FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-w")
MACHINE_FLAGS = ("-O2",)
KERNEL_FLAGS = ("-O1",)  # builds in 0.6 of the time of -O2, and small cases run no slower
Patch = Callable[[str, str], str]
# Unrolling costs compile time and buys nothing here; the line stays, so that line numbers do.
_UNROLL = re.compile(r"^#pragma unroll.*$", re.MULTILINE)
_building_the_machine = threading.Lock()


class EmulatorBuildError(BuildFailure):
    """The C++ compiler refused a kernel, or there is none."""


# ---- the compiler ----


@functools.cache
def find_compiler(configured: str | None) -> tuple[str, ...] | None:
    """The command of a C++ compiler: FLASHPATCH_CXX, g++, clang++ or the `ziglang` package, in this order."""
    if configured:
        command = tuple(shlex.split(configured))
        return command if shutil.which(command[0]) else None
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return (name,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def available() -> Reason | None:
    """None if kernels can be emulated here, else why not and what to type."""
    configured = os.environ.get("FLASHPATCH_CXX")
    if os.name != "posix":
        return Reason("no_emulator", f"the CPU emulator needs Linux or another POSIX system, this is {sys.platform}")
    if command := find_compiler(configured):
        if _compiles(command):
            return None
        name = f"FLASHPATCH_CXX={configured}" if configured else command[0]
        return Reason("no_compiler", f"{name} does not compile C++; set FLASHPATCH_CXX to a compiler that does")
    if configured:
        return Reason("no_compiler", f"FLASHPATCH_CXX={configured}: there is no such compiler; unset it or correct it")
    return Reason("no_compiler", "no C++ compiler was found; type: apt install g++   or: pip install ziglang")


@functools.cache
def _signature(compiler: tuple[str, ...]) -> str:
    """What decides the machine code besides the sources: the compiler's version, this CPU, the flags."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    cpu = platform.machine() + platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu += next(line for line in lines if line.startswith(("flags", "Features")))
    return repr((version, cpu, compiler, FLAGS, MACHINE_FLAGS, KERNEL_FLAGS, pattern_flags(compiler)))


@functools.cache
def _compiles(compiler: tuple[str, ...]) -> bool:
    """Whether a command takes C++ at all and says so of an error."""

    def accepts(program: str) -> bool:
        command = (*compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "-")
        try:
            return subprocess.run(command, input=program, capture_output=True, text=True, check=False).returncode == 0
        except OSError:
            return False

    return accepts("int one = 1;") and not accepts("int one = ;")


@functools.cache
def pattern_flags(compiler: tuple[str, ...]) -> tuple[str, ...]:
    """The flag that fills uninitialised arrays with garbage, where the compiler has it (g++ 12, clang)."""
    flag = "-ftrivial-auto-var-init=pattern"
    command = (*compiler, flag, "-fsyntax-only", "-x", "c++", os.devnull)
    return (flag,) if subprocess.run(command, capture_output=True, check=False).returncode == 0 else ()


def _native() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _run(command: Sequence[str], what: str, folder: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise EmulatorBuildError(
            Reason("compile_failed", f"{what} does not compile for the CPU ({command[0]})"), done.stderr
        )


# ---- what is compiled ----


@functools.cache
def _read_sources(folder: Path | None) -> dict[str, str]:
    """Headers and kernels by name, those in `emulation/` in place of their namesakes."""
    root = find("cuda_src")
    texts = {}
    for place in (root, folder or root, root / "emulation"):
        for path in sorted(place.glob("*.*")):
            if path.suffix in (".cu", ".cuh", ".h", ".cpp"):
                texts[path.name] = _UNROLL.sub("", path.read_text(encoding="utf-8"))
    return texts


def sources(patch: Patch | None = None, folder: Path | None = None) -> dict[str, str]:
    """Every source by its name, rewritten by `patch`; `folder` has more of them."""
    texts = _read_sources(folder)
    return {name: patch(name, text) for name, text in texts.items()} if patch else texts


def _kernel_source(config: Config, text: str) -> str:
    """The translation unit of a Config: constants, the kernel file, and a C entry for each kernel in it."""
    entries = re.findall(r"^KERNEL\(.*\)\s*(\w+)\s*\(", text, re.MULTILINE)
    entries = entries or [f"attention_{config.kernel}"]  # of a kernel it includes, renamed
    export = 'extern "C" __attribute__((visibility("default")))'
    tail = "".join(
        f"{export} void flashpatch_enter_{entry}(const void* params) {{ emulation::enter({entry}, params); }}\n"
        f"{export} unsigned flashpatch_params_{entry}() {{ return emulation::params_bytes({entry}); }}\n"
        f"{export} unsigned flashpatch_alignment_{entry}() {{ return emulation::params_alignment({entry}); }}\n"
        for entry in entries
    )
    return f'{constants(config)}#line 1 "{config.kernel}.cu"\n{text}\n{tail}'


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


# ---- building ----


def _kept(name: str, build: Callable[[str], Path]) -> Path:
    """The file of that name in the cache, made by `build(folder)` if it is missing or damaged."""

    def made() -> bytes:
        with tempfile.TemporaryDirectory(prefix="flashpatch-build-") as folder:
            return build(folder).read_bytes()

    return disk_cache.file(disk_cache.folder(disk_cache.EMULATOR), name, made)


def _build_machine(texts: dict[str, str], compiler: tuple[str, ...]) -> Path:
    """The machine itself, compiled once for all kernels."""
    sources = {name: text for name, text in texts.items() if name.endswith((".h", ".cpp"))}

    def made(folder: str) -> Path:
        for name, text in sources.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        unit = "".join(f'#include "{name}"\n' for name in sorted(sources) if name.endswith(".cpp"))
        Path(folder, "all.cc").write_text(unit, encoding="utf-8")
        command = [*compiler, *FLAGS, *MACHINE_FLAGS, _native(), "-c", "all.cc", "-o", "machine.o"]
        _run(command, "the emulator", folder)
        return Path(folder, "machine.o")

    with _building_the_machine:
        return _kept(f"machine-{_digest(_signature(compiler), sources)}.o", made)


def build(config: Config, patch: Patch | None = None, folder: Path | None = None) -> Path:
    """The shared object of a Config, from the cache where it is there: the machine and the kernels of one source file.

    There has to be a compiler (`available`). Raises EmulatorBuildError where it refuses a source.
    """
    compiler, texts = find_compiler(os.environ.get("FLASHPATCH_CXX")), sources(patch, folder)
    machine = _build_machine(texts, compiler)
    name = f"{config.kernel}.cu"
    if name not in texts:
        known = ", ".join(sorted(n for n in texts if n.endswith(".cu"))) or "none"
        raise EmulatorBuildError(Reason("no_kernel", f"there is no kernel source {name} (there are: {known})"))
    unit = _kernel_source(config, texts[name])
    kernels = re.findall(r'^#include "(\w+\.cu)"', texts[name], re.MULTILINE)
    headers = {name: text for name, text in texts.items() if name.endswith((".cuh", ".h")) or name in kernels}

    def made(folder: str) -> Path:
        for name, text in {**headers, "kernel.cc": unit}.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        shared = ("-shared", "-Wl,-Bsymbolic") if sys.platform != "darwin" else ("-shared",)
        flags = (*FLAGS, *KERNEL_FLAGS, *pattern_flags(compiler), *shared)
        command = [*compiler, *flags, "kernel.cc", "-x", "none", str(machine), "-lm", "-o", "kernel.so"]
        _run(command, f"{config.kernel} ({config})", folder)
        return Path(folder, "kernel.so")

    return _kept(f"{config.kernel}-{_digest(_signature(compiler), machine.name, unit, headers)}.so", made)
