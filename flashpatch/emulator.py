"""The kernels of `cuda_src/` on a CPU: compiled by a C++ compiler, run one fiber per CUDA thread, checked as they run.

`cuda_src/emulation/` holds a second body for every instruction the kernels use. It is strict where a GPU is lazy:
copies arrive only at their wait, shared memory starts as NaN, unordered accesses and out-of-bounds are errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from .problem import Config, Reason
from .support_matrix import find

FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-w")
MACHINE_FLAGS = ("-O2",)
KERNEL_FLAGS = ("-O1",)  # builds in 0.6 of the time of -O2, and small cases run no slower
PARAMS_LIMIT = 4096
# TensorMapFields of emulation/machine_sm90.h
_TENSOR_MAP = struct.Struct("=QQ4Q5I5I3I28x")
_TENSOR_MAP_MAGIC = 0x70616D726F736E65
Patch = Callable[[str, str], str]
# Unrolling costs compile time and buys nothing here; the line stays, so that line numbers do.
_UNROLL = re.compile(r"^#pragma unroll.*$", re.MULTILINE)


class EmulationError(RuntimeError):
    """A kernel did what the hardware does not define: where, which thread, and what."""

    def __init__(self, kernel: str, entry: str, block: int, thread: int, site: str, what: str):
        at = f" at {site}" if site else ""
        super().__init__(f"{entry} of {kernel}, block {block}, thread {thread}{at}: {what}")
        self.kernel, self.entry, self.block, self.thread = kernel, entry, block, thread
        self.site, self.what = site, what

    def __reduce__(self):
        return type(self), (self.kernel, self.entry, self.block, self.thread, self.site, self.what)


class BuildError(RuntimeError):
    """The C++ compiler refused a kernel, or there is none. `reason` says what to type."""

    def __init__(self, reason: Reason, log: str = ""):
        super().__init__(f"{reason.text}\n{log}".strip())
        self.reason, self.log = reason, log

    def __reduce__(self):
        return type(self), (self.reason, self.log)


@dataclasses.dataclass(frozen=True)
class Counters:
    """What the last launch did. Places are (instruction, "file:line")."""

    executions: dict[tuple[str, str], int]
    bank_conflicts: dict[tuple[str, str], int]

    @property
    def instructions(self) -> dict[str, int]:
        """Executions by instruction: warp collectives once per warp, everything else once per thread."""
        totals: dict[str, int] = {}
        for (instruction, _), count in self.executions.items():
            totals[instruction] = totals.get(instruction, 0) + count
        return totals


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


def _compiler() -> tuple[str, ...]:
    reason = available()
    if reason is not None:
        raise BuildError(reason)
    return find_compiler(os.environ.get("FLASHPATCH_CXX"))


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
    return repr((version, cpu, compiler, FLAGS, MACHINE_FLAGS, KERNEL_FLAGS, _pattern_flags(compiler)))


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
def _pattern_flags(compiler: tuple[str, ...]) -> tuple[str, ...]:
    """The flag that fills uninitialised arrays with garbage, where the compiler has it (g++ 12, clang)."""
    flag = "-ftrivial-auto-var-init=pattern"
    command = (*compiler, flag, "-fsyntax-only", "-x", "c++", os.devnull)
    return (flag,) if subprocess.run(command, capture_output=True, check=False).returncode == 0 else ()


def _native() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _run(command: Sequence[str], what: str, folder: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise BuildError(Reason("compile_failed", f"{what} does not compile for the CPU ({command[0]})"), done.stderr)


# ---- what is compiled ----


def constants(config: Config) -> str:
    """The Config as C++ constants, put in front of the kernel's source (`head_dim` -> `kHeadDim`)."""
    lines = [
        f"constexpr bool kIs{name} = {str(config.dtype in dtypes).lower()};"
        for name, dtypes in (
            ("Bf16", ("bfloat16", "float8_e4m3fn")),  # numbers of 16 bits, which out of 8 bits has
            ("Fp32", ("float32",)),
            ("E4m3", ("float8_e4m3fn",)),
        )
    ]
    for field in dataclasses.fields(config):
        if field.name not in ("kernel", "dtype"):
            value = getattr(config, field.name)
            kind, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
            name = "k" + "".join(part.capitalize() for part in field.name.split("_"))
            lines.append(f"constexpr {kind} {name} = {text};")
    return "\n".join(lines) + "\n"


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


