"""Which implementation of attention an operator or a GPU kernel belongs to, by its name. Data, and three lookups.

`dense` families hold the whole score matrix in memory; `flash` ones compute it in tiles by the FlashAttention
algorithm; the others are fused in another way. The names of kernels are those that torch 2.11 to 2.13, flash-attn 2 to
4, xFormers, vLLM, SGLang, FlashInfer and TensorRT-LLM launch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One implementation of attention. `kind` is flash, fused, dense or unknown."""

    name: str
    title: str
    kind: str
    operators: str = ""  # regular expression over "namespace::operator"
    kernels: str = ""  # regular expression over kernel names as a profiler shows them


_AROUND = (
    r"(?!.*(norm|rope|rotary|cache|merge|reduce_seg|copy|gather|scatter|quant|topk|index|metadata|schedul|plan|mask|softmax"
    r"|proj|linear_att|lightning|dropout|bias|gemm|pad|transpose|concat|store|sink_init))"
)

# The first that matches decides, so the particular stand before the general.
FAMILIES = [
    Family(
        "flashpatch", "flashpatch kernel", "flash", r"^flashpatch::attention_", r"\battention_(forward|backward|decode)_\w+"
    ),
    Family("flashpatch_fallback", "flashpatch fallback (torch operators, in tiles)", "fused"),
    Family(
        "sdpa_flash", "SDPA, FlashAttention", "flash",
        r"^aten::_(scaled_dot_product_flash_attention|flash_attention_(forward|backward))(_backward|_quantized)?$",
        r"pytorch_flash::|pytorch_fmha::",
    ),
    Family(
        "sdpa_cudnn", "SDPA, cuDNN", "flash", r"^aten::_(scaled_dot_product_)?cudnn_attention(_forward)?(_backward)?$",
        r"cudnn.*(sdpa|fmha|flash|fprop_attn|mha|multihead|dot_do_o)",
    ),
    Family(
        "sdpa_flash_cpu", "SDPA, CPU flash", "flash", r"^aten::_scaled_dot_product_flash_attention_for_cpu(_backward)?$"
    ),
    Family(
        "xformers", "xFormers", "flash", r"^xformers\w*::\w*(attention|fwd|bwd|flash)", r"xformers|_fwd_kernel_splitK|_splitK_reduce"
    ),
    Family(
        "sdpa_efficient", "SDPA, memory-efficient", "fused",
        r"^aten::_(scaled_dot_product_)?efficient_attention(_forward)?(_backward)?$",
        r"fmha_cutlass[FB]|PyTorchMemEffAttention|\bAttention(Backward)?Kernel<",
    ),
    Family("sdpa_overrideable", "SDPA, the device's own", "fused", r"^aten::_scaled_dot_product_fused_attention_overrideable"),
    Family("sdpa_math", "SDPA, math", "dense", r"^aten::_scaled_dot_product_attention_math"),
    Family("sage", "SageAttention (quantised)", "flash", r"^sage\w*::", r"qk_int8?_sv|qk_int_sv|sageattn|sage_attn"),
    Family(
        "flex", "FlexAttention, compiled", "flash", "", r"triton_tem_\w*flex_(attention|decoding)|\w*flex_(attention|decoding)\w*"
    ),
    Family("flex_eager", "FlexAttention, not compiled", "dense", r"^higher_order::flex_attention(_backward)?$"),
    Family(
        "native_mha", "nn.MultiheadAttention's C++ path", "unknown",
        r"^aten::(_native_multi_head_attention|_transformer_encoder_layer_fwd|_triton_multi_head_attention)$",
    ),
    Family("native_mha_dense", "nn.MultiheadAttention's C++ path: matmul, softmax, matmul", "dense"),
    Family(
        "flashinfer", "FlashInfer", "flash", r"^flashinfer::\w*(prefill|decode|attention|mla)",
        r"flashinfer.*(Prefill|Decode|MLA|Attention)(?!.*(Rotary|Plan))|Batch(Prefill|Decode)With|Single(Prefill|Decode)With",
    ),
    Family(
        "paged", "a serving engine's paged attention", "flash",
        r"^\w+::(paged_attention|unified_attention)\w*$",
        r"paged_attention_(v\d|ll4mi)|unified_attention|masked_multihead_attention_kernel|mmha|xqa_kernel|kernel_mha"
        r"|_fwd_(grouped_)?kernel_stage\d|_decode_att|decode_attention|extend_attention|context_attention_fwd|fmha_v2|fmhaSm",
    ),
    Family(
        "flash_attn", "flash-attn", "flash",
        r"^\w*(flash|fa[234])\w*::\w*(fwd|bwd|forward|backward|attn|attention)\w*$|^sgl_kernel::\w*fwd",
        r"flash_(fwd|bwd)|FlashAttn(Fwd|Bwd)|FlashAttention(Forward|Backward)|flash::\w|flashattn|flash_attn|BatchedFlash",
    ),
    Family(
        "fmha", "FMHA of CUTLASS or Composable Kernel", "flash", r"^aiter::\w*(fmha|attn|attention)",
        r"cutlass::fmha|ck_tile::\w*Fmha|fmha_(fwd|bwd)|aiter\w*fmha",
    ),
    Family(
        "triton_attention", "attention written in Triton", "flash", "",
        r"^_?attn_(fwd|bwd)|^_?(flash|decode|prefill)_?attn|^_?bwd_kernel_d[kqv]|^_?bwd_d[kqv]_?\w*kernel|parallel_attn_(fwd|bwd)",
    ),
    Family("eager", "eager: matmul, softmax, matmul", "dense"),
    # Last: whatever has attention in its name, of whomever, and is not one of the things done around it.
    Family(
        "unknown", "attention that flashpatch does not know", "unknown",
        r"(?i)^(?!aten::|prims?::|flashpatch::)\w+::" + _AROUND + r"\w*(attention|attn|fmha|multi_?head)\w*$",
        r"(?i)^(?!.*at::native)" + _AROUND + r".*(attention|attn|fmha|multi_?head|\bmla_|_mla_(prefill|decode)|^_fwd_kernel$)",
    ),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}

