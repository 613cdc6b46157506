"""Compares a backend's result with a few rows of it computed in float32 PyTorch, so that a kernel that is wrong here is found out.

The rows are the first, the last and some between, of the first, the middle and the last head. What rounding may do is judged by
the numbers themselves: an output row may be off by a few roundings of its largest contributions, so that peaked attention and
outliers are no reason to fail, while another scale, a missing tile of keys or a missing residual is far outside. A low precision is
compared with what its numbers give exactly (quantise.py), so that its own error is no excuse for another.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .pooling.reference import pool_cells
from .quantise import LARGEST, key_mean, rounded
from .registry import Mismatch
from .selection.bits import selected_keys, unpack_bits, unselected_in_cells
from .selection.reference import _sums, _units_kept, _units_to_choose
from .shapes import GRANULARITIES, GROUP_SIZE, KeySelection, PooledTail, QueryGroups, ceil_div

ROWS = 8  # query rows compared of each head or group
# Relative error of a row: 2 steps of the dtype for bfloat16, 4 for float16. float32 counts as bfloat16, in which kernels compute it.
TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8, torch.float32: 2.0**-6}
LSE_TOLERANCE = 2.0**-6  # absolute; some kernels sum probabilities that are already rounded to bfloat16
MASS_TOLERANCE = 1e-2
NEGLIGIBLE_MASS = 1e-9  # share of a group's mass below which one key is as good as another
LOGIT_STEP = 2.0**-18  # error of a logit / (|q| |k| scale): float32 sums in any order, a fast exp2

Read = Callable[[Tensor], Tensor]  # of an input as the float32 numbers the backend is to compute with


class Finding(NamedTuple):
    """what is wrong unless `excess` <= 1; excess: error / allowed error, a scalar on the device."""

    what: str
    excess: Tensor


_INPUTS = "the inputs hold NaN or infinities"


def variant(op: str, args: tuple) -> tuple:
    """What of the arguments, beside the geometry, makes kernels take another path."""
    if op == "token_sparse_attention":
        selection, tail, residual, _, with_lse, dense, *_ = args[4:]  # the precision is of the geometry
        size = tail.size if isinstance(tail, PooledTail) else tail
        return selection.granularity, size, residual and residual.format, with_lse, dense is not None
    if op == "select_keys":
        return args[6], bool(args[7])  # granularity, kept ranges
    return (args[3],) if op == "pool_cells" else ()


def check(op: str, result, args: tuple) -> bool:
    """True if the result of `op` on args (as backends get them) is right; False if the inputs are not finite: nothing can be said.

    Raises registry.Mismatch. Waits for the device.
    """
    reads: list[Read] = [Tensor.float]
    if args[0].dtype == torch.float32:
        reads.append(lambda x: x.bfloat16().float())
    with torch.no_grad(), torch.autocast(args[0].device.type, enabled=False):
        found = [list(_CHECKS[op](result, args, read)) for read in reads]
        excess = torch.stack([f.excess.float() for each in found for f in each]).view(len(reads), -1).tolist()
    for each, by in zip(found, excess, strict=True):
        wrong = [(f.what, e) for f, e in zip(each, by, strict=True) if not e <= 1]
        if not wrong:
            return True
        if wrong[0][0] == _INPUTS:
            return False
    what, by = wrong[0]
    if math.isnan(by):
        raise Mismatch(f"{what} (NaN)")
    raise Mismatch(what if math.isinf(by) else f"{what} ({by:.3g} times the error allowed)")


def _dense_attention(result, args: tuple, read: Read) -> Iterator[Finding]:
    q, k, v, scale = args
    out, lse = result
    _expect("the output", out, q.shape, q.dtype)
    _expect("the log-sum-exp", lse, q.shape[:3], torch.float32)
    for b, h in _heads(q):
        rows = _spread(q.shape[2])
        yield _finite(q[b, h, rows], k[b, h], v[b, h])
        part = read(k[b, h]), read(v[b, h]), None
        yield from _rows_agree(out[b, h, rows], lse[b, h, rows], read(q[b, h, rows]), [part], None, scale)


def _token_sparse_attention(result, args: tuple, read: Read) -> Iterator[Finding]:
    q, k, v, groups, selection, tail, residual, scale, with_lse, dense, *named = args
    precision = named[0] if named else "half"
    out, lse = result
    _expect("the output", out, q.shape if dense is None else (*q.shape[:2], groups.count * GROUP_SIZE, q.shape[3]), q.dtype)
    if with_lse:
        _expect("the log-sum-exp", lse, q.shape[:3], torch.float32)
    orders = groups.expanded(*q.shape[:2])
    for b, h, g in _some_groups(q):
        members = orders[b, h, g * GROUP_SIZE : min(q.shape[2], (g + 1) * GROUP_SIZE)].long()
        whole = q[b, h].index_select(0, members)  # whose queries share a scale
        some = _spread(len(members))
        rows, slots = members[some], [g * GROUP_SIZE + i for i in some]
        own = _of_group(selection, b, h, g)
        chosen = selected_keys(own, 0, 0)[0][selection.cells.place]  # (S,) in token order
        yield _finite(whole, k[b, h], v[b, h])
        bias = torch.zeros(chosen.shape, dtype=torch.float32, device=q.device).masked_fill_(~chosen, -math.inf)
        mean = key_mean(read(k[b, h])) if precision != "half" else None
        parts = [(_keys(read(k[b, h]), mean, precision), read(v[b, h]), bias)]
        if tail is not None:
            if isinstance(tail, PooledTail):
                size, keys, values = tail.size, read(tail.k[b, h]), read(tail.v[b, h])
            else:
                exact = k[b, h] if precision == "half" else read(k[b, h])
                own_head = pool_cells(exact[None, None], v[b, h][None, None], selection.cells, tail)
                size, values = tail, read(own_head.v[0, 0])
                keys = read(own_head.k[0, 0]) if precision == "half" else own_head.k[0, 0]
            yield _finite(keys, values)
            parts.append((_keys(keys, mean, precision), values, unselected_in_cells(own, 0, 0, size)[0].float().log()))
        added = None if residual is None else residual.expand(b, h)[slots]
        if added is not None:
            yield _finite(added)
        rows_out = out[b, h, rows] if dense is None else -out[b, h, slots]
        if dense is not None:
            added = -dense[b, h, rows].float()  # the difference is the output less dense, with the other sign
            yield _finite(added)
        rows_lse = lse[b, h, rows] if with_lse else None
        if with_lse and mean is not None:
            rows_lse = rows_lse - read(whole)[some] @ mean * scale
        queries = rounded(read(whole), precision, over=(0, 1))[some]
        codes = _code_step(queries, [keys for keys, _, _ in parts], precision) * abs(scale)
        yield from _rows_agree(rows_out, rows_lse, queries, parts, added, scale, codes)


def _keys(keys: Tensor, mean: Tensor | None, precision: str) -> Tensor:
    """Keys (n, D) float32 as `precision` multiplies them; mean (D,) of the head's keys, None in half."""
    return keys if mean is None else rounded(keys - mean, precision)


