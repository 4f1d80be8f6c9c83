"""What each feature costs over the plain kernel of its family: the same shape, timed in one process, per visible score.

Unlike `benchmarking`, which times what a call gets, every kernel the matrix claims for a feature is timed, also where
another one would be preferred; and beside them what users have without flashpatch, where it has the feature.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch

from . import benchmarking, execution, feature_peers, launcher, planning
from .call import Call
from .problem import DIRECTIONS, Plan

PEERS = {"sdpa_efficient": "SDPA efficient", "flex": "FlexAttention", "eager": "eager"}
ROUNDS = 20
PEER_ROUNDS = 5  # of peers less is asked: they are several times slower, or faster


@dataclass
class Cost:
    """One kernel with one feature; `error` instead of figures where it could not run."""

    feature: Annotated[str, "what is asked beyond plain attention"]
    direction: Annotated[str, "forward or backward"]
    kernel: Annotated[str, "the kernel's name, or one of PEERS"]
    head_dim: Annotated[int, "of q and k"]
    milliseconds: Annotated[float | None, "median over rounds"] = None
    tflops: Annotated[float | None, "TFLOP/s, counting the scores that are visible"] = None
    cost: Annotated[float | None, "time per visible score over the plain kernel's, timed beside it, median"] = None
    quartiles: Annotated[list[float] | None, "first and third, of the samples of cost"] = None
    error: Annotated[str, "why it did not run; empty if it did"] = ""


@dataclass
class CostReport:
    """All costs of one run, and the machine they are from."""

    gpu: Annotated[str, "the GPU's name"]
    dtype: Annotated[str, "of q, k and v"]
    batch: Annotated[int, "rows of the batch"]
    seqlen: Annotated[int, "queries and keys of a row"]
    width: Annotated[int, "heads times head_dim"]
    torch: Annotated[str, "torch's version"]
    date: Annotated[str, "of the run, UTC"]
    kernels: Annotated[str, "digest of the sources of flashpatch's kernels"]
    costs: Annotated[list[Cost], "every kernel with every feature"] = field(default_factory=list)


@dataclass
class _Setting:
    """The tensors of one head dim and what a feature makes of them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    call: Call
    visible: float  # of all scores

    @property
    def length(self) -> int:
        return self.call.max_seqlen_q

    def flops(self, direction: str) -> float:
        heads, dims = self.q.shape[-2], self.q.shape[-1] + self.v.shape[-1]
        rows = self.q.numel() // (heads * self.q.shape[-1])
        forward = 2.0 * rows * heads * self.length * dims * self.visible
        return forward * (2.5 if direction == "backward" else 1.0)


# ---- features ----


def _causal(s: _Setting) -> None:
    s.call.window_right, s.visible = 0, (s.length + 1) / (2 * s.length)


