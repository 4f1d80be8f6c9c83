"""`flashpatch bench --roofline`: its options, and how its report is printed and drawn."""

from __future__ import annotations

from functools import wraps
from pathlib import Path

import click

from . import charts, models, rendering
from .options import DEVICE, TEXT, given
from .rendering import HOLDS, MISMATCH, MISSING, USAGE, Fault


def options(function):
    """The options, handed on as `roofline`: None unless it is asked for."""

    @click.option(
        "--roofline", is_flag=True, help="Measure ceilings first; every variant, counted work, what bounds it."
    )
    @click.option(
        "--model",
        type=TEXT,
        metavar="MODEL",
        help="With --roofline: the attention shapes of MODEL (its config is enough).",
    )
    @click.option("--full", is_flag=True, help="With --roofline: without a causal mask.")
    @click.option("--tokens", type=click.IntRange(min=1), default=16384, show_default=True, help="Batch times seqlen.")
    @click.option(
        "--device",
        type=DEVICE,
        metavar="DEVICE",
        help="cuda, cuda:N or, with --roofline, cpu; default: the GPU if there is one.",
    )
    @click.option("--html", type=TEXT, metavar="FILE", help="With --roofline: write the report as one HTML file.")
    @click.option("--svg", type=TEXT, metavar="FILE", help="With --roofline: write the plot as an SVG file.")
    @wraps(function)
    def wrapped(*arguments, roofline, model, full, tokens, device, html, svg, **keywords):
        if roofline:
            if words := given("odd", "features"):
                raise click.UsageError(f"--roofline and {', '.join(words)} are different measurements; leave one out")
            raise SystemExit(report(model, full, tokens, device, html, svg, **keywords))
        if words := given("model", "full", "tokens", "html", "svg"):
            raise click.UsageError(f"{', '.join(words)} goes with --roofline; add that")
        if device == "cpu":
            raise click.UsageError(
                "bench times kernels on a GPU; torch's own attention on the CPU: flashpatch bench --roofline --device cpu"
            )
        return function(*arguments, device=device, **keywords)

    return wrapped


def report(model, full, tokens, device, html, svg, *, head_dims, seqlens, rounds, dtype, as_json, **_) -> int:
    """Measure, print, draw, and return the exit code."""
    import torch

    from flashpatch import benchmarking, roofline

    for option, path in (("--html", html), ("--svg", svg)):
        rendering.must_have_folder(option, path)
    models.quiet()
    usable = torch.version.cuda is not None and torch.cuda.is_available()
    device = device or ("cuda" if usable else "cpu")
    if device != "cpu":
        take(device, "; --device cpu times torch's own on the CPU")
        device = "cuda"
    if dtype == "float8_e4m3fn":
        raise Fault("--roofline counts kernels of float16, bfloat16 and float32; leave it out for float8_e4m3fn", USAGE)
    dtype = getattr(torch, dtype or ("bfloat16" if device == "cuda" else "float32"))
    if model:
        shapes = _shapes_of(model, seqlens)
        start = max(shapes, key=lambda shape: shape.seqlen)
    else:
        shapes = [s for d in head_dims for s in roofline.shapes(seqlens, d, tokens, causal=not full)]
        start = next((shape for shape in reversed(shapes) if shape.seqlen <= 8192), shapes[0])
    with rendering.progress("bench") as advance:
        done = roofline.roofline(
            shapes, device=device, dtype=dtype, samples=rounds or benchmarking.ROUNDS, experiments=start,
            advance=lambda count, total: advance(count, total, ""),
        )  # fmt: skip
    ours = [point for point in done.points if point.variant == "flashpatch" and point.error]
    failed = [point for point in done.points if point.bound == "failed"]
    code = MISMATCH if ours or failed else HOLDS
    if svg:
        try:
            Path(svg).write_text(charts.standalone(drawings(done)[0]), encoding="utf-8")
        except OSError as error:
            raise Fault(f"--svg {svg}: {error}", USAGE) from None
    if html:
        from . import html as pages

        title = f"attention on {done.device}"
        pages.write(
            html, "roofline.html.jinja", title=title, report=done, drawings=drawings(done), words=experiment_words
        )
    if as_json:
        rendering.emit_json(done, code)
    else:
        _print(done, failed)
    return code


