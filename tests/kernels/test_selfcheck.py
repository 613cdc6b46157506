"""Results compared with sampled rows: right backends never fail, wrong ones do."""
import math
from dataclasses import replace

import pytest
import torch

from mc_sparse.kernels import (
    cell_order,
    compress_residual,
    dense_attention,
    group_queries,
    pool_cells,
    select_keys,
    selfcheck,
    sparse_residual,
)
from mc_sparse.kernels.attention import reference as attention
from mc_sparse.kernels.grouping import reference as grouping
from mc_sparse.kernels.pooling import reference as pooling
from mc_sparse.kernels.registry import Mismatch
from mc_sparse.kernels.selection import reference as selecting
from mc_sparse.kernels.shapes import PooledTail
from mc_sparse.kernels.testing import KINDS, make_qkv

LENGTHS = [1, 129, 300]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def case(length=300, *, kind="random", dtype=torch.bfloat16, granularity="token", residual="bf16", kept=()):
    """Inputs of every operation, as backends get them: .args by operation."""
    q, k, v = make_qkv(1, 3, length, 64, kind=kind, dtype=dtype, layout="bshd")
    cells = cell_order(None, before=length)
    scale = 0.125
    out, lse = dense_attention(q, k, v, scale=scale)
    groups = group_queries(q)
    chosen = {"density": 0.4, "cells": cells, "granularity": granularity, "kept": kept, "scale": scale}
    selection = select_keys(q, k, lse, groups, **chosen)
    tail = pool_cells(k, v, cells, 32)
    rest = compress_residual(sparse_residual(q, k, v, groups, selection, out, tail=tail, scale=scale), residual)
    return {
        "dense_attention": (q, k, v, scale),
        "group_queries": (q,),
        "pool_cells": (k, v, cells, 32),
        "select_keys": (q, k, lse, groups, *chosen.values()),
        "token_sparse_attention": (q, k, v, groups, selection, tail, rest, scale, True, None),
    }