def _code_step(queries: Tensor, keys: list[Tensor], precision: str) -> Tensor:
    """What the product of a rounded query (n, D) and a key changes by when one number of the key gets the next code, at most, (n,).

    The mean that keys are smoothed by depends on the order of its sum, and so do codes of numbers half way between two.
    """
    if precision == "half":
        return queries.new_zeros(len(queries))
    step = {"int8": 1, "fp8": 8}[precision] / LARGEST[precision]  # of the largest number; e4m3's for a quarter of it
    return queries.abs().amax(1) * torch.stack([k.abs().amax() for k in keys]).amax() * step


def _rows_agree(
    out: Tensor, lse: Tensor | None, queries: Tensor, parts: list[tuple[Tensor, Tensor, Tensor | None]], added: Tensor | None, scale: float,
    slack: Tensor | float = 0.0,
) -> Iterator[Finding]:  # fmt: skip
    """Rows of an output (n, D) and lse (n,) against softmax attention of queries (n, D) over the keys of all parts, plus `added` (n, D).

    A part is keys and values (m, D) and what is added to the keys' logits, (m,) or None. slack (n,): by what a logit may be off beside
    the rounding of float32.
    """
    logits = [queries @ keys.mT * scale + (0.0 if bias is None else bias) for keys, _, bias in parts]
    scores = torch.cat(logits, 1)
    true_lse = scores.logsumexp(1)
    weights = torch.where(scores == -math.inf, 0.0, (scores - true_lse[:, None]).exp()).split([s.shape[1] for s in logits], 1)
    truth = sum(w @ values for w, (_, values, _) in zip(weights, parts, strict=True))
    # Errors of the weights are independent: they add up as the root of the sum of squares.
    spread = sum(w.square() @ values.square() for w, (_, values, _) in zip(weights, parts, strict=True)).sqrt()
    longest = torch.stack([torch.linalg.vector_norm(keys, dim=1).amax() for keys, _, _ in parts]).amax()
    drift = (LOGIT_STEP * abs(scale) * torch.linalg.vector_norm(queries, dim=1) * longest + slack).clamp_max(1.0)  # (n,)
    allowed = (TOLERANCE[out.dtype] + drift) * (_rms(truth) + _rms(spread)) + torch.finfo(out.dtype).tiny
    if added is not None:
        truth = truth + added
        allowed = allowed + TOLERANCE[out.dtype] * (_rms(truth) + _rms(added))
    in_range = (truth.abs() <= torch.finfo(out.dtype).max).all(1)
    error = torch.where(in_range, _rms(out.float() - truth), 0.0)
    yield Finding("output rows differ from the definition", (error / allowed).amax())
    if lse is not None:
        empty = true_lse == -math.inf
        error = torch.where(empty, torch.where(lse == -math.inf, 0.0, math.inf), (lse - true_lse).abs())
        yield Finding("log-sum-exps differ from the definition", (error / (LSE_TOLERANCE + 4 * drift)).amax())


