"""The trace: every implementation is named, every silent loss planted in a tiny model is found with its reason, and
healthy models raise no alarm."""

import gzip
import json
import math
import threading

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import BY_NAME, MODELS, ids, noise
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

import flashpatch
from flashpatch import families, findings, mask_kinds, operator_reading, profiles
from flashpatch.findings import UNREADABLE


def qkv(heads=4, heads_kv=None, seqlen=64, dtype=torch.float32, head_dim=16):
    return noise(2, heads, seqlen, head_dim).to(dtype), *(
        noise(2, heads_kv or heads, seqlen, head_dim).to(dtype) for _ in "kv"
    )


def traced(function, *arguments, **keywords):
    with flashpatch.trace() as t:
        function(*arguments, **keywords)
    assert not [text for text in t.report.statements if UNREADABLE in text]
    return t.report


def sdpa(*arguments, **keywords):
    """Found by its name when it is called; functions imported before the trace are another test."""
    return F.scaled_dot_product_attention(*arguments, **keywords)


def codes(report, *levels):
    return {finding.code for finding in report.findings if finding.level in (levels or ("wrong", "slow"))}


def text_of(report, code):
    return next(finding.text for finding in report.findings if finding.code == code)


# ---- the tutorial's snippet ----


def test_the_tutorial_snippet_does_not_run_flash_attention():
    """`F.scaled_dot_product_attention` on fp32 tensors, as every tutorial shows it."""
    q, k, v = (torch.randn(1, 8, 128, 64) for _ in range(3))
    report = traced(sdpa, q, k, v)
    (row,) = report.rows
    assert row.family == "sdpa_flash_cpu" and row.dtype == "float32"
    assert "takes float16 and bfloat16, not float32" in row.forecast
    assert traced(sdpa, *(x.bfloat16() for x in (q, k, v))).rows[0].forecast == ""


@pytest.mark.parametrize(
    "shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)], ids=lambda shape: f"{len(shape)}-D"
)
def test_tensors_of_any_rank_are_read(shape):
    q, k, v = (noise(*shape).requires_grad_() for _ in range(3))
    for mask in (None, torch.ones(5, 5, dtype=torch.bool).tril()):
        report = traced(lambda mask=mask: sdpa(q, k, v, attn_mask=mask).sum().backward())
        assert [tuple(row.q[-2:]) for row in report.rows] == [(5, 8)], mask
    assert traced(spelled_out, q, k, v).rows[0].family == "eager"


def test_what_cannot_be_read_runs_all_the_same(monkeypatch):
    """A trace around a user's program must not be what breaks it."""
    q, k, v = qkv()
    expected = F.scaled_dot_product_attention(q, k, v)

    def broken(*arguments):
        raise TypeError("an operator nobody foresaw")

    monkeypatch.setattr(operator_reading, "pairs", broken)
    with flashpatch.trace() as t:
        found = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(found, expected)
    assert "TypeError: an operator nobody foresaw" in str(t)
    for budget in ({"expect": "flash"}, {"forbid": "math,eager"}, {"max_declines": 0}):
        assert any(UNREADABLE in broken.text for broken in findings.violations(t.report, **budget)), budget


# ---- every implementation ----


def spelled_out(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v


def einsum(q, k, v):
    return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


def by_hand(q, k, v):
    scores = (q @ k.mT).exp()
    return (scores / scores.sum(-1, keepdim=True)) @ v


def transposed(q, k, v):
    return (v.mT @ (q @ k.mT).softmax(-1).mT).mT


RUNS = {
    "eager": spelled_out,
    "eager-einsum": einsum,
    "eager-exp": by_hand,
    "eager-transposed": transposed,
    "eager-one-head": lambda q, k, v: spelled_out(q[0, 0], k[0, 0], v[0, 0]),
    "sdpa_flash_cpu": F.scaled_dot_product_attention,
    "sdpa_math": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
    "flex_eager": flex_attention,
    "flashpatch_fallback": lambda q, k, v: flashpatch.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), on_decline="fallback"
    ),
}


