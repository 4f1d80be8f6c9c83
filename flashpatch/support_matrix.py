"""compat_matrix.yaml, read, expanded into cells and checked: what kernels there are, and for what.

The matrix is data: dispatch, `flashpatch audit`, the README's table and the tests' grid are all read from it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import yaml

from .problem import DIRECTIONS, DTYPES

STATUSES = ("verified", "compiled", "unsupported")


def find(name: str) -> Path:
    """A data file of the package, in a wheel (beside this file) or in a checkout (one level up)."""
    package = Path(__file__).resolve().parent
    for root in (package, package.parent):
        if (root / name).exists():
            return root / name
    raise FileNotFoundError(f"{name} is missing from this installation of flashpatch; reinstall it")


class MatrixError(ValueError):
    """compat_matrix.yaml contradicts itself: a missing, duplicate or unknown cell."""


@dataclass(frozen=True)
class Capability:
    """One compute capability: its name for NVRTC's -arch and its opt-in shared memory per block in bytes."""

    number: tuple[int, int]
    generation: str
    shared_memory: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One claim of the matrix: this kernel, on this generation, for this dtype, head dim and feature."""

    kernel: str
    generation: str
    direction: str
    dtype: str
    head_dim: int
    feature: str
    status: str
    note: str = ""
    evidence: str = ""

    @property
    def name(self) -> str:
        return f"{self.kernel}/{self.generation}/{self.dtype}/d{self.head_dim}/{self.feature}"


@dataclass(frozen=True)
class Matrix:
    """compat_matrix.yaml, expanded and checked."""

    capabilities: dict[tuple[int, int], Capability]
    generations: dict[str, str]  # name -> what people call it
    exclusive: frozenset[str]  # generations whose kernels use instructions that later ones do not have
    features: dict[str, str]  # name -> meaning
    kernels: dict[str, str]  # name -> direction, in order of preference
    cells: dict[tuple[str, str, str, int, str], Cell]  # (kernel, generation, dtype, head_dim, feature)
    # (generation, direction, dtype, head_dim, feature) -> reason
    unsupported: dict[tuple[str, str, str, int, str], str]
    excludes: tuple[tuple[frozenset[str], frozenset[str], str], ...]  # (features together, directions, reason)
    head_dims: tuple[int, ...]  # of q and k
    head_dims_v: tuple[int, ...]
    short_seqlen: int  # sequences up to this long count as short
    tiles: dict[str, dict[int, tuple[dict, ...]]]

    def bucket(self, head_dim: int) -> int | None:
        """The smallest padded head dim that holds `head_dim`."""
        return next((bucket for bucket in self.head_dims if head_dim <= bucket), None)

    def bucket_v(self, head_dim_v: int) -> int | None:
        """The same for the head dim of v, of which fewer sizes are compiled."""
        return next((bucket for bucket in self.head_dims_v if head_dim_v <= bucket), None)

    def cell(self, kernel: str, generation: str, dtype: str, head_dim: int, feature: str) -> Cell | None:
        return self.cells.get((kernel, generation, dtype, head_dim, feature))

    @functools.cached_property
    def supported(self) -> dict[tuple[str, str], dict[str, dict[str, set[int]]]]:
        """(generation, direction) -> dtype -> feature -> head dims of the cells there, whichever their kernel."""
        found: dict = {}
        for cell in self.cells.values():
            dtypes = found.setdefault((cell.generation, cell.direction), {})
            dtypes.setdefault(cell.dtype, {}).setdefault(cell.feature, set()).add(cell.head_dim)
        return found


@functools.lru_cache(maxsize=1)
def support() -> Matrix:
    """The matrix of this installation, read once."""
    return load_matrix(yaml.safe_load(find("compat_matrix.yaml").read_text(encoding="utf-8")))


def load_matrix(data: dict) -> Matrix:
    """Expand the rows of compat_matrix.yaml into cells. Raises MatrixError naming the first contradiction."""
    capabilities = {}
    for generation, entry in data["generations"].items():
        for number, facts in entry["capabilities"].items():
            major, minor = map(int, str(number).split("."))
            if (major, minor) in capabilities:
                raise MatrixError(f"capability {number} is listed twice")
            capabilities[major, minor] = Capability(
                (major, minor), generation, facts["shared_memory"], tuple(facts["gpus"])
            )
    head_dims = tuple(data["head_dims"])
    cells: dict[tuple[str, str, str, int, str], Cell] = {}
    unsupported: dict[tuple[str, str, str, int, str], str] = {}
    for row in data["rows"]:
        _expand(row, data, cells, unsupported)
    supported = {(cell.generation, cell.direction, *key[2:]) for key, cell in cells.items()}
    for key in itertools.product(data["generations"], DIRECTIONS, DTYPES, head_dims, data["features"]):
        if key in supported and key in unsupported:
            raise MatrixError(f"{'/'.join(map(str, key))} is both supported and unsupported")
        if key not in supported and key not in unsupported:
            raise MatrixError(f"{'/'.join(map(str, key))} has no cell: add it to a row, or to an unsupported one")
    for cell in cells.values():
        if cell.head_dim not in data["tiles"].get(cell.kernel, ()):
            raise MatrixError(
                f"{cell.name} has no tile: add one to tiles, or leave head dim {cell.head_dim} out of the row"
            )
    return Matrix(
        capabilities=capabilities,
        generations={name: entry["title"] for name, entry in data["generations"].items()},
        exclusive=frozenset(name for name, entry in data["generations"].items() if entry.get("exclusive")),
        features=data["features"],
        kernels=data["kernels"],
        cells=cells,
        unsupported=unsupported,
        excludes=tuple(
            (frozenset(entry["features"]), frozenset(entry.get("directions", DIRECTIONS)), entry["reason"])
            for entry in data.get("excludes", ())
        ),
        head_dims=head_dims,
        short_seqlen=data["short_seqlen"],
        head_dims_v=tuple(data.get("head_dims_v", head_dims)),
        tiles={
            kernel: {head_dim: tuple(tiles) for head_dim, tiles in table.items()}
            for kernel, table in data["tiles"].items()
        },
    )


def _expand(row: dict, data: dict, cells: dict, unsupported: dict) -> None:
    """Add one row's cells. A row names a kernel and a status per generation, or the reason nothing is there."""
    unknown = (
        set(row)
        - {"kernel", "status", "evidence", "note", "unsupported", "generations"}
        - {"directions", "dtypes", "head_dims", "features"}
    )
    if unknown:
        raise MatrixError(f"a row has unknown keys: {', '.join(sorted(unknown))}")
    head_dims = row.get("head_dims", data["head_dims"])
    features = row.get("features", list(data["features"]))
    for wanted, known in ((head_dims, data["head_dims"]), (features, data["features"]), (row["dtypes"], DTYPES)):
        if stray := [item for item in wanted if item not in known]:
            raise MatrixError(f"a row names {stray[0]!r}, which is not one of {', '.join(map(str, known))}")
    if "unsupported" in row:
        for key in itertools.product(
            row["generations"], row.get("directions", DIRECTIONS), row["dtypes"], head_dims, features
        ):
            if key in unsupported:
                raise MatrixError(f"{'/'.join(map(str, key))} is listed twice")
            unsupported[key] = row["unsupported"]
        return
    kernel = row["kernel"]
    if kernel not in data["kernels"]:
        raise MatrixError(f"a row names the kernel {kernel!r}, which is not under kernels")
    for generation, status in row["status"].items():
        if status not in STATUSES[:2]:
            raise MatrixError(f"{kernel} on {generation}: status {status!r} is not one of {', '.join(STATUSES[:2])}")
        evidence = row.get("evidence", "") if status == "verified" else ""
        if status == "verified" and not evidence:
            raise MatrixError(f"{kernel} on {generation} is called verified without naming its evidence")
        for dtype, head_dim, feature in itertools.product(row["dtypes"], head_dims, features):
            key = (kernel, generation, dtype, head_dim, feature)
            if key in cells:
                raise MatrixError(f"{'/'.join(map(str, key))} is listed twice")
            cells[key] = Cell(
                kernel,
                generation,
                data["kernels"][kernel],
                dtype,
                head_dim,
                feature,
                status,
                row.get("note", ""),
                evidence,
            )
