"""What will run for `flashpatch.pairwise`: from a PairProblem to a PairPlan or a Decline, by compat_matrix.yaml alone."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import ClassVar

import yaml

from .problem import DTYPES as ALL_DTYPES
from .problem import SCALED, Decline, Device, Reason
from .support_matrix import STATUSES, MatrixError, find

# In the order of the constants in cuda_src/pairwise.cuh.
COSTS = ("sqeuclidean", "euclidean", "l1", "negative_dot", "giou")
DTYPES = tuple(dtype for dtype in ALL_DTYPES if dtype not in SCALED)
REDUCTIONS = {"min": "pairwise_min", "topk": "pairwise_topk", "logsumexp": "pairwise_logsumexp"}
GRADIENT = "pairwise_gradient"


@dataclass(frozen=True)
class PairProblem:
    """One reduction of a cost matrix as the planner sees it. `kernel` is one of REDUCTIONS' values, or GRADIENT."""

    kernel: str
    cost: str
    dtype: str
    dim: int
    k: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class PairConfig:
    """All that is fixed when a pairwise kernel is compiled; each field but the first two becomes a constant, as
    `problem.Config`'s do (`dim` -> `kDim`)."""

    kernel: str
    dtype: str
    cost: int  # position in COSTS
    element_bytes: int
    dim: int  # features taken at a time
    resident: bool  # whether these are all of them, so that a CTA keeps its rows
    block_m: int
    block_n: int
    num_warps: int
    ctas: int  # per multiprocessor, which bounds the registers
    k: int  # the most a row's list holds; 0 where there is none
    gradient_dim: int  # features of the gradient a CTA computes; 0 where there is none

    deterministic: ClassVar[bool] = False
    tf32: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """A readable file name."""
        sizes = f"{self.dtype}-d{self.dim}{'' if self.resident else 'n'}"
        parts = (self.kernel, COSTS[self.cost], sizes, f"k{self.k}" * bool(self.k))
        return "-".join((*filter(None, parts), f"g{self.gradient_dim}" * bool(self.gradient_dim))).rstrip("-")


@dataclass(frozen=True)
class PairPlan:
    """The kernel that will run a PairProblem on a device, and the matrix's word for it."""

    problem: PairProblem
    device: Device
    config: PairConfig
    status: str

    @property
    def label(self) -> str:
        """What its launches are counted under."""
        return self.config.kernel


@dataclass(frozen=True)
class PairSupport:
    """The section `pairwise` of compat_matrix.yaml, expanded and checked."""

    costs: dict[str, str]
    kernels: dict[str, str]
    tiles: dict[str, dict]
    cells: dict[tuple[str, str, str, str], str]  # (kernel, generation, dtype, cost) -> status
    unsupported: dict[tuple[str, str, str, str], str]  # the same -> reason
    evidence: str


@functools.lru_cache(maxsize=1)
def support() -> PairSupport:
    """The section of this installation, read once."""
    return load(yaml.safe_load(find("compat_matrix.yaml").read_text(encoding="utf-8")))


def load(data: dict) -> PairSupport:
    """Expand the section into cells. Raises MatrixError naming the first contradiction."""
    section, generations = data["pairwise"], list(data["generations"])
    if tuple(section["costs"]) != COSTS:
        raise MatrixError(f"pairwise.costs are {', '.join(section['costs'])}; the kernels know {', '.join(COSTS)}")
    cells: dict[tuple, str] = {}
    unsupported: dict[tuple, str] = {}
    for row in section["rows"]:
        for generation, status in row["status"].items():
            if status not in STATUSES[:2] or generation not in generations:
                raise MatrixError(f"pairwise: {generation}: {status} is no generation with one of {STATUSES[:2]}")
            if status == "verified" and not section.get("evidence"):
                raise MatrixError(f"pairwise on {generation} is called verified without naming its evidence")
            for kernel, dtype, cost in itertools.product(row["kernels"], row["dtypes"], row["costs"]):
                _add(cells, (kernel, generation, dtype, cost), status)
    for row in section["unsupported"]:
        axes = (
            row.get("kernels", list(section["kernels"])), row.get("generations", generations),
            row.get("dtypes", DTYPES), row.get("costs", list(section["costs"])),
        )  # fmt: skip
        for key in itertools.product(*axes):
            if key in cells:
                raise MatrixError(f"pairwise: {'/'.join(key)} is both supported and unsupported")
            unsupported.setdefault(key, row["reason"])
    for key in itertools.product(section["kernels"], generations, DTYPES, section["costs"]):
        if key not in cells and key not in unsupported:
            raise MatrixError(f"pairwise: {'/'.join(key)} has no cell: add it to a row, or to an unsupported one")
    return PairSupport(
        section["costs"], section["kernels"], section["tiles"], cells, unsupported, section.get("evidence", "")
    )


def _add(cells: dict, key: tuple, status: str) -> None:
    if key in cells:
        raise MatrixError(f"pairwise: {'/'.join(key)} is listed twice")
    cells[key] = status


def resolve(problem: PairProblem, device: Device) -> PairPlan | Decline:
    """The kernel that runs `problem` on `device`, or every reason why none does."""
    matrix = support()
    key = (problem.kernel, device.generation, problem.dtype, problem.cost)
    tile = matrix.tiles[problem.kernel]
    reasons = []
    if key in matrix.unsupported:
        reasons.append(Reason(_code(matrix, key), matrix.unsupported[key]))
    k = next((most for most in tile.get("most", (0,)) if most >= problem.k or not most), None)
    if k is None:
        most = tile["most"][-1]
        reasons.append(Reason("k", f"k = {problem.k} is above {most}, the longest list compiled"))
    if reasons:
        return Decline(problem, tuple(reasons))
    dim = next((size for size in tile["dims"] if size >= problem.dim), tile["dims"][-1])
    gradient = tile.get("gradient_dims", (0,))
    config = PairConfig(
        problem.kernel,
        problem.dtype,
        COSTS.index(problem.cost),
        4 if problem.dtype == "float32" else 2,
        dim,
        problem.dim <= dim,
        tile["block_m"],
        tile["block_n"],
        tile["num_warps"],
        tile["ctas"],
        k,
        next((size for size in gradient if size >= problem.dim), gradient[-1]),
    )
    needed = shared_memory(config)
    if needed > device.shared_memory:
        text = f"{config.kernel} needs {needed} bytes of shared memory, {device.name} has {device.shared_memory}"
        return Decline(problem, (Reason("shared_memory", text),))
    return PairPlan(problem, device, config, matrix.cells[key])


def _code(matrix: PairSupport, key: tuple) -> str:
    """The stable code of an unsupported cell: the first axis along which nothing is supported."""
    kernel, generation, dtype, _ = key
    if not any(cell[:2] == (kernel, generation) for cell in matrix.cells):
        return "generation"
    return "cost" if any(cell[:3] == (kernel, generation, dtype) for cell in matrix.cells) else "dtype"


def shared_memory(config: PairConfig) -> int:
    """Bytes of dynamic shared memory per block, as each kernel file's kSharedMemory has it."""
    pitch = config.block_m + 4
    tiles = 4 * config.dim * pitch * 4
    if config.kernel == "pairwise_topk":
        return tiles + config.block_m * (config.block_n + 1) * 4
    if config.kernel == GRADIENT:
        return tiles + config.block_n * pitch * 4 + config.block_n * (config.gradient_dim + 4) * 4
    return tiles
