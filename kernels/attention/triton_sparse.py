"""Token-sparse attention in Triton, in three passes over some heads at a time.

gather    (of the pooling) K and V of a head become contiguous rows in cell order, with the pooled rows after them, K quantised if asked
expand    selection bits become ascending row numbers, and the pooled rows get their biases
attend    one program per group: gathers Q, runs over its rows of K and V, adds the residual, scatters the output

With bfloat16 the exponentials of `attend` are taken relative to the largest of each query's first four logits. bfloat16 and float32 reach
from 2^-126 to 2^127, so the other logits may be far larger or smaller without harm: no maximum is searched, nothing is rescaled (a fifth
faster on an H200). Groups in which a query leaves that range run again with a running maximum, as float16, which ends at 2^16, always does.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, card, launch
from ..pooling.triton_pool import gather_quantised, gather_rows, pool_cells, quantise_queries, row_width
from ..quantise import PRECISIONS as PRECISIONS
from ..residual import Residual
from ..residual.reference import INT2_INNER, INT2_OUTER
from ..selection.bits import unselected_in_cells
from ..shapes import CELL_SIZES, GROUP_SIZE, Geometry, KeySelection, PooledTail, QueryGroups, ceil_div
from ..triton_support import NAME, fence, half, needs_fence, operand, popcount
from ..triton_support import why_not as why_not_triton
from .passes import add_mean, epilogue_of, heads_at_once

__all__ = ["NAME", "PRECISIONS", "token_sparse_attention", "why_not"]

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
INNER, OUTER = tl.constexpr(INT2_INNER), tl.constexpr(INT2_OUTER)
ANY = -1  # in the place of one of EPILOGUES: the kernel looks at its argument, so that one is compiled for all of them
EXPAND_BLOCK, EXPAND_WORDS = 1024, 32
AGAIN_PROGRAMS = 1024  # look for groups to run again


def why_not(geometry: Geometry) -> str | None:
    """As of every Triton kernel; products of fp8 are there from Ada (8.9) on."""
    if geometry.precision == "fp8" and geometry.capability is not None and geometry.capability < (8, 9):
        return "needs compute capability 8.9 (Ada) or newer for fp8"
    return why_not_triton(geometry)


@triton.jit
def _words(bits, word, length, CELLS: tl.constexpr):
    """32 selection bits, one per key, for each of `word`; of keys past the end 0."""
    left = length - word * 32
    if CELLS:
        one = tl.load(bits + (word >> 5), mask=left > 0, other=0) >> (word & 31) & 1
        return -one & tl.where(left < 32, (1 << (left & 31)) - 1, -1)
    return tl.load(bits + word, mask=left > 0, other=0)


@triton.jit(do_not_specialize=["bits_row", "length", "cells", "size"], do_not_specialize_on_alignment=["bits", "before", "bias"])
def expand(
    bits, before, numbers, bias, bits_row, length, wide, cells, size, CELLS: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr
):
    """One row (h, g): the places of its selected keys, ascending, then length + 0..cells-1, then 0; log2 of each cell's unselected keys.

    bits (rows, bits_row), a bit per key or per cell of 32 (CELLS); numbers (rows, wide) int32; bias (rows, cells) float32, of cells of
    `size` keys, a multiple of 32; before (rows, ceil(length / 32) + 1) int32: scratch, the selected keys before each 32.
    """
    row = tl.program_id(0).to(tl.int64)
    words = (length + 31) // 32
    bits += row * bits_row
    before += row * (words + 1)
    numbers += row * wide
    bias += row * cells
    found = 0
    for first in range(0, words + 1, BLOCK):
        word = first + tl.arange(0, BLOCK)
        chosen = popcount(_words(bits, word, length, CELLS))
        tl.store(before + word, found + tl.cumsum(chosen, 0) - chosen, mask=word <= words)
        found += tl.sum(chosen, 0)
    for first in range(0, wide - found, BLOCK):
        after = first + tl.arange(0, BLOCK)
        tl.store(numbers + found + after, tl.where(after < cells, length + after, 0), mask=found + after < wide)
    tl.debug_barrier()
    for first in range(0, cells, BLOCK):
        cell = first + tl.arange(0, BLOCK)
        start, stop = tl.minimum(cell * size, length), tl.minimum((cell + 1) * size, length)
        chosen = tl.load(before + (stop + 31) // 32, mask=cell < cells, other=0) - tl.load(before + start // 32, mask=cell < cells, other=0)
        tl.store(bias + cell, tl.log2((stop - start - chosen).to(tl.float32)), mask=cell < cells)  # log2 0 = -inf: the cell drops out
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        bit = tl.arange(0, 32)[None, :]
        mask = _words(bits, word, length, CELLS)[:, None]
        at = tl.load(before + word, mask=word < words, other=0)[:, None] + popcount(mask & ((1 << bit) - 1))
        tl.store(numbers + at, word[:, None] * 32 + bit, mask=(((mask >> bit) & 1) != 0) & (at < wide))  # counts may contradict bits


@triton.jit
def _e4m3(byte):
    """float8 e4m3 to float32 by hand: not every card has the conversion."""
    bits = ((byte & 0x80).to(tl.uint16) << 8) | ((byte & 0x7F).to(tl.uint16) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _residual(values, scales, row, d, D: tl.constexpr, EPILOGUE: tl.constexpr):
    """Rows `row` (n, 1) int64 of a residual, (n, columns) float32; values and scales are addresses of bytes.

    Layouts as in kernels/residual/reference.py.
    """
    RUNS: tl.constexpr = (D + 31) // 32
    d = d[None, :]
    scales = scales.to(tl.pointer_type(tl.float16))
    if EPILOGUE == 1:
        return tl.load(values.to(tl.pointer_type(tl.bfloat16)) + row * D + d, mask=d < D, other=0).to(tl.float32)
    if EPILOGUE == 2:
        return _e4m3(tl.load(values + row * D + d, mask=d < D, other=0)) * tl.load(scales + row).to(tl.float32)
    live = d < RUNS * 32
    scale = tl.load(scales + row * RUNS + d // 32, mask=live, other=0).to(tl.float32)
    if EPILOGUE == 3:
        byte = tl.load(values + row * (RUNS * 16) + d // 2, mask=live, other=0).to(tl.int32)
        return ((byte >> (d % 2 * 4) & 15) - 8).to(tl.float32) * scale
    byte = tl.load(values + row * (RUNS * 8) + d // 4, mask=live, other=0).to(tl.int32)
    code = byte >> (d % 4 * 2)
    size = tl.where((code & 1) != 0, OUTER, INNER)
    return tl.where((code & 2) != 0, -size, size) * scale


@triton.jit
def _program(
    program,
    q, q_scales, rows, out, lse, order, numbers, counts, bias, values, scales, dense,
    q_h, q_s, rows_h, out_h, out_s, dense_h, dense_s, order_h, first, groups, length, wide, cells, scale, rank, with_lse, again, epilogue,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    EPILOGUE: tl.constexpr, ONLINE: tl.constexpr, FENCE: tl.constexpr
):  # fmt: skip
    """M queries of one group: number `program` of the launch that `attend` describes."""
    PARTS: tl.constexpr = 128 // M
    LOW: tl.constexpr = q.dtype.element_ty.primitive_bitwidth == 8
    VALUE: tl.constexpr = tl.float16 if out.dtype.element_ty == tl.float16 else tl.bfloat16
    ROW: tl.constexpr = 3 * BLOCK_D + 16 if LOW else 2 * BLOCK_D  # elements of `rows`: bytes if LOW
    local = program // PARTS
    here = (local // groups).to(tl.int64)
    group = local % groups
    h = first + here
    slots = group * 128 + program % PARTS * M + tl.arange(0, M)
    order += h * order_h
    d = tl.arange(0, BLOCK_D)
    source = slots if LOW else tl.load(order + slots)
    q += (here if LOW else h) * q_h
    q_tile = tl.load(q + source.to(tl.int64)[:, None] * q_s + d[None, :], mask=(source >= 0)[:, None] & (d < D)[None, :], other=0.0)
    rows += here * rows_h
    factor = scale
    if LOW:
        word = tl.arange(0, 4)
        factor *= tl.load(q_scales + local)
        scales_of = rows.to(tl.pointer_type(tl.float32)) + 3 * BLOCK_D // 4
        values_of = rows.to(tl.pointer_type(VALUE)) + BLOCK_D // 2
    numbers += local.to(tl.int64) * wide
    bias += local.to(tl.int64) * cells
    count = tl.load(counts + h * groups + group)

    m = tl.zeros((M,), tl.float32)
    l = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    if not ONLINE:
        for i in tl.static_range(4):
            one = tl.load(numbers + tl.minimum(i, count - 1), mask=count > 0, other=0)
            key = tl.load(rows + one * ROW + d, mask=count > 0, other=0.0)
            logit = tl.sum(q_tile.to(tl.float32) * key.to(tl.float32)[None, :], 1)
            if LOW:
                logit *= tl.load(scales_of + one * (ROW // 4), mask=count > 0, other=0)
            logit *= factor
            if i == 0:
                m = logit
            else:
                m = tl.maximum(m, logit)
    else:
        m += float("-inf")
    n = tl.arange(0, N)
    for i in tl.range(0, count + cells, N, num_stages=STAGES):
        at = tl.load(numbers + i + n)
        if FENCE:
            fence(at)
        row = rows + at[:, None] * ROW + d[None, :]
        value = values_of + at[:, None] * (ROW // 2) + d[None, :] if LOW else row + BLOCK_D
        if LOW:
            k_scale = tl.sum(tl.load(scales_of + at[:, None] * (ROW // 4) + word[None, :]), 1)  # 16 bytes are one copy
        if FENCE:  # one wait must cover all, so the one that is waited for comes last
            v_tile = operand(tl.load(value))
        k_tile = operand(tl.load(row))
        s = tl.dot(operand(q_tile), tl.trans(k_tile))
        if LOW:
            s = s.to(tl.float32) * (k_scale * factor)[None, :]
        else:
            s *= factor
        if not ONLINE:
            s -= m[:, None]
        if i + N > count:  # a tile with pooled cells, which weigh as many keys as are unselected, or with nothing
            j = i + n - count
            more = tl.load(bias + j, mask=(j >= 0) & (j < cells), other=0)
            s += tl.where(j < cells, more, float("-inf"))[None, :]
        if ONLINE:
            higher = tl.maximum(m, tl.max(s, 1))
            reference = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - reference[:, None])
            shrink = tl.exp2(m - reference)
            m = higher
            l *= shrink
            acc *= shrink[:, None]
        else:
            p = tl.exp2(s)
        if not FENCE:  # waited for here: earlier, ptxas would hold all values in registers
            v_tile = operand(tl.load(value))
        l += tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)
    if not ONLINE:
        lost = (l > 1e27) | (l < 1e-30) | (l != l)  # 1e27 leaves room for values up to 1e11
        tl.store(again + program, tl.max(lost.to(tl.int32), 0) * (count + cells > 0))

    # Read again rather than kept in registers through the loop.
    token = tl.load(order + slots, cache_modifier=".cg")
    live = token >= 0
    query = tl.where(live, token, 0).to(tl.int64)
    place = live[:, None] & (d < D)[None, :]
    slot = (h * groups * 128 + slots)[:, None]
    empty = l == 0  # no key at all
    acc = acc / tl.where(empty, 1.0, l)[:, None]
    if with_lse != 0:
        total = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, l))) * LN_2)
        tl.store(lse + h * length + query, total, mask=live)
    # Every end stores by itself: before a common store ptxas would keep what each of them adds in registers.
    which = epilogue if EPILOGUE < 0 else EPILOGUE
    target = out + h * out_h + query[:, None] * out_s + d[None, :]
    if which == 0:
        tl.store(target, acc.to(out.dtype.element_ty), mask=place)
    for fmt in tl.static_range(1, 5):
        if which == fmt:
            tl.store(target, (acc + _residual(values, scales, slot, d, D, fmt)).to(out.dtype.element_ty), mask=place)
    if which == 5:  # by hand: as a product it made Triton 3.6 read past its shared memory on Hopper
        left_at, right_at = values.to(tl.pointer_type(tl.bfloat16)), scales.to(tl.pointer_type(tl.bfloat16))
        for r in range(rank):
            left = tl.load(left_at + (h * groups * 128 + slots) * rank + r).to(tl.float32)
            right = tl.load(right_at + (h * rank + r) * D + d, mask=d < D, other=0).to(tl.float32)
            acc += left[:, None] * right[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=place)
    if which == 6:  # dense - output, in group order
        full = tl.load(dense + h * dense_h + query[:, None] * dense_s + d[None, :], mask=place, other=0)
        difference = tl.where(live[:, None], full.to(tl.float32) - acc, 0.0)
        tl.store(out + slot * D + d[None, :], difference.to(out.dtype.element_ty), mask=(d < D)[None, :])


@triton.jit(
    do_not_specialize=["first", "groups", "length", "cells", "rank", "with_lse", "programs", "epilogue"],
    do_not_specialize_on_alignment=["lse", "order", "counts", "bias", "values", "scales", "again"],
)
def attend(
    q, q_scales, rows, out, lse, order, numbers, counts, bias, values, scales, dense,
    q_h, q_s, rows_h, out_h, out_s, dense_h, dense_s, order_h, first, groups, length, wide, cells, scale, rank, with_lse, again, programs,
    epilogue, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    EPILOGUE: tl.constexpr, ONLINE: tl.constexpr, FENCE: tl.constexpr
):  # fmt: skip
    """All queries of some heads of one batch row, M queries of one group to a program.

    q, out, dense (H, S, D) by their strides; order (H, G*128) order_h apart; counts (H, G), lse (H, S) and the residual contiguous.
    rows (heads, S + cells, 2, BLOCK_D): keys and values in cell order, then the pooled ones; numbers (heads, G, wide) which of them each
    group sees; bias (heads, G, cells) of its pooled ones. These begin at head `first`; again (programs,) is 1 for programs to run online.
    In low precision q (heads, G*128, BLOCK_D) in group order, with q_scales (heads, G), and rows are quantised
    (kernels/pooling/triton_pool.py), q from head `first` on too; in half q_scales is not read.
    """
    if ONLINE:
        for program in range(tl.program_id(0), programs, tl.num_programs(0)):
            if tl.load(again + program) != 0:
                _program(
                    program,
                    q, q_scales, rows, out, lse, order, numbers, counts, bias, values, scales, dense,
                    q_h, q_s, rows_h, out_h, out_s, dense_h, dense_s, order_h, first, groups, length, wide, cells, scale, rank,
                    with_lse, again, epilogue, D, BLOCK_D, M, N, STAGES, EPILOGUE, ONLINE, FENCE,
                )  # fmt: skip
    else:
        _program(
            tl.program_id(0),
            q, q_scales, rows, out, lse, order, numbers, counts, bias, values, scales, dense,
            q_h, q_s, rows_h, out_h, out_s, dense_h, dense_s, order_h, first, groups, length, wide, cells, scale, rank, with_lse, again,
            epilogue, D, BLOCK_D, M, N, STAGES, EPILOGUE, ONLINE, FENCE,
        )  # fmt: skip


def token_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, groups: QueryGroups, selection: KeySelection, tail: PooledTail | int | None,
    residual: Residual | None, scale: float, with_lse: bool, dense: Tensor | None, precision: str = "half",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As the reference. Heads are computed some at a time, so that laid-out rows and row numbers take bounded memory."""
    batch, heads, length, dim = q.shape
    keys, width, dtype, device, capability = k.shape[2], row_width(dim, precision), q.dtype, q.device, Geometry.of(q, k).capability
    q, k, v = half(q), half(k), half(v)
    shape = (batch, heads, length, dim) if dense is None else (batch, heads, groups.count * GROUP_SIZE, dim)
    out = torch.empty(shape, dtype=dtype, device=device)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=device) if with_lse else None
    epilogue, values, scales, rank = epilogue_of(residual, dense, q)
    minus = out if dense is None else dense if dense.stride(-1) == 1 else dense.contiguous()
    order = groups.expanded(batch, heads)

    # `fixed` takes the exponentials relative to a fixed reference, `online` keeps a running maximum.
    kernel = "sparse" if precision == "half" else "sparse_low"
    online = launch(f"{kernel}_online", width, capability)
    fixed = launch(kernel, width, capability) if q.dtype == torch.bfloat16 else None
    # With all ends in one kernel ptxas keeps the products of Hopper from overlapping.
    fixed_end = epilogue if precision == "half" or card(capability) == "hopper" else ANY
    online_end = epilogue if fixed is None and precision == "half" else ANY

    if isinstance(tail, int) and tail not in CELL_SIZES:
        tail = pool_cells(k if precision == "half" else k.float(), v, selection.cells, tail)
    size = tail.size if isinstance(tail, PooledTail) else tail
    cells = 0 if size is None else ceil_div(keys, size)
    past = max(how.tile for how in (online, fixed) if how)  # lists are read a tile past their end
    wide = ceil_div(selection.most + cells + past, 16) * 16
    parts = GROUP_SIZE // online.queries
    per_head = 4 * groups.count * (wide + cells + parts + ceil_div(keys, 32) + 1) + 4 * (keys + cells) * width
    per_head += 0 if precision == "half" else groups.count * (GROUP_SIZE * width + 4)
    for b in range(batch):
        pooled = (tail.k[b], tail.v[b]) if isinstance(tail, PooledTail) else None
        for some in heads_at_once(heads, per_head, device):
            if precision == "half":
                queries, q_scales, rows = q[b], q[b], gather_rows(k[b], v[b], selection.cells, some, size, pooled)
            else:
                queries, q_scales = quantise_queries(q[b], order[b], some, precision)
                rows, mean = gather_quantised(k[b], v[b], selection.cells, some, size, pooled, precision)
            numbers, bias = _expanded(selection, b, some, wide, size)
            programs = (some.stop - some.start) * groups.count * parts
            again = torch.full((programs,), int(fixed is None), dtype=torch.int32, device=device)
            arguments = {
                "q": queries, "q_scales": q_scales, "rows": rows, "out": out[b], "lse": bias if lse is None else lse[b],
                "order": order[b], "numbers": numbers, "counts": selection.counts[b], "bias": bias,
                "values": values if residual is None else values[b], "scales": scales if residual is None else scales[b],
                "dense": minus[b], "again": again,
                "q_h": queries.stride(0), "q_s": queries.stride(1), "rows_h": rows.stride(0), "out_h": out.stride(1),
                "out_s": out.stride(2), "dense_h": minus.stride(1), "dense_s": minus.stride(2), "order_h": order.stride(1),
                "first": some.start, "groups": groups.count, "length": length, "wide": wide, "cells": cells,
                "scale": scale * LOG2_E.value, "rank": rank, "with_lse": int(with_lse), "programs": programs, "epilogue": epilogue,
            }  # fmt: skip
            if fixed is not None:
                attend[(programs,)](**arguments, **_constants(fixed, q, width, fixed_end, False))
            grid = programs if fixed is None else min(programs, AGAIN_PROGRAMS)
            attend[(grid,)](**arguments, **_constants(online, q, width, online_end, True))
            if with_lse and precision != "half":
                add_mean(lse[b, some], q[b, some], mean, scale)
    return out, lse


