"""Attention that a model computes in its own code, read while it runs and done as one call.

Some models never ask for an attention implementation: their modules multiply q by k, scale and mask the scores, take a
softmax and multiply by v. `MODULES` says which of them are read. While such a module runs, its product of q and k gives
`Scores` instead of a tensor. They record what the module does to them (scale, ALiBi and other biases, masks, softmax,
dropout), and the product with v becomes one call of `interface.attention_function`. Whatever cannot be recorded is
computed from the module's own operations, exactly as it wrote them, and counted as the decline `scores_used`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import attention_weights, counting, interface
from .recorded_scores import Scores

# ---- where ----


class Where(NamedTuple):
    """Where a module class has its attention."""

    product: int = 0  # which of its batched products is that of q and k
    masks: bool = False  # its model's masks may be MaskSpecs: they are built by transformers' masking functions
    # A field of a module's configuration with which they may not: the model adds to its masks, by its implementation's name.
    unless: str = ""


# "package.Class" under transformers.models -> where. Every row is compared with eager in tests/test_inlined.py.
MODULES = {
    "blip.BlipAttention": Where(),
    "blip.BlipTextSelfAttention": Where(),
    "bloom.BloomAttention": Where(masks=True),
    "codegen.CodeGenAttention": Where(masks=True),
    "deberta.DisentangledSelfAttention": Where(),
    "deberta_v2.DisentangledSelfAttention": Where(),
    "falcon.FalconAttention": Where(masks=True, unless="alibi"),
    "gpt_neo.GPTNeoSelfAttention": Where(masks=True),
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": Where(masks=True),
    "gptj.GPTJAttention": Where(masks=True),
    "imagegpt.ImageGPTAttention": Where(),
    "luke.LukeSelfAttention": Where(),
    "megatron_bert.MegatronBertSelfAttention": Where(),
    "mpnet.MPNetSelfAttention": Where(),
    "mpt.MptAttention": Where(masks=True),
    "rembert.RemBertSelfAttention": Where(),
    "roformer.RoFormerSelfAttention": Where(),
    "sam.SamVisionAttention": Where(),
    "sam.SamVisionSdpaAttention": Where(),
    "sam_hq.SamHQVisionAttention": Where(),
    "sam_hq.SamHQVisionSdpaAttention": Where(),
    "speecht5.SpeechT5Attention": Where(),
    "tapas.TapasSelfAttention": Where(),
    "trocr.TrOCRAttention": Where(masks=True),
    "vilt.ViltSelfAttention": Where(),
    "visual_bert.VisualBertSelfAttention": Where(),
    "vitdet.VitDetAttention": Where(),
    "xglm.XGLMAttention": Where(masks=True),
}


@functools.cache
def where(cls: type) -> Where | None:
    """Where a module class has its attention; None for classes that are not read.

    Nor is one that asks for an implementation in the transformers that is installed: GPT-J does from 5.24 on, say.
    """
    if "ALL_ATTENTION_FUNCTIONS" in "".join(interface.source_of(base) for base in cls.__mro__[:-2]):
        return None
    parts = cls.__module__.split(".")
    if parts[:2] != ["transformers", "models"] or len(parts) < 4:
        return None
    return MODULES.get(f"{parts[2]}.{cls.__name__}")


_PACKAGES = {name.split(".")[0] for name in MODULES}


def may_have(model_class: type) -> bool:
    """Whether models of this class are of a package with modules that are read."""
    parts = model_class.__module__.split(".")
    return parts[:2] == ["transformers", "models"] and parts[2] in _PACKAGES


# ---- reading a module ----

_PRODUCTS = {
    torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__, torch.baddbmm,
    torch.Tensor.baddbmm,
}  # fmt: skip
_ADDING = {torch.baddbmm, torch.Tensor.baddbmm}
_WIDENING = {torch.Tensor.to, torch.Tensor.float, torch.Tensor.type_as}
_TURNING = {torch.Tensor.transpose, torch.transpose, torch.Tensor.permute, torch.permute}


class Reading(TorchFunctionMode):
    """One forward of one module: hears its operations and gives `Scores` for its product of q and k."""

    def __init__(self, module, tag, product: int):
        super().__init__()
        self.module, self.tag, self.name = module, tag, type(module).__name__
        self.q = None
        self.uncompiled = None  # a mode to leave with this one, in a compiled model
        self.before = product  # products still to come before that of q and k
        self.wide: dict[int, tuple] = {}  # id of a tensor -> (it, what it was before it was widened)
        self.constants: dict[int, tuple] = {}  # id of a tensor -> (it, its number)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _PRODUCTS and self.before >= 0 and not any(isinstance(arg, Scores) for arg in args):
            made = self._scores(function, args, kwargs)
            if made is not None:
                return made
        elif function is torch.nn.functional.scaled_dot_product_attention:
            return self._whole(*args, **kwargs)
        result = function(*args, **kwargs)
        if function in _WIDENING:
            self._widened(args[0], result)
        elif function in _TURNING and id(args[0]) in self.wide:
            narrow = self.wide[id(args[0])][1]
            self.wide[id(result)] = result, function(narrow, *args[1:], **kwargs)
        elif function is torch.full or function is torch.tensor:
            value = args[1] if function is torch.full and len(args) > 1 else kwargs.get("fill_value", args[0])
            if isinstance(value, (int, float)) and result.numel() == 1:
                self.constants[id(result)] = result, float(value)
        return result

    def _widened(self, narrow, wide) -> None:
        """Remember what a tensor was before its dtype became a wider one: kernels take the narrow one, and lose nothing."""
        if (
            isinstance(narrow, torch.Tensor) and isinstance(wide, torch.Tensor) and narrow.dtype != wide.dtype
            and narrow.is_floating_point() and torch.promote_types(narrow.dtype, wide.dtype) == wide.dtype
        ):  # fmt: skip
            self.wide[id(wide)] = wide, narrow

    def _scores(self, function, args, kwargs) -> Scores | None:
        bias = None
        options = {"beta": 1.0, "alpha": 1.0}
        if function in _ADDING:
            bound = _BADDBMM.bind(*args, **kwargs)
            bias, q, turned = (bound.arguments[name] for name in ("input", "batch1", "batch2"))
            options.update({name: float(bound.arguments[name]) for name in options if name in bound.arguments})
        else:
            q, turned = args if len(args) == 2 else (args[0], kwargs.get("mat2", kwargs.get("other")))
        if not (isinstance(q, torch.Tensor) and isinstance(turned, torch.Tensor)):
            return None
        if q.dim() not in (3, 4) or turned.dim() != q.dim() or q.shape[0] != turned.shape[0] or q.dtype != turned.dtype:
            return None
        self.before -= 1
        if self.before >= 0:
            return None
        shape = torch.Size((*q.shape[:-1], turned.shape[-1]))
        dtype = q.dtype
        narrow_q, narrow_k = self.wide.get(id(q), (q, q))[1], self.wide.get(id(turned), (turned, turned))[1]
        if narrow_q.dtype == narrow_k.dtype:
            q, turned = narrow_q, narrow_k
        k = turned.transpose(-1, -2)
        if q.dim() == 3:
            q, k = q[:, None], k[:, None]
        if k.shape[1] == 0 or q.shape[1] % k.shape[1] or (k.shape[1] not in (1, q.shape[1])):
            return None
        self.q = q
        scores = Scores(self, q, k, shape, dtype, (function, args, kwargs))
        scores.scale = options["alpha"]
        if bias is not None and options["beta"]:
            scores.bias = scores.aligned(bias)
            if scores.bias is None or scores.scale <= 0.0:
                return None
            if options["beta"] != 1.0:
                scores.bias = scores.bias * options["beta"]
        return scores

    def _whole(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        """A call of torch's own attention, as transformers' sdpa makes it."""
        plain = query.dim() == 4 and query.shape[0] == key.shape[0] and (dropout_p == 0.0 or self.module.training)
        grouped = enable_gqa or key.shape[1] == value.shape[1] == 1  # one head is broadcast to all
        if not plain or (query.shape[1] != key.shape[1] and not grouped):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        out, _ = interface.attention_function(
            self.module, query, key, value, attn_mask, scaling=scale, dropout=dropout_p, is_causal=is_causal
        )
        return out.transpose(1, 2)

    def attend(self, scores: Scores, v: torch.Tensor) -> torch.Tensor:
        """The recorded attention as one call; [batch, heads, rows, head_dim] in the form the module computes in."""
        mask = scores.mask
        if scores.spec is not None:
            spec = scores.spec
            if mask is not None:
                mask = mask if spec.mask is None else mask & spec.mask
                spec = spec._replace(mask=mask, dense=True)
            mask = spec
        with torch._C.DisableTorchFunction():  # nothing inside is the module's
            out, _ = interface.attention_function(
                self.module, scores.q, scores.k, v, mask, scaling=scores.scale, dropout=scores.dropout_p,
                position_bias=scores.bias,
            )  # fmt: skip
            out = out.transpose(1, 2).to(scores.dtype)
        return out if scores.ndim == 4 else out.reshape(-1, *out.shape[2:])

    def declined(self, text: str) -> None:
        interface.decline(self.tag.layer, self.tag.strict, self.q, self.q, "scores_used", text)


def _baddbmm(input, batch1, batch2, *, beta=1.0, alpha=1.0): ...


_BADDBMM = inspect.signature(_baddbmm)


# ---- attaching to modules ----

_active = threading.local()


def attach(module) -> list:
    """Read this module's attention from now on; returns handles whose `remove()` ends that."""
    return [
        module.register_forward_pre_hook(_begin, with_kwargs=True),
        module.register_forward_hook(_end, always_call=True),
    ]


