"""Cell means in float32, one head at a time."""
from __future__ import annotations

import torch
from torch import Tensor

from ..shapes import CellOrder, Geometry, PooledTail, ceil_div

NAME = "reference"


def why_not(geometry: Geometry) -> str | None:
    return None


def pool_cells(k: Tensor, v: Tensor, cells: CellOrder, size: int) -> PooledTail:
    """Means over all keys of each cell; the last cell may be short. Summed in float32, rounded once."""
    return PooledTail(_means(k, cells.order, size), _means(v, cells.order, size), size)


def _means(x: Tensor, order: Tensor, size: int) -> Tensor:
    batch, heads, length, dim = x.shape
    out = x.new_empty(batch, heads, ceil_div(length, size), dim)
    whole = length // size  # cells that are full
    for b in range(batch):
        for h in range(heads):
            rows = x[b, h].index_select(0, order)
            out[b, h, :whole] = rows[: whole * size].view(whole, size, dim).mean(1, dtype=torch.float32)
            if whole * size < length:
                out[b, h, whole] = rows[whole * size :].mean(0, dtype=torch.float32)
    return out
