"""The transformers seam: the attention function and the mask function `fpatch`, `apply`, `restore`, `enable`, reports.

transformers dispatches attention by name (`config._attn_implementation`). The name must not contain "flash": that would
make transformers treat it as its own FlashAttention, with other masks and renaming. Both functions are registered under
one name, because without a mask function transformers passes no mask at all.

What a call means is what eager attention would compute for it: the mask alone decides who sees whom (eager ignores
`module.is_causal`, and `sliding_window` is already in the mask). Two things differ on purpose. Documents that
`position_ids` or `cu_seq_lens_*` mark are kept apart also where transformers forgets to (with a cache, or in models that
do not hand the positions to their mask). A row that a mask hides completely gives 0 where eager gives the mean of V;
such rows are padding. An additive mask of the user's own keeps eager's meaning even there: it is a bias.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch

from . import counting, mask_functions, masks, ops
from .call import Call
from .masks import MaskSpec
from .problem import Decline, DeclinedError, Problem, Reason

NAME = "fpatch"
SUPPORTED = "5.17 up to, not including, 6"

# Keyword arguments with no bearing on attention: switches and tensors of the model around it that decoders pass through.
NOISE = frozenset(
    (
        "use_cache", "cache_position", "past_key_values", "past_key_value", "return_dict", "return_legacy_cache",
        "output_hidden_states", "output_router_logits", "output_attentions", "encoder_hidden_states",
        "encoder_attention_mask", "num_items_in_batch", "position_embeddings", "position_embeddings_global",
        "position_embeddings_local", "labels", "logits_to_keep", "inputs_embeds", "input_ids", "token_pretrainedids",
        "mm_token_pretrainedids", "pixel_values", "image_sizes", "deterministic", "seq_idx", "layer_idx", "max_length_q",
        "max_length_k", "max_seqlen_q", "max_seqlen_k",
    )
)  # fmt: skip
# Keyword arguments that carry meaning eager attention expresses elsewhere: ignoring them would be a wrong result.
REFUSED = {
    "indices": "the model's sparse selection of keys reaches attention only under eager and sdpa",
    "block_indices": "the model's sparse selection of key blocks reaches attention only under eager and sdpa",
    "cache": "continuous batching writes its paged cache inside the attention function",
    "read_index": "continuous batching reads its paged cache inside the attention function",
    "write_index": "continuous batching writes its paged cache inside the attention function",
    "block_table": "continuous batching reads its paged cache inside the attention function",
}
# Source that makes a model fold its selection of keys into the mask for the two names it knows, and for no other.
_NAME_TEST = re.compile(r"_attn_implementation (?:not )?in \(\"eager\", \"sdpa\"\)")


# ---- registration ----


def unavailable() -> str | None:
    """Why transformers cannot be patched here, or None."""
    try:
        import transformers
    except ImportError:
        return (
            f"transformers is not installed; flashpatch patches transformers {SUPPORTED}: "
            "pip install 'transformers>=5.17,<6'"
        )
    if not hasattr(transformers, "AttentionMaskInterface") or not hasattr(transformers, "AttentionInterface"):
        return (
            f"transformers {transformers.__version__} has no AttentionMaskInterface; flashpatch needs {SUPPORTED}: "
            "pip install 'transformers>=5.17,<6'"
        )
    return None


_registered = False
_unattributed: int | None = None
_model_code: int | None = None


def register() -> None:
    """Make `attn_implementation="fpatch"` known to transformers, in this process. Nothing uses it until asked to."""
    global _registered, _unattributed, _model_code
    if _registered:
        return
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    mask_functions.teach(masking_utils)
    masks.on_materialise = _materialised_by_model
    _unattributed = counting.register_layer("layers that share a compiled graph")
    _model_code = counting.register_layer("masks a model computes with itself")
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
    _registered = True


def _materialised_by_model(reason: str) -> None:
    counting.layers[_model_code].mask_materialised += 1


# ---- the mask function ----


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset=0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask=None,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    device="cpu",
    **kwargs,
):
    """What transformers calls once per kind of mask and forward. Always a MaskSpec: None would not say what is meant."""
    from transformers import masking_utils

    if isinstance(attention_mask, MaskSpec):
        return attention_mask
    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    sizes = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, "use_vmap": use_vmap, "device": device,
    }  # fmt: skip

    def materialise(functions):
        function = functions[0] if len(functions) == 1 else masking_utils.and_masks(*functions)
        return masking_utils.sdpa_mask(
            **sizes, mask_function=function, allow_is_causal_skip=False, allow_is_bidirectional_skip=False
        )

    if attention_mask is not None and attention_mask.dim() != 2:
        # Not a padding mask; transformers' own indexing gives it whatever meaning it has.
        dense = masking_utils.sdpa_mask(
            **sizes, mask_function=mask_function, attention_mask=attention_mask,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
        )  # fmt: skip
        far = masks.UNLIMITED
        return MaskSpec(
            batch_size, q_length, kv_length, dtype, torch.device(device), far, far, 0, None, dense,
            given=True, dense=True, words=("unrecognised",),
        )  # fmt: skip
    return mask_functions.recover(
        **sizes, mask_function=mask_function, attention_mask=attention_mask, dtype=dtype, materialise=materialise
    )


# ---- the attention function ----


class Tag:
    """What a patched attention module knows: the number it counts under, and whether a decline is an error there.

    Copies and pickles of the module come without it.
    """

    __slots__ = ("alive", "layer", "parents", "strict")

    def __init__(self, layer: int, strict: bool, parents: tuple = ()):
        self.layer, self.strict, self.parents, self.alive = layer, strict, parents, True

    def shares_a_graph(self) -> bool:
        """Whether a part of the model around this module is compiled by itself.

        Such a part is compiled once and used for every layer like it; a number that differs from layer to layer
        would compile it anew for each, and soon not at all.
        """
        for parent in self.parents:
            if parent._compiled_call_impl is not None or isinstance(parent, torch._dynamo.OptimizedModule):
                return True
        return False

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return type(None), ()


def _tag_of(module) -> Tag | None:
    tag = getattr(module, "_flashpatch", None)
    if tag is None and not torch.compiler.is_compiling():
        tag = _tag_unseen(module)
    return tag


def _tag_unseen(module) -> Tag:
    """A layer number for a module nobody applied flashpatch to: it was loaded under the name `fpatch`."""
    for model in _enabled.alive():
        paths = [path for path, candidate in model.named_modules() if candidate is module]
        if paths:
            return _tag_module(module, paths[0], False, _parents(model, paths[0]))
    index = getattr(module, "layer_idx", None)
    return _tag_module(module, type(module).__name__ + ("" if index is None else f" of layer {index}"), False)


def _tag_module(module, name: str, strict: bool, parents: tuple = ()) -> Tag:
    tag = Tag(counting.register_layer(name), strict, parents)
    module._flashpatch = tag
    return tag


def _parents(model, path: str) -> tuple:
    """The modules between a model (not itself) and the module at `path` (itself included)."""
    found, parent = [], model
    for name in filter(None, path.split(".")):
        parent = getattr(parent, name)
        found.append(parent)
    return tuple(found)


def attention_function(
    module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask=None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **kwargs,
):
    """Attention as transformers calls it: q, k, v [batch, heads, length, head_dim]; returns (out [batch, length, heads,
    head_dim], weights or None)."""
    tag = _tag_of(module)
    alone = tag is not None and not (torch.compiler.is_compiling() and tag.shares_a_graph())
    layer = tag.layer if alone else _unattributed
    strict = tag is not None and tag.strict
    if kwargs:
        _check_keywords(module, kwargs, layer, strict, query, value)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    lowered, bias = _mask(
        attention_mask, q, k, is_causal, sliding_window, position_ids, cu_seq_lens_q, cu_seq_lens_k, layer
    )
    if lowered.key_length != k.shape[1]:
        k, v = k[:, : lowered.key_length], v[:, : lowered.key_length]
    bias = _bias(position_bias, bias, q, lowered.key_length)
    sinks = None if s_aux is None else s_aux.reshape(-1).float()
    call = Call(
        float(q.shape[-1] ** -0.5 if scaling is None else scaling),
        q.shape[1], k.shape[1], lowered.window_left, lowered.window_right,
        0.0 if softcap is None else float(softcap), float(dropout) if module.training else 0.0,
        bias=bias, mask=lowered.mask, key_ranges=lowered.key_ranges, sinks=sinks,
    )  # fmt: skip
    if kwargs.get("output_attentions") or _attentions_collected():
        _decline(layer, strict, query, value, "output_attentions", "the attention weights themselves are asked for")
        return _with_weights(q, k, v, call, layer)
    out, _ = ops.attend(q, k, v, call, layer, strict)
    return out.contiguous(), None


def _check_keywords(module, kwargs: dict, layer: int, strict: bool, query, value) -> None:
    """Refuse keywords that would be wrong results when ignored; name those that only look harmless."""
    for name, given in kwargs.items():
        if given is None or given is False or name in NOISE:
            continue
        refusal = REFUSED.get(name)
        if refusal is None and not _eager_ignores(module, name):
            refusal = "flashpatch does not know what it means"
        if refusal is not None:
            problem = Problem("forward", str(query.dtype).removeprefix("torch."), query.shape[-1], value.shape[-1])
            text = (
                f"{type(module).__name__} passes {name}=...: {refusal}. Use the model's own implementation: "
                'model.set_attn_implementation("eager"), or "sdpa" where the model supports it'
            )
            raise DeclinedError(Decline(problem, (Reason("kwarg_unknown", text),)))
        text = f"{name} is passed to {type(module).__name__}; its eager attention ignores it too, so it has no effect"
        _decline(layer, strict, query, value, "kwarg_unknown", text)


_eager_ignored: dict[tuple[type, str], bool] = {}


def _eager_ignores(module, keyword: str) -> bool:
    """Whether the model's own eager attention takes `keyword` only to drop it, which proves it irrelevant here."""
    key = type(module), keyword
    if key not in _eager_ignored:
        eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
        parameters = inspect.signature(eager).parameters if callable(eager) else {}
        swallows = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        used = keyword in parameters or (swallows and re.search(rf"kwargs\W+(get\W+)?{keyword}\b", _source(eager)))
        _eager_ignored[key] = bool(swallows and not used)
    return _eager_ignored[key]


