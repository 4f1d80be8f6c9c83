"""The matrix and the planner: data that cannot contradict itself, answers that are complete and in words."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import re

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashpatch import compiler, emulator, execution, kernel_sets, planning, support_matrix, support_table
from flashpatch.planning import resolve, shared_memory
from flashpatch.problem import DIRECTIONS, DTYPES, Decline, DeclinedError, Device, Plan, Problem, Reason
from flashpatch.support_matrix import MatrixError, load_matrix

MATRIX = planning.support()
RAW = yaml.safe_load(support_matrix.find("compat_matrix.yaml").read_text(encoding="utf-8"))
GPUS = [planning.device_for(number) for number in MATRIX.capabilities]


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name.replace(" ", ""))
def test_every_claim_resolves_to_a_kernel_that_fits(device):
    """A supported cell is a Plan within the GPU's shared memory; an unsupported one is a Decline with its reason."""
    for direction, dtype, head_dim, feature in itertools.product(DIRECTIONS, DTYPES, MATRIX.head_dims, MATRIX.features):
        asked = frozenset() if feature == "plain" else frozenset({feature})
        answer = resolve(Problem(direction, dtype, head_dim, min(head_dim, max(MATRIX.head_dims_v)), asked), device)
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
def test_no_claim_is_lost_to_shared_memory(device):
    """Every head dim the matrix claims has a tile on every GPU it names: the backward at 256 in 99 KB."""
    for cell in MATRIX.cells.values():
        problem = Problem(cell.direction, cell.dtype, cell.head_dim, cell.head_dim)
        if cell.generation == device.generation and cell.feature == "plain" and not beyond_99_kb(problem):
            answer = resolve(problem, device)
            assert isinstance(answer, Plan), str(answer)


# ---- limits: the whole tile tables ----

THREADS, REGISTERS = 1024, 65536  # of a block and of a multiprocessor, on every generation
FLAGS = tuple(planning.FLAGS)


def configs_on(capability):
    """Every Config a GPU can come to: each of its kernels' tiles that planning may choose, dtypes and features."""
    device = planning.device_for(capability)
    dtypes = {(cell.kernel, cell.dtype) for cell in MATRIX.cells.values() if cell.generation == device.generation}
    for (kernel, table), dtype in itertools.product(MATRIX.tiles.items(), ("float16", "float32", "float8_e4m3fn")):
        if (kernel, dtype) not in dtypes:
            continue
        for bucket, other in itertools.product(table, (32, *table)):
            for asked in [
                frozenset(),
                frozenset(MATRIX.features) - {"plain"},
                *map(lambda f: frozenset([f]), MATRIX.features),
            ]:
                head_dims = (bucket, min(bucket, other)), (min(bucket, other), bucket)
                tf32 = {False, dtype == "float32"}
                for (head_dim, head_dim_v), short, rounded in itertools.product(head_dims, (False, True), tf32):
                    problem = Problem(MATRIX.kernels[kernel], dtype, head_dim, head_dim_v, asked, short, rounded)
                    config = planning._config(problem, device, kernel, (head_dim, head_dim_v), MATRIX)
                    if config is not None:
                        yield device, config


@pytest.mark.parametrize("capability", MATRIX.capabilities, ids=lambda number: "sm_{}{}".format(*number))
def test_no_config_exceeds_its_generation(capability):
    """Shared memory, threads and registers of the main kernels and the small ones beside them. The compiler keeps a
    kernel within the registers that its number of threads leaves (test_compile), so the threads are what can be wrong.
    """
    seen = set()
    for device, main in configs_on(capability):
        for config in kernel_sets.configs(main):
            seen.add(config)
            assert shared_memory(config) <= device.shared_memory, (compiler.name(config), device.name)
            threads = 32 * config.num_warps
            assert threads <= THREADS and REGISTERS // threads >= 64, compiler.name(config)
    claimed = {
        cell.kernel for cell in MATRIX.cells.values() if cell.generation == planning.device_for(capability).generation
    }
    assert claimed <= {config.kernel for config in seen}


def test_every_tile_is_some_gpus():
    """A tile that no capability comes to is dead weight, or too big for all of them."""
    sizes = ("block_m", "block_n", "num_warps", "num_stages")
    used = {
        (config.kernel, max(config.head_dim, config.head_dim_v), *(getattr(config, size) for size in sizes))
        for capability in MATRIX.capabilities
        for _, config in configs_on(capability)
    }
    for kernel, table in MATRIX.tiles.items():
        for bucket, tiles in table.items():
            for tile in tiles:
                assert (kernel, bucket, *(tile[size] for size in sizes)) in used, (kernel, bucket, tile)


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0), (12, 1)], ids=str)
def test_the_widest_backward_fits_the_smallest_gpus(capability):
    device = planning.device_for(capability)
    for name in MATRIX.features:
        asked = frozenset() if name == "plain" else frozenset([name])
        answer = resolve(Problem("backward", "float16", 256, 256, asked), device)
        assert isinstance(answer, Plan) and shared_memory(answer.config) <= device.shared_memory, (name, answer)


