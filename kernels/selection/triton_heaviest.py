"""The heaviest units (keys, or cells of 32) of rows of masses, as the bits, counts and retained mass of a KeySelection.

One program a row: a sample of the row brackets the threshold between two masses, one pass over the row collects what lies
between, the threshold is found among those exactly, a second pass writes the bits. A row whose bracket missed (3 in 1000) or
holds more than fits is searched by bisection over the whole row.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, launch
from ..shapes import GRANULARITIES, CellOrder, Geometry, KeySelection, QueryGroups, ceil_div, key_budget
from .bits import WORD
from .reference import _units_kept

SCRATCH_BYTES = 512 << 20  # masses that exist at one time
# The mass kernels run 1, 2, 3 or 6 programs at once on a multiprocessor; chunks of this many rows for each leave none idle at their end.
ROWS_PER_MULTIPROCESSOR = 6
ROW_MULTIPLE = 128  # rows of masses are padded to it: the largest tile of keys
ROOM = 2  # candidates that a row can have, in samples
# Half width of the bracket in standard deviations of the sample's rank: 3 rows in 1000 miss it, and at a density of 0.15 the candidates of
# 200000 units fit.
SIGMAS = 3
MOST = tl.constexpr(0x7FFFFFFF)


def row_width(keys: int) -> int:
    return ceil_div(keys, ROW_MULTIPLE) * ROW_MULTIPLE


def scratch_rows(rows: int, keys: int, device: torch.device) -> Iterator[tuple[range, Tensor]]:
    """(some rows, memory (len(rows), row_width(keys)) float32 for their masses) until all rows are covered; the memory is reused."""
    at_once = max(1, SCRATCH_BYTES // (4 * row_width(keys)))
    if device.type == "cuda":
        full = ROWS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        at_once = at_once // full * full or at_once
    memory = torch.empty((min(rows, at_once), row_width(keys)), dtype=torch.float32, device=device)
    for first in range(0, rows, at_once):
        some = range(first, min(rows, first + at_once))
        yield some, memory[: len(some)]


@dataclass(frozen=True, eq=False)
class Choice:
    """A KeySelection that is filled in rows; a row is one group of one head of one batch row, in that order."""

    selection: KeySelection
    budget: int  # units to choose of those that are free
    always: Tensor | None  # (units,) int8: 1 where the unit holds a kept key
    parameters: Launch

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, groups: QueryGroups, density: float,
        cells: CellOrder, granularity: str, kept: tuple[tuple[int, int], ...], parameters: Launch | None = None,
    ) -> Choice:
        per_bit = GRANULARITIES[granularity]
        shape = (*q.shape[:2], groups.count)
        bits = torch.empty((*shape, ceil_div(ceil_div(k.shape[2], per_bit), WORD)), dtype=torch.int32, device=q.device)
        counts = torch.empty(shape, dtype=torch.int32, device=q.device)
        retained = torch.empty(shape, dtype=torch.float32, device=q.device)
        always = _units_kept(kept, cells, per_bit) if kept else None
        budget = _budget(density, cells, per_bit, kept, always)
        return cls(
            KeySelection(bits, counts, retained, granularity, cells), budget, None if always is None else always.to(torch.int8),
            parameters or launch("heaviest", 64, Geometry.of(q, k).capability),
        )

    @property
    def rows(self) -> int:
        return self.selection.counts.numel()

    def choose(self, rows: range, masses: Tensor) -> None:
        """Fills the selection of `rows` by masses (len(rows), row_width(keys)) float32 in cell order, 0 past the keys."""
        selection = self.selection
        per_bit, keys = GRANULARITIES[selection.granularity], len(selection.cells)
        if per_bit > 1:
            masses = masses.view(len(rows), -1, per_bit).sum(2)
        units = ceil_div(keys, per_bit)
        sample = self.parameters.tile
        step = ceil_div(units, sample)
        rank = self.budget / step
        margin = 0 if step == 1 else SIGMAS * math.sqrt(rank * (1 - self.budget / units)) + SIGMAS
        candidates = torch.empty((len(rows), 2, ROOM * sample), dtype=torch.int32, device=masses.device)  # levels, places
        heaviest_kernel[(len(rows),)](
            masses, candidates, self.always, selection.cells.order, selection.bits, selection.counts, selection.retained,
            rows.start, units, keys, masses.stride(0), self.budget, step, math.ceil(rank + margin), math.floor(rank - margin),
            per_bit, self.always is not None, sample, ROOM * sample, **self.parameters.options,
        )  # fmt: skip


def _budget(density: float, cells: CellOrder, per_bit: int, kept: tuple[tuple[int, int], ...], always: Tensor | None) -> int:
    """How many of the units that are not always selected each group chooses."""
    if per_bit > 1 and always is not None:
        # Which cells hold a kept key is known only to the order, so this reads the device.
        sizes = cells.sizes(per_bit)[~always]
        free, free_keys = sizes.numel(), int(sizes.sum())
    else:
        free_keys = len(cells) - sum(stop - start for start, stop in kept)
        free = ceil_div(free_keys, per_bit)
    return free if density >= 1 else min(free, ceil_div(key_budget(density, free_keys), per_bit))


@triton.jit
def _load(masses, always, at, units, KEPT: tl.constexpr):
    """Masses at some places and their order as integers (the bits of floats that are not negative); -1: kept, or past the end."""
    free = at < units
    mass = tl.load(masses + at, mask=free, other=0.0)
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
def _reach(masses, always, units, level, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """How many units of the row reach a level."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, units, BLOCK):
        levels = _load(masses, always, start + tl.arange(0, BLOCK), units, KEPT)[1]
        count += (levels >= level).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _token(order, at, mask, CELLS: tl.constexpr):
    """What decides between equal masses, the lower first: a key's token, a cell's own number."""
    return at if CELLS else tl.load(order + at, mask=mask, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["first_row", "units", "keys", "budget", "step", "rank_low", "rank_high"])
