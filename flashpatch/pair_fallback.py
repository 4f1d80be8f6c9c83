"""`flashpatch.pairwise` in torch operators, for whatever no kernel takes: tile by tile, on any device, also in fp64.

x [batch, rows, dim], y [batch, columns, dim], bias [batch, columns] or None; results are for the rows, memory is linear.
No autograd inside: the gradient of logsumexp is written out.
"""

from __future__ import annotations

import torch

# Scores of one tile over all batches.
_TILE = 1 << 22
_MOST_COLUMNS = 1 << 13


def reduce(x, y, bias, cost: str, kernel: str, k: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices) [batch, rows, k]; `kernel` names the reduction. Of logsumexp k is 1 and indices are empty."""
    x, y, bias = _wide(x), _wide(y), None if bias is None else _wide(bias)
    parts = []
    for row in _steps(x.shape[1], _rows(x, y)):
        part = None
        for column in _steps(y.shape[1], _MOST_COLUMNS):
            scores = _scores(cost_of(x[:, row], y[:, column], cost), bias, column, scale)
            part = _MERGES[kernel](part, scores, column.start, k)
        parts.append(part)
    if not parts or parts[0] is None:  # only logsumexp has a value over no column
        values = x.new_full((x.shape[0], x.shape[1], k), -torch.inf)
        return values, torch.zeros(values.shape, dtype=torch.int64, device=x.device)
    values, indices = zip(*parts, strict=True)
    return torch.cat(values, 1), torch.cat(indices, 1)


def gradient(grad, logsumexp, x, y, bias, cost: str, scale: float):
    """Gradients of logsumexp [batch, rows]: for x, for y, for bias (also where there is none)."""
    x, y, bias = _wide(x), _wide(y), None if bias is None else _wide(bias)
    dx, dy, dbias = torch.zeros_like(x), torch.zeros_like(y), y.new_zeros(y.shape[:2])
    # a row of no weight at all has no gradient
    shift = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)
    for row in _steps(x.shape[1], _rows(x, y)):
        for column in _steps(y.shape[1], _MOST_COLUMNS):
            matrix = cost_of(x[:, row], y[:, column], cost)
            weights = torch.exp(_scores(matrix, bias, column, scale) - shift[:, row, None]) * grad[:, row, None]
            dbias[:, column] += weights.sum(1)
            for_x, for_y = _cost_gradient(weights * scale, x[:, row], y[:, column], matrix, cost)
            dx[:, row] += for_x
            dy[:, column] += for_y
    return dx, dy, dbias


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _steps(count: int, size: int):
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _rows(x, y) -> int:
    columns = max(min(y.shape[1], _MOST_COLUMNS), 1) * max(x.shape[0], 1)
    return max(_TILE // columns, 1)


def _scores(matrix, bias, column: slice, scale: float):
    scores = matrix * scale
    return scores if bias is None else scores + bias[:, None, column]


# ---- reductions: what was found so far, joined with one more tile ----


def _merge_min(part, scores, start: int, k: int):
    found = scores.min(-1, keepdim=True)  # of equal ones the first; a NaN before all
    values, indices = found.values, found.indices + start
    if part is None:
        return values, indices
    better = (values < part[0]) | (values.isnan() & ~part[0].isnan())
    return torch.where(better, values, part[0]), torch.where(better, indices, part[1])


def _merge_topk(part, scores, start: int, k: int):
    values, indices = scores.sort(dim=-1, stable=True)
    values, indices = values[..., :k], indices[..., :k] + start
    if part is not None:
        values, indices = torch.cat((part[0], values), -1), torch.cat((part[1], indices), -1)
        values, order = values.sort(dim=-1, stable=True)
        values, indices = values[..., :k], indices.gather(-1, order[..., :k])
    return values, indices


def _merge_logsumexp(part, scores, start: int, k: int):
    values = torch.logsumexp(scores, -1, keepdim=True)
    if part is not None:
        values = torch.logaddexp(part[0], values)
    return values, torch.zeros(values.shape, dtype=torch.int64, device=values.device)


_MERGES = {"pairwise_min": _merge_min, "pairwise_topk": _merge_topk, "pairwise_logsumexp": _merge_logsumexp}


# ---- costs ----


def cost_of(x, y, cost: str) -> torch.Tensor:
    """The cost matrix [batch, rows, columns] of two sets."""
    if cost == "negative_dot":
        return -torch.matmul(x, y.mT)
    if cost == "giou":
        return _outside_minus_overlap(*_giou_parts(*_edges(x, y))[:3])
    exact = "donot_use_mm_for_euclid_dist"  # the product form cancels
    distance = torch.cdist(x, y, p=1.0 if cost == "l1" else 2.0, compute_mode=exact)
    return distance.square() if cost == "sqeuclidean" else distance


def _outside_minus_overlap(common, hull, union):
    """Minus the generalised IoU from its three areas; nothing over nothing is nothing."""
    return (hull - union) * _inverse(hull) - common * _inverse(union)


def _inverse(area):
    return torch.where(area == 0, 0.0, 1.0 / torch.where(area == 0, 1.0, area))


def giou_of_pairs(x, y) -> torch.Tensor:
    """The cost of one pair each, [...] of boxes [..., 4]; differentiable."""
    return _outside_minus_overlap(*_giou_parts(x.unbind(-1), y.unbind(-1))[:3])


def _edges(x, y):
    return [edge.unsqueeze(-1) for edge in x.unbind(-1)], [edge.unsqueeze(-2) for edge in y.unbind(-1)]


def _giou_parts(a, b):
    """Areas of intersection, hull and union of boxes given by their edges, and the sides of the first two."""
    low, high = [torch.maximum(a[i], b[i]) for i in (0, 1)], [torch.minimum(a[i], b[i]) for i in (2, 3)]
    sides = [high[i] - low[i] for i in (0, 1)]
    hull_sides = [torch.maximum(a[i + 2], b[i + 2]) - torch.minimum(a[i], b[i]) for i in (0, 1)]
    common = sides[0].clamp(min=0) * sides[1].clamp(min=0)
    hull = hull_sides[0].clamp(min=0) * hull_sides[1].clamp(min=0)

    def area(box):
        return (box[2] - box[0]).clamp(min=0) * (box[3] - box[1]).clamp(min=0)

    return common, hull, area(a) + area(b) - common, sides, hull_sides


def _cost_gradient(weights, x, y, matrix, cost: str):
    """For x and y, the weights [batch, rows, columns] times the derivative of the cost."""
    if cost == "negative_dot":
        return -torch.matmul(weights, y), -torch.matmul(weights.mT, x)
    if cost == "giou":
        return _giou_gradient(weights, x, y), _giou_gradient(weights.mT, y, x)
    distance = matrix.sqrt() if cost == "sqeuclidean" else matrix
    if cost == "sqeuclidean":
        weights = 2.0 * weights * distance
    p = 1.0 if cost == "l1" else 2.0
    backward = torch.ops.aten._cdist_backward
    for_x = backward(weights.contiguous(), x.contiguous(), y.contiguous(), p, distance.contiguous())
    for_y = backward(weights.mT.contiguous(), y.contiguous(), x.contiguous(), p, distance.mT.contiguous())
    return for_x, for_y


def _giou_gradient(weights, x, y):
    """d(hull part - overlap) / dx: through the areas of the intersection, the hull and the union."""
    a, b = _edges(x, y)
    common, hull, union, sides, hull_sides = _giou_parts(a, b)
    by_union, by_hull = _inverse(union), _inverse(hull)
    d_common, d_union = -by_union, common * by_union**2 - by_hull
    d_hull = union * by_hull**2
    gradients = []
    for i in range(4):
        axis, upper = i % 2, i >= 2
        other = 1 - axis
        own = (a[i - 2] < a[i]) if upper else (a[i] < a[i + 2])
        sign = 1.0 if upper else -1.0
        d_area = sign * own * (a[other + 2] - a[other]).clamp(min=0)
        inner = (a[i] < b[i]) if upper else (a[i] > b[i])  # this edge bounds the intersection, else the hull
        outer = (a[i] > b[i]) if upper else (a[i] < b[i])
        side = sign * inner * (sides[axis] > 0) * sides[other].clamp(min=0)
        hull_side = sign * outer * (hull_sides[axis] > 0) * hull_sides[other].clamp(min=0)
        gradients.append((weights * (d_common * side + d_union * (d_area - side) + d_hull * hull_side)).sum(-1))
    return torch.stack(gradients, -1)
