"""The kernels of `cuda_src/` on a CPU: compiled by a C++ compiler, run one fiber per CUDA thread, checked as they run.

`cuda_src/emulation/` holds a second body for every instruction the kernels use. It is strict where a GPU is lazy:
copies arrive only at their wait, shared memory starts as NaN, unordered accesses and out-of-bounds are errors.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from .emulator_builds import EmulatorBuildError, Patch, available, build
from .problem import Config

PARAMS_LIMIT = 4096
# TensorMapFields of emulation/machine_sm90.h
_TENSOR_MAP = struct.Struct("=QQ4Q5I5I3I28x")
_TENSOR_MAP_MAGIC = 0x70616D726F736E65


class EmulationError(RuntimeError):
    """A kernel did what the hardware does not define: where, which thread, and what."""

    def __init__(self, kernel: str, entry: str, block: int, thread: int, site: str, what: str):
        at = f" at {site}" if site else ""
        super().__init__(f"{entry} of {kernel}, block {block}, thread {thread}{at}: {what}")
        self.kernel, self.entry, self.block, self.thread = kernel, entry, block, thread
        self.site, self.what = site, what

    def __reduce__(self):
        return type(self), (self.kernel, self.entry, self.block, self.thread, self.site, self.what)


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
_locks: dict[object, threading.Lock] = {}  # of what is being built, by the same keys


def load(config: Config, *, seed: int | None = None, patch: Patch | None = None, folder: Path | None = None) -> Kernel:
    """The kernels of `config.kernel`, built at most once per sources and Config.

    `seed` shuffles the order of warps (default: FLASHPATCH_EMULATION_SEED, else they take turns). `patch(name, text)`
    rewrites sources before they are compiled; `folder` has more of them. Raises EmulatorBuildError.
    """
    if seed is None:
        seed = warp_order()
    return Kernel(config, _library(config, patch, folder), seed)


def _library(config: Config, patch: Patch | None, folder: Path | None) -> _Library:
    key = (config, folder) if patch is None else None
    if (library := _libraries.get(key)) is None:
        with _locks.setdefault(key, threading.Lock()):
            if (library := _libraries.get(key)) is None:
                if reason := available():
                    raise EmulatorBuildError(reason)
                path = build(config, patch, folder)
                with _locks.setdefault(path, threading.Lock()):
                    if (library := _libraries.get(path)) is None:
                        library = _libraries[path] = _Library(path)
                if key is not None:
                    _libraries[key] = library
    return library
