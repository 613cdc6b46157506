"""The Triton selection against the reference. Run with TRITON_INTERPRET=1 on a CPU, or on a CUDA machine."""
import math
from dataclasses import replace

import pytest
import torch

from mc_sparse.kernels import (
    CellOrder,
    QueryGroups,
    cell_order,
    dense_attention,
    group_queries,
    key_budget,
    select_keys,
    selfcheck,
    unpack_bits,
)
from mc_sparse.kernels import launch as launch_table
from mc_sparse.kernels.selection import heaviest, select_keys_lagged, triton_heaviest, triton_select
from mc_sparse.kernels.shapes import GRANULARITIES
from mc_sparse.kernels.testing import KINDS, assert_no_worse_than, make_qkv
from mc_sparse.kernels.triton_support import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL_SAMPLE = 128
LENGTHS = [(1, 1), (31, 129), (129, 31), (300, 300), (129, 500)]


@pytest.fixture
def small_sample(monkeypatch):
    """A sample of 128 units and chunks as short, so that rows of some hundred need all the steps a long row does."""
    for kernel in triton_heaviest.Launches._fields:
        entry = dict.fromkeys(launch_table._TABLE[kernel], launch_table.Launch(SMALL_SAMPLE, 4, 1))
        monkeypatch.setitem(launch_table._TABLE, kernel, entry)


