"""Exact attention in torch operations, for whatever no kernel takes: any device, any floating dtype, every feature.

The score matrix is walked in tiles with an online softmax (FlashAttention-2, arXiv 2307.08691, Algorithm 1 forward,
Algorithm 2 backward), so memory grows linearly with the lengths. 16-bit and fp32 inputs are computed in fp32, fp64 in fp64.
Nothing here reads a device tensor's value on the host unless that device is the CPU, so a call on a GPU never waits.
"""

from __future__ import annotations

import functools
import math

import torch

from .call import Call, out_dtype
from .modes import autocast_dtype
from .score_tiles import ScoreTiles


def _without_autograd_and_autocast(function):
    @functools.wraps(function)
    def wrapped(tensor, *args):
        with torch.no_grad():
            kind = tensor.device.type
            if autocast_dtype(kind) is None:
                return function(tensor, *args)
            # Autocast would round the fp32 products back to 16 bits.
            with torch.autocast(kind, enabled=False):
                return function(tensor, *args)

    return wrapped


@_without_autograd_and_autocast
def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call):
    """Attention and its logsumexp: FlashAttention-2, Algorithm 1.

    q [batch, seqlen_q, num_heads_q, head_dim], k and v [batch, seqlen_k, num_heads_kv, head_dim | head_dim_v]
    (varlen: [total, num_heads, head_dim]), any floating dtype and strides.
    Returns out, contiguous, [batch, seqlen_q, num_heads_q, head_dim_v] in q's dtype, and logsumexp, natural log,
    [batch, num_heads_q, seqlen_q] in fp32 (fp64 for fp64 inputs); varlen: [total_q, ...] and [num_heads_q, total_q].
    A row that sees nothing has out 0 and logsumexp -inf (the sink's value if there is one).
    q, k and v of 8 bits are taken in fp32, times their factors, and out is bfloat16.
    """
    if q.dtype.itemsize == 1:
        out, logsumexp = forward(*_dequantised(q, k, v, call), call)
        return out.to(out_dtype(q.dtype)), logsumexp
    tiles = ScoreTiles(q, k, v, call)
    contain = tiles.masked and not tiles.known_finite(v)
    keep_scale = tiles.keep_scale
    for m0, m1 in tiles.row_tiles():
        q_tile = tiles.rows(tiles.q, m0, m1).mul_(call.softmax_scale)
        row_max, row_sum, out_tile = tiles.sink_state(m0, m1)
        for n0, n1 in tiles.key_tiles(m0, m1):
            k_tile, v_tile = tiles.keys(tiles.k, n0, n1), tiles.keys(tiles.v, n0, n1)
            if contain:
                k_tile, v_tile = _poison_keys(k_tile, v_tile)
            scores, _, _ = tiles.scores(q_tile, k_tile, m0, m1, n0, n1)
            new_max = scores.amax(-1, keepdim=True)
            if row_max is not None:
                new_max = torch.maximum(new_max, row_max)
            # A row that has seen nothing yet has maximum -inf; any finite number does in its place, its exponentials are 0.
            anchor = new_max.masked_fill(new_max == -math.inf, 0.0) if tiles.rows_may_be_empty else new_max
            p = scores.sub_(anchor).exp_()
            tile_sum = p.sum(-1, keepdim=True)
            if keep_scale is not None:
                p.mul_(tiles.keep(m0, m1, n0, n1))
            if row_max is None:
                row_sum, out_tile = tile_sum, torch.bmm(p, v_tile)
            else:
                rescale = torch.exp(row_max - anchor)
                row_sum = row_sum.mul_(rescale).add_(tile_sum)
                out_tile = out_tile.mul_(rescale).baddbmm_(p, v_tile)
            row_max = new_max
        if row_max is None:
            tiles.out[:, m0:m1].zero_()
            tiles.logsumexp[:, :, m0:m1].fill_(-math.inf)
            continue
        if keep_scale is not None:
            out_tile.mul_(keep_scale)
        out_tile.div_(row_sum.masked_fill(row_sum == 0.0, 1.0) if tiles.rows_may_be_empty else row_sum)
        tiles.store_rows(tiles.out, out_tile, m0, m1)
        tiles.row_values(tiles.logsumexp, m0, m1).copy_(row_sum.log_().add_(row_max).view(tiles.value_shape(m0, m1)))
    if tiles.varlen:
        return tiles.out.squeeze(0), tiles.logsumexp.squeeze(0)
    return tiles.out, tiles.logsumexp


