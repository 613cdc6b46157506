"""Exact selection in two steps: the mass of every key for every group, then the heaviest of each group (triton_heaviest.py)."""
from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .. import triton_support
from ..launch import Launch, card, launch
from ..pooling.triton_pool import gather_into
from ..shapes import GRANULARITIES, GROUP_SIZE, CellOrder, Geometry, KeySelection, QueryGroups
from ..triton_support import NAME, half, operand, padded
from .heaviest import Piece
from .triton_heaviest import Choice

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

__all__ = ["NAME", "select_keys", "why_not"]


def described(capability: tuple[int, int] | None) -> bool:
    """Whether kernels read keys and values by tensor descriptor (TMA). On Hopper they do: before Triton 3.7 cp.async is not fenced
    from wgmma there (triton_support.needs_fence)."""
    return card(capability) == "hopper"


def why_not(geometry: Geometry) -> str | None:
    if TensorDescriptor is None and described(geometry.capability):
        return f"needs Triton 3.4 or newer on this card, this is {triton.__version__}"
    return triton_support.why_not(geometry)


def select_keys(
    q: Tensor, k: Tensor, lse: Tensor, groups: QueryGroups, density: float,
    cells: CellOrder, granularity: str, kept: tuple[tuple[int, int], ...], scale: float,
) -> KeySelection:
    choice = Choice.of(q, k, groups, density, cells, granularity, kept)
    if choice.is_everything:
        return choice.everything(lse, groups)
    return choice.heaviest(Masses.of(q, k, lse, groups, cells, granularity, scale))


@dataclass(frozen=True, eq=False)
class Masses:
    """As heaviest.Masses, made once per call."""

    q: Tensor
    k: Tensor
    lse: Tensor  # (B, H, Sq) float32, contiguous
    members: Tensor  # (B, H, G*C) int32, a view: the groups' order
    cells: CellOrder
    per_bit: int  # keys of a unit
    scale: float
    launch: Launch
    described: bool

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, lse: Tensor, groups: QueryGroups, cells: CellOrder, granularity: str, scale: float,
        parameters: Launch | None = None,
    ) -> Masses:
        q, k = half(q), half(k)
        capability = Geometry.of(q, k).capability
        parameters = parameters or launch("mass", padded(q.shape[3]), capability)
        members = groups.expanded(q.shape[0], q.shape[1])
        lse, scale = lse.float().contiguous(), scale * math.log2(math.e)
        return cls(q, k, lse, members, cells, GRANULARITIES[granularity], scale, parameters, described(capability))

    @property
    def groups_each(self) -> int:
        return self.launch.queries // GROUP_SIZE

    @property
    def key_bytes(self) -> int:
        return self.k.shape[2] * padded(self.k.shape[3]) * self.k.element_size()

    def compute(self, piece: Piece, out: Tensor) -> None:
        keys = laid_out(self.k, self.cells, piece.heads)
        self.launch_kernel(piece, keys, out)

    def launch_kernel(self, piece: Piece, keys: Tensor, out: Tensor) -> None:
        q, parameters, dim = self.q, self.launch, keys.shape[1]
        mass_kernel[(len(piece.programs),)](
            q, source(keys, parameters.tile, self.described), self.lse, self.members, out,
            piece.programs.start, piece.rows.start, piece.heads.start, q.shape[1], self.members.shape[2] // GROUP_SIZE,
            q.shape[2], self.k.shape[2], out.stride(0), self.scale, *q.stride()[:3], *self.members.stride()[:2],
            q.shape[3], dim, parameters.tile, self.per_bit, self.described, parameters.queries == 2 * GROUP_SIZE, **parameters.options,
        )  # fmt: skip


def laid_out(x: Tensor, cells: CellOrder, heads: range) -> Tensor:
    """Rows of x (B, H, S, D), last stride 1, of some of the B * H heads in cell order: (heads * S, D padded), 0 past D."""
    per_batch, length, dim = x.shape[1:]
    rows = x.new_empty(len(heads), length, padded(dim))
    for b in range(heads.start // per_batch, (heads.stop - 1) // per_batch + 1):
        some = range(max(heads.start, b * per_batch), min(heads.stop, (b + 1) * per_batch))
        part = rows[some.start - heads.start : some.stop - heads.start]
        gather_into(x[b], cells, slice(some.start - b * per_batch, some.stop - b * per_batch), part, part, padded(dim), 0, padded(dim))
    return rows.flatten(0, 1)


def source(rows: Tensor, tile: int, by_descriptor: bool):
    """What a kernel reads laid out rows from."""
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [tile, rows.shape[1]]) if by_descriptor else rows


