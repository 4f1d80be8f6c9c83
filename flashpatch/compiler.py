"""From a Config to a loaded CUDA function: sources + constants -> cubin (NVRTC, cached on disk) -> CuPy.

Only this module and `kernel_launch` import CuPy, and only when something is compiled. Nothing here needs a GPU
except `load`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import re
import sys
import threading
import time
from pathlib import Path

from . import disk_cache
from .kernel_constants import constants
from .problem import BuildFailure, Config, Device, Reason
from .support_matrix import find

# What the kernels need beside torch, by CUDA's major version: the extras cuda12 and cuda13. Named one by one, because a package
# index knows nothing of a flashpatch that came from a clone or a wheel.
PACKAGES = {
    "12": ("cupy-cuda12x>=14.0", "nvidia-cuda-nvrtc-cu12>=12,<13", "nvidia-cuda-runtime-cu12>=12,<13"),
    "13": ("cupy-cuda13x>=14.0", "nvidia-cuda-nvrtc>=13,<14", "nvidia-cuda-runtime>=13,<14"),
}
REINSTALL = "install flashpatch anew, as it was installed: pip install --force-reinstall --no-deps CLONE_OR_WHEEL"

# No fast math and no -ftz: kernels rely on denormals, for one so that a hidden score stays -inf (kScoresThemselves in scores.cuh).
OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")


class CompileError(BuildFailure):
    """NVRTC refused a kernel, or there is no NVRTC."""


# ---- what is compiled ----


@functools.cache
def headers() -> dict[str, str]:
    """What a kernel may include, by name: every header of cuda_src, and kernels, which other families build anew."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(find("cuda_src").glob("*.cu*"))}


def source(config: Config) -> str:
    """The whole translation unit of a Config: its constants, then the kernel file."""
    return constants(config) + _kernel_text(config.kernel)


@functools.cache
def _kernel_text(kernel: str) -> str:
    if f"{kernel}.cu" not in headers():
        raise FileNotFoundError(f"cuda_src/{kernel}.cu is missing from this installation of flashpatch")
    return headers()[f"{kernel}.cu"]


def arch(config: Config, device: Device) -> str:
    """NVRTC's -arch for a Config on a device. The Hopper kernels need the architecture-specific feature set."""
    major, minor = device.capability
    return f"sm_{major}{minor}" + ("a" if "sm90" in config.kernel else "")


@functools.cache
def digest(config: Config) -> str:
    """What evidence stands for: the Config and all that is compiled for it, comments and blank lines left out."""
    digest = hashlib.sha256(repr((config, OPTIONS)).encode())
    reachable = _reachable(_kernel_text(config.kernel))
    for name, text in [*sorted(reachable.items()), (config.kernel, _kernel_text(config.kernel))]:
        digest.update(f"\n@{name}\n{_significant(text)}".encode())
    return digest.hexdigest()[:16]


@functools.cache
def sources_digest() -> str:
    """What figures of all kernels are figures of: every kernel file and header, comments and blank lines left out."""
    texts = (f"\n@{name}\n{_significant(text)}" for name, text in sorted(headers().items()))
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def _reachable(text: str) -> dict[str, str]:
    """The headers a source includes, directly or through others."""
    found: dict[str, str] = {}
    queue = [text]
    while queue:
        for name in re.findall(r'^\s*#include "([^"]+)"', queue.pop(), re.MULTILINE):
            if name not in found:
                if name not in headers():
                    raise FileNotFoundError(f"cuda_src/{name} is missing from this installation of flashpatch")
                found[name] = headers()[name]
                queue.append(found[name])
    return found


def check_sources(kernel: str) -> None:
    """Raises FileNotFoundError naming the first file that a kernel needs and this installation lacks."""
    _reachable(_kernel_text(kernel))


@functools.cache
def _significant(text: str) -> str:
    """Source without comments and blank space at line ends: editing those does not change what is compiled."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    lines = (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def name(config: Config) -> str:
    """A readable file name for a Config: the kernel, its sizes, its features."""
    if not isinstance(config, Config):
        return config.name
    flags = "-".join(
        field.name.removeprefix("has_")
        for field in dataclasses.fields(config)
        if isinstance(getattr(config, field.name), bool) and getattr(config, field.name)
    )
    sizes = f"{config.dtype}-d{config.head_dim}" + (
        f"v{config.head_dim_v}" if config.head_dim_v != config.head_dim else ""
    )
    tile = f"{config.block_m}x{config.block_n}x{config.num_warps}w{config.num_stages}s"
    return "-".join(part for part in (config.kernel, sizes, tile, flags) if part)


# ---- NVRTC ----


@functools.lru_cache(maxsize=1)
def _nvrtc():
    """CuPy's binding of NVRTC. Raises CompileError naming what to install."""
    _make_cupy_importable()
    try:
        from cupy_backends.cuda.libs import nvrtc
    except Exception as error:
        raise CompileError(_why_no_cupy(error)) from error
    try:
        nvrtc.getVersion()
    except Exception as error:
        try:
            import cupy  # noqa: F401 - it is what looks for the libraries
        except Exception as why:
            raise CompileError(_why_no_cupy(why)) from why
        raise CompileError(_why_no_nvrtc(), str(error)) from error
    return nvrtc


