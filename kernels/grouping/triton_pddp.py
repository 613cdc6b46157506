"""Fast PDDP in Triton: the reference's recursion without a sort.

Only membership of the two halves of a node matters, and the groups list their tokens ascending. So a node is cut by the exact
`cut`-th smallest projection (radix select on sortable integers) and a stable partition: beginning with 0..S-1, the tokens of
every node ascend at every level. The nodes of a level follow from S alone, so programs find their own: nothing is read back.

Levels of large nodes take four kernels, with several programs to a node. There the direction comes from a sample of the rows.
Levels of nodes of up to FUSED_ROWS take one kernel with one program to a node, which finds its rows in L2 on the second reading.
Head dims above 128, whose Gram matrix fits no program's registers, are slow: they take that kernel at every level.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import triton_support
from ..launch import launch
from ..shapes import GROUP_SIZE, Geometry, QueryGroups, ceil_div
from .reference import POWER_ITERATIONS

NAME = triton_support.NAME
why_not = triton_support.why_not

FUSED_ROWS = 4096  # tokens of the largest node that one program splits by itself
SAMPLED_ROWS = 4096  # rows of a larger node that give its direction
_MOMENT_PROGRAMS = 512  # programs that fill a large GPU; more partial sums than that only cost memory traffic
_KEYS = 1024  # sortable projections that a program of the fused kernel takes at a time
_SHIFT_ROWS = tl.constexpr(16)  # rows whose mean is taken off a node's rows before their moments: near enough that nothing cancels
_OPERAND = tl.constexpr(tl.float32 if triton_support.INTERPRETED else tl.bfloat16)  # the interpreter multiplies no bfloat16


def group_queries(q: Tensor) -> QueryGroups:
    """PDDP groups of q (B, H, S, D), order (B, H, G*C) int32, as the reference makes them but for rounding.

    Tokens with NaN or infinity, and the tokens of a node they spoil, are placed somewhere, once.
    """
    if q.stride(-1) != 1:
        q = q.contiguous()
    batch, heads, length, dim = q.shape
    rows, width = batch * heads, ceil_div(length, GROUP_SIZE) * GROUP_SIZE
    capability = Geometry.of(q, q).capability
    padded = triton_support.padded(dim)
    order, spare = (torch.full((rows, width), -1, dtype=torch.int32, device=q.device) for _ in range(2))
    order[:, :length] = torch.arange(length, dtype=torch.int32, device=q.device)
    keys = torch.empty_like(order)
    for level in range((width // GROUP_SIZE - 1).bit_length()):
        _split_level(q, order, spare, keys, level, padded, capability)
        order, spare = spare, order
    return QueryGroups(order.view(batch, heads, width), length)


def _split_level(q: Tensor, order: Tensor, out: Tensor, keys: Tensor, level: int, padded: int, capability: tuple[int, int] | None):
    """Halves every node of `level` that has more than C tokens: order (rows, G*C) into out, both int32. keys: scratch like order."""
    _, heads, length, dim = q.shape
    rows, width = order.shape
    nodes = 1 << level
    most = GROUP_SIZE * ceil_div(width // GROUP_SIZE, nodes)  # tokens of the largest node
    tree = (level, length, width)
    source = (q, *q.stride()[:3], heads, dim)
    shape = {"D": padded, "EXACT": dim == padded, "C": GROUP_SIZE}

    if most <= FUSED_ROWS or padded > 128:
        constants, options = parameters("split", padded, capability)
        _split[(rows * nodes,)](*source, order, out, keys, *tree, **shape, **constants, **options)
        return
    parts = min(ceil_div(_MOMENT_PROGRAMS, rows * nodes), max(1, SAMPLED_ROWS // 256))
    gram = torch.empty(rows * nodes, parts, padded, padded, dtype=torch.float32, device=q.device)
    total = torch.empty(rows * nodes, parts, padded, dtype=torch.float32, device=q.device)
    axis = torch.empty(rows * nodes, 2, padded, dtype=torch.float32, device=q.device)  # mean and direction
    sample = (parts, SAMPLED_ROWS)
    constants, options = parameters("moments", padded, capability)
    _moments[(rows * nodes, parts)](*source, order, gram, total, *tree, *sample, **shape, **constants, **options)
    constants, options = parameters("direction", padded, capability)
    _direction[(rows * nodes,)](*source, order, gram, total, axis, *tree, *sample, **shape, **constants, **options)
    constants, options = parameters("project", padded, capability)
    _project[(rows * nodes, ceil_div(most, constants["TILE"]))](*source, order, axis, keys, *tree, **shape, **constants, **options)
    constants, options = parameters("partition", padded, capability)
    _partition[(rows * nodes,)](order, out, keys, *tree, C=GROUP_SIZE, **constants, **options)


def parameters(kernel: str, padded: int, capability: tuple[int, int] | None) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of a kernel beside its shape, and its launch options."""
    chosen = launch(f"pddp_{kernel}", padded, capability)
    constants = {} if kernel == "direction" else {"TILE": chosen.tile}
    if kernel in ("direction", "split"):
        constants["ITERATIONS"] = POWER_ITERATIONS
    if kernel == "split":
        constants |= {"KEYS": _KEYS, "STAGES": chosen.stages}
    return constants, chosen.options


