"""flashpatch.pairwise: the emulated kernels and the fallback against the definition in fp64, and what users lean on:
ties, NaN, empty sets, leading dimensions, gradients, errors."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import json
import math
import re
from pathlib import Path

import nvrtc
import pytest
import torch
import yaml

import flashpatch
from flashpatch import compiler, emulator, pair_launching, pair_planning, planning, reference, support_matrix, tolerance
from flashpatch.pair_planning import COSTS, REDUCTIONS, PairPlan, PairProblem

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = pair_planning.support()
GRADIENT_COSTS = [cost for cost in COSTS if cost != "giou"]
needs_emulator = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))


@pytest.fixture(params=["emulated", "fallback"])
def path(request, monkeypatch):
    """How a call is computed: by the emulated kernels, or by torch operators."""
    if request.param == "emulated":
        if reason := emulator.available():
            pytest.skip(str(reason))
        monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    else:
        monkeypatch.delenv("FLASHPATCH_EMULATE", raising=False)
    flashpatch.reset_counts()
    yield request.param
    launches = flashpatch.stats()["launches"]
    assert bool(launches) == (request.param == "emulated"), launches


def call(path, *arguments, **options):
    """By a kernel, whatever it runs on, unless the path is the fallback."""
    return flashpatch.pairwise(*arguments, on_decline="fallback" if path == "fallback" else "error", **options)


def points(*shape, seed=0, boxes=False, dtype=torch.float32, device="cpu"):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if boxes:
        made = torch.cat((made[..., :2], made[..., :2] + made[..., 2:].abs()), -1)
    return made.to(dtype).to(device)


def close(name, actual, eager, exact, factor):
    """An empty string, or by how much `actual` is off: more than `factor` times what torch is in fp32, and rounding.

    Few numbers are compared at times, among which torch may be exact by luck: rounding counts as four units of the largest.
    """
    finite = exact[exact.isfinite()].abs()
    rounding = 4 * torch.finfo(torch.float32).eps * float(finite.max() if finite.numel() else 0.0)
    result = tolerance.compare(actual, eager, exact, factor=factor)
    bound = result.bound + rounding
    return "" if result.error <= bound else f"{name}: error {result.error:.3e} beyond {bound:.3e}"


def faults(x, y, options, path):
    """What is wrong with a result, beside the definition in fp64; eager is the definition in fp32."""
    exact, eager = (reference.pairwise(x, y, **options, dtype=dtype) for dtype in (torch.float64, torch.float32))
    actual = call(path, x, y, **options)
    reduce, dim = options["reduce"], options.get("dim", -1)
    if reduce == "logsumexp":
        return list(filter(None, [close(reduce, actual, eager, exact, 2.0)]))
    # where an index differs, the score there is as good
    rows, columns = (x, y) if dim == -1 else (y, x)
    every = {**options, "reduce": "topk", "k": columns.shape[-2], "dim": -1}
    sorted_scores, order = reference.pairwise(rows, columns, **every)
    scores = torch.empty_like(sorted_scores).scatter_(-1, order, sorted_scores)
    indices = actual.indices if reduce == "topk" else actual.indices[..., None]
    found = [
        close("values", actual.values, eager[0], exact[0], 2.0),
        close("indices", scores.gather(-1, indices).reshape(exact[0].shape), eager[0].double(), exact[0], 2.0),
        "" if (indices.sort(-1).values.diff() > 0).all() and (indices >= 0).all() else "an index twice",
    ]
    return list(filter(None, found))


# cost -> features and dtype: between them every bucket and every dtype
CASES = {
    "sqeuclidean": (3, torch.float32), "euclidean": (13, torch.bfloat16), "l1": (2, torch.float16),
    "negative_dot": (21, torch.float32), "giou": (4, torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("cost", COSTS)
def test_matches_the_definition(path, cost, reduce):
    """Odd sizes on every side of a tile, over either set, with and without a term."""
    dim, dtype = CASES[cost]
    options = {"cost": cost, "reduce": reduce, "scale": -0.7, **({"k": 3} if reduce == "topk" else {})}
    for rows, columns in ((130, 257), (3, 300), (129, 3)):
        x, y = (points(2, n, dim, seed=n, boxes=cost == "giou", dtype=dtype) for n in (rows, columns))
        for extra in ({"bias": points(2, columns, seed=2)}, {"dim": -2}):
            assert faults(x, y, {**options, **extra}, path) == [], (rows, columns, extra.keys())


@pytest.mark.parametrize("k", [1, 5, 32])
def test_of_equal_scores_the_first(path, k):
    """Small whole numbers: every score is exact and most are tied, within a tile and across tiles and splits."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(0, 2, (40, 3), generator=generator).float()
    y = torch.randint(0, 2, (700, 3), generator=generator).float()
    for cost in ("sqeuclidean", "l1", "negative_dot"):
        actual = call(path, x, y, cost=cost, reduce="topk", k=k)
        expected = reference.pairwise(x, y, cost=cost, reduce="topk", k=k)
        assert torch.equal(actual.indices, expected[1]) and torch.equal(actual.values.double(), expected[0])
    nearest = call(path, x, y)
    assert torch.equal(nearest.indices, call(path, x, y, reduce="topk", k=1).indices[:, 0])


