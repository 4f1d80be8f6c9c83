"""Why F.scaled_dot_product_attention does not take a backend for a call, in torch's own words.

torch prints its reasons as warnings of `torch.backends.cuda.can_use_*_attention(params, debug=True)` and of the choice
operator behind scaled_dot_product_attention; they are caught here, from Python's warnings and from the process's
standard error, where some of its builds write them.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import warnings
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Lines that announce a reason or speak of other backends, and where in torch a warning comes from.
_NO_REASON = re.compile(r"kernel not used because|runtime disabled|No available kernel|No viable backend")
_ORIGIN = re.compile(r"\s*\((Triggered internally|function) .*", re.DOTALL)
_STAMP = re.compile(r"^\[W.*?\]\s*(Warning:)?\s*")


def refusals(q, k, v, mask, dropout_p: float, is_causal: bool, enable_gqa: bool, taken: str) -> dict[str, str]:
    """{backend: why it was not taken} for the fused backends other than `taken`; empty if nothing faster exists."""
    if q.device.type == "cpu":
        if taken == "sdpa_flash_cpu":
            return {}
        return {"flash": _on_cpu(q, k, v, mask, dropout_p, is_causal, enable_gqa)}
    if q.device.type != "cuda":
        return {}
    found = {}
    for name in BACKENDS:
        if taken == f"sdpa_{name}":
            break
        found[name] = _on_cuda(name, q, k, v, mask, dropout_p, is_causal, enable_gqa)
    return found


def forecast(q, k, v, mask, dtype: torch.dtype) -> str:
    """Why SDPA would not run FlashAttention for such a call on an NVIDIA GPU, by its documented limits; empty if it may."""
    reasons = []
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}")
    if mask is not None:
        reasons.append("it takes no attn_mask")
    if q[-1] > 256:
        reasons.append(f"it takes head dims up to 256, not {q[-1]}")
    if q[-1] != v[-1] or k[-1] != v[-1]:
        reasons.append("it takes one head dim for q, k and v")
    return "; ".join(reasons)


def _on_cpu(q, k, v, mask, dropout_p, is_causal, enable_gqa) -> str:
    if not torch.backends.cuda.flash_sdp_enabled():
        return "switched off (sdpa_kernel or torch.backends.cuda.enable_flash_sdp)"
    texts = _choice_words(SDPBackend.FLASH_ATTENTION, q, k, v, mask, dropout_p, is_causal, enable_gqa)
    if not texts and mask is not None and mask.requires_grad:
        texts = ["the attn_mask requires a gradient, which no fused CPU kernel computes"]
    return "; ".join(texts) or "torch gives no reason"


def _on_cuda(name, q, k, v, mask, dropout_p, is_causal, enable_gqa) -> str:
    enabled = {
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    }[name]
    if not enabled():
        return f"switched off (sdpa_kernel or torch.backends.cuda.enable_{'mem_efficient' if name == 'efficient' else name}_sdp)"
    usable = {
        "flash": torch.backends.cuda.can_use_flash_attention,
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
    }[name]
    parameters = torch.backends.cuda.SDPAParams(q, k, v, mask, dropout_p, is_causal, enable_gqa)
    with sdpa_kernel(BACKENDS[name]), _heard() as texts:
        able = usable(parameters, debug=True)
    if able:
        return "it could have run; torch preferred another backend"
    texts = texts or _choice_words(BACKENDS[name], q, k, v, mask, dropout_p, is_causal, enable_gqa)
    return "; ".join(texts) or "torch gives no reason"


def _choice_words(backend, q, k, v, mask, dropout_p, is_causal, enable_gqa) -> list[str]:
    """What the choice operator says when only `backend` is allowed."""
    # "no available kernel" is the answer asked for; its reasons are in the warnings
    with sdpa_kernel(backend), _heard() as texts, contextlib.suppress(RuntimeError):
        torch._fused_sdp_choice(q, k, v, mask, dropout_p, is_causal, enable_gqa=enable_gqa)
    return texts


@contextmanager
def _heard():
    """A list that has, after the block, every reason torch gave inside it."""
    texts: list[str] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        os.dup2(file.fileno(), 2)
        try:
            yield texts
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            printed = file.read().decode(errors="replace").splitlines()
            for text in [*(str(warning.message) for warning in caught), *printed]:
                text = " ".join(_ORIGIN.sub("", _STAMP.sub("", text)).split())
                if text and not _NO_REASON.search(text) and text not in texts:
                    texts.append(text)


def enabled() -> tuple[bool, ...]:
    """Which backends are switched on."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
