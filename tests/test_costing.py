"""`flashpatch cost`: its arithmetic, from hand-made numbers up to models of every kind of attention."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import torch
import transformers
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from flashpatch import call_costs, costing

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


def llama(**changes):
    return transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 3, **changes})


def cost(config, **options):
    return costing.cost(config, **{"dtype": "float16", "contexts": (4096,), **options})


def test_4096_tokens_in_fp16_are_16_8_million_scores_in_32_mib():
    (found,) = cost(llama()).contexts
    assert found.scores == 16_777_216 and found.score_matrix_bytes == 32 * 2**20


def test_a_plain_model_by_hand():
    """3 layers, 4 query and 2 key/value heads of 16, causal, batch 5, 4096 tokens."""
    (found,) = cost(llama(), batch=5).contexts
    n, batch, layers, heads, groups, d = 4096, 5, 3, 4, 2, 16
    pairs = n * (n + 1) // 2
    kernel, eager = found.with_kernel, found.without
    assert kernel.forward_flops == batch * layers * heads * pairs * 4 * d
    assert kernel.backward_flops == 2.5 * kernel.forward_flops
    assert eager.forward_flops == batch * layers * heads * n * n * 4 * d
    assert eager.backward_flops == 2 * eager.forward_flops
    assert found.visible == pairs / n**2
    tensors = 2 * n * d * (2 * heads + 2 * groups)  # q, out, k, v in fp16
    assert kernel.forward_bytes == batch * layers * (tensors + 4 * n * heads)
    assert kernel.working_bytes == batch * 4 * n * heads and kernel.saved_bytes == layers * kernel.working_bytes
    repeated = 2 * 2 * n * heads * d
    assert eager.forward_bytes == batch * layers * (24 * heads * n * n + tensors + 2 * repeated)
    assert eager.working_bytes == batch * (8 * heads * n * n + repeated)
    assert eager.saved_bytes == batch * layers * (6 * heads * n * n + repeated)
    assert found.kv_cache_bytes == layers * n * groups * 2 * d * 2


class _Traffic(TorchDispatchMode):
    """Bytes that operators other than views read and write."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not (function.is_view or function is torch.ops.aten._unsafe_view.default):
            tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
            self.bytes += sum(t.untyped_storage().nbytes() for t in tensors if t.dim())
        return result


