"""compute-sanitizer over small cases of every kernel: no access out of bounds, no race in shared memory, no barrier misused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SANITIZER = shutil.which("compute-sanitizer")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer (of the CUDA toolkit) is not on the PATH"),
]

# Two tiles and a half in every direction. Dropout takes the portable kernels on every GPU.
PROGRAM = """
import torch
import flashpatch

def run(head_dim, seqlen_q=300, seqlen_k=340, **keywords):
    lengths = keywords.get("cu_seqlens_q")
    shape = (lambda n, heads: (n, heads, head_dim)) if lengths is not None else (lambda n, heads: (2, n, heads, head_dim))
    q, k, v = (
        torch.randn(shape(n, heads), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n, heads in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2))
    )
    out = flashpatch.attention(q, k, v, **keywords)
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))

starts = torch.tensor([0, 130, 130, 300], dtype=torch.int32, device="cuda")
for head_dim in (64, 128, 256):
    run(head_dim)
    run(head_dim, causal=True, deterministic=True)
    run(head_dim, causal=True, dropout_p=0.1)
    run(head_dim, deterministic=True, dropout_p=0.1)
run(128, seqlen_k=300, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=170, max_seqlen_k=170)
run(64, window_size=(100, 20), softcap=20.0)
run(64, mask=torch.rand(2, 1, 300, 340, device="cuda") > 0.2)
torch.cuda.synchronize()
print("launched", sorted(flashpatch.stats()["launches"]))
"""


# The Hopper backwards are not under racecheck. It reports their exchanges through mbarriers that one lane of a warp arrives at for
# all its lanes, after a warp barrier: by PTX's memory model that orders the accesses of the whole warp, the tool counts
# only the arriving lane's.
CHECKS = {
    "memcheck": "attention_", "synccheck": "attention_", "racecheck-forward": "attention_forward",
    "racecheck-backward": "attention_backward_sm80",
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_sanitizer_is_silent(check):
    tool = check.split("-")[0]
    command = [SANITIZER, "--tool", tool, "--kernel-name", f"kns={CHECKS[check]}", "--error-exitcode", "9"]
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[1],
        # every tensor an allocation of its own, so that a step outside is seen
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0 and "launched" in report, report[-4000:]
