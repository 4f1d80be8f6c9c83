"""The operators around the kernels: schemas, autograd, autocast, compile, counting, arguments. No GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashpatch
from flashpatch import counting, emulator, execution, operators, reference
from flashpatch.call import Call
from flashpatch.problem import DeclinedError


@pytest.fixture(autouse=True)
def _quiet():
    counting.reset_counts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def qkv(batch=2, seqlen_q=9, seqlen_k=9, heads=4, heads_kv=2, head_dim=16, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(seqlen_q * 31 + seqlen_k)

    def make(seqlen, heads):
        tensor = torch.randn(batch, seqlen, heads, head_dim, generator=generator).to(dtype)
        return tensor.requires_grad_(grad)

    return make(seqlen_q, heads), make(seqlen_k, heads_kv), make(seqlen_k, heads_kv)


def attention(*args, **kwargs):
    return flashpatch.attention(*args, on_decline="fallback", **kwargs)


def arguments(q, k, v, **changes):
    """The flat arguments of attention_forward, plain attention unless changed."""
    names = [
        "bias",
        "mask",
        "key_ranges",
        "alibi_slopes",
        "sinks",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "rng_state",
        "q_descale",
        "k_descale",
        "v_descale",
    ]
    tensors = [changes.get(name) for name in names]
    scalars = (q.shape[1], k.shape[1], 0.25, -1, changes.get("window_right", -1), 0.0, 0.0, False, False, 0)
    return (q, k, v, *tensors, *scalars)


@pytest.mark.parametrize("case", ["plain", "causal", "bias-sinks"])
def test_opcheck(case):
    q, k, v = qkv(grad=True)
    changes = {"causal": {"window_right": 0}, "bias-sinks": {
        "bias": torch.randn(1, 4, 9, 9, requires_grad=True), "sinks": torch.randn(4, requires_grad=True),
    }}.get(case, {})  # fmt: skip
    torch.library.opcheck(operators.forward_op, arguments(q, k, v, **changes))


def test_gradients_equal_the_reference():
    q, k, v = qkv(dtype=torch.float64, grad=True)
    bias = torch.randn(1, 4, 1, 9, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    inputs = (q, k, v, bias, sinks)
    results = []
    for function in (attention, reference.attention):
        extra = {"return_logsumexp": True} if function is attention else {}
        out, logsumexp = function(q, k, v, causal=True, bias=bias, sinks=sinks, softcap=3.0, **extra)
        loss = (out.double() * torch.linspace(0, 1, out.numel(), dtype=torch.float64).view_as(out)).sum()
        results.append((out, logsumexp, *torch.autograd.grad(loss + logsumexp.double().square().sum(), inputs)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-6, atol=1e-8)


def test_only_the_bias_needs_a_gradient():
    q, k, v = qkv()
    bias = torch.zeros(4, 9, 9, requires_grad=True)
    attention(q, k, v, bias=bias).square().sum().backward()
    assert bias.grad.shape == bias.shape and bias.grad.abs().sum() > 0


def test_nothing_is_kept_under_no_grad():
    q, k, v = qkv(grad=True)
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    assert attention(q, k, v).requires_grad


def test_a_second_derivative_is_refused_by_name():
    q, k, v = qkv(grad=True)
    (gradient,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (gradient.sum() + q.sum()).backward()


def test_compile_sees_one_operator_and_counting_does_not_recompile():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q * 2, k, v, causal=True) + 1, backend=backend, fullgraph=True)
    q, k, v = qkv()
    before = counting.layers[0].calls
    for _ in range(4):
        result = compiled(q, k, v)
    assert len(graphs) == 1 and counting.layers[0].calls == before + 4
    torch.testing.assert_close(result, attention(q * 2, k, v, causal=True) + 1)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:flashpatch", "ignore::DeprecationWarning")
def test_jit_trace_records_the_operator_and_its_lengths():
    """It kept neither the call nor, once it did, the lengths apart: another one was computed with those of the trace."""
    given, other = ([torch.randn(1, n, 2, 16) for _ in range(3)] for n in (9, 9))

    def function(q, k, v):
        return attention(q, k, v, causal=True)

    traced = torch.jit.trace(function, given, check_trace=False)
    assert "flashpatch::attention_forward" in str(traced.graph)
    torch.testing.assert_close(traced(*other), function(*other))
    with pytest.raises(RuntimeError, match="recorded for 9 queries and 9 keys and is given 12 and 12"):
        traced(*(torch.randn(1, 12, 2, 16) for _ in range(3)))


def test_compile_backward_through_aot():
    torch._dynamo.reset()
    q, k, v = qkv(grad=True)
    compiled = torch.compile(lambda q: attention(q, k, v).square().sum(), backend="aot_eager", fullgraph=True)
    (ours,) = torch.autograd.grad(compiled(q), q)
    (eager,) = torch.autograd.grad(attention(q, k, v).square().sum(), q)
    torch.testing.assert_close(ours, eager)


def test_autocast_casts_as_sdpa_does():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v.bfloat16())
        theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert out.dtype == theirs.dtype == torch.bfloat16


def test_mixed_dtypes_take_the_widest():
    q, k, v = qkv()
    out = attention(q, k.bfloat16(), v.half())
    assert out.dtype == torch.float32 and out.isfinite().all()


@pytest.mark.parametrize("autocast", [True, False])
def test_gradients_of_mixed_dtypes_come_in_their_own(autocast):
    q, k, v = (
        tensor.detach().to(dtype).requires_grad_()
        for tensor, dtype in zip(qkv(), (torch.float32, torch.bfloat16, torch.float16), strict=True)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = attention(q, k, v, causal=True)
    assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
    gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert [gradient.dtype for gradient in gradients] == [q.dtype, k.dtype, v.dtype]
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected = torch.autograd.grad(attention(*wide, causal=True).square().sum(), wide)
    for ours, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0.1, atol=0.1 if autocast else 0.02)


def test_autocast_leaves_fp64_alone_as_sdpa_does():
    q = qkv()[0].double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, q, q)))
        out = attention(q, q, q)
    assert out.dtype == theirs.dtype == torch.float64
    torch.testing.assert_close(out, theirs.transpose(1, 2))


@pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
def test_autocast_takes_fp32_to_a_kernel(monkeypatch):
    """fp32 q and k from norms, v in 16 bits: under autocast the 16-bit kernel runs, without it fp32 is declined by name."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    q, k, v = qkv()
    v = v.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flashpatch.attention(q, k, v)
    torch.testing.assert_close(out, flashpatch.attention(q.bfloat16(), k.bfloat16(), v), rtol=0, atol=0)
    launches = flashpatch.stats()["launches"]
    assert launches == {"forward_sm80": 2}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputes_are_counted_apart(reentrant):
    q, k, v = qkv(grad=True)
    out = checkpoint(lambda q, k, v: attention(q, k, v), q, k, v, use_reentrant=reentrant)
    out.sum().backward()
    assert (counting.layers[0].calls, counting.layers[0].recomputes) == (1, 1)


