"""The choice of the heaviest units (keys, or cells of 32) of rows of masses: what its ways of computing, Triton and PyTorch, share."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..shapes import GRANULARITIES, CellOrder, KeySelection, QueryGroups, ceil_div, key_budget
from .bits import WORD
from .reference import _units_kept

SCRATCH_BYTES = 640 << 20  # masses, what choosing needs beside them and laid out keys that exist at one time
# The mass kernels run 1, 2, 3 or 6 programs at once on a multiprocessor; pieces of this many for each leave none idle at their end.
PROGRAMS_PER_MULTIPROCESSOR = 6
ROW_MULTIPLE = 32  # rows of masses are padded to it, so that they begin at whole cache lines


def row_width(units: int) -> int:
    return ceil_div(units, ROW_MULTIPLE) * ROW_MULTIPLE


class Piece(NamedTuple):
    """What one launch of a mass kernel covers: consecutive programs, rows (groups of all heads) and heads (of all batch rows)."""

    programs: range
    rows: range
    heads: range


class Masses(Protocol):
    """A mass kernel with its arguments. groups_each: of one program; key_bytes: of one head's keys, laid out."""

    groups_each: int
    key_bytes: int

    def compute(self, piece: Piece, out: Tensor) -> None:
        """Masses of the units of some rows, (rows, width); columns past the units are left as they are."""


def pieces(choice: Choice, groups_each: int, key_bytes: int) -> Iterator[tuple[Piece, Tensor]]:
    """(piece, memory (its rows, row_width(units)) float32 for their masses) until all rows are covered; the memory is reused.

    groups_each: of one head for one program; the last program of a head may have fewer. key_bytes: of one head's keys, laid out.
    """
    groups, heads = choice.selection.counts.shape[-1], choice.rows // choice.selection.counts.shape[-1]
    programs_each, device = ceil_div(groups, groups_each), choice.selection.counts.device
    width = row_width(choice.units)
    row_bytes = 4 * width + choice.scratch_bytes + key_bytes // groups
    at_once = max(1, SCRATCH_BYTES // (row_bytes * groups_each))
    if device.type == "cuda":
        full = PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        at_once = at_once // full * full or at_once
    programs = heads * programs_each
    memory = torch.empty((min(choice.rows, at_once * groups_each), width), dtype=torch.float32, device=device)
    for first in range(0, programs, at_once):
        some = range(first, min(programs, first + at_once))
        rows = range(*(p // programs_each * groups + p % programs_each * groups_each for p in (some.start, some.stop)))
        piece = Piece(some, rows, range(some.start // programs_each, (some.stop - 1) // programs_each + 1))
        yield piece, memory[: len(rows)]


@dataclass(frozen=True, eq=False)
class Choice(ABC):
    """A KeySelection that is filled in rows; a row is one group of one head of one batch row, in that order."""

    selection: KeySelection
    budget: int  # units to choose of those that are free
    free: int
    always: Tensor | None  # (units,) bool: whether the unit holds a kept key

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, groups: QueryGroups, density: float,
        cells: CellOrder, granularity: str, kept: tuple[tuple[int, int], ...], **more,
    ) -> Choice:  # fmt: skip
        """Of q (B, H, Sq, D) and k (B, H, Sk, D). more: fields of a subclass."""
        per_bit = GRANULARITIES[granularity]
        shape = (*q.shape[:2], groups.count)
        bits = torch.empty((*shape, ceil_div(ceil_div(k.shape[2], per_bit), WORD)), dtype=torch.int32, device=q.device)
        counts = torch.empty(shape, dtype=torch.int32, device=q.device)
        retained = torch.empty(shape, dtype=torch.float32, device=q.device)
        always = _units_kept(kept, cells, per_bit) if kept else None
        budget, free = _budget(density, cells, per_bit, kept, always)
        return cls(KeySelection(bits, counts, retained, granularity, cells), budget, free, always, **more)

    @property
    def rows(self) -> int:
        return self.selection.counts.numel()

    @property
    def units(self) -> int:
        """Of one row: keys or cells."""
        return ceil_div(len(self.selection.cells), GRANULARITIES[self.selection.granularity])

    @property
    @abstractmethod
    def scratch_bytes(self) -> int:
        """Memory that a row takes from its masses to its choice, beside them."""

    @property
    def is_everything(self) -> bool:
        return self.budget == self.free

    def everything(self, lse: Tensor, groups: QueryGroups) -> KeySelection:
        """Every unit for every group; groups without a query whose lse (B, H, Sq) is above -inf have no mass to retain."""
        selection = self.selection
        selection.bits.fill_(-1)
        if self.units % WORD:
            selection.bits[..., -1] = (1 << self.units % WORD) - 1
        selection.counts.fill_(len(selection.cells))
        members = groups.expanded(*lse.shape[:2]).long()
        with_mass = (lse > float("-inf")).gather(2, members.clamp(min=0)) & (members >= 0)
        selection.retained.copy_(with_mass.unflatten(2, (groups.count, -1)).any(-1))
        return selection

    def heaviest(self, masses: Masses) -> KeySelection:
        """The heaviest units of every group."""
        for piece, memory in pieces(self, masses.groups_each, masses.key_bytes):
            masses.compute(piece, memory)
            self.choose(piece.rows, memory)
        return self.selection

    @abstractmethod
    def choose(self, rows: range, masses: Tensor) -> None:
        """Fills the selection of `rows` by masses (len(rows), row_width(units)) float32 of the units in cell order.

        Chosen are the `budget` heaviest free units, of equal ones those of the lower token (or cell); NaN is heavier than any number.
        """


def _budget(density: float, cells: CellOrder, per_bit: int, kept: tuple[tuple[int, int], ...], always: Tensor | None) -> tuple[int, int]:
    """How many units each group chooses, and of how many: those that are not always selected."""
    if per_bit > 1 and always is not None:
        # Which cells hold a kept key is known only to the order, so this reads the device.
        sizes = cells.sizes(per_bit)[~always]
        free, free_keys = sizes.numel(), int(sizes.sum())
    else:
        free_keys = len(cells) - sum(stop - start for start, stop in kept)
        free = ceil_div(free_keys, per_bit)
    return free if density >= 1 else min(free, ceil_div(key_budget(density, free_keys), per_bit)), free
