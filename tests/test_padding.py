"""Head dims that are no multiple of what kernels take: computed by them through copies with zeros behind, and named."""

from __future__ import annotations

import pytest
import torch

import flashpatch
from flashpatch import auditing, counting, emulator, operators, planning, reference, tolerance
from flashpatch.call import Call
from flashpatch.problem import Decline, Problem

needs_emulator = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    counting.reset_counts()


def normal(*shape: int, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(head_dim: int, head_dim_v: int, dtype=torch.bfloat16, rows: tuple = (2, 13), keys: tuple = (2, 21), heads=4):
    return (
        normal(*rows, heads, head_dim, dtype=dtype),
        normal(*keys, 2, head_dim, dtype=dtype, seed=1),
        normal(*keys, 2, head_dim_v, dtype=dtype, seed=2),
    )


LENGTHS = {
    "cu_seqlens_q": torch.tensor([0, 4, 4, 15], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 9, 12, 25], dtype=torch.int32),
}
# dims, dtype, generation, what is asked beside: every way that the copies go differs in one of them
CASES = {
    "d20": (20, 20, torch.bfloat16, "ampere", {"causal": True}),
    "d4": (4, 4, torch.float16, "ampere", {"softmax_scale": 0.7}),
    "d18-v12-fp32": (18, 12, torch.float32, "ampere", {"window_size": (5, 2)}),
    "d65": (65, 65, torch.bfloat16, "ampere", {}),
    "only v": (16, 30, torch.bfloat16, "ampere", {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    "only q and k": (33, 32, torch.float16, "ampere", {"bias": normal(1, 4, 13, 21, dtype=torch.float16)}),
    "softcap, mask": (20, 12, torch.bfloat16, "ampere", {"softcap": 3.0, "mask": normal(2, 1, 13, 21) > -1}),
    "varlen": (20, 18, torch.bfloat16, "ampere", LENGTHS | {"causal": True}),
    "hopper": (52, 52, torch.bfloat16, "hopper", {"causal": True}),
    "hopper, unequal": (65, 36, torch.float16, "hopper", {"window_size": (6, 1)}),
    "hopper, varlen": (100, 100, torch.bfloat16, "hopper", LENGTHS),
    "turing": (18, 20, torch.float16, "turing", {"deterministic": True}),
}


@needs_emulator
@pytest.mark.parametrize("case", CASES)
def test_out_and_gradients_are_those_of_the_true_head_dim(case, monkeypatch):
    head_dim, head_dim_v, dtype, generation, asked = CASES[case]
    monkeypatch.setenv("FLASHPATCH_GENERATION", generation)
    varlen = "cu_seqlens_q" in asked
    leaves = qkv(head_dim, head_dim_v, dtype, *(((15,), (25,)) if varlen else ()))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    longest = {"max_seqlen_q": 11, "max_seqlen_k": 13} if varlen else {}
    out, logsumexp = flashpatch.attention(*leaves, **asked, **longest, return_logsumexp=True)
    dout, dlogsumexp = normal(*out.shape, dtype=dtype, seed=3), normal(*logsumexp.shape, dtype=torch.float32, seed=4)
    asked = {name: value for name, value in asked.items() if name != "deterministic"}

    def results(upcast: bool):
        exact, sums = reference.attention(*leaves, **asked, upcast=upcast)
        gradients = torch.autograd.grad((exact, sums), leaves, (dout.to(exact.dtype), dlogsumexp.to(sums.dtype)))
        return exact, sums, *gradients

    gradients = torch.autograd.grad((out, logsumexp), leaves, (dout, dlogsumexp))
    names = ("out", "logsumexp", "dq", "dk", "dv")
    for name, ours, exact, eager in zip(
        names, (out, logsumexp, *gradients), results(True), results(False), strict=True
    ):
        outcome = tolerance.compare(ours, eager, exact, factor=3.0 if name.startswith("d") else 2.0)
        assert outcome.ok and ours.is_contiguous(), outcome.message(name)
    stats = flashpatch.stats()
    family = {"ampere": "sm80", "hopper": "sm90", "turing": "sm75"}[generation]
    assert not stats["declines"] and sum(stats["launches"].values()) == 2 and f"forward_{family}" in stats["launches"]
    assert sum(stats["padded"].values()) == 2 and all(" padded to " in text for text in stats["padded"])


@needs_emulator
def test_tensors_in_any_strides_are_copied_once():
    """Sliced, transposed, without a unit last stride: the copy with zeros behind is a readable one."""
    q, k, v = qkv(20, 20)
    wanted = flashpatch.attention(q, k, v)
    strided = (
        normal(2, 13, 4, 50)[..., 3:23].copy_(q),
        k.transpose(1, 2).contiguous().transpose(1, 2),
        v.mT.contiguous().mT,
    )
    counting.reset_counts()
    assert torch.equal(flashpatch.attention(*strided), wanted)
    assert flashpatch.stats()["copies"] == 3
    counting.reset_counts()
    q, k, v = qkv(16, 12)
    q = q.mT.contiguous().mT  # not padded, but not readable either
    flashpatch.attention(q, k, v)
    assert flashpatch.stats()["copies"] == 2
    assert flashpatch.stats()["padded"] == {"head_dim_v 12 padded to 16 (v copied)": 1}


@needs_emulator
def test_8_bits_are_padded_to_16(monkeypatch):
    monkeypatch.setenv("FLASHPATCH_GENERATION", "hopper")
    q, k, v = (tensor.to(torch.float8_e4m3fn) for tensor in qkv(40, 36, torch.float32))
    out = flashpatch.attention(q, k, v)
    outcome = tolerance.compare(out, reference.attention(q, k, v, upcast=False)[0], reference.attention(q, k, v)[0])
    assert outcome.ok, outcome.message("out")
    text = "head_dim 40 padded to 48, head_dim_v 36 padded to 48 (q, k, v copied)"
    assert flashpatch.stats()["padded"] == {text: 1}


@needs_emulator
def test_compiled_transformed_and_recomputed_calls_are_the_same():
    q, k, v = (tensor.requires_grad_() for tensor in qkv(20, 12))

    def loss(q, k, v):
        return flashpatch.attention(q, k, v, causal=True).float().square().sum()

    wanted = torch.autograd.grad(loss(q, k, v), (q, k, v))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for ours in (torch.autograd.grad(compiled(q, k, v), (q, k, v)), torch.func.grad(loss, (0, 1, 2))(q, k, v)):
        assert all(torch.equal(*pair) for pair in zip(ours, wanted, strict=True))
    out = torch.func.vmap(lambda q, k, v: flashpatch.attention(q[None], k[None], v[None])[0])(q, k, v)
    assert torch.equal(out, flashpatch.attention(q, k, v))


def test_shapes_without_values_are_those_of_the_true_head_dim():
    q, k, v = (tensor.to("meta") for tensor in qkv(20, 12))
    out, _ = operators.forward_op(q, k, v, *operators.flat(Call(0.1, 13, 21)), False, 0)
    assert out.shape == (2, 13, 4, 12)


@pytest.mark.parametrize(
    ("problem", "padded_to", "text"),
    [
        (Problem("forward", "bfloat16", 64, 64), None, ""),
        (Problem("forward", "bfloat16", 20, 20), (24, 24), "head_dim 20 padded to 24 (q, k, v copied)"),
        (Problem("backward", "float32", 20, 20), (24, 24), "head_dim 20 padded to 24 (q, k, v, out, dout copied)"),
        (Problem("backward", "bfloat16", 65, 64), (72, 64), "head_dim 65 padded to 72 (q, k copied)"),
        (Problem("forward", "float16", 571, 509), (576, 512), "head_dim 571 padded to 576, head_dim_v 509 padded to 512 (q, k, v copied)"),
        (Problem("forward", "float8_e4m3fn", 72, 72), (80, 80), "head_dim 72 padded to 80 (q, k, v copied)"),
    ],
)  # fmt: skip
def test_a_plan_names_what_is_padded(problem, padded_to, text):
    plan = planning.resolve(problem, planning.gpu("h200"))
    assert (plan.padded_to, plan.padding) == (padded_to, text)


@pytest.mark.parametrize("dims", [(577, 64), (64, 513), (0, 64)])
def test_what_nothing_holds_is_declined(dims):
    answer = planning.resolve(Problem("forward", "bfloat16", *dims), planning.gpu("h200"))
    assert isinstance(answer, Decline) and [reason.code for reason in answer.reasons] == ["head_dim"]


def test_an_audit_and_a_patched_models_rows_name_it():
    import tiny_models
    from transformers import LlamaConfig

    config = LlamaConfig(**tiny_models._TEXT | {"head_dim": 20})
    for module in auditing.plan(config, gpu="h200", dtype="bfloat16"):
        assert module.reasons == [] and len(module.choices) == 2 and all(choice.kernel for choice in module.choices)
        assert all("head_dim 20 padded to 24 (q, k, v" in "; ".join(choice.reasons) for choice in module.choices)
    if emulator.available() is None:
        model = tiny_models._decoder("Llama")(head_dim=20).bfloat16().eval()
        with flashpatch.apply(model, strict=True) as patch, torch.no_grad():
            model(**tiny_models._text())
        for row in patch.report.rows:
            assert (row.copies, row.padded) == (3, {"head_dim 20 padded to 24 (q, k, v copied)": 1})
