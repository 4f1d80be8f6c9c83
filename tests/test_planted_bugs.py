"""Would the emulated tests notice? Every entry plants one bug in the kernels' sources and must be killed:
by a checker of the emulator, by numbers that leave the tolerance, or by bank conflicts where there are none.

A replacement must match its source exactly once, so that an entry cannot go stale silently.
"""

import math
import mmap
from dataclasses import dataclass, field, replace

import numpy
import pytest
import torch

from flashpatch import emulator, emulator_builds, launcher, planning, reference, tolerance
from flashpatch.call import Call
from flashpatch.problem import Config, Device, Plan, Problem

pytestmark = pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))

DEVICE = Device("emulated", "ampere", (8, 0), 166912, backend="emulated")
TURING = Device("emulated", "turing", (7, 5), 65536, backend="emulated")
HOPPER = Device("emulated", "hopper", (9, 0), 232448, multiprocessors=2, backend="emulated")


# ---- problems ----


@dataclass(frozen=True)
class Case:
    """One small problem and the Config that runs it. Odd lengths, so that every edge is inside some tile."""

    kernel: str = "forward_sm80"
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 40
    head_dim_v: int = 40
    batch: int = 2
    seqlen_q: int = 45
    seqlen_k: int = 77
    heads: int = 4
    heads_kv: int = 2
    window: tuple[int, int] = (-1, -1)
    num_stages: int = 2
    num_warps: int = 2
    tile: tuple[int, int] = (32, 32)
    deterministic: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    growing: float = 0  # key blocks score higher the later the kernel comes to them: far with 1, little with 0.02
    low: bool = False  # scores so low that what a key scores that is none, 0, is infinitely more likely
    multiprocessors: int = 2
    one_tile: bool = False  # a CTA ends after one: the emulator runs them in turn, so the first would take all
    huge_rows: bool = False  # rows of q so far apart that offsets need 64 bits
    features: frozenset[str] = field(
        default_factory=frozenset
    )  # of key_ranges, mask, bias, to_the_end, wide_bias, broadcast, alibi, sinks, nan, nan_before, nan_unused, varlen, descales, uneven, far_apart, tiny

    @property
    def config(self) -> Config:
        flags = {f"has_{name}": name in self.features for name in ("key_ranges", "mask", "bias", "alibi", "sinks")}
        wide = "wide_bias" in self.features
        flags |= {"has_bias": flags["has_bias"] or wide, "wide_bias": wide}
        if self.kernel == "forward_sm90":
            tile = (128, 64, 12)
        elif self.kernel == "backward_sm90":
            tile = (64, 128, 12)
        elif self.kernel == "backward_wide_sm90":
            tile = (64, 64, 12)
        else:
            tile = (*self.tile, self.num_warps)
        head_dims = (planning.support().bucket(size) for size in (self.head_dim, self.head_dim_v))
        return Config(
            self.kernel,
            str(self.dtype).removeprefix("torch."),
            *head_dims,
            *tile,
            self.num_stages,
            has_window=self.window != (-1, -1),
            has_softcap=self.softcap > 0,
            has_dropout=self.dropout_p > 0,
            deterministic=self.deterministic,
            **flags,
        )


def forward(**options):
    return Case(features=frozenset(options.pop("features", ())), **options)


def backward(**options):
    return Case(kernel="backward_sm80", features=frozenset(options.pop("features", ())), **options)


def turing(kernel, **options):
    return Case(
        kernel=kernel, dtype=torch.float16, num_stages=1, features=frozenset(options.pop("features", ())), **options
    )


def hopper(kernel, **options):
    sizes = {"batch": 1, "seqlen_q": 150, "seqlen_k": 200, "heads": 2, "heads_kv": 1}
    return Case(kernel=kernel, **{**sizes, **options})


PLAIN = forward()
CAUSAL = forward(window=(-1, 0))
WINDOW = forward(window=(9, 5), dtype=torch.float16)
ONE_STAGE = forward(num_stages=1, window=(-1, 0))
ALMOST_FULL = forward(seqlen_k=95)
PAST_THE_END = forward(seqlen_k=95, window=(-1, 50))
GROWING = forward(growing=1, dtype=torch.float16, seqlen_k=160)
WIDE_V = forward(head_dim=32, head_dim_v=64)
HUGE = forward(huge_rows=True, batch=1, heads=1, heads_kv=1, seqlen_q=70)
SCORES = forward(softcap=4.0, features=("bias", "alibi", "sinks"))
SMALL_SCORES = forward(softcap=60.0)
LARGE = forward(head_dim=64, head_dim_v=504, batch=1, heads=1, heads_kv=1, num_stages=1)
RANGES = forward(features=("key_ranges", "sinks", "nan"))
MASK = forward(features=("mask", "nan"))
MASK_OF_HEADS = forward(features=("mask", "mask_of_heads"))
MASK_LONG = forward(features=("mask", "mask_holes"), batch=1, heads=1, heads_kv=1, seqlen_k=1264)
WIDE_BIAS = forward(features=("wide_bias",), seqlen_k=80)
DROPOUT = forward(dropout_p=0.3, tile=(64, 32))
DROPOUT_RARELY_KEPT = forward(dropout_p=0.9)
FP32_DROPOUT = forward(dropout_p=0.3, dtype=torch.float32)
VARLEN = forward(features=("varlen",), window=(-1, 0))
BACKWARD = backward()
BACKWARD_CAUSAL = backward(window=(-1, 0), num_stages=1)
BACKWARD_WINDOW = backward(window=(9, 5), dtype=torch.float16)
BACKWARD_SPLIT = backward(num_warps=4, head_dim=64, head_dim_v=64)
BACKWARD_ORDERED = backward(deterministic=True, window=(-1, 0))
BACKWARD_SCORES = backward(softcap=4.0, features=("bias", "alibi", "sinks"))
BACKWARD_MASK = backward(features=("mask", "key_ranges", "nan"))
BACKWARD_PARTS = backward(window=(9, 5), head_dim=64, head_dim_v=64, tile=(64, 64))
BACKWARD_DEALT = backward(
    window=(9, 0), features=("nan_before",), head_dim=64, head_dim_v=64, num_warps=2, tile=(64, 64)
)
BACKWARD_DEALT_CAUSAL = replace(BACKWARD_DEALT, window=(-1, 0), features=frozenset())
BACKWARD_RANGES = backward(features=("key_ranges",))
BACKWARD_HIDDEN = backward(features=("key_ranges", "nan"), head_dim=72, head_dim_v=72)
BACKWARD_LATE = backward(features=("key_ranges", "to_the_end"))
BACKWARD_LARGE = backward(
    head_dim=504, head_dim_v=504, batch=1, heads=1, heads_kv=1, num_stages=1, num_warps=8, tile=(64, 32)
)
BACKWARD_MASK_OF_HEADS = backward(features=("mask", "mask_of_heads"))
BACKWARD_MASK_LONG = backward(features=("mask", "mask_holes"), batch=1, heads=1, heads_kv=1, seqlen_q=200)
BACKWARD_WIDE_BIAS = backward(features=("wide_bias",))
BACKWARD_BIAS_BROADCAST = backward(features=("wide_bias", "broadcast"))
BACKWARD_BIAS_SPLIT = backward(features=("bias",), num_warps=4, head_dim=64, head_dim_v=64)
BACKWARD_BIAS_ORDERED = backward(deterministic=True, features=("bias",))
BACKWARD_DROPOUT = backward(dropout_p=0.3)
BACKWARD_VARLEN = backward(features=("varlen",))
TURING_FORWARD = turing("forward_sm75")
TURING_BACKWARD = turing("backward_sm75")
FP32 = forward(dtype=torch.float32, features=("uneven",))
FP32_PARTS = forward(dtype=torch.float32, features=("far_apart",))
FP32_TINY = forward(dtype=torch.float32, features=("tiny",))
FP32_CAPPED = forward(dtype=torch.float32, softcap=1e5)
FP32_VARLEN = forward(dtype=torch.float32, features=("varlen",))
FP32_MASK = forward(dtype=torch.float32, features=("mask", "bias", "nan"))
FP32_BACKWARD = backward(dtype=torch.float32, features=("uneven",))
FP32_WIDE = backward(
    dtype=torch.float32, head_dim=96, head_dim_v=96, tile=(64, 32), batch=1, heads=1, heads_kv=1, features=("uneven",)
)
FP32_SPLIT = backward(dtype=torch.float32, num_warps=4, head_dim=64, head_dim_v=64)
FP32_BACKWARD_PARTS = backward(dtype=torch.float32, features=("far_apart",))
FP32_SPLIT_PARTS = backward(dtype=torch.float32, num_warps=4, head_dim=64, head_dim_v=64, features=("far_apart",))
HOPPER_FORWARD = hopper("forward_sm90")
HOPPER_GROWING = hopper("forward_sm90", growing=1, seqlen_q=70, seqlen_k=448, heads=1)
HOPPER_CAUSAL = hopper("forward_sm90", window=(-1, 0))
HOPPER_WINDOW = hopper("forward_sm90", window=(70, 3))
HOPPER_CAPPED = hopper("forward_sm90", softcap=4.0, low=True)
HOPPER_LITTLE_CAPPED = replace(HOPPER_GROWING, softcap=500.0, dtype=torch.float16)
HOPPER_PACKED = replace(HOPPER_CAUSAL, features=frozenset(("varlen",)))
HOPPER_UNUSED = replace(HOPPER_FORWARD, features=frozenset(("varlen", "nan_unused")))
HOPPER_EIGHT = hopper(
    "forward_sm90",
    dtype=torch.float8_e4m3fn,
    head_dim=112,
    head_dim_v=112,
    heads_kv=2,
    features=frozenset(("varlen", "descales")),
)
HOPPER_EIGHT_GROWING = replace(HOPPER_GROWING, dtype=torch.float8_e4m3fn, head_dim=48, head_dim_v=48, growing=0.02)
HOPPER_EIGHT_WINDOW = hopper(
    "forward_sm90",
    dtype=torch.float8_e4m3fn,
    head_dim=64,
    head_dim_v=64,
    window=(30, 0),
    features=frozenset(("nan_before", "descales")),
)
HOPPER_SECTIONS = replace(HOPPER_CAUSAL, heads=5)  # in sections of two heads
HOPPER_BACKWARD_CAPPED = hopper("backward_sm90", softcap=4.0, window=(-1, 0))
HOPPER_BACKWARD = hopper("backward_sm90", head_dim=64, head_dim_v=64)
HOPPER_ORDERED = hopper(
    "backward_sm90", head_dim=64, head_dim_v=64, window=(-1, 0), deterministic=True, multiprocessors=8, one_tile=True
)
HOPPER_VARLEN = hopper("backward_sm90", head_dim=40, head_dim_v=40, features=frozenset(("varlen",)))
# four query heads to a key head, in two tiles
HOPPER_SHARED = hopper("backward_sm90", head_dim=64, head_dim_v=64, heads=8, heads_kv=2, multiprocessors=8)
HOPPER_SHARED_ORDERED = replace(HOPPER_SHARED, heads=4, heads_kv=1, deterministic=True, one_tile=True)
WIDE = hopper("backward_wide_sm90", head_dim=248, head_dim_v=248)
WIDE_CAUSAL = hopper("backward_wide_sm90", head_dim=184, head_dim_v=184, window=(-1, 0))
WIDE_HEADS = hopper("backward_wide_sm90", head_dim=192, head_dim_v=192, heads=4, heads_kv=2)
WIDE_LOW = hopper("backward_wide_sm90", head_dim=192, head_dim_v=192, low=True)
WIDE_EMPTY = hopper("backward_wide_sm90", head_dim=192, head_dim_v=192, seqlen_k=100, window=(-1, 0))
WIDE_WINDOW = hopper("backward_wide_sm90", head_dim=192, head_dim_v=192, window=(120, 12))
WIDE_ORDERED = hopper(
    "backward_wide_sm90",
    head_dim=256,
    head_dim_v=256,
    window=(-1, 0),
    deterministic=True,
    multiprocessors=8,
    one_tile=True,
)
CASES = {name: value for name, value in list(globals().items()) if isinstance(value, Case)}


