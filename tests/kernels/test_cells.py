"""The cell order: a permutation whose runs are compact, nested cells."""
import time

import pytest
import torch

from mc_sparse.kernels import cell_order, keep_only
from mc_sparse.kernels.cells import _cell_order

GRIDS = [(1, 1, 1), (1, 5, 7), (3, 27, 31), (8, 32, 32), (21, 1, 200), (2, 9, 16)]


def coordinates(grid):
    return torch.cartesian_prod(*(torch.arange(n) for n in grid)).view(-1, 3)


def extents(at):
    return tuple((at.max(0).values - at.min(0).values + 1).tolist())


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("before, after", [(0, 0), (5, 0), (0, 77), (3, 4)])
def test_it_is_a_permutation_with_other_tokens_last(grid, before, after):
    cells = cell_order(grid, before=before, after=after)
    inside = grid[0] * grid[1] * grid[2]
    assert cells.order.dtype == cells.place.dtype == torch.int64
    assert torch.equal(cells.order.sort().values, torch.arange(before + inside + after))
    assert torch.equal(cells.order[cells.place], torch.arange(len(cells)))
    assert torch.equal(cells.order[:inside].sort().values, torch.arange(before, before + inside))
    outside = [*range(before), *range(before + inside, before + inside + after)]
    assert cells.order[inside:].tolist() == outside


@pytest.mark.parametrize("grid", [(8, 32, 32), (2, 8, 8), (4, 16, 64)])
@pytest.mark.parametrize("size, box", [(128, (2, 8, 8)), (64, (2, 4, 8)), (32, (2, 4, 4))])
def test_cells_are_boxes_where_the_grid_divides(grid, size, box):
    at = coordinates(grid)[cell_order(grid).order]
    assert {extents(run) for run in at.split(size)} == {box}


@pytest.mark.parametrize("grid", [(3, 27, 31), (7, 13, 17), (21, 45, 80)])
@pytest.mark.parametrize("size", [128, 64, 32])
def test_cells_are_compact_on_any_grid(grid, size):
    """Mean squared distance to the cell's centre stays within 1.4 of the box's that it would be on a grid that divides."""
    weighted = coordinates(grid).float() * torch.tensor([2.0, 1.0, 1.0])
    whole = weighted[cell_order(grid).order][: grid[0] * grid[1] * grid[2] // size * size].view(-1, size, 3)
    box = {128: (2, 8, 8), 64: (2, 4, 8), 32: (2, 4, 4)}[size]
    ideal = (coordinates(box).float() * torch.tensor([2.0, 1.0, 1.0])).var(0, correction=0).sum()
    assert whole.var(1, correction=0).sum(1).mean() < 1.4 * ideal


def test_small_grids_by_hand():
    # 40 tokens in a row: two runs of 32, the first cut is at 32 * floor(2 / 2).
    assert cell_order((1, 1, 40)).order.tolist() == list(range(40))
    # 8 x 8: the height is split first (equal extents, earlier axis); both halves are cells of 32.
    assert cell_order((1, 8, 8)).order.tolist() == list(range(64))
    # 4 x 16: the width is the longest extent: left half of every row, then right half.
    left = [row * 16 + column for row in range(4) for column in range(8)]
    assert cell_order((1, 4, 16)).order.tolist() == left + [token + 8 for token in left]
    # two frames count as four rows: 2 x 2 x 16 is split along the width, 3 x 5 x 5 (75 tokens) along time.
    assert cell_order((2, 2, 16)).order[:32].tolist() == sorted(f * 32 + r * 16 + c for f in range(2) for r in range(2) for c in range(8))
    assert cell_order((3, 5, 5)).order[:32].tolist() == list(range(32))


def test_without_a_grid_the_order_is_the_sequence():
    assert cell_order(None, before=3, after=4).order.tolist() == list(range(7))


def test_it_is_fast_and_cached():
    _cell_order.cache_clear()
    start = time.process_time()
    cells = cell_order((21, 45, 80))
    assert time.process_time() - start < 1.0  # 0.1 s on one core of 2024
    assert torch.equal(cell_order((21, 45, 80)).order, cells.order)
    assert _cell_order.cache_info().hits == 1


def test_orders_of_an_inference_run_serve_training_later():
    _cell_order.cache_clear()
    with torch.inference_mode():
        cell_order((3, 5, 7))
    values = torch.randn(105, 4, requires_grad=True)
    values[cell_order((3, 5, 7)).order].sum().backward()
    assert values.grad is not None


def test_keep_only_renumbers_as_compaction_does():
    cells = cell_order((2, 9, 16), before=3, after=5)
    keep = torch.rand(len(cells), generator=torch.Generator().manual_seed(0)) < 0.6
    kept = keep_only(cells, keep)
    survivors = keep.nonzero().flatten()
    assert survivors[kept.order].tolist() == [token for token in cells.order.tolist() if keep[token]]
    assert torch.equal(kept.order[kept.place], torch.arange(len(survivors)))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: cell_order((0, 4, 4)), "three positive extents"),
        (lambda: cell_order((4, 4)), "three positive extents"),
        (lambda: cell_order((1, 1, 1), before=-1), "cannot be negative"),
        (lambda: cell_order(None), "no tokens"),
        (lambda: keep_only(cell_order((1, 2, 2)), torch.ones(5, dtype=torch.bool)), "needed is \\(4,\\) bool"),
        (lambda: keep_only(cell_order((1, 2, 2)), torch.ones(4)), "needed is \\(4,\\) bool"),
    ],
)
def test_refusals_say_what_is_needed(call, message):
    with pytest.raises(ValueError, match=message):
        call()
