"""Token-sparse attention by kernels for Hopper that ship compiled: at run time only the driver is needed (scripts/build_cubins.py).

Three launches for some heads at a time: keys and values are laid out in cell order with the pooled ones after them (cute_sm90_rows.py);
attention straight from the selection bits (cute_sm90_mainloop.py); and once more, with a running maximum, for groups in which a query left
the range of its exponentials, of which there are hardly ever any. In int8 the queries' codes come first.

Where cells of 32 are selected, kernels of their own copy them whole: rows are laid out in blocks of 32 for these.
"""
from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import cubin
from ..dtypes import half
from ..pooling.reference import pool_cells
from ..quantise import key_mean, quantised
from ..residual import Residual
from ..selection.bits import WORD, unselected_in_cells
from ..shapes import CELL_SIZES, GROUP_SIZE, Geometry, KeySelection, PooledTail, QueryGroups, ceil_div
from .passes import add_mean, epilogue_of, heads_at_once

NAME = "hopper"
PRECISIONS = ("half", "int8")
CUBINS = Path(__file__).with_name("cubins")


class Cubins(NamedTuple):
    """What runs a dtype, head dim and kind of rows, by name; queries in int8."""

    rows: str
    fixed: str
    online: str
    queries: str | None = None


def _chosen(short: str, dim: int, tile: str, kind: str) -> Cubins:
    ending, flag = f"{short}_d{dim}", "" if kind == "half" else f"_{kind}"
    fixed = f"sparse_{ending}_{tile}{flag}"
    before = (f"queries_int8_{ending}",) if "int8" in kind else ()
    return Cubins(f"rows{flag}_{ending}", fixed, f"{fixed}_online", *before)


# By dtype, head dim and kind of rows: a precision, or where cells of 32 are selected "cells", which is half, or "int8_cells".
CHOSEN = {
    (dtype, dim, kind): _chosen(short, dim, tile, kind)
    for dim, tile, kind in (
        (128, "n144_s2", "half"), (64, "n192_s4", "half"), (128, "n160_s2", "cells"), (64, "n192_s4", "cells"),
        (128, "n144_s2", "int8"), (128, "n160_s3", "int8_cells"),
    )
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))
}  # fmt: skip
LOG2_E = 1.4426950408889634
PLACES = 128  # that a warp of the passes before attention takes
LINE = 64  # elements of 16 bits in a line of L2, which rows begin with


def why_not(geometry: Geometry) -> str | None:
    """None when the Hopper kernels can run this geometry: sm_90, 16-bit, head dim 64 or 128, with int8 128."""
    if geometry.device_type != "cuda" or geometry.capability != (9, 0):
        return "is compiled for Hopper GPUs (compute capability 9.0)"
    chosen = CHOSEN.get((geometry.dtype, geometry.head_dim, geometry.precision))
    if chosen is None:
        dims = "head dims 64 and 128" if geometry.precision == "half" else f"head dim 128 for products in {geometry.precision}"
        return f"takes bfloat16 and float16 with {dims}, not {geometry.dtype} with {geometry.head_dim}"
    cells = CHOSEN[geometry.dtype, geometry.head_dim, _in_cells(geometry.precision)]
    return cubin.why_not(CUBINS / name for name in (*chosen, *cells) if name)


def _in_cells(precision: str) -> str:
    """The kind of rows where cells of 32 are selected."""
    return "cells" if precision == "half" else f"{precision}_cells"


def _kernel(name: str, device: torch.device) -> cubin.Kernel:
    return cubin.kernel(CUBINS / name, device.index)