def far_apart(rows, width, dtype):
    """[rows, width] with 2^26 elements from row to row, in memory that is only reserved."""
    stride = 1 << 26
    size = ((rows - 1) * stride + width) * 2
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    return torch.frombuffer(memory, dtype=dtype).as_strided((rows, width), (stride, 1))


@dataclass
class Inputs:
    """Tensors of a Case: what the kernels take (q, k, v, call) and what the reference takes beyond that."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlogsumexp: torch.Tensor
    call: Call
    keywords: dict


def inputs_of(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(7)

    wide = torch.float32 if case.dtype.itemsize == 1 else case.dtype  # nothing is computed in 8 bits

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(case.dtype).to(wide)

    varlen = "varlen" in case.features
    shape_q, shape_k = (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
    if varlen:
        shape_q, shape_k = (case.seqlen_q + 20,), (case.seqlen_k + 30,)
    q = normal(*shape_q, case.heads, case.head_dim) * 2
    k, v = normal(*shape_k, case.heads_kv, case.head_dim), normal(*shape_k, case.heads_kv, case.head_dim_v)
    dout = normal(*shape_q, case.heads, case.head_dim_v)
    if case.growing:
        visited = torch.arange(case.seqlen_k)[:, None, None]
        if case.kernel != "forward_sm90":  # which alone goes through the keys upwards
            visited = case.seqlen_k - visited
        k = k + (q.mean() + visited * case.growing / 20).to(wide)
        q = q.abs()
    if (
        "uneven" in case.features
    ):  # every tile, and every other row of v, has a largest number of its own; the last keys are zero
        keys, queries = torch.arange(case.seqlen_k)[:, None, None], torch.arange(case.seqlen_q)[:, None, None]
        k, v = k * 2.0 ** -(keys // 32), v * 2.0 ** (keys // 32 + 3 * (keys % 2))
        dout = dout * 2.0 ** -(queries // 32)
        k[:, -3:], v[:, -3:] = 0, 0
    if "far_apart" in case.features:  # one key holds numbers too large for a common exponent, and no row attends to it
        q, k[:, 40], v[:, 40] = q.abs(), -40, 2.0**28
    if "tiny" in case.features:  # scores below the smallest number of fp32
        q, k = q * 2.0**-80, k * 2.0**-80
    if case.low:
        q, k = q.abs(), -8 * k.abs()
    if case.huge_rows:
        far = far_apart(case.seqlen_q, case.head_dim, case.dtype)
        far.copy_(q[0, :, 0])
        q = far[None, :, None]
    q, k, v = q.to(case.dtype), k.to(case.dtype), v.to(case.dtype)
    full = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    keywords = {}
    if "descales" in case.features:
        for name in ("q_descale", "k_descale", "v_descale"):
            keywords[name] = torch.rand((2 if varlen else case.batch, case.heads_kv), generator=generator) + 0.5
    if "key_ranges" in case.features:
        ends = torch.randint(
            0, case.seqlen_k + 1, (case.batch, case.seqlen_q, 2), generator=generator, dtype=torch.int32
        )
        keywords["key_ranges"] = ends.sort(-1).values
        keywords["key_ranges"][:, ::7] = 0
        if "to_the_end" in case.features:
            keywords["key_ranges"][..., 1] = case.seqlen_k
    if "mask" in case.features:
        mask = torch.rand((case.batch, 1, case.seqlen_q, case.seqlen_k), generator=generator) < 0.4
        mask[:, :, :, 33:64] = False
        if "mask_holes" in case.features:  # tiles that are visible as a whole, tiles that are hidden
            mask[:, :, :, 160:] = torch.rand(case.seqlen_k, generator=generator)[160:] < 0.5
            mask[:, :, :, 512:640] = True
            mask[:, :, 64:128] = True
        if "mask_of_heads" in case.features:
            mask = torch.rand(full, generator=generator) < 0.4
        keywords["mask"] = mask.expand(full)
    if "bias" in case.features:
        keywords["bias"] = normal(1, case.heads, case.seqlen_q, case.seqlen_k).expand(full)
    if "wide_bias" in case.features:
        shape = (case.batch, 1, 1, case.seqlen_k) if "broadcast" in case.features else full
        keywords["bias"] = torch.randn(shape, generator=generator).expand(full)
    if "alibi" in case.features:
        keywords["alibi_slopes"] = (torch.rand(case.heads, generator=generator) / 4).expand(case.batch, case.heads)
    if "sinks" in case.features:
        keywords["sinks"] = torch.randn(case.heads, generator=generator)
    if varlen:
        keywords["cu_seqlens_q"] = torch.tensor([0, 20, 20 + case.seqlen_q], dtype=torch.int32)
        keywords["cu_seqlens_k"] = torch.tensor([0, 30, 30 + case.seqlen_k], dtype=torch.int32)
        keywords["seqused_k"] = torch.tensor([23, case.seqlen_k], dtype=torch.int32)
    if "nan_unused" in case.features:
        k[23:30], v[23:30] = math.nan, math.nan
    if "nan_before" in case.features:  # a window that begins behind it for all rows
        k[:, 5], v[:, 5] = math.nan, math.nan
    if "nan" in case.features:  # nobody sees key 40
        if "mask" in keywords:
            keywords["mask"] = keywords["mask"] & (torch.arange(case.seqlen_k) != 40)
        if "key_ranges" in keywords:
            keywords["key_ranges"][..., 1] = keywords["key_ranges"][..., 1].clamp(max=40)
        k[:, 40, :, 0], v[:, 40, :, 0] = math.nan, math.nan
    rng_state = torch.tensor([1234567, 89], dtype=torch.int64) if case.dropout_p else None
    call = Call(
        case.head_dim**-0.5,
        case.seqlen_q,
        case.seqlen_k,
        *case.window,
        softcap=case.softcap,
        dropout_p=case.dropout_p,
        deterministic=case.deterministic,
        rng_state=rng_state,
        **keywords,
    )
    keywords = dict(keywords, window_size=case.window, softcap=case.softcap, dropout_p=case.dropout_p)
    if rng_state is not None:
        keywords["keep"] = kept(case, rng_state)
    statistics = (case.heads, q.shape[0]) if varlen else (case.batch, case.heads, case.seqlen_q)
    return Inputs(q, k, v, dout, torch.randn(statistics, generator=generator), call, keywords)


MULTIPLIERS = (
    *(0x243F6A80, 0x85A308D1, 0x13198A22, 0x03707343),
    *(0xA4093824, 0x299F31D5, 0x082EFA96, 0xEC4E6C87),
    *(0x452821E8, 0x38D01379, 0xBE5466CA, 0x34E90C6B),
    *(0xC0AC29BC, 0xC97C50DD, 0x3F84D5BE, 0xB547091F),
)


def kept(case: Case, rng_state) -> torch.Tensor:
    """The dropout mask, by a Philox4x32-7 of our own: one call for keys j & ~57 | {0, 1, 8, 9, ...} of rows i & ~24 | {0, 8, ...}."""
    i = numpy.arange(case.seqlen_q, dtype=numpy.uint64)[:, None]
    j = numpy.arange(case.seqlen_k, dtype=numpy.uint64)[None, :]
    seed, offset = (int(x) for x in rng_state)
    low = numpy.uint64(0xFFFFFFFF)
    rows = []
    for row in range(case.batch * case.heads):
        shape = numpy.broadcast_shapes(i.shape, j.shape)
        counter = [j // 64 * 4 + j // 2 % 4, i // 32 * 8 + i % 8, row, offset]
        counter = [numpy.broadcast_to(numpy.asarray(c, numpy.uint64), shape) for c in counter]
        keys = [seed & 0xFFFFFFFF, seed >> 32]
        for _ in range(7):
            x, z = counter[0] * numpy.uint64(0xD2511F53), counter[2] * numpy.uint64(0xCD9E8D57)
            high_x, high_z = x >> numpy.uint64(32), z >> numpy.uint64(32)
            first, third = high_z ^ counter[1] ^ numpy.uint64(keys[0]), high_x ^ counter[3] ^ numpy.uint64(keys[1])
            counter = [first, z & low, third, x & low]
            keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
        pair = [numpy.choose((j // 32 % 2).astype(int), [counter[c], counter[c + 2]]) for c in (0, 1)]
        multiplier = numpy.array(MULTIPLIERS, numpy.uint64)[(i // 8 % 4 * 4 + j // 8 % 4).astype(int)]
        word = pair[0] * multiplier + pair[1]
        bits = word // 2 ** (j % 2 * 16) % 2**15
        rare = case.dropout_p <= 0.5
        drop = bits < round((case.dropout_p if rare else 1 - case.dropout_p) * 2**15)
        rows.append(torch.from_numpy(~drop if rare else drop))
    return torch.stack(rows).view(case.batch, case.heads, case.seqlen_q, case.seqlen_k)


# ---- a run, and what is wrong with it ----


def run(case: Case, patch, monkeypatch):
    """What kills the kernels' result on this Case; None if it is right."""
    kernels = []

    def load(config):
        kernels.append(real_load(config, patch=one_tile_each if case.one_tile else patch))
        return kernels[-1]

    def one_tile_each(name, text):
        return (patch(name, text) if patch else text).replace("    index = take(); ", "    index = tiles; ")

    real_load = emulator.load
    monkeypatch.setenv("FLASHPATCH_EMULATION_SECONDS", "60")  # a bug may loop for ever
    monkeypatch.setattr(launcher.emulator, "load", load)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # fills what nobody wrote with NaN
    try:
        faults = (forward_faults if case.kernel.startswith("forward") else backward_faults)(case)
    except emulator.EmulationError as error:
        return str(error)
    finally:
        torch.use_deterministic_algorithms(False)
        monkeypatch.setattr(launcher.emulator, "load", real_load)
    conflicts = {
        place: n for kernel in kernels for place, n in kernel.last.bank_conflicts.items() if "ldmatrix" in place[0]
    }
    return faults or (f"bank conflicts {conflicts}" if conflicts else None)