def _select_keys(result: KeySelection, args: tuple, read: Read) -> Iterator[Finding]:
    q, k, lse, groups, density, cells, granularity, kept, scale = args
    keys, per_bit = k.shape[2], GRANULARITIES[granularity]
    sizes = cells.sizes(per_bit)
    shape = (*q.shape[:2], groups.count)
    if result.granularity != granularity:
        raise Mismatch(f"the selection is by {result.granularity}, not by {granularity}")
    _expect("the selection's bits", result.bits, (*shape, ceil_div(sizes.numel(), 32)), torch.int32)
    _expect("the selection's counts", result.counts, shape, torch.int32)
    _expect("the retained mass", result.retained, shape, torch.float32)
    always = _units_kept(kept, cells, per_bit)
    budget = _units_to_choose(density, sizes, always, per_bit)
    orders = groups.expanded(*q.shape[:2])
    for b, h, g in _some_groups(q):
        rows = orders[b, h, g * GROUP_SIZE : min(q.shape[2], (g + 1) * GROUP_SIZE)].long()
        queries, row_lse, all_keys = read(q[b, h].index_select(0, rows)), lse[b, h].index_select(0, rows), read(k[b, h])
        share = (queries @ all_keys.mT).mul_(scale).sub_(row_lse[:, None]).exp_().masked_fill_((row_lse == -math.inf)[:, None], 0)
        mass = share.sum(0)[cells.order]
        mass = mass if per_bit == 1 else _sums(mass, per_bit)
        total = mass.sum()
        yield _finite(queries, all_keys, total)

        bits = unpack_bits(result.bits[b, h, g], 32 * result.bits.shape[3])
        chosen, free = bits[: sizes.numel()], bits[: sizes.numel()] & ~always
        held = (chosen * sizes).sum()
        yield _unless(~bits[sizes.numel() :].any(), f"bits past the last of {keys} keys are set")
        yield _unless(~(always & ~chosen).any(), "a key that is always kept is not selected")
        yield _unless(free.sum() == budget, f"a group did not select the {budget} keys or cells of its budget")
        yield _unless(held == result.counts[b, h, g], "counts differ from the bits")
        reach = torch.linalg.vector_norm(queries, dim=1).amax() * torch.linalg.vector_norm(all_keys, dim=1).amax()
        slack = (MASS_TOLERANCE + 2 * LOGIT_STEP * abs(scale) * reach).clamp_max(0.5)
        total = total.clamp_min(torch.finfo(torch.float32).tiny)
        lightest = mass.masked_fill(~free, math.inf).amin() + NEGLIGIBLE_MASS * total
        heaviest_left = mass.masked_fill(chosen | always, 0).amax()
        # Without mass, equal: 0 / 0 would be NaN.
        excess = torch.where(heaviest_left > 0, (1 - slack) * heaviest_left / lightest, 0.0)
        yield Finding("a lighter key was selected before a heavier one", excess)
        retained = (mass * chosen).sum() / total
        yield Finding("the retained mass differs from the definition", (result.retained[b, h, g] - retained).abs() / slack)


