"""The kernels themselves, in the emulator: what compat_matrix.yaml claims, drawn problems, and bank conflicts.

By default a small part of the claims that still reaches every kernel, feature, dtype and head dim; `-m slow` has the rest.
"""

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashpatch
from flashpatch import (
    case_runs,
    cases,
    counting,
    emulator,
    kernel_launch,
    kernel_sets,
    launcher,
    planning,
    reference,
    support_matrix,
    tile_counts,
    tolerance,
)
from flashpatch.call import Call
from flashpatch.problem import Plan, Problem

pytestmark = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))

AMPERE = planning.device_for((8, 0), "Ampere", backend="emulated")
HOPPER = planning.device_for((9, 0), "Hopper", backend="emulated")
TURING = planning.device_for((7, 5), "Turing", backend="emulated")
DEVICES = (AMPERE, HOPPER, TURING)
MATRIX = planning.support()
DECODER, PACKED = frozenset(("causal", "gqa")), frozenset(("causal", "varlen"))  # of cases.EVERYDAY
MOST_BUILDS = 100  # of the claims in the default run: each costs a second


# ---- what the matrix claims ----


def plans(case, device):
    return [plan for plan in case_runs.plans_of(case.problem, device) if isinstance(plan, Plan)]


def builds(case, device):
    return {config for plan in plans(case, device) for config in kernel_sets.configs(plan.config)}


def facts(case, device):
    """What a case shows. Empty problems and single rows show no feature: too little of it is left."""
    if 0 in (case.batch, case.seqlen_q, case.seqlen_k):
        return {("sizes", case.batch, case.seqlen_q, case.seqlen_k)}
    if case.seqlen_q == 1:
        return {(plan.config.kernel, "one row") for plan in plans(case, device)[:1]}
    found = {(device.generation, case.layout), (device.generation, case.values)}
    for plan in plans(case, device):
        config = plan.config
        head_dim = max(config.head_dim, config.head_dim_v)
        found |= {(part.kernel, case.problem.dtype) for part in kernel_sets.configs(config)}
        found |= {(config.kernel, feature) for feature in case.problem.features or {"plain"}}
        found |= {(plan.problem.direction, head_dim), (config.kernel, config.num_warps)}
        if device is HOPPER and config.kernel.endswith("sm90"):  # tiles and registers are dealt out anew for each
            found.add((config.kernel, head_dim))
    if case.problem.features in (DECODER, PACKED):
        found.add((device.generation, case.problem.features))
    return found


def covering(claims):
    """Claims that together show everything all of them show, one after another by what is new for each build."""
    facts_of = {claim: facts(*claim) for claim in claims}
    builds_of = {claim: builds(*claim) for claim in claims}
    missing, built, chosen = set().union(*facts_of.values()), set(), []
    while missing:
        best = max(claims, key=lambda claim: len(facts_of[claim] & missing) / (1 + len(builds_of[claim] - built)))
        chosen.append(best)
        missing -= facts_of[best]
        built |= builds_of[best]
    return chosen


CLAIMS = [(case, device) for device in DEVICES for case in cases.cases(device)]
QUICK = covering(CLAIMS)


def expected_launches(case, device):
    """Kernel -> launches: one a kernel, two where a deterministic backward is run again; none for an empty grid."""
    rows, keys = case.batch * case.seqlen_q, case.batch * case.seqlen_k
    expected = Counter()
    for plan in plans(case, device):
        runs = 2 if plan.problem.direction == "backward" and "deterministic" in case.problem.features else 1
        for config in kernel_sets.configs(plan.config):
            by_keys = plan.problem.direction == "backward" and config is plan.config  # one block for keys, not queries
            if keys if by_keys else rows:
                expected[config.kernel] += runs
    return dict(expected)


@pytest.mark.parametrize(
    ("case", "device"),
    [
        pytest.param(*claim, id=f"{claim[1].name}-{claim[0].name}", marks=() if claim in QUICK else pytest.mark.slow)
        for claim in CLAIMS
    ],
)
def test_what_the_matrix_claims(case, device):
    result = case_runs.run_case(case, device, seed=0)
    assert result.error == ""
    assert [check.message for check in result.checks if not check.passed] == []
    assert {"out", "logsumexp"} <= {check.tensor for check in result.checks}
    if len(plans(case, device)) == 2:
        assert {"dq", "dk", "dv"} <= {check.tensor for check in result.checks}
    assert result.launches == expected_launches(case, device)


