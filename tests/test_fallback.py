"""The exact fallback against the naive reference: every feature alone and the pairs that interact, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashpatch import dropout, fallback, reference, score_tiles, tolerance
from flashpatch.call import Call


@dataclass(frozen=True)
class Case:
    """One problem, small enough for a whole score matrix; inputs are drawn from it by `Inputs`.

    `bias` and `mask` name the dimensions they have, the others are broadcast: "BHQK" full, "B11K" padding, ...
    """

    batch: int = 2
    seqlen_q: int = 19
    seqlen_k: int = 23
    heads_q: int = 4
    heads_kv: int = 4
    head_dim: int = 8
    head_dim_v: int = 8
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    bias: str = ""
    bias_has_infinity: bool = False
    mask: str = ""
    alibi: str = ""  # "H" or "BH"
    sinks: bool = False
    key_ranges: str = ""  # "BQ", "B", "Q" or "1"
    seqused: tuple[int, ...] = ()
    lengths_q: tuple[int, ...] = ()  # varlen
    lengths_k: tuple[int, ...] = ()
    rows_after: int = 0  # varlen: rows of q and k after the last sequence
    dropout_p: float = 0.0
    scale: float = 1.0  # of q, for large scores
    layout: str = "contiguous"  # or "heads_first" (transposed), "sliced" (head_dim is part of a wider tensor)


CASES = {
    "plain": Case(),
    "batch=1-heads=1": Case(batch=1, heads_q=1, heads_kv=1),
    "q=1": Case(seqlen_q=1),
    "k=1": Case(seqlen_k=1),
    "q=k=1": Case(seqlen_q=1, seqlen_k=1, head_dim=1, head_dim_v=1),
    "d=5-dv=8": Case(head_dim=5),
    "d=16-dv=3": Case(head_dim=16, head_dim_v=3),
    "gqa": Case(heads_kv=2),
    "mqa": Case(heads_kv=1),
    "heads_first": Case(layout="heads_first"),
    "sliced": Case(layout="sliced", heads_kv=2),
    "large-scores": Case(scale=60.0),
    # Where rows look.
    "causal": Case(causal=True),
    "causal-q=k": Case(causal=True, seqlen_q=21, seqlen_k=21),
    "causal-q=5-k=67": Case(causal=True, seqlen_q=5, seqlen_k=67),
    "causal-q=67-k=5-empty_rows": Case(causal=True, seqlen_q=67, seqlen_k=5),
    "causal-q=2-k=1": Case(causal=True, seqlen_q=2, seqlen_k=1),
    "causal-gqa-dv": Case(causal=True, heads_kv=2, head_dim_v=12),
    "window=3,0": Case(window=(3, 0)),
    "window=0,4": Case(window=(0, 4)),
    "window=0,0": Case(window=(0, 0)),
    "window=2,5-q>k": Case(window=(2, 5), seqlen_q=40, seqlen_k=9),
    "window=-1,4": Case(window=(-1, 4)),
    "window=6,-1": Case(window=(6, -1)),
    "window=5,3-causal": Case(window=(5, 3), causal=True),
    "seqused": Case(seqused=(23, 11)),
    "seqused=0": Case(seqused=(7, 0)),
    "seqused-causal": Case(seqused=(23, 11), causal=True),
    "seqused-window": Case(seqused=(9, 20), window=(4, 2)),
    "seqused-window-left": Case(seqused=(9, 20), window=(4, -1), heads_kv=2),
    "key_ranges=BQ": Case(key_ranges="BQ"),
    "key_ranges=B-causal": Case(key_ranges="B", causal=True),
    "key_ranges=Q-window": Case(key_ranges="Q", window=(7, 7)),
    "key_ranges=1": Case(key_ranges="1"),
    "key_ranges=BQ-seqused-mask": Case(key_ranges="BQ", seqused=(22, 13), mask="BHQK"),
    "mask=BHQK": Case(mask="BHQK"),
    "mask=B11K": Case(mask="B11K"),
    "mask=1HQ1": Case(mask="1HQ1"),
    "mask=BHQK-gqa": Case(mask="BHQK", heads_kv=2),
    "mask=B1QK-causal-mqa": Case(mask="B1QK", causal=True, heads_kv=1),
    # What scores are.
    "softcap": Case(softcap=2.0),
    "softcap-large-scores-causal": Case(softcap=5.0, scale=30.0, causal=True),
    "bias=BHQK": Case(bias="BHQK"),
    "bias=1HQK": Case(bias="1HQK"),
    "bias=B11K": Case(bias="B11K"),
    "bias=11Q1": Case(bias="11Q1"),
    "bias=1111": Case(bias="1111"),
    "bias=1HQK-gqa-causal": Case(bias="1HQK", heads_kv=2, causal=True),
    "bias=BHQK-mask=B11K": Case(bias="BHQK", mask="B11K"),
    "bias=-inf": Case(bias="B1QK", bias_has_infinity=True),
    "bias=-inf-causal-softcap": Case(bias="BHQK", bias_has_infinity=True, causal=True, softcap=3.0),
    "alibi=H": Case(alibi="H"),
    "alibi=BH-causal-gqa": Case(alibi="BH", causal=True, heads_kv=2),
    "alibi-seqused": Case(alibi="H", seqused=(23, 11)),
    "alibi-q>k": Case(alibi="H", seqlen_q=31, seqlen_k=8),
    "sinks": Case(sinks=True),
    "sinks-gqa-causal-empty_rows": Case(sinks=True, heads_kv=2, causal=True, seqlen_q=40, seqlen_k=9),
    "sinks-softcap-alibi": Case(sinks=True, softcap=2.0, alibi="H"),
    "sinks-window-mask": Case(sinks=True, window=(4, 0), mask="BHQK"),
    "bias-alibi-softcap-sinks-mask": Case(
        bias="1HQK", alibi="BH", softcap=4.0, sinks=True, mask="B1QK", heads_kv=2, head_dim_v=6
    ),
    # Dropout.
    "dropout": Case(dropout_p=0.25),
    "dropout=1": Case(dropout_p=1.0),
    "dropout-bias": Case(dropout_p=0.4, bias="1HQK"),
    "dropout-gqa-causal-sinks": Case(dropout_p=0.1, heads_kv=2, causal=True, sinks=True, seqlen_q=50, seqlen_k=37),
    "dropout-window-seqused": Case(dropout_p=0.5, window=(9, 1), seqused=(21, 9)),
    # Sequences of different lengths.
    "varlen": Case(lengths_q=(7, 1, 12), lengths_k=(5, 9, 12)),
    "varlen-causal": Case(lengths_q=(7, 1, 12), lengths_k=(5, 9, 12), causal=True, heads_kv=2),
    "varlen-empty": Case(lengths_q=(0, 4, 3, 0, 6), lengths_k=(3, 0, 8, 0, 5)),
    "varlen-rows_after": Case(lengths_q=(5, 6), lengths_k=(9, 4), rows_after=3, causal=True, sinks=True),
    "varlen-window-seqused": Case(lengths_q=(7, 9), lengths_k=(15, 12), window=(3, 1), seqused=(11, 12)),
    "varlen-alibi=BH-gqa": Case(lengths_q=(7, 9), lengths_k=(15, 6), alibi="BH", heads_kv=2),
    "varlen-bias=BHQK": Case(lengths_q=(7, 9), lengths_k=(15, 6), bias="BHQK", heads_kv=2),
    "varlen-bias=1HQK-softcap": Case(lengths_q=(7, 9), lengths_k=(15, 6), bias="1HQK", softcap=2.0),
    "varlen-bias=B11K-mask=B1QK": Case(lengths_q=(7, 9), lengths_k=(15, 6), bias="B11K", mask="B1QK"),
    "varlen-key_ranges=BQ": Case(lengths_q=(7, 9), lengths_k=(15, 6), key_ranges="BQ", sinks=True),
    "varlen-key_ranges=B-causal": Case(lengths_q=(7, 9), lengths_k=(15, 6), key_ranges="B", causal=True),
    "varlen-dropout": Case(lengths_q=(17, 0, 9), lengths_k=(15, 3, 36), dropout_p=0.3, causal=True, heads_kv=2),
    "varlen-many": Case(lengths_q=tuple(range(12)), lengths_k=tuple(range(12)), causal=True),
    # Nothing there.
    "batch=0": Case(batch=0, bias="1HQK", sinks=True),
    "q=0": Case(seqlen_q=0, bias="B11K", causal=True),
    "k=0": Case(seqlen_k=0, bias="BHQK", mask="BHQK"),
    "k=0-sinks": Case(seqlen_k=0, sinks=True),
    "k=0-sinks-causal": Case(seqlen_k=0, sinks=True, causal=True),
    "varlen-nothing": Case(lengths_q=(0, 0), lengths_k=(0, 0), causal=True),
    "varlen-batch=0": Case(lengths_q=(), lengths_k=(), rows_after=2, batch=0, causal=True, key_ranges="B"),
}
ALL = pytest.mark.parametrize("name", CASES)
# One of each kind of arithmetic; masks do not depend on the dtype.
ROUNDED = [
    "plain",
    "gqa",
    "causal",
    "causal-q=67-k=5-empty_rows",
    "sinks-softcap-alibi",
    "bias=1HQK",
    "bias=-inf",
    "bias-alibi-softcap-sinks-mask",
    "dropout-bias",
    "varlen-causal",
    "varlen-bias=BHQK",
    "batch=0",
]


class Inputs:
    """Random tensors for a case, as the fallback's `call` and as the reference's keywords (`options`)."""

    def __init__(self, case: Case, dtype, seed=0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        self.case = case
        varlen = bool(case.lengths_q) or case.rows_after > 0
        batch, seqlen_q, seqlen_k = case.batch, case.seqlen_q, case.seqlen_k
        if varlen:
            batch = len(case.lengths_q)
            seqlen_q, seqlen_k = max(case.lengths_q, default=0), max(case.lengths_k, default=0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        def rows(lengths, seqlen, heads, d):
            shape = (sum(lengths) + case.rows_after,) if varlen else (batch, seqlen)
            if case.layout == "sliced":
                return normal(*shape, heads, 2 * d + 1)[..., 1 : d + 1]
            if case.layout == "heads_first":
                return normal(*shape[:-1], heads, shape[-1], d).transpose(-3, -2)
            return normal(*shape, heads, d)

        self.q = rows(case.lengths_q, seqlen_q, case.heads_q, case.head_dim) * case.scale
        self.k = rows(case.lengths_k, seqlen_k, case.heads_kv, case.head_dim)
        self.v = rows(case.lengths_k, seqlen_k, case.heads_kv, case.head_dim_v)
        self.dout = normal(*self.q.shape[:-1], case.head_dim_v)
        lse_shape = (case.heads_q, self.q.shape[0]) if varlen else (batch, case.heads_q, seqlen_q)
        self.dlogsumexp = normal(*lse_shape).to(torch.promote_types(dtype, torch.float32))
        full = (batch, case.heads_q, seqlen_q, seqlen_k)

        def sized(dims):
            return [1 if dim == "1" else size for dim, size in zip(dims, full, strict=True)]

        self.bias = self.sinks = mask = key_ranges = slopes = None
        if case.bias:
            self.bias = normal(*sized(case.bias))
            if case.bias_has_infinity:
                self.bias[torch.rand(self.bias.shape, generator=generator) < 0.4] = -math.inf
                self.bias[..., 2, :] = -math.inf
        if case.mask:
            mask = torch.rand(sized(case.mask), generator=generator) < 0.6
            mask[..., :1, :] &= mask.shape[-2] == 1  # the first row sees nothing, if rows differ
        if case.sinks:
            self.sinks = normal(case.heads_q).to(torch.promote_types(dtype, torch.float32))
            self.sinks[-1:] = -math.inf
        if case.key_ranges:
            shape = (batch if "B" in case.key_ranges else 1, seqlen_q if "Q" in case.key_ranges else 1, 2)
            key_ranges = torch.randint(-2, seqlen_k + 3, shape, generator=generator, dtype=torch.int32)
            key_ranges = key_ranges.sort(-1).values
            if "Q" in case.key_ranges:
                key_ranges[:, -1:] = key_ranges[:, -1:].flip(-1)  # ends before it begins
        if case.alibi:
            slopes = torch.rand(*((batch,) if case.alibi == "BH" else ()), case.heads_q, generator=generator)
        seqused = torch.tensor(case.seqused, dtype=torch.int32) if case.seqused else None
        cu_seqlens = [None, None]
        if varlen:
            cu_seqlens = [
                torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
                for lengths in (case.lengths_q, case.lengths_k)
            ]
        rng_state = torch.tensor([-3 * 2**40 + 12345 + seed, 2**33 + 7])
        keep = reference.dropout_keep(rng_state, case.dropout_p, *full) if case.dropout_p else None

        self.options = {
            "causal": case.causal,
            "window_size": case.window,
            "softcap": case.softcap,
            "mask": mask,
            "alibi_slopes": slopes,
            "key_ranges": key_ranges,
            "cu_seqlens_q": cu_seqlens[0],
            "cu_seqlens_k": cu_seqlens[1],
            "seqused_k": seqused,
            "dropout_p": case.dropout_p,
            "keep": keep,
        }
        left, right = case.window
        if case.causal:
            right = 0 if right < 0 else min(right, 0)
        self.call = Call(
            softmax_scale=case.head_dim**-0.5,
            max_seqlen_q=seqlen_q,
            max_seqlen_k=seqlen_k,
            window_left=left,
            window_right=right,
            softcap=case.softcap,
            dropout_p=case.dropout_p,
            bias=None if self.bias is None else self.bias.expand(full),
            mask=None if mask is None else mask.expand(full),
            key_ranges=None if key_ranges is None else key_ranges.expand(batch, seqlen_q, 2),
            alibi_slopes=None if slopes is None else slopes.expand(batch, case.heads_q),
            sinks=self.sinks,
            cu_seqlens_q=cu_seqlens[0],
            cu_seqlens_k=cu_seqlens[1],
            seqused_k=seqused,
            rng_state=rng_state if case.dropout_p else None,
        )

    def run(self):
        """The fallback's results by name."""
        call, qkv = self.call, (self.q, self.k, self.v)
        out, logsumexp = fallback.forward(*qkv, call)
        grads = fallback.backward(self.dout, self.dlogsumexp, *qkv, out, logsumexp, call)
        names = ("out", "logsumexp", "dq", "dk", "dv", "dbias", "dsinks")
        results = {name: x for name, x in zip(names, (out, logsumexp, *grads), strict=True) if x is not None}
        if self.bias is not None:
            reduced = [
                1 if size > 1 and stride == 0 else size
                for size, stride in zip(call.bias.shape, call.bias.stride(), strict=True)
            ]
            assert list(results["dbias"].shape) == reduced
            results["dbias"] = results["dbias"].sum_to_size(self.bias.shape)  # expanded to size 0
        return results

    def expected(self, upcast=True):
        """The reference's results by name: in fp64, or, not upcast, as eager computes them in the inputs' dtype."""

        def leaf(x):
            return None if x is None else x.to(torch.float64 if upcast else x.dtype).requires_grad_()

        leaves = {name: leaf(getattr(self, name)) for name in ("q", "k", "v", "bias", "sinks")}
        out, logsumexp = reference.attention(**leaves, **self.options, upcast=upcast)
        seen = torch.where(logsumexp.isfinite(), logsumexp * self.dlogsumexp, 0)
        loss = (out * self.dout).sum() + seen.sum()
        leaves = {f"d{name}": x for name, x in leaves.items() if x is not None}
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        else:  # an empty batch: nothing was computed from the inputs
            grads = [None] * len(leaves)
        grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves.values(), strict=True)]
        return {"out": out.detach(), "logsumexp": logsumexp.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads have nothing to share in tensors this small, and waiting for each other on a busy machine is slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["one_tile", "tiny_tiles"])
