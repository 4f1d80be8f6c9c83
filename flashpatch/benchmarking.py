"""How fast attention runs here: flashpatch beside eager, SDPA's backends and FlashAttention-3 where its wheel
(`fa3-fwd`, forward only) is installed, by CUDA events, in one process, and beside the fastest matrix product.

Counting follows the FlashAttention papers: forward 4 * batch * heads * seqlen_q * seqlen_k * head_dim FLOPs, half
when causal, backward 2.5 times that; batch * seqlen = 16384 and heads * head_dim = 2048 by default. A window counts the
keys it shows.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import compiler
from .call import out_dtype
from .ops import attention

SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The side of the square matrices whose product in the inputs' dtype is the ceiling.
CEILING_SIZE = 8192
ROUNDS = 5


def peers(dtype: torch.dtype = torch.bfloat16) -> tuple[str, ...]:
    """What flashpatch can be timed beside here; in fp32 also flashpatch with its products rounded to TF32, in 8 bits flashpatch in
    bfloat16."""
    if dtype == torch.float32:  # of SDPA's fast backends one takes it
        return ("flashpatch_tf32", "sdpa_efficient")
    fa3 = ("fa3",) if importlib.util.find_spec("fa3_fwd_interface") else ()
    return ("flashpatch_bf16", *fa3) if dtype.itemsize == 1 else (*SDPA_BACKENDS, *fa3)


def directions(dtype: torch.dtype) -> tuple[str, ...]:
    """What attention of a dtype has."""
    return ("forward",) if dtype.itemsize == 1 else ("forward", "backward")


@dataclass(frozen=True)
class Shape:
    """One attention call: [batch, seqlen, num_heads, head_dim] for q, seqlen keys in num_heads_kv heads."""

    batch: Annotated[int, "rows of the batch"]
    seqlen: Annotated[int, "queries and keys of a row"]
    num_heads: Annotated[int, "query heads"]
    num_heads_kv: Annotated[int, "key and value heads"]
    head_dim: Annotated[int, "of q, k and v"]
    causal: Annotated[bool, "with a causal mask"]
    window: Annotated[int, "keys a query sees at most, itself included (causal); 0: all"] = 0

    def flops(self, direction: str) -> float:
        """Of one call: forward, or backward at 2.5 times that."""
        pairs = self.seqlen**2 / (2 if self.causal else 1)
        if 0 < self.window < self.seqlen:
            pairs = self.window * self.seqlen - self.window**2 / 2
        forward = 4.0 * self.batch * self.num_heads * pairs * self.head_dim
        return forward * (2.5 if direction == "backward" else 1.0)


@dataclass
class Timing:
    """One variant at one shape; `error` instead of figures where it could not run."""

    shape: Annotated[Shape, "the call"]
    direction: Annotated[str, "forward or backward"]
    variant: Annotated[str, "flashpatch, one of SDPA's backends, fa3, or eager"]
    milliseconds: Annotated[float | None, "median over rounds"] = None
    tflops: Annotated[float | None, "TFLOP/s by that median"] = None
    peak_bytes: Annotated[int | None, "memory taken beyond the inputs"] = None
    error: Annotated[str, "why it did not run; empty if it did"] = ""


@dataclass
class Accuracy:
    """How far one tensor of one variant is from the same in fp64, over two heads of one sequence of normal numbers."""

    shape: Annotated[Shape, "the call"]
    variant: Annotated[str, "flashpatch, one of SDPA's backends, or eager"]
    tensor: Annotated[str, "out, dq, dk or dv"]
    largest: Annotated[float, "largest absolute error"]
    rms: Annotated[float, "root of the mean squared error"]


@dataclass
class BenchReport:
    """All timings of one run, and the machine they are from."""

    gpu: Annotated[str, "the GPU's name"]
    dtype: Annotated[str, "of q, k and v"]
    torch: Annotated[str, "torch's version"]
    date: Annotated[str, "of the run, UTC"]
    kernels: Annotated[str, "digest of the sources of flashpatch's kernels"]
    ceiling_tflops: Annotated[float, "TFLOP/s of a product of random 8192 x 8192 matrices, median over the run"] = 0.0
    timings: Annotated[list[Timing], "every variant at every shape"] = field(default_factory=list)
    accuracies: Annotated[list[Accuracy], "every variant that ran, and eager, at every head dim"] = field(
        default_factory=list
    )
    host_microseconds: Annotated[dict[str, float], "host time of one forward call on a tiny problem"] = field(
        default_factory=dict
    )


def origin() -> tuple[str, str, str]:
    """What figures are of: torch's version, the date, and the digest of the kernels' sources."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return torch.__version__, today, compiler.sources_digest()


