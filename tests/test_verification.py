"""`flashpatch verify` itself: what it tries, that it notices what is wrong, and what evidence may claim."""

import dataclasses
import functools
import itertools
import json
import math

import pytest
import torch
import torch._dynamo  # the first dispatch mode imports it, which must not happen while a test replaces torch.device
import yaml

from flashpatch import (
    case_runs,
    cases,
    compiler,
    evidence,
    fallback,
    kernel_launch,
    launcher,
    planning,
    support_matrix,
    verification,
)
from flashpatch.arguments import check as check_arguments
from flashpatch.problem import Plan, Problem

EMULATED = planning.device_for((8, 0), "CPU emulator (Ampere)", backend="emulated")
DEVICES = [EMULATED, planning.gpu("h200"), planning.gpu("rtx 4090"), planning.gpu("a100")]


check = functools.partial(check_arguments, causal=False, softmax_scale=None, deterministic=False)


def ids(device):
    return f"{device.name.split()[0]}-{device.backend}"


# ---- cases ----


@pytest.mark.parametrize("device", DEVICES, ids=ids)
def test_every_claimed_cell_is_reached(device):
    reached = {
        cell
        for case in cases.cases(device)
        for plan in case_runs.plans_of(case.problem, device)
        if isinstance(plan, Plan)
        for cell in plan.cells
    }
    cells = cases.claimed(device)
    unreached = {name: verification._why_unreached(cells[name], device, False) for name in set(cells) - reached}
    # what is left is left by the device, in words: a 99 KB block cannot hold every head dim
    assert all("shared_memory" in why for why in unreached.values()), unreached
    assert len(reached) > len(cells) // 2


@pytest.mark.parametrize("device", DEVICES[:2], ids=ids)
def test_every_pair_of_features_that_may_meet_meets(device):
    met = {
        (case.problem.dtype, planning.support().bucket(case.problem.head_dim), frozenset(pair))
        for case in cases.cases(device)
        for pair in itertools.combinations(sorted(case.problem.features), 2)
    }
    matrix = planning.support()
    features = [name for name in matrix.features if name != "plain"]
    head_dims = (64, 128) if device.backend == "gpu" else (64,)
    for dtype, head_dim in itertools.product(("float16", "bfloat16"), head_dims):
        for pair in itertools.combinations(sorted(features), 2):
            problem = Problem("forward", dtype, head_dim, head_dim, frozenset(pair))
            if isinstance(planning.resolve(problem, device), Plan):
                assert (dtype, head_dim, frozenset(pair)) in met


@pytest.mark.parametrize("device", DEVICES, ids=ids)
def test_case_names_are_unique(device):
    names = [case.name for case in cases.cases(device)]
    assert len(names) == len(set(names))


def test_quick_is_a_part():
    quick = {case.problem for case in cases.cases(EMULATED, quick=True)}
    assert {planning.support().bucket(problem.head_dim) for problem in quick} == {64, 128}
    assert len(quick) < len({case.problem for case in cases.cases(EMULATED)})
    # and nothing but that is why the others are not run
    others = [cell for cell in cases.claimed(EMULATED).values() if cell.head_dim not in (64, 128)]
    assert {verification._why_unreached(cell, EMULATED, True) for cell in others} == {"left out by --quick"}


def test_inputs_exist_for_every_feature_of_the_matrix():
    assert set(planning.support().features) <= set(cases._FEATURES)


def test_inputs_are_what_the_public_call_accepts_and_are_reproducible():
    for case in cases.cases(EMULATED):
        inputs = cases.make_inputs(case, "cpu", 3)
        again = cases.make_inputs(case, "cpu", 3)
        assert torch.equal(inputs.q, again.q) and torch.equal(inputs.dout, again.dout)
        assert inputs.q.stride(-1) == 1 or inputs.q.numel() == 0
        keywords = {
            name: inputs.keywords.get(name)
            for name in (
                "bias", "mask", "key_ranges", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
                "max_seqlen_k", "seqused_k",
            )
        }  # fmt: skip
        problems = check(
            inputs.q, inputs.k, inputs.v, window_size=inputs.keywords.get("window_size", (-1, -1)), softcap=0.0,
            dropout_p=0.0, on_decline="error", **keywords,
        )  # fmt: skip
        assert problems == [], case.name


