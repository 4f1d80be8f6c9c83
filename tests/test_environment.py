"""What may be wrong with a machine: found by `audit` before it hurts, and a decline by the same name at run time.

Modules, metadata, drivers and GPUs are faked; NVRTC itself is the one that is here, or a fake that fails as it does.
"""

from __future__ import annotations

import builtins
import importlib.metadata
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import flashpatch
from flashpatch import compiler, emulator, environment, execution, pairs, planning
from flashpatch.problem import DeclinedError, Problem

H200 = planning.device_for((9, 0), "NVIDIA H200")
CONFIG = planning.resolve(Problem("forward", "bfloat16", 64, 64), H200).config


class Nvrtc:
    """NVRTC as CuPy shows it."""

    def __init__(self, version=(13, 0), archs=(75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121), fault=""):
        self.version, self.archs, self.fault = version, list(archs), fault

    def getVersion(self):
        return self.version

    def getSupportedArchs(self):
        return self.archs

    def createProgram(self, *arguments):
        return 1

    def compileProgram(self, program, options):
        asked = [int(option.removeprefix("-arch=sm_").strip("a")) for option in options if "-arch" in option]
        if self.fault or set(asked) - set(self.archs):
            raise RuntimeError(self.fault or "nvrtc: error: invalid value for --gpu-architecture (-arch)")

    def getProgramLog(self, program):
        return ""

    def getCUBIN(self, program):
        return b"cubin"

    def destroyProgram(self, program):
        pass


