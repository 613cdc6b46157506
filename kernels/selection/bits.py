"""Selections as bits: packing, and what is read back from them. Pure integer work, on any device."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..shapes import BUDGET_TILE, GRANULARITIES, KeySelection, ceil_div

WORD = 32


def pack_bits(mask: Tensor) -> Tensor:
    """mask (..., n) bool -> (..., ceil(n / 32)) int32: entry i is bit i % 32 of word i // 32; bits past n are 0."""
    words = ceil_div(mask.shape[-1], WORD)
    bits = pad(mask, (0, words * WORD - mask.shape[-1])).view(*mask.shape[:-1], words, WORD).int()
    return (bits << _bit_numbers(mask.device)).sum(-1, dtype=torch.int32)  # bit 31 wraps to the sign, as it should


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    """Inverse of pack_bits: (..., words) int32 -> (..., n) bool."""
    return ((bits[..., None] >> _bit_numbers(bits.device)) & 1).bool().flatten(-2)[..., :n]


def popcount(words: Tensor) -> Tensor:
    """Set bits of each int32 word, int32. The usual halving; every mask clears the copies of the sign bit that >> brings in."""
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


def expand_selection(selection: KeySelection) -> Tensor:
    """Selected places of the cell order, ascending, int32 (B, H, G, Kpad); after the group's count -1.

    Kpad is the largest count, rounded up to whole tiles of T = 128.
    """
    batch, heads, groups = selection.counts.shape
    width = ceil_div(int(selection.counts.max()), BUDGET_TILE) * BUDGET_TILE
    out = selection.bits.new_full((batch, heads, groups, width), -1)
    for b in range(batch):
        for h in range(heads):
            places, counts = places_of(selection, b, h)
            live = torch.arange(places.shape[1], device=places.device) < counts[:, None]
            out[b, h, :, : places.shape[1]] = places.int().masked_fill_(~live, -1)
    return out


def places_of(selection: KeySelection, b: int, h: int) -> tuple[Tensor, Tensor]:
    """Selected places (G, largest count) int64 of one head, ascending, 0 after the group's count; and the counts (G,)."""
    counts = selection.counts[b, h].long()
    group, place = selected_keys(selection, b, h).nonzero(as_tuple=True)
    widest = int(counts.max())
    if place.numel() == widest * counts.numel():
        return place.view(counts.numel(), widest), counts
    places = place.new_zeros(counts.numel(), widest)
    first = counts.cumsum(0) - counts
    places[group, torch.arange(place.numel(), device=place.device) - first[group]] = place
    return places, counts


def selected_keys(selection: KeySelection, b: int, h: int) -> Tensor:
    """Which keys each group of one head selected, (G, S) bool in cell order."""
    keys = len(selection.cells)
    per_bit = GRANULARITIES[selection.granularity]
    chosen = unpack_bits(selection.bits[b, h], ceil_div(keys, per_bit))
    return chosen if per_bit == 1 else chosen.repeat_interleave(per_bit, 1)[:, :keys]


def unselected_counts(selection: KeySelection, size: int) -> Tensor:
    """Keys of each cell of `size` that the group did not select, (B, H, G, ceil(S / size)) int32."""
    batch, heads, groups = selection.counts.shape
    out = selection.bits.new_empty(batch, heads, groups, ceil_div(len(selection.cells), size))
    for b in range(batch):
        for h in range(heads):
            out[b, h] = unselected_in_cells(selection, b, h, size)
    return out


def unselected_in_cells(selection: KeySelection, b: int, h: int, size: int) -> Tensor:
    """unselected_counts of one head, (G, ceil(S / size)) int32."""
    sizes = selection.cells.sizes(size)
    bits = selection.bits[b, h]
    if size % WORD:  # no whole number of words, or of cells of 32, to a cell
        selected = _sums_of(selected_keys(selection, b, h), size)
    elif selection.granularity == "token":
        selected = _sums_of(popcount(bits), size // WORD)
    else:
        small = selection.cells.sizes(WORD)
        selected = _sums_of(unpack_bits(bits, small.numel()) * small, size // WORD)
    return sizes - selected


def _sums_of(x: Tensor, run: int) -> Tensor:
    """Sums over consecutive runs of the last dimension, the last one may be short, int32."""
    runs = ceil_div(x.shape[-1], run)
    return pad(x, (0, runs * run - x.shape[-1])).view(*x.shape[:-1], runs, run).sum(-1, dtype=torch.int32)


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(WORD, dtype=torch.int32, device=device)