def _decline(layer: int, strict: bool, query, value, code: str, text: str) -> None:
    """Count, warn about or raise a decline that the seam itself decides; not while a graph is traced."""
    if torch.compiler.is_compiling():
        return
    reason = Reason(code, text)
    if strict or os.environ.get("FLASHPATCH_STRICT") == "1":
        problem = Problem("forward", str(query.dtype).removeprefix("torch."), query.shape[-1], value.shape[-1])
        raise DeclinedError(Decline(problem, (reason,)))
    counting.record_decline(layer, reason)


def _mask(attention_mask, q, k, is_causal, sliding_window, position_ids, cu_seq_lens_q, cu_seq_lens_k, layer: int):
    """Who sees whom, as (Lowered, additive mask or None)."""
    q_length, k_length = q.shape[1], k.shape[1]
    documents = cu_seq_lens_q if cu_seq_lens_k is not None else None
    if isinstance(attention_mask, MaskSpec):
        spec = _matching(attention_mask, q, k)
        if documents is not None:
            spec = _with_documents(spec, cu_seq_lens_q, cu_seq_lens_k, q, k)
        elif position_ids is not None:
            spec = _with_positions(spec, position_ids, k_length)
        if spec.dense and not torch.compiler.is_compiling():
            counting.layers[layer].mask_materialised += 1
        return spec.lower(k_length), None
    far = masks.UNLIMITED
    left = right = far
    bias = mask = None
    if attention_mask is None:
        # Eager adds no mask then; only a caller's explicit word adds causality, top-left as in transformers' sdpa.
        if is_causal and q_length > 1:
            right = 0
        if sliding_window is not None:
            left = sliding_window - 1
            right = min(right, left)
    elif isinstance(attention_mask, torch.Tensor):
        mask = _four_dimensional(attention_mask, k_length).to(q.device)
        if mask.dtype != torch.bool:
            mask, bias = None, mask
    else:
        raise TypeError(
            f"flashpatch got an attention mask of type {type(attention_mask).__name__}; a tensor is needed. "
            'Block masks belong to attn_implementation="flex_attention"'
        )
    shift = k_length - q_length if attention_mask is None and right != 0 else 0
    spec = MaskSpec(q.shape[0], q_length, k_length, q.dtype, q.device, left, right, shift, None, mask)
    if documents is not None:
        spec = _with_documents(spec, cu_seq_lens_q, cu_seq_lens_k, q, k)
    return spec.lower(k_length), bias