def test_eager_traffic_is_that_of_transformers_own_function():
    """Its operators' bytes, counted as they run: within 3% of the formula, q, k, v and out being next to nothing here."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    n, heads, d = 512, 4, 4
    module = torch.nn.Module()
    module.num_key_value_groups = 1
    q, k, v = (torch.randn(1, heads, n, d, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.zeros(1, heads, n, n, dtype=torch.bfloat16)
    with _Traffic() as forward:
        out, weights = eager_attention_forward(module, q, k, v, mask, scaling=0.5)
    with _Traffic() as backward:
        torch.autograd.grad(out.sum(), (q, k, v))
    del weights
    scores = heads * n * n
    # a CPU casts to fp32 before softmax, and back after its gradient, where a GPU does both in one kernel: 8 bytes a score
    assert abs(forward.bytes / scores - (8 * 2 + 8 + 8 + 2)) < 1  # 2: the mask itself is read
    assert abs(backward.bytes / scores - (8 * 2 + 12 + 8)) < 1


@pytest.mark.parametrize(
    ("sizes", "left", "right", "chunk"),
    [((7, 7), -1, -1, None), ((7, 7), -1, 0, None), ((9, 9), 3, 0, None), ((9, 13), 2, 1, None), ((5, 12), -1, 0, None),
     ((12, 5), -1, 0, None), ((11, 11), -1, 0, 4), ((1, 30), 7, 0, None)],
)  # fmt: skip
def test_visible_pairs_are_those_of_the_mask(sizes, left, right, chunk):
    rows, keys = sizes
    i = torch.arange(rows)[:, None] + keys - rows
    j = torch.arange(keys)[None]
    mask = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        mask &= j >= i - left
    if right >= 0:
        mask &= j <= i + right
    if chunk:
        mask &= i // chunk == j // chunk
    assert call_costs.visible_pairs(rows, keys, left, right, chunk) == int(mask.sum())


# ---- models ----


def masks(report):
    return {layer.mask: layer.count for layer in report.layers}


def test_sliding_windows_and_full_layers():
    config = transformers.Gemma3TextConfig(**SMALL, num_hidden_layers=7, sliding_window=512, head_dim=32)
    report = cost(config, contexts=(8192, 16384))
    assert masks(report) == {"window 512": 6, "causal": 1}
    short, long = report.contexts
    window = sum(min(i + 1, 512) for i in range(8192))
    assert short.with_kernel.forward_flops == 4 * 32 * 4 * (6 * window + 8192 * 8193 // 2)
    assert short.kv_cache_bytes == (6 * 512 + 8192) * 2 * 2 * 32 * 2
    assert 2 < long.with_kernel.forward_flops / short.with_kernel.forward_flops < 4
    assert "6 of 7 calls have a window" in report.statement


def test_chunks():
    config = transformers.Llama4TextConfig(
        **SMALL,
        num_hidden_layers=4,
        intermediate_size_mlp=64,
        head_dim=32,
        attention_chunk_size=256,
        num_local_experts=2,
    )
    report = cost(config, contexts=(1024,))
    assert masks(report) == {"chunk 256": 3, "causal": 1}
    pairs = 3 * 4 * (256 * 257 // 2) + 1024 * 1025 // 2
    assert report.contexts[0].with_kernel.forward_flops == 4 * 32 * 4 * pairs


def test_layers_that_are_no_attention():
    config = transformers.Qwen3NextConfig(
        **SMALL, num_hidden_layers=4, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )  # fmt: skip
    report = cost(config, dtype="bfloat16")
    assert masks(report) == {"causal": 1} and report.other_layers == {"linear_attention": 3}


def test_an_encoder_sees_everything_and_a_vision_tower_keeps_its_length():
    sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    report = cost(transformers.BertConfig(**sizes, num_hidden_layers=2))
    assert masks(report) == {"full": 2} and report.contexts[0].visible == 1.0
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    text = transformers.CLIPTextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict())
    report = cost(config)
    assert {(layer.mask, layer.seqlen_q) for layer in report.layers} == {("causal", None), ("full", 17)}


def test_a_vision_model_has_its_own_length():
    """Its weights are drawn from a truncated normal, which cannot be done without values."""
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    report = cost(config, contexts=(4096, 8192))
    assert [found.context for found in report.contexts] == [17] and "changes nothing" in report.statement
    assert report.contexts[0].kv_cache_bytes == 0 and report.largest_context_with_kernel is None


def test_a_cache_holds_what_a_decoder_reads_again():
    sizes = {"d_model": 64, "d_ff": 64, "num_heads": 4, "d_kv": 16, "vocab_size": 100}
    config = transformers.T5Config(**sizes, num_layers=3, num_decoder_layers=2, decoder_start_token_id=0)
    report = cost(config)
    assert masks(report)["causal"] == 2 and sum(layer.count for layer in report.layers) == 7
    assert report.contexts[0].kv_cache_bytes == (2 + 2) * 4096 * 4 * (16 + 16) * 2


def test_a_token_is_multiplied_by_its_own_experts_only():
    config = transformers.MixtralConfig(**SMALL, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2)
    report = cost(config)
    expert = 3 * 64 * 64
    embedding = 100 * 64
    assert report.parameters - report.active_parameters == 2 * 6 * expert + embedding
    found = report.contexts[0]
    own = found.with_kernel.forward_flops
    assert found.share_of_forward == pytest.approx(own / (own + 2 * report.active_parameters * 4096))


def test_hard_coded_attention_is_named_and_not_counted():
    report = cost(transformers.OpenAIGPTConfig(vocab_size=60, n_embd=64, n_layer=2, n_head=4, n_positions=1024))
    assert len(report.undispatched) == 2 and report.layers == []
    assert "nothing to count" in report.statement


# ---- the GPU, time, money, fit ----


def recorded() -> tuple[float, dict]:
    """The matrix product's TFLOP/s, and flashpatch's as the matrix has them, of tests/evidence/h200_speed.json."""
    measured = json.loads((ROOT / "tests" / "evidence" / "h200_speed.json").read_text(encoding="utf-8"))
    found: dict = {}
    for timing in measured["timings"]:
        shape = timing["shape"]
        if timing["variant"] == "flashpatch":
            key = f"{shape['head_dim']} {'causal' if shape['causal'] else 'full'}"
            rows = found.setdefault(key, {}).setdefault(shape["seqlen"], [None, None])
            rows[timing["direction"] == "backward"] = timing["tflops"]
    return measured["ceiling_tflops"], found


def test_ceilings_are_the_measured_ones():
    """A recording differs from the next by what the card's clock does; after a new one: python tests/test_costing.py"""
    product, expected = recorded()
    limits, speeds = call_costs.ceilings("h200")
    assert speeds.keys() == expected.keys() and limits.measured
    for key, rows in expected.items():
        assert speeds[key].keys() == rows.keys()
        for length, rates in rows.items():
            assert speeds[key][length] == pytest.approx(rates, rel=0.1), (key, length)
    assert limits.matmul_tflops == pytest.approx(product, rel=0.1)


