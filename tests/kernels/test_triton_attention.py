"""The Triton sparse attention against its definition and its laws. Run with TRITON_INTERPRET=1 on a CPU, or on a CUDA machine."""
import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

from mc_sparse.kernels import (
    CellOrder,
    Geometry,
    KeySelection,
    PooledTail,
    QueryGroups,
    cell_order,
    compress_residual,
    dense_attention,
    group_queries,
    pack_bits,
    pool_cells,
    registry,
    select_keys,
    selfcheck,
    sparse_residual,
    token_sparse_attention,
)
from mc_sparse.kernels.attention import cute_sm90, passes, reference, triton_sparse
from mc_sparse.kernels.dtypes import half
from mc_sparse.kernels.pooling import triton_pool
from mc_sparse.kernels.quantise import key_mean, quantised
from mc_sparse.kernels.selection.bits import popcount, selected_keys, unselected_in_cells
from mc_sparse.kernels.testing import KINDS, assert_no_worse_than, make_qkv
from mc_sparse.kernels.triton_support import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHARES = (0.3, 0.0, 1.0, 1, 0.05)  # of the keys, by group, in turn; a whole number is a number of keys
FORMATS = ["bf16", "fp8", "int4", "int2", "rank-1", "rank-8", "rank-20"]


@dataclass(frozen=True)
class Case:
    """Arguments of one call, in the order of the function. scale None: 1 / sqrt(D)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    groups: QueryGroups
    selection: KeySelection
    tail: PooledTail | int | None = None
    scale: float | None = None

    @property
    def inputs(self):
        return self.q, self.k, self.v, self.groups, self.selection

    def arguments(self, residual=None, dense=None):
        """As a backend gets them; with the lse unless dense is given."""
        scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return *self.inputs, self.tail, residual, scale, dense is None, dense

    def run(self, residual=None):
        """Output and lse."""
        return triton_sparse.token_sparse_attention(*self.arguments(residual))

    def difference(self, dense):
        """dense - output in group order."""
        return triton_sparse.token_sparse_attention(*self.arguments(dense=dense))[0]


def a_selection(shape, cells, shares=SHARES, granularity="token", seed=0):
    """Random keys for (B, H, G); the groups' shares of the keys (or cells) are `shares` in turn; a whole number is their number."""
    generator = torch.Generator(cells.order.device).manual_seed(seed)
    sizes = cells.sizes(1 if granularity == "token" else 32)
    units = sizes.numel()
    mask = torch.rand((*shape, units), generator=generator, device=sizes.device)
    for g, share in zip(range(shape[2]), itertools.cycle(shares)):  # noqa: B905  the shares repeat
        row = mask[:, :, g]
        mask[:, :, g] = row.argsort(-1).argsort(-1) < share if isinstance(share, int) else row < share
    mask = mask.bool()
    counts = (mask * sizes).sum(-1, dtype=torch.int32)
    return KeySelection(pack_bits(mask), counts, torch.ones(counts.shape, device=counts.device), granularity, cells)