def test_declines_are_errors_by_default_counted_and_warned_once_otherwise():
    q, k, v = qkv()
    with pytest.raises(DeclinedError, match="no_gpu") as error:
        flashpatch.attention(q, k, v)
    assert error.value.decline.reasons[0].code == "no_gpu"
    counting._warned.clear()
    with pytest.warns(UserWarning, match="no_gpu") as caught:
        attention(q, k, v)
        attention(q, k, v)
    assert len(caught) == 1
    assert sum(flashpatch.stats()["declines"].values()) == 2


WARNED = """
import torch, flashpatch
from flashpatch import counting
q = torch.randn(1, 4, 1, 16, requires_grad=True)
out = flashpatch.attention(q, q, q, on_decline="fallback")
counting._warned.clear()
out.sum().backward()
counting._warned.clear()
torch.compile(lambda q: flashpatch.attention(q, q, q, on_decline="fallback"), backend="aot_eager")(q)
"""


def test_a_warning_points_at_the_line_of_a_script(tmp_path):
    """Also where that line is the outermost: in a script itself, through autograd and torch.compile."""
    script = tmp_path / "script.py"
    script.write_text(WARNED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"script\.py:(\d+): UserWarning: flashpatch:", done.stderr) == ["5", "7", "9"]
    assert done.stderr.count("UserWarning: flashpatch:") == 3


def test_strict_by_environment(monkeypatch):
    monkeypatch.setenv("FLASHPATCH_STRICT", "1")
    with pytest.raises(DeclinedError):
        attention(*qkv())