def test_a_score_of_infinity_is_a_score(path):
    y, bias = torch.zeros(300, 2), torch.full((300,), math.inf)
    assert call(path, torch.zeros(5, 2), y, bias=bias).indices.tolist() == [0] * 5
    bias[200] = 3.0
    found = call(path, torch.zeros(5, 2), y, bias=bias, reduce="topk", k=2)
    assert found.indices.tolist() == [[200, 0]] * 5 and found.values.tolist() == [[3.0, math.inf]] * 5
    total = call(path, torch.zeros(5, 2), y, bias=bias, reduce="logsumexp")
    assert total.tolist() == [math.inf] * 5


def test_nan_goes_where_torch_puts_it(path):
    x, y = points(3, 2), points(300, 2, seed=1)
    y[[170, 40]] = math.nan
    matrix = torch.cdist(x, y).square()
    assert call(path, x, y).indices.tolist() == matrix.min(-1).indices.tolist() == [40] * 3
    assert call(path, x, y).values.isnan().all()
    last = call(path, x, y, reduce="topk", k=5)
    assert last.values.isfinite().all() and not set(last.indices.flatten().tolist()) & {40, 170}
    few = call(path, x, y[38:42], reduce="topk", k=4)
    assert few.indices[:, 3].tolist() == [2] * 3 and few.values[:, 3].isnan().all()
    assert call(path, x, y, reduce="logsumexp").isnan().all()
    x[1] = math.nan  # one row is one row's matter
    assert call(path, x, y[:40]).values.isnan().tolist() == [False, True, False]


