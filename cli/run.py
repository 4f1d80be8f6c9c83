"""`flashpatch run`: an unmodified script with flashpatch enabled, and what ran when it ends."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from . import options, rendering
from .rendering import MISSING, USAGE, Fault


@dataclass(frozen=True)
class Layer:
    """What one attention module of the script's models did."""

    path: Annotated[str, "the module's name in its model, or flashpatch.attention for direct calls"]
    calls: Annotated[int, "forward calls counted"]
    recomputes: Annotated[int, "forwards run again inside a backward (activation checkpointing)"]
    launches: Annotated[dict[str, int], "kernel -> calls that ran on it"]
    declines: Annotated[dict[str, int], "why calls ran without a kernel, as code: text -> times"]
    copies: Annotated[int, "inputs copied because kernels cannot read their layout or head dim"]
    padded: Annotated[dict[str, int], "which head dims were padded with zeros to what -> calls"]


@dataclass(frozen=True)
class RunReport:
    """`flashpatch run SCRIPT`, written by --report."""

    script: Annotated[str, "what ran"]
    layers: Annotated[list[Layer], "every attention module that called flashpatch"]
    honoured: Annotated[list[str], "models that asked for another implementation by name and kept it"]
    unreachable: Annotated[list[str], "models that compute attention themselves and were left as they are"]


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.option("--override", is_flag=True, help="Also replace implementations that the script asks for by name.")
@click.option("--strict", is_flag=True, help="Make every decline an error inside the script.")
@click.option(
    "--report", "report_file", type=options.TEXT, metavar="FILE", help="Also write the report as JSON to FILE."
)
@options.json_schema("cli.run.RunReport", what="--report writes")
@click.argument("script", type=options.TEXT)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(as_module, override, strict, report_file, script, arguments):
    """Run SCRIPT with its ARGUMENTS as python would, every transformers model it builds on flashpatch, and print what
    each attention module ran on when it ends (to stderr). The exit code is the script's.

    Processes that SCRIPT starts are not covered; with a launcher, start this command in each of them:
    torchrun --no-python flashpatch run train.py
    """
    if script.startswith("-"):
        raise click.UsageError(f"run has no option {script}; options of SCRIPT come after it")
    if as_module:
        sys.path[0] = os.getcwd()
        _must_exist(script)
    elif not Path(script).is_file() and not Path(script, "__main__.py").is_file():
        raise Fault(f"there is no file {script}; for an installed module type: flashpatch run -m {script}", USAGE)
    rendering.must_have_folder("--report", report_file)
    from flashpatch import enabling, interface

    if reason := interface.unavailable():
        raise Fault(reason, MISSING)
    if strict:
        os.environ["FLASHPATCH_STRICT"] = "1"
    enabling.enable(override)
    code = 1
    try:
        code = _run(script, arguments, as_module)
    finally:
        report = _report(script)
        _print(report)
        if report_file:
            Path(report_file).write_text(rendering.json_text(report, code), encoding="utf-8")
    raise SystemExit(code)


def _run(script: str, arguments: tuple[str, ...], as_module: bool) -> int:
    """What `python SCRIPT ARGUMENTS` (or `python -m`) does, in this process. Returns the exit code."""
    sys.argv = [script, *arguments]
    if not as_module:
        path = Path(script).resolve()
        sys.path[0] = str(path if path.is_dir() else path.parent)
    try:
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return exit.code or 0
        click.echo(exit.code, err=True)
        return 1
    except (Exception, KeyboardInterrupt) as error:
        error = error.with_traceback(_beyond_runpy(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _must_exist(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # its package imports something that is missing
        found = None
    if found is None:
        raise Fault(f"there is no module {module}; for a file type: flashpatch run FILE", USAGE)


def _beyond_runpy(trace):
    """A traceback as python shows it: from the script on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _report(script: str) -> RunReport:
    from flashpatch import counting, enabling

    layers = [
        Layer(
            counts.name, counts.calls, counts.recomputes, dict(counts.launches),
            {f"{reason}: {text}": times for (reason, text), times in counts.declines.items()}, counts.copies,
            dict(counts.padded),
        )
        for counts in counting.layers
        if counts.calls or counts.recomputes
    ]  # fmt: skip
    honoured = [f"{name} ({implementation})" for name, implementation in enabling.honoured()]
    return RunReport(script, layers, honoured, sorted(enabling.unreachable()))


def _print(report: RunReport) -> None:
    rows = [
        [
            layer.path,
            layer.calls,
            layer.recomputes or "-",
            "; ".join(
                [", ".join(f"{kernel} x {times}" for kernel, times in layer.launches.items()) or "-", *layer.padded]
            ),
            "; ".join(f"{reason} x {times}" for reason, times in layer.declines.items()) or "-",
        ]
        for layer in report.layers
    ]
    click.echo("", err=True)
    if rows:
        columns = ["attention module", "calls", "recomputes", "kernels", "declined"]
        rendering.table(columns, rows, f"flashpatch: what {report.script} ran", stream=sys.stderr)
    else:
        click.echo(f"flashpatch: no attention of {report.script} came to flashpatch.", err=True)
    for text, names in (
        ("kept the implementation it asked for by name (--override replaces it)", report.honoured),
        ("computes attention itself and was left as it is", report.unreachable),
    ):
        for name in names:
            click.echo(f"flashpatch: {name} {text}.", err=True)
