"""`flashpatch verify`: the kernels of this machine, or one model."""

from __future__ import annotations

import click

from . import models, options, rendering
from .rendering import DECLINED, HOLDS, MISMATCH, MISSING, USAGE, Fault


@click.command("verify")
@click.argument("model", required=False, type=options.TEXT)
@click.option("--emulate", is_flag=True, help="Run the kernels in the CPU emulator even where there is a GPU.")
@click.option(
    "--gpu", type=options.GPU, metavar="NAME", help="The GPU whose kernels are emulated (h200, sm_90); default: A100."
)
@click.option("--require-gpu", is_flag=True, help="Exit with 3 where no GPU runs the kernels.")
@click.option("--quick", is_flag=True, help="Only the most used head dims, one size each.")
@click.option("--no-backward", is_flag=True, help="With MODEL: leave the gradients out.")
@click.option("--record", is_flag=True, help="Write tests/evidence/<gpu>.json from this run (a GPU and a checkout).")
@click.option("--demote", is_flag=True, help="Set what has no valid evidence to compiled in compat_matrix.yaml.")
@click.option(
    "--capture",
    type=options.TEXT,
    metavar="FILE",
    help="With MODEL: write the attention call that differs first (or the first) there.",
)
@click.option(
    "--layer",
    type=options.TEXT,
    metavar="MODULE",
    help="With --capture: the attention module whose call is written, by path or number.",
)
@click.option(
    "--replay", type=options.TEXT, metavar="FILE", help="Run a captured call again and compare it with the reference."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all inputs.")
@options.strict
@options.dtype("Only this dtype; with MODEL: the model's dtype.", of_kernels=True)
@options.device
@options.model_options
@options.as_json
@options.json_schema("verification.KernelReport", "model_verification.ModelReport", "captures.ReplayReport")
def command(
    model, emulate, gpu, require_gpu, quick, no_backward, record, demote, capture, layer, replay, seed, strict, dtype, device,
    as_json, **load
):  # fmt: skip
    """Measure every kernel the matrix claims for this machine against a fp64 reference, forward and backward.

    With MODEL (hub id or folder): compare the patched and the unpatched model with eager attention in fp32. Where it
    differs, the report names the first module and heads that do, says whether that module's attention call is wrong by
    itself, whether the unpatched model was finite there, and whether its input fits the dtype.

    A failing case in one small file: `flashpatch verify MODEL --capture call.safetensors` writes that attention call's
    tensors and arguments, `flashpatch verify --replay call.safetensors` runs it again, on a GPU, or in the CPU emulator
    (--gpu NAME: with that GPU's kernels).
    """
    if replay:
        others = ("model", "record", "demote", "quick", "capture", "layer", "no_backward", "seed", "strict", "dtype")
        if words := options.given(*others, *options.OF_MODELS):
            raise click.UsageError(f"--replay runs one captured call as it was; leave out {', '.join(words)}")
        raise SystemExit(_replay(replay, emulate, gpu, require_gpu, device, as_json))
    if (capture or layer) and model is None:
        raise click.UsageError("--capture and --layer are about one call of a MODEL; name it")
    if layer and not capture:
        raise click.UsageError("--layer says which call --capture writes; add --capture FILE")
    if model is None and (words := options.given("no_backward", *options.OF_MODELS)):
        raise click.UsageError(f"{', '.join(words)} goes with a MODEL; name one")
    if demote and not record:
        _demote()
        return
    if model is None:
        code = _kernels(emulate, gpu, require_gpu, quick, record, demote, seed, strict, dtype, device, as_json)
    else:
        if record or demote or quick or emulate or gpu:
            words = "--record, --demote, --quick, --emulate and --gpu are for kernels; leave them or MODEL out"
            raise click.UsageError(words)
        options.must_be_of_models(dtype)
        code = _model(model, require_gpu, strict, no_backward, capture, layer, seed, dtype, device, as_json, load)
    raise SystemExit(code)


def _kernels(emulate, gpu, require_gpu, quick, record, demote, seed, strict, dtype, device, as_json) -> int:
    from flashpatch import verification

    try:
        here = verification.device_here(device, emulate, gpu)
    except verification.NothingToRunOn as error:
        raise Fault(str(error), MISSING) from None
    except ValueError as error:
        raise Fault(str(error), USAGE) from None
    if record and here.backend != "gpu":
        raise Fault(f"--record writes what a GPU showed; this machine's kernels are {here.backend}", USAGE)
    with rendering.progress("verify") as advance:
        report = verification.verify_kernels(here, quick=quick, dtype=dtype, seed=seed, advance=advance)
    failed, passed = report.count("failed"), report.count("passed")
    left_out = [cell for cell in report.cells if cell.verdict == "not_run"]
    if failed:
        code = MISMATCH
    elif not passed or (require_gpu and report.backend != "gpu") or (strict and left_out):
        code = DECLINED
    else:
        code = HOLDS
    if as_json:
        rendering.emit_json(report, code)
    else:
        _print_kernels(report, passed, failed, left_out)
        if code == DECLINED and not passed:
            click.echo("Nothing was verified.")
        elif code == DECLINED and require_gpu and report.backend != "gpu":
            click.echo("--require-gpu: no kernel ran on a GPU.")
    if record and passed:  # of what failed there is no record, so nothing claims it
        _record(report, here)
        if demote:
            _demote()
    return code


def _print_kernels(report, passed: int, failed: int, left_out: list) -> None:
    click.echo(f"{report.device}, {report.generation}: {report.statement}")
    if not report.cells:
        return
    groups: dict[tuple, list] = {}
    for cell in report.cells:
        groups.setdefault((cell.cell.split("/")[0], cell.dtype, cell.head_dim), []).append(cell)
    rows = []
    for (kernel, dtype, head_dim), cells in groups.items():
        ran = [cell for cell in cells if cell.error is not None]
        worst = max(ran, key=lambda cell: (cell.verdict == "failed", cell.error / (cell.bound or 1.0)), default=None)
        good = sum(cell.verdict in ("passed", "compiled") for cell in cells)
        rows.append([
            kernel, dtype, head_dim, f"{good} of {len(cells)}", sum(cell.launches for cell in cells),
            worst.tensor if worst else "-", *(rendering.number(getattr(worst, name, None)) for name in
            ("error", "eager_error", "bound")),
        ])  # fmt: skip
    columns = ["kernel", "dtype", "head dim", "features", "launches", "tensor", "error", "eager's", "bound"]
    rendering.table(columns, rows)
    for case in report.cases:
        if not case.passed:
            why = case.error or "; ".join(check.message for check in case.checks if not check.passed)
            click.echo(f"FAILED {case.case} (seed {case.seed}, {len(case.cells)} cells): {why}")
    reasons = dict.fromkeys(cell.reason for cell in left_out)
    for reason in reasons:
        count = sum(cell.reason == reason for cell in left_out)
        click.echo(
            f"not run: {count} cells, for example {next(c.cell for c in left_out if c.reason == reason)}: {reason}"
        )
    verb = "compiled" if report.backend == "compiled" else "passed"
    good = report.count("compiled") if report.backend == "compiled" else passed
    click.echo(
        f"{good} of {len(report.cells)} claimed cells {verb}, {failed} failed, {len(left_out)} not run; "
        f"{len(report.cases)} cases in {rendering.seconds(report.seconds)}."
    )


def _record(report, device) -> None:
    import dataclasses

    from flashpatch import auditing, evidence

    try:
        folder = evidence.folder()
    except FileNotFoundError as error:
        raise Fault(f"--record: {error}", USAGE) from None
    here = dataclasses.asdict(auditing.environment())
    kept = ("flashpatch", "torch", "torch_cuda", "driver", "cupy", "nvrtc")
    path = evidence.record(report, device, {name: here[name] for name in kept}, folder)
    click.echo(f"wrote {path}", err=True)


def _demote() -> None:
    from flashpatch import evidence, planning, support_matrix

    try:
        folder = evidence.folder()
    except FileNotFoundError as error:
        raise Fault(f"--demote: {error}", USAGE) from None
    path = support_matrix.find("compat_matrix.yaml")
    stale = evidence.stale_cells(planning.support(), folder)
    text, changes = evidence.demote(path.read_text(encoding="utf-8"), stale)
    if changes:
        path.write_text(text, encoding="utf-8")
    for change in changes:
        click.echo(change)
    for reason in dict.fromkeys(stale.values()):
        click.echo(f"because {reason}")
    if not changes:
        click.echo("Every verified cell has valid evidence; nothing to demote.")


def _replay(file, emulate, gpu, require_gpu, device, as_json) -> int:
    from flashpatch import captures, verification

    try:
        here = verification.device_here(device, emulate, gpu)
    except verification.NothingToRunOn as error:
        if emulate or device:
            raise Fault(str(error), MISSING) from None
        here = None
    except ValueError as error:
        raise Fault(str(error), USAGE) from None
    if here is not None and here.backend == "compiled":
        here = None
    try:
        report = captures.replay(file, here)
    except captures.CaptureError as error:
        raise Fault(str(error), USAGE) from None
    if not report.holds:
        code = MISMATCH
    elif report.backend == "fallback" or (require_gpu and report.backend != "gpu"):
        code = DECLINED
    else:
        code = HOLDS
    if as_json:
        rendering.emit_json(report, code)
        return code
    shapes = ", ".join(f"{name} {shape}" for name, shape in report.shapes.items())
    click.echo(f"{report.file}: {report.module} of {report.model}, {report.dtype}, {shapes}")
    click.echo(f"asks for {' + '.join(report.features) or 'plain attention'}")
    columns = ["", "tensor", "error", "eager's", "bound", "holds", "heads beyond it"]
    rows = [
        [when, check.tensor, *map(rendering.number, (check.error, check.eager_error, check.bound)),
         "yes" if check.passed else "NO", ", ".join(map(str, check.heads))]
        for when, checks in (("captured", report.captured), ("replayed", report.replayed))
        for check in checks
    ]  # fmt: skip
    rendering.table(columns, rows)
    click.echo(f"captured on {report.captured_on}; replayed on {report.replayed_on}.")
    for decline in report.declines:
        click.echo(f"no kernel: {decline}")
    if report.error:
        click.echo(f"FAILED: {report.error}")
    elif code == MISMATCH:
        click.echo("FAILED: the replayed call is further from the reference than its dtype explains.")
    elif report.backend == "fallback":
        click.echo("Not verified: no kernel ran this call; the exact fallback's results match.")
    elif code == DECLINED:
        click.echo("--require-gpu: no kernel ran on a GPU.")
    else:
        click.echo("Holds: every tensor of the replayed call is within its bound.")
    return code


def _model(name, require_gpu, strict, no_backward, capture, layer, seed, dtype, device, as_json, load) -> int:
    from flashpatch import captures, difference_explanations, model_verification

    with models.translated():
        loaded, inputs = models.load(name, dtype=dtype, device=device, patched=False, padding="left", seed=seed, **load)
        with rendering.progress("verify") as advance:
            try:
                report = model_verification.verify_model(
                    loaded, inputs, name=name, backward=not no_backward, seed=seed, capture=capture, layer=layer,
                    advance=advance,
                )  # fmt: skip
            except (captures.CaptureError, difference_explanations.NothingToCaptureError) as error:
                raise Fault(str(error), USAGE) from None
    code, why = _model_code(report, require_gpu, strict)
    if as_json:
        rendering.emit_json(report, code)
    else:
        _print_model(report)
        click.echo(why)
    return code


def _model_code(report, require_gpu: bool, strict: bool) -> tuple[int, str]:
    """The exit code of a model's report, and the sentence that says why."""
    total = len(report.modules)
    on_gpu = report.device.startswith("cuda")
    others = sorted(report.declines - {"no_gpu", "not_dispatched"})
    if report.error and not report.declined:
        return MISMATCH, f"FAILED: the patched model does not run: {report.error}"
    if report.error:
        return DECLINED, f"Nothing was verified: {report.error}"
    if not report.holds:
        return MISMATCH, "FAILED: the patched model is further from the yardstick than its dtype explains."
    if not total:
        return DECLINED, "Nothing was verified: the model has no attention module."
    if report.undispatched:
        return (
            DECLINED,
            f"Not verified: {len(report.undispatched)} of {total} attention modules never called flashpatch.",
        )
    if require_gpu and not (on_gpu and report.launches):
        return DECLINED, "--require-gpu: no kernel ran on a GPU."
    if on_gpu and not report.launches:
        return DECLINED, f"Not verified: no kernel ran ({', '.join(others)}); the exact fallback's outputs match."
    if strict and report.declines:
        return DECLINED, f"--strict: declined ({', '.join(sorted(report.declines))})."
    if others and not on_gpu:
        return (
            DECLINED,
            f"Outputs match, but something declined for another reason than the missing GPU ({', '.join(others)}).",
        )
    return (
        HOLDS,
        f"Holds: every output and gradient compared is within its bound, {total} of {total} modules dispatched.",
    )


def _print_model(report) -> None:
    click.echo(f"{report.model}: {report.dtype}, {report.device}; compared with {report.yardstick}.")
    rows = []
    for kind, label in (("logits", "output"), ("attention", "attention outputs"), ("gradient", "gradients")):
        found = [comparison for comparison in report.comparisons if comparison.kind == kind]
        if not found:
            continue
        worst = max(found, key=lambda c: (not c.passed, c.error / c.bound if c.bound else c.error))
        good = sum(comparison.passed for comparison in found)
        numbers = (worst.error, worst.eager_error, worst.default_error, worst.bound)
        rows.append([label, f"{good} of {len(found)}", worst.name, *map(rendering.number, numbers)])
    columns = ["quantity", "hold", "closest to its bound", "patched", "eager", f"unpatched ({report.default})", "bound"]
    rendering.table(columns, rows)
    if report.eager_runs > 1:
        click.echo(
            f"eager: the largest error of {report.eager_runs} runs, the further ones with attention outputs rounded anew, "
            "because one run was not enough to tell a difference from chance."
        )
    for comparison in report.comparisons:
        if not comparison.passed:
            click.echo(f"FAILED {comparison.message}")
    if report.explanation:
        click.echo(report.explanation.text)
    if report.capture:
        click.echo(f"wrote {report.capture}; type: flashpatch verify --replay {report.capture}")
    if report.unpatched_nan:
        names = ", ".join(report.unpatched_nan[:5]) + (" ..." if len(report.unpatched_nan) > 5 else "")
        click.echo(f"The unpatched model itself is not finite in {len(report.unpatched_nan)} quantities: {names}")
    if report.tokens:
        tokens = report.tokens
        click.echo(
            f"Greedy tokens: {tokens.differing} of {tokens.positions} differ, {tokens.failing} of them where the "
            "yardstick is certain."
        )
    reasons: dict[str, int] = {}
    for module in report.modules:
        for decline in module.declines:
            reasons[decline] = reasons.get(decline, 0) + 1
    for reason, count in reasons.items():
        click.echo(f"{count} of {len(report.modules)} modules: {reason}")
    click.echo(f"{report.statement} {rendering.seconds(report.seconds)}.")
