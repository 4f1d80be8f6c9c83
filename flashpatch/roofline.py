"""Whether attention here is limited by arithmetic or by memory: measured ceilings, counted work, and an experiment.

The ceilings are measured on this machine first: the fastest matrix product over several shapes, and the bandwidth of
copying and of reading. FLOPs and bytes are counted operator by operator while a call runs (a fused operator reads its
inputs and writes its outputs once), not taken from a formula for the whole. The verdict is checked by an experiment: how
time responds to twice the FLOPs, and how to more bytes for the same FLOPs.
"""

from __future__ import annotations

import gc
import math
import random
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import benchmarking, tracing
from .benchmarking import Shape
from .counted_work import count
from .measured_ceilings import Ceilings, measure_ceilings, milliseconds, synchronize

GPU_VARIANTS = ("flashpatch", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "flex", "eager")
CPU_VARIANTS = ("flashpatch", "sdpa_flash", "sdpa_math", "eager")
DENSE = ("sdpa_math", "eager")
# A clock and a ceiling are both medians; more than this above the ceiling is no noise.
_OVER = 1.02
# A time that grows with a smaller power of FLOPs and of bytes is neither's: launches, or too little work.
_RESPONDS = 0.3


@dataclass
class Point:
    """One variant at one shape; `error` instead of figures where it could not run."""

    shape: Annotated[Shape, "the call"]
    direction: Annotated[str, "forward or backward"]
    variant: Annotated[str, "eager, one of SDPA's backends, flex, or flashpatch"]
    milliseconds: Annotated[float | None, "median"] = None
    tflops: Annotated[float | None, "TFLOP/s of the work asked for, half of it when causal"] = None
    gbs: Annotated[float | None, "GB/s of the bytes counted"] = None
    peak_bytes: Annotated[int | None, "memory taken beyond the inputs; null on a CPU"] = None
    flops: Annotated[float, "FLOPs it executes, counted"] = 0.0
    bytes: Annotated[int, "bytes its operators read and write, counted"] = 0
    intensity: Annotated[float | None, "FLOPs executed per byte moved"] = None
    bound: Annotated[str, "by the roofline: memory or compute; failed above a ceiling; empty where it did not run"] = ""
    fraction: Annotated[float | None, "of the ceiling that bounds it"] = None
    error: Annotated[str, "why it did not run; empty if it did"] = ""


@dataclass
class Experiment:
    """How the time of one variant responds. Exponents of time ~ flops^a * bytes^b, from three measured calls."""

    variant: Annotated[str, "what was timed"]
    shape: Annotated[Shape, "the call they start from"]
    milliseconds: Annotated[list[float], "of it, with twice the head_dim, and with more bytes for the same FLOPs"]
    flops: Annotated[list[float], "counted for each"]
    bytes: Annotated[list[int], "counted for each"]
    more_bytes_by: Annotated[str, "how the third call differs"]
    to_flops: Annotated[float | None, "exponent of FLOPs; null: the calls do not tell the two apart"]
    to_bytes: Annotated[float | None, "exponent of bytes"]
    bound: Annotated[
        str,
        "memory or compute, by the larger exponent; neither where time answers to none; empty where it could not run",
    ]
    roofline: Annotated[str, "what the roofline says of the first call"]
    error: Annotated[str, "why it did not run; empty if it did"] = ""

    @property
    def agrees(self) -> bool:
        return bool(self.bound) and self.bound == self.roofline


@dataclass
class RooflineReport:
    """`flashpatch bench --roofline`."""

    device: Annotated[str, "the GPU's name, or the processor's"]
    dtype: Annotated[str, "of q, k and v"]
    torch: Annotated[str, "torch's version"]
    ceilings: Annotated[Ceilings, "what this machine reaches"]
    points: Annotated[list[Point], "every variant at every shape"] = field(default_factory=list)
    experiments: Annotated[list[Experiment], "one for each variant"] = field(default_factory=list)


# ---- running ----


def call(variant: str, q, k, v, causal: bool) -> torch.Tensor:
    """One forward on [batch, seqlen, heads, head_dim] tensors."""
    if variant == "flashpatch" and q.device.type == "cpu":
        from .ops import attention

        return attention(q, k, v, causal=causal, on_decline="fallback")
    if variant == "sdpa_math":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            gqa = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa).transpose(1, 2)
    if variant == "flex":
        return _flex(q, k, v, causal)
    return benchmarking.call(variant, q, k, v, causal)


_compiled_flex: dict[tuple, object] = {}


