"""Options that several commands share."""

from __future__ import annotations

import json
from functools import reduce

import click
from click.core import ParameterSource

DTYPES = {
    "float16": "float16", "fp16": "float16", "half": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float32": "float32", "fp32": "float32",
    "float64": "float64", "fp64": "float64",
}  # fmt: skip
# Of kernels, not of models: their q, k and v never have it.
EIGHT_BITS = {"float8_e4m3fn": "float8_e4m3fn", "fp8": "float8_e4m3fn"}


class _Text(click.ParamType):
    """Text that is there: an empty shell variable is not to pass for an option that was left out."""

    name = "text"

    def convert(self, value, parameter, context):
        if not value:
            self.fail("it is empty; give a value, or leave it out", parameter, context)
        return value


class _Gpu(click.ParamType):
    name = "gpu"

    def convert(self, value, parameter, context):
        from flashpatch import planning

        try:
            planning.gpu(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)
        return value


TEXT = _Text()
GPU = _Gpu()


def given(*names: str) -> list[str]:
    """Which of these parameters the command line has, as they are typed."""
    context = click.get_current_context()
    return [
        parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
    ]


class _Dtype(click.ParamType):
    name = "dtype"

    def __init__(self, names: dict[str, str]):
        self.names = names

    def convert(self, value, parameter, context):
        if value not in self.names:
            self.fail(f"{value!r} is not one of {', '.join(self.names)}", parameter, context)
        return self.names[value]


def dtype(help: str, of_kernels: bool = False):
    """`of_kernels`: with the dtypes that models do not have."""
    names = {**DTYPES, **EIGHT_BITS} if of_kernels else DTYPES
    return click.option("--dtype", type=_Dtype(names), metavar="DTYPE", help=f"{help} [{', '.join(names)}]")


def must_be_of_models(dtype: str | None) -> None:
    """Refuse a dtype of kernels alone where a model is named."""
    if dtype in EIGHT_BITS.values():
        raise click.UsageError(
            f"--dtype {dtype} is about kernels alone: a model's q, k and v never have it; leave MODEL out"
        )


class _Device(click.ParamType):
    name = "device"

    def convert(self, value, parameter, context):
        kind, colon, index = value.partition(":")
        if kind not in ("cuda", "cpu") or (colon and not index.isdigit()):
            self.fail(f"{value!r} is not a device; cpu, cuda or cuda:N is needed", parameter, context)
        return value


DEVICE = _Device()
device = click.option(
    "--device", type=DEVICE, metavar="DEVICE", help="cpu, cuda or cuda:N; default: the GPU if there is one."
)
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of tables.")
strict = click.option("--strict", is_flag=True, help="Exit with 3 if anything declined to run on a kernel.")


def json_schema(*reports: str, what: str = "--json prints"):
    """`--json-schema`: print the schema of what `--json` prints, and leave. Reports are "module.Class"."""

    def show(context, parameter, value):
        if not value or context.resilient_parsing:
            return
        from importlib import import_module

        from flashpatch.requirements import check_torch

        from . import schema

        check_torch()
        kinds = []
        for report in reports:
            module, _, name = report.rpartition(".")
            kinds.append(schema.json_schema(getattr(import_module(f"flashpatch.{module}"), name)))
        click.echo(json.dumps(kinds[0] if len(kinds) == 1 else {"oneOf": kinds}, indent=2))
        context.exit(0)

    help = f"Print the JSON Schema of what {what}."
    return click.option("--json-schema", is_flag=True, is_eager=True, expose_value=False, callback=show, help=help)


OF_MODELS = ("gguf_file", "trust_remote_code", "allow_pickle", "random_weights", "seqlen", "batch")


def model_options(function):
    """What it takes to load a model; `flashpatch.models.load` has the same words."""
    return reduce(
        lambda wrapped, option: option(wrapped),
        (
            click.option(
                "--gguf-file", type=TEXT, metavar="NAME", help="Load the weights from this GGUF file of MODEL."
            ),
            click.option("--trust-remote-code", is_flag=True, help="Run Python code that MODEL brings along."),
            click.option("--allow-pickle", is_flag=True, help="Accept weights in pickles, which can run any code."),
            click.option("--random-weights", is_flag=True, help="Build MODEL from its config alone, weights random."),
            click.option(
                "--seqlen",
                type=click.IntRange(min=1),
                default=128,
                show_default=True,
                help="Tokens in each row of MODEL's input.",
            ),
            click.option(
                "--batch", type=click.IntRange(min=1), default=2, show_default=True, help="Rows of MODEL's input."
            ),
        ),
        function,
    )
