"""`flashpatch audit`: this machine, the matrix for a GPU, and what a model would run on."""

from __future__ import annotations

from pathlib import Path

import click

from . import models, options, rendering, tracing
from .rendering import DECLINED, HOLDS, MISSING, USAGE, Fault


@click.command("audit")
@click.argument("model", required=False)
@click.option("--gpu", metavar="NAME", help='Plan for this GPU (h200, "RTX 4090", sm_90), here or not.')
@click.option("--markdown", metavar="FILE", help="Rewrite the support table between FILE's markers (-: print it).")
@tracing.options
@options.strict
@options.dtype("Only this dtype; with MODEL: the model's dtype.")
@options.device
@options.model_options
@options.as_json
@options.json_schema("auditing.AuditReport", "tracing.TraceReport", "profiles.ProfileReport")
def command(model, gpu, markdown, trace, profile, watch, strict, dtype, device, as_json, **load):
    """Show this machine's environment, what the kernels support on its GPU or on --gpu NAME, and, with MODEL (hub id
    or folder), what each attention module runs on now and would run on patched. Launches nothing, loads no weights.

    With --trace: load MODEL, run it once, and show what computed each attention and why nothing faster did. With
    --profile FILE: the same from a trace that torch's profiler wrote. --expect, --forbid and --max-declines exit with 3
    where they do not hold.
    """
    from flashpatch import auditing

    if markdown:
        _write_markdown(auditing, markdown)
        return
    if trace or profile or watch.given:
        raise SystemExit(tracing.report(model, gpu, trace, profile, watch, strict, dtype, device, as_json, load))
    models.quiet()
    try:
        with models.translated():
            report = auditing.audit(model, gpu=gpu, dtype=dtype, device=device, **load)
    except auditing.UnknownGpu as error:
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


def _write_markdown(auditing, target: str) -> None:
    from flashpatch import planning

    table = auditing.markdown(planning.support())
    if target == "-":
        click.echo(table)
        return
    path = Path(target)
    try:
        path.write_text(auditing.with_table(path.read_text(encoding="utf-8"), table), encoding="utf-8")
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
        rows = [
            [module.path, module.module, module.now, module.forward, module.backward, "; ".join(module.reasons)]
            for module in report.modules
        ]
        rendering.table(["module", "class", "now", "patched: forward", "backward", "why not"], rows, report.model)
        total = len(report.modules)
        click.echo(
            f"{sum(module.dispatched for module in report.modules)} of {total} attention modules would call flashpatch, "
            f"{sum(module.dispatched and not module.reasons for module in report.modules)} of {total} run on a kernel."
        )


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
