"""The forecast of bytes against what an anchor really holds."""
import pytest
import torch

from mc_sparse.kernels import cell_order, compress_residual, dense_attention, group_queries, select_keys, sparse_residual
from mc_sparse.mcsparse_core.cache import AnchorState
from mc_sparse.mcsparse_core.forecast import cache_budget, state_bytes
from mc_sparse.mcsparse_core.plan import Recipe


@pytest.mark.parametrize("residual", ["bf16", "fp8", "int4", "int2", "rank-8", "off"])
@pytest.mark.parametrize("grouping", ["pddp", "cells"])
@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize(("rows", "heads", "grid", "dim"), [(1, 2, (4, 8, 8), 32), (2, 1, (3, 7, 9), 40)])
def test_bytes_of_a_state(residual, grouping, granularity, rows, heads, grid, dim):
    recipe = Recipe(0.3, grouping=grouping, granularity=granularity, residual=residual)
    tokens = grid[0] * grid[1] * grid[2]
    q = torch.randn(rows, heads, tokens, dim, generator=torch.Generator().manual_seed(0))
    cells = cell_order(grid)
    groups = group_queries(q, method=grouping, cells=cells)
    dense, lse = dense_attention(q, q, q, scale=dim**-0.5)
    selection = select_keys(q, q, lse, groups, density=0.3, cells=cells, granularity=granularity, scale=dim**-0.5)
    kept = None if residual == "off" else compress_residual(sparse_residual(q, q, q, groups, selection, dense), residual)
    assert AnchorState(0, (), groups, selection, kept).nbytes == state_bytes(recipe, rows, heads, tokens, dim)


def test_auto_residual_is_taken_as_int4():
    auto, int4 = (state_bytes(Recipe(0.1, residual=r), 1, 12, 32760, 128) for r in ("auto", "int4"))
    assert auto == int4


@pytest.mark.parametrize(
    ("free", "working", "budget"),
    [(100, 10, 75), (100, 60, 40), (100, 200, 0), (0, 0, 0)],
)
def test_budget_leaves_room_for_the_forward_pass_and_a_quarter(free, working, budget):
    assert cache_budget(free, working) == budget