def test_the_default_run_reaches_every_kernel_and_feature():
    """A new source, kernel, feature, dtype or head dim fails here until some claim in the default run has it."""
    # pairwise has claims of its own: tests/test_pairwise.py
    sources = {
        path.stem for path in support_matrix.find("cuda_src").glob("*.cu") if not path.stem.startswith("pairwise")
    }
    launched = Counter()
    cells = set()
    for case, device in QUICK:
        launched.update(expected_launches(case, device))
        if case.seqlen_q > 1 and case.batch and case.seqlen_k:
            cells |= {tuple(cell.split("/")) for plan in plans(case, device) for cell in plan.cells}
    assert sources == {kernel for kernel, count in launched.items() if count}
    claimed = {(cell.kernel, cell.feature) for cell in MATRIX.cells.values()}
    assert {kernel for kernel, _ in claimed} == set(MATRIX.kernels)
    assert claimed == {(kernel, feature) for kernel, _, _, _, feature in cells}
    assert {(c.kernel, c.dtype) for c in MATRIX.cells.values()} == {(kernel, dtype) for kernel, _, dtype, _, _ in cells}
    directions = {(MATRIX.kernels[kernel], head_dim) for kernel, _, _, head_dim, _ in cells}
    assert directions == {(MATRIX.kernels[c.kernel], f"d{c.head_dim}") for c in MATRIX.cells.values()}
    own = {(c.kernel, f"d{c.head_dim}") for c in MATRIX.cells.values() if c.kernel.endswith("sm90")}
    assert own <= {(kernel, head_dim) for kernel, _, _, head_dim, _ in cells}
    assert {generation for _, generation, *_ in cells} == {device.generation for device in DEVICES}
    assert len({config for claim in QUICK for config in builds(*claim)}) <= MOST_BUILDS


@pytest.mark.parametrize("generation", ["ampere", "hopper"])
@pytest.mark.parametrize("batch, heads", [(2, 0), (0, 2)], ids=["no query heads", "no sequences"])
@pytest.mark.parametrize("feature", ["plain", "mask"])
def test_nothing_is_launched_where_nothing_asks(monkeypatch, generation, batch, heads, feature):
    """Kernels divide by the query heads of a key head, and a mask of no sequences has no memory to be read."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    monkeypatch.setenv("FLASHPATCH_GENERATION", generation)
    monkeypatch.setattr(kernel_launch, "launched", Counter())
    q = torch.randn(batch, 3, heads, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(batch, 4, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    mask = torch.ones(1, 1, 1, 4, dtype=torch.bool) if feature == "mask" else None
    out, logsumexp = flashpatch.attention(q, k, v, mask=mask, return_logsumexp=True)
    out.float().sum().backward()
    assert out.shape == q.shape and logsumexp.shape == (batch, heads, 3) and q.grad.shape == q.shape
    assert torch.equal(k.grad, torch.zeros_like(k)) and torch.equal(v.grad, torch.zeros_like(v))
    assert not kernel_launch.launched


# ---- fp32 ----


def attention_errors(monkeypatch, q, k, v):
    """Largest errors against fp64 of fp32 attention through the emulated kernels, and what was launched."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    counting.reset_counts()
    out = flashpatch.attention(q, k, v)
    expected, _ = reference.attention(q, k, v)
    return float((out.double() - expected).abs().max()), flashpatch.stats()["launches"]


