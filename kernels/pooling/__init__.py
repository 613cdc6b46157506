"""Mean key and value of each cell: the fresh, pooled account of the keys a group does not select."""
from __future__ import annotations

from torch import Tensor

from ..checks import check_bhsd, check_cells, check_same_length, is_cell_size
from ..registry import AUTO, call
from ..shapes import CellOrder, Geometry, PooledTail


def pool_cells(k: Tensor, v: Tensor, cells: CellOrder, size: int, *, backend: str = AUTO) -> PooledTail:
    """Means of k and v (B, H, S, D) over all keys of each cell of `size` tokens, (B, H, ceil(S / size), D) in their dtype.

    size 128, 64 or 32 in practice; any positive size works (1: the keys themselves, in cell order).
    """
    check_bhsd("pool_cells", k=k, v=v)
    check_same_length("pool_cells", k=k, v=v)
    check_cells("pool_cells", cells, k.shape[2])
    if not is_cell_size(size):
        raise ValueError(f"pool_cells: size is {size!r}; a cell has at least one token (32, 64 or 128 are usual)")
    return call("pool_cells", Geometry.of(k, k), backend, k, v, cells.to(k.device), size)