def test_dropout_is_replayed_in_a_recompute():
    gradients = []
    for wrapped in (False, True):
        torch.manual_seed(7)
        q, k, v = qkv(grad=True)

        def run(q, k, v):
            return attention(q, k, v, dropout_p=0.3)

        out = checkpoint(run, q, k, v, use_reentrant=False) if wrapped else run(q, k, v)
        out.square().sum().backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "shape", [(0, 5, 5, 4), (2, 0, 5, 4), (2, 5, 0, 4), (2, 5, 5, 0)], ids=["batch", "queries", "keys", "query heads"]
)
@pytest.mark.parametrize(
    "option", ["plain", "causal", "mask", "bias", "sinks", "alibi_slopes", "seqused_k", "dropout_p"]
)
def test_empty(shape, option):
    q, k, v = qkv(*shape, grad=True)
    given = {
        "plain": {}, "causal": {"causal": True}, "mask": {"mask": torch.ones(1, 1, 1, shape[2], dtype=torch.bool)},
        "bias": {"bias": torch.zeros(shape[3], shape[1], 1, requires_grad=True)},
        "sinks": {"sinks": torch.zeros(shape[3], requires_grad=True)}, "alibi_slopes": {"alibi_slopes": torch.ones(shape[3])},
        "seqused_k": {"seqused_k": torch.full((shape[0],), shape[2], dtype=torch.int32)}, "dropout_p": {"dropout_p": 0.5},
    }[option]  # fmt: skip
    out, logsumexp = attention(q, k, v, **given, return_logsumexp=True)
    assert out.shape == q.shape and not out.any()
    out.sum().backward()
    assert not q.grad.any() and not k.grad.any() and logsumexp.shape == (shape[0], shape[3], shape[1])
    for learned in (given.get("bias"), given.get("sinks")):
        assert learned is None or torch.equal(learned.grad, torch.zeros_like(learned))