def tiles(request, monkeypatch):
    """Everything in one tile, and many tiles whose edges fall anywhere."""
    if request.param == "tiny_tiles":
        monkeypatch.setattr(score_tiles, "TILE_SCORES", 1)
        monkeypatch.setattr(score_tiles, "TILE_SCORES_CPU", 1)
        monkeypatch.setattr(score_tiles, "TILE_MINIMUM", 7)
        monkeypatch.setattr(score_tiles, "TILE_ROWS", 5)


@pytest.fixture
def as_on_a_device(monkeypatch):
    """The fallback may not look at values, as on a GPU: nothing skipped by values, NaN contained without looking."""
    monkeypatch.setattr(score_tiles, "_on_host", lambda device: False)


def assert_equal(config, actual, expected, tolerance=1e-10):
    """Equality up to the last digits of fp64, in shape and in every value, NaN never."""
    assert actual.keys() == expected.keys(), config
    for name, x in actual.items():
        assert x.isnan().sum() == 0, f"{config}: NaN in {name}"
        torch.testing.assert_close(
            x,
            expected[name].to(x.dtype),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{config} {name}: {text}",
        )


# ---- against the reference ----


@ALL
def test_float64(name, tiles):
    inputs = Inputs(CASES[name], torch.float64)
    assert_equal(name, inputs.run(), inputs.expected())


