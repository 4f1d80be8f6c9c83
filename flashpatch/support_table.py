"""The matrix as tables: of one GPU, and the README's of all generations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from . import planning, support_matrix
from .problem import DIRECTIONS, DTYPES, SCALED, Device, Plan, Problem


@dataclass(frozen=True)
class Support:
    """One line of the matrix for a GPU: a feature in one direction and dtype, over the head dims that share a status."""

    direction: Annotated[str, "forward or backward"]
    dtype: Annotated[str, "dtype of q, k, v"]
    feature: Annotated[str, "plain: attention itself; otherwise what is asked beside it"]
    head_dims: Annotated[list[int], "padded head dims; every other runs in the next one up"]
    status: Annotated[str, "verified, compiled or unsupported"]
    kernel: Annotated[str | None, "kernel that runs it"]
    reason: Annotated[str, "why no kernel does, or a note"]


def support_of(device: Device, dtype: str | None = None) -> list[Support]:
    """The matrix for one GPU, as planning decides it there (a GPU's shared memory counts)."""
    matrix = planning.support()
    rows: dict[tuple, list[int]] = {}
    for direction in ("forward", "backward"):
        for name in ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn"):
            if dtype not in (None, name):
                continue
            for feature in matrix.features:
                for head_dim in matrix.head_dims:
                    features = frozenset() if feature == "plain" else frozenset([feature])
                    head_dim_v = min(head_dim, matrix.head_dims_v[-1])
                    decision = planning.resolve(Problem(direction, name, head_dim, head_dim_v, features), device)
                    if isinstance(decision, Plan):
                        outcome = (decision.status, decision.config.kernel, decision.note)
                    else:
                        outcome = ("unsupported", None, "; ".join(reason.text for reason in decision.reasons))
                    rows.setdefault((direction, name, feature, *outcome), []).append(head_dim)
    return [
        Support(direction, name, feature, head_dims, status, kernel, reason)
        for (direction, name, feature, status, kernel, reason), head_dims in rows.items()
    ]


MARKERS = ("<!-- support:begin -->", "<!-- support:end -->")


def markdown(matrix: support_matrix.Matrix) -> str:
    """The support table of the README, from the matrix alone."""
    generations = list(matrix.generations)
    lines = ["| | " + " | ".join(matrix.generations[name] for name in generations) + " |"]
    lines.append("|---" * (len(generations) + 1) + "|")
    lines.append("| for example | " + " | ".join(_examples(matrix, name) for name in generations) + " |")
    dims = ", ".join(map(str, matrix.head_dims))
    for feature, meaning in matrix.features.items():
        cells = [_cell_words(matrix, name, feature) for name in generations]
        lines.append(f"| `{feature}`: {meaning} | " + " | ".join(cells) + " |")
    scaled = sorted({cell.dtype for cell in matrix.cells.values()} & SCALED)
    dtypes = sorted({cell.dtype for cell in matrix.cells.values()} - SCALED)
    largest = {d: max(cell.head_dim for cell in matrix.cells.values() if cell.dtype == d) for d in dtypes}
    smaller = "".join(f", {d} up to {size}" for d, size in largest.items() if size < max(largest.values()))
    lines += [
        "",
        f"Kernels take {', '.join(dtypes[:-1])} and {dtypes[-1]} with head dims up to {max(matrix.head_dims)}{smaller} (padded "
        f"to {dims}; what is no multiple of 8 through a copy with zeros behind it, named in reports). A word stands for forward and backward; two words are forward / backward. "
        "*verified*: ran on that generation and passed, the evidence is in `tests/evidence`. *compiled*: builds for "
        "it and passes in the CPU emulator, no run of it there is on record. *fallback*: no kernel; computed exactly by torch operators "
        "in tiles, and counted.",
    ]
    for name, title in matrix.generations.items():
        here = sorted({cell.dtype for cell in matrix.cells.values() if cell.generation == name} - SCALED)
        if here and here != dtypes:
            lines[-1] += f" On {title} only {' and '.join(here)}."
    for dtype in scaled:
        cells = [cell for cell in matrix.cells.values() if cell.dtype == dtype]
        titles = " and ".join(
            title for name, title in matrix.generations.items() if any(c.generation == name for c in cells)
        )
        dims = ", ".join(map(str, sorted({cell.head_dim for cell in cells})))
        step = planning.head_dim_step(dtype)
        lines[-1] += (
            f" {dtype} with factors per head: the forward on {titles}, padded to head dims {dims}, through a copy what is no multiple of {step}."
        )
    lines[-1] += f" Largest head dims, forward / backward: {_largest_head_dims(matrix)}."
    together = [
        f"{' + '.join(sorted(names))}{'' if len(directions) == 2 else f' in the {min(directions)}'} ({reason})"
        for names, directions, reason in matrix.excludes
    ]
    if together:
        lines.append(f"Not together in one kernel: {'; '.join(together)}.")
    return "\n".join(lines)


def _largest_head_dims(matrix: support_matrix.Matrix) -> str:
    """Per generation, and per capability where a smaller shared memory holds less; those without kernels are left out."""
    words = []
    for name, title in matrix.generations.items():
        found: dict[tuple[int, int], list[str]] = {}
        for number in (n for n, capability in matrix.capabilities.items() if capability.generation == name):
            device = planning.device_for(number)
            largest = tuple(_largest_head_dim(matrix, device, direction) for direction in DIRECTIONS)
            found.setdefault(largest, []).append(".".join(map(str, number)))
        for (forward, backward), numbers in found.items():
            if forward:
                which = f" ({', '.join(numbers)})" if len(found) > 1 else ""
                words.append(f"{title}{which} {forward} / {backward}")
    return ", ".join(words)


def _largest_head_dim(matrix: support_matrix.Matrix, device: Device, direction: str) -> int:
    sizes = [
        head_dim
        for head_dim in matrix.head_dims
        for dtype in DTYPES
        if isinstance(
            planning.resolve(Problem(direction, dtype, head_dim, min(head_dim, matrix.head_dims_v[-1])), device),
            Plan,
        )
    ]
    return max(sizes, default=0)


def _examples(matrix: support_matrix.Matrix, generation: str) -> str:
    gpus = [gpu for item in matrix.capabilities.values() if item.generation == generation for gpu in item.gpus]
    return ", ".join(gpus[:3])


def _cell_words(matrix: support_matrix.Matrix, generation: str, feature: str) -> str:
    words = []
    for direction in ("forward", "backward"):
        found = {
            (cell.dtype, cell.head_dim): cell.status
            for cell in matrix.cells.values()
            if (cell.generation, cell.direction, cell.feature) == (generation, direction, feature)
        }
        dtypes = {dtype for dtype, _ in found}
        plain = {
            (cell.dtype, cell.head_dim)
            for cell in matrix.cells.values()
            if (cell.generation, cell.direction, cell.feature) == (generation, direction, "plain")
            and cell.dtype in dtypes
        }
        if not found:
            words.append("fallback")
        elif set(found) < plain:
            words.append(f"{_statuses(found)} (head dims {', '.join(map(str, sorted({d for _, d in found})))})")
        else:
            words.append(_statuses(found))
    return words[0] if words[0] == words[1] else " / ".join(words)


def _statuses(found: dict[tuple[str, int], str]) -> str:
    """The weakest status of some cells, (dtype, head dim) -> status; where dtypes differ, those of the weaker named."""
    weaker = sorted({dtype for (dtype, _), status in found.items() if status == "compiled"})
    if not weaker:
        return "verified"
    return "compiled" if {dtype for dtype, _ in found} == set(weaker) else f"verified, {' and '.join(weaker)} compiled"


def with_table(text: str, table: str) -> str:
    """A document with what is between its markers replaced by the table. Raises ValueError without markers."""
    begin, end = (text.find(marker) for marker in MARKERS)
    if begin < 0 or end < begin:
        raise ValueError(f"the document has no {MARKERS[0]} ... {MARKERS[1]}")
    return f"{text[: begin + len(MARKERS[0])]}\n{table}\n{text[end:]}"
