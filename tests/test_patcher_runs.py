"""Patched models as they are really run: generation, packing, checkpointing, autocast, torch.compile."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from tiny_models import BY_NAME, MODELS, ids, output

from flashpatch import counting, ops, patcher

GENERATING = [tiny for tiny in MODELS if tiny.generates and tiny.name != "gemma3_vision"]
# not llama4: its chunks count from the start of the row, in eager too
PACKING = ["llama", "mistral", "gemma2", "gpt2", "gpt_oss"]
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flashpatch:")
        yield


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda model, backend: torch.compile(model, fullgraph=True, backend=backend)
    torch._dynamo.reset()


# ---- generation ----


def generated(model, inputs, **options):
    kept = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    return model.generate(**kept, max_new_tokens=6, do_sample=False, **options)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("tiny", GENERATING, ids=lambda tiny: tiny.name)
def test_generated_tokens_equal_eager(tiny, cache):
    if cache == "static" and tiny.name in ("t5", "doge", "llama4"):
        pytest.skip("transformers itself cannot give this model a static cache")
    model, inputs = tiny.model(), tiny.inputs()
    if tiny.decoder:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :4] = 0
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    expected = generated(model, inputs, **options)
    with patcher.apply(model) as patch:
        found = generated(model, inputs, **options)
        assert patch.report.dispatched == tiny.layers
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_generation_without_padding_equals_eager(name):
    """A static cache's prefill has more keys than it fills; a window's cache forgets its first ones."""
    model = BY_NAME[name].model()
    for cache in (None, "static"):
        expected = generated(model, {"input_ids": ids(1)}, cache_implementation=cache)
        with patcher.apply(model):
            assert torch.equal(generated(model, {"input_ids": ids(1)}, cache_implementation=cache), expected)


def test_prefill_in_chunks_equals_one_forward():
    model = BY_NAME["mistral"].model()
    tokens = ids()
    with patcher.apply(model):
        whole = output(model, {"input_ids": tokens})
        first = model(tokens[:, :5], use_cache=True)
        rest = model(tokens[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, **CLOSE)


# ---- packed sequences ----

LENGTHS = (5, 1, 6)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


def apart(model, tokens):
    return torch.cat([output(model, {"input_ids": part}) for part in tokens.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("use_cache", [False, True], ids=["no-cache", "with-cache"])
@pytest.mark.parametrize("name", PACKING)
def test_packed_documents_equal_separate_runs(name, use_cache):
    model, tokens = BY_NAME[name].model(), ids(1)
    expected = apart(model, tokens).detach()
    with patcher.apply(model):
        found = output(model, {"input_ids": tokens, "position_ids": POSITIONS, "use_cache": use_cache})
    torch.testing.assert_close(found.detach(), expected, **CLOSE)


@pytest.mark.parametrize("positions", [[0, 0, 0, 0, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 2, 2, 2, 4, 5, 6, 7, 8, 9]])
def test_image_positions_are_no_documents(positions):
    """The first axis of multimodal positions stands still in an image and jumps behind it; nothing starts anew there."""
    model, tokens = BY_NAME["llama"].model(), ids(1)
    inputs = {"input_ids": tokens, "position_ids": torch.tensor([positions]), "use_cache": True}
    expected = output(model, inputs).detach()
    with patcher.apply(model):
        torch.testing.assert_close(output(model, inputs).detach(), expected, **CLOSE)


def test_positions_without_restarts_add_nothing(monkeypatch):
    """Ordinary forwards, with or without a cache, stay on the plain causal path."""
    calls = spied(monkeypatch)
    model = BY_NAME["llama"].model()
    with patcher.apply(model):
        for use_cache in (False, True):
            output(model, {"input_ids": ids(), "use_cache": use_cache})
            output(model, {"input_ids": ids(), "use_cache": use_cache, "attention_mask": torch.ones(2, 12)})
    assert {(call.key_ranges is None, call.mask is None, call.window_right) for call in calls} == {(True, True, 0)}


def test_packed_documents_by_cu_seq_lens():
    """What DataCollatorWithFlattening(return_flash_attn_kwargs=True) passes."""
    model, tokens = BY_NAME["llama"].model(), ids(1)
    expected = apart(model, tokens).detach()
    offsets = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    with patcher.apply(model):
        found = output(
            model,
            {"input_ids": tokens, "position_ids": POSITIONS, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
             "max_length_q": 6, "max_length_k": 6},
        )  # fmt: skip
    torch.testing.assert_close(found.detach(), expected, **CLOSE)


# ---- training ----


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "gpt_oss"])
def test_gradient_checkpointing(name, reentrant):
    tiny = BY_NAME[name]
    model = tiny.model().train()
    inputs = {**tiny.inputs(), "attention_mask": torch.tensor([[1] * 9 + [0] * 3, [1] * 12])}

    def gradients():
        model.zero_grad()
        output(model, inputs)[1].square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    with patcher.apply(model) as patch:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = gradients()
        rows = patch.report.rows
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(found[parameter] / scale, gradient / scale, **CLOSE)
    assert {(row.calls, row.recomputes) for row in rows} == {(1, 1)}


def test_checkpointing_replays_dropout():
    model = BY_NAME["llama"].model(attention_dropout=0.5).train()

    def gradient():
        model.zero_grad()
        torch.manual_seed(3)
        output(model, {"input_ids": ids()}).square().sum().backward()
        return model.model.layers[0].self_attn.v_proj.weight.grad.clone()

    with patcher.apply(model):
        expected = gradient()
        for reentrant in (True, False):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            torch.testing.assert_close(gradient(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "whisper"])
def test_autocast(name):
    """Under bf16 autocast the patched model is as close to fp32 as eager is, in eager's dtype."""
    tiny = BY_NAME[name]
    model, inputs = tiny.model(), tiny.inputs()
    exact = output(model, inputs).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = output(model, inputs).detach()
        with patcher.apply(model):
            found = output(model, inputs)
    found.float().sum().backward()
    assert found.dtype == eager.dtype
    floor = 2 * ((exact.bfloat16() + 0.3) - 0.3 - exact.bfloat16()).abs().max()
    assert (found - exact).abs().max() <= 2 * (eager - exact).abs().max() + floor