def inputs(q_length=300, k_length=300, head_dim=16, batch=1, heads=2, kind="random", dtype=torch.bfloat16, **layout):
    """q, k, lse, groups and a cell order that is not the token order."""
    q = make_qkv(batch, heads, q_length, head_dim, kind=kind, dtype=dtype, device=DEVICE, seed=1, **layout)[0]
    k = make_qkv(batch, heads, k_length, head_dim, kind=kind, dtype=dtype, device=DEVICE, seed=1, **layout)[1]
    cells = cell_order((2, 3, k_length // 6) if k_length >= 6 else None, after=k_length % 6 if k_length >= 6 else k_length).to(DEVICE)
    lse = dense_attention(q.cpu().float(), k.cpu().float(), k.cpu().float())[1].to(DEVICE)
    return q, k, lse, group_queries(q.cpu()), cells


def compare(definition, q, k, lse, groups, cells, tolerance=1e-4, mine=None, **arguments):
    """Selects by Triton (unless `mine` is given) and by the reference; returns both and the tokens, on the CPU, after checks.

    Equal: counts, kept keys, the number of selected units. Retained mass within the tolerance. Units that only one of them
    selected have masses within the tolerance of the lightest selected one, for the float sums differ in their last digits.
    """
    groups = type(groups)(groups.order.to(DEVICE), groups.length)
    mine = mine or select_keys(q, k, lse, groups, cells=cells, backend="triton", **arguments)
    q, k, lse = q.cpu(), k.cpu(), lse.cpu()
    groups, cells = type(groups)(groups.order.cpu(), groups.length), cells.to("cpu")
    reference = select_keys(q, k, lse, groups, cells=cells, backend="reference", **arguments)
    assert mine.bits.shape == reference.bits.shape and mine.bits.dtype == torch.int32
    mine = type(mine)(mine.bits.cpu(), mine.counts.cpu(), mine.retained.cpu(), mine.granularity, cells)
    torch.testing.assert_close(mine.retained, reference.retained, rtol=tolerance, atol=1e-6)

    tokens, expected = (definition.selected_tokens(s) for s in (mine, reference))
    assert torch.equal(mine.counts, tokens.sum(-1).int())
    per_bit = 1 if mine.granularity == "token" else 32
    units = -(-len(cells) // per_bit)
    assert not unpack_bits(mine.bits, mine.bits.shape[-1] * 32)[..., units:].any()
    chosen, should = (unpack_bits(s.bits, units) for s in (mine, reference))
    assert torch.equal(chosen.sum(-1), should.sum(-1))
    if per_bit == 1:
        assert torch.equal(mine.counts, reference.counts)
    for start, stop in arguments.get("kept", ()):
        assert bool(tokens[..., start:stop].all())

    scale = arguments.get("scale")
    mass = definition.mass(q, k, lse, groups, scale=scale)[..., cells.order]
    mass = torch.stack([part.sum(-1) for part in mass.split(per_bit, -1)], -1)
    always = torch.zeros(len(cells), dtype=torch.bool)
    for start, stop in arguments.get("kept", ()):
        always[start:stop] = True
    always = torch.stack([part.any() for part in always[cells.order].split(per_bit)])
    lightest = mass.masked_fill(~should | always, math.inf).amin(-1, keepdim=True).expand_as(mass)
    exchanged = chosen != should
    torch.testing.assert_close(mass[exchanged], lightest[exchanged], rtol=tolerance, atol=1e-30)
    return mine, reference, tokens, expected


@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("q_length, k_length", LENGTHS)
def test_selects_what_the_reference_selects(q_length, k_length, granularity, definition):
    compare(definition, *inputs(q_length, k_length), density=0.3, granularity=granularity)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [16, 40, 64])
def test_kinds_and_head_dims(kind, head_dim, small_sample, definition):
    layout = {"layout": "bshd" if head_dim == 40 else "bhsd", "nan_slack": 2}
    compare(definition, *inputs(129, 500, head_dim, kind=kind, **layout), density=0.4)


@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("density", [0, 1e-3, 0.3, 0.9, 1.0, 2.0])
def test_densities(density, granularity, small_sample, definition):
    compare(definition, *inputs(129, 700, kind="clustered"), density=density, granularity=granularity)


@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("kept", [((0, 1),), ((5, 40), (300, 500)), ((0, 500),)])
def test_kept_keys(kept, granularity, small_sample, definition):
    compare(definition, *inputs(129, 500), density=0.3, kept=kept, granularity=granularity)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_layout_scale_and_shared_groups(dtype, definition):
    """float32 inputs are rounded to bfloat16 by the backend, so the reference gets rounded ones."""
    q, k, lse, _, cells = inputs(200, 150, batch=2, dtype=dtype, layout="bshd", nan_slack=3)
    if dtype == torch.float32:
        q, k = q.bfloat16().float(), k.bfloat16().float()
    groups = group_queries(q.cpu(), method="cells", cells=cell_order((2, 10, 10)))
    assert groups.order.shape[:2] == (1, 1)
    compare(definition, q, k, lse, groups, cells, density=0.4, scale=0.4)


def test_rows_without_mass(definition):
    q, k, lse, groups, cells = inputs(kind="clustered")
    lse[..., ::2] = -math.inf
    compare(definition, q, k, lse, groups, cells, density=0.3)
    dead = compare(definition, q, k, torch.full_like(lse, -math.inf), groups, cells, density=0.3)[0]
    assert bool((dead.counts == 128).all()) and bool((dead.retained == 0).all())


def test_equal_masses_go_to_the_lower_token(small_sample, definition):
    """Every key has the mass 128: more equal keys than the candidates have room for, so the whole row is searched."""
    q, k, lse, groups, cells = inputs(128, 700)
    tokens = compare(definition, 0 * q, k, 0 * lse, groups, cells, density=0.3)[2]
    assert tokens.nonzero()[:, -1].view(1, 2, -1).unique(dim=1).flatten().tolist() == list(range(key_budget(0.3, 700)))
    cellwise = compare(definition, 0 * q, k, 0 * lse, groups, cells, density=0.3, granularity="cell32")[0]
    assert unpack_bits(cellwise.bits, 22)[0, 0, 0].nonzero().flatten().tolist() == list(range(8))


@pytest.mark.parametrize("repeats", [2, 50, 600])
def test_ties_at_the_threshold(repeats, small_sample):
    """Masses that are the same small integers in both (or all 0): equality to the bit, the tie at the threshold included.

    This goes by the row directly. Keys that are equal need not get equal masses from a matrix product (a BLAS may add
    up the rows of an edge block in another order), so from q and k ties are exact only where the sums are.
    """
    generator = torch.Generator().manual_seed(3)
    keys = 600
    cells = cell_order((2, 15, 20)).to(DEVICE)
    masses = torch.randint(keys // repeats, (4, keys), generator=generator).float()
    rows = torch.zeros(4, heaviest.row_width(keys))
    rows[:, :keys] = masses
    q = torch.zeros(1, 2, 256, 16, device=DEVICE)
    k = torch.zeros(1, 2, keys, 16, device=DEVICE)
    for kept in ((), ((7, 90),)):
        choice = triton_heaviest.Choice.of(q, k, group_queries(q.cpu()), 0.4, cells, "token", kept)
        choice.choose(range(4), rows.to(DEVICE))
        chosen = unpack_bits(choice.selection.bits, keys).view(4, keys).cpu()
        order = cells.order.tolist()
        held = {token for start, stop in kept for token in range(start, stop)}
        for row in range(4):
            free = sorted((-masses[row, place].item(), token) for place, token in enumerate(order) if token not in held)
            expected = {token for _, token in free[: key_budget(0.4, keys - len(held))]} | held
            assert {order[p] for p in chosen[row].nonzero().flatten().tolist()} == expected


def chosen_of_rows(masses, density):
    """A Choice of float32 masses (rows, keys) on the CPU, in token order, that has been made."""
    rows, keys = masses.shape
    memory = torch.full((rows, heaviest.row_width(keys)), math.nan)
    memory[:, :keys] = masses
    q, k = torch.zeros(1, 1, 128 * rows, 16, device=DEVICE), torch.zeros(1, 1, keys, 16, device=DEVICE)
    choice = triton_heaviest.Choice.of(q, k, group_queries(q.cpu()), density, cell_order(None, after=keys).to(DEVICE), "token", ())
    choice.choose(range(rows), memory.to(DEVICE))
    return choice


@pytest.mark.parametrize("density", [0.02, 0.3, 0.8])
def test_rows_of_many_chunks(density, small_sample):
    """40 chunks, and more than 20 times the sample, which is doubled for that."""
    masses = (2 * torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))).exp()
    choice = chosen_of_rows(masses, density)
    assert choice.launches.bracket.tile == 2 * SMALL_SAMPLE
    heaviest = masses.topk(key_budget(density, 5000))
    chosen = unpack_bits(choice.selection.bits, 5000).view(2, 5000).cpu()
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, heaviest.indices, True))
    share = heaviest.values.double().sum(1) / masses.double().sum(1)
    torch.testing.assert_close(choice.selection.retained.flatten().cpu().double(), share, rtol=1e-6, atol=0)