def a_case(
    length=300, keys=None, dim=16, *, batch=1, heads=2, dtype=torch.bfloat16, kind="random", granularity="token", grouping="pddp",
    shares=SHARES, tail=None, pooled=False, scale=None, seed=0, **layout,
):  # fmt: skip
    """keys None: as many as queries. tail: tokens per cell, pooled by the kernel unless `pooled`."""
    keys = length if keys is None else keys
    q = make_qkv(batch, heads, length, dim, kind=kind, dtype=dtype, seed=seed, device=DEVICE, **layout)[0]
    k, v = make_qkv(batch, heads, keys, dim, kind=kind, dtype=dtype, seed=seed, device=DEVICE, **layout)[1:]
    cells = cell_order((2, 3, keys // 6) if keys >= 6 else None, after=keys % 6 if keys >= 6 else keys).to(DEVICE)
    groups = group_queries(q.cpu(), method=grouping, cells=cell_order((1, 1, length)))
    groups = QueryGroups(groups.order.to(DEVICE), length)
    selection = a_selection((batch, heads, groups.count), cells, shares, granularity, seed)
    return Case(q, k, v, groups, selection, pool_cells(k, v, cells, tail, backend="reference") if pooled else tail, scale)


def stored(x, dtype):
    """x in dtype as the kernels round it. The interpreter cuts float32 off to bfloat16, which is up to twice as far."""
    if INTERPRETED and dtype == torch.bfloat16:
        return (x.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()
    return x.to(dtype)


def of_group(case, b, h, g):
    """Tokens of one group, their exact output and lse in float64, and both again with a kernel's roundings: pooled rows and
    weights in 16 bits. float32 inputs are read as bfloat16, as the backend says it does."""
    tokens = case.groups.order[b % case.groups.order.shape[0], h % case.groups.order.shape[1]].long()[g * 128 : (g + 1) * 128]
    tokens = tokens[tokens >= 0]
    at = slice(b, b + 1), slice(h, h + 1), slice(g, g + 1)
    own = replace(case.selection, bits=case.selection.bits[at], counts=case.selection.counts[at])
    cells, scale = case.selection.cells, case.q.shape[-1] ** -0.5 if case.scale is None else case.scale
    places = selected_keys(own, 0, 0)[0].nonzero().flatten()
    q, k, v = half(case.q[b, h, tokens]), half(case.k[b, h]), half(case.v[b, h])
    dtype = k.dtype
    rows, bias = [[x[cells.order[places]].double()] for x in (k, v)], [q.new_zeros(len(places)).double()]
    plain_rows = [list(x) for x in rows]
    if case.tail is not None:
        size = case.tail.size if isinstance(case.tail, PooledTail) else case.tail
        bias.append(unselected_in_cells(own, 0, 0, size)[0].double().log())
        for i, x in enumerate((k, v)):
            if isinstance(case.tail, PooledTail):
                exact = half((case.tail.k, case.tail.v)[i][b, h]).double()
            else:
                whole = len(cells) // size * size
                runs = x[cells.order].double()
                exact = torch.cat([runs[:whole].view(-1, size, x.shape[1]).mean(1), runs[None, whole:].mean(1)[: len(cells) > whole]])
            rows[i].append(exact)
            plain_rows[i].append(stored(exact, dtype).double())
    results = []
    for (keys, values), weight_dtype in (((torch.cat(x) for x in rows), None), ((torch.cat(x) for x in plain_rows), dtype)):
        scores = q.double() @ keys.T * scale + torch.cat(bias)
        if weight_dtype is not None:
            scores = scores.float()
        lse = scores.logsumexp(1)
        highest = scores.amax(1, keepdim=True) if scores.shape[1] else lse[:, None]
        weights = (scores - highest).exp()
        total = weights.sum(1, keepdim=True)
        weights = weights if weight_dtype is None else weights.to(weight_dtype)
        out = weights.double() @ values / total.double()
        results += [torch.where((lse == -math.inf)[:, None], 0.0, out), lse.double()]
    return tokens, *results


def all_groups(case):
    return itertools.product(*map(range, case.selection.counts.shape))


def check(case, residual=None, dense=None, some=None):
    """Runs and compares every group, or `some` (b, h, g): output and lse, or given dense the difference in group order."""
    if dense is None:
        out, lse = case.run(residual)
        assert out.shape == case.q.shape and out.dtype == case.q.dtype and lse.shape == case.q.shape[:3] and lse.dtype == torch.float32
    else:
        out = case.difference(dense)
        length = case.q.shape[2]
        assert out.shape == (*case.q.shape[:2], case.groups.order.shape[2], case.q.shape[3]) and out.dtype == case.q.dtype
        assert not out[:, :, length:].any()
    for b, h, g in some or all_groups(case):
        tokens, exact, exact_lse, plain, plain_lse = of_group(case, b, h, g)
        slots = slice(g * 128, g * 128 + len(tokens))
        if dense is not None:
            exact, plain = (dense[b, h, tokens].double() - x for x in (exact, plain))
            found = out[b, h, slots]
        else:
            found = out[b, h, tokens]
            # exp2 and log2 of a GPU are approximate, so a few steps of float32 are granted.
            assert_no_worse_than(lse[b, h, tokens], exact_lse, plain_lse, rounding_steps=64)
        if residual is not None:
            exact, plain = (x + residual.expand(b, h)[slots] for x in (exact, plain))
        steps = 2**16 if out.dtype == torch.float32 else 2  # float32 is computed in bfloat16: one step of that, a rounded weight
        assert_no_worse_than(found, exact, stored(plain, out.dtype), rounding_steps=steps)


# ---- against the definition


@pytest.mark.parametrize("tail", [None, 32])
@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("length", [1, 31, 128, 129, 300, 500])
def test_lengths(length, granularity, tail):
    check(a_case(length, granularity=granularity, tail=tail, nan_slack=3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 40, 64, 96])
def test_head_dims_and_dtypes(dim, dtype):
    check(a_case(200, dim=dim, dtype=dtype, tail=64, nan_slack=2, heads=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_largest_head_dim(dtype):
    """Two programs to a group."""
    case = a_case(140, dim=256, heads=1, dtype=dtype, tail=32, shares=(0.3, 1.0))
    check(case)
    check(case, dense=torch.randn_like(case.q))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_and_layouts(kind, layout, dtype):
    check(a_case(300, dim=40, kind=kind, layout=layout, nan_slack=5, dtype=dtype, tail=32, heads=1 if layout == "bhsd" else 2))


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("size", [1, 7, 32, 64, 128])
def test_tails(size, granularity, pooled):
    """Cells that are selected whole, in part and not at all; a short last one."""
    check(a_case(129, 270, shares=(0.4, 0.97), granularity=granularity, tail=size, pooled=pooled, kind="clustered", heads=1))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dim, dtype", [(40, torch.bfloat16), (64, torch.float16)])
def test_residuals(fmt, dim, dtype):
    case = a_case(140, dim=dim, dtype=dtype, layout="bshd", tail=32, shares=(0.4, 0.0))
    r = torch.randn((1, 2, 256, dim), generator=torch.Generator().manual_seed(1)) * (torch.arange(256)[:, None] < 140)
    check(case, compress_residual(r.to(DEVICE, dtype), fmt))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", [None, 64])
def test_the_difference_from_dense(dtype, tail):
    case = a_case(200, dim=24, dtype=dtype, tail=tail, layout="bshd", shares=(0.3, 0.0))
    dense = make_qkv(1, 2, 200, 24, dtype=dtype, device=DEVICE, layout="bshd", nan_slack=2, seed=9)[0]
    check(case, dense=dense)
    check(case, dense=dense.mT.contiguous().mT)  # last stride not 1


@pytest.mark.parametrize("grouping", ["pddp", "cells"])
@pytest.mark.parametrize("length, keys", [(300, 150), (129, 400), (1, 260), (260, 1)])
def test_other_keys_than_queries_two_rows_a_scale(length, keys, grouping):
    case = a_case(length, keys, batch=2, grouping=grouping, scale=0.4, tail=32, kind="clustered", layout="bshd", nan_slack=2)
    assert case.groups.order.shape[:2] == ((2, 2) if grouping == "pddp" else (1, 1))
    check(case)


@pytest.mark.parametrize("tail", [None, 32])
def test_counts_of_none_one_and_all_keys(tail):
    """Fewer than the four keys from which the exponentials' reference is taken, too."""
    case = a_case(768, 300, shares=(0, 1, 2, 3, 300, 5), heads=1, tail=tail)
    assert case.selection.counts.flatten().tolist() == [0, 1, 2, 3, 300, 5]
    check(case)
    nothing = replace(case, selection=a_selection((1, 1, 6), case.selection.cells, (0.0,)))
    check(nothing)
    if tail is None:
        out, lse = nothing.run()
        assert not out.any() and bool((lse == -math.inf).all())


def test_odd_strides():
    """Rows of 19 values, a last stride that is not 1, heads that share one head of keys."""
    case = a_case(200, dim=16, tail=32, pooled=True, heads=3)
    wide = torch.full((3, 1, 3, 200, 19), math.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[..., 1:17] = torch.stack([case.q, case.k, case.v])
    q, k, v = wide[..., 1:17].unbind()
    check(replace(case, q=q, k=k, v=v))
    check(replace(case, q=q.mT.contiguous().mT, k=k.mT.contiguous().mT))
    shared = [x[:, :1].expand(-1, 3, -1, -1) for x in (case.k, case.v)]
    check(replace(case, k=shared[0], v=shared[1], tail=32))
    tail = PooledTail(case.tail.k.mT.contiguous().mT, case.tail.v.expand(1, 3, -1, 16), 32)
    check(replace(case, tail=tail))


# ---- logits outside the range of the fixed reference


def far_apart(low, high, shares, **arguments):
    """Logits (base 2, about) of the first selected keys `low`, of the others `high`, for every query; a small random part beside."""
    case = a_case(300, heads=2, scale=math.log(2), shares=shares, **arguments)
    q, k = case.q.mul(0.05), case.k.clone()
    q[..., 0], k[..., 0] = 1.0, high
    for b, h, g in all_groups(case):
        chosen = selected_keys(replace(case.selection, bits=case.selection.bits[b : b + 1, h : h + 1, g : g + 1]), 0, 0)[0]
        first = case.selection.cells.order[chosen.nonzero().flatten()[:4]]
        k[b, h, first, 0] = low
    return replace(case, q=q, k=k)


@pytest.mark.parametrize("low, high", [(-300.0, 200.0), (0.0, 140.0), (200.0, -300.0), (-4000.0, 4000.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_far_apart(low, high, dtype, monkeypatch):
    """The first pass gives inf or NaN where the first keys are far below; more groups than programs look for such."""
    monkeypatch.setattr(triton_sparse, "AGAIN_PROGRAMS", 2)
    check(far_apart(low, high, (0.3,), dtype=dtype))
    check(far_apart(low, high, (0.3, 0.5), dtype=dtype, tail=32))


@pytest.mark.parametrize("high", [300.0, -300.0])
def test_a_group_without_keys_and_a_tail_far_from_zero(high):
    case = far_apart(high, high, (0.0, 0.4, 0.0), tail=32)
    check(case)
    r = torch.randn((1, 2, 384, 16), generator=torch.Generator().manual_seed(1)).to(DEVICE).bfloat16()
    check(case, compress_residual(r, "int4"))
    check(case, dense=torch.randn_like(case.q))


def test_only_the_groups_that_need_it_run_again():
    """One query in one group is far off: the result of the other groups does not change by a bit."""
    case = a_case(300, heads=1, shares=(0.3,), tail=32)
    before = case.run()[0]
    token = case.groups.order[0, 0, 150].long()
    q = case.q.clone()
    q[:, :, token] *= 400
    moved = replace(case, q=q)
    check(moved)
    others = torch.cat([case.groups.order[0, 0, :128], case.groups.order[0, 0, 256:300]]).long()
    assert torch.equal(moved.run()[0][:, :, others], before[:, :, others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_query_that_is_no_number_spoils_its_own_row_only(dtype):
    case = a_case(300, dtype=dtype, shares=(0.3,), tail=32)
    q = case.q.clone()
    q[0, 0, 7, 3] = math.nan
    out, lse = replace(case, q=q).run()
    assert bool(out[0, 0, 7].isnan().all()) and bool(lse[0, 0, 7].isnan())
    out[0, 0, 7], lse[0, 0, 7] = 0, 0
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    expected, expected_lse = case.run()
    expected[0, 0, 7], expected_lse[0, 0, 7] = 0, 0
    assert_no_worse_than(out, expected.double(), expected, rounding_steps=4)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


# ---- through the registry


@pytest.mark.parametrize("kind", ["random", "ties", "outliers"] if INTERPRETED else KINDS)  # cut off, clustered pooled keys are too far off
def test_the_check_of_first_results_accepts_it(kind):
    for dtype, tail, granularity in zip(DTYPES, (None, 32, 7), ("token", "cell32", "token"), strict=True):
        case = a_case(140, dim=24, kind=kind, dtype=dtype, tail=tail, granularity=granularity)
        residual = compress_residual(torch.randn((1, 2, 256, 24), generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype), "int4")
        for arguments in (case.arguments(), case.arguments(residual), case.arguments(dense=torch.ones_like(case.q))):
            assert selfcheck.check("token_sparse_attention", triton_sparse.token_sparse_attention(*arguments), arguments)


def test_an_anchor_and_a_reuse_of_it(monkeypatch):
    """The public functions with the backend by name: the reuse right after the anchor gives the anchor's output."""
    monkeypatch.setattr(registry, "_verified", set())
    monkeypatch.setattr(registry, "_demoted", {})
    q, k, v = make_qkv(1, 2, 300, 40, dtype=torch.bfloat16, layout="bshd", device=DEVICE)
    cells = cell_order((3, 10, 10)).to(DEVICE)
    dense, lse = dense_attention(q, k, v, backend="reference")
    groups = group_queries(q, backend="triton")
    selection = select_keys(q, k, lse, groups, density=0.4, cells=cells, backend="triton")
    r = sparse_residual(q, k, v, groups, selection, dense, tail=64, backend="triton")
    for fmt in ("bf16", "rank-40"):
        same = {"tail": 64, "residual": compress_residual(r, fmt), "backend": "triton"}
        reused = token_sparse_attention(q, k, v, groups, selection, **same)
        assert_no_worse_than(reused, dense.double(), stored(dense.float(), dense.dtype), rounding_steps=4)
        assert torch.equal(token_sparse_attention(q, k, v, groups, selection, return_lse=True, **same)[0], reused)
    assert {key[:2] for key in registry._verified} >= {("token_sparse_attention", "triton")} and not registry._demoted


# ---- laws


@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("tail", [None, 32, 7])
def test_density_one_is_dense(tail, granularity):
    case = a_case(200, 300, kind="outliers", granularity=granularity, shares=(1.1,), tail=tail)
    out, lse = case.run()
    exact, exact_lse = dense_attention(case.q.float(), case.k.float(), case.v.float(), backend="reference")
    assert_no_worse_than(out, exact, stored(exact, out.dtype))
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooled", [False, True])
def test_cells_of_one_key_make_any_selection_dense(pooled):
    case = a_case(200, 300, kind="clustered", tail=1, pooled=pooled)
    out, lse = case.run()
    exact, exact_lse = dense_attention(case.q.float(), case.k.float(), case.v.float(), backend="reference")
    assert_no_worse_than(out, exact, stored(exact, out.dtype))
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tail", [None, 64])
def test_permuting_queries_permutes_outputs(tail):
    case = a_case(300, tail=tail)
    shuffle = torch.randperm(300, generator=torch.Generator().manual_seed(5))
    moved_to = torch.cat([shuffle.argsort(), torch.tensor([-1])]).int().to(DEVICE)  # -1 stays -1
    groups = QueryGroups(moved_to[case.groups.order.long()], 300)
    out, lse = case.run()
    shuffled, shuffled_lse = replace(case, q=case.q[:, :, shuffle], groups=groups).run()
    assert torch.equal(shuffled, out[:, :, shuffle]) and torch.equal(shuffled_lse, lse[:, :, shuffle])


def test_a_tail_cell_that_is_selected_whole_changes_nothing():
    """Not even when its mean is huge: it is not there."""
    case = a_case(140, 256, heads=1, tail=64, pooled=True, shares=(0.2,))
    mask = selected_keys(case.selection, 0, 0)[None, None]
    mask[..., 64:128] = True
    case = replace(case, selection=replace(case.selection, bits=pack_bits(mask), counts=mask.sum(-1, dtype=torch.int32)))
    huge = replace(case.tail, k=case.tail.k.clone(), v=case.tail.v.clone())
    huge.k[:, :, 1] = huge.v[:, :, 1] = 1e4
    for one, other in zip(case.run(), replace(case, tail=huge).run(), strict=True):
        assert torch.equal(one, other)


def test_the_tail_is_the_same_given_or_pooled_here():
    """To the bit where the means are: both sum in float32, in whatever order, and integers have no rounding to differ in."""
    case = a_case(140, 270, kind="ties", tail=32)
    given = replace(case, tail=pool_cells(case.k, case.v, case.selection.cells, 32, backend="triton"))
    assert torch.equal(case.run()[0], given.run()[0])


def test_every_element_is_written_and_inputs_only_read():
    """New memory is full of NaN, and of the largest integers, which as row numbers would be far outside."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and bool(torch.empty(3).isnan().all())
    try:
        for tail, granularity in ((None, "token"), (32, "cell32"), (7, "token")):
            case = a_case(300, 270, dim=40, tail=tail, granularity=granularity, nan_slack=2)
            copies = [x.clone() for x in (case.q, case.k, case.v, case.groups.order, case.selection.bits)]
            check(case)
            check(case, dense=torch.ones_like(case.q))
            after = (case.q, case.k, case.v, case.groups.order, case.selection.bits)
            assert all(map(torch.equal, copies, after))
    finally:
        torch.use_deterministic_algorithms(False)


def test_heads_in_parts_are_the_heads(monkeypatch):
    """The result does not depend on how many heads are laid out at a time."""
    case = a_case(140, batch=2, heads=3, tail=32)
    r = torch.randn((2, 3, 256, 16), generator=torch.Generator().manual_seed(1)).to(DEVICE).bfloat16()
    residual = compress_residual(r, "rank-4")
    whole, difference = case.run(residual), case.difference(case.q)
    monkeypatch.setattr(passes, "SCRATCH_MOST", 1)  # one head
    assert all(map(torch.equal, case.run(residual), whole)) and torch.equal(case.difference(case.q), difference)


# ---- low precision


LOW = ("int8", "fp8")


def check_low(case, precision, residual=None, dense=None):
    """Against the definition, whose weights have all digits; float32 inputs are read as bfloat16."""
    out, lse = triton_sparse.token_sparse_attention(*case.arguments(residual, dense), precision)
    read = case if case.q.dtype != torch.float32 else replace(case, q=half(case.q).float(), k=half(case.k).float(), v=half(case.v).float())
    exact, exact_lse = reference.token_sparse_attention(*read.arguments(residual, dense), precision)
    assert out.shape == exact.shape and out.dtype == exact.dtype and bool(out.isfinite().all())
    assert (out.float() - exact.float()).norm() <= (2**-11 if case.q.dtype == torch.float16 else 2**-7) * exact.float().norm()
    if dense is None:
        # On a GPU the keys' mean may end in another digit, and a number of a key in another code.
        scale = case.q.shape[-1] ** -0.5 if case.scale is None else case.scale
        step = 0.0 if INTERPRETED else 2 * scale * selfcheck._code_step(case.q.flatten(0, 2).float(), [case.k], precision).amax().item()
        torch.testing.assert_close(lse, exact_lse, rtol=1e-4, atol=2e-3 + step)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("dim, dtype", [(16, torch.float16), (40, torch.bfloat16), (64, torch.float32), (128, torch.bfloat16)])
@pytest.mark.parametrize("tail, pooled", [(None, False), (32, False), (128, True), (7, False)])
def test_low_precision_is_the_definition(precision, dim, dtype, tail, pooled):
    check_low(a_case(200, 270, dim=dim, dtype=dtype, tail=tail, pooled=pooled, heads=1, nan_slack=2, layout="bshd"), precision)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("kind", ["clustered", "outliers"])
def test_low_precision_of_cells_rows_and_a_scale(precision, kind):
    check_low(a_case(129, 400, batch=2, granularity="cell32", grouping="cells", scale=0.4, tail=64, kind=kind), precision)
    check_low(a_case(140, dim=256, heads=1, tail=32, shares=(0.3, 1.0), kind=kind), precision)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_end_of_low_precision(fmt, dtype):
    """One kernel has them all."""
    case = a_case(140, dim=40, dtype=dtype, layout="bshd", tail=32, shares=(0.4, 0.0))
    r = torch.randn((1, 2, 256, 40), generator=torch.Generator().manual_seed(1)) * (torch.arange(256)[:, None] < 140)
    check_low(case, "int8", compress_residual(r.to(DEVICE, dtype), fmt))


@pytest.mark.parametrize("precision", LOW)
def test_the_difference_from_dense_in_low_precision(precision):
    case = a_case(200, dim=24, tail=64, layout="bshd", shares=(0.3, 0.0))
    dense = make_qkv(1, 2, 200, 24, dtype=case.q.dtype, device=DEVICE, layout="bshd", nan_slack=2, seed=9)[0]
    check_low(case, precision, dense=dense)


@pytest.mark.parametrize("low, high", [(-300.0, 200.0), (200.0, -300.0)])
def test_logits_far_apart_in_low_precision(low, high):
    check_low(far_apart(low, high, (0.3,), tail=32), "int8")


@pytest.mark.parametrize("precision", LOW)
def test_heads_in_parts_in_low_precision(precision, monkeypatch):
    case = a_case(140, batch=2, heads=3, tail=32)
    whole = triton_sparse.token_sparse_attention(*case.arguments(), precision)
    monkeypatch.setattr(passes, "SCRATCH_MOST", 1)  # one head
    assert all(map(torch.equal, triton_sparse.token_sparse_attention(*case.arguments(), precision), whole))


@pytest.mark.parametrize("precision", LOW)
def test_no_number_spoils_more_than_its_group_in_low_precision(precision):
    case = a_case(300, dtype=torch.float16, shares=(0.3,), tail=None)
    expected = triton_sparse.token_sparse_attention(*case.arguments(), precision)[0]
    q, k = case.q.clone(), case.k.clone()
    q[0, 0, 7, 3] = math.nan
    unseen = case.selection.cells.order[(~selected_keys(case.selection, 0, 0).any(0)).nonzero()[0, 0]]
    k[0, 0, unseen] = math.nan  # of no group
    out = triton_sparse.token_sparse_attention(*replace(case, q=q, k=k).arguments(), precision)[0]
    order = case.groups.order[0, 0].long()
    own = int((order == 7).nonzero()) // 128
    members = order[own * 128 : own * 128 + 128]
    members = members[members >= 0]
    assert bool(out[0, 0, members].isnan().all())
    out[0, 0, members] = expected[0, 0, members]
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)  # the mean of the others is another
    k[0, 0] = math.inf
    assert bool(triton_sparse.token_sparse_attention(*replace(case, k=k).arguments(), precision)[0][0, 0].isnan().all())


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("size", [None, 32, 64, 128])
@pytest.mark.parametrize("dim", [24, 64])
def test_quantised_rows(precision, size, dim):
    """[codes][values][scale, zeros], bit by bit but for codes on the edge between two, which the order of a sum decides."""
    k, v = make_qkv(1, 3, 300, dim, dtype=torch.bfloat16, device=DEVICE, layout="bshd", kind="outliers")[1:]
    cells = cell_order((3, 10, 10)).to(DEVICE)
    rows, mean = triton_pool.gather_quantised(k[0], v[0], cells, slice(1, 3), size, None, precision)
    width, count = max(32, dim), 0 if size is None else -(-300 // size)
    assert rows.shape == (2, 300 + count, 3 * width + 16)
    torch.testing.assert_close(mean[:, :dim], key_mean(k[0, 1:]), rtol=1e-5, atol=1e-6)
    keys = (k[0, 1:].float() - key_mean(k[0, 1:])[:, None])[:, cells.order]
    if size is not None:
        keys = torch.cat([keys, torch.stack([cell.mean(1) for cell in keys.split(size, 1)], 1)], 1)
    (codes, scale), values = quantised(keys, precision), rows.view(torch.bfloat16)[..., width // 2 : 3 * width // 2]
    end = rows.view(torch.float32)[..., 3 * width // 4 :]
    torch.testing.assert_close(end[..., :1], scale, rtol=1e-5, atol=0)
    assert not end[..., 1:].any() and not values[..., dim:].any() and not rows[..., dim:width].float().any()
    assert torch.equal(values[:, :300, :dim], v[0, 1:, cells.order])
    assert (rows[..., :dim].float() != codes.float()).float().mean() < 1e-3


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("dim, shared", [(24, False), (128, True), (256, False)])
def test_quantised_queries(dim, shared, precision):
    """To the bit, in group order, of all heads by one order or each by its own; slack and columns past D are 0."""
    q = make_qkv(1, 3, 300, dim, dtype=torch.bfloat16, device=DEVICE, layout="bshd", nan_slack=1, kind="outliers")[0][0]
    q[1] *= 1e-3
    q[2, :128] = 0
    order = torch.stack([torch.randperm(300, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    order[2] = torch.arange(300)
    order = torch.nn.functional.pad(order[2:] if shared else order, (0, 84), value=-1).int().to(DEVICE).expand(3, -1)
    width = max(32, 1 << (dim - 1).bit_length())
    codes, scales = triton_pool.quantise_queries(q, order, slice(1, 3), precision)
    assert codes.shape == (2, 384, width) and scales.shape == (2, 3)
    x = torch.stack([q[h, order[h].long()] * (order[h] >= 0)[:, None] for h in (1, 2)])
    expected, scale = quantised(x.unflatten(1, (3, 128)), precision, over=(-2, -1))
    assert torch.equal(scales, scale.flatten(1)) and scales[1, 0] == 1
    assert torch.equal(codes[..., :dim].float(), expected.flatten(1, 2).float())
    assert not codes[:, 300:].float().any() and not codes[..., dim:].float().any()


@pytest.mark.parametrize("precision", LOW)
def test_low_precision_far_apart_in_memory(precision):
    """Tokens 2^25 + 16 values apart: the last begins beyond 2^31."""
    length, step = 66, 2**25 + 16
    memory = torch.empty(length * step, dtype=torch.bfloat16, device=DEVICE)
    case = a_case(length, dim=32, heads=1, tail=32)
    q, k, v = (memory.as_strided((1, 1, length, 32), (0, 0, step, 1), 64 * i) for i in range(3))
    for far, x in zip((q, k, v), (case.q, case.k, case.v), strict=True):
        far.copy_(x)
    results = [triton_sparse.token_sparse_attention(*c.arguments(), precision) for c in (case, replace(case, q=q, k=k, v=v))]
    assert all(map(torch.equal, *results))


# ---- on a GPU


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel depends on; geometries vary inside it."""

    dim: int
    dtype: torch.dtype
    residual: str = "none"  # a format, "none" or "difference"
    layout: str = "bhsd"  # "bshd", or "odd": rows of D + 3 values
    granularity: str = "token"
    tail: int | None = None


VARIANTS = [
    Variant(128, torch.bfloat16),
    Variant(128, torch.bfloat16, "int4", "bhsd", "cell32", 64),
    Variant(128, torch.float16, "none", "bshd", "token", 64),
    Variant(64, torch.bfloat16, "none", "bshd", "cell32", 32),
    Variant(64, torch.bfloat16, "rank-8", "odd", "token", 128),
    Variant(64, torch.float16, "difference", "bhsd", "token", 7),
    Variant(40, torch.float32, "none", "odd", "token", 32),
    Variant(80, torch.float16, "int2", "odd", "cell32"),
]


def random_rows(generator, shape, dtype, layout, integers):
    """A (B, H, S, D) view between NaNs."""
    batch, heads, length, dim = shape
    wide = dim + 3 if layout == "odd" else dim
    memory = (batch, length + 4, heads, wide) if layout == "bshd" else (batch, heads, length + 4, wide)
    x = torch.full(memory, math.nan, dtype=dtype, device="cuda")
    x = (x.transpose(1, 2) if layout == "bshd" else x)[:, :, 2:-2, wide - dim :]
    values = torch.randn(shape, generator=generator, device="cuda")
    return x.copy_(values.mul_(2).round_() if integers else values)


def random_case(variant, seed):
    """S 1 to 20000, up to 3 rows and 4 heads, any cell order and groups, mixed counts; ties or outliers in some."""
    generator = torch.Generator("cuda").manual_seed(seed)
    draws = torch.rand(11, generator=generator, device="cuda").tolist()
    length, keys = (round(math.exp(u * math.log(20_000))) for u in draws[:2])
    keys = length if draws[2] < 0.6 else keys
    batch, heads = 1 + int(3 * draws[3]), 1 + int(4 * draws[4])
    ties, outliers = draws[5] < 0.2, draws[5] > 0.7
    q, k, v = (
        random_rows(generator, (batch, heads, n, variant.dim), variant.dtype, variant.layout, ties) for n in (length, keys, keys)
    )
    if ties:
        k[:, :, keys // 2 :] = k[:, :, : keys - keys // 2].clone()
    if outliers:
        some = torch.randint(keys, (1 + keys // 50,), generator=generator, device="cuda")
        v[:, :, some, ::3] = 6e4  # near the end of float16
        k[:, :, some] *= 8
        q[..., :: max(1, variant.dim // 3)] *= 3
    order = torch.randperm(keys, generator=generator, device="cuda")
    cells = CellOrder(order, order.argsort()) if draws[6] < 0.5 else cell_order(None, after=keys).to("cuda")
    count = -(-length // 128)
    shared = (1, 1) if draws[7] < 0.3 else (batch, heads)
    members = torch.full((*shared, count * 128), -1, dtype=torch.int32, device="cuda")
    members[..., :length] = torch.rand((*shared, length), generator=generator, device="cuda").argsort(-1)
    densities = (0.0, 1, 1.1, draws[8], 0.1 * draws[8], 0.3)
    at = int(6 * draws[9])
    selection = a_selection((batch, heads, count), cells, densities[at:] + densities[:at], variant.granularity, seed)
    tail = variant.tail
    if tail is not None and draws[10] < 0.3:
        tail = pool_cells(k, v, cells, tail, backend="triton")
    return Case(q, k, v, QueryGroups(members, length), selection, tail), generator


def random_end(variant, case, generator):
    """(residual, dense) as the variant has them."""
    if variant.residual == "difference":
        return None, random_rows(generator, case.q.shape, variant.dtype, variant.layout, False)
    if variant.residual == "none":
        return None, None
    shape = (*case.q.shape[:2], case.groups.order.shape[2], case.q.shape[3])
    return compress_residual(torch.randn(shape, generator=generator, device="cuda").to(variant.dtype), variant.residual), None


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too many to interpret")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.dim}-{str(v.dtype)[6:]}-{v.residual}-{v.layout}-{v.tail}")
def test_random_geometries(variant):
    """63 for each of 8 variants: 504."""
    for seed in range(63):
        case, generator = random_case(variant, seed)
        batch, heads = case.q.shape[:2]
        residual, dense = random_end(variant, case, generator)
        last = case.groups.count - 1
        some = {(0, 0, last), (batch - 1, heads - 1, 0), (batch // 2, heads // 2, last // 2), (0, heads - 1, last // 3)}
        try:
            check(case, residual, dense, some)
        except Exception as error:
            size = case.tail.size if isinstance(case.tail, PooledTail) else case.tail
            raise AssertionError(f"seed {seed}: q {tuple(case.q.shape)}, {case.k.shape[2]} keys, tail {size}") from error


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
def test_170_thousand_tokens_at_offsets_beyond_2_31():
    """Rows 16384 values apart, as of 128 heads of which two are used: the last row begins at element 2.8e9."""
    length, heads, dim = 170_000, 2, 128
    generator = torch.Generator("cuda").manual_seed(0)
    memory = torch.empty((1, length, 128, dim), dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    q, k, v = (memory[:, first :: 100] for first in (3, 11, 20))
    for x in (q, k, v):
        assert x.shape == (1, heads, length, dim) and x.stride(2) * length > 2**31
        x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
    cells = cell_order((34, 50, 100)).to("cuda")
    count, words = -(-length // 128), -(-length // 32)
    random = (torch.randint(-(2**31), 2**31, (1, heads, count, words), generator=generator, device="cuda").int() for _ in range(2))
    bits = next(random) & next(random)  # a quarter of the keys
    bits[..., -1] &= (1 << length % 32) - 1 if length % 32 else -1
    counts = popcount(bits).sum(-1, dtype=torch.int32)
    order = torch.rand((1, heads, length), generator=generator, device="cuda").argsort(-1).int()
    order = torch.nn.functional.pad(order, (0, count * 128 - length), value=-1)
    selection = KeySelection(bits, counts, torch.ones(counts.shape, device="cuda"), "token", cells)
    case = Case(q, k, v, QueryGroups(order, length), selection, 64)
    some = [(0, h, g) for h in range(heads) for g in (0, 1, count // 2, count - 2, count - 1)]
    check(case, some=some)
    check(case, dense=v, some=some)
    check(replace(case, tail=None), some=some[:3])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too many to interpret")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.dim}-{str(v.dtype)[6:]}-{v.residual}-{v.layout}-{v.tail}")
def test_random_geometries_in_low_precision(variant):
    for seed in range(12):
        case, generator = random_case(variant, seed)
        residual, dense = random_end(variant, case, generator)
        for precision in LOW:
            arguments = (*case.arguments(residual, dense), precision)
            result = triton_sparse.token_sparse_attention(*arguments)
            try:
                assert selfcheck.check("token_sparse_attention", result, arguments)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {precision}: q {tuple(case.q.shape)}, {case.k.shape[2]} keys") from error


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
@pytest.mark.parametrize("precision", ("half", *LOW))
def test_200_thousand_tokens(precision):
    """24 of 128 heads that share memory: the last row begins at element 3.3e9, and the quantised rows of all heads take 2 GB."""
    length, dim = 200_000, 128
    generator = torch.Generator("cuda").manual_seed(0)
    memory = torch.empty((1, length, 128, dim), dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    q, k, v = (memory[:, first::5][:, :24] for first in range(3))
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, generator=generator, device="cuda", dtype=torch.bfloat16))
    cells, count = cell_order((40, 50, 100)).to("cuda"), -(-length // 128)
    bits = torch.randint(-(2**31), 2**31, (1, 24, count, length // 32), generator=generator, device="cuda").int()
    for _ in range(3):
        bits &= bits.roll(7, -1)
    counts = popcount(bits).sum(-1, dtype=torch.int32)
    order = torch.rand((1, 24, length), generator=generator, device="cuda").argsort(-1).int()
    groups = QueryGroups(torch.nn.functional.pad(order, (0, count * 128 - length), value=-1), length)
    selection = KeySelection(bits, counts, torch.ones(counts.shape, device="cuda"), "token", cells)
    named = () if precision == "half" else (precision,)
    for dense in (None, v):
        arguments = (*Case(q, k, v, groups, selection, 64).arguments(dense=dense), *named)
        assert selfcheck.check("token_sparse_attention", triton_sparse.token_sparse_attention(*arguments), arguments)


# ---- the Hopper kernels, on the same random geometries

HOPPER = [
    Variant(128, torch.bfloat16, "none", "bshd", "token", 64),
    Variant(128, torch.bfloat16, "rank-8", "bhsd", "token", 128),
    Variant(128, torch.float16, "difference", "odd", "token", 7),
    Variant(128, torch.bfloat16, "int4", "odd", "cell32", 64),
    Variant(128, torch.float16, "none", "bshd", "cell32", 32),
    Variant(64, torch.bfloat16, "none", "bshd", "cell32", 128),
    Variant(64, torch.float16, "fp8", "bhsd", "token", 32),
    Variant(64, torch.bfloat16, "difference", "bhsd", "cell32", 100),
]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too many to interpret")
@pytest.mark.parametrize("precision", cute_sm90.PRECISIONS)
@pytest.mark.parametrize("variant", HOPPER, ids=lambda v: f"{v.dim}-{str(v.dtype)[6:]}-{v.residual}-{v.layout}-{v.granularity}-{v.tail}")
def test_random_geometries_on_hopper(variant, precision):
    """63 for each of 8 variants, 504, and 12 for each in int8; sampled rows against float32, and the same from call to call."""
    for seed in range(63 if precision == "half" else 12):
        case, generator = random_case(variant, seed)
        why_not = cute_sm90.why_not(replace(Geometry.of(case.q, case.k), precision=precision))
        if why_not is not None:
            pytest.skip(why_not)
        residual, dense = random_end(variant, case, generator)
        arguments = (*case.arguments(residual, dense), precision)
        result = cute_sm90.token_sparse_attention(*arguments)
        again = cute_sm90.token_sparse_attention(*arguments)
        try:
            selfcheck.check("token_sparse_attention", result, arguments)
            assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(result, again, strict=True) if x is not None)
        except Exception as error:
            raise AssertionError(f"seed {seed}: q {tuple(case.q.shape)}, {case.k.shape[2]} keys") from error
