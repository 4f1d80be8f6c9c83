"""On a GPU: every pairwise kernel the matrix claims there against its definition, times beside the materialised forms, the
file under tests/evidence that says so, and the README's figures.

    python tests/record_pairwise.py tests/evidence/h200_pairwise.json

Afterwards the rows of that generation may be called verified in compat_matrix.yaml.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import test_pairwise
import torch

import flashpatch
from flashpatch import compiler, execution
from flashpatch.pair_planning import GRADIENT, REDUCTIONS

SIZE = 32768
MARKERS = "<!-- pairwise:begin -->", "<!-- pairwise:end -->"
sinkhorn = test_pairwise.sinkhorn_module()


def check(plan) -> list[str]:
    """What is wrong with the kernel of a plan on this GPU."""
    problem, dtype = plan.problem, getattr(torch, plan.problem.dtype)
    x, y = (
        test_pairwise.points(2, n, problem.dim, seed=n, boxes=problem.cost == "giou", dtype=dtype, device="cuda")
        for n in (1003, 2051)
    )
    bias = test_pairwise.points(2, 2051, seed=1, device="cuda")
    if problem.kernel == GRADIENT:
        weight = test_pairwise.points(2, 1003, seed=2, device="cuda")
        options = {"cost": problem.cost, "reduce": "logsumexp", "scale": -0.7}
        run = lambda a, b, bias: flashpatch.pairwise(a, b, bias=bias, **options)  # noqa: E731
        x, y = x.float(), y.float()  # gradients in fp32; those of the other dtypes are these, rounded
        return test_pairwise.gradient_faults(x, y, bias, weight, problem.cost, run)
    reduce = next(name for name, kernel in REDUCTIONS.items() if kernel == problem.kernel)
    options = {"cost": problem.cost, "reduce": reduce, "scale": -0.7, "bias": bias}
    if reduce == "topk":
        options["k"] = problem.k
    return test_pairwise.faults(x, y, options, "kernel")


def milliseconds(run) -> float:
    """Median of ten, by events."""
    run()
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def peak(run) -> int:
    """Bytes allocated beside what is there."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def reductions(size: int = SIZE) -> list[dict]:
    """Each reduction of squared distances beside torch on the materialised matrix."""
    rows = []
    for dim, dtype in ((3, torch.float32), (64, torch.float32), (64, torch.bfloat16)):
        x, y = (test_pairwise.points(size, dim, seed=seed, dtype=dtype, device="cuda") for seed in (0, 1))
        for reduce in REDUCTIONS:
            options = {"k": 10} if reduce == "topk" else {"scale": -1.0} if reduce == "logsumexp" else {}

            def materialised(reduce=reduce, x=x, y=y):
                matrix = torch.cdist(x.float(), y.float()).square_()
                if reduce == "logsumexp":
                    return matrix.neg_().logsumexp(-1)
                return matrix.min(-1) if reduce == "min" else matrix.topk(10, largest=False)

            def own(reduce=reduce, options=options, x=x, y=y):
                return flashpatch.pairwise(x, y, reduce=reduce, **options)

            row = {"reduce": reduce, "points": size, "dim": dim, "dtype": str(dtype).removeprefix("torch.")}
            for name, run in (("pairwise", own), ("materialised", materialised)):
                row[f"{name}_milliseconds"] = round(milliseconds(run), 4)
                row[f"{name}_peak_bytes"] = peak(run)
            rows.append(row)
    return rows


def figures(document: dict) -> str:
    """What the README shows of a recorded document."""
    by_dim: dict[tuple, list[str]] = {}
    for row in document["reductions"]:
        pair = f"{row['pairwise_milliseconds']:.1f} / {row['materialised_milliseconds']:.1f}"
        by_dim.setdefault((row["dim"], row["dtype"]), []).append(pair)
    size = document["reductions"][0]["points"]
    lines = [
        sinkhorn.table(document["sinkhorn"]),
        "",
        f"One reduction of {size} x {size} squared distances, ms, `flashpatch.pairwise` / torch on the materialised matrix:",
        "",
        "| features | dtype | min | topk, k = 10 | logsumexp |",
        "|---|---|---|---|---|",
        *(f"| {dim} | {dtype} | {' | '.join(pairs)} |" for (dim, dtype), pairs in by_dim.items()),
    ]
    return "\n".join(lines)


def with_figures(text: str, document: dict) -> str:
    """The README with its figures renewed."""
    before, _, rest = text.partition(MARKERS[0] + "\n")
    _, _, after = rest.partition(MARKERS[1])
    return f"{before}{MARKERS[0]}\n{figures(document)}\n{MARKERS[1]}{after}"


def main() -> None:
    device = execution.device_of(torch.device("cuda", 0))
    plans = list(test_pairwise.plans(device.generation))
    with ThreadPoolExecutor() as pool:  # NVRTC builds side by side
        list(pool.map(lambda plan: compiler.load(plan.config, device), plans))
    cells, failed = {}, []
    for plan in plans:
        problem = plan.problem
        name = f"{problem.kernel}/{device.generation}/{problem.dtype}/{problem.cost}"
        found = check(plan)
        failed += [f"{name}: {fault}" for fault in found]
        cells[name] = {"config": plan.config.name, "digest": compiler.digest(plan.config), "passed": not found}
        print(name, found or "passed", flush=True)
    small, big = sinkhorn.clouds(33_000, 3, "cuda"), sinkhorn.clouds(100_000, 3, "cuda")
    sizes = {"epsilon": 0.01, "iterations": 10}
    example = [
        sinkhorn.measure(sinkhorn.sinkhorn_materialised, *small, **sizes),
        sinkhorn.measure(sinkhorn.sinkhorn, *small, **sizes),
        sinkhorn.measure(sinkhorn.sinkhorn, *big, **sizes),
    ]
    potentials = sinkhorn.sinkhorn(*big, **sizes)
    document = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "nvrtc": ".".join(map(str, compiler.nvrtc_version())),
        "cells": cells,
        "sinkhorn": example,
        "sinkhorn_row_sums_off_by": sinkhorn.marginal_error(*big, *potentials, epsilon=0.01),
        "reductions": reductions(),
    }
    print(figures(document))
    if failed:
        raise SystemExit("not recorded: " + "; ".join(failed))
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    readme = test_pairwise.ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text(encoding="utf-8"), document), encoding="utf-8")


if __name__ == "__main__":
    main()
