"""Dense and token-sparse attention against their definitions in float64, and the laws that tie them together."""
import math
from dataclasses import replace

import pytest
import torch

from mc_sparse.kernels import (
    KeySelection,
    QueryGroups,
    auto_residual,
    cell_order,
    compress_residual,
    dense_attention,
    group_queries,
    pack_bits,
    pool_cells,
    retained_energy,
    select_keys,
    sparse_residual,
    token_sparse_attention,
)
from mc_sparse.kernels.testing import KINDS, assert_no_worse_than, make_qkv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 2, 63, 127, 128, 129, 1000, 4212]


def torch_dense(q, k, v):
    """The same maths, plainly, in q's dtype."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def a_selection(mask, cells, granularity="token"):
    sizes = cells.sizes(1 if granularity == "token" else 32)
    counts = (mask * sizes).sum(-1).int()
    return KeySelection(pack_bits(mask), counts, torch.ones(counts.shape), granularity, cells)


def random_mask(shape, share, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def equal_count_mask(shape, count, seed=0):
    heaviest = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).topk(count, -1).indices
    return torch.zeros(shape, dtype=torch.bool).scatter_(-1, heaviest, True)


def in_groups(x, groups):
    """x (B, H, S, D) in group order, (B, H, G*C, D), 0 past the last query."""
    order = groups.expanded(*x.shape[:2]).long()
    return x.gather(2, order.clamp_min(0)[..., None].expand(-1, -1, -1, x.shape[3])) * (order >= 0)[..., None]


# ---- dense


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_dense_attention(backend, dtype, kind, definition):
    q, k, v = make_qkv(2, 3, 300, 40, kind=kind, dtype=dtype, layout="bshd", nan_slack=4)
    k, v = k[:, :, :200], v[:, :, :200]
    out, lse = dense_attention(q, k, v, backend=backend)
    exact, exact_lse = definition.dense(q, k, v)
    plain, plain_lse = torch_dense(q, k, v)
    assert out.dtype == dtype and lse.dtype == torch.float32 and lse.shape == (2, 3, 300)
    assert_no_worse_than(out, exact, plain)
    assert_no_worse_than(lse, exact_lse, plain_lse)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_dense_attention_takes_a_scale_and_any_strides(backend, definition):
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in make_qkv(1, 2, 130, 9))
    out, lse = dense_attention(q, k, v, scale=0.9, backend=backend)
    exact, exact_lse = definition.dense(q, k, v, scale=0.9)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)


# ---- token sparse: the definition


@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("equal_counts", [True, False])
@pytest.mark.parametrize("size", [None, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_attention(granularity, equal_counts, size, dtype, definition):
    cells = cell_order((3, 11, 13), before=4)
    q, k, v = make_qkv(2, 2, len(cells), 24, kind="clustered", dtype=dtype, layout="bshd", nan_slack=4)
    groups = group_queries(q)
    units = len(cells) if granularity == "token" else len(cells.sizes(32))
    shape = (2, 2, groups.count, units)
    mask = equal_count_mask(shape, units // 4) if equal_counts else random_mask(shape, torch.tensor([0.1, 0.5, 0.9, 1.0])[:, None])
    if granularity == "cell32" and equal_counts:
        mask[..., -1] = False  # the short cell would make counts differ
    selection = a_selection(mask, cells, granularity)
    tail = None if size is None else pool_cells(k, v, cells, size)
    out, lse = token_sparse_attention(q, k, v, groups, selection, tail=tail, return_lse=True)
    tokens = definition.selected_tokens(selection)
    exact, exact_lse = definition.sparse(q, k, v, groups, tokens, cells, size)
    assert out.dtype == dtype and lse.dtype == torch.float32
    plain, plain_lse = definition.sparse(q, k, v, groups, tokens, cells, size, dtype=dtype)
    assert_no_worse_than(out, exact, plain)
    assert_no_worse_than(lse, exact_lse, plain_lse)
    assert torch.equal(token_sparse_attention(q, k, v, groups, selection, tail=tail), out)
    assert torch.equal(token_sparse_attention(q, k, v, groups, selection, tail=size), out)  # pooled there


def test_sparse_attention_on_an_anchor(definition):
    """The real thing: exact selection, shared cell groups, kept keys, a scale, keys fewer than queries."""
    cells = cell_order((2, 15, 17))
    q, _, _ = make_qkv(1, 2, 700, 32, kind="clustered")
    _, k, v = make_qkv(1, 2, 510, 32, kind="clustered")
    groups = group_queries(q, method="cells", cells=cell_order((1, 25, 28)))
    lse = dense_attention(q, k, v, scale=0.3)[1]
    selection = select_keys(q, k, lse, groups, density=0.3, cells=cells, kept=((500, 510),), scale=0.3)
    out = token_sparse_attention(q, k, v, groups, selection, tail=pool_cells(k, v, cells, 64), scale=0.3)
    exact, _ = definition.sparse(q, k, v, groups, definition.selected_tokens(selection), cells, 64, scale=0.3)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


# ---- token sparse: laws


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [None, 32])
def test_density_one_is_dense(length, size):
    cells = cell_order((1, 1, length))
    q, k, v = make_qkv(1, 2, length, 16, kind="outliers")
    dense, lse = dense_attention(q, k, v)
    groups = group_queries(q)
    for granularity in ("token", "cell32"):
        selection = select_keys(q, k, lse, groups, density=1.0, cells=cells, granularity=granularity)
        tail = None if size is None else pool_cells(k, v, cells, size)
        out, sparse_lse = token_sparse_attention(q, k, v, groups, selection, tail=tail, return_lse=True)
        torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sparse_lse, lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("granularity", ["token", "cell32"])
def test_cells_of_one_key_make_any_selection_dense(length, granularity):
    cells = cell_order((1, 1, length))
    q, k, v = make_qkv(1, 1, length, 16, kind="clustered")
    groups = group_queries(q)
    units = length if granularity == "token" else len(cells.sizes(32))
    selection = a_selection(random_mask((1, 1, groups.count, units), 0.3), cells, granularity)
    out, lse = token_sparse_attention(q, k, v, groups, selection, tail=pool_cells(k, v, cells, 1), return_lse=True)
    for got, expected in zip((out, lse), dense_attention(q, k, v), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [None, 64])
def test_permuting_queries_permutes_outputs(size):
    cells = cell_order((1, 1, 500))
    q, k, v = make_qkv(1, 2, 500, 16)
    groups = group_queries(q)
    selection = a_selection(random_mask((1, 2, 4, 500), 0.3), cells)
    tail = None if size is None else pool_cells(k, v, cells, size)
    out = token_sparse_attention(q, k, v, groups, selection, tail=tail)
    shuffle = torch.randperm(500, generator=torch.Generator().manual_seed(5))
    moved_to = torch.cat([shuffle.argsort(), torch.tensor([-1])]).int()  # -1 stays -1
    shuffled_groups = QueryGroups(moved_to[groups.order.long()], 500)
    shuffled = token_sparse_attention(q[:, :, shuffle], k, v, shuffled_groups, selection, tail=tail)
    assert torch.equal(shuffled, out[:, :, shuffle])


def test_a_group_without_keys_gives_zero_or_the_tail(definition):
    cells = cell_order((1, 1, 300))
    q, k, v = make_qkv(1, 1, 300, 16)
    groups = group_queries(q)
    mask = random_mask((1, 1, 3, 300), torch.tensor([0.4, 0.0, 0.2])[:, None])
    selection = a_selection(mask, cells)
    empty = groups.order[0, 0, 128:256].long()
    out, lse = token_sparse_attention(q, k, v, groups, selection, return_lse=True)
    assert bool((out[0, 0, empty] == 0).all()) and bool((lse[0, 0, empty] == -torch.inf).all())
    assert bool(torch.isfinite(lse).sum() == 300 - 128) and bool(torch.isfinite(out).all())

    none = a_selection(torch.zeros_like(mask), cells)
    out, lse = token_sparse_attention(q, k, v, groups, none, return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())
    for some in (selection, none):
        out = token_sparse_attention(q, k, v, groups, some, tail=pool_cells(k, v, cells, 64))
        exact, _ = definition.sparse(q, k, v, groups, definition.selected_tokens(some), cells, 64)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_tail_cell_that_is_selected_whole_changes_nothing():
    """Not even when its mean is huge or NaN in the value: it is not there."""
    cells = cell_order((1, 1, 256))
    q, k, v = make_qkv(1, 1, 256, 16)
    groups = group_queries(q)
    mask = random_mask((1, 1, 2, 256), 0.2)
    mask[..., 64:128] = True
    selection = a_selection(mask, cells)
    tail = pool_cells(k, v, cells, 64)
    out = token_sparse_attention(q, k, v, groups, selection, tail=tail)
    huge = replace(tail, k=tail.k.clone(), v=tail.v.clone())
    huge.k[:, :, 1] = 1e4
    huge.v[:, :, 1] = 1e4
    assert torch.equal(token_sparse_attention(q, k, v, groups, selection, tail=huge), out)


def test_the_residual_is_added_in_token_order():
    cells = cell_order((1, 1, 300))
    q, k, v = make_qkv(2, 2, 300, 16)
    groups = group_queries(q)
    selection = a_selection(random_mask((2, 2, 3, 300), torch.tensor([0.4, 0.0, 0.2])[:, None]), cells)
    out, lse = token_sparse_attention(q, k, v, groups, selection, return_lse=True)
    r = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    residual = compress_residual(in_groups(r, groups), "bf16")
    with_residual, same_lse = token_sparse_attention(q, k, v, groups, selection, residual=residual, return_lse=True)
    torch.testing.assert_close(with_residual, out + r)
    assert torch.equal(same_lse, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [None, 7, 64])
def test_the_difference_is_in_group_order(size, dtype, definition):
    """Rounded once: the same as of the definition's output, which the output rounded to 16 bits would miss."""
    cells = cell_order((3, 10, 10))
    q, k, v = make_qkv(2, 2, 300, 24, kind="clustered", dtype=dtype, layout="bshd", nan_slack=2)
    dense, _ = dense_attention(q, k, v)
    groups = group_queries(q)
    selection = a_selection(random_mask((2, 2, 3, 300), torch.tensor([0.4, 0.0, 0.95])[:, None]), cells)
    r = sparse_residual(q, k, v, groups, selection, dense, tail=size)
    assert r.shape == (2, 2, 384, 24) and r.dtype == dtype and not r[:, :, 300:].any()
    tail = None if size is None else pool_cells(k, v, cells, size)
    out, _ = token_sparse_attention(q.float(), k.float(), v.float(), groups, selection, return_lse=True,
                                    tail=tail and replace(tail, k=tail.k.float(), v=tail.v.float()))  # fmt: skip
    exact = in_groups(dense.float() - out, groups)
    assert_no_worse_than(r, exact, exact.to(dtype))