def _matching(spec: MaskSpec, q, k) -> MaskSpec:
    """The spec on the tensors' device, or an error where it was built for other lengths."""
    if spec.q_length != q.shape[1] or spec.kv_length < k.shape[1]:
        raise ValueError(
            f"the attention mask was built for {spec.q_length} queries and {spec.kv_length} keys, but attention got "
            f"{q.shape[1]} and {k.shape[1]}: this model extends its keys or queries after building the mask. "
            'Use its own implementation: model.set_attn_implementation("eager")'
        )
    return spec if spec.device == q.device else spec.to(q.device)


def _with_documents(spec: MaskSpec, cu_seq_lens_q, cu_seq_lens_k, q, k) -> MaskSpec:
    """Keep the documents of `cu_seq_lens_*` apart: a batch of one row, sequences laid end to end."""
    if spec.joined is not None and spec.joined[0] is cu_seq_lens_q:
        return spec.joined[1]
    if q.shape[0] != 1 or (spec.causal and q.shape[1] != k.shape[1]):
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k describe sequences laid end to end in one row; got a batch of "
            f"{q.shape[0]} with {q.shape[1]} queries and {k.shape[1]} keys. Leave them out, or pass one row"
        )
    ranges = masks.document_ranges(cu_seq_lens_q.to(q.device), cu_seq_lens_k.to(q.device), q.shape[1])
    return spec.with_ranges(cu_seq_lens_q, ranges)


