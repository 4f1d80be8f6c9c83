"""On a GPU: what the trace says ran is what the profiler's kernel names say, for every implementation of attention."""

import datetime
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import BY_NAME, ids
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashpatch
from flashpatch import findings, profiles, roofline, tracing

EVIDENCE = Path(__file__).parent / "evidence" / "h200_trace.json"
BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
NAMES = ("flashpatch", *BACKENDS, "eager", "flex")
# On a GPU the math backend is spelled out as eager attention is.
BY_KERNELS = {"sdpa_math": "eager"}


def step(name: str):
    """A call that runs one implementation, forward and backward."""
    q, k, v = (torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    dout = torch.randn_like(q)

    def run():
        if name in BACKENDS:
            with sdpa_kernel(BACKENDS[name]):
                out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        else:
            out = roofline.call(name, q, k, v, False)
        torch.autograd.grad(out, (q, k, v), dout)

    return run


def observe(name: str) -> dict:
    """What the trace and, in another run, the profiler say of one implementation."""
    run = step(name)
    run()
    with flashpatch.trace() as t:
        run()
    with torch.profiler.profile() as profiler:
        run()
        torch.cuda.synchronize()
    profile = tracing.kernels_of(profiler)
    return {
        "trace": sorted({row.family for row in t.report.rows}),
        "backward_calls": sum(row.backward_calls for row in t.report.rows),
        "milliseconds": sum(row.milliseconds or 0.0 for row in t.report.rows),
        "refused": t.report.rows[0].refused if t.report.rows else {},
        "profiler": {row.family: row.kernels for row in profile.families},
    }


def agrees(name: str, seen: dict) -> bool:
    # a compiled FlexAttention has no operator; its kernels' names are all there is
    expected = [] if name == "flex" else [name]
    return seen["trace"] == expected and list(seen["profiler"]) == [BY_KERNELS.get(name, name)]


def tutorial_snippet() -> dict:
    """fp32 tensors, as every tutorial shows them."""
    q, k, v = (torch.randn(1, 8, 1024, 64, device="cuda") for _ in range(3))
    with flashpatch.trace() as t:
        F.scaled_dot_product_attention(q, k, v)
    (row,) = t.report.rows
    return {"family": row.family, "refused": row.refused}


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_trace_agrees_with_the_profiler(name):
    seen = observe(name)
    assert agrees(name, seen), seen
    assert name == "flex" or (seen["backward_calls"] == 1 and seen["milliseconds"] > 0)


@pytest.mark.gpu
def test_the_tutorial_snippet_does_not_run_flash_attention_on_a_gpu():
    seen = tutorial_snippet()
    assert seen["family"] in ("sdpa_efficient", "sdpa_math")
    assert "dtype" in seen["refused"]["flash"].lower(), seen


@pytest.mark.gpu
def test_a_dense_mask_is_refused_in_torchs_words():
    q, k, v = (torch.randn(1, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.rand(1024, 1024, device="cuda") > 0.5
    with flashpatch.trace() as t:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    (row,) = t.report.rows
    assert row.family != "sdpa_flash" and "mask" in row.refused["flash"].lower() and row.mask == "dense"


@pytest.mark.gpu
def test_a_patched_model_keeps_its_budget():
    model = BY_NAME["llama"].model("sdpa", head_dim=64).cuda().bfloat16()
    report = tracing.run(model, {"input_ids": ids().cuda()}, patch=True, train=True, profile=True)
    assert {row.family for row in report.rows} == {"flashpatch"} and report.holds
    assert findings.violations(report, expect="flash", forbid="dense", max_declines=0) == []
    assert [row.family for row in report.profile.families] == ["flashpatch"]


@pytest.mark.skipif(not EVIDENCE.exists(), reason="nothing recorded; on a GPU: python tests/test_gpu_tracing.py")
def test_what_was_recorded_on_a_gpu_agrees_and_is_still_recognised():
    """The names of real kernels, against the patterns of today."""
    recorded = json.loads(EVIDENCE.read_text())
    assert set(recorded["implementations"]) == set(NAMES)
    for name, seen in recorded["implementations"].items():
        assert agrees(name, seen), name
        if name in ("eager", "sdpa_math"):
            continue
        for kernel in seen["profiler"][name]:
            event = {"ph": "X", "cat": "kernel", "name": kernel, "ts": 0, "dur": 1}
            assert [row.family for row in profiles.classify([event]).families] == [name], kernel
    assert recorded["tutorial_snippet"]["family"] != "sdpa_flash"


def record() -> None:
    """Write the evidence from this GPU."""
    seen = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": datetime.date.today().isoformat(),
        "implementations": {name: observe(name) for name in NAMES}, "tutorial_snippet": tutorial_snippet(),
    }  # fmt: skip
    EVIDENCE.write_text(json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    record()
