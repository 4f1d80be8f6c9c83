"""Where a patched model differs first, and why, as far as measuring one attention call alone can tell; and that call, captured."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

import torch

from . import captures, model_runs, patcher
from .model_comparisons import ModelComparison


@dataclass(frozen=True)
class Explanation:
    """The first place where the patched model differs, and why, as far as measuring it alone can tell."""

    module: Annotated[
        str, "the first attention module that differs (of gradients: the first in the backward); empty: none does"
    ]
    layer: Annotated[int, "its position among the model's attention modules, from 0; -1: none"]
    kind: Annotated[str, "attention, gradient or logits: what differs there"]
    error: Annotated[float, "patched: largest absolute difference there; null if not finite"]
    eager_error: Annotated[float, "the same for eager attention in the model's own dtype"]
    bound: Annotated[float, "what the error may be"]
    ran_on: Annotated[str, "kernel, or fallback, that computed the module's call"]
    call: Annotated[list[captures.CallCheck], "that call alone against the fp64 reference on the q, k, v it was given"]
    heads: Annotated[list[int], "heads of that call beyond their bound"]
    unpatched_nan: Annotated[bool, "the module's output is not finite in the unpatched model or in eager attention"]
    input_largest: Annotated[
        float | None, "largest absolute number in the module's input in the yardstick; null if not finite"
    ]
    dtype_largest: Annotated[float, "largest number of the model's dtype"]
    input_out_of_range: Annotated[bool, "the module's input does not fit the model's dtype"]
    text: Annotated[str, "all this in sentences"]


class NothingToCaptureError(ValueError):
    """No attention call of the patched model is what `capture` and `layer` ask for; the text lists the modules."""


def first_difference(comparisons: list[ModelComparison], paths: list[str]) -> tuple[str, ModelComparison] | None:
    """The first attention module that differs, and the comparison that says so; the path is empty where none does.

    Outputs differ first in the order of calls. A gradient differs first in the last module that has one, for the backward
    comes from there.
    """
    failed = [comparison for comparison in comparisons if not comparison.passed]
    for comparison in failed:
        if comparison.kind == "attention":
            return comparison.name.split(" (call ")[0], comparison
    order = {path: number for number, path in enumerate(paths)}
    owned = [
        (order[path], path, comparison)
        for comparison in failed
        if comparison.kind == "gradient"
        for path in paths
        if comparison.name.startswith(f"{path}.")
    ]
    if owned:
        _, path, comparison = max(owned, key=lambda entry: (entry[0], entry[2].error / (entry[2].bound or 1.0)))
        return path, comparison
    return ("", failed[0]) if failed else None


def chosen_path(paths: list[str], layer: str | None) -> str | None:
    """The path that `layer` names: a path, or a position among the attention modules."""
    if layer is None:
        return None
    if layer.isdigit() and int(layer) < len(paths):
        return paths[int(layer)]
    if layer in paths:
        return layer
    raise NothingToCaptureError(f"the model has no attention module {layer!r}; it has {_listed(paths)}")


def _listed(paths: list[str]) -> str:
    return (", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")) or "none"


def heard_from(model, inputs: dict, modules, backward: bool, seed: int, path: str, advance) -> captures.Capture | None:
    """The patched model once more, for one module's first attention call; None if it makes none."""
    if not path:
        return None
    advance(3, 4, f"patched, listening to {path}")
    with patcher.apply(model), captures.listening(path) as heard:
        model_runs.observe(model, inputs, modules, backward, seed, {})
    return heard[0] if heard else None


def save_call(heard: captures.Capture | None, file: str, model: str, paths: list[str]) -> None:
    if heard is None:
        raise NothingToCaptureError(
            f"nothing to write to {file}: no attention call came to flashpatch from that module; there are {_listed(paths)}"
        )
    heard.model = model
    captures.save(heard, file)


def explain(
    first, heard, modules, plain: tuple[model_runs.Observation, ...], input_largest: dict, dtype: torch.dtype
) -> Explanation:
    path, comparison = first
    paths = [name for name, _ in modules]
    checks = [] if heard is None else captures.check(heard, heard.results)
    heads = sorted({head for check in checks if check.tensor != "dsinks" for head in check.heads})
    finite = all(seen[key].isfinite().all() for seen in plain for key in seen if key == ("attention", path))
    largest = input_largest.get(path)
    limit = torch.finfo(dtype).max
    beyond = largest is not None and not largest <= limit
    layer = paths.index(path) if path in paths else -1
    explanation = Explanation(
        path,
        layer,
        comparison.kind,
        comparison.error,
        comparison.eager_error,
        comparison.bound,
        "" if heard is None else heard.ran_on,
        checks,
        heads,
        not finite,
        largest if largest is None or math.isfinite(largest) else None,
        limit,
        beyond,
        "",
    )
    return dataclasses.replace(explanation, text=_sentences(explanation, comparison, len(paths), str(dtype)))


def _sentences(found: Explanation, comparison: ModelComparison, count: int, dtype: str) -> str:
    dtype = dtype.removeprefix("torch.")
    what = {"attention": "output", "gradient": f"gradient of {comparison.name}", "logits": "the model's output"}[
        found.kind
    ]
    numbers = f"error {found.error:.3e}, eager's own {found.eager_error:.3e}, bound {found.bound:.3e}"
    if not found.module:
        return f"No attention module differs; {what} does ({comparison.name}: {numbers})."
    text = [f"First to differ: {found.module}, attention module {found.layer} of {count} (from 0), {what}: {numbers}."]
    failed = [check for check in found.call if not check.passed]
    who = "the fallback" if found.ran_on == "fallback" else f"kernel {found.ran_on}"
    if failed:
        worst = failed[0]
        heads = f" in head{'s' * (len(worst.heads) > 1)} {', '.join(map(str, worst.heads))}" if worst.heads else ""
        text.append(
            f"Its attention call alone is wrong: {worst.tensor} of {who}, on the q, k, v it was given, differs from the "
            f"reference{heads}, most at {worst.worst_index} (error {worst.error:.3e}, eager's own {worst.eager_error:.3e}, "
            f"bound {worst.bound:.3e})."
        )
    elif found.call:
        text.append(
            f"Its attention call alone is right: what {who} computed of the q, k, v, mask and scale it was given is within "
            "its bound. So it was given something else than eager attention was: a mask, a scale, or inputs that differ."
        )
    else:
        text.append("It made no attention call through flashpatch.")
    if found.unpatched_nan:
        text.append("The unpatched model's output of this module is not finite either.")
    if found.input_out_of_range:
        reached = "infinity or NaN" if found.input_largest is None else f"{found.input_largest:.3g}"
        text.append(
            f"Its input is outside {dtype}: it reaches {reached} in the yardstick, {dtype} {found.dtype_largest:.3g}."
        )
    return " ".join(text)
