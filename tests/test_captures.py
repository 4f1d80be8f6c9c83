"""`verify MODEL` explains what it finds, and one attention call becomes a file that says the same elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math

import jsonschema
import pytest
import torch
import transformers

from flashpatch import (
    captures,
    cases,
    emulator,
    execution,
    fallback,
    model_comparisons,
    model_runs,
    model_verification,
    planning,
)
from flashpatch.captures import CaptureError
from flashpatch.problem import Plan, Problem

IDS = {"input_ids": torch.arange(24).view(2, 12)}
SIZES = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
EMULATED = planning.device_for((8, 0), "CPU emulator (Ampere)", backend="emulated")
needs_emulator = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2, initializer_range=0.2)
    )


def plant(monkeypatch, name, change, layer):
    """Make the results of one attention layer's call wrong, as a wrong kernel would be; counted from 0 in call order."""
    exact, number = getattr(fallback, name), [-1]

    def wrong(*arguments):
        number[0] += 1
        results = exact(*arguments)
        position = number[0] % SIZES["num_hidden_layers"]
        if name == "backward":
            position = SIZES["num_hidden_layers"] - 1 - position
        return change(*results) if position == layer else results

    monkeypatch.setattr(fallback, name, wrong)


def off_by_a_tenth(out, logsumexp):
    out = out.clone()
    out[:, :, [1, 3]] *= 1.1
    return out, logsumexp


# ---- what is explained ----


def test_the_first_layer_and_its_heads_are_named(model, monkeypatch):
    plant(monkeypatch, "forward", off_by_a_tenth, layer=1)
    found = model_verification.verify_model(model, IDS, backward=False).explanation
    assert (found.module, found.layer, found.kind) == ("model.layers.1.self_attn", 1, "attention")
    assert found.heads == [1, 3] and found.error > found.bound > found.eager_error
    assert [check.tensor for check in found.call if not check.passed] == ["out"]
    assert not found.unpatched_nan and not found.input_out_of_range
    assert "attention call alone is wrong: out of the fallback" in found.text and "heads 1, 3" in found.text


def test_a_wrong_gradient_is_traced_to_the_first_in_the_backward(model, monkeypatch):
    def wrong(dq, dk, dv, *rest):
        dk = dk.clone()
        dk[:, :, 1] *= 1.5
        return dq, dk, dv, *rest

    plant(monkeypatch, "backward", wrong, layer=1)
    found = model_verification.verify_model(model, IDS).explanation
    assert (found.module, found.kind, found.heads) == ("model.layers.1.self_attn", "gradient", [1])
    assert [check.tensor for check in found.call if not check.passed] == ["dk"]


def test_a_right_call_with_wrong_arguments_is_told_apart(model, monkeypatch):
    """Here the scale is wrong: the call is right for what it was given, and the text says so."""
    exact = execution.forward

    def rescaled(q, k, v, call, *rest):
        return exact(q, k, v, dataclasses.replace(call, softmax_scale=2 * call.softmax_scale, ready=None), *rest)

    monkeypatch.setattr(execution, "forward", rescaled)
    real = captures.listening

    def below(path, number=1):  # hears what the kernel is given
        monkeypatch.setattr(execution, "forward", exact)
        listener = real(path, number)
        heard = listener.__enter__()
        inner = execution.forward
        execution.forward = lambda q, k, v, call, *rest: inner(
            q, k, v, dataclasses.replace(call, softmax_scale=2 * call.softmax_scale, ready=None), *rest
        )

        class Leave:
            def __enter__(self):
                return heard

            def __exit__(self, *error):
                listener.__exit__(*error)

        return Leave()

    monkeypatch.setattr(captures, "listening", below)
    found = model_verification.verify_model(model, IDS, backward=False).explanation
    assert found.module == "model.layers.0.self_attn" and found.call and all(check.passed for check in found.call)
    assert "alone is right" in found.text and "a mask, a scale" in found.text


def test_nan_of_the_unpatched_model_and_inputs_out_of_range_are_said(model):
    """fp16 that overflows in the stream: not a kernel's fault, and the explanation has both facts."""
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2e5)
        for layer in model.model.layers:
            layer.input_layernorm.weight.mul_(3e4)
    report = model_verification.verify_model(model.half(), IDS, backward=False)
    found = report.explanation
    assert not report.holds and found.unpatched_nan and found.input_out_of_range
    assert found.dtype_largest == 65504.0 and (found.input_largest is None or found.input_largest > 65504.0)
    assert "outside float16" in found.text and "not finite either" in found.text


def test_nothing_is_explained_where_nothing_differs(model):
    report = model_verification.verify_model(model, IDS, backward=False)
    assert report.holds and report.explanation is None and report.capture == "" and report.eager_runs == 1