def _staged(folder: Path | None, patch: Patch | None) -> dict[str, str]:
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


# ---- building, with a cache on disk ----


def _cache_folder() -> Path:
    """A folder that only this user can read or write; a temporary one where there is none."""
    base = os.environ.get("FLASHPATCH_CACHE_DIR")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashpatch"
    folder = (Path(base).absolute() if base else home) / "emulator"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _temporary_folder()


@functools.lru_cache(maxsize=1)
def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="flashpatch-emulator-"))


def _intact(path: Path) -> bool:
    """Whether an entry is whole: its last 32 bytes are the SHA-256 of the rest (loaders ignore what follows an ELF)."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


def _cached(name: str, build: Callable[[str], Path]) -> Path:
    """The cache entry of that name, made by `build(folder)` if it is missing or damaged."""
    path = _cache_folder() / name
    if _intact(path):
        return path
    with tempfile.TemporaryDirectory(prefix="flashpatch-build-") as folder:
        content = build(folder).read_bytes()
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content + hashlib.sha256(content).digest())
    os.replace(file.name, path)
    return path


def _build_machine(texts: dict[str, str], compiler: tuple[str, ...]) -> Path:
    """The machine itself, compiled once for all kernels."""
    sources = {name: text for name, text in texts.items() if name.endswith((".h", ".cpp"))}

    def build(folder: str) -> Path:
        for name, text in sources.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        unit = "".join(f'#include "{name}"\n' for name in sorted(sources) if name.endswith(".cpp"))
        Path(folder, "all.cc").write_text(unit, encoding="utf-8")
        command = [*compiler, *FLAGS, *MACHINE_FLAGS, _native(), "-c", "all.cc", "-o", "machine.o"]
        _run(command, "the emulator", folder)
        return Path(folder, "machine.o")

    with _locks.setdefault("machine", threading.Lock()):
        return _cached(f"machine-{_digest(_signature(compiler), sources)}.o", build)


def _build(config: Config, texts: dict[str, str]) -> Path:
    """The shared object of a Config."""
    compiler = _compiler()
    machine = _build_machine(texts, compiler)
    name = f"{config.kernel}.cu"
    if name not in texts:
        known = ", ".join(sorted(n for n in texts if n.endswith(".cu"))) or "none"
        raise BuildError(Reason("no_kernel", f"there is no kernel source {name} (there are: {known})"))
    unit = _kernel_source(config, texts[name])
    kernels = re.findall(r'^#include "(\w+\.cu)"', texts[name], re.MULTILINE)
    headers = {name: text for name, text in texts.items() if name.endswith((".cuh", ".h")) or name in kernels}

    def build(folder: str) -> Path:
        for name, text in {**headers, "kernel.cc": unit}.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        shared = ("-shared", "-Wl,-Bsymbolic") if sys.platform != "darwin" else ("-shared",)
        flags = (*FLAGS, *KERNEL_FLAGS, *_pattern_flags(compiler), *shared)
        command = [*compiler, *flags, "kernel.cc", "-x", "none", str(machine), "-lm", "-o", "kernel.so"]
        _run(command, f"{config.kernel} ({config})", folder)
        return Path(folder, "kernel.so")

    return _cached(f"{config.kernel}-{_digest(_signature(compiler), machine.name, unit, headers)}.so", build)


# ---- tensor maps ----


def tensor_map(
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_bytes: int = 2,
    swizzle_bytes: int = 128,
) -> bytes:
    """The 128 bytes that stand for a CUtensorMap here: TensorMapFields of `emulation/machine_sm90.h`.

    As cuTensorMapEncodeTiled: `dims` and `box` from the contiguous dimension on, `strides` in bytes without its own.
    Raises ValueError for what that function would refuse.
    """
    rank = len(dims)
    if not (3 <= rank <= 5 and len(box) == rank and len(strides) == rank - 1):
        raise ValueError(
            f"a tensor map needs 3 to 5 dims, as many box sizes and one stride less, got {dims} {box} {strides}"
        )
    if address % 16 or any(stride % 16 for stride in strides):
        raise ValueError(
            f"address {address:#x} and strides {tuple(strides)} of a tensor map must be multiples of 16 bytes"
        )
    if not all(1 <= size <= 256 for size in box) or box[0] * element_bytes % 16:
        raise ValueError(f"box {tuple(box)}: sizes from 1 to 256, the first a multiple of 16 bytes")
    if swizzle_bytes and box[0] * element_bytes > swizzle_bytes:
        raise ValueError(
            f"box {tuple(box)}: rows of {box[0] * element_bytes} bytes do not fit a {swizzle_bytes}-byte swizzle"
        )
    padding = 5 - rank
    return _TENSOR_MAP.pack(
        _TENSOR_MAP_MAGIC,
        address,
        *strides,
        *[0] * padding,
        *dims,
        *[1] * padding,
        *box,
        *[1] * padding,
        rank,
        element_bytes,
        swizzle_bytes,
    )


# ---- loading and launching ----


class _GlobalRange(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_uint32),
    ]


class _Failure(ctypes.Structure):
    _fields_ = [
        ("block", ctypes.c_uint32), ("thread", ctypes.c_uint32), ("line", ctypes.c_uint32),
        ("file", ctypes.c_char_p), ("text", ctypes.c_char * 2000),
    ]  # fmt: skip


class _Record(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p), ("instruction", ctypes.c_char_p), ("line", ctypes.c_uint32),
        ("unused", ctypes.c_uint32), ("executions", ctypes.c_uint64), ("bank_conflicts", ctypes.c_uint64),
    ]  # fmt: skip


class _Library:
    """A loaded shared object. One machine each, so one launch at a time."""

    def __init__(self, path: Path):
        self.lock = threading.Lock()
        self.c = ctypes.CDLL(str(path))
        u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
        launch = (pointer, ctypes.c_char_p, u32, u32, u32, u32, u64, pointer, u32, ctypes.c_int, ctypes.c_double)
        self.c.flashpatch_launch.argtypes = launch
        self.c.flashpatch_failure.restype = ctypes.POINTER(_Failure)
        self.c.flashpatch_records.argtypes = [ctypes.POINTER(ctypes.POINTER(_Record))]

    def counters(self) -> Counters:
        """Reads the counters; the caller holds the lock."""
        first = ctypes.POINTER(_Record)()
        records = first[: self.c.flashpatch_records(ctypes.byref(first))]
        executions, conflicts = {}, {}
        for record in records:
            if record.executions:
                place = (record.instruction.decode(), f"{Path(record.file.decode()).name}:{record.line}")
                executions[place] = executions.get(place, 0) + record.executions
                conflicts[place] = conflicts.get(place, 0) + record.bank_conflicts
        return Counters(executions, {place: count for place, count in conflicts.items() if count})


class Kernel:
    """The kernels of one source file, compiled for one Config. `last` has the counters of the last launch."""

    def __init__(self, config: Config, library: _Library, seed: int):
        self.config, self.seed = config, seed
        self.last: Counters | None = None
        self._library = library

    def launch(
        self,
        entry: str,
        grid: int,
        block_threads: int,
        shared_memory: int,
        params: bytes,
        stream: object = None,
        tensors: Sequence[tuple[int, int, str, bool]] = (),
    ) -> None:
        """Run a grid to its end. `tensors` are the memory it may touch: (address, bytes, name, writable); none: unchecked.

        Raises EmulationError. `stream` is ignored.
        """
        enter, params = self._entry(entry, bytes(params))
        ranges = (_GlobalRange * max(1, len(tensors)))(
            *(_GlobalRange(address, address + size, (name or "a tensor").encode(), writable)
              for address, size, name, writable in tensors)
        )  # fmt: skip
        limit = time_limit()
        library = self._library
        with library.lock:
            failed = library.c.flashpatch_launch(
                enter,
                params,
                len(params),
                grid,
                block_threads,
                shared_memory,
                self.seed,
                ranges,
                len(tensors),
                self.config.deterministic,
                limit,
            )
            self.last = library.counters()
            failure = library.c.flashpatch_failure().contents
            if failed:
                site = f"{failure.file.decode()}:{failure.line}" if failure.file else ""
                raise EmulationError(
                    self.config.kernel,
                    entry,
                    failure.block,
                    failure.thread,
                    site,
                    failure.text.decode(errors="replace"),
                )

    def _entry(self, entry: str, params: bytes) -> tuple[ctypes.c_void_p, bytes]:
        try:
            enter = getattr(self._library.c, f"flashpatch_enter_{entry}")
        except AttributeError:
            raise ValueError(f"{self.config.kernel}.cu has no kernel {entry!r}") from None
        size = getattr(self._library.c, f"flashpatch_params_{entry}")()
        alignment = getattr(self._library.c, f"flashpatch_alignment_{entry}")()
        # a struct ends with its last field, or with the padding that follows it
        if -(-len(params) // alignment) * alignment != size or size > PARAMS_LIMIT:
            raise ValueError(f"{entry} takes {size} bytes of params (at most {PARAMS_LIMIT}), got {len(params)}")
        params = params.ljust(size, b"\0")
        return ctypes.cast(enter, ctypes.c_void_p), params


def warp_order() -> int:
    """FLASHPATCH_EMULATION_SEED. Raises ValueError that names it."""
    text = os.environ.get("FLASHPATCH_EMULATION_SEED") or "0"
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 64:
        raise ValueError(
            f"FLASHPATCH_EMULATION_SEED={text}: a whole number from 0 to 2^64 - 1 is needed; unset or correct it"
        )
    return int(text)


def time_limit() -> float:
    """FLASHPATCH_EMULATION_SECONDS. Raises ValueError that names it."""
    text = os.environ.get("FLASHPATCH_EMULATION_SECONDS") or "300"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ValueError(
            f"FLASHPATCH_EMULATION_SECONDS={text}: a number of seconds above 0 is needed; unset or correct it"
        )
    return seconds


_libraries: dict[object, _Library] = {}  # by (Config, folder), and by path
_locks: dict[object, threading.Lock] = {}  # of what is being built, by the same keys; "machine": the machine itself


def load(config: Config, *, seed: int | None = None, patch: Patch | None = None, folder: Path | None = None) -> Kernel:
    """The kernels of `config.kernel`, built at most once per sources and Config.

    `seed` shuffles the order of warps (default: FLASHPATCH_EMULATION_SEED, else they take turns). `patch(name, text)`
    rewrites sources before they are compiled; `folder` has more of them. Raises BuildError.
    """
    if seed is None:
        seed = warp_order()
    return Kernel(config, _library(config, patch, folder), seed)


def _library(config: Config, patch: Patch | None, folder: Path | None) -> _Library:
    key = (config, folder) if patch is None else None
    if (library := _libraries.get(key)) is None:
        with _locks.setdefault(key, threading.Lock()):
            if (library := _libraries.get(key)) is None:
                path = _build(config, _staged(folder, patch))
                with _locks.setdefault(path, threading.Lock()):
                    if (library := _libraries.get(path)) is None:
                        library = _libraries[path] = _Library(path)
                if key is not None:
                    _libraries[key] = library
    return library
