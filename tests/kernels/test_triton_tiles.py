"""Keys as the Hopper kernel of selection wants them, and, on a Hopper GPU, its selection against the reference."""
import pytest
import torch

from mc_sparse.kernels import Geometry, cell_order, dense_attention, group_queries, unpack_bits
from mc_sparse.kernels.selection import cute_sm90, reference
from mc_sparse.kernels.testing import make_qkv
from mc_sparse.kernels.triton_support import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_are_permuted_by_pieces(dim, layout):
    """Element by element, by the rule of wgmma's 128-byte swizzle; the heads are those of two batch rows."""
    batch, heads, length = 2, 3, 200
    k = make_qkv(batch, heads, length, dim, dtype=torch.bfloat16, device=DEVICE, layout=layout, nan_slack=3)[1]
    cells = cell_order((2, 5, 18), before=7, after=13).to(DEVICE)
    tiles = cute_sm90.in_tiles(k, cells, range(2, 5)).cpu()
    assert tiles.shape == (3, 2, 128 * dim)
    rows = torch.nn.functional.pad(k.cpu().flatten(0, 1)[2:5][:, cells.order.cpu()], (0, 0, 0, 256 - length))
    row, column = torch.arange(128)[:, None], torch.arange(dim)
    place = column // 64 * 128 * 64 + row * 64 + ((column % 64 // 8) ^ (row % 8)) * 8 + column % 8
    assert torch.equal(tiles[:, :, place], rows.unflatten(1, (2, 128)))


@pytest.mark.skipif(INTERPRETED, reason="its products are for a Hopper GPU")
@pytest.mark.parametrize("granularity", ["token", "cell32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length, keys", [(129, 500), (300, 131), (1000, 3000), (3000, 1000)])
def test_selection_on_hopper(length, keys, dim, dtype, granularity):
    q = make_qkv(2, 3, length, dim, kind="clustered", dtype=dtype, device=DEVICE, layout="bshd", nan_slack=3, seed=1)[0]
    k = make_qkv(2, 3, keys, dim, kind="clustered", dtype=dtype, device=DEVICE, layout="bshd", nan_slack=3, seed=2)[1]
    if cute_sm90.why_not(Geometry.of(q, k)) is not None:
        pytest.skip("needs a Hopper GPU")
    lse = dense_attention(q.float(), k.float(), k.float(), backend="reference")[1]
    lse[0, 0, ::5] = float("-inf")
    cells = cell_order((3, 4, keys // 12), after=keys % 12).to(DEVICE)
    args = (q, k, lse, group_queries(q), 0.2, cells, granularity, ((3, 9),), dim**-0.5)
    mine, expected = cute_sm90.select_keys(*args), reference.select_keys(*args)
    assert torch.equal(mine.counts, expected.counts)
    torch.testing.assert_close(mine.retained, expected.retained, rtol=1e-4, atol=1e-6)
    units = keys if granularity == "token" else -(-keys // 32)
    agreed = unpack_bits(mine.bits, units) & unpack_bits(expected.bits, units)
    assert agreed.sum() >= 0.999 * unpack_bits(expected.bits, units).sum()
