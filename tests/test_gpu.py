"""What only a GPU shows: streams, graphs, devices, memory, large offsets, synchronisation, training. Run with -m gpu."""

from __future__ import annotations

import concurrent.futures
import random
import statistics
import warnings

import pytest
import torch
import torch.nn.functional as F
from tiny_models import BY_NAME

import flashpatch
from flashpatch import case_runs, cases, counting, evidence, execution, reference, tolerance

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    if not (torch.cuda.is_available() and torch.version.cuda):
        pytest.skip("no GPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flashpatch:")
        yield execution.device_of(torch.device("cuda", torch.cuda.current_device()))


def qkv(batch=2, seqlen=257, heads=4, heads_kv=2, head_dim=64, dtype=torch.bfloat16, grad=False, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def make(heads):
        tensor = torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=dtype, generator=generator)
        return tensor.requires_grad_(grad)

    return make(heads), make(heads_kv), make(heads_kv)


def test_a_sample_of_the_evidence_is_derived_anew(gpu):
    """Recorded cases with fresh seeds: what the evidence says still holds on this machine."""
    found = cases.cases(gpu)
    for case in random.SystemRandom().sample(found, 24):
        result = case_runs.run_case(case, gpu, seed=random.SystemRandom().randrange(2**31))
        assert result.passed, (case.name, result.seed, result.error, [c.message for c in result.checks if not c.passed])
        assert sum(result.launches.values()) or 0 in (case.batch, case.seqlen_q), case.name


def test_evidence_of_this_gpu_matches_the_sources(gpu):
    path = evidence.folder() / f"{evidence.file_name(gpu)}.json"
    if not path.exists():
        pytest.skip(f"no evidence for {gpu.name}; type: flashpatch verify --record")
    from flashpatch import planning

    stale = {
        cell: why
        for cell, why in evidence.stale_cells(planning.support(), path.parent).items()
        if gpu.generation in cell
    }
    assert not stale, f"type: flashpatch verify --record\n{stale}"


def test_launches_follow_torchs_current_stream():
    q, k, v = qkv(seqlen=1024)
    expected = flashpatch.attention(q, k, v)
    stream = torch.cuda.Stream()
    for _ in range(20):
        late = torch.zeros_like(q)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            late.copy_(q)  # a launch on another stream would read zeros
            found = flashpatch.attention(late, k, v)
        stream.synchronize()
        assert torch.equal(found, expected)


def test_threads_launch_side_by_side():
    """Each thread on a stream of its own, with layouts of its own: nothing that is packed for one reaches the other."""
    inputs = [qkv(seqlen=64 * n, heads=n, heads_kv=n, dtype=dtype, seed=n) for n, dtype in enumerate(
        (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32), start=1)]  # fmt: skip
    expected = [flashpatch.attention(*tensors, causal=True) for tensors in inputs]
    torch.cuda.synchronize()

    def run(index: int) -> bool:
        stream, right = torch.cuda.Stream(), True
        with torch.cuda.stream(stream):
            for _ in range(200):
                found = flashpatch.attention(*inputs[index], causal=True)
                right &= torch.equal(found, expected[index])
        return right

    with concurrent.futures.ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(run, range(len(inputs))))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_captured_graph_replays_with_new_inputs(head_dim):
    q, k, v = qkv(head_dim=head_dim, grad=True)
    dout = torch.randn_like(q)

    def step():
        out = flashpatch.attention(q, k, v, causal=True)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        with torch.no_grad():
            for tensor, fresh in zip((q, k, v), qkv(head_dim=head_dim, seed=seed), strict=True):
                tensor.copy_(fresh)
        graph.replay()
        flashpatch.attention(*qkv(head_dim=head_dim))  # eager calls beside the graph disturb neither
        for name, found, expected in zip(("out", "dq", "dk", "dv"), captured, step(), strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, msg=name)


