"""Calls like the one before are recognised without looking at them anew: what may pass as alike, and what must not."""

from decimal import Decimal

import numpy as np
import pytest
import torch

from flashpatch import execution, known_calls, ops, reference, tensor_layouts


def tensors(requires_grad=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 9, 4, 16, generator=generator).to(dtype).requires_grad_(requires_grad) for _ in range(3)]


def transposed(tensor):
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


class Subclass(torch.Tensor):
    pass


def test_tensors_alike_are_recognised_whatever_they_hold():
    alike = tensor_layouts.check(*tensors())
    assert alike(*(tensor + 1 for tensor in tensors()))
    assert not tensor_layouts.never(*tensors())


@pytest.mark.parametrize(
    "other",
    [
        lambda q: q.double(),
        lambda q: q[:, :8],
        lambda q: q[None],
        transposed,
        lambda q: q.to("meta"),
        lambda q: q.clone().requires_grad_(),
        lambda q: torch.nn.Parameter(q, requires_grad=False),
        lambda q: q.as_subclass(Subclass),
        lambda q: None,
    ],
    ids=["dtype", "size", "dimensions", "strides", "device", "gradient", "parameter", "subclass", "no tensor"],
)
def test_other_tensors_are_not(other):
    q, k, v = tensors()
    alike = tensor_layouts.check(q, k, v)
    assert not alike(other(q), k, v)
    assert not alike(q, k, other(v))


