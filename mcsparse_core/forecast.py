"""Memory of a run before it begins: pure functions of sizes."""
from __future__ import annotations

from ..kernels.residual.reference import size_of
from ..kernels.shapes import GRANULARITIES, GROUP_SIZE, ceil_div
from .plan import Recipe

AUTO_RESIDUAL = "int4"  # what `residual auto` is expected to choose; rank 8 takes less, bf16 is its exception
LEFT_FREE = 0.25  # share of the free memory that the cache never takes


def state_bytes(recipe: Recipe, rows: int, heads: int, tokens: int, head_dim: int) -> int:
    """Bytes that one (site, branch) keeps between anchors for so many batch rows (`AnchorState.nbytes`)."""
    groups = ceil_div(tokens, GROUP_SIZE)
    bits = ceil_div(tokens, GRANULARITIES[recipe.granularity])
    order = 4 * groups * GROUP_SIZE * (rows * heads if recipe.grouping == "pddp" else 1)
    selection = 4 * rows * heads * groups * (ceil_div(bits, 32) + 2)
    if recipe.residual == "off":
        return order + selection
    fmt = AUTO_RESIDUAL if recipe.residual == "auto" else recipe.residual
    return order + selection + size_of(fmt, (rows, heads, groups * GROUP_SIZE, head_dim))


def cache_budget(free: int, working: int) -> int:
    """Bytes the cache may take of `free` ones when a forward pass needs `working`; at least a quarter stays free besides."""
    return max(0, min(free - working, int(free * (1 - LEFT_FREE))))