@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference_mode"])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.filterwarnings("ignore")
def test_each_implementation_is_named(name, inference):
    with torch.inference_mode(inference):
        report = traced(RUNS[name], *qkv())
    (row,) = report.rows
    assert row.family == name.split("-")[0] and row.calls == 1
    shape = [1, 1, 64, 16] if "one-head" in name else [2, 4, 64, 16]
    assert row.q == row.k == row.v == shape
    assert row.flops == 4 * math.prod(shape[:2]) * 64 * 64 * 16
    dense = families.BY_NAME[row.family].kind == "dense"
    assert row.kind == families.BY_NAME[row.family].kind
    assert row.matrix_bytes == (4 * math.prod(shape[:2]) * 64 * 64 if dense else 0)
    assert bool(codes(report, "slow")) == (dense or name == "flashpatch_fallback")
    assert row.bytes >= 4 * 4 * math.prod(shape) + 2 * row.matrix_bytes * (name == "eager")


def test_the_emulated_kernel_is_named(monkeypatch):
    if flashpatch.plan is None or __import__("flashpatch.emulator", fromlist=["x"]).available() is not None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    q, k, v = (torch.randn(1, 20, 2, 64).bfloat16() for _ in range(3))
    report = traced(flashpatch.attention, q, k, v, causal=True)
    (row,) = report.rows
    assert (row.family, row.kernel, row.causal) == ("flashpatch", "forward_sm80", True) and not report.findings


def test_other_libraries_are_known_by_their_operators():
    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define(
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, bool causal, float softcap=0.) -> Tensor"
    )
    library.impl("_flash_attn_forward", lambda q, k, v, dropout_p, causal, softcap=0.0: q.clone(), "CPU")
    q, k, v = (torch.randn(2, 32, 4, 16) for _ in range(3))
    (row,) = traced(torch.ops.flash_attn._flash_attn_forward, q, k, v, 0.0, True, 5.0).rows
    assert (row.family, row.q, row.causal, row.features) == ("flash_attn", [2, 4, 32, 16], True, ["softcap"])
    known = {
        "flash_attn_3::fwd": "flash_attn", "_vllm_fa3_C::fwd": "flash_attn", "xformers_flash::flash_fwd": "xformers",
        "xformers::efficient_attention_forward_cutlass": "xformers", "flash_attn::_flash_attn_varlen_backward": "flash_attn",
        "aten::_scaled_dot_product_cudnn_attention": "sdpa_cudnn", "aten::_scaled_dot_product_efficient_attention_backward":
        "sdpa_efficient", "aten::bmm": None, "aten::_softmax": None, "quantized::linear": None,
    }  # fmt: skip
    for operator, family in known.items():
        found = families.of_operator(operator)
        assert (found and found.name) == family, operator


def test_multihead_attention_that_returns_weights_is_eager():
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    x = noise(2, 9, 32)
    assert traced(layer, x, x, x).rows[0].family == "eager"
    report = traced(layer, x, x, x, need_weights=False)
    assert report.rows[0].family == "sdpa_flash_cpu" and report.holds


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padding"])
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_torchs_encoder_fast_path_is_seen_inside_its_one_operator(padded):
    """With padding it runs on nested tensors; on a CPU it spells attention out either way."""
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    padding = torch.arange(9) >= torch.tensor([[9], [5]]) if padded else None
    with torch.inference_mode():
        report = traced(model, noise(2, 9, 32), src_key_padding_mask=padding)
    assert [(row.path, row.family, row.q) for row in report.rows] == [
        (f"layers.{index}", "native_mha_dense", [2, 2, 9, 16]) for index in range(2)
    ]
    assert codes(report, "note") == {"native_path"} and report.rows[0].matrix_shape == [2, 2, 9, 9]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.inference_mode():
            report = traced(model, noise(2, 9, 32))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert {row.family for row in report.rows} == {"sdpa_flash_cpu"}


def test_a_window_given_as_numbers_is_shown():
    model = BY_NAME["gemma2"].model("sdpa")
    with flashpatch.apply(model):
        report = traced(model, ids())
    assert {row.mask for row in report.rows} == {"causal", "causal window of 4"} and codes(report, "wrong") == set()
    q, k, v = (x.transpose(1, 2) for x in qkv())
    options = {"window_size": (3, 2), "on_decline": "fallback"}
    assert traced(flashpatch.attention, q, k, v, **options).rows[0].mask == "window of 3 before, 2 after"


def test_what_is_no_attention_is_not_reported():
    """A router's softmax, a linear attention, a loss."""
    x, experts = noise(2, 8, 16), torch.nn.Linear(16, 4)

    def run():
        chosen = experts(x).softmax(-1).topk(2).values
        state = (x.mT @ x) @ x.mT
        F.cross_entropy(experts(x).flatten(0, 1), torch.zeros(16, dtype=torch.long))
        return chosen, state

    assert traced(run).rows == []