def test_a_model_in_which_a_last_bit_decides_is_held_to_what_eager_itself_does(model, monkeypatch):
    """Further runs of eager widen a bound only as far as eager itself goes; a wrong call stays wrong."""
    exact = torch.zeros(8)
    eagers = [{("gradient", "w"): exact + error} for error in (0.01, 0.1, 0.05)]

    def holds(error, eagers):
        return model_comparisons.comparisons_of(
            {("gradient", "w"): exact + error}, eagers, eagers[0], {("gradient", "w"): exact}
        )[0].passed

    assert [holds(0.3, eagers[:1]), holds(0.3, eagers), holds(0.7, eagers)] == [False, True, False]

    plant(monkeypatch, "forward", off_by_a_tenth, layer=1)
    report = model_verification.verify_model(model.bfloat16(), IDS, backward=False)
    assert not report.holds and report.eager_runs == 4
    seen = []
    modules = [("model.layers.1.self_attn", model.model.layers[1].self_attn)]
    for seed in (None, 0, 1):
        with model_runs.rounded_anew(modules, seed) if seed is not None else contextlib.nullcontext():
            seen.append(model_runs.observe(model, IDS, modules, False, 0, {})["attention", modules[0][0]])
    apart = [((one - seen[0]) / seen[0]).abs().max() for one in seen[1:]]
    assert not torch.equal(seen[1], seen[2]) and all(0 < float(a) <= 2 * torch.finfo(torch.bfloat16).eps for a in apart)


# ---- the file ----


def captured(case, path, spoil=None):
    """The file of a case's call, its results by the fallback."""
    inputs = cases.make_inputs(case, "cpu", 5)
    out, logsumexp = fallback.forward(inputs.q, inputs.k, inputs.v, inputs.call)
    gradients = fallback.backward(inputs.dout, None, inputs.q, inputs.k, inputs.v, out, logsumexp, inputs.call)
    results = {"out": out, "logsumexp": logsumexp, "dout": inputs.dout}
    results |= {name: g for name, g in zip(captures.GRADIENTS, gradients, strict=True) if g is not None}
    if spoil:
        spoil(results)
    capture = captures.Capture(inputs.q, inputs.k, inputs.v, inputs.call, results, "layer", "model", "fallback", {})
    return inputs, captures.save(capture, path)


FEATURES = (
    ("causal", "gqa"), ("mask", "gqa", "sinks"), ("bias", "softcap", "alibi"), ("key_ranges", "window"), ("dropout",),
    ("varlen", "causal"), ("seqused_k", "unequal_head_dims"),
)  # fmt: skip


@pytest.mark.parametrize("features", FEATURES, ids="+".join)
def test_a_file_keeps_a_call_whole(features, tmp_path):
    """Every feature there and back: equal tensors, repeated dimensions stored once, results that check."""
    head_dim_v = 24 if "unequal_head_dims" in features else 32
    problem = Problem("forward", "bfloat16", 32, head_dim_v, frozenset(features))
    case = cases.Case(problem, 2, 33, 50, 4, 2 if "gqa" in features else 4)
    inputs, path = captured(case, tmp_path / "call.safetensors")
    loaded = captures.load(path)
    for name in captures.INPUTS:
        assert torch.equal(getattr(loaded, name).nan_to_num(), getattr(inputs, name).nan_to_num())
    for field in dataclasses.fields(loaded.call):
        kept, given = getattr(loaded.call, field.name), getattr(inputs.call, field.name)
        if isinstance(given, torch.Tensor):
            assert torch.equal(kept, given) and kept.dtype == given.dtype, field.name
        elif field.name not in ("ready", "expanded"):
            assert kept == given, field.name
    checks = captures.check(loaded, loaded.results)
    assert {"out", "dq", "dk", "dv"} <= {check.tensor for check in checks} and all(check.passed for check in checks)
    if "mask" in features:  # one mask for all heads
        assert path.stat().st_size < 4 * 2 * 33 * 50 + sum(t.numel() for t in loaded.results.values()) * 4 + 60_000


@needs_emulator
def test_a_call_is_replayed_by_the_emulated_kernels(tmp_path):
    def spoil(results):
        results["out"][0, 7, 2] += 0.5

    case = cases.Case(Problem("forward", "bfloat16", 32, 32, frozenset({"causal", "gqa"})), 2, 33, 50, 4, 2)
    _, path = captured(case, tmp_path / "call.safetensors", spoil)
    report = captures.replay(path, EMULATED)
    assert isinstance(planning.resolve(case.problem, EMULATED), Plan)
    assert report.backend == "emulated" and report.holds and len(report.replayed) == 5
    assert [(check.tensor, check.heads) for check in report.captured if not check.passed] == [("out", [2])]


