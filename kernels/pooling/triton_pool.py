"""Cell means in Triton: one program per cell, float32 sums, rounded once."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from ..shapes import CellOrder, Geometry, PooledTail, ceil_div
from ..triton_support import NAME, half, padded, why_not

__all__ = ["NAME", "pool_cells", "why_not"]


@triton.jit(do_not_specialize=["length", "heads", "size"], do_not_specialize_on_alignment=["order"])
def cell_means(x, order, means, x_b, x_h, x_s, length, heads, size, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """means (B, H, cells, D): of x (B, H, S, D) over runs of `size` of order (S,) int64, BLOCK rows at a time."""
    head, cell = tl.program_id(0).to(tl.int64), tl.program_id(1)  # heads vary fastest: neighbours where the model keeps (B, S, H, D)
    d = tl.arange(0, BLOCK_D)
    column = (d < D)[None, :]
    x += head // heads * x_b + head % heads * x_h
    start = cell * size
    stop = tl.minimum(start + size, length)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(start, stop, BLOCK):
        place = first + tl.arange(0, BLOCK)
        token = tl.load(order + place, mask=place < stop, other=0)
        rows = tl.load(x + token[:, None] * x_s + d[None, :], mask=(place < stop)[:, None] & column, other=0)
        total += tl.sum(rows.to(tl.float32), 0)
    mean = total / (stop - start).to(tl.float32)
    tl.store(means + (head * tl.num_programs(1) + cell) * D + d, mean.to(means.dtype.element_ty), mask=d < D)


def pool_cells(k: Tensor, v: Tensor, cells: CellOrder, size: int) -> PooledTail:
    """As the reference."""
    return PooledTail(_means(k, cells, size), _means(v, cells, size), size)


def _means(x: Tensor, cells: CellOrder, size: int) -> Tensor:
    batch, heads, length, dim = x.shape
    how = launch("pool", padded(dim), Geometry.of(x, x).capability)
    means = torch.empty((batch, heads, ceil_div(length, size), dim), dtype=x.dtype, device=x.device)
    x = half(x)
    cell_means[(batch * heads, means.shape[2])](
        x, cells.order, means, *x.stride()[:3], length, heads, size, D=dim, BLOCK_D=padded(dim), BLOCK=how.tile, **how.options
    )
    return means
