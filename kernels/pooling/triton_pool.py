"""Rows in cell order and cell means in Triton, both from one reading of the keys or values."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import CELL_SIZES, CellOrder, PooledTail, ceil_div
from ..triton_support import NAME, half, padded, why_not
from . import reference

__all__ = ["NAME", "gather_rows", "pool_cells", "why_not"]


@triton.jit(do_not_specialize=["length", "first"], do_not_specialize_on_alignment=["order", "means"])
def gather(
    x, order, rows, means, x_h, x_s, rows_h, means_h, length, first,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr, MEAN_WIDTH: tl.constexpr,
):  # fmt: skip
    """BLOCK places of the cell order of one head of x (H, S, D): their rows, if WIDTH > 0, and the means of their cells, if CELL > 0.

    rows (heads of this launch, S, WIDTH) and means (heads, cells, MEAN_WIDTH), heads rows_h and means_h apart; columns past D are 0.
    """
    here = tl.program_id(0).to(tl.int64)  # heads vary fastest: their rows are neighbours where the model keeps (B, S, H, D)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (place < length)[:, None]
    d = tl.arange(0, BLOCK_D)
    token = tl.load(order + place, mask=place < length, other=0)
    row = tl.load(x + (first + here) * x_h + token[:, None] * x_s + d[None, :], mask=live & (d < D)[None, :], other=0)
    if WIDTH:
        tl.store(rows + here * rows_h + place.to(tl.int64)[:, None] * WIDTH + d[None, :], row, mask=live & (d < WIDTH)[None, :])
    if CELL:
        cell = tl.program_id(1) * (BLOCK // CELL) + tl.arange(0, BLOCK // CELL)
        total = tl.sum(tl.reshape(row.to(tl.float32), (BLOCK // CELL, CELL, BLOCK_D)), 1)
        mean = total / tl.maximum(tl.minimum(length - cell * CELL, CELL), 1).to(tl.float32)[:, None]
        where = here * means_h + cell.to(tl.int64)[:, None] * MEAN_WIDTH + d[None, :]
        tl.store(means + where, mean.to(means.dtype.element_ty), mask=(cell * CELL < length)[:, None] & (d < MEAN_WIDTH)[None, :])


def pool_cells(k: Tensor, v: Tensor, cells: CellOrder, size: int) -> PooledTail:
    """As the reference, which also computes the sizes that no plan asks for."""
    if size not in CELL_SIZES:
        return reference.pool_cells(k, v, cells, size)
    return PooledTail(_means(k, cells, size), _means(v, cells, size), size)


def gather_rows(x: Tensor, cells: CellOrder, heads: slice, pooled: Tensor | int | None) -> Tensor:
    """Some heads of x (H, S, D) in cell order, then their pooled rows: (heads, S + nb, D padded).

    pooled: the size of the cells to pool, the pooled rows themselves (H, nb, D), or None for no such rows.
    """
    length, dim = x.shape[1:]
    width, size = padded(dim), pooled if isinstance(pooled, int) else 0
    count = pooled.shape[1] if isinstance(pooled, Tensor) else ceil_div(length, size) if size else 0
    rows = x.new_empty(heads.stop - heads.start, length + count, width)
    _gather(x, cells, heads, rows, rows[:, length:], width, size, width)
    if isinstance(pooled, Tensor):
        rows[:, length:, dim:] = 0
        rows[:, length:, :dim] = pooled[heads]
    return rows


def _means(x: Tensor, cells: CellOrder, size: int) -> Tensor:
    batch, heads, length, dim = x.shape
    means = torch.empty((batch, heads, ceil_div(length, size), dim), dtype=x.dtype, device=x.device)
    for row, mean in zip(half(x), means, strict=True):
        _gather(row, cells, slice(0, heads), mean, mean, 0, size, dim)
    return means


def _gather(x: Tensor, cells: CellOrder, heads: slice, rows: Tensor, means: Tensor, width: int, size: int, mean_width: int) -> None:
    length, dim = x.shape[1:]
    block = max(64, size)
    gather[(heads.stop - heads.start, ceil_div(length, block))](
        x, cells.order, rows, means, *x.stride()[:2], rows.stride(0), means.stride(0), length, heads.start,
        D=dim, BLOCK_D=padded(dim), BLOCK=block, WIDTH=width, CELL=size, MEAN_WIDTH=mean_width,
    )  # fmt: skip
