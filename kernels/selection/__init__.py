"""Which keys each group of queries attends to."""
from __future__ import annotations

from torch import Tensor

from ..checks import check_bhsd, check_cells, check_groups
from ..registry import AUTO, call
from ..shapes import GRANULARITIES, CellOrder, Geometry, KeySelection, QueryGroups, key_runs
from .bits import expand_selection, pack_bits, unpack_bits, unselected_counts

__all__ = ["expand_selection", "pack_bits", "select_keys", "unpack_bits", "unselected_counts"]


def select_keys(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    groups: QueryGroups,
    *,
    density: float,
    cells: CellOrder,
    granularity: str = "token",
    kept: tuple[tuple[int, int], ...] = (),
    scale: float | None = None,
    backend: str = AUTO,
) -> KeySelection:
    """The keys with the largest attention mass for each group, mass[g, j] = sum over the group's queries of exp(q.k_j * scale - lse).

    q (B, H, Sq, D), k (B, H, Sk, D), lse (B, H, Sq) float32; rows whose lse is -inf add no mass. density in 0..1: higher
    keeps more keys (slower, more exact); 1 or more selects every key. kept: half-open token ranges of keys that every group
    selects, on top of the budget.

    token: the key_budget(density, n) heaviest of the n keys that are not kept; of equal masses the lower token index first.
    cell32: the same with the cells of 32 keys that hold no kept key: as many of the heaviest as cover key_budget(density, n),
    n = keys of those cells, a cell's mass being the sum over its keys (of equal masses the lower cell first). Cells with a
    kept key are selected whole. The last cell may be short, so a group that selects it has up to 31 keys fewer.
    """
    op = "select_keys"
    check_bhsd(op, q=q, k=k)
    check_groups(op, groups, q)
    check_cells(op, cells, k.shape[2])
    if lse.shape != q.shape[:3] or lse.device != q.device:
        raise ValueError(f"{op}: lse is {tuple(lse.shape)} on {lse.device}; needed is {tuple(q.shape[:3])} on {q.device}")
    if not density >= 0:
        raise ValueError(f"{op}: density is {density}; allowed is 0 to 1, the share of keys to select")
    if granularity not in GRANULARITIES:
        raise ValueError(f"{op}: granularity is {granularity!r}; choose one of {', '.join(GRANULARITIES)}")
    kept = key_runs(kept, k.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return call(op, Geometry.of(q, k), backend, q, k, lse, groups, density, cells.to(q.device), granularity, kept, scale)