def plan_of(case: Case) -> Plan:
    direction = case.kernel.split("_")[0]
    problem = Problem(direction, case.config.dtype, case.head_dim, case.head_dim_v)
    device = HOPPER if "sm90" in case.kernel else TURING if "sm75" in case.kernel else DEVICE
    return Plan(problem, replace(device, multiprocessors=case.multiprocessors), case.config, "compiled")


def compare(name, actual, eager, exact, factor=2.0):
    result = tolerance.compare(actual, eager, exact, factor=factor)
    return "" if result.ok else result.message(name) + ". "


def without_nan(inputs: Inputs):
    """k and v for eager attention, which lets masked NaN through."""
    return tuple(tensor.double().nan_to_num(0.0).to(tensor.dtype) for tensor in (inputs.k, inputs.v))


def forward_faults(case: Case):
    inputs = inputs_of(case)
    k, v = without_nan(inputs)
    exact, exact_logsumexp = reference.attention(inputs.q, k, v, **inputs.keywords)
    eager, _ = reference.attention(inputs.q, k, v, **inputs.keywords, upcast=False)
    out, logsumexp, *_ = launcher.forward(plan_of(case), inputs.q, inputs.k, inputs.v, inputs.call)
    faults = compare("out", out, eager, exact)
    error = torch.where(logsumexp == exact_logsumexp, 0.0, (logsumexp - exact_logsumexp).abs()).max()
    if not error <= 1e-3:
        faults += f"logsumexp: error {error:.3e}"
    return faults


def backward_faults(case: Case):
    inputs = inputs_of(case)
    k, v = without_nan(inputs)
    leaves = {name: value.detach().clone() for name, value in (("q", inputs.q), ("k", k), ("v", v))}
    if inputs.call.bias is not None:
        bias = inputs.keywords["bias"]
        leaves["bias"] = bias[tuple(slice(0, None if stride else 1) for stride in bias.stride())].clone()
    for leaf in leaves.values():
        leaf.requires_grad_()

    def gradients(upcast):
        keywords = dict(inputs.keywords)
        if "bias" in leaves:
            keywords["bias"] = leaves["bias"].expand(inputs.call.bias.shape)
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        out, logsumexp = reference.attention(q, k, v, **keywords, upcast=upcast)
        weight = torch.where(logsumexp.isfinite(), inputs.dlogsumexp.to(logsumexp.dtype), 0.0)
        loss = (out * inputs.dout.to(out.dtype)).sum().double()
        loss = loss + torch.where(logsumexp.isfinite(), logsumexp * weight, 0.0).sum().double()
        return out.detach(), logsumexp.detach(), torch.autograd.grad(loss, list(leaves.values()))

    out, logsumexp, exact = gradients(upcast=True)
    _, _, eager = gradients(upcast=False)
    actual = launcher.backward(
        plan_of(case),
        inputs.dout,
        torch.where(logsumexp.isfinite(), inputs.dlogsumexp, 0.0).float(),
        inputs.q,
        inputs.k,
        inputs.v,
        out.to(case.dtype),
        logsumexp.float(),
        inputs.call,
    )
    names = ("dq", "dk", "dv", "dbias")
    return "".join(
        compare(name, a.to(case.dtype), b, c.double(), 3.0)
        for name, a, b, c in zip(names, actual, eager, exact, strict=False)
    )


# ---- the bugs ----


@dataclass(frozen=True)
class Bug:
    """`old` in `source`, found exactly once, becomes `new`; `case` must notice."""

    source: str
    kind: str
    old: str
    new: str
    case: str

    def patch(self, name, text):
        if name != self.source:
            return text
        assert text.count(self.old) == 1, f"{self.source}: {text.count(self.old)} matches for {self.old!r}"
        return text.replace(self.old, self.new)