_OPERATORS = [(re.compile(family.operators), family) for family in FAMILIES if family.operators]
_KERNELS = [(re.compile(family.kernels), family) for family in FAMILIES if family.kernels]

# Other kernels that an eager attention is made of.
SOFTMAX = re.compile(r"softmax(?!.*(log_?softmax|nll))", re.IGNORECASE)
LOG_SOFTMAX = re.compile(r"log_?softmax|nll_loss|cross_entropy|LogSoftMax", re.IGNORECASE)
GEMM = re.compile(r"gemm|gemv|nvjet|xmma|cutlass\w*::Kernel|cutlass_\d+|\bdot_kernel|splitKreduce", re.IGNORECASE)
BETWEEN = re.compile(
    r"elementwise|dropout|copy|masked|fill|scal|add|mul|div|cat|and_kernel|splitKreduce|triton_poi", re.IGNORECASE
)


def of_operator(name: str) -> Family | None:
    """The family of "namespace::operator", or None if it is no attention."""
    return next((family for pattern, family in _OPERATORS if pattern.search(name)), None)


def of_kernel(name: str) -> Family | None:
    """The family of a GPU kernel's name, or None if it is no attention."""
    return next((family for pattern, family in _KERNELS if pattern.search(name)), None)


def is_backward(name: str) -> bool:
    """Whether an operator or kernel of attention belongs to its backward."""
    return bool(re.search(r"backward|bwd|bprop|cutlassB|_dot_do_o|convert_d[qkv]", name, re.IGNORECASE))


def allowed(words: str) -> tuple[set[str], bool]:
    """The families of `--expect` words with commas, and whether they take torch's CPU flash kernel as it is.

    "flash" asks for what a GPU runs: that kernel stands for it only where FlashAttention could take the same call.
    "flash_cpu" and "fused" mean the kernel itself.
    """
    words = [word.strip().lower() for word in words.split(",")]
    named = any("sdpa_flash_cpu" in expand(word) for word in words if word != "flash")
    return set().union(*map(expand, words)), named


def expand(word: str) -> set[str]:
    """The families a word of `--expect` and `--forbid` stands for: a family, a kind, or a backend of SDPA.

    Raises ValueError, naming what is known.
    """
    word = word.strip().lower()
    named = {family.name for family in FAMILIES if word in (family.name, family.name.removeprefix("sdpa_"))}
    kinds = {family.name for family in FAMILIES if family.kind == word}
    if word == "fused":
        kinds |= {family.name for family in FAMILIES if family.kind == "flash"}
    if word == "flash":
        named = set()
    if not named | kinds:
        known = [family.name for family in FAMILIES]
        short = [name.removeprefix("sdpa_") for name in known if name.startswith("sdpa_") and name != "sdpa_flash"]
        raise ValueError(f"{word!r} is no kind of attention; known: flash, fused, dense, {', '.join([*short, *known])}")
    return named | kinds
