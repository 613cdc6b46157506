"""Attention over all keys, and over the keys each group of queries selected."""
from __future__ import annotations

from torch import Tensor

from ..checks import check_bhsd, check_groups, check_memory, check_same_length, check_scale, check_selection, is_cell_size
from ..quantise import PRECISIONS
from ..registry import AUTO, SPARSE, call
from ..residual import Residual
from ..shapes import Geometry, KeySelection, PooledTail, QueryGroups, ceil_div


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, backend: str = AUTO) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v in q's dtype (B, H, Sq, D), and the natural log of each row's sum of exponentials, (B, H, Sq) float32.

    q (B, H, Sq, D), k and v (B, H, Sk, D), any strides. scale None: 1 / sqrt(D).
    """
    check_bhsd("dense_attention", q=q, k=k, v=v)
    check_same_length("dense_attention", k=k, v=v)
    return call("dense_attention", Geometry.of(q, k), backend, q, k, v, check_scale("dense_attention", scale, q))


def token_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: QueryGroups,
    selection: KeySelection,
    *,
    tail: PooledTail | int | None = None,
    residual: Residual | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    precision: str = "half",
    backend: str = AUTO,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query over the keys its group selected, (B, H, Sq, D) in q's dtype and order.

    return_lse: return (output, lse), lse (B, H, Sq) float32 as of dense_attention.
    tail: one softmax over the selected keys and the pooled keys, whose logits get + ln n, n = keys of that cell the group did
    not select; cells with n = 0 are left out. A number pools k and v into cells of that many tokens here, which is faster than pool_cells
    before. residual: added to the output (never to the lse).
    precision: what queries and keys are multiplied in, see quantise.py; "int8" and "fp8" are faster and less exact. A residual belongs to
    the precision it was made in.
    A group without selected keys sees the tail alone; without a tail its output is 0 (plus residual) and its lse -inf.
    """
    op = SPARSE
    _check(op, q, k, v, groups, selection, tail, precision)
    if residual is not None:
        _check_residual(op, residual, (*q.shape[:2], groups.order.shape[-1], q.shape[3]), q)
    scale = check_scale(op, scale, q)
    inputs = q, k, v, groups, selection, tail, residual, scale, return_lse, None
    out, lse = call(op, Geometry.of(q, k, precision), backend, *inputs, *_named(precision))
    return (out, lse) if return_lse else out


def sparse_residual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: QueryGroups,
    selection: KeySelection,
    dense: Tensor,
    *,
    tail: PooledTail | int | None = None,
    scale: float | None = None,
    precision: str = "half",
    backend: str = AUTO,
) -> Tensor:
    """R = dense - token_sparse_attention(...) in group order, (B, H, G*C, D) in q's dtype, 0 past the last query.

    dense (B, H, Sq, D): what attention over all keys gave. R is rounded once, so that it is more exact than the difference of outputs.
    """
    op = SPARSE
    _check(op, q, k, v, groups, selection, tail, precision)
    check_bhsd(op, q=q, dense=dense)
    check_same_length(op, q=q, dense=dense)
    scale = check_scale(op, scale, q)
    inputs = q, k, v, groups, selection, tail, None, scale, False, dense
    return call(op, Geometry.of(q, k, precision), backend, *inputs, *_named(precision))[0]


def _named(precision: str) -> tuple[str, ...]:
    """The last argument of backends that name it in PRECISIONS; the others get none."""
    return () if precision == "half" else (precision,)


def _check(
    op: str, q: Tensor, k: Tensor, v: Tensor, groups: QueryGroups, selection: KeySelection, tail: PooledTail | int | None, precision: str
) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision is {precision!r}; choose one of {', '.join(PRECISIONS)}")
    check_bhsd(op, q=q, k=k, v=v)
    check_same_length(op, k=k, v=v)
    check_groups(op, groups, q)
    check_selection(op, selection, q, k)
    size = tail.size if isinstance(tail, PooledTail) else tail
    if size is not None and not is_cell_size(size):
        raise ValueError(f"{op}: tail is {size!r}; needed is a PooledTail, a number of tokens per cell (32, 64 or 128 are usual), or None")
    if isinstance(tail, PooledTail):
        cells = ceil_div(k.shape[2], size)
        if tuple(tail.k.shape) != (*k.shape[:2], cells, k.shape[3]) or tail.k.shape != tail.v.shape or tail.k.device != q.device:
            raise ValueError(
                f"{op}: the tail is {tuple(tail.k.shape)} on {tail.k.device}; needed is {(*k.shape[:2], cells, k.shape[3])} on {q.device}. "
                "Pool the keys of this call (pool_cells)"
            )
        check_bhsd(op, q=q, **{"tail.k": tail.k, "tail.v": tail.v})


def _check_residual(op: str, residual: Residual, shape: tuple[int, ...], q: Tensor) -> None:
    if not isinstance(residual, Residual):
        raise ValueError(f"{op}: the residual is a {type(residual).__name__}; needed is a Residual (compress_residual)")
    if tuple(residual.shape) != shape:
        raise ValueError(
            f"{op}: the residual is {tuple(residual.shape)} in group order; q and groups need {shape}. Compress it with the same groups"
        )
    for part in residual.payload:
        check_memory(op, "the residual's payload", part, part.dtype, q.device)