def test_dropout_draws_anew_at_every_replay():
    q, k, v = qkv()
    flashpatch.attention(q, k, v, dropout_p=0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashpatch.attention(q, k, v, dropout_p=0.3)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_a_cold_call_in_a_capture_is_a_clear_error():
    q, k, v = qkv(head_dim=40, dtype=torch.float16)  # a head dim nothing else here uses
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run the same call once before capturing"), torch.cuda.graph(graph):
        flashpatch.attention(q, k, v, softcap=7.0)
    torch.cuda.synchronize()
    assert flashpatch.attention(q, k, v, softcap=7.0).isfinite().all()


@pytest.mark.parametrize("head_dim", [4, 20, 65, 250])
def test_a_head_dim_of_any_size_runs_on_kernels(head_dim):
    """Through copies with zeros behind them, forward and backward, and a captured graph too."""
    counting.reset_counts()
    leaves = qkv(head_dim=head_dim, grad=True)
    out = flashpatch.attention(*leaves, causal=True)
    dout = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, leaves, dout))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact, _ = reference.attention(*wide, causal=True)
    eager, _ = reference.attention(*leaves, causal=True, upcast=False)
    rights = (exact, *torch.autograd.grad(exact, wide, dout.double()))
    theirs = (eager, *torch.autograd.grad(eager, leaves, dout))
    for name, mine, other, right in zip(("out", "dq", "dk", "dv"), found, theirs, rights, strict=True):
        outcome = tolerance.compare(mine, other, right, factor=3.0 if name.startswith("d") else 2.0)
        assert outcome.ok, outcome.message(name)
    stats = flashpatch.stats()
    assert not stats["declines"] and sum(stats["padded"].values()) == 2
    q, k, v = (leaf.detach() for leaf in leaves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashpatch.attention(q, k, v, causal=True)
    graph.replay()
    assert torch.equal(captured, out)


@pytest.mark.parametrize("kind", ["plain", "gqa-causal", "varlen", "fallback"])
def test_nothing_waits_for_the_gpu(kind):
    q, k, v = qkv(seqlen=64, grad=True)
    keywords = {"causal": True} if kind == "gqa-causal" else {}
    if kind == "varlen":
        q, k, v = (tensor.detach().flatten(0, 1).requires_grad_() for tensor in (q, k, v))
        starts = torch.tensor([0, 30, 128], dtype=torch.int32, device="cuda")
        keywords = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=98, max_seqlen_k=98)
    if kind == "fallback":
        q, k, v = (tensor.detach().float().requires_grad_() for tensor in (q, k, v))

    def step():
        out = flashpatch.attention(q, k, v, on_decline="fallback", **keywords)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_all_memory_is_torchs():
    import cupy

    q, k, v = qkv(grad=True)
    flashpatch.attention(q, k, v).sum().backward()
    assert cupy.get_default_memory_pool().used_bytes() == 0


