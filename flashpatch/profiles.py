"""Which attention ran, read from a Chrome trace that torch's profiler wrote, of any program.

Kernels are told by their names. Eager attention has no kernel of its own: it shows as a softmax that a matrix product
comes before and another one after, with only elementwise kernels between. A trace without a GPU's kernels is read by
the operators in it.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from . import families

# Elementwise kernels between a product and the softmax: scale, mask, cast, dropout, and what a framework adds.
_FAR = 12


@dataclass
class FamilyTime:
    """One implementation of attention in a trace."""

    family: Annotated[str, "sdpa_flash, eager, flashpatch, ..."]
    title: Annotated[str, "in words"]
    verdict: Annotated[str, "flash, fused, dense (the whole score matrix in memory) or unknown"]
    calls: Annotated[int, "forward kernels, or softmaxes between two matrix products"]
    backward_calls: Annotated[int, "backward kernels"]
    milliseconds: Annotated[float, "of all of them on the device"]
    share: Annotated[float, "of the time of all kernels, 0 to 1"]
    kernels: Annotated[list[str], "names, the longest running first; at most five"]


@dataclass
class ProfileReport:
    """`flashpatch audit --profile`: the attention in a profiler's trace."""

    path: Annotated[str, "the file read"]
    gpu: Annotated[bool, "read by GPU kernels; false: by operators"]
    kernels: Annotated[int, "kernels (or operators) in the trace"]
    milliseconds: Annotated[float, "time of all of them"]
    families: Annotated[list[FamilyTime], "each implementation of attention, the longest running first"]
    softmaxes_alone: Annotated[int, "softmaxes outside any attention: samplers, routers, losses"]
    verdict: Annotated[str, "in a sentence"]


class NotATrace(ValueError):
    """The file is no Chrome trace; the text says what to do."""


def read(path: str | Path) -> ProfileReport:
    """Classify the attention kernels of a trace, plain or gzipped. Raises NotATrace."""
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = json.loads(data)
    except (OSError, EOFError, ValueError) as error:
        raise NotATrace(f"{path} cannot be read as a Chrome trace: {error}") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise NotATrace(f"{path} has no traceEvents; write it with profiler.export_chrome_trace(path)")
    return classify(events, str(path))


def _is_span(event) -> bool:
    """A complete event as profilers write them: named, with a beginning and a duration."""
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and isinstance(event.get("name"), str)
        and all(isinstance(event.get(key, 0), (int, float)) for key in ("ts", "dur"))
        and all(isinstance(event.get(key, 0), (int, float, str)) for key in ("pid", "tid"))
        and isinstance(event.get("args") or {}, dict)
    )


def classify(events: list[dict], path: str = "") -> ProfileReport:
    """Classify the events of a trace."""
    spans = [event for event in events if _is_span(event)]
    kernels = [event for event in spans if str(event.get("cat", "")).lower() in ("kernel", "gpu_op", "gpu_kernel")]
    gpu = bool(kernels)
    if not gpu:
        kernels = _operators(spans)
    found: dict[str, FamilyTime] = {}
    times: dict[str, dict[str, float]] = {}
    total = sum(float(event.get("dur", 0)) for event in kernels) / 1e3

    def add(family: families.Family, names: list[str], milliseconds: float, backward: bool) -> None:
        row = found.setdefault(family.name, FamilyTime(family.name, family.title, family.kind, 0, 0, 0.0, 0.0, []))
        row.backward_calls += backward
        row.calls += not backward
        row.milliseconds += milliseconds
        for name in names:
            times.setdefault(family.name, {}).setdefault(name, 0.0)
            times[family.name][name] += milliseconds

    alone = 0
    for stream in _streams(kernels):
        for index, event in enumerate(stream):
            name = str(event["name"])
            family = families.of_kernel(name) if gpu else families.of_operator(name)
            if family is not None:
                add(family, [name], float(event.get("dur", 0)) / 1e3, families.is_backward(name))
            elif families.SOFTMAX.search(name) and not families.LOG_SOFTMAX.search(name):
                around = _around(stream, index)
                if around is None:
                    alone += 1
                    continue
                backward = families.is_backward(name)
                names = list(dict.fromkeys(str(item["name"]) for item in around))
                dense = families.BY_NAME["sdpa_math" if not gpu and "_safe_softmax" in name else "eager"]
                add(dense, names, sum(float(item.get("dur", 0)) for item in around) / 1e3, backward)
    for name, row in found.items():
        row.kernels = sorted(times[name], key=times[name].get, reverse=True)[:5]
        row.share = row.milliseconds / total if total else 0.0
    rows = sorted(found.values(), key=lambda row: -row.milliseconds)
    return ProfileReport(path, gpu, len(kernels), total, rows, alone, _verdict(rows, gpu))