def _flex(q, k, v, causal: bool) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention
    from torch.utils._triton import has_triton

    if q.device.type == "cuda" and not has_triton():
        raise RuntimeError("torch.compile needs Triton for FlexAttention on a GPU; type: pip install triton")
    key = (q.shape, k.shape, q.dtype, causal, q.requires_grad)
    if key not in _compiled_flex:
        # dynamo finds what it compiled by its code, keeps a few and then leaves the rest to dense operators
        torch.compiler.reset()
        _compiled_flex.clear()
        _compiled_flex[key] = torch.compile(flex_attention, dynamic=False)
    blocks = _blocks(q.shape[1], k.shape[1], q.device) if causal else None
    gqa = q.shape[2] != k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return _compiled_flex[key](q, k, v, block_mask=blocks, enable_gqa=gqa).transpose(1, 2)


_known_blocks: dict[tuple, object] = {}


def _blocks(rows: int, columns: int, device):
    from torch.nn.attention.flex_attention import create_block_mask

    key = (rows, columns, device)
    if key not in _known_blocks:
        _known_blocks.clear()
        _known_blocks[key] = create_block_mask(lambda b, h, i, j: i >= j, None, None, rows, columns, device=device)
    return _known_blocks[key]


def _runner(variant: str, shape: Shape, direction: str, dtype, device):
    backward = direction == "backward"

    def make(heads):
        tensor = torch.randn(shape.batch, shape.seqlen, heads, shape.head_dim, device=device, dtype=dtype)
        return tensor.requires_grad_(backward)

    q, k, v = make(shape.num_heads), make(shape.num_heads_kv), make(shape.num_heads_kv)
    if not backward:

        def run():
            with torch.no_grad():
                call(variant, q, k, v, shape.causal)

        return run
    out = call(variant, q, k, v, shape.causal)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def measure(
    variant: str, shape: Shape, direction: str, dtype, device: torch.device, ceilings: Ceilings, samples: int = 3
) -> Point:
    """Time and count one variant at one shape. What it raises, running out of memory too, is its `error`."""
    point = Point(shape, direction, variant)
    try:
        run = _runner(variant, shape, direction, dtype, device)
        run()  # compiles, and takes what is taken once
        if device.type == "cuda":
            synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run()
            synchronize(device)
            point.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        point.flops, point.bytes = count(run, shape, direction, dtype.itemsize)
        point.milliseconds = milliseconds(run, device, samples=samples)
        judge(point, ceilings)
    except torch.OutOfMemoryError as error:
        point.error = f"out of memory: {'. '.join(' '.join(str(error).split()).split('. ')[:2])[:160]}"
    except Exception as error:
        point.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    run = None
    if point.error:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return point


def judge(point: Point, ceilings: Ceilings) -> None:
    """Fill in speed, intensity, and which ceiling bounds a timed point."""
    seconds = point.milliseconds / 1e3
    point.tflops = point.shape.flops(point.direction) / seconds / 1e12
    point.gbs = point.bytes / seconds / 1e9
    point.intensity = point.flops / point.bytes
    compute = point.flops / seconds / 1e12 / ceilings.tflops
    memory = point.gbs / ceilings.gbs
    point.fraction = max(compute, memory)
    point.bound = "memory" if point.intensity < ceilings.ridge else "compute"
    if point.fraction > _OVER:
        point.bound = "failed"