@ALL
def test_float64_without_reading_values(name, tiles, as_on_a_device):
    inputs = Inputs(CASES[name], torch.float64, seed=1)
    assert_equal(name, inputs.run(), inputs.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ROUNDED)
def test_tolerance(name, dtype, tiles):
    inputs = Inputs(CASES[name], dtype, seed=2)
    actual, eager, expected = inputs.run(), inputs.expected(upcast=False), inputs.expected()
    assert actual.keys() == expected.keys()
    for result, x in actual.items():
        assert x.dtype == (torch.float32 if result in ("logsumexp", "dsinks") else dtype)
        factor = tolerance.GRADIENT_FACTOR if result.startswith("d") else tolerance.FORWARD_FACTOR
        comparison = tolerance.compare(x, eager[result], expected[result], factor=factor)
        assert comparison.ok, comparison.message(f"{name} {dtype} {result}")


def test_large_scores_float32():
    """The rule for what the forward gives. Gradients also carry what rounding the stored logsumexp to fp32 costs.

    Eager keeps its probabilities; the backward recomputes them as exp(s - logsumexp), so that each is off by the
    rounding of a logsumexp of hundreds, about as much again as the rounding of the scores themselves.
    """
    inputs = Inputs(Case(scale=60.0, causal=True), torch.float32)
    actual, eager, expected = inputs.run(), inputs.expected(upcast=False), inputs.expected()
    rounding = 2.0**-24 * expected["logsumexp"].abs().max().item()
    assert expected["logsumexp"].max() > 100
    for result in ("out", "logsumexp"):
        comparison = tolerance.compare(actual[result], eager[result], expected[result])
        assert comparison.ok, comparison.message(f"large scores {result}")
    for result in ("dq", "dk", "dv"):
        error = (actual[result].double() - expected[result]).abs().max()
        assert error < 8 * rounding * expected[result].abs().max()