def take(device: str, otherwise: str = "") -> None:
    """Make a GPU the current one, or say that it is not there."""
    import torch

    index = int(device.partition(":")[2] or 0)
    if not (torch.version.cuda and torch.cuda.is_available()) or index >= torch.cuda.device_count():
        raise Fault(
            f"bench needs an NVIDIA GPU, and torch sees no {device}; `flashpatch audit` says more{otherwise}", MISSING
        )
    torch.cuda.set_device(index)


def _shapes_of(name: str, seqlens) -> list:
    from flashpatch import dummy_inputs, roofline
    from flashpatch import models as library

    with models.translated():
        loaded = library.load(name, random_weights=True, patched=False)
        shapes = roofline.shapes_of(loaded, dummy_inputs.make(loaded, batch=1, seqlen=32), seqlens)
    if not shapes:
        raise Fault(f"{name} ran no attention with one head dim for q, k and v", USAGE)
    return shapes


def drawings(done) -> list[str]:
    """The roofline of forwards, and speed over seqlen forward and backward, as SVG."""
    ran = [point for point in done.points if point.milliseconds]
    points: dict[str, list] = {}
    for point in ran:
        if point.direction == "forward":
            speed = point.flops / point.milliseconds / 1e9
            points.setdefault(point.variant, []).append((point.intensity, speed))
    plots = (
        [charts.roofline(f"Roofline, {done.device}, forward", done.ceilings.tflops, done.ceilings.gbs, points)]
        if ran
        else []
    )
    for direction in ("forward", "backward"):
        series: dict[str, list] = {}
        for point in ran:
            if point.direction == direction:
                series.setdefault(point.variant, []).append((point.shape.seqlen, point.milliseconds))
        plots.append(charts.lines(f"Milliseconds, {direction}", "seqlen", "ms", series))
    return [plot for plot in plots if plot]


def _print(done, failed) -> None:
    ceilings = done.ceilings
    click.echo(
        f"{done.device}, {done.dtype}, torch {done.torch}. Measured ceilings: {ceilings.tflops:.4g} TFLOP/s ({ceilings.product}), "
        f"copy {ceilings.copy_gbs:.4g} GB/s, read {ceilings.read_gbs:.4g} GB/s; memory bounds below {ceilings.ridge:.3g} FLOPs per byte."
    )
    rows = []
    for point in done.points:
        shape = point.shape
        figures = [point.milliseconds, point.tflops, point.gbs]
        memory = "-" if point.peak_bytes is None else f"{point.peak_bytes / 2**20:.0f} MiB"
        share = "-" if point.fraction is None else f"{point.fraction:.0%}"
        rows.append([
            shape.head_dim, shape.seqlen, point.direction, point.variant, *map(rendering.figure, figures),
            memory, rendering.figure(point.intensity), point.bound, share, point.error,
        ])  # fmt: skip
    columns = [
        "head dim", "seqlen", "direction", "variant", "ms", "TFLOP/s", "GB/s", "peak", "FLOP/byte", "bound by", "of it", "error",
    ]  # fmt: skip
    rendering.table(columns, rows)
    for item in done.experiments:
        click.echo(experiment_words(item))
    for point in failed:
        click.echo(
            f"FAILED measurement: {point.variant} {point.direction} at seqlen {point.shape.seqlen} shows {point.fraction:.0%} of a "
            "measured ceiling: the time, the ceiling, or the count (data that stays in a cache) is wrong for it"
        )


def experiment_words(item) -> str:
    """An Experiment in a sentence."""
    if item.error:
        return f"{item.variant}: no experiment: {item.error}"
    if item.to_flops is None:
        return f"{item.variant}: the experiment's calls do not tell FLOPs from bytes"
    verdict = "agrees" if item.agrees else f"the roofline says {item.roofline or 'nothing'}"
    return (
        f"{item.variant}: time ~ FLOPs^{item.to_flops:.2f} * bytes^{item.to_bytes:.2f} (twice the head_dim: "
        f"x{item.milliseconds[1] / item.milliseconds[0]:.2f}; {item.more_bytes_by}: x{item.milliseconds[2] / item.milliseconds[0]:.2f}), "
        f"so {item.bound}-bound; {verdict}".replace("neither-bound", "bound by neither")
    )