def _with_positions(spec: MaskSpec, position_ids, k_length: int) -> MaskSpec:
    """Keep the documents apart that position ids restart for, where transformers has not looked: a first forward with a
    cache, or a model that does not hand its positions to the mask. As transformers does, only without a 2-D mask."""
    if spec.joined is not None and spec.joined[0] is position_ids:
        return spec.joined[1]
    alone = spec.causal and not (spec.given or spec.packed or spec.dense or spec.on_device) and spec.shift == 0
    if not alone or spec.q_length == 1 or spec.q_length != k_length or position_ids.dim() != 2:
        return spec
    if position_ids.shape[1] != spec.q_length or position_ids.shape[0] not in (1, spec.batch_size):
        return spec
    return spec.with_ranges(position_ids, masks.position_ranges(position_ids.to(spec.device)))


def _four_dimensional(tensor: torch.Tensor, k_length: int) -> torch.Tensor:
    """A mask or bias broadcast from the right, as eager's addition does; columns beyond the keys are cut off."""
    if tensor.dim() < 4:
        tensor = tensor[(None,) * (4 - tensor.dim())]
    return tensor[..., :k_length] if tensor.shape[-1] > k_length else tensor


def _bias(position_bias, additive, q, key_length: int) -> torch.Tensor | None:
    """What is added to the scores, in the dtype attention will run in. Values below that dtype's range become its
    lowest number, not -inf: a row made of nothing else stays the plain mean it is in eager attention."""
    if position_bias is None and additive is None:
        return None
    parts = [_four_dimensional(part, key_length) for part in (position_bias, additive) if part is not None]
    bias = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and q.dtype != torch.float64 else q.dtype
    if bias.dtype == dtype:
        return bias
    if bias.is_floating_point() and torch.finfo(bias.dtype).min < torch.finfo(dtype).min:
        lowest = torch.finfo(dtype).min
        bias = torch.where((bias < lowest) & (bias != -torch.inf), lowest, bias)
    return bias.to(dtype)


def _attentions_collected() -> bool:
    """Whether a model collects attention weights by hooks, which it does not tell the attention function."""
    collector = _collector()
    if collector is None or (torch.compiler.is_compiling() and not collector.compiling):
        return False
    collected = collector.get()
    return bool(collected) and any("attentions" in name for name in collected)


def _collector():
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector


def _with_weights(q, k, v, call: Call, layer: int):
    """Attention in plain torch, weights included: the whole score matrix, rounded where eager rounds."""
    if not torch.compiler.is_compiling():
        counting.record_call(counting.layers[layer])
    groups = q.shape[2] // k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q, k.transpose(2, 3)) * call.softmax_scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.bias is not None:
        scores = scores + call.bias
    spec = MaskSpec(
        q.shape[0], q.shape[2], k.shape[2], q.dtype, q.device,
        call.window_left if call.window_left >= 0 else masks.UNLIMITED,
        call.window_right if call.window_right >= 0 else masks.UNLIMITED,
        k.shape[2] - q.shape[2], call.key_ranges, call.mask,
    )  # fmt: skip
    scores = scores.masked_fill(~spec.visible(), torch.finfo(scores.dtype).min)
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    if call.sinks is not None:
        weights = weights[..., :-1]
    weights = torch.dropout(weights, call.dropout_p, call.dropout_p > 0)
    return torch.matmul(weights, v.to(weights.dtype)).transpose(1, 2).contiguous(), weights


# ---- which modules are attention ----


def _source(thing) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""


_dispatches_cache: dict[type, bool] = {}


def _dispatches(cls: type) -> bool:
    """Whether a module class calls whatever is registered under the implementation's name."""
    if cls not in _dispatches_cache:
        text = "".join(_source(base) for base in cls.__mro__ if base is not torch.nn.Module and base is not object)
        _dispatches_cache[cls] = "ALL_ATTENTION_FUNCTIONS" in text
    return _dispatches_cache[cls]


_COMPUTES = re.compile(r"softmax\(|scaled_dot_product_attention|multi_head_attention_forward|flex_attention\(")


def _computes(cls: type) -> bool:
    """Whether a module class computes attention by itself."""
    if cls is torch.nn.MultiheadAttention:
        return True
    own = [base for base in cls.__mro__ if base is not object and base.__module__.split(".")[0] != "torch"]
    text = "".join(map(_source, own))
    return bool(_COMPUTES.search(text))


def attention_modules(model) -> list[tuple[str, torch.nn.Module, str | None]]:
    """Every attention module of a model as (path, module, None or why it cannot be reached).

    Reachable ones dispatch by name. Of the others only those are listed that compute attention themselves: the wrappers
    around attention modules, which bear similar names, do not.
    """
    found = []
    for path, module in model.named_modules():
        cls = type(module)
        if isinstance(module, _pretrained()):
            continue
        if _dispatches(cls):
            found.append((path, module, _refusal(cls)))
        elif "attention" in cls.__name__.lower() and _computes(cls):
            inner = [child for child in module.modules() if child is not module and _dispatches(type(child))]
            if not inner:
                found.append((path, module, f"{cls.__name__} computes attention itself and asks for no implementation"))
    return found


def _refusal(cls: type) -> str | None:
    """Why a dispatching class would compute something else under our name."""
    if _NAME_TEST.search(_source(cls)):
        return (
            f"{cls.__name__} selects keys and tells attention only under the names eager and sdpa (kwarg_unknown: "
            "indices); patched it would attend to all keys"
        )
    return None


def _pretrained() -> type:
    from transformers import PreTrainedModel

    return PreTrainedModel


# ---- apply, report, restore ----


@dataclass
class ModuleRow:
    """One attention module. `dispatched` is proven by calls; `switched` says that it should come to us."""

    path: str
    class_name: str
    switched: bool
    dispatched: bool
    kernel: str | None
    reasons: list[tuple[str, str]]
    calls: int = 0
    recomputes: int = 0
    launches: dict[str, int] = field(default_factory=dict)
    copies: int = 0
    mask_materialised: int = 0


@dataclass
class PatchReport:
    """What became of each attention module. `mask_materialised` counts masks that model code computed with itself."""

    model: str
    rows: list[ModuleRow]
    mask_materialised: int = 0
    honoured: list[tuple[str, str]] = field(default_factory=list)  # (model class, implementation asked for by name)

    @property
    def dispatched(self) -> int:
        return sum(row.dispatched for row in self.rows)

    @property
    def switched(self) -> int:
        return sum(row.switched for row in self.rows)

    @property
    def total(self) -> int:
        return len(self.rows)