BUGS = [
    # forward
    Bug("forward_sm80.cu", "dropped wait", "cp_async_wait<0>();\n    sync_block();  // K", "sync_block();  // K", "PLAIN"),
    Bug("forward_sm80.cu", "dropped wait", "cp_async_wait<0>();\n      sync_block();  // V", "sync_block();  // V", "ONE_STAGE"),
    Bug("forward_sm80.cu", "dropped barrier", "sync_block();  // K (", "// K (", "PLAIN"),
    Bug("forward_sm80.cu", "dropped barrier", "sync_block();  // V has", "// V has", "ONE_STAGE"),
    Bug("forward_sm80.cu", "dropped barrier", "sync_block();  // out overwrites", "// out overwrites", "WIDE_V"),
    Bug("forward_sm80.cu", "dropped barrier", "sync_warp();  // all lanes have read the warp's rows of Q", ";", "FP32_PARTS"),
    Bug("forward_sm80.cu", "dropped barrier", "sync_warp();  // the warp's rows of out", "// the warp's rows of out", "PLAIN"),
    Bug("forward_sm80.cu", "swapped stage", "load_k(n_next, stage ^ 1)", "load_k(n_next, stage)", "PLAIN"),
    Bug("forward_sm80.cu", "swapped stage", "right_rows(v_smem(stage), 0)", "right_rows(v_smem(stage ^ 1), 0)", "PLAIN"),
    Bug("forward_sm80.cu", "head mapping", "head / (p.num_heads_q / p.num_heads_kv)", "head % p.num_heads_kv", "PLAIN"),
    Bug("seqlen.cuh", "32-bit offset", "first + row * stride", "first + (i64)(int)((u32)row * (u32)stride)", "HUGE"),
    Bug("forward_sm80.cu", "past the end", "j_lane == 0 && i < sequence.q_length", "j_lane == 0", "PLAIN"),
    Bug("forward_sm80.cu", "stale block", "n_first = keys.any.begin / kBlockN", "n_first = keys.any.begin / kBlockN + 1", "WINDOW"),
    Bug("forward_sm80.cu", "wrong columns", "v_of(p, sequence, kv_head).columns_from(first_v)", "v_of(p, sequence, kv_head)", "LARGE"),
    Bug("forward_sm80.cu", "past the end", "keys.any.end - first, p.head_dim_v - first_v);", "keys.any.end - first, p.head_dim_v);", "LARGE"),
    Bug("forward_sm80.cu", "dropped feature", "if constexpr (kHasDropout && !kIsFp32) drop(", "if constexpr (false) drop(", "DROPOUT"),
    # softmax
    Bug("softmax.cuh", "missing rescale", "row_sum[m][half] *= factor;", "", "GROWING"),
    Bug("softmax.cuh", "missing rescale", "out_frag[m][n][half * 2] *= factor,", "", "GROWING"),
    Bug("softmax.cuh", "missing guard", "return row_max == negative_infinity() ? 0.f : row_max;", "return row_max;", "RANGES"),
    Bug("softmax.cuh", "unbounded lag", "kLag = 8.f", "kLag = 800.f", "GROWING"),
    Bug("softmax.cuh", "logsumexp base", "= total_log2 * kLn2", "= total_log2", "PLAIN"),
    Bug("softmax.cuh", "partial sum", "sum += shfl_xor(sum, 2);", "", "PLAIN"),
    Bug("softmax.cuh", "wrong lanes", "shfl_xor(largest, 2)", "shfl_xor(largest, 4)", "PLAIN"),
    Bug("softmax.cuh", "sink", "+ exp2_approx(sink_log2 - top)", "", "SCORES"),
    # masks
    Bug("mask.cuh", "off by one, left", "i + s.diagonal - s.window_left)", "i + s.diagonal - s.window_left + 1)", "WINDOW"),
    Bug("mask.cuh", "off by one, right", "i + s.diagonal + s.window_right + 1", "i + s.diagonal + s.window_right", "CAUSAL"),
    Bug("mask.cuh", "off by one, end", "Span keys = {0, s.k_length};", "Span keys = {0, s.k_length + 1};", "ALMOST_FULL"),
    Bug("mask.cuh", "off by one, unmasked", "keys.end > all.end;", "keys.end > all.end + 1;", "ALMOST_FULL"),
    Bug("mask.cuh", "off by one, left", "diagonal - s.window_left,", "diagonal - s.window_left + 1,", "WINDOW"),
    Bug("mask.cuh", "off by one, right", "diagonal + s.window_right + 1;", "diagonal + s.window_right;", "CAUSAL"),
    Bug("mask.cuh", "off by one, end", ": Span{0, s.k_length};", ": Span{0, s.k_length + 1};", "ALMOST_FULL"),
    Bug("mask.cuh", "off by one, end", "s.k_length - (j & ~7) >= 8 * kN", "s.k_length - (j & ~7) >= 8 * kN - 1", "PAST_THE_END"),
    Bug("mask.cuh", "off by some, skipped", "keys.begin < any.end &&", "keys.begin < any.end - 8 &&", "BACKWARD_WINDOW"),
    Bug("mask.cuh", "off by one, range", "ld_global(range + 1)", "ld_global(range + 1) - 1", "RANGES"),
    Bug("mask.cuh", "off by one, queries", "j - s.diagonal - s.window_right)", "j - s.diagonal - s.window_right + 1)", "BACKWARD_CAUSAL"),
    Bug("mask.cuh", "off by one, queries", "j - s.diagonal + s.window_left + 1)", "j - s.diagonal + s.window_left)", "BACKWARD_WINDOW"),
    Bug("mask.cuh", "skipped block", "first - s.diagonal - s.window_right) / kBlockM", "first - s.diagonal - s.window_right) / kBlockM + 1", "BACKWARD_CAUSAL"),
    Bug("mask_tiles.cuh", "swapped strides", "source = mask + (i * p.mask_stride_row + j *", "source = mask + (j * p.mask_stride_row + i *", "MASK"),
    Bug("mask_tiles.cuh", "wrong mask", "(p.mask_stride_batch == 0 ? 0 : batch)", "0", "MASK"),
    Bug("mask_tiles.cuh", "wrong mask", "? 0 : head);", "? 0 : 0);", "MASK_OF_HEADS"),
    Bug("mask_tiles.cuh", "wrong flag", "all &= count <= 0 || bits == (1u << count) - 1;", "all = all;", "MASK"),
    Bug("mask_tiles.cuh", "wrong flag", "any |= bits != 0;", "any |= bits == 0xffffu;", "MASK"),
    Bug("mask_tiles.cuh", "stale flags", "if (i >> 5 == group) return;", "if (group >= 0) return;", "MASK_LONG"),
    Bug("mask_tiles.cuh", "swapped bits", "0x10204080u", "0x08040201u", "MASK_LONG"),
    Bug("mask_tiles.cuh", "wrong thread", "+ w) * kThreads + thread_index(), bits", "+ w) * kThreads + (thread_index() ^ 1), bits", "MASK"),
    Bug("forward_sm80.cu", "stale mask", "hidden = next_hidden, mask_bits = next_mask_bits;", "hidden = true, mask_bits = next_mask_bits;", "MASK_LONG"),
    Bug("forward_sm80.cu", "no second look", "compute_block<kCarefully>(p, forget(", "compute_block<kPlainly>(p, forget(", "MASK"),
    Bug("backward_sm80.cu", "bounds forgotten", "if (blocks.bounded) blocks.hide_unseen(mask_bits, block, smem);", "", "BACKWARD_MASK"),
    Bug("query_blocks.cuh", "wrong head", "(mask_head = b.head)", "(mask_head = b.head) * 0", "BACKWARD_MASK_OF_HEADS"),
    Bug("query_blocks.cuh", "stale mask", "else bits.fill(~0u);", "", "BACKWARD_MASK_LONG"),
    # bias
    Bug("bias.cuh", "swapped strides", "(i + r) * bias.stride_row + (j + chunk * kPerChunk) * bias.stride_column", "(j + chunk * kPerChunk) * bias.stride_row + (i + r) * bias.stride_column", "SCORES"),
    Bug("bias.cuh", "past the end", "i + r < s.q_length ? s.k_length", "true ? s.k_length", "SCORES"),
    Bug("bias.cuh", "wrong element", "(e * kBiasBytes % 4 * 8)", "0", "SCORES"),
    Bug("bias.cuh", "wrong column", "column >> 2) + (column & 3) * 4);\n  return", "column >> 2));\n  return", "WIDE_BIAS"),
    Bug("bias.cuh", "wrong query", "query + n * 8 + (e & 1), column", "query + n * 8, column", "BACKWARD_WIDE_BIAS"),
    Bug("bias.cuh", "wrong fragment", "frag[m][n * 2 + (e >> 1)]", "frag[m][(e >> 1) * 2 + n]", "BACKWARD_SCORES"),
    Bug("bias.cuh", "shared tiles", "kDeterministic || p.bias_stride_batch != 0", "p.bias_stride_batch != 0", "BACKWARD_BIAS_ORDERED"),
    Bug("forward_sm80.cu", "early copy", "sync_warp();  // all lanes have read the warp's rows of the bias", "", "SCORES"),
    Bug("backward_sm80.cu", "stale bias", "      if constexpr (kHasBias) {\n        if (blocks.contains(next)) load_next_bias(next);", "      if constexpr (kHasBias) {\n        if (blocks.contains(next)) load_next_bias(block);", "BACKWARD_BIAS_SPLIT"),
    Bug("backward_bias.cu", "past the end", "if (i < rows && j < keys)", "if (j < keys)", "BACKWARD_SCORES"),
    Bug("backward_bias.cu", "wrong key", "(e >> 1) * 8;", "(e >> 1) * 4;", "BACKWARD_SCORES"),
    Bug("mask.cuh", "NaN let through", "carried(chunk.x) | ", "", "MASK"),
    Bug("mask.cuh", "dropped barrier", "sync_block();  // everybody has looked", "// everybody has looked", "MASK"),
    Bug("mask.cuh", "dropped barrier", "sync_block();  // zeroed", "// zeroed", "MASK"),
    Bug("mask.cuh", "dropped barrier", "sync_block();  // every warp's part", "// every warp's part", "RANGES"),
    # scores
    Bug("scores.cuh", "sign", "x -= scores.slope_log2", "x += scores.slope_log2", "BACKWARD_SCORES"),
    Bug("scores.cuh", "sign", "score -= scores.slope_log2", "score += scores.slope_log2", "SCORES"),
    Bug("scores.cuh", "missing magnitude", "(distance < 0 ? -distance : distance)", "distance", "BACKWARD_SCORES"),
    Bug("scores.cuh", "missing magnitude", "fabsf(distance + ", "(distance + ", "SCORES"),
    Bug("scores.cuh", "missing derivative", "derivative = kHasSoftcap ? 1.f - qk * qk : 1.f;", "derivative = 1.f;", "BACKWARD_SCORES"),
    Bug("dropout.cuh", "dropout counter", "((u32)j >> 1 & 3)", "((u32)j >> 1 & 1)", "DROPOUT"),
    Bug("dropout.cuh", "wrong half", "word << 17 < dropout.share << 17", "word << 1 < dropout.share << 17", "FP32_DROPOUT"),
    Bug("dropout.cuh", "wrong pair", "second ? words[m / 2].z :", "second ? words[m / 2].x :", "DROPOUT"),
    Bug("dropout.cuh", "swapped rows", "multiplier(lower, e & 1, k & 1, e >> 1)", "multiplier(lower, e >> 1, k & 1, e & 1)", "DROPOUT"),
    Bug("dropout.cuh", "wrong half", "j & 1 ? 1 : 17", "j & 1 ? 17 : 1", "BACKWARD_DROPOUT"),
    Bug("dropout.cuh", "wrong rows", "kM == 1 ? i >> 4 & 1 : m & 1", "m & 1", "DROPOUT_RARELY_KEPT"),
    Bug("dropout.cuh", "wrong side", "rare ? ~0u : 0u", "~0u", "DROPOUT_RARELY_KEPT"),
    Bug("scores.cuh", "beyond its range", "kSmallTanh = 0.4f", "kSmallTanh = 400.f", "SCORES"),
    Bug("scores.cuh", "wrong polynomial", "else return {first * kTanh1, third * kTanh3", "else return {first * kTanh1, first * kTanh3", "SMALL_SCORES"),
    Bug("scores.cuh", "tanh of a small argument", "fabsf(x) < 0.55f ? x + x * w * rest : large_tanh_of(x)", "large_tanh_of(x)", "FP32_CAPPED"),
    Bug("scores.cuh", "scores that are changed", "{1.f, 0.f, 1e-44f}", "{1.f, 0.f, 1e-4f}", "FP32_CAPPED"),
    Bug("backward_sm90.cuh", "hidden gradient", "maximum(1.f - x * x, 0.f);  // hidden", "(1.f - x * x);  // hidden", "HOPPER_BACKWARD_CAPPED"),
    # sequences
    Bug("seqlen.cuh", "overlapping blocks", "first_packed_block((int)s.q_start, kBlockM, s.batch)", "first_packed_block((int)s.q_start, kBlockM, 0)", "BACKWARD_VARLEN"),
    Bug("seqlen.cuh", "alignment of the diagonal", "s.diagonal = s.k_length - s.q_length;", "s.diagonal = 0;", "CAUSAL"),
    Bug("seqlen.cuh", "keys in use", "smaller(s.k_length, larger(ld_global(p.seqused_k + batch), 0))", "s.k_length", "VARLEN"),
    Bug("seqlen.cuh", "start of a sequence", "s.k_start = rows.start;", "s.k_start = 0;", "VARLEN"),
    # tiles
    Bug("tile.cuh", "swizzle on one side", "(lane_offset ^ ((chunk", "(lane_offset + ((chunk", "PLAIN"),
    Bug("tile.cuh", "no swizzle at all", "(chunk ^ fold(row))", "chunk", "PLAIN"),
    Bug("tile.cuh", "alignment", "address(row, fragment) + t * 4", "address(row, fragment) + t * 2", "PLAIN"),
    Bug("product.cuh", "transposition", "ldmatrix_x4_trans(b_frag", "ldmatrix_x4(b_frag", "PLAIN"),
    Bug("tile.cuh", "matrix order", "chunk + (lane_index() >> 4))", "chunk + ((lane_index() >> 3) & 1))", "PLAIN"),
    Bug("tile.cuh", "past the end", "from_begin + round * kStep < rows && ", "", "PLAIN"),
    Bug("tile.cuh", "unwritten tail", "if (row < row_end && (chunk", "if (row < row_end - 1 && (chunk", "PLAIN"),
    Bug("tile.cuh", "written past the end", "if (row < row_end && (chunk", "if ((chunk", "PLAIN"),
    Bug("tile.cuh", "overwritten sum", "red_add_global(fragment + fragment_index(0), F32x4{", "st_global((F32x4*)(fragment + fragment_index(0)), F32x4{", "BACKWARD"),
    # backward
    Bug("backward_sm80.cu", "dropped wait", "cp_async_wait<0>();\n    sync_block();  // Q", "sync_block();  // Q", "BACKWARD"),
    Bug("backward_sm80.cu", "dropped barrier", "sync_block();  // Q, dO and", "// Q, dO and", "BACKWARD"),
    Bug("backward_sm80.cu", "dropped barrier", "!masked) sync_block();", "!masked) {}", "BACKWARD"),
    Bug("backward_sm80.cu", "dropped barrier", "sync_block();  // K is", "// K is", "BACKWARD_HIDDEN"),
    Bug("backward_sm80.cu", "dropped wait", "cp_async_wait<0>();  // and V", "// and V", "BACKWARD_HIDDEN"),
    Bug("backward_sm80.cu", "stale dS", "else products.template store_no_ds<kNeighbours>(column_warp, first);", "", "BACKWARD_PARTS"),
    Bug("backward_sm80.cu", "stale dS", "else products.template store_no_ds<kNeighbours>(column_warp, first);", "", "BACKWARD_DEALT"),
    Bug("backward_sm80.cu", "wrong keys", "visit_part(mask, Number<kNeighbours>{}, part, first);", "visit_part(mask, Number<kNeighbours>{}, part, 0);", "BACKWARD_DEALT"),
    Bug("backward_sm80.cu", "wrong keys", "(first + m) * kKeyStep + half * 8", "(first + m) * 16 + half * 8", "BACKWARD_DEALT"),
    Bug("backward_sm80.cu", "skipped keys", "(kKeyFrags - 1) * kKeyStep + 16}", "(kKeyFrags - 1) * 16 + 16}", "BACKWARD_DEALT_CAUSAL"),
    Bug("backward_sm80.cu", "skipped keys", "first_key + key_warp + first * kKeyStep;", "first_key + key_warp;", "BACKWARD_DEALT"),
    Bug("backward_products.cuh", "wrong rows", "load_rows(a_frag, v_rows, k, first * kKeyStep, kKeyStep)", "load_rows(a_frag, v_rows, k, 0, kKeyStep)", "BACKWARD_DEALT"),
    Bug("backward_products.cuh", "wrong sums", "fragments_of<kM>(dk_frag, first)", "fragments_of<kM>(dk_frag, 0)", "BACKWARD_DEALT"),
    Bug("backward_products.cuh", "wrong rows", "key_warp + first * kKeyStep, column / 16, ds_packed", "key_warp, column / 16, ds_packed", "BACKWARD_DEALT"),
    Bug("backward_sm80.cu", "skipped keys", "(any.begin - first_key, 0) / (2 * kMmaDepth)", "(any.begin - first_key, 0) / (2 * kMmaDepth) + 1", "BACKWARD_PARTS"),
    Bug("backward_sm80.cu", "skipped keys", "smaller(any.end - first_key, kBlockN)}", "smaller(any.end - first_key, kBlockN) - 2 * kMmaDepth}", "BACKWARD_PARTS"),
    Bug("backward_sm80.cu", "skipped keys", "kBlockM + dq_m * 16, kDqRowFrags * 16).any", "kBlockM, kDqRowFrags * 16).any", "BACKWARD_DEALT"),
    Bug("backward_sm80.cu", "dropped barrier", "sync_block();  // P^T and", "// P^T and", "BACKWARD_SPLIT"),
    Bug("backward_sm80.cu", "dropped barrier", "sync_block();  // nobody reads K", "// nobody reads K", "BACKWARD"),
    Bug("backward_sm80.cu", "dropped barrier", "sync_block();  // dK and dV are", "// dK and dV are", "BACKWARD"),
    Bug("backward_sm80.cu", "dropped turn", "if constexpr (kDeterministic) blocks.await_turn(block);", "", "BACKWARD_ORDERED"),
    Bug("backward_sm80.cu", "wrong columns", "dq_m, pair * kDqWarpsN + dq_n, some_keys", "dq_m, dq_n, some_keys", "BACKWARD_LARGE"),
    Bug("backward_sm80.cu", "wrong columns", "column = (pair + (n >> 1)) *", "column = (n >> 1) *", "BACKWARD_LARGE"),
    Bug("backward_sm80.cu", "wrong columns", "(dq_m * (kHeadDim / 8) + dq_n * 2) * 128", "dq_m * (kHeadDim / 8) * 128", "BACKWARD_LARGE"),
    Bug("query_blocks.cuh", "skipped block", "larger(any.begin, first_key) <", "larger(all.begin, first_key) <", "BACKWARD_RANGES"),
    Bug("query_blocks.cuh", "unmasked block", "masked || all.begin > first_key || all.end <", "masked || all.end <", "BACKWARD_LATE"),
    Bug("backward_delta.cu", "wrong hull", "any_end = larger(any_end, shfl_xor(any_end, lanes));", "", "BACKWARD_RANGES"),
    Bug("backward_delta.cu", "wrong hull", "all_begin = larger(all_begin, begin);", "", "BACKWARD_LATE"),
    Bug("backward_delta.cu", "lost columns", "kPieces = (kChunks + kLanes - 1) / kLanes;", "kPieces = 1;", "BACKWARD_LARGE"),
    Bug("backward_delta.cu", "lost rows", "pass += kTogether", "pass += 2 * kTogether", "BACKWARD_LARGE"),
    Bug("backward_delta.cu", "stale turns", "if (p.dq_turns && thread_index() == 0) st_global(p.dq_turns + block, 0);", "", "BACKWARD_ORDERED"),
    Bug("backward_sm80.cu", "missing scale", "scale(dk_frag, p.softmax_scale);", "", "BACKWARD"),
    Bug("backward_sm80.cu", "missing delta", "dp = s * (dp - (e & 1 ? delta.y : delta.x));", "dp = s * dp;", "BACKWARD"),
    Bug("query_rows.cuh", "logsumexp base", "logsumexp = natural * kLog2e", "logsumexp = natural", "BACKWARD"),
    Bug("query_blocks.cuh", "head mapping", "return first_head + b.head;", "return first_head / group + b.head * p.num_heads_kv;", "BACKWARD"),
    Bug("backward_sm80.cu", "missing derivative", "dp *= derivative;", "", "BACKWARD_SCORES"),
    Bug("backward_sm80.cu", "dropout of dp", "dp = kept * dp -", "dp = s * dp -", "BACKWARD_DROPOUT"),
    Bug("backward_sm80.cu", "masked NaN", "dp = visible ? dp : 0.f;", "", "BACKWARD_MASK"),
    Bug("backward_sm80.cu", "NaN let through", "if (!looked) found |= any_non_finite(s_frag);", "", "BACKWARD_MASK"),
    Bug("backward_sm80.cu", "NaN let through", "before it stores\n        take_out();", "before it stores", "BACKWARD_HIDDEN"),
    Bug("backward_sm80.cu", "swapped stage", "load_queries(next, stage ^ 1)", "load_queries(next, stage)", "BACKWARD"),
    Bug("backward_delta.cu", "missing dlogsumexp", "if (p.dlogsumexp) sum -=", "if (false) sum -=", "BACKWARD"),
    Bug("backward_delta.cu", "not zeroed", "i < kBlockM * kHeadDim; i +=", "i < kBlockM * kHeadDim / 2; i +=", "BACKWARD"),
    Bug("backward_delta.cu", "partial sum", "int lanes = kLanes / 2", "int lanes = kLanes / 4", "BACKWARD"),
    Bug("backward_dq.cu", "missing scale", "scale(c, p.softmax_scale);", "", "BACKWARD"),
    Bug("backward_dq.cu", "lost rounds", "round += kTogether", "round += 2 * kTogether", "BACKWARD_LARGE"),
    Bug("backward_dq.cu", "dropped barrier", "sync_block();  // the whole tile", "// the whole tile", "BACKWARD"),
    # Turing: products of 8 columns, copies through registers, floats added one by one
    Bug("substitutes_sm75.cuh", "wrong half", "mma_m16n8k8(d, a[2], a[3], b1)", "mma_m16n8k8(d, a[2], a[3], b0)", "TURING_FORWARD"),
    Bug("substitutes_sm75.cuh", "wrong rows", "mma_m16n8k8(d, a[0], a[1], b0)", "mma_m16n8k8(d, a[0], a[2], b0)", "TURING_FORWARD"),
    Bug("substitutes_sm75.cuh", "lost half", "  mma_m16n8k8(d, a[2], a[3], b1);\n", "", "TURING_BACKWARD"),
    Bug("substitutes_sm75.cuh", "read past the end", "if (valid) bytes =", "bytes =", "TURING_FORWARD"),
    Bug("substitutes_sm75.cuh", "not zeroed", "  st_shared(destination, bytes);", "  if (valid) st_shared(destination, bytes);", "TURING_FORWARD"),
    Bug("substitutes_sm75.cuh", "wrong place", "st_shared(destination, bytes)", "st_shared(destination ^ 16, bytes)", "TURING_BACKWARD"),
    Bug("ptx_sm75.cuh", "swapped halves", "narrow<false>(low) | emulation::narrow<false>(high) << 16", "narrow<false>(high) | emulation::narrow<false>(low) << 16", "TURING_FORWARD"),
    Bug("tile.cuh", "overwritten sum", "red_add_global(fragment + fragment_index(e), c[e])", "st_global(fragment + fragment_index(e), c[e])", "TURING_BACKWARD"),
    Bug("tile.cuh", "wrong element", "element * 32 + lane_index()", "element * 16 + lane_index()", "TURING_BACKWARD"),
    Bug("forward_sm80.cu", "dropped barrier", "sync_block();  // V has landed", "// V has landed", "TURING_FORWARD"),
    Bug("backward_sm80.cu", "dropped barrier", "sync_block();  // Q, dO and", "// Q, dO and", "TURING_BACKWARD"),
    # fp32
    Bug("product_fp32.cuh", "lost small parts", "? high + (low + high * kLost) : high", "? high : high", "FP32_PARTS"),
    Bug("product_fp32.cuh", "lost half of the small parts", "b[pair][e].low, b[pair][e + 1].low);", "0u, 0u);", "FP32_PARTS"),
    Bug("product_fp32.cuh", "order of the contraction", "T::offset(row + 2 * t, chunk", "T::offset(row + t, chunk", "FP32_PARTS"),
    Bug("product_fp32.cuh", "swizzle of odd rows", "chunk & T::kSwizzle ^ 4", "chunk & T::kSwizzle", "FP32_PARTS"),
    Bug("product_fp32.cuh", "forgotten sum", "acc[m][first * 2 + n][e] += tile", "acc[m][first * 2 + n][e] = tile", "FP32_PARTS"),
    Bug("product_fp32.cuh", "stale fragments", "if (kPrefetch && k + 1 < kSteps) load(k + 1);", "", "FP32_PARTS"),
    Bug("product.cuh", "order of the contraction", "packed[m][k][(e & 1) * 2 + (e >> 1)]", "packed[m][k][e]", "FP32_BACKWARD_PARTS"),
    Bug("product.cuh", "rows for columns", "a_frag[m][1] = pair[2], a_frag[m][2] = pair[1]", "a_frag[m][1] = pair[1], a_frag[m][2] = pair[2]", "FP32_BACKWARD_PARTS"),
    Bug("product.cuh", "order of the contraction", "a_frag[m][half] = pair.x, a_frag[m][half + 2] = pair.y;", "a_frag[m][half] = pair.y, a_frag[m][half + 2] = pair.x;", "FP32_SPLIT_PARTS"),
    Bug("tile.cuh", "half a row", "fragment * 2 + (t >> 1)) + (t & 1) * 8", "fragment * 2) + (t & 1) * 8", "FP32"),
    Bug("tile.cuh", "no swizzle at all", "((row ^ row >> 2) & 1) << 2 | (row & 2) | (row >> 2 & 1)", "0", "FP32_PARTS"),
    Bug("mask.cuh", "NaN let through", "kOne = kIsFp32 ? 0x00800000", "kOne = kIsFp32 ? 1", "FP32_MASK"),
    Bug("bias.cuh", "half a bias", "kIsFp32 || kWideBias", "kWideBias", "FP32_MASK"),
    Bug("half_pairs.cuh", "lost small parts", "each(low, a.low, b_high);", "", "FP32"),
    Bug("half_pairs.cuh", "lost small parts", "each(low, a.high, b_low);", "", "FP32"),
    Bug("half_pairs.cuh", "lost small parts", "pack<false>(x - rounded.x, y - rounded.y)", "pack<false>(x - rounded.x, 0.f)", "FP32_BACKWARD"),
    Bug("half_pairs.cuh", "wrong tile", "return {base + Half::kBytes}", "return {base}", "FP32"),
    Bug("half_pairs.cuh", "wrong tile", "{right_first(tile.high(), row, 0), right_first(tile.low(), row, 0)}", "{right_first(tile.high(), row, 0), right_first(tile.high(), row, 0)}", "FP32_BACKWARD"),
    Bug("half_pairs.cuh", "missing factor", "acc[m][n][e] = x * factor;", "acc[m][n][e] = x;", "FP32"),
    Bug("half_pairs.cuh", "missing factor", "acc[m][n][e] += x * factor;", "acc[m][n][e] += x;", "FP32"),
    Bug("half_pairs.cuh", "beyond fp16", "kTop = 15,", "kTop = 18,", "FP32"),
    Bug("half_pairs.cuh", "overlapping blocks", "first_packed_block((int)s.k_start, kBlockN, s.batch)", "first_packed_block((int)s.k_start, kBlockN, 0)", "FP32_VARLEN"),
    Bug("half_pairs.cuh", "head mapping", "* p.num_heads_kv + kv_head", "* p.num_heads_kv", "FP32"),
    Bug("half_pairs.cuh", "swapped rows", "row + m * 16 + (e & 1) * 8 + (lane", "row + m * 16 + (e >> 1) * 8 + (lane", "FP32_SPLIT"),
    Bug("split_pairs.cuh", "past the end", "row < rows && row < Half::kRows", "row < Half::kRows", "FP32"),
    Bug("split_pairs.cuh", "rows not compared", " && bottom >= top - kSpread", "", "FP32_PARTS"),
    Bug("split_pairs.cuh", "below the range", "top >= 127 - kLargestExponent && ", "", "FP32_TINY"),
    Bug("split_pairs.cuh", "dropped barrier", "sync_block();  // every warp's part", "// every warp's part", "FP32"),
    Bug("split_pairs.cuh", "partial maximum", "int lanes = 16; lanes > 0", "int lanes = 16; lanes > 8", "FP32"),
    Bug("split_pairs.cuh", "q for dout", "of_dout ? dout_of(p, s, position.head) : q_of", "of_dout ? q_of(p, s, position.head) : q_of", "FP32_BACKWARD"),
    Bug("split_pairs.cuh", "wrong tile", "split_keys<PairTile<kBlockN, kHeadDimV>>(p, index, true)", "split_keys<PairTile<kBlockN, kHeadDimV>>(p, 0, true)", "FP32"),
    Bug("forward_sm80.cu", "stale exponents", "k_exponent = next_k_exponent, v_exponent = next_v_exponent;", "k_exponent = next_k_exponent;", "FP32"),
    Bug("forward_sm80.cu", "stale exponents", "      if constexpr (kPaired) fetch_exponents(n_next);\n", "", "FP32"),
    Bug("forward_sm80.cu", "range not looked at", "if (sync_block_or(out_of_range)) {", "if (sync_block_or(out_of_range), false) {", "FP32_PARTS"),
    Bug("forward_sm80.cu", "lift left in", "power_of_two(v_exponent - kLiftP)", "power_of_two(v_exponent)", "FP32"),
    Bug("backward_sm80.cu", "stale exponents", "      products.fetch_exponents(blocks.head_of(next), next.m_block);\n", "", "FP32_BACKWARD"),
    Bug("backward_products.cuh", "beyond fp16", "- 126, -2 * kLargestExponent) - kLiftDs", "- 126, -2 * kLargestExponent) - kLiftDs - 14", "FP32_BACKWARD"),
    Bug("backward_sm80.cu", "range not looked at", "if (products.out_of_range(position.head * group, group, blocks.m_blocks)) return backward_in_parts(p);", "", "FP32_BACKWARD_PARTS"),
    Bug("backward_products.cuh", "lift left in", "power_of_two(dout_exponent - kLiftP));\n        add", "power_of_two(dout_exponent));\n        add", "FP32_BACKWARD"),
    Bug("backward_products.cuh", "wrong rows", "pair_down_first(q_pair(stage), row)", "pair_down_first(q_pair(stage), 0)", "FP32_WIDE"),
    # Hopper
    Bug("forward_sm90.cu", "dropped wait", "rings.v.wait_full();\n      take_turn();", "take_turn();", "HOPPER_FORWARD"),
    Bug("forward_sm90.cu", "dropped wait", "wgmma_wait<1>();", "", "HOPPER_FORWARD"),
    Bug("forward_sm90.cu", "early release", "wgmma_wait<1>();\n      pin(s_frag);\n      release_next(rings.k);", "release_next(rings.k);\n      wgmma_wait<1>();\n      pin(s_frag);", "HOPPER_FORWARD"),
    Bug("forward_sm90.cu", "missing rescale", "if (grew) scale_rows(o_frag, factor);", "", "HOPPER_FORWARD"),
    Bug("softmax_sm90.cuh", "missing rescale", "scale_rows(o_frag, factor);", "", "HOPPER_GROWING"),
    Bug("softmax_sm90.cuh", "maximum that stays too long", "if (!vote_any(!stays)) return;", "return;", "HOPPER_GROWING"),
    Bug("softmax_sm90.cuh", "maximum that stays too long", "cap.bound[0] > limit[0] || cap.bound[1] > limit[1]", "cap.bound[0] < limit[0]", "HOPPER_LITTLE_CAPPED"),
    Bug("softmax_sm90.cuh", "sign forgotten", "maximum(largest[i & 3], fabsf(s_frag[i]));", "maximum(largest[i & 3], s_frag[i]);", "HOPPER_CAPPED"),
    Bug("softmax_sm90.cuh", "off by one, end", "smaller(count & 7, 2) - first;", "smaller(count & 7, 1) - first;", "HOPPER_CAUSAL"),
    Bug("softmax_sm90.cuh", "off by one, begin", "~keys_before(columns[half].begin, first)", "~keys_before(columns[half].begin + 1, first)", "HOPPER_WINDOW"),
    Bug("forward_sm90.cu", "dropped barrier", "sync_block();  // nobody waits", "// nobody waits", "HOPPER_FORWARD"),
    Bug("forward_sm90.cu", "dropped barrier", "sync_warp();          // of all lanes", "// of all lanes", "HOPPER_FORWARD"),
    Bug("forward_sm90.cu", "lost proxy fence", "fence_proxy_async();  // ordinary stores", "// ordinary stores", "HOPPER_FORWARD"),
    Bug("forward_sm90.cu", "dropped wait", "bulk_wait_read<0>();\n      mbarrier_arrive", "mbarrier_arrive", "HOPPER_SECTIONS"),
    Bug("forward_sm90.cu", "early release", "rings.q.empty(kConsumers)", "rings.q.empty()", "HOPPER_SECTIONS"),
    Bug("forward_sm90.cu", "turn taken twice", "if (n != own.end || own.begin == own.end) {", "{", "HOPPER_SECTIONS"),
    Bug("forward_sm90.cu", "dropped turn", "if (others_go_on) pass_turn();", "", "HOPPER_CAUSAL"),
    Bug("forward_producer_sm90.cuh", "dropped barrier", "sync_warp();  // read after write", "// read after write", "HOPPER_FORWARD"),
    Bug("forward_producer_sm90.cuh", "unwritten tail", "clear_rows(v_smem, keys);", "", "HOPPER_UNUSED"),
    Bug("forward_producer_sm90.cuh", "dropped wait", "rings.cut.wait_full();", "", "HOPPER_PACKED"),
    Bug("forward_producer_sm90.cuh", "lost proxy fence", "fence_proxy_async();  // written by stores", "// written by stores", "HOPPER_PACKED"),
    Bug("forward_producer_sm90.cuh", "dropped barrier", "sync_warp();          // by all lanes, before", "// by all lanes, before", "HOPPER_PACKED"),
    Bug("forward_producer_sm90.cuh", "keys of another warpgroup", "first = work.first_row + lane_index() * 64;", "first = work.first_row;", "HOPPER_CAUSAL"),
    Bug("forward_producer_sm90.cuh", "wrong first row", "kBlockM - s.q_length) / 64 * 64 : 0;", "kBlockM - s.q_length) / 64 * 64 + 64 : 0;", "HOPPER_CAUSAL"),
    Bug("forward_sm90.cu", "rows before the first", "if (first_row >= 0 && elect()) store_rows(", "if (elect()) store_rows(", "HOPPER_PACKED"),
    Bug("forward_sm90.cu", "Q of another warpgroup", "rings.q.position = consumer;", "rings.q.position = 0;", "HOPPER_FORWARD"),
    Bug("tile_sm90.cuh", "wrong row", "mine = row + (lane & 15);", "mine = row + (lane & 7);", "HOPPER_FORWARD"),
    Bug("packed_sm90.cuh", "rows of another warp", "first * T::kPitch", "0", "HOPPER_FORWARD"),
    Bug("packed_sm90.cuh", "past the end", "return {kRaggedRows - length,", "return {kRaggedRows - length - 1,", "HOPPER_PACKED"),
    Bug("tile_sm90.cuh", "wrong step", "kSlabBytes + k * 32 % kPitch", "kSlabBytes + k * 16 % kPitch", "HOPPER_FORWARD"),
    Bug("tile_sm90.cuh", "wrong phase", "parity() ^ 1); }  // a fresh", "parity()); }  // a fresh", "HOPPER_FORWARD"),
    Bug("forward_values_sm90.cu", "keys in order", "words[t][2] = keys[j + 8], words[t][3] = keys[j + 9]", "words[t][2] = keys[j + 2 & 31], words[t][3] = keys[j + 3 & 31]", "HOPPER_EIGHT"),
    Bug("forward_values_sm90.cu", "keys behind the last", "first_key + first + j < s.k_length && ", "", "HOPPER_EIGHT"),
    Bug("forward_values_sm90.cu", "lost swizzle", "swap = group & 1;", "swap = 0;", "HOPPER_EIGHT"),
    Bug("forward_values_sm90.cu", "dropped barrier", "sync_warp();  // eight", "// eight", "HOPPER_EIGHT"),
    Bug("values_sm90.cuh", "another sequence's values", "first_block_of(p.cu_seqlens_k, kBlockN, s.batch)", "0", "HOPPER_EIGHT"),
    Bug("softmax_sm90.cuh", "maximum that stays too long", "return share < kMostLag ? share : kMostLag;", "return 1e6f;", "HOPPER_EIGHT_GROWING"),
    Bug("softmax_sm90.cuh", "maximum off by a factor", "kTopLog2 = kIsE4m3 ? 8.f", "kTopLog2 = kIsE4m3 ? 10.f", "HOPPER_EIGHT_GROWING"),
    Bug("tile_sm90.cuh", "wrong swizzle", "kPitch == 128 ? 1u : 3u", "kPitch == 128 ? 1u : 2u", "HOPPER_EIGHT"),
    Bug("forward_sm90.cu", "lost factor", "factor[0] *= scale, factor[1] *= scale;", "", "HOPPER_EIGHT"),
    Bug("scores.cuh", "lost factor", " * descale(p, p.k_descale, batch, head)", "", "HOPPER_EIGHT"),
    Bug("recompute_sm90.cuh", "lost factor", "acc[c] * scale", "acc[c]", "HOPPER_EIGHT_WINDOW"),
    Bug("backward_sm90.cu", "dropped fence", "fence_proxy_async();", "", "HOPPER_BACKWARD"),
    Bug("backward_sm90.cu", "missing scale", "store_gradient(p, dk_frag, p.softmax_scale", "store_gradient(p, dk_frag, 1.f", "HOPPER_BACKWARD"),
    Bug("backward_sm90.cu", "dropped wait", "else if (lane == 0) bulk_wait_read<0>();", "", "HOPPER_BACKWARD"),
    Bug("backward_sm90.cu", "dropped turn", "await_turn(p, walk.record, turns_before(s, task.n_block, walk.m_block));", "", "HOPPER_ORDERED"),
    Bug("backward_sm90.cu", "dropped wait", "mbarrier_wait(smem.barrier(kDqFull, warpgroup), step >> 1 & 1);", "", "HOPPER_ORDERED"),
    Bug("backward_sm90.cu", "dropped wait", "mbarrier_wait(smem.barrier(kDqEmpty, warpgroup), (dq_step >> 1 & 1) ^ 1);", "{}", "HOPPER_ORDERED"),
    Bug("backward_sm90.cu", "wrong warpgroup", "if ((step & 1) == warpgroup) continue;", "if ((step & 1) != warpgroup) continue;", "HOPPER_ORDERED"),
    Bug("backward_sm90.cuh", "lost tile", "u32 index = kDeterministic ? take() : block_index();", "u32 index = take();", "HOPPER_BACKWARD"),
    Bug("backward_sm90.cuh", "dropped wait", "mbarrier_wait(smem.barrier(kKeysEmpty), parity);", "", "HOPPER_BACKWARD"),
    Bug("backward_sm90.cuh", "wrong head", "at.head / p.splits, at.head % p.splits", "at.head % p.splits, at.head % p.splits", "HOPPER_SHARED"),
    Bug("backward_sm90.cuh", "wrong share", "task.kv_head * p.splits + task.split)", "task.kv_head + task.split)", "HOPPER_SHARED"),
    Bug("backward_sm90.cu", "step that is never done", "if (kLast) arrive(smem.barrier(kStepDone));", "", "HOPPER_BACKWARD"),
    Bug("backward_sm90.cu", "step done too early", "if (kLast) arrive(smem.barrier(kStepDone));\n      if ((stage ^ warpgroup) == 0 && previous != kNone) compute_dq(step - 2, !kLast);\n      else if (!kLast) arrive(", "arrive(smem.barrier(kStepDone));\n      if ((stage ^ warpgroup) == 0 && previous != kNone) compute_dq(step - 2, false);\n      else if (false) arrive(", "HOPPER_BACKWARD"),
    Bug("backward_sm90.cuh", "tile too many", "p.num_heads_kv * p.splits; }", "p.num_heads_q; }", "HOPPER_SHARED"),
    Bug("backward_sm90.cuh", "overwritten sum", "red_add_global(sums + i * 128,", "st_global((F32x4*)(sums + i * 128),", "HOPPER_SHARED"),
    Bug("backward_sm90.cu", "early release", "const KeyTask here = uniform(smem.task());\n    arrive(smem.barrier(kKeysEmpty));", "arrive(smem.barrier(kKeysEmpty));\n    const KeyTask here = uniform(smem.task());", "HOPPER_BACKWARD"),
    Bug("backward_sm90.cuh", "dropped turn", "while (uniform(ld_acquire_global(adders_of(p, record)))", "while (false && uniform(ld_acquire_global(adders_of(p, record)))", "HOPPER_SHARED_ORDERED"),
    Bug("backward_sm90.cuh", "turn passed before its sums", "sync_warp();     // the warp's", "// the warp's", "HOPPER_SHARED_ORDERED"),
    Bug("workspace_sm90.cuh", "wrong record", "(first + n_block) * p.num_heads_kv + kv_head", "(first + n_block) + kv_head", "HOPPER_SHARED"),
    Bug("backward_prepare_sm90.cu", "not zeroed", "i < 2 * kKeyFloats / 4", "i < kKeyFloats / 4", "HOPPER_SHARED"),
    Bug("backward_finish_sm90.cu", "dk for dv", "of_v ? dv_sums(p, record) : dk_sums(p, record)", "of_v ? dk_sums(p, record) : dv_sums(p, record)", "HOPPER_SHARED"),
    Bug("backward_finish_sm90.cu", "wrong rows", "tile = index % kTiles", "tile = 0", "HOPPER_SHARED"),
    Bug("backward_sm90.cu", "added too late", "bulk_wait<0>();", "bulk_wait<1>();", "HOPPER_ORDERED"),
    # Hopper, head dims 192 and 256
    Bug("backward_wide_sm90.cu", "dropped wait", "wait(kQFull, step);                                             // read after write: Q and", "// Q and", "WIDE"),
    Bug("backward_wide_sm90.cu", "dropped wait", "wait(kDsFull, step - 1); ", "", "WIDE"),
    Bug("backward_wide_sm90.cu", "dropped wait", "wgmma_wait<1>();\n        pin(dq_frag);", "pin(dq_frag);", "WIDE"),
    Bug("backward_wide_sm90.cu", "dropped wait", "mbarrier_wait(smem.barrier(kPFull), step & 1); ", "", "WIDE"),
    Bug("backward_wide_sm90.cu", "dropped wait", "mbarrier_wait(smem.barrier(kPEmpty), (step & 1) ^ 1);", "", "WIDE"),
    Bug("backward_wide_sm90.cu", "dropped wait", "mbarrier_wait(smem.barrier(kDsEmpty, stage), (step >> 1 & 1) ^ 1);", "", "WIDE"),
    Bug("backward_sm90.cuh", "dropped barrier", "sync_block();  // nobody waits", "// nobody waits", "WIDE"),
    Bug("backward_wide_sm90.cu", "wrong parity", "mbarrier_wait(smem.barrier(kPEmpty), (step & 1) ^ 1);", "mbarrier_wait(smem.barrier(kPEmpty), step & 1);", "WIDE"),
    Bug("backward_wide_sm90.cu", "wrong parity", "step & 1), step >> 1 & 1); };", "step & 1), step & 1); };", "WIDE_CAUSAL"),
    Bug("backward_wide_sm90.cu", "early release", "multiply(p_frag, smem.dout(stage).operand());\n        arrive(smem.barrier(kDoutEmpty, stage));", "arrive(smem.barrier(kDoutEmpty, stage));\n        multiply(p_frag, smem.dout(stage).operand());", "WIDE"),
    Bug("backward_sm90.cuh", "early release", "kWarpArrivals = 32;", "kWarpArrivals = 31;", "WIDE"),
    Bug("backward_wide_sm90.cu", "lost proxy fence", "fence_proxy_async();", "", "WIDE"),
    Bug("backward_wide_sm90.cu", "wrong adders", "kTurns ? 1 : 2;", "kTurns ? 2 : 1;", "WIDE"),
    Bug("backward_wide_sm90.cu", "wrong columns", "column / 8 * 128 + lane * 4", "lane * 4", "WIDE"),
    Bug("backward_wide_sm90.cu", "overwritten sum", "red_add_global(dq + i * 128, F32x4{", "st_global((F32x4*)(dq + i * 128), F32x4{", "WIDE_CAUSAL"),
    Bug("backward_wide_sm90.cu", "lost step", "else {\n        wgmma_fence();\n        issue_multiply<QueryTile>(gradient, a_frag, b);\n      }", "", "WIDE_CAUSAL"),
    Bug("backward_wide_sm90.cu", "lost last step", "const auto last_dq = [&] {\n      if (dq_is_due()) {", "const auto last_dq = [&] {\n      if (false) {", "WIDE_CAUSAL"),
    Bug("backward_wide_sm90.cu", "stale record", "previous = walk.record;", "", "WIDE"),
    Bug("backward_wide_sm90.cu", "missing scale", "store_gradient(p, gradient, p.softmax_scale,", "store_gradient(p, gradient, 1.f,", "WIDE"),
    Bug("backward_wide_sm90.cu", "swapped statistics", "probabilities(s_frag, p_frag, logsumexp, scores, ", "probabilities(s_frag, p_frag, (float (&)[kBlockM / 4])s_frag, scores, ", "WIDE"),
    Bug("backward_wide_sm90.cu", "dropped turn", "await_turn(p, previous, kAddersPerBlock * turns_before(sequence, task.n_block, previous_m));", "", "WIDE_ORDERED"),
    Bug("backward_wide_sm90.cu", "dropped barrier", "barrier_sync(1 + warpgroup, 128);                               // our turn", "// our turn", "WIDE_ORDERED"),
    Bug("backward_wide_sm90.cu", "dropped barrier", "barrier_sync(1 + warpgroup, 128);                                 // everybody's", "// everybody's", "WIDE_ORDERED"),
    Bug("backward_wide_sm90.cu", "turn that is never passed", "if constexpr (kDeterministic) pass_held_turn([] {});", "", "WIDE_ORDERED"),
    # what both Hopper backwards share
    Bug("backward_sm90.cuh", "off by one, end", "ends = keys < 64;", "ends = keys < 8;", "WIDE_LOW"),
    Bug("backward_sm90.cuh", "off by one, right", "first = first_key - s.diagonal - right;", "first = first_key - s.diagonal - right + 1;", "WIDE_CAUSAL"),
    Bug("backward_sm90.cuh", "off by one, left", "span = (u32)left + (u32)right;", "span = (u32)left + (u32)right - 1;", "WIDE_WINDOW"),
    Bug("backward_sm90.cuh", "off by one, unmasked", "i >= first + 63 &&", "i >= first + 62 &&", "WIDE_WINDOW"),
    Bug("backward_sm90.cuh", "head mapping", "head = (task.kv_head * p.splits + task.split) * p.split_heads;", "head = task.kv_head * p.splits + task.split;", "WIDE_HEADS"),
    Bug("backward_sm90.cuh", "stuck head", "      ++head;\n", "", "WIDE"),
    Bug("backward_sm90.cuh", "wrong record", "(m_blocks.end - m_blocks.begin) * heads - 1;", "(m_blocks.end - m_blocks.begin) * heads;", "WIDE"),
    Bug("backward_sm90.cuh", "wrong parity", "parity = (step >> 1 & 1) ^ 1;", "parity = step >> 1 & 1;", "WIDE"),
    Bug("packed_sm90.cuh", "start of a sequence", "(int)start + length, kRaggedRows}", "length, kRaggedRows}", "HOPPER_VARLEN"),
    Bug("packed_sm90.cuh", "rows of another sequence", "if (ragged) return {kRaggedRows - length,", "if (ragged) return {kRaggedRows - length - 1,", "HOPPER_VARLEN"),
    # before and after
    Bug("packed_sm90.cuh", "overlapping blocks", "0), rows, b);", "0), rows, 0);", "HOPPER_VARLEN"),
    Bug("packed_sm90.cuh", "wrong sequence", "middle) <= at.block", "middle) < at.block", "HOPPER_VARLEN"),
    Bug("backward_prepare_sm90.cu", "missing dlogsumexp", "float delta = -dlogsumexp;", "float delta = 0.f;", "WIDE"),
    Bug("backward_prepare_sm90.cu", "not zeroed", "i < kDqFloats / (4 * kThreads); ++i", "i < kDqFloats / (4 * kThreads) - 1; ++i", "WIDE"),
    Bug("backward_prepare_sm90.cu", "partial sum", "int lanes = kLanes / 2; lanes > 0", "int lanes = kLanes / 2; lanes > 1", "WIDE"),
    Bug("backward_prepare_sm90.cu", "unwritten tail", "st_global(negative_delta_rows(p, record) + local, exists ? -delta : 0.f);", "if (exists) st_global(negative_delta_rows(p, record) + local, -delta);", "WIDE"),
    Bug("backward_prepare_sm90.cu", "missing guard", "logsumexp == negative_infinity() ? -negative_infinity() : ", "", "WIDE_EMPTY"),
    Bug("backward_prepare_sm90.cu", "past the end", "if (i < sequence.q_length && chunk * 8 <", "if (chunk * 8 <", "HOPPER_BACKWARD"),
    Bug("backward_prepare_sm90.cu", "logsumexp base", "logsumexp * kLog2e", "logsumexp", "HOPPER_BACKWARD"),
    Bug("backward_prepare_sm90.cu", "sign", "? -delta : 0.f", "? delta : 0.f", "HOPPER_BACKWARD"),
    Bug("backward_prepare_sm90.cu", "another row's sum", "chunk == pass", "chunk == 0", "HOPPER_BACKWARD"),
    Bug("seqlen.cuh", "heads and blocks swapped", "position_of(index, heads, blocks)", "position_of(index, blocks, heads)", "HOPPER_BACKWARD"),
    Bug("seqlen.cuh", "overlapping sections", "section * each + (section < longer ? section : longer)", "section * each", "HOPPER_SECTIONS"),
    Bug("seqlen.cuh", "wrong section", "longer + (row - longer * (each + 1)) / each", "(row - longer * (each + 1)) / each", "HOPPER_SECTIONS"),
    Bug("backward_finish_sm90.cu", "missing scale", "acc[4 * i + 3] = sum.w * scale;", "acc[4 * i + 3] = sum.w;", "HOPPER_BACKWARD"),
    Bug("backward_finish_sm90.cu", "wrong warp", "(warp_index() * kDqTiles + tile)", "(tile * 4 + warp_index() ^ 1)", "HOPPER_BACKWARD"),
    Bug("backward_finish_sm90.cu", "unwritten tail", "first + tile * 64, sequence.q_length,", "first + tile * 64, sequence.q_length - 1,", "WIDE"),
    Bug("backward_finish_sm90.cu", "written past the end", "first + tile * 64, sequence.q_length,", "first + tile * 64, sequence.q_length + 1,", "HOPPER_VARLEN"),
]  # fmt: skip


