"""Fast PDDP: recursive bisection of the queries of a head along their principal direction (Boley 1998), in whole groups."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..chunks import chunks
from ..shapes import GROUP_SIZE, Geometry, QueryGroups, ceil_div

NAME = "reference"
# Products with the Gram matrix, a multiple of 8. 16 leave the within-group variance of random queries within 0.3 % of exact
# eigenvectors' (8: 0.5 %, 32: 0.2 %): where the top two eigenvalues are close, either direction splits well.
POWER_ITERATIONS = 16
GRAM_ROWS = 2048  # of a node that are multiplied together: one long sum for each of few nodes would leave a GPU idle


def why_not(geometry: Geometry) -> str | None:
    return None


def group_queries(q: Tensor) -> QueryGroups:
    """PDDP groups of q (B, H, S, D), order (B, H, G*C) int32.

    A node of n > C tokens is sorted stably by its projection on its principal direction and cut at C * floor(ceil(n / C) / 2).
    Inside a group the tokens ascend. Node sizes depend on S alone, so all nodes of one size on one level go as a batch.
    """
    batch, heads, length, dim = q.shape
    rows = batch * heads
    order = torch.arange(length, device=q.device).repeat(rows, 1)
    level = [(0, length)]  # (first place, tokens) of the nodes of one level, in order of place
    while level := [(start, n) for start, n in level if n > GROUP_SIZE]:
        for n in sorted({n for _, n in level}):
            starts = torch.tensor([start for start, size in level if size == n], device=q.device)
            places = starts[:, None] + torch.arange(n, device=q.device)  # (nodes, n)
            nodes = len(starts)
            for some_rows in chunks(rows, 4 * n * dim * nodes, q.device):
                together = some_rows.stop - some_rows.start
                for some_nodes in chunks(nodes, 4 * n * dim * together, q.device):
                    here = places[some_nodes].flatten()
                    tokens = order[some_rows, here]
                    x = torch.stack([q[row // heads, row % heads].index_select(0, t) for row, t in enumerate(tokens, some_rows.start)])
                    by_projection = _principal_projection(x.float().view(-1, n, dim)).argsort(dim=1, stable=True)
                    order[some_rows, here] = tokens.view(-1, n).gather(1, by_projection).view(together, -1)
        level = [part for start, n in level for part in _halves(start, n)]
    return QueryGroups(_canonical(order).view(batch, heads, -1), length)


def _halves(start: int, n: int) -> tuple[tuple[int, int], tuple[int, int]]:
    cut = GROUP_SIZE * (ceil_div(n, GROUP_SIZE) // 2)
    return (start, cut), (start + cut, n - cut)


def _principal_projection(x: Tensor) -> Tensor:
    """Projection (nodes, n) of the rows of x (nodes, n, D) on the principal direction of each node; x is overwritten.

    The direction comes from power iteration started at the Gram row of the largest diagonal entry; that entry stays positive, so
    the sign does not depend on the device. Equal rows: all zero.
    """
    x -= x.mean(1, keepdim=True)
    gram = _gram(x)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    largest = diagonal.argmax(1)
    # Divided by its trace, the largest eigenvalue is in 1/D..1: eight products cannot leave the range of float32.
    gram /= diagonal.sum(1).clamp_min(torch.finfo(x.dtype).tiny)[:, None, None]
    direction = gram.gather(1, largest[:, None, None].expand(-1, 1, gram.shape[2])).mT  # (nodes, D, 1)
    for _ in range(POWER_ITERATIONS // 8):
        for _ in range(8):
            direction = gram @ direction
        direction /= direction.abs().amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return (x @ direction).squeeze(2)


def _gram(x: Tensor) -> Tensor:
    """x^T x of each node of x (nodes, n, D), (nodes, D, D)."""
    nodes, n, dim = x.shape
    whole = n // GRAM_ROWS * GRAM_ROWS
    rest = x[:, whole:]
    gram = rest.mT @ rest
    if whole:
        parts = x[:, :whole].reshape(-1, GRAM_ROWS, dim)
        gram += (parts.mT @ parts).view(nodes, -1, dim, dim).sum(1)
    return gram


def _canonical(order: Tensor) -> Tensor:
    """order (rows, S) with the tokens of each group ascending, padded with -1 to (rows, G*C) int32."""
    rows, length = order.shape
    slack = ceil_div(length, GROUP_SIZE) * GROUP_SIZE - length
    groups = pad(order, (0, slack), value=length).view(rows, -1, GROUP_SIZE).sort(dim=2).values
    return groups.masked_fill_(groups == length, -1).view(rows, -1).int()