def test_weights_of_nothing(path):
    """-inf everywhere in a row, or in all but one column: no NaN in the value or the gradient."""
    x, y = points(4, 3).requires_grad_(), points(200, 3, seed=1).requires_grad_()
    bias = torch.full((200,), -math.inf)
    total = call(path, x, y, reduce="logsumexp", bias=bias)
    assert total.tolist() == [-math.inf] * 4
    assert all((g == 0).all() for g in torch.autograd.grad(total.sum(), (x, y)))
    bias[150] = 0.0
    total = call(path, x, y, reduce="logsumexp", bias=bias, scale=-1.0)
    torch.testing.assert_close(total, -(x - y[150]).square().sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_empty_sets(reduce):
    k = {"k": 1} if reduce == "topk" else {}
    nothing, something = torch.empty(2, 0, 3), torch.randn(2, 5, 3)
    leaf = something.clone().requires_grad_()
    found = flashpatch.pairwise(nothing, leaf, reduce=reduce, on_decline="fallback", **k)
    assert (torch.autograd.grad((found if reduce == "logsumexp" else found.values).sum(), leaf)[0] == 0).all()
    shapes = [t.shape for t in (found if reduce != "logsumexp" else (found,))]
    assert shapes == [(2, 0, 1)] * 2 if reduce == "topk" else [(2, 0)] * len(shapes)
    if reduce == "logsumexp":
        total = flashpatch.pairwise(leaf, nothing, reduce=reduce)
        assert (total == -math.inf).all() and total.shape == (2, 5)
        assert (torch.autograd.grad(total.sum(), leaf)[0] == 0).all()
    else:
        with pytest.raises(ValueError, match=r"empty y|points of y"):
            flashpatch.pairwise(something, nothing, reduce=reduce, **k)
    assert flashpatch.pairwise(torch.empty(0, 4, 3), torch.empty(0, 5, 3), reduce="logsumexp").shape == (0, 4)


def test_leading_dimensions_broadcast_and_strides_are_any(path):
    x = points(3, 8, 1, 20).movedim(1, 3)[..., :7, :]  # [3, 1, 7, 8], features apart in memory
    x = x.movedim(-1, -2)[..., :5].movedim(-1, -2)  # [3, 1, 5, 8]
    y = points(4, 9, 16, seed=1)[..., 3:11]
    found = call(path, x, y, bias=points(9, seed=2))
    expected = reference.pairwise(x, y, bias=points(9, seed=2).expand(3, 4, 9))
    assert found.values.shape == found.indices.shape == (3, 4, 5)
    torch.testing.assert_close(found.values.double(), expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found.indices, expected[1])


# ---- gradients ----


def gradients(x, y, bias, weight, run):
    leaves = [t.detach().clone().requires_grad_() for t in (x, y, bias)]
    total = run(leaves[0], leaves[1], bias=leaves[2])
    return torch.autograd.grad((total * weight.to(total.dtype)).sum(), leaves)


def gradient_faults(x, y, bias, weight, cost, run, dim=-1):
    def definition(dtype):
        return lambda a, b, bias: reference.pairwise(
            a, b, cost=cost, reduce="logsumexp", scale=-0.7, bias=bias, dim=dim, dtype=dtype
        )

    exact = gradients(x.double(), y.double(), bias.double(), weight, definition(torch.float64))
    eager = gradients(x, y, bias, weight, definition(torch.float32))
    actual = gradients(x, y, bias, weight, run)
    compared = zip(("dx", "dy", "dbias"), actual, eager, exact, strict=True)
    return list(filter(None, (close(*tensors, tolerance.GRADIENT_FACTOR) for tensors in compared)))


@pytest.mark.parametrize("cost", COSTS)
def test_gradient_of_logsumexp_is_that_of_fp64_autograd(path, cost):
    if cost == "giou" and path == "emulated":
        with pytest.raises(flashpatch.DeclinedError, match="giou"):
            x, y = points(3, 4, boxes=True).requires_grad_(), points(5, 4, boxes=True)
            call(path, x, y, cost=cost, reduce="logsumexp").sum().backward()
        return
    dim, _ = CASES[cost]
    for rows, columns, axis in ((130, 257, -1), (3, 140, -2)):
        x, y = (points(2, n, dim, seed=n, boxes=cost == "giou") for n in (rows, columns))
        over, left = (columns, rows) if axis == -1 else (rows, columns)
        bias, weight = points(2, over, seed=5), points(2, left, seed=6)

        def run(a, b, bias, axis=axis):
            return call(path, a, b, cost=cost, reduce="logsumexp", scale=-0.7, bias=bias, dim=axis)

        assert gradient_faults(x, y, bias, weight, cost, run, axis) == [], (rows, columns, axis)


@pytest.mark.parametrize("cost", COSTS)
def test_gradcheck_of_the_fallback(cost):
    x, y = (points(n, 4, seed=n, boxes=cost == "giou", dtype=torch.float64).requires_grad_() for n in (4, 6))
    bias = points(6, dtype=torch.float64).requires_grad_()
    for reduce in ("logsumexp", "min"):

        def run(x, y, bias, reduce=reduce):
            found = flashpatch.pairwise(x, y, cost=cost, reduce=reduce, bias=bias, scale=-0.5, on_decline="fallback")
            return found if reduce == "logsumexp" else found.values

        assert torch.autograd.gradcheck(run, (x, y, bias))


def test_values_of_topk_have_gradients(path):
    x, y = points(20, 3).requires_grad_(), points(150, 3, seed=1).requires_grad_()
    found = call(path, x, y, cost="euclidean", reduce="topk", k=4)
    actual = torch.autograd.grad(found.values.sum(), (x, y))
    expected = torch.autograd.grad(torch.cdist(x, y).topk(4, largest=False).values.sum(), (x, y))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_second_derivatives_are_refused():
    x = points(4, 3).requires_grad_()
    total = flashpatch.pairwise(x, points(5, 3), reduce="logsumexp", on_decline="fallback").sum()
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (first.square().sum() + x.sum()).backward()


@pytest.mark.filterwarnings("ignore:flashpatch")
def test_function_transforms():
    x, y = torch.randn(3, 5, 4), torch.randn(3, 7, 4)

    def own(x, y):
        return flashpatch.pairwise(x, y, cost="sqeuclidean", reduce="logsumexp", on_decline="fallback").sum()

    def defined(x, y):
        return (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1).logsumexp(-1).sum()

    for transform in (
        lambda f: torch.func.grad(f, (0, 1)),
        torch.vmap,
        lambda f: torch.vmap(torch.func.grad(f, (0, 1))),
    ):
        torch.testing.assert_close(transform(own)(x, y), transform(defined)(x, y))
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda x: own(x, y), (x,), (x,))