# ---- planning is the printed matrix ----


def rows_for(generation, direction, dtype, head_dim):
    """The rows of compat_matrix.yaml about this, read anew: kernel -> feature -> status, and feature -> reason."""
    kernels, reasons = {}, {}
    for row in RAW["rows"]:
        features = row.get("features", list(RAW["features"]))
        if dtype not in row["dtypes"] or head_dim not in row.get("head_dims", RAW["head_dims"]):
            continue
        if "unsupported" in row:
            if generation in row["generations"] and direction in row.get("directions", DIRECTIONS):
                reasons.update(dict.fromkeys(features, row["unsupported"]))
        elif generation in row["status"] and RAW["kernels"][row["kernel"]] == direction:
            kernels.setdefault(row["kernel"], {}).update(dict.fromkeys(features, row["status"][generation]))
    return kernels, reasons


def printed_answer(problem, generation):
    """(kernel, status) that the matrix gives a problem, or the set of reasons why none, by its rows alone."""
    sizes = (problem.head_dim, problem.head_dim_v)
    largest = (max(RAW["head_dims"]), max(RAW["head_dims_v"]))
    if any(not 0 < size <= limit for size, limit in zip(sizes, largest, strict=True)):
        return {"head_dim"}
    bucket = min(size for size in RAW["head_dims"] if size >= max(sizes))
    kernels, unsupported = rows_for(generation, problem.direction, problem.dtype, bucket)
    wanted = problem.features | {"plain"}
    excluded = {
        entry["reason"]
        for entry in RAW["excludes"]
        if set(entry["features"]) <= wanted and problem.direction in entry.get("directions", DIRECTIONS)
    }
    refused = {unsupported[feature] for feature in wanted if feature in unsupported}
    if excluded or refused:
        return excluded | refused
    for kernel in RAW["kernels"]:  # in order of preference
        if wanted <= set(kernels.get(kernel, ())):
            return kernel, "verified" if {kernels[kernel][f] for f in wanted} == {"verified"} else "compiled"
    return {f"no single kernel has {' + '.join(sorted(wanted))} together"}


def beyond_99_kb(problem) -> bool:
    """What a generation may claim although its smaller GPUs lack the shared memory; they decline by name."""
    largest = max(problem.head_dim, problem.head_dim_v)
    return largest > 256 or (problem.dtype == "float32" and problem.direction == "backward" and largest > 192)


head_dims = st.one_of(st.integers(1, 80).map(lambda n: 8 * n), st.integers(0, 600), st.sampled_from(MATRIX.head_dims))


@settings(max_examples=400, derandomize=True, database=None, deadline=None)
@given(
    st.sampled_from(GPUS),
    st.builds(
        Problem,
        st.sampled_from(DIRECTIONS),
        st.sampled_from(DTYPES),
        head_dims,
        head_dims,
        st.sets(st.sampled_from([name for name in MATRIX.features if name != "plain"]), max_size=6).map(frozenset),
    ),
)
@example(planning.device_for((8, 6)), Problem("backward", "bfloat16", 256, 256, frozenset({"mask", "key_ranges"})))
@example(planning.device_for((7, 5)), Problem("forward", "bfloat16", 64, 64))
def test_a_faked_gpu_gets_what_the_matrix_prints(device, problem):
    answer, printed = resolve(problem, device), printed_answer(problem, device.generation)
    if isinstance(answer, Plan):
        assert (answer.config.kernel, answer.status) == printed
        step = 16 if problem.dtype == "float8_e4m3fn" else 8
        given, taken = (problem.head_dim, problem.head_dim_v), (answer.config.head_dim, answer.config.head_dim_v)
        padded = answer.padded_to or given
        for size, zeros_end, bucket in zip(given, padded, taken, strict=True):
            assert zeros_end % step == 0 and 0 <= zeros_end - size < step and zeros_end <= bucket
        assert shared_memory(answer.config) <= device.shared_memory
    elif printed == {"head_dim"}:
        assert {reason.code for reason in answer.reasons} == printed
    elif {reason.code for reason in answer.reasons} == {"shared_memory"}:
        assert isinstance(printed, tuple) and beyond_99_kb(problem)
        assert device.shared_memory < planning.gpu("a100").shared_memory
    else:
        assert {reason.text for reason in answer.reasons} == printed


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name.replace(" ", ""))
def test_audit_prints_what_the_matrix_has(device):
    printed = {
        (row.direction, row.dtype, row.feature, head_dim): (row.kernel, row.status)
        for row in support_table.support_of(device)
        for head_dim in row.head_dims
    }
    whole = itertools.product(DIRECTIONS, DTYPES, MATRIX.features, MATRIX.head_dims)
    assert set(printed) == set(whole)
    for (direction, dtype, feature, head_dim), found in printed.items():
        head_dim_v = min(head_dim, MATRIX.head_dims_v[-1])
        problem = Problem(direction, dtype, head_dim, head_dim_v, frozenset({feature} - {"plain"}))
        answer = printed_answer(problem, device.generation)
        if beyond_99_kb(problem) and device.shared_memory < planning.gpu("a100").shared_memory:
            answer = set()
        assert found == (answer if isinstance(answer, tuple) else (None, "unsupported"))


