"""Patched models against eager attention: logits, gradients, masks, and that a patch says and undoes all it does."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import subprocess
import sys
import types
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import BY_NAME, HARD_CODED, MODELS, ids, output

from flashpatch import attention_modules, counting, enabling, interface, mask_functions, patcher, tagging, tracing
from flashpatch.problem import DeclinedError

TEXT = [tiny for tiny in MODELS if tiny.decoder]
ids_of = {"ids": lambda tiny: tiny.name}
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Declines are expected here (there is no GPU) and read from the counters, not from warnings."""
    monkeypatch.delenv("FLASHPATCH_STRICT", raising=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flashpatch:")
        yield


def gradients(model, inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    result = output(model, inputs)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(5))
    (result * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(ours, eager):
    assert ours.keys() == eager.keys()
    for name, gradient in eager.items():
        scale = gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(
            ours[name] / scale, gradient / scale, **CLOSE, msg=lambda m, name=name: f"{name}: {m}"
        )


# ---- outputs and gradients ----


@pytest.mark.parametrize("tiny", MODELS, **ids_of)
def test_logits_and_gradients_equal_eager(tiny):
    model, inputs = tiny.model(), tiny.inputs()
    logits, grads = output(model, inputs).detach(), gradients(model, inputs)
    with patcher.apply(model) as patch:
        torch.testing.assert_close(output(model, inputs).detach(), logits, **CLOSE)
        assert_same_gradients(gradients(model, inputs), grads)
        report = patch.report
    assert report.dispatched == tiny.layers, [row for row in report.rows if not row.dispatched]
    assert report.total == tiny.layers + tiny.hard_coded
    assert {code for row in report.rows if row.dispatched for code, _ in row.reasons} == {"no_gpu"}
    assert all(row.calls == 2 for row in report.rows if row.dispatched)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tiny", [*TEXT, BY_NAME["bert"], BY_NAME["t5"]], **ids_of)
def test_padded_rows_equal_eager(tiny, side):
    model, inputs = tiny.model(), tiny.inputs()
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, slice(0, 5) if side == "left" else slice(7, 12)] = 0
    inputs["attention_mask"] = mask
    if tiny.decoder:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    kept = mask.bool() if "decoder_input_ids" not in inputs else torch.ones_like(inputs["decoder_input_ids"]).bool()
    expected = output(model, inputs).detach()[kept]
    with patcher.apply(model):
        found = output(model, inputs).detach()
    assert found.isfinite().all()
    torch.testing.assert_close(found[kept], expected, **CLOSE)


@pytest.mark.parametrize("tiny", TEXT, **ids_of)
def test_the_last_token_moves_nothing_before_it(tiny):
    model = tiny.model()
    tokens = ids()
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 90 + 3
    with patcher.apply(model):
        before, after = output(model, {"input_ids": tokens}), output(model, {"input_ids": changed})
    torch.testing.assert_close(before[:, :-1], after[:, :-1], atol=1e-5, rtol=0)
    assert (before[:, -1] - after[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["bool", "float", "additive-half", "int"])
def test_masks_of_the_users_own(kind):
    """A 4-D mask reaches attention as it is: boolean, or anything eager can add to the scores."""
    model = BY_NAME["llama"].model()
    seen = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.6
    seen |= torch.eye(12, dtype=torch.bool)
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    mask = {
        "bool": seen, "float": additive, "additive-half": torch.where(seen, 0.0, -65504.0).half(), "int": seen.int(),
    }[kind]  # fmt: skip
    # eager cannot take a boolean mask: what it means is the additive one
    expected = output(model, {"input_ids": ids(), "attention_mask": additive if kind == "bool" else mask}).detach()
    with patcher.apply(model):
        found = output(model, {"input_ids": ids(), "attention_mask": mask}).detach()
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_row_that_is_all_lowest_numbers_is_the_mean_as_in_eager():
    model = BY_NAME["llama"].model()
    mask = torch.zeros(2, 1, 12, 12)
    mask[0, :, 3] = torch.finfo(torch.float32).min
    expected = output(model, {"input_ids": ids(), "attention_mask": mask}).detach()
    with patcher.apply(model):
        found = output(model, {"input_ids": ids(), "attention_mask": mask}).detach()
    torch.testing.assert_close(found, expected, **CLOSE)


def test_narrower_dtypes_keep_the_lowest_number_finite():
    module = torch.nn.Module()
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.full((1, 1, 4, 4), torch.finfo(torch.float32).min)
    out, _ = interface.attention_function(module, q, k, v, mask)
    torch.testing.assert_close(out[:, 0], v.float().mean(2).bfloat16(), atol=2e-2, rtol=0)


@pytest.mark.parametrize("name", ["llama", "bert", "mistral", "t5"])
def test_shapes_come_out_of_the_meta_device(name):
    """Nothing that asks a mask for its values may run where there are none."""
    tiny = BY_NAME[name]
    model, inputs = tiny.model("sdpa"), tiny.inputs()
    expected = [part.shape for part in model(**inputs).values() if isinstance(part, torch.Tensor)]
    model = model.to("meta")
    inputs = {word: part.to("meta") if isinstance(part, torch.Tensor) else part for word, part in inputs.items()}
    with patcher.apply(model), tracing.trace():
        assert [part.shape for part in model(**inputs).values() if isinstance(part, torch.Tensor)] == expected
    assert not mask_functions._contiguous(torch.empty(1, 4, dtype=torch.long, device="meta"))


def test_the_copied_configs_of_encoder_and_decoder_are_switched():
    model = BY_NAME["t5"].model()
    with patcher.apply(model):
        assert {part.config._attn_implementation for part in (model, model.encoder, model.decoder)} == {"fpatch"}
    assert {part.config._attn_implementation for part in (model, model.encoder, model.decoder)} == {"eager"}


# ---- the call itself ----


class Bare(torch.nn.Module):
    def __init__(self, is_causal=None):
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


@pytest.mark.parametrize("q_length", [1, 5])
@pytest.mark.parametrize("keyword", [None, True, False])
@pytest.mark.parametrize("attribute", [None, True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_causality_comes_from_the_mask_or_an_explicit_word(masked, attribute, keyword, q_length):
    """`module.is_causal` alone never counts, as in eager; a mask beats every word; one query is never causal."""
    q, (k, v) = torch.randn(1, 2, q_length, 8), torch.randn(2, 1, 2, 7, 8)
    mask = (torch.rand(1, 1, q_length, 7) < 0.7).logical_or(torch.arange(7) == 0) if masked else None
    seen = mask if masked else torch.ones(1, 1, q_length, 7, dtype=torch.bool)
    if not masked and keyword and q_length > 1:
        seen = seen.tril()  # top-left, as transformers' sdpa
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)
    out, weights = interface.attention_function(Bare(attribute), q, k, v, mask, is_causal=keyword)
    torch.testing.assert_close(out, expected, **CLOSE)
    assert weights is None and out.is_contiguous()


def test_documents_by_cu_seq_lens():
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    offsets = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    out, _ = interface.attention_function(
        Bare(), q, k, v, None, is_causal=True, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=4
    )
    for begin, end in ((0, 4), (4, 6), (6, 9)):
        part = slice(begin, end)
        alone = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, part], k[:, :, part], v[:, :, part], is_causal=True
        )
        torch.testing.assert_close(out[:, part], alone.transpose(1, 2), **CLOSE)
    with pytest.raises(ValueError, match="laid end to end"):
        interface.attention_function(
            Bare(), *(torch.randn(2, 2, 9, 8) for _ in range(3)), None, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets
        )


@pytest.mark.parametrize("keyword", sorted(interface.REFUSED))
def test_keywords_that_would_be_wrong_results_are_refused(keyword):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(DeclinedError, match=f"passes {keyword}=.*set_attn_implementation"):
        interface.attention_function(Bare(), q, q, q, None, **{keyword: torch.zeros(1)})


def test_unknown_keywords_are_refused_or_named():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(DeclinedError, match=r"kwarg_unknown.*sharpness"):
        interface.attention_function(Bare(), q, q, q, None, sharpness=2.0)
    interface.attention_function(Bare(), q, q, q, None, sharpness=None)
    model = BY_NAME["llama"].model()
    expected = output(model, {"input_ids": ids(), "sharpness": 2.0}).detach()
    with patcher.apply(model) as patch:
        found = output(model, {"input_ids": ids(), "sharpness": 2.0}).detach()
        codes = {code: text for code, text in patch.report.rows[0].reasons}
    torch.testing.assert_close(found, expected, **CLOSE)
    assert "sharpness" in codes["kwarg_unknown"]


def test_a_mask_of_one_row_stands_for_all_rows():
    from transformers.masking_utils import bidirectional_mask_function

    padding = torch.tensor([[1, 1, 1, 0]])
    spec = interface.mask_function(1, 1, 4, mask_function=bidirectional_mask_function, attention_mask=padding)
    q, k, v = (torch.randn(1, 2, length, 8) for length in (5, 4, 4))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :3], v[:, :, :3]).transpose(1, 2)
    torch.testing.assert_close(interface.attention_function(Bare(), q, k, v, spec)[0], expected, **CLOSE)