def test_compiles_into_one_graph():
    x, y = points(6, 3), points(9, 3, seed=1)

    def loss(x, y):
        return flashpatch.pairwise(x, y, reduce="logsumexp", scale=-1.0, on_decline="fallback").sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), loss(x, y))


# ---- errors ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost": "cosine"}, "cost='cosine' is not one of sqeuclidean"),
        ({"reduce": "max"}, "reduce='max' is not one of min"),
        ({"dim": 0}, "dim=0: -1 reduces over y"),
        ({"reduce": "topk"}, "needs k from 1 to 6"),
        ({"reduce": "topk", "k": 7}, "needs k from 1 to 6, the points of y, got 7"),
        ({"k": 2}, "k=2 goes with reduce='topk'"),
        ({"scale": math.inf}, "scale=inf"),
        ({"y": torch.zeros(6, 4)}, "x has 3 features, y has 4"),
        ({"y": torch.zeros(6, 3).half()}, "cast or move one of them"),
        ({"cost": "giou"}, "takes boxes"),
        ({"bias": torch.zeros(5)}, r"bias is \[5\]; its last dimension is one number per point of y, 6"),
        ({"x": torch.zeros(2, 5, 3), "y": torch.zeros(3, 6, 3)}, "do not broadcast"),
        ({"x": torch.zeros(3)}, r"got \[3\]"),
        ({"x": torch.zeros(5, 3).int(), "y": torch.zeros(6, 3).int()}, "torch.int32"),
        ({"on_decline": "warn"}, "neither 'error' nor"),
        ({"x": [[0.0]]}, r"x is list, not a torch\.Tensor"),
        ({"bias": [0.0]}, r"bias is list, not a torch\.Tensor"),
        ({"y": torch.zeros(6, 3).to_sparse()}, "y is a sparse_coo tensor"),
        ({"scale": "auto"}, "scale=auto is not a number that is finite"),
        ({"reduce": "topk", "k": 2.0}, "k=2.0 is not an int"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        flashpatch.pairwise(**{"x": torch.zeros(5, 3), "y": torch.zeros(6, 3), **change})


def test_without_a_kernel_it_is_declined_by_name(monkeypatch):
    monkeypatch.delenv("FLASHPATCH_EMULATE", raising=False)
    with pytest.raises(flashpatch.DeclinedError, match="this call: no_gpu"):
        flashpatch.pairwise(torch.zeros(5, 3), torch.zeros(6, 3))
    device = planning.gpu("h200")
    reasons = pair_planning.resolve(PairProblem("pairwise_topk", "l1", "float64", 3, 40), device).reasons
    assert [reason.code for reason in reasons] == ["dtype", "k"]
    reasons = pair_planning.resolve(PairProblem("pairwise_min", "l1", "float32", 3), planning.gpu("t4")).reasons
    assert [reason.code for reason in reasons] == ["generation"]


# ---- the matrix, the argument, the builds ----


def plans(gpu: str):
    """A plan for every claimed cell, features and k in turns, so that every bucket is in some."""
    device = planning.gpu(gpu)
    turns = itertools.cycle(((2, 1), (3, 4), (8, 16), (33, 32)))
    for (kernel, generation, dtype, cost), _ in sorted(SUPPORT.cells.items()):
        if generation == device.generation:
            dim, k = next(turns)
            problem = PairProblem(kernel, cost, dtype, 4 if cost == "giou" else dim, k if "topk" in kernel else 1)
            yield pair_planning.resolve(problem, device)


def test_every_claim_is_planned():
    for number in planning.support().capabilities:
        device = planning.device_for(number)
        for kernel, cost, dtype in itertools.product(SUPPORT.kernels, COSTS, ("bfloat16", "float32", "float64")):
            plan = pair_planning.resolve(PairProblem(kernel, cost, dtype, 4), device)
            claimed = (kernel, device.generation, dtype, cost) in SUPPORT.cells
            assert isinstance(plan, PairPlan) == claimed, (kernel, cost, dtype, device, plan)


def test_what_is_called_verified_ran():
    """Each verified cell passed on that GPU, with the very sources that are compiled for it now."""
    evidence = json.loads((ROOT / "tests" / "evidence" / SUPPORT.evidence).read_text(encoding="utf-8"))["cells"]
    stale = []
    for generation in {key[1] for key, status in SUPPORT.cells.items() if status == "verified"}:
        for plan in plans(generation):
            problem = plan.problem
            found = evidence.get(f"{problem.kernel}/{generation}/{problem.dtype}/{problem.cost}")
            if not (found and found["passed"] and found["digest"] == compiler.digest(plan.config)):
                stale.append(problem)
    assert stale == [], "type on that GPU: python tests/record_pairwise.py FILE; or call its rows compiled"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda section: section["rows"].append(section["rows"][0]), "listed twice"),
        (lambda section: section["rows"].pop(), "has no cell"),
        (lambda section: section["unsupported"].append({"reason": "no"}), "both supported"),
        (lambda section: section["rows"][0]["status"].update(hopper="fine"), "hopper: fine"),
        (lambda section: section["costs"].update(cosine="angle"), "the kernels know"),
    ],
)
def test_a_section_that_contradicts_itself_does_not_load(spoil, message):
    data = copy.deepcopy(yaml.safe_load(support_matrix.find("compat_matrix.yaml").read_text(encoding="utf-8")))
    spoil(data["pairwise"])
    with pytest.raises(support_matrix.MatrixError, match=message):
        pair_planning.load(data)


