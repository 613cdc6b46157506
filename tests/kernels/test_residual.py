"""Compressed residuals: stated error bounds, stated sizes, group order."""
import pytest
import torch

from mc_sparse.kernels import FORMATS, auto_residual, compress_residual, group_queries, retained_energy
from mc_sparse.kernels.residual.reference import size_of

DIMS = [8, 40, 64, 128]


def a_residual(dim=64, length=300, batch=2, heads=2, seed=0, rank=None):
    generator = torch.Generator().manual_seed(seed)
    if rank:
        u, v = torch.randn(batch, heads, length, rank, generator=generator), torch.randn(batch, heads, rank, dim, generator=generator)
        return u @ v
    spread = torch.randn(batch, heads, length, 1, generator=generator).exp()  # rows of very different size
    return 0.1 * spread * torch.randn(batch, heads, length, dim, generator=generator)


def in_groups(r, groups):
    order = groups.expanded(*r.shape[:2]).long()
    rows = r.float().gather(2, order.clamp_min(0)[..., None].expand(-1, -1, -1, r.shape[3]))
    return rows * (order >= 0)[..., None]


def expanded(residual):
    batch, heads = residual.shape[:2]
    return torch.stack([torch.stack([residual.expand(b, h) for h in range(heads)]) for b in range(batch)])


def largest_of_runs(x, reduce):
    """reduce(|x|) of each run of 32 along D, spread over the run again."""
    return torch.cat([reduce(run.abs()).expand_as(run) for run in x.split(32, -1)], -1)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "int4", "int2"])
def test_every_value_is_within_the_stated_bound(fmt, dim):
    r = a_residual(dim)
    groups = group_queries(r)
    x = in_groups(r, groups)
    back = expanded(compress_residual(r, groups, fmt))
    assert back.dtype == torch.float32 and back.shape == x.shape
    size = x.abs()
    if fmt == "bf16":
        bound = size * 2**-8
    elif fmt == "fp8":
        bound = torch.maximum(size * 2**-4, size.amax(-1, keepdim=True) / 448 * 2**-10) * (1 + 2**-9)
    elif fmt == "int4":
        bound = largest_of_runs(x, lambda run: run.amax(-1, keepdim=True)) / 7 / 2 * (1 + 2**-7)
    else:
        mean = largest_of_runs(x, lambda run: run.mean(-1, keepdim=True))
        bound = torch.maximum(0.65 * mean, size - 1.7 * mean) * (1 + 2**-9) + mean * 2**-9
    assert bool(((back - x).abs() <= bound).all())
    assert bool((back[:, :, 300:] == 0).all())


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rank", [1, 8, 40])
def test_rank_is_within_the_stated_bound(rank, dim):
    r = a_residual(dim) + a_residual(dim, rank=3)
    groups = group_queries(r)
    x = in_groups(r, groups)
    residual = compress_residual(r, groups, f"rank-{rank}")
    energies = torch.linalg.svdvals(x.double()).square()
    outside = energies[..., rank:].sum(-1).sqrt()
    whole = energies.sum(-1).sqrt()
    error = (expanded(residual) - x).double().flatten(2).norm(dim=2)
    # 6 iterations need not have converged where neighbouring singular values are close; then either direction is as good
    assert bool((error <= 1.02 * outside + 2**-6 * whole).all())
    u, v = residual.payload
    assert u.dtype == v.dtype == torch.bfloat16
    assert u.shape == (2, 2, 384, min(rank, dim)) and v.shape == (2, 2, min(rank, dim), dim)
    torch.testing.assert_close(v.float() @ v.float().mT, torch.eye(min(rank, dim)).expand(2, 2, -1, -1), rtol=0, atol=2**-6)


