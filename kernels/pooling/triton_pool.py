"""Rows in cell order and cell means in Triton, both from one reading of the keys or values."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import CELL_SIZES, CellOrder, PooledTail, ceil_div
from ..triton_support import NAME, padded, why_not
from . import reference

__all__ = ["NAME", "gather_rows", "pool_cells", "why_not"]


@triton.jit(do_not_specialize=["length", "first"], do_not_specialize_on_alignment=["order", "means"])
def gather(
    x, order, rows, means, x_h, x_s, rows_h, rows_s, means_h, means_s, length, first,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr, MEAN_WIDTH: tl.constexpr,
):  # fmt: skip
    """BLOCK places of the cell order of one head of x (H, S, D): their rows, if WIDTH > 0, and the means of their cells, if CELL > 0.

    rows (heads of this launch, S, WIDTH) and means (heads, cells, MEAN_WIDTH) by their strides; columns past D are 0.
    """
    here = tl.program_id(0).to(tl.int64)  # heads vary fastest: their rows are neighbours where the model keeps (B, S, H, D)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (place < length)[:, None]
    d = tl.arange(0, BLOCK_D)
    token = tl.load(order + place, mask=place < length, other=0)
    row = tl.load(x + (first + here) * x_h + token[:, None] * x_s + d[None, :], mask=live & (d < D)[None, :], other=0)
    if WIDTH:
        tl.store(rows + here * rows_h + place.to(tl.int64)[:, None] * rows_s + d[None, :], row, mask=live & (d < WIDTH)[None, :])
    if CELL:
        cell = tl.program_id(1) * (BLOCK // CELL) + tl.arange(0, BLOCK // CELL)
        total = tl.sum(tl.reshape(row.to(tl.float32), (BLOCK // CELL, CELL, BLOCK_D)), 1)
        mean = total / tl.maximum(tl.minimum(length - cell * CELL, CELL), 1).to(tl.float32)[:, None]
        where = here * means_h + cell.to(tl.int64)[:, None] * means_s + d[None, :]
        tl.store(means + where, mean.to(means.dtype.element_ty), mask=(cell * CELL < length)[:, None] & (d < MEAN_WIDTH)[None, :])


def pool_cells(k: Tensor, v: Tensor, cells: CellOrder, size: int) -> PooledTail:
    """As the reference, which also computes the sizes that no plan asks for."""
    if size not in CELL_SIZES:
        return reference.pool_cells(k, v, cells, size)
    return PooledTail(_means(k, cells, size), _means(v, cells, size), size)


def gather_rows(
    k: Tensor, v: Tensor, cells: CellOrder, heads: slice, size: int | None, pooled: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Rows of k and v side by side for some heads of k, v (H, S, D): (heads, S + nb, 2, D padded).

    The rows are in cell order; then, unless size is None, come the means of their cells of that size, or `pooled` (H, nb, D) instead.
    """
    length, dim = k.shape[1:]
    width, count = padded(dim), 0 if size is None else ceil_div(length, size)
    rows = k.new_empty(heads.stop - heads.start, length + count, 2, width)
    for i, x in enumerate((k, v)):
        side = rows[:, :, i]
        gather_into(x, cells, heads, side, side[:, length:], width, size or 0 if pooled is None else 0, width)
        if pooled is not None:
            side[:, length:, dim:] = 0
            side[:, length:, :dim] = pooled[i][heads]
    return rows


def _means(x: Tensor, cells: CellOrder, size: int) -> Tensor:
    batch, heads, length, dim = x.shape
    means = torch.empty((batch, heads, ceil_div(length, size), dim), dtype=x.dtype, device=x.device)
    for row, mean in zip(x if x.stride(-1) == 1 else x.contiguous(), means, strict=True):
        gather_into(row, cells, slice(0, heads), mean, mean, 0, size, dim)
    return means


def gather_into(x: Tensor, cells: CellOrder, heads: slice, rows: Tensor, means: Tensor, width: int, size: int, mean_width: int) -> None:
    """`gather` for some heads of x (H, S, D): width 0 writes no rows, size 0 no means."""
    length, dim = x.shape[1:]
    block = max(64, size)
    gather[(heads.stop - heads.start, ceil_div(length, block))](
        x, cells.order, rows, means, *x.stride()[:2], *rows.stride()[:2], *means.stride()[:2], length, heads.start,
        D=dim, BLOCK_D=padded(dim), BLOCK=block, WIDTH=width, CELL=size, MEAN_WIDTH=mean_width,
    )  # fmt: skip
