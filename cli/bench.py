"""`flashpatch bench`: how fast attention runs on this GPU, beside torch's own."""

from __future__ import annotations

import click

from . import options, rendering, roofline
from .rendering import HOLDS, MISMATCH, USAGE, Fault


def _numbers(context, parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        needed = "whole numbers above 0 with commas between them are needed, such as 512,2048"
        raise click.BadParameter(f"{value!r}: {needed}")
    return numbers


@click.command("bench")
@click.option("--head-dims", default="64,128", show_default=True, callback=_numbers, help="Head dims to time.")
@click.option("--seqlens", default="512,2048,8192", show_default=True, callback=_numbers, help="Sequence lengths.")
@click.option("--odd", is_flag=True, help="Instead: one sequence with few key heads, and windows.")
@click.option(
    "--eager",
    is_flag=True,
    help="Time eager attention too, which holds the whole score matrix; with --features FlexAttention as well.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Medians over this many.  [default: 5, with --features 20]")
@options.dtype("float16, bfloat16 (default), float32 or, forward only, float8_e4m3fn.", of_kernels=True)
@click.option("--features", is_flag=True, help="Time instead what each feature costs over the plain kernel.")
@roofline.options
@options.as_json
@options.json_schema("benchmarking.BenchReport", "feature_costs.CostReport", "roofline.RooflineReport")
def command(head_dims, seqlens, odd, eager, rounds, dtype, features, device, as_json):
    """Time flashpatch beside SDPA's backends, and FlashAttention-3 where the wheel fa3-fwd is installed, forward and
    backward: 16384 tokens, heads times head dim 2048.

    TFLOP/s count the FlashAttention papers' way. The variants run in random order in every round. With --features every
    kernel is timed with every feature it has, at four rows of 4096 tokens, per score that is visible.
    """
    import torch

    from flashpatch import benchmarking

    if odd and (words := options.given("head_dims", "seqlens", "features")):
        raise click.UsageError(f"--odd has shapes of its own; leave out {', '.join(words)}")
    if features and (words := options.given("seqlens")):
        raise click.UsageError(f"--features times four rows of 4096 tokens; leave out {', '.join(words)}")
    roofline.take(device or "cuda")
    taken = ("float16", "bfloat16", "float32", *(() if features else ("float8_e4m3fn",)))
    if dtype not in (None, *taken):
        raise Fault(f"--dtype {dtype}: bench{' --features' if features else ''} times {', '.join(taken)}", USAGE)
    if features:
        _time_features(head_dims, rounds, eager, getattr(torch, dtype or "bfloat16"), as_json)
    peers = benchmarking.peers(getattr(torch, dtype or "bfloat16"))
    variants = ("flashpatch", *peers, *(("eager",) if eager else ()))
    shapes = benchmarking.odd_shapes() if odd else benchmarking.standard_shapes(head_dims, seqlens)
    with rendering.progress("bench") as advance:
        report = benchmarking.bench(
            shapes, dtype=getattr(torch, dtype or "bfloat16"), variants=variants, rounds=rounds or benchmarking.ROUNDS,
            directions=benchmarking.directions(getattr(torch, dtype or "bfloat16")),
            advance=lambda done, total: advance(done, total, ""),
        )  # fmt: skip
    failed = [timing for timing in report.timings if timing.variant == "flashpatch" and timing.error]
    code = MISMATCH if failed else HOLDS
    if as_json:
        rendering.emit_json(report, code)
    else:
        _print(report, variants)
    raise SystemExit(code)


def _time_features(head_dims, rounds, eager, dtype, as_json) -> None:
    from flashpatch import feature_costs

    with rendering.progress("bench") as advance:
        report = feature_costs.measure(
            head_dims=head_dims, rounds=rounds or feature_costs.ROUNDS, dtype=dtype,
            peers=tuple(feature_costs.PEERS) if eager else ("sdpa_efficient",),
            advance=lambda done, total: advance(done, total, ""),
        )  # fmt: skip
    failed = [cost for cost in report.costs if cost.kernel not in feature_costs.PEERS and cost.error]
    code = MISMATCH if failed else HOLDS
    if as_json:
        rendering.emit_json(report, code)
    else:
        click.echo(f"{report.gpu}, {report.dtype}, {report.batch} x {report.seqlen} tokens, width {report.width}")
        rows = [
            [c.direction, c.head_dim, c.feature, c.kernel, *("-" if x is None else f"{x:.{d}f}" for x, d in figures)]
            for c in report.costs
            for figures in [((c.milliseconds, 3), (c.tflops, 0), (c.cost, 2))]
        ]
        rendering.table(["direction", "head dim", "feature", "kernel", "milliseconds", "TFLOP/s", "cost"], rows)
        for cost in failed:
            click.echo(f"{cost.kernel} with {cost.feature} did not run: {cost.error}")
    raise SystemExit(code)


def _print(report, variants) -> None:
    ceiling = f"a matrix product reaches {report.ceiling_tflops:.0f}"
    click.echo(f"{report.gpu}, {report.dtype}: TFLOP/s (milliseconds); {ceiling}")
    rows: dict[tuple, dict[str, str]] = {}
    for timing in report.timings:
        shape = timing.shape
        mask = f"window {shape.window}" if shape.window else "causal" if shape.causal else "full"
        key = (timing.direction, shape.head_dim, mask, shape.seqlen)
        figure = "-" if timing.milliseconds is None else f"{timing.tflops:.0f} ({timing.milliseconds:.3f})"
        rows.setdefault(key, {})[timing.variant] = figure
    columns = ["direction", "head dim", "mask", "seqlen", *variants]
    rendering.table(columns, [[*key, *(row[variant] for variant in variants)] for key, row in rows.items()])
    for timing in report.timings:
        if timing.error:
            click.echo(f"{timing.variant} {timing.direction} did not run: {timing.error}")
    costs = ", ".join(f"{variant} {cost:.0f}" for variant, cost in report.host_microseconds.items())
    click.echo(f"host time of one forward call, microseconds: {costs}")
