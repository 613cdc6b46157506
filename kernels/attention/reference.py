"""The definition of both attentions in float32 PyTorch, one head at a time."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..chunks import chunks
from ..residual import Residual
from ..selection.bits import places_of, unselected_in_cells
from ..shapes import GROUP_SIZE, Geometry, KeySelection, PooledTail, QueryGroups

NAME = "reference"

# (queries (g, C, D), keys (g, K, D), values (g, K, D), bias (g, K) or None) -> output (g, C, D), lse (g, C)
Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], tuple[Tensor, Tensor]]


def why_not(geometry: Geometry) -> str | None:
    return None


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[b, h].float(), v[b, h].float()
            for rows in chunks(q.shape[2], 4 * k.shape[2], q.device, at_least=GROUP_SIZE):
                o, l = attend(q[b, h, rows].float()[None], keys[None], values[None], None, scale)
                out[b, h, rows], lse[b, h, rows] = o[0], l[0]
    return out, lse


def token_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, groups: QueryGroups, selection: KeySelection,
    tail: PooledTail | None, residual: Residual | None, scale: float,
) -> tuple[Tensor, Tensor]:
    return by_gathering(q, k, v, groups, selection, tail, residual, partial(attend, scale=scale))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention with its log-sum-exp; every query has at least one key whose bias is not -inf."""
    scores = torch.bmm(q * scale, k.mT)
    if bias is not None:
        scores += bias[:, None, :]
    top = scores.amax(2, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(2, keepdim=True)
    return torch.bmm(weights, v).div_(total), (top + total.log()).squeeze(2)


def by_gathering(
    q: Tensor, k: Tensor, v: Tensor, groups: QueryGroups, selection: KeySelection,
    tail: PooledTail | None, residual: Residual | None, attend: Attend,
) -> tuple[Tensor, Tensor]:
    """Token-sparse attention that copies each group's rows together and leaves the softmax to `attend`.

    Per head, keys (and values) are laid out once as [keys in cell order][pooled keys]; the rows of a group are its selected
    places and all cells of the tail. A bias carries ln n of the tail, and -inf for padding where counts differ.
    """
    batch, heads, length, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
    orders = groups.expanded(batch, heads)
    for b in range(batch):
        for h in range(heads):
            order = orders[b, h, :length].long()
            in_groups = q.new_zeros(groups.count * GROUP_SIZE, dim, dtype=torch.float32)
            in_groups[:length] = q[b, h].index_select(0, order)
            keys = _rows(k[b, h], selection, None if tail is None else tail.k[b, h])
            values = _rows(v[b, h], selection, None if tail is None else tail.v[b, h])
            unselected = None if tail is None else unselected_in_cells(selection, b, h, tail.size)
            o, l = _head(in_groups.view(groups.count, GROUP_SIZE, dim), keys, values, selection, unselected, (b, h), attend)
            o = o.view(-1, dim)
            if residual is not None:
                o += residual.expand(b, h)
            out[b, h].index_copy_(0, order, o[:length].to(q.dtype))
            lse[b, h].index_copy_(0, order, l.view(-1)[:length])
    return out, lse


def _rows(x: Tensor, selection: KeySelection, pooled: Tensor | None) -> Tensor:
    """[x in cell order][pooled] in float32, (S + nb, D)."""
    rows = x.index_select(0, selection.cells.order).float()
    return rows if pooled is None else torch.cat([rows, pooled.float()])


def _head(
    q: Tensor, keys: Tensor, values: Tensor, selection: KeySelection, unselected: Tensor | None, head: tuple[int, int], attend: Attend,
) -> tuple[Tensor, Tensor]:
    """Output (G, C, D) and lse (G, C) float32 of one head's groups q (G, C, D)."""
    places, counts = places_of(selection, *head)  # (G, widest) with 0 after the count, (G,)
    widest = places.shape[1]
    index, bias = places, None
    ragged = bool((counts != widest).any())
    if ragged or unselected is not None:
        bias = q.new_zeros(places.shape)
        if ragged:
            bias.masked_fill_(torch.arange(widest, device=q.device) >= counts[:, None], float("-inf"))
    if unselected is not None:
        pooled = torch.arange(len(selection.cells), keys.shape[0], device=q.device).expand(len(counts), -1)
        index = torch.cat([places, pooled], 1)
        bias = torch.cat([bias, unselected.log()], 1)

    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"))
    width = index.shape[1]
    if width == 0:
        return out, lse
    for some in chunks(len(counts), 4 * width * (2 * q.shape[2] + GROUP_SIZE), q.device):
        at = index[some].reshape(-1)
        rows = (-1, width, q.shape[2])
        some_bias = None if bias is None else bias[some]
        o, l = attend(q[some], keys.index_select(0, at).view(rows), values.index_select(0, at).view(rows), some_bias)
        if ragged and unselected is None:  # a group without any key: nothing to attend to
            none = counts[some] == 0
            o, l = o.masked_fill(none[:, None, None], 0), l.masked_fill(none[:, None], float("-inf"))
        out[some], lse[some] = o, l
    return out, lse