def test_a_mask_of_another_length_is_an_error():
    spec = interface.mask_function(batch_size=1, q_length=4, kv_length=4)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match="4 queries and 4 keys, but attention got 4 and 6"):
        interface.attention_function(Bare(), q, k, k, spec)


@pytest.mark.parametrize("tiny", [BY_NAME[name] for name in ("llama", "gemma2", "gpt_oss", "t5", "bert")], **ids_of)
def test_output_attentions_gives_the_weights_and_says_so(tiny):
    model, inputs = tiny.model(), tiny.inputs()
    name = "decoder_attentions" if tiny.name == "t5" else "attentions"
    expected = model(**inputs, output_attentions=True)
    with patcher.apply(model) as patch:
        found = model(**inputs, output_attentions=True)
        assert all("output_attentions" in dict(row.reasons) for row in patch.report.rows)
        assert model(**inputs)[name] is None if name in model(**inputs) else True
    assert len(found[name]) == len(expected[name]) > 0
    for ours, eager in zip(found[name], expected[name], strict=True):
        torch.testing.assert_close(ours, eager, **CLOSE)
    torch.testing.assert_close(found[0], expected[0], **CLOSE)


def test_dropout_only_while_training():
    model = BY_NAME["llama"].model(attention_dropout=0.5)
    with patcher.apply(model):
        first, second = (output(model, {"input_ids": ids()}).detach() for _ in range(2))
        assert torch.equal(first, second)
        model.train()
        dropped = [output(model, {"input_ids": ids()}).detach() for _ in range(2)]
        assert not torch.equal(*dropped)
        torch.manual_seed(7)
        one = output(model, {"input_ids": ids()}).detach()
        torch.manual_seed(7)
        assert torch.equal(one, output(model, {"input_ids": ids()}).detach())
        model.eval()
        assert torch.equal(first, output(model, {"input_ids": ids()}).detach())