def by_default():
    """A bug in every source. The rest is for `-m slow`: each costs a build."""
    return list({bug.source: bug for bug in reversed(BUGS)}.values())


BY_DEFAULT = by_default()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in {bug.case for bug in BY_DEFAULT} else pytest.mark.slow) for name in CASES],
)
def test_kernels_as_they_are_survive(name, monkeypatch):
    assert run(CASES[name], None, monkeypatch) is None


def tiles_of_the_matrix():
    """Every shape of tile that some generation, dtype and head dim has, for kernels whose shapes differ in little else; by
    default the smallest and the largest of each kernel."""
    shapes = {
        (kernel, tile["block_m"], tile["block_n"], tile["num_warps"], dtype)
        for kernel in ("forward_sm80", "backward_sm80", "forward_sm75", "backward_sm75")
        for tiles in planning.support().tiles[kernel].values()
        for tile in tiles
        for dtype in (("float32",) if tile.get("dtypes") == ["float32"] else ("float16",))
    }
    by_size = sorted(shapes, key=lambda shape: (shape[1] * shape[2], shape))
    extremes = [shape for order in (by_size, by_size[::-1]) for shape in {(s[0], s[4]): s for s in order}.values()]
    return [
        pytest.param(*shape, id="-".join(map(str, shape)), marks=() if shape in extremes else pytest.mark.slow)
        for shape in sorted(shapes)
    ]