@pytest.mark.parametrize("causal", [False, True])
def test_extra_memory_grows_linearly(causal):
    extra = {}
    for seqlen in (2048, 4096, 8192, 16384, 32768, 65536):
        q, k, v = qkv(1, seqlen, 2, 2, grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flashpatch.attention(q, k, v, causal=causal).sum().backward()
        torch.cuda.synchronize()
        extra[seqlen] = torch.cuda.max_memory_allocated() - before
    assert extra[65536] <= 1.1 * 32 * extra[2048], extra


def test_offsets_beyond_32_bits():
    """Rows 2^32 bytes and more apart: 32-bit arithmetic would read elsewhere."""
    room = torch.zeros(3, 2**31 + 64 * 4 * 40, dtype=torch.bfloat16, device="cuda")
    q, k, v = (torch.randn(3, 40, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    far = room.as_strided((3, 40, 4, 64), (room.stride(0), 256, 64, 1)).copy_(k.detach()).requires_grad_()
    out, expected = flashpatch.attention(q, far, v), flashpatch.attention(q, k, v)
    assert torch.equal(out, expected)
    for found, wanted in zip(
        torch.autograd.grad(out.sum(), (q, far, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_deterministic_is_bit_equal(head_dim):
    q, k, v = qkv(2, 1500, 8, 2, head_dim, grad=True)
    dout = torch.randn_like(q)

    def step():
        out = flashpatch.attention(q, k, v, causal=True, deterministic=True)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    first = step()
    for _ in range(10):
        for name, ours, before in zip(("out", "dq", "dk", "dv"), step(), first, strict=True):
            assert torch.equal(ours, before), name


def test_real_activations_with_large_logits():
    """A few keys far larger than the others, as trained models have them (attention sinks)."""
    q, k, v = qkv(2, 512, 4, 4, 128)
    k[:, :4] *= 12
    out, logsumexp = flashpatch.attention(q, k, v, causal=True, return_logsumexp=True)
    expected, _ = reference.attention(q, k, v, causal=True)
    eager, _ = reference.attention(q, k, v, causal=True, upcast=False)
    outcome = tolerance.compare(out, eager, expected)
    assert outcome.ok, outcome.message("large logits")
    assert logsumexp.isfinite().all()


def test_autocast_and_fp32_norms():
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = flashpatch.attention(q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, flashpatch.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_compiled_training_step_has_no_graph_break():
    q, k, v = qkv(grad=True)
    compiled = torch.compile(
        lambda q: flashpatch.attention(q, k, v, causal=True).float().square().sum(), fullgraph=True
    )
    before = counting.layers[0].calls
    for _ in range(3):
        (ours,) = torch.autograd.grad(compiled(q), q)
    assert counting.layers[0].calls == before + 3
    (eager,) = torch.autograd.grad(flashpatch.attention(q, k, v, causal=True).float().square().sum(), q)
    torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


def _loss_curve(patched: bool, seed: int, steps: int = 200) -> list[float]:
    """A small llama that learns to repeat a random sequence: 200 steps in bf16 autocast."""
    model = BY_NAME["llama"].model(head_dim=64).cuda().train()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    patch = flashpatch.apply(model) if patched else None
    losses = []
    for _ in range(steps):
        half = torch.randint(3, 99, (16, 24), generator=generator)
        tokens = torch.cat([half, half], 1).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if patch is not None:
        assert all(row.launches.get("forward_sm90") or row.launches.get("forward_sm80") for row in patch.report.rows)
    return losses


def test_training_stays_in_the_band_of_eager_seeds():
    """200 steps: the patched loss curve, smoothed, lies within the range of five eager ones that differ by data seed."""

    def smooth(losses):
        return [statistics.fmean(losses[i : i + 20]) for i in range(0, len(losses), 20)]

    band = [smooth(_loss_curve(False, seed)) for seed in range(5)]
    patched = smooth(_loss_curve(True, 0))
    for i, loss in enumerate(patched):
        low, high = min(curve[i] for curve in band), max(curve[i] for curve in band)
        slack = 0.5 * (high - low)
        assert low - slack <= loss <= high + slack, (i, loss, [curve[i] for curve in band])
    assert patched[-1] < patched[0] - 0.05


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_runs_beside_the_first_whichever_is_current():
    inputs = [[x.to(f"cuda:{index}").requires_grad_() for x in qkv()] for index in (0, 1)]
    results = {}
    for current in (0, 1):
        with torch.cuda.device(current):
            for index, (q, k, v) in enumerate(inputs):
                out = flashpatch.attention(q, k, v, causal=True)
                gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
                assert {t.device for t in (out, *gradients)} == {torch.device("cuda", index)}
                results[current, index] = [t.cpu() for t in (out, *gradients)]
    for (current, index), tensors in results.items():
        for tensor, first in zip(tensors[:1] + tensors[2:], results[0, 0][:1] + results[0, 0][2:], strict=True):
            torch.testing.assert_close(tensor, first, rtol=0, atol=0, msg=f"GPU {index} while {current} is current")
        torch.testing.assert_close(tensors[1], results[0, 0][1], rtol=1e-2, atol=1e-2)  # dq is summed in any order
