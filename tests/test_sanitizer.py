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

# Two tiles and a half in every direction, and a few calls beyond what is short to the planner, whose tiles are others. Dropout takes the
# portable kernels on every GPU; 48 heads are more tiles than a GPU has multiprocessors, so that persistent kernels take a second one.
# `build` runs all cases at once, to compile them in parallel.
PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
import flashpatch
from flashpatch import kernel_launch

hopper = torch.cuda.get_device_capability() == (9, 0)

def run_in_eight_bits(head_dim, seqlen_k=340, **keywords):
    q, k, v = (torch.randn(2, n, 4, head_dim, device="cuda").to(torch.float8_e4m3fn) for n in (300, seqlen_k, seqlen_k))
    flashpatch.attention(q, k, v, **keywords)

def run(head_dim, seqlen_q=300, seqlen_k=340, heads=4, heads_kv=2, batch=2, **keywords):
    lengths = keywords.get("cu_seqlens_q")
    shape = (lambda n, heads: (n, heads, head_dim)) if lengths is not None else (lambda n, heads: (batch, n, heads, head_dim))
    q, k, v = (
        torch.randn(shape(n, heads), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n, heads in ((seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    )
    if keywords.pop("nan", False):  # behind the window of most rows, which are then computed once more
        v.data[:, 3] = float("nan")
    out = flashpatch.attention(q, k, v, **keywords)
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))

starts = torch.tensor([0, 130, 130, 300], dtype=torch.int32, device="cuda")
cases = [
    dict(head_dim=128, seqlen_k=300, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=170, max_seqlen_k=170),
    dict(head_dim=64, window_size=(100, 20), softcap=20.0),
    dict(head_dim=64, window_size=(20, 0), nan=True),
    dict(head_dim=128, window_size=(20, 0), nan=True, dropout_p=0.1),
    dict(head_dim=96, seqused_k=torch.tensor([340, 70], dtype=torch.int32, device="cuda"), causal=True),
    dict(head_dim=192, window_size=(100, 20), softcap=20.0),
    *(dict(head_dim=head_dim, seqlen_k=1100, heads=2, window_size=window) for head_dim in (64, 128) for window in ((-1, -1), (500, 0))),
    dict(head_dim=64, mask=torch.rand(2, 1, 300, 340, device="cuda") > 0.2),
]
# what nobody looks at before a launch: starts beyond the end beside queries, and some that fall
for wild in ([0, 200, 5000, 2**31 - 1], [9000, 2**31 - 1, -7, 300], [0, 300, 40, 300]):
    wild = torch.tensor(wild, dtype=torch.int32, device="cuda")
    cases += [
        dict(head_dim=128, seqlen_k=300, cu_seqlens_q=starts, cu_seqlens_k=wild, max_seqlen_q=170, max_seqlen_k=300, **keywords)
        for keywords in (dict(causal=True), dict(deterministic=True), dict(dropout_p=0.1))
    ]
for head_dim in (64, 128, 256):
    cases += [
        dict(head_dim=head_dim, heads=48, heads_kv=48),
        dict(head_dim=head_dim, causal=True, deterministic=True),
        dict(head_dim=head_dim, causal=True, dropout_p=0.1),
        dict(head_dim=head_dim, deterministic=True, dropout_p=0.1),
    ]
eight_bits = [dict(head_dim=64, window_size=(100, 20)), dict(head_dim=128, causal=True, seqlen_k=1100)] if hopper else []
with ThreadPoolExecutor(16 if sys.argv[1:] == ["build"] else 1) as pool:
    list(pool.map(lambda case: run(**case), cases))
    list(pool.map(lambda case: run_in_eight_bits(**case), eight_bits))
torch.cuda.synchronize()
wanted = {"forward_sm80", "backward_sm80"}
if hopper:
    wanted |= {"forward_sm90", "forward_values_sm90", "backward_sm90", "backward_wide_sm90"}
assert wanted <= set(kernel_launch.launched), set(kernel_launch.launched)
print("all launched")
"""

TOOLS = ("memcheck", "synccheck", "racecheck")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Every tool at work. What it runs has been compiled before: under a tool that takes minutes."""
    root = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "FLASHPATCH_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # every tensor an allocation of its own, so that a step outside is seen
    }
    built = subprocess.run(
        [sys.executable, "-c", PROGRAM, "build"], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr[-4000:]
    command = ["--kernel-name", "kns=attention_", "--error-exitcode", "9", sys.executable, "-c", PROGRAM]
    started = {
        tool: subprocess.Popen(
            [SANITIZER, "--tool", tool, *command], cwd=root, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for tool in TOOLS
    }  # fmt: skip
    yield started
    for process in started.values():
        process.kill()


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_is_silent(running, tool):
    report, _ = running[tool].communicate(timeout=600)
    assert running[tool].returncode == 0 and "all launched" in report, report[-4000:]
