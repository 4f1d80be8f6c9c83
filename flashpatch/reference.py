"""The yardstick: attention as it is defined, one whole score matrix per sequence, differentiable by torch's autograd.

It imports nothing else of this package, so that it cannot share a mistake with what is measured against it.
"""

from __future__ import annotations

import math

import numpy
import torch


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    softmax_scale=None,
    window_size=(-1, -1),
    softcap=0.0,
    bias=None,
    mask=None,
    alibi_slopes=None,
    sinks=None,
    key_ranges=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_k=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    dropout_p=0.0,
    keep=None,
    upcast=True,
    dtype=torch.float64,
):
    """Naive attention: (out, logsumexp) in the shapes of `flashpatch.attention`.

    q [batch, seqlen_q, num_heads_q, head_dim], k and v [batch, seqlen_k, num_heads_kv, head_dim | head_dim_v], or varlen
    [total, num_heads, head_dim] with cu_seqlens_q and cu_seqlens_k. bias, mask and keep broadcast to
    [batch, num_heads_q, seqlen_q, seqlen_k] (varlen: the longest sequences); key_ranges to [batch, seqlen_q, 2].
    `keep` (bool) is the dropout mask: what survives `dropout_p`. q, k and v stand for themselves times their descales,
    [batch, num_heads_kv] each.

    With `upcast`, everything is computed and returned in `dtype`: this is the reference. Without, it is computed as
    PyTorch's eager attention does it, in the inputs' own dtype with the softmax in fp32: its error is what that dtype costs.
    PyTorch has none in 8 bits; there the probabilities are in 8 bits, a row's largest as 256, and out is bfloat16.
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    input_dtype = q.dtype
    if upcast:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rounded = None if upcast or input_dtype.itemsize > 1 else input_dtype
    if rounded is not None:  # nothing is computed in 8 bits
        q, k, v, input_dtype = q.float(), k.float(), v.float(), torch.bfloat16
    softmax_dtype = dtype if upcast else torch.promote_types(input_dtype, torch.float32)
    out_dtype = dtype if upcast else input_dtype
    num_heads = q.shape[-2]

    if cu_seqlens_q is None:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        q_of, k_of, v_of = list(q), list(k), list(v)
    else:
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        batch = len(starts_q) - 1
        q_of = [q[starts_q[b] : starts_q[b + 1]] for b in range(batch)]
        k_of = [k[starts_k[b] : starts_k[b + 1]] for b in range(batch)]
        v_of = [v[starts_k[b] : starts_k[b + 1]] for b in range(batch)]
        seqlen_q = max((len(x) for x in q_of), default=0)
        seqlen_k = max((len(x) for x in k_of), default=0)

    full = (batch, num_heads, seqlen_q, seqlen_k)
    if bias is not None:
        bias = bias.expand(full)
    if mask is not None:
        mask = mask.expand(full)
    if keep is not None:
        keep = keep.expand(full)
    if key_ranges is not None:
        key_ranges = key_ranges.expand(batch, seqlen_q, 2)
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.expand(batch, num_heads)

    outs, logsumexps = [], []
    for b in range(batch):
        length_q, length_k = len(q_of[b]), len(k_of[b])
        if seqused_k is not None:
            length_k = min(length_k, int(seqused_k[b]))
        # Each query head reads the key head of its group.
        group = num_heads // k_of[b].shape[1]
        q_heads = q_of[b].transpose(0, 1)  # [num_heads, length_q, head_dim]
        k_heads = k_of[b][:length_k].repeat_interleave(group, dim=1).transpose(0, 1)
        v_heads = v_of[b][:length_k].repeat_interleave(group, dim=1).transpose(0, 1)

        if q_descale is not None:
            q_heads = q_heads * q_descale[b].to(q.dtype).repeat_interleave(group)[:, None, None]
        if k_descale is not None:
            k_heads = k_heads * k_descale[b].to(q.dtype).repeat_interleave(group)[:, None, None]
        if v_descale is not None:
            v_heads = v_heads * v_descale[b].to(q.dtype).repeat_interleave(group)[:, None, None]

        scores = q_heads @ k_heads.transpose(1, 2) * softmax_scale  # [num_heads, length_q, length_k]
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[b, :, :length_q, :length_k]

        i = torch.arange(length_q, device=q.device)[:, None]
        j = torch.arange(length_k, device=q.device)[None, :]
        relative = j - (i + length_k - length_q)  # 0 on the bottom-right aligned diagonal, positive in the future
        if alibi_slopes is not None:
            slopes = alibi_slopes[b].to(softmax_dtype)[:, None, None]
            scores = scores - (slopes * relative.abs()).to(scores.dtype)
        visible = torch.ones(num_heads, length_q, length_k, dtype=torch.bool, device=q.device)
        if causal:
            visible = visible & (relative <= 0)
        if window_size[0] >= 0:
            visible = visible & (relative >= -window_size[0])
        if window_size[1] >= 0:
            visible = visible & (relative <= window_size[1])
        if key_ranges is not None:
            first, last = key_ranges[b, :length_q, 0:1], key_ranges[b, :length_q, 1:2]
            visible = visible & (first <= j) & (j < last)
        if mask is not None:
            visible = visible & mask[b, :, :length_q, :length_k]

        # The sink is one more key that everybody sees, with a value of zero.
        scores = scores.to(softmax_dtype)
        if sinks is None:
            sink_column = torch.full((num_heads, length_q, 1), -math.inf, dtype=softmax_dtype, device=q.device)
        else:
            sink_column = sinks.to(softmax_dtype)[:, None, None].expand(num_heads, length_q, 1)
        columns = torch.cat([scores.masked_fill(~visible, -math.inf), sink_column], dim=2)
        # A row that sees nothing has no softmax; it gets zeros in its place, with zero gradient.
        empty = (columns == -math.inf).all(dim=2, keepdim=True)
        columns = columns.masked_fill(empty, 0.0)
        probabilities = torch.softmax(columns, dim=2)[:, :, :-1].masked_fill(~visible | empty, 0.0)
        logsumexp = torch.logsumexp(columns, dim=2).masked_fill(empty[:, :, 0], -math.inf)

        probabilities = probabilities.to(q.dtype)
        if rounded is not None and length_k:
            factor = 256 / probabilities.amax(dim=2, keepdim=True).clamp(min=1e-30)
            probabilities = (probabilities * factor).to(rounded).to(q.dtype) / factor
        if dropout_p > 0:
            kept = keep[b, :, :length_q, :length_k]
            probabilities = probabilities * kept / (1 - dropout_p) if dropout_p < 1 else probabilities * 0
        outs.append((probabilities @ v_heads).transpose(0, 1))  # [length_q, num_heads, head_dim_v]
        logsumexps.append(logsumexp)

    if cu_seqlens_q is not None:
        # Rows after the last sequence belong to none and see nothing but the sink.
        rest = q[starts_q[-1] :]
        outs.append(rest.new_zeros(len(rest), num_heads, v.shape[-1]))
        logsumexp = rest.new_full((num_heads, len(rest)), -math.inf, dtype=softmax_dtype)
        logsumexps.append(logsumexp if sinks is None else sinks.to(softmax_dtype)[:, None].expand_as(logsumexp))
        return torch.cat(outs).to(out_dtype), torch.cat(logsumexps, dim=1)
    if batch == 0:
        out = q.new_zeros(0, seqlen_q, num_heads, v.shape[-1], dtype=out_dtype)
        return out, q.new_zeros(0, num_heads, seqlen_q, dtype=softmax_dtype)
    return torch.stack(outs).to(out_dtype), torch.stack(logsumexps)


def pairwise(x, y, *, cost="sqeuclidean", reduce="min", dim=-1, k=None, scale=1.0, bias=None, dtype=torch.float64):
    """`flashpatch.pairwise` from its definition: the whole score matrix in `dtype`, differentiable by torch's autograd.

    Returns (values, indices) for min and topk, the tensor for logsumexp.
    """
    x, y = x.to(dtype), y.to(dtype)
    if cost == "negative_dot":
        matrix = -(x @ y.mT)
    elif cost == "giou":
        matrix = _negative_giou(x[..., :, None, :], y[..., None, :, :])
    else:
        differences = x[..., :, None, :] - y[..., None, :, :]
        matrix = {
            "sqeuclidean": lambda: (differences**2).sum(-1),
            "euclidean": lambda: torch.linalg.vector_norm(differences, dim=-1),
            "l1": lambda: differences.abs().sum(-1),
        }[cost]()
    scores = matrix * scale
    if bias is not None:
        scores = scores + bias.to(dtype).unsqueeze(-2 if dim == -1 else -1)
    if reduce == "logsumexp":
        return torch.logsumexp(scores, dim)
    ascending = scores.sort(dim=dim, stable=True)  # of equal scores the first; a NaN comes last
    if reduce == "topk":
        return ascending.values.narrow(dim, 0, k).movedim(dim, -1), ascending.indices.narrow(dim, 0, k).movedim(dim, -1)
    values, indices = ascending.values.select(dim, 0), ascending.indices.select(dim, 0)
    unordered = scores.isnan()
    first = unordered.to(torch.int8).argmax(dim)  # a NaN is smaller than everything
    return values.masked_fill(unordered.any(dim), math.nan), torch.where(unordered.any(dim), first, indices)


def _negative_giou(a, b):
    """Minus the generalised IoU of boxes (x0, y0, x1, y1), with x0 <= x1 and y0 <= y1 (arXiv 1902.09630, algorithm 1)."""

    def area(x0, y0, x1, y1):
        return (x1 - x0).clamp(min=0) * (y1 - y0).clamp(min=0)

    (ax0, ay0, ax1, ay1), (bx0, by0, bx1, by1) = a.unbind(-1), b.unbind(-1)
    common = area(torch.maximum(ax0, bx0), torch.maximum(ay0, by0), torch.minimum(ax1, bx1), torch.minimum(ay1, by1))
    hull = area(torch.minimum(ax0, bx0), torch.minimum(ay0, by0), torch.maximum(ax1, bx1), torch.maximum(ay1, by1))
    union = area(ax0, ay0, ax1, ay1) + area(bx0, by0, bx1, by1) - common
    # nothing over nothing is nothing
    overlap = torch.where(union == 0, 0.0, common / torch.where(union == 0, 1.0, union))
    outside = torch.where(hull == 0, 0.0, (hull - union) / torch.where(hull == 0, 1.0, hull))
    return outside - overlap


def philox(counter, key):
    """Philox4x32-7 (Salmon et al., SC 2011): numpy uint32 arrays, four of counter and two of key, to four words."""
    c0, c1, c2, c3 = (numpy.asarray(c, dtype=numpy.uint64) for c in counter)
    k0, k1 = (int(k) for k in key)
    low, word = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
    for _ in range(7):
        first = numpy.uint64(0xD2511F53) * c0
        second = numpy.uint64(0xCD9E8D57) * c2
        c0 = (second >> word) ^ c1 ^ numpy.uint64(k0)
        c2 = (first >> word) ^ c3 ^ numpy.uint64(k1)
        c1, c3 = second & low, first & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return tuple(c.astype(numpy.uint32) for c in (c0, c1, c2, c3))


# As cuda_src/dropout.cuh has them.
MULTIPLIERS = (
    *(0x243F6A80, 0x85A308D1, 0x13198A22, 0x03707343),
    *(0xA4093824, 0x299F31D5, 0x082EFA96, 0xEC4E6C87),
    *(0x452821E8, 0x38D01379, 0xBE5466CA, 0x34E90C6B),
    *(0xC0AC29BC, 0xC97C50DD, 0x3F84D5BE, 0xB547091F),
)


def dropout_keep(rng_state, dropout_p, batch, num_heads, seqlen_q, seqlen_k):
    """What dropout keeps for a Philox state (seed, offset): bool [batch, num_heads, seqlen_q, seqlen_k], on the CPU.

    Element by element from the definition: counter (((j >> 6) << 2) | ((j >> 1) & 3), ((i >> 5) << 3) | (i & 7),
    b * num_heads + h, offset); (a, x) the first two words, if j & 32 the last two; the word a * m + x with m number
    ((i >> 3) & 3) * 4 + ((j >> 3) & 3) of MULTIPLIERS; of its upper half if j is odd, else its lower, the low 15 bits. With
    dropout_p in fp32, up to 1/2, elements are kept whose bits are >= floor(dropout_p * 2^15 + 1/2); beyond, those whose
    bits are < floor((1 - dropout_p) * 2^15 + 1/2).
    """
    seed, offset = (int(x) % 2**64 for x in rng_state)
    head = numpy.arange(batch * num_heads).reshape(batch, num_heads, 1, 1)
    i = numpy.arange(seqlen_q).reshape(-1, 1)
    j = numpy.arange(seqlen_k)
    counter = numpy.broadcast_arrays(((j >> 6) << 2) | ((j >> 1) & 3), ((i >> 5) << 3) | (i & 7), head, offset % 2**32)
    words = philox(counter, (seed % 2**32, seed >> 32))
    a, x = numpy.where(j & 32, words[2], words[0]), numpy.where(j & 32, words[3], words[1])
    m = numpy.array(MULTIPLIERS, dtype=numpy.uint32)[((i >> 3) & 3) * 4 + ((j >> 3) & 3)]
    word = a * m + x
    bits = numpy.where(j & 1, word >> 16, word) & 0x7FFF
    p = float(numpy.float32(dropout_p))
    share = math.floor(min(p, 1 - p) * 2**15 + 0.5)
    return torch.from_numpy(bits >= share if p <= 0.5 else bits < share)