# ---- a device that stands in for an older one ----

H200 = planning.device_for((9, 0), "NVIDIA H200", multiprocessors=132)


@pytest.mark.parametrize(
    "wanted, generation, limit",
    [("turing", "turing", 65536), ("ampere", "ampere", 166912), ("8.6", "ampere", 101376), ("ada", "ada", 101376)],
)
def test_a_stand_in_takes_kernels_and_limits_and_keeps_its_own_instructions(wanted, generation, limit):
    device = planning.standing_for(H200, wanted)
    assert (device.generation, device.shared_memory, device.capability) == (generation, limit, (9, 0))
    for direction, feature in itertools.product(DIRECTIONS, MATRIX.features):
        problem = Problem(direction, "float16", 128, 128, frozenset({feature} - {"plain"}))
        plan, native = resolve(problem, device), resolve(problem, planning.gpu(wanted))
        assert plan.config == native.config and compiler.arch(plan.config, device) == "sm_90"
        family = plan.config.kernel[-4:]
        assert plan.status == "compiled" and plan.note == f"{family}-family source compiled for sm_90, on NVIDIA H200"


def test_a_stand_in_verifies_nothing(monkeypatch):
    cells = {key: dataclasses.replace(cell, status="verified", evidence="x.json") for key, cell in MATRIX.cells.items()}
    monkeypatch.setattr(planning, "support", lambda: dataclasses.replace(MATRIX, cells=cells))
    problem = Problem("forward", "float16", 64, 64)
    assert resolve(problem, planning.gpu("t4")).status == "verified"
    assert resolve(problem, planning.standing_for(H200, "turing")).status == "compiled"


@pytest.mark.parametrize("wanted", ["hopper", "9.0", "h200"])
def test_a_device_does_not_stand_in_for_itself(wanted):
    assert planning.standing_for(H200, wanted) == H200


@pytest.mark.parametrize(
    "device, wanted, message",
    [
        (H200, "tring", "FLASHPATCH_GENERATION=tring: there is no such generation; known: volta, turing, .*8.6"),
        (H200, "blackwell", "NVIDIA H200 has compute capability 9.0 and cannot run kernels of the newer 10.0"),
        (planning.device_for((8, 0)), "8.6", "8.0 and cannot run kernels of the newer 8.6"),
        (planning.device_for((12, 0)), "hopper", "kernels of Hopper use instructions that RTX 5070 .* does not have"),
    ],
)
def test_a_switch_that_cannot_be_is_an_error_that_says_why(device, wanted, message):
    with pytest.raises(planning.SwitchError, match=message):
        planning.standing_for(device, wanted)


def test_the_switch_reaches_calls(monkeypatch):
    import torch

    facts = dict(major=9, minor=0, name="NVIDIA H200", shared_memory_per_block_optin=232448, multi_processor_count=132)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Facts", (), facts))
    assert execution.device_of(torch.device("cuda", 0)) == H200
    monkeypatch.setenv("FLASHPATCH_GENERATION", "turing")
    assert execution.device_of(torch.device("cuda", 0)) == planning.standing_for(H200, "turing")
    assert execution.own_device(0) == H200
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    emulated = execution.device_of(torch.device("cpu"))
    assert emulated == Device("CPU emulator (Turing)", "turing", (7, 5), 65536, backend="emulated")


def test_all_reasons_at_once_and_what_would_run():
    answer = resolve(Problem("forward", "float32", 1000, 0), planning.gpu("h200"))
    assert [reason.code for reason in answer.reasons] == ["head_dim", "head_dim"]
    assert "1000 is above 576" in str(answer) and "head_dim 256" in answer.nearest
    answer = resolve(Problem("backward", "float64", 64, 64, frozenset({"bias"})), planning.gpu("h200"))
    assert {reason.code for reason in answer.reasons} == {"dtype"}
    assert answer.nearest.startswith("bfloat16, head_dim 64")