def _constants(how: Launch, q: Tensor, width: int, epilogue: int, online: bool) -> dict:
    """Compile-time arguments of `attend` and options of its launch."""
    dim, capability = q.shape[3], Geometry.of(q, q).capability
    constants = {"D": dim, "BLOCK_D": width, "M": how.queries, "N": how.tile, "STAGES": how.stages, "EPILOGUE": epilogue}
    return constants | {"ONLINE": online, "FENCE": needs_fence(capability)} | how.options


def _expanded(selection: KeySelection, b: int, some: slice, wide: int, size: int | None) -> tuple[Tensor, Tensor]:
    """Rows that each group sees (heads, G, wide) int32 and the tail's biases (heads, G, nb) float32."""
    bits = selection.bits[b, some]
    heads, groups, words = bits.shape
    cells = 0 if size is None else ceil_div(len(selection.cells), size)
    numbers = bits.new_empty(heads, groups, wide)
    before = bits.new_empty(heads, groups, ceil_div(len(selection.cells), 32) + 1)
    bias = torch.empty((heads, groups, cells), dtype=torch.float32, device=bits.device)
    in_words = cells > 0 and size % 32 == 0
    expand[(heads * groups,)](
        bits, before, numbers, bias, words, len(selection.cells), wide, cells, size if in_words else 32,
        CELLS=selection.granularity == "cell32", BLOCK=EXPAND_BLOCK, WORDS=EXPAND_WORDS,
    )  # fmt: skip
    if cells and not in_words:
        for i, h in enumerate(range(some.start, some.stop)):
            bias[i] = unselected_in_cells(selection, b, h, size).float().log2()
    return numbers, bias