@pytest.mark.parametrize("name", ["bias", "mask", "key_ranges"])
def test_what_the_public_call_refuses_no_kernel_claims(name):
    problem = Problem("forward", "bfloat16", 64, 64, frozenset(("varlen", name)))
    inputs = cases.make_inputs(cases.Case(problem, 2, 9, 9, 2, 2), "cpu", 0)
    keywords = dict.fromkeys(("bias", "mask", "key_ranges", "alibi_slopes", "sinks", "seqused_k")) | inputs.keywords
    problems = check(
        inputs.q, inputs.k, inputs.v, window_size=(-1, -1), softcap=0.0, dropout_p=0.0, on_decline="error", **keywords
    )
    assert any("cannot be combined" in text for text in problems)
    assert not isinstance(planning.resolve(problem, EMULATED), Plan)


# ---- a stand-in for the kernels, right or wrong in a chosen way ----


@pytest.fixture
def kernels(monkeypatch):
    """Replaces the launcher by the exact fallback; `kernels.spoil(name, change)` makes one result wrong."""

    class Kernels:
        spoiled: dict = {}  # noqa: RUF012
        counted = True

        def spoil(self, name, change):
            self.spoiled = {name: change}

        def _done(self, plan, names, tensors):
            if self.counted:
                kernel_launch.launched[plan.config.kernel] += 1
            changed = [
                tensor if tensor is None or name not in self.spoiled else self.spoiled[name](tensor.clone())
                for name, tensor in zip(names, tensors, strict=True)
            ]
            return (*changed, 0)

        def forward(self, plan, q, k, v, call):
            return self._done(plan, ("out", "logsumexp"), fallback.forward(q, k, v, call))

        def backward(self, plan, *arguments):
            return self._done(plan, case_runs.OUTPUTS[2:], fallback.backward(*arguments))

    stand_in = Kernels()
    monkeypatch.setattr(launcher, "forward", stand_in.forward)
    monkeypatch.setattr(launcher, "backward", stand_in.backward)
    return stand_in


def case_of(*features, **sizes):
    problem = Problem("forward", "bfloat16", 64, 64, frozenset(features))
    sizes = {"batch": 2, "seqlen_q": 33, "seqlen_k": 50, "num_heads_q": 4, "num_heads_kv": 2} | sizes
    return cases.Case(problem, **sizes)


SMALL = [case for case in cases.cases(EMULATED) if case.problem.head_dim <= 64]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_right_implementation_passes_every_case(kernels, case):
    result = case_runs.run_case(case, EMULATED, 5)
    assert result.passed, [check.message for check in result.checks]
    backward = isinstance(case_runs.plans_of(case.problem, EMULATED)[1], Plan)
    assert sum(result.launches.values()) == 1 + backward * (1 + ("deterministic" in case.problem.features))


def one_nan(tensor):
    tensor.flatten()[-1] = math.nan
    return tensor


@pytest.mark.parametrize("name", ["out", "logsumexp", "dq", "dk", "dv", "dsinks"])
@pytest.mark.parametrize("change", [lambda tensor: tensor * 1.1 + 0.05, one_nan], ids=["scaled", "one NaN"])
def test_a_wrong_result_fails_by_name(kernels, name, change):
    kernels.spoil(name, change)
    result = case_runs.run_case(case_of("causal", "gqa", "sinks"), EMULATED, 0)
    wrong = [check for check in result.checks if not check.passed]
    assert wrong[0].tensor == name and wrong[0].message.startswith(f"{name}: ") and "beyond" in wrong[0].message
    # a backward is fed with what its forward returned; nothing is fed with a gradient
    assert len(wrong) == 1 or name in ("out", "logsumexp")


