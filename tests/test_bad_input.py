"""Arguments that contradict each other or make no sense: named with their value and what is allowed, before any launch.

What only a device knows, the values inside offsets, lengths and ranges, is clamped where it is used: never read beyond a
tensor's end, nor waited for.
"""

from __future__ import annotations

import pytest
import torch

import flashpatch
from flashpatch import ops, reference
from flashpatch.call import Call


def qkv(batch=2, seqlen_q=6, seqlen_k=6, heads=4, heads_kv=2, dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, seqlen_q, heads, dim), (batch, seqlen_k, heads_kv, dim), (batch, seqlen_k, heads_kv, dim)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


PACKED = {"cu_seqlens_q": offsets(0, 2, 6), "cu_seqlens_k": offsets(0, 2, 6), "max_seqlen_q": 4, "max_seqlen_k": 4}
BAD = {
    "mask-list": ({"mask": [[True]]}, r"mask is list, not a torch\.Tensor"),
    "bias-number": ({"bias": 1.0}, r"bias is float, not a torch\.Tensor"),
    "window-none": ({"window_size": None}, r"window_size is None; two numbers of keys \(left, right\)"),
    "window-number": ({"window_size": 4}, r"window_size is 4; two numbers"),
    "window-fraction": ({"window_size": (1.5, 0)}, r"window_size is \(1\.5, 0\); two numbers"),
    "window-negative": ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\).*-1 for unlimited"),
    "causal-window-right": (
        {"causal": True, "window_size": (3, 2)},
        r"causal is True.*window_size is \(3, 2\).*causal=False.*window_size=\(3, 0\) or \(3, -1\)",
    ),
    "window-mask": (
        {"window_size": (1, 0), "mask": torch.ones(6, 6, dtype=torch.bool).tril().triu(-3)},
        r"mask is a window of its own, \(3, 0\), and window_size with causal is \(1, 0\); pass one of them",
    ),
    "window-mask-right": (
        {"window_size": (-1, 2), "mask": torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()}, r"window of its own, \(-1, 0\)",
    ),
    "causal-mask": ({"causal": True, "mask": torch.ones(6, 6, dtype=torch.bool).tril(2)}, r"its own, \(-1, 2\)"),
    "causal-word": ({"causal": "yes"}, r"causal is 'yes'; True or False"),
    "dropout-one": ({"dropout_p": 1.0}, r"dropout_p is 1\.0; it must be in \[0, 1\)"),
    "dropout-negative": ({"dropout_p": -0.1}, r"dropout_p is -0\.1"),
    "dropout-none": ({"dropout_p": None}, r"dropout_p is None; it must be in \[0, 1\)"),
    "dropout-nan": ({"dropout_p": float("nan")}, r"dropout_p is nan"),
    "softcap-negative": ({"softcap": -1.0}, r"softcap is -1\.0; it must be finite and positive"),
    "softcap-tensor": ({"softcap": torch.ones(3)}, r"softcap is Tensor.*number"),
    "scale-nan": ({"softmax_scale": float("nan")}, r"softmax_scale is nan; it must be finite"),
    "scale-beyond-fp32": ({"softmax_scale": 1e39}, r"softmax_scale is 1e\+39; it must be finite in fp32"),
    "scale-beyond-fp64": ({"softmax_scale": 10**400}, r"softmax_scale is an int of 1329 bits; it must be finite in fp32"),
    "softcap-beyond-fp32": ({"softcap": 1e39}, r"softcap is 1e\+39; it must be finite and positive in fp32"),
    "scale-word": ({"softmax_scale": "auto"}, r"softmax_scale is 'auto'"),
    "alibi-shape": ({"alibi_slopes": torch.ones(3, 4)}, r"alibi_slopes has shape \[3, 4\]; \[4\] or \[batch, 4\] = \[2, 4\]"),
    "alibi-rank": ({"alibi_slopes": torch.ones(1, 2, 4)}, r"alibi_slopes has shape \[1, 2, 4\]"),
    "alibi-dtype": ({"alibi_slopes": torch.ones(4, dtype=torch.int64)}, r"alibi_slopes has dtype torch\.int64; a floating"),
    "alibi-gradient": (
        {"alibi_slopes": torch.ones(4, requires_grad=True)}, r"alibi_slopes requires a gradient.*detach.*bias",
    ),
    "sinks-length": ({"sinks": torch.ones(3)}, r"sinks has shape \[3\]; \[num_heads_q\] = \[4\]"),
    "sinks-dtype": ({"sinks": torch.ones(4, dtype=torch.int32)}, r"sinks has dtype torch\.int32; a floating"),
    "bias-shape": ({"bias": torch.zeros(3, 6, 6)}, r"bias has shape \[3, 6, 6\]; it must broadcast to .*\[2, 4, 6, 6\]"),
    "mask-dtype": ({"mask": torch.zeros(6, 6)}, r"mask has dtype torch\.float32; bool is needed"),
    "mask-shape": ({"mask": torch.ones(2, 5, 6, dtype=torch.bool)}, r"mask has shape \[2, 5, 6\]"),
    "bias-dtype": ({"bias": torch.ones(6, 6, dtype=torch.bool)}, r"bias has dtype torch\.bool.*goes to mask"),
    "bias-meta": ({"bias": torch.zeros(6, 6, device="meta")}, r"bias is on meta, q on cpu"),
    "mask-sparse": ({"mask": torch.ones(6, 6, dtype=torch.bool).to_sparse()}, r"mask is a sparse_coo tensor; a dense"),
    "ranges-shape": ({"key_ranges": torch.zeros(2, 6, dtype=torch.int32)}, r"key_ranges has shape \[2, 6\]"),
    "seqused-length": ({"seqused_k": offsets(1, 2, 3)}, r"seqused_k has 3 entries for a batch of 2"),
    "seqused-negative": ({"seqused_k": offsets(-1, 2)}, r"seqused_k is \[-1, 2\]; numbers of keys are needed, 0 to \d+"),
    "seqused-beyond": ({"seqused_k": offsets(999, 2)}, r"seqused_k is \[999, 2\]; numbers of keys are needed, 0 to \d+"),
    "max-seqlen-alone": ({"max_seqlen_q": 4}, r"belong to cu_seqlens_q"),
    "decline-word": ({"on_decline": "ignore"}, r"on_decline is 'ignore'"),
}  # fmt: skip
BAD_PACKED = {
    "decreasing": ({"cu_seqlens_q": offsets(0, 5, 3)}, r"cu_seqlens_q is \[0, 5, 3\].*never decrease"),
    "late-start": ({"cu_seqlens_k": offsets(1, 2, 6)}, r"cu_seqlens_k is \[1, 2, 6\].*start at 0"),
    "beyond-the-end": ({"cu_seqlens_k": offsets(0, 2, 9)}, r"cu_seqlens_k is \[0, 2, 9\].*end at most at 6"),
    "another-batch": ({"cu_seqlens_k": offsets(0, 6)}, r"cu_seqlens_k has 2 entries"),
    "too-short-a-longest": ({"max_seqlen_q": 3}, r"max_seqlen_q is 3, but cu_seqlens_q has a sequence of 4"),
    "longest-missing": ({"max_seqlen_q": None}, r"cu_seqlens needs max_seqlen_q and max_seqlen_k"),
    "longest-a-tensor": ({"max_seqlen_q": torch.tensor(4)}, r"max_seqlen_q is Tensor; an int"),
    "dtype": ({"cu_seqlens_q": torch.tensor([0, 2, 6])}, r"cu_seqlens_q is torch\.int64.*int32 vector"),
    "list": ({"cu_seqlens_q": [0, 2, 6]}, r"cu_seqlens_q is list, not a torch\.Tensor"),
    "mask": ({"mask": torch.ones(6, 6, dtype=torch.bool)}, r"mask cannot be combined with cu_seqlens"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    keywords, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        flashpatch.attention(*qkv(), **{"on_decline": "fallback", **keywords})


AGREEING = {
    "documents": {"window_size": (1, 0), "mask": torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()},
    "documents of a token": {"window_size": (1, 0), "mask": torch.eye(6, dtype=torch.bool)},
    "causal": {"window_size": (1, 0), "mask": torch.ones(6, 6, dtype=torch.bool).tril()},
    "the same window": {"window_size": (1, 0), "mask": torch.ones(6, 6, dtype=torch.bool).tril().triu(-1)},
    "padding, its own": {"window_size": (1, 0), "mask": (torch.arange(6) > 1).expand(2, 1, 6, 6).contiguous()},
    "padding": {"window_size": (1, 0), "mask": torch.ones(2, 1, 1, 6, dtype=torch.bool)},
    "padding, expanded": {"window_size": (1, 0), "mask": torch.ones(2, 1, 1, 6, dtype=torch.bool).expand(2, 1, 6, 6)},
    "queries": {"window_size": (1, 0), "mask": torch.arange(6)[:, None] > 2},
    "causal alone": {"causal": True, "mask": torch.ones(6, 6, dtype=torch.bool)},
    "causal, left": {"causal": True, "window_size": (2, -1)},
    "causal, left and none": {"causal": True, "window_size": (2, 0)},
    "wide": {"window_size": (5, 5), "mask": torch.ones(6, 6, dtype=torch.bool)},
    "unused keys": {
        "window_size": (-1, 0), "mask": torch.ones(6, 6, dtype=torch.bool).tril(-4) | torch.eye(6, dtype=torch.bool)[5],
        "seqused_k": offsets(2, 2),
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:flashpatch")
@pytest.mark.parametrize("name", AGREEING)
def test_what_agrees_is_intersected(name):
    out = flashpatch.attention(*qkv(), **AGREEING[name], on_decline="fallback")
    expected, _ = reference.attention(*qkv(), **AGREEING[name])
    torch.testing.assert_close(out, expected.float())


@pytest.mark.filterwarnings("ignore:flashpatch")
def test_a_mask_that_a_window_narrows_is_no_error_where_nobody_looks():
    """In a compiled graph, as on a GPU, the two are intersected; so they are where a model's mask means both."""
    given = {"window_size": (1, 0), "mask": torch.ones(6, 6, dtype=torch.bool).tril().triu(-3)}
    compiled = torch.compile(
        lambda q, k, v: flashpatch.attention(q, k, v, **given, on_decline="fallback"), backend="aot_eager"
    )
    expected = reference.attention(*qkv(), **given)[0].float()
    torch.testing.assert_close(compiled(*qkv()), expected)
    call = Call(0.25, 6, 6, window_left=1, window_right=0, mask=given["mask"][None, None])
    torch.testing.assert_close(ops.attend(*qkv(), call, 0)[0], expected)


@pytest.mark.parametrize("name", BAD_PACKED)
def test_bad_packing_is_named(name):
    keywords, message = BAD_PACKED[name]
    q, k, v = (x[0] for x in qkv())
    with pytest.raises(ValueError, match=message):
        flashpatch.attention(q, k, v, **{**PACKED, "on_decline": "fallback", **keywords})


def test_bad_tensors_are_named():
    q, k, v = qkv()
    for bad, message in (
        ((q.to_sparse(), k, v), r"q is a sparse_coo tensor; a dense \(strided\) one is needed"),
        ((torch.nested.nested_tensor(list(q), layout=torch.jagged), k, v), r"q is a jagged tensor.*cu_seqlens"),
        ((torch.nested.nested_tensor(list(q)), k, v), r"q is a nested tensor.*cu_seqlens"),
        ((q.tolist(), k, v), r"q is list, not a torch\.Tensor"),
        ((q.int(), k, v), r"q has dtype torch\.int32; one of float16"),
        ((q, k.to("meta"), v), r"k is on meta, q on cpu"),
        ((q[0], k, v), r"q has shape \[6, 4, 16\]; \[batch, seqlen, num_heads, head_dim\]"),
    ):
        with pytest.raises(ValueError, match=message):
            flashpatch.attention(*bad, on_decline="fallback")


OPTIONS = {
    "plain": {},
    "everything": {
        "causal": True, "softcap": 2.0, "dropout_p": 0.3, "mask": torch.ones(6, 6, dtype=torch.bool),
        "bias": torch.zeros(4, 6, 1), "sinks": torch.zeros(4), "alibi_slopes": torch.ones(4),
        "seqused_k": torch.tensor([6, 1], dtype=torch.int32),
    },
    "factors": {"q_descale": torch.ones(2, 1)},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:flashpatch")
@pytest.mark.parametrize(
    "dtypes, options",
    [("float32", "plain"), ("bfloat16", "everything"), ("float64", "everything"), ("float16 float32 float32", "plain"),
     ("float8_e4m3fn", "factors")],
)  # fmt: skip
def test_tensors_without_values_give_shapes(dtypes, options):
    """As the call with values does, forward and backward."""
    names = dtypes.split() * (3 if " " not in dtypes else 1)
    described = []
    for device in ("cpu", "meta"):
        inputs = [x.to(getattr(torch, name)).to(device) for x, name in zip(qkv(), names, strict=True)]
        given = {
            name: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for name, x in OPTIONS[options].items()
        }
        learned = [] if "float8" in dtypes else [*inputs, *(given[name] for name in ("bias", "sinks") if name in given)]
        for tensor in learned:
            tensor.requires_grad_()
        results = flashpatch.attention(*inputs, **given, return_logsumexp=True, on_decline="fallback")
        if learned:
            results += torch.autograd.grad(results[0].float().sum(), learned)
        assert {x.device.type for x in results} == {device}
        described.append([(x.shape, x.dtype) for x in results])
    assert described[0] == described[1]


def test_all_faults_are_named_at_once():
    with pytest.raises(ValueError, match=r"(?s)dropout_p is 2\.0.*softcap is -1\.0"):
        flashpatch.attention(*qkv(), dropout_p=2.0, softcap=-1.0)
    with pytest.raises(TypeError, match="softmax_sclae"):
        flashpatch.attention(*qkv(), softmax_sclae=1.0)


# ---- values only a device knows: the seam and compiled graphs reach the operator without them being looked at ----

WILD = (-(2**31), -7, 0, 3, 1000, 2**31 - 1)
# Of 12 rows, two sequences: starts beyond the end beside queries, ends beyond it, and starts that fall.
WILD_OFFSETS = [
    (0, 6, 12),
    (0, 1000, 2**31 - 1),
    (1000, 2**31 - 1, 3),
    (-7, 3, 1000),
    (0, 9, 4),
    (0, 9, 1000),
    (2**31 - 1, -(2**31), 12),
]


def wild(*shape):
    index = torch.randint(0, len(WILD), shape, generator=torch.Generator().manual_seed(sum(shape)))
    return torch.tensor(WILD, dtype=torch.int32)[index]


def wild_calls(hopper):
    if not hopper:
        for turn in range(4):
            yield {"key_ranges": wild(2, 6, 2).roll(turn, 0)}
            yield {"seqused_k": wild(2).roll(turn, 0)}
    yield {"seqused_k": offsets(1000, -7), "window_right": 0, "window_left": 3}
    for packed_q, packed_k in zip(WILD_OFFSETS, WILD_OFFSETS[1:] + WILD_OFFSETS[:1], strict=True):
        yield {"cu_seqlens_q": offsets(*packed_q), "cu_seqlens_k": offsets(*packed_k)}
        yield {
            "cu_seqlens_q": offsets(0, 6, 12),
            "cu_seqlens_k": offsets(*packed_k),
            "window_right": 0,
            "deterministic": True,
        }


WHERE = {
    "fallback": (None, torch.float32),
    "emulated": ("ampere", torch.bfloat16),
    "emulated-fp32": ("ampere", torch.float32),
    "hopper": ("hopper", torch.bfloat16),
    "hopper-8-bits": ("hopper", torch.float8_e4m3fn),
}


@pytest.mark.parametrize("where", WHERE)
def test_wild_values_are_never_followed_out_of_bounds(where, monkeypatch):
    """The emulator stops a kernel that reads or writes beyond a tensor; torch itself does for the fallback."""
    generation, dtype = WHERE[where]
    if generation:
        monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
        monkeypatch.setenv("FLASHPATCH_GENERATION", generation)
    for extra in wild_calls(generation == "hopper"):
        inputs = [x.to(dtype) for x in qkv(dim=64 if generation == "hopper" else 16)]
        if "cu_seqlens_q" in extra:
            inputs = [x.flatten(0, 1) for x in inputs]
        if dtype.itemsize > 1:
            inputs = [x.requires_grad_() for x in inputs]
        out, _ = ops.attend(*inputs, Call(0.25, 6, 6, **extra), 0, strict=generation is not None)
        assert out.shape == inputs[0].shape
        if dtype.itemsize > 1:
            out.float().sum().backward()
            assert all(x.grad.shape == x.shape for x in inputs), extra


def test_starts_that_fall_hold_nobody_up(monkeypatch):
    """The fifth sequence begins before the third, so nobody is dealt key block 3 of the second, for which block 2 would wait."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    monkeypatch.setenv("FLASHPATCH_GENERATION", "hopper")
    packed = {"cu_seqlens_q": offsets(*range(9)), "cu_seqlens_k": offsets(0, 0, 400, 400, 0, 0, 0, 0, 400)}
    q, k, v = (torch.randn(rows, 1, 64).bfloat16().requires_grad_() for rows in (8, 400, 400))
    out, _ = ops.attend(q, k, v, Call(0.125, 1, 400, deterministic=True, **packed), 0, strict=True)
    out.float().sum().backward()