@_without_autograd_and_autocast
def backward(dout, dlogsumexp, q, k, v, out, logsumexp, call: Call):
    """Gradients of `forward`: FlashAttention-2, Algorithm 2, with the tiles of `forward`.

    dout as out; dlogsumexp as logsumexp, or None. Returns dq, dk, dv in the shapes and dtypes of q, k, v;
    dbias, or None without a bias, with size 1 where `call.bias` is expanded by stride 0; dsinks [num_heads_q], or None.
    Raises TypeError for 8 bits, which have no gradients.
    """
    if q.dtype.itemsize == 1:
        raise TypeError(
            f"flashpatch attention of {q.dtype} has a forward only; for gradients pass q, k and v in bfloat16"
        )
    tiles = ScoreTiles(q, k, v, call, (out, logsumexp))
    contain = tiles.masked and not tiles.known_finite(q, k, v, dout)
    keep_scale = tiles.keep_scale
    if tiles.varlen:
        dout = dout.unsqueeze(0)
        dlogsumexp = None if dlogsumexp is None else dlogsumexp.unsqueeze(0)
    dq = torch.empty_like(tiles.q, memory_format=torch.contiguous_format)
    dk = dv = dbias = dsinks = None
    if tiles.bias is not None:
        dbias = torch.zeros(tiles.bias.shape, dtype=tiles.dtype, device=q.device)
    if call.sinks is not None:
        dsinks = torch.zeros(tiles.heads_kv, tiles.group, dtype=tiles.dtype, device=q.device)
    for m0, m1 in tiles.row_tiles():
        q_tile = tiles.rows(tiles.q, m0, m1).mul_(call.softmax_scale)
        dout_tile = tiles.rows(dout, m0, m1)
        delta = tiles.rows(tiles.out, m0, m1).mul_(dout_tile).sum(-1, keepdim=True)
        if dlogsumexp is not None:
            delta.view(tiles.value_shape(m0, m1)).sub_(tiles.row_values(dlogsumexp, m0, m1))
        row_lse = tiles.row_values(tiles.logsumexp, m0, m1).reshape(delta.shape).to(tiles.dtype)
        if tiles.rows_may_be_empty:
            empty = row_lse == -math.inf
            delta.masked_fill_(empty, 0.0)
            row_lse = row_lse.masked_fill(empty, math.inf)
        if dsinks is not None:
            sink_share = torch.exp(tiles.sinks - row_lse.view(tiles.value_shape(m0, m1)))
            dsinks -= sink_share.mul_(delta.view_as(sink_share)).sum((0, 3))
        if contain:
            row_lse, q_tile, dout_tile = _poison_rows(row_lse, q_tile, dout_tile)
        dq_tile = None
        for n0, n1 in tiles.key_tiles(m0, m1):
            k_tile, v_tile = tiles.keys(tiles.k, n0, n1), tiles.keys(tiles.v, n0, n1)
            k_of_scores = k_tile
            if contain:
                # dS K of a row that sees a key that is not finite is NaN, even where P is 0. Of V the forward has seen to it:
                # such rows have a NaN logsumexp, and P is NaN.
                k_of_scores = torch.nan_to_num(k_tile, math.nan, math.nan, math.nan)
                k_tile, v_tile = _zero_nonfinite(k_tile), _zero_nonfinite(v_tile)
            scores, hidden, tanh = tiles.scores(q_tile, k_of_scores, m0, m1, n0, n1)
            p = scores.sub_(row_lse).exp_()
            if hidden is not None:
                # exp(-inf - NaN) is NaN: what a row does not see must be 0 in a row of NaN too, or keys nobody saw get NaN.
                p.view(tiles.tile_shape(m0, m1, n0, n1)).masked_fill_(hidden, 0.0)
            ds = torch.bmm(dout_tile, v_tile.transpose(1, 2))
            p_dropped = p
            if keep_scale is not None:
                keep = tiles.keep(m0, m1, n0, n1)
                p_dropped = p * keep
                p_dropped.mul_(keep_scale)
                ds.mul_(keep).mul_(keep_scale)
            dv = tiles.add_keys(dv, torch.bmm(p_dropped.transpose(1, 2), dout_tile), n0, n1)
            ds.sub_(delta).mul_(p)
            if hidden is not None:
                ds.view(tiles.tile_shape(m0, m1, n0, n1)).masked_fill_(hidden, 0.0)
            if dbias is not None:
                tiles.add_bias(dbias, ds, m0, m1, n0, n1)
            if tanh is not None:
                ds.mul_(tanh.square_().neg_().add_(1.0))
                if contain and hidden is not None:  # 0 times the derivative at a NaN
                    ds.view(tiles.tile_shape(m0, m1, n0, n1)).masked_fill_(hidden, 0.0)
            dk = tiles.add_keys(dk, torch.bmm(ds.transpose(1, 2), q_tile), n0, n1)
            dq_tile = torch.bmm(ds, k_tile) if dq_tile is None else dq_tile.baddbmm_(ds, k_tile)
        if dq_tile is None:
            dq[:, m0:m1].zero_()
        else:
            tiles.store_rows(dq, dq_tile.mul_(call.softmax_scale), m0, m1)
    dk, dv = tiles.finish_keys(dk, tiles.k), tiles.finish_keys(dv, tiles.v)
    if tiles.varlen:
        dq, dk, dv = dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)
    if dbias is not None:
        dbias = dbias.to(call.bias.dtype)
    if dsinks is not None:
        dsinks = dsinks.flatten().to(call.sinks.dtype)
    return dq, dk, dv, dbias, dsinks