def _row(path: str, class_name: str, tag: Tag | None, obstacle: str | None) -> ModuleRow:
    if tag is None:
        return ModuleRow(path, class_name, False, False, None, [("not_dispatched", obstacle)])
    counts = counting.counts(tag.layer)
    reasons = list(counts.declines)
    reached = counts.calls + counts.recomputes > 0
    if not reached:
        shared = counting.counts(_unattributed)
        if shared.calls + shared.recomputes > 0 and tag.shares_a_graph():
            reached = True
            reasons = [
                ("shared_graph", f"it is compiled together with layers like it and counted under {shared.name!r}")
            ]
            reasons += list(shared.declines)
            counts = counting.LayerCounts(counts.name, launches=shared.launches)
        else:
            reasons.insert(0, ("not_dispatched", "no forward has brought it to flashpatch since it was patched"))
    forward = sorted(kernel for kernel in counts.launches if "forward" in kernel)
    return ModuleRow(
        path, class_name, True, reached, ", ".join(forward) or None, reasons, counts.calls, counts.recomputes,
        dict(counts.launches), counts.copies, counts.mask_materialised,
    )  # fmt: skip


class Patch:
    """A patched model. `report` says what ran; `restore()` (or leaving `with`) puts everything back as it was."""

    def __init__(self, model, entries, configs, tags):
        self.model = model
        self._entries = entries  # (path, class name, tag or None, obstacle or None)
        self._configs = configs  # (config, implementation before)
        self._tags = tags  # (module, our tag, tag before)
        self._masks_before = counting.counts(_model_code).mask_materialised
        self.active = True

    @property
    def report(self) -> PatchReport:
        rows = [_row(*entry) for entry in self._entries]
        made = counting.counts(_model_code).mask_materialised - self._masks_before
        return PatchReport(type(self.model).__name__, rows, made)

    def restore(self) -> None:
        """Undo this patch and nothing else: what somebody has changed since then is left alone."""
        if not self.active:
            return
        self.active = False
        _put_back(self._configs, self._tags)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "active" if self.active else "restored"
        switched = sum(entry[2] is not None for entry in self._entries)
        return f"<Patch of {type(self.model).__name__}: {switched} of {len(self._entries)} attention modules, {state}>"


def _put_back(configs, tags) -> None:
    for config, before in configs:
        if config._attn_implementation_internal == NAME:
            config._attn_implementation_internal = before
    for module, tag, before in tags:
        tag.alive = False
        if getattr(module, "_flashpatch", None) is tag:
            if before is not None and before.alive:
                module._flashpatch = before
            else:
                del module._flashpatch


def apply(model: torch.nn.Module, *, strict: bool | None = None) -> Patch:
    """Send a transformers model's attention through flashpatch, in place and without touching its weights.

    `strict=True` makes any decline an error for this model (`FLASHPATCH_STRICT=1` for all). Either every reachable
    attention module is switched over or, after an error, none. Models that compute attention themselves are left
    untouched, and the report says so per module.
    """
    register()
    pretrained = _pretrained()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"flashpatch.apply needs a transformers model, got {type(model).__name__}")
    roots = _roots(model, pretrained)
    if not roots:
        raise TypeError(
            f"{type(model).__name__} contains no transformers model; flashpatch.apply patches transformers models, "
            "flashpatch.attention(q, k, v) serves any other code"
        )
    configs = [(config, config._attn_implementation_internal) for config in _configs(model)]
    modules = attention_modules(model)
    strict = bool(strict)
    entries, tags = [], []
    try:
        if not any(_is_refused(obstacle, module) for _, module, obstacle in modules):
            for root in roots:
                _switch(root)
        for path, module, obstacle in modules:
            config = getattr(module, "config", None)
            if obstacle is None and getattr(config, "_attn_implementation", NAME) != NAME:
                obstacle = f"its configuration still says {config._attn_implementation!r}"
            tag = None
            if obstacle is None:
                before = getattr(module, "_flashpatch", None)
                tag = _tag_module(module, path or type(module).__name__, strict, _parents(model, path))
                tags.append((module, tag, before))
            entries.append((path, type(module).__name__, tag, obstacle))
    except BaseException:
        _put_back(configs, tags)
        for config, _ in configs:
            config.__dict__.pop("_attn_was_changed", None)
        raise
    return Patch(model, entries, configs, tags)


def _is_refused(obstacle: str | None, module) -> bool:
    return obstacle is not None and _dispatches(type(module))


