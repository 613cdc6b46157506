"""Groups of 128 similar queries that will share one selection of keys."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_bhsd, check_cells
from ..registry import AUTO, call
from ..shapes import GROUP_SIZE, CellOrder, Geometry, QueryGroups, ceil_div

METHODS = ("pddp", "cells")


def group_queries(q: Tensor, *, method: str = "pddp", cells: CellOrder | None = None, backend: str = AUTO) -> QueryGroups:
    """Groups of exactly C = 128 queries of q (B, H, S, D); only the last of a head may be short.

    pddp: by content, per row and head: split along the principal direction, recursively; order (B, H, G*C).
    cells: by position: the runs of 128 of the cell order `cells`, one order (1, 1, G*C) for all rows and heads.
    """
    check_bhsd("group_queries", q=q)
    if method == "cells":
        if cells is None:
            raise ValueError("group_queries: method 'cells' needs the cell order; pass cells=cell_order(...) or use method 'pddp'")
        check_cells("group_queries", cells, q.shape[2])
        slack = ceil_div(len(cells), GROUP_SIZE) * GROUP_SIZE - len(cells)
        order = pad(cells.order.to(q.device, torch.int32), (0, slack), value=-1)
        return QueryGroups(order[None, None], len(cells))
    if method != "pddp":
        raise ValueError(f"group_queries: method is {method!r}; choose one of {', '.join(METHODS)}")
    return call("group_queries", Geometry.of(q, q), backend, q)
