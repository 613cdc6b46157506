"""Dense attention that yields the masses of a selection on the way, weighted by the log-sum-exp of an earlier step.

With p = exp(score - lse_before) nothing is searched for a maximum or rescaled: the output is the sum of p v over the sum of p, the
mass of a key the sum of its p. Groups in which lse_before is too far off for the range of p run again with lse computed.
"""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, launch
from ..shapes import GRANULARITIES, CellOrder, Geometry, KeySelection, QueryGroups
from ..triton_support import NAME, half, operand, padded
from . import LAGGED_LIFT, LAGGED_REACH, triton_select
from .heaviest import Piece, pieces
from .triton_heaviest import Choice
from .triton_select import described, laid_out, load_queries, load_tile, source, store_masses

__all__ = ["NAME", "select_keys_lagged", "why_not"]

MOST_HEAD_DIM = 128  # beyond it the accumulators fill the registers


def why_not(geometry: Geometry) -> str | None:
    if geometry.head_dim > MOST_HEAD_DIM:
        return f"takes head dims up to {MOST_HEAD_DIM}, not {geometry.head_dim}"
    return triton_select.why_not(geometry)


def select_keys_lagged(
    q: Tensor, k: Tensor, v: Tensor, lse_before: Tensor, groups: QueryGroups, density: float,
    cells: CellOrder, granularity: str, kept: tuple[tuple[int, int], ...], scale: float, parameters: Launch | None = None,
) -> tuple[Tensor, Tensor, KeySelection]:
    dtype = q.dtype
    q, k, v = half(q), half(k), half(v)
    capability = Geometry.of(q, k).capability
    dim, length = padded(q.shape[3]), k.shape[2]
    parameters = parameters or launch("lagged", dim, capability)
    lift, reach = LAGGED_LIFT[q.dtype], LAGGED_REACH[q.dtype]
    with torch.cuda.device_of(q):
        choice = Choice.of(q, k, groups, density, cells, granularity, kept)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        weights = lse_before.to(torch.float32, copy=True, memory_format=torch.contiguous_format)  # the lse that p is relative to
        far = torch.empty(choice.rows, dtype=torch.int8, device=q.device)
        members = groups.expanded(*q.shape[:2])
        strides = *q.stride()[:3], *members.stride()[:2]
        shape = q.shape[3], dim, parameters.tile, described(capability)
        base2 = scale * math.log2(math.e)

        def run(piece: Piece, masses: Tensor) -> None:
            keys, values = (source(laid_out(x, cells, piece.heads), parameters.tile, described(capability)) for x in (k, v))
            grid = (len(piece.rows),)
            numbers = piece.rows.start, piece.heads.start, q.shape[1], groups.count, q.shape[2], length

            def attend(again: bool) -> None:
                lagged_kernel[grid](
                    q, keys, values, weights, members, masses, out, lse, far, *numbers, masses.stride(0), base2, *strides, *out.stride(),
                    *shape, GRANULARITIES[granularity], lift, again, **parameters.options,
                )  # fmt: skip

            attend(again=False)
            correct_kernel[grid](q, keys, weights, members, lse, far, *numbers, base2, *strides, *shape, reach, **parameters.options)
            attend(again=True)

        for piece, masses in pieces(choice, 1, 2 * length * dim * k.element_size()):
            run(piece, masses)
            choice.choose(piece.rows, masses)
    return out.to(dtype), lse, choice.selection


