"""What is done around the masses of the Hopper kernel of selection, in Triton and in PyTorch; on a Hopper GPU, the whole selection."""
import math
from dataclasses import replace

import pytest
import torch

from mc_sparse.kernels import Geometry, cell_order, dense_attention, group_queries, unpack_bits
from mc_sparse.kernels import launch as launch_table
from mc_sparse.kernels.selection import cute_sm90, heaviest, reference, torch_steps, triton_heaviest, triton_select, triton_steps
from mc_sparse.kernels.shapes import GRANULARITIES
from mc_sparse.kernels.testing import KINDS, make_qkv
from mc_sparse.kernels.triton_support import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
KEPT = ((7, 90), (300, 301))
NAN = 0x7FFFFFFF  # bits of the one that NVIDIA GPUs make


def test_triton_is_taken_where_it_runs():
    assert cute_sm90.steps(Geometry(1, 1, 9, 9, 64, torch.bfloat16, DEVICE, (9, 0))) is triton_steps
    assert cute_sm90.steps(Geometry(1, 1, 9, 9, 512, torch.bfloat16, DEVICE, (9, 0))) is torch_steps


def test_where_triton_fails_pytorch_is_taken(monkeypatch, caplog):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler. Please specify via CC\nenvironment variable")

    monkeypatch.setattr(triton_steps, "swizzle", Broken())
    triton_steps._why_no_launch.cache_clear()
    geometry = Geometry(1, 1, 9, 9, 64, torch.bfloat16, DEVICE, (9, 0))
    assert cute_sm90.steps(geometry) is torch_steps and cute_sm90.steps(geometry) is torch_steps
    assert triton_steps.why_not(geometry) == "cannot run kernels here: Failed to find C compiler. Please specify via CC"
    assert len(caplog.records) == 1 and "anchors are slower" in caplog.text
    triton_steps._why_no_launch.cache_clear()


@pytest.fixture
def small_sample(monkeypatch):
    """So that rows of some hundred units need all the steps of a long row in Triton, and are chosen in parts in PyTorch."""
    for kernel in triton_heaviest.Launches._fields:
        entry = dict.fromkeys(launch_table._TABLE[kernel], launch_table.Launch(128, 4, 1))
        monkeypatch.setitem(launch_table._TABLE, kernel, entry)
    monkeypatch.setattr("mc_sparse.kernels.chunks.CPU_CHUNK_BYTES", 40_000)
    monkeypatch.setattr("mc_sparse.kernels.chunks.DEVICE_CHUNK_BYTES", 40_000)


