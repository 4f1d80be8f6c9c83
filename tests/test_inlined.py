"""Models whose attention is hard-coded: read while they run, one call per module, equal to their own arithmetic."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings

import model_inputs
import pytest
import shrinking
import torch
import transformers

import flashpatch
from flashpatch import counting, enabling, inlined, model_runs, model_verification, patcher, tagging
from flashpatch.problem import DeclinedError

# type -> (its fields, its attention modules). Together they have every class of inlined.MODULES.
TYPES = {
    "blip": ({}, 6),
    "bloom": ({}, 2),
    "codegen": ({}, 2),
    "deberta": ({"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}, 2),
    "deberta-v2": ({"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4}, 2),
    "falcon": ({"alibi": True}, 2),
    "gpt_neo": ({}, 2),
    "gpt_neox_japanese": ({}, 2),
    "gptj": ({}, 2),
    "imagegpt": ({}, 2),
    "luke": ({}, 2),
    "megatron-bert": ({}, 2),
    "mpnet": ({}, 2),
    "mpt": ({}, 2),
    "rembert": ({}, 2),
    "roformer": ({}, 2),
    "sam_vision_model": ({}, 2),
    "sam_hq_vision_model": ({}, 2),
    "speecht5": ({}, 6),
    "tapas": ({}, 2),
    "trocr": ({}, 2),
    "vilt": ({}, 2),
    "visual_bert": ({}, 2),
    "vitdet": ({"use_relative_position_embeddings": True}, 2),
    "xglm": ({}, 2),
}


@pytest.fixture(autouse=True)
def quiet():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small to share
    yield from _quiet()
    torch.set_num_threads(threads)


def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flashpatch:")
        yield


def small(name: str, **changes):
    config = shrinking.shrunk(name, **{**TYPES.get(name, ({},))[0], **changes})
    model = shrinking.build(shrinking.model_classes(name, config)[0], config)
    return model, model_inputs.inputs_of(model, name, 12)


def codes(report) -> set[str]:
    return {code for row in report.rows for code, _ in row.reasons}


@pytest.mark.parametrize("name", TYPES)
def test_output_and_gradients_equal_the_models_own(name):
    model, inputs = small(name)
    for variant, given in model_inputs.variants(model, inputs):
        report = model_verification.verify_model(model, given)
        faults = [comparison.message for comparison in report.comparisons if not comparison.passed]
        assert report.holds, (variant, report.error or faults[:2])
        assert sum(module.dispatched for module in report.modules) == TYPES[name][1]
        assert all(module.calls == 1 for module in report.modules)
        assert report.declines == {"no_gpu"}, variant


def test_a_model_computes_what_it_computed_before():
    """As it is loaded when nobody names an implementation, which may be another than eager attention, and not equal to it."""
    loaded = set()
    for name in TYPES:
        eager, inputs = small(name)
        model = type(eager)._from_config(eager.config.__class__.from_dict(eager.config.to_dict())).float().eval()
        if model.config._attn_implementation == "eager":
            continue
        loaded.add(name)
        model.load_state_dict(eager.state_dict())
        outputs = []
        with torch.no_grad():
            for patched in (False, True):
                with patcher.apply(model) if patched else contextlib.nullcontext() as patch:
                    torch.manual_seed(0)  # ViLT draws the patches it looks at
                    outputs.append(model_runs.main_output(model(**inputs))[1])
                    assert not patched or all(row.dispatched for row in patch.report.rows), name
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert {"falcon", "sam_vision_model"} <= loaded


def test_a_field_is_looked_for_where_the_module_has_its_configuration():
    inner, inputs = small("falcon")

    class Outer(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig  # which has no such field

        def __init__(self, config):
            super().__init__(config)
            self.inner = inner

        def forward(self, **keywords):
            return self.inner(**keywords)

    model = Outer(transformers.PretrainedConfig())
    expected = model_runs.main_output(model(**inputs))[1]
    with patcher.apply(model) as patch:
        torch.testing.assert_close(model_runs.main_output(model(**inputs))[1], expected, rtol=1e-4, atol=1e-4)
        assert patch.report.dispatched == TYPES["falcon"][1]


def test_every_class_that_is_read_is_compared_here():
    seen = set()
    for name in TYPES:
        for implementation in ("eager", "sdpa"):
            config = shrinking.shrunk(name, **TYPES[name][0])
            cls = shrinking.model_classes(name, config)[0]
            try:
                model = cls._from_config(config, attn_implementation=implementation)
            except ValueError:
                continue
            seen |= {
                f"{type(module).__module__.split('.')[2]}.{type(module).__name__}"
                for module in model.modules()
                if inlined.where(type(module))
            }
    dispatching = {"codegen.CodeGenAttention", "gptj.GPTJAttention"}  # from 5.24 on
    assert set(inlined.MODULES) - dispatching <= seen <= set(inlined.MODULES)


@pytest.mark.parametrize("name", ["sam_vision_model", "sam_hq_vision_model"])
def test_a_module_that_calls_torchs_own_attention_is_read_too(name):
    config = shrinking.shrunk(name)
    model = shrinking.model_classes(name, config)[0]._from_config(config, attn_implementation="sdpa").eval()
    shrinking.energise(model)
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected = model(image).last_hidden_state.detach()
    with patcher.apply(model) as patch:
        found = model(image).last_hidden_state.detach()
        assert patch.report.dispatched == 2
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("name", ["bloom", "deberta", "sam_vision_model"])
def test_enable_reads_them_from_the_first_forward_on(name, enabled):
    """A copy made before that too. What was asked for by name is left alone."""
    named, inputs = small(name)  # asks for eager
    model = type(named)(shrinking.shrunk(name, **TYPES[name][0])).eval()
    model.load_state_dict(named.state_dict())
    expected = model_inputs.output_of(named(**inputs))
    assert patcher.report(named).dispatched == 0
    for built in (copy.deepcopy(model), model, pickle.loads(pickle.dumps(model))):
        before = counting.stats()["calls"]
        torch.testing.assert_close(model_inputs.output_of(built(**inputs)), expected, atol=2e-5, rtol=2e-5)
        assert counting.stats()["calls"] - before == TYPES[name][1]
    report = patcher.report(model)
    assert [row.calls for row in report.rows] == [1] * TYPES[name][1]
    assert all(row.path in dict(model.named_modules()) for row in report.rows)
    assert type(model).__name__ not in enabling.unreachable()


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_they_are_read_in_a_compiled_model_too(name, enabled):
    """A graph shows nothing to read, so it breaks at each module; who asks for one graph is told why there is none."""
    named, inputs = small(name)  # asks for eager
    named(**inputs)
    expected = model_inputs.output_of(named(**inputs))
    model = type(named)(shrinking.shrunk(name, **TYPES[name][0])).eval()
    model.load_state_dict(named.state_dict())
    compiled = torch.compile(model, backend="aot_eager")
    for calls in (1, 2):
        found = model_inputs.output_of(compiled(**inputs))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        assert [row.calls for row in patcher.report(model).rows] == [calls] * TYPES[name][1]
    found.sum().backward()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)


@pytest.mark.parametrize("name", ["bloom", "falcon", "blip", "speecht5", "sam_vision_model", "trocr"])
def test_a_default_that_reaches_a_model_inside_was_asked_for_by_nobody(name, enabled):
    config = shrinking.shrunk(name)
    for cls in shrinking.model_classes(name, config):
        for given in (config, config, copy.deepcopy(config)):  # as it is, with what the first model put there, copied
            with torch.device("meta"):
                cls(given)
    assert enabling.honoured() == []
    with torch.device("meta"):
        cls._from_config(config, attn_implementation="eager")
    assert (cls.__name__, "eager") in enabling.honoured()


def test_a_model_inside_is_read_also_where_it_is_called_by_itself(enabled):
    model = shrinking.model_classes("bloom", config := shrinking.shrunk("bloom"))[-1](config).eval()
    model.base_model(torch.randint(0, 5, (1, 7)))
    assert {row.calls for row in patcher.report(model).rows} == {1}


def test_enable_switches_what_fails_on_its_name_while_it_is_built(enabled):
    """SAM picks a class by the name and has none for ours, its mask decoder asks for an implementation by name."""
    config = shrinking.shrunk("sam")
    model = shrinking.model_classes("sam", config)[0](config).eval()
    with torch.no_grad():
        model(**model_inputs.inputs_of(model, "sam", 12))
    dispatched = {row.class_name for row in patcher.report(model).rows if row.dispatched}
    assert dispatched == {"SamVisionSdpaAttention", "SamAttention"}


@pytest.mark.parametrize("name", ["bloom", "gptj", "falcon", "gpt_neo", "mpt", "xglm", "codegen"])
def test_generation_equals_the_models_own(name):
    model, inputs = small(name)
    assert model_inputs.generated(model, inputs).startswith("equal: 4")


@pytest.mark.parametrize("name", ["gptj", "bloom", "codegen", "xglm"])
def test_causal_masks_keep_their_structure(name, monkeypatch):
    from flashpatch import ops

    calls, original = [], ops.attend
    monkeypatch.setattr(
        ops, "attend", lambda q, k, v, call, *rest, **more: calls.append(call) or original(q, k, v, call, *rest, **more)
    )
    model, inputs = small(name)
    with patcher.apply(model), torch.no_grad():
        model(**inputs)
    assert [(call.window_right, call.mask) for call in calls] == [(0, None)] * 2


@pytest.mark.parametrize("name", ["bloom", "gptj", "deberta-v2", "vitdet"])
def test_they_run_on_kernels(name, monkeypatch):
    """Strict, in bf16, through the emulator. GPT-J widens q and k to fp32 by itself; kernels get them as they were."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    monkeypatch.setenv("FLASHPATCH_STRICT", "1")
    model, inputs = small(name)
    report = model_verification.verify_model(model.bfloat16(), inputs)
    faults = [comparison.message for comparison in report.comparisons if not comparison.passed]
    assert report.holds, report.error or faults[:2]
    assert all(module.kernels for module in report.modules)