def test_other_modes_are_not():
    q, k, v = tensors()
    alike = tensor_layouts.check(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert not alike(q, k, v)
    seen = []
    torch.func.vmap(lambda q: seen.append(alike(q, k, v)) or q)(q[None])
    with torch.inference_mode():
        assert not alike(q + 0, k, v)
    assert seen == [False]


@pytest.fixture
def checks(monkeypatch):
    """Calls on a CPU that are remembered as a GPU's are, and how often their arguments were checked."""
    count = [0]
    check = ops.check

    def counted(*args, **kwargs):
        count[0] += 1
        return check(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(ops, "check", counted)
    known_calls.forget()
    monkeypatch.setattr(execution, "_forwards", execution._Prepared())
    monkeypatch.setattr(execution, "_backwards", execution._Prepared())
    yield count
    known_calls.forget()


def attention(q, k, v, **options):
    return ops.attention(q, k, v, on_decline="fallback", **options)


@pytest.mark.filterwarnings("ignore:flashpatch")
def test_what_differs_is_computed_as_asked(checks):
    """Each call twice in turn, so that every one comes after another kind and after its own."""
    q, k, v = tensors()
    calls = {
        "plain": ((q, k, v), {}),
        "causal": ((q, k, v), {"causal": True}),
        "window": ((q, k, v), {"window_size": [3, 0]}),
        "scale": ((q, k, v), {"softmax_scale": 0.1}),
        "softcap": ((q, k, v), {"softcap": 2.0}),
        "strides": (tuple(map(transposed, (q, k, v))), {}),
        "length": ((q, k[:, :5], v[:, :5]), {}),
        "dtype": (tuple(tensor.double() for tensor in (q, k, v)), {}),
    }
    for _ in range(3):
        for inputs, options in calls.values():
            for _ in range(2):
                out = attention(*inputs, **options)
                torch.testing.assert_close(out, reference.attention(*inputs, **options)[0].to(out.dtype))
    assert checks == [len(calls)], "each kind is checked once"


@pytest.mark.filterwarnings("ignore:flashpatch")
def test_eight_bits_have_no_gradients_whatever_came_before(checks):
    q, k, v = (tensor.to(torch.float8_e4m3fn) for tensor in tensors())
    q.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not attention(q, k, v).requires_grad
        with pytest.raises(ValueError, match="q requires a gradient"):
            attention(q, k, v)


@pytest.mark.filterwarnings("ignore:flashpatch")
def test_gradients_follow_the_mode_and_the_tensors(checks):
    plain, training = tensors(), tensors(requires_grad=True)
    for _ in range(3):
        with torch.no_grad():
            assert not attention(*training).requires_grad
        assert not attention(*plain).requires_grad
        out, logsumexp = attention(*training, return_logsumexp=True)
        assert out.requires_grad and logsumexp.requires_grad
        gradients = torch.autograd.grad(attention(*training, causal=True).square().sum(), training)
        expected = torch.autograd.grad(reference.attention(*training, causal=True)[0].square().sum(), training)
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs.to(ours.dtype))


@pytest.mark.filterwarnings("ignore:flashpatch")
def test_switches_of_torch_are_seen(checks, monkeypatch):
    """Whether products may be TF32, whether algorithms must be deterministic: both may change between two calls."""
    q, k, v = tensors()
    seen = []
    decide = execution.decide

    def watched(direction, q, k, v, call):
        seen.append((execution.takes_tf32(q.dtype), call.deterministic))
        return decide(direction, q, k, v, call)

    monkeypatch.setattr(execution, "decide", watched)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for tf32, deterministic in ((False, False), (True, False), (False, False), (False, True), (True, True)):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.use_deterministic_algorithms(deterministic)
            attention(q, k, v)
            attention(q, k, v)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
        torch.use_deterministic_algorithms(False)
    assert seen == [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.filterwarnings("ignore:flashpatch")
def test_autocast_and_transforms_go_around_what_is_remembered(checks):
    q, k, v = tensors()
    attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, v).dtype == torch.bfloat16
    gradient = torch.func.grad(lambda q: attention(q, k, v).sum())(q)
    assert gradient.shape == q.shape
    assert attention(q, k, v).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:flashpatch")
def test_wrong_arguments_are_still_named_after_right_ones(checks):
    q, k, v = tensors()
    attention(q, k, v)
    for wrong in ({"window_size": (1,)}, {"window_size": None}, {"softmax_scale": "a"}, {"softcap": -1.0}):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            attention(q, k, v, **wrong)
    with pytest.raises((ValueError, TypeError), match=r"\bk\b"):
        attention(q, None, v)


REFUSED = [
    ("window_size", (2, 0), (2.0, 0.0)), ("window_size", (2, 0), torch.tensor([2, 0])), ("window_size", (1, 0), (True, False)),
    ("window_size", (2, 0), (Decimal(2), 0)), ("window_size", (0, 1), range(2)), ("window_size", (2, 0), iter((2, 0))),
    ("softcap", 2.0, Decimal(2)), ("softcap", 2.0, 2 + 0j), ("softmax_scale", 0.5, Decimal("0.5")),
    ("dropout_p", 0.0, 0j), ("dropout_p", 0.0, torch.tensor([0.0, 0.0])), ("causal", True, torch.tensor(True)),
    ("deterministic", True, "no"), ("deterministic", True, torch.tensor([1, 0])),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:flashpatch")
@pytest.mark.parametrize("name, right, wrong", REFUSED, ids=[f"{name}-{wrong!r:.20}" for name, _, wrong in REFUSED])
def test_what_is_refused_is_refused_after_its_equal_too(checks, name, right, wrong):
    """2 == 2.0 == Decimal(2), and they have one hash: equality alone would let the second pass where the first had been."""
    q, k, v = tensors()
    for _ in range(3):
        attention(q, k, v, **{name: right})
    with pytest.raises(ValueError, match=f"{name} is "):
        attention(q, k, v, **{name: wrong})


@pytest.mark.filterwarnings("ignore:flashpatch")
@pytest.mark.parametrize("recognised", [False, True], ids=["looked at", "recognised"])
@pytest.mark.parametrize(
    "name, plain, other",
    [("window_size", (3, 0), [np.int64(3), np.int32(0)]), ("window_size", (3, 0), [3, 0]), ("causal", True, 1),
     ("causal", True, np.True_), ("softcap", 1.0, True), ("softcap", 1.0, 1), ("softcap", 2.0, np.float32(2)),
     ("softmax_scale", 1.0, 1), ("dropout_p", 0.0, False), ("dropout_p", 0.0, np.float64(0)), ("deterministic", True, 1)],
    ids=str,
)  # fmt: skip
def test_what_is_taken_means_the_same_before_and_after(checks, name, plain, other, recognised):
    q, k, v = tensors()
    expected = attention(q, k, v, **{name: plain}) if recognised else None
    for _ in range(2):
        out = attention(q, k, v, **{name: other})
    assert torch.equal(out, attention(q, k, v, **{name: plain}) if expected is None else expected)


def test_another_torchs_guards_are_done_without(monkeypatch):
    monkeypatch.setattr(tensor_layouts, "_guards", lambda tensors: None)
    assert tensor_layouts.check(*tensors()) is tensor_layouts.never