def _make_cupy_importable() -> None:
    """CuPy creates its cache folder when imported and fails where HOME cannot be written: give it another one."""
    if "CUPY_CACHE_DIR" not in os.environ:
        home = Path.home() / ".cupy"
        if not os.access(home if home.exists() else home.parent, os.W_OK):
            os.environ["CUPY_CACHE_DIR"] = str(disk_cache.temporary_folder() / "cupy")


def cupy_packages() -> dict[str, str]:
    """The CuPy packages that are installed, with their versions."""
    found = {}
    for package in ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def cupy_fault() -> Reason | None:
    """What is wrong with the CuPy packages themselves: two of them, or one for another CUDA than torch's. It may go well
    until it does not, so it is said beforehand and stops nothing by itself."""
    import torch

    packages = cupy_packages()
    if len(packages) > 1:
        text = f"{' and '.join(packages)} are both installed; they share one folder and break each other"
        return Reason("two_cupys", f"{text}; type: {install_line()}")
    for package in packages:
        made_for = re.search(r"cuda(\d+)x", package)
        if made_for and torch.version.cuda and made_for[1] != torch.version.cuda.split(".")[0]:
            text = f"{package} is for CUDA {made_for[1]}, torch was built with CUDA {torch.version.cuda}"
            return Reason("cupy_mismatch", f"{text}; type: {install_line()}")
    return None


def _why_no_cupy(error: Exception) -> Reason:
    packages = cupy_packages()
    if fault := cupy_fault():
        return Reason(fault.code, f"CuPy cannot be imported ({error}): {fault.text}")
    if not packages:
        return Reason("no_cupy", f"CuPy is not installed ({error}); type: {install_line()}")
    (package,) = packages
    text = f"{package} {packages[package]} is installed but cannot be imported ({error})"
    return Reason("no_cupy", f"{text}; type: pip install --force-reinstall {package}")


def _why_no_nvrtc() -> Reason:
    if fault := cupy_fault():
        return Reason(fault.code, f"NVRTC (libnvrtc) was not found: {fault.text}")
    return Reason("no_nvrtc", f"NVRTC (libnvrtc) was not found; type: {install_line()}")


def install_line(major: str = "", option: str = "") -> str:
    """What to type to get CuPy and NVRTC: for this major version of CUDA, torch's, or else the driver's. CuPys in its way go."""
    import torch

    major = major or (torch.version.cuda or str(driver_version() // 1000)).split(".")[0]
    wanted, installed = PACKAGES.get(major, PACKAGES["13"]), list(cupy_packages())
    wrong = installed if len(installed) > 1 else [name for name in installed if not wanted[0].startswith(f"{name}>")]
    remove = f"pip uninstall -y {' '.join(wrong)} && " if wrong else ""
    return f"{remove}pip install {option}{' '.join(map(repr, wanted))}"


def mismatch(device: Device) -> Reason | None:
    """Why what NVRTC makes cannot run on a device, or None; asked before anything is compiled for it."""
    version, driver = nvrtc_version(), driver_version()
    named = f"NVRTC {version[0]}.{version[1]}"
    if not driver:
        return Reason(
            "no_driver", "no NVIDIA driver was found (libcuda cannot be loaded); install one, then type: nvidia-smi"
        )
    if driver // 1000 < version[0]:
        text = f"{named} is newer than the driver (CUDA {driver // 1000}.{driver % 1000 // 10})"
        known = f", or type: {install_line(str(driver // 1000))}" if driver >= 12000 else ""
        return Reason("driver", f"{text}; update the driver{known}")
    return _arch_fault("{}{}".format(*device.capability))


def _arch_fault(number: str) -> Reason | None:
    """Why NVRTC cannot compile for compute capability `number` ("90"), or None."""
    known = sorted(_nvrtc().getSupportedArchs())
    if int(number) in known:
        return None
    version = ".".join(map(str, nvrtc_version()))
    if int(number) < known[0]:
        text = f"NVRTC {version} no longer compiles for sm_{number}; an older one does"
        return Reason("nvrtc_arch", f"{text}; type: {install_line('12')}")
    return Reason("nvrtc_arch", f"NVRTC {version} does not know sm_{number}; type: {install_line(option='--upgrade ')}")


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's version. Raises CompileError where there is none."""
    return tuple(_nvrtc().getVersion())


def available() -> Reason | None:
    """None if kernels can be compiled here, else why not and what to type."""
    try:
        _nvrtc()
    except CompileError as error:
        return error.reason
    return None


@functools.cache
def incomplete() -> Reason | None:
    """Why the NVRTC that was found compiles nothing at all (its built-in part is a library of its own), or None."""
    nvrtc = _nvrtc()
    program = nvrtc.createProgram("__global__ void nothing() {}", "nothing.cu", (), ())
    try:
        nvrtc.compileProgram(program, ())
        return None
    except Exception as error:
        return _incomplete(nvrtc.getProgramLog(program) or str(error))
    finally:
        nvrtc.destroyProgram(program)


def _incomplete(log: str) -> Reason:
    text = f"NVRTC {'.'.join(map(str, nvrtc_version()))} is incomplete: {' '.join(log.split())[:200]}"
    return Reason("nvrtc_incomplete", f"{text}; type: {install_line(option='--force-reinstall --no-deps ')}")


def compile_cubin(config: Config, arch: str) -> tuple[bytes, str]:
    """Compile one Config for one architecture, no GPU needed. Returns the cubin and NVRTC's log (registers, spills).

    Raises CompileError with NVRTC's own words.
    """
    nvrtc = _nvrtc()
    names, texts = zip(*((name.encode(), text.encode()) for name, text in headers().items()), strict=True)
    program = nvrtc.createProgram(source(config), f"{config.kernel}.cu", texts, names)
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS))
        # CuPy strips the last byte as if it were a C string's end
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except Exception as error:
        log = nvrtc.getProgramLog(program) or str(error)
        version = ".".join(map(str, nvrtc.getVersion()))
        if "gpu-architecture" in log:
            why = _arch_fault(arch.strip("sm_a")) or Reason("nvrtc_arch", f"NVRTC {version} does not know {arch}")
        elif "builtin" in f"{log} {error}".lower():
            why = _incomplete(log)
        else:
            why = Reason("compile_failed", f"NVRTC {version} could not compile {name(config)} for {arch}")
        raise CompileError(why, log) from error
    finally:
        nvrtc.destroyProgram(program)


