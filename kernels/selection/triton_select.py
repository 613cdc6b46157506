"""Exact selection in two kernels: the mass of every key for every group, then the heaviest of each group (triton_heaviest.py)."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import triton_support
from ..launch import Launch, card, launch
from ..shapes import GROUP_SIZE, CellOrder, Geometry, KeySelection, QueryGroups
from ..triton_support import INTERPRETED, NAME, half, operand, padded
from .triton_heaviest import Choice, row_width, scratch_rows

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

__all__ = ["NAME", "select_keys", "why_not"]


@dataclass(frozen=True)
class Variant:
    """How the masses are computed.

    described: K arrives in token order through a tensor descriptor (TMA) and the masses are written to their places, else K is
    gathered in cell order by pointers. polynomial: of 8 exponentials, how many (0, 2 or 4) are a polynomial on the FMA units
    (relative error 1e-4) instead of the special function unit.
    """

    described: bool = False
    polynomial: int = 0


PLAIN = Variant()
# What runs by card; the other variants are for benchmarks/bench_selection.py --tune. Hopper never gathers: before Triton 3.7 cp.async
# is not fenced from wgmma (triton_support.needs_fence).
VARIANTS = {"hopper": Variant(described=True)}


def why_not(geometry: Geometry) -> str | None:
    if TensorDescriptor is None and VARIANTS.get(card(geometry.capability), PLAIN).described:
        return f"needs Triton 3.4 or newer on this card, this is {triton.__version__}"
    return triton_support.why_not(geometry)


def select_keys(
    q: Tensor, k: Tensor, lse: Tensor, groups: QueryGroups, density: float,
    cells: CellOrder, granularity: str, kept: tuple[tuple[int, int], ...], scale: float,
) -> KeySelection:
    with torch.cuda.device_of(q):
        choice = Choice.of(q, k, groups, density, cells, granularity, kept)
        masses = Masses.of(q, k, lse, groups, cells, scale)
        for rows, scratch in scratch_rows(choice.rows, len(cells), q.device):
            masses.compute(rows, scratch)
            choice.choose(rows, scratch)
    return choice.selection


@dataclass(frozen=True, eq=False)
class Masses:
    """Arguments of the mass kernel, made once per call."""

    q: Tensor
    k: Tensor
    lse: Tensor  # (B, H, Sq) float32, contiguous
    members: Tensor  # (B, H, G*C) int32, a view: the groups' order
    keys: Tensor  # (width,) int32: tokens in cell order, or places in token order, padded
    scale: float
    variant: Variant
    launch: Launch

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, lse: Tensor, groups: QueryGroups, cells: CellOrder, scale: float,
        variant: Variant | None = None, parameters: Launch | None = None,
    ) -> Masses:
        q, k = half(q), half(k)
        capability = Geometry.of(q, k).capability
        parameters = parameters or launch("mass", padded(q.shape[3]), capability)
        variant = variant or VARIANTS.get(card(capability), PLAIN)
        if variant.described:
            k = describable(k)
        members = groups.expanded(q.shape[0], q.shape[1])
        keys = key_numbers(cells, variant.described)
        return cls(q, k, lse.float().contiguous(), members, keys, scale * math.log2(math.e), variant, parameters)

    def compute(self, rows: range, out: Tensor) -> None:
        """Masses of some rows (len(rows), width) in cell order; columns past the keys become 0."""
        q, k, dim = self.q, self.k, padded(self.q.shape[3])
        described, tile = self.variant.described, self.launch.tile
        mass_kernel[(len(rows),)](
            q, TensorDescriptor(k, k.shape, k.stride(), [1, 1, tile, dim]) if described else k,
            self.lse, self.members, self.keys, out,
            rows.start, q.shape[1], self.members.shape[2] // GROUP_SIZE, q.shape[2], k.shape[2], out.stride(0), self.scale,
            *q.stride()[:3], *k.stride()[:3], *self.members.stride()[:2],
            q.shape[3], dim, tile, described, 0 if INTERPRETED else self.variant.polynomial, **self.launch.options,
        )  # fmt: skip


def key_numbers(cells: CellOrder, described: bool) -> Tensor:
    """(row_width,) int32: the token at each place, then 0, a row that exists; described: the place of each token, then on as the tokens."""
    width = row_width(len(cells))
    numbers = torch.arange(width, dtype=torch.int32, device=cells.order.device) if described else cells.order.new_zeros(width).int()
    numbers[: len(cells)] = cells.place if described else cells.order
    return numbers


def describable(x: Tensor) -> Tensor:
    """x (B, H, S, D), last stride 1, as it is where a tensor descriptor can be made of it, else a copy with aligned rows."""
    unit = 16 // x.element_size()  # descriptors want 16-byte alignment of the first element and of every stride
    if x.data_ptr() % 16 == 0 and all(stride > 0 and stride % unit == 0 for stride in x.stride()[:3]):
        return x
    rows = x.new_empty((*x.shape[:3], -(-x.shape[3] // unit) * unit))
    return rows[..., : x.shape[3]].copy_(x)


@triton.jit
def load_queries(q, at, live, q_token, D: tl.constexpr, D_PADDED: tl.constexpr):
    """The group's rows of one head's q, [128, D_PADDED]; 0 past D and in rows that are not live."""
    d = tl.arange(0, D_PADDED)
    mask = live[:, None] if D == D_PADDED else live[:, None] & (d < D)[None, :]
    return tl.load(q + at[:, None] * q_token + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_tile(x, b, h, start, key, x_token, D: tl.constexpr, D_PADDED: tl.constexpr, TILE: tl.constexpr, DESCRIBED: tl.constexpr):
    """TILE rows of k or v, [TILE, D_PADDED], 0 past D: by descriptor the tokens from `start` on, else the rows `key` of the head x."""
    d = tl.arange(0, D_PADDED)
    if DESCRIBED:
        tile = tl.reshape(x.load([b.to(tl.int32), h.to(tl.int32), start, 0]), (TILE, D_PADDED))
    elif D == D_PADDED:
        tile = tl.load(x + key.to(tl.int64)[:, None] * x_token + d[None, :])
    else:
        tile = tl.load(x + key.to(tl.int64)[:, None] * x_token + d[None, :], mask=(d < D)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["first_row", "heads", "groups", "q_length", "k_length"])
def mass_kernel(
    q, k, lse, members, keys, mass,
    first_row, heads, groups, q_length, k_length, width, scale,  # scale: of exponents to base 2
    q_batch, q_head, q_token, k_batch, k_head, k_token, members_batch, members_head,
    D: tl.constexpr, D_PADDED: tl.constexpr, TILE: tl.constexpr, DESCRIBED: tl.constexpr, POLYNOMIAL: tl.constexpr,
):  # fmt: skip
    """Masses of all keys for one group a program.

    Scores are computed transposed, keys by queries, so that the sum over the group's queries stays inside a thread but for
    two shuffles.
    """
    row = first_row + tl.program_id(0)
    head = row // groups
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    token = tl.load(members + b * members_batch + h * members_head + row % groups * 128 + tl.arange(0, 128))  # [128], -1: none
    live = token >= 0
    at = tl.where(live, token, 0).to(tl.int64)
    queries = tl.trans(operand(load_queries(q + b * q_batch + h * q_head, at, live, q_token, D, D_PADDED)))
    shift = tl.load(lse + head.to(tl.int64) * q_length + at) * 1.4426950408889634
    shift = tl.where(live & (shift > float("-inf")), shift, float("inf"))  # exp2(-inf) = 0: these queries add no mass

    mass += tl.program_id(0).to(tl.int64) * width
    if not DESCRIBED:
        k += b * k_batch + h * k_head
    for start in range(0, k_length, TILE):
        column = start + tl.arange(0, TILE)
        key = tl.load(keys + column)  # [TILE]
        tile = load_tile(k, b, h, start, key, k_token, D, D_PADDED, TILE, DESCRIBED)
        exponents = tl.dot(operand(tile), queries) * scale - shift[None, :]  # [TILE, 128]
        if POLYNOMIAL == 0:
            total = tl.sum(tl.exp2(exponents), 1)
        else:
            total = tl.sum(_exp2(exponents, POLYNOMIAL), 1)
            total = tl.where(total < 1e-30, 0.0, total)  # the polynomial's exp2(-inf) is 1e-38
        total = tl.where(column < k_length, total, 0.0)
        tl.store(mass + (key if DESCRIBED else column), total)


# 2**x, x <= 64 say: round x to n + f, a cubic for 2**f (relative error 7.6e-5), n into the exponent bits.
_COEFFICIENTS = (0.9999280735567418, 0.6932609858003214, 0.24261112205233143, 0.055171667217711204)
_CUBIC = """
    max.f32 x, {x}, 0fC2FC0000;
    add.rn.f32 t, x, 0f4B400000;
    sub.rn.f32 n, t, 0f4B400000;
    sub.rn.f32 x, x, n;
    fma.rn.f32 p, x, 0f{c3}, 0f{c2};
    fma.rn.f32 p, p, x, 0f{c1};
    fma.rn.f32 p, p, x, 0f{c0};
    mov.b32 i, p;
    mov.b32 j, t;
    shl.b32 j, j, 23;
    add.s32 i, i, j;
    mov.b32 {y}, i;