def test_tf32_is_the_users_choice(monkeypatch):
    """Exact by default; one TF32 product where torch's own matrix products may be rounded so, and counted as that."""
    q, k, v = (torch.randn(1, 40, 2, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    error, launches = attention_errors(monkeypatch, q, k, v)
    assert error < 2e-6 and launches == {"forward_sm80": 1}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        error, launches = attention_errors(monkeypatch, q, k, v)
    finally:
        torch.set_float32_matmul_precision(before)
    assert 2e-5 < error < 2e-3 and launches == {"forward_sm80 (TF32)": 1}


def test_nan_of_a_hidden_key_stays_out_of_a_softcaps_gradient(monkeypatch):
    """dS is 0 there, and the derivative of the cap NaN: their product is no gradient."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    q, k, v = (torch.randn(1, 3, 1, 32, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3))
    k[0, 1] = math.nan
    mask = torch.tensor([True, False, True]).expand(1, 1, 3, 3)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    flashpatch.attention(*leaves, mask=mask, softcap=2.0).sum().backward()
    assert q.grad.isfinite().all() and k.grad[0, [0, 2]].isfinite().all() and v.grad.isfinite().all()


@pytest.mark.parametrize("feature, value", [("window", math.nan), ("window", -math.inf), ("mask", math.nan)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_sees_nan_or_inf_becomes_nan(monkeypatch, feature, value, dtype):
    """Key 3 is seen by rows 3 and 4 alone: their dq and its dk and dv are NaN. -Inf has a weight of 0, and 0 * Inf is NaN too."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    q, k, v = (torch.randn(1, 9, 1, 32, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3))
    q, k = q.abs(), k.index_fill(1, torch.tensor([3]), value)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    mask = ((distance == 0) | (distance == 1)).expand(1, 1, 9, 9)
    keywords = {"window": {"window_size": (1, 0)}, "mask": {"mask": mask}}[feature]
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    flashpatch.attention(*leaves, **keywords).float().sum().backward()
    assert q.grad[0, 3:5].isnan().all() and q.grad[0, [0, 1, 2, 5, 6, 7, 8]].isfinite().all()
    assert k.grad[0, 3].isnan().all() and v.grad[0, 3].isnan().all()
    assert all(grad[0, [0, 1, 5, 6, 7, 8]].isfinite().all() for grad in (k.grad, v.grad))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("emulate", ["1", "0"], ids=["kernel", "fallback"])
def test_rows_that_see_nan_or_inf_in_v_behind_a_window_are_nan_with_their_logsumexp(monkeypatch, emulate, value):
    """As README says: in all columns, and dv at every key of such a row; nothing elsewhere. Rows 3 and 4 see key 3."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", emulate)
    q, k, v = (torch.randn(1, 9, 1, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    v[0, 3, 0, 7] = value
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    options = {"window_size": (1, 0), "return_logsumexp": True, "on_decline": "fallback"}
    out, logsumexp = flashpatch.attention(*leaves, **options)
    out.float().sum().backward()
    rows, keys = torch.zeros(9, dtype=torch.bool), torch.zeros(9, dtype=torch.bool)
    rows[3:5], keys[2:5] = True, True
    for found, where in ((out, rows), (v.grad, keys)):
        assert torch.equal(found[0, :, 0].isnan(), where[:, None].expand(9, 32)) and not found.isinf().any()
    assert torch.equal(logsumexp[0, 0].isnan(), rows) and not logsumexp.isinf().any()


@pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
@pytest.mark.parametrize("generation", ["ampere", "hopper"])
@pytest.mark.parametrize(
    ("dtype", "softcap", "scale", "takes"),
    [
        (torch.bfloat16, 1e9, 10.0, True),
        (torch.float16, 1e5, 0.125, True),
        (torch.bfloat16, 5e-7, 0.5, True),
        (torch.float16, 0.01, 1e-10, True),
        (torch.float32, 1e8, 1.0, True),
        (torch.float32, 50.0, 0.125, True),
        (torch.bfloat16, 1.1e9, 11.0, False),
        (torch.float16, 50.0, 4.9e-7, False),
        (torch.bfloat16, 4e-7, 0.5, False),
        (torch.float32, 0.009, 0.9e-10, False),
    ],
)
def test_a_softcap_that_kernels_do_not_compute_exactly_is_declined(
    monkeypatch, generation, dtype, softcap, scale, takes
):
    """At both ends of what they take out and gradients are right beside hidden keys; beyond, the fallback computes them and says so."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    monkeypatch.setenv("FLASHPATCH_GENERATION", generation)
    torch.manual_seed(0)
    leaves = [torch.randn(1, 70, 2, 64).to(dtype).requires_grad_() for _ in range(3)]
    if not takes:
        with pytest.raises(flashpatch.DeclinedError, match=r"softcap: softcap is .* kernels take a softcap up to"):
            flashpatch.attention(*leaves, causal=True, softcap=softcap, softmax_scale=scale)
    out = flashpatch.attention(
        *leaves, causal=True, softcap=softcap, softmax_scale=scale, on_decline="error" if takes else "fallback"
    )
    dout = torch.randn(out.shape).to(dtype)

    def gradients(out, leaves):
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))

    def expected(leaves, softcap, upcast):
        options = {"window_size": (-1, 0), "softcap": softcap, "softmax_scale": scale}
        return gradients(reference.attention(*leaves, **options, upcast=upcast)[0], leaves)

    exact = expected([leaf.detach().double().requires_grad_() for leaf in leaves], softcap, True)
    huge = softcap > 1e4 and dtype != torch.float32  # nothing, and beyond fp16
    eager = expected(leaves, 0.0 if huge else softcap, False)
    for name, mine, theirs, right in zip(("out", "dq", "dk", "dv"), gradients(out, leaves), eager, exact, strict=True):
        outcome = tolerance.compare(mine, theirs, right)
        assert outcome.ok, outcome.message(name)


@pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
@pytest.mark.parametrize("generation", ["ampere", "hopper"])
def test_rows_are_exact_beside_rows_with_much_larger_scores(monkeypatch, generation):
    """Where a warp has scores near its softcap it takes a tanh that is exact to 1e-7 of that, which is 0.1 here, and not for small ones."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    monkeypatch.setenv("FLASHPATCH_GENERATION", generation)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 64).bfloat16() for _ in range(3))
    q[:, ::2] *= 6e5
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = flashpatch.attention(*leaves, softcap=1e6)
    dout = torch.randn(out.shape)
    dout[:, ::2] = 0.0
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact, _ = reference.attention(*wide, softcap=1e6)
    ours = (out, *torch.autograd.grad(out, leaves, dout.bfloat16()))
    theirs = (exact, *torch.autograd.grad(exact, wide, dout.bfloat16().double()))
    for name, mine, right in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        rows = slice(1, None, 2) if name in ("out", "dq") else slice(None)
        mine, right = mine.detach()[:, rows].double(), right.detach()[:, rows]
        assert (mine - right).abs().max() < 2e-2 * right.abs().max(), name


@pytest.mark.parametrize("softcap", [5.0, 50.0, 1e6])
def test_a_softcap_is_as_exact_as_eager_in_fp32(monkeypatch, softcap):
    """Not the polynomial that 16-bit inputs hide: of a cap of 50 that is off by 6e-5; nor 1 - 2 / (1 + e^2x), which is off by 5e-6."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    q, k, v = (torch.randn(1, 70, 2, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    out, logsumexp = flashpatch.attention(q, k, v, softcap=softcap, return_logsumexp=True)
    expected, wanted = reference.attention(q, k, v, softcap=softcap)
    assert (out.double() - expected).abs().max() < 7e-7 and (logsumexp.double() - wanted).abs().max() < 1.5e-6