@needs_emulator
def test_a_wrong_kernel_shows_in_the_replay(tmp_path, monkeypatch):
    case = cases.Case(Problem("forward", "bfloat16", 32, 32, frozenset({"causal"})), 1, 33, 33, 2, 2)
    _, path = captured(case, tmp_path / "call.safetensors")
    real = emulator.load

    places = []

    def scaled(name, text):
        places.append(text.count("return p.softmax_scale;"))
        return text.replace("return p.softmax_scale;", "return 1.1f * p.softmax_scale;")

    monkeypatch.setattr(emulator, "load", lambda config: real(config, patch=scaled))
    report = captures.replay(path, EMULATED)
    assert sum(places) and not report.holds and any(check.heads for check in report.replayed)


def test_what_is_no_capture_is_refused(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "text").write_text("no tensors")
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    for name, message in (("text", "cannot be read"), ("weights.safetensors", "is no captured call"), ("no", "cannot")):
        with pytest.raises(CaptureError, match=message):
            captures.load(tmp_path / name)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scalars": '{"a": ['}, "damaged capture .*JSONDecodeError"),
        ({"scalars": "[1, 2]"}, "scalars must be numbers"),
        ({"scalars": "{}"}, "scalars must be numbers: softmax_scale"),
        ({"shapes": '{"q": [3]}'}, "damaged capture"),
        ({"origin": "7"}, "damaged capture"),
        ({"integers": ""}, "must be floating-point"),
    ],
    ids=["json", "list", "missing", "shapes", "origin", "integers"],
)
def test_a_damaged_capture_is_a_sentence(tmp_path, change, message):
    from safetensors.torch import save_file

    q = torch.ones(1, 2, 1, 8, dtype=torch.int64 if "integers" in change else torch.float32)
    scalars = dict.fromkeys(captures._SCALARS, 1)
    metadata = {"format": captures._FORMAT, "scalars": json.dumps(scalars), "origin": "{}"}
    metadata["shapes"] = json.dumps({name: list(q.shape) for name in "qkv"})
    save_file({name: q.clone() for name in "qkv"}, tmp_path / "call", {**metadata, **change})
    with pytest.raises(CaptureError, match=message):
        captures.load(tmp_path / "call")


# ---- the commands ----


def run(*arguments):
    pytest.importorskip("flashpatch.cli", reason="needs the editable install: pip install -e .")
    from click.testing import CliRunner

    from flashpatch import cli

    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, initializer_range=0.2)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@needs_emulator
def test_capture_and_replay_from_the_command_line(folder, tmp_path, monkeypatch):
    file = tmp_path / "call.safetensors"
    with monkeypatch.context() as planted:
        plant(planted, "forward", off_by_a_tenth, layer=1)
        result = run("verify", folder, "--seqlen", 12, "--no-backward", "--capture", file)
    assert result.exit_code == 1
    assert "First to differ: model.layers.1.self_attn" in result.stdout
    assert f"flashpatch verify --replay {file}" in result.stdout
    result = run("verify", "--replay", file, "--emulate", "--json")
    document = json.loads(result.stdout)
    jsonschema.validate(document, json.loads(run("verify", "--json-schema").stdout))
    assert result.exit_code == 0 and document["module"] == "model.layers.1.self_attn"
    assert document["captured"][0]["heads"] == [1, 3] and document["replayed"][0]["passed"]
    words = run("verify", "--replay", file, "--emulate").stdout
    assert "NO     1, 3" in words and "Holds" in words


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_a_chosen_call_of_a_healthy_model(folder, tmp_path):
    file = tmp_path / "call.safetensors"
    result = run("verify", folder, "--seqlen", 12, "--no-backward", "--capture", file, "--layer", 2)
    assert result.exit_code == 0 and captures.load(file).module == "model.layers.2.self_attn"
    assert math.prod(captures.load(file).q.shape) == 2 * 12 * 64
    result = run("verify", folder, "--seqlen", 12, "--no-backward", "--capture", file, "--layer", "lm_head")
    assert result.exit_code == 2 and "it has model.layers.0.self_attn" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replay", "{0}/none"), "cannot be read as a captured call"),
        (("--capture", "{0}/file"), "are about one call of a MODEL"),
        (("{0}", "--layer", "1"), "add --capture FILE"),
        (("{0}", "--replay", "{0}/none"), "leave out MODEL"),
    ],
)
def test_wrong_usage_says_what_to_type(arguments, message, tmp_path):
    result = run("verify", *(argument.format(tmp_path) for argument in arguments))
    assert result.exit_code == 2 and message in " ".join(result.output.split())