def test_the_order_of_candidates_does_not_matter(small_sample, monkeypatch):
    """Which chunk adds its candidates first differs from run to run."""
    masses = (2 * torch.randn(2, 2000, generator=torch.Generator().manual_seed(0))).exp()
    before = chosen_of_rows(masses, 0.2).selection
    kernel, exchanged = triton_heaviest.heaviest_kernel, []

    class Reversed:
        def __getitem__(self, grid):
            def run(*arguments, **options):
                found, candidates = arguments[3:5]
                for row, count in enumerate(found[:, 3].tolist()):
                    candidates[row, :count] = candidates[row, :count].flip(0)
                    exchanged.append(count)
                kernel[grid](*arguments, **options)

            return run

    monkeypatch.setattr(triton_heaviest, "heaviest_kernel", Reversed())
    after = chosen_of_rows(masses, 0.2).selection
    assert min(exchanged) > 100
    assert torch.equal(before.bits, after.bits) and torch.equal(before.retained, after.retained)


def test_a_bracket_that_misses(small_sample):
    """Masses that only the units outside the sample have: the bracket is wrong and the row is searched whole."""
    step = 5
    keys = SMALL_SAMPLE * step
    i = torch.arange(SMALL_SAMPLE)
    sampled = i * step + (i * 40503 & 0xFFFF) % step
    for inside in (0.0, 1000.0):
        masses = torch.rand(1, keys, generator=torch.Generator().manual_seed(0)) + 1
        masses[:, sampled] += inside - (inside == 0) * masses[:, sampled]
        chosen = unpack_bits(chosen_of_rows(masses, 0.3).selection.bits, keys).view(keys).cpu()
        assert chosen.nonzero().flatten().tolist() == masses[0].topk(256).indices.sort().values.tolist()


