"""The heaviest keys of each group, as bits: exact counts, stated ties, lossless packing."""
import math

import pytest
import torch

from mc_sparse.kernels import (
    KeySelection,
    cell_order,
    dense_attention,
    expand_selection,
    group_queries,
    key_budget,
    pack_bits,
    select_keys,
    unpack_bits,
    unselected_counts,
)
from mc_sparse.kernels.testing import KINDS, make_qkv

LENGTHS = [1, 2, 63, 127, 128, 129, 1000]


def anchor(q, k, cells, **arguments):
    """(groups, lse, selection) of an anchor step."""
    groups = group_queries(q)
    lse = dense_attention(q, k, k)[1]
    return groups, lse, select_keys(q, k, lse, groups, cells=cells, **arguments)


def a_selection(mask, cells, granularity="token"):
    """A selection of the tokens (or cells) of `mask` (B, H, G, n), in cell order."""
    sizes = cells.sizes(1 if granularity == "token" else 32)
    counts = (mask * sizes).sum(-1).int()
    return KeySelection(pack_bits(mask), counts, torch.ones(counts.shape), granularity, cells)


def test_budget_by_hand():
    assert [key_budget(d, 1000) for d in (0, 0.001, 0.128, 0.129, 0.5, 0.99, 1)] == [0, 128, 128, 256, 512, 1000, 1000]
    assert [key_budget(0.25, n) for n in (1, 128, 512, 513, 4212)] == [1, 128, 128, 256, 1152]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["token", "cell32"])
def test_selection_is_the_heaviest_keys(kind, granularity, definition):
    """Every selected key is at least as heavy as every other one, up to rounding, in the float64 definition."""
    cells = cell_order((4, 11, 23))
    q, k, _ = make_qkv(2, 2, len(cells), 24, kind=kind, layout="bshd", nan_slack=2)
    groups, lse, selection = anchor(q, k, cells, density=0.3, granularity=granularity)
    mass = definition.mass(q, k, lse, groups)
    tokens = definition.selected_tokens(selection)
    torch.testing.assert_close(selection.counts, tokens.sum(-1).int(), rtol=0, atol=0)
    torch.testing.assert_close(selection.retained.double(), (mass * tokens).sum(-1) / mass.sum(-1), rtol=1e-4, atol=1e-6)
    if granularity == "cell32":
        runs = [torch.stack([part.sum(-1) for part in x[..., cells.order].double().split(32, -1)], -1) for x in (mass, tokens)]
        mass, tokens = runs[0], runs[1] > 0
        assert set(tokens.sum(-1).unique().tolist()) == {key_budget(0.3, len(cells)) / 32}
    else:
        assert set(selection.counts.unique().tolist()) == {key_budget(0.3, len(cells))}
    lightest = mass.masked_fill(~tokens, math.inf).amin(-1)
    heaviest_left = mass.masked_fill(tokens, -math.inf).amax(-1)
    assert bool((lightest >= heaviest_left * (1 - 1e-5)).all())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("density", [0, 0.1, 0.25, 0.9, 1.0, 2.0])
@pytest.mark.parametrize("granularity", ["token", "cell32"])
def test_counts_are_exact(length, density, granularity, definition):
    cells = cell_order((1, 1, length))
    q, k, _ = make_qkv(1, 2, length, 8)
    selection = anchor(q, k, cells, density=density, granularity=granularity)[2]
    budget = key_budget(min(density, 1), length)
    tokens = definition.selected_tokens(selection)
    assert torch.equal(selection.counts, tokens.sum(-1).int())
    if granularity == "token" or budget in (0, length):
        assert bool((selection.counts == budget).all())
    else:  # budget / 32 cells, the last of which may be short
        assert set(selection.counts.unique().tolist()) <= {budget, budget - 32 + (length - 1) % 32 + 1}
    assert selection.realised_density == pytest.approx(selection.counts.double().mean().item() / length)


def test_equal_masses_go_to_the_lower_token():
    """q = 0 and lse = 0 give every key the mass 1 per query, exactly."""
    cells = cell_order((4, 11, 23))
    q, length = torch.zeros(1, 1, len(cells), 8), len(cells)
    k = torch.randn(1, 1, length, 8, generator=torch.Generator().manual_seed(0))
    selection = select_keys(q, k, torch.zeros(1, 1, length), group_queries(q), density=0.2, cells=cells)
    places = expand_selection(selection)
    for g in range(8):
        chosen = places[0, 0, g][places[0, 0, g] >= 0].long()
        assert cells.order[chosen].sort().values.tolist() == list(range(key_budget(0.2, length)))


