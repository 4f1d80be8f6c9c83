"""What features are timed beside: every peer computes what the kernels compute."""

import pytest
import torch

from flashpatch import feature_costs, feature_peers, reference

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