def test_reuse_right_after_the_anchor_gives_the_anchors_output():
    cells = cell_order((3, 10, 10))
    q, k, v = make_qkv(1, 2, 300, 32, kind="clustered", dtype=torch.bfloat16, layout="bshd")
    dense, lse = dense_attention(q, k, v)
    groups = group_queries(q)
    selection = select_keys(q, k, lse, groups, density=0.25, cells=cells)
    tail = pool_cells(k, v, cells, 64)
    residual = compress_residual(sparse_residual(q, k, v, groups, selection, dense, tail=tail), "bf16")
    reused = token_sparse_attention(q, k, v, groups, selection, tail=tail, residual=residual)
    assert_no_worse_than(reused, dense, dense, rounding_steps=4)


def test_inputs_are_read_only_and_calls_repeat_under_inference_mode():
    cells = cell_order((1, 1, 300))
    inputs = make_qkv(1, 2, 300, 16, layout="bshd")
    groups = group_queries(inputs[0])
    selection = a_selection(random_mask((1, 2, 3, 300), 0.3), cells)
    copies = [x.clone() for x in inputs]
    tail = pool_cells(*inputs[1:], cells, 32)
    tail_k = tail.k.clone()
    first = token_sparse_attention(*inputs, groups, selection, tail=tail)
    with torch.inference_mode():
        q = inputs[0].clone()  # an inference tensor
        lse = dense_attention(q, *inputs[1:])[1]
        chosen = select_keys(q, inputs[1], lse, group_queries(q), density=0.3, cells=cells)
        compress_residual(sparse_residual(q, *inputs[1:], group_queries(q), chosen, q), "rank-4")
        second = token_sparse_attention(*inputs, groups, selection, tail=tail)
    assert torch.equal(first, second)
    assert all(map(torch.equal, inputs, copies)) and torch.equal(tail.k, tail_k)


