"""q, k and v in float8_e4m3fn: what the call says, the fallback, the kernels in the emulator, and the emulator's own numbers."""

import math
import struct

import pytest
import torch
from click.testing import CliRunner

import flashpatch
from flashpatch import cases, emulator, fallback, operators, planning, reference, tolerance
from flashpatch.call import Call
from flashpatch.problem import Config, DeclinedError, Problem

EIGHT = torch.float8_e4m3fn
needs_emulator = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))


def qkv(seqlen_q=9, seqlen_k=13, heads=4, heads_kv=2, head_dim=64, batch=2, scale=1.0):
    generator = torch.Generator().manual_seed(seqlen_q * 31 + seqlen_k)
    shapes = ((batch, seqlen_q, heads, head_dim), *((batch, seqlen_k, heads_kv, head_dim),) * 2)
    return tuple((torch.randn(shape, generator=generator) * scale).to(EIGHT) for shape in shapes)


def descales(batch=2, heads_kv=2):
    generator = torch.Generator().manual_seed(5)
    return {f"{name}_descale": torch.rand(batch, heads_kv, generator=generator) + 0.5 for name in "qkv"}


def wide(q, k, v, q_descale, k_descale, v_descale):
    """The numbers that 8 bits stand for, in fp64."""
    group = q.shape[2] // k.shape[2]
    factors = (q_descale.repeat_interleave(group, 1), k_descale, v_descale)
    return [
        tensor.double() * factor.double()[:, None, :, None] for tensor, factor in zip((q, k, v), factors, strict=True)
    ]


# ---- what the call says ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: ((q.float(), k.float(), v.float()), descales()), "q_descale belongs to q, k and v in float8_e4m3fn"),
        (lambda q, k, v: ((q, k.to(torch.bfloat16), v), {}), "float8_e4m3fn is taken for all three or none"),
        (lambda q, k, v: ((q, k, v), {"v_descale": torch.ones(3, 2)}), "v_descale is torch.float32 [3, 2]"),
        (lambda q, k, v: ((q, k, v), {"k_descale": torch.ones(2, 2).half()}), "k_descale is torch.float16"),
        (lambda q, k, v: ((q, k, v), {"q_descale": -torch.ones(2, 2)}), "factors must be finite and not negative"),
        (lambda q, k, v: ((q, k, v), {"v_descale": torch.full((2, 2), torch.inf)}), "v_descale has the value inf"),
        (lambda q, k, v: ((q, k, v), {"bias": torch.zeros(1, 1, 1, 1, requires_grad=True)}), "bias requires a gradient"),
        (lambda q, k, v: ((q, k, v), {"bias": torch.zeros(1, 1, 1, 1).to(q.dtype)}), "bias has dtype torch.float8_e4m3fn"),
        (lambda q, k, v: ((q, k, v), {"q_descale": 0.5}), "q_descale is float, not a torch.Tensor"),
        (lambda q, k, v: ((q, k, v), {"sinks": torch.zeros(4, requires_grad=True)}), "sinks requires a gradient"),
        (lambda q, k, v: ((q.requires_grad_(), k, v), {}), "q requires a gradient"),
    ],
    ids=["other-dtype", "mixed", "shape", "half", "negative", "infinite", "bias-gradient", "bias-dtype", "number", "sinks-gradient", "gradient"],
)  # fmt: skip
def test_what_cannot_be_is_named(change, message):
    tensors, keywords = change(*qkv())
    with pytest.raises(ValueError) as error:
        flashpatch.attention(*tensors, **keywords, on_decline="fallback")
    assert message in str(error.value)


def test_there_is_no_backward():
    q, k, v = qkv()
    call = Call(0.1, 9, 13)
    out, logsumexp = fallback.forward(q, k, v, call)
    with pytest.raises(TypeError, match="forward only"):
        fallback.backward(out, None, q, k, v, out, logsumexp, call)


@pytest.mark.filterwarnings("ignore")
def test_factors_are_looked_at_where_they_are_there():
    q, k, v = qkv()
    with flashpatch.trace(), pytest.raises(ValueError, match="finite and not negative"):
        flashpatch.attention(q, k, v, k_descale=-torch.ones(2, 2), on_decline="fallback")

    def one(q, k, v, factor):
        return flashpatch.attention(q[None], k[None], v[None], q_descale=factor, on_decline="fallback")[0]

    factors = torch.rand(2, 2)
    together = torch.func.vmap(one)(q, k, v, factors)
    assert torch.equal(together, torch.stack([one(*row) for row in zip(q, k, v, factors, strict=True)]))


@pytest.mark.parametrize(
    ("gpu", "problem", "code"),
    [
        ("h200", Problem("backward", "float8_e4m3fn", 64, 64), "dtype"),
        ("h200", Problem("forward", "float8_e4m3fn", 257, 257), "head_dim"),
        ("h200", Problem("forward", "float8_e4m3fn", 64, 64, frozenset({"bias"})), "bias"),
        ("rtx 4090", Problem("forward", "float8_e4m3fn", 64, 64), "dtype"),
    ],
)
def test_what_no_kernel_takes_is_declined_by_name(gpu, problem, code):
    decline = planning.resolve(problem, planning.gpu(gpu))
    assert code in {reason.code for reason in decline.reasons}


