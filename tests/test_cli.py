"""The command line: exit codes, JSON against its schema, and errors that are sentences."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("flashpatch.cli", reason="needs the editable install: pip install -e .")

import jsonschema
import yaml
from click.testing import CliRunner

from flashpatch import (
    auditing,
    case_runs,
    cases,
    cli,
    compiler,
    emulator,
    evidence,
    fallback,
    launcher,
    model_verification,
    planning,
    support_matrix,
    verification,
)
from flashpatch.problem import DIRECTIONS, DTYPES, SCALED, Plan, Problem, Reason

NO_GPU = not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not NO_GPU, reason="what a machine without a GPU says")


def run(*arguments, **options):
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*arguments):
    """The exit code and the document of a command, checked against the schema that the command prints."""
    result = run(*arguments, "--json")
    document = json.loads(result.stdout)
    schema = json.loads(run(arguments[0], "--json-schema").stdout)
    jsonschema.validate(document, schema)
    assert document["exit_code"] == result.exit_code
    return result.exit_code, document


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Saved models: one that dispatches, one whose attention is hard-coded, and folders that are not models."""
    import transformers

    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64)
    gpt = transformers.OpenAIGPTConfig(vocab_size=60, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    transformers.LlamaForCausalLM(llama).save_pretrained(root / "llama")
    transformers.OpenAIGPTLMHeadModel(gpt).save_pretrained(root / "hard-coded")
    broken = transformers.LlamaForCausalLM(llama)
    broken.model.layers[0].self_attn.v_proj.weight.data[0, 0] = math.nan
    broken.save_pretrained(root / "broken")
    (root / "empty").mkdir()
    (root / "pickled").mkdir()
    (root / "pickled" / "config.json").write_text((root / "llama" / "config.json").read_text())
    torch.save({}, root / "pickled" / "pytorch_model.bin")
    (root / "untyped").mkdir()
    (root / "untyped" / "config.json").write_text("{}")
    return root


SHORT = ("--seqlen", 12)


# ---- help, schemas, bad input ----


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_and_schema(command):
    assert run(command, "--help").exit_code == 0
    schema = json.loads(run(command, "--json-schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    (first, *_) = schema.get("oneOf", [schema])
    assert all("description" in value for name, value in first["properties"].items() if name != "exit_code")


def test_help_lists_every_command_without_loading_torch():
    program = (
        "import sys\nfrom flashpatch.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert done.stdout.strip().endswith("False")


BAD = [
    (("nonsense",), 2, "No such command"),
    (("verify", "--nonsense"), 2, "No such option"),
    (("verify", "--dtype", "int8"), 2, "float16, fp16"),
    (("verify", "--device", "tpu"), 2, "cpu, cuda or cuda:N"),
    (("verify", "--device", "cuda:7"), 4, "torch sees no GPU cuda:7"),
    (("verify", "--record"), 2, "emulated"),
    (("verify", "--gpu", "abacus"), 2, "known: "),
    (("verify", "{root}/llama", "--record"), 2, "are for kernels"),
    (("verify", "{root}/llama", "--device", "cuda"), 4, "torch sees no GPU"),
    (("verify", "{root}/missing"), 2, "does not exist"),
    (("verify", "{root}/empty"), 2, "no config.json"),
    (("verify", "{root}/llama/config.json"), 2, "is a file"),
    (("verify", "{root}/pickled"), 2, "pickle"),
    (("verify", "{root}/untyped", "--random-weights"), 2, "no model type"),
    (("verify", "{root}/llama", "--gguf-file", "weights.gguf"), 2, "has no file weights.gguf"),
    (("verify", "{root}/llama", "--seqlen", "0"), 2, "x>=1"),
    (("apply",), 2, "Missing argument 'MODEL'"),
    (("apply", "{root}/missing"), 2, "does not exist"),
    (("apply", "{root}/llama", "--save", "{root}/llama/config.json"), 2, "that is a file"),
    (("audit", "--gpu", "abacus"), 2, "known: "),
    (("audit", "--device", "cuda"), 4, "torch sees no GPU"),
    (("audit", "{root}/missing"), 2, "does not exist"),
    (("audit", "--markdown", "{root}/missing.md"), 2, "missing.md"),
    (("verify", "--gpu", ""), 2, "unknown GPU ''; known: P100"),
    (("audit", "--gpu", ""), 2, "unknown GPU ''; known: P100"),
    (("cost", "{root}/llama", "--gpu", ""), 2, "unknown GPU ''; known: P100"),
    (("verify", "--replay", ""), 2, "'--replay': it is empty"),
    (("apply", ""), 2, "'MODEL': it is empty"),
    (("verify", "--batch", "2", "--no-backward"), 2, "--no-backward, --batch goes with a MODEL"),
    (("verify", "--replay", "x", "--dtype", "fp16"), 2, "leave out --dtype"),
    (("audit", "--seqlen", "128"), 2, "--seqlen goes with a MODEL"),
    (("bench", "--device", "cpu"), 2, "flashpatch bench --roofline --device cpu"),
    (("bench", "--device", "cuda:7"), 4, "torch sees no cuda:7"),
    (("bench", "--html", "x.html"), 2, "--html goes with --roofline"),
    (("bench", "--roofline", "--odd"), 2, "leave one out"),
    (("bench", "--features", "--seqlens", "512"), 2, "leave out --seqlens"),
    (("run", "--json", "{root}/missing.py"), 2, "run has no option --json"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), BAD, ids=[" ".join(map(str, entry[0])) for entry in BAD])
def test_bad_input_is_a_sentence(folders, arguments, code, words):
    result = run(*(argument.format(root=folders) for argument in arguments))
    assert result.exit_code == code, result.output
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_as_a_process_stdout_is_the_document_alone(folders):
    command = [sys.executable, "-c", "from flashpatch.cli import main; main()"]
    arguments = ["apply", str(folders / "llama"), "--json", "--seqlen", "12"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dispatched"] == 2
    assert done.stderr == ""


# ---- verify: kernels ----


def one_case(*features):
    problem = Problem("forward", "bfloat16", 64, 64, frozenset(features))
    return cases.Case(problem, 1, 20, 30, 2, 2)


@pytest.fixture
def single(monkeypatch):
    """One small case in place of all."""
    monkeypatch.setattr(verification, "cases", lambda device, quick: [one_case("causal")])


needs_compiler = pytest.mark.skipif(emulator.available() is not None, reason="needs a C++ compiler")


@needs_compiler
def test_verify_runs_the_kernels_in_the_emulator(single):
    code, report = run_json("verify")
    assert code == 0 and report["backend"] == "emulated" and "There is no GPU" in report["statement"]
    passed = [cell for cell in report["cells"] if cell["verdict"] == "passed"]
    assert {cell["feature"] for cell in passed} == {"plain", "causal"}
    assert all(cell["launches"] and cell["digests"] and cell["error"] <= cell["bound"] for cell in passed)
    (case,) = report["cases"]
    assert {check["tensor"] for check in case["checks"]} == {"out", "logsumexp", "dq", "dk", "dv"}
    assert set(case["launches"]) == {"forward_sm80", "backward_delta", "backward_sm80", "backward_dq"}


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dtype", "fp8"), "no float8_e4m3fn kernel for Ampere, but for Hopper. Type: flashpatch verify --gpu hopper --dtype float8_e4m3fn"),
        (("--dtype", "fp64"), "no float64 kernel for Ampere, nor for any other GPU"),
        (("--gpu", "v100"), "no kernel for Volta and older, but for Turing, Ampere, "),
    ],
)  # fmt: skip
def test_why_nothing_was_verified(arguments, words):
    result = run("verify", "--emulate", *arguments)
    assert result.exit_code == 3 and words in result.stdout and "emulator, at small sizes" not in result.stdout
    assert "Nothing was verified" in result.stdout


@needs_compiler
def test_verify_in_words(single):
    result = run("verify")
    assert result.exit_code == 0
    assert "4 of " in result.stdout and "claimed cells passed, 0 failed" in result.stdout
    assert run("verify", "--require-gpu").exit_code == 3
    assert run("verify", "--strict").exit_code == 3  # most cells were left out


@needs_compiler
def test_a_wrong_kernel_is_named(single, monkeypatch):
    exact = launcher.forward

    def wrong(plan, q, k, v, call):
        out, logsumexp, copies = exact(plan, q, k, v, call)
        return out.index_fill(1, torch.tensor([3]), 9.0), logsumexp, copies

    monkeypatch.setattr(launcher, "forward", wrong)
    result = run("verify", "--seed", 11)
    assert result.exit_code == 1
    assert "FAILED bf16-d64-causal" in result.stdout and "seed 11" in result.stdout and "[0, 3, " in result.stdout


def test_nothing_launched_is_nothing_verified(single, monkeypatch):
    monkeypatch.setattr(emulator, "available", lambda: None)
    monkeypatch.setattr(verification, "_build", lambda *_: None)
    monkeypatch.setattr(launcher, "forward", lambda plan, q, k, v, call: (*fallback.forward(q, k, v, call), 0))
    monkeypatch.setattr(launcher, "backward", lambda plan, *arguments: (*fallback.backward(*arguments), 0))
    result = run("verify")
    assert result.exit_code == 3 and "Nothing was verified" in result.stdout


def test_without_a_cpp_compiler_kernels_are_compiled_and_the_report_says_so(single, monkeypatch):
    monkeypatch.setattr(emulator, "available", lambda: Reason("no_compiler", "none; type: apt install g++"))
    monkeypatch.setattr(compiler, "available", lambda: None)
    monkeypatch.setattr(compiler, "compile_cubin", lambda config, arch: (b"", ""))
    code, report = run_json("verify")
    assert code == 3 and report["backend"] == "compiled" and "not run" in report["statement"]


def test_a_machine_that_can_do_nothing_says_what_to_type(monkeypatch):
    monkeypatch.setattr(emulator, "available", lambda: Reason("no_compiler", "none; type: apt install g++"))
    monkeypatch.setattr(compiler, "available", lambda: Reason("no_cupy", "none; type: pip install it"))
    result = run("verify")
    assert result.exit_code == 4 and "apt install g++" in result.stderr and "pip install it" in result.stderr


def test_demote_edits_the_matrix_by_its_evidence(monkeypatch, tmp_path):
    data = yaml.safe_load(support_matrix.find("compat_matrix.yaml").read_text(encoding="utf-8"))
    for row in data["rows"]:
        if "hopper" in row.get("status", {}):
            row["status"] = {**row["status"], "hopper": "verified"}
            row["evidence"] = "h200.json"
    path = tmp_path / "compat_matrix.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    monkeypatch.setattr(support_matrix, "find", lambda name: path)
    monkeypatch.setattr(planning, "support", lambda: support_matrix.load_matrix(yaml.safe_load(path.read_text())))
    monkeypatch.setattr(evidence, "folder", lambda: tmp_path)
    result = run("verify", "--demote")
    assert result.exit_code == 0 and "on hopper: verified -> compiled" in result.stdout
    assert "h200.json is missing" in result.stdout
    assert {cell.status for cell in planning.support().cells.values() if cell.generation == "hopper"} == {"compiled"}
    assert "nothing to demote" in run("verify", "--demote").stdout


# ---- verify: a model ----


def test_verify_model_holds_on_a_cpu(folders):
    code, report = run_json("verify", folders / "llama", *SHORT)
    assert code == 0
    assert {module["declines"][0].split(":")[0] for module in report["modules"]} == {"no_gpu"}
    kinds = {comparison["kind"] for comparison in report["comparisons"]}
    assert kinds == {"logits", "attention", "gradient"} and report["tokens"]["failing"] == 0
    assert all(comparison["error"] <= comparison["bound"] for comparison in report["comparisons"])
    assert report["yardstick"] == "eager attention, weights in float64"


def test_verify_model_in_words(folders):
    result = run("verify", folders / "llama", *SHORT, "--no-backward", "--dtype", "bf16")
    assert result.exit_code == 0
    assert "no kernel ran" in result.stdout and "Holds" in result.stdout and "gradients  " not in result.stdout


@pytest.mark.parametrize("option", ["--require-gpu", "--strict"])
def test_verify_model_can_insist(folders, option):
    result = run("verify", folders / "llama", *SHORT, "--no-backward", option)
    assert result.exit_code == 3 and option in result.stdout


def test_a_model_that_never_dispatches_is_not_verified(folders):
    code, report = run_json("verify", folders / "hard-coded", *SHORT, "--no-backward")
    assert code == 3 and not any(module["dispatched"] for module in report["modules"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, logsumexp: (out * 1.01, logsumexp),
        lambda out, logsumexp: (out.index_fill(1, torch.tensor([11]), math.nan), logsumexp),
    ],
    ids=["one percent off", "NaN"],
)
def test_a_wrong_model_is_a_mismatch(folders, monkeypatch, spoil):
    exact = fallback.forward
    monkeypatch.setattr(fallback, "forward", lambda q, k, v, call: spoil(*exact(q, k, v, call)))
    code, report = run_json("verify", folders / "llama", *SHORT, "--no-backward")
    assert code == 1
    failed = {comparison["name"] for comparison in report["comparisons"] if not comparison["passed"]}
    assert "model.layers.0.self_attn" in failed


def test_a_wrong_gradient_alone_is_a_mismatch(folders, monkeypatch):
    exact = fallback.backward

    def wrong(*arguments):
        dq, dk, *rest = exact(*arguments)
        return dq, dk * 1.05, *rest

    monkeypatch.setattr(fallback, "backward", wrong)
    code, report = run_json("verify", folders / "llama", *SHORT)
    failed = {comparison["kind"] for comparison in report["comparisons"] if not comparison["passed"]}
    assert code == 1 and failed == {"gradient"}


def test_nan_of_the_model_itself_is_said(folders):
    result = run("verify", folders / "broken", *SHORT, "--no-backward")
    assert result.exit_code == 1 and "The unpatched model itself is not finite" in result.stdout


def test_a_patched_model_that_fails_is_named(folders, monkeypatch):
    def fail(*_):
        raise RuntimeError("no luck today")

    monkeypatch.setattr(fallback, "forward", fail)
    code, report = run_json("verify", folders / "llama", *SHORT, "--no-backward")
    assert code == 1 and "no luck today" in report["error"]


def test_the_model_is_left_as_it_was():
    import transformers

    sizes = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=64)).bfloat16().train()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    model_verification.verify_model(model, {"input_ids": torch.arange(8)[None]}, backward=False)
    assert model.training and model.config._attn_implementation == implementation
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1])


