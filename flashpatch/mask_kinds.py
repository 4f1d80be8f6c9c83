"""What a dense attention mask says, read from its values: nothing, causal, a window, padding, packed documents, a bias."""

from __future__ import annotations

import torch

# Additive masks hide with -inf or the dtype's lowest number; a learned bias is nowhere near.
HIDDEN = -1e4
# Beyond this many entries a mask's first row of the batch speaks for all.
_MOST = 1 << 26


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Boolean [..., seqlen_q, seqlen_k] of who sees whom, of a boolean or an additive mask."""
    return mask if mask.dtype == torch.bool else mask > HIDDEN


def is_bias(mask: torch.Tensor) -> bool:
    """Whether an additive mask changes scores that it does not hide."""
    return mask.dtype != torch.bool and bool(((mask != 0) & (mask > HIDDEN)).any())


@torch.no_grad()
def kind(mask: torch.Tensor | None, seqlen_q: int, seqlen_k: int) -> str:
    """The mask's meaning in words; "none" without one. Waits for the GPU that holds it."""
    if mask is None:
        return "none"
    if not isinstance(mask, torch.Tensor) or mask.numel() == 0 or mask.is_meta:
        return "unknown"
    if mask.requires_grad or is_bias(_sample(mask)):  # what is learned is a bias, also while it is zero
        return "bias"
    seen = _per_row(visible(_sample(mask)), seqlen_q, seqlen_k)
    if seen is None:
        return "unknown"
    if bool(seen.all()):
        return "hides nothing"
    row = torch.arange(seqlen_q, device=seen.device)[:, None]
    column = torch.arange(seqlen_k, device=seen.device)[None]
    keys = seen.any(-2, keepdim=True)
    for shift in dict.fromkeys((seqlen_k - seqlen_q, 0)):
        triangle = column <= row + shift
        if seqlen_q > 1 and bool((seen == triangle).all()):
            return "causal"
        if seqlen_q > 1 and bool((seen == (triangle & keys)).all()):
            return "causal and padding"
        width = int(seen.sum(-1).max())
        band = triangle & (column > row + shift - width)
        if seqlen_q > 1 and bool((seen == band).all()):
            return f"causal window of {width}"
        if seqlen_q > 1 and bool((seen == (band & keys)).all()):
            return f"causal window of {width} and padding"
    if bool((seen == keys).all()):
        return "padding"
    if _contiguous(seen):
        within = bool((seen <= (column <= row + seqlen_k - seqlen_q)).all())
        return "causal, an interval of keys per row" if within else "an interval of keys per row"
    return "dense"


def _sample(mask: torch.Tensor) -> torch.Tensor:
    while mask.numel() > _MOST and mask.dim() > 2:
        mask = mask[0]
    return mask


def _per_row(seen: torch.Tensor, seqlen_q: int, seqlen_k: int) -> torch.Tensor | None:
    """[rows, seqlen_q, seqlen_k], or None where the shapes do not fit."""
    if seen.dim() < 2:
        seen = seen.reshape(1, -1)
    try:
        seen = seen.expand(*seen.shape[:-2], seqlen_q, seqlen_k)
    except RuntimeError:
        return None
    return seen.reshape(-1, seqlen_q, seqlen_k)


def _contiguous(seen: torch.Tensor) -> bool:
    """Whether each row sees one interval of keys."""
    starts = seen.int().diff(dim=-1, prepend=torch.zeros_like(seen[..., :1], dtype=torch.int))
    return bool(((starts == 1).sum(-1) <= 1).all())


@torch.no_grad()
def documents(position_ids: torch.Tensor, seqlen: int) -> torch.Tensor | None:
    """[rows, seqlen] number of the packed document of each token, or None if the positions mark only one.

    A document begins where the position falls back to the first one; padding does not (it starts at another number).
    """
    if position_ids.is_meta or position_ids.dim() != 2 or position_ids.shape[1] != seqlen or seqlen < 2:
        return None
    begins = (position_ids[:, 1:] == position_ids[:, :1]) & (position_ids[:, 1:] < position_ids[:, :-1])
    if not bool(begins.any()):
        return None
    return torch.nn.functional.pad(begins.int(), (1, 0)).cumsum(1)


@torch.no_grad()
def mixes_documents(mask: torch.Tensor | None, owner: torch.Tensor) -> bool:
    """Whether under this mask a token attends to an earlier token of another document."""
    if mask is None:
        return True
    seqlen = owner.shape[1]
    seen = visible(mask)
    seen = seen.expand(*seen.shape[:-2], seqlen, seqlen)
    if seen.dim() == 4:
        seen = seen[:, 0]
    elif seen.dim() == 2:
        seen = seen[None]
    if seen.shape[0] not in (1, owner.shape[0]):
        return False
    foreign = (owner[:, :, None] != owner[:, None, :]).tril()
    return bool((seen & foreign).any())