# ---- apply, report, restore ----


def state_of(model):
    configs = {id(c): c._attn_implementation_internal for c in attention_modules.configs_of(model)}
    return configs, {path: sorted(vars(module)) for path, module in model.named_modules()}


@pytest.mark.parametrize("name", ["llama", "t5", "llava", "bloom"])
def test_restore_returns_everything(name):
    model = BY_NAME[name].model()
    before, forwards = state_of(model), [module.forward for module in model.modules()]
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    patch = patcher.apply(model)
    assert model.state_dict().keys() == expected.keys()
    patch.restore()
    patch.restore()
    assert state_of(model) == before
    assert [module.forward for module in model.modules()] == forwards
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_a_failure_half_way_puts_everything_back(monkeypatch):
    model = BY_NAME["llava"].model()
    before = state_of(model)
    original, seen = tagging.tag_module, []

    def fail_on_the_third(*args, **kwargs):
        seen.append(args)
        if len(seen) == 3:
            raise RuntimeError("half way")
        return original(*args, **kwargs)

    monkeypatch.setattr(tagging, "tag_module", fail_on_the_third)
    with pytest.raises(RuntimeError, match="half way"):
        patcher.apply(model)
    assert state_of(model) == before


def test_a_failing_switch_puts_everything_back(monkeypatch):
    model = BY_NAME["llava"].model()
    before = state_of(model)
    original = type(model.model.vision_tower).get_correct_attn_implementation

    def fail(self, *args, **kwargs):
        raise RuntimeError("half way")

    monkeypatch.setattr(type(model.model.vision_tower), "get_correct_attn_implementation", fail)
    with pytest.raises(RuntimeError, match="half way"):
        patcher.apply(model)
    monkeypatch.setattr(type(model.model.vision_tower), "get_correct_attn_implementation", original)
    assert state_of(model) == before


@pytest.mark.parametrize("tiny", HARD_CODED, **ids_of)
def test_hard_coded_models_are_untouched_and_said_so(tiny):
    model, inputs = tiny.model(), tiny.inputs()
    before, expected = state_of(model), output(model, inputs).detach()
    with patcher.apply(model) as patch:
        assert torch.equal(output(model, inputs).detach(), expected)
        report = patch.report
    assert (report.dispatched, report.total) == (0, tiny.hard_coded)
    assert all("computes attention itself" in dict(row.reasons)["not_dispatched"] for row in report.rows)
    assert state_of(model) == before