BAD = {
    "head-dims": (lambda q, k, v: attention(q, k[..., :8], v), "q has head_dim 16 and k has 8"),
    "heads": (lambda q, k, v: attention(q, k[:, :, [0, 1, 0]], v[:, :, [0, 1, 0]]), "q has 4 heads and k has 3"),
    "lengths": (lambda q, k, v: attention(q, k, v[:, :4]), "may differ in head_dim only"),
    "batch": (lambda q, k, v: attention(q, k[:1], v[:1]), "q has batch 2 and k has 1"),
    "rank": (lambda q, k, v: attention(q[0], k, v), r"\[batch, seqlen, num_heads, head_dim\] is needed"),
    "dtype": (lambda q, k, v: attention(q.int(), k, v), "q has dtype torch.int32"),
    "type": (lambda q, k, v: attention(q.tolist(), k, v), "q is list, not a torch.Tensor"),
    "device": (lambda q, k, v: attention(q, k.to("meta"), v), "k is on meta, q on cpu"),
    "dropout": (lambda q, k, v: attention(q, k, v, dropout_p=1.0), r"dropout_p is 1.0; it must be in \[0, 1\)"),
    "softcap": (lambda q, k, v: attention(q, k, v, softcap=-5.0), "softcap is -5.0"),
    "window": (lambda q, k, v: attention(q, k, v, window_size=(-2, 0)), "window_size is"),
    "mask-dtype": (lambda q, k, v: attention(q, k, v, mask=torch.zeros(9, 9)), "bool is needed"),
    "mask-shape": (lambda q, k, v: attention(q, k, v, mask=torch.ones(3, 9, 9).bool()), "it must broadcast to"),
    "bias-shape": (lambda q, k, v: attention(q, k, v, bias=torch.zeros(9, 8)), "bias has shape"),
    "ranges-dtype": (
        lambda q, k, v: attention(q, k, v, key_ranges=torch.zeros(1, 9, 2).long()),
        "key_ranges has dtype torch.int64; int32 is needed",
    ),
    "sinks": (lambda q, k, v: attention(q, k, v, sinks=torch.zeros(2)), r"\[num_heads_q\] = \[4\]"),
    "alibi": (lambda q, k, v: attention(q, k, v, alibi_slopes=torch.zeros(3)), "alibi_slopes has shape"),
    "on-decline": (lambda q, k, v: flashpatch.attention(q, k, v, on_decline="ignore"), '"error" or "fallback"'),
    "half-varlen": (
        lambda q, k, v: attention(q[0], k[0], v[0], cu_seqlens_q=torch.tensor([0, 9]).int()),
        "given together",
    ),
    "varlen-order": (
        lambda q, k, v: attention(
            q[0], k[0], v[0], cu_seqlens_q=torch.tensor([0, 9, 3]).int(), cu_seqlens_k=torch.tensor([0, 4, 9]).int(),
            max_seqlen_q=9, max_seqlen_k=5,
        ),
        "never decrease",
    ),
    "varlen-mask": (
        lambda q, k, v: attention(
            q[0], k[0], v[0], cu_seqlens_q=torch.tensor([0, 9]).int(), cu_seqlens_k=torch.tensor([0, 9]).int(),
            max_seqlen_q=9, max_seqlen_k=9, mask=torch.ones(9, 9).bool(),
        ),
        "mask cannot be combined with cu_seqlens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named_with_what_is_allowed(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call(*qkv())


def test_all_contradictions_at_once():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"softcap is -1.*dropout_p|dropout_p.*softcap is -1"):
        attention(q, k, v, softcap=-1.0, dropout_p=2.0)


def test_an_unknown_keyword_is_named():
    with pytest.raises(TypeError, match="attn_bias"):
        attention(*qkv(), attn_bias=None)


def test_features_name_what_is_asked():
    q, k, v = qkv()
    call = Call(0.25, 9, 9, window_left=3, window_right=0, softcap=2.0)
    assert execution.features(q, k, v, call) == {"causal", "window", "gqa", "softcap"}


def test_strided_extras_reach_the_kernels_right(monkeypatch):
    """Slopes, sinks and ranges in any strides: kernels read them with a unit one."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    if emulator.available() is not None:
        pytest.skip(str(emulator.available()))
    q, k, v = qkv(dtype=torch.bfloat16)
    every_other = {
        "alibi_slopes": torch.rand(8)[::2],
        "sinks": torch.randn(8)[::2],
        "key_ranges": torch.stack([torch.zeros(9), torch.arange(9) + 1]).int().T[None],
    }
    dense = {name: tensor.contiguous() for name, tensor in every_other.items()}
    for name, tensor in every_other.items():
        assert not tensor.is_contiguous()
        torch.testing.assert_close(
            flashpatch.attention(q, k, v, **{name: tensor}), flashpatch.attention(q, k, v, **{name: dense[name]}),
            rtol=0, atol=0,
        )  # fmt: skip


def test_derivatives_that_do_not_exist_are_refused_not_zero():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (torch.ones_like(q),))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: attention(q, k, v).sum())(q).sum())(q)
    for name, tensor in {
        "q": q,
        "bias": torch.randn(9, 9),
        "sinks": torch.randn(4),
        "alibi_slopes": torch.rand(4),
    }.items():
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            attention(
                **{"q": q, "k": k, "v": v, name: torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(tensor))}
            )


@pytest.mark.parametrize("name", ["mask", "key_ranges", "alibi_slopes", "seqused_k", "cu_seqlens_k"])
def test_what_the_backward_reads_again_must_not_change_before_it(name):
    """As autograd itself says of q, k, v, bias and sinks: a reused buffer of lengths would give wrong gradients, silently."""
    q, k, v = (tensor.requires_grad_() for tensor in qkv())
    rows = q.shape[1]
    given = {
        "mask": torch.ones(rows, k.shape[1], dtype=torch.bool), "alibi_slopes": torch.rand(4),
        "key_ranges": torch.tensor([0, 5], dtype=torch.int32).expand(q.shape[0], rows, 2).clone(),
        "seqused_k": torch.full((q.shape[0],), 5, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 5, k.shape[1]], dtype=torch.int32),
    }[name]  # fmt: skip
    keywords = {name: given}
    if name == "cu_seqlens_k":
        q, k, v = q[0], k[0], v[0]
        keywords |= {"cu_seqlens_q": given.clone(), "max_seqlen_q": rows, "max_seqlen_k": k.shape[0]}
    attention(q, k, v, **keywords).sum().backward()
    out = attention(q, k, v, **keywords)
    given.copy_(given.clone())
    with pytest.raises(RuntimeError, match=f"^{name} of flashpatch attention changed in place.*clone"):
        out.sum().backward()


def test_function_transforms_give_the_gradients_of_backward():
    tensors = [*qkv(), torch.randn(4, 9, 9), torch.randn(4)]

    def loss(q, k, v, bias, sinks):
        out, logsumexp = attention(q, k, v, causal=True, bias=bias, sinks=sinks, return_logsumexp=True)
        return (out.square().sum() + logsumexp.sum()) / 9

    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    every = tuple(range(5))
    for found in (
        torch.func.grad(loss, argnums=every)(*tensors),
        torch.func.vjp(loss, *tensors)[1](torch.ones(())),
        torch.func.jacrev(loss, argnums=every)(*tensors),
    ):
        for ours, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, plain)
    stacked = [torch.stack([tensor, tensor + 1]) for tensor in tensors]
    each = torch.vmap(torch.func.grad(loss, argnums=every))(*stacked)
    values = torch.vmap(loss)(*stacked)
    torch.testing.assert_close(values[0], loss(*tensors))
    for ours, plain in zip(each, expected, strict=True):
        torch.testing.assert_close(ours[0], plain)


@pytest.mark.parametrize(
    "in_dims, keywords, calls",
    [((0, 0, 0), {}, 1), ((3, 0, 1), {"causal": True}, 1), ((0, None, None), {}, 3), ((0, 0, 0), {"sinks": torch.ones(4)}, 3)],
    ids=["all", "other dimensions", "shared keys", "sinks"],
)  # fmt: skip
def test_vmap_is_one_call_where_batches_can_be_joined(in_dims, keywords, calls):
    stacked = [torch.stack([tensor * factor for factor in (1, 2, 3)]) for tensor in qkv(seqlen_k=7)]

    def loss(q, k, v):
        return attention(q, k, v, **keywords).square().sum()

    one = torch.func.grad(loss, argnums=0)
    given = [x[0] if dim is None else x for x, dim in zip(stacked, in_dims, strict=True)]
    each = [one(*(x if dim is None else x[i] for x, dim in zip(given, in_dims, strict=True))) for i in range(3)]
    given = [x if dim is None else x.movedim(0, dim) for x, dim in zip(given, in_dims, strict=True)]
    before = flashpatch.stats()["calls"]
    values = torch.vmap(loss, in_dims=in_dims)(*given)
    assert flashpatch.stats()["calls"] - before == calls and values.shape == (3,)
    torch.testing.assert_close(torch.vmap(one, in_dims=in_dims)(*given), torch.stack(each))


def test_a_bias_that_repeats_itself_and_gets_no_gradient():
    """ALiBi, say: one row of numbers per head, expanded by stride 0, in training."""
    q, k, v = (tensor.requires_grad_() for tensor in qkv())
    row = torch.randn(1, 4, 1, 9)
    found, expected = (
        torch.autograd.grad(attention(q, k, v, bias=bias).square().sum(), (q, k, v))
        for bias in (row.expand(2, 4, 9, 9), row.expand(2, 4, 9, 9).contiguous())
    )
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_wider_bias_keeps_its_precision():
    q, k, v = qkv(dtype=torch.bfloat16)
    bias = 300 + torch.rand(9, 9) - torch.arange(9.0)
    exact, _ = reference.attention(q, k, v, bias=bias)
    assert (attention(q, k, v, bias=bias).double() - exact).abs().max() < 0.02
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    wide = [tensor.double() for tensor in qkv()]
    weights = torch.randn_like(attention(*wide))
    torch.autograd.gradcheck(lambda sinks: (attention(*wide, sinks=sinks) * weights).sum(), sinks)


def test_a_switch_is_on_off_or_an_error(monkeypatch):
    monkeypatch.setenv("FLASHPATCH_STRICT", "yes")
    with pytest.raises(DeclinedError):
        attention(*qkv())
    monkeypatch.setenv("FLASHPATCH_STRICT", "perhaps")
    with pytest.raises(ValueError, match="FLASHPATCH_STRICT='perhaps'"):
        attention(*qkv())


def test_max_seqlen_below_a_sequence_is_named():
    rows, starts = torch.randn(8, 1, 16), torch.tensor([0, 8]).int()
    with pytest.raises(ValueError, match="max_seqlen_q is 3, but cu_seqlens_q has a sequence of 8"):
        attention(rows, rows, rows, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=3, max_seqlen_k=8)
