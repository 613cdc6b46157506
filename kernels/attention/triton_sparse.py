"""Token-sparse attention in Triton, in three passes over some heads at a time.

lay_out   K and V of a head become contiguous rows in cell order, where they are not contiguous already
expand    selection bits become ascending row numbers, and the pooled tail's biases
attend    one program per group: gathers Q, runs over the selected rows and the pooled cells, adds the residual, scatters the output

With bfloat16 the exponentials of `attend` are taken relative to the row maximum of the first tile alone. bfloat16 and float32
reach from 2^-126 to 2^127, so later logits may be far larger or smaller without harm; no maximum is searched, nothing is rescaled. Groups
in which a row leaves that range are computed again with a running maximum. float16 reaches only 2^15 and always runs with one.
"""
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from ..residual import Residual
from ..residual.reference import INT2_INNER, INT2_OUTER, rank_of
from ..selection.bits import unselected_in_cells
from ..shapes import CELL_SIZES, GRANULARITIES, GROUP_SIZE, Geometry, KeySelection, PooledTail, QueryGroups, ceil_div
from ..triton_support import NAME, fence, half, needs_fence, padded, why_not

__all__ = ["NAME", "token_sparse_attention", "why_not"]

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
INNER, OUTER = tl.constexpr(INT2_INNER), tl.constexpr(INT2_OUTER)
# What `attend` does at the end, by residual format.
EPILOGUES = {"none": 0, "bf16": 1, "fp8": 2, "int4": 3, "int2": 4, "rank": 5, "difference": 6}
# Bytes for the rows and row numbers of the heads that are computed together.
SCRATCH_SHARE, SCRATCH_LEAST, SCRATCH_MOST = 1 / 64, 128 << 20, 3 << 29
EXPAND_BLOCK, LAY_OUT_BLOCK = 1024, 64


