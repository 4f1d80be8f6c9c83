"""`Call`: everything about one attention call except q, k and v, checked once in `ops` and trusted below it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Call:
    """Tensors and scalars of one call, in the meanings of `flashpatch.attention`.

    `causal` is already folded into `window_right`; masks, biases and key ranges are already expanded
    (by stride 0) to their full shapes; `max_seqlen_*` are the plain lengths when there are no `cu_seqlens_*`.
    """

    softmax_scale: float
    max_seqlen_q: int
    max_seqlen_k: int
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    bias: torch.Tensor | None = None  # [batch, num_heads_q, seqlen_q, seqlen_k], dtype of q
    mask: torch.Tensor | None = None  # [batch, num_heads_q, seqlen_q, seqlen_k], bool, True = attend
    key_ranges: torch.Tensor | None = None  # [batch, seqlen_q, 2], int32: row i sees keys begin <= j < end
    alibi_slopes: torch.Tensor | None = None  # [batch, num_heads_q], fp32
    sinks: torch.Tensor | None = None  # [num_heads_q], fp32
    cu_seqlens_q: torch.Tensor | None = None  # [batch + 1], int32
    cu_seqlens_k: torch.Tensor | None = None  # [batch + 1], int32
    seqused_k: torch.Tensor | None = None  # [batch], int32
    rng_state: torch.Tensor | None = None  # [2], int64: Philox seed and offset
