"""What a machine reaches, measured: the fastest matrix product, and the bandwidth of copying and reading."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import torch


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches, measured just before."""

    tflops: Annotated[float, "TFLOP/s of the fastest matrix product in this dtype"]
    product: Annotated[str, "its shape"]
    copy_gbs: Annotated[float, "GB/s of copying, read and written counted"]
    read_gbs: Annotated[float, "GB/s of reading (a sum)"]

    @property
    def gbs(self) -> float:
        """The higher of the two bandwidths."""
        return max(self.copy_gbs, self.read_gbs)

    @property
    def ridge(self) -> float:
        """FLOPs per byte where arithmetic begins to limit."""
        return self.tflops * 1e3 / self.gbs


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(run, device: torch.device, budget: float = 30.0, samples: int = 3) -> float:
    """Median time of a call: each sample is as many calls as fill `budget` milliseconds."""

    def sample(repeats: int) -> float:
        synchronize(device)
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                run()
            stop.record()
            synchronize(device)
            return start.elapsed_time(stop) / repeats
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - began) * 1e3 / repeats

    first = sample(1)
    repeats = max(1, min(200, int(budget / max(first, 1e-3))))
    return statistics.median(sample(repeats) for _ in range(samples))


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Ceilings:
    """The fastest matrix product over several shapes, and the bandwidth of copying and reading."""
    if small:
        products, length = [(512, 512, 512), (1024, 1024, 1024)], 1 << 24
    elif device.type == "cuda":
        products = [(8192, 8192, 8192), (4096, 4096, 4096), (16384, 8192, 2048), (8192, 16384, 16384)]
        length = 1 << 29
    else:
        products, length = [(1024, 1024, 1024), (2048, 2048, 2048), (4096, 2048, 1024)], 1 << 26
    best, shape = 0.0, ""
    for m, n, k in products:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        speed = 2e-9 * m * n * k / milliseconds(lambda a=a, b=b: a @ b, device)
        if speed > best:
            best, shape = speed, f"{m} x {k} by {k} x {n}"
        del a, b
    source = torch.ones(length, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / milliseconds(lambda: target.copy_(source), device) / 1e6
    read = source.nbytes / milliseconds(lambda: source.sum(), device) / 1e6
    return Ceilings(best, shape, copied, read)
