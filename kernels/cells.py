"""The cell order: one order of the tokens by position, in which runs of 32, 64 and 128 tokens are compact cells that nest."""
from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .shapes import CELL_SIZES, CellOrder, ceil_div

# A step in time counts as two steps in space: latent frames differ more than neighbouring latent pixels do.
AXIS_WEIGHTS = np.array([2, 1, 1])


def cell_order(grid: tuple[int, int, int] | None, *, before: int = 0, after: int = 0) -> CellOrder:
    """Cell order of [before tokens][F*H*W raster tokens][after tokens], on the CPU.

    Grid tokens come first, by recursive bisection of their coordinates along the longest extent (frames weighted 2, the
    earlier axis wins a tie), cut at u * floor(m / 2) of m = ceil(n / u) runs, for u = 128, then 64, then 32; inside a cell of
    32 they are in raster order. The other tokens follow in sequence order. grid None: all tokens in sequence order.
    Orders are cached as numbers; the tensors are the caller's own.
    """
    if grid is not None and (len(grid) != 3 or min(grid) < 1):
        raise ValueError(f"cell_order: grid is {grid}; needed are three positive extents (frames, height, width), or None")
    if before < 0 or after < 0:
        raise ValueError(f"cell_order: before is {before} and after {after}; token counts cannot be negative")
    if grid is None and before + after == 0:
        raise ValueError("cell_order: there are no tokens; give a grid, or the token count as `before` or `after`")
    return _from_order(torch.tensor(_cell_order(None if grid is None else tuple(int(n) for n in grid), int(before), int(after))))


def keep_only(cells: CellOrder, keep: Tensor) -> CellOrder:
    """Cell order of the tokens that `keep` (S,) bool keeps, renumbered 0..kept-1 as compacting the keys does."""
    if keep.dtype != torch.bool or keep.shape != (len(cells),):
        raise ValueError(f"keep_only: keep is {tuple(keep.shape)} {keep.dtype}; needed is ({len(cells)},) bool")
    keep = keep.to(cells.order.device)
    number = keep.cumsum(0) - 1
    return _from_order(number[cells.order[keep[cells.order]]])


@lru_cache(maxsize=16)
def _cell_order(grid: tuple[int, int, int] | None, before: int, after: int) -> np.ndarray:
    inside = np.empty(0, dtype=np.int64) if grid is None else _bisect(grid) + before
    middle = inside.size
    outside = np.concatenate([np.arange(before), np.arange(before + middle, before + middle + after)])
    return np.concatenate([inside, outside])


def _from_order(order: Tensor) -> CellOrder:
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return CellOrder(order, place)


def _bisect(grid: tuple[int, int, int]) -> np.ndarray:
    """Raster indices of the grid's tokens in cell order, (F*H*W,) int64."""
    frames, height, width = grid
    # int16 coordinates: numpy sorts them stably by radix, 5 times faster than int64.
    small = np.int16 if max(grid) < 2**15 else np.int64
    coordinates = np.indices(grid).reshape(3, -1).astype(small)
    units = sorted(CELL_SIZES, reverse=True)
    out: list[np.ndarray] = []
    stack = [np.arange(frames * height * width)]
    while stack:
        node = stack.pop()
        unit = next((u for u in units if node.size > u), None)
        if unit is None:
            out.append(np.sort(node))
            continue
        at = coordinates[:, node]
        extent = (at.max(1).astype(np.int64) - at.min(1) + 1) * AXIS_WEIGHTS
        by_axis = node[np.argsort(at[extent.argmax()], kind="stable")]
        cut = unit * (ceil_div(node.size, unit) // 2)
        stack += [by_axis[cut:], by_axis[:cut]]  # the first part is taken next
    return np.concatenate(out)
