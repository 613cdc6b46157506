"""What the Hopper selection does around its masses, in PyTorch: keys laid out in tiles, and the choice of the heaviest.

For machines without Triton (triton_steps.py); the choice is the same to the bit.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..chunks import chunks
from ..shapes import GRANULARITIES, CellOrder, ceil_div
from . import heaviest
from .bits import pack_bits

TILE = 128  # keys
PIECE = 8  # elements of 16 bits that lie together
UNIT_BYTES = 24  # temporary, for each unit of a row: its weight in 64 bits, and those of the heaviest with their places


@dataclass(frozen=True, eq=False)
class Choice(heaviest.Choice):
    """As heaviest.Choice, some rows at a time, without waiting for the device."""

    @property
    def scratch_bytes(self) -> int:
        return 0  # bounded by itself

    def choose(self, rows: range, masses: Tensor) -> None:
        selection, units, per_bit = self.selection, self.units, GRANULARITIES[self.selection.granularity]
        bits, counts, retained = (x.flatten(0, 2)[rows.start : rows.stop] for x in (selection.bits, selection.counts, selection.retained))
        token = selection.cells.order if per_bit == 1 else torch.arange(units, device=masses.device)
        missing = units * per_bit - len(selection.cells)  # keys of the last cell
        for some in chunks(len(rows), UNIT_BYTES * units, masses.device):
            mass = masses[some.start : some.stop, :units]
            chosen = self._heaviest(mass, units - 1 - token)
            bits[some] = pack_bits(chosen)
            counts[some] = (self.budget + units - self.free) * per_bit - missing * chosen[:, -1].int()
            retained[some] = torch.where(chosen, mass, 0.0).sum(1) / mass.sum(1).clamp_min(torch.finfo(torch.float32).tiny)

    def _heaviest(self, mass: Tensor, before: Tensor) -> Tensor:
        """The chosen and the kept units of rows of mass (n, units), bool. before (units,) int64: what decides between equal ones.

        Masses are not negative, so their bits as integers are in their order; with `before` as lower half no two weights are equal.
        """
        weight = torch.add(before, mass.view(torch.int32), alpha=1 << 32)
        if self.always is not None:
            weight.masked_fill_(self.always, torch.iinfo(weight.dtype).min)
        if self.budget == 0:
            chosen = torch.zeros_like(weight, dtype=torch.bool)
        else:
            chosen = weight >= weight.topk(self.budget, sorted=False).values.amin(1, keepdim=True)
        return chosen if self.always is None else chosen | self.always


def in_tiles(x: Tensor, cells: CellOrder, heads: range) -> Tensor:
    """Rows of x (B, H, S, D), last stride 1, of some of the B * H heads in cell order: (heads, tiles, TILE * D), 0 past the end.

    A tile is D / 64 blocks of 64 columns; in a block each row is 128 bytes, whose 16-byte pieces are permuted by (piece ^ row % 8).
    """
    per_batch, length, dim = x.shape[1:]
    tiles = ceil_div(length, TILE)
    rows = x.new_zeros(len(heads), tiles * TILE, dim)
    for here, head in enumerate(heads):
        torch.index_select(x[head // per_batch, head % per_batch], 0, cells.order, out=rows[here, :length])
    pieces = rows.view(len(heads), tiles, TILE * dim).view(torch.complex128)  # only for its 16 bytes
    return pieces.index_select(2, _places(dim, x.device)).view(x.dtype)


def _places(dim: int, device: torch.device) -> Tensor:
    """Of each piece of a tile its number in rows that are not permuted, (TILE * D / PIECE,) int64."""
    block = torch.arange(dim // 64, device=device)[:, None, None]
    row = torch.arange(TILE, device=device)[:, None]
    piece = torch.arange(8, device=device)
    return (row * (dim // PIECE) + block * 8 + (piece ^ row % 8)).flatten()
