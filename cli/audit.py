"""`flashpatch audit`: this machine, the matrix for a GPU, and what a model would run on."""

from __future__ import annotations

from pathlib import Path

import click

from . import models, options, rendering, tracing
from .rendering import DECLINED, HOLDS, MISSING, USAGE, Fault


@click.command("audit")
@click.argument("model", required=False, type=options.TEXT)
@click.option(
    "--gpu", type=options.GPU, metavar="NAME", help='Plan for this GPU (h200, "RTX 4090", sm_90), here or not.'
)
@click.option(
    "--markdown",
    type=options.TEXT,
    metavar="FILE",
    help="Rewrite the support table between FILE's markers (-: print it).",
)
@click.option("--all", "every", is_flag=True, help="With MODEL: every generation and dtype instead of one GPU.")
@click.option("--svg", type=options.TEXT, metavar="FILE", help="With --all: write the picture (-: print it).")
@click.option(
    "--html",
    type=options.TEXT,
    metavar="FILE",
    help="With --all or --trace: write the report as one HTML file (--all -: print it).",
)
@tracing.options
@options.strict
@options.dtype("Only this dtype; with MODEL: the model's dtype.", of_kernels=True)
@options.device
@options.model_options
@options.as_json
@options.json_schema("auditing.AuditReport", "auditing.GridReport", "tracing.TraceReport", "profiles.ProfileReport")
def command(model, gpu, markdown, every, html, svg, trace, profile, watch, strict, dtype, device, as_json, **load):
    """Show this machine's environment, what the kernels support on its GPU or on --gpu NAME, and, with MODEL (hub id
    or folder), what each attention module runs on now and would run on patched. Launches nothing, loads no weights.

    With --trace: load MODEL, run it once, and show what computed each attention and why nothing faster did. With
    --profile FILE: the same from a trace that torch's profiler wrote. --expect, --forbid and --max-declines exit with 3
    where they do not hold.
    """
    from flashpatch import auditing, planning

    if markdown:
        _write_markdown(markdown)
        return
    if every and (model is None or gpu or device or trace or profile):
        raise click.UsageError("--all shows MODEL on every generation: it needs MODEL, and neither --gpu nor --device")
    if svg and not every:
        raise click.UsageError("--svg draws what --all shows; add --all")
    if model is None and (words := options.given("strict", *options.OF_MODELS)):
        raise click.UsageError(f"{', '.join(words)} goes with a MODEL; name one")
    if model or profile:
        options.must_be_of_models(dtype)
    if not every and (trace or profile or watch.given):
        raise SystemExit(tracing.report(model, gpu, trace, profile, watch, strict, dtype, device, as_json, load))
    models.quiet()
    if every:
        raise SystemExit(_every(auditing, model, html, svg, strict, dtype, as_json, load))
    try:
        with models.translated():
            report = auditing.audit(model, gpu=gpu, dtype=dtype, device=device, **load)
    except planning.SwitchError as error:
        raise Fault(str(error), USAGE) from None
    except auditing.NoSuchDevice as error:
        raise Fault(str(error), MISSING) from None
    undispatched = [module for module in report.modules if not module.dispatched]
    declined = [module for module in report.modules if module.reasons]
    code = DECLINED if undispatched or (strict and declined) else HOLDS
    if as_json:
        rendering.emit_json(report, code)
    else:
        _print(report)
    raise SystemExit(code)