def test_params_match_the_launcher():
    text = re.sub(
        r"//[^\n]*", "", (support_matrix.find("cuda_src") / "params_pairwise.cuh").read_text(encoding="utf-8")
    )
    body = re.search(r"struct PairParams \{(.*?)\n\};", text, re.DOTALL).group(1)
    names = [name for line in body.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
    assert tuple(names) == pair_launching.FIELDS


def test_costs_are_numbered_as_in_the_kernels():
    text = (support_matrix.find("cuda_src") / "pairwise.cuh").read_text(encoding="utf-8")
    numbered = re.search(r"constexpr int (kSqeuclidean = .*);", text).group(1)
    names = ["".join(part.capitalize() for part in cost.split("_")) for cost in COSTS]
    assert numbered == ", ".join(f"k{name} = {number}" for number, name in enumerate(names))


@pytest.mark.parametrize("major", [12, 13])
def test_builds(major):
    """Every kernel by both majors of NVRTC: shared memory as planned, registers within the block's, spills as recorded."""
    if nvrtc.load(major) is None:
        pytest.skip(f"no NVRTC {major} here; pip install {nvrtc.WHEELS[major]}")
    library, found = nvrtc.load(major), []
    chosen = {
        plan.config.kernel: plan for plan in plans("h200" if major == 13 else "rtx4090") if plan.problem.cost != "giou"
    }
    for plan in chosen.values():
        config = plan.config
        checked = (
            f"{compiler.source(config)}\n"
            f'static_assert(kSharedMemory == {pair_planning.shared_memory(config)}, "pair_planning.shared_memory");\n'
        )
        options = (f"-arch={compiler.arch(config, plan.device)}", *compiler.OPTIONS)
        _, log = library.compile(checked, f"{config.kernel}.cu", compiler.headers(), options)
        usage = compiler.usage(log)
        admitted = SUPPORT.tiles[config.kernel].get("spill_bytes", 0) if library.version == (13, 0) else math.inf
        if usage["registers"] * 256 * config.ctas > 65536 or usage["spill_bytes"] > admitted:
            found.append((config.name, usage))
    assert set(chosen) == set(SUPPORT.kernels) and found == []


# ---- would these tests notice? ----

BUGS = [
    ("pairwise.cuh", "sync_block();  // this step's", "// this step's", "min"),
    ("pairwise.cuh", "step & 1 ^ 1", "step & 1", "min"),
    ("pairwise.cuh", "if (point >= points.count || feature >= points.dim) return 0.f;", "if (point >= points.count) return 0.f;", "min"),
    ("pairwise.cuh", "points.offset + point * points.stride", "points.offset + (point + 1) * points.stride", "min"),
    ("pairwise.cuh", "acc[m][n] += difference * difference;", "acc[m][n] += difference;", "min"),
    ("pairwise.cuh", "if (chunk == 0) {", "if (step == 0) {", "min"),
    ("pairwise.cuh", "place.first_block + p.split_blocks", "place.first_block + p.split_blocks - 1", "min"),
    ("pairwise_min.cu", "column < p.columns ?", "true ?", "min"),
    ("pairwise_min.cu", "lanes < 8; lanes <<= 1", "lanes < 4; lanes <<= 1", "min"),
    ("pairwise_min.cu", "sync_block();  // the other half", "// the other half", "min"),
    ("pairwise_min.cu", "take_better(best[m], ld_shared<Best>(smem + score_row(m) * 8));", "", "min"),
    ("pairwise_min.cu", "(equal && other.column < best.column)", "false", "ties"),
    ("pairwise_min.cu", "if (row < p.rows) {", "{", "min"),
    ("pairwise_logsumexp.cu", "(n >> 2) * 32 + (n & 3) < left ?", "true ?", "logsumexp"),
    ("pairwise_logsumexp.cu", "sum.sum = sums[m].shifted(shift);", "sum.sum = sums[m].sum;", "logsumexp"),
    ("pairwise_logsumexp.cu", "lanes < 8; lanes <<= 1", "lanes < 4; lanes <<= 1", "logsumexp"),
    ("pairwise_logsumexp.cu", "sync_block();  // nobody reads", "// nobody reads", "logsumexp"),
    ("pairwise_topk.cu", "sync_block();  // the scores", "// the scores", "topk"),
    ("pairwise_topk.cu", "|| (key == keys[i - 1] && column < columns[i - 1])", "", "ties"),
    ("pairwise_topk.cu", "sync_block();  // nobody reads", "// nobody reads", "topk"),
    ("pairwise_topk.cu", "half == 1 || place.first_row", "place.first_row", "topk"),
    ("pairwise_topk.cu", "p.columns - first_column - half * kHalf", "kHalf", "topk"),
    ("pairwise_gradient.cu", "sync_block();  // weights and", "// weights and", "gradient"),
    ("pairwise_gradient.cu", "lanes = 4 * kFeatureGroups", "lanes = 8 * kFeatureGroups", "gradient"),
    ("pairwise_gradient.cu", "gradient[i][c] * p.scale", "gradient[i][c]", "gradient"),
    ("pairwise_gradient.cu", "column < p.columns ? exp2", "true ? exp2", "gradient"),
    ("pairwise_gradient.cu", "row_weight[m] * column_weight", "row_weight[m]", "gradient"),
    ("pairwise_gradient.cu", "? 2.f :", "? 1.f :", "gradient"),
]  # fmt: skip
BY_DEFAULT = list({(source, case): (source, *bug, case) for source, *bug, case in BUGS}.values())  # the rest is slow


def wrong(case: str, source: str) -> list[str]:
    """What is wrong with the emulated kernels on a small case."""
    x, y, bias = points(1, 131, 20), points(1, 600, 20, seed=1), points(1, 600, seed=2)
    topk = {"k": 8} if case == "topk" or source == "pairwise_topk.cu" else {}
    if case == "gradient":
        options = {"cost": "sqeuclidean", "reduce": "logsumexp", "scale": -0.7}
        run = lambda a, b, bias: call("emulated", a, b, bias=bias, **options)  # noqa: E731
        return gradient_faults(x, y, bias, points(1, 131, seed=3), "sqeuclidean", run)
    if case == "ties":
        generator = torch.Generator().manual_seed(9)
        x, y = (torch.randint(0, 4, (*t.shape[:2], 3), generator=generator).float() for t in (x, y))
        options = {"reduce": "topk" if topk else "min", **topk}
        expected = reference.pairwise(x, y, **options)[1]
        return [] if torch.equal(call("emulated", x, y, **options).indices, expected) else ["another of equal scores"]
    sizes = {"scale": -1.0, "bias": bias - 5.0} if case == "logsumexp" else {"bias": bias + 5.0}
    options = {"reduce": case, **sizes, **topk}
    return faults(x, y, options, "emulated")


@functools.cache
def right_as_it_is(case: str, source: str) -> bool:
    return wrong(case, source) == []


@needs_emulator
@pytest.mark.parametrize(
    ("source", "right", "planted", "case"),
    [pytest.param(*bug, marks=() if bug in BY_DEFAULT else pytest.mark.slow) for bug in BUGS],
    ids=lambda value: str(value)[:40],
)
def test_planted_bug_is_noticed(source, right, planted, case, monkeypatch):
    real, texts = emulator.load, []

    def plant(name, text):
        if name == source:
            texts.append(text.count(right))
            return text.replace(right, planted)
        return text

    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    monkeypatch.setenv("FLASHPATCH_EMULATION_SECONDS", "60")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # fills what nobody wrote with NaN
    try:
        assert right_as_it_is(case, source)
        monkeypatch.setattr(emulator, "load", lambda config: real(config, patch=plant))
        try:
            found = wrong(case, source)
        except (emulator.EmulationError, RuntimeError, IndexError) as error:
            found = [str(error)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert texts and set(texts) == {1}, f"{source} has this {texts} times"
    assert found, "nobody noticed"


# ---- the worked example, and what the README says of it ----


def test_readme_has_the_measured_figures():
    spec = importlib.util.spec_from_file_location("record_pairwise", ROOT / "tests" / "record_pairwise.py")
    recording = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recording)
    document = json.loads((ROOT / "tests" / "evidence" / "h200_pairwise.json").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert recording.MARKERS[0] in text and recording.with_figures(text, document) == text


def sinkhorn_module():
    spec = importlib.util.spec_from_file_location("sinkhorn", ROOT / "tests" / "examples" / "sinkhorn.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sinkhorn_transports():
    """The example's plan has the right marginals, agrees with the materialised form, and its gradient is the cost's."""
    example = sinkhorn_module()
    x, y = (t.double() for t in example.clouds(60, 2, "cpu"))
    sizes = {"epsilon": 0.05, "iterations": 40}
    f, g = example.sinkhorn(x, y, **sizes)
    other_f, other_g = example.sinkhorn_materialised(x, y, **sizes)
    torch.testing.assert_close(f, other_f, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(g, other_g, rtol=1e-6, atol=1e-8)
    assert example.marginal_error(x, y, f, g, epsilon=0.05) < 1e-4
    slope = example.gradient_of_cost(x, y, g, epsilon=0.05)
    step = torch.zeros_like(x)
    step[3, 0] = 1e-4
    costs = [sum(t.mean() for t in example.sinkhorn(x + sign * step, y, **sizes)) for sign in (1, -1)]
    assert abs(float(costs[0] - costs[1]) / 2e-4 - float(slope[3, 0])) < 1e-4


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("cost", COSTS)
def test_on_a_gpu(cost):
    for dtype, dim in ((torch.float32, 3), (torch.bfloat16, 40), (torch.float16, 8)):
        dim = 4 if cost == "giou" else dim
        x, y = (points(2, n, dim, seed=n, boxes=cost == "giou", dtype=dtype, device="cuda") for n in (1003, 2051))
        bias = points(2, 2051, seed=1, device="cuda")
        for reduce in REDUCTIONS:
            options = {
                "cost": cost,
                "reduce": reduce,
                "scale": -0.7,
                "bias": bias,
                **({"k": 7} if reduce == "topk" else {}),
            }
            assert faults(x, y, options, "emulated") == []
        if cost != "giou" and dtype == torch.float32:
            run = lambda a, b, bias: flashpatch.pairwise(a, b, cost=cost, reduce="logsumexp", scale=-0.7, bias=bias)  # noqa: E731
            assert gradient_faults(x, y, bias, points(2, 1003, device="cuda"), cost, run) == []