@triton.jit
def load_queries(q, at, live, q_token, D: tl.constexpr, D_PADDED: tl.constexpr):
    """The group's rows of one head's q, [128, D_PADDED]; 0 past D and in rows that are not live."""
    d = tl.arange(0, D_PADDED)
    mask = live[:, None] if D == D_PADDED else live[:, None] & (d < D)[None, :]
    return tl.load(q + at[:, None] * q_token + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_tile(x, head, start, length, D_PADDED: tl.constexpr, TILE: tl.constexpr, DESCRIBED: tl.constexpr):
    """TILE rows of laid out keys or values, [TILE, D_PADDED], from place `start` of a head on; past the head's end something finite."""
    if DESCRIBED:
        tile = x.load([head * length + start, 0])  # the next head's rows, or 0
    else:
        place = tl.minimum(start + tl.arange(0, TILE), length - 1)
        row = head.to(tl.int64) * length + place
        tile = tl.load(x + row[:, None] * D_PADDED + tl.arange(0, D_PADDED)[None, :])
    return tile


@triton.jit
def store_masses(mass, total, start, length, live, PER_BIT: tl.constexpr, TILE: tl.constexpr):
    """Stores the masses of the keys from place `start` on, [TILE], or of their cells, in a row that is live."""
    place = start + tl.arange(0, TILE)
    if PER_BIT == 1:
        tl.store(mass + place, total, mask=(place >= 0) & (place < length) & live)
    else:
        total = tl.sum(tl.reshape(tl.where(place < length, total, 0.0), (TILE // PER_BIT, PER_BIT)), 1)
        place = start + PER_BIT * tl.arange(0, TILE // PER_BIT)
        tl.store(mass + place // PER_BIT, total, mask=(place >= 0) & (place < length) & live)


@triton.jit
def _group(
    q, lse, members, group, groups, head, heads, q_length,
    q_batch, q_head, q_token, members_batch, members_head, D: tl.constexpr, D_PADDED: tl.constexpr,
):  # fmt: skip
    """Of one group of a head: its q transposed [D_PADDED, 128], and its lse to base 2 [128], infinite where there is no query to count."""
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    i = tl.arange(0, 128)
    token = tl.load(members + b * members_batch + h * members_head + group * 128 + i, mask=(group < groups) & (i >= 0), other=-1)
    live = token >= 0
    at = tl.where(live, token, 0).to(tl.int64)
    queries = tl.trans(operand(load_queries(q + b * q_batch + h * q_head, at, live, q_token, D, D_PADDED)))
    shift = tl.load(lse + head.to(tl.int64) * q_length + at) * 1.4426950408889634
    return queries, tl.where(live & (shift > float("-inf")), shift, float("inf"))  # exp2(-inf) = 0: they add no mass


@triton.jit(do_not_specialize=["first_program", "first_row", "first_head", "heads", "groups", "q_length", "k_length"])
def mass_kernel(
    q, k, lse, members, mass,
    first_program, first_row, first_head, heads, groups, q_length, k_length, width, scale,  # scale: of exponents to base 2
    q_batch, q_head, q_token, members_batch, members_head,
    D: tl.constexpr, D_PADDED: tl.constexpr, TILE: tl.constexpr, PER_BIT: tl.constexpr,
    DESCRIBED: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Masses of all units for one group a program, or for two neighbours (PAIR), which halves the reading of k.

    Scores are computed transposed, keys by queries, so that the sum over the group's queries stays inside a thread but for two
    shuffles. On Hopper a product runs beside the exponentials of the one before: its exponents are carried through the loop. There
    is no code behind the loop, for the compiler would merge its exponentials with those inside and take the overlap away.
    """
    each: tl.constexpr = 2 if PAIR else 1
    program = first_program + tl.program_id(0)
    programs_each = tl.cdiv(groups, each)  # of a head
    head = program // programs_each
    group = program % programs_each * each
    queries, shift = _group(
        q, lse, members, group, groups, head, heads, q_length, q_batch, q_head, q_token, members_batch, members_head, D, D_PADDED
    )
    row = mass + (head * groups + group - first_row).to(tl.int64) * width
    head_here = head - first_head
    if not DESCRIBED:
        for start in range(0, k_length, TILE):
            tile = operand(load_tile(k, head_here, start, k_length, D_PADDED, TILE, DESCRIBED))
            total = tl.sum(tl.exp2(tl.dot(tile, queries) * scale - shift[None, :]), 1)
            store_masses(row, total, start, k_length, True, PER_BIT, TILE)
    else:
        last_row = row
        is_there = True
        if PAIR:
            queries_2, shift_2 = _group(
                q, lse, members, group + 1, groups, head, heads, q_length, q_batch, q_head, q_token, members_batch, members_head,
                D, D_PADDED,
            )  # fmt: skip
            last_row += width
            is_there = group + 1 < groups
        exponents = tl.full([TILE, 128], float("-inf"), tl.float32)
        for start in range(0, k_length + TILE, TILE):
            tile = operand(load_tile(k, head_here, start, k_length, D_PADDED, TILE, DESCRIBED))
            scores = tl.dot(tile, queries)
            store_masses(last_row, tl.sum(tl.exp2(exponents), 1), start - TILE, k_length, is_there, PER_BIT, TILE)
            exponents = scores * scale - shift[None, :]
            if PAIR:
                scores = tl.dot(tile, queries_2)
                store_masses(row, tl.sum(tl.exp2(exponents), 1), start, k_length, True, PER_BIT, TILE)
                exponents = scores * scale - shift_2[None, :]