def test_fp32_norms_under_bf16_weights():
    """q and k come in fp32 from their norms, v in bf16: unpatched that fails, or needs autocast; patched it runs either
    way, on one 16-bit dtype, as close to fp32 as eager is under autocast."""
    import transformers

    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).eval()
    inputs = {"input_ids": ids(), "use_cache": False}  # a cache makes v as wide as k
    exact = output(model, inputs).detach()
    model.bfloat16()
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            module.float()
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="same dtype"):
        output(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = output(model, inputs).detach().float()
        with patcher.apply(model):
            under_autocast = output(model, inputs)
    with patcher.apply(model) as patch:
        without = output(model, inputs)
        assert all(row.calls == 1 for row in patch.report.rows)
    floor = 2 * ((exact.bfloat16() + 0.3) - 0.3 - exact.bfloat16()).abs().max()
    for found in (under_autocast, without):
        assert found.dtype == torch.bfloat16
        assert (found.float() - exact).abs().max() <= 2 * (eager - exact).abs().max() + floor
    without.float().sum().backward()
    assert model.model.layers[0].self_attn.q_norm.weight.grad.dtype == torch.float32


def test_bf16_weights_with_padding():
    model = BY_NAME["llama"].model()
    inputs = {"input_ids": ids(), "attention_mask": torch.tensor([[0] * 4 + [1] * 8, [1] * 12])}
    exact = output(model, inputs).detach()
    model.bfloat16()
    eager = output(model, inputs).detach().float()
    with patcher.apply(model):
        found = output(model, inputs).detach().float()
    real = inputs["attention_mask"].bool()
    assert found.isfinite().all()
    assert (found - exact)[real].abs().max() <= 2 * (eager - exact)[real].abs().max() + 0.02


# ---- torch.compile ----


def spied(monkeypatch) -> list:
    """The Calls that reach the operator from now on."""
    calls = []
    original = ops.attend

    def attend(q, k, v, call, *args, **kwargs):
        calls.append(call)
        return original(q, k, v, call, *args, **kwargs)

    monkeypatch.setattr(ops, "attend", attend)
    return calls


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole_and_once(backend, compiled):
    model = BY_NAME["llama"].model()
    expected = output(model, {"input_ids": ids()}).detach()
    with patcher.apply(model) as patch:
        graph = compiled(model, backend)
        for _ in range(3):
            found = output(graph, {"input_ids": ids(), "use_cache": False})
        found.sum().backward()
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        assert [row.calls for row in patch.report.rows] == [3, 3]
    torch.testing.assert_close(found.detach(), expected, **CLOSE)


@pytest.mark.parametrize("name", ["gemma2", "llama4", "t5"])
def test_masks_keep_their_structure_in_a_compiled_graph(name, compiled, monkeypatch):
    """Windows, chunks and packed documents are recovered while tracing too; nothing becomes a dense mask."""
    tiny = BY_NAME[name]
    model, inputs = tiny.model(), tiny.inputs()
    expected = output(model, inputs).detach()
    calls = spied(monkeypatch)
    with patcher.apply(model), torch.no_grad():
        found = output(compiled(model, "eager"), {**inputs, "use_cache": False})
    torch.testing.assert_close(found, expected, **CLOSE)
    assert calls and all(call.mask is None for call in calls)


def test_layers_compiled_by_themselves_share_one_graph():
    torch._dynamo.reset()
    model = BY_NAME["llama"].model(num_hidden_layers=10)
    inputs = {"input_ids": ids(), "use_cache": False}
    expected = output(model, inputs).detach()
    with patcher.apply(model) as patch:
        torch._dynamo.utils.counters.clear()
        for layer in model.model.layers:
            layer.compile(backend="eager")
        torch.testing.assert_close(output(model, inputs).detach(), expected, **CLOSE)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert patch.report.dispatched == 10
        assert "shared_graph" in dict(patch.report.rows[0].reasons)
    torch._dynamo.reset()


# ---- processes ----


def test_the_name_is_known_after_importing_flashpatch_first():
    script = """
import flashpatch, sys
from flashpatch import registration
registration.install()
assert "torch" not in sys.modules and "transformers" not in sys.modules
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM._from_config(config, attn_implementation="fpatch")
assert model.config._attn_implementation == "fpatch"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_calls_are_counted_by_layer_not_by_model():
    model = BY_NAME["llama"].model()
    direct = counting.counts(counting.DIRECT).calls
    with patcher.apply(model):
        output(model, {"input_ids": ids()})
    assert counting.counts(counting.DIRECT).calls == direct
