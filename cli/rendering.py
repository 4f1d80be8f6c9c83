"""What every command prints with: tables, JSON, progress, and errors for people."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import click

HOLDS, MISMATCH, USAGE, DECLINED, MISSING = 0, 1, 2, 3, 4
SECONDS_BETWEEN_LINES = 30


class Fault(click.ClickException):
    """An error for people: what is wrong and what to type, without a traceback, with its exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code

    def show(self, file=None):
        click.echo(f"flashpatch: {self.format_message()}", file=file or sys.stderr)


def must_have_folder(option: str, path: str | None) -> None:
    """Before long work: where its result is to be written."""
    if path and path != "-" and not Path(path).resolve().parent.is_dir():
        raise Fault(f"{option} {path}: there is no folder {Path(path).resolve().parent}", USAGE)


def table(columns: list[str], rows: list[list], title: str = "", stream=None) -> None:
    """A table on stdout or `stream`: drawn on a terminal, otherwise aligned columns that `grep` and `cut` can read,
    never wrapped."""
    stream = stream or sys.stdout
    cells = [[str(cell) for cell in row] for row in rows]
    if stream.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(*columns, title=title or None, title_justify="left")
        for row in cells:
            drawn.add_row(*(Text(cell) for cell in row))
        Console(file=stream).print(drawn)
        return
    if title:
        click.echo(title, file=stream)
    widths = [max(len(row[i]) for row in [columns, *cells]) for i in range(len(columns))]
    for row in [columns, *cells]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), file=stream)


def emit_json(report, exit_code: int) -> None:
    """The report as one JSON document on stdout, its own exit code among the keys."""
    click.echo(json_text(report, exit_code))


def json_text(report, exit_code: int) -> str:
    return json.dumps({**document(report), "exit_code": exit_code}, indent=2, allow_nan=False)


def document(value):
    """A dataclass as what JSON holds: numbers that JSON has no word for become null."""
    if dataclasses.is_dataclass(value):
        return {field.name: document(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): document(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [document(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def progress(label: str, silent: bool = False):
    """A callable `advance(done, total, text)` that keeps one line on stderr; where that is no terminal (a log), it writes one
    every half minute."""
    if silent:
        yield lambda done, total, text="": None
        return
    if not sys.stderr.isatty():
        said = time.monotonic()

        def say(done, total, text=""):
            nonlocal said
            if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                click.echo(f"{label} {text}".strip() + f": {done} of {total}", err=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)

        def advance(done, total, text=""):
            bar.update(task, completed=done, total=total, description=f"{label} {text}".strip())

        yield advance


def number(value: float | None) -> str:
    """A measured number in a column."""
    if value is None:
        return "-"
    return f"{value:.2e}" if math.isfinite(value) else str(value)


def figure(value: float | None) -> str:
    """A number in a column for reading: three figures or the whole ones, never an exponent."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else format(Decimal(f"{value:.3g}"), "f")


def kilobytes(value: int) -> str:
    """A size of shared memory in a column."""
    return f"{value / 1024:.1f} KB"


def seconds(value: float) -> str:
    """A duration in a column."""
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"
