"""Exact selection with the masses by the Hopper kernel, which ships compiled (cute_sm90_mass.py, scripts/build_mass_cubins.py).

Keys are laid out in cell order, in tiles as the kernel wants them in shared memory; it computes the masses of some rows, and the heaviest
of these rows are chosen as by triton_select.py.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import cubin, triton_support
from ..shapes import GRANULARITIES, GROUP_SIZE, CellOrder, Geometry, KeySelection, QueryGroups, ceil_div
from .triton_heaviest import Choice, Piece

NAME = "hopper"
CUBINS = Path(__file__).with_name("cubins")
# Which cubin runs a dtype and head dim.
CHOSEN = {
    (torch.bfloat16, 128): "mass_bf16_d128_s4",
    (torch.float16, 128): "mass_fp16_d128_s4",
    (torch.bfloat16, 64): "mass_bf16_d64_s8",
    (torch.float16, 64): "mass_fp16_d64_s8",
}
GROUPS = 2  # of a program
TILE = 128  # keys


def why_not(geometry: Geometry) -> str | None:
    """None when the Hopper kernel can run this geometry: sm_90, 16-bit, head dim 64 or 128, and Triton for the choice."""
    if geometry.device_type != "cuda" or geometry.capability != (9, 0):
        return "is compiled for Hopper GPUs (compute capability 9.0)"
    if (geometry.dtype, geometry.head_dim) not in CHOSEN:
        return f"takes bfloat16 and float16 with head dims 64 and 128, not {geometry.dtype} with {geometry.head_dim}"
    return cubin.why_not([CUBINS / CHOSEN[geometry.dtype, geometry.head_dim]]) or triton_support.why_not(geometry)


def select_keys(
    q: Tensor, k: Tensor, lse: Tensor, groups: QueryGroups, density: float,
    cells: CellOrder, granularity: str, kept: tuple[tuple[int, int], ...], scale: float,
) -> KeySelection:
    """As the reference."""
    choice = Choice.of(q, k, groups, density, cells, granularity, kept)
    if choice.is_everything:
        return choice.everything(lse, groups)
    return choice.heaviest(Masses.of(q, k, lse, groups, cells, granularity, scale))


@dataclass(frozen=True, eq=False)
class Masses:
    """As triton_heaviest.Masses, made once per call."""

    kernel: cubin.Kernel
    q: Tensor  # (B, H, Sq, D)
    k: Tensor  # (B, H, Sk, D)
    lse: Tensor  # (B, H, Sq) float32, contiguous
    members: Tensor  # (B, H, G*C) int32, a view: the groups' order
    cells: CellOrder
    granularity: str
    scale: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, lse: Tensor, groups: QueryGroups, cells: CellOrder, granularity: str, scale: float) -> Masses:
        one = cubin.kernel(CUBINS / CHOSEN[q.dtype, q.shape[3]], q.device.index)
        return cls(one, cubin.aligned(q), cubin.aligned(k), lse.contiguous(), groups.expanded(*q.shape[:2]), cells, granularity, scale)

    @property
    def groups_each(self) -> int:
        return GROUPS

    @property
    def key_bytes(self) -> int:
        return ceil_div(self.k.shape[2], TILE) * TILE * self.k.shape[3] * self.k.element_size()

    def compute(self, piece: Piece, out: Tensor) -> None:
        self.launch(piece, in_tiles(self.k, self.cells, piece.heads), out)

    def launch(self, piece: Piece, tiles: Tensor, out: Tensor) -> None:
        q, members = self.q, self.members
        self.kernel.launch(
            len(piece.programs), torch.cuda.current_stream(q.device).cuda_stream,
            q=q, keys=tiles, lse=self.lse, members=members, mass=out,
            q_batch=q.stride(0), q_head=q.stride(1), q_token=q.stride(2), members_batch=members.stride(0), members_head=members.stride(1),
            first_program=piece.programs.start, first_row=piece.rows.start, first_head=piece.heads.start, heads=q.shape[1],
            groups=members.shape[2] // GROUP_SIZE, q_length=q.shape[2], k_length=self.k.shape[2], width=out.stride(0),
            in_cells=int(GRANULARITIES[self.granularity] > 1), scale=self.scale * math.log2(math.e),
        )  # fmt: skip


def in_tiles(x: Tensor, cells: CellOrder, heads: range) -> Tensor:
    """Rows of x (B, H, S, D), last stride 1, of some of the B * H heads in cell order: (heads, tiles, TILE * D), 0 past the end.

    The order inside a tile is that of `swizzle`.
    """
    per_batch, length, dim = x.shape[1:]
    tiles = x.new_empty(len(heads), ceil_div(length, TILE), TILE * dim)
    for b in range(heads.start // per_batch, (heads.stop - 1) // per_batch + 1):
        some = range(max(heads.start, b * per_batch), min(heads.stop, (b + 1) * per_batch))
        part = tiles[some.start - heads.start : some.stop - heads.start]
        swizzle[(len(some), tiles.shape[1])](
            x[b], cells.order, part, *x.stride()[1:3], length, some.start - b * per_batch, D=dim, TILE=TILE
        )
    return tiles


@triton.jit(do_not_specialize=["length", "first"], do_not_specialize_on_alignment=["order"])
def swizzle(x, order, tiles, x_h, x_s, length, first, D: tl.constexpr, TILE: tl.constexpr):
    """One tile of one head of x (H, S, D): TILE places of the cell order.

    A tile is D / 64 blocks of 64 columns; in a block each row is 128 bytes, whose 16-byte pieces are permuted by (piece ^ row % 8).
    """
    here = tl.program_id(0).to(tl.int64)  # heads vary fastest: their rows are neighbours where the model keeps (B, S, H, D)
    row = tl.arange(0, TILE)[:, None, None]
    piece = tl.arange(0, D // 8)[None, :, None]
    column = tl.arange(0, 8)[None, None, :]
    place = tl.program_id(1) * TILE + row
    live = place < length
    token = tl.load(order + place, mask=live, other=0)
    values = tl.load(x + (first + here) * x_h + token * x_s + piece * 8 + column, mask=live, other=0)
    to = piece // 8 * (TILE * 64) + row * 64 + ((piece % 8) ^ (row % 8)) * 8 + column
    tl.store(tiles + (here * tl.num_programs(1) + tl.program_id(1)) * (TILE * D) + to, values)
