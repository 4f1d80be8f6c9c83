"""The machine and its packages: what decides whether kernels run here, and what is wrong with it before it hurts.

Each check names what it found by a stable code and the line to type. The same codes are the declines of a call that
runs into it all the same.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from typing import Annotated

import torch

from . import compiler, disk_cache, emulator, emulator_builds, execution, planning
from .problem import Device, Reason


@dataclass(frozen=True)
class Fault:
    """Something wrong with the environment, and the line to type."""

    code: Annotated[str, "a stable name"]
    text: Annotated[str, "what is wrong"]
    remedy: Annotated[str, "what to type or do; empty if there is nothing"]


@dataclass(frozen=True)
class Environment:
    """The block to paste into an issue."""

    flashpatch: Annotated[str, "flashpatch's version"]
    python: Annotated[str, "Python's version"]
    system: Annotated[str, "operating system and processor"]
    torch: Annotated[str, "torch's version"]
    torch_cuda: Annotated[str | None, "CUDA that torch was built with; null: a CPU build"]
    transformers: Annotated[str | None, "transformers' version"]
    gpus: Annotated[list[str], "GPUs torch sees, with compute capability"]
    driver: Annotated[str | None, "newest CUDA the driver supports"]
    cupy: Annotated[list[str], "CuPy packages installed, with versions, and whether they cannot be imported"]
    nvrtc: Annotated[str | None, "version of the NVRTC that is used"]
    cxx: Annotated[str | None, "C++ compiler the CPU emulator uses"]
    cache: Annotated[str | None, "folder of compiled kernels; null: none can be written, they stay in memory"]
    variables: Annotated[dict[str, str], "FLASHPATCH_* environment variables that are set"]
    problems: Annotated[list[Fault], "what is wrong here"]


def environment() -> Environment:
    """Everything about this machine and process that decides what runs."""
    devices, faults = _devices()
    broken = compiler.available()
    nvrtc = None if broken else ".".join(map(str, compiler.nvrtc_version()))
    faults += [*_packages(broken, bool(devices)), *_toolkit(devices, broken), *_emulator(), *_switches(devices)]
    if (cache := disk_cache.folder()) is None:
        text = f"compiled kernels cannot be kept: {disk_cache.fault()}"
        faults.append(Fault("no_cache", text, f"export {disk_cache.VARIABLE}=/a/folder/of/yours"))
    return Environment(
        flashpatch=version_of("flashpatch") or "not installed",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        transformers=version_of("transformers"),
        gpus=[_titled(device) for device in devices],
        driver=_driver(),
        cupy=_cupy(broken),
        nvrtc=nvrtc,
        cxx=_cxx(),
        cache=str(cache) if cache else None,
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith("FLASHPATCH_")},
        problems=list(dict.fromkeys(faults)),
    )


def version_of(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def fault(reason: Reason, effect: str = "") -> Fault:
    """A Reason as a Fault: its text ends with the line to type."""
    text, _, remedy = reason.text.partition("; type: ")
    return Fault(reason.code, f"{effect}: {text}" if effect else text, remedy)


# ---- GPUs and the driver ----


def _devices() -> tuple[list[Device], list[Fault]]:
    """The GPUs torch sees, as they are, or why it sees none."""
    if torch.version.cuda is None:
        if not os.path.exists("/proc/driver/nvidia/version"):
            return [], []
        remedy = "pip install --upgrade --force-reinstall torch  (see pytorch.org for the build of your CUDA)"
        return [], [Fault("torch_cpu", "there is an NVIDIA driver, but this torch was built without CUDA", remedy)]
    if not torch.cuda.is_available():
        return [], [_no_gpu(compiler.driver_version())]
    devices = [execution.own_device(index) for index in range(torch.cuda.device_count())]
    unknown = [device for device in devices if device.capability not in planning.support().capabilities]
    text = "not known to this version"
    return devices, [Fault("unknown_gpu", f"{device.name}: {text}", "install a newer flashpatch") for device in unknown]


def _no_gpu(driver: int) -> Fault:
    """Why a torch that was built with CUDA finds no GPU."""
    major = int(torch.version.cuda.split(".")[0])
    if not driver:
        text = "torch was built with CUDA, but there is no NVIDIA driver (libcuda cannot be loaded)"
        return Fault("no_driver", text, "nvidia-smi  (if that fails too, install the driver)")
    if driver // 1000 < major:
        text = f"torch was built with CUDA {torch.version.cuda}, the driver supports CUDA {_dotted(driver)} at most"
        remedy = f"update the driver, or install torch for CUDA {driver // 1000} (see pytorch.org)"
        return Fault("driver", text, remedy)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        text = f"torch finds no usable GPU, and CUDA_VISIBLE_DEVICES is {hidden!r}"
        return Fault("no_gpu", text, "unset CUDA_VISIBLE_DEVICES")
    return Fault("no_gpu", "torch was built with CUDA but finds no usable GPU", "nvidia-smi")


def _titled(device: Device) -> str:
    number = ".".join(map(str, device.capability))
    return f"cuda:{device.index} {device.name}, compute capability {number}, {device.generation}"


def _driver() -> str | None:
    number = compiler.driver_version()
    return _dotted(number) if number else None


def _dotted(number: int) -> str:
    """The newest CUDA a driver supports, as people write it: 13000 -> "13.0"."""
    return f"{number // 1000}.{number % 1000 // 10}"


# ---- CuPy and NVRTC ----


def _cupy(broken: Reason | None) -> list[str]:
    """The CuPy packages, each said to be there or broken, never both."""
    found = [f"{name} {version}" for name, version in compiler.cupy_packages().items()]
    unusable = broken is not None and broken.code in ("no_cupy", "two_cupys", "cupy_mismatch")
    return [f"{package} (unusable)" for package in found] if unusable else found


def _packages(broken: Reason | None, has_gpu: bool) -> list[Fault]:
    """CuPy and NVRTC that are missing, broken, doubled, or made for another CUDA than torch."""
    effect = "kernels cannot run on this GPU" if has_gpu else "kernels cannot be compiled here"
    if broken:
        return [fault(broken, effect)]
    wrong = compiler.cupy_fault()
    return [fault(wrong)] if wrong else []


def _toolkit(devices: list[Device], broken: Reason | None) -> list[Fault]:
    """NVRTC that is incomplete, newer than the driver, or without a GPU's architecture; sources that are missing."""
    found = []
    try:
        for kernel in planning.support().kernels:
            compiler.check_sources(kernel)
    except FileNotFoundError as error:
        found.append(Fault("no_sources", str(error), compiler.REINSTALL))
    if broken:
        return found
    if reason := compiler.incomplete():
        return [*found, fault(reason)]
    mismatches = (compiler.mismatch(device) for device in devices)
    return found + [_with_remedy(reason) for reason in mismatches if reason]


def _with_remedy(reason: Reason) -> Fault:
    """`driver` has two remedies, of which only one is typed."""
    if reason.code not in ("driver", "no_driver"):
        return fault(reason)
    text, _, remedy = reason.text.partition("; ")
    return Fault(reason.code, text, remedy.replace("or type:", "or:"))


# ---- the emulator, and switches ----


def _emulator() -> list[Fault]:
    reason = emulator.available()
    return [fault(reason, "kernels cannot be emulated on the CPU")] if reason else []


def _cxx() -> str | None:
    command = emulator_builds.find_compiler(os.environ.get("FLASHPATCH_CXX"))
    return " ".join(command) if command and not emulator.available() else None


def _switches(devices: list[Device]) -> list[Fault]:
    """Environment variables that cannot mean anything here."""
    found = []
    wanted = os.environ.get(planning.SWITCH)
    for check in (
        lambda: wanted and planning.of_switch(wanted),
        *(lambda device=device: wanted and planning.standing_for(device, wanted) for device in devices),
        emulator.warp_order,
        emulator.time_limit,
    ):
        try:
            check()
        except ValueError as error:
            name = str(error).split("=")[0]
            found.append(Fault("variable", str(error), f"unset {name}"))
    return found