@pytest.mark.parametrize("generation", sorted(MATRIX.generations))
def test_the_nearest_request_runs_and_is_not_the_one_declined(generation):
    device = planning.gpu(generation)
    asked = itertools.product(
        DIRECTIONS, DTYPES, ((32, 32), (50, 64), (64, 256), (256, 256), (576, 576), (1024, 8)),
        ((), ("mask",), ("bias", "varlen"), ("causal", "unequal_head_dims")),
    )  # fmt: skip
    for direction, dtype, (head_dim, head_dim_v), features in asked:
        problem = Problem(direction, dtype, head_dim, head_dim_v, frozenset(features))
        answer = resolve(problem, device)
        if isinstance(answer, Plan) or not MATRIX.supported.get((device.generation, direction)):
            continue
        named = re.fullmatch(r"(\w+), head_dim (\d+)(?:, head_dim_v (\d+))?(?:, ([\w +]+))?", answer.nearest)
        assert named, (problem, answer.nearest)
        dtype, size, size_v, words = named.groups()
        found = Problem(
            direction, dtype, int(size), int(size_v or size), frozenset(words.split(" + ") if words else ())
        )
        assert isinstance(resolve(found, device), Plan), (problem, answer.nearest)
        assert found != problem


@pytest.mark.parametrize(
    "gpu, dtype, head_dim, features, nearest",
    [
        ("h200", "float8_e4m3fn", 32, (), "float8_e4m3fn, head_dim 48"),
        ("a10", "bfloat16", 512, ("causal",), "bfloat16, head_dim 256, causal"),
        ("a100", "bfloat16", 64, ("bias", "varlen", "causal"), "bfloat16, head_dim 64, bias + causal"),
        ("a100", "bfloat16", 0, (), "bfloat16, head_dim 8"),
        ("v100", "float16", 64, (), ""),
    ],
)
def test_what_would_run_instead(gpu, dtype, head_dim, features, nearest):
    problem = Problem("backward" if head_dim == 512 else "forward", dtype, head_dim, head_dim, frozenset(features))
    assert resolve(problem, planning.gpu(gpu)).nearest == nearest


@pytest.mark.parametrize("features", [(), ("bias", "key_ranges")], ids=["plain", "with a bias"])
def test_fp32_declines_only_what_exceeds_shared_memory(features):
    """Rows of fp32 are twice as long: in 99 KB the backward of head dim 256 has no tile, everything else up to there has one."""
    for device in GPUS:
        if device.generation in ("volta", "turing"):
            continue
        for direction, head_dim in itertools.product(DIRECTIONS, MATRIX.head_dims):
            head_dim_v = min(head_dim, MATRIX.head_dims_v[-1])
            answer = resolve(Problem(direction, "float32", head_dim, head_dim_v, frozenset(features)), device)
            small = device.shared_memory < 100 * 1024
            if head_dim > 256 or (direction, head_dim, small) == ("backward", 256, True):
                assert {reason.code for reason in answer.reasons} <= {"shared_memory", "head_dim"}, str(answer)
            else:
                assert isinstance(answer, Plan), (device.name, str(answer))
                assert {c.dtype for c in kernel_sets.configs(answer.config)} == {"float32"}


def test_fp32_has_no_wider_bias():
    (reason,) = resolve(Problem("forward", "float32", 64, 64, frozenset({"wide_bias"})), planning.gpu("h200")).reasons
    assert reason.code == "wide_bias" and "counts as `bias`" in reason.text


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
        (lambda data: data["tiles"]["forward_sm80"].pop(96), "d96/plain has no tile"),
    ],
    ids=[
        "duplicate",
        "missing",
        "dtype",
        "feature",
        "no-evidence",
        "status",
        "kernel",
        "both",
        "unknown-key",
        "no-tile",
    ],
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
    kernels = [config.kernel for config in kernel_sets.configs(plan.config)]
    assert kernels == list(kernel_sets.launches(plan.config)) and len(kernels) == 3


def test_errors_cross_processes():
    """Data loaders and launchers pickle what a worker raised; the reasons must arrive with it."""
    reason = Reason("no_nvrtc", "there is none")
    decline = Decline(Problem("forward", "float16", 64, 64), (reason,))
    place = ("forward_sm80", "attention_forward_sm80", 1, 2, "tile.cuh:3", "out of bounds")
    for error, fields in (
        (DeclinedError(decline), {"decline": decline}),
        (compiler.CompileError(reason, "line 3"), {"reason": reason, "log": "line 3"}),
        (emulator.EmulatorBuildError(reason), {"reason": reason}),
        (emulator.EmulationError(*place), {"block": 1, "what": "out of bounds"}),
    ):
        found = pickle.loads(pickle.dumps(error))
        assert type(found) is type(error) and str(found) == str(error)
        assert {name: getattr(found, name) for name in fields} == fields