REFERENCE = {
    "dense_attention": attention.dense_attention,
    "group_queries": grouping.group_queries,
    "pool_cells": pooling.pool_cells,
    "select_keys": selecting.select_keys,
    "token_sparse_attention": attention.token_sparse_attention,
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_right(kind, dtype, length):
    for op, args in case(length, kind=kind, dtype=dtype).items():
        assert selfcheck.check(op, REFERENCE[op](*args), args), op


@pytest.mark.parametrize("residual", ["bf16", "fp8", "int4", "int2", "rank-8", "rank-128"])
@pytest.mark.parametrize("granularity, kept", [("token", ()), ("token", ((3, 40), (290, 300))), ("cell32", ()), ("cell32", ((31, 33),))])
def test_the_reference_is_right_in_every_variant(granularity, kept, residual):
    args = case(granularity=granularity, kept=kept, residual=residual)
    for op in ("select_keys", "token_sparse_attention"):
        assert selfcheck.check(op, REFERENCE[op](*args[op]), args[op])
    a = args["token_sparse_attention"]
    dense = torch.randn(a[0].shape, generator=torch.Generator().manual_seed(0)).to(a[0].dtype)
    for bare in (
        (*a[:5], None, a[6], a[7], False, None), (*a[:5], None, None, a[7], True, None), (*a[:6], None, a[7], True, None),
        (*a[:5], 32, *a[6:]), (*a[:5], 7, None, a[7], True, None), (*a[:6], None, a[7], False, dense),
    ):  # fmt: skip
        assert selfcheck.check("token_sparse_attention", attention.token_sparse_attention(*bare), bare)


def test_a_group_without_keys_is_empty_or_the_tail_alone():
    q, k, v, groups, selection, tail, _, scale, _, _ = case()["token_sparse_attention"]
    none = replace(selection, bits=torch.zeros_like(selection.bits), counts=torch.zeros_like(selection.counts))
    for a_tail in (None, tail):
        args = (q, k, v, groups, none, a_tail, None, scale, True, None)
        out, lse = attention.token_sparse_attention(*args)
        assert selfcheck.check("token_sparse_attention", (out, lse), args)
    with pytest.raises(Mismatch, match="log-sum-exps"):
        args = (q, k, v, groups, none, None, None, scale, True, None)
        selfcheck.check("token_sparse_attention", (torch.zeros_like(out), torch.zeros_like(lse)), args)


def like_a_kernel(q, k, v, scale):
    """Dense attention with a GPU kernel's roundings: inputs, weights (relative to a running maximum) and output in 16 bits."""
    dtype = torch.bfloat16 if q.dtype == torch.float32 else q.dtype
    q16, k16, v16 = (x.to(dtype).float() for x in (q, k, v))
    m = torch.full((*q.shape[:3], 1), -math.inf)
    total, acc = torch.zeros_like(m), torch.zeros(q.shape)
    for k_tile, v_tile in zip(k16.split(64, 2), v16.split(64, 2), strict=True):
        scores = q16 @ k_tile.mT * (scale * math.log2(math.e))
        new = torch.maximum(m, scores.amax(3, keepdim=True))
        weights = torch.exp2(scores - new)
        shrink = torch.exp2(m - new)
        total = total * shrink + weights.sum(3, keepdim=True)
        acc = acc * shrink + weights.to(dtype).float() @ v_tile
        m = new
    return (acc / total).to(dtype).to(q.dtype), ((m + total.log2()) * math.log(2)).squeeze(3)


@pytest.mark.parametrize("temperature", [0.1, 1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_rounding_of_kernels_is_no_mistake(kind, dtype, temperature):
    for seed in range(3):
        q, k, v = make_qkv(1, 3, 1000, 64, kind=kind, dtype=dtype, seed=seed)
        for values in (v, v + 3):  # a common offset, which averaging does not shrink
            args = (q, k, values, 0.125 * temperature)
            assert selfcheck.check("dense_attention", like_a_kernel(*args), args)


def wrong_dense(mistake):
    def compute(q, k, v, scale):
        if mistake == "scale":
            return attention.dense_attention(q, k, v, 1.1 * scale)
        if mistake == "last keys missing":
            return attention.dense_attention(q, k[:, :, :-44], v[:, :, :-44], scale)
        if mistake == "keys and values out of step":
            return attention.dense_attention(q, k, v.roll(1, 2), scale)
        if mistake == "head mixed up":
            return attention.dense_attention(q, k.roll(1, 1), v.roll(1, 1), scale)
        out, lse = attention.dense_attention(q, k, v, scale)
        if mistake == "lse in base 2":
            return out, lse / math.log(2)
        if mistake == "NaN in the last row":
            out[:, :, -1] = float("nan")
        if mistake == "transposed lse":
            return out, lse.mT
        if mistake == "output in float32":
            return out.double().float(), lse
        return out, lse

    return compute


@pytest.mark.parametrize("kind", ["random", "clustered", "outliers"])
@pytest.mark.parametrize(
    "mistake, words",
    [
        ("scale", "output rows"), ("last keys missing", "output rows"), ("keys and values out of step", "output rows"),
        ("head mixed up", "output rows"), ("lse in base 2", "log-sum-exps"), ("NaN in the last row", "NaN"),
        ("transposed lse", r"log-sum-exp is \(1, 300, 3\)"), ("output in float32", "output is .* torch.float32"),
    ],
)  # fmt: skip
def test_wrong_dense_attention(mistake, words, kind):
    args = case(kind=kind)["dense_attention"]
    with pytest.raises(Mismatch, match=words):
        selfcheck.check("dense_attention", wrong_dense(mistake)(*args), args)


@pytest.mark.parametrize("mistake", ["residual", "tail", "tail values", "next group's keys", "query order", "scale", "two words swapped"])
def test_wrong_sparse_attention(mistake):
    args = case(384, residual="rank-8")["token_sparse_attention"]
    q, k, v, groups, selection, tail, residual, scale, with_lse, _ = args
    bits = selection.bits
    changed = {
        "residual": (*args[:6], None, scale, True, None),
        "tail": (*args[:5], None, residual, scale, True, None),
        "tail values": (*args[:5], PooledTail(tail.k, tail.v.flip(2), 32), residual, scale, True, None),
        "next group's keys": (*args[:4], replace(selection, bits=bits.roll(1, 2)), *args[5:]),
        "scale": (*args[:7], 1.05 * scale, True, None),
        "two words swapped": (*args[:4], replace(selection, bits=bits[..., [1, 0, *range(2, bits.shape[3])]]), *args[5:]),
        "query order": args,
    }[mistake]
    out, lse = attention.token_sparse_attention(*changed)
    with pytest.raises(Mismatch):
        selfcheck.check("token_sparse_attention", (out.roll(1, 2) if mistake == "query order" else out, lse), args)


@pytest.mark.parametrize("mistake", ["tail", "sign", "token order", "output"])
def test_a_wrong_difference(mistake):
    """What an anchor keeps, dense - output in group order."""
    args = case(384)["token_sparse_attention"]
    q, k, v, groups, selection, tail, _, scale, _, _ = args
    dense, _ = dense_attention(q, k, v, scale=scale)
    args = (q, k, v, groups, selection, tail, None, scale, False, dense)
    r, lse = attention.token_sparse_attention(*args)
    assert selfcheck.check("token_sparse_attention", (r, lse), args)
    wrong = {
        "tail": lambda: attention.token_sparse_attention(*args[:5], None, *args[6:])[0],
        "sign": lambda: -r,
        "token order": lambda: r.gather(2, groups.order.long().argsort(-1)[..., None].expand_as(r)),
        "output": lambda: attention.token_sparse_attention(*args[:9], None)[0],
    }[mistake]()
    with pytest.raises(Mismatch):
        selfcheck.check("token_sparse_attention", (wrong, lse), args)


def test_a_missing_residual_is_seen_where_it_is_small():
    """Random inputs and many keys: outputs near 0, the residual smaller still."""
    args = case(2000)["token_sparse_attention"]
    result = attention.token_sparse_attention(*args[:6], None, *args[7:])
    with pytest.raises(Mismatch):
        selfcheck.check("token_sparse_attention", result, args)


@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize(
    "mistake, words",
    [
        ("shifted", "lighter|bits past|budget"), ("lightest", "lighter"), ("short", "budget"), ("counts", "counts"),
        ("retained", "retained"), ("past the end", "bits past"), ("kept", "always kept|budget"), ("other scale", "lighter|retained"),
    ],
)  # fmt: skip
def test_wrong_selection(mistake, words, granularity):
    kept = ((5, 9),) if mistake == "kept" else ()
    # 650 keys, 21 cells: bit 30 of the last word stands for nothing
    args = case(650, kind="outliers", granularity=granularity, kept=kept)["select_keys"]
    q, k, lse, groups, density, cells, *rest = args
    right = selecting.select_keys(*args)
    if mistake == "lightest":
        wrong = selecting.select_keys(-q, k, lse, *args[3:])
    elif mistake == "short":
        wrong = selecting.select_keys(q, k, lse, groups, density - 0.2, *args[5:])
    elif mistake == "kept":
        wrong = selecting.select_keys(*args[:7], (), args[8])
    elif mistake == "other scale":
        wrong = selecting.select_keys(*args[:8], args[8] * 2)
    elif mistake == "past the end":
        wrong = replace(right, bits=right.bits | (1 << 30))
    else:
        wrong = replace(
            right,
            bits=right.bits << 1 if mistake == "shifted" else right.bits,
            counts=right.counts - int(mistake == "counts"),
            retained=right.retained * int(mistake != "retained"),
        )
    with pytest.raises(Mismatch, match=words):
        selfcheck.check("select_keys", wrong, args)


def test_wrong_groups():
    (q,) = args = case()["group_queries"]
    right = grouping.group_queries(q)
    order = right.order

    def with_order(change):
        changed = order.clone()
        change(changed)
        return replace(right, order=changed)

    def twice(o):
        o[0, 2, 5] = o[0, 2, 6]

    def swap(o):
        o[0, 1, [5, 6]] = o[0, 1, [6, 5]]

    def early_slack(o):
        o[..., -1], o[..., 299] = o[..., 299].clone(), -1

    for change in (twice, swap, early_slack):
        with pytest.raises(Mismatch):
            selfcheck.check("group_queries", with_order(change), args)
    with pytest.raises(Mismatch, match="int64"):
        selfcheck.check("group_queries", replace(right, order=order.long()), args)


def test_wrong_pooling():
    k, v, cells, size = args = case()["pool_cells"]
    right = pooling.pool_cells(*args)
    short = right.k.clone()
    short[:, :, -1] *= (300 % 32) / 32  # the last cell divided by 32
    for wrong in (replace(right, k=short), replace(right, v=right.v * 32), replace(right, v=right.k), replace(right, k=right.k[:, :, :-1])):
        with pytest.raises(Mismatch):
            selfcheck.check("pool_cells", wrong, args)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_say_nothing(value):
    for place in ("q", "k", "v"):
        inputs = case()
        q, k, v, *_ = inputs["dense_attention"]
        {"q": q, "k": k, "v": v}[place][:, :, -1, 3] = value
        args = (q, k, v, 0.125)
        assert not selfcheck.check("dense_attention", (torch.zeros_like(q), torch.zeros(q.shape[:3])), args)
        sparse_args = (q, k, v, *inputs["token_sparse_attention"][3:])
        result = attention.token_sparse_attention(*sparse_args)
        # In the rows of q that are compared, or in keys or values of the head, selected or not.
        assert not selfcheck.check("token_sparse_attention", result, sparse_args)
    q, k, lse, groups, *rest = case()["select_keys"]
    lse[:] = value
    args = (q, k, lse, groups, *rest)
    if value != math.inf:  # exp(x - inf) = 0: then every key weighs nothing
        assert not selfcheck.check("select_keys", selecting.select_keys(*args), args)


def test_rows_without_a_log_sum_exp_add_no_mass():
    q, k, lse, *rest = case()["select_keys"]
    lse[:, :, ::3] = -math.inf
    args = (q, k, lse, *rest)
    assert selfcheck.check("select_keys", selecting.select_keys(*args), args)
    lse[:] = -math.inf
    assert selfcheck.check("select_keys", selecting.select_keys(*args), args)


def test_the_settings_of_others_do_not_matter():
    args = case()
    results = {op: REFERENCE[op](*a) for op, a in args.items()}
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert all(selfcheck.check(op, results[op], a) for op, a in args.items())
    finally:
        torch.set_default_dtype(torch.float32)


def test_variants_tell_code_paths_apart():
    a = case()["token_sparse_attention"]
    cases = (
        a, (*a[:5], None, *a[6:]), (*a[:5], 64, *a[6:]), (*a[:6], None, *a[7:]), (*a[:8], False, None), (*a[:6], None, *a[7:9], a[0]),
    )  # fmt: skip
    assert len({selfcheck.variant("token_sparse_attention", x) for x in cases}) == 6
    s = case()["select_keys"]
    cases = (s, (*s[:6], "cell32", *s[7:]), (*s[:7], ((0, 3),), s[8]))
    assert len({selfcheck.variant("select_keys", x) for x in cases}) == 3
