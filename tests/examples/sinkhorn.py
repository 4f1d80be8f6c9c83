"""Optimal transport between two clouds of 100,000 points, whose cost matrix would take 40 GB, in a few megabytes.

Sinkhorn's iterations in the log domain (Peyre and Cuturi, Computational Optimal Transport, arXiv 1803.00567, section 4.4):
each is one logsumexp over the rows and one over the columns of the scores (potential - cost) / epsilon, which
`flashpatch.pairwise` reduces without storing them.

    python tests/examples/sinkhorn.py                      # on a GPU: 100,000 x 100,000
    python tests/examples/sinkhorn.py --points 2000        # anywhere
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import torch

import flashpatch


def sinkhorn(x, y, *, epsilon: float, iterations: int, on_decline: str = "fallback"):
    """Potentials (f, g) of the entropic transport between uniform weights on x [n, d] and y [m, d], cost |x - y|^2."""
    log_a, log_b = -math.log(len(x)), -math.log(len(y))
    options = {"reduce": "logsumexp", "scale": -1 / epsilon, "on_decline": on_decline}
    g = x.new_zeros(len(y))
    for _ in range(iterations):
        f = -epsilon * flashpatch.pairwise(x, y, bias=g / epsilon + log_b, dim=-1, **options)
        g = -epsilon * flashpatch.pairwise(x, y, bias=f / epsilon + log_a, dim=-2, **options)
    return f, g


def marginal_error(x, y, f, g, *, epsilon: float, on_decline: str = "fallback") -> float:
    """How far the plan's row sums are from the weights of x, summed; the column sums are exact after an iteration."""
    bias = g / epsilon - math.log(len(y))
    sums = flashpatch.pairwise(x, y, reduce="logsumexp", scale=-1 / epsilon, bias=bias, on_decline=on_decline)
    return float((torch.exp(f / epsilon + sums) - 1).abs().mean())


def gradient_of_cost(x, y, g, *, epsilon: float, on_decline: str = "fallback") -> torch.Tensor:
    """d(transport cost) / dx at the optimum: there the potentials' own derivatives cancel (envelope theorem)."""
    x = x.detach().requires_grad_()
    bias = (g / epsilon - math.log(len(y))).detach()
    f = -epsilon * flashpatch.pairwise(x, y, reduce="logsumexp", scale=-1 / epsilon, bias=bias, on_decline=on_decline)
    return torch.autograd.grad(f.mean(), x)[0]


def sinkhorn_materialised(x, y, *, epsilon: float, iterations: int):
    """The same with the matrix in memory, as it is usually written."""
    log_a, log_b = -math.log(len(x)), -math.log(len(y))
    matrix = torch.cdist(x, y).square_()
    g = x.new_zeros(len(y))
    for _ in range(iterations):
        f = -epsilon * torch.logsumexp((g - matrix) / epsilon + log_b, 1)
        g = -epsilon * torch.logsumexp((f[:, None] - matrix) / epsilon + log_a, 0)
    return f, g


def clouds(points: int, dim: int, device: str):
    """Two clouds in the unit cube: uniform, and around its centre."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(points, dim, generator=generator)
    y = 0.5 + 0.1 * torch.randn(points, dim, generator=generator)
    return x.to(device), y.to(device)


def measure(run, x, y, *, epsilon: float, iterations: int) -> dict:
    """Milliseconds of an iteration (median of three runs) and peak memory beside the inputs, or that it did not fit."""
    cuda = x.is_cuda
    row = {"points": len(x), "dim": x.shape[1], "form": run.__name__, "iterations": iterations}
    try:
        run(x, y, epsilon=epsilon, iterations=1)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before, seconds = torch.cuda.memory_allocated() if cuda else 0, []
        for _ in range(3):
            started = time.perf_counter()
            run(x, y, epsilon=epsilon, iterations=iterations)
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return {**row, "milliseconds": None, "peak_bytes": None}
    peak = torch.cuda.max_memory_allocated() - before if cuda else None
    return {**row, "milliseconds": 1000 * statistics.median(seconds) / iterations, "peak_bytes": peak}


def table(rows: list[dict]) -> str:
    """The measurements as a Markdown table."""
    lines = ["| points | form | ms an iteration | peak memory |", "|---|---|---|---|"]
    for row in rows:
        name = "`flashpatch.pairwise`" if row["form"] == "sinkhorn" else "materialised"
        if row["milliseconds"] is None:
            time_, memory = "out of memory", "-"
        else:
            time_ = f"{row['milliseconds']:.2f}"
            memory = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.1f} MB"
        lines.append(f"| {row['points']:,} x {row['points']:,}, {row['dim']}-D | {name} | {time_} | {memory} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--fitting", type=int, help="size at which the materialised form runs too (default: a third)")
    parser.add_argument("--dim", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=0.01)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="write the measurements there too")
    options = parser.parse_args()
    sizes = {"epsilon": options.epsilon, "iterations": options.iterations}
    rows = []
    small = clouds(options.fitting or options.points // 3, options.dim, options.device)
    rows.append(measure(sinkhorn_materialised, *small, **sizes))
    rows.append(measure(sinkhorn, *small, **sizes))
    x, y = clouds(options.points, options.dim, options.device)
    rows.append(measure(sinkhorn, x, y, **sizes))
    f, g = sinkhorn(x, y, **sizes)
    error = marginal_error(x, y, f, g, epsilon=options.epsilon)
    print(table(rows))
    print(f"\ntransport cost {float(f.mean() + g.mean()):.6f}, row sums off by {error:.2e} after {options.iterations}")
    print(f"the matrix alone: {len(x) * len(y) * 4 / 1e9:.1f} GB; kernels: {flashpatch.stats()['launches']}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows, "marginal_error": error}, file, indent=1)


if __name__ == "__main__":
    main()
