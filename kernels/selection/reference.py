"""Exact selection: the mass of every key for every group, in float32, one head and some groups at a time."""
from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import chunks
from ..shapes import GRANULARITIES, GROUP_SIZE, CellOrder, Geometry, KeySelection, QueryGroups, ceil_div, key_budget
from .bits import pack_bits

NAME = "reference"


def why_not(geometry: Geometry) -> str | None:
    return None


def select_keys(
    q: Tensor, k: Tensor, lse: Tensor, groups: QueryGroups, density: float,
    cells: CellOrder, granularity: str, kept: tuple[tuple[int, int], ...], scale: float,
) -> KeySelection:
    batch, heads, length, _ = q.shape
    keys, per_bit = k.shape[2], GRANULARITIES[granularity]
    sizes = cells.sizes(per_bit)  # keys of each unit that can be selected: a key, or a cell of 32
    always = _units_kept(kept, cells, per_bit)
    budget = _units_to_choose(density, sizes, always, per_bit)
    rank = cells.order if per_bit == 1 else torch.arange(sizes.numel(), device=q.device)

    bits = torch.empty((batch, heads, groups.count, ceil_div(sizes.numel(), 32)), dtype=torch.int32, device=q.device)
    counts = torch.empty((batch, heads, groups.count), dtype=torch.int32, device=q.device)
    retained = torch.empty((batch, heads, groups.count), dtype=torch.float32, device=q.device)
    orders = groups.expanded(batch, heads)
    for b in range(batch):
        for h in range(heads):
            in_cell_order = k[b, h].index_select(0, cells.order).float()
            # The lse rides along as one more dimension whose key is 1, which saves a pass over the scores.
            extended = torch.cat([in_cell_order, in_cell_order.new_ones(keys, 1)], 1)
            for some in chunks(groups.count, 4 * GROUP_SIZE * keys, q.device):
                order = orders[b, h, some.start * GROUP_SIZE : min(length, some.stop * GROUP_SIZE)].long()
                mass = _mass(q[b, h].index_select(0, order), lse[b, h].index_select(0, order), extended, scale)
                unit_mass = mass if per_bit == 1 else _sums(mass, per_bit)
                mask = _heaviest(unit_mass.masked_fill(always, float("-inf")), budget, rank) | always
                bits[b, h, some] = pack_bits(mask)
                counts[b, h, some] = (mask * sizes).sum(1, dtype=torch.int32)
                retained[b, h, some] = (unit_mass * mask).sum(1) / unit_mass.sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return KeySelection(bits, counts, retained, granularity, cells)


def _units_kept(kept: tuple[tuple[int, int], ...], cells: CellOrder, per_bit: int) -> Tensor:
    """Units (keys or cells, in cell order) that hold a key of the kept token ranges, bool."""
    token_kept = torch.zeros(len(cells), dtype=torch.bool, device=cells.order.device)
    for start, stop in kept:
        token_kept[start:stop] = True
    place_kept = token_kept[cells.order]
    return place_kept if per_bit == 1 else _sums(place_kept.float(), per_bit) > 0


def _units_to_choose(density: float, sizes: Tensor, always: Tensor, per_bit: int) -> int:
    """How many of the units that are not always selected each group chooses."""
    free = int((~always).sum())
    if density >= 1:
        return free
    return min(free, ceil_div(key_budget(density, int(sizes[~always].sum())), per_bit))


def _mass(q: Tensor, lse: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Attention mass (g, S) of keys (S, D + 1), the last dimension 1, for whole groups: q (n, D) and lse (n,) in group order."""
    n, groups = q.shape[0], ceil_div(q.shape[0], GROUP_SIZE)
    queries = q.new_zeros((groups * GROUP_SIZE, q.shape[1] + 1), dtype=torch.float32)
    queries[:n, :-1] = q
    queries[:n, :-1] *= scale
    queries[:n, -1] = torch.where(lse == float("-inf"), lse, -lse)
    queries[n:, -1] = float("-inf")  # exp(-inf) = 0: rows past the end, and rows of lse = -inf, add no mass
    return (queries @ keys.mT).exp_().view(groups, GROUP_SIZE, -1).sum(1)


def _heaviest(mass: Tensor, count: int, rank: Tensor) -> Tensor:
    """The `count` largest of each row of mass (g, n), bool; of equal masses those with the lower rank (n,)."""
    if count == 0:
        return torch.zeros_like(mass, dtype=torch.bool)
    threshold = mass.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, level = mass > threshold, mass == threshold
    room = count - above.sum(1, keepdim=True)
    if bool((level.sum(1, keepdim=True) != room).any()):  # equal masses at the threshold
        by_rank = rank.argsort()
        level_by_rank = level[:, by_rank]
        level = (level_by_rank & (level_by_rank.cumsum(1) <= room))[:, rank]
    return above | level


def _sums(x: Tensor, run: int) -> Tensor:
    """Sums over consecutive runs of the last dimension; the last run may be short."""
    runs = ceil_div(x.shape[-1], run)
    return torch.nn.functional.pad(x, (0, runs * run - x.shape[-1])).view(*x.shape[:-1], runs, run).sum(-1)