def test_what_is_never_written_is_noticed(kernels):
    kernels.spoil("out", lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    result = case_runs.run_case(case_of("causal"), EMULATED, 0)
    assert not result.passed


def test_a_window_that_is_one_key_too_wide_is_noticed(kernels, monkeypatch):
    case = case_of("causal", "window")
    exact = kernels.forward

    def wide(plan, q, k, v, call):
        return exact(plan, q, k, v, dataclasses.replace(call, window_left=call.window_left + 1))

    monkeypatch.setattr(launcher, "forward", wide)
    assert not case_runs.run_case(case, EMULATED, 0).passed


def test_nondeterminism_is_noticed(kernels, monkeypatch):
    exact, calls = kernels.backward, itertools.count()

    def drifting(plan, *arguments):
        dq, *rest = exact(plan, *arguments)
        return (dq + 1e-3 * next(calls), *rest)

    monkeypatch.setattr(launcher, "backward", drifting)
    result = case_runs.run_case(case_of("deterministic"), EMULATED, 0)
    assert any("two runs" in check.message for check in result.checks)


def test_a_pass_without_a_launch_is_not_a_pass(kernels, monkeypatch):
    kernels.counted = False
    monkeypatch.setattr(verification, "_build", lambda *_: None)
    monkeypatch.setattr(verification, "cases", lambda device, quick: [case_of("causal")])
    report = verification.verify_kernels(EMULATED)
    assert report.count("passed") == 0
    assert {cell.reason for cell in report.cells if cell.cases} == {"no launch was counted"}


def test_a_failed_build_is_a_failed_case_in_its_own_words(monkeypatch):
    def refuse(*_):
        raise compiler.CompileError(compiler.Reason("compile_failed", "no such luck"), "line 3: error")

    monkeypatch.setattr(launcher, "forward", refuse)
    result = case_runs.run_case(case_of(), EMULATED, 0)
    assert not result.passed and "no such luck" in result.error and "line 3" in result.error


def test_compiled_only_is_not_passed(monkeypatch):
    device = planning.device_for((8, 0), "no GPU", backend="compiled")
    monkeypatch.setattr(verification, "cases", lambda device, quick: [case_of("causal")])
    monkeypatch.setattr(compiler, "compile_cubin", lambda config, arch: (b"", ""))
    report = verification.verify_kernels(device)
    assert report.count("passed") == 0 and report.count("compiled") == 4
    assert "not run" in report.statement


def test_a_backward_from_rounded_out_is_allowed_what_that_costs():
    """One key and a sink have a row's weight: dP - dout . out cancels, and eager has next to no error that could be the yardstick."""
    case = case_of("sinks", num_heads_kv=4, seqlen_q=3, seqlen_k=1)
    inputs = case_runs.make_inputs(case, torch.device("cpu"), seed=0)
    expected = case_runs._expected(case, inputs, upcast=True, backward=True)
    q, k, v, dout = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    scale = q.shape[-1] ** -0.5
    weight = (torch.einsum("bihd,bjhd->bhij", q, k) * scale - expected["logsumexp"][..., None]).exp()
    dlogsumexp = inputs.dlogsumexp.double()[..., None]

    def dq(out):
        delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
        ds = weight * (torch.einsum("bihd,bjhd->bhij", dout, v) - delta + dlogsumexp)
        return torch.einsum("bhij,bjhd->bihd", ds, k) * scale

    torch.testing.assert_close(dq(expected["out"]), expected["dq"])
    error = (dq(expected["out"].bfloat16().double()) - expected["dq"]).abs().max()
    cost = expected["dq of rounded out"].abs().max()
    assert 0.3 * cost < error <= cost


def test_results_without_elements_are_bit_equal_in_any_strides():
    nothing = torch.empty_like(torch.empty(1, dtype=torch.float16).expand(2, 0, 4))
    assert case_runs._bit_equal(nothing, nothing) and not case_runs._bit_equal(nothing, torch.empty(2, 0, 5))


# ---- evidence ----


def test_the_matrix_is_not_more_optimistic_than_its_evidence():
    stale = evidence.stale_cells(planning.support(), evidence.folder())
    examples = "\n".join(f"{cell}: {why}" for cell, why in list(stale.items())[:5])
    assert not stale, (
        f"{len(stale)} cells of compat_matrix.yaml are called verified without valid evidence:\n{examples}\n"
        "type: flashpatch verify --record (on that GPU), or: flashpatch verify --demote"
    )


@pytest.fixture
def recorded(kernels, monkeypatch, tmp_path):
    """A GPU's evidence for one case, and the matrix that claims it."""
    device = planning.gpu("h200")
    monkeypatch.setattr(verification, "_build", lambda *_: None)
    case = case_of("causal", "gqa")
    for module in (verification, evidence):
        monkeypatch.setattr(module, "cases", lambda device, quick: [case])
    monkeypatch.setattr(verification.torch, "device", lambda *_: "cpu")
    report = verification.verify_kernels(device)
    path = evidence.record(report, device, {"driver": "13.0"}, tmp_path)
    text = support_matrix.find("compat_matrix.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    for row in data["rows"]:
        if "hopper" in row.get("status", {}):
            row["evidence"] = path.name
            row["status"] = {**row["status"], "hopper": "verified"}
    return path, support_matrix.load_matrix(data)


def verified(matrix, *features):
    names = {("bfloat16", 64, feature) for feature in features}
    chosen = {
        planning.resolve(Problem(direction, "bfloat16", 64, 64, frozenset(("causal", "gqa"))), planning.gpu("h200"))
        for direction in ("forward", "backward")
    }
    kernels = {plan.config.kernel for plan in chosen}
    kept = {
        key: cell
        for key, cell in matrix.cells.items()
        if (cell.dtype, cell.head_dim, cell.feature) in names and cell.kernel in kernels
    }
    return dataclasses.replace(matrix, cells=kept)


def test_recorded_evidence_holds_until_the_source_changes(recorded, monkeypatch, tmp_path):
    path, matrix = recorded
    assert json.loads(path.read_text())["driver"] == "13.0"
    claims = verified(matrix, "plain", "causal", "gqa")
    assert {cell.status for cell in claims.cells.values() if cell.generation == "hopper"} == {"verified"}
    assert evidence.stale_cells(claims, tmp_path) == {}
    assert all("no entry" in why for why in evidence.stale_cells(verified(matrix, "softcap"), tmp_path).values())
    real = compiler.digest
    monkeypatch.setattr(
        compiler, "digest", lambda config: "other" if config.kernel == "backward_finish_sm90" else real(config)
    )
    assert all("has changed" in why for why in evidence.stale_cells(claims, tmp_path).values())
    assert {cell.split("/")[0] for cell in evidence.stale_cells(claims, tmp_path)} == {"backward_sm90"}
    monkeypatch.setattr(compiler, "digest", lambda config: "other")
    assert all("has changed" in why for why in evidence.stale_cells(claims, tmp_path).values())
    path.unlink()
    assert all("missing" in why for why in evidence.stale_cells(claims, tmp_path).values())


def test_a_stand_in_is_recorded_as_compiled_and_backs_no_claim(kernels, monkeypatch, tmp_path):
    """What an H200 shows of Ampere's kernels is kept, named as that, and no cell of Ampere may be verified by it."""
    h200 = dataclasses.replace(planning.gpu("h200"), name="NVIDIA H200")
    device = planning.standing_for(h200, "ampere")
    monkeypatch.setattr(verification, "_build", lambda *_: None)
    for module in (verification, evidence):
        monkeypatch.setattr(module, "cases", lambda device, quick: [case_of("causal", "gqa")])
    monkeypatch.setattr(verification.torch, "device", lambda *_: "cpu")
    report = verification.verify_kernels(device)
    assert "no evidence for Ampere itself" in report.statement
    assert {cell.status for cell in report.cells} == {"compiled"}
    path = evidence.record(report, device, {"driver": "13.0"}, tmp_path)
    content = json.loads(path.read_text())
    assert path.name == "h200-as-sm80.json" and content["status"] == "compiled" and content["stands_for"] == [8, 0]
    assert content["note"] == "sm80-family source compiled for sm_90, on NVIDIA H200"
    assert all(entry["error"] <= entry["bound"] for entries in content["cells"].values() for entry in entries)
    cells = {
        key: dataclasses.replace(cell, status="verified", evidence=path.name)
        for key, cell in planning.support().cells.items()
        if cell.name in content["cells"]
    }
    stale = evidence.stale_cells(dataclasses.replace(planning.support(), cells=cells), tmp_path)
    assert len(stale) == len(cells) == 6 and all("stood in for another" in why for why in stale.values())


@pytest.mark.parametrize("path", sorted(evidence.folder().glob("*-as-*.json")), ids=lambda path: path.stem)
def test_records_of_stand_ins_claim_no_more_than_they_show(path):
    """Every claimed cell of the generation that was stood in for, each error within its bound, and no row relies on it."""
    content = json.loads(path.read_text(encoding="utf-8"))
    device = planning.device_for(tuple(content["stands_for"]))
    assert content["status"] == "compiled" and content["note"].endswith(f"on {content['gpu']}")
    assert content["shared_memory"] <= device.shared_memory
    assert set(content["cells"]) <= set(cases.claimed(device)) and content["cells"]
    assert all(entry["error"] <= entry["bound"] for entries in content["cells"].values() for entry in entries)
    assert path.name not in {cell.evidence for cell in planning.support().cells.values()}


def test_evidence_comes_from_a_gpu_only(kernels, monkeypatch, tmp_path):
    monkeypatch.setattr(verification, "_build", lambda *_: None)
    monkeypatch.setattr(verification, "cases", lambda device, quick: [case_of()])
    with pytest.raises(ValueError, match="emulated"):
        evidence.record(verification.verify_kernels(EMULATED), EMULATED, {}, tmp_path)


MATRIX = """\
# kept
head_dims: [64, 128]
features: {plain: all, causal: below}
rows:
  - kernel: one   # kept too
    status: {ampere: verified, hopper: verified}  # both
    dtypes: [float16]
  - kernel: one
    status: &shared
      hopper: verified
    dtypes: [bfloat16]
    head_dims: [64]
  - kernel: two
    status: *shared
    dtypes: [bfloat16]
  - unsupported: never
    generations: [volta]
    dtypes: [float16]
"""


@pytest.mark.parametrize(
    ("stale", "before", "after"),
    [
        ("one/hopper/float16/d128/causal", "hopper: verified}  # both", "hopper: compiled}  # both"),
        ("one/ampere/float16/d64/plain", "{ampere: verified", "{ampere: compiled"),
        ("one/hopper/bfloat16/d64/plain", "      hopper: verified\n", "      hopper: compiled\n"),
        ("two/hopper/bfloat16/d128/plain", "      hopper: verified\n", "      hopper: compiled\n"),
    ],
)
def test_demoting_changes_one_word(stale, before, after):
    text, changes = evidence.demote(MATRIX, [stale])
    assert text == MATRIX.replace(before, after) and len(changes) == 1


def test_demoting_nothing_changes_nothing():
    assert evidence.demote(MATRIX, []) == (MATRIX, [])
    assert evidence.demote(MATRIX, ["one/hopper/bfloat16/d128/plain"]) == (MATRIX, [])
