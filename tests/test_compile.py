"""Every Config the matrix can choose, built by both majors of NVRTC: it compiles, fits the GPU, spills no more than
compat_matrix.yaml admits, and became the instructions it was written for.

A default run builds a few Configs that between them have every kernel file on every architecture, its dtypes, head dims
and features, with the other major every kernel file, feature and architecture; `-m slow` builds all of them, in every tile
(hours of CPU time). FLASHPATCH_COMPILE_REPORT=FILE appends what each build took and used, one JSON object a line.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nvrtc
import pytest

from flashpatch import cases, compiler, kernel_sets, planning, support_matrix
from flashpatch.problem import DIRECTIONS, Config, Plan, Problem

MATRIX = planning.support()
MAJORS = (12, 13)
# spill_bytes in the matrix are what this version reports, as is the evidence for speed
RECORDED = (13, 0)
# Registers of a multiprocessor, and so of a block, on every architecture; each warp gets them in steps of 8 a thread.
REGISTERS = 65536
# What a user waits at the first call. A loaded machine may take four times as long before a test fails.
SECONDS, SLACK = 3.0, 4.0
WORKERS = 2
# kernel, or kernel and dtype -> instructions without which it is not the kernel it was written to be
INSTRUCTIONS = {
    "forward_sm80": {"HMMA"},
    "backward_sm80": {"HMMA"},
    "forward_sm75": {"HMMA"},
    "backward_sm75": {"HMMA"},
    "forward_sm90": {"HGMMA", "UTMALDG"},
    ("forward_sm90", "float8_e4m3fn"): {"QGMMA", "UTMALDG", "UBLKCP"},
    "backward_sm90": {"HGMMA", "UTMALDG"},
    "backward_wide_sm90": {"HGMMA", "UTMALDG"},
}
LOCAL_MEMORY = {"LDL", "STL"}


# ---- what is built ----


@dataclasses.dataclass(frozen=True)
class Target:
    """One build: a Config for an architecture, and the shared memory a block may have there."""

    config: Config
    arch: str
    shared_memory: int

    @property
    def name(self) -> str:
        return f"{compiler.name(self.config)} for {self.arch}"


@functools.cache
def grid() -> tuple[Target, ...]:
    """Every build the matrix can ask for: each feature alone and the combinations `verify` tries, on every GPU."""
    targets: dict[Target, None] = {}
    for number in MATRIX.capabilities:
        device = planning.device_for(number)
        problems = {
            Problem(
                direction, dtype, head_dim, min(head_dim, max(MATRIX.head_dims_v)), frozenset({feature} - {"plain"})
            )
            for direction, dtype, head_dim, feature in itertools.product(
                DIRECTIONS, ("float16", "bfloat16", "float32", "float8_e4m3fn"), MATRIX.head_dims, MATRIX.features
            )
            if feature != "unequal_head_dims"  # the cases have it, with head dims that are
        }
        for case in cases.cases(device):
            problems |= {case.problem, case.problem.backward()}
        problems |= {dataclasses.replace(problem, short=True) for problem in problems}
        problems |= {dataclasses.replace(problem, tf32=True) for problem in problems if problem.dtype == "float32"}
        for problem in sorted(problems, key=_order):
            plan = planning.resolve(problem, device)
            if isinstance(plan, Plan):
                for config in kernel_sets.configs(plan.config):
                    targets[Target(config, compiler.arch(config, device), device.shared_memory)] = None
    return tuple(targets)


def _order(problem: Problem) -> tuple:
    """The same in every process, so that the default run is too: a set's own order is not."""
    return (
        problem.direction,
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        sorted(problem.features),
        problem.short,
        problem.tf32,
    )


def tiles_of(config: Config) -> tuple[tuple[str, int, int], ...]:
    """The entries of the matrix's tile table that a Config may have come from, as (kernel, head dim, position)."""
    bucket = max(config.head_dim, config.head_dim_v)
    return tuple(
        (config.kernel, bucket, position)
        for position, tile in enumerate(MATRIX.tiles.get(config.kernel, {}).get(bucket, ()))
        if config.dtype in tile.get("dtypes", ("float16", "bfloat16"))
        and all(tile[size] == getattr(config, size) for size in ("block_m", "block_n", "num_warps", "num_stages"))
    )


def spill_bytes(config: Config) -> int:
    """What the matrix admits for a Config's tile; the small kernels beside the main ones have no tile and no spills."""
    return max(
        (MATRIX.tiles[kernel][bucket][position].get("spill_bytes", 0) for kernel, bucket, position in tiles_of(config)),
        default=0,
    )


def flags(config: Config) -> list[str]:
    return [field.name for field in dataclasses.fields(config) if getattr(config, field.name) is True]


