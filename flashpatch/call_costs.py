"""What attention calls cost: FLOPs, bytes and memory, and the time on a GPU whose ceilings were measured."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import numpy
import yaml

from . import dry_runs, planning, support_matrix


@dataclass(frozen=True)
class Ceilings:
    """What a GPU was measured to do; null where nobody measured."""

    gpu: Annotated[str, "its name"]
    memory_bytes: Annotated[float | None, "memory of the GPU"]
    matmul_tflops: Annotated[float | None, "best matrix product, TFLOP/s"]
    bandwidth_tb_s: Annotated[float | None, "device copy, bytes read and written, TB/s"]
    measured: Annotated[bool, "the figures were measured on this GPU with flashpatch's kernels, not given"]


@functools.lru_cache(maxsize=1)
def _measured() -> dict:
    return yaml.safe_load(support_matrix.find("compat_matrix.yaml").read_text(encoding="utf-8"))["ceilings"]


def ceilings(gpu: str, *, tflops=None, bandwidth=None, memory=None) -> tuple[Ceilings, dict]:
    """A GPU's ceilings (TFLOP/s, TB/s, GiB where given) and the measured speeds of attention on it, {} if there are none."""
    device = planning.gpu(gpu)
    found = _measured().get(device.name, {})
    own = not (tflops or bandwidth)
    memory = memory or found.get("memory_gib")
    return Ceilings(
        device.name,
        None if memory is None else memory * 2**30,
        tflops or found.get("matmul_tflops"),
        bandwidth or found.get("bandwidth_tb_s"),
        bool(found) and own,
    ), found.get("attention", {}) if own else {}


def _attention_tflops(
    speeds: dict, limits: Ceilings, head_dim: int, mask: str, seqlen: int, direction: int
) -> float | None:
    """Measured TFLOP/s of the padded head dim, at the nearest measured length below; unmeasured: the matrix product's."""
    if not speeds:
        return limits.matmul_tflops
    sizes = sorted({int(key.split()[0]) for key in speeds})
    padded = next((size for size in sizes if size >= head_dim), sizes[-1])
    rows = speeds[f"{padded} {'full' if mask == 'full' else 'causal'}"]
    length = max((length for length in rows if length <= seqlen), default=min(rows))
    return rows[length][direction] * min(head_dim / padded, 1.0)


