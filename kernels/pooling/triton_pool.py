"""Rows in cell order and cell means in Triton, both from one reading of the keys or values; keys also smoothed and quantised.

A quantised row holds [key, W codes of one byte][value, W numbers of 16 bits][the key's scale, float32][12 bytes of zeros], 3 W + 16
bytes for a head dim padded to W, at least 32. Numbers are those of quantise.py.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import quantise
from ..shapes import CELL_SIZES, CellOrder, PooledTail, ceil_div
from ..triton_support import INTERPRETED, NAME, padded, why_not
from . import reference

__all__ = ["NAME", "gather_quantised", "gather_rows", "pool_cells", "quantise_queries", "row_width", "why_not"]

_INTERPRETED = tl.constexpr(INTERPRETED)
CODE_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROUNDER = tl.constexpr(1.5 * 2**23)  # added to a float32 below 2^22, it leaves the number in the low bits, rounded half to even
STEPPER = tl.constexpr(1.5 * 2**14)  # the same for multiples of 2^-9
SUM_ROWS, SUM_STEPS = 64, 16  # rows of a program of `column_sums`: at a time, and times


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


@triton.jit(do_not_specialize=["length", "first"])
def column_sums(x, sums, x_h, x_s, length, first, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Sums of the finite values of BLOCK * STEPS rows of one head of x (H, S, D): sums (heads of this launch, parts, BLOCK_D) float32."""
    here = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for i in range(STEPS):
        row = ((tl.program_id(1) * STEPS + i) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        mask = (row < length)[:, None] & (d < D)[None, :]
        value = tl.load(x + (first + here) * x_h + row[:, None] * x_s + d[None, :], mask=mask, other=0).to(tl.float32)
        total += tl.where(value - value == 0, value, 0.0)  # infinity - infinity is NaN
    part = here * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + part * BLOCK_D + d, tl.sum(total, 0))


