"""What transformers calls: the attention function and the mask function `fpatch`.

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
import re
import sys
import threading

import torch

from . import counting, mask_functions, masks, ops
from .attention_weights import attentions_collected, with_weights
from .call import Call
from .call_masks import bias_of_call, mask_of_call
from .masks import MaskSpec
from .modes import autocast_dtype
from .problem import Decline, DeclinedError, Problem, Reason
from .tagging import tag_of

NAME = "fpatch"
SUPPORTED = "5.17 up to, not including, 6"
REQUIREMENT = ">=5.17,<6"
OLDEST = (5, 17)

# Keyword arguments with no bearing on attention: switches and tensors of the model around it that decoders pass through.
NOISE = frozenset(
    (
        "use_cache", "cache_position", "past_key_values", "return_dict",
        "output_hidden_states", "output_router_logits", "output_attentions", "encoder_hidden_states",
        "encoder_attention_mask", "num_items_in_batch", "position_embeddings",
        "labels", "logits_to_keep", "inputs_embeds", "input_ids", "token_type_ids",
        "mm_token_type_ids", "pixel_values", "image_sizes", "deterministic", "seq_idx", "layer_idx", "max_length_q",
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
# Model types that add columns of their own to a mask which is a tensor, and skip that for anything else.
TENSOR_MASKS = frozenset({"deepseek_v4"})
# Model types that shorten their sequences behind the mask, and can only where it is None, as it is where it hides nothing.
NO_EMPTY_MASKS = frozenset({"informer"})


# ---- registration ----


def unavailable() -> str | None:
    """Why transformers cannot be patched here, or None."""
    install = f"flashpatch patches transformers {SUPPORTED}: pip install 'transformers{REQUIREMENT}'"
    try:
        import transformers

        version = transformers.__version__
        parts = [getattr(transformers, name, None) for name in ("AttentionInterface", "AttentionMaskInterface")]
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            return f"transformers is not installed; {install}"
        return f"transformers cannot be imported ({error}); install what it misses: pip install {error.name}"
    except Exception as error:  # a dependency of transformers that is broken or too old, in whichever way it says so
        text = " ".join(str(error).split())
        return f"transformers cannot be imported ({type(error).__name__}: {text[:300]}); repair it, for example: pip install --upgrade --force-reinstall transformers"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return f"transformers {version} is too old: its masks are built in another way; {install}"
    if None in parts:
        return f"transformers {version} has no AttentionMaskInterface; {install}"
    return None


_registered = False
# Layers that belong to no module, once registered: calls from a graph that several modules share, and the masks that
# models compute with themselves.
unattributed: int | None = None
model_code: int | None = None


def register() -> None:
    """Make `attn_implementation="fpatch"` known to transformers, in this process. Nothing uses it until asked to."""
    global _registered, unattributed, model_code
    if _registered:
        return
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils, modeling_utils

    mask_functions.teach(masking_utils)
    masks.on_materialise = _materialised_by_model
    unattributed = counting.register_layer("layers that share a compiled graph")
    model_code = counting.register_layer("masks a model computes with itself")
    AttentionInterface.register(NAME, attention_function)
    # Kosmos2_5VisionAttention asks the registry for an attribute, not for an entry, and computes eagerly if it finds none.
    setattr(modeling_utils.ALL_ATTENTION_FUNCTIONS, NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
    _registered = True


def _materialised_by_model(reason: str) -> None:
    counting.layers[model_code].mask_materialised += 1


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
    spec = mask_functions.recover(
        **sizes, mask_function=mask_function, attention_mask=attention_mask, dtype=dtype, materialise=materialise
    )
    model_type = getattr(kwargs.get("config"), "model_type", None)
    if model_type in TENSOR_MASKS:
        return spec.materialise()
    return None if model_type in NO_EMPTY_MASKS and spec.hides_nothing() else spec


# ---- the attention function ----


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
    tag = tag_of(module)
    alone = tag is not None and not (torch.compiler.is_compiling() and tag.shares_a_graph())
    layer = tag.layer if alone else unattributed
    strict = tag is not None and tag.strict
    if kwargs:
        _check_keywords(module, kwargs, layer, strict, query, value)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = _in_one_dtype(q, k, v)
    lowered, bias = mask_of_call(
        attention_mask, q, k, is_causal, sliding_window, position_ids, cu_seq_lens_q, cu_seq_lens_k, layer
    )
    if lowered.key_length != k.shape[1]:
        k, v = k[:, : lowered.key_length], v[:, : lowered.key_length]
    bias = bias_of_call(position_bias, bias, q, lowered.key_length)
    sinks = None if s_aux is None else s_aux.reshape(-1).float()
    call = Call(
        float(q.shape[-1] ** -0.5 if scaling is None else scaling),
        q.shape[1], k.shape[1], lowered.window_left, lowered.window_right,
        0.0 if softcap is None else float(softcap), float(dropout) if module.training else 0.0,
        bias=bias, mask=lowered.mask, key_ranges=lowered.key_ranges, sinks=sinks,
    )  # fmt: skip
    if kwargs.get("output_attentions") or attentions_collected():
        decline(layer, strict, query, value, "output_attentions", "the attention weights themselves are asked for")
        return with_weights(q, k, v, call, layer)
    out, _ = ops.attend(q, k, v, call, layer, strict, statistics=False)
    return out.contiguous(), None


def _in_one_dtype(q, k, v):
    """q, k, v of a 16-bit model whose norms are fp32: 16 bits for all, as autocast makes of them. An output as wide as the
    widest would not fit the weights it is multiplied with next."""
    if autocast_dtype(q.device.type) is not None:
        return q, k, v
    narrow = [tensor.dtype for tensor in (v, q, k) if tensor.dtype.itemsize == 2]
    return tuple(tensor.to(narrow[0]) for tensor in (q, k, v)) if narrow else (q, k, v)


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
        decline(layer, strict, query, value, "kwarg_unknown", text)


_one_parser = threading.Lock()  # inspect parses with ast, which two threads at once break in Python 3.11


def source_of(thing) -> str:
    """The source text of a class, function or module; empty where there is none."""
    try:
        with _one_parser:
            return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""


_eager_ignored: dict[tuple[type, str], bool] = {}


def _eager_ignores(module, keyword: str) -> bool:
    """Whether the model's own eager attention takes `keyword` only to drop it, which proves it irrelevant here."""
    key = type(module), keyword
    if key not in _eager_ignored:
        eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
        parameters = inspect.signature(eager).parameters if callable(eager) else {}
        swallows = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        used = keyword in parameters or (swallows and re.search(rf"kwargs\W+(get\W+)?{keyword}\b", source_of(eager)))
        _eager_ignored[key] = bool(swallows and not used)
    return _eager_ignored[key]


def decline(layer: int, strict: bool, query, value, code: str, text: str) -> None:
    """Count, warn about or raise a decline that the seam itself decides; not while a graph is traced."""
    if torch.compiler.is_compiling():
        return
    reason = Reason(code, text)
    if strict or counting.switched_on("FLASHPATCH_STRICT"):
        problem = Problem("forward", str(query.dtype).removeprefix("torch."), query.shape[-1], value.shape[-1])
        raise DeclinedError(Decline(problem, (reason,)))
    counting.record_decline(layer, reason)