def test_shapes_without_values():
    """Under torch.compile and on the meta device nothing is computed; out is bfloat16 there too."""
    q, k, v = (tensor.to("meta") for tensor in qkv())
    out, logsumexp = operators.forward_op(q, k, v, *operators.flat(Call(0.1, 9, 13)), False, 0)
    assert (out.dtype, out.shape) == (torch.bfloat16, q.shape) and logsumexp.dtype == torch.float32


@pytest.mark.parametrize("command", [["verify", "gpt2"], ["audit", "gpt2"], ["bench", "--features"]], ids=" ".join)
def test_models_and_feature_costs_have_none(command):
    from flashpatch import cli

    result = CliRunner().invoke(cli.main, [*command, "--dtype", "fp8"])
    assert result.exit_code == (4 if command[0] == "bench" and not torch.cuda.is_available() else 2)


# ---- computed ----


@pytest.mark.parametrize("size", ["batch", "seqlen_q", "seqlen_k", "heads"])
def test_nothing_times_factors_is_nothing(size):
    q, k, v = qkv(**{size: 0})
    factors = descales(batch=k.shape[0])
    out = flashpatch.attention(q, k, v, **factors, causal=True, on_decline="fallback")
    assert out.shape == q.shape and out.dtype == torch.bfloat16 and not out.any()
    starts = {name: torch.arange(k.shape[0] + 1, dtype=torch.int32) * t.shape[1] for name, t in (("q", q), ("k", k))}
    packed = flashpatch.attention(
        *(tensor.flatten(0, 1) for tensor in (q, k, v)), **factors, cu_seqlens_q=starts["q"], cu_seqlens_k=starts["k"],
        max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1], on_decline="fallback",
    )  # fmt: skip
    assert packed.shape == q.flatten(0, 1).shape and not packed.any()


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"causal": True, "softcap": 3.0},
        {"window_size": (5, 2), "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"seqused_k": torch.tensor([7, 0], dtype=torch.int32)},
    ],
    ids=["full", "causal-softcap", "window-sinks", "seqused"],
)
def test_the_fallback_computes_what_8_bits_stand_for(keywords):
    q, k, v = qkv()
    out, logsumexp = flashpatch.attention(
        q, k, v, **descales(), **keywords, return_logsumexp=True, on_decline="fallback"
    )
    exact, exact_logsumexp = reference.attention(*wide(q, k, v, **descales()), **keywords)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(logsumexp.double(), exact_logsumexp, rtol=1e-5, atol=1e-5)


def test_the_fallback_takes_packed_sequences():
    case = cases.Case(Problem("forward", "float8_e4m3fn", 64, 64, frozenset({"varlen", "gqa"})), 2, 20, 30, 4, 2)
    inputs = cases.make_inputs(case, "cpu", 0)
    out, _ = fallback.forward(inputs.q, inputs.k, inputs.v, inputs.call)
    lengths = ("max_seqlen_q", "max_seqlen_k")
    exact, _ = reference.attention(
        inputs.q, inputs.k, inputs.v, **{n: x for n, x in inputs.keywords.items() if n not in lengths}
    )
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    monkeypatch.setenv("FLASHPATCH_GENERATION", "hopper")


def close(out, exact, eager):
    outcome = tolerance.compare(out, eager, exact)
    assert outcome.ok, outcome.message("out")


@needs_emulator
def test_a_call_runs_on_the_kernels_and_factors_broadcast(emulated):
    before = flashpatch.stats()["launches"]
    q, k, v = qkv()
    one, row = torch.tensor(0.25), torch.tensor([0.5, 2.0])
    out = flashpatch.attention(q, k, v, q_descale=one, v_descale=row)
    full = {"q_descale": one.expand(2, 2), "k_descale": torch.ones(2, 2), "v_descale": row.expand(2, 2)}
    exact, _ = reference.attention(*wide(q, k, v, **full))
    close(out, exact, reference.attention(q, k, v, **full, upcast=False)[0])
    launches = flashpatch.stats()["launches"]
    assert launches["forward_sm90"] == before.get("forward_sm90", 0) + 1
    with pytest.raises(DeclinedError, match="bias"):
        flashpatch.attention(q, k, v, bias=torch.zeros(1, 1, 9, 13))


