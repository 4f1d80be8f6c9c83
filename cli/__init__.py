"""The command line: each command parses, calls the library, and prints a table or JSON. See `flashpatch --help`."""

from __future__ import annotations

import click

from flashpatch import __version__
from flashpatch.requirements import RequirementError

COMMANDS = {
    "apply": "Patch a model, run it once, and show what each attention module ran on.",
    "audit": "Show this machine, what the kernels support on a GPU, and what a model would run on.",
    "cost": "Count what a model's attention costs at a context length: FLOPs, memory, time, money.",
    "bench": "Time attention on this GPU, beside torch's own.",
    "run": "Run an unmodified script with flashpatch enabled, and show what its attention ran on.",
    "verify": "Prove by measurement that the kernels, or a patched model, compute what they should.",
}


class _Commands(click.Group):
    """Commands are imported when they are used: `flashpatch --help` does not wait for torch."""

    def list_commands(self, context):
        return sorted(COMMANDS)

    def get_command(self, context, name):
        if name not in COMMANDS:
            return None
        from importlib import import_module

        return import_module(f".{name}", __name__).command

    def invoke(self, context):
        try:
            return super().invoke(context)
        except RequirementError as error:
            from .rendering import MISSING, Fault

            raise Fault(str(error), MISSING) from None

    def format_commands(self, context, formatter):
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashpatch")
def main():
    """Exact tiled attention for existing models; every kernel that runs and every fallback named.

    Exit codes: 0 it holds. 1 a mismatch, a NaN or a failed kernel, named. 2 wrong usage. 3 something declined under
    --strict, an attention module never called flashpatch, a budget (--expect, --forbid, --max-declines) does not hold, or
    nothing was verified. 4 the machine lacks something; the message has the line to type.
    """