def _window(s: _Setting) -> None:
    s.call.window_left, s.call.window_right = s.length // 4 - 1, 0
    s.visible = _mean(torch.arange(1, s.length + 1).clamp(max=s.length // 4)) / s.length


def _key_ranges(s: _Setting) -> None:
    ends = torch.arange(1, s.length + 1, dtype=torch.int32, device=s.q.device)
    s.call.key_ranges = torch.stack([torch.zeros_like(ends), ends], -1)[None].expand(s.q.shape[0], -1, -1)
    s.visible = (s.length + 1) / (2 * s.length)


def _gqa(s: _Setting) -> None:
    heads = max(1, s.k.shape[-2] // 4)
    s.k, s.v = (tensor[..., :heads, :].contiguous() for tensor in (s.k, s.v))


def _varlen(s: _Setting) -> None:
    starts = torch.arange(0, s.q.shape[0] + 1, dtype=torch.int32, device=s.q.device) * s.length
    s.q, s.k, s.v = (tensor.flatten(0, 1) for tensor in (s.q, s.k, s.v))
    s.call.cu_seqlens_q = s.call.cu_seqlens_k = starts


def _seqused_k(s: _Setting) -> None:
    s.call.seqused_k = torch.full((s.q.shape[0],), s.length, dtype=torch.int32, device=s.q.device)


def _grid(s: _Setting) -> tuple[int, int, int, int]:
    return s.q.shape[0], s.q.shape[2], s.length, s.length


def _mask(s: _Setting) -> None:
    s.call.mask = (torch.rand(s.length, s.length, device=s.q.device) > 0.1).expand(_grid(s))


def _mask_of_documents(s: _Setting) -> None:
    """Four documents that do not see each other: most tiles are hidden as a whole."""
    document = torch.arange(s.length, device=s.q.device) // max(1, s.length // 4)
    s.call.mask, s.visible = (document[:, None] == document).expand(_grid(s)), 0.25


def _bias(s: _Setting) -> None:
    shape = (s.q.shape[0], 1, s.length, s.length)
    s.call.bias = torch.randn(shape, device=s.q.device, dtype=s.q.dtype).expand(_grid(s))
    s.call.bias_gradient = False


def _wide_bias(s: _Setting) -> None:
    _bias(s)
    s.call.bias = s.call.bias[:, :1].float().expand(_grid(s))


def _bias_of_heads(s: _Setting) -> None:
    """A bias per head for all sequences, with its gradient, as T5 trains one."""
    shape = (1, s.q.shape[2], s.length, s.length)
    s.call.bias = torch.randn(shape, device=s.q.device, dtype=s.q.dtype).expand(_grid(s))


def _alibi(s: _Setting) -> None:
    s.call.alibi_slopes = torch.rand(s.q.shape[-2], device=s.q.device).div(16).expand(s.q.shape[0], -1)


def _sinks(s: _Setting) -> None:
    s.call.sinks = torch.randn(s.q.shape[-2], device=s.q.device)


def _softcap(s: _Setting) -> None:
    s.call.softcap = 30.0


def _dropout(s: _Setting) -> None:
    s.call.dropout_p = 0.1
    s.call.rng_state = torch.tensor([1, 2], dtype=torch.int64, device=s.q.device)


def _deterministic(s: _Setting) -> None:
    s.call.deterministic = True


FEATURES: dict[str, Callable[[_Setting], None]] = {
    "plain": lambda setting: None,
    "causal": _causal,
    "window": _window,
    "key_ranges": _key_ranges,
    "gqa": _gqa,
    "varlen": _varlen,
    "seqused_k": _seqused_k,
    "alibi": _alibi,
    "sinks": _sinks,
    "softcap": _softcap,
    "dropout": _dropout,
    "deterministic": _deterministic,
    "mask": _mask,
    "mask of documents": _mask_of_documents,
    "bias": _bias,
    "wide_bias": _wide_bias,
    "bias of heads, with gradient": _bias_of_heads,
}


def _mean(counts: torch.Tensor) -> float:
    return float(counts.double().mean())


# ---- timing ----


def measure(
    *,
    head_dims=(64, 128),
    batch: int = 4,
    seqlen: int = 4096,
    width: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
    features=tuple(FEATURES),
    peers=("sdpa_efficient",),
    rounds: int = ROUNDS,
    device: str = "cuda",
    advance=lambda done, total: None,
) -> CostReport:
    """Time every kernel with every feature it has, the variants of a head dim in random order in each round.

    A cost is the median of ratios of two samples, one right after the other, the plain kernel's first in every other round: the
    card's clock depends on what ran just before, and drifts.
    Eager attention, which keeps the score matrix, and FlexAttention, which is compiled for every feature (minutes), are
    timed once, on their own. Raises RuntimeError without a CUDA device. `advance(done, total)` is called after each head dim.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("costs are timed on an NVIDIA GPU; torch sees none")
    name = str(dtype).removeprefix("torch.")
    report = CostReport(torch.cuda.get_device_name(device), name, batch, seqlen, width, *benchmarking.origin())
    for number, head_dim in enumerate(head_dims):
        report.costs += _of_head_dim(head_dim, batch, seqlen, width, dtype, features, peers, rounds, device)
        advance(number + 1, len(head_dims))
    return report


def _of_head_dim(head_dim, batch, seqlen, width, dtype, features, peers, rounds, device) -> list[Cost]:
    costs, runs = [], {}
    plain: dict[tuple[str, str], int] = {}  # number in costs, by kernel and direction
    samples: dict[int, list[float]] = {}  # milliseconds, by number in costs
    ratios: dict[int, list[float]] = {}  # over the plain kernel's beside it
    flops: dict[int, float] = {}
    heads = width // head_dim
    tensors = [torch.randn(batch, seqlen, heads, head_dim, device=device, dtype=dtype) for _ in range(3)]
    for feature in dict.fromkeys(("plain", *features)):
        setting = _setting(feature, *tensors)
        for direction in DIRECTIONS:
            for kernel, make in _makers(setting, direction, peers).items():
                cost = Cost(feature, direction, kernel, head_dim)
                try:
                    run = make()
                    if run is None:
                        continue
                    run()
                    torch.cuda.synchronize(device)
                    samples[len(costs)], ratios[len(costs)] = [], []
                    flops[len(costs)] = setting.flops(direction)
                    if feature == "plain":
                        plain[kernel, direction] = len(costs)
                    if kernel in ("eager", "flex"):
                        samples[len(costs)].append(benchmarking.milliseconds(run, device, 15.0))
                    else:
                        runs[len(costs)] = run
                except Exception as error:
                    cost.error = f"{type(error).__name__}: {str(error)[:200]}".splitlines()[0]
                costs.append(cost)
    for number_of_round in range(rounds):
        order = [n for n in runs if number_of_round < PEER_ROUNDS or costs[n].kernel not in PEERS]
        random.shuffle(order)
        for number in order:
            own = plain.get((costs[number].kernel, costs[number].direction), number)
            pair = (own, number) if number_of_round % 2 else (number, own)
            times = {n: benchmarking.milliseconds(runs[n], device, 15.0) for n in dict.fromkeys(pair)}
            for n, milliseconds in times.items():  # the plain kernel's time is the median of all it was timed
                samples[n].append(milliseconds)
            ratios[number].append(times[number] / times[own])
    for number, times in samples.items():
        if not times:
            continue
        cost = costs[number]
        cost.milliseconds = statistics.median(times)
        cost.tflops = flops[number] / cost.milliseconds / 1e9
        own = plain.get((cost.kernel, cost.direction))
        if own is not None:
            found = ratios[number] or [cost.milliseconds / costs[own].milliseconds]
            per_score = sorted(ratio * flops[own] / flops[number] for ratio in found)
            cost.cost = statistics.median(per_score)
            cost.quartiles = [per_score[len(per_score) // 4], per_score[-1 - len(per_score) // 4]]
    return costs


def _setting(feature: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Setting:
    """All features have the same tensors: where those lie in memory changes times too."""
    setting = _Setting(q, k, v, Call(q.shape[-1] ** -0.5, q.shape[1], k.shape[1]), 1.0)
    FEATURES[feature](setting)
    return setting


def _makers(s: _Setting, direction: str, peers) -> dict[str, Callable]:
    """Kernel or peer -> what makes one launch of it; a peer's gives None where it does not have the feature."""
    makers = {}
    device = execution.device_of(s.q.device)
    for kernel, of in planning.support().kernels.items():
        plan = _plan(s, direction, kernel, device)
        if of == direction and plan is not None:
            makers[kernel] = functools.partial(_kernel_run, s, direction, plan)
    for peer in peers:
        makers[peer] = functools.partial(feature_peers.PEERS[peer], s.q, s.k, s.v, s.call, direction)
    return makers


def _plan(s: _Setting, direction: str, kernel: str, device) -> Plan | None:
    decision = execution.decide(direction, s.q, s.k, s.v, s.call)
    found = planning.resolve(replace(decision.problem, direction=direction), device, kernels=(kernel,))
    return found if isinstance(found, Plan) else None


def _kernel_run(s: _Setting, direction: str, plan: Plan) -> Callable:
    if direction == "forward":
        ready = launcher.ready_forward(plan, s.q, s.k, s.v, s.call)
        return lambda: ready.run(s.q, s.k, s.v, s.call)
    forward = execution.decide("forward", s.q, s.k, s.v, s.call)
    out, logsumexp, _ = launcher.forward(forward, s.q, s.k, s.v, s.call)
    dout = torch.randn_like(out)
    ready = launcher.ready_backward(plan, dout, s.q, s.k, s.v, out, s.call)
    return lambda: ready.run(dout, None, s.q, s.k, s.v, out, logsumexp, s.call)


# ---- the table ----


def table(report: dict, family: str = "sm80") -> str:
    """A CostReport as JSON holds it, as a Markdown table of one family's features: cost forward / backward by head dim."""
    figures: dict[str, dict[tuple[int, str, str], dict]] = {}
    own = {f"{direction}_{family}" for direction in DIRECTIONS}
    features = {cost["feature"] for cost in report["costs"] if cost["kernel"] in own}
    for cost in report["costs"]:
        if cost["feature"] in features:
            figures.setdefault(cost["feature"], {})[cost["head_dim"], cost["direction"], cost["kernel"]] = cost
    head_dims = sorted({cost["head_dim"] for cost in report["costs"]})

    def cell(row: dict, head_dim: int, key: str, digits: int) -> str:
        found = [row.get((head_dim, d, f"{d}_{family}"), {}).get(key) for d in DIRECTIONS]
        return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in found)

    def against(row: dict, head_dim: int, peer: str) -> str:
        found = [
            (row.get((head_dim, d, f"{d}_{family}"), {}).get("tflops"), row.get((head_dim, d, peer), {}).get("tflops"))
            for d in DIRECTIONS
        ]
        if not any(theirs for _, theirs in found):
            return ""
        return " / ".join("-" if not (ours and theirs) else f"{ours / theirs:.2f}" for ours, theirs in found)

    peers = [peer for peer in PEERS if any(cost["kernel"] == peer for cost in report["costs"])]
    titles = ["TFLOP/s", "cost", *(f"against {PEERS[peer]}" for peer in peers)]
    columns = [f"d{d}: {what}" for d in head_dims for what in titles]
    lines = [f"| feature | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for feature, row in figures.items():
        cells = []
        for d in head_dims:
            cells += [cell(row, d, "tflops", 0), cell(row, d, "cost", 2), *(against(row, d, peer) for peer in peers)]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)
