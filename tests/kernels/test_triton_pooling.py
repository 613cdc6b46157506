"""The Triton pooling and its rows in cell order against plain means. Run with TRITON_INTERPRET=1 on a CPU, or on a CUDA machine."""
import math

import pytest
import torch

from mc_sparse.kernels import CellOrder, cell_order, pool_cells, registry, selfcheck
from mc_sparse.kernels.pooling import triton_pool
from mc_sparse.kernels.testing import KINDS, assert_no_worse_than, make_qkv
from mc_sparse.kernels.triton_support import INTERPRETED, padded

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Every test has the first results of the backend, which are checked."""
    monkeypatch.setattr(registry, "_verified", set())
    monkeypatch.setattr(registry, "_demoted", {})


def scattered(length):
    """A cell order that is not the token order."""
    cells = cell_order((2, 3, length // 6) if length >= 6 else None, after=length % 6 if length >= 6 else length)
    return cells.to(DEVICE)


def stored(x, dtype):
    """x in dtype as the kernel rounds it. The interpreter cuts float32 off to bfloat16, which is up to twice as far."""
    if INTERPRETED and dtype == torch.bfloat16:
        return (x.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()
    return x.to(dtype)


def means(x, cells, size):
    return torch.stack([run.mean(2) for run in x[:, :, cells.order].double().split(size, 2)], 2)


def assert_means(pooled, x, cells, size):
    exact = means(x, cells, size)
    assert pooled.dtype == x.dtype
    steps = 8 if pooled.dtype == torch.float32 else 2  # sums of 128 float32 numbers
    assert_no_worse_than(pooled, exact, stored(exact, pooled.dtype), rounding_steps=steps)


@pytest.mark.parametrize("length", [1, 31, 128, 129, 500])
@pytest.mark.parametrize("size", [1, 7, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_means_of_all_keys_of_each_cell(dtype, size, length):
    cells = scattered(length)
    _, k, v = make_qkv(2, 2, length, 24, kind="outliers", dtype=dtype, layout="bshd", nan_slack=3, device=DEVICE)
    v = 1000 * v.clamp(-2, 2)  # sums of a cell leave the range of float16, means do not
    tail = pool_cells(k, v, cells, size, backend="triton")
    assert tail.size == size and registry.demotions() == ()
    for pooled, x in ((tail.k, k), (tail.v, v)):
        assert_means(pooled, x, cells, size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [16, 40, 64, 96, 256])
def test_head_dims_and_kinds(dim, kind):
    _, k, v = make_qkv(1, 3, 200, dim, kind=kind, dtype=torch.bfloat16, nan_slack=2, device=DEVICE)
    cells = scattered(200)
    tail = pool_cells(k, v, cells, 32, backend="triton")
    assert_means(tail.k, k, cells, 32)
    assert_means(tail.v, v, cells, 32)


def test_odd_strides_and_inputs_that_stay():
    wide = torch.full((2, 1, 3, 200, 19), math.nan, dtype=torch.float16, device=DEVICE)
    wide[..., 1:17] = torch.randn(wide[..., 1:17].shape, generator=torch.Generator().manual_seed(0))
    k, v = wide[..., 1:17].unbind()
    cells = scattered(200)
    before = k.clone()
    shared = k[:, :1].expand(-1, 3, -1, -1)  # all heads are one
    for x in (k, k.mT.contiguous().mT, shared):
        tail = pool_cells(x, v, cells, 64, backend="triton")
        assert_means(tail.k, x, cells, 64)
        assert_means(tail.v, v, cells, 64)
    assert torch.equal(k, before)


def test_the_check_of_first_results_accepts_it():
    for dtype in DTYPES:
        _, k, v = make_qkv(1, 2, 300, 40, dtype=dtype, device=DEVICE)
        arguments = (k, v, scattered(300), 32)
        assert selfcheck.check("pool_cells", triton_pool.pool_cells(*arguments), arguments)


def test_every_element_is_written():
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is full of NaN
    try:
        _, k, v = make_qkv(1, 2, 300, 40, dtype=torch.bfloat16, device=DEVICE, nan_slack=1)
        tail = pool_cells(k, v, scattered(300), 128, backend="triton")
        assert not tail.k.isnan().any() and not tail.v.isnan().any()
    finally:
        torch.use_deterministic_algorithms(False)


# ---- on a GPU


def random_rows(generator, shape, dtype, layout):
    """A (B, H, S, D) view between NaNs; rows of D + 3 values in the "odd" layout."""
    batch, heads, length, dim = shape
    wide = dim + 3 if layout == "odd" else dim
    memory = (batch, length + 4, heads, wide) if layout == "bshd" else (batch, heads, length + 4, wide)
    x = torch.full(memory, math.nan, dtype=dtype, device="cuda")
    x = (x.transpose(1, 2) if layout == "bshd" else x)[:, :, 2:-2, wide - dim :]
    return x.copy_(torch.randn(shape, generator=generator, device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too many to interpret")
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "odd"])
@pytest.mark.parametrize("dim, dtype", [(128, torch.bfloat16), (64, torch.float16), (40, torch.float32)])
def test_random_geometries(dim, dtype, layout):
    """56 for each of 9 kinds: 504. S 1 to 20000, up to 3 rows and 4 heads; values up to the end of float16 in some."""
    for seed in range(56):
        generator = torch.Generator("cuda").manual_seed(seed)
        draws = torch.rand(5, generator=generator, device="cuda").tolist()
        length = round(math.exp(draws[0] * math.log(20_000)))
        shape = (1 + int(3 * draws[1]), 1 + int(4 * draws[2]), length, dim)
        k, v = (random_rows(generator, shape, dtype, layout) for _ in range(2))
        if draws[3] < 0.3:
            v[:, :, :: 1 + length // 50] = 6e4
        order = torch.randperm(length, generator=generator, device="cuda")
        cells = CellOrder(order, order.argsort())
        size = (32, 64, 128)[int(3 * draws[4])]
        tail = triton_pool.pool_cells(k, v, cells, size)
        heads = slice(0, shape[1])
        for pooled, x in ((tail.k, k), (tail.v, v)):
            whole = length // size * size
            read = x[:, heads, order].double()
            parts = [read[:, :, :whole].unflatten(2, (-1, size)).mean(3)] if whole else []
            parts += [read[:, :, whole:].mean(2, keepdim=True)] if whole < length else []
            exact = torch.cat(parts, 2)
            assert pooled.shape == exact.shape and pooled.dtype == dtype, (seed, shape, size)
            assert_no_worse_than(pooled, exact, exact.to(dtype), rounding_steps=8 if dtype == torch.float32 else 2)  # of float32 sums


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
def test_offsets_beyond_2_31():
    """170000 tokens, rows 16384 values apart: the last begins at element 2.8e9."""
    memory = torch.empty((1, 170_000, 128, 128), dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    k, v = memory[:, 3::100], memory[:, 11::100]
    for x in (k, v):
        x.copy_(torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda"))
    cells = cell_order((34, 50, 100)).to("cuda")
    tail = pool_cells(k, v, cells, 64, backend="triton")
    for pooled, x in ((tail.k, k), (tail.v, v)):
        exact = x[:, :, cells.order[:169_984]].double().unflatten(2, (-1, 64)).mean(3)
        assert_no_worse_than(pooled[:, :, :2656], exact, exact.to(x.dtype))


# ---- the rows that the attention reads


@pytest.mark.parametrize("size", [None, 32, 64, 128])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dim", [24, 64])
def test_rows_in_cell_order_with_pooled_ones_after_them(dim, given, size):
    """Keys and values side by side; columns past D are 0."""
    if given and size is None:
        pytest.skip("nothing to give")
    _, k, v = make_qkv(1, 3, 150, dim, dtype=torch.float16, device=DEVICE, nan_slack=2, layout="bshd")
    cells, width = scattered(150), padded(dim)
    count = 0 if size is None else -(-150 // size)
    pooled = [torch.randn((3, count, dim), generator=torch.Generator().manual_seed(i)).half().to(DEVICE) for i in range(2)]
    rows = triton_pool.gather_rows(k[0], v[0], cells, slice(1, 3), size, tuple(pooled) if given else None)
    assert rows.shape == (2, 150 + count, 2, width) and not rows[..., dim:].any()
    for i, x in enumerate((k, v)):
        assert torch.equal(rows[:, :150, i, :dim], x[0, 1:, cells.order])
        if given:
            assert torch.equal(rows[:, 150:, i, :dim], pooled[i][1:])
        elif count:
            exact = means(x, cells, size)[0, 1:]
            assert_no_worse_than(rows[:, 150:, i, :dim], exact, exact.half())