"""


def _float_bits(x: float) -> str:
    return f"{torch.tensor(x, dtype=torch.float32).view(torch.int32).item() & 0xFFFFFFFF:08X}"


def _exp2_assembly(polynomial: int) -> str:
    """exp2 of 8 values: those a thread holds of two adjacent columns, twice for two rows each, so both rows are treated alike."""
    cubic = {f"c{i}": _float_bits(c) for i, c in enumerate(_COEFFICIENTS)}
    by_cubic = {2: (1, 3), 4: (1, 3, 5, 7)}[polynomial]
    lines = ["{ .reg .f32 x, t, n, p; .reg .b32 i, j;"]
    for i in range(8):
        lines.append(_CUBIC.format(x=f"${8 + i}", y=f"${i}", **cubic) if i in by_cubic else f"ex2.approx.ftz.f32 ${i}, ${8 + i};")
    return "\n".join([*lines, "}"])


_EXP2_OF_2 = tl.constexpr(_exp2_assembly(2))
_EXP2_OF_4 = tl.constexpr(_exp2_assembly(4))


@triton.jit
def _exp2(x, POLYNOMIAL: tl.constexpr):
    """2**x, of every 8 values POLYNOMIAL by a polynomial."""
    assembly: tl.constexpr = _EXP2_OF_2 if POLYNOMIAL == 2 else _EXP2_OF_4
    return tl.inline_asm_elementwise(assembly, "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f", [x], dtype=tl.float32, is_pure=True, pack=8)