def test_ties_below_heavier_keys():
    """Keys of mass 128 (k = 0) come first wherever they are, the tie among the massless rest goes by token."""
    cells = cell_order((1, 16, 32))
    heavy = torch.arange(500, 10, -9)
    k = torch.full((1, 1, 512, 4), -1000.0)
    k[0, 0, heavy] = 0
    q = torch.ones(1, 1, 512, 4)
    selection = select_keys(q, k, torch.zeros(1, 1, 512), group_queries(q), density=0.25, cells=cells, scale=1.0)
    rest = [token for token in range(512) if token not in set(heavy.tolist())][: 128 - len(heavy)]
    for g in range(4):
        assert cells.order[expand_selection(selection)[0, 0, g].long()].sort().values.tolist() == sorted([*heavy.tolist(), *rest])


def test_equal_cells_go_to_the_lower_cell():
    cells = cell_order((4, 11, 23))
    q = torch.zeros(1, 1, len(cells), 8)
    lse = torch.zeros(1, 1, len(cells))
    selection = select_keys(q, q, lse, group_queries(q), density=0.2, cells=cells, granularity="cell32")
    assert unpack_bits(selection.bits, 32)[0, 0, 0].nonzero().flatten().tolist() == list(range(256 // 32))


@pytest.mark.parametrize("kept", [((0, 1),), ((5, 40), (900, 1000)), ((0, 1000),)])
def test_kept_keys_come_on_top_of_the_budget(kept, definition):
    cells = cell_order((2, 20, 22), after=120)
    q, k, _ = make_qkv(1, 2, 1000, 16)
    always = torch.zeros(1000, dtype=torch.bool)
    for start, stop in kept:
        always[start:stop] = True
    selection = anchor(q, k, cells, density=0.2, kept=kept)[2]
    tokens = definition.selected_tokens(selection)
    assert bool(tokens[..., always].all())
    assert set(selection.counts.unique().tolist()) == {int(always.sum()) + key_budget(0.2, int((~always).sum()))}

    selection = anchor(q, k, cells, density=0.2, kept=kept, granularity="cell32")[2]
    in_runs = always[cells.order].split(32)
    top = sum(len(run) for run in in_runs if run.any())
    assert bool(definition.selected_tokens(selection)[..., always].all())
    budget = key_budget(0.2, 1000 - top)
    assert set(selection.counts.unique().tolist()) <= {top + budget, top + budget - 32 + 8}  # 1000 = 31 * 32 + 8


def test_rows_without_mass_do_not_count(definition):
    cells = cell_order((1, 1, 300))
    q, k, _ = make_qkv(1, 1, 300, 16, kind="clustered")
    groups, lse, _ = anchor(q, k, cells, density=0.3)
    lse[..., ::2] = -math.inf
    selection = select_keys(q, k, lse, groups, density=0.3, cells=cells)
    mass = definition.mass(q, k, lse, groups)
    assert bool(torch.isfinite(selection.retained).all())
    expected = mass.topk(128, -1).indices.sort(-1).values
    assert torch.equal(definition.selected_tokens(selection).nonzero()[:, -1].view(1, 1, 3, 128), expected)
    dead = select_keys(q, k, torch.full_like(lse, -math.inf), groups, density=0.3, cells=cells)
    assert bool((dead.counts == 128).all()) and bool((dead.retained == 0).all())


def test_scale_and_head_order_and_layout(definition):
    """One group order for all heads, fewer keys than queries, strided half inputs: the same rule."""
    cells = cell_order((1, 15, 20))
    q, _, _ = make_qkv(2, 2, 400, 16, kind="clustered", dtype=torch.bfloat16, layout="bshd", nan_slack=1)
    _, k, _ = make_qkv(2, 2, 300, 16, kind="clustered", dtype=torch.bfloat16)
    groups = group_queries(q, method="cells", cells=cell_order((1, 20, 20)))
    lse = dense_attention(q, k, k, scale=0.7)[1]
    selection = select_keys(q, k, lse, groups, density=0.4, cells=cells, scale=0.7)
    mass, tokens = definition.mass(q, k, lse, groups, scale=0.7), definition.selected_tokens(selection)
    assert bool((mass.masked_fill(~tokens, math.inf).amin(-1) >= mass.masked_fill(tokens, -math.inf).amax(-1) * (1 - 1e-5)).all())
    again = select_keys(q.contiguous(), k, lse, groups, density=0.4, cells=cells, scale=0.7)
    assert torch.equal(again.bits, selection.bits)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 1000])