def facets(target: Target, major: int) -> set[tuple]:
    """What a build stands for in the default run: with the major that bounds on spills are for (`admitted_spills`), each
    kernel on each architecture, in its dtypes, and at each head dim in 32, 16 and 8 bits; with the other that it takes each
    kernel, feature and architecture."""
    config = target.config
    found = {(config.kernel,), (target.arch,), *((config.kernel, flag) for flag in flags(config))}
    if major == RECORDED[0]:
        found |= {(config.kernel, target.arch), (config.kernel, config.dtype)}
        element = planning.ELEMENT_BYTES[config.dtype]
        found |= {(kernel, head_dim, element) for kernel, head_dim, _ in tiles_of(config)}
    return found


@functools.cache
def representative(major: int) -> tuple[Target, ...]:
    """The fewest builds, or nearly, that have every facet of the grid; simple ones first, as they build faster."""
    missing_of = {target: facets(target, major) for target in grid()}
    chosen = []
    while missing_of:
        best = max(missing_of, key=lambda target: (len(missing_of[target]), -len(flags(target.config))))
        chosen.append(best)
        covered = missing_of[best]
        missing_of = {target: left for target, missing in missing_of.items() if (left := missing - covered)}
    return tuple(chosen)


def architectures() -> list[str]:
    """Every -arch the matrix has a kernel for, read off its cells: the grid takes seconds that collection can spare."""
    found = {}
    for number, capability in MATRIX.capabilities.items():
        device = planning.device_for(number)
        for cell in MATRIX.cells.values():
            if cell.generation == capability.generation:
                config = Config(cell.kernel, cell.dtype, cell.head_dim, cell.head_dim, 0, 0, 0)
                found[compiler.arch(config, device)] = number
    return list(found)


# ---- building ----


@dataclasses.dataclass(frozen=True)
class Build:
    """What came of a target with one version of NVRTC. `instructions` is None where there is no nvdisasm, and of kernels that
    need none in particular."""

    target: Target
    version: tuple[int, int]
    log: str
    seconds: float  # of CPU time: what else runs on the machine counts for less
    instructions: frozenset[str] | None = None
    error: str = ""

    @functools.cached_property
    def usage(self) -> dict[str, int]:
        return compiler.usage(self.log)


def build(major: int, target: Target) -> Build:
    """Compile a target; by the product's own way with the NVRTC that CuPy has taken."""
    config, arch = target.config, target.arch
    started = time.thread_time()
    try:
        if compiler.available() is None and compiler.nvrtc_version()[0] == major:
            version = compiler.nvrtc_version()
            cubin, log = compiler.compile_cubin(config, arch)
        else:
            library = nvrtc.load(major)
            version = library.version
            checked = (
                f"{compiler.source(config)}\n"
                f'static_assert(kSharedMemory == {planning.shared_memory(config)}, "planning.shared_memory");\n'
            )
            options = (f"-arch={arch}", *compiler.OPTIONS)
            cubin, log = library.compile(checked, f"{config.kernel}.cu", compiler.headers(), options)
    except (compiler.CompileError, nvrtc.BuildError) as error:
        return Build(target, version, "", time.thread_time() - started, error=str(error))
    seconds = time.thread_time() - started
    return Build(target, version, log, seconds, instructions(cubin) if config.kernel in INSTRUCTIONS else None)


def nvdisasm() -> Path | None:
    return nvrtc.wheel_file("cu13/bin/nvdisasm", "cu13/bin/nvdisasm.exe")


def instructions(cubin: bytes) -> frozenset[str] | None:
    """The names of the machine instructions in a cubin, without their modifiers."""
    if nvdisasm() is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        # data flow analysis would only annotate the listing
        done = subprocess.run([nvdisasm(), "-ndf", "-c", path], capture_output=True, text=True, check=True)
    return frozenset(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", done.stdout))


SETS = {"representative": representative, "all": lambda major: grid()}


def builds(major: int, arch: str, which: str) -> tuple[Build, ...]:
    """The builds of a set for one architecture."""
    targets = [target for target in SETS[which](major) if target.arch == arch]
    with ThreadPoolExecutor(WORKERS) as pool:
        made = tuple(pool.map(functools.partial(build, major), targets))
    if report := os.environ.get("FLASHPATCH_COMPILE_REPORT"):
        with open(report, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record(done)) + "\n" for done in made)
    return made


def record(done: Build) -> dict:
    """One line of FLASHPATCH_COMPILE_REPORT."""
    return {
        "nvrtc": ".".join(map(str, done.version)),
        "arch": done.target.arch,
        "config": compiler.name(done.target.config),
        "seconds": round(done.seconds, 3),
        **done.usage,
        "shared_memory": planning.shared_memory(done.target.config),
        "error": done.error,
    }


