"""The heaviest units of rows of masses in Triton, as the bits, counts and retained mass of a KeySelection.

Three kernels: a sample of each row brackets its threshold between two masses; one pass over all rows writes the bits of what lies above
and collects what lies between; the threshold is found among those exactly and their bits are added. A row whose bracket missed, or
holds more than fits as equal masses do, is searched by bisection over the whole row.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, launch
from ..shapes import GRANULARITIES, CellOrder, Geometry, QueryGroups, ceil_div
from ..triton_support import INTERPRETED, popcount
from . import heaviest

ROOM = 2  # candidates that a row can have, in samples
SIGMAS = 4.5  # half width of the bracket in standard deviations of the sample's rank: 1 row in 150000 misses it
SLACK = 1 / 8  # by how much of that the bracket may be wider, which saves steps of the search for it
LONG = 20  # units for one in the sample, beyond which the sample is doubled so that the candidates fit (to 240000 units at any density)
MOST = tl.constexpr(0x7FFFFFFF)
_INTERPRETED = tl.constexpr(INTERPRETED)


class Launches(NamedTuple):
    """Launch parameters of the three kernels. tile: units in the sample; of a program; of a step."""

    bracket: Launch
    divide: Launch
    heaviest: Launch


@dataclass(frozen=True, eq=False)
class Choice(heaviest.Choice):
    """As heaviest.Choice, in three kernels."""

    launches: Launches

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, groups: QueryGroups, density: float,
        cells: CellOrder, granularity: str, kept: tuple[tuple[int, int], ...], launches: Launches | None = None,
    ) -> Choice:  # fmt: skip
        if launches is None:
            launches = Launches(*(launch(kernel, 64, Geometry.of(q, k).capability) for kernel in Launches._fields))
        if ceil_div(k.shape[2], GRANULARITIES[granularity]) > LONG * launches.bracket.tile:
            launches = launches._replace(bracket=_doubled(launches.bracket), heaviest=_doubled(launches.heaviest))
        return super().of(q, k, groups, density, cells, granularity, kept, launches=launches)

    @property
    def room(self) -> int:
        """For candidates of one row."""
        return ROOM * self.launches.bracket.tile

    @property
    def scratch_bytes(self) -> int:
        return 8 * self.room

    def choose(self, rows: range, masses: Tensor) -> None:
        selection, units, count, device = self.selection, self.units, len(rows), masses.device
        bracket, divide, finish = self.launches
        step, chunks = ceil_div(units, bracket.tile), ceil_div(units, divide.tile)
        rank = self.budget / step
        margin = 0 if step == 1 else SIGMAS * math.sqrt(rank * (1 - self.budget / units)) + SIGMAS
        ranks = math.ceil(rank + margin), math.floor(rank - margin), int(SLACK * margin)
        found = torch.empty((count, 4), dtype=torch.int32, device=device)  # low and high level, how many units above, how many between
        candidates = torch.empty((count, self.room), dtype=torch.int64, device=device)  # level and, in the lower half, place
        sums = torch.empty((count, 2, chunks), dtype=torch.float32, device=device)  # of the masses above and of all, by chunk
        width, kept = masses.stride(0), self.always is not None
        always = self.always.view(torch.int8) if kept else None
        bracket_kernel[(count,)](
            masses, always, found, units, width, self.budget, step, *ranks, kept, bracket.tile, **bracket.options
        )
        divide_kernel[(count, chunks)](
            masses, always, found, candidates, sums, selection.bits, rows.start, units, width,
            kept, self.room, divide.tile, **divide.options,
        )  # fmt: skip
        heaviest_kernel[(count,)](
            masses, always, selection.cells.order, found, candidates, sums, selection.bits, selection.counts, selection.retained,
            rows.start, units, len(selection.cells), width, chunks, self.budget, units - self.free,
            GRANULARITIES[selection.granularity], kept, self.room, finish.tile, **finish.options,
        )  # fmt: skip


def _doubled(parameters: Launch) -> Launch:
    """For twice as many units."""
    return parameters._replace(tile=2 * parameters.tile, warps=2 * parameters.warps)


@triton.jit
def _load(masses, always, at, past, units, width, KEPT: tl.constexpr):
    """Masses at some places, all before `past`, and their order as integers: their bits, as they are not negative; below 0 for units that
    are kept or past the end."""
    mass = tl.load(masses + at, mask=at < width, other=0.0)  # up to the row's end in memory, for that is aligned
    if past > units:
        bits = tl.where(at < units, mass.to(tl.int32, bitcast=True), -0x80000000)  # -0.0: no mass
        mass = bits.to(tl.float32, bitcast=True)
    levels = tl.minimum(mass.to(tl.int32, bitcast=True), MOST - 1)  # NaN, too, is below what nothing reaches
    if KEPT:
        levels = tl.where(tl.load(always + at, mask=at < units, other=0) == 0, levels, -1)
    return mass, levels


@triton.jit
def _halved(low, high, middle, count, fewest, most):
    """A search in low..high - 1 goes on in one half of it, or, if from `fewest` to `most` reach its middle, ends with that."""
    return tl.where(count >= fewest, middle, low), tl.where(count > most, high, tl.where(count >= fewest, middle + 1, middle))


@triton.jit
def _threshold(levels, fewest, most, low, high):
    """A t in low..high - 1 that from `fewest` to `most` of the levels reach; without one the largest that `fewest` do, or low."""
    while high - low > 1:
        middle = low + (high - low) // 2
        low, high = _halved(low, high, middle, tl.sum((levels >= middle).to(tl.int32)), fewest, most)
    return low


@triton.jit
def _reach(masses, always, units, width, level, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """How many units of the row reach a level."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, units, BLOCK):
        levels = _load(masses, always, start + tl.arange(0, BLOCK), start + BLOCK, units, width, KEPT)[1]
        count += (levels >= level).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _token(order, at, mask, CELLS: tl.constexpr):
    """What decides between equal masses, the lower first: a key's token, a cell's own number."""
    return at if CELLS else tl.load(order + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _scatter(pointers, values, mask):
    """Stores int64 values where mask (int32) is not 0, from the threads that have them; tl.store passes them on to others first."""
    if _INTERPRETED:  # it knows no assembly
        tl.store(pointers, values, mask=mask != 0)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b64 [$1], $2; mov.b32 $0, $3; }",
            "=r,l,l,r", [pointers.to(tl.int64), values, mask], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _bits_of(chosen, bit):
    """Words [N] of chosen [N, 32]."""
    return tl.sum(tl.where(chosen, (1 << bit)[None, :], 0), 1)