def test_reference_is_torch_attention():
    """The yardstick itself, against PyTorch's attention (top-left causal: equal lengths) and its own gradients."""
    inputs = Inputs(Case(seqlen_q=21, seqlen_k=21, causal=True, heads_kv=2), torch.float64)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out, logsumexp = reference.attention(inputs.q, inputs.k, inputs.v, causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 8**-0.5
    scores = scores.masked_fill(torch.ones(21, 21, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [1, 2, 4, 8, 9, 10])
@pytest.mark.parametrize("seqlen_q", [1, 3, 9, 14])
def test_window_is_inclusive(window, seqlen_q):
    """With one-hot values and equal scores a row of the output shows which keys it saw."""
    seqlen_k = 9
    q, k = torch.zeros(1, seqlen_q, 1, 4), torch.zeros(1, seqlen_k, 1, 4)
    v = torch.eye(seqlen_k)[None, :, None]
    out, _ = fallback.forward(q, k, v, Call(1.0, seqlen_q, seqlen_k, window_left=window - 1, window_right=0))
    for i in range(seqlen_q):
        last = i + seqlen_k - seqlen_q
        seen = [j for j in range(seqlen_k) if last - window < j <= last]
        assert out[0, i, 0].nonzero().flatten().tolist() == seen


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(strategies.data())
def test_any_problem(data):
    """Features in any combination, lengths, heads and strides at random."""

    def draw(*choices):
        return data.draw(strategies.sampled_from(choices))

    heads_kv, group = data.draw(strategies.integers(1, 3)), data.draw(strategies.integers(1, 3))
    varlen, batch = data.draw(strategies.booleans()), data.draw(strategies.integers(1, 3))
    length = strategies.integers(0, 30)
    lengths_q, lengths_k = (tuple(data.draw(length) for _ in range(batch)) for _ in range(2))
    case = Case(
        batch=batch,
        seqlen_q=data.draw(length),
        seqlen_k=data.draw(length),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=data.draw(strategies.integers(1, 9)),
        head_dim_v=data.draw(strategies.integers(1, 9)),
        causal=data.draw(strategies.booleans()),
        window=(draw(-1, -1, 0, 3, 40), draw(-1, -1, 0, 2, 40)),
        softcap=draw(0.0, 0.0, 1.5),
        bias=draw("", "", "BHQK", "1HQK", "B11K", "11QK"),
        mask=draw("", "", "BHQK", "B11K", "1HQ1"),
        alibi=draw("", "", "H", "BH"),
        sinks=data.draw(strategies.booleans()),
        key_ranges=draw("", "", "BQ", "B", "Q", "1"),
        seqused=tuple(data.draw(length) for _ in range(batch)) if data.draw(strategies.booleans()) else (),
        lengths_q=lengths_q if varlen else (),
        lengths_k=lengths_k if varlen else (),
        dropout_p=draw(0.0, 0.0, 0.3),
        layout=draw("contiguous", "heads_first", "sliced"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_tiles, "TILE_SCORES_CPU", 1)
        patch.setattr(score_tiles, "TILE_MINIMUM", data.draw(strategies.integers(1, 12)))
        patch.setattr(score_tiles, "TILE_ROWS", data.draw(strategies.integers(1, 40)))
        inputs = Inputs(case, torch.float64, seed=data.draw(strategies.integers(0, 2**31)))
        assert_equal(str(case), inputs.run(), inputs.expected())


# ---- what must not leak ----

HIDING = ["causal", "window=3,0", "seqused-causal", "key_ranges=BQ", "mask=B11K", "varlen-causal", "varlen-rows_after"]


@pytest.mark.parametrize(
    "poison, softcap",
    [(math.nan, 0.0), (math.inf, 0.0), (-math.inf, 0.0), (math.nan, 2.0)],
    ids=["nan", "inf", "k=-inf", "nan-softcap"],
)
@pytest.mark.parametrize("looks", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", HIDING)
def test_a_poisoned_key_reaches_only_rows_that_see_it(name, looks, poison, softcap, tiles, monkeypatch):
    """Rows that do not see the broken key, and keys that those rows alone see, keep every digit; the others show NaN, out
    of an infinite K what eager attention has there: a score of -inf is a probability of 0, one of inf NaN."""
    monkeypatch.setattr(score_tiles, "_on_host", lambda device: looks)
    case = replace(CASES[name], bias="BHQK", softcap=softcap)
    clean = Inputs(case, torch.float64)
    key = (0, 6) if clean.call.cu_seqlens_k is None else (6,)

    # The reference says who sees the key: its value has a gradient only through rows that see it.
    q, k, v = clean.q, clean.k, clean.v.clone().requires_grad_()
    out, _ = reference.attention(q, k, v, bias=clean.bias, **clean.options)
    rows = out.sum(-1)  # [..., heads]
    sees = torch.stack([torch.autograd.grad(x, v, retain_graph=True)[0][key].abs().sum() > 0 for x in rows.flatten()])
    sees = sees.view(rows.shape)
    assert not sees.all(), "the case must hide the key from somebody"

    expected = clean.run()
    broken = Inputs(case, torch.float64)
    if poison == -math.inf:
        broken.k[key][:, 0] = poison  # one element, and a V that shows nothing
    else:
        broken.k[key] = broken.v[key] = poison
    if clean.call.cu_seqlens_k is None:
        # A bias may be NaN where the row does not see the key.
        broken.bias[0, :, :, 6] = torch.where(sees[0].t(), broken.bias[0, :, :, 6], math.nan)
    actual = broken.run()
    for result in ("out", "dq"):
        torch.testing.assert_close(actual[result][~sees], expected[result][~sees], rtol=1e-10, atol=1e-10)
        if result == "dq" or poison != -math.inf:
            assert actual[result][sees].isnan().all(), "whoever sees a NaN must show it"
    if poison == -math.inf:
        eager = broken.expected()
        torch.testing.assert_close(actual["out"], eager["out"], rtol=1e-10, atol=1e-10, equal_nan=True)
        expected |= {name: eager[name] for name in ("dk", "dv", "dbias")}
    blind = ~sees.transpose(-1, -2)
    torch.testing.assert_close(actual["logsumexp"][blind], expected["logsumexp"][blind], rtol=1e-10, atol=1e-10)
    for result in ("dk", "dv", "dbias"):
        reached = actual[result].isnan()
        assert reached.any() == sees.any()
        torch.testing.assert_close(actual[result][~reached], expected[result][~reached], rtol=1e-10, atol=1e-10)
    if not sees.any():
        assert_equal(name, actual, expected)


@pytest.mark.parametrize("name", ["seqused=0", "mask=B11K", "varlen-rows_after", "key_ranges=B-causal"])
def test_keys_nobody_sees_may_hold_anything(name, tiles):
    """Stale cache tails and padding: no digit of any result moves, gradients of these keys are 0."""
    inputs = Inputs(CASES[name], torch.float64)
    expected = inputs.run()
    unseen = (expected["dv"] == 0).all(-1).all(-1)
    assert unseen.any()
    inputs.k[unseen] = math.nan
    inputs.v[unseen] = math.inf
    assert_equal(name, inputs.run(), expected)


def test_a_poisoned_row_reaches_only_keys_that_it_sees(tiles):
    """A NaN in q or dout of row 4 gives NaN to the keys up to 4 and leaves the later ones alone."""
    case = Case(seqlen_q=12, seqlen_k=12, causal=True)
    expected = Inputs(case, torch.float64).run()
    for spoil in ("q", "dout"):
        inputs = Inputs(case, torch.float64)
        getattr(inputs, spoil)[0, 4, 1] = math.nan
        actual = inputs.run()
        for result in ("dk", "dv"):
            touched = torch.zeros(case.batch, 12, case.heads_kv, dtype=torch.bool)
            touched[0, :5, 1] = True
            assert actual[result][touched].isnan().all()
            torch.testing.assert_close(actual[result][~touched], expected[result][~touched], rtol=1e-10, atol=1e-10)


def test_empty_rows():
    """Rows that see nothing: out 0, logsumexp -inf, gradients 0, even if their logsumexp gets a NaN gradient."""
    case = Case(seqlen_q=9, seqlen_k=4, causal=True)
    hidden_by_bias = Case(seqlen_q=9, seqlen_k=4, bias="BHQK")
    for inputs in (Inputs(case, torch.float32), Inputs(hidden_by_bias, torch.float32)):
        inputs.dlogsumexp[:, :, :5] = math.nan
        if inputs.bias is not None:
            inputs.bias[:, :, :5] = -math.inf
        results = inputs.run()
        assert (results["out"][:, :5] == 0).all() and (results["dq"][:, :5] == 0).all()
        assert (results["logsumexp"][:, :, :5] == -math.inf).all()
        assert all(not x.isnan().any() for x in results.values())


def test_sink_of_minus_infinity_is_no_sink():
    with_sink, without = Inputs(Case(sinks=True), torch.float64), Inputs(Case(), torch.float64)
    with_sink.sinks.fill_(-math.inf)
    actual, expected = with_sink.run(), without.run()
    assert (actual.pop("dsinks") == 0).all()
    assert_equal("sink -inf", actual, expected)


# ---- memory, devices, context ----


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor any operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if torch.is_tensor(x):
                stored = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
                self.elements = max(self.elements, stored)
        return result


@pytest.mark.parametrize("name", ["causal", "window=3,0", "gqa", "dropout", "sinks-softcap-alibi", "bias=B11K"])
def test_memory_is_linear(name, monkeypatch):
    """No tensor grows with seqlen_q * seqlen_k: four times the length makes none more than four times as large."""
    monkeypatch.setattr(score_tiles, "TILE_SCORES_CPU", 1 << 13)
    largest = []
    for seqlen in (96, 384):
        inputs = Inputs(replace(CASES[name], batch=1, seqlen_q=seqlen, seqlen_k=seqlen), torch.float32)
        with LargestTensor() as tracked:
            inputs.run()
        largest.append(tracked.elements)
    assert largest[1] <= 4 * largest[0]
    assert largest[1] < 384 * 384 / 2


@ALL
def test_never_waits_for_a_device(name):
    """Meta tensors have no values: reading one on the host, or a shape that depends on one, raises."""
    inputs = Inputs(CASES[name], torch.bfloat16)

    def without_values(x):
        return x.to("meta") if torch.is_tensor(x) else x

    call = Call(**{field: without_values(getattr(inputs.call, field)) for field in Call.__slots__})
    q, k, v = (without_values(x) for x in (inputs.q, inputs.k, inputs.v))
    out, logsumexp = fallback.forward(q, k, v, call)
    dout, dlogsumexp = without_values(inputs.dout), without_values(inputs.dlogsumexp)
    dq, dk, dv, _, _ = fallback.backward(dout, dlogsumexp, q, k, v, out, logsumexp, call)
    assert out.shape == (*q.shape[:-1], v.shape[-1]) and out.dtype == q.dtype and out.is_contiguous()
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert logsumexp.dtype == torch.float32
    with pytest.raises((RuntimeError, NotImplementedError)):
        logsumexp.sum().item()


def test_autocast_does_not_round():
    inputs = Inputs(Case(causal=True), torch.float32)
    expected = inputs.run()
    with torch.autocast("cpu", torch.bfloat16):
        actual = inputs.run()
    assert all(torch.equal(x, expected[name]) for name, x in actual.items())


def test_no_graph_is_recorded():
    inputs = Inputs(Case(), torch.float32)
    inputs.q.requires_grad_()
    out, logsumexp = fallback.forward(inputs.q, inputs.k, inputs.v, inputs.call)
    assert not out.requires_grad and not logsumexp.requires_grad


def test_inputs_are_left_alone():
    """Views of the inputs are handed around; none is written to."""
    for name in ("plain", "causal", "bias-alibi-softcap-sinks-mask", "varlen-bias=BHQK", "batch=1-heads=1"):
        inputs = Inputs(CASES[name], torch.float32)
        tensors = [inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlogsumexp, inputs.bias, inputs.sinks]
        before = [None if x is None else x.clone() for x in tensors]
        inputs.run()
        assert all(x is None or torch.equal(x, y) for x, y in zip(tensors, before, strict=True)), name


def test_backward_without_dlogsumexp():
    inputs = Inputs(CASES["causal"], torch.float64)
    call, qkv = inputs.call, (inputs.q, inputs.k, inputs.v)
    out, logsumexp = fallback.forward(*qkv, call)
    zeros = torch.zeros_like(inputs.dlogsumexp)
    without = fallback.backward(inputs.dout, None, *qkv, out, logsumexp, call)
    with_zeros = fallback.backward(inputs.dout, zeros, *qkv, out, logsumexp, call)
    assert all(torch.equal(x, y) for x, y in zip(without[:3], with_zeros[:3], strict=True))


def test_expanded_gradients():
    """`out.sum().backward()` hands over a dout whose every stride is 0."""
    inputs = Inputs(CASES["causal-gqa-dv"], torch.float64)
    inputs.dout = torch.ones((), dtype=torch.float64).expand(inputs.dout.shape)
    assert_equal("expanded", inputs.run(), inputs.expected())


# ---- Philox ----

# Known answers of Random123's Philox4x32-7 (kat_vectors).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter, key, words):
    tensors = [torch.tensor(x) for x in (*counter, *key)]
    assert tuple(int(x) for x in dropout.philox(tensors[:4], tensors[4:])) == words
    assert tuple(int(x) for x in reference.philox(counter, key)) == words


def test_philox_equals_numpy():
    generator = numpy.random.default_rng(0)
    counter, key = generator.integers(0, 2**32, (4, 1000)), generator.integers(0, 2**32, 2)
    expected = reference.philox(counter, key)
    actual = dropout.philox([torch.from_numpy(c) for c in counter], [torch.tensor(int(k)) for k in key])
    assert all((a.numpy() == e).all() for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share(p):
    """Within 4 sigma overall, and no two heads, batches or offsets share a mask."""
    keep = reference.dropout_keep((99, 0), p, 2, 3, 200, 150)
    count = keep.numel()
    assert abs(int(keep.sum()) - count * (1 - p)) < 4 * math.sqrt(count * p * (1 - p))
    other = reference.dropout_keep((99, 1), p, 2, 3, 200, 150)
    masks = [*keep.flatten(0, 1), *other.flatten(0, 1)]
    agreement = p * p + (1 - p) * (1 - p)
    for a in range(len(masks)):
        for b in range(a):
            assert abs((masks[a] == masks[b]).double().mean() - agreement) < 0.02


def test_dropout_mask_in_the_backward_is_that_of_the_forward():
    """With values of one-hot and dout of ones, dv is the transposed dropped probability matrix, which the forward shows."""
    case = Case(batch=1, heads_q=1, heads_kv=1, seqlen_q=40, seqlen_k=33, head_dim_v=33, dropout_p=0.3)
    inputs = Inputs(case, torch.float64)
    inputs.v = torch.eye(33, dtype=torch.float64)[None, :, None]
    inputs.dout = torch.ones_like(inputs.dout)
    results = inputs.run()
    torch.testing.assert_close(results["dv"][0, :, 0, 0], results["out"][0, :, 0].sum(0), rtol=1e-12, atol=1e-12)


# ---- the tolerance rule ----


def test_comparison_fails_and_says_where():
    expected = torch.linspace(-2, 2, 24, dtype=torch.float64).view(2, 3, 4)
    eager = expected.to(torch.bfloat16)
    assert tolerance.compare(eager.clone(), eager, expected).ok
    wrong = eager.clone()
    wrong[1, 2, 0] += 0.5
    comparison = tolerance.compare(wrong, eager, expected)
    assert not comparison.ok and comparison.worst_index == (1, 2, 0) and comparison.error > comparison.bound
    assert "bf16 causal" in comparison.message("bf16 causal") and "[1, 2, 0]" in comparison.message("bf16 causal")


def test_comparison_of_nan_and_infinity():
    expected = torch.tensor([1.0, -math.inf, 2.0], dtype=torch.float64)
    eager = expected.float()
    assert tolerance.compare(eager, eager, expected).ok
    for value, index in ((math.nan, 0), (math.inf, 1), (0.0, 1), (-math.inf, 2)):
        wrong = eager.clone()
        wrong[index] = value
        comparison = tolerance.compare(wrong, eager, expected)
        assert not comparison.ok and comparison.worst_index == (index,)
    assert not tolerance.compare(eager, torch.full_like(eager, math.nan), expected).ok
    overflowed = torch.full_like(eager, math.inf)
    assert not tolerance.compare(overflowed, overflowed, expected).ok, "that eager overflows too is no excuse"
    assert tolerance.compare(eager[:0], eager[:0], expected[:0]).ok
    with pytest.raises(ValueError, match="shapes differ"):
        tolerance.compare(eager[:2], eager, expected)
