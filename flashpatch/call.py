"""`Call`: everything about one attention call except q, k and v, checked once in `ops` and trusted below it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The optional tensors of a call, in the order of struct Params.
TENSORS = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "key_ranges", "mask", "bias", "alibi_slopes", "sinks", "rng_state",
    "q_descale", "k_descale", "v_descale",
)  # fmt: skip
DESCALES = ("q_descale", "k_descale", "v_descale")
NO_POINTERS = (0,) * len(TENSORS)


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of out for q, k and v of a dtype: their own, of 8 bits bfloat16."""
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


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
    q_descale: torch.Tensor | None = None  # [batch, num_heads_kv], fp32: q of 8 bits stands for q_descale * q
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    ready: object = None  # the prepared launch of a Call that is kept for one signature of tensors on a GPU
    bias_gradient: bool = True  # whether anybody wants the gradient of the bias
    expanded: bool = False  # whether masks and biases have their full shapes, which all layers below `ops` rely on

    def is_plain(self) -> bool:
        """Whether the call has no tensors beside q, k and v."""
        return (
            self.cu_seqlens_q is None
            and self.key_ranges is None
            and self.mask is None
            and self.bias is None
            and self.seqused_k is None
            and self.alibi_slopes is None
            and self.sinks is None
            and self.rng_state is None
            and self.q_descale is None
            and self.k_descale is None
            and self.v_descale is None
        )

    def pointers(self) -> tuple[int, ...]:
        """Device addresses of TENSORS, 0 for those that are not given."""
        if self.is_plain():
            return NO_POINTERS
        tensors = (getattr(self, name) for name in TENSORS)
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)

    def signature(self) -> tuple:
        """All that shapes a launch beside q, k and v: scalars, and the layouts of the given tensors."""
        scalars = (
            self.softmax_scale, self.max_seqlen_q, self.max_seqlen_k, self.window_left, self.window_right,
            self.softcap, self.dropout_p, self.deterministic, self.bias_gradient,
        )  # fmt: skip
        if self.is_plain():
            return scalars
        tensors = (getattr(self, name) for name in TENSORS)
        return (*scalars, *(None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors))
