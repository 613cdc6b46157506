"""Exact selection with the masses by the Hopper kernel, which ships compiled (cute_sm90_mass.py, scripts/build_mass_cubins.py).

Keys are laid out in cell order, in tiles as the kernel wants them in shared memory; it computes the masses of some rows, and the heaviest
of these rows are chosen as by triton_select.py. Both steps are in Triton where it can run, else in PyTorch.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from .. import cubin
from ..registry import load
from ..shapes import GRANULARITIES, GROUP_SIZE, CellOrder, Geometry, KeySelection, QueryGroups, ceil_div
from . import torch_steps
from .heaviest import Piece
from .torch_steps import TILE

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


def why_not(geometry: Geometry) -> str | None:
    """None when the Hopper kernel can run this geometry: sm_90, 16-bit, head dim 64 or 128."""
    if geometry.device_type != "cuda" or geometry.capability != (9, 0):
        return "is compiled for Hopper GPUs (compute capability 9.0)"
    if (geometry.dtype, geometry.head_dim) not in CHOSEN:
        return f"takes bfloat16 and float16 with head dims 64 and 128, not {geometry.dtype} with {geometry.head_dim}"
    return cubin.why_not([CUBINS / CHOSEN[geometry.dtype, geometry.head_dim]])


def steps(geometry: Geometry) -> ModuleType:
    """The module of the steps around the masses: Triton's where it can run, else PyTorch's."""
    fast, _ = load(".selection.triton_steps")
    return torch_steps if fast is None or fast.why_not(geometry) is not None else fast


def select_keys(
    q: Tensor, k: Tensor, lse: Tensor, groups: QueryGroups, density: float,
    cells: CellOrder, granularity: str, kept: tuple[tuple[int, int], ...], scale: float,
) -> KeySelection:
    """As the reference."""
    around = steps(Geometry.of(q, k))
    choice = around.Choice.of(q, k, groups, density, cells, granularity, kept)
    if choice.is_everything:
        return choice.everything(lse, groups)
    return choice.heaviest(Masses.of(q, k, lse, groups, cells, granularity, scale, around.in_tiles))


@dataclass(frozen=True, eq=False)
class Masses:
    """As heaviest.Masses, made once per call."""

    kernel: cubin.Kernel
    q: Tensor  # (B, H, Sq, D)
    k: Tensor  # (B, H, Sk, D)
    lse: Tensor  # (B, H, Sq) float32, contiguous
    members: Tensor  # (B, H, G*C) int32, a view: the groups' order
    cells: CellOrder
    granularity: str
    scale: float
    in_tiles: Callable[[Tensor, CellOrder, range], Tensor]  # of `steps`

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, lse: Tensor, groups: QueryGroups, cells: CellOrder, granularity: str, scale: float,
        in_tiles: Callable[[Tensor, CellOrder, range], Tensor],
    ) -> Masses:  # fmt: skip
        one, members = cubin.kernel(CUBINS / CHOSEN[q.dtype, q.shape[3]], q.device.index), groups.expanded(*q.shape[:2])
        return cls(one, cubin.aligned(q), cubin.aligned(k), lse.contiguous(), members, cells, granularity, scale, in_tiles)

    @property
    def groups_each(self) -> int:
        return GROUPS

    @property
    def key_bytes(self) -> int:
        return ceil_div(self.k.shape[2], TILE) * TILE * self.k.shape[3] * self.k.element_size()

    def compute(self, piece: Piece, out: Tensor) -> None:
        self.launch(piece, self.in_tiles(self.k, self.cells, piece.heads), out)

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