@pytest.mark.parametrize("kernel, block_m, block_n, num_warps, dtype", tiles_of_the_matrix())
def test_a_feature_means_the_same_in_every_shape_of_tile(kernel, block_m, block_n, num_warps, dtype, monkeypatch):
    """Masks, biases and dropout are laid out by tiles and by warps; tables give smaller GPUs shapes that no H200 uses."""
    head_dim = 8 * num_warps if num_warps > 4 else 32  # as many columns as warps share out
    case = Case(
        kernel,
        dtype=getattr(torch, dtype),
        tile=(block_m, block_n),
        num_warps=num_warps,
        num_stages=1,
        head_dim=head_dim,
        head_dim_v=head_dim,
        batch=1,
        heads=2,
        heads_kv=1,
        seqlen_q=block_m + 45,
        seqlen_k=block_n + 77,
        dropout_p=0.3,
        features=frozenset(("mask", "bias", "nan")),
    )
    assert run(case, None, monkeypatch) is None


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=() if bug in BY_DEFAULT else pytest.mark.slow) for bug in BUGS],
    ids=lambda bug: f"{bug.source.split('.')[0]}-{bug.kind}-{bug.case}",
)
def test_planted_bug_is_noticed(bug, monkeypatch):
    assert run(CASES[bug.case], bug.patch, monkeypatch) is not None, f"nobody noticed: {bug}"


def test_every_bug_has_its_place():
    """Also those that only `-m slow` plants: a source that has changed makes the entry fail here."""
    sources = emulator_builds.sources()
    for bug in BUGS:
        assert bug.patch(bug.source, sources[bug.source]) != sources[bug.source]