def experiment(variant: str, shape: Shape, dtype, device: torch.device, ceilings: Ceilings) -> Experiment:
    """How the forward's time responds to twice the head_dim, and to more bytes for the same FLOPs.

    The score matrix of dense attention grows with the heads while their width shrinks. A fused one moves only its
    inputs and outputs, which grow when four sequences of half the length take the place of one.
    """
    wide = replace(shape, head_dim=2 * shape.head_dim)
    if variant in DENSE:
        heads = {"num_heads": 2 * shape.num_heads, "num_heads_kv": 2 * shape.num_heads_kv}
        more, words = replace(shape, head_dim=shape.head_dim // 2, **heads), "twice the heads of half the head_dim"
    else:
        more, words = (
            replace(shape, batch=4 * shape.batch, seqlen=shape.seqlen // 2),
            "four sequences of half the length",
        )
    points = [measure(variant, s, "forward", dtype, device, ceilings, samples=5) for s in (shape, wide, more)]
    error = next((point.error for point in points if point.error), "")
    result = Experiment(variant, shape, [], [], [], words, None, None, "", points[0].bound, error)
    if error:
        return result
    result.milliseconds = [point.milliseconds for point in points]
    result.flops, result.bytes = [point.flops for point in points], [point.bytes for point in points]
    result.to_flops, result.to_bytes = _exponents(result.milliseconds, result.flops, result.bytes)
    if result.to_flops is not None:
        result.bound = "compute" if result.to_flops > result.to_bytes else "memory"
        if max(result.to_flops, result.to_bytes) < _RESPONDS:
            result.bound = "neither"
    return result


def _exponents(times, flops, moved) -> tuple[float | None, float | None]:
    """(a, b) of time ~ flops^a * bytes^b through three points."""
    rows = [
        (math.log(flops[i] / flops[0]), math.log(moved[i] / moved[0]), math.log(times[i] / times[0])) for i in (1, 2)
    ]
    (f1, b1, t1), (f2, b2, t2) = rows
    determinant = f1 * b2 - f2 * b1
    if abs(determinant) < 0.05:
        return None, None
    return (t1 * b2 - t2 * b1) / determinant, (f1 * t2 - f2 * t1) / determinant


# ---- the whole ----


def shapes(seqlens, head_dim: int = 128, tokens: int = 16384, width: int = 2048, causal: bool = True) -> list[Shape]:
    """A fixed number of tokens and of heads times head_dim, as `bench` takes them."""
    heads = max(1, width // head_dim)
    return [Shape(max(1, tokens // seqlen), seqlen, heads, heads, head_dim, causal) for seqlen in seqlens]


def shapes_of(model: torch.nn.Module, inputs: dict, seqlens, batch: int = 1) -> list[Shape]:
    """The attention a model asks for, each kind once, at these lengths."""
    with torch.no_grad(), tracing.trace(model) as traced:
        model(**inputs)
    kinds = {}
    for row in traced.report.rows:
        causal = row.causal or row.mask.startswith("causal")
        if row.q[-1] == row.v[-1]:
            kinds[row.q[1], row.k[1] // row.heads_expanded if row.k[1] == row.q[1] else row.k[1], row.q[-1], causal] = (
                None
            )
    return [
        Shape(batch, seqlen, heads, heads_kv, head_dim, causal)
        for heads, heads_kv, head_dim, causal in kinds
        for seqlen in seqlens
    ]


def roofline(
    wanted: list[Shape],
    *,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    variants=None,
    directions=("forward", "backward"),
    samples: int = 3,
    experiments: Shape | None = None,
    small: bool = False,
    advance=lambda done, total: None,
) -> RooflineReport:
    """Ceilings, then every variant at every shape, in random order, then the experiment on each variant.

    `experiments` is the call that the experiment starts from (None: none). `small` takes small ceilings, for tests.
    """
    device = torch.device(device)
    variants = variants or (GPU_VARIANTS if device.type == "cuda" else CPU_VARIANTS)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    report = RooflineReport(
        name, str(dtype).removeprefix("torch."), torch.__version__, measure_ceilings(device, dtype, small=small)
    )
    total = len(wanted) * len(variants) * len(directions) + (len(variants) if experiments else 0)
    done = 0
    for shape in wanted:
        work = [(variant, direction) for variant in variants for direction in directions]
        random.shuffle(work)
        found = {}
        for variant, direction in work:
            found[variant, direction] = measure(variant, shape, direction, dtype, device, report.ceilings, samples)
            done += 1
            advance(done, total)
        report.points += [found[variant, direction] for variant in variants for direction in directions]
    for variant in variants if experiments else ():
        report.experiments.append(experiment(variant, experiments, dtype, device, report.ceilings))
        done += 1
        advance(done, total)
    return report


def table(report: dict) -> str:
    """A RooflineReport as JSON holds it, as a Markdown table: forward / backward milliseconds, memory, what bounds it."""
    lines = [
        "| seqlen | variant | ms | TFLOP/s | GB/s | peak memory | FLOPs per byte | bound by | of the ceiling |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    pairs: dict[tuple, dict[str, dict]] = {}
    for point in report["points"]:
        pairs.setdefault((point["shape"]["seqlen"], point["variant"]), {})[point["direction"]] = point
    for (seqlen, variant), pair in pairs.items():
        both = [pair[direction] for direction in ("forward", "backward") if direction in pair]

        def each(name, form, both=both):
            return " / ".join("-" if point[name] is None else form.format(point[name]) for point in both)

        errors = [point["error"] for point in both if point["error"]]
        if len(errors) == len(both):
            lines.append(f"| {seqlen} | {variant} | {errors[0].split(':')[0]} | | | | | | |")
            continue
        memory = " / ".join("-" if p["peak_bytes"] is None else f"{p['peak_bytes'] / 2**30:.2f} GiB" for p in both)
        bound = " / ".join(point["bound"] or point["error"].split(":")[0] for point in both)
        lines.append(
            f"| {seqlen} | {variant} | {each('milliseconds', '{:.3g}')} | {each('tflops', '{:.3g}')} | "
            f"{each('gbs', '{:.0f}')} | {memory} | {each('intensity', '{:.0f}')} | {bound} | {each('fraction', '{:.0%}')} |"
        )
    return "\n".join(lines)