def token_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, groups: QueryGroups, selection: KeySelection, tail: PooledTail | int | None,
    residual: Residual | None, scale: float, with_lse: bool, dense: Tensor | None, precision: str = "half",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As the reference. Heads are computed some at a time, so that laid-out rows take bounded memory."""
    q, k, v = cubin.aligned(half(q)), cubin.aligned(half(k)), cubin.aligned(half(v))
    (batch, heads, length, dim), keys, device = q.shape, k.shape[2], q.device
    int8, in_cells = precision == "int8", selection.granularity == "cell32"
    chosen = CHOSEN[q.dtype, dim, _in_cells(precision) if in_cells else precision]
    lay_out, fixed, online = (_kernel(name, device) for name in (chosen.rows, chosen.fixed, chosen.online))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    stream = torch.cuda.current_stream(device).cuda_stream

    out = q.new_empty((batch, heads, length if dense is None else groups.count * GROUP_SIZE, dim))
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=device) if with_lse else None
    epilogue, values, scales, rank = epilogue_of(residual, dense, q)
    values, scales = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (values, scales))
    minus = out if dense is None else cubin.aligned(half(dense))
    order = groups.expanded(batch, heads)
    if isinstance(tail, int) and tail not in CELL_SIZES:
        tail = pool_cells(k.float() if int8 else k, v, selection.cells, tail)
    pooled = isinstance(tail, PooledTail)
    size = (tail.size if pooled else tail) or 0
    cells = ceil_div(keys, size) if size else 0
    counted = size % WORD == 0 and (not in_cells or size <= WORD * WORD)  # by the kernel
    width = 3 * dim // 2 if int8 else 2 * dim  # of a row, on average in a block, in elements of 16 bits
    begins, ends = (WORD * ceil_div(n, WORD) if in_cells else n for n in (keys, cells))  # rows before the pooled ones, and of these
    total_rows = begins + ends
    each = ceil_div(total_rows * (width + 2 * int8), LINE) * LINE  # of a head, in elements; in int8 with the keys' scales
    per_head = 2 * each + (0 if counted else 4 * groups.count * cells) + (groups.count * (GROUP_SIZE * dim + 4) if int8 else 0)

    for b in range(batch):
        for some in heads_at_once(heads, per_head, device):
            here = some.stop - some.start
            rows = q.new_empty((here, each))
            queries, mean = q[b, some], rows
            if int8:
                mean = key_mean(k[b, some])
                queries = _codes(_kernel(chosen.queries, device), queries, order[b, some], stream)
            _lay_out(lay_out, k[b, some], v[b, some], selection.cells.order, mean, rows, total_rows, 0 if pooled else size, stream)
            if pooled and in_cells and not int8:
                pooled_k, pooled_v = (cubin.aligned(x[b, some].to(q.dtype)) for x in (tail.k, tail.v))
                _lay_out(lay_out, pooled_k, pooled_v, torch.arange(cells, device=device), mean, rows[:, begins * width :], ends, 0, stream)
            elif pooled:
                table = rows[:, begins * width : total_rows * width].unflatten(1, (ends, width))
                k_scales = rows[:, total_rows * width :].view(torch.float32)[:, begins:total_rows] if int8 else None
                _put_pooled(table, k_scales, tail.k[b, some], tail.v[b, some], mean if int8 else None, in_cells)
            bias = rows if counted else _biases(selection, b, some, size)
            total = here * groups.count
            again = torch.zeros(1 + 2 * total, dtype=torch.int32, device=device)
            for attend in (fixed, online):
                attend.launch(
                    min(total, processors), stream, q=queries, rows=rows, out=out[b], lse=out if lse is None else lse[b], order=order[b],
                    bits=selection.bits[b], counts=selection.counts[b], bias=bias, values=values if residual is None else values[b],
                    scales=scales if residual is None else scales[b], dense=minus[b], again=again,
                    q_h=queries.stride(0), rows_h=rows.stride(0), out_h=out.stride(1), dense_h=minus.stride(1), order_h=order.stride(1),
                    q_s=queries.stride(1), out_s=out.stride(2), dense_s=minus.stride(2), first=some.start, groups=groups.count, total=total,
                    length=length, keys=keys, bits_row=selection.bits.shape[3], in_cells=int(in_cells),
                    cells=cells, size=size if counted else 0, rank=rank, epilogue=epilogue, with_lse=int(with_lse),
                    scale=scale * LOG2_E,
                )  # fmt: skip
            if with_lse and int8:
                add_mean(lse[b, some], q[b, some], mean, scale)
    return out, lse


def _lay_out(
    one: cubin.Kernel, k: Tensor, v: Tensor, order: Tensor, mean: Tensor, rows: Tensor, total: int, size: int, stream: int
) -> None:
    """k and v (H, S, D) into the first of `total` rows of each of rows (H, ...), in that order (S,), with the means of cells of `size`."""
    heads, length, _ = k.shape
    parts = heads * ceil_div(length, PLACES * one.facts["variant"]["warps"])
    one.launch(
        parts, stream, k=k, v=v, order=order, mean=mean, rows=rows, k_h=k.stride(0), v_h=v.stride(0), rows_h=rows.stride(0),
        k_s=k.stride(1), v_s=v.stride(1), heads=heads, length=length, total=total, size=size, parts=parts,
    )  # fmt: skip


def _codes(codes_of: cubin.Kernel, q: Tensor, order: Tensor, stream: int) -> Tensor:
    """q (H, S, D) in int8: (H, ...) of q's dtype, in which a head has its codes (G * 128, D) in that order, (H, G * 128), and G scales."""
    heads, _, dim = q.shape
    groups = order.shape[1] // GROUP_SIZE
    rows = q.new_empty((heads, ceil_div(groups * (GROUP_SIZE * dim + 4), 16) * 8))
    codes_of.launch(
        heads * groups, stream, x=q, order=order, rows=rows, x_h=q.stride(0), order_h=order.stride(0), rows_h=rows.stride(0),
        x_s=q.stride(1), heads=heads, groups=groups,
    )  # fmt: skip
    return rows