def _begin(module, args, kwargs) -> None:
    if torch.compiler.is_compiling():
        return _begin_uncompiled(module, args, kwargs)
    tag = getattr(module, "_flashpatch", None)
    if tag is None:
        return
    readings = _active.__dict__.setdefault("readings", [])
    if _weights_wanted(module, args, kwargs):
        weight = next(module.parameters())
        interface.decline(
            tag.layer, tag.strict, weight, weight, "output_attentions", "the attention weights themselves are asked for"
        )
        counting.layers[tag.layer].called()
        return
    reading = Reading(module, tag, where(type(module)).product)
    reading.__enter__()
    readings.append(reading)


class _Uncompiled(TorchDispatchMode):
    """Nothing that runs under a mode like this is compiled."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@torch.compiler.disable(reason="flashpatch reads this module's attention while it runs: compile without fullgraph=True")
def _begin_uncompiled(module, args, kwargs) -> None:
    """In a compiled model: a graph break, and the module runs as it does in eager mode."""
    _begin(module, args, kwargs)
    readings = _active.__dict__.get("readings")
    if readings and readings[-1].module is module:
        readings[-1].uncompiled = _Uncompiled()
        readings[-1].uncompiled.__enter__()


def _end(module, args, output):
    readings = _active.__dict__.get("readings")
    if not readings or readings[-1].module is not module:
        return None
    reading = readings.pop()
    if reading.uncompiled is not None:
        reading.uncompiled.__exit__(None, None, None)
    reading.__exit__(None, None, None)
    return _without_scores(output)


def _without_scores(output):
    """A module's output with None for weights that nobody asked for."""
    if isinstance(output, Scores):
        return None
    if isinstance(output, (tuple, list)):
        return type(output)(_without_scores(part) for part in output)
    return output


@functools.cache
def _signature(cls: type) -> inspect.Signature:
    return inspect.signature(cls.forward)


def _weights_wanted(module, args, kwargs) -> bool:
    if kwargs.get("output_attentions") or attention_weights.attentions_collected():
        return True
    try:
        return bool(_signature(type(module)).bind_partial(module, *args).arguments.get("output_attentions"))
    except TypeError:
        return False


def masks_by_name(model) -> bool:
    """Whether all attention a model reads its masks into takes MaskSpecs, so that its masks may be built by our name."""
    read = [(row, module) for module in model.modules() if (row := where(type(module))) is not None]
    return bool(read) and all(
        row.masks and not (row.unless and getattr(module.config, row.unless)) for row, module in read
    )
