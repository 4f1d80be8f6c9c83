"""Evidence: what a GPU showed, kept in `tests/evidence`, and what the matrix may claim by it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path

import yaml

from . import kernel_sets, planning, support_matrix
from .cases import cases
from .problem import Decline, Device, Problem
from .verification import KernelReport, strain


def folder() -> Path:
    """Where evidence lives in a checkout. Raises FileNotFoundError in an installed package, which has none."""
    root = support_matrix.find("compat_matrix.yaml").parent
    tests = root / "tests"
    if not tests.is_dir():
        raise FileNotFoundError(
            "evidence belongs to a checkout (tests/evidence); flashpatch is installed as a wheel here"
        )
    return tests / "evidence"


def record(report: KernelReport, device: Device, environment: dict, target: Path) -> Path:
    """Write what a GPU run showed as evidence: per passed cell the case, its problem, seed, errors and digest.

    Of a GPU that stood in for an older generation it is a record of errors, and backs no claim (`_fault`).
    """
    if report.backend != "gpu":
        raise ValueError(f"evidence comes from a GPU; this run was {report.backend}")
    by_name = {case.name: case for case in cases(device, report.quick)}
    ran = {result.case: result for result in report.cases}
    cells = {}
    for cell in report.cells:
        if cell.verdict != "passed":
            continue
        kernel = cell.cell.split("/")[0]
        forward = kernel.startswith("forward")
        entries = []
        seen = set()
        for name in cell.cases:
            digest = ran[name].configs[kernel]
            if digest in seen:
                continue
            seen.add(digest)
            problem = by_name[name].problem
            worst = max((check for check in ran[name].checks if check.of_forward == forward), key=strain)
            entries.append({
                "case": name,
                "seed": ran[name].seed,
                "head_dim": problem.head_dim,
                "head_dim_v": problem.head_dim_v,
                "features": sorted(problem.features),
                "short": problem.short,
                "digest": digest,
                "tensor": worst.tensor,
                "error": worst.error,
                "eager_error": worst.eager_error,
                "bound": worst.bound,
            })  # fmt: skip
        cells[cell.cell] = entries
    content = {
        "gpu": device.name,
        "capability": list(device.capability),
        "shared_memory": device.shared_memory,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **environment,
        **_stand_in(device, cells),
        "cells": cells,
    }
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{file_name(device)}.json"
    path.write_text(_written(content), encoding="utf-8")
    return path


def _stand_in(device: Device, cells: Iterable[str]) -> dict:
    """What a record says of a GPU that stood in for another."""
    if not device.stands_for:
        return {}
    kernels = dict.fromkeys(cell.split("/")[0] for cell in cells)
    notes = dict.fromkeys(planning.stand_in_note(kernel, device) for kernel in kernels)
    return {"stands_for": list(device.stands_for), "status": "compiled", "note": "; ".join(notes)}


def _written(content: dict) -> str:
    """JSON with one line for each case of a cell: long, but a line is what changes."""
    cells = content["cells"]
    head = json.dumps({**content, "cells": {}}, indent=1)
    lines = []
    for name, entries in cells.items():
        rows = ",\n".join(f"   {json.dumps(entry)}" for entry in entries)
        lines.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
    body = ",\n".join(lines)
    return head.removesuffix("{}\n}") + "{\n" + body + "\n }\n}\n"


def file_name(device: Device) -> str:
    """The file name of a GPU's evidence: "NVIDIA H200" -> "h200", standing in for a Turing "h200-as-sm75"."""
    words = device.name.lower().replace("nvidia", "").replace("geforce", "").split()
    if device.stands_for:
        words += ["as", "sm" + "".join(map(str, device.stands_for))]
    return "-".join(words) or device.generation


def stale_cells(matrix: support_matrix.Matrix, source: Path) -> dict[str, str]:
    """Verified cells whose evidence is missing or is about other code, each with the reason."""
    verified = [cell for cell in matrix.cells.values() if cell.status == "verified"]
    contents = {name: _content(source / Path(name).name) for name in {cell.evidence for cell in verified}}
    return {cell.name: reason for cell in verified if (reason := _fault(cell, contents[cell.evidence]))}


def _content(path: Path) -> dict | None:
    """What an evidence file holds, or None where it is missing or unreadable."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _fault(cell: support_matrix.Cell, content: dict | None) -> str:
    if content is None:
        return f"{cell.evidence} is missing or unreadable"
    if "stands_for" in content:
        return f"{cell.evidence} is of a GPU that stood in for another; nothing is verified by that"
    entries = content["cells"].get(cell.name)
    if not entries:
        return f"{cell.evidence} has no entry for it"
    device = planning.device_for(tuple(content["capability"]), content["gpu"], shared_memory=content["shared_memory"])
    for entry in entries:
        problem = Problem(
            cell.direction, cell.dtype, entry["head_dim"], entry["head_dim_v"], frozenset(entry["features"]),
            entry.get("short", False),
        )  # fmt: skip
        decision = planning.resolve(problem, device)
        if isinstance(decision, Decline) or decision.config.kernel != cell.kernel:
            return f"{entry['case']} no longer runs on {cell.kernel}"
        if kernel_sets.digest(decision.config) != entry["digest"]:
            return f"what is compiled for {entry['case']} has changed since"
    return ""


def demote(text: str, stale: Iterable[str]) -> tuple[str, list[str]]:
    """compat_matrix.yaml with the rows of stale cells set to compiled, everything else as it was.

    The smallest unit that can be demoted is a row's status on one generation (rows that share a status by an
    anchor share the change). Returns the new text and what was changed.
    """
    stale = [name.split("/") for name in stale]
    data = yaml.safe_load(text)
    root = yaml.compose(text)
    rows = next(value for key, value in root.value if key.value == "rows").value
    edits = {}
    for row, node in zip(data["rows"], rows, strict=True):
        if "kernel" not in row:
            continue
        status = next(value for key, value in node.value if key.value == "status")
        head_dims = row.get("head_dims", data["head_dims"])
        features = row.get("features", list(data["features"]))
        for generation, value in status.value:
            hit = any(
                kernel == row["kernel"]
                and where == generation.value
                and dtype in row["dtypes"]
                and int(head_dim.removeprefix("d")) in head_dims
                and feature in features
                for kernel, where, dtype, head_dim, feature in stale
            )
            if hit and value.value == "verified":
                place = (value.start_mark.index, value.end_mark.index)
                edits[place] = f"{row['kernel']} on {generation.value}: verified -> compiled"
    for start, end in sorted(edits, reverse=True):
        text = text[:start] + "compiled" + text[end:]
    return text, list(edits.values())