def assert_same_choice(mine, expected):
    """Bits and counts; the retained mass is summed in another order."""
    assert torch.equal(mine.bits, expected.bits) and torch.equal(mine.counts, expected.counts)
    torch.testing.assert_close(mine.retained, expected.retained, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("density, kept", [(0.0, KEPT), (0.02, ()), (0.3, KEPT), (0.9, ())])
def test_both_choose_the_same(density, kept, granularity, small_sample):
    """Random masses, few different ones, none at all, half of a row NaN, one NaN; rows in two heads of two batch rows."""
    keys = 701
    units = keys if granularity == "token" else -(-keys // 32)
    cells = cell_order((2, 15, 20), before=60, after=41).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    masses = torch.full((12, heaviest.row_width(units)), math.nan)
    rows = masses[:, :units]
    rows[:8] = (2 * torch.randn(8, units, generator=generator)).exp()
    rows[3:6] = torch.randint(3, (3, units), generator=generator).float()
    rows[6] = 0
    rows[8:] = torch.rand(4, units, generator=generator)
    rows.view(torch.int32)[8, ::2] = rows.view(torch.int32)[9, 5] = NAN
    masses = masses.to(DEVICE)
    q, k = torch.zeros(2, 2, 384, 16, device=DEVICE), torch.zeros(2, 2, keys, 16, device=DEVICE)
    found = []
    for steps in (torch_steps, triton_steps):
        choice = steps.Choice.of(q, k, group_queries(q.cpu()), density, cells, granularity, kept)
        choice.choose(range(0, 5), masses[:5])
        choice.choose(range(5, 12), masses[5:])
        found.append(choice.selection)
    mine, expected = (replace(s, retained=s.retained.flatten()[[*range(8), 10, 11]]) for s in found)  # without those of NaN
    assert_same_choice(mine, expected)
    assert torch.equal((unpack_bits(mine.bits, units) * cells.sizes(GRANULARITIES[granularity])).sum(-1).int(), mine.counts)


@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_select_the_same_by_the_same_masses(kind, granularity, small_sample, monkeypatch):
    """Masses by Triton, in pieces that end inside a head."""
    q, k, _ = make_qkv(2, 2, 300, 16, kind=kind, dtype=torch.bfloat16, device=DEVICE)
    cells, groups = cell_order((3, 10, 10)).to(DEVICE), group_queries(q.cpu())
    groups = type(groups)(groups.order.to(DEVICE), groups.length)
    lse = dense_attention(q.float(), k.float(), k.float(), backend="reference")[1]
    masses = triton_select.Masses.of(q, k, lse, groups, cells, granularity, 0.25)
    choices = [steps.Choice.of(q, k, groups, 0.4, cells, granularity, ((3, 9),)) for steps in (torch_steps, triton_steps)]
    monkeypatch.setattr(heaviest, "PROGRAMS_PER_MULTIPROCESSOR", 1 << 20)  # no rounding to whole multiprocessors
    monkeypatch.setattr(heaviest, "SCRATCH_BYTES", 30_000)
    assert_same_choice(*(choice.heaviest(masses) for choice in choices))


@pytest.mark.parametrize("steps", [torch_steps, triton_steps])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_are_permuted_by_pieces(dim, layout, steps):
    """Element by element, by the rule of wgmma's 128-byte swizzle; the heads are those of two batch rows."""
    batch, heads, length = 2, 3, 200
    k = make_qkv(batch, heads, length, dim, dtype=torch.bfloat16, device=DEVICE, layout=layout, nan_slack=3)[1]
    cells = cell_order((2, 5, 18), before=7, after=13).to(DEVICE)
    tiles = steps.in_tiles(k, cells, range(2, 5)).cpu()
    assert tiles.shape == (3, 2, 128 * dim)
    rows = torch.nn.functional.pad(k.cpu().flatten(0, 1)[2:5][:, cells.order.cpu()], (0, 0, 0, 256 - length))
    row, column = torch.arange(128)[:, None], torch.arange(dim)
    place = column // 64 * 128 * 64 + row * 64 + ((column % 64 // 8) ^ (row % 8)) * 8 + column % 8
    assert torch.equal(tiles[:, :, place], rows.unflatten(1, (2, 128)))


@pytest.mark.skipif(INTERPRETED, reason="its products are for a Hopper GPU")
@pytest.mark.parametrize("steps", [torch_steps, triton_steps])
@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length, keys", [(129, 500), (300, 131), (1000, 3000), (3000, 1000)])
def test_selection_on_hopper(length, keys, dim, dtype, granularity, steps, monkeypatch):
    q = make_qkv(2, 3, length, dim, kind="clustered", dtype=dtype, device=DEVICE, layout="bshd", nan_slack=3, seed=1)[0]
    k = make_qkv(2, 3, keys, dim, kind="clustered", dtype=dtype, device=DEVICE, layout="bshd", nan_slack=3, seed=2)[1]
    if cute_sm90.why_not(Geometry.of(q, k)) is not None:
        pytest.skip("needs a Hopper GPU")
    lse = dense_attention(q.float(), k.float(), k.float(), backend="reference")[1]
    lse[0, 0, ::5] = float("-inf")
    cells = cell_order((3, 4, keys // 12), after=keys % 12).to(DEVICE)
    args = (q, k, lse, group_queries(q), 0.2, cells, granularity, ((3, 9),), dim**-0.5)
    monkeypatch.setattr(cute_sm90, "steps", lambda geometry: steps)
    mine, expected = cute_sm90.select_keys(*args), reference.select_keys(*args)
    assert torch.equal(mine.counts, expected.counts)
    torch.testing.assert_close(mine.retained, expected.retained, rtol=1e-4, atol=1e-6)
    units = keys if granularity == "token" else -(-keys // 32)
    agreed = unpack_bits(mine.bits, units) & unpack_bits(expected.bits, units)
    assert agreed.sum() >= 0.999 * unpack_bits(expected.bits, units).sum()
