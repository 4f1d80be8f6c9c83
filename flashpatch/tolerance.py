"""How close is close enough: the one rule by which kernels and the fallback are compared with the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`: `error` is max|actual - reference|, found at `worst_index`; `bound` is what is allowed."""

    ok: bool
    error: float
    bound: float
    worst_index: tuple[int, ...]

    def message(self, config: str) -> str:
        """One line for people: the configuration, where the error is largest, and both numbers."""
        verdict = "within" if self.ok else "beyond"
        return f"{config}: error {self.error:.3e} at {list(self.worst_index)} is {verdict} the bound {self.bound:.3e}"


def compare(actual, eager, reference, *, factor=FORWARD_FACTOR) -> Comparison:
    """Whether max|actual - reference| <= factor * max|eager - reference| + 2 * max|(reference + 0.3 - 0.3) - reference|.

    actual, eager and reference have one shape. `reference` is the fp64 (or fp32) result, `eager` PyTorch's own in the dtype
    of `actual`; the last term is what rounding to that dtype costs. `factor` is 2, for gradients 3. A NaN in any of the
    three fails, and so does an infinity that is not the same in `actual` and `reference`.
    """
    if not actual.shape == eager.shape == reference.shape:
        raise ValueError(f"shapes differ: {list(actual.shape)}, eager {list(eager.shape)}, {list(reference.shape)}")
    if actual.numel() == 0:
        return Comparison(True, 0.0, 0.0, ())
    difference = _distance(actual, reference)
    # argmax treats NaN as the largest: the worst index is then the first NaN.
    worst = int(difference.argmax())
    error = float(difference.flatten()[worst])
    index = tuple(int(x) for x in torch.unravel_index(torch.tensor(worst), difference.shape))
    rounded = reference.to(actual.dtype)
    rounding = ((rounded + 0.3 - 0.3) - rounded).double()[rounded.isfinite()].abs()
    bound = factor * float(_distance(eager, reference).max()) + 2.0 * float(rounding.max() if rounding.numel() else 0.0)
    return Comparison(math.isfinite(error) and error <= bound, error, bound, index)


def _distance(x, reference):
    x, reference = x.detach().double(), reference.detach().double().to(x.device)
    # inf - inf is NaN, but the same infinity in both (logsumexp of an empty row) is agreement.
    return torch.where(x == reference, 0.0, (x - reference).abs())
