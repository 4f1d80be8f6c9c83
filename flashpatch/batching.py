"""torch.func.vmap of the operators: what is mapped over joins the batch that the tensors have in front. Where one has no
batch (a sink, packed sequences), or is not mapped over, the elements go through the operator one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch


def rule(operator, have_batches: Callable[[tuple], bool]) -> Callable:
    """An operator's rule for torch.library.register_vmap; `have_batches(arguments)` says whether all its tensors, results
    too, have the batch in front."""

    def mapped(info, in_dims: tuple, *arguments):
        together = have_batches(arguments) and not any(
            dim is None and isinstance(argument, torch.Tensor) for argument, dim in zip(arguments, in_dims, strict=True)
        )
        if not together:
            return _one_by_one(operator, info.batch_size, in_dims, arguments)
        fronted = [
            argument if dim is None else argument.movedim(dim, 0)
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]
        results = operator(*(x.flatten(0, 1) if isinstance(x, torch.Tensor) else x for x in fronted))
        apart = fronted[0].shape[:2]
        # an empty vector stands for a result that nobody asked for
        dims = tuple(None if result.dim() == 1 else 0 for result in results)
        return tuple(r if dim is None else r.unflatten(0, apart) for r, dim in zip(results, dims, strict=True)), dims

    return mapped


def _one_by_one(operator, size: int, in_dims: tuple, arguments: tuple):
    if size == 0:
        raise ValueError(
            f"vmap of {operator} over no elements: only where all of its tensors are mapped over and have a batch"
        )
    elements = [
        operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims, strict=True)))
        for i in range(size)
    ]
    results = tuple(torch.stack(parts) for parts in zip(*elements, strict=True))
    return results, (0,) * len(results)