# ---- apply ----


def test_apply_reports_each_module(folders):
    code, report = run_json("apply", folders / "llama", *SHORT, "--train")
    assert code == 0 and report["dispatched"] == len(report["modules"]) == 2 and report["on_kernels"] == 0
    assert report["directions"] == ["forward", "backward"]
    assert all(module["calls"] == 1 for module in report["modules"])


@needs_compiler
def test_apply_on_emulated_kernels(folders, monkeypatch):
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    code, report = run_json("apply", folders / "llama", *SHORT, "--train", "--dtype", "bf16", "--strict")
    assert code == 0 and report["on_kernels"] == 2
    assert report["modules"][0]["launches"] == {"forward_sm80": 1, "backward_sm80": 1}
    assert set(report["modules"][0]["backends"].values()) == {"emulated"}


def test_apply_exit_codes(folders):
    assert run("apply", folders / "llama", *SHORT, "--strict").exit_code == 3
    result = run("apply", folders / "hard-coded", *SHORT)
    assert result.exit_code == 3 and "0 of 2 attention modules called flashpatch" in result.stdout
    result = run("apply", folders / "broken", *SHORT)
    assert result.exit_code == 1 and "not finite" in result.stdout


def test_apply_save_never_overwrites_its_source(folders):
    weights = folders / "llama" / "model.safetensors"
    before = weights.read_bytes()
    result = run("apply", folders / "llama", *SHORT, "--random-weights", "--save", folders / "llama")
    assert result.exit_code == 2 and "that is MODEL itself" in result.output
    assert weights.read_bytes() == before