@pytest.mark.parametrize("scale", [1e-39, 2.0**-100, 2.0**60, 1e30], ids=["subnormal", "tiny", "large", "huge"])
def test_fp32_keeps_its_range(monkeypatch, scale):
    """v of any magnitude: an error relative to it, not to 1; below 2^-113 what TF32's smallest numbers, 2^-136, can tell apart."""
    q, k, v = (torch.randn(1, 20, 1, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    error, _ = attention_errors(monkeypatch, q, k, v * scale)
    assert error < 2e-6 * scale + 2.0**-136


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_fp32_infinities_and_nan_are_those_of_fp32(monkeypatch, value):
    """Column 3 of v holds one; the others stay finite. A key with an infinity is seen by rows or hidden, as its sign says."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    q, k, v = (torch.randn(1, 20, 1, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    v[0, 5, 0, 3] = value
    out = flashpatch.attention(q, k, v)
    wanted = torch.full((20,), value)
    assert torch.equal(out[0, :, 0, 3].nan_to_num(7.0, 8.0, 9.0), wanted.nan_to_num(7.0, 8.0, 9.0))
    assert out[..., :3].isfinite().all() and out[..., 4:].isfinite().all()
    q, k, v = q.abs(), k.clone(), v.nan_to_num(0.0, 0.0, 0.0)
    k[0, 5, 0, 3] = value
    expected = reference.attention(q, k, v, upcast=False)[0]
    found = flashpatch.attention(q, k, v)
    assert torch.equal(found.isfinite(), expected.isfinite())


# ---- drawn problems ----


@dataclass(frozen=True)
class Family:
    """What is fixed when kernels are compiled: drawn problems differ in everything else, so that few are built.

    Features of `compiled` other than the window have no value that means "off", so every problem asks for them.
    """

    device: planning.Device
    dtype: str
    head_dim: int
    compiled: frozenset[str]

    def plan(self, direction):
        return planning.resolve(
            Problem(direction, self.dtype, self.head_dim, self.head_dim, self.compiled), self.device
        )

    def __contains__(self, feature):
        return feature in self.compiled

    @property
    def padded(self):
        return not self.compiled.isdisjoint(("key_ranges", "mask", "bias"))

    @property
    def equal_head_dims(self):
        return self.plan("backward").config.kernel.endswith("sm90")


def family(device, dtype, head_dim, *compiled):
    return Family(device, dtype, head_dim, frozenset(compiled))


SCORES = ("window", "key_ranges", "mask", "bias", "alibi", "softcap", "sinks", "dropout")
FAMILIES = {
    "ampere": family(AMPERE, "bfloat16", 64, *DECODER),
    "ampere-scores": family(AMPERE, "bfloat16", 64, *SCORES),
    "hopper": family(HOPPER, "bfloat16", 64, *DECODER),
    "turing": family(TURING, "float16", 64, *DECODER),
}
MORE_FAMILIES = {
    "ampere-wide": family(AMPERE, "float16", 192, "window", "deterministic", "alibi"),
    "ampere-narrow-scores": family(AMPERE, "float16", 32, *SCORES),
    "turing-scores": family(TURING, "float16", 64, *SCORES),
    "turing-wide": family(TURING, "float16", 256, "window", "deterministic", "sinks"),
    "hopper-scores": family(HOPPER, "float16", 128, "window", "softcap", "sinks"),
    "hopper-narrow-scores": family(HOPPER, "bfloat16", 64, "window", "softcap"),
    "hopper-wide": family(HOPPER, "bfloat16", 192, "window"),
    "hopper-wide-scores": family(HOPPER, "float16", 256, "window", "softcap", "sinks"),
}


@dataclass(frozen=True)
class Asked:
    """A drawn problem in plain values: what hypothesis prints when one fails."""

    lengths: tuple[tuple[int, int], ...]  # of queries and keys, per sequence; padded: the same for all
    varlen: bool
    stray_rows: int  # varlen: rows after the last sequence
    heads_kv: int
    group: int
    head_dim: int
    head_dim_v: int
    layouts: tuple[str, str, str, str]  # of q, k, v, dout
    window: tuple[int, int]
    used: tuple[int, ...] | None  # seqused_k
    own: tuple[bool, bool, bool, bool]  # mask and bias: whether batch, head, row and key have their own; else broadcast
    transposed_mask: bool
    hidden_key: bool  # the mask hides one key from everybody; it holds NaN
    softcap: float
    dropout_p: float
    scale: float
    loud: bool
    with_dlogsumexp: bool
    seed: int


# Where eager PyTorch happens to be exact (one key: p is 1, its derivative 0), fp32 arithmetic may still round.
EXACT = 2e-5
LAYOUTS = (
    "contiguous",
    "transposed",
    "sliced",
    "one batch for all",
    "one head for all",
    "strided columns",
    "misaligned",
)


@st.composite
def problems(draw, family: Family):
    varlen = not family.padded and draw(st.booleans())
    length = st.integers(0, 80 if varlen else 150)
    if varlen:
        lengths = tuple(draw(st.lists(st.tuples(length, length), min_size=1, max_size=4)))
    else:
        lengths = (draw(st.tuples(length, length)),) * draw(st.integers(1, 2))
    heads_kv = draw(st.integers(1, 2))
    head_dim = draw(st.integers(1, family.head_dim // 8)) * 8
    longest = max(keys for _, keys in lengths)
    side = st.one_of(st.just(-1), st.integers(0, 20), st.integers(0, 160))
    used = st.tuples(*(st.integers(0, longest + 4) for _ in lengths))
    return Asked(
        lengths=lengths,
        varlen=varlen,
        stray_rows=draw(st.integers(0, 3)) if varlen and "sinks" not in family else 0,
        heads_kv=heads_kv,
        group=draw(st.integers(1, 3 - heads_kv)) if len(lengths) > 1 else draw(st.integers(1, 3)),
        head_dim=head_dim,
        head_dim_v=head_dim if family.equal_head_dims else draw(st.integers(1, family.head_dim // 8)) * 8,
        layouts=tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(4)),
        window=draw(st.tuples(side, st.one_of(st.just(0), side))),
        used=draw(st.one_of(st.none(), used)),
        own=draw(st.tuples(*[st.booleans()] * 4)),
        transposed_mask=draw(st.booleans()),
        hidden_key=draw(st.booleans()),
        softcap=draw(st.sampled_from((0.5, 5.0, 30.0, 50.0, 1000.0, 1e6))) if "softcap" in family else 0.0,
        dropout_p=draw(st.sampled_from((0.1, 0.5, 0.9))) if "dropout" in family else 0.0,
        scale=draw(st.sampled_from((head_dim**-0.5, 0.02, 0.5))),
        loud=draw(st.booleans()),
        with_dlogsumexp=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


def laid_out(shape, layout, dtype):
    """Room for [batch, rows, heads, dim] or [rows, heads, dim]; what lies beside it is NaN."""
    *rows, heads, dim = shape
    if layout == "one batch for all" and len(rows) == 2:
        return torch.full((1, rows[1], heads, dim), math.nan, dtype=dtype).expand(shape)
    if layout == "one head for all":
        return torch.full((*rows, 1, dim), math.nan, dtype=dtype).expand(shape)
    if layout == "strided columns":
        return torch.full((*rows, heads, dim, 2), math.nan, dtype=dtype)[..., 0]
    if layout == "misaligned":
        size = math.prod(shape)
        return torch.full((size + 8,), math.nan, dtype=dtype)[1 : size + 1].view(shape)
    return cases._room(shape, layout if layout in cases.LAYOUTS else "contiguous", dtype, "cpu")


def filled(room, generator, scale):
    """Normal numbers, in an expanded tensor the same for all."""
    owned = room[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in room.stride())]
    owned.copy_(torch.randn(owned.shape, generator=generator) * scale)
    return room


def blind(tensor, index):
    """NaN where nobody looks, unless somebody else looks there: expanded tensors stay as they are."""
    if all(stride or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor[index] = math.nan


def inputs_of(asked: Asked, family: Family) -> cases.Inputs:
    generator = torch.Generator().manual_seed(asked.seed)
    dtype = getattr(torch, family.dtype)
    batch, heads = len(asked.lengths), asked.heads_kv * asked.group
    longest_q, longest_k = (max(column) for column in zip(*asked.lengths, strict=True))
    keywords = {"window_size": asked.window, "softmax_scale": asked.scale}
    if asked.varlen:
        starts_q, starts_k = ([0, *itertools.accumulate(c)] for c in zip(*asked.lengths, strict=True))
        rows_q, rows_k = ((starts[-1] + asked.stray_rows,) for starts in (starts_q, starts_k))
        keywords["cu_seqlens_q"], keywords["cu_seqlens_k"] = (
            torch.tensor(starts, dtype=torch.int32) for starts in (starts_q, starts_k)
        )
        statistics = (heads, *rows_q)
    else:
        rows_q, rows_k, statistics = (batch, longest_q), (batch, longest_k), (batch, heads, longest_q)
    loudness = 4.0 if asked.loud else 1.0
    shapes = (
        (*rows_q, heads, asked.head_dim), (*rows_k, asked.heads_kv, asked.head_dim),
        (*rows_k, asked.heads_kv, asked.head_dim_v), (*rows_q, heads, asked.head_dim_v),
    )  # fmt: skip
    q, k, v, dout = (
        filled(laid_out(shape, layout, dtype), generator, scale)
        for shape, layout, scale in zip(shapes, asked.layouts, (loudness, loudness, 1.0, 1.0), strict=True)
    )
    if asked.used is not None:
        keywords["seqused_k"] = torch.tensor(asked.used, dtype=torch.int32)
        for number, used in enumerate(asked.used):
            begin, end = (starts_k[number], starts_k[number + 1]) if asked.varlen else (0, longest_k)
            unused = slice(min(begin + used, end), end)
            for tensor in (k, v):
                blind(tensor, unused if asked.varlen else (number, unused))
    if asked.stray_rows:
        for tensor, end in ((q, starts_q[-1]), (k, starts_k[-1]), (v, starts_k[-1]), (dout, starts_q[-1])):
            blind(tensor, slice(end, None))
    full = (batch, heads, longest_q, longest_k)
    # an empty dimension has nothing to broadcast
    part = tuple(size if own or not size else 1 for own, size in zip(asked.own, full, strict=True))
    if "key_ranges" in family:
        shape = (part[0], part[2], 2)
        keywords["key_ranges"] = torch.randint(-5, longest_k + 9, shape, generator=generator, dtype=torch.int32)
        keywords["key_ranges"][:, ::2] = keywords["key_ranges"][:, ::2].sort(-1).values  # others may be empty
    if "bias" in family:
        keywords["bias"] = torch.randn(part, generator=generator).to(dtype)
    if "mask" in family:
        mask = torch.rand(part, generator=generator) > 0.2
        if asked.transposed_mask:
            mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
        if asked.hidden_key and asked.own[3] and longest_k:
            mask[..., longest_k // 2] = False
            blind(k, (slice(None), longest_k // 2))
            blind(v, (slice(None), longest_k // 2))
            keywords["bias"][..., longest_k // 2] = math.nan
        keywords["mask"] = mask
    if "alibi" in family:
        keywords["alibi_slopes"] = torch.rand((part[0], heads), generator=generator) / 8
    if "softcap" in family:
        keywords["softcap"] = asked.softcap
    if "sinks" in family:
        keywords["sinks"] = torch.randn(heads, generator=generator) * 2
    if "dropout" in family:
        keywords["dropout_p"] = asked.dropout_p
    expanded = {
        name: keywords[name].expand(shape)
        for name, shape in (
            ("bias", full), ("mask", full), ("key_ranges", (batch, longest_q, 2)), ("alibi_slopes", (batch, heads)),
        )
        if name in keywords
    }  # fmt: skip
    optional = {name: keywords.get(name) for name in ("sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")}
    call = Call(
        asked.scale,
        longest_q,
        longest_k,
        *asked.window,
        softcap=asked.softcap,
        dropout_p=asked.dropout_p,
        deterministic="deterministic" in family,
        rng_state=torch.tensor([asked.seed, 3], dtype=torch.int64) if asked.dropout_p else None,
        **expanded,
        **optional,
    )
    dlogsumexp = torch.randn(statistics, generator=generator) * asked.with_dlogsumexp
    return cases.Inputs(q, k, v, dout, dlogsumexp, keywords, call)


def faults(asked: Asked, family: Family):
    """What is wrong with the kernels' results on a problem: a message for each tensor beyond its bound."""
    inputs = inputs_of(asked, family)
    forward, backward = family.plan("forward"), family.plan("backward")
    with case_runs._Poison():
        out, logsumexp, _ = launcher.forward(forward, inputs.q, inputs.k, inputs.v, inputs.call)
        dlogsumexp = inputs.dlogsumexp if asked.with_dlogsumexp else None
        arguments = (inputs.dout, dlogsumexp, inputs.q, inputs.k, inputs.v, out, logsumexp, inputs.call)
        *gradients, _ = launcher.backward(backward, *arguments)
    heads = asked.heads_kv * asked.group
    case = cases.Case(forward.problem, len(asked.lengths), 0, 0, heads, asked.heads_kv)  # only batch and heads count
    inputs = dataclasses.replace(inputs, dout=inputs.dout.nan_to_num(0.0))
    expected, eager = (case_runs._expected(case, inputs, upcast, backward=True) for upcast in (True, False))
    extra = rounding_of_delta(inputs, expected["out"])
    found = []
    for name, tensor in zip(case_runs.OUTPUTS, (out, logsumexp, *gradients), strict=True):
        if tensor is not None:
            largest = case_runs._largest(expected["logsumexp"])
            check = case_runs._check(name, tensor, eager[name], expected[name], out.dtype, largest, None)
            allowed = max(check.bound + extra.get(name, 0.0), EXACT)
            if not check.error <= allowed:
                found.append(f"{check.message}; allowed here {allowed:.3e}")
    return found


def rounding_of_delta(inputs, out):
    """What gradients may be off by because delta = rowsum(dout * out) is taken from an `out` of 16 bits, by size.

    Eager attention keeps all of P instead, and is exact where a row sees one key in effect; tiny problems have such rows.
    """
    if not out.numel():
        return {}
    products = inputs.dout.double() * out
    of_a_row = torch.finfo(inputs.q.dtype).eps * float(products.norm(dim=-1).max())
    rows = products.shape[:-1].numel()
    q, k = (float(tensor.nan_to_num(0.0).abs().max()) if tensor.numel() else 0.0 for tensor in (inputs.q, inputs.k))
    scaled = {"dq": of_a_row * inputs.call.softmax_scale * k, "dk": of_a_row * inputs.call.softmax_scale * q}
    return {**scaled, "dbias": of_a_row * rows**0.5, "dsinks": of_a_row * (rows / out.shape[-2]) ** 0.5}


def drawn(family, examples):
    """A test of `examples` drawn problems, always the same ones."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(problems(family))
    def check(asked):
        assert faults(asked, family) == []

    return check


@pytest.mark.parametrize("name", FAMILIES)
def test_drawn_problems(name):
    drawn(FAMILIES[name], 12)()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *MORE_FAMILIES])
def test_more_drawn_problems(name):
    drawn({**FAMILIES, **MORE_FAMILIES}[name], 150)()


# ---- bank conflicts ----


@contextlib.contextmanager
def watched(patch=None):
    """The emulated kernels that are loaded meanwhile, by name."""
    kernels = {}

    def load(config):
        kernels[config.kernel] = kernel = real(config, patch=patch)
        return kernel

    real, emulator.load = emulator.load, load
    try:
        yield kernels
    finally:
        emulator.load = real


def counters_of(device, dtype, head_dim, features=(), patch=None):
    """Kernel -> counters of one forward and backward over several blocks each way; results aside."""
    case = cases.Case(Problem("forward", dtype, head_dim, head_dim, frozenset(features)), 1, 200, 264, 1, 1)
    with watched(patch) as kernels:
        case_runs.run_case(case, device, seed=0)
    assert set(kernels) == set(expected_launches(case, device))
    return {name: kernel.last for name, kernel in kernels.items()}


# Loops and epilogues alike: tiles are swizzled for every access to them.
MOST_CONFLICTS = 0
READS = ("ldmatrix", "wgmma")  # of tiles, in the loops


def expect_no_conflicts(counters):
    for kernel, counted in counters.items():
        if kernel in MATRIX.kernels:
            assert any(name.startswith(READS) for name in counted.instructions), f"{kernel}: nothing was counted"
        assert sum(counted.bank_conflicts.values()) <= MOST_CONFLICTS, f"{kernel}: {counted.bank_conflicts}"


@pytest.mark.parametrize("features", [(), ("causal",)], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_no_bank_conflicts(device, head_dim, features):
    expect_no_conflicts(counters_of(device, "float16", head_dim, features))


def test_no_bank_conflicts_in_the_wide_backward():
    expect_no_conflicts(counters_of(HOPPER, "float16", 192))


LOST_SWIZZLES = {
    "Ampere": (AMPERE, "tile.cuh", "(chunk ^ fold(row))", "chunk", "forward_sm80"),
    "Hopper": (HOPPER, "backward_sm90.cuh", "lane_index() >> 4) ^ (lane_index() & 7)", "lane_index() >> 4)", "backward_sm90"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST_SWIZZLES)
def test_a_lost_swizzle_shows(name):
    device, source, old, new, kernel = LOST_SWIZZLES[name]

    def patch(name, text):
        assert name != source or text.count(old) == 1
        return text.replace(old, new) if name == source else text

    with pytest.raises(AssertionError, match=kernel):
        expect_no_conflicts(counters_of(device, "bfloat16", 64, patch=patch))


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "heads_kv", "causal", "splits"),
    [
        (1, 1024, 64, 8, True, 4),  # the GPU holds 132 tiles at a time, here are 64 key blocks
        (1, 1024, 64, 8, False, 2),
        (1, 1024, 71, 1, True, 71),  # 71 has no other divisors
        (1, 4096, 64, 8, False, 1),  # 256, all of one length: two full waves
        (16, 4096, 32, 8, True, 1),
        (1, 1024, 8, 8, True, 1),  # nothing to share
    ],
)
def test_tiles_share_the_query_heads_of_few_key_blocks(batch, seqlen, heads, heads_kv, causal, splits):
    device = dataclasses.replace(HOPPER, multiprocessors=132)
    plan = planning.resolve(Problem("backward", "bfloat16", 128, 128, frozenset({"causal"} if causal else ())), device)
    q, k = (torch.empty(batch, seqlen, n, 128, dtype=torch.bfloat16, device="meta") for n in (heads, heads_kv))
    call = Call(0.1, seqlen, seqlen, -1, 0 if causal else -1)
    backward = launcher.Backward(plan, q, q, k, k, q, call)
    key_blocks = batch * heads_kv * seqlen // 128
    assert backward.blocks == min(132, key_blocks * splits)
    shared = None if backward.shared_keys is None else backward.shared_keys.shape
    assert shared == (None if splits == 1 else (key_blocks, 2 * 128 * 128))
    assert tile_counts.splits(plan, tile_counts.Shapes(plan.config, q, k, call), key_blocks, call) == splits
