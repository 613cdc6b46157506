"""The definition of both attentions in float32 PyTorch, one head at a time; on the CPU also the fast way to compute the sparse one."""
from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import chunks
from ..pooling.reference import pool_cells
from ..quantise import PRECISIONS as PRECISIONS
from ..quantise import key_mean, rounded
from ..residual import Residual
from ..selection.bits import places_of, unselected_in_cells
from ..shapes import GROUP_SIZE, Geometry, KeySelection, PooledTail, QueryGroups

NAME = "reference"


def why_not(geometry: Geometry) -> str | None:
    return None


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[b, h].float(), v[b, h].float()
            for rows in chunks(q.shape[2], 4 * k.shape[2], q.device, at_least=GROUP_SIZE):
                # The scale goes into the product's own factor: scaling q beforehand would round it once more.
                scores = torch.addmm(keys.new_zeros(()), q[b, h, rows].float(), keys.mT, beta=0, alpha=scale)
                lse[b, h, rows] = scores.logsumexp(1)
                out[b, h, rows] = torch.softmax(scores, 1) @ values
    return out, lse


def token_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, groups: QueryGroups, selection: KeySelection, tail: PooledTail | int | None,
    residual: Residual | None, scale: float, with_lse: bool, dense: Tensor | None, precision: str = "half",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Output (B, H, S, D) in q's dtype and token order, and the lse (B, H, S) float32 when asked for.

    Given dense (B, H, S, D): dense - output in group order (B, H, G*C, D) instead, 0 past the last query.
    Per head, keys (and values) are laid out once as [keys in cell order][pooled keys], queries in group order.
    precision other than half: of the rounded queries, a scale for each group, and of the rounded keys less their mean, pooled ones too
    (quantise.py); the lse is of the keys as they came.
    """
    batch, heads, length, dim = q.shape
    if isinstance(tail, int):
        tail = pool_cells(k if precision == "half" else k.float(), v, selection.cells, tail)
    shape = (batch, heads, length if dense is None else groups.count * GROUP_SIZE, dim)
    out = torch.zeros(shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device) if with_lse else None
    queries = torch.zeros((groups.count, GROUP_SIZE, dim), dtype=torch.float32, device=q.device)  # slack rows stay 0
    orders = groups.expanded(batch, heads)
    for b in range(batch):
        for h in range(heads):
            order = orders[b, h, :length].long()
            own = q[b, h].index_select(0, order)
            queries.view(-1, dim)[:length] = own
            keys = _rows(k[b, h], selection, None if tail is None else tail.k[b, h])
            if precision != "half":
                mean = key_mean(k[b, h])
                keys = rounded(keys - mean, precision)
            values = _rows(v[b, h], selection, None if tail is None else tail.v[b, h])
            unselected = None if tail is None else unselected_in_cells(selection, b, h, tail.size)
            grouped = rounded(queries, precision, over=(-2, -1))
            o, l = _one_head(grouped, keys, values, *places_of(selection, b, h), unselected, scale, with_lse)
            o = o.view(-1, dim)
            if residual is not None:
                o += residual.expand(b, h)
            if dense is None:
                out[b, h].index_copy_(0, order, o[:length].to(q.dtype))
            else:
                out[b, h, :length] = dense[b, h].index_select(0, order).float() - o[:length]
            if with_lse:
                l = l.view(-1)[:length]
                lse[b, h].index_copy_(0, order, l if precision == "half" else l + own.float() @ mean * scale)
    return out, lse


def _rows(x: Tensor, selection: KeySelection, pooled: Tensor | None) -> Tensor:
    """[x in cell order][pooled] in float32, (S + nb, D)."""
    rows = x.index_select(0, selection.cells.order).float()
    return rows if pooled is None else torch.cat([rows, pooled.float()])


def _one_head(
    queries: Tensor, keys: Tensor, values: Tensor, places: Tensor, counts: Tensor, unselected: Tensor | None,
    scale: float, with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output (G, C, D) and lse (G, C) of queries (G, C, D) over each group's rows of keys and values (S + nb, D).

    places (G, widest) are the rows of the selected keys, of which the first counts (G,) are meant; unselected (G, nb) None
    without a tail. Rows of a chunk of groups are copied together, so that the rest is two batched products and a softmax.
    """
    total, dim = queries.shape[0], queries.shape[2]
    index, bias, first_biased = places, None, places.shape[1]
    ragged = bool((counts != places.shape[1]).any())
    if ragged:  # columns from the smallest count on are padding for some group
        first_biased = int(counts.min())
        padding = torch.arange(first_biased, places.shape[1], device=places.device) >= counts[:, None]
        bias = torch.zeros(padding.shape, dtype=torch.float32, device=places.device).masked_fill_(padding, float("-inf"))
    if unselected is not None:
        pooled = torch.arange(keys.shape[0] - unselected.shape[1], keys.shape[0], device=places.device)
        index = torch.cat([places, pooled.expand(total, -1)], 1)
        logs = unselected.float().log()  # -inf for cells that are selected whole: they drop out
        bias = logs if bias is None else torch.cat([bias, logs], 1)

    width = index.shape[1]
    out = torch.empty_like(queries)
    lse = queries.new_empty(queries.shape[:2]) if with_lse else None
    if width == 0:
        return out.zero_(), None if lse is None else lse.fill_(float("-inf"))
    parts = list(chunks(total, 4 * width * (2 * dim + GROUP_SIZE), queries.device))
    most = parts[0].stop
    # Reused by every chunk: fresh memory of this size costs page faults.
    key_rows, value_rows = queries.new_empty(2, most * width, dim)
    score_rows = queries.new_empty(most, GROUP_SIZE, width)
    for part in parts:
        n = part.stop - part.start
        at = index[part].reshape(-1)
        torch.index_select(keys, 0, at, out=key_rows[: n * width])
        torch.index_select(values, 0, at, out=value_rows[: n * width])
        scores, some_keys = score_rows[:n], key_rows[: n * width].view(n, width, dim)
        torch.baddbmm(scores, queries[part], some_keys.mT, beta=0, alpha=scale, out=scores)
        if bias is not None:
            scores[:, :, first_biased:] += bias[part, None, :]
        if with_lse:
            lse[part] = scores.logsumexp(2)
        torch.softmax(scores, 2, out=scores)
        torch.bmm(scores, value_rows[: n * width].view(n, width, dim), out=out[part])
    if ragged and unselected is None:  # a group without any key: the softmax of nothing is NaN
        out.masked_fill_((counts == 0)[:, None, None], 0)
    return out, lse
