"""From a PairPlan and tensors to launched kernels: splits of the columns, the packed PairParams, the joining of splits."""

from __future__ import annotations

import struct

import torch

from .kernel_launch import Kernel
from .pair_planning import PairPlan, shared_memory

# In the order of struct PairParams in cuda_src/params_pairwise.cuh.
POINTERS = (
    "x", "y", "row_term", "column_term", "row_weight", "column_weight", "values", "indices", "gradient",
)  # fmt: skip
STRIDES = ("x_stride_batch", "x_stride_row", "y_stride_batch", "y_stride_row")
INTEGERS = ("batch", "rows", "columns", "dim", "k", "row_blocks", "splits", "split_blocks")
FIELDS = (*POINTERS, *STRIDES, *INTEGERS, "scale")
_PARAMS = struct.Struct(f"={len(POINTERS)}Q{len(STRIDES)}q{len(INTEGERS)}if")
# CTAs wanted per multiprocessor before the columns are no longer split, and what an emulator counts as.
_WANTED, _EMULATED_MULTIPROCESSORS = 2, 3


def reduce(plan: PairPlan, x, y, bias) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices) [batch, rows, k] of a plan's reduction; x [batch, rows, dim], y [batch, columns, dim], columns > 0.

    Raises problem.BuildFailure if the kernel cannot be built or loaded here.
    """
    launch = _Launch(plan, x, y, plan.problem.k)
    kernel = plan.problem.kernel
    if kernel == "pairwise_logsumexp":
        launch.run(column_term=bias)
        values = launch.values[0] if launch.splits == 1 else torch.logsumexp(launch.values, 0)
        return values, torch.empty(0, dtype=torch.int64, device=x.device)
    indices = torch.empty(launch.values.shape, dtype=torch.int32, device=x.device)
    launch.run(column_term=bias, indices=indices)
    values, indices = launch.values[0], indices[0].long()
    if launch.splits > 1:
        values, indices = _joined(launch.values, launch.indices, kernel, plan.problem.k)
    return values, indices


def _joined(values, indices, kernel: str, k: int):
    """Splits come in the order of their columns, so that a stable order keeps the first of equal scores."""
    if kernel == "pairwise_min":
        best = values.min(0)
        return best.values, indices.gather(0, best.indices[None])[0].long()
    values, indices = (t.movedim(0, -2).flatten(-2) for t in (values, indices))
    values, order = values.sort(dim=-1, stable=True)
    return values[..., :k], indices.gather(-1, order[..., :k]).long()


def gradient(plan: PairPlan, grad, logsumexp, x, y, bias, for_x: bool, for_y: bool):
    """(dx, dy, dbias) of logsumexp [batch, rows] in fp32; dx None unless `for_x`, the other two None unless `for_y`."""
    shift = torch.where(logsumexp == -torch.inf, -torch.inf, -logsumexp)  # a row of no weight at all has no gradient
    grad = grad.float().contiguous()
    dx = dy = dbias = None
    if for_x:
        launch = _Launch(plan, x, y, 1)
        dx, _ = launch.run_gradient(row_term=shift, row_weight=grad, column_term=bias)
    if for_y:
        launch = _Launch(plan, y, x, 1)
        dy, dbias = launch.run_gradient(row_term=bias, column_term=shift, column_weight=grad)
    return dx, dy, dbias


class _Launch:
    """One launch: rows of x against all of y, split where the rows alone would not fill the GPU."""

    def __init__(self, plan: PairPlan, x, y, k: int):
        self.plan, self.x, self.y, self.k = plan, x, y, k
        config = plan.config
        self.batch, self.rows, self.dim = x.shape
        self.row_blocks, column_blocks = -(-self.rows // config.block_m), -(-y.shape[1] // config.block_n)
        self.parts = -(-self.dim // config.gradient_dim) if config.gradient_dim else 1
        own = max(self.row_blocks * self.batch * self.parts, 1)
        wanted = -(-_WANTED * (plan.device.multiprocessors or _EMULATED_MULTIPROCESSORS) // own)
        self.split_blocks = -(-column_blocks // max(min(wanted, column_blocks), 1))
        self.splits = -(-column_blocks // max(self.split_blocks, 1)) or 1
        shape = (self.splits, self.batch, self.rows, k)
        self.values = torch.empty(shape, dtype=torch.float32, device=x.device)
        self.indices = None

    def run(self, indices=None, gradient=None, **terms) -> None:
        self.indices = indices
        tensors = {"x": self.x, "y": self.y, **terms, "values": self.values, "indices": indices, "gradient": gradient}
        argument = _PARAMS.pack(
            *(0 if tensors.get(name) is None else tensors[name].data_ptr() for name in POINTERS),
            *self.x.stride()[:2], *self.y.stride()[:2],
            self.batch, self.rows, self.y.shape[1], self.dim, self.k, self.row_blocks, self.splits, self.split_blocks,
            self.plan.problem.scale,
        )  # fmt: skip
        config = self.plan.config
        kernel = Kernel(self.plan.device, config, config.kernel, shared_memory(config))
        kernel.launch(self.row_blocks * self.splits * self.batch * self.parts, argument, tensors.values())

    def run_gradient(self, **terms) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' gradient [batch, rows, dim] and the sums of its weights [batch, rows]."""
        shape = (self.splits, self.batch, self.rows, self.dim)
        gradient = torch.empty(shape, dtype=torch.float32, device=self.x.device)
        self.run(gradient=gradient, **terms)
        return gradient.sum(0), self.values.sum(0)[..., 0]
