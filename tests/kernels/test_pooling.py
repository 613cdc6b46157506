"""Cell means."""
import pytest
import torch

from mc_sparse.kernels import cell_order, pool_cells
from mc_sparse.kernels.testing import assert_no_worse_than, make_qkv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 32, 64, 128])
@pytest.mark.parametrize("length", [1, 31, 128, 1000])
def test_means_of_all_keys_of_each_cell(dtype, size, length):
    cells = cell_order((1, length, 1))
    _, k, v = make_qkv(2, 2, length, 24, kind="outliers", dtype=dtype, layout="bshd", nan_slack=3)
    v = 1000 * v.clamp(-2, 2)  # sums of a cell leave the range of float16, means do not
    tail = pool_cells(k, v, cells, size)
    assert tail.size == size and tail.k.dtype == tail.v.dtype == dtype
    for pooled, x in ((tail.k, k), (tail.v, v)):
        exact = torch.stack([run.mean(2) for run in x[:, :, cells.order].double().split(size, 2)], 2)
        assert_no_worse_than(pooled, exact, exact.to(dtype))


@pytest.mark.parametrize(
    "length, cells, size, message",
    [
        (10, cell_order(None, after=9), 32, "has 9 tokens, the keys 10"),
        (10, cell_order(None, after=10), 0, "at least one token"),
        (10, cell_order(None, after=10), 32.0, "size is 32.0; a cell has at least one token"),
        (9, cell_order(None, after=10), 32, "k and v have \\(10, 9\\) tokens"),
    ],
)
def test_refusals_say_what_is_needed(length, cells, size, message):
    with pytest.raises(ValueError, match=message):
        pool_cells(torch.zeros(1, 1, 10, 8), torch.zeros(1, 1, length, 8), cells, size)