def test_weights_that_are_asked_for_are_the_models_own_and_named():
    model, inputs = small("gptj")
    expected = model(**inputs, output_attentions=True).attentions
    with patcher.apply(model) as patch:
        found = model(**inputs, output_attentions=True).attentions
        assert "output_attentions" in codes(patch.report)
        assert all(row.calls == 1 for row in patch.report.rows)
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own, atol=2e-5, rtol=2e-5)
    with patcher.apply(model, strict=True), pytest.raises(DeclinedError, match="output_attentions"):
        model(**inputs, output_attentions=True)


def test_dropout_is_drawn_only_while_training():
    model, inputs = small("bloom", attention_dropout=0.5)
    with patcher.apply(model):
        assert torch.equal(model(**inputs).logits, model(**inputs).logits)
        model.train()
        assert not torch.equal(model(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_gradient(reentrant):
    gradients = []
    for checkpointed in (False, True):
        model, inputs = small("gptj")
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with patcher.apply(model) as patch:
            model(**inputs, use_cache=False).logits.square().mean().backward()
            assert all((row.calls, row.recomputes) == (1, int(checkpointed)) for row in patch.report.rows)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain, rtol=0, atol=0, msg=name)


def attention(q, k, v, then=lambda scores: scores):
    scores = then(torch.matmul(q, k.transpose(-1, -2)) / 4.0)
    return torch.matmul(torch.softmax(scores, -1), v)


class Hard(torch.nn.Module):
    def __init__(self, then):
        super().__init__()
        self.then = then

    def forward(self, q, k, v):
        return attention(q, k, v, self.then)


def in_place(scores, method, *args):
    """What a statement without an assignment does."""
    getattr(scores, method)(*args)
    return scores


BELOW = torch.ones(5, 5, dtype=torch.bool).tril()
UNRECORDED = {
    "clamp": lambda s: s.clamp(-1.0, 1.0),
    "index": lambda s: s[:, :, :, :] * 1.0,
    "power": lambda s: s**2,
    "subtraction": lambda s: s - s.amax(-1, keepdim=True),
    "scaled-by-a-negative": lambda s: s * -1.0,
    "filled-with-a-number-that-counts": lambda s: s.masked_fill(~BELOW, -3.0),
    "chosen-by-where": lambda s: torch.where(BELOW, s, torch.zeros(())),
    "maximum": lambda s: torch.max(s, torch.zeros(())),
    "transposed": lambda s: s.transpose(-1, -2),
    "through-numpy-like-functions": lambda s: torch.cumsum(s, -1),
    "clamped-in-place": lambda s: in_place(s, "clamp_", -1.0, 1.0),
    "clamped-in-place-then-scaled": lambda s: in_place(s, "clamp_", -1.0, 1.0) * 2.0,
}
RECORDED = {
    "nothing": lambda s: s,
    "scale": lambda s: s * 2.0 / torch.tensor(3.0),
    "a-scale-per-head": lambda s: s * torch.tensor([0.5, 2.0]).view(2, 1, 1),
    "bias-then-scale": lambda s: (s + torch.arange(5.0)) * 0.5,
    "bias-from-the-left": lambda s: torch.arange(5.0) + s,
    "a-constant": lambda s: s + 3.0,
    "masked-fill": lambda s: s.masked_fill(~BELOW, float("-inf")),
    "where": lambda s: torch.where(BELOW, s, torch.full((), torch.finfo(torch.float32).min)),
    "two-masks": lambda s: s.masked_fill(~BELOW, -3.0e38).masked_fill(torch.arange(5) == 1, -3.0e38),
    "lowest": lambda s: torch.max(s, torch.tensor(torch.finfo(torch.float32).min)),
    "as-three-dimensions": lambda s: s.view(4, 5, 5).add(torch.ones(4, 1, 5)).view(2, 2, 5, 5),
    "as-rows-of-pixels": lambda s: (s.view(4, 5, 1, 5, 1) + torch.arange(5.0).view(5, 1)).view(2, 2, 5, 5),
    "in-its-own-dtype": lambda s: s.float().type_as(s),
    "masked-in-place": lambda s: in_place(s, "masked_fill_", ~BELOW, float("-inf")),
    "scaled-in-place": lambda s: in_place(in_place(s, "mul_", 2.0), "add_", torch.arange(5.0)),
}


@pytest.fixture
def hard(monkeypatch):
    """A module of ours that is read like a model's."""
    monkeypatch.setattr(inlined, "where", lambda cls: inlined.Where() if cls is Hard else None)

    def make(then):

        module = Hard(then)
        tag = tagging.tag_module(module, "hard", False)
        inlined.attach(module)
        return module, counting.counts(tag.layer)

    return make


@pytest.mark.parametrize("name", [*RECORDED, *UNRECORDED])
def test_whatever_a_module_does_to_its_scores_is_what_it_gets(name, hard):
    then = RECORDED.get(name) or UNRECORDED[name]
    module, counts = hard(then)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 16, generator=generator, requires_grad=True) for _ in range(3))
    found, expected = module(q, k, v), attention(q, k, v, then)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    weight = torch.randn(found.shape, generator=generator)
    for ours, own in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(ours, own, atol=5e-5, rtol=5e-5)
    assert (counts.calls, "scores_used" in {code for code, _ in counts.declines}) == (
        (1, False) if name in RECORDED else (0, True)
    )


def test_a_failing_forward_ends_the_reading(hard):
    def fail(scores):
        raise KeyError("half way")

    module, _ = hard(fail)
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(KeyError):
        module(x, x, x)
    assert isinstance(torch.matmul(x, x.transpose(-1, -2)), torch.Tensor)


def test_restore_and_copies_leave_nothing_behind():
    model, inputs = small("gptj")
    expected = model(**inputs).logits.detach()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    implementation = model.config._attn_implementation
    patch = flashpatch.apply(model)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.testing.assert_close(twin(**inputs).logits, expected, atol=2e-4, rtol=2e-4)
    again = flashpatch.apply(model)
    model(**inputs)
    assert {row.calls for row in again.report.rows} == {1}
    again.restore()
    patch.restore()
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(**inputs).logits, expected)