SOUND = Nvrtc()
CUDA12 = "pip install 'cupy-cuda12x>=14.0' 'nvidia-cuda-nvrtc-cu12>=12,<13' 'nvidia-cuda-runtime-cu12>=12,<13'"
CUDA13 = "pip install 'cupy-cuda13x>=14.0' 'nvidia-cuda-nvrtc>=13,<14' 'nvidia-cuda-runtime>=13,<14'"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine to spoil: driver and torch of CUDA 13, one CuPy, an NVRTC, an H200."""

    def be(driver=13000, torch_cuda="13.0", cupys=("cupy-cuda13x",), nvrtc=SOUND, gpus=(H200,)):
        def version(package):
            if package.startswith("cupy") and package not in cupys:
                raise importlib.metadata.PackageNotFoundError(package)
            return "14.2.0" if package.startswith("cupy") else "1.0"

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(execution, "own_device", lambda index: gpus[index])
        monkeypatch.setattr(compiler, "driver_version", lambda: driver)
        fail = isinstance(nvrtc, Exception)
        libraries = types.ModuleType("cupy_backends.cuda.libs")
        if not fail:
            libraries.nvrtc = nvrtc
        monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", libraries)
        real = builtins.__import__

        def refuse(name, *arguments, **keywords):
            if name == "cupy_backends.cuda.libs" and fail:
                raise nvrtc
            return real(name, *arguments, **keywords)

        monkeypatch.setattr(builtins, "__import__", refuse)
        monkeypatch.setenv("FLASHPATCH_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(compiler, "_kernels", {})
        for cached in (compiler._nvrtc, compiler.incomplete):
            cached.cache_clear()
        return environment.environment()

    yield be
    for cached in (compiler._nvrtc, compiler.incomplete):
        cached.cache_clear()


def faults(report):
    return {fault.code: fault for fault in report.problems if fault.code != "no_compiler"}


def declined(device=H200):
    """The code and text a call would be declined with, when its kernel is loaded."""
    if reason := compiler.available():
        return reason
    with pytest.raises(compiler.CompileError) as error:
        compiler.load(CONFIG, device)
    return error.value.reason


def test_a_sound_machine_has_no_faults(machine):
    report = machine()
    assert faults(report) == {} and report.cupy == ["cupy-cuda13x 14.2.0"] and report.nvrtc == "13.0"
    assert report.driver == "13.0" and report.gpus == ["cuda:0 NVIDIA H200, compute capability 9.0, hopper"]


def test_nvrtc_newer_than_the_driver(machine):
    found = faults(machine(driver=12080))["driver"]
    assert "NVRTC 13.0 is newer than the driver (CUDA 12.8)" in found.text
    assert "update the driver" in found.remedy and found.remedy.endswith(f"pip uninstall -y cupy-cuda13x && {CUDA12}")
    assert declined().code == "driver" and declined().text.endswith(CUDA12)


def test_a_driver_too_old_for_any_extra(machine):
    assert faults(machine(driver=11040))["driver"].remedy == "update the driver"


def test_a_newer_driver_is_fine(machine):
    assert faults(machine(driver=13020, nvrtc=Nvrtc((12, 9)), torch_cuda="12.9", cupys=["cupy-cuda12x"])) == {}


def test_nvrtc_without_the_architecture(machine):
    device = planning.device_for((12, 0), "RTX 5090")
    found = faults(
        machine(gpus=[device], nvrtc=Nvrtc((12, 6), archs=(75, 80, 90)), torch_cuda="12.6", cupys=["cupy-cuda12x"])
    )
    assert found["nvrtc_arch"].text == "NVRTC 12.6 does not know sm_120"
    assert found["nvrtc_arch"].remedy == CUDA12.replace("install", "install --upgrade")
    assert declined(device).code == "nvrtc_arch"


def test_nvrtc_that_no_longer_has_the_architecture(machine):
    device = planning.device_for((7, 5), "T4")
    found = faults(machine(gpus=[device], nvrtc=Nvrtc((13, 9), archs=(80, 90))))["nvrtc_arch"]
    assert "no longer compiles for sm_75" in found.text and found.remedy == f"pip uninstall -y cupy-cuda13x && {CUDA12}"
    assert declined(device).code == "nvrtc_arch"


def test_an_unknown_capability(machine):
    """It is planned as its family; where NVRTC does not know it either, that is the decline."""
    device = planning.device_for((13, 0), "RTX 9090")
    found = faults(machine(gpus=[device]))
    assert "unknown capability 13.0, planned as blackwell_consumer" in found["unknown_gpu"].text
    assert found["unknown_gpu"].remedy == "install a newer flashpatch" and "sm_130" in found["nvrtc_arch"].text
    assert declined(device).code == "nvrtc_arch"


@pytest.mark.parametrize("package, cuda", [("cupy-cuda12x", "13.0"), ("cupy-cuda13x", "12.8")])
@pytest.mark.parametrize("nvrtc", [Nvrtc(), None], ids=["works", "no NVRTC"])
def test_cupy_for_another_cuda_than_torch(machine, package, cuda, nvrtc):
    if nvrtc is None:
        nvrtc = Nvrtc()
        nvrtc.getVersion = lambda: 1 / 0
    else:
        nvrtc.version = (int(package[-3:-1]), 0)
    report = machine(cupys=[package], torch_cuda=cuda, nvrtc=nvrtc)
    found = faults(report)["cupy_mismatch"]
    assert f"{package} is for CUDA {package[-3:-1]}, torch was built with CUDA {cuda}" in found.text
    assert found.remedy == f"pip uninstall -y {package} && {CUDA12 if cuda[:2] == '12' else CUDA13}"
    if report.nvrtc is None:
        assert declined().code == "cupy_mismatch" and report.cupy == [f"{package} 14.2.0 (unusable)"]
    else:  # it works as it is, and nothing is declined for it
        assert compiler.available() is None


@pytest.mark.parametrize("works", [True, False])
def test_two_cupys(machine, works):
    nvrtc = Nvrtc() if works else ImportError("cannot import name 'nvrtc'")
    found = faults(machine(cupys=["cupy-cuda12x", "cupy-cuda13x"], nvrtc=nvrtc))["two_cupys"]
    assert found.remedy == f"pip uninstall -y cupy-cuda12x cupy-cuda13x && {CUDA13}"
    if works:
        assert compiler.available() is None
    else:
        assert declined().code == "two_cupys" and "cannot import name" in declined().text


def test_cupy_is_present_or_absent_never_both(machine):
    broken = machine(nvrtc=ImportError("libcudart.so.13: cannot open shared object file"))
    assert broken.cupy == ["cupy-cuda13x 14.2.0 (unusable)"] and broken.nvrtc is None
    text = faults(broken)["no_cupy"].text
    assert "cupy-cuda13x 14.2.0 is installed but cannot be imported (libcudart.so.13" in text
    assert (
        "not installed" not in text and faults(broken)["no_cupy"].remedy == "pip install --force-reinstall cupy-cuda13x"
    )
    absent = machine(cupys=(), nvrtc=ImportError("No module named 'cupy_backends'"))
    assert absent.cupy == [] and "CuPy is not installed" in faults(absent)["no_cupy"].text
    assert declined().code == "no_cupy"


def test_no_libnvrtc(machine):
    nvrtc = Nvrtc()
    nvrtc.getVersion = lambda: (_ for _ in ()).throw(RuntimeError("libnvrtc.so.13: cannot open shared object file"))
    found = faults(machine(nvrtc=nvrtc))["no_nvrtc"]
    assert "libnvrtc" in found.text and found.remedy == CUDA13
    assert declined().code == "no_nvrtc"


def test_nvrtc_without_its_builtins(machine):
    nvrtc = Nvrtc(fault="nvrtc: error: failed to open libnvrtc-builtins.so.13.0.")
    found = faults(machine(nvrtc=nvrtc))["nvrtc_incomplete"]
    assert "libnvrtc-builtins.so.13.0" in found.text and "--force-reinstall --no-deps 'cupy" in found.remedy
    assert declined().code == "nvrtc_incomplete"


def test_no_sources(machine, monkeypatch):
    sound = dict(compiler.headers())
    monkeypatch.setattr(compiler, "headers", lambda: {k: v for k, v in sound.items() if k != "mask.cuh"})
    compiler.digest.cache_clear()
    found = faults(machine())["no_sources"]
    assert found.text == "cuda_src/mask.cuh is missing from this installation of flashpatch"
    assert "pip install --force-reinstall --no-deps CLONE_OR_WHEEL" in found.remedy
    assert declined().code == "no_sources"
    compiler.digest.cache_clear()


@pytest.mark.skipif(compiler.available() is not None, reason=str(compiler.available()))
def test_no_cuda_headers_are_needed(tmp_path):
    """The kernels include nothing of CUDA's, so a machine without a toolkit compiles them."""
    program = (
        "from flashpatch import compiler, planning\n"
        "from flashpatch.problem import Config\n"
        "cubin, _ = compiler.compile_cubin(Config('backward_delta', 'float16', 64, 64, 64, 0, 4), 'sm_80')\n"
        "print(cubin[:4])\n"
    )
    variables = {"CUDA_PATH": str(tmp_path), "CUDA_HOME": str(tmp_path), "CPATH": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=False)
    assert "ELF" in done.stdout, done.stderr


