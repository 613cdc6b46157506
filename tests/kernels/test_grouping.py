"""Groups of queries: every query once, and PDDP no looser than with exact eigenvectors."""
import pytest
import torch

from mc_sparse.kernels import cell_order, group_queries
from mc_sparse.kernels.testing import KINDS, make_qkv

LENGTHS = [1, 2, 63, 127, 128, 129, 1000, 4212]


def within_group_variance(x, order):
    """Sum over groups of squared distances to the group's mean; x (S, D)."""
    return sum((x[group] - x[group].mean(0)).square().sum() for group in (g[g >= 0].long() for g in order.split(128)))


def exact_pddp(x):
    """Order of the tokens of x (S, D) float64 by recursion with exact eigenvectors."""
    def split(tokens):
        if len(tokens) <= 128:
            return [tokens]
        centred = x[tokens] - x[tokens].mean(0)
        direction = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
        ordered = tokens[(centred @ direction).argsort(stable=True)]
        cut = 128 * (-(-len(tokens) // 128) // 2)
        return split(ordered[:cut]) + split(ordered[cut:])

    return torch.cat(split(torch.arange(len(x))))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("method", ["pddp", "cells"])
def test_every_query_is_in_exactly_one_group(length, method):
    q, _, _ = make_qkv(2, 3, length, 16, layout="bshd")
    groups = group_queries(q, method=method, cells=cell_order(None, after=length))
    width = -(-length // 128) * 128
    assert groups.order.dtype == torch.int32
    assert groups.order.shape == ((2, 3, width) if method == "pddp" else (1, 1, width))
    assert groups.count == width // 128 and groups.length == length
    whole = groups.expanded(2, 3)
    assert torch.equal(whole[..., :length].sort(-1).values, torch.arange(length, dtype=torch.int32).expand(2, 3, -1))
    assert bool((whole[..., length:] == -1).all())


# Not clustered at 4212: with about as many clusters as groups, which clusters a cut goes through is luck. Heads then differ by
# up to 20 % either way, with any number of iterations, and the mean over heads by less than 3 %.
@pytest.mark.parametrize("kind, length, dim", [*((kind, 1000, 64) for kind in KINDS), ("random", 4212, 32), ("outliers", 4212, 32)])
def test_pddp_is_as_tight_as_with_exact_eigenvectors(kind, length, dim):
    q, _, _ = make_qkv(1, 2, length, dim, kind=kind)
    order = group_queries(q).order[0]
    for h in range(2):
        x = q[0, h].double()
        assert within_group_variance(x, order[h]) <= 1.01 * within_group_variance(x, exact_pddp(x))


def test_pddp_beats_the_sequence_order():
    q, _, _ = make_qkv(1, 1, 2048, 64, kind="clustered")
    x = q[0, 0].double()
    # The right half of the 32 clusters cannot be split off exactly: 0.75 was measured, 1.0 is no grouping at all.
    assert within_group_variance(x, group_queries(q).order[0, 0]) < 0.8 * within_group_variance(x, torch.arange(2048))


def test_pddp_finds_clusters_of_one_group_each():
    centres = 10 * torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    cluster = torch.randperm(1024, generator=torch.Generator().manual_seed(2)) % 8
    q = (centres[cluster] + 0.01 * torch.randn(1024, 32, generator=torch.Generator().manual_seed(3)))[None, None]
    for group in group_queries(q).order[0, 0].long().split(128):
        assert len(cluster[group].unique()) == 1
        assert torch.equal(group, group.sort().values)


def test_pddp_of_equal_queries_keeps_their_order():
    assert group_queries(torch.full((1, 1, 300, 8), 0.5)).order[0, 0, :300].tolist() == list(range(300))


def test_pddp_follows_the_direction_of_a_line():
    """On a line the groups are its intervals, in the order in which the entry of largest variance grows."""
    place = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    q = place[:, None] * torch.tensor([0.5, -2.0, 1.0])
    first, second = group_queries(q[None, None]).order[0, 0].long().split(128)
    assert set(place[first].tolist()) == set(range(128, 256))  # that entry is -2 * place
    assert set(place[second].tolist()) == set(range(128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pddp_depends_on_values_alone(dtype):
    """Not on the memory layout, the other heads, NaN beside the tokens, or the call."""
    q, _, _ = make_qkv(2, 3, 700, 24, kind="clustered", dtype=dtype)
    strided, _, _ = make_qkv(2, 3, 700, 24, kind="clustered", dtype=dtype, layout="bshd", nan_slack=5)
    before = strided.clone()
    order = group_queries(q).order
    assert torch.equal(group_queries(strided).order, order)
    assert torch.equal(strided, before)
    for b in range(2):
        for h in range(3):
            assert torch.equal(group_queries(q[b : b + 1, h : h + 1]).order[0, 0], order[b, h])


def test_cell_groups_are_the_runs_of_128():
    cells = cell_order((3, 9, 16), before=2)
    groups = group_queries(torch.zeros(2, 2, len(cells), 8), method="cells", cells=cells)
    assert groups.order[0, 0, : len(cells)].tolist() == cells.order.tolist()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"method": "kmeans"}, "choose one of pddp, cells"),
        ({"method": "cells"}, "needs the cell order"),
        ({"method": "cells", "cells": cell_order(None, after=9)}, "has 9 tokens, the keys 10"),
        ({"backend": "warp"}, "no backend 'warp'; choose one of auto, reference"),
    ],
)
def test_refusals_say_what_is_needed(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_queries(torch.zeros(1, 1, 10, 8), **arguments)