def standard_shapes(head_dims=(64, 128), seqlens=(512, 2048, 8192, 16384), tokens=16384, width=2048) -> list[Shape]:
    """The FlashAttention papers' setting: a fixed number of tokens and of heads times head_dim."""
    return [
        Shape(max(1, tokens // seqlen), seqlen, width // head_dim, width // head_dim, head_dim, causal)
        for head_dim in head_dims
        for causal in (False, True)
        for seqlen in seqlens
    ]


def odd_shapes() -> list[Shape]:
    """A single long sequence with few key heads, and windows, whose time should follow the window."""
    single = [Shape(1, seqlen, 64, 8, 128, True) for seqlen in (1024, 2048, 4096, 8192, 16384, 32768)]
    return single + [Shape(1, seqlen, 16, 16, 128, True, window) for window in (1024, 4096) for seqlen in (8192, 32768)]


def bench(
    shapes: list[Shape],
    *,
    dtype: torch.dtype = torch.bfloat16,
    variants=("flashpatch", "sdpa_flash", "sdpa_cudnn"),
    directions=("forward", "backward"),
    rounds: int = ROUNDS,
    device: str = "cuda",
    advance=lambda done, total: None,
) -> BenchReport:
    """Time every variant at every shape, the variants in random order in each round; medians over rounds.

    Raises RuntimeError without a CUDA device. `advance(done, total)` is called after each shape.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("bench needs an NVIDIA GPU; torch sees none")
    report = BenchReport(torch.cuda.get_device_name(device), str(dtype).removeprefix("torch."), *origin())
    ceilings = []
    for number, shape in enumerate(shapes):
        ceilings.append(_ceiling(dtype, device))
        report.timings += _bench_shape(shape, dtype, variants, directions, rounds, device)
        advance(number + 1, len(shapes))
    report.ceiling_tflops = statistics.median(ceilings)
    failed = {timing.variant for timing in report.timings if timing.error}
    for shape in dict.fromkeys(Shape(1, 2048, 2, 2, shape.head_dim, shape.causal) for shape in shapes):
        others = () if dtype.itemsize == 1 else ("eager",)
        named = [variant for variant in (*variants, *others) if variant not in failed]
        report.accuracies += _accuracies(shape, dtype, named, device, "backward" in directions)
    report.host_microseconds = host_cost(variants, dtype, device)
    return report


def _ceiling(dtype, device) -> float:
    """TFLOP/s of the library's matrix product, random data: what the tensor cores give at this card's clocks and power."""
    a, b = (torch.randn(CEILING_SIZE, CEILING_SIZE, device=device).to(dtype) for _ in range(2))

    def product():
        if dtype.itemsize > 1:
            return a @ b
        one = torch.ones((), device=device)
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=out_dtype(dtype))

    return 2.0 * CEILING_SIZE**3 / milliseconds(product, device) / 1e9


def _accuracies(shape: Shape, dtype, variants, device, backward: bool) -> list[Accuracy]:
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.batch, shape.seqlen, shape.num_heads, shape.head_dim)
    q, k, v, dout = (torch.randn(size, device=device, generator=generator).to(dtype) for _ in range(4))

    def results(variant, *inputs):
        leaves = [tensor.detach().requires_grad_(backward) for tensor in _cast(variant, *inputs)]
        with _precision(variant):
            out = call(variant, *leaves, shape.causal)
            return out.detach(), *(torch.autograd.grad(out, leaves, dout.to(out.dtype)) if backward else ())

    expected = results("eager", q.double(), k.double(), v.double())
    found = []
    for variant in dict.fromkeys(variants):
        for name, actual, right in zip(("out", "dq", "dk", "dv"), results(variant, q, k, v), expected, strict=False):
            error = (actual.double() - right).abs()
            found.append(Accuracy(shape, variant, name, float(error.max()), float(error.square().mean().sqrt())))
    return found


def _cast(variant: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The inputs in the dtype that a variant's name asks for."""
    return tuple(tensor.to(torch.bfloat16) for tensor in tensors) if variant.endswith("_bf16") else tensors


@contextlib.contextmanager
def _precision(variant: str):
    """fp32 products as a variant has them: TF32 where its name says so."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if variant.endswith("_tf32") else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _inputs(shape: Shape, dtype, device, requires_grad: bool):
    def make(heads):
        tensor = torch.randn(shape.batch, shape.seqlen, heads, shape.head_dim, device=device).to(dtype)
        return tensor.requires_grad_(requires_grad)

    return make(shape.num_heads), make(shape.num_heads_kv), make(shape.num_heads_kv)


def call(variant: str, q, k, v, causal: bool, window: int = 0) -> torch.Tensor:
    """One forward of a variant on [batch, seqlen, heads, head_dim] tensors; the result in the same layout."""
    window_size = (window - 1, 0) if window else (-1, -1)
    if variant.startswith("flashpatch"):
        return attention(q, k, v, causal=causal, window_size=window_size)
    if variant == "fa3":
        from fa3_fwd_interface import flash_attn_func

        if q.requires_grad:
            raise NotImplementedError("the wheel fa3-fwd has no backward")
        return flash_attn_func(q, k, v, causal=causal, window_size=window_size)
    if window:
        raise NotImplementedError("no window without a dense mask")
    gqa = q.shape[2] != k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if variant == "eager":
        return _eager(q, k, v, causal).transpose(1, 2)
    with sdpa_kernel(SDPA_BACKENDS[variant]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa).transpose(1, 2)


def _eager(q, k, v, causal: bool) -> torch.Tensor:
    """Attention as transformers' eager_attention_forward writes it: the whole score matrix, softmax in fp32."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v


def _bench_shape(shape: Shape, dtype, variants, directions, rounds: int, device) -> list[Timing]:
    backward = "backward" in directions
    q, k, v = _inputs(shape, dtype, device, backward)
    dout = torch.randn(shape.batch, shape.seqlen, shape.num_heads, shape.head_dim, device=device).to(out_dtype(dtype))
    runs, timings = {}, []
    for variant in variants:
        for direction in directions:
            timing = Timing(shape, direction, variant)
            timings.append(timing)
            try:
                run = _runner(variant, direction, q, k, v, dout, shape)
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                run()
                torch.cuda.synchronize(device)
                timing.peak_bytes = torch.cuda.max_memory_allocated(device) - before
                runs[variant, direction] = (timing, run)
            except Exception as error:
                timing.error = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    samples = {key: [] for key in runs}
    for _ in range(rounds):
        order = list(runs)
        random.shuffle(order)
        for key in order:
            samples[key].append(milliseconds(runs[key][1], device))
    for key, (timing, _) in runs.items():
        timing.milliseconds = statistics.median(samples[key])
        timing.tflops = shape.flops(timing.direction) / timing.milliseconds / 1e9
    return timings


def _runner(variant: str, direction: str, q, k, v, dout, shape: Shape):
    if direction == "forward":
        q, k, v = (tensor.detach() for tensor in _cast(variant, q, k, v))

        def run():
            with torch.no_grad(), _precision(variant):
                call(variant, q, k, v, shape.causal, shape.window)

        return run
    with _precision(variant):
        out = call(variant, q, k, v, shape.causal, shape.window)

    def run():
        with _precision(variant):
            torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return run


def milliseconds(run, device, budget: float = 40.0) -> float:
    """Milliseconds per call: enough calls between two events to fill about `budget` milliseconds."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measure(repeats):
        start.record()
        for _ in range(repeats):
            run()
        stop.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(stop) / repeats

    return measure(max(3, min(200, int(budget / max(measure(2), 1e-3)))))


def host_cost(variants, dtype, device, calls: int = 2000) -> dict[str, float]:
    """Microseconds of host time for one call on a tiny problem, under no_grad, nothing waited for."""
    q, k, v = _inputs(Shape(1, 128, 4, 4, 64, False), dtype, device, False)
    costs = {}
    with torch.no_grad():
        for variant in variants:
            if variant in ("eager", "flashpatch_tf32", "flashpatch_bf16"):
                continue
            backend = SDPA_BACKENDS.get(variant)
            views = [tensor.transpose(1, 2) for tensor in (q, k, v)]

            def run(variant=variant, backend=backend, views=views):
                if backend is None:
                    return call(variant, q, k, v, False)
                return F.scaled_dot_product_attention(*views)

            with sdpa_kernel(backend or SDPBackend.MATH):
                for _ in range(50):
                    run()
                torch.cuda.synchronize(device)
                started = time.perf_counter()
                for _ in range(calls):
                    run()
                costs[variant] = (time.perf_counter() - started) / calls * 1e6
            torch.cuda.synchronize(device)
    return costs


def speed_table(report: dict) -> str:
    """A BenchReport as JSON holds it, as a Markdown table: TFLOP/s forward / backward of every variant, flashpatch's
    ratio to the best of the others, and its share of the ceiling."""
    cells: dict[tuple, dict[str, dict[str, float | None]]] = {}
    for timing in report["timings"]:
        shape = timing["shape"]
        key = (shape["head_dim"], "causal" if shape["causal"] else "full", shape["seqlen"])
        cells.setdefault(key, {}).setdefault(timing["variant"], {})[timing["direction"]] = timing["tflops"]
    variants, kinds = (list(dict.fromkeys(t[key] for t in report["timings"])) for key in ("variant", "direction"))
    columns = ["head_dim, mask, seqlen", *variants, "against the best of the others", "of the matrix product"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]

    def both(row: dict, figure) -> str:
        return " / ".join(figure(row, direction) for direction in kinds)

    def best(row: dict, direction: str) -> float:
        return max(
            figures[direction] or 0.0 for variant, figures in row.items() if not variant.startswith("flashpatch")
        )

    for (head_dim, mask, seqlen), row in cells.items():
        entries = [
            f"{head_dim} {mask} {seqlen}",
            *(both(row[variant], lambda r, d: f"{r[d]:.0f}" if r[d] else "-") for variant in variants),
            both(row, lambda r, d: f"{r['flashpatch'][d] / best(r, d):.2f}"),
            both(row, lambda r, d: f"{r['flashpatch'][d] / report['ceiling_tflops']:.0%}"),
        ]
        lines.append(f"| {' | '.join(entries)} |")
    return "\n".join(lines)


def accuracy_table(report: dict) -> str:
    """The accuracies of a BenchReport as JSON holds it, as a Markdown table: root mean square errors against fp64."""
    cells: dict[tuple, dict[str, dict[str, float]]] = {}
    for entry in report["accuracies"]:
        key = (entry["shape"]["head_dim"], "causal" if entry["shape"]["causal"] else "full")
        cells.setdefault(key, {}).setdefault(entry["variant"], {})[entry["tensor"]] = entry["rms"]
    variants = list(dict.fromkeys(entry["variant"] for entry in report["accuracies"]))
    lines = [f"| head_dim, mask | {' | '.join(variants)} |", "|---" * (len(variants) + 1) + "|"]
    for (head_dim, mask), row in cells.items():
        figures = [
            " / ".join(f"{row[variant][name]:.1e}" for name in ("out", "dq", "dk", "dv") if name in row[variant])
            for variant in variants
        ]
        lines.append(f"| {head_dim} {mask} | {' | '.join(figures)} |")
    return "\n".join(lines)