def _write_markdown(target: str) -> None:
    from flashpatch import planning, support_table

    table = support_table.markdown(planning.support())
    if target == "-":
        click.echo(table)
        return
    path = Path(target)
    try:
        path.write_text(support_table.with_table(path.read_text(encoding="utf-8"), table), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Fault(f"--markdown {target}: {error}", USAGE) from None


def _print(report) -> None:
    here = report.environment
    rows = [
        ["flashpatch", here.flashpatch],
        ["python", here.python],
        ["system", here.system],
        ["torch", f"{here.torch} (CUDA {here.torch_cuda})" if here.torch_cuda else f"{here.torch} (no CUDA)"],
        ["transformers", here.transformers or "not installed"],
        ["GPU", "; ".join(here.gpus) or "none"],
        ["driver", f"up to CUDA {here.driver}" if here.driver else "none"],
        ["CuPy", "; ".join(here.cupy) or "not installed"],
        ["NVRTC", here.nvrtc or "not found"],
        ["C++ compiler", here.cxx or "none"],
        ["cache", here.cache or "none, in memory only"],
        *([name, value] for name, value in here.variables.items()),
    ]
    rendering.table(["environment", ""], rows)
    for fault in here.problems:
        click.echo(f"PROBLEM {fault.code}: {fault.text}" + (f"\n  type: {fault.remedy}" if fault.remedy else ""))
    click.echo()
    click.echo(report.statement)
    if report.support:
        rows = [
            [
                row.feature,
                row.direction,
                row.dtype,
                _range(row.head_dims),
                row.status,
                row.kernel or "fallback",
                row.reason,
            ]
            for row in _merged(report.support)
        ]
        rendering.table(["feature", "direction", "dtype", "head dims", "status", "runs on", "note"], rows)
    if report.modules:
        click.echo()
        rows = [row for module in report.modules for row in _rows(module)]
        columns = ["module", "class", "now", "direction", "runs on", "tile", "shared memory", "status", "why"]
        rendering.table(columns, rows, report.model)
        total = len(report.modules)
        on_kernels = sum(module.dispatched and not module.reasons for module in report.modules)
        forward = sum(_forward_on_a_kernel(module) for module in report.modules)
        more = f" ({forward} of {total} in the forward)" if forward > on_kernels else ""
        click.echo(
            f"{sum(module.dispatched for module in report.modules)} of {total} attention modules would call flashpatch, "
            f"{on_kernels} of {total} run on a kernel{more}."
        )


def _forward_on_a_kernel(module) -> bool:
    choices = [choice for choice in module.choices if choice.direction == "forward"]
    return module.dispatched and bool(choices) and all(choice.kernel for choice in choices)


def _rows(module) -> list[list]:
    """A line for each direction of a module, and for each way its calls differ."""
    start = [module.path, module.module, module.now]
    if not module.choices:
        return [[*start, "both", "its own", "", "", "", "; ".join(module.reasons)]]
    return [[*start, choice.direction, *_choice(choice)] for choice in module.choices]


def _choice(choice) -> list[str]:
    size = rendering.kilobytes(choice.shared_memory) if choice.kernel else ""
    return [choice.kernel or "fallback", choice.tile, size, choice.status, "; ".join(choice.reasons)]


# ---- every generation and dtype ----


def _every(auditing, model: str, html, svg, strict, dtype, as_json, load) -> int:
    from . import picture

    for option, path in (("--html", html), ("--svg", svg)):
        rendering.must_have_folder(option, path)
    with models.translated():
        report = auditing.grid(model, dtype=dtype, **load)
    declined = strict and any(square.status == "fallback" for square in report.squares)
    code = DECLINED if declined or report.dispatched < report.modules else HOLDS
    printed = False
    for target, draw in ((html, picture.html), (svg, picture.svg)):
        if target:
            printed |= target == "-"
            _write(target, draw(report))
    if as_json:
        rendering.emit_json(report, code)
    elif not printed:
        _print_every(report)
    return code


def _write(target: str, text: str) -> None:
    if target == "-":
        click.echo(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Fault(f"{target} cannot be written: {error}", USAGE) from None


def _print_every(report) -> None:
    from . import picture

    rendering.table(list(picture.COLUMNS), picture.lines(report), report.model)
    click.echo(summary(report))
    for sentence in undispatched(report):
        click.echo(sentence)


def summary(report) -> str:
    """A model's attention in a sentence."""
    asked = f" asks for {', '.join(report.features)}" if report.features else ""
    dims = f", head dim {' and '.join(map(str, report.head_dims))}" if report.head_dims else ""
    return f"{report.dispatched} of {report.modules} attention modules would call flashpatch; attention{asked}{dims}."


def undispatched(report) -> list[str]:
    """Why modules of a GridReport would not call flashpatch, in sentences."""
    return [f"not dispatched: {reason.removeprefix('not_dispatched: ')}" for reason in report.reasons]


def _merged(support):
    """Rows that differ in dtype or direction only, as one."""
    import dataclasses

    for axis in ("dtype", "direction"):
        groups: dict[tuple, list] = {}
        for row in support:
            key = tuple(
                (name, tuple(value) if isinstance(value, list) else value)
                for name, value in ((f.name, getattr(row, f.name)) for f in dataclasses.fields(row))
                if name not in (axis, *(("kernel",) if axis == "direction" else ()))
            )
            groups.setdefault(key, []).append(row)
        support = [
            dataclasses.replace(
                rows[0],
                **{axis: ", ".join(dict.fromkeys(getattr(row, axis) for row in rows))},
                kernel=", ".join(dict.fromkeys(row.kernel for row in rows if row.kernel)) or None,
            )
            for rows in groups.values()
        ]
    every = {row.feature for row in support}
    alike: dict[tuple, list] = {}
    for row in support:
        alike.setdefault((row.direction, row.dtype, tuple(row.head_dims), row.status, row.reason), []).append(row)
    return [
        row
        for rows in alike.values()
        for row in ([dataclasses.replace(rows[0], feature="all")] if {r.feature for r in rows} == every else rows)
    ]


def _range(head_dims: list[int]) -> str:
    return ", ".join(map(str, head_dims))