# ---- on a GPU ----


@functools.lru_cache(maxsize=1)
def libcuda() -> ctypes.CDLL:
    """The driver's own library. Raises OSError where there is no driver."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def driver_version() -> int:
    """The newest CUDA the driver supports, as 1000 * major + 10 * minor; 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        libcuda().cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


class Kernel:
    """One cubin loaded on one device."""

    def __init__(self, cubin: bytes, config: Config, device: Device):
        from cupy.cuda.function import Module

        self.config, self.device = config, device
        self._module = Module()
        self._module.load(cubin)
        self._functions: dict[tuple[str, int], object] = {}

    def function(self, entry: str, shared_memory: int):
        """The entry as a CuPy Function, its dynamic shared memory limit raised once."""
        key = (entry, shared_memory)
        if key not in self._functions:
            from cupy_backends.cuda.api import driver

            function = self._module.get_function(entry)
            if shared_memory > 48 * 1024:
                attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                driver.funcSetAttribute(function.ptr, attribute, shared_memory)
            self._functions[key] = function
        return self._functions[key]


_kernels: dict[tuple[Config, int], Kernel | CompileError] = {}
_locks: dict[tuple[Config, int], threading.Lock] = {}  # one per kernel: different ones compile side by side
compile_seconds = 0.0  # spent in NVRTC by this process


def load(config: Config, device: Device) -> Kernel:
    """The loaded kernel of a Config on a device; compiled at most once per process, device and cache.

    Raises CompileError; a failure is remembered, never retried. Must not be called for the first time inside a
    CUDA graph capture.
    """
    key = (config, device.index)
    kernel = _kernels.get(key)
    if kernel is None:
        with _locks.setdefault(key, threading.Lock()):
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _load(config, device)
    if isinstance(kernel, CompileError):
        raise kernel
    return kernel


def _load(config: Config, device: Device) -> Kernel | CompileError:
    global compile_seconds
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"flashpatch cannot compile or load {name(config)} while a CUDA graph is being captured; "
            "run the same call once before capturing"
        )
    try:
        if reason := mismatch(device):
            return CompileError(reason)
        version = nvrtc_version()
        target = arch(config, device)
        started = time.perf_counter()
        file_name = f"{name(config)}-{target}-nvrtc{version[0]}.{version[1]}-{digest(config)}.cubin"
        cubin = disk_cache.content(disk_cache.folder(), file_name, lambda: compile_cubin(config, target)[0])
        compile_seconds += time.perf_counter() - started
        with torch.cuda.device(device.index):
            return Kernel(cubin, config, device)
    except CompileError as error:
        return error
    except FileNotFoundError as error:
        return CompileError(Reason("no_sources", f"{error}; {REINSTALL}"))
    except Exception as error:
        return CompileError(Reason("load_failed", f"{name(config)} could not be loaded on {device.name}: {error}"))


def usage(log: str) -> dict[str, int]:
    """Registers, spilled bytes and stack bytes per entry, read from NVRTC's log (the largest over entries)."""

    def largest(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, log)), default=0)

    return {
        "registers": largest(r"Used (\d+) registers"),
        "spill_bytes": largest(r"(\d+) bytes spill stores") + largest(r"(\d+) bytes spill loads"),
        "stack_bytes": largest(r"(\d+) bytes stack frame"),
    }