def _verdict(rows: list[FamilyTime], gpu: bool) -> str:
    where = "" if gpu else " (no GPU kernels in this trace; read by its operators)"
    if not rows:
        return f"No attention was recognised{where}."
    dense = [row for row in rows if row.verdict == "dense"]
    unknown = [row for row in rows if row.verdict == "unknown"]
    if unknown and not dense:
        names = ", ".join(row.kernels[0].partition("<")[0] for row in unknown)
        known = [row.title for row in rows if row not in unknown]
        fused = f"; the rest ran fused: {', '.join(known)}" if known else ""
        return f"Attention of a kind that is not known ran: {names}{fused}{where}."
    if not dense:
        return f"Every attention ran fused: {', '.join(row.title for row in rows)}{where}."
    share = sum(row.milliseconds for row in dense) / (sum(row.milliseconds for row in rows) or 1.0)
    names = ", ".join(row.title for row in dense)
    return f"{share:.0%} of attention's time is {names}: the whole score matrix in memory{where}."


def _streams(kernels: list[dict]) -> list[list[dict]]:
    """Kernels by stream (operators by thread), each in order of time."""
    streams: dict[tuple, list[dict]] = {}
    for event in kernels:
        arguments = event.get("args") or {}
        key = (event.get("pid"), arguments.get("device"), arguments.get("stream", event.get("tid")))
        streams.setdefault(key, []).append(event)
    return [sorted(events, key=lambda event: float(event.get("ts", 0))) for events in streams.values()]


def _operators(spans: list[dict]) -> list[dict]:
    """Of the operators on a CPU those that do the work: attention's own as a whole, else the innermost."""
    found = []
    for thread in _streams([event for event in spans if event.get("cat") in ("cpu_op", "Operator")]):
        end = -1.0
        for index, event in enumerate(thread):
            begin, stop = float(event.get("ts", 0)), float(event.get("ts", 0)) + float(event.get("dur", 0))
            if begin < end:
                continue  # inside an attention operator
            if families.of_operator(str(event["name"])) is not None:
                end = stop
                found.append(event)
            elif index + 1 == len(thread) or float(thread[index + 1].get("ts", 0)) >= stop:
                found.append(event)
            elif event["name"] in ("aten::_safe_softmax", "aten::bmm", "aten::mm", "aten::baddbmm", "aten::_softmax"):
                end = stop
                found.append(event)
    return found


def _around(stream: list[dict], index: int) -> list[dict] | None:
    """The kernels of one eager attention around its softmax: product, elementwise, softmax, elementwise, product."""
    group = [stream[index]]
    for step in (-1, 1):
        for distance in range(1, _FAR + 1):
            place = index + step * distance
            if not 0 <= place < len(stream):
                return None
            name = str(stream[place]["name"])
            if _is_product(name):
                group.append(stream[place])
                break
            if families.of_kernel(name) is not None or not _is_between(name):
                return None
            group.append(stream[place])
        else:
            return None
    return group


def _is_product(name: str) -> bool:
    return bool(families.GEMM.search(name)) or name in ("aten::bmm", "aten::mm", "aten::baddbmm", "aten::matmul")


def _is_between(name: str) -> bool:
    if name.startswith("aten::"):
        return not any(word in name for word in ("embedding", "topk", "sort", "multinomial", "norm", "addmm"))
    return bool(families.BETWEEN.search(name)) and not any(
        word in name.lower() for word in ("norm", "topk", "sort", "embedding", "multinomial", "argmax", "index_")
    )