def test_models_that_select_keys_by_name_are_refused_whole():
    settings = {
        "vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 2,
        "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8,
        "index_topk": 4, "first_k_dense_replace": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**settings)).eval()
    before = state_of(model)
    with patcher.apply(model) as patch:
        assert state_of(model) == before
        assert patch.report.switched == 0 < patch.report.total
        assert "selects keys" in dict(patch.report.rows[0].reasons)["not_dispatched"]


def test_masks_a_model_computes_with_are_exact_and_counted():
    model = BY_NAME["doge"].model()
    with patcher.apply(model) as patch:
        output(model, {"input_ids": ids()})
        assert patch.report.mask_materialised == 1


def test_bloom_loaded_under_our_name_still_adds_the_right_mask():
    """Nothing stops transformers from building a hard-coded model under any name; it then gets our mask."""
    torch.manual_seed(0)
    model = BY_NAME["bloom"].build().eval()
    inputs = {"input_ids": ids(), "attention_mask": torch.tensor([[0] * 3 + [1] * 9, [1] * 12])}
    expected = output(model, inputs).detach()
    model.config._attn_implementation = interface.NAME
    assert torch.equal(output(model, inputs).detach(), expected)
    assert patcher.report(model).dispatched == 0


def test_before_any_forward_nothing_counts_as_dispatched():
    model = BY_NAME["llama"].model()
    with patcher.apply(model) as patch:
        assert patch.report.dispatched == 0 and patch.report.switched == 2
        assert all("no forward" in dict(row.reasons)["not_dispatched"] for row in patch.report.rows)
        output(model, {"input_ids": ids()})
        assert [(row.path, row.class_name, row.calls) for row in patch.report.rows] == [
            ("model.layers.0.self_attn", "LlamaAttention", 1), ("model.layers.1.self_attn", "LlamaAttention", 1),
        ]  # fmt: skip


def test_patches_of_one_model_nest_and_those_of_two_do_not_meet():
    first, second = BY_NAME["llama"].model(), BY_NAME["llama"].model()
    outer = patcher.apply(first)
    inner = patcher.apply(first)
    output(first, {"input_ids": ids()})
    output(second, {"input_ids": ids()})
    assert (inner.report.rows[0].calls, outer.report.rows[0].calls) == (1, 0)
    inner.restore()
    output(first, {"input_ids": ids()})
    assert outer.report.rows[0].calls == 1
    outer.restore()
    assert first.config._attn_implementation == second.config._attn_implementation == "eager"


def test_restoring_out_of_order_leaves_the_model_unpatched():
    model = BY_NAME["llama"].model()
    before = state_of(model)
    outer, inner = patcher.apply(model), patcher.apply(model)
    outer.restore()
    inner.restore()
    assert state_of(model) == before


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_patch_whose_earlier_one_was_restored_says_so(name):
    tiny = BY_NAME[name]
    model = tiny.model()
    outer, inner = patcher.apply(model), patcher.apply(model)
    outer.restore()
    assert not inner.active and "undone" in repr(inner) and inner.report.rows[0].reasons[0][0] == "undone"
    with patcher.apply(model) as again:
        output(model, tiny.inputs())
        assert again.active and again.report.rows[0].calls == 1 and not inner.active


def test_copies_and_pickles_count_apart():
    model = BY_NAME["llama"].model()
    with patcher.apply(model) as patch:
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        expected = output(model, {"input_ids": ids()})
        for twin in twins:
            assert torch.equal(output(twin, {"input_ids": ids()}), expected)
            assert patcher.report(twin).dispatched == 2
        assert patch.report.rows[0].calls == 1


