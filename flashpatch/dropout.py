"""Which probabilities dropout keeps, in torch operations: the same bits as the kernels draw (cuda_src/dropout.cuh).

`reference.dropout_keep` defines the bits that decide an element: a Philox call draws two pairs (a, x) for a block of 32 by
64, a * m + x is the word of two neighbouring keys, m one of the MULTIPLIERS.
"""

from __future__ import annotations

import math

import torch

_LOW_32 = 0xFFFFFFFF
MULTIPLIERS = (
    *(0x243F6A80, 0x85A308D1, 0x13198A22, 0x03707343),
    *(0xA4093824, 0x299F31D5, 0x082EFA96, 0xEC4E6C87),
    *(0x452821E8, 0x38D01379, 0xBE5466CA, 0x34E90C6B),
    *(0xC0AC29BC, 0xC97C50DD, 0x3F84D5BE, 0xB547091F),
)


def philox(counter, key):
    """Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    `counter` is four and `key` two int64 tensors that broadcast, each with values in [0, 2^32);
    returns the four output words as int64 tensors with values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        # The products wrap as signed 64-bit; their bits are those of the unsigned product, so shift and mask recover it.
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW_32) ^ c1 ^ k0,
            product1 & _LOW_32,
            ((product0 >> 32) & _LOW_32) ^ c3 ^ k1,
            product0 & _LOW_32,
        )
        k0 = (k0 + 0x9E3779B9) & _LOW_32
        k1 = (k1 + 0xBB67AE85) & _LOW_32
    return c0, c1, c2, c3


def kept_by(bits: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Which of 15 random bits keep an element. `dropout_p` is rounded to fp32 first: kernels receive it as fp32."""
    p = torch.tensor(dropout_p, dtype=torch.float32).item()
    share = math.floor(min(p, 1 - p) * 2**15 + 0.5)
    return bits >= share if p <= 0.5 else bits < share


def bits_of_tile(rng_state: torch.Tensor, heads: int, m0: int, m1: int, n0: int, n1: int) -> torch.Tensor:
    """15 bits for each of rows m0..m1 and keys n0..n1 of every head of every sequence: int64 [heads, rows, keys]."""
    device = rng_state.device
    # Blocks of 32 rows and 64 columns that cover the tile: each block's bits land in it by a transposition.
    blocks_m, blocks_n = range(m0 >> 5, (m1 + 31) >> 5), range(n0 >> 6, (n1 + 63) >> 6)
    rows = torch.arange(blocks_m.start * 8, blocks_m.stop * 8, device=device)[:, None]
    columns = torch.arange(blocks_n.start * 4, blocks_n.stop * 4, device=device)
    key, offset = _key_and_offset(rng_state)
    words = torch.stack(philox((columns, rows, _apart(heads, device), offset), key), -1).unflatten(-1, (2, 1, 1, 2))
    word = words[..., 0] * torch.tensor(MULTIPLIERS, device=device).view(4, 4) + words[..., 1]
    bits = torch.stack((word & 0x7FFF, word >> 16 & 0x7FFF), -1)
    # heads, blocks of rows, row in 8, blocks of columns, pair of columns, 32 columns, 8 rows, 8 columns, column in a pair
    bits = bits.view(heads, len(blocks_m), 8, len(blocks_n), 4, 2, 4, 4, 2).permute(0, 1, 6, 2, 3, 5, 7, 4, 8)
    bits = bits.reshape(heads, len(blocks_m) * 32, len(blocks_n) * 64)
    m, n = m0 - blocks_m.start * 32, n0 - blocks_n.start * 64
    return bits[:, m : m + m1 - m0, n : n + n1 - n0]


def bits_in_sequences(rng_state: torch.Tensor, heads: int, sequence, i, j) -> torch.Tensor:
    """The same for packed sequences: of each row its sequence and index in it, [rows, 1], and of each key, [rows, keys]."""
    device = rng_state.device
    j = j & _LOW_32  # keys before the sequence: hidden, but a counter must fit its word
    key, offset = _key_and_offset(rng_state)
    heads = sequence * heads + _apart(heads, device)
    words = philox(((j >> 6 << 2) | (j >> 1 & 3), (i >> 5 << 3) | (i & 7), heads, offset), key)
    upper = (j & 32) != 0
    a, x = torch.where(upper, words[2], words[0]), torch.where(upper, words[3], words[1])
    word = a * torch.tensor(MULTIPLIERS, device=device)[(i >> 3 & 3) * 4 + (j >> 3 & 3)] + x
    return torch.where((j & 1) == 0, word, word >> 16) & 0x7FFF


def _key_and_offset(rng_state: torch.Tensor):
    seed, offset = rng_state[0], rng_state[1] & _LOW_32
    return (seed & _LOW_32, (seed >> 32) & _LOW_32), offset


def _apart(heads: int, device: torch.device) -> torch.Tensor:
    return torch.arange(heads, device=device)[:, None, None]