def _put_pooled(rows: Tensor, scales: Tensor | None, k: Tensor, v: Tensor, mean: Tensor | None, in_blocks: bool) -> None:
    """The tail's pooled keys and values (H, cells, D) into their rows (H, rows, width).

    In int8 with the keys' mean (H, D) and with the keys' scales (H, rows), then also into blocks of 32, of which the last ends with zeros.
    """
    dim = k.shape[2]
    if mean is None:
        rows[..., :dim], rows[..., dim:] = k, v
        return
    past = (0, 0, 0, rows.shape[1] - k.shape[1])
    k, v = pad(k.float() - mean[:, None], past), pad(v.to(rows.dtype), past)
    codes, scale = quantised(k, "int8")
    codes = codes.view(rows.dtype)
    scales.copy_(scale[..., 0])
    if in_blocks:
        rows.unflatten(1, (-1, WORD)).flatten(2).copy_(torch.cat((_swizzled(codes), _swizzled(v)), 2))
    else:
        rows[..., : dim // 2], rows[..., dim // 2 :] = codes, v


def _swizzled(x: Tensor) -> Tensor:
    """Rows (H, n, w) of 16-bit elements as they lie in blocks of 32, (H, n / 32, 32 w): cute_sm90_rows.py says how."""
    pieces = x.unflatten(2, (-1, 8, 8)).unflatten(1, (-1, 4, 8)).transpose(3, 4)  # (H, n / 32, eight, columns, row of 8, piece, 8)
    eight = torch.arange(8, device=x.device)
    return pieces[..., eight[:, None], eight ^ eight[:, None], :].flatten(2)


def _biases(selection: KeySelection, b: int, some: slice, size: int) -> Tensor:
    """log2 of each cell's unselected keys, (heads, G, cells) float32: -inf where there are none, and the cell drops out."""
    return torch.stack([unselected_in_cells(selection, b, h, size).float().log2() for h in range(some.start, some.stop)])
