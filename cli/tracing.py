"""`flashpatch audit --trace` and `--profile`: their options, budgets, and how their reports are printed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps

import click

from . import models, rendering
from .options import TEXT
from .rendering import DECLINED, HOLDS, USAGE, Fault


@dataclass(frozen=True)
class Watch:
    """How to run what is traced, and the budget it must keep."""

    patch: bool
    compile: bool
    train: bool
    padding: str | None
    expect: str | None
    forbid: str | None
    max_declines: int | None
    html: str | None

    @property
    def given(self) -> bool:
        return any(value is not None and value is not False for value in vars(self).values())


def options(function):
    """The options of both, handed on as `trace`, `profile` and `watch`; --html is the command's own."""
    names = [name for name in Watch.__dataclass_fields__ if name != "html"]

    @click.option("--trace", is_flag=True, help="Load and run MODEL once and show what computed each attention.")
    @click.option(
        "--profile",
        type=TEXT,
        metavar="FILE",
        help="Classify the attention kernels of a torch profiler trace (.json, .gz).",
    )
    @click.option("--patch", is_flag=True, help="With --trace: apply flashpatch first.")
    @click.option("--compile", is_flag=True, help="With --trace: run MODEL under torch.compile.")
    @click.option("--train", is_flag=True, help="With --trace: run a backward too.")
    @click.option("--padding", type=click.Choice(["left", "right"]), help="With --trace: pad the rows of the batch.")
    @click.option(
        "--expect",
        type=TEXT,
        metavar="KINDS",
        help="Exit with 3 if any attention ran on another (flash, fused, cudnn, ...). On a CPU, flash also asks that "
        "FlashAttention could take the call on a GPU; flash_cpu is torch's CPU kernel alone.",
    )
    @click.option(
        "--forbid", type=TEXT, metavar="KINDS", help="Exit with 3 if any attention ran on these (math,eager)."
    )
    @click.option("--max-declines", type=click.IntRange(min=0), metavar="N", help="Exit with 3 above N declined calls.")
    @wraps(function)
    def wrapped(*arguments, **keywords):
        watch = Watch(html=keywords["html"], **{name: keywords.pop(name) for name in names})
        return function(*arguments, watch=watch, **keywords)

    return wrapped


def report(model, gpu, trace, profile, watch: Watch, strict, dtype, device, as_json, load) -> int:
    """Run, print, and return the exit code."""
    if profile:
        if (
            trace
            or model
            or (watch.given and watch != Watch(False, False, False, None, watch.expect, watch.forbid, None, None))
        ):
            raise Fault("--profile reads a file: leave out MODEL, --trace and what belongs to it", USAGE)
        return _profile(profile, watch, as_json)
    if not trace and watch.html:
        raise Fault("--html writes what --all or --trace shows; add one of them", USAGE)
    if not trace or not model or gpu:
        raise Fault(
            "--trace runs MODEL on this machine: type flashpatch audit MODEL --trace, without --gpu; --expect, --forbid, "
            "--max-declines, --patch, --compile, --train and --padding belong to it",
            USAGE,
        )
    _check(watch)
    return _trace(model, watch, strict, dtype, device, as_json, load)


def _check(watch: Watch) -> None:
    from flashpatch import families

    rendering.must_have_folder("--html", watch.html)
    try:
        for words in (watch.expect, watch.forbid):
            for word in words.split(",") if words else ():
                families.expand(word)
    except ValueError as error:
        raise Fault(str(error), USAGE) from None
    if watch.max_declines is not None and not watch.patch:
        raise Fault("--max-declines counts flashpatch's declines: add --patch", USAGE)


def _trace(name, watch: Watch, strict, dtype, device, as_json, load) -> int:
    from flashpatch import findings, tracing

    with models.translated():
        loaded, inputs = models.load(name, dtype=dtype, device=device, patched=False, padding=watch.padding, **load)
        cuda = next(loaded.parameters()).is_cuda
        done = tracing.run(loaded, inputs, patch=watch.patch, compile=watch.compile, train=watch.train, profile=cuda)
    done.violations = findings.violations(done, watch.expect or "", watch.forbid or "", watch.max_declines)
    if (watch.expect or watch.forbid) and any(row.device == "cpu" for row in done.rows):
        done.statements.append(findings.ON_A_CPU)
    code = DECLINED if done.violations or (strict and not done.holds) else HOLDS
    if watch.html:
        from . import html

        html.write(watch.html, "trace.html.jinja", title=f"{name}: what computed attention", report=done)
    if as_json:
        rendering.emit_json(done, code)
    else:
        _print(name, done)
    return code


