"""The heaviest units (keys, or cells of 32) of rows of masses, as the bits, counts and retained mass of a KeySelection.

One program a row: a sample of the row brackets the threshold between two masses; one pass over the row writes the bits of what lies
above and collects what lies between; the threshold is found among those exactly and their bits are added. A row whose bracket missed
(1 in 10000), or holds more than fits as equal masses do, is searched by bisection over the whole row.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, launch
from ..shapes import GRANULARITIES, CellOrder, Geometry, KeySelection, QueryGroups, ceil_div, key_budget
from ..triton_support import popcount
from .bits import WORD
from .reference import _units_kept

SCRATCH_BYTES = 640 << 20  # masses, candidates and laid out keys that exist at one time
# The mass kernels run 1, 2, 3 or 6 programs at once on a multiprocessor; pieces of this many for each leave none idle at their end.
PROGRAMS_PER_MULTIPROCESSOR = 6
ROW_MULTIPLE = 32  # rows of masses are padded to it, so that they begin at whole cache lines
ROOM = 2  # candidates that a row can have, in samples
SIGMAS = 4  # half width of the bracket in standard deviations of the sample's rank
LONG = 24  # units for one in the sample, beyond which the sample is doubled so that the candidates fit (to 360000 units at any density)
PER_THREAD = 8  # units of a step of the pass over the row
MOST = tl.constexpr(0x7FFFFFFF)


def row_width(units: int) -> int:
    return ceil_div(units, ROW_MULTIPLE) * ROW_MULTIPLE


class Piece(NamedTuple):
    """What one launch of a mass kernel covers: consecutive programs, rows (groups of all heads) and heads (of all batch rows)."""

    programs: range
    rows: range
    heads: range


def pieces(choice: Choice, groups_each: int, key_bytes: int) -> Iterator[tuple[Piece, Tensor]]:
    """(piece, memory (its rows, row_width(units)) float32 for their masses) until all rows are covered; the memory is reused.

    groups_each: of one head for one program; the last program of a head may have fewer. key_bytes: of one head's keys, laid out.
    """
    groups, heads = choice.selection.counts.shape[-1], choice.rows // choice.selection.counts.shape[-1]
    programs_each, device = ceil_div(groups, groups_each), choice.selection.counts.device
    width = row_width(choice.units)
    row_bytes = 4 * width + 8 * ROOM * choice.parameters.tile + key_bytes // groups
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
class Choice:
    """A KeySelection that is filled in rows; a row is one group of one head of one batch row, in that order."""

    selection: KeySelection
    budget: int  # units to choose of those that are free
    free: int
    always: Tensor | None  # (units,) int8: 1 where the unit holds a kept key
    parameters: Launch

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, groups: QueryGroups, density: float,
        cells: CellOrder, granularity: str, kept: tuple[tuple[int, int], ...], parameters: Launch | None = None,
    ) -> Choice:
        per_bit = GRANULARITIES[granularity]
        units = ceil_div(k.shape[2], per_bit)
        shape = (*q.shape[:2], groups.count)
        bits = torch.empty((*shape, ceil_div(units, WORD)), dtype=torch.int32, device=q.device)
        counts = torch.empty(shape, dtype=torch.int32, device=q.device)
        retained = torch.empty(shape, dtype=torch.float32, device=q.device)
        always = _units_kept(kept, cells, per_bit) if kept else None
        budget, free = _budget(density, cells, per_bit, kept, always)
        parameters = parameters or launch("heaviest", 64, Geometry.of(q, k).capability)
        if units > LONG * parameters.tile:
            parameters = parameters._replace(tile=2 * parameters.tile, warps=2 * parameters.warps)
        always = None if always is None else always.to(torch.int8)
        return cls(KeySelection(bits, counts, retained, granularity, cells), budget, free, always, parameters)

    @property
    def rows(self) -> int:
        return self.selection.counts.numel()

    @property
    def units(self) -> int:
        """Of one row: keys or cells."""
        return ceil_div(len(self.selection.cells), GRANULARITIES[self.selection.granularity])

    @property
    def is_everything(self) -> bool:
        return self.budget == self.free

    def choose_everything(self, with_mass: Tensor) -> None:
        """Fills the whole selection with every unit. with_mass (B, H, G) bool: groups that have any mass to retain."""
        selection = self.selection
        selection.bits.fill_(-1)
        if self.units % WORD:
            selection.bits[..., -1] = (1 << self.units % WORD) - 1
        selection.counts.fill_(len(selection.cells))
        selection.retained.copy_(with_mass)

    def choose(self, rows: range, masses: Tensor) -> None:
        """Fills the selection of `rows` by masses (len(rows), row_width(units)) float32 of the units in cell order."""
        selection, units = self.selection, self.units
        sample, warps = self.parameters.tile, self.parameters.warps
        step = ceil_div(units, sample)
        rank = self.budget / step
        margin = 0 if step == 1 else SIGMAS * math.sqrt(rank * (1 - self.budget / units)) + SIGMAS
        candidates = torch.empty((len(rows), 2, ROOM * sample), dtype=torch.int32, device=masses.device)  # levels, places
        heaviest_kernel[(len(rows),)](
            masses, candidates, self.always, selection.cells.order, selection.bits, selection.counts, selection.retained,
            rows.start, units, len(selection.cells), masses.stride(0), self.budget, units - self.free, step,
            math.ceil(rank + margin), math.floor(rank - margin),
            GRANULARITIES[selection.granularity], self.always is not None, sample, ROOM * sample, 32 * warps * PER_THREAD,
            self.parameters.stages, **self.parameters.options,
        )  # fmt: skip


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


@triton.jit
def _load(masses, always, at, units, width, KEPT: tl.constexpr):
    """Masses at some places and their order as integers (the bits of floats that are not negative); -1: kept, or past the end."""
    mass = tl.load(masses + at, mask=at < width, other=0.0)  # up to the row's end in memory, for that is aligned
    free = at < units
    mass = tl.where(free, mass, 0.0)
    if KEPT:
        free = free & (tl.load(always + at, mask=free, other=1) == 0)
    return mass, tl.where(free, tl.maximum(mass.to(tl.int32, bitcast=True), 0), -1)


@triton.jit
def _threshold(levels, rank, low, high):
    """The largest t in low..high - 1 that at least `rank` of the levels reach; low if none."""
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((levels >= middle).to(tl.int32)) >= rank
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _reach(masses, always, units, width, level, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """How many units of the row reach a level."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, units, BLOCK):
        levels = _load(masses, always, start + tl.arange(0, BLOCK), units, width, KEPT)[1]
        count += (levels >= level).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _token(order, at, mask, CELLS: tl.constexpr):
    """What decides between equal masses, the lower first: a key's token, a cell's own number."""
    return at if CELLS else tl.load(order + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _bits_of(chosen, bit):
    """Words [N] of chosen [N, 32]."""
    return tl.sum(chosen.to(tl.int32) << bit[None, :], 1)


@triton.jit
def _reach_token(levels, places, order, found, threshold, token, PER_BIT: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the candidates at the threshold have at most this token."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, found, BLOCK):
        i = start + tl.arange(0, BLOCK)
        level = tl.load(levels + i, mask=i < found, other=-1) == threshold
        at = tl.load(places + i, mask=i < found, other=0)
        count += (level & (_token(order, at, level, PER_BIT > 1) <= token)).to(tl.int32)
    return tl.sum(count)


@triton.jit(do_not_specialize=["first_row", "units", "keys", "budget", "kept_units", "step", "rank_low", "rank_high"])
def heaviest_kernel(
    masses, candidates, always, order, bits, counts, retained,
    first_row, units, keys, width, budget, kept_units, step, rank_low, rank_high,
    PER_BIT: tl.constexpr, KEPT: tl.constexpr, SAMPLE: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The `budget` heaviest free units of one row a program.

    step: a unit in `step` is in the sample; rank_low, rank_high: ranks in it that bracket the threshold.
    """
    row = first_row + tl.program_id(0)
    masses += tl.program_id(0).to(tl.int64) * width
    candidates += tl.program_id(0).to(tl.int64) * (2 * ROOM)
    words = tl.cdiv(units, 32)
    bits += row.to(tl.int64) * words
    word = tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)

    # One unit of every `step`, the place in it scattered so that no period of the grid is met.
    i = tl.arange(0, SAMPLE)
    sample = _load(masses, always, i * step + (i * 40503 & 0xFFFF) % step, units, width, KEPT)[1]
    low = tl.full((), MOST, tl.int32)  # without a budget nothing reaches the bracket
    high = tl.full((), MOST, tl.int32)
    if budget > 0:
        low = _threshold(sample, rank_low, tl.full((), 0, tl.int32), high)
        if rank_high > 0:
            high = _threshold(sample, rank_high, low, high) + 1

    above = tl.full((), 0, tl.int32)
    found = tl.full((), 0, tl.int32)
    chosen_mass = tl.zeros([BLOCK // 32, 32], tl.float32)
    all_mass = tl.zeros([BLOCK // 32, 32], tl.float32)
    for start in tl.range(0, units, BLOCK, num_stages=STAGES):
        at = start + word[:, None] * 32 + bit[None, :]
        mass, levels = _load(masses, always, at, units, width, KEPT)
        chosen = levels >= high
        between = (levels >= low) & (levels < high)
        between_bits = _bits_of(between, bit)
        inside = popcount(between_bits)
        number = (found + tl.cumsum(inside, 0) - inside)[:, None] + popcount(between_bits[:, None] & ((1 << bit) - 1)[None, :])
        fits = between & (number < ROOM)
        tl.store(candidates + number, levels, mask=fits)
        tl.store(candidates + ROOM + number, at, mask=fits)
        found += tl.sum(inside)
        above += tl.sum(popcount(_bits_of(chosen, bit)))
        if KEPT:
            chosen = chosen | ((levels < 0) & (at < units))
        tl.store(bits + start // 32 + word, _bits_of(chosen, bit), mask=start // 32 + word < words)
        chosen_mass += tl.where(chosen, mass, 0.0)
        all_mass += mass
    retained_mass = tl.sum(chosen_mass)

    # Chosen are the levels above the threshold, and of those at it the ones whose token is at most `last`.
    if (above == budget) | ((above < budget) & (above + found >= budget) & (found <= ROOM)):
        if above < budget:
            tl.debug_barrier()  # the candidates and the bits were written by other threads
            n = tl.arange(0, ROOM)
            levels = tl.load(candidates + n, mask=n < found, other=-1)
            threshold = _threshold(levels, budget - above, low, high)
            room = budget - above - tl.sum((levels > threshold).to(tl.int32))
            last = tl.full((), MOST, tl.int32)
            if tl.sum((levels == threshold).to(tl.int32)) > room:
                before = tl.full((), -1, tl.int32)
                last = keys - 1
                while last - before > 1:
                    middle = before + (last - before) // 2
                    enough = _reach_token(candidates, candidates + ROOM, order, found, threshold, middle, PER_BIT, BLOCK) >= room
                    before, last = tl.where(enough, before, middle), tl.where(enough, middle, last)
            added_mass = tl.zeros([BLOCK], tl.float32)
            for start in range(0, found, BLOCK):
                i_1d = start + tl.arange(0, BLOCK)
                levels_1d = tl.load(candidates + i_1d, mask=i_1d < found, other=-1)
                at_1d = tl.load(candidates + ROOM + i_1d, mask=i_1d < found, other=0)
                chosen_1d = levels_1d >= threshold
                if last < MOST:
                    level_1d = levels_1d == threshold
                    chosen_1d = chosen_1d & ~(level_1d & (_token(order, at_1d, level_1d, PER_BIT > 1) > last))
                tl.atomic_or(bits + at_1d // 32, tl.full([BLOCK], 1, tl.int32) << (at_1d % 32), mask=chosen_1d, sem="relaxed")
                added_mass += tl.where(chosen_1d, levels_1d.to(tl.float32, bitcast=True), 0.0)
            retained_mass += tl.sum(added_mass)
    else:
        if above > budget:
            low = high
            high = tl.full((), MOST, tl.int32)
        elif above + found < budget:
            high = low
            low = tl.full((), 0, tl.int32)
        while high - low > 1:
            middle = low + (high - low) // 2
            enough = _reach(masses, always, units, width, middle, KEPT, BLOCK) >= budget
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        threshold = low
        room = budget - _reach(masses, always, units, width, threshold + 1, KEPT, BLOCK)
        before = tl.full((), -1, tl.int32)  # the first `room` of the level: fewer up to `before`, enough up to `last`
        last = keys - 1
        while last - before > 1:
            middle = before + (last - before) // 2
            count = tl.zeros([BLOCK], tl.int32)
            for start in range(0, units, BLOCK):
                at_1d = start + tl.arange(0, BLOCK)
                level_1d = _load(masses, always, at_1d, units, width, KEPT)[1] == threshold
                count += (level_1d & (_token(order, at_1d, level_1d, PER_BIT > 1) <= middle)).to(tl.int32)
            enough = tl.sum(count) >= room
            before, last = tl.where(enough, before, middle), tl.where(enough, middle, last)
        chosen_mass = tl.zeros([BLOCK // 32, 32], tl.float32)
        for start in range(0, units, BLOCK):
            at_2d = start + word[:, None] * 32 + bit[None, :]
            mass, levels_2d = _load(masses, always, at_2d, units, width, KEPT)
            level_2d = levels_2d == threshold
            level_2d = level_2d & (_token(order, at_2d, level_2d, PER_BIT > 1) <= last)
            chosen_2d = (levels_2d > threshold) | level_2d
            if KEPT:
                chosen_2d = chosen_2d | ((levels_2d < 0) & (at_2d < units))
            tl.store(bits + start // 32 + word, _bits_of(chosen_2d, bit), mask=start // 32 + word < words)
            chosen_mass += tl.where(chosen_2d, mass, 0.0)
        retained_mass = tl.sum(chosen_mass)

    count = (budget + kept_units) * PER_BIT
    if PER_BIT > 1:  # the last cell may be short
        tl.debug_barrier()  # its bit was set by another thread
        count -= ((tl.load(bits + words - 1) >> ((units - 1) % 32)) & 1) * (units * PER_BIT - keys)
    tl.store(counts + row, count)
    tl.store(retained + row, retained_mass / tl.maximum(tl.sum(all_mass), 1.1754943508222875e-38))