def _roots(model, pretrained: type) -> list:
    """The outermost transformers models in `model` (itself, or inside PEFT, DDP or torch.compile wrappers)."""
    if isinstance(model, pretrained):
        return [model]
    return [root for child in model.children() for root in _roots(child, pretrained)]


def _configs(model) -> list:
    """Every configuration that a module of the model may read its implementation from."""
    found: dict[int, object] = {}

    def add(config):
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", None) or ():
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def _switch(root) -> None:
    """transformers' own switch, silenced: what it could not switch is in the report, module by module."""
    from transformers.utils import logging

    pretrained = _pretrained()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        root.set_attn_implementation(NAME)
        for submodel in root.modules():
            # A stack with its own copy of the configuration (T5's encoder and decoder) is not reached from above.
            if isinstance(submodel, pretrained) and submodel.config._attn_implementation != NAME:
                submodel.set_attn_implementation(NAME)
    finally:
        logging.set_verbosity(level)


def report(model: torch.nn.Module) -> PatchReport:
    """The report of any model, however it came to `fpatch`: `apply`, `enable` or `attn_implementation="fpatch"`."""
    register()
    rows = []
    for path, module, obstacle in attention_modules(model):
        tag = getattr(module, "_flashpatch", None)
        config = getattr(module, "config", None)
        if obstacle is None and tag is None and getattr(config, "_attn_implementation", None) != NAME:
            obstacle = f"its configuration says {getattr(config, '_attn_implementation', None)!r}"
        if obstacle is None and tag is None:
            tag = _tag_module(module, path, False, _parents(model, path))
        rows.append(_row(path, type(module).__name__, tag if obstacle is None else None, obstacle))
    made = counting.counts(_model_code).mask_materialised
    return PatchReport(type(model).__name__, rows, made, list(_enabled.honoured))


# ---- every model loaded from now on ----


class _Enabled:
    """What `enable` has seen: models that took the default, and the implementations scripts asked for by name."""

    def __init__(self):
        self.original = None
        self.override = False
        self.models: list[weakref.ref] = []
        self.honoured: list[tuple[str, str]] = []
        self.unreachable: Counter = Counter()

    def alive(self) -> list:
        return [model for model in (ref() for ref in self.models) if model is not None]


_enabled = _Enabled()


def enable(override: bool = False) -> None:
    """From now on, models that are built without a chosen attention implementation use flashpatch.

    An implementation asked for by name is honoured and listed (`enabled_models`, reports); `override=True` replaces it
    too. Models that cannot be switched keep their default.
    """
    register()
    pretrained = _pretrained()
    _enabled.override = override
    if _enabled.original is not None:
        return
    original = pretrained._check_and_adjust_attn_implementation

    def choose(self, attn_implementation, is_init_check=False, **kwargs):
        if is_init_check:
            attn_implementation = _choose(self, attn_implementation)
        return original(self, attn_implementation, is_init_check, **kwargs)

    _enabled.original = original
    pretrained._check_and_adjust_attn_implementation = choose


def _choose(model, asked: str | None) -> str | None:
    name = type(model).__name__
    if asked == NAME:
        _enabled.models.append(weakref.ref(model))
        return asked
    reachable = model._can_set_attn_implementation() and not _NAME_TEST.search(
        _source(sys.modules.get(type(model).__module__))
    )
    if not reachable:
        _enabled.unreachable[name] += 1
        return asked
    if asked is not None and not _enabled.override:
        if (name, asked) not in _enabled.honoured:
            _enabled.honoured.append((name, asked))
        return asked
    _enabled.models.append(weakref.ref(model))
    return NAME


def disable() -> None:
    """Undo `enable` for models built from now on; those already built keep what they have."""
    if _enabled.original is not None:
        _pretrained()._check_and_adjust_attn_implementation = _enabled.original
        _enabled.original = None


def enabled_models() -> list:
    """The outermost models that took flashpatch by default since `enable` and are still alive."""
    models = _enabled.alive()
    inner = {id(module) for model in models for module in model.modules() if module is not model}
    return [model for model in models if id(model) not in inner]


def honoured() -> list[tuple[str, str]]:
    """(model class, implementation) that scripts asked for by name since `enable`, and got."""
    return list(_enabled.honoured)