def heaviest_kernel(
    masses, candidates, always, order, bits, counts, retained,
    first_row, units, keys, width, budget, step, rank_low, rank_high,
    PER_BIT: tl.constexpr, KEPT: tl.constexpr, SAMPLE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The `budget` heaviest free units of one row a program.

    step: a unit in `step` is in the sample; rank_low, rank_high: ranks in it that bracket the threshold.
    """
    row = first_row + tl.program_id(0)
    masses += tl.program_id(0).to(tl.int64) * width
    candidates += tl.program_id(0).to(tl.int64) * (2 * ROOM)
    i = tl.arange(0, SAMPLE)

    # Chosen are the levels above `threshold`, and of those at it the ones whose token is at most `last`.
    threshold = tl.full((), MOST, tl.int32)
    last = tl.full((), -1, tl.int32)
    if budget > 0:
        low = tl.full((), 0, tl.int32)
        high = tl.full((), MOST, tl.int32)
        # One unit of every `step`, the place in it scattered so that no period of the grid is met.
        sample = _load(masses, always, i * step + (i * 40503 & 0xFFFF) % step, units, KEPT)[1]
        bracket_low = _threshold(sample, rank_low, low, high)
        bracket_high = high
        if rank_high > 0:
            bracket_high = _threshold(sample, rank_high, bracket_low, high) + 1

        above = tl.full((), 0, tl.int32)
        found = tl.full((), 0, tl.int32)
        for start in range(0, units, SAMPLE):
            at = start + i
            levels = _load(masses, always, at, units, KEPT)[1]
            between = (levels >= bracket_low) & (levels < bracket_high)
            number = found + tl.cumsum(between.to(tl.int32), 0) - 1
            fits = between & (number < ROOM)
            tl.store(candidates + number, levels, mask=fits)
            tl.store(candidates + ROOM + number, at, mask=fits)
            above += tl.sum((levels >= bracket_high).to(tl.int32))
            found += tl.sum(between.to(tl.int32))
        tl.debug_barrier()  # the candidates were written by other threads than read them

        if (above < budget) & (above + found >= budget) & (found <= ROOM):
            n = tl.arange(0, ROOM)
            levels = tl.load(candidates + n, mask=n < found, other=-1)
            threshold = _threshold(levels, budget - above, bracket_low, bracket_high)
            room = budget - above - tl.sum((levels > threshold).to(tl.int32))
            level = levels == threshold
            last = tl.full((), MOST, tl.int32)
            if tl.sum(level.to(tl.int32)) > room:
                at = tl.load(candidates + ROOM + n, mask=level, other=0)
                token = tl.where(level, _token(order, at, level, PER_BIT > 1), MOST)
                last = -1 - _threshold(-1 - token, room, -keys, tl.full((), 0, tl.int32))
        else:
            if above >= budget:
                low = bracket_high
            elif above + found < budget:
                high = bracket_low
            while high - low > 1:
                middle = low + (high - low) // 2
                enough = _reach(masses, always, units, middle, KEPT, SAMPLE) >= budget
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            threshold = low
            room = budget - _reach(masses, always, units, threshold + 1, KEPT, SAMPLE)
            lower = tl.full((), -1, tl.int32)  # the first `room` of the level: fewer up to `lower`, enough up to `last`
            last = keys - 1
            while last - lower > 1:
                middle = lower + (last - lower) // 2
                count = tl.zeros([SAMPLE], tl.int32)
                for start in range(0, units, SAMPLE):
                    at = start + i
                    level = _load(masses, always, at, units, KEPT)[1] == threshold
                    count += (level & (_token(order, at, level, PER_BIT > 1) <= middle)).to(tl.int32)
                enough = tl.sum(count) >= room
                lower, last = tl.where(enough, lower, middle), tl.where(enough, middle, last)

    words = tl.cdiv(units, 32)
    bits += row.to(tl.int64) * words
    word = tl.arange(0, SAMPLE // 32)
    bit = tl.arange(0, 32)
    selected = tl.zeros([SAMPLE // 32, 32], tl.int32)
    selected_mass = tl.zeros([SAMPLE // 32, 32], tl.float32)
    all_mass = tl.zeros([SAMPLE // 32, 32], tl.float32)
    for start in range(0, words, SAMPLE // 32):
        at = (start + word)[:, None] * 32 + bit[None, :]
        mass, levels = _load(masses, always, at, units, KEPT)
        level = levels == threshold
        if last < MOST:
            level = level & (_token(order, at, level, PER_BIT > 1) <= last)
        chosen = (levels > threshold) | level
        if KEPT:
            chosen = chosen | ((levels < 0) & (at < units))
        tl.store(bits + start + word, tl.sum(chosen.to(tl.int32) << bit[None, :], 1), mask=start + word < words)
        selected += tl.where(chosen, tl.minimum(keys - at * PER_BIT, PER_BIT), 0)
        selected_mass += tl.where(chosen, mass, 0.0)
        all_mass += mass
    tl.store(counts + row, tl.sum(selected))
    tl.store(retained + row, tl.sum(selected_mass) / tl.maximum(tl.sum(all_mass), 1.1754943508222875e-38))
