"""Who sees whom in one call of transformers' attention function: of a recovered mask, a tensor or none, with the documents that
other arguments mark; and what is added to the scores."""

from __future__ import annotations

import torch

from . import counting, masks
from .masks import MaskSpec
from .modes import autocast_dtype


def mask_of_call(
    attention_mask, q, k, is_causal, sliding_window, position_ids, cu_seq_lens_q, cu_seq_lens_k, layer: int
):
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
    if spec.q_length != q.shape[1] and spec.same_for_all_rows():
        spec = spec._replace(q_length=q.shape[1])  # which keys are padding does not depend on the rows
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


def bias_of_call(position_bias, additive, q, key_length: int) -> torch.Tensor | None:
    """What is added to the scores, in the dtype attention will run in. Values below that dtype's range become its
    lowest number, not -inf: a row made of nothing else stays the plain mean it is in eager attention."""
    if position_bias is None and additive is None:
        return None
    parts = [_four_dimensional(part, key_length) for part in (position_bias, additive) if part is not None]
    bias = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    dtype = (q.dtype != torch.float64 and autocast_dtype(q.device.type)) or q.dtype
    if bias.dtype == dtype:
        return bias
    if bias.is_floating_point() and torch.finfo(bias.dtype).min < torch.finfo(dtype).min:
        lowest = torch.finfo(dtype).min
        bias = torch.where((bias < lowest) & (bias != -torch.inf), lowest, bias)
    return bias.to(dtype)