def test_autocast_changes_nothing():
    q, k, v = make_qkv(length=300, head_dim=32)
    cells = cell_order(None, after=300)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            dense, lse = dense_attention(q, k, v, backend="reference")
            groups = group_queries(q)
            selection = select_keys(q, k, lse, groups, density=0.5, cells=cells)
            r = sparse_residual(q, k, v, groups, selection, dense)
            kept = [compress_residual(r, fmt) for fmt in ("int4", "rank-8")] + [auto_residual(r, dense, 0.5)]
            reused = [token_sparse_attention(q, k, v, groups, selection, residual=each, tail=64) for each in kept]
            results.append([dense, lse, groups.order, selection.bits, *reused, torch.tensor([retained_energy(r, each) for each in kept])])
    for without, within in zip(*results, strict=True):
        assert torch.equal(without, within)


def test_many_chunks_are_one_answer(monkeypatch):
    """Work is split by memory; the split must not show."""
    cells = cell_order((1, 1, 1000))
    q, k, v = make_qkv(1, 1, 1000, 16)
    results = []
    for chunk_bytes in (1 << 30, 1):
        monkeypatch.setattr("mc_sparse.kernels.chunks.CPU_CHUNK_BYTES", chunk_bytes)
        groups = group_queries(q)
        dense, lse = dense_attention(q, k, v, backend="reference")
        selection = select_keys(q, k, lse, groups, density=0.3, cells=cells)
        results.append((dense, lse, groups.order, selection.retained, token_sparse_attention(q, k, v, groups, selection)))
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-5)