# ---- drivers and torch ----


def test_no_driver(machine):
    found = faults(machine(driver=0, gpus=()))["no_driver"]
    assert "there is no NVIDIA driver" in found.text and "nvidia-smi" in found.remedy
    assert declined().code == "no_driver"


def test_a_driver_too_old_for_torch(machine):
    found = faults(machine(driver=12040, gpus=()))["driver"]
    assert found.text == "torch was built with CUDA 13.0, the driver supports CUDA 12.4 at most"
    assert "update the driver" in found.remedy


def test_gpus_that_are_hidden(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert faults(machine(gpus=()))["no_gpu"].remedy == "unset CUDA_VISIBLE_DEVICES"


def test_what_to_install_is_for_torchs_cuda_or_the_drivers(monkeypatch):
    monkeypatch.setattr(compiler, "cupy_packages", dict)
    for cuda, driver, line in (
        ("12.8", 13000, CUDA12),
        (None, 12080, CUDA12),
        (None, 0, CUDA13),
        ("11.8", 0, CUDA13),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(compiler, "driver_version", lambda driver=driver: driver)
        assert compiler.install_line() == line


@pytest.mark.parametrize("major", ["12", "13"])
def test_the_packages_to_install_are_those_of_the_extra(major):
    """By their own names: an index knows nothing of a flashpatch that came from a clone."""
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(rf"^cuda{major} = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    assert re.findall(r'"([^";]+);', extra) == list(compiler.PACKAGES[major])


# ---- switches and the emulator's compiler ----


@pytest.mark.parametrize(
    "name, value, part",
    [
        ("FLASHPATCH_GENERATION", "tring", "known: volta, turing"),
        ("FLASHPATCH_GENERATION", "blackwell", "cannot run kernels of the newer 10.0"),
        ("FLASHPATCH_EMULATION_SEED", "x", "a whole number from 0"),
        ("FLASHPATCH_EMULATION_SEED", "-1", "a whole number from 0"),
        ("FLASHPATCH_EMULATION_SECONDS", "soon", "a number of seconds above 0"),
    ],
)
def test_a_variable_that_means_nothing(machine, monkeypatch, name, value, part):
    monkeypatch.setenv(name, value)
    found = faults(machine())["variable"]
    assert found.text.startswith(f"{name}={value}: ") and part in found.text and found.remedy == f"unset {name}"


@pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
@pytest.mark.parametrize("command", ["/nonexistent", "/bin/false", "/bin/true"])
def test_a_compiler_that_is_none_is_a_decline(monkeypatch, command):
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    monkeypatch.setenv("FLASHPATCH_CXX", command)
    monkeypatch.setattr(execution, "_forwards", execution._Prepared())
    q = torch.zeros(1, 8, 1, 32, dtype=torch.bfloat16)
    with pytest.raises(DeclinedError, match=f"no_compiler: FLASHPATCH_CXX={command}"):
        flashpatch.attention(q, q, q)
    assert flashpatch.attention(q, q, q, on_decline="fallback").shape == q.shape


@pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
def test_a_kernel_that_does_not_build_for_the_cpu_is_a_decline(monkeypatch):
    """The compiler works, the kernel does not: declined once, remembered, computed by the fallback."""
    attempts = []

    def load(config):
        attempts.append(config)
        raise emulator.EmulatorBuildError(
            compiler.Reason("compile_failed", "forward_sm80 does not compile for the CPU (g++)")
        )

    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    monkeypatch.setattr(execution, "_forwards", execution._Prepared())
    monkeypatch.setattr(execution, "_failures", {})
    monkeypatch.setattr(emulator, "load", load)
    q = torch.zeros(1, 8, 1, 32, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(DeclinedError, match="compile_failed: forward_sm80 does not compile"):
            flashpatch.attention(q, q, q)
    assert len(attempts) == 1
    monkeypatch.setattr(pairs, "_failures", {})
    x = torch.zeros(1, 8, 3)
    for _ in range(2):
        with pytest.raises(DeclinedError, match="compile_failed: forward_sm80 does not compile"):
            flashpatch.pairwise(x, x, reduce="min")
    assert len(attempts) == 2