def _group_queries(result: QueryGroups, args: tuple, read: Read) -> Iterator[Finding]:
    (q,) = args
    batch, heads, length, _ = q.shape
    width = ceil_div(length, GROUP_SIZE) * GROUP_SIZE
    if result.length != length:
        raise Mismatch(f"the groups are of {result.length} queries, not of {length}")
    _expect("the order of the queries", result.order, (batch, heads, width), torch.int32)
    order, last = result.order[..., :length], length - length % GROUP_SIZE
    yield _finite(q)
    everyone = torch.arange(length, dtype=torch.int32, device=q.device)
    yield _unless((order.sort(dim=2).values == everyone).all(), "the order is no permutation of the queries")
    yield _unless((result.order[..., length:] == -1).all(), "places past the last query are not -1")
    for part in (order[..., :last].unflatten(2, (-1, GROUP_SIZE)), order[..., last:]) if last else (order,):
        yield _unless((part.diff(dim=-1) > 0).all(), "the queries of a group do not ascend")


def _pool_cells(result: PooledTail, args: tuple, read: Read) -> Iterator[Finding]:
    k, v, cells, size = args
    count = ceil_div(k.shape[2], size)
    for name, x, pooled in (("keys", k, result.k), ("values", v, result.v)):
        _expect(f"the pooled {name}", pooled, (*x.shape[:2], count, x.shape[3]), x.dtype)
        step = torch.finfo(torch.bfloat16 if x.dtype == torch.float32 else x.dtype).eps
        for b, h in _heads(x):
            for c in {0, count // 2, count - 1}:
                rows = x[b, h].index_select(0, cells.order[c * size : (c + 1) * size])
                yield _finite(rows)
                rows = read(rows)
                truth = rows.mean(0)
                allowed = step * truth.abs() + LOGIT_STEP * rows.abs().mean(0) + torch.finfo(x.dtype).tiny
                yield Finding(f"pooled {name} are not the mean of their cell", ((pooled[b, h, c].float() - truth).abs() / allowed).amax())


_CHECKS = {
    "dense_attention": _dense_attention,
    "group_queries": _group_queries,
    "pool_cells": _pool_cells,
    "select_keys": _select_keys,
    "token_sparse_attention": _token_sparse_attention,
}


def _expect(what: str, x: Tensor, shape: tuple, dtype: torch.dtype) -> None:
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        raise Mismatch(f"{what} is {tuple(x.shape)} {x.dtype}, not {tuple(shape)} {dtype}")


def _finite(*tensors: Tensor) -> Finding:
    """That all sums are finite: they are not where any entry is NaN or infinite."""
    sums = torch.stack([t.sum(dtype=torch.float32) for t in tensors])
    return _unless(sums.isfinite().all(), _INPUTS)


def _unless(right: Tensor, what: str) -> Finding:
    return Finding(what, torch.where(right, 0.0, math.inf))


def _rms(x: Tensor) -> Tensor:
    """Of each row of x (n, D)."""
    return x.square().mean(1).sqrt()


def _spread(count: int) -> list[int]:
    """Up to ROWS of 0..count-1, evenly, with the first and the last."""
    return sorted({round(i * (count - 1) / (ROWS - 1)) for i in range(ROWS)})


def _heads(x: Tensor) -> list[tuple[int, int]]:
    """First, middle and last (b, h) of x (B, H, ...)."""
    batch, heads = x.shape[:2]
    return list(dict.fromkeys([(0, 0), (batch // 2, heads // 2), (batch - 1, heads - 1)]))


def _some_groups(q: Tensor) -> list[tuple[int, int, int]]:
    """(b, h, g): the last group, which may be short, of the first head, a middle one, and the first of the last head."""
    batch, heads, length = q.shape[:3]
    count = ceil_div(length, GROUP_SIZE)
    some = [(0, 0, count - 1), (batch // 2, heads // 2, count // 2), (batch - 1, heads - 1, 0)]
    return list(dict.fromkeys(some))


def _of_group(selection: KeySelection, b: int, h: int, g: int) -> KeySelection:
    """The selection of one group, (1, 1, 1, words)."""
    at = slice(b, b + 1), slice(h, h + 1), slice(g, g + 1)
    return replace(selection, bits=selection.bits[at], counts=selection.counts[at], retained=selection.retained[at])