# ---- what is asked of a build ----


def admitted_spills(config: Config, version: tuple[int, int]) -> float:
    """Bytes of spill stores and loads. Exact for the version they are recorded with; another 13.x allocates registers
    a little differently, and 12.x is only reported."""
    if version == RECORDED:
        return spill_bytes(config)
    return 2 * spill_bytes(config) + 128 if version[0] == RECORDED[0] else float("inf")


def faults(done: Build) -> list[str]:
    """What is wrong with a build, in words."""
    config = done.target.config
    if done.error:
        return [f"does not compile: {done.error}"]
    found = []
    threads = 32 * config.num_warps
    registers = -(-done.usage["registers"] // 8) * 8 * threads
    if not done.usage["registers"]:
        found.append("NVRTC's log names no registers")
    if registers > REGISTERS:
        found.append(f"{done.usage['registers']} registers x {threads} threads are more than {REGISTERS}")
    static = max(map(int, re.findall(r"(\d+) bytes smem", done.log)), default=0)
    shared = planning.shared_memory(config) + static
    if shared > done.target.shared_memory:
        found.append(f"{shared} bytes of shared memory are more than {done.target.shared_memory}")
    spilled, admitted = done.usage["spill_bytes"], admitted_spills(config, done.version)
    if spilled > admitted:
        found.append(f"{spilled} bytes spill; compat_matrix.yaml admits {admitted} (spill_bytes of its tile)")
    if serialised := re.findall(r".*\bC75\d\d\b.*", done.log):
        found.append(f"wgmma is serialised: {serialised[0].strip()}")
    if done.seconds > SLACK * SECONDS:
        found.append(f"compiled in {done.seconds:.1f} s of CPU time; {SECONDS} are meant, {SLACK * SECONDS} the most")
    return found


def instruction_faults(done: Build) -> list[str]:
    """What the disassembly has that it should not, and lacks; nothing where there is none."""
    if done.instructions is None:
        return []
    config = done.target.config
    found = []
    of_kernel = INSTRUCTIONS.get(config.kernel, set())
    if lacking := INSTRUCTIONS.get((config.kernel, config.dtype), of_kernel) - done.instructions:
        found.append(f"no {' and no '.join(sorted(lacking))} instruction")
    # the matrix says none spills, so nothing may live in local memory: no array indexed at run time either
    local = LOCAL_MEMORY & done.instructions
    if local and done.version == RECORDED and spill_bytes(config) == 0:
        found.append(f"local memory is used: {' '.join(sorted(local))}")
    return found


def summary(made: tuple[Build, ...]) -> str:
    """The figures of some builds, shown by pytest -rA."""
    slowest = max(made, key=lambda done: done.seconds)
    spilling = [done for done in made if done.usage["spill_bytes"]]
    version = ".".join(map(str, made[0].version))
    return "\n".join([
        f"NVRTC {version}, {made[0].target.arch}: {len(made)} builds, {sum(done.seconds for done in made):.1f} s of CPU "
        f"time; slowest {slowest.seconds:.2f} s, {compiler.name(slowest.target.config)}",
        *(f"  {done.usage['spill_bytes']} bytes spill: {compiler.name(done.target.config)}" for done in spilling),
    ])  # fmt: skip


def require(major: int) -> None:
    if compiler.available() is None and compiler.nvrtc_version()[0] == major:
        return
    if nvrtc.load(major) is None:
        pytest.skip(f"no NVRTC {major} here; pip install {nvrtc.WHEELS[major]}")


in_both_sets = pytest.mark.parametrize("which", ["representative", pytest.param("all", marks=pytest.mark.slow)])
by_both_majors = pytest.mark.parametrize("major", MAJORS)
for_every_architecture = pytest.mark.parametrize("arch", architectures())


@in_both_sets
@by_both_majors
@for_every_architecture
def test_builds(arch, major, which):
    """Every Config compiles, within registers and shared memory, without unrecorded spills, in reasonable time, and uses
    the tensor cores, the copy engine and no local memory."""
    require(major)
    made = builds(major, arch, which)
    print(summary(made))
    found = {done.target.name: faults(done) + instruction_faults(done) for done in made}
    assert {name: faults for name, faults in found.items() if faults} == {}


# ---- that the sets and the checks are what they claim ----


def test_the_default_run_stands_for_the_grid():
    kernels = {path.stem for path in support_matrix.find("cuda_src").glob("*.cu")}
    kernels = {kernel for kernel in kernels if not kernel.startswith("pairwise")}  # tests/test_pairwise.py builds those
    chosen = representative(RECORDED[0])
    assert {target.config.kernel for target in chosen} == kernels
    assert {target.arch for target in chosen} == {target.arch for target in grid()} == set(architectures())
    head_dims = {(kernel, head_dim) for kernel, table in MATRIX.tiles.items() for head_dim in table}
    assert {tile[:2] for target in chosen for tile in tiles_of(target.config)} == head_dims
    for kernel in kernels:
        dtypes = [
            {target.config.dtype for target in targets if target.config.kernel == kernel}
            for targets in (chosen, grid())
        ]
        assert dtypes[0] == dtypes[1]


def test_two_nvrtcs_do_not_confuse_the_compiler():
    """CuPy takes the newer one, and still builds with it when the older one is loaded beside it."""
    if nvrtc.load(12) is None or nvrtc.load(13) is None:
        pytest.skip(f"needs both; pip install {' '.join(nvrtc.WHEELS.values())}")
    assert nvrtc.load(12).version[0] == 12 and nvrtc.load(13).version[0] == 13
    assert compiler.nvrtc_version() == nvrtc.load(13).version


def base(kernel: str) -> Config:
    """A bf16 Config of head dim 128 without features, as the grid has it."""
    return next(
        target.config
        for target in grid()
        if target.config.kernel == kernel
        and (target.config.dtype, target.config.head_dim, target.config.head_dim_v) == ("bfloat16", 128, 128)
        and not flags(target.config)
    )


@pytest.mark.parametrize(
    ("kernel", "arch", "limit", "change", "fault"),
    [
        (
            "forward_sm80",
            "sm_86",
            101376,
            {"block_n": 128, "num_stages": 2},
            "163904 bytes of shared memory are more than 101376",
        ),
        ("forward_sm80", "sm_80", 166912, {"block_n": 128}, "bytes spill"),
        ("forward_sm80", "sm_80", 166912, {"block_n": 24}, "does not compile: .*tile shape"),
        ("forward_sm90", "sm_90", 232448, {}, "does not compile: .*sm_90"),
    ],
    ids=["shared memory", "spill", "tile shape", "without the architecture's own features"],
)
def test_a_broken_tile_is_noticed(kernel, arch, limit, change, fault):
    require(13)
    done = build(13, Target(dataclasses.replace(base(kernel), **change), arch, limit))
    assert any(re.search(fault, found, re.DOTALL) for found in faults(done)), faults(done)


def test_a_wrong_planned_size_is_noticed(monkeypatch):
    """Where planning and the kernel disagree about shared memory, the build with the assertion fails."""
    if nvrtc.load(12) is None:
        pytest.skip(f"no NVRTC 12 here; pip install {nvrtc.WHEELS[12]}")
    right = planning.shared_memory
    monkeypatch.setattr(planning, "shared_memory", lambda config: right(config) + 16)
    done = build(12, Target(base("backward_dq"), "sm_80", 166912))
    assert any("planning.shared_memory" in fault for fault in faults(done))


def good(kernel: str, **changes) -> Build:
    """A build without fault, as a compiler could report it, changed."""
    log = "ptxas info : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 128 registers"
    needed = INSTRUCTIONS.get(kernel, set()) | {"EXIT"}
    target = Target(base(kernel), "sm_90a", 232448)
    return dataclasses.replace(Build(target, RECORDED, log, 0.5, frozenset(needed)), **changes)


@pytest.mark.parametrize("kernel", ["forward_sm90", "backward_sm90", "backward_delta"])
def test_a_good_build_has_no_faults(kernel):
    assert faults(good(kernel)) + instruction_faults(good(kernel)) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"log": "Used 200 registers"}, "200 registers x 512 threads"),
        ({"log": ""}, "names no registers"),
        ({"log": "Used 64 registers\n4 bytes spill stores, 8 bytes spill loads"}, "12 bytes spill"),
        ({"log": "Used 64 registers, 131072 bytes smem"}, "of shared memory"),
        ({"log": "Used 64 registers\nptxas info : (C7510) Potential Performance Loss: wgmma"}, "serialised: .*C7510"),
        ({"seconds": 13.0}, "13.0 s of CPU time"),
        ({"instructions": frozenset({"HGMMA"})}, "no UTMALDG"),
        ({"instructions": frozenset({"HMMA"})}, "no HGMMA and no UTMALDG"),
        ({"instructions": frozenset({"HGMMA", "UTMALDG", "LDL"})}, "local memory is used: LDL"),
    ],
)
def test_a_fault_is_noticed(changes, fault):
    done = good("forward_sm90", **changes)
    assert any(re.search(fault, found) for found in faults(done) + instruction_faults(done))
