"""Every transformers model type that dispatches attention: built small, patched, and compared with eager attention.

    python tests/model_table.py                 every type that tests/evidence/models.json has no row for yet
    python tests/model_table.py llama t5        these types, anew
    python tests/model_table.py --again differs these outcomes, anew (several: --again differs,unbuilt)
    python tests/model_table.py --emulate       these types' kernels: of the types that are equal the EMULATED quickest, in bf16 and
                                                strict (a decline is an error), forward and backward on the CPU emulator
    python tests/model_table.py --page          write tests/evidence/models.md, the table for people

One process per type with a time and a memory limit, so a crash costs one row. A row says what was compared: outputs,
each attention module's output and every parameter's gradient (`model_verification`: fp32 against eager in fp64), for a
plain batch, batches padded left and right, packed documents, and greedy generation. Outcomes:

    equal      at least one attention module dispatched and everything compared holds
    declined   nothing dispatched, or the patched model refuses; the reason is the row's
    unbuilt    no small model or no inputs for it are known; the reason is the row's
    differs    something compared does not hold
"""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent
TABLE = ROOT / "evidence" / "models.json"
SECONDS, MEMORY = 150, 10 << 30
LENGTH = 12
NEAR = 2.0  # of a bound on rounding
EMULATED = 60  # types whose kernels run too
MOST_PARAMETERS = 20_000_000  # of a model whose widths cannot be made small
OUTCOMES = ("equal", "declined", "unbuilt", "differs")

# What differs by intent: (type, check) -> why. The only other thing than "equal" that a check may say.
EXPLAINED = {
    ("pe_video", "left"): "as pe_audio",
    (
        "pe_audio",
        "left",
    ): "its text is pooled at the first token, which is padding here; in a sliding window a padding row "
    "sees no key, and gives 0 where eager gives the mean over all values",
    ("blt", "left"): (
        _BLT
        := "its patches mix padding with text: with eager attention too other padding tokens change the logits of the "
        "text; a padding row that sees no key is 0 here and the mean over all values there, and with that row set to 0 eager is "
        "equal"
    ),
    ("blt", "generate"): _BLT,
    ("videoprism", "left"): "as videoprism_text_model, which is a part of it",
    (
        "videoprism_text_model",
        "left",
    ): "it appends a token, so padding cannot be told apart in its output; padding rows that "
    "see no key give 0 where eager gives the mean over all values",
}


# Why there is no small model, where the exception does not say it.
_SESSION = "its forward takes a video session that it changes, so that a second run is another computation"
_GENERATES = "its model has no forward, it only generates; its parts are rows of their own"
BECAUSE = {
    "edgetam": "its default config fetches a file from the hub",
    "edgetam_video": _SESSION,
    "esmfold2": "its inputs are the features of a protein with its atoms, which nothing here makes",
    "qwen2_5_omni": _GENERATES,
    "qwen2_5_omni_token2wav": "it starts from noise drawn in its forward; its two parts are rows of their own",
    "qwen3_omni_moe": _GENERATES,
    "sam2_video": _SESSION,
    "sam3_geometry_encoder": "it runs for boxes, which need torchvision's compiled roi_align",
    "sam3_lite_text_geometry_encoder": "it runs for boxes, which need torchvision's compiled roi_align",
    "sam3_tracker_video": _SESSION,
    "sapiens2_head": "it configures a head of convolutions; no model class takes it",
}


# ---- one type ----


class Unbuilt(Exception):
    """No small model, or no inputs on which it runs with eager attention."""