def test_apply_save_writes_a_copy_that_comes_up_patched(folders, tmp_path):
    import transformers

    import flashpatch

    target = tmp_path / "copy"
    assert run("apply", folders / "llama", *SHORT, "--save", target).exit_code == 0
    assert flashpatch.load(target).config._attn_implementation == "fpatch"
    assert transformers.AutoModelForCausalLM.from_pretrained(target).config._attn_implementation != "fpatch"
    assert transformers.AutoModelForCausalLM.from_pretrained(folders / "llama").config._attn_implementation != "fpatch"


def test_apply_leaves_nothing_patched(folders):
    from flashpatch import enabling

    run("apply", folders / "llama", *SHORT)
    assert enabling._enabled.original is None


@pytest.mark.parametrize("command", ["/nonexistent", "/bin/false"])
def test_a_compiler_that_was_named_and_is_none_is_missing(monkeypatch, command):
    """Not passed over for compiling only: whoever named it wanted the kernels to run."""
    monkeypatch.setenv("FLASHPATCH_CXX", command)
    result = run("verify", "--quick")
    assert result.exit_code == 4 and f"FLASHPATCH_CXX={command}" in result.stderr


@pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
@pytest.mark.parametrize(
    "name, value",
    [("FLASHPATCH_EMULATION_SEED", "x"), ("FLASHPATCH_EMULATION_SECONDS", "0"), ("FLASHPATCH_GENERATION", "tring")],
)
def test_a_variable_that_means_nothing_is_wrong_usage(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    result = run("verify", "--quick")
    assert result.exit_code == 2 and f"{name}={value}: " in result.stderr


# ---- audit ----


def test_audit_without_a_gpu():
    code, report = run_json("audit")
    assert code == 0 and report["gpu"] is None and "--gpu" in report["statement"]
    assert report["environment"]["torch"] == torch.__version__ and report["support"] == []


@pytest.mark.parametrize("gpu", ["h200", "RTX 4090", "sm_80", "turing"])
def test_audit_for_another_gpu_is_what_planning_decides(gpu):
    _, report = run_json("audit", "--gpu", gpu)
    device = planning.gpu(gpu)
    assert report["generation"] == device.generation
    for row in report["support"]:
        for head_dim in row["head_dims"]:
            features = frozenset() if row["feature"] == "plain" else frozenset([row["feature"]])
            head_dim_v = min(head_dim, planning.support().head_dims_v[-1])
            decision = planning.resolve(Problem(row["direction"], row["dtype"], head_dim, head_dim_v, features), device)
            assert isinstance(decision, Plan) == (row["status"] != "unsupported")


def test_audit_of_a_model(folders):
    code, report = run_json("audit", folders / "llama", "--gpu", "h200", "--dtype", "bf16")
    assert code == 0
    assert [module["forward"].split()[0] for module in report["modules"]] == ["forward_sm80"] * 2
    assert report["modules"][0]["features"] == ["causal", "gqa"] and report["modules"][0]["head_dim"] == 16
    choices = report["modules"][0]["choices"]
    assert [choice["direction"] for choice in choices] == ["forward", "backward"]
    for choice in choices:
        features = frozenset(report["modules"][0]["features"])
        plan = planning.resolve(Problem(choice["direction"], "bfloat16", 16, 16, features), planning.gpu("h200"))
        assert choice["kernel"] == plan.config.kernel and choice["status"] == plan.status
        assert choice["shared_memory"] == planning.shared_memory(plan.config)
        assert choice["tile"].startswith(f"{plan.config.block_m}x{plan.config.block_n}, {plan.config.num_warps} warps")
    code, report = run_json("audit", folders / "llama", "--gpu", "t4", "--dtype", "bf16", "--strict")
    assert code == 3 and report["modules"][0]["reasons"][0].startswith("dtype: Turing")
    code, report = run_json("audit", folders / "llama", "--gpu", "t4", "--dtype", "fp16", "--strict")
    assert code == 0 and report["modules"][0]["forward"] == "forward_sm75 (compiled)"
    code, report = run_json("audit", folders / "llama", "--gpu", "v100", "--strict")
    assert code == 3 and report["modules"][0]["reasons"][0].startswith("generation")
    code, report = run_json("audit", folders / "hard-coded", "--gpu", "h200")
    assert code == 3 and not report["modules"][0]["dispatched"]


def test_audit_says_what_runs_in_the_forward_alone(tmp_path):
    import transformers

    sizes = {"vocab_size": 60, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlamaConfig(**sizes, intermediate_size=64).save_pretrained(tmp_path)
    found = run("audit", tmp_path, "--gpu", "rtx3090", "--dtype", "float32").stdout
    assert "0 of 2 run on a kernel (2 of 2 in the forward)." in found  # head dim 256: the backward does not fit 99 KB


def test_audit_prints_a_line_for_each_direction(folders):
    lines = run("audit", folders / "llama", "--gpu", "t4", "--dtype", "fp16").stdout.splitlines()
    shown = [line.split() for line in lines if line.startswith("model.layers.0")]
    assert [line[3:5] for line in shown] == [["forward", "forward_sm75"], ["backward", "backward_sm75"]]
    assert all({"KB", "compiled", "warps,"} <= set(line) for line in shown)


def test_audit_under_the_switch(folders, monkeypatch):
    monkeypatch.setenv("FLASHPATCH_GENERATION", "tring")
    result = run("audit")
    assert result.exit_code == 0 and "PROBLEM variable: FLASHPATCH_GENERATION=tring" in result.stdout
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    result = run("audit", folders / "llama")
    assert result.exit_code == 2 and "there is no such generation" in result.stderr
    monkeypatch.setenv("FLASHPATCH_GENERATION", "turing")
    _, report = run_json("audit", folders / "llama", "--dtype", "fp16")
    assert report["generation"] == "turing" and report["modules"][0]["forward"] == "forward_sm75 (compiled)"


# ---- audit --all ----


def test_audit_of_every_generation(folders):
    """Each square is what planning decides for each capability it names; none is left out."""
    code, report = run_json("audit", folders / "llama", "--all")
    assert code == 0 and (report["modules"], report["dispatched"]) == (2, 2)
    covered = set()
    for square in report["squares"]:
        for number in square["capabilities"]:
            covered.add((number, square["dtype"], square["direction"]))
            problem = Problem(square["direction"], square["dtype"], 16, 16, frozenset(report["features"]))
            device = planning.gpu(number)
            answer = planning.resolve(problem, device)
            (tally,) = square["tallies"]
            assert tally["modules"] == 2 and square["generation"] == device.generation
            if isinstance(answer, Plan):
                size = planning.shared_memory(answer.config)
                found = (tally["choice"]["kernel"], tally["choice"]["shared_memory"], square["status"])
                assert found == (answer.config.kernel, size, answer.status)
            else:
                reasons = [f"{reason.code}: {reason.text}" for reason in answer.reasons]
                assert square["status"] == "fallback" and tally["choice"]["reasons"] == reasons
    numbers = [".".join(map(str, number)) for number in planning.support().capabilities]
    assert covered == set(itertools.product(numbers, set(DTYPES) - SCALED, DIRECTIONS))


def test_a_model_that_is_not_dispatched_has_no_squares_to_show(folders):
    code, report = run_json("audit", folders / "hard-coded", "--all", "--dtype", "bf16")
    assert code == 3 and report["dispatched"] == 0 and report["reasons"]
    assert {square["status"] for square in report["squares"]} == {"fallback"}
    assert "not dispatched" in run("audit", folders / "hard-coded", "--all", "--svg", "-").stdout


def test_pictures_are_complete_and_need_nothing_from_outside(folders, tmp_path):
    svg, html = tmp_path / "grid.svg", tmp_path / "grid.html"
    table = run("audit", folders / "llama", "--all", "--svg", svg, "--html", html).stdout
    drawing = ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    texts = ["".join(element.itertext()) for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    width, height = (float(drawing.get(size)) for size in ("width", "height"))
    for element in drawing.iter():
        place = [float(element.get(name, 0)) for name in ("x", "y")]
        assert 0 <= place[0] < width and 0 <= place[1] < height
    page = html.read_text(encoding="utf-8")
    for title in planning.support().generations.values():
        assert title in texts and f">{title} (" in page and title in table
    for kernel in ("forward_sm75", "backward_sm75", "forward_sm80", "backward_sm80"):
        assert kernel in texts and f">{kernel}</td>" in page and kernel in table
    said = "2 of 2 attention modules would call flashpatch"
    assert any(text.startswith(said) for text in texts) and f'<p class="phone">{said}' in page and said in table
    for text in (svg.read_text(encoding="utf-8"), page):
        links = re.findall(r"(?:href|src)=\"(?!data:)|url\(|https?://[^\"]*", text)
        assert set(links) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize(
    "arguments",
    [("--all",), ("MODEL", "--all", "--gpu", "h200"), ("MODEL", "--svg", "x.svg"), ("MODEL", "--html", "x")],
)
def test_pictures_ask_for_what_they_need(folders, arguments):
    result = run("audit", *(folders / "llama" if word == "MODEL" else word for word in arguments))
    assert result.exit_code == 2 and "--all" in result.stderr


def test_audit_reads_no_weights(folders, tmp_path):
    (tmp_path / "config.json").write_text((folders / "llama" / "config.json").read_text())
    assert run("audit", tmp_path, "--gpu", "h200").exit_code == 0


def test_audit_of_an_instance_leaves_it_as_it_was():
    import transformers

    sizes = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=64))
    weight = model.lm_head.weight.clone()
    (module,) = auditing.plan(model, gpu="h200")
    assert module.dispatched and module.dtype == "float32" and module.forward.startswith("forward_sm80")
    assert model.config._attn_implementation == "sdpa" and torch.equal(model.lm_head.weight, weight)
    assert model(torch.arange(4)[None]).logits.isfinite().all()


def test_a_missing_nvrtc_and_an_unwritable_cache_are_problems(monkeypatch):
    monkeypatch.setattr(compiler, "available", lambda: Reason("no_nvrtc", "NVRTC was not found; type: pip install x"))
    monkeypatch.setenv("FLASHPATCH_CACHE_DIR", os.devnull)
    found = {fault.code: fault for fault in auditing.environment().problems}
    assert "no_nvrtc" in found and os.devnull in found["no_cache"].text


# ---- rendering ----


def test_numbers_json_has_no_word_for_are_null():
    from flashpatch.cli import rendering

    check = case_runs.Check("out", math.nan, math.inf, 1.0, False, "")
    assert rendering.document(check)["error"] is None and rendering.document(check)["eager_error"] is None


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys, monkeypatch):
    from flashpatch.cli import rendering

    with rendering.progress("work") as advance:
        advance(1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(rendering, "SECONDS_BETWEEN_LINES", 0)
    with rendering.progress("verify") as advance:
        advance(40, 98, "running")
    assert capsys.readouterr() == ("", "verify running: 40 of 98\n")


def test_a_terminal_gets_a_drawn_table(monkeypatch, capsys):
    from flashpatch.cli import rendering

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    rendering.table(["a", "b"], [["[1]", 2]])
    drawn = capsys.readouterr().out
    assert "[1]" in drawn and drawn != "a    b\n[1]  2\n"


def test_a_hub_that_cannot_be_reached_is_one_line():
    """huggingface_hub sets its own log level when it is imported: it must find ours before.."""
    program = (
        "import os, sys; sys.argv = ['flashpatch', 'cost', 'nobody/nothing']\n"
        "os.environ['HF_ENDPOINT'] = 'http://127.0.0.1:9'\n"
        "import time; time.sleep = lambda seconds: None\n"
        "from flashpatch.cli import main; main()"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(
        r"flashpatch: nobody/nothing is not in the local cache and the hub cannot be reached; .*\n", done.stderr
    )