def test_a_pickle_brings_flashpatch_with_it(tmp_path):
    model = BY_NAME["llama"].model()
    with patcher.apply(model):
        torch.save(model, tmp_path / "model.pt")
    script = f"""
import sys, torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
model(torch.tensor([[5, 6, 7]]))
assert sys.modules["flashpatch"].stats()["calls"] == 2
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_a_model_switched_away_later_says_so():
    model = BY_NAME["llama"].model()
    with patcher.apply(model) as patch:
        model.set_attn_implementation("sdpa")
        output(model, {"input_ids": ids()})
        reasons = [dict(row.reasons) for row in patch.report.rows]
    assert all("set to 'sdpa' after it was patched" in found["switched_away"] for found in reasons)
    assert not any("not_dispatched" in found for found in reasons)
    assert "switched_away" not in {code for row in patch.report.rows for code, _ in row.reasons}


def test_a_warning_points_at_the_code_that_called_the_model():
    model = BY_NAME["llama"].model()
    counting._warned.clear()
    with patcher.apply(model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output(model, {"input_ids": ids()})
    ours = [warning for warning in caught if "flashpatch:" in str(warning.message)]
    assert [Path(warning.filename).name for warning in ours] == ["tiny_models.py"]


def test_a_patch_can_be_collected():
    model = BY_NAME["llama"].model()
    gone = weakref.ref(model)
    patcher.apply(model)
    del model
    gc.collect()
    assert gone() is None


def test_strict_raises_for_this_model_only(monkeypatch):
    strict, lenient = BY_NAME["llama"].model(), BY_NAME["llama"].model()
    with patcher.apply(strict, strict=True), patcher.apply(lenient):
        with pytest.raises(DeclinedError, match="no_gpu"):
            output(strict, {"input_ids": ids()})
        output(lenient, {"input_ids": ids()})
        monkeypatch.setenv("FLASHPATCH_STRICT", "1")
        with pytest.raises(DeclinedError, match="no_gpu"):
            output(lenient, {"input_ids": ids()})


def test_what_is_no_transformers_model_is_refused_in_words():
    with pytest.raises(TypeError, match=r"flashpatch\.attention"):
        patcher.apply(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="needs a transformers model, got str"):
        patcher.apply("llama")


def test_an_old_transformers_is_named_with_the_range(monkeypatch):
    old = types.ModuleType("transformers")
    old.__version__ = "4.40.0"
    monkeypatch.setitem(sys.modules, "transformers", old)
    monkeypatch.setattr(interface, "_registered", False)
    with pytest.raises(RuntimeError, match=r"4\.40\.0 is too old.*5\.17 up to, not including, 6.*pip install"):
        patcher.apply(torch.nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "not installed" in interface.unavailable()


def test_a_broken_transformers_is_named(monkeypatch, tmp_path):
    """What transformers says of its own dependencies, and what to type."""
    for number, (text, expected) in enumerate(
        (
            ("import regexx_missing", r"cannot be imported \(No module named .*pip install regexx_missing"),
            (
                "raise ImportError('tokenizers>=99 is required')",
                r"ImportError: tokenizers>=99 is required\).*pip install",
            ),
            ("raise RuntimeError('numpy 1 and 2')", r"RuntimeError: numpy 1 and 2"),
        )
    ):
        folder = tmp_path / str(number) / "transformers"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
        monkeypatch.delitem(sys.modules, "transformers", raising=False)
        monkeypatch.syspath_prepend(folder.parent)
        assert re.search(expected, interface.unavailable())


# ---- loading under the name, and enable ----


def test_from_pretrained_by_name(tmp_path):
    BY_NAME["llama"].model().save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, eager = load(tmp_path, attn_implementation="fpatch"), load(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(output(model, {"input_ids": ids()}), output(eager, {"input_ids": ids()}), **CLOSE)
    report = patcher.report(model)
    assert (report.dispatched, report.total) == (2, 2)


def test_enable_takes_defaults_and_honours_names(enabled):
    default = BY_NAME["llama"].build()
    config = default.config
    named = transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager")
    assert default.config._attn_implementation == "fpatch"
    assert named.config._attn_implementation == "eager"
    assert ("LlamaForCausalLM", "eager") in enabling.honoured()
    hard_coded = BY_NAME["openai_gpt"].build()
    assert hard_coded.config._attn_implementation == "eager"
    enabling.enable(override=True)
    assert transformers.LlamaForCausalLM._from_config(
        copy.deepcopy(config), attn_implementation="sdpa"
    ).config._attn_implementation == "fpatch"  # fmt: skip
    enabling.disable()
    assert BY_NAME["llama"].build().config._attn_implementation == "sdpa"


def test_models_that_enable_took_are_reported_by_path(enabled):
    model = BY_NAME["llama"].build().eval()
    output(model, {"input_ids": ids()})
    names = [layer.name for layer in counting.layers[-2:]]
    assert names == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert patcher.report(model).dispatched == 2


def test_disable_restores_transformers_itself():
    method = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    enabling.enable()
    enabling.disable()
    assert transformers.PreTrainedModel._check_and_adjust_attn_implementation is method


def test_every_known_keyword_is_one_transformers_uses():
    """A word that transformers never writes is a slip, and the keyword it was meant to be would be refused."""
    root = Path(transformers.__file__).parent
    sources = [*root.glob("*.py"), *root.glob("models/*/modeling_*.py"), *root.glob("generation/*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*sources, *root.glob("integrations/*.py")])
    used = set(re.findall(r"\w+", text))
    older = {"read_index", "write_index"}  # up to 5.22
    assert set(interface.NOISE) | set(interface.REFUSED) <= used | older