def _dequantised(q, k, v, call: Call):
    """q, k and v of 8 bits as fp32 numbers, each times the factor of its sequence and key head."""
    group = q.shape[-2] // max(1, k.shape[-2])

    def scaled(tensor, descale, starts, group):
        if descale is None or descale.numel() == 0:
            return tensor.float()
        descale = descale.repeat_interleave(group, 1) if group != 1 else descale
        if starts is None:
            return tensor.float() * descale[:, None, :, None]
        rows = torch.arange(tensor.shape[0], device=tensor.device)
        sequence = torch.searchsorted(starts[1:].long(), rows, right=True).clamp_(max=starts.numel() - 2)
        return tensor.float() * descale[sequence][..., None]

    return (
        scaled(q, call.q_descale, call.cu_seqlens_q, group),
        scaled(k, call.k_descale, call.cu_seqlens_k, 1),
        scaled(v, call.v_descale, call.cu_seqlens_k, 1),
    )


def _zero_nonfinite(x):
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)


def _poison_keys(k_tile, v_tile):
    """Keys whose V is not finite give NaN scores: NaN in all columns for the rows that see them, and nothing for the others.

    Without this, 0 * NaN in the product with V would reach rows that do not see the key. One column alone, as in eager
    attention, would take another product of that size.
    """
    broken = ~v_tile.isfinite().all(-1, keepdim=True)
    return k_tile.masked_fill(broken, math.nan), _zero_nonfinite(v_tile)


def _poison_rows(row_lse, q_tile, dout_tile):
    """Rows whose q or dout is not finite give NaN to the keys that they see, and nothing to the others."""
    broken = ~(q_tile.isfinite().all(-1, keepdim=True) & dout_tile.isfinite().all(-1, keepdim=True))
    return row_lse.masked_fill(broken, math.nan), _zero_nonfinite(q_tile), _zero_nonfinite(dout_tile)