@pytest.mark.parametrize("granularity", ["token", "cell32"])
def test_rows_in_parts_are_the_rows(granularity, monkeypatch):
    """The result does not depend on how many rows of masses exist at a time; a part may end inside a head or span batch rows."""
    q, k, lse, groups, cells = inputs(300, 200, batch=2)
    groups = type(groups)(groups.order.to(DEVICE), groups.length)
    arguments = {"cells": cells, "density": 0.5, "granularity": granularity, "backend": "triton"}
    whole = select_keys(q, k, lse, groups, **arguments)
    monkeypatch.setattr(heaviest, "PROGRAMS_PER_MULTIPROCESSOR", 1 << 20)  # no rounding to whole multiprocessors
    for rows in (1, 5):
        row_bytes = 4 * heaviest.row_width(200 // GRANULARITIES[granularity]) + 8 * triton_heaviest.ROOM * 4096 + 200 * 16 * 2
        monkeypatch.setattr(heaviest, "SCRATCH_BYTES", rows * row_bytes)
        parts = select_keys(q, k, lse, groups, **arguments)
        assert torch.equal(whole.bits, parts.bits) and torch.equal(whole.retained, parts.retained)


@pytest.mark.parametrize("kept", [(), ((3, 20),)])
def test_everything_needs_no_masses(kept, monkeypatch, definition):
    """Groups without mass retain nothing; the others all of it."""
    q, k, lse, groups, cells = inputs(300, 77)
    lse[0, 0] = -math.inf
    monkeypatch.setattr(triton_select.Masses, "of", None)
    compare(definition, q, k, lse, groups, cells, density=1.0, kept=kept)
    compare(definition, q, k, lse, groups, cells, density=1.0, kept=kept, granularity="cell32")


@pytest.mark.parametrize("queries", [128, 256])
@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("q_length, k_length, head_dim", [(129, 170, 64), (300, 64, 40), (400, 31, 16)])
def test_masses_by_descriptor(q_length, k_length, head_dim, granularity, queries, definition):
    """As on Hopper, one or two groups a program: the masses of the definition, and nothing else is written."""
    if not INTERPRETED and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("descriptors want a Hopper GPU")
    q, k, lse, groups, cells = inputs(q_length, k_length, head_dim, nan_slack=2)
    groups = type(groups)(groups.order.to(DEVICE), groups.length)
    masses = triton_select.Masses.of(q, k, lse, groups, cells, granularity, head_dim**-0.5, launch_table.Launch(64, 4, 3, queries=queries))
    choice = triton_heaviest.Choice.of(q, k, groups, 0.5, cells, granularity, ())
    masses = replace(masses, described=True)
    (piece, memory), = heaviest.pieces(choice, queries // 128, masses.key_bytes)
    memory.fill_(math.nan)
    masses.compute(piece, memory)
    expected = definition.mass(*(x.cpu() for x in (q, k, lse)), type(groups)(groups.order.cpu(), groups.length))[..., cells.order.cpu()]
    expected = torch.stack([part.sum(-1) for part in expected.split(GRANULARITIES[granularity], -1)], -1).flatten(0, 2).float()
    torch.testing.assert_close(memory[:, : choice.units].cpu(), expected, rtol=1e-4, atol=1e-6)
    assert bool(memory[:, choice.units :].isnan().all())


def lagged(definition, q, k, v, lse_before, groups, cells, **arguments):
    """select_keys_lagged by Triton against dense attention and the exact selection with that lse, in the reference."""
    groups = type(groups)(groups.order.to(DEVICE), groups.length)
    out, lse, mine = select_keys_lagged(q, k, v, lse_before, groups, cells=cells, **arguments)
    q, k, v, lse_before = (x.cpu() for x in (q, k, v, lse_before))
    scale = arguments.get("scale")
    exact, exact_lse = dense_attention(q.float(), k.float(), v.float(), scale=scale, backend="reference")
    assert_no_worse_than(out.cpu(), exact, dense_attention(q, k, v, scale=scale, backend="reference")[0])
    torch.testing.assert_close(lse.cpu(), exact_lse, rtol=1e-5, atol=1e-4)
    return mine, exact_lse


@pytest.mark.parametrize(
    "q_length, k_length, head_dim, layout", [(1, 1, 16, "bhsd"), (129, 500, 40, "bshd"), (300, 129, 64, "bshd"), (200, 192, 16, "bhsd")]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lagged_selection_is_the_selection_with_an_old_lse(q_length, k_length, head_dim, layout, dtype, definition):
    q, k, lse, groups, cells = inputs(q_length, k_length, head_dim, batch=2, dtype=dtype, layout=layout, nan_slack=2, kind="clustered")
    v = make_qkv(2, 2, k_length, head_dim, dtype=dtype, device=DEVICE, layout=layout, nan_slack=2)[2]
    before = lse + torch.randn(lse.shape, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    mine, _ = lagged(definition, q, k, v, before, groups, cells, density=0.4)
    compare(definition, q, k, before, groups, cells, density=0.4, mine=mine)


@pytest.mark.parametrize("dtype, far", [(torch.bfloat16, 60.0), (torch.float16, 6.0)])
def test_lagged_where_the_old_lse_is_far_off(dtype, far, definition):
    """Too far for the dtype's range, infinite or NaN: those queries count with their own lse, the others of their group do not."""
    q, k, lse, groups, cells = inputs(300, 200, 16, dtype=dtype)
    v = make_qkv(1, 2, 200, 16, dtype=dtype, device=DEVICE)[2]
    before, weights = lse + 1, lse + 1
    for token, off in ((0, far), (3, -far), (10, math.inf), (11, -math.inf), (12, math.nan), (13, 1000.0), (14, -1000.0)):
        before[:, :, token] = lse[:, :, token] + off
        weights[:, :, token] = lse[:, :, token]
    mine, _ = lagged(definition, q, k, v, before, groups, cells, density=0.4)
    compare(definition, q, k, weights, groups, cells, density=0.4, mine=mine)


# ---- random geometries

RANDOM = [
    (128, torch.bfloat16, "token", "bshd"), (128, torch.bfloat16, "cell32", "bhsd"), (64, torch.float16, "token", "bhsd"),
    (40, torch.float32, "token", "odd"),
]  # fmt: skip


@pytest.mark.parametrize("dim, dtype, granularity, layout", RANDOM)
def test_some_random_geometries(dim, dtype, granularity, layout):
    for seed in range(12):
        check_random_geometry(dim, dtype, granularity, layout, seed, 400)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too many to interpret")
@pytest.mark.parametrize("dim, dtype, granularity, layout", RANDOM)
def test_random_geometries(dim, dtype, granularity, layout):
    """126 for each of 4 variants: 504. Keys 1 to 20000, up to 3 rows and 3 heads."""
    for seed in range(126):
        check_random_geometry(dim, dtype, granularity, layout, seed, 20_000)


def check_random_geometry(dim, dtype, granularity, layout, seed, longest):
    """Sampled groups against exact masses (kernels/selfcheck.py), counts of all; rows of lse = -inf, kept keys, every kind of budget."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    draws = torch.rand(8, generator=generator, device=DEVICE).tolist()
    keys = round(longest ** draws[0])
    queries = keys if draws[1] < 0.7 else round((longest / 4) ** draws[1])
    batch, heads = 1 + int(3 * draws[2]), 1 + int(3 * draws[3])
    q, k = (random_rows(generator, (batch, heads, n, dim), dtype, layout) for n in (queries, keys))
    if draws[4] < 0.3:
        for x in (q, k):
            x.round_()  # many equal masses
    lse = exact_lse(q, k)
    lse[torch.rand(lse.shape, generator=generator, device=DEVICE) < 0.02] = -math.inf
    order = torch.rand((batch, heads, queries), generator=generator, device=DEVICE).argsort(-1).int()
    groups = QueryGroups(torch.nn.functional.pad(order, (0, -queries % 128), value=-1), queries)
    at = torch.randperm(keys, generator=generator, device=DEVICE)
    cells = CellOrder(at, at.argsort())
    density = (0.0, 0.02, 0.1, 0.3, 0.9, 1.0)[int(6 * draws[5])]
    kept = ((keys // 3, keys // 3 + 1 + keys // 50),) if draws[6] < 0.3 and keys > 3 else ()
    arguments = (q, k, lse, groups, density, cells, granularity, kept, dim**-0.5)
    found = triton_select.select_keys(*arguments)
    assert selfcheck.check("select_keys", found, arguments), seed
    per_bit = GRANULARITIES[granularity]
    sizes = cells.sizes(per_bit)
    chosen = unpack_bits(found.bits, sizes.numel())
    assert torch.equal((chosen * sizes).sum(-1).int(), found.counts), seed
    assert len(chosen.sum(-1).unique()) == 1, seed  # every group as many
    again = triton_select.select_keys(*arguments)
    assert torch.equal(again.bits, found.bits), seed


def exact_lse(q, k):
    """(B, H, S) float32, some rows at a time."""
    lse = torch.empty(q.shape[:3], device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            parts = [(rows.float() @ k[b, h].float().mT * q.shape[3] ** -0.5).logsumexp(1) for rows in q[b, h].split(1024)]
            lse[b, h] = torch.cat(parts)
    return lse


def random_rows(generator, shape, dtype, layout):
    """A (B, H, S, D) view between NaNs; rows of D + 3 values in the "odd" layout."""
    batch, heads, length, dim = shape
    wide = dim + 3 if layout == "odd" else dim
    memory = (batch, length + 4, heads, wide) if layout == "bshd" else (batch, heads, length + 4, wide)
    x = torch.full(memory, math.nan, dtype=dtype, device=DEVICE)
    x = (x.transpose(1, 2) if layout == "bshd" else x)[:, :, 2:-2, wide - dim :]
    return x.copy_(torch.randn(shape, generator=generator, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
def test_170_thousand_keys():
    """Against sampled masses; offsets of the masses beyond 2^31 bytes."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k = (torch.randn((1, 2, 170_000, 128), generator=generator, device=DEVICE).bfloat16() for _ in range(2))
    cells = cell_order((34, 50, 100)).to(DEVICE)
    groups = group_queries(q, method="cells", cells=cells)
    for density in (0.05, 0.3):
        arguments = (q, k, exact_lse(q, k), groups, density, cells, "token", (), 128**-0.5)
        assert selfcheck.check("select_keys", triton_select.select_keys(*arguments), arguments)


@pytest.mark.parametrize("density", [0.0, 0.25, 0.9])
def test_bits_are_as_many_as_counts_where_masses_are_nan(density):
    """The NaN of NVIDIA GPUs is the largest of all patterns."""
    keys = 512
    k = torch.zeros((1, 1, keys, 16), dtype=torch.bfloat16, device=DEVICE)
    groups = QueryGroups(torch.arange(256, dtype=torch.int32, device=DEVICE)[None, None], 256)
    choice = triton_heaviest.Choice.of(k[:, :, :256], k, groups, density, cell_order(None, after=keys).to(DEVICE), "token", ())
    masses = torch.rand(2, heaviest.row_width(keys), device=DEVICE)
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32)
    masses[0], masses[1, 3] = nan, nan
    choice.choose(range(2), masses)
    assert torch.equal(unpack_bits(choice.selection.bits, keys).sum(-1), choice.selection.counts)