@triton.jit(do_not_specialize=["units", "budget", "step", "rank_low", "rank_high", "slack"])
def bracket_kernel(
    masses, always, found, units, width, budget, step, rank_low, rank_high, slack, KEPT: tl.constexpr, SAMPLE: tl.constexpr
):  # fmt: skip
    """The levels between which a row's threshold is to be sought, and counts of 0, a row a program.

    step: a unit in `step` is in the sample; rank_low, rank_high: ranks in it that bracket the threshold, by up to `slack` ranks more.
    """
    masses += tl.program_id(0).to(tl.int64) * width
    found += 4 * tl.program_id(0)
    # One unit of every `step`, the place in it scattered so that no period of the grid is met.
    i = tl.arange(0, SAMPLE)
    sample = _load(masses, always, i * step + (i * 40503 & 0xFFFF) % step, SAMPLE * step, units, width, KEPT)[1]
    low = tl.full((), MOST, tl.int32)  # without a budget nothing reaches the bracket
    high = tl.full((), MOST, tl.int32)
    if budget > 0:
        low = _threshold(sample, rank_low, rank_low + slack, tl.full((), 0, tl.int32), high)
        if rank_high > 0:
            high = _threshold(sample, tl.maximum(rank_high - slack, 1), rank_high, low, high) + 1
    tl.store(found, low)
    tl.store(found + 1, high)
    tl.store(found + 2, 0)
    tl.store(found + 3, 0)