def row_of(model_type: str, *, kernels: bool = False) -> dict:
    """Build one type, compare it every way it can be compared, and say what was seen."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    started = time.perf_counter()
    try:
        model, inputs, how = built(model_type)
    except Unbuilt as failure:
        return {"outcome": "unbuilt", "reason": BECAUSE.get(model_type) or str(failure)}
    row = {"model": type(model).__name__, "built": how, "dispatched": 0, "modules": 0, "checks": {}}
    compare(model_type, model, inputs, row)
    if row.pop("worst", 0.0) > NEAR or row["outcome"] != "differs":
        row["seconds"] = round(time.perf_counter() - started, 1)
        return row
    # Just beyond a bound on rounding: a fault shows with any weights, bad luck does not.
    first, misses = row, []
    for seed in (1, 2, 3):
        model, inputs, how = built(model_type, seed)
        row = {"model": type(model).__name__, "built": how, "dispatched": 0, "modules": 0, "checks": {}}
        compare(model_type, model, inputs, row)
        row.pop("worst", None)
        misses.append(row["outcome"] != "equal")
    if sum(misses) > 1:
        return first
    row["near_miss"] = [verdict for verdict in first["checks"].values() if verdict.startswith("differs")]
    row["outcome"] = "equal"
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def built(model_type: str, seed: int = 0):
    """(model, inputs, how) on which eager attention runs.

    A part that has no model of its own, or none that runs, comes in the model it is a part of.
    """
    import shrinking

    try:
        return _built(model_type, seed)
    except Unbuilt:
        for whole in shrinking.wholes(model_type):
            model, inputs, how = _built(whole, seed)
            return model, inputs, f"{how}, {PART}{whole}"
        raise


NOT_RUN = "no forward has brought it to flashpatch"
NO_CLASS, PART = "no model class", "of which it is a part: "


def _built(model_type: str, seed: int):
    """The first way of shrinking and class that does."""
    import shrinking

    from flashpatch import attention_modules

    failures, without = [], None
    for widths in (True, False):
        try:
            config = shrinking.shrunk(model_type, widths)
        except Exception as failure:
            failures.append(f"config: {_brief(failure)}")
            continue
        for cls in shrinking.model_classes(model_type, config):
            how = f"{cls.__name__}, {'small widths' if widths else 'default widths'}"
            try:
                if not widths and shrinking.parameters(cls, config) > MOST_PARAMETERS:
                    continue
                model = shrinking.build(cls, copy.deepcopy(config), seed)
                _eager(model)
                found = model, _accepted(model, model_type), how
                if attention_modules.find(model):
                    return found
                without = without or found  # a backbone, say: another class may have more
            except Exception as failure:
                failures.append(f"{how}: {_brief(failure)}")
    if without:
        return without
    raise Unbuilt("; ".join(failures[:3]) or NO_CLASS)


def _accepted(model, model_type: str) -> dict:
    """The first inputs on which the model runs; the first failure where there are none."""
    import model_inputs

    first = None
    for inputs in model_inputs.candidates(model, model_type, LENGTH):
        try:
            with torch.no_grad():
                output = model_inputs.output_of(model(**inputs))
            if not output.isfinite().all():
                raise ValueError("the output is not finite")
            return inputs
        except Exception as failure:
            first = first or failure
    raise first


def _eager(model) -> None:
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel) and part.config._attn_implementation != "eager":
            part.set_attn_implementation("eager")


def _brief(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    places = [frame for frame in traceback.extract_tb(failure.__traceback__) if "transformers/models" in frame.filename]
    where = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
    return f"{type(failure).__name__}: {text[:160]}{where}"


def compare(model_type: str, model, inputs: dict, row: dict) -> None:
    """All comparisons of one model; fills `row`."""
    import model_inputs

    from flashpatch import model_verification

    reports, own = {}, _own_modules(model_type, model, PART in row["built"])
    for name, variant in model_inputs.variants(model, inputs):
        try:
            reports[name] = report = model_verification.verify_model(model, variant)
        except model_verification.UnpatchedError as failure:
            row["checks"][name] = f"not comparable: {_brief(failure.__cause__ or failure)}"
            if name == "plain":
                break
            continue
        row["checks"][name] = _verdict(report)
        row["worst"] = max(row.get("worst", 0.0), _worst(report))
        if name == "plain":
            modules = [module for module in report.modules if module.path in own]
            row["modules"] = len(modules)
            row["dispatched"] = sum(module.dispatched for module in modules)
            row["left_alone"] = sorted({d for m in modules if not m.dispatched for d in m.declines})
            row["compared"] = len(report.comparisons)
            row["kernels"] = sum(bool(module.kernels) for module in modules)
            if report.declined or not (row["dispatched"] or report.error):
                row["outcome"] = "declined"
                none = "no attention module" + (" reads its config" if PART in row["built"] else "")
                row["reason"] = report.error or "; ".join(row["left_alone"]) or none
                if modules and all(NOT_RUN in reason for reason in row["left_alone"]):
                    row["outcome"] = "unbuilt"
                    row["reason"] = BECAUSE.get(model_type, "on these inputs the model does not run its attention")
                return
    for name, check in (("packed", model_inputs.packed), ("generate", model_inputs.generated)):
        try:
            verdict = check(model, inputs)
        except Exception as failure:
            verdict = f"not comparable: {_brief(failure)}"
            if getattr(failure, "patched", False):
                verdict = f"fails patched: {_brief(failure)}"
        if verdict is not None:
            row["checks"][name] = verdict
            if verdict.startswith(("differs", "fails")):
                row["worst"] = float("inf")
    for name, verdict in row["checks"].items():
        if verdict.startswith("differs") and (model_type, name) in EXPLAINED:
            row["checks"][name] = f"explained: {EXPLAINED[model_type, name]} ({verdict[:80]})"
    wrong = [name for name, verdict in row["checks"].items() if verdict.startswith(("differs", "fails"))]
    if wrong:
        row["outcome"] = "differs"
    elif row["checks"].get("plain", "").startswith("equal"):
        row["outcome"] = "equal"
    else:
        row["outcome"], row["reason"] = "unbuilt", row["checks"].get("plain", "nothing ran")


def _own_modules(model_type: str, model, part: bool) -> set[str]:
    """The attention modules that a row is about: of a part in a larger model, those with the part's config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from flashpatch import attention_modules

    kind = CONFIG_MAPPING[model_type] if part else object
    return {
        path for path, module, _ in attention_modules.find(model) if isinstance(getattr(module, "config", None), kind)
    }