def test_bits_by_definition(n):
    mask = torch.rand(2, 3, n, generator=torch.Generator().manual_seed(n)) < 0.4
    mask[0, 0] = True
    bits = pack_bits(mask)
    assert bits.dtype == torch.int32 and bits.shape == (2, 3, -(-n // 32))
    for row, words in zip(mask.flatten(0, 1).tolist(), bits.flatten(0, 1).tolist(), strict=True):
        number = sum((word & 0xFFFFFFFF) << 32 * w for w, word in enumerate(words))
        assert number == sum(bit << i for i, bit in enumerate(row))
    assert torch.equal(unpack_bits(bits, n), mask)


@pytest.mark.parametrize("granularity, length", [("token", 1000), ("token", 31), ("cell32", 1000), ("cell32", 1024), ("cell32", 31)])
def test_expansion_is_the_inverse_of_packing(granularity, length):
    cells = cell_order((1, 1, length))
    units = length if granularity == "token" else -(-length // 32)
    mask = torch.rand(2, 2, 5, units, generator=torch.Generator().manual_seed(0)) < torch.tensor([0, 0.1, 0.5, 0.9, 1.01])[:, None]
    places = expand_selection(a_selection(mask, cells, granularity))
    assert places.dtype == torch.int32
    assert places.shape == (2, 2, 5, -(-length // 128) * 128)
    for b in range(2):
        for h in range(2):
            for g in range(5):
                per_unit = 1 if granularity == "token" else 32
                expected = [p for p in range(length) if mask[b, h, g, p // per_unit]]
                assert places[b, h, g].tolist() == expected + [-1] * (places.shape[3] - len(expected))


def test_expansion_is_no_wider_than_needed():
    cells = cell_order((1, 1, 1000))
    mask = torch.zeros(1, 1, 2, 1000, dtype=torch.bool)
    assert expand_selection(a_selection(mask, cells)).shape == (1, 1, 2, 0)
    mask[0, 0, 1, :129] = True
    assert expand_selection(a_selection(mask, cells)).shape == (1, 1, 2, 256)


@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("size", [1, 7, 32, 64, 128])
@pytest.mark.parametrize("length", [5, 128, 1000])
def test_unselected_counts(granularity, size, length):
    cells = cell_order((1, 1, length))
    units = length if granularity == "token" else -(-length // 32)
    mask = torch.rand(1, 2, 4, units, generator=torch.Generator().manual_seed(1)) < torch.tensor([0, 0.3, 0.9, 1.01])[:, None]
    keys = mask if granularity == "token" else mask.repeat_interleave(32, -1)[..., :length]
    expected = torch.stack([(~run).sum(-1) for run in keys.split(size, -1)], -1).int()
    assert torch.equal(unselected_counts(a_selection(mask, cells, granularity), size), expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"density": -0.1}, "allowed is 0 to 1"),
        ({"density": math.nan}, "allowed is 0 to 1"),
        ({"granularity": "cell64"}, "choose one of token, cell32"),
        ({"kept": ((5, 3),)}, "ascending, disjoint"),
        ({"kept": ((0, 11),)}, "inside 0..10"),
        ({"cells": cell_order(None, after=9)}, "has 9 tokens, the keys 10"),
        ({"lse": torch.zeros(1, 1, 9)}, "needed is \\(1, 1, 10\\)"),
        ({"lse": torch.zeros(1, 1, 10, dtype=torch.int64)}, "needed is .* torch.float32"),
        ({"scale": math.nan}, "scale is nan; needed is a finite number"),
        ({"groups": group_queries(torch.zeros(1, 1, 9, 8))}, "do not fit q"),
        ({"k": torch.zeros(1, 1, 10, 7)}, "must agree in B, H and D"),
        ({"k": torch.zeros(1, 1, 10, 8, dtype=torch.float64)}, "allowed are float32"),
        ({"k": torch.zeros(1, 1, 10, 8, dtype=torch.float16)}, "they must agree"),
        ({"k": torch.zeros(1, 10, 8)}, "needed is \\(B, H, S, D\\)"),
    ],
)
def test_refusals_say_what_is_needed(arguments, message):
    q = torch.zeros(1, 1, 10, 8)
    good = {"q": q, "k": q, "lse": torch.zeros(1, 1, 10), "groups": group_queries(q), "density": 0.5, "cells": cell_order(None, after=10)}
    q, k, lse, groups, *rest = {**good, **arguments}.items()
    with pytest.raises(ValueError, match=message):
        select_keys(q[1], k[1], lse[1], groups[1], **dict(rest))


def test_kept_ranges_are_of_whole_tokens():
    q = torch.zeros(1, 1, 10, 8)
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        select_keys(q, q, q[..., 0], group_queries(q), density=0.5, cells=cell_order(None, after=10), kept=((0.5, 3),))
