"""Rows in cell order and cell means in Triton, both from one reading of the keys or values; keys also smoothed and quantised.

A quantised row holds [key, W codes of one byte][value, W numbers of 16 bits][the key's scale, float32][12 bytes of zeros], 3 W + 16
bytes for a head dim padded to W, at least 32. Queries are quantised by group. Numbers are those of quantise.py.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from .. import quantise
from ..shapes import CELL_SIZES, GROUP_SIZE, CellOrder, PooledTail, ceil_div
from ..triton_support import INTERPRETED, NAME, padded, why_not
from . import reference

__all__ = ["NAME", "gather_quantised", "gather_rows", "pool_cells", "quantise_queries", "row_width", "why_not"]

_INTERPRETED = tl.constexpr(INTERPRETED)
CODE_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROUNDER = tl.constexpr(1.5 * 2**23)  # added to a float32 below 2^22, it leaves the number in the low bits, rounded half to even
STEPPER = tl.constexpr(1.5 * 2**14)  # the same for multiples of 2^-9


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


@triton.jit
def largest(x, axis: tl.constexpr):
    """Largest |x| over an axis of x (n, columns) float32, over both if None; NaN where there is NaN or infinity."""
    return tl.max(tl.abs(x), axis) + tl.sum(x * 0, axis)


@triton.jit
def quantised(x, reach, CODE: tl.constexpr):
    """Codes of type CODE (int8 or float8e4nv) of x (n, columns) float32 and float32 scales, to the bit those of quantise.py.

    reach, (n, 1) or a scalar, as the scales are: the `largest` |x| of what shares one.
    """
    INTEGER: tl.constexpr = CODE.is_int()
    most = reach * 0 + (127.0 if INTEGER else 448.0)
    empty = reach == 0
    scale = tl.where(empty, 1.0, tl.div_rn(reach, most))
    over = x * tl.where(empty, 1.0, tl.minimum(tl.div_rn(most, reach), 3.4028234663852886e38))
    if INTEGER:
        code = (over + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        if _INTERPRETED:  # its conversion to e4m3 cuts off: rounded before, to 4 binary digits or to the smallest step
            bits = over.to(tl.int32, bitcast=True)
            digits = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
            over = tl.where(tl.abs(over) < 2.0**-6, (over + STEPPER) - STEPPER, digits)
        code = over.to(CODE)
    return code, scale


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["order"])
def quantise_group(q, order, codes, scales, q_h, q_s, order_h, first, D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr):
    """The C queries of one group of one head of q (H, S, D), -1 in order (H, G * C) for none, which is zeros, quantised.

    codes (heads of this launch, G, C, BLOCK_D), scales (heads, G) float32.
    """
    here = tl.program_id(0).to(tl.int64)
    slots = tl.program_id(1) * C + tl.arange(0, C)
    d = tl.arange(0, BLOCK_D)
    token = tl.load(order + (first + here) * order_h + slots)[:, None]
    x = tl.load(q + (first + here) * q_h + token.to(tl.int64) * q_s + d[None, :], mask=(token >= 0) & (d < D)[None, :], other=0)
    x = x.to(tl.float32)
    code, scale = quantised(x, largest(x, None), codes.dtype.element_ty)
    program = here * tl.num_programs(1) + tl.program_id(1)
    tl.store(codes + program * (C * BLOCK_D) + tl.arange(0, C)[:, None] * BLOCK_D + d[None, :], code)
    tl.store(scales + program, scale)


@triton.jit
def _store_keys(rows, place, x, live, BLOCK_D: tl.constexpr):
    """Keys x (n, BLOCK_D) float32 into rows number `place` of one head: codes at the beginning, the scale in the last 16 bytes."""
    ROW: tl.constexpr = 3 * BLOCK_D + 16
    code, scale = quantised(x, largest(x, 1)[:, None], rows.dtype.element_ty)
    place = place.to(tl.int64)[:, None]
    tl.store(rows + place * ROW + tl.arange(0, BLOCK_D)[None, :], code, mask=live)
    word = tl.arange(0, 4)[None, :]
    end = rows.to(tl.pointer_type(tl.float32)) + place * (ROW // 4) + 3 * BLOCK_D // 4 + word
    tl.store(end, tl.where(word == 0, scale, 0.0), mask=live)


@triton.jit
def _store_values(rows, place, x, live, BLOCK_D: tl.constexpr):
    """Values x (n, BLOCK_D) of 16 bits into the rows of `_store_keys`, after the codes."""
    ROW: tl.constexpr = 3 * BLOCK_D + 16
    values = rows.to(tl.pointer_type(x.dtype)) + BLOCK_D // 2 + tl.arange(0, BLOCK_D)[None, :]
    tl.store(values + place.to(tl.int64)[:, None] * (ROW // 2), x, mask=live)


@triton.jit(do_not_specialize=["length", "first", "size"], do_not_specialize_on_alignment=["order", "mean"])
def quantise_rows(
    k, v, order, mean, rows, k_h, k_s, v_h, v_s, rows_h, length, first, size, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows order[i] of BLOCK places i of one head of k and v (H, S, D), k less mean (heads of this launch, BLOCK_D) and quantised.

    rows: codes, rows_h to a head. size 32, 64 or 128: the means of cells of that many places follow from row `length` on; 0: none.
    """
    here = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (place < length)[:, None]
    d = tl.arange(0, BLOCK_D)
    token = tl.load(order + place, mask=place < length, other=0)
    key = tl.load(k + (first + here) * k_h + token[:, None] * k_s + d[None, :], mask=live & (d < D)[None, :], other=0).to(tl.float32)
    key = tl.where(live, key - tl.load(mean + here * BLOCK_D + d)[None, :], 0.0)
    rows += here * rows_h
    _store_keys(rows, place, key, live, BLOCK_D)
    for i in tl.static_range(3):
        if size == 32 << i:
            cell, exists, mean_key = _means_of(key, length, BLOCK_D, BLOCK, 32 << i)
            _store_keys(rows, cell, mean_key, exists, BLOCK_D)
    value = tl.load(v + (first + here) * v_h + token[:, None] * v_s + d[None, :], mask=live & (d < D)[None, :], other=0)
    _store_values(rows, place, value, live, BLOCK_D)
    for i in tl.static_range(3):
        if size == 32 << i:
            cell, exists, mean_value = _means_of(value.to(tl.float32), length, BLOCK_D, BLOCK, 32 << i)
            _store_values(rows, cell, mean_value.to(value.dtype), exists, BLOCK_D)


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
    mean = pad(quantise.key_mean(k[heads]), (0, width - dim))
    rows = torch.empty((number, length + count, 3 * width + 16), dtype=CODE_TYPES[precision], device=k.device)
    block = max(CELL_SIZES)
    quantise_rows[(number, ceil_div(length, block))](
        k, v, cells.order, mean, rows, *k.stride()[:2], *v.stride()[:2], rows.stride(0), length, heads.start,
        size or 0 if pooled is None else 0, D=dim, BLOCK_D=width, BLOCK=block, num_warps=max(4, block * width // 4096),
    )  # fmt: skip
    if pooled is not None:
        keys = pad(pooled[0][heads].float(), (0, width - dim)) - mean[:, None]
        rows[:, length:, :width], scale = quantise.quantised(keys, precision)
        values = rows.view(k.dtype)[:, :, width // 2 : width // 2 + width]
        values[:, length:, dim:] = 0
        values[:, length:, :dim] = pooled[1][heads]
        end = rows.view(torch.float32)[:, length:, 3 * width // 4 :]
        end[..., 1:], end[..., :1] = 0, scale
    return rows, mean


def quantise_queries(q: Tensor, order: Tensor, heads: slice, precision: str) -> tuple[Tensor, Tensor]:
    """Some heads of q (H, S, D) by their order (H, G * C), -1 for none.

    Codes (heads, G * C, W), 0 for none, and scales (heads, G) float32.
    """
    width, number, slots = row_width(q.shape[2], precision), heads.stop - heads.start, order.shape[1]
    codes = torch.empty((number, slots, width), dtype=CODE_TYPES[precision], device=q.device)
    scales = torch.empty((number, slots // GROUP_SIZE), dtype=torch.float32, device=q.device)
    quantise_group[scales.shape](
        q, order, codes, scales, *q.stride()[:2], order.stride(0), heads.start,
        D=q.shape[2], BLOCK_D=width, C=GROUP_SIZE, num_warps=max(4, GROUP_SIZE * width // 4096),
    )  # fmt: skip
    return codes, scales


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
