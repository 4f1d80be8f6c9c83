"""Whole models on the kernels, strict: a decline anywhere is an error. In the CPU emulator, and with `-m gpu` on a GPU.

Compared as `flashpatch verify MODEL` compares: logits, every attention output and every gradient, patched and eager
in bf16, against eager attention in fp32.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import BY_NAME, MODELS

import flashpatch
from flashpatch import model_verification, patcher

DEVICES = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def strict_device(request, monkeypatch):
    """Where the kernels run: "cpu" through the emulator, or "cuda"."""
    monkeypatch.setenv("FLASHPATCH_STRICT", "1")
    if request.param == "emulated":
        monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


def on(device: str, tiny) -> tuple[torch.nn.Module, dict]:
    model = tiny.model().to(device, torch.bfloat16)
    inputs = {name: value.to(device) for name, value in tiny.inputs().items()}
    return model, {n: v.bfloat16() if v.is_floating_point() else v for n, v in inputs.items()}


def check(model, inputs, layers: int) -> model_verification.ModelReport:
    report = model_verification.verify_model(model, inputs)
    faults = [comparison.message for comparison in report.comparisons if not comparison.passed]
    assert report.holds, report.error or faults[:3]
    assert sum(bool(module.kernels) for module in report.modules) == layers
    assert not report.declines - {"not_dispatched"}
    return report


@pytest.mark.parametrize("strict_device", DEVICES, indirect=True)
@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_every_layer_runs_on_a_kernel_and_is_right(tiny, strict_device):
    model, inputs = on(strict_device, tiny)
    check(model, inputs, tiny.layers)


@pytest.mark.parametrize("strict_device", DEVICES, indirect=True)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_padded_batches_run_on_kernels(name, side, strict_device):
    tiny = BY_NAME[name]
    model, inputs = on(strict_device, tiny)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, slice(0, 5) if side == "left" else slice(-5, None)] = 0
    check(model, {**inputs, "attention_mask": mask}, tiny.layers)


@pytest.mark.parametrize("strict_device", DEVICES, indirect=True)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_packed_documents_run_on_kernels(name, strict_device):
    """Two documents in one row equal the two on their own."""
    tiny = BY_NAME[name]
    model, inputs = on(strict_device, tiny)
    row = inputs["input_ids"][:1]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(strict_device)
    with flashpatch.apply(model) as patch, torch.no_grad():
        packed = model(input_ids=row, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(input_ids=part).logits for part in (row[:, :5], row[:, 5:])], dim=1)
        assert patch.report.dispatched == tiny.layers
    scale = alone.float().abs().max()
    assert (packed.float() - alone.float()).abs().max() <= 0.03 * scale


@pytest.mark.parametrize("strict_device", DEVICES, indirect=True)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_packed_documents_train_as_apart_with_eager(name, strict_device):
    """Every parameter's gradient from two documents in one row, against the two on their own with eager attention: some
    models mix packed documents there."""
    gradients = {}
    for run, dtype in (("fp32", torch.float32), ("eager", torch.bfloat16), ("patched", torch.bfloat16)):
        model = BY_NAME[name].model().to(strict_device, dtype).train()
        row = BY_NAME[name].inputs()["input_ids"][:1].to(strict_device)
        direction = torch.randn(12, model.config.vocab_size, generator=torch.Generator().manual_seed(3)).to(
            strict_device
        )
        if run == "patched":
            flashpatch.apply(model)
            positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(strict_device)
            logits = model(input_ids=row, position_ids=positions, use_cache=False).logits
        else:
            logits = torch.cat([model(input_ids=part, use_cache=False).logits for part in (row[:, :5], row[:, 5:])], 1)
        (logits[0].float() * direction).sum().backward()
        gradients[run] = {key: parameter.grad.float() for key, parameter in model.named_parameters()}
    for key, exact in gradients["fp32"].items():
        own, ours = ((gradients[run][key] - exact).norm() for run in ("eager", "patched"))
        assert ours <= 2 * own + 0.01 * exact.norm(), key


@pytest.mark.parametrize("strict_device", DEVICES, indirect=True)
@pytest.mark.parametrize("name", ["t5", "gemma2", "gpt_oss"])
def test_training_steps_follow_eagers(name, strict_device):
    """Two steps from labels in training mode: the loss falls as with eager attention in fp32, and as near to it as with
    eager attention in bf16."""
    tiny = BY_NAME[name]
    changes = {"dropout_rate": 0.0} if name == "t5" else {}
    losses = {}
    for run, dtype in (("fp32", torch.float32), ("eager", torch.bfloat16), ("patched", torch.bfloat16)):
        model = tiny.model(**changes).to(strict_device, dtype).train()
        inputs = {key: value.to(strict_device) for key, value in tiny.inputs().items()}
        labels = inputs.get("decoder_input_ids", inputs["input_ids"])
        if run == "patched":
            patcher.apply(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        losses[run] = []
        for _ in range(2):
            loss = model(**inputs, labels=labels, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses[run].append(loss.item())
        if run == "patched":
            assert all(row.launches for row in patcher.report(model).rows)
    fp32, eager, patched = (torch.tensor(losses[run]) for run in ("fp32", "eager", "patched"))
    assert fp32[-1] < fp32[0] - 0.01
    assert (patched - fp32).abs().max() <= 2 * (eager - fp32).abs().max() + 0.004 * fp32.max(), losses


@pytest.mark.parametrize("strict_device", DEVICES, indirect=True)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_runs_on_kernels(cache, strict_device):
    """Greedy tokens under a cache are those of one forward over the whole text, except where bf16 cannot tell."""
    model, inputs = on(strict_device, BY_NAME["llama"])
    options = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    with flashpatch.apply(model) as patch, torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False, **options)
        logits = model(tokens[:, :-1]).logits.float()
        assert all("forward" in kernel for row in patch.report.rows for kernel in row.launches)
    start = inputs["input_ids"].shape[1]
    chosen = logits.gather(-1, tokens[:, 1:, None])[..., 0][:, start - 1 :]
    best = logits.amax(-1)[:, start - 1 :]
    assert (best - chosen).max() <= 0.02 * logits.abs().max()


@pytest.mark.parametrize("strict_device", DEVICES, indirect=True)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_gradient(reentrant, strict_device):
    gradients = []
    for checkpointed in (False, True):
        model, inputs = on(strict_device, BY_NAME["llama"])
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with flashpatch.apply(model) as patch:
            model(**inputs, use_cache=False).logits.float().square().mean().backward()
            rows = patch.report.rows
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        assert all(row.calls == 1 and row.recomputes == int(checkpointed) for row in rows)
    exact = strict_device == "cpu"  # on a GPU dq is summed in no fixed order
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain, **({"rtol": 0, "atol": 0} if exact else {}), msg=name)


def test_strict_refuses_what_no_kernel_takes(monkeypatch):
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    model, inputs = BY_NAME["llama"].model().double(), BY_NAME["llama"].inputs()
    with patcher.apply(model, strict=True), pytest.raises(flashpatch.DeclinedError, match="dtype"):
        model(**inputs)