def _worst(report) -> float:
    """The largest error in units of its bound."""
    if report.error:
        return float("inf")
    judged = [c for c in report.comparisons if f"{c.kind} {c.name}" not in report.unpatched_nan]
    return max((c.error / c.bound if c.error == c.error else float("inf") for c in judged), default=0.0)


def _verdict(report) -> str:
    if report.error:
        return f"{'declined' if report.declined else 'fails patched'}: {report.error[:300]}"
    if report.holds:
        return f"equal: {len(report.comparisons)} quantities"
    judged = [c for c in report.comparisons if f"{c.kind} {c.name}" not in report.unpatched_nan]
    if (
        all(c.passed for c in judged)
        and any(c.kind == "logits" for c in judged)
        and not (report.tokens and report.tokens.failing)
    ):
        return f"equal: {len(judged)} quantities; the other {len(report.comparisons) - len(judged)} are NaN in eager attention too"
    if report.tokens and report.tokens.failing:
        return f"differs: {report.tokens.failing} greedy tokens"
    faults = [comparison.message for comparison in report.comparisons if not comparison.passed]
    return (
        f"differs: {len(faults)} of {len(report.comparisons)}; {faults[0][:250]}"
        if faults
        else "differs: nothing compared"
    )


def on_kernels(model_type: str) -> dict:
    """The plain batch once more, on the emulated kernels. `emulated` becomes a part of the type's row."""
    import model_inputs

    from flashpatch import model_verification

    os.environ |= {"FLASHPATCH_EMULATE": "1", "FLASHPATCH_STRICT": "1"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    model, inputs, _ = built(model_type)
    _, inputs = next(model_inputs.variants(model, inputs))
    report = model_verification.verify_model(model.bfloat16(), inputs)
    kernels = sorted({kernel for module in report.modules for kernel in module.kernels})
    modules = sum(bool(module.kernels) for module in report.modules)
    return {
        "emulated": f"{_verdict(report)}, {modules} of {len(report.modules)} modules on {', '.join(kernels) or 'no kernel'}"
    }


# ---- one process per type ----


def in_a_process(model_type: str, work=row_of) -> dict:
    """`work` in a child with limits; whatever happens to it becomes the row."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = 1
        try:
            # Its own session: whatever compilers it starts end with it.
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            with open(os.devnull, "w") as nothing:
                if not os.environ.get("MODEL_TABLE_TRACE"):
                    os.dup2(nothing.fileno(), 2)
            try:
                row = work(model_type)
            except BaseException as failure:
                row = {"outcome": "unbuilt", "reason": f"the comparison failed: {_brief(failure)}"}
                if os.environ.get("MODEL_TABLE_TRACE"):
                    traceback.print_exc()
            os.write(writer, json.dumps(row).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(SECONDS)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    signal.alarm(0)
    _, status = os.waitpid(child, 0)
    if answer:
        return json.loads(answer)
    ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
    return {"outcome": "unbuilt", "reason": f"its process ended with {ended} (limits: {SECONDS} s, {MEMORY >> 30} GiB)"}


def _quickest(rows: dict) -> list[str]:
    """The types whose kernels run: equal, every attention module dispatched, the quickest first."""
    whole = [name for name, row in rows.items() if row["outcome"] == "equal" and row["dispatched"] == row["modules"]]
    return [
        name
        for name in sorted(whole, key=lambda name: rows[name]["seconds"])[:EMULATED]
        if "emulated" not in rows[name]
    ]


def read_table() -> dict:
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {"rows": {}}


def write_table(table: dict) -> None:
    table["transformers"], table["torch"] = transformers.__version__, torch.__version__.split("+")[0]
    table["rows"] = dict(sorted(table["rows"].items()))
    rows = table["rows"].values()
    table["outcomes"] = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES}
    temporary = TABLE.with_suffix(".part")
    temporary.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    temporary.replace(TABLE)


def page(table: dict) -> str:
    """The table for people."""
    rows = table["rows"]
    counts = ", ".join(f"{number} {outcome}" for outcome, number in table["outcomes"].items())
    text = [
        "# Model types",
        "",
        f"Every model type of transformers {table['transformers']} whose code dispatches attention ({len(rows)}), built small with",
        "random weights, patched and compared with eager attention on a CPU: " + counts + ".",
        "Written by `python tests/model_table.py --page`, from `models.json` beside it, which has every check of every type.",
        "A row stays as it was measured until it is run anew (`python tests/model_table.py TYPE`): these were made over a day",
        "in which the seam was still mended. Every eighth equal row was made anew at its end, and every one was equal again.",
        "",
        f"Of {sum('emulated' in row for row in rows.values())} types the kernels ran too, in bf16, forward and backward, on the CPU emulator and strict (a decline is an",
        "error): the last column, with the attention modules that ran on a kernel.",
        "",
    ]
    for outcome, title in (
        ("differs", "Wrong"),
        ("declined", "Declined"),
        ("unbuilt", "Not built here"),
        ("equal", "Equal"),
    ):
        found = {name: row for name, row in rows.items() if row["outcome"] == outcome}
        text += [f"## {title}: {len(found)}", ""]
        if outcome == "equal":
            text += ["| type | attention modules | checks | emulated kernels |", "|---|---|---|---|"]
            for name, row in found.items():
                checks = "; ".join(
                    f"{check} ({verdict.split(':')[0]})" if not verdict.startswith("equal:") else check
                    for check, verdict in row["checks"].items()
                )
                kernels = row.get("emulated", "").replace("|", "/")[:200]
                text.append(f"| {name} | {row['dispatched']} of {row['modules']} | {checks} | {kernels} |")
        else:
            text += ["| type | reason |", "|---|---|"]
            for name, row in found.items():
                reason = " ".join(str(row.get("reason", row.get("checks"))).split())[:300]
                text.append(f"| {name} | {reason.replace('|', '/')} |")
        text.append("")
    notes = [f"- {name}, {check}: {why}." for (name, check), why in EXPLAINED.items()]
    return "\n".join([*text, "## Differences by intent", "", *notes, ""])


def main(arguments: list[str]) -> None:
    import model_inputs  # noqa: F401  imported once, here, for all children
    import shrinking

    import flashpatch.model_verification  # noqa: F401

    table = read_table()
    if arguments == ["--page"]:
        TABLE.with_suffix(".md").write_text(page(table), encoding="utf-8")
        return
    types = shrinking.dispatching_types()
    table["rows"] = {name: row for name, row in table["rows"].items() if name in types}
    if arguments[:1] == ["--emulate"]:
        for name in arguments[1:] or _quickest(table["rows"]):
            row = in_a_process(name, on_kernels)
            table = read_table()
            table["rows"][name]["emulated"] = row.get("emulated") or f"not comparable: {row['reason']}"
            write_table(table)
            print(f"{name}: {table['rows'][name]['emulated']}", flush=True)
        return
    if arguments[:1] == ["--again"]:
        wanted = [name for name, row in table["rows"].items() if row["outcome"] in arguments[1].split(",")]
    else:
        wanted = arguments or [name for name in types if name not in table["rows"]]
    for name in wanted:
        row = in_a_process(name)
        table = read_table()
        if emulated := table["rows"].get(name, {}).get("emulated"):
            row["emulated"] = emulated
        table["rows"][name] = row
        write_table(table)
        print(f"{name}: {row['outcome']} {row.get('reason', '')[:300]}", flush=True)
        if row["outcome"] == "differs":
            print(json.dumps(row["checks"], indent=1), flush=True)
    print(read_table()["outcomes"])


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT.parent)]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(sys.argv[1:])
