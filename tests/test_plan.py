"""The matrix and the planner: data that cannot contradict itself, answers that are complete and in words."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import yaml

from flashpatch import launcher, planning
from flashpatch.planning import MatrixError, load_matrix, resolve, shared_memory
from flashpatch.problem import DIRECTIONS, DTYPES, Decline, Plan, Problem

MATRIX = planning.support()
RAW = yaml.safe_load(planning.find("compat_matrix.yaml").read_text(encoding="utf-8"))
GPUS = [planning.device_for(number) for number in MATRIX.capabilities]


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name.replace(" ", ""))
def test_every_claim_resolves_to_a_kernel_that_fits(device):
    """A supported cell is a Plan within the GPU's shared memory; an unsupported one is a Decline with its reason."""
    for direction, dtype, head_dim, feature in itertools.product(DIRECTIONS, DTYPES, MATRIX.head_dims, MATRIX.features):
        asked = frozenset() if feature == "plain" else frozenset({feature})
        answer = resolve(Problem(direction, dtype, head_dim, head_dim, asked), device)
        key = (device.generation, direction, dtype, head_dim, feature)
        if key in MATRIX.unsupported:
            assert isinstance(answer, Decline) and answer.reasons, key
            continue
        if isinstance(answer, Decline):
            assert [reason.code for reason in answer.reasons] == ["shared_memory"], (key, answer)
            continue
        assert shared_memory(answer.config) <= device.shared_memory
        assert answer.status == "compiled" or any(
            cell.evidence for cell in MATRIX.cells.values() if cell.name in answer.cells
        )


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name.replace(" ", ""))
def test_head_dims_above_64_still_fit_small_gpus(device):
    """No head dim the matrix claims is lost to shared memory on any GPU it names."""
    if device.generation in ("volta", "turing"):
        pytest.skip("no kernels there")
    for direction, head_dim in itertools.product(DIRECTIONS, MATRIX.head_dims):
        answer = resolve(Problem(direction, "bfloat16", head_dim, head_dim), device)
        assert isinstance(answer, Plan), str(answer)


def test_all_reasons_at_once_and_what_would_run():
    answer = resolve(Problem("forward", "float32", 100, 52), planning.gpu("h200"))
    assert [reason.code for reason in answer.reasons] == ["head_dim", "head_dim"]
    assert "multiple of 8" in str(answer) and "104" in answer.nearest
    answer = resolve(Problem("backward", "float64", 64, 64, frozenset({"bias"})), planning.gpu("h200"))
    assert {reason.code for reason in answer.reasons} == {"dtype"}
    assert answer.nearest.startswith("bfloat16, head_dim 64")


def test_fp32_declines_only_where_its_backward_exceeds_shared_memory():
    """Rows of fp32 are twice as long: in 99 KB the backward of head dim 256 has no tile, everything else has one."""
    for device in GPUS:
        if device.generation in ("volta", "turing"):
            continue
        for direction, head_dim in itertools.product(DIRECTIONS, MATRIX.head_dims):
            answer = resolve(Problem(direction, "float32", head_dim, head_dim), device)
            if (direction, head_dim) == ("backward", 256) and device.shared_memory < 100 * 1024:
                assert [reason.code for reason in answer.reasons] == ["shared_memory"]
            else:
                assert isinstance(answer, Plan), (device.name, str(answer))
                assert {c.dtype for c in launcher.configs(answer.config)} == {"float32"}


def test_tf32_is_another_kernel_of_the_same_cells():
    exact, rounded = (
        resolve(Problem("forward", "float32", 64, 64, tf32=tf32), planning.gpu("a100")) for tf32 in (False, True)
    )
    assert rounded.cells == exact.cells and rounded.config == dataclasses.replace(exact.config, tf32=True)


@pytest.mark.parametrize(
    "name, generation",
    [("h200", "hopper"), ("NVIDIA H200", "hopper"), ("rtx 4090", "ada"), ("GeForce RTX 3090", "ampere"),
     ("sm_120", "blackwell_consumer"), ("7.5", "turing"), ("hopper", "hopper"), ("v100", "volta")],
)  # fmt: skip
def test_gpu_names(name, generation):
    assert planning.gpu(name).generation == generation


def test_unknown_gpu_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown GPU 'h2000'; known: .*H200.*9\.0"):
        planning.gpu("h2000")


@pytest.mark.parametrize("capability, generation", [((12, 3), "blackwell_consumer"), ((11, 0), "blackwell"), ((9, 9), "hopper"), ((3, 5), "volta")])  # fmt: skip
def test_unknown_capability_takes_its_family_and_says_so(capability, generation):
    device = planning.device_for(capability, "Mystery")
    assert device.generation == generation and "unknown capability" in device.name


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda data: data["rows"].append(copy.deepcopy(data["rows"][0])), "listed twice"),
        (lambda data: data["rows"].pop(), "has no cell"),
        (lambda data: data["rows"][0].update(dtypes=["float13"]), "float13"),
        (lambda data: data["rows"][0].update(features=["plain", "teleport"]), "teleport"),
        (lambda data: data["rows"][0]["status"].update(hopper="verified"), "without naming its evidence"),
        (lambda data: data["rows"][0]["status"].update(hopper="works"), "'works'"),
        (lambda data: data["rows"][0].update(kernel="forward_sm1"), "forward_sm1"),
        (
            lambda data: data["rows"][-1].update(generations=["volta", "hopper"]),
            "supported and unsupported|listed twice",
        ),
        (lambda data: data["rows"][0].update(colour="red"), "unknown keys: colour"),
    ],
    ids=["duplicate", "missing", "dtype", "feature", "no-evidence", "status", "kernel", "both", "unknown-key"],
)
def test_a_matrix_that_contradicts_itself_does_not_load(spoil, message):
    data = copy.deepcopy(RAW)
    for row in data["rows"]:
        if "status" in row:
            row["status"] = {generation: "compiled" for generation in row["status"]}
            row.pop("evidence", None)
    spoil(data)
    with pytest.raises(MatrixError, match=message):
        load_matrix(data)


def test_excluded_pairs_decline_with_their_reason(monkeypatch):
    spoiled = dataclasses.replace(
        MATRIX, excludes=((frozenset({"softcap", "alibi"}), frozenset(DIRECTIONS), "never both"),)
    )
    monkeypatch.setattr(planning, "support", lambda: spoiled)
    both = Problem("forward", "bfloat16", 64, 64, frozenset({"softcap", "alibi"}))
    answer = resolve(both, planning.device_for((9, 0)))
    assert isinstance(answer, Decline) and answer.reasons[0].text == "never both"
    alone = dataclasses.replace(both, features=frozenset({"softcap"}))
    assert isinstance(resolve(alone, planning.device_for((9, 0))), Plan)


def test_a_plan_names_every_kernel_it_launches():
    plan = resolve(Problem("backward", "bfloat16", 64, 64), planning.gpu("h200"))
    kernels = [config.kernel for config in launcher.configs(plan.config)]
    assert kernels == list(launcher.launches(plan.config)) and len(kernels) == 3
