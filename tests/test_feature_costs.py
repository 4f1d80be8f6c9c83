"""What features are timed beside: every peer computes what the kernels compute. How a cost comes of what was timed."""

from collections import Counter

import pytest
import torch

from flashpatch import emulator, execution, feature_costs, feature_peers, reference

KEYWORDS = ("softcap", "bias", "mask", "alibi_slopes", "sinks", "key_ranges")
# Dropout draws its own numbers, packed sequences have no dense peer.
COMPARED = [name for name in feature_costs.FEATURES if name not in ("dropout", "varlen", "seqused_k", "deterministic")]


@pytest.mark.parametrize("peer", feature_peers.PEERS)
@pytest.mark.parametrize("feature", COMPARED)
def test_peer_computes_the_same(feature, peer, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    torch.manual_seed(0)
    s = feature_costs._setting(feature, *(torch.randn(2, 96, 8, 16) for _ in range(3)))
    call = s.call
    run = feature_peers.PEERS[peer](s.q, s.k, s.v, call, "forward")
    if run is None:
        assert peer != "eager"
        pytest.skip(f"{peer} does not have {feature}")
    if peer == "sdpa_efficient":
        monkeypatch.setattr(
            feature_peers, "SDPBackend", type("OnACpu", (), {"EFFICIENT_ATTENTION": feature_peers.SDPBackend.MATH})
        )
    keywords = {name: getattr(call, name) for name in KEYWORDS}
    window = (call.window_left, call.window_right)
    expected, _ = reference.attention(s.q, s.k, s.v, softmax_scale=call.softmax_scale, window_size=window, **keywords)
    torch.testing.assert_close(run().transpose(1, 2), expected.float(), rtol=1e-4, atol=1e-5)


def test_a_bias_that_trains_has_its_gradient_in_every_peer(monkeypatch):
    """Summed over the rows of the batch, which share it."""
    on_a_cpu = type("OnACpu", (), {"EFFICIENT_ATTENTION": feature_peers.SDPBackend.MATH})
    monkeypatch.setattr(feature_peers, "SDPBackend", on_a_cpu)
    found = []
    for peer in ("sdpa_efficient", "eager"):
        torch.manual_seed(0)
        s = feature_costs._setting("bias of heads, with gradient", *(torch.randn(2, 33, 4, 16) for _ in range(3)))
        found.append(feature_peers.PEERS[peer](s.q, s.k, s.v, s.call, "backward")())
    assert [gradient.shape for gradient in found[0]] == [*3 * [(2, 4, 33, 16)], (1, 4, 33, 33)]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
def test_a_head_dim_that_is_padded_is_timed_on_padded_copies(monkeypatch):
    """Its kernels were handed the tensors as they are."""
    monkeypatch.setenv("FLASHPATCH_EMULATE", "1")
    torch.manual_seed(0)
    s = feature_costs._setting("causal", *(torch.randn(1, 33, 2, 20).half() for _ in range(3)))
    forward, backward = (
        feature_costs._kernel_run(s, d, feature_costs._plan(s, d, f"{d}_sm80", execution.device_of(s.q.device)))()
        for d in ("forward", "backward")
    )
    expected, _ = reference.attention(s.q, s.k, s.v, window_size=(-1, 0))
    torch.testing.assert_close(forward[0].double(), expected, rtol=1e-2, atol=2e-3)
    assert [gradient.shape for gradient in backward[:3]] == 3 * [s.q.shape]


def test_a_cost_compares_neighbours(monkeypatch):
    """The clock drifts, and depends on what ran just before: each sample has one of its plain kernel beside it, before or after."""
    times = {"plain": 4.0, "causal": 3.0}
    sampled = []

    def makers(setting, direction, peers):
        feature = "causal" if setting.call.window_right == 0 else "plain"
        return {kernel: lambda kernel=kernel: lambda: (feature, kernel) for kernel in ("forward_sm80", *peers)}

    def milliseconds(run, device, budget):
        sampled.append(run())
        return times[sampled[-1][0]] * 1.01 ** len(sampled)

    monkeypatch.setattr(feature_costs, "DIRECTIONS", ("forward",))
    monkeypatch.setattr(feature_costs, "_makers", makers)
    monkeypatch.setattr(feature_costs.benchmarking, "milliseconds", milliseconds)
    monkeypatch.setattr(feature_costs.torch.cuda, "synchronize", lambda device: None)
    found = feature_costs._of_head_dim(
        16, 1, 63, 32, torch.float32, ("causal",), ("sdpa_efficient",), feature_costs.ROUNDS, "cpu"
    )
    visible = 64 / 126
    for kernel in ("forward_sm80", "sdpa_efficient"):
        costs = {cost.feature: cost.cost for cost in found if cost.kernel == kernel}
        assert costs == {"plain": 1.0, "causal": pytest.approx(3 / 4 / visible, rel=0.02)}
        first, third = next(cost.quartiles for cost in found if (cost.kernel, cost.feature) == (kernel, "causal"))
        assert first <= costs["causal"] <= third and first < third
        # nothing between a sample and its plain one; each side as often
        places = [place for place, sample in enumerate(sampled) if sample == ("causal", kernel)]
        before = [sampled[place - 1] == ("plain", kernel) for place in places[1::2]]
        after = [sampled[place + 1] == ("plain", kernel) for place in places[::2]]
        assert before and all(before) and all(after)
    count = Counter(sampled)
    assert count["causal", "forward_sm80"] == feature_costs.ROUNDS
    assert count["causal", "sdpa_efficient"] == feature_costs.PEER_ROUNDS
