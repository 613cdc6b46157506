"""Which keys each group of queries attends to."""
from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from ..checks import check_bhsd, check_cells, check_groups, check_same_length, check_scale
from ..registry import AUTO, call, load
from ..shapes import GRANULARITIES, CellOrder, Geometry, KeySelection, QueryGroups, key_runs
from .bits import expand_selection, pack_bits, unpack_bits, unselected_counts

__all__ = ["expand_selection", "pack_bits", "select_keys", "select_keys_lagged", "unpack_bits", "unselected_counts"]

# select_keys_lagged takes an lse of an earlier step that is off by up to this factor (a power of 2) either way: what p = exp(score - lse)
# may sum to for all of it that matters to be normal numbers of the dtype (float16 has few, and is lifted by LAGGED_LIFT).
LAGGED_REACH = {torch.float32: 60, torch.bfloat16: 60, torch.float16: 6}
LAGGED_LIFT = {torch.bfloat16: 0, torch.float16: 8}


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
    kept = _check(op, q, k, lse, groups, density, cells, granularity, kept)
    scale = check_scale(op, scale, q)
    return call(op, Geometry.of(q, k), backend, q, k, lse, groups, density, cells.to(q.device), granularity, kept, scale)


def select_keys_lagged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_before: Tensor,
    groups: QueryGroups,
    *,
    density: float,
    cells: CellOrder,
    granularity: str = "token",
    kept: tuple[tuple[int, int], ...] = (),
    scale: float | None = None,
) -> tuple[Tensor, Tensor, KeySelection]:
    """Dense attention and, from the same pass over the keys, a selection: output (B, H, Sq, D), lse (B, H, Sq) and the KeySelection.

    Output and lse are those of dense_attention. The selection is that of select_keys with lse_before (B, H, Sq) float32, the lse of an
    earlier step: each query of a group then counts exp(lse - lse_before) times as much as it should, its keys' shares among each other
    are exact. Queries whose two lse differ by more than 4 in float16, else 41, or whose lse_before is infinite, count exactly.
    v as k; everything else as in select_keys. Without a Triton kernel for these inputs two operations do it.
    """
    op = "select_keys_lagged"
    kept = _check(op, q, k, lse_before, groups, density, cells, granularity, kept)
    check_bhsd(op, q=q, v=v)
    check_same_length(op, k=k, v=v)
    scale = check_scale(op, scale, q)
    fused = _lagged_backend(Geometry.of(q, k))
    if fused is not None:
        return fused.select_keys_lagged(q, k, v, lse_before, groups, density, cells.to(q.device), granularity, kept, scale)
    from ..attention import dense_attention  # imports this module

    output, lse = dense_attention(q, k, v, scale=scale)
    reach = LAGGED_REACH[q.dtype] * math.log(2)
    weights = torch.where((lse - lse_before).abs() <= reach, lse_before, lse)
    return output, lse, select_keys(q, k, weights, groups, density=density, cells=cells, granularity=granularity, kept=kept, scale=scale)


def _lagged_backend(geometry: Geometry) -> ModuleType | None:
    module, _ = load(".selection.triton_lagged")
    return module if module is not None and module.why_not(geometry) is None else None


def _check(
    op: str, q: Tensor, k: Tensor, lse: Tensor, groups: QueryGroups, density: float, cells: CellOrder, granularity: str,
    kept: tuple[tuple[int, int], ...],
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Raises what the arguments of a selection deserve; returns the kept ranges."""
    check_bhsd(op, q=q, k=k)
    check_groups(op, groups, q)
    check_cells(op, cells, k.shape[2])
    if lse.shape != q.shape[:3] or lse.dtype != torch.float32 or lse.device != q.device:
        raise ValueError(
            f"{op}: lse is {tuple(lse.shape)} {lse.dtype} on {lse.device}; needed is {tuple(q.shape[:3])} torch.float32 on {q.device}"
        )
    if not density >= 0:
        raise ValueError(f"{op}: density is {density}; allowed is 0 to 1, the share of keys to select")
    if granularity not in GRANULARITIES:
        raise ValueError(f"{op}: granularity is {granularity!r}; choose one of {', '.join(GRANULARITIES)}")
    return key_runs(kept, k.shape[2])