# ---- counting ----


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int = -1, right: int = -1, chunk: int | None = None) -> int:
    """Scores that a mask lets through: rows aligned to the bottom right, `left` and `right` inclusive, -1 unlimited."""
    row = numpy.arange(seqlen_q, dtype=numpy.int64) + (seqlen_k - seqlen_q)
    first = numpy.zeros_like(row) if left < 0 else numpy.maximum(row - left, 0)
    last = numpy.full_like(row, seqlen_k - 1) if right < 0 else numpy.minimum(row + right, seqlen_k - 1)
    if chunk:
        first = numpy.maximum(first, row // chunk * chunk)
        last = numpy.minimum(last, row // chunk * chunk + chunk - 1)
    return int(numpy.maximum(last - first + 1, 0).sum())


@dataclass(frozen=True)
class CallKind:
    """What decides a call's cost; a length of None is the context's."""

    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    seqlen_q: int | None
    seqlen_k: int | None
    left: int
    right: int
    chunk: int | None
    problem: object
    cached: bool  # the next token reads its keys and values again

    @property
    def follows(self) -> bool:
        """Whether a longer context makes it longer."""
        return self.seqlen_q is None or self.seqlen_k is None

    @property
    def mask(self) -> str:
        if self.chunk:
            return f"chunk {self.chunk}"
        if self.left >= 0:
            return f"window {self.left + 1}" if self.right == 0 else f"window {self.left}+{self.right}"
        return "causal" if self.right == 0 else "full"

    def lengths(self, context: int) -> tuple[int, int]:
        return self.seqlen_q or context, self.seqlen_k or context

    def pairs(self, context: int) -> int:
        return visible_pairs(*self.lengths(context), self.left, self.right, self.chunk)

    def kept(self, context: int) -> int:
        """Keys that a cache keeps for the next token."""
        if not self.cached:
            return 0
        keys = self.lengths(context)[1]
        limit = self.chunk or (self.left + 1 if self.left >= 0 else keys)
        return min(keys, limit)


def kinds_of(facts: dry_runs.ModelFacts) -> dict[CallKind, list[str]]:
    """The calls of one forward, alike ones together, with their modules."""
    crosses = getattr(facts.config, "is_encoder_decoder", False)
    chunk = getattr(facts.config, "attention_chunk_size", None)
    kinds: dict[CallKind, list[str]] = {}
    for call in facts.calls:
        batch, rows, heads, head_dim = call.q_shape
        keys = call.k_shape[1]
        kind = CallKind(
            heads * batch, call.k_shape[2] * batch, head_dim, call.v_shape[3], None if rows == facts.context else rows,
            None if keys == facts.context else keys, *call.window,
            chunk if "key_ranges" in call.problem.features else None, call.problem,
            call.window[1] == 0 or "key_ranges" in call.problem.features
            or (crosses and "encoder" not in call.path.split(".")),
        )  # fmt: skip
        kinds.setdefault(kind, []).append(call.path)
    return kinds


def totals(kinds: dict, context: int, batch: int, element: int, kernel: bool, limits: Ceilings, speeds: dict) -> dict:
    """Totals over all calls of one forward, one way, for a batch."""
    total: Counter = Counter()
    milliseconds = [0.0, 0.0]
    for kind, paths in kinds.items():
        rows, keys = kind.lengths(context)
        d, dv, hq, hkv = kind.head_dim, kind.head_dim_v, kind.heads_q, kind.heads_kv
        full = rows * keys
        pairs = kind.pairs(context) if kernel else full
        q, out = rows * hq * d * element, rows * hq * dv * element
        k, v = keys * hkv * d * element, keys * hkv * dv * element
        statistics = 4 * rows * hq
        flops = [2 * hq * pairs * (d + dv), 2 * hq * pairs * (3 * d + 2 * dv if kernel else 2 * d + 2 * dv)]
        moved = [q + k + v + out + statistics, 2 * (q + k + v) + 2 * out + 2 * statistics]
        working, saved = working_bytes(kind, context, element, kernel)
        if not kernel:
            scores = hq * full
            repeated = 0 if hq == hkv else keys * hq * (d + dv) * element
            # q k^T written; * scale and + mask, each read and written; softmax, read and written in fp32; its cast, read and
            # written; read for p v
            moved[0] += scores * (8 * element + 8) + 2 * repeated - statistics
            # dp written; cast to fp32, read and written; softmax's gradient, reads that and p in fp32, written; * scale, read
            # and written; p read for dv, ds for dq and for dk
            moved[1] += scores * (8 * element + 12) + 2 * repeated - 2 * statistics
        for name, value in (
            ("forward_flops", flops[0]), ("backward_flops", flops[1]), ("forward_bytes", moved[0]),
            ("backward_bytes", moved[1]), ("saved_bytes", saved),
        ):  # fmt: skip
            total[name] += value * len(paths) * batch
        total["working_bytes"] = max(total["working_bytes"], working * batch)
        for direction in (0, 1):
            rate = limits.matmul_tflops
            if kernel:
                rate = _attention_tflops(speeds, limits, max(d, dv), kind.mask, rows, direction)
            if rate is None or limits.bandwidth_tb_s is None:
                milliseconds[direction] = math.nan
            else:
                # arithmetic and traffic overlap within a kernel; eager attention's elementwise passes overlap with nothing
                seconds = (flops[direction] / rate / 1e12, moved[direction] / limits.bandwidth_tb_s / 1e12)
                own = max(seconds) if kernel else sum(seconds)
                milliseconds[direction] += own * 1e3 * len(paths) * batch
    unknown = math.isnan(sum(milliseconds))
    return {
        **{name: float(value) for name, value in total.items()},
        "forward_milliseconds": None if unknown else milliseconds[0],
        "backward_milliseconds": None if unknown else milliseconds[1],
    }


def cache_bytes(kinds: dict, context: int, element: int) -> float:
    per_call = (
        len(paths) * kind.kept(context) * kind.heads_kv * (kind.head_dim + kind.head_dim_v) * element
        for kind, paths in kinds.items()
    )
    return float(sum(per_call))


def working_bytes(kind: CallKind, context: int, element: int, kernel: bool) -> tuple[float, float]:
    """Memory beside q, k, v and out of one call: while it runs, and kept for its backward."""
    rows, keys = kind.lengths(context)
    if kernel:
        statistics = 4 * rows * kind.heads_q
        # in fp32 q, k and v as pairs of fp16, which kernels read instead
        numbers = rows * kind.heads_q * kind.head_dim + keys * kind.heads_kv * (kind.head_dim + kind.head_dim_v)
        return statistics + (4 * numbers if element == 4 else 0), statistics
    scores = kind.heads_q * rows * keys
    # repeated keys and values are written out for every query head
    alike = kind.heads_q == kind.heads_kv
    repeated = 0 if alike else keys * kind.heads_q * (kind.head_dim + kind.head_dim_v) * element
    return scores * (2 * element + 4) + repeated, scores * (element + 4) + repeated


def largest_batch(kinds, context: int, element: int, kernel: bool, limits: Ceilings, weights: int) -> int | None:
    if limits.memory_bytes is None:
        return None
    each = cache_bytes(kinds, context, element) + max(
        (working_bytes(kind, context, element, kernel)[0] for kind in kinds), default=0.0
    )
    return max(int((limits.memory_bytes - weights) // each), 0) if each else None


def largest_context(kinds, element: int, kernel: bool, limits: Ceilings, weights: int) -> int | None:
    """The most tokens, in steps of 1024, of which one sequence fits; by bisection, for what it needs only grows."""
    if limits.memory_bytes is None or not any(kind.follows for kind in kinds):
        return None
    low, high = 0, 1 << 14  # in steps: 16M tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high)
            if largest_batch(kinds, middle * 1024, element, kernel, limits, weights)
            else (low, middle - 1)
        )
    return low * 1024