def apart(x):
    """x with a gap after each entry."""
    return torch.stack([x, x], -1)[..., 0]


def valid():
    q = torch.zeros(1, 2, 300, 8)
    cells = cell_order(None, after=300)
    return q, group_queries(q), a_selection(torch.ones(1, 2, 3, 300, dtype=torch.bool), cells), cells


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, g, s, c: {"v": q[:, :, :299]}, "k and v have \\(300, 299\\) tokens"),
        (lambda q, g, s, c: {"q": q[:, :, :299]}, "do not fit q"),
        (lambda q, g, s, c: {"q": q[:, :1], "k": q[:, :1], "v": q[:, :1]}, "do not fit q"),
        (lambda q, g, s, c: {"selection": a_selection(torch.ones(1, 2, 2, 300, dtype=torch.bool), c)}, "Select again"),
        (lambda q, g, s, c: {"k": q[:, :, :299], "v": q[:, :, :299]}, "has 300 tokens, the keys 299"),
        (lambda q, g, s, c: {"tail": pool_cells(q[:, :1], q[:, :1], c, 64)}, "Pool the keys of this call"),
        (lambda q, g, s, c: {"residual": compress_residual(torch.zeros(1, 2, 384, 4), "bf16")}, "Compress it with the same groups"),
        (lambda q, g, s, c: {"residual": compress_residual(torch.zeros(1, 2, 256, 8), "bf16")}, "in group order; q and groups need"),
        (lambda q, g, s, c: {"tail": 0}, "tail is 0; needed is"),
        (lambda q, g, s, c: {"tail": 32.0}, "tail is 32.0; needed is"),
        (lambda q, g, s, c: {"tail": True}, "tail is True; needed is"),
        (lambda q, g, s, c: {"tail": replace(pool_cells(q, q, c, 64), size=0)}, "tail is 0; needed is"),
        (lambda q, g, s, c: {"residual": torch.zeros(1, 2, 384, 8)}, "is a Tensor; needed is a Residual"),
        (lambda q, g, s, c: {"residual": compress_residual(torch.zeros(1, 2, 384, 8), "int4").to("meta")}, "payload: .* on meta"),
        (lambda q, g, s, c: {"groups": replace(g, order=g.order.long())}, "groups' order: contiguous torch.int64"),
        (lambda q, g, s, c: {"groups": replace(g, order=apart(g.order))}, "groups' order: strided"),
        (lambda q, g, s, c: {"selection": replace(s, bits=s.bits[:, :1].expand_as(s.bits))}, "selection's bits: strided"),
        (lambda q, g, s, c: {"selection": replace(s, counts=s.counts[:, :1].expand_as(s.counts))}, "selection's counts: strided"),
        (lambda q, g, s, c: {"selection": replace(s, counts=s.counts.long())}, "selection's counts: contiguous torch.int64"),
        (lambda q, g, s, c: {"selection": replace(s, counts=s.counts.to("meta"))}, "selection's counts: .* on meta"),
        (lambda q, g, s, c: {"selection": replace(s, cells=c.to("meta"))}, "the cell order: .* on meta"),
        (lambda q, g, s, c: {"scale": math.nan}, "scale is nan; needed is a finite number"),
        (lambda q, g, s, c: {"scale": math.inf}, "scale is inf; needed is a finite number"),
        (lambda q, g, s, c: {"v": q.clone().requires_grad_()}, "v requires gradients"),
        (lambda q, g, s, c: {"q": q.double()}, "allowed are float32, bfloat16, float16"),
    ],
)
def test_refusals_say_what_is_needed(change, message):
    q, groups, selection, cells = valid()
    arguments = {"q": q, "k": q, "v": q, "groups": groups, "selection": selection, **change(q, groups, selection, cells)}
    with pytest.raises(ValueError, match=message):
        token_sparse_attention(**arguments)


def test_the_difference_needs_a_dense_output_of_the_queries():
    q, groups, selection, _ = valid()
    with pytest.raises(ValueError, match="q and dense have \\(300, 299\\) tokens"):
        sparse_residual(q, q, q, groups, selection, q[:, :, :299])
    with pytest.raises(ValueError, match="they must agree"):
        sparse_residual(q, q, q, groups, selection, q.half())
