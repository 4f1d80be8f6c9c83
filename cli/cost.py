"""`flashpatch cost`: what a model's attention costs at a context length."""

from __future__ import annotations

import click

from . import charts, models, options, rendering
from .rendering import DECLINED, HOLDS

_SUFFIXES = {"k": 1024, "m": 1024**2}
MOST = 1 << 24  # tokens, the longest context asked for and searched


class _Contexts(click.ParamType):
    name = "contexts"

    def convert(self, value, parameter, context):
        if isinstance(value, tuple):
            return value
        found = []
        for word in value.split(","):
            digits, factor = word.strip(), 1
            if digits[-1:].lower() in _SUFFIXES:
                digits, factor = digits[:-1], _SUFFIXES[digits[-1].lower()]
            try:
                tokens = round(float(digits) * factor)
            except (ValueError, OverflowError):
                tokens = 0
            if not 1 <= tokens <= MOST:
                self.fail(
                    f"{word.strip()!r} is no context length; 4096, 8k, 128k or 1M is one, up to 16M", parameter, context
                )
            found.append(tokens)
        return tuple(found)


@click.command("cost")
@click.argument("model", type=options.TEXT)
@click.option(
    "--gpu", type=options.GPU, metavar="NAME", default="h200", show_default=True, help="The GPU, here or not."
)
@click.option(
    "--context", "contexts", type=_Contexts(), default="8k,128k,1M", show_default=True, metavar="LIST",
    help="Tokens of a sequence; k is 1024, M 1024 k.",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at once.")
@click.option(
    "--price-per-gpu-hour", type=click.FloatRange(min=0), metavar="PRICE", help="Adds money, in its currency."
)
@click.option("--tflops", type=click.FloatRange(min=0, min_open=True), help="Ceiling of matrix products, TFLOP/s.")
@click.option("--bandwidth", type=click.FloatRange(min=0, min_open=True), help="Ceiling of memory traffic, TB/s.")
@click.option("--memory", type=click.FloatRange(min=0, min_open=True), help="Memory of the GPU, GiB.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that MODEL brings along.")
@options.dtype("The model's dtype; default: its configuration's.")
@click.option("--html", type=options.TEXT, metavar="FILE", help="Also write it as one page with charts.")
@options.as_json
@options.json_schema("costing.CostReport")
def command(
    model, gpu, contexts, batch, price_per_gpu_hour, tflops, bandwidth, memory, trust_remote_code, dtype, html, as_json
):
    """Count what attention costs MODEL (hub id or folder) forward and backward: FLOPs, bytes, memory, time, money.

    With a flash kernel and without one, per context length, and the largest context and batch that fit. Read from the
    configuration alone: no weights, no GPU. Grouped heads, windows, chunks and layers that are no attention count as the
    model has them. Times are at what was measured on the GPU (an H200); for another one give --tflops, --bandwidth and
    --memory.

    \b
    flashpatch cost MODEL --gpu h200 --context 8k,128k,1M --price-per-gpu-hour 3.50
    """
    from flashpatch import costing

    rendering.must_have_folder("--html", html)
    models.quiet()
    with models.translated():
        report = costing.cost(
            model, gpu=gpu, contexts=contexts, batch=batch, dtype=dtype, price_per_gpu_hour=price_per_gpu_hour,
            tflops=tflops, bandwidth=bandwidth, memory=memory, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    code = DECLINED if report.undispatched or not report.layers else HOLDS
    if html:
        from . import html as pages

        values = {"summary": _summary(report), "tables": _tables(report), "sentences": _sentences(report)}
        title = f"{report.model}: what attention costs"
        pages.write(
            html, "cost.html.jinja", title=title, report=report, drawings=_drawings(report), sizes=_size, **values
        )
    if as_json:
        rendering.emit_json(report, code)
    else:
        _print(report)
    raise SystemExit(code)


def _print(report) -> None:
    click.echo(_summary(report))
    for title, columns, rows in _tables(report):
        rendering.table(columns, rows, title)
    for sentence in _sentences(report):
        click.echo(sentence)


def _summary(report) -> str:
    return (
        f"{report.model}: {report.parameters:,} parameters, {_size(report.weights_bytes)} of weights, attention in "
        f"{report.dtype}, batch {report.batch}, on {report.ceilings.gpu}."
    )


def _sentences(report) -> list[str]:
    found = [f"no attention, not counted: {count} layers of {name}" for name, count in report.other_layers.items()]
    if report.undispatched:
        found.append(f"not counted, their calls could not be seen: {', '.join(report.undispatched[:5])}")
    if report.largest_context_with_kernel is not None:
        fits = f"{_tokens(report.largest_context_with_kernel)} with a kernel, {_tokens(report.largest_context_without)} without"
        found.append(f"Largest context of one sequence that fits {_size(report.ceilings.memory_bytes)}: {fits}.")
    return [*found, report.statement, *report.notes]


def _tables(report) -> list[tuple[str, list[str], list[list]]]:
    """Title, columns and rows of each table; none without attention."""
    if not report.layers:
        return []
    calls = [
        [layer.count, layer.mask, f"{layer.num_heads_q} / {layer.num_heads_kv}",
         layer.head_dim if layer.head_dim == layer.head_dim_v else f"{layer.head_dim} / {layer.head_dim_v}",
         f"{layer.seqlen_q or 'context'} x {layer.seqlen_k or 'context'}", layer.example,
         "yes" if not layer.declines else "; ".join(layer.declines)]
        for layer in report.layers
    ]  # fmt: skip
    price = report.price_per_gpu_hour is not None
    ways = [
        [_tokens(cost.context), label,
         *(_count(value, "FLOP") for value in (way.forward_flops, way.backward_flops)),
         *map(_size, (way.forward_bytes, way.backward_bytes)),
         *map(_time, (way.forward_milliseconds, way.backward_milliseconds)),
         _size(way.working_bytes), _size(way.saved_bytes), "-" if way.largest_batch is None else way.largest_batch,
         *([rendering.figure(way.forward_price), rendering.figure(way.training_price)] if price else [])]
        for cost in report.contexts
        for label, way in (("kernel", cost.with_kernel), ("eager", cost.without))
    ]  # fmt: skip
    sequences = [
        [_tokens(cost.context), f"{cost.scores / 1e6:,.1f} M", _size(cost.score_matrix_bytes), f"{cost.visible:.1%}",
         _size(cost.kv_cache_bytes), _time(cost.decode_milliseconds), f"{cost.share_of_forward:.0%}"]
        for cost in report.contexts
    ]  # fmt: skip
    pass_columns = [
        "context", "attention", "forward", "backward", "moved fwd", "moved bwd", "time fwd", "time bwd", "memory", "kept",
        "batch fits", *(["price fwd", "price fwd+bwd"] if price else []),
    ]  # fmt: skip
    return [
        (
            "Attention calls of one forward",
            ["calls", "mask", "heads q / kv", "head dim", "rows x keys", "for example", "kernel on this GPU"],
            calls,
        ),
        ("All attention of one pass", pass_columns, ways),
        (
            "One sequence",
            ["context", "scores a head", "one matrix", "seen", "KV cache", "reading it, a token", "share of the forward's FLOPs"],
            sequences,
        ),
    ]  # fmt: skip


def _drawings(report) -> list[str]:
    """Forward time (FLOPs where nobody measured the GPU) and memory over the context, with a kernel and without."""
    timed = all(cost.with_kernel.forward_milliseconds is not None for cost in report.contexts)
    figures = {
        ("Attention's forward, ms" if timed else "Attention's forward, TFLOP", "ms" if timed else "TFLOP"): (
            (lambda way: way.forward_milliseconds) if timed else (lambda way: way.forward_flops / 1e12)
        ),
        ("Memory beside q, k, v and out, one layer, GiB", "GiB"): lambda way: way.working_bytes / 2**30,
    }
    drawn = []
    for (title, unit), value in figures.items():
        series = {
            label: [(cost.context, number) for cost in report.contexts if (number := value(getattr(cost, name)))]
            for label, name in (("with a flash kernel", "with_kernel"), ("eager", "without"))
        }
        drawn.append(charts.lines(title, "context, tokens", unit, series))
    return [drawing for drawing in drawn if drawing]


def _tokens(tokens: int) -> str:
    if tokens >= MOST:
        return f"{MOST >> 20}M or more"
    for size, suffix in ((1024**2, "M"), (1024, "k")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{suffix}"
    return str(tokens)


def _size(value: float) -> str:
    for size, unit in ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:,.4g} {unit}" if value < 1e4 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.0f} B"


def _count(value: float, unit: str) -> str:
    for size, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    if milliseconds >= 120_000:
        return f"{milliseconds / 60_000:,.0f} min"
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.3g} s"
    return f"{milliseconds:.3g} ms" if milliseconds >= 1 else f"{milliseconds * 1000:.3g} µs"