@needs_emulator
@pytest.mark.parametrize("factor", [1e-20, 5e-4, 1.0, 30.0, 1e19])
@pytest.mark.parametrize("softcap", [1e-3, 5.0, 50.0, 1e6])
def test_a_softcap_goes_with_factors_of_any_size(emulated, softcap, factor):
    """They go into the coefficients of its polynomial, which neither underflow to a NaN of hidden scores nor overflow."""
    q, k, v = qkv(seqlen_q=70, seqlen_k=70)
    factors = {
        "q_descale": torch.full((2, 2), factor),
        "k_descale": torch.full((2, 2), factor),
        "v_descale": torch.ones(2, 2),
    }
    out = flashpatch.attention(
        q, k, v, causal=True, softcap=softcap, q_descale=factors["q_descale"], k_descale=factors["k_descale"]
    )
    options = {**factors, "window_size": (-1, 0), "softcap": softcap}
    exact, _ = reference.attention(*wide(q, k, v, **factors), window_size=(-1, 0), softcap=softcap)
    close(out, exact, reference.attention(q, k, v, **options, upcast=False)[0])


@needs_emulator
@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_factors_of_zero_hide_nothing(emulated, softcap):
    """Those of a tensor of zeros: all scores are 0, and hidden ones still hidden."""
    q, k, v = qkv()
    out = flashpatch.attention(q, k, v, causal=True, softcap=softcap, q_descale=torch.zeros(()))
    exact, _ = reference.attention(q.double() * 0, k.double(), v.double(), causal=True)
    close(out, exact, exact.to(torch.bfloat16))


@needs_emulator
@pytest.mark.parametrize("softcap", [0.0, 1e-3, 50.0, 1e9])
def test_factors_beyond_fp32_leave_a_product_of_0_alone(emulated, softcap):
    q, k, v = qkv()
    zeros = torch.zeros_like(q.float()).to(q.dtype)
    out = flashpatch.attention(
        zeros, k, v, softcap=softcap, softmax_scale=10.0, q_descale=torch.tensor(1e20), k_descale=torch.tensor(1e20)
    )
    exact, _ = reference.attention(zeros.double(), k.double(), v.double())
    close(out, exact, exact.to(torch.bfloat16))


@needs_emulator
def test_nan_shows_where_it_is_seen_and_nowhere_else(emulated):
    q, k, v = qkv(seqlen_q=13)
    bits = v.view(torch.uint8)
    bits[0, 10] = 0x7F
    k.view(torch.uint8)[1, 10] = 0x7F
    out = flashpatch.attention(q, k, v, causal=True)
    assert out[:, :10].isfinite().all() and out[:, 10:].isnan().all()


@needs_emulator
def test_one_heavy_key_is_exact(emulated):
    """A row's largest p is 256, which e4m3 has: where one key has all of the weight out is its v, rounded once."""
    q, k, v = qkv(seqlen_q=70, seqlen_k=300, scale=4.0)
    q[:, :, :, 0], k[:, :, :, 0] = 240.0, 0.0
    k[:, 123, :, 0] = 240.0
    out = flashpatch.attention(q, k, v)
    assert torch.equal(out, v[:, 123:124].to(torch.bfloat16).repeat_interleave(2, 2).expand_as(out))


# ---- the emulator's own numbers ----

NUMBERS = """
#include "ptx_sm90.cuh"
struct alignas(64) P { const float* in; u32* packed; float* unpacked; };
KERNEL(128, 1) numbers(GRID_CONSTANT P p) {
  for (int i = thread_index(); i < 1024; i += 128) {
    const float* x = p.in + 4 * i;
    st_global(p.packed + i, pack_e4m3(ld_global(x), ld_global(x + 1), ld_global(x + 2), ld_global(x + 3)));
  }
  for (int i = thread_index(); i < 256; i += 128) st_global(p.unpacked + i, unpack_e4m3((u8)i));
}
"""


@needs_emulator
def test_e4m3_is_torchs(tmp_path):
    """Every bit pattern one way; the other way all of their neighbours, halves between them, and what saturates."""
    (tmp_path / "numbers.cu").write_text(NUMBERS)
    codes = torch.arange(256, dtype=torch.uint8).view(EIGHT).float()
    finite = codes[codes.isfinite()].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    around = [x * f for x in (finite, between) for f in (1.0, 1 + 2**-22, 1 - 2**-22)]
    values = torch.cat([*around, torch.tensor([448.0, 464.0, 1e9, math.inf, -math.inf, -600.0, 1e-12, -0.0, math.nan])])
    values = torch.cat([values, torch.randn(4096 - len(values), generator=torch.Generator().manual_seed(0)) * 20])
    packed, unpacked = torch.zeros(1024, dtype=torch.int32), torch.zeros(256)
    params = struct.pack("=3Q", *(t.data_ptr() for t in (values, packed, unpacked)))
    config = Config("numbers", "float8_e4m3fn", 64, 64, 64, 64, 4)
    emulator.load(config, folder=tmp_path).launch("numbers", 1, 128, 0, params)
    torch.testing.assert_close(unpacked, codes, rtol=0, atol=0, equal_nan=True)
    bits = packed.view(torch.uint8)
    expected = values.clamp(-448, 448).to(EIGHT).view(torch.uint8)
    known = values.isfinite() | values.isinf()
    assert torch.equal(bits[known], expected[known]) and (bits[~known] & 0x7F == 0x7F).all()