# What the kernels share. A program of a level's grid belongs to one node of one row: program = row * 2**level + node.


@triton.jit
def _node(level, length, C: tl.constexpr):
    """This program's (row, first place, tokens); tokens may be 0."""
    nodes = 1 << level
    row = tl.program_id(0) // nodes
    node = tl.program_id(0) % nodes
    start = 0
    n = length
    for depth in range(level):
        cut = (n + C - 1) // C // 2 * C
        goes_right = (node >> (level - 1 - depth)) & 1
        start += goes_right * cut
        n = goes_right * (n - cut) + (1 - goes_right) * cut
    return row.to(tl.int64), start, n


@triton.jit
def _head(q, stride_b, stride_h, heads, row):
    return q + row // heads * stride_b + row % heads * stride_h


@triton.jit
def _rows(head, stride, dim, tokens, live, D: tl.constexpr, EXACT: tl.constexpr):
    """Rows `tokens` of a head, (TILE, D) float32; 0 where not live and past dim."""
    columns = tl.arange(0, D)
    mask = live[:, None]
    if not EXACT:
        mask = mask & (columns < dim)[None, :]
    return tl.load(head + tokens.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _shift(head, stride, dim, order, n, D: tl.constexpr, EXACT: tl.constexpr):
    """Mean of a few rows of the node whose n tokens are at `order`, (D,) float32."""
    places = (tl.arange(0, _SHIFT_ROWS).to(tl.int64) * n // _SHIFT_ROWS).to(tl.int32)
    tokens = tl.load(order + places)
    return tl.sum(_rows(head, stride, dim, tokens, places >= 0, D, EXACT), 0) / _SHIFT_ROWS


@triton.jit
def _scatter(head, stride, dim, order, n, first, stop, sampled, shift, D: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr,
             SAMPLE: tl.constexpr):  # fmt: skip
    """Gram matrix (D, D) and sum (D,) of rows first..stop of a node less shift, in float32.

    SAMPLE: the rows are points of a golden-ratio sequence over the node, `sampled` in all: no period of the data is met.
    """
    gram = tl.zeros((D, D), tl.float32)
    total = tl.zeros((D, 16), tl.float32)  # 16 times the sum: a product with ones takes fewer registers than adding
    ones = tl.full((TILE, 16), 1.0, _OPERAND)
    for at in range(first, stop, TILE):
        places = at + tl.arange(0, TILE)
        live = places < stop
        if SAMPLE:
            places = (((places.to(tl.int64) * 2654435769) & 0xFFFFFFFF) * n >> 32).to(tl.int32)
        tokens = tl.load(order + places, mask=live, other=0)
        x = _rows(head, stride, dim, tokens, live, D, EXACT)
        x = tl.where(live[:, None], x - shift[None, :], 0.0).to(tl.bfloat16)
        gram = tl.dot(tl.trans(x).to(_OPERAND), x.to(_OPERAND), gram)
        total = tl.dot(tl.trans(x).to(_OPERAND), ones, total)
    return gram, tl.max(total, 1)


@triton.jit
def _principal(gram, total, count, D: tl.constexpr, ITERATIONS: tl.constexpr):
    """Principal direction (D,) of `count` rows with this Gram matrix and sum: power iteration as in the reference."""
    TINY: tl.constexpr = 1.1754943508222875e-38
    gram -= total[:, None] * (total / count)[None, :]
    i = tl.arange(0, D)
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], gram, 0.0), 1)
    largest = tl.argmax(diagonal, 0)
    # Divided by its trace, the largest eigenvalue is in 1/D..1: eight products cannot leave the range of float32.
    gram *= 1.0 / tl.maximum(tl.sum(diagonal, 0), TINY)
    direction = (i == largest).to(tl.float32)  # the first product makes it the reference's start, the Gram row of this entry
    for _ in range(ITERATIONS // 8):
        for _ in range(8):
            direction = tl.sum(gram * direction[None, :], 1)
        direction *= 1.0 / tl.maximum(tl.max(tl.abs(direction), 0), TINY)
    return direction


@triton.jit
def _sortable(x):
    """int32 in the order of float32 x, as uint32 bits: equal zeros, every NaN last."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == 0.0, 0, bits)
    bits = tl.where(bits < 0, ~bits, bits ^ -0x80000000)
    return tl.where(x == x, bits, -1)


@triton.jit
def _project_rows(head, stride, dim, order, keys, first, stop, mean, direction, D: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr):
    """Keys of rows first..first + TILE of a node, as far as stop."""
    places = first + tl.arange(0, TILE)
    live = places < stop
    tokens = tl.load(order + places, mask=live, other=0)
    x = _rows(head, stride, dim, tokens, live, D, EXACT)
    tl.store(keys + places, _sortable(tl.sum((x - mean[None, :]) * direction[None, :], 1)), mask=live)


@triton.jit
def _cut(order, out, keys, n, cut, TILE: tl.constexpr):
    """Stable partition of order[:n] into out: first the `cut` tokens of smallest keys (ties: lower place), then the others."""
    digits = tl.arange(0, 32)
    # The key at place `cut` of the sorted keys, found from its top 2 bits on, then 5 at a time. At last `rank` is the number of
    # keys equal to it that go left.
    threshold = tl.zeros((), tl.uint32)
    rank = cut
    for step in range(7):
        counts = tl.zeros((32,), tl.int32)
        for at in range(0, n, TILE):
            places = at + tl.arange(0, TILE)
            # Keys below those that still compete wrap around to large numbers. They and those above are counted in the last digit,
            # where they cannot move the cut.
            above = tl.load(keys + places, mask=places < n, other=-1).to(tl.uint32, bitcast=True) - threshold
            digit = tl.minimum(above >> (30 - 5 * step), 31).to(tl.int32)
            counts += tl.histogram(tl.where(places < n, digit, 31), 32)
        found = tl.sum((tl.cumsum(counts, 0) <= rank).to(tl.int32), 0)
        rank -= tl.sum(tl.where(digits < found, counts, 0), 0)
        threshold += found.to(tl.uint32) << (30 - 5 * step)
    less_before = 0
    ties_before = 0
    for at in range(0, n, TILE):
        places = at + tl.arange(0, TILE)
        live = places < n
        key = tl.load(keys + places, mask=live, other=-1).to(tl.uint32, bitcast=True)
        token = tl.load(order + places, mask=live, other=0)
        is_less = (live & (key < threshold)).to(tl.int32)
        is_tie = (live & (key == threshold)).to(tl.int32)
        both = tl.cumsum(is_less | is_tie << 16, 0)
        less = less_before + (both & 0xFFFF)
        ties = ties_before + (both >> 16)
        goes_left = (is_less == 1) | (is_tie == 1) & (ties <= rank)
        left = less + tl.minimum(ties, rank)  # tokens up to here, this one included, that go left
        tl.store(out + tl.where(goes_left, left - 1, cut + places - left), token, mask=live)
        less_before += tl.sum(is_less, 0)
        ties_before += tl.sum(is_tie, 0)


@triton.jit(do_not_specialize=["heads", "dim", "level", "length", "width", "parts", "sampled"])
def _moments(q, stride_b, stride_h, stride_s, heads, dim, order, gram, total, level, length, width, parts, sampled,
             D: tl.constexpr, EXACT: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Gram matrix and sum of one of `parts` parts of a node's sample: gram (rows*nodes, parts, D, D), total (rows*nodes, parts, D)."""
    row, start, n = _node(level, length, C)
    head = _head(q, stride_b, stride_h, heads, row)
    order += row * width + start
    part = tl.program_id(1)
    each = (sampled + parts - 1) // parts
    shift = _shift(head, stride_s, dim, order, n, D, EXACT)
    stop = tl.minimum(part * each + each, sampled)
    g, t = _scatter(head, stride_s, dim, order, n, part * each, stop, sampled, shift, D, EXACT, TILE, True)
    i = tl.arange(0, D)
    place = tl.program_id(0).to(tl.int64) * parts + part
    tl.store(gram + place * D * D + i[:, None] * D + i[None, :], g)
    tl.store(total + place * D + i, t)


@triton.jit(do_not_specialize=["heads", "dim", "level", "length", "width", "parts", "sampled"])
def _direction(q, stride_b, stride_h, stride_s, heads, dim, order, gram, total, axis, level, length, width, parts, sampled,
               D: tl.constexpr, EXACT: tl.constexpr, C: tl.constexpr, ITERATIONS: tl.constexpr):  # fmt: skip
    """A node's mean and principal direction, axis (rows*nodes, 2, D), from the moments of its parts."""
    row, start, n = _node(level, length, C)
    shift = _shift(_head(q, stride_b, stride_h, heads, row), stride_s, dim, order + row * width + start, n, D, EXACT)
    i = tl.arange(0, D)
    node = tl.program_id(0).to(tl.int64)
    g = tl.zeros((D, D), tl.float32)
    t = tl.zeros((D,), tl.float32)
    for part in range(parts):
        g += tl.load(gram + (node * parts + part) * D * D + i[:, None] * D + i[None, :])
        t += tl.load(total + (node * parts + part) * D + i)
    tl.store(axis + node * 2 * D + i, shift + t / sampled)
    tl.store(axis + node * 2 * D + D + i, _principal(g, t, sampled, D, ITERATIONS))


@triton.jit(do_not_specialize=["heads", "dim", "level", "length", "width"])
def _project(q, stride_b, stride_h, stride_s, heads, dim, order, axis, keys, level, length, width,
             D: tl.constexpr, EXACT: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Sortable projections of a tile of a node's rows on its direction, keys (rows, G*C) in the order of `order`."""
    row, start, n = _node(level, length, C)
    first = tl.program_id(1) * TILE
    if first < n:
        axis += tl.program_id(0).to(tl.int64) * 2 * D
        mean = tl.load(axis + tl.arange(0, D))
        direction = tl.load(axis + D + tl.arange(0, D))
        head = _head(q, stride_b, stride_h, heads, row)
        here = row * width + start
        _project_rows(head, stride_s, dim, order + here, keys + here, first, n, mean, direction, D, EXACT, TILE)


@triton.jit(do_not_specialize=["level", "length", "width"])
def _partition(order, out, keys, level, length, width, C: tl.constexpr, TILE: tl.constexpr):
    """The tokens of a node, order (rows, G*C), into out by their keys."""
    row, start, n = _node(level, length, C)
    here = row * width + start
    _cut(order + here, out + here, keys + here, n, (n + C - 1) // C // 2 * C, TILE)


@triton.jit(do_not_specialize=["heads", "dim", "level", "length", "width"])
def _split(q, stride_b, stride_h, stride_s, heads, dim, order, out, keys, level, length, width,
           D: tl.constexpr, EXACT: tl.constexpr, C: tl.constexpr, ITERATIONS: tl.constexpr, TILE: tl.constexpr,
           KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """All of it for one node: order (rows, G*C) into out. A node of up to C tokens is copied."""
    row, start, n = _node(level, length, C)
    here = row * width + start
    order += here
    out += here
    keys += here
    if n <= C:
        places = tl.arange(0, C)
        tl.store(out + places, tl.load(order + places, mask=places < n), mask=places < n)
    else:
        head = _head(q, stride_b, stride_h, heads, row)
        shift = _shift(head, stride_s, dim, order, n, D, EXACT)
        gram, total = _scatter(head, stride_s, dim, order, n, 0, n, n, shift, D, EXACT, TILE, False)
        direction = _principal(gram, total, n, D, ITERATIONS)
        # Any origin near the rows gives their order. Their mean, kept from above, would cost registers that are not there.
        mean = _shift(head, stride_s, dim, order, n, D, EXACT)
        for first in tl.range(0, n, TILE, num_stages=STAGES):
            _project_rows(head, stride_s, dim, order, keys, first, n, mean, direction, D, EXACT, TILE)
        tl.debug_barrier()  # the keys that other threads wrote
        _cut(order, out, keys, n, (n + C - 1) // C // 2 * C, KEYS)
