"""How many tiles one call is cut into: blocks of queries and keys, and how tiles share the query heads of a key head."""

from __future__ import annotations

from .call import Call
from .problem import Config, Plan

# Query heads are dealt out without a GPU as on an H200.
_USUAL_MULTIPROCESSORS = 132


def takes_maps(config: Config) -> bool:
    """Whether the main kernel's argument is ParamsSm90: Params between tensor maps and tile counters."""
    return config.kernel.endswith("sm90")


class Shapes:
    """Counts of sequences, rows and blocks of one call under one Config."""

    __slots__ = (
        "batch", "group", "m_blocks", "n_blocks", "rows_of_blocks", "split_heads", "splits", "total_k", "total_q",
    )  # fmt: skip

    def __init__(self, config: Config, q, k, call: Call):
        self.group = q.shape[-2] // max(k.shape[-2], 1)
        self.share_heads(1)
        varlen = call.cu_seqlens_q is not None
        self.batch = call.cu_seqlens_q.shape[0] - 1 if varlen else q.shape[0]
        self.total_q, self.total_k = (x.shape[0] if varlen else x.shape[0] * x.shape[1] for x in (q, k))
        if varlen and takes_maps(config):  # the blocks of all sequences in one row: cuda_src/packed_sm90.cuh
            self.rows_of_blocks = 1
            self.m_blocks = self.total_q // config.block_m + self.batch if self.batch else 0
            self.n_blocks = self.total_k // config.block_n + self.batch if self.batch else 0
        else:
            self.rows_of_blocks = self.batch
            self.m_blocks = -(-call.max_seqlen_q // config.block_m)
            self.n_blocks = -(-call.max_seqlen_k // config.block_n)

    def share_heads(self, splits: int) -> None:
        """Deal the query heads of a key head out to `splits` tiles."""
        self.splits, self.split_heads = splits, self.group // splits


# Steps (query blocks of one head) that one more tile of a Hopper backward costs: the start, and adding up dk and dv. Head dim 128
# on an H200: 4096 keys in full with 8 tiles for each of 256 take 45 steps in 1000 longer than with one.
_TILE_STEPS = 3


def splits(plan: Plan, shapes: Shapes, key_blocks: int, call: Call) -> int:
    """How many tiles share the query heads of a key head: of its divisors the one with the shortest estimate.

    Tiles of equal length come in waves. Of unequal ones (causal) the longest start first, and multiprocessors wait for
    the last to end a quarter of the longest, about the mean of what replaying the order for 27 shapes shows.
    """
    if shapes.group <= 1 or not key_blocks:
        return 1
    m, n = plan.config.block_m, plan.config.block_n
    rows, left, right = call.max_seqlen_q, call.window_left, call.window_right
    if left >= 0 and right >= 0:
        rows = min(rows, left + right + n)
    longest = -(-rows // m) * shapes.group
    multiprocessors = plan.device.multiprocessors or _USUAL_MULTIPROCESSORS

    def steps(count: int) -> float:
        if (left < 0) == (right < 0):
            return -(-key_blocks * count // multiprocessors) * (longest / count + _TILE_STEPS)
        return key_blocks * count / multiprocessors * _TILE_STEPS + longest / count / 4

    return min((s for s in range(1, shapes.group + 1) if shapes.group % s == 0), key=steps)