@triton.jit(do_not_specialize=["length", "first"])
def lay_out(x, order, rows, x_h, x_s, length, first, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """rows (heads of this launch, S, BLOCK_D): x (H, S, D) in cell order, order (S,) int64; columns past D are 0."""
    here = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < length
    d = tl.arange(0, BLOCK_D)
    token = tl.load(order + place, mask=live, other=0)
    row = tl.load(x + (first + here) * x_h + token[:, None] * x_s + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0)
    tl.store(rows + (here * length + place)[:, None] * BLOCK_D + d[None, :], row, mask=live[:, None])


@triton.jit(do_not_specialize=["words", "length", "cells", "shift", "by_place"], do_not_specialize_on_alignment=["bits", "order", "bias"])
def expand(
    bits, order, numbers, bias, words, length, most, cells, shift, by_place, TAIL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row (b, h, g): the numbers of its selected keys, ascending in cell order, and log2 of the unselected keys of each cell.

    bits (rows, words), order (length,) int64, numbers (rows, most) int32, bias (rows, cells) float32. shift: log2 of the keys per bit.
    A number is a place of the cell order (by_place), or a token.
    """
    row = tl.program_id(0).to(tl.int64)
    bits += row * words
    numbers += row * most
    bias += row * cells
    lane = tl.arange(0, BLOCK)
    found = 0
    for first in range(0, length, BLOCK):
        place = first + lane
        unit = place >> shift
        word = tl.load(bits + (unit >> 5), mask=place < length, other=0)
        chosen = tl.where(place < length, (word >> (unit & 31)) & 1, 0)
        at = found + tl.cumsum(chosen, 0) - chosen
        token = tl.load(order + place, mask=(chosen != 0) & (by_place == 0), other=0).to(tl.int32)
        tl.store(numbers + at, tl.where(by_place != 0, place, token), mask=(chosen != 0) & (at < most))
        found += tl.sum(chosen, 0)
        if TAIL:
            cell = first // TAIL + tl.arange(0, BLOCK // TAIL)
            left = tl.sum(tl.reshape((place < length).to(tl.int32) - chosen, (BLOCK // TAIL, TAIL)), 1)
            tl.store(bias + cell, tl.log2(left.to(tl.float32)), mask=cell < cells)  # log2 0 = -inf: the cell drops out


@triton.jit
def _step(q, k, v, bias, scale, m, l, acc, ONLINE: tl.constexpr):
    """One tile of keys. bias in log2 units, (1, keys) or 0, -inf drops a key; m (queries,): the running maximum, or a fixed reference."""
    if ONLINE:
        s = tl.dot(q, tl.trans(k)) * scale + bias
        higher = tl.maximum(m, tl.max(s, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - reference[:, None])
        shrink = tl.exp2(m - reference)
        m = higher
        l *= shrink
        acc *= shrink[:, None]
    else:
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale + (bias - m[:, None]))
    return m, l + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc)


@triton.jit
def _whole_tiles(
    q, k, v, numbers, stop, scale, m, l, acc, D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, ONLINE: tl.constexpr, FENCE: tl.constexpr
):
    """The first `stop` selected keys, a multiple of N."""
    for i in tl.range(0, stop, N, num_stages=STAGES):
        at = tl.load(numbers + i + tl.arange(0, N))
        if FENCE:
            fence(at)
        where = at[:, None] * D + tl.arange(0, D)[None, :]
        m, l, acc = _step(q, tl.load(k + where), tl.load(v + where), 0.0, scale, m, l, acc, ONLINE)
    return m, l, acc


@triton.jit
def _others(
    q, k, v, numbers, count, tail_k, tail_v, bias, cells, scale, m, l, acc,
    D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, ONLINE: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    """`count` selected keys, any number, and then the pooled cells."""
    for i in tl.range(0, count + cells, N, num_stages=STAGES):
        j = i + tl.arange(0, N)
        selected = j < count
        here = j < count + cells
        at = tl.load(numbers + j, mask=selected, other=0)
        if FENCE:
            fence(at)
        more = tl.load(bias + j - count, mask=here & (j >= count), other=0)
        where = tl.where(selected, at, j - count)[:, None] * D + tl.arange(0, D)[None, :]
        k_tile = tl.load(tl.where(selected[:, None], k, tail_k) + where, mask=here[:, None], other=0)
        v_tile = tl.load(tl.where(selected[:, None], v, tail_v) + where, mask=here[:, None], other=0)
        m, l, acc = _step(q, k_tile, v_tile, tl.where(here, more, float("-inf"))[None, :], scale, m, l, acc, ONLINE)
    return m, l, acc


@triton.jit
def _e4m3(byte):
    """float8 e4m3 to float32 by hand: not every card has the conversion."""
    bits = ((byte & 0x80).to(tl.uint16) << 8) | ((byte & 0x7F).to(tl.uint16) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _residual(values, scales, row, d, D: tl.constexpr, EPILOGUE: tl.constexpr):
    """Rows `row` (n, 1) int64 of a residual, (n, columns) float32; layouts as in kernels/residual/reference.py."""
    RUNS: tl.constexpr = (D + 31) // 32
    d = d[None, :]
    if EPILOGUE == 1:
        return tl.load(values + row * D + d, mask=d < D, other=0).to(tl.float32)
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


@triton.jit(
    do_not_specialize=["first", "groups", "length", "cells", "rank", "with_lse"],
    do_not_specialize_on_alignment=["lse", "order", "counts", "bias", "values", "scales"],
)
def attend(
    q, k, v, out, lse, order, numbers, counts, bias, tail_k, tail_v, values, scales, dense,
    q_h, q_s, k_h, v_h, out_h, out_s, dense_h, dense_s, order_h, first, groups, length, most, cells, scale, rank, with_lse,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    EPILOGUE: tl.constexpr, ONLINE: tl.constexpr, FENCE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: M queries of one group, of one batch row.

    q, out, dense (H, S, D) by their strides; order (H, G*128) order_h apart; counts (H, G), lse (H, S), tail_k, tail_v (H, cells, BLOCK_D) and
    the residual contiguous. k, v, numbers, bias begin at head `first`: rows of BLOCK_D, heads k_h and v_h apart; (heads, G, most or cells).
    """
    PARTS: tl.constexpr = 128 // M
    local = tl.program_id(0) // PARTS
    here = (local // groups).to(tl.int64)
    group = local % groups
    h = first + here
    slots = group * 128 + tl.program_id(0) % PARTS * M + tl.arange(0, M)
    order += h * order_h
    d = tl.arange(0, BLOCK_D)
    token = tl.load(order + slots)
    q_tile = tl.load(q + h * q_h + token.to(tl.int64)[:, None] * q_s + d[None, :], mask=(token >= 0)[:, None] & (d < D)[None, :], other=0)
    k += here * k_h
    v += here * v_h
    tail_k += h * cells * BLOCK_D
    tail_v += h * cells * BLOCK_D
    numbers += local.to(tl.int64) * most
    bias += local.to(tl.int64) * cells
    count = tl.load(counts + h * groups + group)

    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    whole = count // N * N
    if not ONLINE:
        for i in tl.static_range(4):
            at = tl.load(numbers + tl.minimum(i, count - 1), mask=count > 0, other=0)
            key = tl.load(k + at * BLOCK_D + d, mask=count > 0, other=0)
            m = tl.maximum(m, tl.sum(q_tile.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale)
    m, l, acc = _whole_tiles(q_tile, k, v, numbers, whole, scale, m, l, acc, BLOCK_D, N, STAGES, ONLINE, FENCE)
    m, l, acc = _others(
        q_tile, k, v, numbers + whole, count - whole, tail_k, tail_v, bias, cells, scale, m, l, acc, BLOCK_D, N, 2, ONLINE, FENCE
    )  # fmt: skip
    if not ONLINE:
        lost = (l > 1e30) | (l < 1e-30) | (l != l)
        if (tl.max(lost.to(tl.int32), 0) != 0) & (count + cells > 0):
            m = tl.full((M,), float("-inf"), tl.float32)
            l = tl.zeros((M,), tl.float32)
            acc = tl.zeros((M, BLOCK_D), tl.float32)
            m, l, acc = _others(q_tile, k, v, numbers, count, tail_k, tail_v, bias, cells, scale, m, l, acc, BLOCK_D, N, 1, True, False)

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
    if EPILOGUE == 6:  # dense - output, in group order
        full = tl.load(dense + h * dense_h + query[:, None] * dense_s + d[None, :], mask=place, other=0)
        difference = tl.where(live[:, None], full.to(tl.float32) - acc, 0.0)
        tl.store(out + slot * D + d[None, :], difference.to(out.dtype.element_ty), mask=(d < D)[None, :])
    else:
        if EPILOGUE == 5:
            r = tl.arange(0, BLOCK_R)
            left = tl.load(values + slot * rank + r[None, :], mask=(r < rank)[None, :], other=0)
            right = tl.load(scales + (h * rank + r)[:, None] * D + d[None, :], mask=(r < rank)[:, None] & (d < D)[None, :], other=0)
            acc = tl.dot(left, right, acc)
        elif EPILOGUE != 0:
            acc += _residual(values, scales, slot, d, D, EPILOGUE)
        tl.store(out + h * out_h + query[:, None] * out_s + d[None, :], acc.to(out.dtype.element_ty), mask=place)


def token_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, groups: QueryGroups, selection: KeySelection,
    tail: PooledTail | None, residual: Residual | None, scale: float, with_lse: bool, dense: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As the reference. Heads are computed some at a time, so that laid-out rows and row numbers take bounded memory."""
    batch, heads, length, dim = q.shape
    keys, block_d, dtype, device = k.shape[2], padded(dim), q.dtype, q.device
    how = launch("sparse", block_d, Geometry.of(q, k).capability)
    q, k, v = half(q), half(k), half(v)
    shape = (batch, heads, length, dim) if dense is None else (batch, heads, groups.count * GROUP_SIZE, dim)
    out = torch.empty(shape, dtype=dtype, device=device)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=device) if with_lse else None
    epilogue, values, scales, rank = _epilogue(residual, dense, q)
    minus = out if dense is None else dense if dense.stride(-1) == 1 else dense.contiguous()
    order = groups.expanded(batch, heads)
    cells = 0 if tail is None else tail.k.shape[2]
    tail_k, tail_v = (q, q) if tail is None else (_rows_of(half(t), block_d) for t in (tail.k, tail.v))

    in_place = block_d == dim and all(t.stride(2) == dim and t.stride(1) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (k, v))
    most = max(16, ceil_div(selection.most, 16) * 16)
    per_head = 4 * groups.count * (most + cells) + (0 if in_place else 4 * keys * block_d)
    for b in range(batch):
        for some in _heads_at_once(heads, per_head, device):
            n = some.stop - some.start
            if in_place:
                rows = k[b, some], v[b, some]
            else:
                rows = [_laid_out(t[b], selection, some, block_d) for t in (k, v)]
            numbers, bias = _expanded(selection, b, some, most, None if tail is None else tail.size, by_place=not in_place)
            attend[(n * groups.count * (128 // how.queries),)](
                q[b], *rows, out[b], out if lse is None else lse[b], order[b], numbers, selection.counts[b], bias,
                tail_k if tail is None else tail_k[b], tail_v if tail is None else tail_v[b],
                values if residual is None else values[b], scales if residual is None else scales[b], minus[b],
                q.stride(1), q.stride(2), rows[0].stride(0), rows[1].stride(0), out.stride(1), out.stride(2), minus.stride(1), minus.stride(2),
                order.stride(1), some.start, groups.count, length, most, cells, scale * LOG2_E.value, rank, int(with_lse),
                D=dim, BLOCK_D=block_d, M=how.queries, N=how.tile, STAGES=how.stages, EPILOGUE=epilogue,
                ONLINE=q.dtype == torch.float16, FENCE=needs_fence(Geometry.of(q, k).capability), BLOCK_R=padded(rank), **how.options,
            )  # fmt: skip
    return out, lse


def _epilogue(residual: Residual | None, dense: Tensor | None, unused: Tensor) -> tuple[int, Tensor, Tensor, int]:
    """Number in EPILOGUES, payload tensors and rank."""
    if residual is None:
        return EPILOGUES["none" if dense is None else "difference"], unused, unused, 1
    values, *scales = residual.payload
    scales = scales[0] if scales else values
    rank = rank_of(residual.format)
    if rank is not None:
        return EPILOGUES["rank"], values, scales, values.shape[-1]
    return EPILOGUES[residual.format], values.view(torch.uint8) if residual.format == "fp8" else values, scales, 1


def _rows_of(x: Tensor, width: int) -> Tensor:
    """x (B, H, n, D) contiguous, zero padded to `width` columns."""
    return x.contiguous() if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _heads_at_once(heads: int, bytes_each: int, device: torch.device) -> Iterator[slice]:
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    budget = min(SCRATCH_MOST, max(SCRATCH_LEAST, int(total * SCRATCH_SHARE)))
    launches = ceil_div(heads, max(1, budget // bytes_each))
    step = ceil_div(heads, launches)
    for start in range(0, heads, step):
        yield slice(start, min(heads, start + step))


def _laid_out(x: Tensor, selection: KeySelection, some: slice, width: int) -> Tensor:
    """Heads `some` of x (H, S, D) in cell order, (heads, S, width)."""
    heads, (_, length, dim) = some.stop - some.start, x.shape
    rows = x.new_empty(heads, length, width)
    lay_out[(ceil_div(length, LAY_OUT_BLOCK), heads)](
        x, selection.cells.order, rows, x.stride(0), x.stride(1), length, some.start, D=dim, BLOCK_D=width, BLOCK=LAY_OUT_BLOCK
    )
    return rows


def _expanded(selection: KeySelection, b: int, some: slice, most: int, size: int | None, by_place: bool) -> tuple[Tensor, Tensor]:
    """Row numbers of the selected keys (heads, G, most) int32 and the tail's biases (heads, G, nb) float32."""
    bits = selection.bits[b, some]
    heads, groups, words = bits.shape
    cells = 0 if size is None else ceil_div(len(selection.cells), size)
    numbers = bits.new_empty(heads, groups, most)
    bias = torch.empty((heads, groups, cells), dtype=torch.float32, device=bits.device)
    usual = size in CELL_SIZES
    expand[(heads * groups,)](
        bits, selection.cells.order, numbers, bias, words, len(selection.cells), most, cells,
        GRANULARITIES[selection.granularity].bit_length() - 1, int(by_place), TAIL=size if usual else 0, BLOCK=EXPAND_BLOCK,
    )  # fmt: skip
    if size is not None and not usual:
        for i, h in enumerate(range(some.start, some.stop)):
            bias[i] = unselected_in_cells(selection, b, h, size).float().log2()
    return numbers, bias