@triton.jit
def _group(
    q, members, first_row, heads, groups, q_batch, q_head, q_token, members_batch, members_head, D: tl.constexpr, D_PADDED: tl.constexpr
):
    """Of this program: the row, b, h, the group's tokens [128] (0 where there is none), which of them live, their q [128, D_PADDED]."""
    row = first_row + tl.program_id(0)
    b = (row // groups // heads).to(tl.int64)
    h = (row // groups % heads).to(tl.int64)
    token = tl.load(members + b * members_batch + h * members_head + row % groups * 128 + tl.arange(0, 128))
    live = token >= 0
    at = tl.where(live, token, 0).to(tl.int64)
    return row, b, h, at, live, operand(load_queries(q + b * q_batch + h * q_head, at, live, q_token, D, D_PADDED))


@triton.jit(do_not_specialize=["first_row", "first_head", "heads", "groups", "q_length", "k_length"])
def correct_kernel(
    q, k, weights, members, lse, far,
    first_row, first_head, heads, groups, q_length, k_length, scale,
    q_batch, q_head, q_token, members_batch, members_head,
    D: tl.constexpr, D_PADDED: tl.constexpr, TILE: tl.constexpr, DESCRIBED: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Marks groups with a query whose lse found is further than REACH (base 2) from its weight, and sets that weight to the exact lse."""
    row, b, h, at, live, queries = _group(
        q, members, first_row, heads, groups, q_batch, q_head, q_token, members_batch, members_head, D, D_PADDED
    )
    place = (b * heads + h) * q_length + at
    away = tl.abs(tl.load(lse + place) - tl.load(weights + place)) * 1.4426950408889634
    off = live & ~(away <= REACH)  # also where either is infinite or NaN
    again = tl.max(off.to(tl.int32))
    tl.store(far + row, again)
    if again:
        most = tl.full([128], float("-inf"), tl.float32)
        total = tl.zeros([128], tl.float32)
        for start in range(0, k_length, TILE):
            column = start + tl.arange(0, TILE)
            tile = load_tile(k, row // groups - first_head, start, k_length, D_PADDED, TILE, DESCRIBED)
            scores = tl.dot(queries, tl.trans(operand(tile))) * scale
            scores = tl.where((column < k_length)[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            total = total * tl.exp2(most - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
            most = higher
        tl.store(weights + place, (most + tl.log2(total)) * 0.6931471805599453, mask=off)


@triton.jit(do_not_specialize=["first_row", "first_head", "heads", "groups", "q_length", "k_length"])
def lagged_kernel(
    q, k, v, weights, members, mass, out, lse, far,
    first_row, first_head, heads, groups, q_length, k_length, width, scale,  # scale: of exponents to base 2
    q_batch, q_head, q_token, members_batch, members_head, out_batch, out_head, out_token, out_column,
    D: tl.constexpr, D_PADDED: tl.constexpr, TILE: tl.constexpr, DESCRIBED: tl.constexpr,
    PER_BIT: tl.constexpr, LIFT: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Output and lse of one group's queries, and the masses of all keys, a program. AGAIN: of the groups that are marked only."""
    if AGAIN:  # noqa: SIM102 (the compiler decides this one, the card the other)
        if tl.load(far + first_row + tl.program_id(0)) == 0:
            return
    row, b, h, at, live, queries = _group(
        q, members, first_row, heads, groups, q_batch, q_head, q_token, members_batch, members_head, D, D_PADDED
    )
    place = (b * heads + h) * q_length + at
    shift = tl.where(live, tl.load(weights + place) * 1.4426950408889634 - LIFT, float("inf"))  # exp2(-inf) = 0
    mass += tl.program_id(0).to(tl.int64) * width
    head_here = row // groups - first_head
    acc = tl.zeros([128, D_PADDED], tl.float32)
    total = tl.zeros([128], tl.float32)
    for start in range(0, k_length, TILE):
        k_tile = load_tile(k, head_here, start, k_length, D_PADDED, TILE, DESCRIBED)
        p = tl.exp2(tl.dot(queries, tl.trans(operand(k_tile))) * scale - shift[:, None])  # [128, TILE]
        p = tl.where((start + tl.arange(0, TILE) < k_length)[None, :], p, 0.0)
        total += tl.sum(p, 1)
        store_masses(mass, tl.sum(p, 0), start, k_length, True, PER_BIT, TILE)
        v_tile = load_tile(v, head_here, start, k_length, D_PADDED, TILE, DESCRIBED)
        acc = tl.dot(operand(p.to(v_tile.dtype)), operand(v_tile), acc)

    d = tl.arange(0, D_PADDED)
    out += b * out_batch + h * out_head
    mask = live[:, None] & (d < D)[None, :]
    tl.store(out + at[:, None] * out_token + d[None, :] * out_column, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + place, (shift + tl.log2(total)) * 0.6931471805599453, mask=live)
