"""`flashpatch apply`: patch a model, run it once, and show what each attention module ran on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import click

from . import models, options, rendering
from .rendering import DECLINED, HOLDS, MISMATCH, USAGE, Fault


@dataclass(frozen=True)
class Module:
    """One attention module after one run."""

    path: Annotated[str, "the module's name in the model"]
    module: Annotated[str, "its class"]
    dispatched: Annotated[bool, "it called flashpatch"]
    launches: Annotated[dict[str, int], "kernel -> calls that ran on it"]
    backends: Annotated[dict[str, str], "kernel -> gpu or emulated"]
    statuses: Annotated[dict[str, str], "kernel -> the matrix's word: verified or compiled"]
    calls: Annotated[int, "forward calls counted"]
    recomputes: Annotated[int, "forwards run again inside a backward (activation checkpointing)"]
    copies: Annotated[int, "inputs copied because kernels cannot read their layout or head dim"]
    padded: Annotated[dict[str, int], "which head dims were padded with zeros to what -> calls"]
    mask_materialised: Annotated[int, "dense masks made"]
    declines: Annotated[list[str], "why calls ran without a kernel, as code: text"]


@dataclass(frozen=True)
class ApplyReport:
    """`flashpatch apply MODEL`."""

    model: Annotated[str, "hub id or folder"]
    model_class: Annotated[str, "its class"]
    dtype: Annotated[str, "dtype of its weights"]
    device: Annotated[str, "torch device it ran on"]
    directions: Annotated[list[str], "forward, and backward with --train"]
    modules: Annotated[list[Module], "every attention module"]
    dispatched: Annotated[int, "modules that called flashpatch"]
    on_kernels: Annotated[int, "modules whose every call ran on a kernel"]
    mask_materialised: Annotated[int, "masks that the model's own code computed with, made dense for it"]
    not_finite: Annotated[bool, "the output, or a gradient, holds NaN or infinity"]
    saved: Annotated[str | None, "folder written by --save"]


@click.command("apply")
@click.argument("model", type=options.TEXT)
@click.option("--train", is_flag=True, help="Run a backward too.")
@click.option(
    "--save", type=options.TEXT, metavar="DIR", help="Write a copy that flashpatch.load(DIR) brings up patched."
)
@options.strict
@options.dtype("dtype of the weights; default: as they are stored.")
@options.device
@options.model_options
@options.as_json
@options.json_schema("cli.apply.ApplyReport")
def command(model, train, save, strict, dtype, device, as_json, **load):
    """Load MODEL (hub id or folder), patch it, run one forward on random inputs, and show what each attention module
    ran on. This process only: MODEL is not changed, and nothing stays patched; --save DIR writes a patched copy.
    """
    from pathlib import Path

    if save and Path(save).is_file():
        raise Fault(f"--save {save}: that is a file; a folder is needed", USAGE)
    if save and Path(save).exists() and Path(save).resolve() == Path(model).resolve():
        raise Fault(f"--save {save}: that is MODEL itself, which would be overwritten; name another folder", USAGE)
    with models.translated():
        loaded, inputs = models.load(model, dtype=dtype, device=device, patched=False, **load)
        report = _run(model, loaded, inputs, train, save)
    declined = [module for module in report.modules if module.declines]
    if report.not_finite:
        code = MISMATCH
    elif not report.modules or report.dispatched < len(report.modules) or (strict and declined):
        code = DECLINED
    else:
        code = HOLDS
    if as_json:
        rendering.emit_json(report, code)
    else:
        _print(report)
    raise SystemExit(code)


def _run(name: str, model, inputs: dict, train: bool, save: str | None) -> ApplyReport:
    from flashpatch import models as library
    from flashpatch import patcher

    parameter = next(iter(model.parameters()))
    with patcher.apply(model) as patch:
        model.train(train)
        tensors = _forward(model, inputs, train)
        finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
        done = patch.report
    if save:
        library.save(model, save, source=name)
    modules = [
        Module(
            row.path, row.class_name, row.dispatched, row.launches, row.backends, row.statuses, row.calls,
            row.recomputes, row.copies, row.padded, row.mask_materialised, [f"{code}: {text}" for code, text in row.reasons],
        )
        for row in done.rows
    ]  # fmt: skip
    return ApplyReport(
        name, type(model).__name__, str(parameter.dtype).removeprefix("torch."), str(parameter.device),
        ["forward", "backward"] if train else ["forward"], modules, done.dispatched,
        sum(module.dispatched and not module.declines for module in modules), done.mask_materialised, not finite, save,
    )  # fmt: skip


def _forward(model, inputs: dict, train: bool) -> list:
    """Every floating-point output of one forward, and with `train` every gradient of its sum."""
    import torch

    with torch.set_grad_enabled(train):
        output = model(**inputs)
    values = output.values() if hasattr(output, "values") else output
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if train:
        sum(tensor.float().mean() for tensor in tensors if tensor.requires_grad).backward()
        tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
    return tensors


def _print(report: ApplyReport) -> None:
    rows = []
    for module in report.modules:
        kernels = ", ".join(
            f"{kernel} ({module.statuses[kernel]}{'' if module.backends[kernel] == 'gpu' else ', emulated'})"
            for kernel in module.launches
        )
        ran = kernels or ("fallback" if module.dispatched else "its own")
        rows.append(
            [module.path, module.module, "yes" if module.dispatched else "NO", ran, module.calls, *_rest(module)]
        )
    columns = ["module", "class", "dispatched", "ran on", "calls", "copies", "why not a kernel"]
    rendering.table(columns, rows, f"{report.model}: {report.model_class}, {report.dtype}, {report.device}")
    total = len(report.modules)
    if report.mask_materialised:
        click.echo(f"{report.mask_materialised} masks were made dense because the model's own code computes with them.")
    if report.not_finite:
        click.echo(
            f"FAILED: the {' or a gradient of the '.join(['output', 'model'][: len(report.directions)])} is not finite."
        )
    click.echo(
        f"{report.dispatched} of {total} attention modules called flashpatch, {report.on_kernels} of {total} ran on a "
        f"kernel ({' and '.join(report.directions)})."
    )
    if report.saved:
        click.echo(f"Wrote {report.saved}: flashpatch.load({report.saved!r}) comes up patched.")


def _rest(module: Module) -> list:
    return ["; ".join([str(module.copies), *module.padded]), "; ".join(module.declines)]