def _print(name: str, done) -> None:
    from flashpatch import families
    from flashpatch.findings import grouped, grouped_violations, places, size

    rows = []
    for row in done.rows:
        held = f"{row.matrix_shape} {row.matrix_dtype}, {size(row.matrix_bytes)}" if row.matrix_bytes else "none"
        calls = "+".join(str(count) for count in (row.calls, row.recomputes, row.backward_calls) if count)
        rows.append([
            row.path, families.BY_NAME[row.family].title + (f" ({row.kernel})" if row.kernel else ""), calls,
            f"{row.q} x {row.k[2]}", row.dtype, row.mask, rendering.figure(row.milliseconds), f"{row.flops / 1e9:.3g}",
            size(row.bytes), held,
        ])  # fmt: skip
    columns = ["module", "ran on", "calls", "q x keys", "dtype", "mask", "ms", "GFLOP", "moved", "matrix in memory"]
    rendering.table(columns, rows, f"{name} on {done.device}, torch {done.torch}")
    for row_reasons in dict.fromkeys(tuple(row.refused.items()) for row in done.rows):
        for backend, text in row_reasons:
            click.echo(f"not {backend}: {text}")
    for finding, paths in grouped(done.findings):
        click.echo(f"{finding.level.upper()} {finding.code}: {places(paths)}{': ' if paths else ''}{finding.text}")
    for statement in done.statements:
        click.echo(f"Not seen: {statement}")
    if done.profile is not None:
        click.echo(f"profiler: {done.profile.verdict}")
    click.echo(
        f"{done.operators} operators watched; {done.overhead_milliseconds:.1f} of {done.wall_milliseconds:.1f} ms were the "
        "trace's own. Nothing is watched outside it."
    )
    for violation, paths in grouped_violations(done.violations):
        click.echo(f"BUDGET {violation.rule}: {places(paths)} {violation.text}")


# ---- a profiler's trace ----


def _profile(path: str, watch: Watch, as_json: bool) -> int:
    from flashpatch import families, profiles

    _check(watch)
    try:
        done = profiles.read(path)
    except profiles.NotATrace as error:
        raise Fault(str(error), USAGE) from None
    allowed, on_cpu = families.allowed(watch.expect) if watch.expect else (None, True)
    banned = set().union(*map(families.expand, watch.forbid.split(","))) if watch.forbid else set()
    # by kernels alone, SDPA's math backend and eager attention are the same
    if "sdpa_math" in banned:
        banned.add("eager")
    broken = [
        row
        for row in done.families
        if row.family in banned
        or (allowed is not None and row.family not in allowed)
        or (row.family == "sdpa_flash_cpu" and not on_cpu)
    ]
    nothing = allowed is not None and not done.families
    code = DECLINED if broken or nothing else HOLDS
    if as_json:
        rendering.emit_json(done, code)
        return code
    rows = [
        [
            row.title,
            row.verdict,
            row.calls,
            row.backward_calls,
            f"{row.milliseconds:.3f}",
            f"{row.share:.1%}",
            row.kernels[0][:80],
        ]
        for row in done.families
    ]
    rendering.table(["attention", "verdict", "forward", "backward", "ms", "of all", "longest kernel"], rows, path)
    click.echo(f"{done.verdict} {done.kernels} kernels, {done.milliseconds:.1f} ms in all.")
    for row in broken:
        why = "; what a GPU would run it does not show" if row.family == "sdpa_flash_cpu" and not on_cpu else ""
        click.echo(
            f"BUDGET {_rule(watch)}: {row.title} ran: {row.calls + row.backward_calls} times, {row.kernels[0]}{why}"
        )
    if nothing:
        click.echo(f"BUDGET {_rule(watch)}: no attention was seen at all")
    return code


def _rule(watch: Watch) -> str:
    return " ".join(
        f"--{name} {value}" for name, value in (("expect", watch.expect), ("forbid", watch.forbid)) if value
    )