def renewed(text: str) -> str:
    """compat_matrix.yaml with the recording's figures."""
    product, found = recorded()
    text = re.sub(r"(?<=    matmul_tflops: )\d+", f"{product:.0f}", text)
    for key, rows in found.items():
        figures = ", ".join(
            f"{length}: [{', '.join(f'{rate:.0f}' for rate in rates)}]" for length, rates in rows.items()
        )
        text = re.sub(rf"(?<=      {key}: ){{.*}}", f"{{{figures}}}", text)
    return text


def test_renewing_the_ceilings_changes_figures_alone():
    text = (ROOT / "compat_matrix.yaml").read_text(encoding="utf-8")
    assert re.sub(r"\d+", "0", renewed(text)) == re.sub(r"\d+", "0", text)
    data = yaml.safe_load(renewed(text))["ceilings"]["H200"]
    assert data["attention"]["128 causal"][8192] == [round(rate) for rate in recorded()[1]["128 causal"][8192]]


def test_time_and_money():
    report = cost(llama(num_attention_heads=1, num_key_value_heads=1), contexts=(16384,), price_per_gpu_hour=3.6)
    kernel = report.contexts[0].with_kernel
    limits, speeds = call_costs.ceilings("h200")
    rates = speeds["64 causal"][16384]
    assert kernel.forward_milliseconds == pytest.approx(kernel.forward_flops / rates[0] / 1e9)
    assert kernel.backward_milliseconds == pytest.approx(kernel.backward_flops / rates[1] / 1e9)
    assert kernel.forward_price == pytest.approx(kernel.forward_milliseconds * 1e-6)
    both = kernel.forward_milliseconds + kernel.backward_milliseconds
    assert kernel.training_price == pytest.approx(both * 1e-6)
    eager = report.contexts[0].without
    assert eager.forward_milliseconds == pytest.approx(
        eager.forward_bytes / 4.24e9 + eager.forward_flops / (limits.matmul_tflops * 1e9)
    )
    assert report.contexts[0].decode_milliseconds == pytest.approx(report.contexts[0].kv_cache_bytes / 4.24e9)