# ---- paths, backward, recompute, restoration ----


def test_calls_belong_to_modules_and_directions():
    model = BY_NAME["llama"].model("sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    report = traced(lambda: model(ids()).logits.sum().backward())
    by_path = {row.path: row for row in report.rows}
    assert sorted(by_path) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for row in by_path.values():
        assert (row.calls, row.recomputes, row.backward_calls) == (1, 1, 1)
        assert row.milliseconds > 0 and row.backward_milliseconds > 0
    assert report.operators > 100 and 0 < report.overhead_milliseconds < report.wall_milliseconds


def test_eager_backwards_are_counted():
    model = BY_NAME["llama"].model("eager").train()
    rows = traced(lambda: model(ids()).logits.sum().backward()).rows
    assert [(row.calls, row.backward_calls) for row in rows] == [(1, 1)] * 2


def test_outside_the_block_nothing_is_left_and_inside_nothing_changes():
    call, sdpa = torch.nn.Module.__call__, F.scaled_dot_product_attention
    model = BY_NAME["gemma2"].model("sdpa")
    expected = model(ids()).logits
    with pytest.raises(ZeroDivisionError), flashpatch.trace():
        assert torch.nn.Module.__call__ is not call
        assert torch.equal(model(ids()).logits, expected)
        with pytest.raises(RuntimeError, match="one at a time"), flashpatch.trace():
            pass
        raise ZeroDivisionError
    assert torch.nn.Module.__call__ is call and F.scaled_dot_product_attention is sdpa
    assert torch._C._len_torch_dispatch_stack() == 0
    with flashpatch.trace() as t, pytest.raises(RuntimeError, match="after the with block"):
        _ = t.report


def test_errors_inside_are_the_callers_own():
    with pytest.raises(RuntimeError, match="size"), flashpatch.trace():
        F.scaled_dot_product_attention(noise(1, 2, 4, 8), noise(1, 2, 4, 9), noise(1, 2, 4, 8))
    with pytest.raises(TypeError), flashpatch.trace():
        F.scaled_dot_product_attention(noise(1, 2, 4, 8))


# ---- silent losses, planted ----


def test_a_dense_mask_that_says_causal():
    q, k, v = qkv(dtype=torch.bfloat16)
    report = traced(sdpa, q, k, v, attn_mask=torch.ones(64, 64).tril().bool())
    assert codes(report) == {"mask_materialised"} and "is_causal=True" in text_of(report, "mask_materialised")
    assert "takes no attn_mask" in report.rows[0].forecast


def test_a_mask_that_pushes_sdpa_to_math_is_quoted():
    """T5 trains its position bias: a mask with a gradient."""
    report = traced(BY_NAME["t5"].model("sdpa"), **BY_NAME["t5"].inputs())
    row = report.rows[0]
    assert (row.family, row.mask) == ("sdpa_math", "bias") and "requires a gradient" in row.refused["flash"]
    assert "flash was not taken" in text_of(report, "sdpa_math")
    assert row.matrix_shape == [2, 2, 12, 12]


def test_torchs_own_reason_is_quoted():
    report = traced(sdpa, *qkv(), dropout_p=0.5)
    assert report.rows[0].refused == {"flash": "Both fused kernels do not support non-zero dropout."}
    imported_before = F.scaled_dot_product_attention
    report = traced(imported_before, *qkv(), dropout_p=0.5)
    assert report.rows[0].refused == {"flash": "Both fused kernels do not support non-zero dropout."}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        report = traced(sdpa, *qkv())
    assert "switched off" in report.rows[0].refused["flash"]


def test_fp32_inputs_under_16_bit_weights():
    """A norm on q and k that returns fp32, as PEFT's upcast norms and fp32 rotary embeddings do."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96, dtype=torch.bfloat16)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2).float() for part in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v)

    report = traced(Attention(), noise(2, 9, 32).bfloat16())
    assert codes(report) == {"upcast"} and "float32 although" in text_of(report, "upcast")


def test_heads_expanded_for_a_mask():
    inputs = {"input_ids": ids(), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    inputs["attention_mask"][0, :4] = 0
    report = traced(BY_NAME["llama"].model("sdpa"), **inputs)
    assert codes(report) == {"heads_expanded"} and "copied 2 times" in text_of(report, "heads_expanded")
    assert {row.mask for row in report.rows} == {"causal and padding"} and report.rows[0].heads_expanded == 2


def test_math_expands_the_heads_of_enable_gqa():
    q, k, v = qkv(4, 2)
    report = traced(sdpa, q, k, v, dropout_p=0.1, enable_gqa=True)
    assert codes(report) == {"sdpa_math", "heads_expanded"} and report.rows[0].k == [2, 2, 64, 16]


def test_softcap_and_sinks_ignored():
    report = traced(BY_NAME["gemma2"].model("sdpa"), ids())
    assert "softcap_ignored" in codes(report, "wrong") and "at 2" in text_of(report, "softcap_ignored")
    assert "softcap_ignored" not in codes(traced(BY_NAME["gemma2"].model("eager"), ids()))
    model = BY_NAME["gpt_oss"].model("eager")
    report = traced(model, ids())
    assert codes(report, "wrong") == set() and "does not support sdpa" in text_of(report, "eager")
    assert {row.mask for row in report.rows} == {"causal", "causal window of 4"}
    assert all(row.features == ["sinks"] for row in report.rows)
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config._attn_implementation_internal = "sdpa"
    assert "sinks_ignored" in codes(traced(model, ids()), "wrong")


def test_a_window_that_nobody_applies():
    class Windowed(torch.nn.Module):
        sliding_window = 4

        def forward(self, q, k, v, causal):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    assert codes(traced(Windowed(), *qkv(), True)) == {"window_ignored"}
    assert codes(traced(Windowed(), *qkv(seqlen=4), True)) == set()


@pytest.mark.parametrize(("name", "read"), [("bloom", True), ("gptj", True), ("openai_gpt", False)])
def test_hard_coded_attention(name, read):
    report = traced(BY_NAME[name].model("sdpa"), ids())
    assert codes(report) == {"hard_coded"} and "computes attention itself" in text_of(report, "hard_coded")
    assert ("flashpatch.apply(model) reads it" in text_of(report, "hard_coded")) == read
    assert len(report.rows) == 2 and all(row.family == "eager" and row.mask == "causal" for row in report.rows)


def test_an_attention_function_without_a_mask_function():
    AttentionInterface.register("maskless", sdpa_attention_forward)
    report = traced(BY_NAME["llama"].model("maskless"), ids())
    assert codes(report, "wrong") == {"mask_function_missing"} and "'maskless'" in text_of(
        report, "mask_function_missing"
    )


def packed(**keywords):
    return {"input_ids": ids(1), "position_ids": torch.tensor([[*range(5), *range(7)]]), **keywords}


def test_packed_documents_that_see_each_other():
    model = BY_NAME["llama"].model("sdpa")
    assert codes(traced(model, **packed()), "wrong") == {"packed_contamination"}
    everything = torch.ones(1, 12, dtype=torch.long)
    assert codes(traced(model, **packed(attention_mask=everything, use_cache=False)), "wrong") == {
        "packed_contamination"
    }
    apart = traced(model, **packed(use_cache=False))
    assert codes(apart, "wrong") == set() and apart.rows[0].mask == "causal, an interval of keys per row"
    model.set_attn_implementation("eager")
    assert codes(traced(model, **packed()), "wrong") == {"packed_contamination"}
    with flashpatch.apply(model):
        assert codes(traced(model, **packed()), "wrong") == set()


def test_attention_weights_that_come_back_empty():
    model = BY_NAME["llama"].model("sdpa")
    report = traced(model, ids(), output_attentions=True)
    assert codes(report, "wrong") == {"output_attentions"}
    assert codes(traced(BY_NAME["llama"].model("eager"), ids(), output_attentions=True), "wrong") == set()
    missing = {finding.path for finding in report.findings if finding.code == "output_attentions"}
    assert missing == {"LlamaForCausalLM (attentions)"}


@pytest.mark.parametrize("kind", ["BertModel", "T5EncoderModel", "T5Model"])
def test_an_empty_tuple_says_nothing_of_attention_a_model_does_not_have(kind):
    """transformers returns `cross_attentions=()` of models without cross-attention."""
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    if kind != "BertModel":
        sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    config = {"BertModel": transformers.BertConfig}.get(kind, transformers.T5Config)
    inputs = {"input_ids": ids(), **({"decoder_input_ids": ids()} if kind == "T5Model" else {})}
    expected = {"BertModel": {"attentions"}, "T5EncoderModel": {"attentions"}}.get(
        kind, {"encoder_attentions", "decoder_attentions", "cross_attentions"}
    )
    for implementation, lacking in (("eager", set()), ("sdpa", expected)):
        model = getattr(transformers, kind)(config(**sizes, attn_implementation=implementation)).eval()
        report = traced(model, output_attentions=True, **inputs)
        wrong = {finding.path for finding in report.findings if finding.level == "wrong"}
        assert wrong == {f"{kind} ({name})" for name in lacking}


@pytest.mark.filterwarnings("ignore")
def test_attention_weights_asked_of_a_patched_model_are_a_decline():
    model = BY_NAME["llama"].model("sdpa")
    with flashpatch.apply(model):
        report = traced(model, ids(), output_attentions=True)
        assert not traced(model, ids()).rows[0].declines[0].startswith("output_attentions")
    assert codes(report) == {"declined"} and all(row.family == "eager" for row in report.rows)
    assert all(
        row.declines == ["output_attentions: the attention weights themselves are asked for"] for row in report.rows
    )
    (broken,) = findings.violations(report, max_declines=1)
    assert "2 calls declined: output_attentions" in broken.text


def test_a_registered_function_that_is_eager_inside():
    def function(module, query, key, value, attention_mask, scaling, **keywords):
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        weights = (query @ key.mT * scaling + attention_mask).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    AttentionInterface.register("by_hand", function)
    AttentionMaskInterface.register("by_hand", eager_mask)
    report = traced(BY_NAME["llama"].model("by_hand"), ids())
    assert codes(report) == {"eager"} and "attention function 'by_hand' computes it with torch" in text_of(
        report, "eager"
    )


def test_a_learned_bias_is_a_bias_also_while_it_is_zero():
    bias = torch.zeros(4, 64, 64, requires_grad=True)
    report = traced(sdpa, *qkv(), attn_mask=bias)
    assert report.rows[0].mask == "bias" and "mask_materialised" not in codes(report)
    report = traced(sdpa, *qkv(), attn_mask=bias.detach())
    assert "or a bias of zeros" in text_of(report, "mask_materialised")


@pytest.mark.parametrize("kind", ["OptimizedModule", "module.compile"])
def test_a_compiled_model_that_materialises_its_mask(kind):
    torch._dynamo.reset()
    model = BY_NAME["llama"].model("sdpa")
    if kind == "module.compile":
        model.compile(backend="aot_eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        expected = compiled(ids()).logits
        with flashpatch.trace() as t:
            assert torch.equal(compiled(ids()).logits, expected)
    rows = t.report.rows
    assert [row.path for row in rows] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(row.compiled and row.family == "sdpa_flash_cpu" and row.mask == "causal" for row in rows)
    assert {"mask_materialised", "heads_expanded"} <= codes(t.report)
    assert "by the compiled model" in text_of(t.report, "mask_materialised")
    assert "not_attributed" in codes(t.report, "note")


def test_a_compiled_model_is_not_compiled_again():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=0.0)
    compiled = torch.compile(layer, backend=backend)
    x = noise(2, 5, 16)
    compiled(x)
    before = len(graphs)
    with flashpatch.trace() as t:
        compiled(x)
    compiled(x)
    assert len(graphs) == before > 0 and t.report.rows


def test_a_sub_model_left_behind():
    model = BY_NAME["llava"].model("sdpa")
    model.model.vision_tower.set_attn_implementation("eager")
    report = traced(model, **BY_NAME["llava"].inputs())
    assert "left_behind" in codes(report)
    left = {finding.path for finding in report.findings if finding.code == "left_behind"}
    assert left == {f"model.vision_tower.encoder.layers.{i}.self_attn" for i in range(2)}


@pytest.mark.filterwarnings("ignore")
def test_a_sub_model_that_was_not_patched():
    model = BY_NAME["llava"].model("sdpa")
    with flashpatch.apply(model.model.language_model):
        report = traced(model, **BY_NAME["llava"].inputs())
    left = {finding.path for finding in report.findings if finding.code == "left_behind"}
    assert left == {f"model.vision_tower.encoder.layers.{i}.self_attn" for i in range(2)}
    with flashpatch.apply(model):
        assert "left_behind" not in codes(traced(model, **BY_NAME["llava"].inputs()))


def test_a_patched_models_declines_are_findings():
    model = BY_NAME["llama"].model("sdpa")
    with flashpatch.apply(model):
        report = traced(model, ids())
    assert {row.family for row in report.rows} == {"flashpatch_fallback"} and codes(report) == {"declined"}
    assert "no_gpu" in text_of(report, "declined")


# ---- no false alarm ----

# What these do on their defaults is a real loss, covered above.
UNHEALTHY = {"gemma2", "gpt_oss", "t5", "gemma3_vision"}
WINDOWED = {"gemma3", "mistral", "llama4", "doge", "whisper"}


@pytest.mark.parametrize("tiny", [tiny for tiny in MODELS if tiny.name not in UNHEALTHY], ids=lambda tiny: tiny.name)
def test_healthy_models_raise_no_alarm(tiny):
    model = tiny.model("sdpa").bfloat16()
    inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in tiny.inputs().items()}
    with torch.no_grad():
        report = traced(model, **inputs)
    assert len(report.rows) >= tiny.layers
    # a window or a chunk is a mask, and a mask expands the heads: true, and not this model's fault
    assert codes(report) <= ({"heads_expanded"} if tiny.name in WINDOWED else set()), report.findings
    assert {row.family for row in report.rows} == {"sdpa_flash_cpu"}


def test_a_cap_on_the_last_logits_is_none_on_the_scores():
    sizes = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    config = transformers.RecurrentGemmaConfig(**sizes, lru_width=32, head_dim=16, attention_window_size=8)
    assert config.logits_soft_cap
    report = traced(transformers.RecurrentGemmaForCausalLM(config).eval(), ids())
    assert len(report.rows) == 1 and codes(report, "wrong") == set()


def test_two_masks_on_the_same_scores_count_together():
    """A window by `where` and then a causal mask by addition, as GPT-Neo; documents hidden before a causal mask."""
    i, j = torch.arange(64)[:, None], torch.arange(64)[None]
    lowest = torch.finfo(torch.float32).min
    causal = torch.zeros(64, 64).masked_fill(j > i, lowest)

    def windowed(q, k, v):
        scores = torch.where(j > i - 4, q @ k.mT, lowest) + causal
        return scores.softmax(-1) @ v

    assert traced(windowed, *qkv()).rows[0].mask == "causal window of 4"

    class Packed(torch.nn.Module):
        def forward(self, q, k, v, position_ids):
            scores = (q @ k.mT).masked_fill((i < 32) != (j < 32), lowest) + causal
            return scores.softmax(-1) @ v

    positions = torch.arange(32).repeat(2)[None].expand(2, -1)
    report = traced(Packed(), *qkv(), position_ids=positions)
    assert codes(report, "wrong") == set() and report.rows[0].mask == "causal, an interval of keys per row"


def test_padding_and_left_padded_positions_are_no_packed_documents():
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0).masked_fill(mask == 0, 1)
    model = BY_NAME["qwen3"].model("sdpa")
    report = traced(model, input_ids=ids(), attention_mask=mask, position_ids=positions)
    assert codes(report, "wrong") == set()
    traced_generate = traced(model.generate, ids(), attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert codes(traced_generate, "wrong") == set() and len(traced_generate.rows) >= 4


def test_checkpointed_functions_and_threads_do_no_harm():
    q, k, v = (x.requires_grad_() for x in qkv())
    report = traced(lambda: checkpoint(spelled_out, q, k, v, use_reentrant=False).sum().backward())
    assert {row.family for row in report.rows} == {"eager"}


def test_what_another_thread_runs_is_said_not_to_be_seen():
    model = BY_NAME["llama"].model("sdpa")
    with flashpatch.trace() as t:
        thread = threading.Thread(target=model, args=(ids(),))
        thread.start()
        thread.join()
    assert t.report.rows == [] and "other threads" in " ".join(t.report.statements)


def test_what_is_replaced_inside_the_block_stays_replaced():
    original = F.scaled_dot_product_attention

    def theirs(q, k, v, **_):
        return spelled_out(q, k, v)

    try:
        with flashpatch.trace() as t:
            F.scaled_dot_product_attention = theirs
            sdpa(*qkv())
        assert F.scaled_dot_product_attention is theirs and t.report.rows[0].family == "eager"
    finally:
        F.scaled_dot_product_attention = original


def test_a_profiler_that_runs_already_is_left_alone():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with pytest.raises(RuntimeError, match="audit --profile"), flashpatch.trace(profile=True):
            pass
        with flashpatch.trace() as t:
            sdpa(*qkv())
    assert len(t.report.rows) == 1 and any("attention" in event.name for event in profiler.events())


def test_flex_attention_uncompiled_is_found():
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    report = traced(flex_attention, *(noise(1, 2, 128, 16) for _ in range(3)), block_mask=blocks)
    assert codes(report) == {"flex_not_compiled"} and report.rows[0].mask == "in code (mask_mod)"


# ---- what masks say ----

_i, _j = torch.arange(6)[:, None], torch.arange(6)[None]
_owner = torch.tensor([0, 0, 0, 1, 1, 1])
KINDS = {
    "none": None,
    "hides nothing": torch.ones(6, 6, dtype=torch.bool),
    "causal": _j <= _i,
    "causal window of 2": (_j <= _i) & (_j > _i - 2),
    "causal and padding": (_j <= _i) & (_j > 1),
    "padding": (_j < 4).expand(6, 6),
    "causal, an interval of keys per row": (_j <= _i) & (_owner[:, None] == _owner[None]),
    "an interval of keys per row": _owner[:, None] == _owner[None],
    "dense": (_i + _j) % 2 == 0,
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_what_a_mask_says(name, additive):
    mask = KINDS[name]
    if additive and mask is not None:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert mask_kinds.kind(mask, 6, 6) == name
    assert mask_kinds.kind(torch.randn(6, 6), 6, 6) == "bias"


# ---- budgets ----


def test_budgets():
    report = traced(RUNS["sdpa_math"], *qkv())
    (line,) = findings.violations(report, forbid="math,eager")
    assert line.rule == "--forbid math,eager" and "non-zero dropout" in line.text
    assert findings.violations(report, forbid="eager") == []
    assert findings.violations(report, expect="flash")[0].rule == "--expect flash"
    healthy = traced(sdpa, *(tensor.bfloat16() for tensor in qkv()))
    assert findings.violations(healthy, expect="flash", forbid="dense") == []
    assert "no attention was seen" in findings.violations(traced(lambda: None), expect="flash")[0].text
    declined = traced(RUNS["flashpatch_fallback"], *qkv())
    assert "no_gpu" in findings.violations(declined, max_declines=0)[0].text
    assert findings.violations(declined, max_declines=1) == []
    with pytest.raises(ValueError, match="known: flash, fused, dense"):
        findings.violations(report, forbid="nonsense")


def test_flash_on_a_cpu_asks_for_a_call_that_a_gpu_could_run_so():
    report = traced(sdpa, *qkv())
    assert report.rows[0].family == "sdpa_flash_cpu" and "not float32" in report.rows[0].forecast
    (line,) = findings.violations(report, expect="flash")
    assert "torch's CPU kernel" in line.text and "would not take this call: it takes float16" in line.text
    for words in ("flash_cpu", "flash,flash_cpu", "fused"):  # the kernel itself is asked for
        assert findings.violations(report, expect=words) == []


# ---- profiler traces ----


def kernel(name, ts, dur=10.0, stream=7):
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 0,
        "args": {"device": 0, "stream": stream},
    }


GEMM, SOFTMAX = "sm90_xmma_gemm_bf16bf16_tn", "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>"
ELEMENTWISE = "void at::native::elementwise_kernel<128, 4>"
KERNELS = {
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": ("sdpa_flash", False),
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<x>": ("sdpa_flash", True),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128": ("sdpa_cudnn", False),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": ("sdpa_cudnn", True),
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": ("sdpa_efficient", False),
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80": ("sdpa_efficient", True),
    "triton_tem_fused_flex_attention_0": ("flex", False),
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>": ("flash_attn", False),
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<x>>>": ("flash_attn", False),
    "attention_forward_sm90": ("flashpatch", False),
    "attention_backward_sm80": ("flashpatch", True),
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<x>": ("flashinfer", False),
    "void flashinfer::mla::BatchMLAPagedAttentionKernel<x>": ("flashinfer", False),
    "void vllm::paged_attention_v2_kernel<bf16>": ("paged", False),
    "kernel_unified_attention_2d": ("paged", False),
    "_fwd_grouped_kernel_stage1": ("paged", False),
    "fmha_v2_flash_attention_bf16_64_128_S_q_paged_kv_128_causal_sm90_kernel": ("paged", False),
    "fmhaSm100aKernel_QkvBfloat16OBfloat16H128PagedKvCausal": ("paged", False),
    "flash_fwd_splitkv_mla_kernel": ("flash_attn", False),
    "void xformers::fmha_cutlassF_f16_aligned_64x128_rf_sm80": ("xformers", False),
    "void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaFwdKernelTmaWarpspecialized<x>>": ("fmha", False),
    "void ck_tile::FmhaBwdDQDKDVKernel<x>_bwd": ("fmha", True),
    "attn_fwd.kd": ("triton_attention", False),
    "_bwd_kernel_dkdv": ("triton_attention", True),
    "void somebody::SparseAttentionKernel<x>": ("unknown", False),
    "_fwd_kernel": ("unknown", False),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS, ids=lambda name: name[:40])
def test_kernels_are_known_by_name(name):
    family, backward = KERNELS[name]
    (row,) = profiles.classify([kernel(name, 0)]).families
    assert (row.family, row.backward_calls, row.calls) == (family, int(backward), int(not backward))


@pytest.mark.parametrize(
    "name",
    ["void flashinfer::RMSNormKernel<8u>", "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<x>",
     "void vllm::reshape_and_cache_flash_kernel<bf16>", "void vllm::merge_attn_states_kernel<x>", "chunk_gated_delta_rule_fwd_kernel_h",
     "_linear_attn_decode_kernel", "void vllm::concat_and_cache_mla_kernel<x>", "fused_qk_norm_rope", "nvjet_sm90_tst_128x128",
     "void at::native::elementwise_kernel<attention>", "topk_softmax"],
)  # fmt: skip
def test_what_an_engine_runs_around_attention_is_none(name):
    assert profiles.classify([kernel(name, 0)]).families == []


def test_attention_that_is_not_known_is_said_to_be_unknown():
    report = profiles.classify([kernel("void somebody::SparseAttentionKernel<x>", 0), kernel("flash_fwd_kernel", 10)])
    assert {row.family: row.verdict for row in report.families} == {"unknown": "unknown", "flash_attn": "flash"}
    assert "not known ran: void somebody::SparseAttentionKernel; the rest ran fused: flash-attn" in report.verdict
    library = torch.library.Library("somebody", "FRAGMENT")
    library.define("sparse_attention(Tensor q, Tensor k, Tensor v) -> Tensor")
    library.impl("sparse_attention", lambda q, k, v: q.clone(), "CPU")
    seen = traced(torch.ops.somebody.sparse_attention, *qkv())
    assert [row.kind for row in seen.rows] == ["unknown"] and "unknown_attention" in codes(seen, "note")
    assert findings.violations(seen, expect="flash") and not findings.violations(seen, forbid="dense")


def test_eager_is_a_softmax_between_two_products():
    names = [GEMM, ELEMENTWISE, SOFTMAX, ELEMENTWISE, GEMM, "void rms_norm_kernel", GEMM, SOFTMAX, "topk_kernel", GEMM]
    report = profiles.classify([kernel(name, 10 * i) for i, name in enumerate(names)])
    (row,) = report.families
    assert (row.family, row.calls, row.verdict, row.milliseconds) == ("eager", 1, "dense", 0.05)
    assert report.softmaxes_alone == 1 and "whole score matrix" in report.verdict
    # the other stream's products are no part of it
    apart = [kernel(GEMM, 0, stream=1), kernel(SOFTMAX, 10, stream=2), kernel(GEMM, 20, stream=1)]
    assert profiles.classify(apart).families == []


@pytest.mark.parametrize("zipped", [False, True], ids=["json", "gz"])
def test_a_file_of_torchs_profiler(tmp_path, zipped):
    q, k, v = qkv()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        F.scaled_dot_product_attention(q, k, v)
        spelled_out(q, k, v)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    path = tmp_path / ("trace.json.gz" if zipped else "trace.json")
    profiler.export_chrome_trace(str(path))
    report = profiles.read(path)
    assert not report.gpu
    assert {row.family: row.calls for row in report.families} == {"sdpa_flash_cpu": 1, "eager": 1, "sdpa_math": 1}
    assert path.read_bytes()[:2] == (b"\x1f\x8b" if zipped else path.read_bytes()[:2])


@pytest.mark.parametrize(
    "content",
    [b"", b"no json", b"{}", gzip.compress(b"x", mtime=0), b"\x1f\x8bcut"],
    ids=["empty", "text", "object", "gzip", "cut"],
)
def test_a_file_that_is_no_trace_is_a_sentence(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(profiles.NotATrace, match="trace"):
        profiles.read(path)


def test_the_trace_can_run_the_profiler_beside_it():
    with flashpatch.trace(profile=True) as t:
        F.scaled_dot_product_attention(*qkv())
    assert [row.family for row in t.report.profile.families] == ["sdpa_flash_cpu"]
    assert json.dumps(t.report.profile.families[0].kernels)