def test_rank_of_a_low_rank_residual_is_all_of_it():
    r = a_residual(rank=5)
    groups = group_queries(r)
    assert retained_energy(r, groups, compress_residual(r, groups, "rank-5")) > 1 - 1e-4
    assert retained_energy(r, groups, compress_residual(r, groups, "rank-3")) < 0.95


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dim", DIMS)
def test_size_is_what_is_stored(fmt, dim):
    r = a_residual(dim)
    groups = group_queries(r)
    residual = compress_residual(r, groups, fmt)
    assert residual.format == fmt and residual.shape == (2, 2, 384, dim)
    assert residual.nbytes == size_of(fmt, r.shape, 384) == sum(t.numel() * t.element_size() for t in residual.payload)


def test_sizes_against_bf16():
    """The table of the pooled tail study: fp8 0.52, int4 0.28, int2 0.16, rank 8 a sixteenth (and V)."""
    shape = torch.Size((1, 40, 75600, 128))
    ratio = {fmt: size_of(fmt, shape, 75648) / size_of("bf16", shape, 75648) for fmt in FORMATS}
    expected = {"bf16": 1, "fp8": 0.508, "int4": 0.281, "int2": 0.156, "rank-8": 0.0625, "rank-16": 0.125, "rank-32": 0.25}
    assert ratio == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("fmt", FORMATS)
def test_extremes_stay_finite(fmt):
    r = torch.zeros(1, 1, 130, 40)
    groups = group_queries(r)
    assert bool((expanded(compress_residual(r, groups, fmt)) == 0).all())
    assert retained_energy(r, groups, compress_residual(r, groups, fmt)) == 1.0
    r[0, 0, 0] = 1e30 if fmt == "bf16" or fmt.startswith("rank") else 3e7
    r[0, 0, 1] = 1e-12
    assert bool(torch.isfinite(expanded(compress_residual(r, groups, fmt))).all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_it_is_deterministic_and_reads_strided_half_inputs(fmt):
    r = a_residual().bfloat16()
    groups = group_queries(r)
    strided = r.transpose(1, 2).contiguous().transpose(1, 2)
    first, second = compress_residual(r, groups, fmt), compress_residual(strided, groups, fmt)
    assert all(map(torch.equal, first.payload, second.payload))
    moved = first.to("cpu")
    assert torch.equal(moved.expand(1, 0), first.expand(1, 0)) and moved.format == fmt


def test_retained_energy_is_the_share():
    r = a_residual()
    groups = group_queries(r)
    residual = compress_residual(r, groups, "int2")
    x = in_groups(r, groups).double()
    lost = (expanded(residual) - x).square().sum() / x.square().sum()
    assert retained_energy(r, groups, residual) == pytest.approx(1 - lost.item(), abs=1e-6)


@pytest.mark.parametrize(
    "make, bound, expected",
    [
        (lambda: a_residual(rank=6), 0.05, "rank-8"),
        (lambda: a_residual(rank=12), 0.05, "rank-16"),
        (lambda: a_residual(), 0.3, "int4"),
        (lambda: a_residual(), 0.05, "bf16"),
        (lambda: a_residual(), 0.0, "bf16"),
        (lambda: a_residual(), 1.0, "rank-8"),
        (lambda: a_residual(dim=32, rank=12), 0.05, "rank-16"),  # int4 is tried before it, being smaller here
        (lambda: a_residual(dim=32), 0.3, "int4"),
    ],
)
def test_auto_takes_the_smallest_within_the_bound(make, bound, expected):
    r = make()
    assert auto_residual(r, group_queries(r), r, bound).format == expected


def test_auto_measures_against_the_output():
    r = a_residual()
    groups = group_queries(r)
    assert auto_residual(r, groups, 100 * r, 0.01).format == "rank-8"
    assert auto_residual(r, groups, r, 0.01).format == "bf16"


@pytest.mark.parametrize("fmt", ["int8", "rank-0", "rank-x", "rank", ""])
def test_refusals_say_what_is_needed(fmt):
    r = a_residual()
    with pytest.raises(ValueError, match="choose one of bf16, fp8, int4, int2"):
        compress_residual(r, group_queries(r), fmt)
    with pytest.raises(ValueError, match="they must agree"):
        auto_residual(r, group_queries(r), r[:1], 0.1)