def test_the_largest_context_and_batch_that_fit():
    report = cost(llama(), memory=2.0, contexts=(4096,))
    for kernel, largest in ((True, report.largest_context_with_kernel), (False, report.largest_context_without)):
        at, beyond = (cost(llama(), memory=2.0, contexts=(n,)).contexts[0] for n in (largest, largest + 1024))
        batches = [(c.with_kernel if kernel else c.without).largest_batch for c in (at, beyond)]
        assert batches[0] >= 1 and batches[1] == 0
    (found,) = report.contexts
    each = found.kv_cache_bytes + found.without.working_bytes
    assert found.without.largest_batch == int((2 * 2**30 - report.weights_bytes) // each) > 0
    assert report.largest_context_without < report.largest_context_with_kernel


def test_a_gpu_nobody_measured():
    report = cost(llama(), gpu="rtx 4090")
    assert report.contexts[0].with_kernel.forward_milliseconds is None and report.largest_context_with_kernel is None
    assert report.contexts[0].with_kernel.forward_flops > 0 and "--tflops" in " ".join(report.notes)
    given = cost(llama(), gpu="rtx 4090", tflops=100.0, bandwidth=1.0, memory=24.0)
    kernel = given.contexts[0].with_kernel
    assert kernel.forward_milliseconds == pytest.approx(kernel.forward_flops / 100e9) and not given.ceilings.measured
    wide = cost(llama(), dtype="float32")
    assert wide.contexts[0].with_kernel.forward_milliseconds is None and "in float32" in " ".join(wide.notes)
    with pytest.raises(ValueError, match="known: "):
        cost(llama(), gpu="abacus")


def test_what_has_no_kernel_says_so():
    report = cost(llama(), gpu="v100", dtype="float32")
    assert all("generation: " in " ".join(layer.declines) for layer in report.layers)
    assert report.contexts[0].score_matrix_bytes == 64 * 2**20


# ---- the command ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("config")
    llama(architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(path)
    return path


def run(*arguments):
    pytest.importorskip("flashpatch.cli", reason="needs the editable install: pip install -e .")
    from click.testing import CliRunner

    from flashpatch import cli

    return CliRunner().invoke(cli.main, ["cost", *map(str, arguments)])


def test_the_command_prints_json_as_its_schema_has_it(folder):
    result = run(folder, "--context", "512,8k,1M", "--price-per-gpu-hour", 3.5, "--json")
    document = json.loads(result.stdout)
    jsonschema.validate(document, json.loads(run("--json-schema").stdout))
    assert result.exit_code == document["exit_code"] == 0
    assert [entry["context"] for entry in document["contexts"]] == [512, 8192, 1048576]


def test_the_command_in_words(folder):
    words = " ".join(run(folder, "--context", "4k", "--price-per-gpu-hour", "2").stdout.split())
    assert "16.8 M 32 MiB" in words and "four times the work" in words and "price fwd" in words
    assert "Largest context of one sequence that fits 139.8 GiB" in words


def test_the_page_is_complete_and_fetches_nothing(folder, tmp_path):
    result = run(folder, "--context", "4k,64k", "--price-per-gpu-hour", "2", "--html", tmp_path / "cost.html")
    page = (tmp_path / "cost.html").read_text(encoding="utf-8")
    assert (
        result.exit_code == 0 and page.count("<svg") == 2 and "four times the work" in page and "price fwd+bwd" in page
    )
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "") and "<script" not in page
    assert "32 MiB" in page and page.count("<tr>") == 3 + 1 + 4 + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--html", "/nowhere/x.html"), "there is no folder /nowhere"),
        (("--context", "lots"), "'lots' is no context length; 4096, 8k"),
        (("--context", "0"), "no context length"),
        (("--gpu", "abacus"), "known: "),
    ],
)
def test_wrong_usage(folder, arguments, message):
    result = run(folder, *arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


if __name__ == "__main__":
    matrix = ROOT / "compat_matrix.yaml"
    matrix.write_text(renewed(matrix.read_text(encoding="utf-8")), encoding="utf-8")
