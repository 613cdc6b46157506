"""The choice of the heaviest in PyTorch, for Hopper machines without Triton, against the reference's on the same masses."""
import math

import pytest
import torch

from mc_sparse.kernels import cell_order, group_queries, pack_bits, unpack_bits
from mc_sparse.kernels.selection import heaviest, reference, torch_steps
from mc_sparse.kernels.shapes import GRANULARITIES


def choose(masses, keys, density, granularity="token", kept=(), cells=None):
    """A Choice of masses (rows, units) that has been made; the memory beyond the units is NaN."""
    rows, units = masses.shape
    memory = torch.full((rows, heaviest.row_width(units)), math.nan)
    memory[:, :units] = masses
    q, k = torch.zeros(1, 1, 128 * rows, 8), torch.zeros(1, 1, keys, 8)
    cells = cells or cell_order(None, after=keys)
    choice = torch_steps.Choice.of(q, k, group_queries(q), density, cells, granularity, kept)
    choice.choose(range(rows), memory)
    return choice


@pytest.mark.parametrize("kept", [(), ((0, 1), (40, 77))])
@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("density", [0, 1e-3, 0.3, 0.9])
@pytest.mark.parametrize("levels", [1, 3, 1 << 20])
def test_it_is_the_references_choice(levels, density, granularity, kept, monkeypatch):
    """From all masses equal to hardly any; a few rows at a time."""
    keys = 1000
    cells = cell_order((4, 11, 20), before=100, after=20)
    units = keys if granularity == "token" else -(-keys // 32)
    masses = torch.randint(levels, (7, units), generator=torch.Generator().manual_seed(1)).float()
    monkeypatch.setattr("mc_sparse.kernels.chunks.CPU_CHUNK_BYTES", 2 * torch_steps.UNIT_BYTES * units)
    choice = choose(masses, keys, density, granularity, kept, cells)
    sizes = cells.sizes(GRANULARITIES[granularity])
    always = reference._units_kept(kept, cells, GRANULARITIES[granularity])
    rank = cells.order if granularity == "token" else torch.arange(units)
    budget = reference._units_to_choose(density, sizes, always, GRANULARITIES[granularity])
    assert (choice.budget, choice.free) == (budget, int((~always).sum()))
    expected = reference._heaviest(masses.masked_fill(always, -math.inf), budget, rank) | always
    assert torch.equal(choice.selection.bits[0, 0], pack_bits(expected))
    assert torch.equal(choice.selection.counts[0, 0], (expected * sizes).sum(1).int())
    share = (masses * expected).sum(1) / masses.sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    torch.testing.assert_close(choice.selection.retained[0, 0], share, rtol=1e-6, atol=0)


def test_masses_a_bit_apart_and_the_smallest_are_told_apart():
    keys = 300
    one = torch.tensor(0x3F800000, dtype=torch.int32)
    for first in (one, torch.tensor(1, dtype=torch.int32)):  # from 1.0 on, and from the smallest number above 0 on
        masses = (first + torch.arange(keys, dtype=torch.int32).roll(70)).view(torch.float32)[None]
        chosen = unpack_bits(choose(masses, keys, 0.4).selection.bits, keys).flatten()
        assert torch.equal(chosen, torch.zeros(keys, dtype=torch.bool).scatter(0, masses[0].topk(128).indices, True))


def test_everything_needs_no_masses():
    q, k = torch.zeros(1, 2, 200, 8), torch.zeros(1, 2, 70, 8)
    lse = torch.zeros(1, 2, 200)
    lse[0, 1] = -math.inf
    choice = torch_steps.Choice.of(q, k, group_queries(q), 1.0, cell_order(None, after=70), "token", ())
    assert choice.is_everything
    selection = choice.everything(lse, group_queries(q))
    assert bool(unpack_bits(selection.bits, 70).all()) and bool((selection.counts == 70).all())
    assert selection.retained[0].tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("density", [0.0, 0.25, 0.9])
def test_bits_are_as_many_as_counts_where_masses_are_nan(density):
    """The NaN of NVIDIA GPUs is the largest of all patterns."""
    keys = 512
    masses = torch.rand(2, keys, generator=torch.Generator().manual_seed(0))
    masses.view(torch.int32)[0], masses.view(torch.int32)[1, 3] = 0x7FFFFFFF, 0x7FFFFFFF
    selection = choose(masses, keys, density).selection
    assert torch.equal(unpack_bits(selection.bits, keys).sum(-1), selection.counts)
    if density:
        assert bool(unpack_bits(selection.bits, keys)[0, 0, 1, 3])