@triton.jit(do_not_specialize=["first_row", "units"])
def divide_kernel(
    masses, always, found, candidates, sums, bits, first_row, units, width, KEPT: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Bits of the units above the bracket and of the kept ones, candidates from those between, for a chunk of one row a program.

    Chunks of a row add their candidates in whatever order they run.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    masses += row.to(tl.int64) * width
    candidates += row.to(tl.int64) * ROOM
    found += 4 * row
    words = tl.cdiv(units, 32)
    word = tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)
    low = tl.load(found)
    high = tl.load(found + 1)
    at = chunk * BLOCK + word[:, None] * 32 + bit[None, :]
    mass, levels = _load(masses, always, at, (chunk + 1) * BLOCK, units, width, KEPT)
    chosen = levels >= high
    chosen_bits = _bits_of(chosen, bit)
    between = _bits_of(levels >= low, bit) ^ chosen_bits
    inside = popcount(between)
    both = tl.sum(inside | popcount(chosen_bits) << 16)
    if KEPT:
        chosen = chosen | ((levels < 0) & (at < units))
        chosen_bits = _bits_of(chosen, bit)
    place = chunk * (BLOCK // 32) + word
    tl.store(bits + (first_row + row).to(tl.int64) * words + place, chosen_bits, mask=place < words)
    sums += row * (2 * tl.num_programs(1)) + chunk
    tl.store(sums, tl.sum(tl.where(chosen, mass, 0.0)))
    tl.store(sums + tl.num_programs(1), tl.sum(mass))
    tl.atomic_add(found + 2, both >> 16, sem="relaxed")
    first = tl.atomic_add(found + 3, both & 0xFFFF, sem="relaxed")
    if first + (both & 0xFFFF) <= ROOM:
        number = (first + tl.cumsum(inside, 0) - inside)[:, None] + popcount(between[:, None] & ((1 << bit) - 1)[None, :])
        _scatter(candidates + number, (levels.to(tl.int64) << 32) | at, between[:, None] & (1 << bit)[None, :])


@triton.jit
def _sum(x, n):
    """Of n float32 numbers."""
    i = tl.arange(0, 32)
    total = tl.zeros([32], tl.float32)
    for start in range(0, n, 32):
        total += tl.load(x + start + i, mask=start + i < n, other=0.0)
    return tl.sum(total)


@triton.jit
def _candidates(candidates, i, between):
    """Levels and places of some candidates; level -1 past the last."""
    pair = tl.load(candidates + i, mask=i < between, other=-1)
    return (pair >> 32).to(tl.int32), tl.where(i < between, pair.to(tl.int32), 0)


@triton.jit
def _reach_token(candidates, order, between, threshold, token, PER_BIT: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the candidates at the threshold have at most this token."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, between, BLOCK):
        levels, at = _candidates(candidates, start + tl.arange(0, BLOCK), between)
        level = levels == threshold
        count += (level & (_token(order, at, level, PER_BIT > 1) <= token)).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _reach_token_of_all(
    masses, always, order, units, width, threshold, token, PER_BIT: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many of the row's units at the threshold have at most this token."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, units, BLOCK):
        at = start + tl.arange(0, BLOCK)
        level = _load(masses, always, at, start + BLOCK, units, width, KEPT)[1] == threshold
        count += (level & (_token(order, at, level, PER_BIT > 1) <= token)).to(tl.int32)
    return tl.sum(count)


@triton.jit(do_not_specialize=["first_row", "units", "keys", "chunks", "budget", "kept_units"])
def heaviest_kernel(
    masses, always, order, found, candidates, sums, bits, counts, retained,
    first_row, units, keys, width, chunks, budget, kept_units,
    PER_BIT: tl.constexpr, KEPT: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The bits of one row's candidates, or of the whole row where those do not hold the threshold, its count and retained mass."""
    row = first_row + tl.program_id(0)
    masses += tl.program_id(0).to(tl.int64) * width
    candidates += tl.program_id(0).to(tl.int64) * ROOM
    found += 4 * tl.program_id(0)
    sums += tl.program_id(0) * (2 * chunks)
    words = tl.cdiv(units, 32)
    bits += row.to(tl.int64) * words
    low = tl.load(found)
    high = tl.load(found + 1)
    above = tl.load(found + 2)
    between = tl.load(found + 3)
    all_mass = tl.maximum(_sum(sums + chunks, chunks), 1.1754943508222875e-38)
    share = _sum(sums, chunks) / all_mass

    # Chosen are the levels above the threshold, and of those at it the ones whose token is at most `last`.
    if (above == budget) | ((above < budget) & (above + between >= budget) & (between <= ROOM)):
        if above < budget:
            levels = _candidates(candidates, tl.arange(0, ROOM), between)[0]
            wanted = budget - above
            threshold = _threshold(levels, wanted, wanted, low, high)
            last = tl.full((), MOST, tl.int32)
            if tl.sum((levels >= threshold).to(tl.int32)) > wanted:
                wanted -= tl.sum((levels > threshold).to(tl.int32))
                before = tl.full((), -1, tl.int32)
                last = keys - 1
                while last - before > 1:
                    middle = before + (last - before) // 2
                    enough = _reach_token(candidates, order, between, threshold, middle, PER_BIT, BLOCK) >= wanted
                    before, last = tl.where(enough, before, middle), tl.where(enough, middle, last)
            # The candidates' order is an accident. Their shares of the mass are added as whole numbers of 2^-44, as that does not see it.
            added = tl.zeros([BLOCK], tl.int64)
            for start in range(0, between, BLOCK):
                levels_1d, at_1d = _candidates(candidates, start + tl.arange(0, BLOCK), between)
                chosen_1d = levels_1d >= threshold
                if last < MOST:
                    level_1d = levels_1d == threshold
                    chosen_1d = chosen_1d & ~(level_1d & (_token(order, at_1d, level_1d, PER_BIT > 1) > last))
                tl.atomic_or(bits + at_1d // 32, tl.full([BLOCK], 1, tl.int32) << (at_1d % 32), mask=chosen_1d, sem="relaxed")
                mass_1d = tl.where(chosen_1d, levels_1d, 0).to(tl.float32, bitcast=True)
                added += (mass_1d / all_mass * 17592186044416.0).to(tl.int64)
            share += tl.sum(added).to(tl.float32) * 5.684341886080802e-14
    else:
        if above > budget:
            low = high
            high = tl.full((), MOST, tl.int32)
        elif above + between < budget:
            high = low
            low = tl.full((), 0, tl.int32)
        while high - low > 1:
            middle = low + (high - low) // 2
            low, high = _halved(low, high, middle, _reach(masses, always, units, width, middle, KEPT, BLOCK), budget, budget)
        threshold = low
        last = tl.full((), MOST, tl.int32)
        if _reach(masses, always, units, width, threshold, KEPT, BLOCK) > budget:
            wanted = budget - _reach(masses, always, units, width, threshold + 1, KEPT, BLOCK)
            before = tl.full((), -1, tl.int32)  # the first of the level: fewer than wanted up to `before`, enough up to `last`
            last = keys - 1
            while last - before > 1:
                middle = before + (last - before) // 2
                enough = _reach_token_of_all(masses, always, order, units, width, threshold, middle, PER_BIT, KEPT, BLOCK) >= wanted
                before, last = tl.where(enough, before, middle), tl.where(enough, middle, last)
        word = tl.arange(0, BLOCK // 32)
        bit = tl.arange(0, 32)
        chosen_mass = tl.zeros([BLOCK // 32, 32], tl.float32)
        for start in range(0, units, BLOCK):
            at_2d = start + word[:, None] * 32 + bit[None, :]
            mass, levels_2d = _load(masses, always, at_2d, start + BLOCK, units, width, KEPT)
            level_2d = levels_2d == threshold
            level_2d = level_2d & (_token(order, at_2d, level_2d, PER_BIT > 1) <= last)
            chosen_2d = (levels_2d > threshold) | level_2d
            if KEPT:
                chosen_2d = chosen_2d | ((levels_2d < 0) & (at_2d < units))
            tl.store(bits + start // 32 + word, _bits_of(chosen_2d, bit), mask=start // 32 + word < words)
            chosen_mass += tl.where(chosen_2d, mass, 0.0)
        share = tl.sum(chosen_mass) / all_mass

    count = (budget + kept_units) * PER_BIT
    if PER_BIT > 1:  # the last cell may be short
        tl.debug_barrier()  # its bit was set by another thread
        count -= ((tl.load(bits + words - 1) >> ((units - 1) % 32)) & 1) * (units * PER_BIT - keys)
    tl.store(counts + row, count)
    tl.store(retained + row, share)
