"""What `flashpatch verify` tries: cases that reach every claimed cell and every pair of features, and their inputs.

Data only; tests run the same cases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from . import planning, support_matrix
from .call import DESCALES, Call
from .problem import SCALED, Device, Plan, Problem

SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Case:
    """One attention call to try: what is asked, at which sizes, with which inputs."""

    problem: Problem  # the forward; its backward runs too where the matrix has one
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    values: str = "normal"  # or "large": logits far apart, as real activations have them
    layout: str = "contiguous"  # "transposed": [batch, heads, seqlen, dim] in memory; "sliced": rows of a wider tensor

    @property
    def name(self) -> str:
        problem = self.problem
        dims = f"d{problem.head_dim}" + (f"v{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
        features = "+".join(sorted(problem.features)) or "plain"
        sizes = f"b{self.batch}-q{self.seqlen_q}-k{self.seqlen_k}-h{self.num_heads_q}x{self.num_heads_kv}"
        tile = "-short" if problem.short else ""
        return f"{SHORT[problem.dtype]}-{dims}-{features}-{sizes}-{self.values}-{self.layout}{tile}"


# (seqlen_q, seqlen_k): never multiples of a tile only, both longer and shorter than the other, single rows
EMULATED_SIZES = ((70, 133), (129, 65), (1, 77), (64, 64), (33, 150))
GPU_SIZES = ((113, 203), (1024, 1023), (1, 257), (640, 128), (257, 769))
VALUES = ("normal", "large")
LAYOUTS = ("contiguous", "transposed", "sliced")


def claimed(device: Device) -> dict[str, support_matrix.Cell]:
    """The cells the matrix claims for a device, by name."""
    return {cell.name: cell for cell in planning.support().cells.values() if cell.generation == device.generation}


def cases(device: Device, quick: bool = False) -> list[Case]:
    """What to try on a device so that every claimed cell is reached, and every pair of features that may meet.

    On a GPU each feature is tried alone and in the largest combinations, pairs at the two most used head dims. In the
    emulator, where each combination costs a build, only in the largest ones; pairs, and what calls ask for every day,
    at one head dim. `quick` keeps the two most used head dims.
    """
    on_gpu = device.backend == "gpu"
    buckets = sorted({(cell.dtype, cell.head_dim) for cell in claimed(device).values()})
    found = []
    for dtype, bucket in buckets:
        if quick and bucket not in (64, 128):
            continue
        common = (dtype, bucket) == (buckets[0][0], 64)
        in_pairs = bucket in ((64, 128) if on_gpu else (64,))
        combinations = _combinations(device, dtype, bucket, alone=on_gpu, size=2 if in_pairs else 1)
        if not on_gpu and common:
            combinations = [*EVERYDAY, *combinations]
        for features in combinations:
            found.append(_case(device, dtype, bucket, features, len(found), padded=len(found) % 3 == 1))
        if bucket == 512:  # far apart the other way round
            problem = Problem("forward", dtype, 64, 512, frozenset({"unequal_head_dims"}))
            found.append(replace(_case(device, dtype, 64, problem.features, len(found), padded=False), problem=problem))
        if bucket == 64:
            problem = _problem(dtype, bucket, frozenset())
            sizes = ((2, 0, 5), (2, 5, 0), (0, 5, 5))  # nothing to ask, nothing to read, nobody there
            found += [Case(problem, batch, seqlen_q, seqlen_k, 2, 2) for batch, seqlen_q, seqlen_k in sizes]
    found = [case for case in found if isinstance(planning.resolve(case.problem, device), Plan)]
    return [variant for case in found for variant in _by_length(case, device)]


def _by_length(case: Case, device: Device) -> Iterable[Case]:
    """The case with the tile for any length, and once more where short sequences have a tile of their own. The sizes stay
    as they are: a tile has to be right at every length."""
    yield case
    problems = case.problem, case.problem.backward()
    plans = [(planning.resolve(p, device), planning.resolve(replace(p, short=True), device)) for p in problems]
    if any(isinstance(usual, Plan) and usual.config != short.config for usual, short in plans):
        yield replace(case, problem=replace(case.problem, short=True))


# What most calls look like: a decoder's training, its packed training, a cache, a local layer.
EVERYDAY = tuple(
    frozenset(names)
    for names in ((), ("causal", "gqa"), ("causal", "varlen"), ("causal", "gqa", "seqused_k"), ("causal", "window"))
)


def _case(device: Device, dtype: str, bucket: int, features: frozenset[str], number: int, padded: bool) -> Case:
    sizes = GPU_SIZES if device.backend == "gpu" else EMULATED_SIZES
    if "dropout" in features:  # the reference draws its Philox numbers on the CPU
        sizes = tuple(size for size in sizes if size[0] * size[1] <= 200_000)
    # One row per head is too small a sample: the largest error of eager attention over a few rows of a peaked softmax
    # says nothing of what the next few rows would show.
    batch = 8 if sizes[number % len(sizes)][0] == 1 and "varlen" not in features else 2
    step = planning.head_dim_step(dtype)
    smaller = planning.support().bucket(bucket - step) == bucket and (
        padded or (device.backend != "gpu" and number % 2)
    )
    return Case(
        _problem(dtype, bucket - step if smaller else bucket, features),
        batch,
        *sizes[number % len(sizes)],
        *((4, 2) if "gqa" in features else (2, 2)),
        VALUES[number % 2],
        LAYOUTS[number % 3],
    )


def _problem(dtype: str, head_dim: int, features: frozenset[str]) -> Problem:
    step = planning.head_dim_step(dtype)
    head_dim_v = max(head_dim * 2 // 3 // step * step, step) if "unequal_head_dims" in features else head_dim
    head_dim_v = min(head_dim_v, max(planning.support().head_dims_v))
    return Problem("forward", dtype, head_dim, head_dim_v, features)


def _combinations(device: Device, dtype: str, bucket: int, alone: bool, size: int) -> list[frozenset[str]]:
    """Each feature alone, if asked, and for every kernel sets as large as may be, until all `size` of its features that
    may meet have met on it."""
    matrix = planning.support()
    chosen: dict[frozenset[str], None] = {frozenset(): None}
    for kernel, direction in matrix.kernels.items():
        names = [name for name in matrix.features if name != "plain"]
        features = [name for name in names if matrix.cell(kernel, device.generation, dtype, bucket, name)]

        def runs(asked: Iterable[str], kernel=kernel, direction=direction) -> bool:
            forward = _problem(dtype, bucket, frozenset(asked))
            plan = planning.resolve(replace(forward, direction=direction), device)
            here = isinstance(plan, Plan) and plan.config.kernel == kernel
            return here and isinstance(planning.resolve(forward, device), Plan)

        if alone:
            chosen.update((frozenset([name]), None) for name in features if runs([name]))
        groups = {frozenset(group) for group in itertools.combinations(features, size) if runs(group)}
        met: set[frozenset[str]] = set()
        while unmet := groups - met:
            together = set(min(unmet, key=sorted))
            for name in features:
                if runs(together | {name}):
                    together.add(name)
            chosen[frozenset(together)] = None
            met |= {frozenset(group) for group in itertools.combinations(sorted(together), size)}
    return list(chosen)


# ---- inputs ----


@dataclass
class Inputs:
    """Tensors of one case: q, k, v, the gradients that come in, and the keywords of `flashpatch.attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlogsumexp: torch.Tensor
    keywords: dict
    call: Call


def make_inputs(case: Case, device: torch.device | str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed. Memory beside what a tensor shows is NaN, and so are keys
    that no row may see."""
    features = case.problem.features
    unknown = features - set(_FEATURES)
    if unknown:
        raise ValueError(f"no inputs for the feature {sorted(unknown)[0]!r}; add it to cases._FEATURES")
    draw = _Draw(case, device, seed)
    for name in _FEATURES:  # in a fixed order, so that adding one feature does not change the other's numbers
        if name in features:
            _FEATURES[name](case, draw)
    if case.problem.dtype in SCALED:
        shape = (_batch(case, draw), case.num_heads_kv)
        draw.keywords |= {name: draw.factors(shape) for name in DESCALES}
    if "varlen" in features:
        rows_q, rows_k = int(draw.keywords["cu_seqlens_q"][-1]), int(draw.keywords["cu_seqlens_k"][-1])
        q_shape, k_shape = (rows_q, case.num_heads_q), (rows_k, case.num_heads_kv)
        statistics = (case.num_heads_q, rows_q)
    else:
        q_shape = (case.batch, case.seqlen_q, case.num_heads_q)
        k_shape = (case.batch, case.seqlen_k, case.num_heads_kv)
        statistics = (case.batch, case.num_heads_q, case.seqlen_q)
    scale = 4.0 if case.values == "large" else 1.0
    q = draw.tensor((*q_shape, case.problem.head_dim), scale)
    k = draw.tensor((*k_shape, case.problem.head_dim), scale)
    v = draw.tensor((*k_shape, case.problem.head_dim_v), 1.0)
    _blind_unseen(k, v, draw.keywords)
    dout = draw.tensor((*q_shape, case.problem.head_dim_v), 1.0)
    dlogsumexp = torch.randn(statistics, generator=draw.generator).to(device)
    return Inputs(q, k, v, dout, dlogsumexp, draw.keywords, _call(q, k, case, draw.keywords, seed))


class _Draw:
    """The random numbers and keywords of one case."""

    def __init__(self, case: Case, device, seed: int):
        self.case, self.device = case, device
        self.dtype = getattr(torch, case.problem.dtype)
        self.generator = torch.Generator().manual_seed(seed)
        self.keywords: dict = {}

    def tensor(self, shape: tuple[int, ...], scale: float) -> torch.Tensor:
        room = _room(shape, self.case.layout, self.dtype, self.device)
        return room.copy_(self.normal(shape) * scale)

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def factors(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator).add(0.5).to(self.device)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)


def _room(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device) -> torch.Tensor:
    """Uninitialised rows in a layout; whatever lies between them is NaN."""
    *rows, heads, dim = shape
    if layout == "transposed":
        return torch.full((*rows[:-1], heads, rows[-1], dim), math.nan, dtype=dtype, device=device).transpose(-3, -2)
    if layout == "sliced":
        wider = dim + max(8, 16 // dtype.itemsize)
        return torch.full((*rows, heads + 1, wider), math.nan, dtype=dtype, device=device)[..., :heads, :dim]
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def _causal(case: Case, draw: _Draw) -> None:
    draw.keywords["causal"] = True


def _window(case: Case, draw: _Draw) -> None:
    left = max(case.seqlen_k // 2, 1)
    draw.keywords["window_size"] = (left, -1 if "causal" in case.problem.features else max(case.seqlen_k // 4, 1))


def _varlen(case: Case, draw: _Draw) -> None:
    # a sequence without keys, one without queries, one query against few keys, one of another ratio
    lengths_q = [case.seqlen_q, 3, 0, 1, max(case.seqlen_q // 3, 1)]
    lengths_k = [case.seqlen_k, 0, 5, 2, case.seqlen_k]
    for name, lengths in (("q", lengths_q), ("k", lengths_k)):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        draw.keywords[f"cu_seqlens_{name}"] = starts.to(draw.device)
        draw.keywords[f"max_seqlen_{name}"] = max(lengths)


def _seqused_k(case: Case, draw: _Draw) -> None:
    batch = _batch(case, draw)
    used = [max(case.seqlen_k - 3, 0), 0, 2, 1, case.seqlen_k // 2]
    lengths = list(itertools.islice(itertools.cycle(used), batch))
    draw.keywords["seqused_k"] = torch.tensor(lengths, dtype=torch.int32, device=draw.device)


def _key_ranges(case: Case, draw: _Draw) -> None:
    shape = (_batch(case, draw), _longest(case, draw, "q"))
    keys = _longest(case, draw, "k")
    begin = draw.integers(0, max(keys // 2, 1), shape)
    end = begin + draw.integers(0, keys + 1, shape)  # some rows see nothing, some run past the last key
    draw.keywords["key_ranges"] = torch.stack([begin, end], dim=-1).to(draw.device)


def _mask(case: Case, draw: _Draw) -> None:
    shape = (_batch(case, draw), 1, _longest(case, draw, "q"), _longest(case, draw, "k"))
    mask = torch.rand(shape, generator=draw.generator) > 0.2
    mask[:, :, 1:2] = False  # a row that sees nothing
    mask[..., -1:] = False  # a key nobody sees
    draw.keywords["mask"] = mask.to(draw.device)


def _bias(case: Case, draw: _Draw) -> None:
    shape = (1, case.num_heads_q, _longest(case, draw, "q"), _longest(case, draw, "k"))
    draw.keywords["bias"] = draw.normal(shape).to(draw.dtype).to(draw.device)


def _wide_bias(case: Case, draw: _Draw) -> None:
    shape = (_batch(case, draw), 1, _longest(case, draw, "q"), _longest(case, draw, "k"))
    draw.keywords["bias"] = draw.normal(shape).to(draw.device)


def _alibi(case: Case, draw: _Draw) -> None:
    draw.keywords["alibi_slopes"] = torch.rand(case.num_heads_q, generator=draw.generator).div(16).to(draw.device)


def _softcap(case: Case, draw: _Draw) -> None:
    """Small enough to bend scores of normal numbers, as models have it (30, 50), and so large that tanh is nearly its argument."""
    softcaps = 5.0, 30.0, 50.0, 1000.0
    draw.keywords["softcap"] = softcaps[int(torch.randint(len(softcaps), (), generator=draw.generator))]


def _sinks(case: Case, draw: _Draw) -> None:
    draw.keywords["sinks"] = draw.normal((case.num_heads_q,)).to(draw.device)


def _dropout(case: Case, draw: _Draw) -> None:
    draw.keywords["dropout_p"] = 0.2


def _deterministic(case: Case, draw: _Draw) -> None:
    draw.keywords["deterministic"] = True


# In this order: what comes later may depend on lengths that came before.
_FEATURES: dict[str, Callable[[Case, _Draw], None]] = {
    "plain": lambda case, draw: None,
    "gqa": lambda case, draw: None,  # in the head counts
    "unequal_head_dims": lambda case, draw: None,  # in the head dims
    "varlen": _varlen,
    "seqused_k": _seqused_k,
    "causal": _causal,
    "window": _window,
    "key_ranges": _key_ranges,
    "mask": _mask,
    "bias": _bias,
    "wide_bias": _wide_bias,
    "alibi": _alibi,
    "softcap": _softcap,
    "sinks": _sinks,
    "dropout": _dropout,
    "deterministic": _deterministic,
}


def _batch(case: Case, draw: _Draw) -> int:
    starts = draw.keywords.get("cu_seqlens_q")
    return case.batch if starts is None else len(starts) - 1


def _longest(case: Case, draw: _Draw, name: str) -> int:
    return draw.keywords.get(f"max_seqlen_{name}", getattr(case, f"seqlen_{name}"))


def _blind_unseen(k: torch.Tensor, v: torch.Tensor, keywords: dict) -> None:
    """NaN in keys and values that no row may see: the rest of a cache beyond its length, a key masked everywhere."""
    starts, used, mask = (keywords.get(name) for name in ("cu_seqlens_k", "seqused_k", "mask"))
    if used is not None:
        for number, length in enumerate(used.tolist()):
            if starts is None:
                k[number, length:], v[number, length:] = math.nan, math.nan
            else:
                begin, end = starts[number : number + 2].tolist()
                k[begin + length : end], v[begin + length : end] = math.nan, math.nan
    if mask is not None and starts is None:
        k[:, -1:], v[:, -1:] = math.nan, math.nan


def _call(q: torch.Tensor, k: torch.Tensor, case: Case, keywords: dict, seed: int) -> Call:
    """The Call that `flashpatch.attention` would make of the keywords, with everything expanded."""
    varlen = "cu_seqlens_q" in keywords
    batch = len(keywords["cu_seqlens_q"]) - 1 if varlen else case.batch
    longest_q = keywords["max_seqlen_q"] if varlen else case.seqlen_q
    longest_k = keywords["max_seqlen_k"] if varlen else case.seqlen_k
    left, right = keywords.get("window_size", (-1, -1))
    if keywords.get("causal"):
        right = 0

    def expanded(name: str, shape: tuple[int, ...]):
        value = keywords.get(name)
        return None if value is None else value.expand(shape)

    grid = (batch, case.num_heads_q, longest_q, longest_k)
    dropout = keywords.get("dropout_p", 0.0)
    return Call(
        softmax_scale=case.problem.head_dim**-0.5,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        window_left=left,
        window_right=right,
        softcap=keywords.get("softcap", 0.0),
        dropout_p=dropout,
        deterministic=keywords.get("deterministic", False),
        bias=expanded("bias", grid),
        mask=expanded("mask", grid),
        key_ranges=expanded("key_ranges", (batch, longest_q, 2)),
        alibi_slopes=expanded("alibi_slopes", (batch, case.num_heads_q)),
        sinks=keywords.get("sinks"),
        cu_seqlens_q=keywords.get("cu_seqlens_q"),
        cu_seqlens_k=keywords.get("cu_seqlens_k"),
        seqused_k=keywords.get("seqused_k"),
        rng_state=torch.tensor([seed, 4], dtype=torch.int64, device=q.device) if dropout else None,
        **{name: keywords.get(name) for name in DESCALES},
    )