@triton.jit
def quantised(x, CODE: tl.constexpr):
    """Codes of type CODE (int8 or float8e4nv) and float32 scales of rows x (n, columns) float32, to the bit those of quantise.py."""
    reach = tl.max(tl.abs(x), 1)
    INTEGER: tl.constexpr = CODE.is_int()
    most = tl.zeros_like(reach) + (127.0 if INTEGER else 448.0)
    empty = reach == 0
    scale = tl.where(empty, 1.0, tl.div_rn(reach, most)) + tl.sum(x * 0, 1)  # NaN where the row holds NaN or infinity
    over = x * tl.where(empty, 1.0, tl.minimum(tl.div_rn(most, reach), 3.4028234663852886e38))[:, None]
    if INTEGER:
        code = (over + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        if _INTERPRETED:  # its conversion to e4m3 cuts off: rounded before, to 4 binary digits or to the smallest step
            bits = over.to(tl.int32, bitcast=True)
            digits = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
            over = tl.where(tl.abs(over) < 2.0**-6, (over + STEPPER) - STEPPER, digits)
        code = over.to(CODE)
    return code, scale


@triton.jit
def _store_quantised(rows, place, x, live, BLOCK_D: tl.constexpr, ROW: tl.constexpr):
    """x (n, BLOCK_D) float32 into rows number `place` of one head, of ROW bytes: codes at the beginning, the scale in the last 16."""
    code, scale = quantised(x, rows.dtype.element_ty)
    place = place.to(tl.int64)[:, None]
    tl.store(rows + place * ROW + tl.arange(0, BLOCK_D)[None, :], code, mask=live)
    word = tl.arange(0, 4)[None, :]
    end = rows.to(tl.pointer_type(tl.float32)) + place * (ROW // 4) + (ROW // 4 - 4) + word
    tl.store(end, tl.where(word == 0, scale[:, None], 0.0), mask=live)


@triton.jit(do_not_specialize=["length", "first", "size"], do_not_specialize_on_alignment=["order", "mean"])
def quantise_rows(
    x, v, order, mean, rows, x_h, x_s, v_h, v_s, rows_h, length, first, size,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Rows order[i] of BLOCK places i of one head of x (H, S, D), less mean (heads of this launch, BLOCK_D), quantised.

    rows: codes, of ROW bytes, rows_h to a head. Where a row has room for values, those of v (H, S, D) are copied.
    size 32, 64 or 128: the means of cells of that many places follow from row `length` on; 0: none.
    """
    VALUES: tl.constexpr = ROW > 2 * BLOCK_D
    here = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (place < length)[:, None]
    d = tl.arange(0, BLOCK_D)
    token = tl.load(order + place, mask=place < length, other=0)
    row = tl.load(x + (first + here) * x_h + token[:, None] * x_s + d[None, :], mask=live & (d < D)[None, :], other=0).to(tl.float32)
    row = tl.where(live, row - tl.load(mean + here * BLOCK_D + d)[None, :], 0.0)
    rows += here * rows_h
    _store_quantised(rows, place, row, live, BLOCK_D, ROW)
    for i in tl.static_range(3):
        if size == 32 << i:
            cell, exists, mean_row = _means_of(row, length, BLOCK_D, BLOCK, 32 << i)
            _store_quantised(rows, cell, mean_row, exists, BLOCK_D, ROW)
    if VALUES:
        value = tl.load(v + (first + here) * v_h + token[:, None] * v_s + d[None, :], mask=live & (d < D)[None, :], other=0)
        values = rows.to(tl.pointer_type(value.dtype)) + BLOCK_D // 2 + d[None, :]
        tl.store(values + place.to(tl.int64)[:, None] * (ROW // 2), value, mask=live)
        for i in tl.static_range(3):
            if size == 32 << i:
                cell, exists, mean_row = _means_of(value.to(tl.float32), length, BLOCK_D, BLOCK, 32 << i)
                tl.store(values + cell.to(tl.int64)[:, None] * (ROW // 2), mean_row.to(value.dtype), mask=exists)


@triton.jit
def _means_of(x, length, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, CELL: tl.constexpr):
    """Row numbers of the cells of x (BLOCK, BLOCK_D), whose rows past the end are 0, which exist (n, 1), and their means."""
    cell = tl.program_id(1) * (BLOCK // CELL) + tl.arange(0, BLOCK // CELL)
    total = tl.sum(tl.reshape(x, (BLOCK // CELL, CELL, BLOCK_D)), 1)
    count = tl.maximum(tl.minimum(length - cell * CELL, CELL), 1).to(tl.float32)
    return length + cell, (cell * CELL < length)[:, None], total / count[:, None]


def pool_cells(k: Tensor, v: Tensor, cells: CellOrder, size: int) -> PooledTail:
    """As the reference, which also computes the sizes that no plan asks for."""
    if size not in CELL_SIZES:
        return reference.pool_cells(k, v, cells, size)
    return PooledTail(_means(k, cells, size), _means(v, cells, size), size)


def row_width(dim: int, precision: str) -> int:
    """Columns that a head dim is computed in: products of one byte need 32."""
    return padded(dim) if precision == "half" else max(32, padded(dim))


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


def gather_quantised(
    k: Tensor, v: Tensor, cells: CellOrder, heads: slice, size: int | None, pooled: tuple[Tensor, Tensor] | None, precision: str
) -> tuple[Tensor, Tensor]:
    """As gather_rows: quantised rows (heads, S + nb, 3 W + 16) in CODE_TYPES, and the means (heads, W) float32 of the keys."""
    length, dim = k.shape[1:]
    width, number = row_width(dim, precision), heads.stop - heads.start
    count = 0 if size is None else ceil_div(length, size)
    mean = _key_means(k, heads, width)
    rows = torch.empty((number, length + count, 3 * width + 16), dtype=CODE_TYPES[precision], device=k.device)
    _quantise_into(rows, k, v, cells.order, mean, heads, size or 0 if pooled is None else 0)
    if pooled is not None:
        keys = torch.nn.functional.pad(pooled[0][heads].float(), (0, width - dim)) - mean[:, None]
        rows[:, length:, :width], scale = quantise.quantised(keys, precision)
        values = rows.view(k.dtype)[:, :, width // 2 : width // 2 + width]
        values[:, length:, dim:] = 0
        values[:, length:, :dim] = pooled[1][heads]
        end = rows.view(torch.float32)[:, length:, 3 * width // 4 :]
        end[..., 1:], end[..., :1] = 0, scale
    return rows, mean


def quantise_queries(q: Tensor, heads: slice, precision: str) -> Tensor:
    """Some heads of q (H, S, D) in token order, (heads, S, W + 16): W codes, the scale as float32 and 12 bytes of zeros."""
    length, dim = q.shape[1:]
    width, number = row_width(dim, precision), heads.stop - heads.start
    rows = torch.empty((number, length, width + 16), dtype=CODE_TYPES[precision], device=q.device)
    none = torch.zeros((number, width), dtype=torch.float32, device=q.device)
    _quantise_into(rows, q, q, torch.arange(length, device=q.device), none, heads, 0)
    return rows


def _quantise_into(rows: Tensor, x: Tensor, v: Tensor, order: Tensor, mean: Tensor, heads: slice, size: int) -> None:
    """`quantise_rows` of some heads of x and v (H, S, D)."""
    length, dim = x.shape[1:]
    block = max(CELL_SIZES)
    quantise_rows[(heads.stop - heads.start, ceil_div(length, block))](
        x, v, order, mean, rows, *x.stride()[:2], *v.stride()[:2], rows.stride(0), length, heads.start, size,
        D=dim, BLOCK_D=mean.shape[1], BLOCK=block, ROW=rows.stride(1), num_warps=max(4, block * mean.shape[1] // 4096),
    )  # fmt: skip


def _key_means(k: Tensor, heads: slice, width: int) -> Tensor:
    """quantise.key_mean of some heads of k (H, S, D), (heads, width)."""
    length, dim = k.shape[1:]
    number, parts = heads.stop - heads.start, ceil_div(length, SUM_ROWS * SUM_STEPS)
    sums = torch.empty((number, parts, width), dtype=torch.float32, device=k.device)
    column_sums[(number, parts)](k, sums, *k.stride()[:2], length, heads.start, D=dim, BLOCK_D=width, BLOCK=SUM_ROWS, STEPS=SUM_STEPS)
    return sums.sum(1) / length


def _means(x: Tensor, cells: CellOrder, size: int) -> Tensor:
    batch, heads, length, dim = x.shape
    means = torch.empty((batch, heads, ceil_div(length, size), dim), dtype=x.dtype, device=x.device)
    for row, mean in zip(x if x.stride(-1) == 1 else x.contiguous(), means, strict=True):
        gather_into(row, cells, slice(0, heads), mean, mean, 0, size, dim)
    return means


def gather_into(x: Tensor, cells: CellOrder, heads: slice, rows: Tensor, means: Tensor, width: int, size: int, mean_width: int) -> None:
    """`gather` for some heads of x (H, S, D): width 0 writes no rows, size 0 no means."""
    length, dim = x.shape[1:]
    block_d = padded(dim)
    block = max(128 if block_d <= 128 else 64, size)
    warps = max(2, block * block_d // 8192)  # few, with much to do: the loads of a thread wait for each other
    gather[(heads.stop - heads.start, ceil_div(length, block))](
        x, cells.order, rows, means, *x.stride()[:2], *rows.stride()[:2], *means.stride()[:2], length, heads.start,
        D=dim, BLOCK_D=block_d, BLOCK=block, WIDTH=width, CELL=size, MEAN_WIDTH=mean_width, num_warps=warps,
    )  # fmt: skip
