"""One attention call cut into tiles of scores, in torch operations: which tiles, what they hold, what hides in them."""

from __future__ import annotations

import math

import torch

from . import dropout
from .call import Call

# Scores held at once over all batches and heads. On a CPU 2^20 fp32 scores stay near the caches and still keep small
# problems in one tile; a GPU needs larger tiles to be busy, and 2^24 fp32 scores are 64 MiB.
TILE_SCORES_CPU = 1 << 20
TILE_SCORES = 1 << 24
# Query rows per tile: enough to pay for loading a key tile, few enough that causal really skips half of the tiles.
TILE_ROWS = 128
TILE_MINIMUM = 64


class ScoreTiles:
    """One call laid out for tiles.

    A varlen call is one long sequence: whatever restricts a row (its sequence, lengths, window, key range) becomes one
    interval of keys per row, `begin <= j < end`, computed on the device. Tiles hold [batch * num_heads_kv] matrices whose
    rows are the query rows of all heads that share the key head, so that grouped heads need no repeated K and V.
    """

    def __init__(self, q, k, v, call: Call, results=None):
        self.call = call
        self.varlen = call.cu_seqlens_q is not None
        if self.varlen:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            results = results and [result.unsqueeze(0) for result in results]
        self.q, self.k, self.v = q, k, v
        self.batch, self.seqlen_q, self.heads_q, _ = q.shape
        self.seqlen_k, self.heads_kv = k.shape[1:3]
        self.group = self.heads_q // max(1, self.heads_kv)
        self.device = q.device
        self.on_host = _on_host(q.device)
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        if results:
            self.out, self.logsumexp = results
        else:
            self.out = q.new_empty(self.batch, self.seqlen_q, self.heads_q, v.shape[3])
            self.logsumexp = q.new_empty(self.batch, self.heads_q, self.seqlen_q, dtype=self.dtype)

        self.bias, self.mask = _without_expanded(call.bias), _without_expanded(call.mask)
        self.sinks = None
        if call.sinks is not None:
            self.sinks = call.sinks.to(self.dtype).view(self.heads_kv, self.group, 1)
        self.keep_scale = None
        if call.dropout_p > 0.0:
            self.keep_scale = 1.0 / (1.0 - call.dropout_p) if call.dropout_p < 1.0 else 0.0
        self.no_keys = self.seqlen_k == 0 or (self.varlen and call.cu_seqlens_q.numel() == 1)
        self._set_bounds()
        self.masked = self.begin is not None or self.end is not None or self.mask is not None
        # Whether nothing but the window hides keys: then the host knows what each row sees.
        self.window_only = (
            not (self.varlen or call.seqused_k is not None or call.key_ranges is not None) and self.mask is None
        )
        self.shift = self.seqlen_k - self.seqlen_q
        # Whether a row's running maximum can be -inf. Not where all rows see the first key; a bias of -inf hides keys too.
        first_key_seen = self.window_only and call.window_left < 0 and self.shift + call.window_right >= 0
        self.rows_may_be_empty = self.no_keys or self.bias is not None or (self.masked and not first_key_seen)

    def _set_bounds(self):
        """Sets `begin`, `end` (None: no limit) and `diagonal` (None: unused), int64 [batch or 1, seqlen_q, 1]."""
        call = self.call
        self.begin = self.end = self.diagonal = None
        if self.no_keys:
            return
        needs_diagonal = call.window_left >= 0 or call.window_right >= 0 or call.alibi_slopes is not None
        if not (self.varlen or needs_diagonal or call.seqused_k is not None or call.key_ranges is not None):
            return
        length_q, length_k, key_ranges = self.seqlen_q, self.seqlen_k, call.key_ranges
        first = length_k - length_q if not self.varlen and call.seqused_k is None else 0
        rows = torch.arange(first, first + self.seqlen_q, device=self.device).view(1, -1, 1)
        if self.varlen:
            starts_q, starts_k = call.cu_seqlens_q.long(), call.cu_seqlens_k.long()
            lengths_q, lengths_k = starts_q.diff(), starts_k.diff()
            if call.seqused_k is not None:
                lengths_k = torch.minimum(lengths_k, call.seqused_k)
            sequence = torch.searchsorted(starts_q[1:], rows, right=True)
            # Rows after the last sequence belong to none: they see nothing.
            outside = sequence == lengths_q.numel()
            self.sequence = sequence.clamp_(max=lengths_q.numel() - 1)
            rows = rows - starts_q[self.sequence]
            self.row_in_sequence, self.key_start = rows, starts_k[self.sequence]
            length_q, length_k = lengths_q[self.sequence], lengths_k[self.sequence].masked_fill_(outside, 0)
            if key_ranges is not None:
                key_ranges = key_ranges[self.sequence[..., 0], rows[..., 0].clamp(max=max(0, key_ranges.shape[1] - 1))]
        elif call.seqused_k is not None:
            length_k = call.seqused_k.long().clamp(max=self.seqlen_k)[:, None, None]
        same_lengths = not torch.is_tensor(length_k)
        if needs_diagonal:
            self.diagonal = rows if same_lengths else rows + (length_k - length_q)
        if not same_lengths:
            self.end = length_k
        if call.window_right >= 0:
            end = self.diagonal + (call.window_right + 1)
            self.end = end if same_lengths else torch.minimum(end, length_k)
        if call.window_left >= 0:
            self.begin = self.diagonal - call.window_left
        if key_ranges is not None:
            first, last = key_ranges[..., 0:1].long(), key_ranges[..., 1:2].long()
            self.begin = first if self.begin is None else torch.maximum(self.begin, first)
            self.end = last if self.end is None else torch.minimum(self.end, last)
        if self.varlen:
            self.begin = self.key_start if self.begin is None else self.begin.clamp_(min=0) + self.key_start
            self.end = self.end + self.key_start
            self.diagonal = None if self.diagonal is None else self.diagonal + self.key_start

    def known_finite(self, *tensors) -> bool:
        """Whether no tensor holds NaN or inf. False where finding out would make the host wait for a device."""
        # One sum per tensor is far cheaper than containing; should it overflow, containing is merely unneeded.
        return self.on_host and all(math.isfinite(x.sum(dtype=self.dtype).item()) for x in tensors)

    # ---- which tiles ----

    def row_tiles(self):
        """(m0, m1) of each tile of query rows."""
        heads = self.batch * self.heads_q
        if heads == 0:
            return
        scores = TILE_SCORES_CPU if self.on_host else TILE_SCORES
        rows = max(1, min(self.seqlen_q, TILE_ROWS))
        while rows > TILE_MINIMUM and heads * rows * TILE_MINIMUM > scores:
            rows //= 2
        self.tile_keys = max(TILE_MINIMUM, scores // (heads * rows))
        for m0 in range(0, self.seqlen_q, rows):
            yield m0, min(m0 + rows, self.seqlen_q)

    def key_tiles(self, m0, m1):
        """(n0, n1) of each tile of keys that rows m0..m1 can see, as far as the host can know."""
        if self.no_keys:
            return
        call, n0, end = self.call, 0, self.seqlen_k
        if not self.varlen:
            if call.window_right >= 0:
                end = min(end, m1 + self.shift + call.window_right)
            if call.window_left >= 0 and call.seqused_k is None:  # seqused_k moves the window left
                n0 = max(n0, m0 + self.shift - call.window_left)
        if self.on_host and (self.varlen or call.seqused_k is not None or call.key_ranges is not None):
            if self.begin is not None:
                n0 = max(n0, _narrow(self.begin, 1, m0, m1).min().item())
            if self.end is not None:
                end = min(end, _narrow(self.end, 1, m0, m1).max().item())
        # Many keys that all rows see are walked apart from those at the diagonal: hiding costs as much as a product.
        edge = m0 + self.shift + call.window_right + 1
        stops = [edge, end] if self.window_only and n0 + TILE_ROWS <= edge < end else [end]
        for stop in stops:
            while n0 < stop:
                n1 = min(n0 + self.tile_keys, stop)
                yield n0, n1
                n0 = n1

    def sees_all(self, m0, m1, n0, n1):
        """Whether the host knows that rows m0..m1 see all keys n0..n1."""
        left, right = self.call.window_left, self.call.window_right
        return (
            self.window_only
            and (right < 0 or n1 <= m0 + self.shift + right + 1)
            and (left < 0 or n0 >= m1 - 1 + self.shift - left)
        )

    # ---- loading and storing ----

    def tile_shape(self, m0, m1, n0, n1):
        """The shape in which a tile of scores meets masks and biases."""
        return self.batch, self.heads_kv, self.group, m1 - m0, n1 - n0

    def value_shape(self, m0, m1):
        """The shape of one value per row of a tile."""
        return self.batch, self.heads_kv, self.group, m1 - m0

    def rows(self, x, m0, m1):
        """Rows m0..m1 of [batch, seqlen_q, num_heads_q, d], copied to [batch * num_heads_kv, group * rows, d]."""
        shape = (*self.value_shape(m0, m1), x.shape[3])
        tile = torch.empty(shape, dtype=self.dtype, device=self.device)
        tile.copy_(self.by_heads(x, m0, m1))
        return tile.view(self.batch * self.heads_kv, self.group * (m1 - m0), shape[4])

    def store_rows(self, x, tile, m0, m1):
        """The inverse of `rows`, rounding to the dtype of x."""
        self.by_heads(x, m0, m1).copy_(tile.view(*self.value_shape(m0, m1), x.shape[3]))

    def by_heads(self, x, m0, m1):
        """Rows m0..m1 of [batch, seqlen_q, num_heads_q, d], viewed as [batch, num_heads_kv, group, rows, d]."""
        x = _narrow(x, 1, m0, m1)
        return x.view(self.batch, m1 - m0, self.heads_kv, self.group, x.shape[3]).permute(0, 2, 3, 1, 4)

    def row_values(self, x, m0, m1):
        """Rows m0..m1 of [batch, num_heads_q, seqlen_q], viewed as [batch, num_heads_kv, group, rows]."""
        return _narrow(x, 2, m0, m1).view(self.value_shape(m0, m1))

    def keys(self, x, n0, n1):
        """Keys n0..n1 of [batch, seqlen_k, num_heads_kv, d] as [batch * num_heads_kv, keys, d]."""
        x = _narrow(x, 1, n0, n1).transpose(1, 2)
        return x.reshape(self.batch * self.heads_kv, n1 - n0, x.shape[3]).to(self.dtype)

    def add_keys(self, total, tile, n0, n1):
        """Adds a tile of dk or dv to its sum over tiles of rows."""
        if total is None:
            if n1 - n0 == self.seqlen_k:
                return tile
            total = tile.new_zeros(tile.shape[0], self.seqlen_k, tile.shape[2])
        total[:, n0:n1] += tile
        return total

    def finish_keys(self, total, x):
        """The sum of `add_keys` in the shape and dtype of x."""
        if total is None:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        total = total.view(self.batch, self.heads_kv, self.seqlen_k, x.shape[3]).transpose(1, 2)
        return total.to(x.dtype, memory_format=torch.contiguous_format)

    def sink_state(self, m0, m1):
        """Row maximum, row sum and output before the first key: the sink's, or None three times."""
        if self.sinks is None:
            return None, None, None
        row_max = self.sinks.expand(self.value_shape(m0, m1)).reshape(self.batch * self.heads_kv, -1, 1)
        out = row_max.new_zeros(*row_max.shape[:2], self.v.shape[3])
        return row_max, torch.ones_like(row_max), out

    # ---- one tile of scores ----

    def scores(self, q_tile, k_tile, m0, m1, n0, n1):
        """softcap(scaled q.k) + bias + alibi, -inf where hidden; what is hidden, or None; softcap's tanh, or None."""
        call, tanh = self.call, None
        flat = torch.bmm(q_tile, k_tile.transpose(1, 2))
        if call.softcap > 0.0:
            tanh = flat.mul_(1.0 / call.softcap).tanh_()
            flat = tanh * call.softcap
        hidden = None
        hides = self.masked and not self.sees_all(m0, m1, n0, n1)
        if self.bias is not None or call.alibi_slopes is not None or hides:
            scores = flat.view(self.tile_shape(m0, m1, n0, n1))
            if self.bias is not None:
                scores += self.attached(self.bias, m0, m1, n0, n1)
            if call.alibi_slopes is not None:
                columns = torch.arange(n0, n1, device=self.device)
                distance = (self.of_rows(self.diagonal, m0, m1) - columns).abs_().to(self.dtype)
                scores.addcmul_(self.slopes(m0, m1), distance, value=-1.0)
            if hides:
                hidden = self.hidden(m0, m1, n0, n1)
                scores.masked_fill_(hidden, -math.inf)
        return flat, hidden, tanh

    def hidden(self, m0, m1, n0, n1):
        """What rows must not see: bool, broadcastable to `tile_shape`."""
        hidden = None
        if self.begin is not None or self.end is not None:
            columns = torch.arange(n0, n1, device=self.device)
            if self.end is not None:
                hidden = columns >= self.of_rows(self.end, m0, m1)
            if self.begin is not None:
                before = columns < self.of_rows(self.begin, m0, m1)
                hidden = before if hidden is None else before | hidden
        if self.mask is not None:
            masked = ~self.attached(self.mask, m0, m1, n0, n1)
            hidden = masked if hidden is None else masked | hidden
        return hidden

    def of_rows(self, x, m0, m1):
        """Rows m0..m1 of [batch or 1, seqlen_q or 1, 1] as [batch or 1, 1, 1, rows or 1, 1]."""
        return _narrow(x, 1, m0, m1)[:, None, None]

    def slopes(self, m0, m1):
        """ALiBi slopes that broadcast to `tile_shape`."""
        slopes = self.call.alibi_slopes.to(self.dtype)
        if not self.varlen:
            return slopes.view(-1, self.heads_kv, self.group, 1, 1)
        of_rows = slopes[self.sequence[0, m0:m1, 0]]  # [rows, num_heads_q]
        return of_rows.t().reshape(1, self.heads_kv, self.group, m1 - m0, 1)

    def in_sequence(self, m0, m1, n0, n1):
        """Varlen: each row's sequence [rows, 1] and index in it [rows, 1], and the keys' indices in it [rows, keys]."""
        keys = torch.arange(n0, n1, device=self.device) - self.key_start[0, m0:m1]
        return self.sequence[0, m0:m1], self.row_in_sequence[0, m0:m1], keys

    def attached(self, x, m0, m1, n0, n1):
        """The tile of a compact mask or bias, broadcastable to `tile_shape`."""
        if self.varlen:
            # Keys of other sequences have indices outside; they are hidden, so any element does for them.
            index = [i.clamp(0, size - 1) for i, size in zip(self.in_sequence(m0, m1, n0, n1), _sizes(x), strict=True)]
            x = x[index[0], :, index[1], index[2]].permute(2, 0, 1)[None]  # [1, heads, rows, keys]
        else:
            x = _narrow(_narrow(x, 2, m0, m1), 3, n0, n1)
        return x.unflatten(1, (1, 1) if x.shape[1] != self.heads_q else (self.heads_kv, self.group))

    def add_bias(self, dbias, ds, m0, m1, n0, n1):
        """Adds a tile of score gradients to dbias, summed where the bias is broadcast."""
        ds = ds.view(self.batch, self.heads_q, m1 - m0, n1 - n0)
        if self.varlen:
            index = [
                i.clamp(0, size - 1) for i, size in zip(self.in_sequence(m0, m1, n0, n1), _sizes(dbias), strict=True)
            ]
            ds = ds[0] if dbias.shape[1] == self.heads_q else ds[0].sum(0, keepdim=True)
            heads = torch.arange(ds.shape[0], device=self.device)[:, None, None]
            dbias.index_put_((index[0], heads, index[1], index[2]), ds, accumulate=True)
            return
        summed = [dim for dim in range(4) if dbias.shape[dim] == 1 and ds.shape[dim] > 1]
        if summed:
            ds = ds.sum(summed, keepdim=True)
        tile = _narrow(_narrow(dbias, 2, m0, m1), 3, n0, n1)
        tile += ds

    def keep(self, m0, m1, n0, n1):
        """Which probabilities dropout keeps: bool [batch * num_heads_kv, group * rows, keys], equal to the kernels' choice."""
        state, heads = self.call.rng_state, self.batch * self.heads_q
        if self.varlen:
            bits = dropout.bits_in_sequences(state, heads, *self.in_sequence(m0, m1, n0, n1))
        else:
            bits = dropout.bits_of_tile(state, heads, m0, m1, n0, n1)
        keep = dropout.kept_by(bits, self.call.dropout_p)
        return keep.reshape(self.batch * self.heads_kv, self.group * (m1 - m0), n1 - n0)


def _on_host(device):
    """Whether values of tensors there can be read without waiting for other work."""
    return device.type == "cpu"


def _without_expanded(x):
    """x [batch, num_heads_q, seqlen_q, seqlen_k] with size 1 wherever it is only repeated (stride 0)."""
    if x is None:
        return None
    for dim in range(4):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _narrow(x, dim, start, stop):
    """start..stop of a dimension, or all of it if it is broadcast."""
    size = x.shape[dim]
    return x if size == 1 or size == stop - start else x.narrow(dim, start, stop - start)


def _sizes(x):
    return x.shape[0], x.shape[2], x.shape[3]
